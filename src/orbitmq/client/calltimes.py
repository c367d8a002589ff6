"""How long calls took, as counts of buckets: percentiles of one consumer or of many together.

The percentile of a group cannot be had from the percentiles of its members, but from their counts.
So members tell their counts, in a text that people can read as well (see `CallTimes.told`).

A bucket is named by the upper 16 bits of a time as IEEE 754 writes it: the exponent and four bits
of the fraction. That divides each doubling into 16 parts of equal width, from nanoseconds to years,
without a table, a logarithm or a limit, and a whole list is put into buckets by a few steps that
leave the interpreter no work for a single time. A percentile is the upper end of its bucket: never
below the truth, and above it by a sixteenth at most.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

#: Where the upper 16 bits of a double are among its four parts of 16 bits.
_UPPER: Final = 3 if sys.byteorder == "little" else 0
#: The last bucket of finite times; above are the infinite ones and those below zero.
_LAST_BUCKET: Final = 0x7FEF
#: What `told` writes.
_TOLD: Final = re.compile(r"calls=\d+ .* longest=(\S+) s buckets=([0-9a-f:,]+)")


def property_of(topic: str) -> str:
    """The name under which a consumer tells how long the calls for a topic took."""
    return f"consumeTimes.{topic}"


@dataclass(frozen=True, slots=True)
class CallTimes:
    """How long calls took, in seconds; None when there were none."""

    #: How many calls each bucket has.
    buckets: Mapping[int, int]
    longest: float | None = None

    @classmethod
    def of(cls, times: Sequence[float]) -> CallTimes:
        """Of single times, none below zero."""
        return cls(Counter(buckets_of(times)), max(times, default=None))

    @classmethod
    def together(cls, parts: Iterable[CallTimes]) -> CallTimes:
        """Of the calls of all parts."""
        buckets = Counter[int]()
        longest: list[float] = []
        for part in parts:
            buckets.update(part.buckets)
            if part.longest is not None:
                longest.append(part.longest)
        return cls(buckets, max(longest, default=None))

    @property
    def calls(self) -> int:
        """How many calls there were."""
        return sum(self.buckets.values())

    @property
    def p50(self) -> float | None:
        """What half of the calls took at most."""
        return self.percentile(0.50)

    @property
    def p95(self) -> float | None:
        """What 95 of 100 calls took at most."""
        return self.percentile(0.95)

    @property
    def p99(self) -> float | None:
        """What 99 of 100 calls took at most."""
        return self.percentile(0.99)

    def percentile(self, share: float) -> float | None:
        """What this share of the calls took at most."""
        if self.longest is None:
            return None
        left = math.ceil(self.calls * share)
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                return min(self.longest, _upper_end(bucket))
        return self.longest

    def told(self) -> str:
        """As consumers tell it: for people in front, for programs at the end."""
        shown = " ".join(
            f"p{share}={self.percentile(share / 100) or 0.0:.6f}" for share in (50, 95, 99)
        )
        buckets = ",".join(f"{bucket:x}:{self.buckets[bucket]}" for bucket in sorted(self.buckets))
        return f"calls={self.calls} {shown} longest={self.longest or 0.0!r} s buckets={buckets}"

    @classmethod
    def from_told(cls, text: str) -> CallTimes | None:
        """What `told` wrote; None for anything else: others may use the same name."""
        found = _TOLD.fullmatch(text)
        if found is None:
            return None
        try:
            pairs = [each.split(":") for each in found[2].split(",")]
            buckets = {int(bucket, 16): int(count) for bucket, count in pairs}
            longest = float(found[1])
        except ValueError:
            return None
        if not (longest >= 0 and max(buckets) <= _LAST_BUCKET and min(buckets.values()) > 0):
            return None
        return cls(buckets, longest)


def buckets_of(times: Sequence[float]) -> array[int]:
    """The bucket of each time."""
    return array("H", array("d", times).tobytes())[_UPPER::4]


def _upper_end(bucket: int) -> float:
    end: float = struct.unpack(">d", struct.pack(">Hxxxxxx", bucket + 1))[0]
    return end
