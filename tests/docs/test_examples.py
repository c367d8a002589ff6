"""What the pages show runs as it stands there, against a cluster at the address that they name."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from orbitmq.broker.accounts import parse_accounts
from orbitmq.cli.schema import all_settings
from orbitmq.testing import EmbeddedCluster
from tools import spark_options_docs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHOWN_ADDRESS = "localhost:9876"
#: Those that `tests/project/test_readme.py` runs are not run again, nor what is made from code.
ELSEWHERE = {"producing.md", "consuming.md", "administering.md", "testing.md", "tutorial.md"}
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.name not in ELSEWHERE)
PATIENCE = 300.0


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


def examples() -> list[Any]:
    return [
        pytest.param(example, id=f"{path.relative_to(DOCS)}-{number}")
        for path in PAGES
        for number, example in enumerate(blocks(path, "python"))
    ]


def expected(example: str) -> list[str]:
    """What an example says that it prints: behind a print, or in the comments that follow one."""
    found: list[str] = []
    follows_print = False
    for line in example.splitlines():
        text = line.strip()
        if match := re.match(r"print\(.*\)  # (.+)$", text):
            found.append(match[1])
            follows_print = False
        elif text.startswith("# ") and follows_print:
            found.append(text.removeprefix("# "))
        else:
            follows_print = text.startswith("print(")
    return found


@pytest.mark.feature("P7")
@pytest.mark.parametrize("example", examples())
def test_an_example_prints_what_its_comments_say(
    example: str, tmp_path: Path, orbit_cluster: EmbeddedCluster
) -> None:
    if "opentelemetry" in example and importlib.util.find_spec("opentelemetry") is None:
        pytest.skip("needs OpenTelemetry's SDK")
    program = example.replace(SHOWN_ADDRESS, orbit_cluster.name_server)

    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=100,
    )

    assert ran.returncode == 0, ran.stderr
    assert expected(example)
    assert ran.stdout.splitlines() == expected(example)


@pytest.mark.timeout(400)
def test_the_pages_about_exactly_once_run_on_spark(
    tmp_path: Path, orbit_cluster: EmbeddedCluster
) -> None:
    orbit_cluster.create_topic("orders", queues=2)
    orbit_cluster.send("orders", *(f"{number}".encode() for number in range(20)))
    example = "\n".join(blocks(DOCS / "howto" / "exactly-once.md", "py"))

    ran = subprocess.run(
        [sys.executable, "-c", example.replace(SHOWN_ADDRESS, orbit_cluster.name_server)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=PATIENCE,
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == expected(example) == ["20 20", "20"]


def test_commands_and_flags_that_pages_show_are_there() -> None:
    reference = (DOCS / "cli.md").read_text()
    sections = dict(
        re.findall(r"^## `(orbitmq [^`]+)`\n(.*?)(?=^## |\Z)", reference, re.DOTALL | re.MULTILINE)
    )
    shared = reference.partition("## `orbitmq")[0]

    shown = 0
    for path in [*PAGES, DOCS / "tutorial.md"]:
        for block in blocks(path, 'sh(?: title="[^"]+")?'):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                words = line.partition("  #")[0].split()
                if not words or words[0] != "orbitmq" or path.name == "cli.md":
                    continue
                name = (
                    " ".join(words[:3]) if " ".join(words[:3]) in sections else " ".join(words[:2])
                )
                assert name in sections, f"{path.name}: {line}"
                for flag in re.findall(r"(?<!\S)--[a-z-]+", " ".join(words)):
                    assert f"`{flag}`" in sections[name] + shared, f"{path.name}: {line}"
                shown += 1
    assert shown > 10


def test_settings_that_pages_show_are_there() -> None:
    known = all_settings()

    for path in [DOCS / "operating.md"]:
        for block in blocks(path, "toml"):
            if "[[accounts]]" in block:
                assert len(parse_accounts(block).by_key) == 2
                continue
            for name in _paths(tomllib.loads(block)):
                assert name in known, f"{path.name}: {name}"


def _paths(table: dict[str, Any], above: str = "") -> list[str]:
    found: list[str] = []
    for name, value in table.items():
        inner = isinstance(value, dict)
        found += _paths(value, f"{above}{name}.") if inner else [f"{above}{name}"]
    return found


def test_the_page_of_spark_options_is_current() -> None:
    assert spark_options_docs.PAGE.read_text() == spark_options_docs.page(), (
        "python -m tools.spark_options_docs writes it"
    )
    assert spark_options_docs.main(["--check"]) == 0


def test_pictures_and_files_that_pages_name_are_there() -> None:
    for path in DOCS.rglob("*.md"):
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", path.read_text()):
            assert (path.parent / picture).exists(), f"{path.name}: {picture}"
        for file in re.findall(
            r"`((?:deploy|src|client|broker|store|message)/[\w./-]+\.\w+)`", path.read_text()
        ):
            homes = (ROOT, ROOT / "src" / "orbitmq")
            assert any((home / file).exists() for home in homes), f"{path.name}: {file}"
