"""Where the time comes from: given to whoever needs it, so that a test can give another one."""

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
