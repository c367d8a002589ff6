"""Counts of values by size: which share of them lies below a bound."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator


class Histogram:
    """How many values lie at or below each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        #: One for each bound, and one for what is above all of them.
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def __len__(self) -> int:
        return sum(self.counts)

    def note(self, value: float, times: int = 1) -> None:
        """Count a value that was seen so often."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Every bound, and how many values are not above it; the last bound is infinite."""
        count = 0
        for bound, more in zip((*self.bounds, float("inf")), self.counts, strict=True):
            count += more
            yield bound, count

    def coarser(self, bounds: tuple[float, ...]) -> Histogram:
        """The same values with fewer bounds, which must be among its own."""
        upto = dict(self.cumulative())
        other = Histogram(bounds)
        passed = 0
        for place, bound in enumerate((*bounds, float("inf"))):
            other.counts[place] = upto[bound] - passed
            passed = upto[bound]
        other.total = self.total
        return other

    def percentile(self, share: float) -> float:
        """The value that this share of all is not above, as far as the buckets tell.

        Values are taken to be spread evenly over their bucket; what is above all bounds counts as
        the last of them. 0 when there is nothing.
        """
        wanted = share * len(self)
        if not wanted:
            return 0.0
        below = 0.0
        passed = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and passed + count >= wanted:
                # Not above the bound, however the division is rounded.
                return min(bound, below + (bound - below) * (wanted - passed) / count)
            passed += count
            below = bound
        return below
