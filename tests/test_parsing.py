"""Text, TOML and arguments become values, or are refused with what is allowed."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.errors import SettingError
from orbitmq.parsing import (
    Duration,
    NotAllowed,
    Zone,
    as_json,
    as_text,
    duration,
    duration_of,
    epoch,
    fill,
    instance,
    instant_of,
    kind_of,
    moment,
    positive,
    seconds,
    switch,
    whole,
    whole_of,
)

LOCAL = datetime(2026, 1, 31, 23, 59, 59).astimezone().timestamp()


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


words = st.text("abcdefgh-./0123456789", min_size=1)
numbers = st.floats(allow_nan=False, allow_infinity=False)
KINDS: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(),
    float: numbers,
    str: words,
    Path: words.map(Path),
    Colour: st.sampled_from(Colour),
    float | None: st.none() | numbers,
    Path | None: st.none() | words.map(Path),
    tuple[str, ...]: st.lists(words).map(tuple),
    tuple[float, ...]: st.lists(numbers).map(tuple),
    tuple[Colour, ...]: st.lists(st.sampled_from(Colour)).map(tuple),
}


@given(st.sampled_from(list(KINDS)).flatmap(lambda t: st.tuples(st.just(t), KINDS[t])))
def test_every_value_can_be_given_again_as_text_and_as_toml(case):
    declared, value = case
    kind = kind_of(declared)

    assert kind.from_text(as_text(value)) == value
    if value is not None:
        assert kind.from_toml(as_json(value)) == value


@pytest.mark.parametrize(
    ("declared", "text", "value"),
    [
        (str, "x", "x"),
        (int, "1_000", 1000),
        (float, "0.5", 0.5),
        (bool, "TRUE", True),
        (bool, "1", True),
        (bool, "yes", True),
        (bool, "off", False),
        (Path, "a/b", Path("a/b")),
        (Path, "~/data", Path("/somewhere/data")),
        (Path | str, "s3a://bucket/x", "s3a://bucket/x"),
        (Path | str | None, "a/b", "a/b"),
        (int | None, "5", 5),
        (int | None, "none", None),
        (int | None, "", None),
        (Duration, "1.5m", 90.0),
        (Duration, "500ms", 0.5),
        (Duration, "3", 3.0),
        (Duration | None, "2h", 7200.0),
        (Literal["a", "B"], "B", "B"),
        (Colour, "red", Colour.RED),
        (Colour, " RED ", Colour.RED),
        (Zone, "UTC", "UTC"),
        (Zone, "+02:00", "+02:00"),
        (tuple[str, ...], "a:1;b:2, c:3,", ("a:1", "b:2", "c:3")),
    ],
)
def test_texts_become_values_of_the_declared_type(declared, text, value, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")

    assert kind_of(declared).from_text(text) == value
    assert kind_of(declared).read(text) == value


@pytest.mark.parametrize(
    ("declared", "value", "read"),
    [
        (int, 5, 5),
        (float, 2, 2.0),
        (bool, False, False),
        (Duration, 3, 3.0),
        (tuple[int, ...], [1, 2], (1, 2)),
    ],
)
def test_toml_values_become_values_of_the_declared_type(declared, value, read):
    assert kind_of(declared).from_toml(value) == read
    assert kind_of(declared).read(value) == read


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
        (Literal["a"], "b"),
        (Path, ""),
        (Path, "a\0b"),
        (Duration, "soon"),
        (Duration, "5 fortnights"),
        (Duration, "nan"),
        (Zone, "Atlantis"),
        (tuple[float, ...], "1,two"),
    ],
)
def test_other_texts_are_refused_with_what_is_allowed(declared, text):
    kind = kind_of(declared)

    with pytest.raises(NotAllowed) as refused:
        kind.from_text(text)

    assert refused.value.allowed == kind.allowed


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (int, "10"),
        (int, True),
        (int, 1.5),
        (float, "1"),
        (float, True),
        (float, math.nan),
        (bool, 1),
        (str, 1),
        (Colour, 1),
        (Path, 5),
        (Duration, True),
        (tuple[str, ...], "a"),
        (tuple[int, ...], [1, "2"]),
    ],
)
def test_toml_values_of_another_type_are_refused(declared, value):
    with pytest.raises(NotAllowed):
        kind_of(declared).from_toml(value)


def test_a_type_that_cannot_be_read_is_an_error_of_the_program():
    with pytest.raises(TypeError, match="dict"):
        kind_of(dict[str, str])


@pytest.mark.parametrize(
    ("convert", "text", "value"),
    [
        (whole_of, "0", 0),
        (whole_of, "9223372036854775807", 2**63 - 1),
        (duration_of, " 15 M ", 900.0),
        (instant_of, "1700000000123", 1_700_000_000.123),
        (instant_of, 1500, 1.5),
        (instant_of, "2026-11-15T16:00:00+08:00", 1_794_729_600.0),
    ],
)
def test_the_value_of_a_text(convert, text, value):
    assert convert(text) == value


@pytest.mark.parametrize(
    ("convert", "text"),
    [
        (whole_of, "-1"),
        (whole_of, "1_0"),
        (whole_of, "9223372036854775808"),
        (duration_of, "15"),
        (duration_of, "m"),
        (instant_of, "2026-11-15T16:00:00"),
        (instant_of, "1960-01-01T00:00:00Z"),
        (instant_of, "999999999999999"),
        (instant_of, True),
        (instant_of, 1.5),
    ],
)
def test_a_text_without_a_value_is_refused(convert, text):
    with pytest.raises(NotAllowed):
        convert(text)


@pytest.mark.parametrize(
    ("read", "value", "expected"),
    [
        (seconds, 3, 3.0),
        (seconds, timedelta(milliseconds=1500), 1.5),
        (epoch, 12.5, 12.5),
        (epoch, datetime(1970, 1, 2, tzinfo=UTC), 86_400.0),
        (moment, "1970-01-02T00:00:00+00:00", 86_400.0),
        (moment, "20260131235959", LOCAL),
        (moment, "2026-01-31#23:59:59:500", LOCAL + 0.5),
    ],
)
def test_durations_and_times_are_read_as_seconds(read, value, expected):
    assert read(value) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "3", None])
@pytest.mark.parametrize(
    ("check", "allowed"),
    [
        (seconds, "seconds"),
        (duration, "seconds"),
        (epoch, "seconds since the epoch"),
        (positive, "a number above 0"),
    ],
)
def test_what_is_no_number_is_refused_by_name(check, allowed, value):
    with pytest.raises(SettingError, match=f"^hold must be {allowed}.*got"):
        check(value, "hold")


@pytest.mark.parametrize(
    ("check", "value", "bounds", "text"),
    [
        (whole, 1.5, {}, "n must be a whole number, 1 or more, got 1.5"),
        (whole, True, {"most": 9}, "n must be a whole number, 1 to 9, got True"),
        (whole, 0, {}, "n must be 1 or more, got 0"),
        (whole, 2**31, {"least": 0, "most": 2**30}, "n must be 0 to 1073741824, got 2147483648"),
        (duration, 0, {}, "n must be positive, got 0"),
        (duration, 5, {"least": 10}, "n must be 10 or more seconds, got 5"),
        (duration, 5, {"most": 2.5}, "n must be at most 2.5 seconds, got 5"),
        (positive, 0, {}, "n must be a number above 0, got 0"),
        (moment, "soon", {}, "n must be like 2026-01-31T23:59:59, "),
        (switch, 1, {}, "n must be True or False, got 1"),
        (instance, "hidden", {"wanted": Path}, "n must be an object of Path, got str"),
    ],
)
def test_the_refusal_says_what_is_allowed(check, value, bounds, text):
    with pytest.raises(SettingError) as refused:
        check(value, "n", **bounds)

    assert str(refused.value).startswith(text)
    assert "hidden" not in str(refused.value)


@dataclass(frozen=True)
class Inner:
    name: str


@dataclass(frozen=True)
class Outer:
    kind: str
    total: int
    inner: tuple[Inner, ...]
    remark: str | None = None


class Source:
    kind = Colour.RED.value
    inner = (SimpleNamespace(name="a", other=1),)

    @property
    def total(self) -> int:
        return 7


def test_a_record_is_filled_from_the_attributes_of_the_first_source_that_has_them():
    filled = fill(Outer, None, Source(), SimpleNamespace(kind="other", remark="so"))

    assert filled == Outer("red", 7, (Inner("a"),), "so")
    assert fill(Outer, Source(), total=8) == Outer("red", 8, (Inner("a"),))


def test_a_field_that_no_source_has_is_an_error_of_the_program():
    with pytest.raises(msgspec.ValidationError, match="total"):
        fill(Outer, SimpleNamespace(kind="red", inner=()))
