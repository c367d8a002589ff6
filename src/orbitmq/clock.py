"""The source of time, passed to the classes that need it: a test passes another one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> float:
        """Seconds since the epoch, comparable between machines; may be set back."""

    def monotonic(self) -> float:
        """Seconds since a fixed point; never goes back."""


class SystemClock:
    """The machine's own clock."""

    __slots__ = ()

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


def milliseconds(seconds: float) -> int:
    """A time in whole milliseconds, rounded down, as stores and messages hold it.

    A later time never gives a smaller number, so a search for the number of a time finds everything
    stored at that time or later. Less than a microsecond does not count: a float of seconds does
    not hold its milliseconds exactly.
    """
    return round(seconds * 1_000_000) // 1000


def milliseconds_up(seconds: float) -> int:
    """The same, rounded up: for deadlines that must not be too early."""
    return -(-round(seconds * 1_000_000) // 1000)
