"""A clock whose time of day can be moved."""

from __future__ import annotations

import time


class MovableClock:
    """Runs like the machine's clock, ahead of it by what it was moved.

    Only the time of day moves: delays become due and messages old, while connections and members
    of groups, which are watched by the monotonic clock, stay as they are.
    """

    def __init__(self) -> None:
        self._ahead = 0.0

    def now(self) -> float:
        return time.time() + self._ahead

    def monotonic(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        """Move on; a negative number moves back, as a correction by NTP would."""
        self._ahead += seconds
