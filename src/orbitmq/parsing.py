"""Values from text, TOML, attributes and arguments.

The first half reads text and TOML into the type that a setting declares and raises `NotAllowed`;
the caller adds the setting's name. The second half checks arguments and raises `SettingError` with
the name that the user knows. Durations are seconds, instants seconds since the epoch.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
import re
import sys
import time
import types
import typing
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from orbitmq.errors import SettingError

T = TypeVar("T")

#: Seconds, or a `timedelta`.
Duration: TypeAlias = float | timedelta
#: Seconds since the epoch, or a `datetime`; one without a zone is in local time, as in Python.
Instant: TypeAlias = float | datetime
#: An `Instant`, or a text: ISO 8601, or a form of RocketMQ's own tools, `20260131235959` or
#: `2026-01-31#23:59:59:000`. Without a zone it is local time.
Moment: TypeAlias = Instant | str
#: The name of a time zone.
Zone = typing.NewType("Zone", str)

LARGEST_INT: Final = 2**31 - 1
LARGEST_LONG: Final = 2**63 - 1

_UNITS: Final = {
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86_400.0,
    "w": 604_800.0,
}
_TRUTHS: Final = dict.fromkeys(("yes", "on"), "true") | dict.fromkeys(("no", "off"), "false")
_UNIONS: Final = (types.UnionType, typing.Union)
_FINITE: Final = Annotated[
    float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)
]  # excludes NaN as well
_ABSENT: Final = object()
_LAST_MS: Final = 253_402_300_799_999  # the end of the year 9999

_duration = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE).fullmatch
_whole = re.compile(r"-?[0-9]{1,19}").fullmatch
_milliseconds = re.compile(r"[0-9]{1,15}").fullmatch
_zone_offset = re.compile(r"Z|(?:UTC|GMT|UT)?[+-]\d{1,2}(?::\d{2}){0,2}").fullmatch
_digits = re.compile(r"\d{14}").fullmatch
_tools_time = re.compile(r"(\d{4}-\d\d-\d\d)#(\d\d:\d\d:\d\d)(?::(\d{3}))?").fullmatch


class NotAllowed(ValueError):
    """A text or a TOML value that cannot be read. The caller turns it into an error of its own."""

    def __init__(self, allowed: str) -> None:
        #: What can be given instead, as in "must be `allowed`".
        self.allowed = allowed
        super().__init__(f"must be {allowed}")


# Text and TOML.


@dataclass(frozen=True, slots=True)
class Kind:
    """The values of a declared type: what they are called, and how they are read."""

    allowed: str
    _convert: Callable[[Any, bool], Any]

    def from_text(self, text: str) -> Any:
        """The value of a flag's or a variable's text. Raises `NotAllowed`."""
        return self._read(text, is_text=True)

    def from_toml(self, value: Any) -> Any:
        """The value of what a TOML parser returned: `"1"` is no number. Raises `NotAllowed`."""
        return self._read(value, is_text=False)

    def read(self, value: Any) -> Any:
        """The value of a text or of what a TOML parser returned. Raises `NotAllowed`."""
        return self._read(value, is_text=isinstance(value, str))

    def _read(self, value: Any, *, is_text: bool) -> Any:
        try:
            return self._convert(value, is_text)
        except (msgspec.ValidationError, NotAllowed):
            raise NotAllowed(self.allowed) from None


def kind_of(declared: Any) -> Kind:
    """The kind for a declared type. Raises `TypeError` for types that cannot be read."""
    if declared == Duration:
        return Kind("a duration such as 500ms, 10s, 5m, 2h or 7d", _duration_or_seconds)
    if declared in _SIMPLE:
        return _SIMPLE[declared]
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if origin in _UNIONS and types.NoneType in arguments:
        rest = (each for each in arguments if each is not types.NoneType)
        return _optional(kind_of(functools.reduce(operator.or_, rest)))
    if origin in _UNIONS and set(arguments) == {Path, str}:
        return Kind("a path, or an address such as s3a://bucket/folder", _path_or_address)
    if origin is typing.Literal:
        return _choice({str(each): each for each in arguments})
    if isinstance(declared, type) and issubclass(declared, enum.Enum):
        return _choice({str(each.value): each for each in declared})
    if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
        return _several(kind_of(arguments[0]))
    raise TypeError(f"no option can have the type {declared!r}")


def as_json(value: Any) -> Any:
    """A value as JSON and TOML have it; `Kind.from_toml` reads it again."""
    plain = msgspec.to_builtins(value, enc_hook=str)
    return list(plain) if isinstance(plain, tuple) else plain


def as_text(value: Any) -> str:
    """A value as `Kind.from_text` reads it again."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(as_text(each) for each in value)
    return str(value.value if isinstance(value, enum.Enum) else value)


def whole_of(text: str, *, least: int = 0) -> int:
    """A whole number in a text, up to Java's largest. Raises `NotAllowed`."""
    if not _whole(text) or not least <= int(text) <= LARGEST_LONG:
        raise NotAllowed(f"a whole number from {least} up" if least else "a whole number")
    return int(text)


def duration_of(text: str) -> float:
    """The seconds of a duration like `15m`. Raises `NotAllowed`."""
    found = _duration(text)
    unit = None if found is None else _UNITS.get(found[2].lower())
    if found is None or unit is None:
        raise NotAllowed("a number and a unit (ms, s, m, h or d), as in 15m or 500ms")
    return float(found[1]) * unit


def instant_of(value: object) -> float:
    """The time of milliseconds since the epoch or of an ISO text with a zone.

    For settings that are read on several machines, where local time is ambiguous. Raises
    `NotAllowed`.
    """
    text = str(value).strip()
    if isinstance(value, int | str) and not isinstance(value, bool):
        if _milliseconds(text) and int(text) <= _LAST_MS:
            return int(text) / 1000
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            found = None
        if found is not None and found.tzinfo is not None and found.timestamp() >= 0:
            return found.timestamp()
    raise NotAllowed(
        "milliseconds since the epoch, or an ISO time with its zone, as in 2026-11-15T08:00:00Z "
        "or 2026-11-15T16:00:00+08:00"
    )


def _builtin(declared: Any) -> Callable[[Any, bool], Any]:
    def convert(value: Any, is_text: bool) -> Any:
        if is_text and declared is not str:
            value = value.strip().replace("_", "").lower()
            value = _TRUTHS.get(value, value)
        return msgspec.convert(value, declared, strict=not is_text)

    return convert


def _path(value: Any, is_text: bool) -> Path:
    text = msgspec.convert(value, str)
    if not text or "\0" in text:
        raise NotAllowed("a path")
    return Path(text).expanduser()


def _path_or_address(value: Any, is_text: bool) -> str:
    return str(value if "://" in msgspec.convert(value, str) else _path(value, is_text))


def _zone(value: Any, is_text: bool) -> str:
    name, known = msgspec.convert(value, str), zoneinfo.available_timezones()
    # On a machine without a list of zones Spark, which has its own, decides.
    if known and name not in known and not _zone_offset(name):
        raise NotAllowed("a time zone")
    return name


def _duration_or_seconds(value: Any, is_text: bool) -> float:
    try:
        number: float = msgspec.convert(value, _FINITE, strict=not is_text)
    except msgspec.ValidationError:
        return duration_of(msgspec.convert(value, str))
    return number


def _choice(choices: dict[str, Any]) -> Kind:
    by_lower_case = {name.lower(): name for name in choices}

    def convert(value: Any, is_text: bool) -> Any:
        text = msgspec.convert(value, str).strip()
        name = text if text in choices else by_lower_case.get(text.lower())
        if name is None:
            raise NotAllowed("one of these")
        return choices[name]

    *others, last = choices
    return Kind(f"{', '.join(others)} or {last}" if others else last, convert)


def _optional(kind: Kind) -> Kind:
    def convert(value: Any, is_text: bool) -> Any:
        # TOML has no null.
        if isinstance(value, str) and value.strip().lower() in ("", "none"):
            return None
        return kind._read(value, is_text=is_text)

    return Kind(f'{kind.allowed}, or "none"', convert)


def _several(kind: Kind) -> Kind:
    def convert(value: Any, is_text: bool) -> tuple[Any, ...]:
        if is_text:
            # RocketMQ writes lists of name servers with semicolons.
            words = [word.strip() for word in value.replace(";", ",").split(",")]
            return tuple(kind.from_text(word) for word in words if word)
        return tuple(kind.from_toml(each) for each in msgspec.convert(value, list))

    return Kind(f"a list, each {kind.allowed}, as in a,b", convert)


_SIMPLE: Final[dict[Any, Kind]] = {
    str: Kind("a text", _builtin(str)),
    bool: Kind("true or false", _builtin(bool)),
    int: Kind("a whole number", _builtin(int)),
    float: Kind("a number", _builtin(_FINITE)),
    Path: Kind("a path", _path),
    Zone: Kind("a time zone such as UTC, Europe/Berlin or +02:00", _zone),
}


# Attributes.


def fill(kind: type[T], *sources: object, **given: object) -> T:
    """A record of the values in `given`, or of the attributes of the first source that has them.

    Attributes that are objects become the inner records that the fields declare.
    """
    found = dict(given)
    for source in sources:
        for name in kind.__annotations__:
            if name not in found and (value := getattr(source, name, _ABSENT)) is not _ABSENT:
                found[name] = value
    return msgspec.convert(found, kind, from_attributes=True)


# Arguments.


class Fields:
    """Checks the fields of a settings object in its `__post_init__`."""

    def __init__(self, settings: object, name: str) -> None:
        """`name` is what users know the object by: `flow` for `flow.max_span`."""
        self._settings = settings
        self._name = name

    def whole(
        self, *names: str, least: int = 1, most: int | None = None, optional: bool = False
    ) -> None:
        """Check whole numbers; `optional` allows None."""
        for name in names:
            value = getattr(self._settings, name)
            if value is not None or not optional:
                whole(value, f"{self._name}.{name}", least=least, most=most)

    def durations(
        self,
        *names: str,
        least: float | None = None,
        most: float | None = None,
        optional: bool = False,
    ) -> None:
        """Check durations and turn them into seconds; without `least` they must be positive."""
        for name in names:
            value = getattr(self._settings, name)
            if value is None and optional:
                continue
            found = duration(value, f"{self._name}.{name}", least=least, most=most)
            object.__setattr__(self._settings, name, found)

    def switches(self, *names: str) -> None:
        """Check that the fields are True or False."""
        for name in names:
            switch(getattr(self._settings, name), f"{self._name}.{name}")

    def kinds(self, **kinds: type) -> None:
        """Check the classes of the fields."""
        for name, wanted in kinds.items():
            instance(getattr(self._settings, name), f"{self._name}.{name}", wanted)


def whole(value: object, name: str, *, least: int = 1, most: int | None = None) -> int:
    """A whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingError(f"{name} must be a whole number, {_bounds(least, most)}, got {value!r}")
    if value < least or (most is not None and value > most):
        raise SettingError(f"{name} must be {_bounds(least, most)}, got {value!r}")
    return value


def duration(
    value: object, name: str, *, least: float | None = None, most: float | None = None
) -> float:
    """The seconds of a `Duration` within bounds; without `least` they must be positive."""
    found = seconds(value, name)
    if least is None and found <= 0:
        raise SettingError(f"{name} must be positive, got {value!r}")
    if (least is not None and found < least) or (most is not None and found > most):
        allowed = f"at most {most:g}" if least is None else _bounds(least, most)
        raise SettingError(f"{name} must be {allowed} seconds, got {value!r}")
    return found


def seconds(value: object, name: str = "duration") -> float:
    """The seconds of a duration."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    return _finite(value, name, "seconds or a timedelta")


def epoch(value: object, name: str = "time") -> float:
    """The seconds since the epoch of an `Instant`."""
    if isinstance(value, datetime):
        return value.timestamp()
    return _finite(value, name, "seconds since the epoch or a datetime")


def moment(value: object, name: str = "a time") -> float:
    """The seconds since the epoch of a `Moment`."""
    if not isinstance(value, str):
        return epoch(value, name)
    text = value.strip()
    if _digits(text):
        text = f"{text[:8]}T{text[8:]}"
    elif tools := _tools_time(text):
        text = f"{tools[1]}T{tools[2]}.{tools[3] or '000'}"
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise SettingError(
            f"{name} must be like 2026-01-31T23:59:59, 20260131235959 or "
            f"2026-01-31#23:59:59:000, got {value!r}"
        ) from error


# Positions in a queue.


class Place(enum.Enum):
    """The kinds of a position in a queue."""

    EARLIEST = "earliest"
    LATEST = "latest"
    TIME = "time"
    OFFSET = "offset"
    FIRST = EARLIEST
    LAST = LATEST


@dataclass(frozen=True, slots=True)
class Position:
    """Where to read from: the first stored message, the end, a time, or an offset."""

    place: Place
    time: float | None = None  #: seconds since the epoch: the first message at or after it
    offset: int | None = None  #: in every queue concerned

    EARLIEST: typing.ClassVar[Position]
    LATEST: typing.ClassVar[Position]
    FIRST: typing.ClassVar[Position]
    LAST: typing.ClassVar[Position]

    def __str__(self) -> str:
        if self.time is not None:
            return datetime.fromtimestamp(self.time).astimezone().isoformat()
        return self.place.value if self.offset is None else f"offset {self.offset}"


Position.EARLIEST = Position.FIRST = Position(Place.EARLIEST)
Position.LATEST = Position.LAST = Position(Place.LATEST)

#: What users may give as a position. A whole number is an offset, a float seconds since the epoch,
#: a `timedelta` so long ago.
AnyPosition: TypeAlias = Position | str | Instant | timedelta

POSITIONS: Final = "earliest, latest, a time such as 2026-11-18T09:00 or -10m, or an offset"
_POSITION_WORDS: Final = {
    "earliest": Position.EARLIEST,
    "first": Position.EARLIEST,
    "begin": Position.EARLIEST,
    "beginning": Position.EARLIEST,
    "consume_from_first_offset": Position.EARLIEST,
    "latest": Position.LATEST,
    "last": Position.LATEST,
    "end": Position.LATEST,
    "consume_from_last_offset": Position.LATEST,
}
#: As seconds since the epoch this is September 2001, and a whole number may be meant so.
_LIKE_A_TIME: Final = 1_000_000_000


def position(given: AnyPosition, name: str, *, now: float | None = None) -> Position:
    """The position that a user means, in every place where one is given.

    A text of digits is an offset; 14 digits are a local time, yyyyMMddHHmmss. Ages such as `-10m`
    and `10m` count back from `now`.
    """
    if isinstance(given, Position):
        return given
    if isinstance(given, timedelta):
        return _ago(abs(given.total_seconds()), now)
    if isinstance(given, int) and not isinstance(given, bool) and given >= _LIKE_A_TIME:
        raise SettingError(
            f"{name}: {given} may be an offset or seconds since the epoch; write '{given}' for the "
            f"offset, {given}.0 for the time"
        )
    if isinstance(given, float) and given > _LAST_MS / 1000:
        raise SettingError(
            f"{name}: {given!r} is beyond the year 9999; a float is seconds since the epoch, not "
            "milliseconds"
        )
    found = _position_in(given, now) if isinstance(given, str) else _position_of(given, name)
    if found is None:
        raise SettingError(f"{name} must be {POSITIONS}, got {given!r}")
    return found


def _position_of(given: object, name: str) -> Position | None:
    if isinstance(given, bool):
        return None
    if isinstance(given, int):
        return Position(Place.OFFSET, offset=given) if given >= 0 else None
    if isinstance(given, datetime) or (isinstance(given, float) and math.isfinite(given)):
        return Position(Place.TIME, epoch(given, name))
    return None


def _position_in(given: str, now: float | None) -> Position | None:
    text = given.strip()
    if (word := _POSITION_WORDS.get(text.lower())) is not None:
        return word
    if text.isdecimal() and text.isascii() and not _digits(text):
        offset = int(text)
        return Position(Place.OFFSET, offset=offset) if offset <= LARGEST_LONG else None
    if (age := age_of(text)) is not None:
        return _ago(age, now)
    try:
        return Position(Place.TIME, moment(text))
    except SettingError:
        return None


def age_of(text: str) -> float | None:
    """The seconds that `now`, `-10m` or `10m` counts back; None for other texts."""
    if text.strip().lower() == "now":
        return 0.0
    try:
        return duration_of(text.strip().removeprefix("-"))
    except NotAllowed:
        return None


def _ago(age: float, now: float | None) -> Position:
    return Position(Place.TIME, max(0.0, (time.time() if now is None else now) - age))


def positive(value: object, name: str) -> float:
    """A number above 0."""
    found = _finite(value, name, "a number above 0")
    if found <= 0:
        raise SettingError(f"{name} must be a number above 0, got {value!r}")
    return found


def switch(value: object, name: str) -> bool:
    """True or False; 0 and 1 are refused."""
    if not isinstance(value, bool):
        raise SettingError(f"{name} must be True or False, got {value!r}")
    return value


def instance(value: object, name: str, wanted: type[T]) -> T:
    """An object of a class. The error does not show the value, which may be a secret."""
    if not isinstance(value, wanted):
        raise SettingError(
            f"{name} must be an object of {wanted.__qualname__}, got {type(value).__name__}"
        )
    return value


def _finite(value: object, name: str, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingError(f"{name} must be {allowed}, got {value!r}")
    return float(value)


def _bounds(least: float, most: float | None) -> str:
    if most is None:
        return f"{least:g} or more"
    # Large whole limits in full, not as 1.04858e+08.
    return f"{least:g} to {most if isinstance(most, int) else format(most, 'g')}"
