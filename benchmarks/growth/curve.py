"""A curve: the cost of one message at several sizes of something, and whether it stays flat.

All sizes are visited in every round, forwards and backwards in turn, so that a machine that gets
busier bends no curve. Ratios are made inside of a round and their median is reported.

    growth     the cost at the last size relative to that at the first
    rise       the cost at the worst size relative to that at the cheapest size before it: a valley
               in the middle of a curve hides nothing
    exponent   of the power law that fits best; 0 is flat, 1 is proportional to the size

A rise of up to a quarter counts as flat: rounds on a shared machine differ by as much. More than
that needs an `Allowance`: the reason in words, and what the reason explains. That is a rise up to a
limit, or one in proportion to the size (bytes have to be copied), in which case the cost of a byte
is judged instead. A curve that rises further, or without a reason, is not ok. Nor is a rate that is
there to be multiplied (`least_gain`) and is not: to stay flat is no gain.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from benchmarks.runner import LEAST_ROUNDS, Scale, quartiles

FLAT = 1.25
_ROUNDS = 7
#: A round visits many sizes: somewhat more time than a bench has for its two sides.
_PATIENCE = 1.3

#: Measures the cost of a message at one size.
Probe: TypeAlias = Callable[[int], float]

Verdict: TypeAlias = Literal["flat", "falls", "rises for a reason", "rises", "gains too little"]


@dataclass(frozen=True, slots=True)
class Allowance:
    """Why a curve may rise, and how far the reason reaches."""

    reason: str
    rise: float | None = None  #: None: in proportion to the size
    rise_per_size: float = FLAT  #: in that case, of the cost divided by the size

    def covers(self, growth: Growth) -> bool:
        if self.rise is None:
            return growth.rise_per_size <= self.rise_per_size
        return growth.rise <= self.rise


@dataclass(frozen=True, slots=True)
class Probes:
    """What is measured, and the least that anybody would need for the same, where that says why."""

    ours: Probe
    floor: Probe | None = None


#: Sets everything up for some sizes, yields what measures, and cleans up.
Prepare: TypeAlias = Callable[[Scale, Sequence[int]], AbstractContextManager[Probes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of one plot."""

    name: str
    axis: str  #: what grows
    sizes: tuple[int, ...]
    prepare: Prepare
    unit: str = "µs of CPU"  #: of the cost of one message
    #: Shown as messages a second, and judged by the time that one takes.
    is_rate: bool = False
    least_gain: float | None = None  #: of a rate: the last must be so many times the first
    floor: str = ""
    allowance: Allowance | None = None
    note: str = ""  #: what a reader must know about the load
    quick_sizes: tuple[int, ...] = ()  #: otherwise the first, the middle and the last
    stage: AbstractContextManager[object] | None = None

    def sizes_for(self, scale: Scale) -> tuple[int, ...]:
        sizes = self.sizes
        if not scale.is_quick:
            return sizes
        if self.quick_sizes or len(sizes) <= 3:
            return self.quick_sizes or sizes
        return sizes[0], sizes[len(sizes) // 2], sizes[-1]

    def dropped_for(self, scale: Scale) -> tuple[int, ...]:
        """Sizes that are left to a full run."""
        kept = self.sizes_for(scale)
        return tuple(size for size in self.sizes if size not in kept)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One size, and what was measured there round by round."""

    size: int
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        return quartiles(self.values)


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """How a cost changes along a curve."""

    last_to_first: float
    spread: tuple[float, float]
    rise: float
    risen: tuple[int, int]  #: the sizes between which it rises most
    rise_per_size: float  #: the same of the cost divided by the size: 1 when in proportion or less
    exponent: float


class Grown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known about one curve; the `curves` of `build/bench.json`."""

    name: str
    axis: str
    unit: str
    points: tuple[Point, ...]
    growth: Growth
    verdict: Verdict
    ok: bool
    is_rate: bool = False
    least_gain: float | None = None
    floor: str = ""
    floor_points: tuple[Point, ...] = ()
    floor_growth: Growth | None = None
    reason: str = ""
    limit: str = ""  #: how far it may rise, in words
    note: str = ""


def measure_curve(curve: Curve, scale: Scale) -> Grown:
    """Visit every size in every round."""
    sizes = curve.sizes_for(scale)
    ours: dict[int, list[float]] = {size: [] for size in sizes}
    floor: dict[int, list[float]] = {size: [] for size in sizes}
    with curve.prepare(scale, sizes) as probes:
        sides = [(probes.ours, ours)]
        if probes.floor is not None:
            sides.append((probes.floor, floor))
        for size in sizes:
            for probe, _ in sides:
                probe(size)  # warms both up
        began = time.perf_counter()
        for number in range(min(LEAST_ROUNDS if scale.is_quick else _ROUNDS, scale.rounds)):
            if number >= LEAST_ROUNDS and (
                time.perf_counter() - began > _PATIENCE * scale.patience
            ):
                break
            for size in sizes if number % 2 == 0 else reversed(sizes):
                for probe, values in sides:
                    values[size].append(probe(size))
    return grown(curve, _points(ours), _points(floor) if len(sides) > 1 else ())


def _points(measured: dict[int, list[float]]) -> tuple[Point, ...]:
    return tuple(Point(size=size, values=tuple(values)) for size, values in measured.items())


def grown(curve: Curve, points: tuple[Point, ...], floor_points: tuple[Point, ...] = ()) -> Grown:
    """The judgement on what was measured."""
    growth = growth_of(points, is_rate=curve.is_rate)
    allowance = curve.allowance
    verdict = judge(growth, allowance, curve.least_gain)
    return Grown(
        name=curve.name,
        axis=curve.axis,
        unit=curve.unit,
        points=points,
        growth=growth,
        verdict=verdict,
        ok=verdict not in ("rises", "gains too little"),
        is_rate=curve.is_rate,
        least_gain=curve.least_gain,
        floor=curve.floor if floor_points else "",
        floor_points=floor_points,
        floor_growth=growth_of(floor_points, is_rate=curve.is_rate) if floor_points else None,
        reason=allowance.reason if allowance is not None else "",
        limit=_limit(allowance),
        note=curve.note,
    )


def growth_of(points: Sequence[Point], *, is_rate: bool = False) -> Growth:
    costs = [[1 / value if is_rate else value for value in point.values] for point in points]
    ratios = _ratios(costs[0], costs[-1])
    medians = [statistics.median(row) for row in costs]
    rise, low, high = _rise(costs)
    per_size = [
        [cost / point.size for cost in row]
        for point, row in zip(points, costs, strict=True)
        if point.size
    ]
    return Growth(
        last_to_first=statistics.median(ratios),
        spread=quartiles(ratios),
        rise=rise,
        risen=(points[low].size, points[high].size),
        rise_per_size=_rise(per_size)[0],
        exponent=_exponent([point.size for point in points], medians),
    )


def judge(growth: Growth, allowance: Allowance | None, least_gain: float | None = None) -> Verdict:
    if least_gain is not None and 1 / growth.last_to_first < least_gain:
        return "gains too little"
    if growth.rise <= FLAT:
        return "falls" if growth.last_to_first < 1 / FLAT else "flat"
    if allowance is not None and allowance.covers(growth):
        return "rises for a reason"
    return "rises"


def _limit(allowance: Allowance | None) -> str:
    if allowance is None:
        return f"{FLAT:g} times"
    if allowance.rise is None:
        return f"{allowance.rise_per_size:g} times for the same number of bytes"
    return f"{allowance.rise:g} times"


def _ratios(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Round by round."""
    return [late / early for early, late in zip(before, after, strict=True)]


def _rise(costs: Sequence[Sequence[float]]) -> tuple[float, int, int]:
    """The most that the cost rises between two places, one before the other, and the two places."""
    medians = [statistics.median(row) for row in costs]
    start, end, low = 0, 0, 0
    for here, cost in enumerate(medians):
        if cost <= medians[low]:
            low = here
        elif cost / medians[low] > medians[end] / medians[start]:
            start, end = low, here
    return max(1.0, statistics.median(_ratios(costs[start], costs[end]))), start, end


def _exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of the line through the logarithms; a size of 0 has none."""
    pairs = [
        (math.log(size), math.log(cost))
        for size, cost in zip(sizes, costs, strict=True)
        if size > 0
    ]
    if len(pairs) < 2:
        return 0.0
    return statistics.linear_regression([x for x, _ in pairs], [y for _, y in pairs]).slope
