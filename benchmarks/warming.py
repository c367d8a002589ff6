"""Lets a peer get as fast as it gets before it is measured.

Java interprets code at first and compiles what runs often, in threads whose CPU time is the
process's: beside a peer that has just begun, anybody looks fast and cheap. So a peer works under
the very load of its line, slot after slot, until it gets no more done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

#: Slots that have to bring nothing new, and how much faster they would be if they did.
_SLOTS = 5
_RISE = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Warming:
    """How long, in seconds of wall time."""

    slot: float
    least: float
    longest: float


def warm_up(
    slot: Callable[[], float],
    warming: Warming,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Call `slot`, which says how much it got done, until that has stopped rising; what it said."""
    began = clock()
    rates: list[float] = []
    while (taken := clock() - began) < warming.longest:
        if taken >= warming.least and _has_stopped_rising(rates):
            break
        rates.append(slot())
    return rates


def _has_stopped_rising(rates: list[float]) -> bool:
    """Whether the last slots were no faster than the best before, but for what rounds differ by.

    Slots that are all alike would be asked for in vain where others use the machine as well.
    """
    if len(rates) <= _SLOTS:
        return False
    return max(rates[-_SLOTS:]) <= _RISE * max(rates[:-_SLOTS])
