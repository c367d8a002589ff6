"""The source of time, passed to the classes that need it: a test passes another one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> float:
        """Seconds since the epoch, as other machines would say it; may be set back."""

    def monotonic(self) -> float:
        """Seconds since some fixed point; never goes back."""


class SystemClock:
    """The machine's own clock."""

    __slots__ = ()

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


def milliseconds(seconds: float) -> int:
    """A time in whole milliseconds, without the part of one: how stores and messages say it.

    A later time is never a smaller number, so what was stored at a time or later is found by the
    number of that time. A microsecond is the least that counts: a float of seconds is not exact to
    the millisecond that it was made of.
    """
    return round(seconds * 1_000_000) // 1000


def milliseconds_up(seconds: float) -> int:
    """The same with the part of one taken for a whole: for what must not happen too early."""
    return -(-round(seconds * 1_000_000) // 1000)
