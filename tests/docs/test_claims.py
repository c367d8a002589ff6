"""Commands, flags, settings, pictures and files that pages name are there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from orbitmq.broker.accounts import parse_accounts
from orbitmq.cli.schema import all_settings
from orbitmq.spark.pipelines.loading import load
from tools import spark_options_docs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


def test_commands_and_flags_that_pages_show_are_there() -> None:
    reference = (DOCS / "cli.md").read_text()
    sections = dict(
        re.findall(r"^## `(orbitmq [^`]+)`\n(.*?)(?=^## |\Z)", reference, re.DOTALL | re.MULTILINE)
    )
    shared = reference.partition("## `orbitmq")[0]

    shown = 0
    for path in PAGES:
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


#: Words that pages use instead of numbers.
WORDS = {
    "half": 1 / 2,
    "third": 1 / 3,
    "quarter": 1 / 4,
    "fifth": 1 / 5,
    "tenth": 1 / 10,
    "sixteenth": 1 / 16,
}
README_CLAIMS = re.compile(
    r"took ([\d.]+) times as many sends .* delivered in an? (\w+) of the time and held an? (\w+) "
    r"of the memory, .* batch read in Spark was ([\d.]+) times as fast"
)


def measured(part: str, line: str) -> float:
    """The ratio of one line of the page that `make bench` makes."""
    page = (DOCS / "performance.md").read_text().partition(f"\n## {part}\n")[2]
    found = re.search(rf"^\| {re.escape(line)} \|[^|]*\| ([\d.]+) ", page, re.MULTILINE)
    assert found, f"performance.md has no figure for: {line}"
    return float(found[1])


def test_figures_that_the_readme_tells_are_those_of_the_last_run() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    claims = README_CLAIMS.search(text)
    assert claims, "the README says it in other words: change the pattern with it"

    for said, ratio in (
        (float(claims[1]), measured("Peers", "sends of 1 KiB, 8 connections with 16 in flight")),
        (
            WORDS[claims[2]],
            1 / measured("Peers", "arrival to delivery at 1,000 messages/s, median"),
        ),
        (WORDS[claims[3]], 1 / measured("Peers", "memory after all of these lines")),
        (float(claims[4]), measured("Spark", "batch read beside Kafka, 1 KiB")),
    ):
        assert said == pytest.approx(ratio, rel=0.25), "say what docs/performance.md has now"


def test_the_price_of_sync_is_that_of_the_last_run() -> None:
    text = " ".join((DOCS / "operating.md").read_text().split())

    assert "about 0.3 of the rate with one message on its way at a time" in text
    assert measured("Broker", "synchronous flush, 1 KiB, 1 in flight") == pytest.approx(
        0.3, rel=0.35
    )
    assert "about two thirds with 64 connections" in text
    assert measured("Broker", "synchronous flush, 1 KiB, 64 connections") == pytest.approx(
        2 / 3, rel=0.35
    )


def test_the_pipeline_that_the_page_shows_is_one(tmp_path: Path) -> None:
    shown = next(text for text in blocks(DOCS / "pipelines.md", "py") if "def pipeline(" in text)
    file = tmp_path / "countries.py"
    file.write_text(shown)

    definition, _ = load(str(file))

    assert definition.about == "Keeps where orders came from, and when."
    assert {option.name: option.default_text for option in definition.options} == {
        "topic": "orders",
        "path": None,
    }
