"""What a measurement counts: messages, bytes, and how long things took.

Times go into buckets whose width grows with the time, 64 for each doubling. So a percentile is at
most 1.6 % above the truth, whatever the number of messages, and counting one costs no memory.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

_PER_DOUBLING = 64
#: Below this everything is one bucket, in seconds.
_LEAST = 1e-6


@dataclass(slots=True)
class Times:
    """How long things took, in seconds."""

    count: int = 0
    total: float = 0.0
    longest: float = 0.0
    _buckets: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float, number: int = 1) -> None:
        """Take in a time, of so many things."""
        self.count += number
        self.total += seconds * number
        self.longest = max(self.longest, seconds)
        place = math.ceil(math.log2(max(seconds, _LEAST) / _LEAST) * _PER_DOUBLING)
        self._buckets[place] += number

    def merge(self, other: Times) -> None:
        self.count += other.count
        self.total += other.total
        self.longest = max(self.longest, other.longest)
        self._buckets.update(other._buckets)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def percentile(self, share: float) -> float | None:
        """What this share of the things took at most; None when there were none."""
        if not self.count:
            return None
        left = math.ceil(self.count * share)
        for place in sorted(self._buckets):
            left -= self._buckets[place]
            if left <= 0:
                return min(self.longest, _LEAST * 2 ** (place / _PER_DOUBLING))
        return self.longest


@dataclass(slots=True)
class Counts:
    """What happened in a stretch of time."""

    messages: int = 0
    bytes: int = 0
    failed: int = 0
    times: Times = field(default_factory=Times)

    def add(self, messages: int, size: int, seconds: float) -> None:
        self.messages += messages
        self.bytes += size
        self.times.add(seconds, messages)

    def merge(self, other: Counts) -> None:
        self.messages += other.messages
        self.bytes += other.bytes
        self.failed += other.failed
        self.times.merge(other.times)
