"""`make features` on small projects made for each test, through real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tools.features import read_rows

ROOT = Path(__file__).parent.parent.parent

PAGE = """\
# What works

## Seeds

### Groups

| id | what works |
|---|---|
| A1 | One |
| A2 | Two |

### Pulling

| id | what works |
|---|---|
| B1 | Three |
| B2 | Four |
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "features.md").write_text(PAGE)
    (tmp_path / "tests" / "interop").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = --strict-markers -p no:cacheprovider\n"
    )
    return tmp_path


def write_tests(project: Path, name: str, body: str) -> None:
    (project / "tests" / name).write_text("import pytest\n\n" + body)


def features(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.features", f"--root={project}", *options],
        cwd=ROOT,
        check=False,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        timeout=60,
    )


def last_line(ended: subprocess.CompletedProcess[str]) -> str:
    return ended.stdout.rstrip("\n").split("\n")[-1]


def table_row(ended: subprocess.CompletedProcess[str], section: str) -> list[str]:
    [line] = [line for line in ended.stdout.splitlines() if f" {section} " in line]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_row_is_proven_by_a_passing_test_that_names_it(project):
    write_tests(
        project,
        "test_some.py",
        """
@pytest.mark.feature("A1")
@pytest.mark.feature("B2")
def test_passes(): pass

@pytest.mark.feature("A2")
@pytest.mark.skip
def test_is_skipped(): pass

@pytest.mark.feature("B1")
@pytest.mark.xfail
def test_is_known_to_fail(): assert False

def test_names_nothing(): assert False, "and so is not run"
""",
    )

    ended = features(project)

    assert last_line(ended) == "features: 2 of 4 proven"
    assert ended.returncode == 0
    assert table_row(ended, "Groups") == ["Groups", "1 of 2", "", "", "A2"]
    assert table_row(ended, "Pulling") == ["Pulling", "1 of 2", "", "", "B1"]


def test_a_failing_test_takes_its_row_away_and_is_named(project):
    write_tests(
        project,
        "test_some.py",
        """
@pytest.mark.feature("A1")
@pytest.mark.parametrize("n", [1, 2])
def test_half(n): assert n == 1

@pytest.mark.feature("A2")
def test_whole(): pass

@pytest.fixture
def leaky():
    yield
    assert False

@pytest.mark.feature("B1")
def test_tears_down_badly(leaky): pass

@pytest.mark.feature("B2")
def test_sets_up_badly(nowhere): pass
""",
    )

    ended = features(project)

    assert last_line(ended) == "features: 1 of 4 proven"
    assert ended.returncode == 1
    assert "A1 fails in tests/test_some.py::test_half[2]" in ended.stdout
    assert "A1 fails in tests/test_some.py::test_half[1]" not in ended.stdout
    assert table_row(ended, "Groups") == ["Groups", "1 of 2", "A1", "", ""]
    assert table_row(ended, "Pulling") == ["Pulling", "0 of 2", "B1 B2", "", ""]


def test_a_mark_that_names_no_row_is_an_error(project):
    write_tests(project, "test_some.py", '@pytest.mark.feature("Z9")\ndef test_passes(): pass\n')

    ended = features(project)

    assert last_line(ended) == "features: 0 of 4 proven"
    assert ended.returncode == 1
    assert "tests/test_some.py::test_passes names 'Z9'" in ended.stdout


def test_interop_tests_count_only_when_asked_for(project):
    write_tests(project, "test_some.py", '@pytest.mark.feature("A1")\ndef test_passes(): pass\n')
    write_tests(
        project,
        "interop/test_java.py",
        '@pytest.mark.interop\n@pytest.mark.feature("B1")\ndef test_java(): pass\n',
    )

    before = features(project)
    with_interop = features(project, "--interop")
    after = features(project)

    assert last_line(before) == "features: 1 of 4 proven"
    assert table_row(before, "Pulling") == ["Pulling", "0 of 2", "", "", "B1 B2"]
    assert last_line(with_interop) == "features: 2 of 4 proven"
    assert table_row(with_interop, "Pulling") == ["Pulling", "1 of 2", "", "", "B2"]
    assert last_line(after) == "features: 1 of 4 proven"
    assert table_row(after, "Pulling") == ["Pulling", "0 of 2", "", "B1", "B2"]


def test_what_container_images_prove_is_known_from_their_own_last_run(project):
    (project / "tests" / "containers").mkdir()
    write_tests(project, "test_some.py", '@pytest.mark.feature("A1")\ndef test_passes(): pass\n')
    body = '@pytest.mark.feature("B1")\ndef test_images(): {}\n'
    write_tests(project, "containers/test_images.py", body.format("pytest.skip('no buildah')"))

    before = features(project)
    build_images(project)
    skipped = features(project)
    write_tests(project, "containers/test_images.py", body.format("pass"))
    build_images(project)
    passed = features(project)
    write_tests(project, "containers/test_images.py", body.format("assert False"))
    build_images(project)
    failed = features(project, "--last")

    assert last_line(before) == last_line(skipped) == "features: 1 of 4 proven"
    assert "make containers" not in before.stdout
    assert last_line(passed) == "features: 2 of 4 proven"
    assert "the last make containers ended at 20" in passed.stdout
    assert last_line(failed) == "features: 1 of 4 proven"
    assert "B1 fails in tests/containers/test_images.py::test_images" in failed.stdout


def build_images(project: Path) -> None:
    """What `make containers` runs."""
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", f"--rootdir={project}", "tests/containers"),
            *("-p", "tools.feature_plugin", f"--features-to={project / 'build'}"),
        ],
        cwd=project,
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )


def test_a_run_interrupted_half_way_proves_nothing(project):
    write_tests(
        project,
        "test_some.py",
        """
import os

@pytest.mark.feature("A1")
def test_passes(): pass

@pytest.mark.feature("A2")
def test_dies(): os._exit(1)
""",
    )

    ended = features(project)

    assert ended.returncode == 1
    assert "pytest broke off" in ended.stderr
    assert not (project / "build" / "features.json").exists()


def test_the_projects_own_page_keeps_the_rows_it_was_begun_with():
    rows = read_rows(ROOT / "docs" / "features.md")

    letters = Counter(row_id[0] for row_id in rows)

    began = dict(zip("ABCDEFGHI", [19, 16, 4, 14, 11, 11, 12, 6, 8], strict=True))
    began |= dict(zip("JKLMNOP", [7, 8, 7, 14, 4, 4, 8], strict=True))
    assert {letter: min(letters[letter], count) for letter, count in began.items()} == began
