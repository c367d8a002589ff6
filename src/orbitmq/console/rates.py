"""Rates out of counters: what producers stored and what a group finished, per second.

Consumers report every few seconds, so that a single step shows nothing or twice as much; a window
of several samples shows what is going on.
"""

from __future__ import annotations

from collections import deque

#: Seconds over which a rate is measured.
WINDOW = 30.0
#: Seconds between two reports of a consumer's progress, as RocketMQ's clients have it.
REPORT_INTERVAL = 5.0


class Meter:
    """Two counters of a group in a topic: stored and finished."""

    __slots__ = ("_points", "moved_at")

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int]] = deque()
        #: When `done` last changed, or nothing waited.
        self.moved_at: float | None = None

    def add(self, at: float, end: int, done: int) -> None:
        """A sample; `at` is monotonic."""
        points = self._points
        if points and done < points[-1][2]:
            # Progress was set back: what was before does not count.
            points.clear()
        if not points or done != points[-1][2] or done >= end or self.moved_at is None:
            self.moved_at = at
        points.append((at, end, done))
        while len(points) > 2 and points[1][0] <= at - WINDOW:
            points.popleft()

    @property
    def seconds(self) -> float:
        """Over how long the rates are measured."""
        return self._points[-1][0] - self._points[0][0] if self._points else 0.0

    @property
    def rates(self) -> tuple[float, float]:
        """Stored and finished per second."""
        if len(self._points) < 2:
            return 0.0, 0.0
        first, last = self._points[0], self._points[-1]
        seconds = self.seconds
        if seconds <= 0:
            return 0.0, 0.0
        return max(0, last[1] - first[1]) / seconds, max(0, last[2] - first[2]) / seconds
