"""So many per second, and no more."""

from __future__ import annotations

import threading
from collections.abc import Callable

from orbitmq.clock import Clock


class Pace:
    """Holds a thread back.

    After `take(n)` has returned, at most `rate * seconds` were taken since the first call, but for
    one portion. What was not taken in time is not made up for: a pause is no debt.
    """

    def __init__(
        self, rate: float, clock: Clock, wait: Callable[[float], object] | None = None
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._wait = wait or threading.Event().wait
        self._next_at: float | None = None

    def take(self, number: int) -> None:
        """Wait until so many more may go."""
        now = self._clock.monotonic()
        due = now if self._next_at is None else self._next_at
        if due > now:
            self._wait(due - now)
        self._next_at = max(due, now) + number / self._rate
