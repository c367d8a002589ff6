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

from orbitmq import parsing
from orbitmq.errors import SettingError

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
    kind = parsing.kind_of(declared)

    assert kind.from_text(parsing.as_text(value)) == value
    if value is not None:
        assert kind.from_toml(parsing.as_json(value)) == value


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
        (parsing.Duration, "1.5m", 90.0),
        (parsing.Duration, "500ms", 0.5),
        (parsing.Duration, "3", 3.0),
        (parsing.Duration | None, "2h", 7200.0),
        (Literal["a", "B"], "B", "B"),
        (Colour, "red", Colour.RED),
        (Colour, " RED ", Colour.RED),
        (parsing.Zone, "UTC", "UTC"),
        (parsing.Zone, "+02:00", "+02:00"),
        (tuple[str, ...], "a:1;b:2, c:3,", ("a:1", "b:2", "c:3")),
    ],
)
def test_texts_become_values_of_the_declared_type(declared, text, value, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")

    assert parsing.kind_of(declared).from_text(text) == value
    assert parsing.kind_of(declared).read(text) == value


@pytest.mark.parametrize(
    ("declared", "value", "read"),
    [
        (int, 5, 5),
        (float, 2, 2.0),
        (bool, False, False),
        (parsing.Duration, 3, 3.0),
        (tuple[int, ...], [1, 2], (1, 2)),
    ],
)
def test_toml_values_become_values_of_the_declared_type(declared, value, read):
    assert parsing.kind_of(declared).from_toml(value) == read
    assert parsing.kind_of(declared).read(value) == read


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
        (parsing.Duration, "soon"),
        (parsing.Duration, "5 fortnights"),
        (parsing.Duration, "nan"),
        (parsing.Zone, "Atlantis"),
        (tuple[float, ...], "1,two"),
    ],
)
def test_other_texts_are_refused_with_what_is_allowed(declared, text):
    kind = parsing.kind_of(declared)

    with pytest.raises(parsing.NotAllowed) as refused:
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
        (parsing.Duration, True),
        (tuple[str, ...], "a"),
        (tuple[int, ...], [1, "2"]),
    ],
)
def test_toml_values_of_another_type_are_refused(declared, value):
    with pytest.raises(parsing.NotAllowed):
        parsing.kind_of(declared).from_toml(value)


def test_a_type_that_cannot_be_read_is_an_error_of_the_program():
    with pytest.raises(TypeError, match="dict"):
        parsing.kind_of(dict[str, str])


@pytest.mark.parametrize(
    ("convert", "text", "value"),
    [
        (parsing.whole_of, "0", 0),
        (parsing.whole_of, "9223372036854775807", 2**63 - 1),
        (parsing.duration_of, " 15 M ", 900.0),
        (parsing.instant_of, "1700000000123", 1_700_000_000.123),
        (parsing.instant_of, 1500, 1.5),
        (parsing.instant_of, "2026-11-15T16:00:00+08:00", 1_794_729_600.0),
    ],
)
def test_the_value_of_a_text(convert, text, value):
    assert convert(text) == value


@pytest.mark.parametrize(
    ("convert", "text"),
    [
        (parsing.whole_of, "-1"),
        (parsing.whole_of, "1_0"),
        (parsing.whole_of, "9223372036854775808"),
        (parsing.duration_of, "15"),
        (parsing.duration_of, "m"),
        (parsing.instant_of, "2026-11-15T16:00:00"),
        (parsing.instant_of, "1960-01-01T00:00:00Z"),
        (parsing.instant_of, "999999999999999"),
        (parsing.instant_of, True),
        (parsing.instant_of, 1.5),
    ],
)
def test_a_text_without_a_value_is_refused(convert, text):
    with pytest.raises(parsing.NotAllowed):
        convert(text)


@pytest.mark.parametrize(
    ("read", "value", "expected"),
    [
        (parsing.seconds, 3, 3.0),
        (parsing.seconds, timedelta(milliseconds=1500), 1.5),
        (parsing.epoch, 12.5, 12.5),
        (parsing.epoch, datetime(1970, 1, 2, tzinfo=UTC), 86_400.0),
        (parsing.moment, "1970-01-02T00:00:00+00:00", 86_400.0),
        (parsing.moment, "20260131235959", LOCAL),
        (parsing.moment, "2026-01-31#23:59:59:500", LOCAL + 0.5),
    ],
)
def test_durations_and_times_are_read_as_seconds(read, value, expected):
    assert read(value) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "3", None])
@pytest.mark.parametrize(
    ("check", "allowed"),
    [
        (parsing.seconds, "seconds"),
        (parsing.duration, "seconds"),
        (parsing.epoch, "seconds since the epoch"),
        (parsing.positive, "a number above 0"),
    ],
)
def test_what_is_no_number_is_refused_by_name(check, allowed, value):
    with pytest.raises(SettingError, match=f"^hold must be {allowed}.*got"):
        check(value, "hold")


@pytest.mark.parametrize(
    ("check", "value", "bounds", "text"),
    [
        (parsing.whole, 1.5, {}, "n must be a whole number, 1 or more, got 1.5"),
        (parsing.whole, True, {"most": 9}, "n must be a whole number, 1 to 9, got True"),
        (parsing.whole, 0, {}, "n must be 1 or more, got 0"),
        (
            parsing.whole,
            2**31,
            {"least": 0, "most": 2**30},
            "n must be 0 to 1073741824, got 2147483648",
        ),
        (parsing.duration, 0, {}, "n must be positive, got 0"),
        (parsing.duration, 5, {"least": 10}, "n must be 10 or more seconds, got 5"),
        (parsing.duration, 5, {"most": 2.5}, "n must be at most 2.5 seconds, got 5"),
        (parsing.positive, 0, {}, "n must be a number above 0, got 0"),
        (parsing.moment, "soon", {}, "n must be like 2026-01-31T23:59:59, "),
        (parsing.switch, 1, {}, "n must be True or False, got 1"),
        (parsing.instance, "hidden", {"wanted": Path}, "n must be an object of Path, got str"),
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


NOW = 1_800_000_000.0
AT_EPOCH = parsing.Position(parsing.Place.TIME, 0.0)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (" Beginning ", parsing.Position.EARLIEST),
        ("latest", parsing.Position.LATEST),
        (7, parsing.Position(parsing.Place.OFFSET, offset=7)),
        ("1763539200", parsing.Position(parsing.Place.OFFSET, offset=1_763_539_200)),
        ("20260131235959", parsing.Position(parsing.Place.TIME, LOCAL)),
        (1763539200.0, parsing.Position(parsing.Place.TIME, 1_763_539_200.0)),
        ("-10m", parsing.Position(parsing.Place.TIME, NOW - 600)),
        (timedelta(minutes=10), parsing.Position(parsing.Place.TIME, NOW - 600)),
        ("-999999999d", AT_EPOCH),
        (timedelta(days=999_999), AT_EPOCH),
    ],
    ids=str,
)
def test_a_position_is_a_word_an_offset_a_time_or_an_age(given, meant):
    assert parsing.position(given, "begin", now=NOW) == meant


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (1_763_539_200, "begin: 1763539200 may be an offset or seconds since the epoch"),
        (1763539200000.0, "begin: 1763539200000.0 is beyond the year 9999; a float is seconds"),
        (-1, "begin must be earliest, latest, a time such as"),
        ("soon", "begin must be earliest, latest, a time such as"),
        (True, "begin must be earliest, latest, a time such as"),
        (math.nan, "begin must be earliest, latest, a time such as"),
    ],
    ids=str,
)
def test_a_position_that_is_none_or_may_be_two_is_refused(given, reason):
    with pytest.raises(SettingError) as refused:
        parsing.position(given, "begin", now=NOW)

    assert str(refused.value).startswith(reason)


class Source:
    kind = Colour.RED.value
    inner = (SimpleNamespace(name="a", other=1),)

    @property
    def total(self) -> int:
        return 7


def test_a_record_is_filled_from_the_attributes_of_the_first_source_that_has_them():
    filled = parsing.fill(Outer, None, Source(), SimpleNamespace(kind="other", remark="so"))

    assert filled == Outer("red", 7, (Inner("a"),), "so")
    assert parsing.fill(Outer, Source(), total=8) == Outer("red", 8, (Inner("a"),))


def test_a_field_that_no_source_has_is_an_error_of_the_program():
    with pytest.raises(msgspec.ValidationError, match="total"):
        parsing.fill(Outer, SimpleNamespace(kind="red", inner=()))
