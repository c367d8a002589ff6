"""Which messages of a queue are done with, when several tasks work on pieces of it at once.

The invariant: everything below `committed` is done with, and the message at `committed` is not, or
not known to be. A piece may be finished before one in front of it: it is remembered, and planned no
more, until the gap is closed. Only `committed` is ever told to a broker.
"""

from __future__ import annotations

import bisect


class Ledger:
    """The offsets of one queue that are done with."""

    __slots__ = ("_islands", "committed")

    def __init__(self, committed: int) -> None:
        self.committed = committed
        #: Stretches beyond that are done with; sorted, none touching another.
        self._islands: list[tuple[int, int]] = []

    def finish(self, start: int, end: int) -> None:
        """Messages from `start` up to, and without, `end` are done with."""
        start = max(start, self.committed)
        if end <= start:
            return
        before = [each for each in self._islands if each[1] < start]
        after = [each for each in self._islands if each[0] > end]
        touched = self._islands[len(before) : len(self._islands) - len(after)]
        if touched:
            start, end = min(start, touched[0][0]), max(end, touched[-1][1])
        self._islands = [*before, (start, end), *after]
        if self._islands[0][0] <= self.committed:
            self.committed = self._islands.pop(0)[1]

    def move(self, offset: int) -> None:
        """Go on from another offset: the queue does not have what lies at the old one."""
        self.committed = offset
        self._islands.clear()

    def open(self, end: int, most: int) -> list[tuple[int, int]]:
        """The first `most` messages below `end` that are not done with, as stretches."""
        found: list[tuple[int, int]] = []
        at = self.committed
        for start, stop in [*self._islands, (end, end)]:
            if most <= 0 or at >= end:
                break
            upto = min(start, end, at + most)
            if upto > at:
                found.append((at, upto))
                most -= upto - at
            at = max(at, stop)
        return found

    def backlog(self, end: int) -> int:
        """How many messages below `end` are not done with."""
        place = bisect.bisect_left(self._islands, (end, end))
        done = sum(min(stop, end) - start for start, stop in self._islands[:place])
        return max(0, end - self.committed - done)
