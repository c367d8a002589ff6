"""How settings of the client are checked: one way for all of them.

A wrong value is refused where it is given, under the name that the user knows, with what is
allowed. Whole numbers are whole, switches are True or False, and durations are seconds or a
`timedelta`, which is put down as seconds.
"""

from __future__ import annotations

from typing import TypeVar

from orbitmq.client.durations import positive_seconds, seconds
from orbitmq.errors import SettingError

T = TypeVar("T")


class Fields:
    """The fields of one settings object, to be checked while it is made."""

    def __init__(self, settings: object, name: str) -> None:
        """`name` is what users know the object by: `flow` for `flow.max_span`."""
        self._settings = settings
        self._name = name

    def whole(
        self, *names: str, least: int = 1, most: int | None = None, optional: bool = False
    ) -> None:
        """Whole numbers within bounds; None as well, if they are `optional`."""
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
        """Seconds within bounds; without a lower one, more than none at all."""
        for name in names:
            value = getattr(self._settings, name)
            if value is None and optional:
                continue
            found = duration(value, f"{self._name}.{name}", least=least, most=most)
            object.__setattr__(self._settings, name, found)

    def switches(self, *names: str) -> None:
        """True or False."""
        for name in names:
            switch(getattr(self._settings, name), f"{self._name}.{name}")

    def kinds(self, **kinds: type) -> None:
        """Objects of a class."""
        for name, wanted in kinds.items():
            kind(getattr(self._settings, name), f"{self._name}.{name}", wanted)


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
    """Seconds within bounds; without a lower one, more than none at all."""
    read = positive_seconds if least is None else seconds
    found = read(value, name)  # type: ignore[arg-type]  # it refuses what is none
    if least is not None and found < least:
        raise SettingError(f"{name} must be {_bounds(least, most)} seconds, got {value!r}")
    if most is not None and found > most:
        allowed = _bounds(least, most) if least is not None else f"at most {most:g}"
        raise SettingError(f"{name} must be {allowed} seconds, got {value!r}")
    return found


def switch(value: object, name: str) -> bool:
    """True or False, and nothing that merely passes for one of them."""
    if not isinstance(value, bool):
        raise SettingError(f"{name} must be True or False, got {value!r}")
    return value


def kind(value: object, name: str, wanted: type[T]) -> T:
    """An object of a class. What was given is not shown: it may be a secret."""
    if not isinstance(value, wanted):
        raise SettingError(
            f"{name} must be an object of {wanted.__qualname__}, got {type(value).__name__}"
        )
    return value


def _bounds(least: float, most: float | None) -> str:
    return f"{least:g} or more" if most is None else f"{least:g} to {_plain(most)}"


def _plain(number: float) -> str:
    """Large limits in full: nobody reads 1.04858e+08."""
    return str(number) if isinstance(number, int) else f"{number:g}"
