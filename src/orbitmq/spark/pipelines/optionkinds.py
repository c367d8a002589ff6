"""How the text of a pipeline's option becomes its value, by the type that its function declares."""

from __future__ import annotations

import enum
import functools
import math
import operator
import re
import types
import typing
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from orbitmq.client.durations import Duration

#: A time zone, as Spark takes it.
Zone = typing.NewType("Zone", str)

_offset = re.compile(r"Z|(?:UTC|GMT|UT)?[+-]\d{1,2}(?::\d{2}){0,2}").fullmatch
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_duration = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*").fullmatch
_UNIONS: Final = (types.UnionType, typing.Union)
_TRUTHS: Final = {"true": True, "yes": True, "on": True, "1": True} | {
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


class NotAllowed(ValueError):
    """A value that an option cannot have. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The values of a type: what they are called, and how they are read."""

    allowed: str
    #: From a text, or from what a TOML file has.
    read: Callable[[Any], Any]


def kind_of(declared: Any) -> Kind:
    """The kind for a declared type. Raises `TypeError` for types that no option can have."""
    if declared == Duration:
        return Kind("a duration such as 500ms, 10s, 5m, 2h or 7d", _seconds)
    arguments = typing.get_args(declared)
    origin = typing.get_origin(declared)
    if origin in _UNIONS and types.NoneType in arguments:
        # What is not given is not read: None is a default only.
        rest = [each for each in arguments if each is not types.NoneType]
        return kind_of(functools.reduce(operator.or_, rest))
    if origin in _UNIONS and set(arguments) == {Path, str}:
        return Kind("a path, or an address such as s3a://bucket/folder", _place)
    if origin is typing.Literal:
        return _choice({str(each): each for each in arguments})
    if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
        return _several(kind_of(arguments[0]))
    if isinstance(declared, type) and issubclass(declared, enum.Enum):
        return _choice({str(each.value): each for each in declared})
    if declared in _SIMPLE:
        return _SIMPLE[declared]
    raise TypeError(f"no option can have the type {declared!r}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise NotAllowed
    return value


def _whole(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return int(_text(value).replace("_", ""))
    except ValueError:
        raise NotAllowed from None


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise NotAllowed
    try:
        found = float(value if isinstance(value, int | float) else _text(value))
    except ValueError:
        raise NotAllowed from None
    if not math.isfinite(found):
        raise NotAllowed
    return found


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    try:
        return _TRUTHS[_text(value).strip().lower()]
    except KeyError:
        raise NotAllowed from None


def _path(value: Any) -> Path:
    if not _text(value) or "\0" in value:
        raise NotAllowed
    return Path(value).expanduser()


def _place(value: Any) -> str:
    return str(_path(value)) if "://" not in _text(value) else str(value)


def _zone(value: Any) -> str:
    known = zoneinfo.available_timezones()
    # A machine without a list of them cannot say; Spark has its own.
    if known and _text(value) not in known and not _offset(value):
        raise NotAllowed
    return _text(value)


def _seconds(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value)
    found = _duration(_text(value))
    if found is None or (found[2] or "s") not in _UNITS:
        raise NotAllowed
    return float(found[1]) * _UNITS[found[2] or "s"]


_SIMPLE: Final[dict[Any, Kind]] = {
    str: Kind("a text", _text),
    bool: Kind("true or false", _truth),
    int: Kind("a whole number", _whole),
    float: Kind("a number", _number),
    Path: Kind("a path", _path),
    Zone: Kind("a time zone such as UTC, Europe/Berlin or +02:00", _zone),
}


def _choice(choices: dict[str, Any]) -> Kind:
    def read(value: Any) -> Any:
        try:
            return choices[_text(value).strip()]
        except KeyError:
            raise NotAllowed from None

    return Kind(f"one of {', '.join(choices)}", read)


def _several(kind: Kind) -> Kind:
    def read(value: Any) -> tuple[Any, ...]:
        words = value if isinstance(value, list) else _text(value).split(",")
        return tuple(kind.read(word.strip() if isinstance(word, str) else word) for word in words)

    return Kind(f"a list, each {kind.allowed}, as in a,b", read)
