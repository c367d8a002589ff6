"""Measures a candidate and its floor side by side.

Machines are shared and clocks drift, so a rate by itself says little. Candidate and floor are run
in turns, round by round, in one process, and each round gives one ratio; the median of these is
what is reported, with the quartiles as its spread. Half of the rounds begin with the candidate
and half with the floor, so that neither always finds the warmer cache.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

import msgspec

from benchmarks.warming import Warming

if TYPE_CHECKING:
    from benchmarks.peers import Peer


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured elsewhere: work of another process, which has its own clock."""

    units: float
    cost: float  #: what ratios are made of, mostly the CPU time of a server
    seconds: float  #: what the figure is made of


#: Does a piece of work and returns how many units it was, or what was measured.
Work = Callable[[], int | Sample]


class NotAtHand(Exception):
    """Raised when a bench is prepared: what is compared with cannot be had here."""


class NoMoreRounds(Exception):
    """Raised by work that looks again at rounds that were made before: it has seen them all."""


LEAST_ROUNDS = 3


class Clock(Enum):
    """What is counted: CPU time leaves the neighbours of a shared machine out."""

    CPU = "CPU time"
    WALL = "wall time"
    #: The figure is a rate by wall time, the ratio one of CPU times; see `Sample`.
    SERVER = "CPU time of the servers"
    #: Likewise, of what runs a client.
    CLIENT = "CPU time of the clients"

    def read(self) -> float:
        return time.process_time() if self is Clock.CPU else time.perf_counter()


_FULL_WARMING = Warming(slot=1.0, least=10.0, longest=20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    rounds: int = 15
    round_seconds: float = 0.12  #: of the candidate, and as much of the floor
    megabytes: int = 192  #: size of the files that whole-file benches work on
    #: Wall time after which no further round of a bench begins, once there were its `least_rounds`:
    #: on a busy machine a second of CPU time may take many.
    patience: float = 15.0
    #: Wall time after which no further line begins: what is left then is said to be left out.
    longest: float = math.inf
    is_quick: bool = False  #: curves have fewer points, and the largest sizes are smaller
    #: Of peers in Java, on every path that is measured.
    warming: Warming = _FULL_WARMING
    #: Seconds of a round beside one, on each side: collecting garbage must not fill a whole round.
    java_round: float = 1.0

    @classmethod
    def quick(cls) -> Scale:
        return cls(
            rounds=7,
            round_seconds=0.06,
            megabytes=48,
            patience=3.0,
            longest=630.0,
            is_quick=True,
            warming=Warming(slot=0.4, least=2.0, longest=4.0),
            java_round=0.4,
        )


#: Sets everything up, yields the candidate and the floor, and cleans up.
Prepare = Callable[[Scale], AbstractContextManager[tuple[Work, Work]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One line of the table."""

    name: str
    room: str
    unit: str  #: of the figure: units a second, or time for a unit
    compared_with: str
    prepare: Prepare
    clock: Clock = Clock.CPU
    #: The figure is the time that so many units take; otherwise it is units in a second.
    time_for: float | None = None
    unit_factor: float = 1.0  #: by which the figure is multiplied to be in its unit
    target: float | None = None  #: the ratio must not be below
    least_figure: float | None = None  #: nor the figure below this, in its unit
    #: Done before each timed part and not counted: lets what the other side left behind settle.
    between: Callable[[], object] | None = None
    note: str = ""  #: what a reader must know to read the line rightly
    rounds: int | None = None  #: for work that takes long by itself
    #: Made whatever the scale's patience, where single rounds say little.
    least_rounds: int = LEAST_ROUNDS
    once_per_round: bool = False  #: one call is one round, without calibration
    #: What neighbouring benches share: entered before the first of them, left after the last.
    stage: AbstractContextManager[object] | None = None
    peer: Peer | None = None  #: what it is compared with, where that has to be fetched


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known about one line; the fields of `build/bench.json`."""

    name: str
    room: str
    figure: float | None
    unit: str
    compared_with: str
    ratio: float | None
    spread: tuple[float, float] | None
    clock: str = ""
    rounds: int = 0
    target: float | None = None
    least_figure: float | None = None
    ok: bool | None = None
    note: str = ""
    figures: tuple[float, ...] = ()  #: of every round
    floor_figures: tuple[float, ...] = ()  #: of what it is compared with: still rising, it was cold
    ratios: tuple[float, ...] = ()  #: likewise of every round

    @property
    def has_target(self) -> bool:
        return self.target is not None or self.least_figure is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """A comparison that people look for and that cannot be made here: named, not left out."""

    name: str
    room: str
    compared_with: str
    reason: str
    target: float | None = None
    least_figure: float | None = None

    def result(self) -> Result:
        return Result(
            name=self.name,
            room=self.room,
            figure=None,
            unit="",
            compared_with=self.compared_with,
            ratio=None,
            spread=None,
            target=self.target,
            least_figure=self.least_figure,
            note=f"not at hand: {self.reason}",
        )


def absence(bench: Bench, reason: str) -> Result:
    """The line of a bench whose peer is not here. Its target stays: it was not reached."""
    return Absent(
        name=bench.name,
        room=bench.room,
        compared_with=bench.compared_with,
        reason=reason,
        target=bench.target,
        least_figure=bench.least_figure,
    ).result()


def measure(bench: Bench, scale: Scale) -> Result:
    """Run one bench."""
    with bench.prepare(scale) as (candidate, floor):
        candidate_calls = floor_calls = 1
        if not bench.once_per_round:
            candidate_calls = _calls_for(candidate, bench.clock, scale.round_seconds)
            floor_calls = _calls_for(floor, bench.clock, scale.round_seconds)
        rates: list[float] = []
        floor_rates: list[float] = []
        ratios: list[float] = []
        began = time.perf_counter()
        for candidate_first in _order(bench.rounds or scale.rounds):
            if len(rates) >= bench.least_rounds and time.perf_counter() - began > scale.patience:
                break
            try:
                if candidate_first:
                    done = _timed(candidate, candidate_calls, bench)
                    floor_done = _timed(floor, floor_calls, bench)
                else:
                    floor_done = _timed(floor, floor_calls, bench)
                    done = _timed(candidate, candidate_calls, bench)
            except NoMoreRounds:
                break
            rates.append(done.units / done.seconds)
            floor_rates.append(floor_done.units / floor_done.seconds)
            ratios.append(done.units / done.cost / (floor_done.units / floor_done.cost))
    ratio = statistics.median(ratios)
    figure = _figure(bench, statistics.median(rates))
    return Result(
        name=bench.name,
        room=bench.room,
        figure=figure,
        unit=bench.unit,
        compared_with=bench.compared_with,
        ratio=ratio,
        spread=quartiles(ratios),
        clock=bench.clock.value,
        rounds=len(ratios),
        target=bench.target,
        least_figure=bench.least_figure,
        ok=_is_reached(bench, ratio, figure),
        note=bench.note,
        figures=tuple(_figure(bench, rate) for rate in rates),
        floor_figures=tuple(_figure(bench, rate) for rate in floor_rates),
        ratios=tuple(ratios),
    )


def _is_reached(bench: Bench, ratio: float, figure: float) -> bool | None:
    if bench.target is None and bench.least_figure is None:
        return None
    is_fast = bench.target is None or ratio >= bench.target
    return is_fast and (bench.least_figure is None or figure >= bench.least_figure)


def _figure(bench: Bench, rate: float) -> float:
    return bench.unit_factor * (rate if bench.time_for is None else bench.time_for / rate)


def _calls_for(work: Work, clock: Clock, seconds: float) -> int:
    """How often to call `work` so that it takes about `seconds`; warms it up as well."""
    work()
    calls = 1
    while True:
        began = clock.read()
        for _ in range(calls):
            work()
        taken = clock.read() - began
        if taken >= seconds / 4:
            return max(1, round(calls * seconds / taken))
        calls *= 4


def _timed(work: Work, calls: int, bench: Bench) -> Sample:
    clock = bench.clock
    gc.collect()
    if bench.between is not None:
        bench.between()
    units = 0
    began = clock.read()
    for _ in range(calls):
        done = work()
        if isinstance(done, Sample):
            return done
        units += done
    # A clock that did not move means less than its resolution.
    taken = max(clock.read() - began, 1e-9)
    return Sample(units, taken, taken)


def _order(rounds: int) -> Iterator[bool]:
    for number in range(rounds):
        yield number % 2 == 0


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Between which the middle half of the values lies."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


Verdict = Literal["ok", "not ok", ""]


def verdict(result: Result) -> Verdict:
    """Whether the target is met, in words."""
    if result.ok is None:
        return ""
    return "ok" if result.ok else "not ok"
