"""Whether a pipeline is failing: it runs, and what it handles comes back.

Such a pipeline looks busy: batches end, rows pass, progress moves. So what it gave back is set
against what it was done with, over the last minutes. One message that fails again and again while
nothing else comes must not make a pipeline ill, which is why a share alone says nothing: there
must be several failures, or nothing that ever went well.
"""

from __future__ import annotations

from collections import deque
from typing import Final

#: Seconds that are looked back.
WINDOW: Final = 300.0
#: From this share of failures on a pipeline is failing, if there are at least so many.
SHARE: Final = 0.5
FEWEST: Final = 5


class FailureWatch:
    """Counts of a pipeline over time. For one thread at a time."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int]] = deque([(float("-inf"), 0, 0)])

    def add(self, now: float, done: int, failed: int) -> None:
        """Handled well, and given back or given up, since the pipeline was started."""
        self._forget(now)
        if self._points[-1][1:] != (done, failed):
            self._points.append((now, done, failed))

    def share(self, now: float) -> float | None:
        """Of what was handled lately, the share that failed; None when there was nothing."""
        self._forget(now)
        done, failed = self._recent()
        return failed / (done + failed) if done + failed else None

    def is_failing(self, now: float) -> bool:
        share = self.share(now)
        if not share:
            return False
        _, failed = self._recent()
        ever = self._points[-1][1]
        return (share >= SHARE and failed >= FEWEST) or ever == 0

    def _recent(self) -> tuple[int, int]:
        (_, done, failed), (_, all_done, all_failed) = self._points[0], self._points[-1]
        return max(0, all_done - done), max(0, all_failed - failed)

    def _forget(self, now: float) -> None:
        """Keep the last counts from before the window: what came since is measured from there."""
        while len(self._points) > 1 and self._points[1][0] <= now - WINDOW:
            self._points.popleft()
