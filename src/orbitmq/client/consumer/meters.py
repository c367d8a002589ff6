"""Sums over a stretch of time that moves along.

They are kept in slots of fixed length, of which the oldest is used again: no timer runs for it, and
adding costs the same however much is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from orbitmq.client.calltimes import CallTimes, buckets_of

#: So many times are put into buckets at once, which is far cheaper than one by one.
_AT_ONCE: Final = 512


class Meter:
    """Counts events and adds values up, over a stretch of time that moves along."""

    __slots__ = (
        "_began", "_counts", "_ends", "_slot", "_slots", "_sums", "_width", "count", "total"
    )  # fmt: skip

    def __init__(self, now: float, slots: int, width: float) -> None:
        self._slots = slots
        self._width = width
        self._began = now
        self._slot = int(now // width)
        #: When the present slot does.
        self._ends = (self._slot + 1) * width
        self._counts = [0] * slots
        self._sums = [0.0] * slots
        #: All events ever, and their values.
        self.count = 0
        self.total = 0.0

    def add(self, now: float, count: int = 1, value: float = 0.0) -> None:
        if now >= self._ends:
            self._move_to(now)
        place = self._slot % self._slots
        self._counts[place] += count
        self._sums[place] += value
        self.count += count
        self.total += value

    def recent(self, now: float) -> int:
        """Events within the stretch."""
        self._move_to(now)
        return sum(self._counts)

    def rate(self, now: float) -> float:
        """Events per second within the stretch, or since the beginning if that is shorter."""
        lasted = min(now - self._began, self._slots * self._width)
        return self.recent(now) / max(lasted, 1.0)

    def mean(self, now: float) -> float:
        """The mean value of the events within the stretch; of all ever if there were none."""
        count = self.recent(now)
        if count:
            return sum(self._sums) / count
        return self.total / self.count if self.count else 0.0

    def _move_to(self, now: float) -> None:
        slot = int(now // self._width)
        passed = min(slot - self._slot, self._slots)
        for step in range(1, passed + 1):
            self._clear((self._slot + step) % self._slots if passed < self._slots else step - 1)
        if passed > 0:
            self._slot = slot
            self._ends = (slot + 1) * self._width

    def _clear(self, place: int) -> None:
        self._counts[place] = 0
        self._sums[place] = 0.0


class CallMeter(Meter):
    """Counts calls, and by how long they took.

    What is added waits until there is much of it, or until somebody asks: `count` and `total` are
    complete after `recent` and all that begins with it.
    """

    __slots__ = ("_buckets", "_longest", "_waiting")

    def __init__(self, now: float, slots: int, width: float) -> None:
        super().__init__(now, slots, width)
        self._buckets: list[Counter[int]] = [Counter() for _ in range(slots)]
        self._longest: list[float | None] = [None] * slots
        #: Times of the present slot that are in no bucket yet.
        self._waiting: list[float] = []

    def add_calls(self, now: float, times: Sequence[float]) -> None:
        """Calls that have ended, by the seconds that each took."""
        if now >= self._ends:
            self._move_to(now)
        waiting = self._waiting
        waiting += times
        if len(waiting) >= _AT_ONCE:
            self._put_into_buckets()

    def recent(self, now: float) -> int:
        self._put_into_buckets()
        return super().recent(now)

    def times(self, now: float) -> CallTimes:
        """How long the calls within the stretch took."""
        self.recent(now)
        return CallTimes.together(map(CallTimes, self._buckets, self._longest))

    def _clear(self, place: int) -> None:
        # The slot that is left keeps what is its own.
        self._put_into_buckets()
        super()._clear(place)
        self._buckets[place] = Counter()
        self._longest[place] = None

    def _put_into_buckets(self) -> None:
        times = self._waiting
        if not times:
            return
        place, seconds = self._slot % self._slots, sum(times)
        self._buckets[place].update(buckets_of(times))
        longest = max(times)
        self._longest[place] = max(self._longest[place] or 0.0, longest)
        self._counts[place] += len(times)
        self._sums[place] += seconds
        self.count += len(times)
        self.total += seconds
        times.clear()
