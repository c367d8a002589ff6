"""Commands, flags, settings, pictures and files that pages name are there."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import Report, ratio_text, read_json
from orbitmq.broker.access import parse_accounts
from orbitmq.cli.settings import all_settings
from orbitmq.spark.pipelines.load import load
from tools import spark_options_docs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


def test_commands_and_flags_that_pages_show_are_there():
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


def test_settings_that_pages_show_are_there():
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


def test_the_page_of_spark_options_is_current():
    assert spark_options_docs.PAGE.read_text() == spark_options_docs.page(), (
        "python -m tools.spark_options_docs writes it"
    )
    assert spark_options_docs.main(["--check"]) == 0


def test_pictures_and_files_that_pages_name_are_there():
    for path in (*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md"):
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", path.read_text()):
            assert (path.parent / picture).exists(), f"{path.name}: {picture}"
        for file in re.findall(
            r"`((?:deploy|docs|tools|src|client|broker|store|message)/[\w./-]+\.\w+)`",
            path.read_text(),
        ):
            homes = (ROOT, ROOT / "src" / "orbitmq")
            assert any((home / file).exists() for home in homes), f"{path.name}: {file}"


def test_recipes_name_what_the_files_have():
    text = (ROOT / "CONTRIBUTING.md").read_text()

    named = re.findall(r"`(\w+)`(?: and `(\w+)`)?(?: \w+)?(?: in| of) `([\w./]+\.\w+)`", text)

    assert len(named) >= 3
    for first, second, file in named:
        for name in filter(None, (first, second)):
            assert re.search(rf"\b{name}\b", (ROOT / file).read_text()), f"{file} has no {name}"


#: Words that pages use instead of numbers: the part is one of so many.
PARTS = {
    "half": 2,
    "third": 3,
    "quarter": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
    "twelfth": 12,
    "sixteenth": 16,
    "twentieth": 20,
}
#: How much a figure may be off besides the rounding of its last digit: two full runs differ so.
SLACK = 0.05


@dataclass(frozen=True, slots=True)
class Claim:
    """What the README says about a line of the page, with the conditions of that line."""

    pattern: str  #: with one group: a number, or a part in words
    room: str
    line: str


README_CLAIMS = (
    Claim(
        r"sends, 128 in flight \| Apache RocketMQ 4\.9\.7 \| ([\d.]+) times as many",
        "Peers",
        "sends of 1 KiB, 8 connections with 16 in flight",
    ),
    Claim(
        r"arrival to delivery \| Apache RocketMQ 4\.9\.7 \| an? (\w+) of the time",
        "Peers",
        "arrival to delivery at 1,000 messages/s, median",
    ),
    Claim(
        r"memory, without mapped files \| Apache RocketMQ 4\.9\.7 \| an? (\w+) of the memory",
        "Peers",
        "memory after all of these lines",
    ),
    Claim(
        r"batch read in Spark, with headers \| Spark's Kafka source \| ([\d.]+) times as fast",
        "Spark",
        "batch read beside Kafka, 1 KiB",
    ),
)
#: Whatever else is said to be so many times, or a part, of something has to be one of the above.
ANY_CLAIM = re.compile(r"[\d.]+ times as \w+|\| an? \w+ of the \w+")


def published() -> Report | None:
    """The data of the page, once there was a full run that wrote it."""
    data = DOCS / "data" / "bench.json"
    return read_json(data) if data.exists() else None


def measured(part: str, line: str) -> float:
    """The ratio of one line of the page that `make bench` makes."""
    if report := published():
        ratios = [
            each.ratio
            for each in report.results
            if (each.room.capitalize(), each.name) == (part, line) and each.ratio is not None
        ]
        assert len(ratios) == 1, f"docs/data/bench.json has no figure for: {line}"
        return ratios[0]
    page = (DOCS / "performance.md").read_text().partition(f"\n## {part}\n")[2]
    found = re.search(rf"^\| {re.escape(line)} \|[^|]*\| ([\d.]+) ", page, re.MULTILINE)
    assert found, f"performance.md has no figure for: {line}"
    return float(found[1])


def is_current(said: str, ratio: float) -> bool:
    """Whether what is said in digits (times) or in words (a part) is the ratio, rounded."""
    if said in PARTS:
        return round(ratio) == PARTS[said] or 1 / ratio == pytest.approx(1 / PARTS[said], rel=SLACK)
    half_a_digit = 0.5 * 10 ** -len(said.partition(".")[2])
    return float(said) == pytest.approx(ratio, rel=SLACK, abs=half_a_digit)


@pytest.mark.parametrize("claim", README_CLAIMS, ids=lambda claim: claim.line)
def test_figures_that_the_readme_tells_are_those_of_the_last_run(claim):
    text = " ".join((ROOT / "README.md").read_text().split())
    found = re.search(claim.pattern, text)
    assert found, "the README says it in other words, or no more: change the claims with it"

    ratio = measured(claim.room, claim.line)

    assert is_current(found[1], ratio), f"the README has {found[0]!r}; the last run: {ratio:.2f}"


def test_the_readme_compares_only_what_is_held_against_the_last_run():
    text = " ".join((ROOT / "README.md").read_text().split())

    for said in ANY_CLAIM.finditer(text):
        covering = [re.search(claim.pattern, text) for claim in README_CLAIMS]
        assert any(
            found and found.start() <= said.start() and said.end() <= found.end()
            for found in covering
        ), f"{said[0]!r} is held against nothing"


def test_the_readme_names_the_cores_of_the_last_run():
    text = " ".join((ROOT / "README.md").read_text().split())
    page = (DOCS / "performance.md").read_text()

    assert "From the last `make bench` on two cores" in text
    assert re.search(r"^Measured in a .* on 2 cores of ", page, re.MULTILINE)


def test_the_data_beside_the_page_is_that_of_the_page():
    """Which there is from the first full run on that wrote both."""
    page = (DOCS / "performance.md").read_text()
    report = published()
    assert (report is not None) == ("(data/bench.json)" in page), "write both: make bench"
    if report is None:
        return

    assert not report.quick
    assert not report.only
    assert (DOCS / "data" / "bench.json").stat().st_size < 300_000
    assert f"commit {report.machine.commit}" in page
    for result in report.results:
        assert f"| {result.name} |" in page
        if result.ratio is not None:
            assert f"| {ratio_text(result)} |" in page


def test_the_price_of_sync_is_that_of_the_last_run():
    text = " ".join((DOCS / "operating.md").read_text().split())

    assert "about 0.3 of the rate with one message in flight" in text
    assert measured("Broker", "synchronous flush, 1 KiB, 1 in flight") == pytest.approx(
        0.3, rel=0.35
    )
    assert "about two thirds with 64 connections" in text
    assert measured("Broker", "synchronous flush, 1 KiB, 64 connections") == pytest.approx(
        2 / 3, rel=0.35
    )


def test_the_pipeline_that_the_page_shows_is_one(tmp_path):
    shown = next(text for text in blocks(DOCS / "pipelines.md", "py") if "def pipeline(" in text)
    file = tmp_path / "countries.py"
    file.write_text(shown)

    definition, _ = load(str(file))

    assert definition.about == "Keeps where orders came from, and when."
    assert {option.name: option.default_text for option in definition.options} == {
        "topic": "orders",
        "path": None,
    }
