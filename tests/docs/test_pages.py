"""Runs the examples of the pages, one page after the other, with one broker.

Every example runs twice: a reader who comes back has a broker with the topics and groups of the
first visit, and the page must still be right.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

from tests.docs.conftest import PATIENCE
from tests.support.walkthrough import SHOWN_ADDRESS, Reader, blocks, expected, matches

ROOT = Path(__file__).parents[2]
TUTORIAL = "docs/tutorial.md"
#: Followed step by step, with a cluster of its own.
FOLLOWED = ("docs/howto/archive.md",)
GUIDES = (
    "docs/producing.md",
    "docs/consuming.md",
    "docs/guarantees.md",
    "docs/administering.md",
    "docs/testing.md",
    *sorted(
        str(path.relative_to(ROOT))
        for path in ROOT.glob("docs/howto/*.md")
        if str(path.relative_to(ROOT)) not in FOLLOWED
    ),
    "docs/from-java.md",
    "docs/from-kafka.md",
)
QUARTER_OF_AN_HOUR = 900.0


def examples(*pages: str) -> list[Any]:
    """The Python programs of pages, in their order."""
    return [
        pytest.param(block.text, id=f"{page}-{number}")
        for page in pages
        for number, block in enumerate(
            block for block in blocks(ROOT / page) if block.language == "python"
        )
    ]


@pytest.mark.feature("P7")
@pytest.mark.parametrize("example", examples("README.md"))
def test_the_readme_shows_what_its_examples_print(example, reader):
    _run_twice(example, reader)


@pytest.mark.feature("P7")
@pytest.mark.timeout(900)
def test_the_tutorial_can_be_followed_to_its_end(reader, record_property):
    steps = [block for block in blocks(ROOT / TUTORIAL) if not block.runs_on]
    assert len(steps) > 14
    assert [block.text for block in steps if "pip install" in block.text]

    began = time.monotonic()
    for block in steps:
        reader.follow(block)
    took = time.monotonic() - began

    # The page says a quarter of an hour, and that is with reading it.
    assert took < QUARTER_OF_AN_HOUR
    record_property("seconds of the tutorial's commands", round(took, 1))
    print(f"the commands of the tutorial took {took:.1f} s")
    assert (reader.folder / ".venv" / "bin" / "python").exists()
    assert list((reader.folder / "orders.parquet").glob("*.parquet"))


@pytest.mark.feature("P7")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", FOLLOWED)
def test_a_guide_can_be_followed_to_its_end(tmp_path, page):
    with Reader(tmp_path, patience=PATIENCE) as reader:
        for block in blocks(ROOT / page):
            reader.follow(block)
        reader.stop()


@pytest.mark.feature("P7")
@pytest.mark.parametrize("example", examples(*GUIDES))
def test_a_guide_shows_what_its_examples_print(example, reader):
    if "opentelemetry" in example and importlib.util.find_spec("opentelemetry") is None:
        pytest.skip("needs OpenTelemetry's SDK")
    _run_twice(example, reader)


def _run_twice(example: str, reader: Reader) -> None:
    assert expected(example)
    # What has a cluster of its own leaves nothing behind.
    times = 2 if SHOWN_ADDRESS in example else 1

    said = reader.run_program(example, times=times)

    assert said.splitlines() == expected(example) * times


@pytest.mark.parametrize(
    ("said", "shown", "is_as_shown"),
    [
        ("a\nb\nc\n", "a\n...\nc\n", True),
        ("a\nc\n", "a\n...\nc\n", True),
        ("a\nb\n", "a\n", False),
        ("x\na\n", "a\n", False),
        ("sent in 5 ms\n", "sent in ...\n", True),
        ("one   two\n", "one two\n", True),
        ("", "...\n", True),
    ],
)
def test_what_is_printed_is_compared_line_by_line(said, shown, is_as_shown):
    assert matches(said, shown) is is_as_shown
