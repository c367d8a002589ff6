"""The tutorial works, command by command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.walkthrough import Reader, blocks, matches

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
#: For one command; Spark needs seconds, on a crowded machine minutes.
PATIENCE = 300.0


@pytest.mark.feature("P7")
@pytest.mark.timeout(900)
def test_the_tutorial_can_be_followed_to_its_end(tmp_path: Path) -> None:
    page = blocks(TUTORIAL)
    assert len(page) > 12

    with Reader(tmp_path, patience=PATIENCE) as reader:
        for block in page:
            reader.follow(block)
        reader.stop()

    assert list((tmp_path / "orders.parquet").glob("*.parquet"))


@pytest.mark.parametrize(
    ("said", "expected", "is_as_expected"),
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
def test_what_is_printed_is_compared_line_by_line(
    said: str, expected: str, is_as_expected: bool
) -> None:
    assert matches(said, expected) is is_as_expected
