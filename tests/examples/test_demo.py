"""The demo ends in a summary that adds up, and says so in its exit code."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start_demo(folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.demo", "--folder", str(folder), *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"PATH": "", "COLUMNS": "120", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )


def rows_of(said: str) -> dict[str, list[int]]:
    """The numbers of the table: acknowledged, found, lost, twice, in flight."""
    rows = {}
    for line in said.splitlines():
        if match := re.match(r"│ (north|south) +│ [^│]+│(.*)│$", line):
            rows[match[1]] = [int(cell.replace(",", "")) for cell in match[2].split("│")]
    return rows


def test_a_run_with_a_kill_adds_up(tmp_path: Path) -> None:
    demo = start_demo(tmp_path / "demo", "--seconds", "2")

    said, _ = demo.communicate(timeout=100)

    assert demo.returncode == 0, said
    rows = rows_of(said)
    assert set(rows) == {"north", "south"}
    for acknowledged, found, lost, twice, in_flight in rows.values():
        assert acknowledged > 0
        assert (lost, twice) == (0, 0)
        assert found == acknowledged + in_flight
    assert (tmp_path / "demo" / "orders.parquet").stat().st_size > 0
    assert not (tmp_path / "demo" / "commitlog").exists()


def test_ctrl_c_still_ends_in_a_summary(tmp_path: Path) -> None:
    demo = start_demo(tmp_path / "demo", "--seconds", "600")
    assert demo.stdout is not None
    log = tmp_path / "demo" / "commitlog" / ("0" * 20)
    while not log.exists():
        assert demo.poll() is None, demo.stdout.read()

    demo.send_signal(signal.SIGINT)
    said, _ = demo.communicate(timeout=100)

    assert demo.returncode == 0, said
    assert "Stopped early" in said
    assert list(rows_of(said)) == ["north"]


def test_a_senseless_time_is_refused_in_one_sentence(tmp_path: Path) -> None:
    demo = start_demo(tmp_path / "demo", "--seconds", "-1")

    said, _ = demo.communicate(timeout=60)

    assert demo.returncode == 2
    assert "--seconds must be positive, got -1" in said


def test_a_folder_that_is_not_its_own_is_left_alone(tmp_path: Path) -> None:
    thesis = tmp_path / "precious" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")

    demo = start_demo(thesis.parent, "--seconds", "1")
    said, _ = demo.communicate(timeout=60)

    assert demo.returncode == 1
    assert "is not empty and not a demo's" in said
    assert thesis.read_text() == "years of work"


def test_the_picture_in_the_readme_shows_a_run_that_adds_up() -> None:
    picture = (ROOT / "docs" / "images" / "demo.svg").read_text().replace("&#160;", " ")

    assert "lost 0, twice 0" in picture
    assert "does not add up" not in picture
