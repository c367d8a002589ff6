"""Numbers over time, in little memory.

Most of what is watched rests most of the time: of a run of equal values only the first and the last
are kept, so that a group that sleeps costs two points and not seven hundred.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping

#: Seconds for which every sample is kept in memory.
FINE = 3600.0


class Series:
    """One number over time."""

    __slots__ = ("_times", "_values")

    def __init__(self) -> None:
        self._times = array("d")
        self._values = array("d")

    def add(self, at: float, value: float) -> None:
        """The next sample; one that is not later than the last replaces it."""
        times, values = self._times, self._values
        if times and at <= times[-1]:
            values[-1] = value
            return
        if len(values) > 1 and values[-1] == value == values[-2]:
            times[-1] = at
            return
        times.append(at)
        values.append(value)

    def forget(self, before: float) -> None:
        """Drop what ended before a time; the value at that time is kept."""
        place = bisect_left(self._times, before)
        if place > 1:
            del self._times[: place - 1]
            del self._values[: place - 1]

    def since(self, start: float) -> list[tuple[float, float]]:
        """The points from a time on, and the one before it."""
        place = max(0, bisect_left(self._times, start) - 1)
        return list(zip(self._times[place:], self._values[place:], strict=True))

    @property
    def last(self) -> tuple[float, float] | None:
        return (self._times[-1], self._values[-1]) if self._times else None

    def __len__(self) -> int:
        return len(self._times)


class FineHistory:
    """Every sample of the last hour, by the name of its series."""

    def __init__(self, keep: float = FINE) -> None:
        self._keep = keep
        self._series: dict[str, Series] = {}
        self._samples = 0

    def add(self, at: float, values: Mapping[str, float]) -> None:
        """One sample of many series."""
        for name, value in values.items():
            series = self._series.get(name)
            if series is None:
                series = self._series[name] = Series()
            series.add(at, value)
        self._samples += 1
        if self._samples % 60 == 0:
            self._forget(at - self._keep)

    def since(self, name: str, start: float) -> list[tuple[float, float]]:
        series = self._series.get(name)
        return [] if series is None else series.since(start)

    def last(self, name: str) -> float | None:
        series = self._series.get(name)
        last = None if series is None else series.last
        return None if last is None else last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)

    def _forget(self, before: float) -> None:
        for name, series in list(self._series.items()):
            last = series.last
            # A series that nobody adds to belongs to what is gone.
            if last is not None and last[0] < before:
                del self._series[name]
            else:
                series.forget(before)


def thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most so many points: of every stretch the lowest and the highest, so that peaks stay."""
    if len(points) <= most or most < 4:
        return points
    stretches = most // 2
    size = len(points) / stretches
    kept: list[tuple[float, float]] = []
    for number in range(stretches):
        part = points[int(number * size) : int((number + 1) * size)]
        if not part:
            continue
        low = min(part, key=lambda point: point[1])
        high = max(part, key=lambda point: point[1])
        kept += sorted({low, high})
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept
