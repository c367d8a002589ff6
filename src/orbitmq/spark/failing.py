"""Whether a pipeline is failing: it runs, and what it handles comes back.

Such a pipeline looks busy: batches end, rows pass, progress moves. So what failed is set against
what went well, over the last minutes. One message that fails again and again while nothing else
comes must not make a pipeline ill. So messages are counted, not failures, and there must be
several of them.

Who reports failures knows how many there were, and not of which messages: names of all would be
too much to pass on. But a message fails for the first time once, for the second time once, and so
on. Failures of one and the same try are failures of different messages, however they are spread
over time, and the try with the most of them says how many messages there are at least.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Final, NamedTuple

#: Seconds that are looked back.
WINDOW: Final = 300.0
#: From this share of failed messages on a pipeline is failing, if there are at least so many.
SHARE: Final = 0.5
FEWEST: Final = 5


class FailureWatch:
    """What went well and what failed, over time. For one thread at a time."""

    def __init__(self) -> None:
        self._points: deque[_Point] = deque()
        self._done = 0
        self._failures: Counter[int] = Counter()

    def add(self, now: float, done: int, failures: Mapping[int, int]) -> None:
        """What was handled since the last time: well, and badly by the tries that were before."""
        if done or any(failures.values()):
            self._points.append(_Point(now, done, Counter(failures)))
            self._done += done
            self._failures.update(failures)
        self._forget(now)

    def share(self, now: float) -> float | None:
        """Of the messages handled lately, the share that failed; None when there were none."""
        self._forget(now)
        failed = self._failed
        return failed / (self._done + failed) if self._done + failed else None

    def is_failing(self, now: float) -> bool:
        share = self.share(now)
        return share is not None and share >= SHARE and self._failed >= FEWEST

    @property
    def _failed(self) -> int:
        return max(self._failures.values(), default=0)

    def _forget(self, now: float) -> None:
        while self._points and self._points[0].at <= now - WINDOW:
            old = self._points.popleft()
            self._done -= old.done
            self._failures -= old.failures  # which drops those that are 0


class _Point(NamedTuple):
    at: float
    done: int
    failures: Counter[int]
