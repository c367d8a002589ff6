"""How the text of a setting becomes its value, by the type that its class declares.

Flags and environment variables are text, a TOML file has types of its own; both become the same
value here or are refused with what is allowed.
"""

from __future__ import annotations

import enum
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class NotAllowed(ValueError):
    """A text or TOML value that a setting cannot have. Never leaves the command."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The values of a type: how they are read and what they are called."""

    allowed: str
    #: From the text of a flag or a variable.
    from_text: Callable[[str], Any]
    #: From what the TOML parser gave.
    from_toml: Callable[[Any], Any]


def kind_of(declared: Any) -> Kind:
    """The kind for a declared type, such as `tuple[float, ...]` or `Path | None`."""
    arguments = typing.get_args(declared)
    if (
        isinstance(declared, types.UnionType)
        and len(arguments) == 2
        and types.NoneType in arguments
    ):
        (wanted,) = (each for each in arguments if each is not types.NoneType)
        return _optional(kind_of(wanted))
    if typing.get_origin(declared) is tuple and len(arguments) == 2 and arguments[1] is ...:
        return _several(kind_of(arguments[0]))
    if isinstance(declared, type) and issubclass(declared, enum.Enum):
        return _choice(declared)
    if declared in _SIMPLE:
        return _SIMPLE[declared]
    raise TypeError(f"no setting can have the type {declared!r}")


def shown(value: Any) -> Any:
    """A value as JSON and TOML have it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [shown(each) for each in value]
    return value


def as_text(value: Any) -> str:
    """A value as it can be given again as a flag."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(as_text(each) for each in value)
    return str(shown(value))


def _whole(text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise NotAllowed from None


def _number(text: str) -> float:
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        raise NotAllowed from None
    return _finite(value)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise NotAllowed
    return value


def _truth(text: str) -> bool:
    try:
        return _TRUTHS[text.strip().lower()]
    except KeyError:
        raise NotAllowed from None


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise NotAllowed
    return Path(text).expanduser()


def _typed(*wanted: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        # In Python a truth value is a number as well, in a setting it is a mistake.
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise NotAllowed
        return value

    return check


_TRUTHS = {"true": True, "1": True, "yes": True, "on": True} | {
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}

_SIMPLE: dict[Any, Kind] = {
    str: Kind("a text", str, _typed(str)),
    bool: Kind("true or false", _truth, _typed(bool)),
    int: Kind("a whole number", _whole, _typed(int)),
    float: Kind("a number", _number, lambda value: _finite(float(_typed(int, float)(value)))),
    Path: Kind("a path", _path, lambda value: _path(_typed(str)(value))),
}


def _choice(choices: type[enum.Enum]) -> Kind:
    names = [str(choice.value) for choice in choices]

    def read(text: Any) -> enum.Enum:
        for choice in choices:
            if isinstance(text, str) and text.strip().lower() == choice.value:
                return choice
        raise NotAllowed

    return Kind(f"{', '.join(names[:-1])} or {names[-1]}", read, read)


def _optional(kind: Kind) -> Kind:
    def from_text(text: str) -> Any:
        return None if text.strip().lower() in ("", "none") else kind.from_text(text)

    def from_toml(value: Any) -> Any:
        # TOML has no null.
        return None if value == "none" else kind.from_toml(value)

    return Kind(f'{kind.allowed}, or "none"', from_text, from_toml)


def _several(kind: Kind) -> Kind:
    def from_text(text: str) -> tuple[Any, ...]:
        # Semicolons are how RocketMQ's people write lists of name servers.
        words = [word.strip() for word in text.replace(";", ",").split(",")]
        return tuple(kind.from_text(word) for word in words if word)

    def from_toml(value: Any) -> tuple[Any, ...]:
        return tuple(kind.from_toml(each) for each in _typed(list)(value))

    return Kind(f"a list, each {kind.allowed}, as in a,b", from_text, from_toml)
