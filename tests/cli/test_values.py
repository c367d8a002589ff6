"""Texts and TOML values become the values of settings, or are refused."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.cli.values import NotAllowed, as_text, kind_of, shown


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


words = st.text("abcdefgh-./0123456789", min_size=1)
#: Types of settings, and values that they can have.
KINDS: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: words,
    Path: words.map(Path),
    Colour: st.sampled_from(Colour),
    float | None: st.none() | st.floats(allow_nan=False, allow_infinity=False),
    Path | None: st.none() | words.map(Path),
    tuple[str, ...]: st.lists(words).map(tuple),
    tuple[float, ...]: st.lists(st.floats(allow_nan=False, allow_infinity=False)).map(tuple),
}


@given(st.sampled_from(list(KINDS)).flatmap(lambda t: st.tuples(st.just(t), KINDS[t])))
def test_every_value_can_be_given_again_as_text_and_as_toml(case: tuple[Any, Any]) -> None:
    declared, value = case
    kind = kind_of(declared)

    assert kind.from_text(as_text(value)) == value
    if value is not None:
        assert kind.from_toml(shown(value)) == value


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        (int, "ten"),
        (int, "1.5"),
        (int, ""),
        (float, "fast"),
        (float, "nan"),
        (float, "inf"),
        (bool, "maybe"),
        (Colour, "green"),
        (Path, ""),
        (tuple[float, ...], "1,two"),
    ],
)
def test_a_text_that_does_not_fit_is_refused(declared: Any, text: str) -> None:
    with pytest.raises(NotAllowed):
        kind_of(declared).from_text(text)


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (int, "10"),
        (int, True),
        (int, 1.5),
        (float, "1"),
        (bool, 1),
        (str, 1),
        (Colour, 1),
        (Path, 5),
        (tuple[str, ...], "a"),
        (tuple[int, ...], [1, "2"]),
    ],
)
def test_a_toml_value_of_another_type_is_refused(declared: Any, value: Any) -> None:
    with pytest.raises(NotAllowed):
        kind_of(declared).from_toml(value)


@pytest.mark.parametrize(("text", "value"), [("TRUE", True), ("1", True), ("off", False)])
def test_the_usual_words_for_truth_are_understood(text: str, value: bool) -> None:
    assert kind_of(bool).from_text(text) is value


def test_lists_are_divided_by_commas_or_as_rocketmq_does_it() -> None:
    assert kind_of(tuple[str, ...]).from_text("a:1;b:2, c:3") == ("a:1", "b:2", "c:3")


def test_a_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")

    assert kind_of(Path).from_text("~/data") == Path("/somewhere/data")
