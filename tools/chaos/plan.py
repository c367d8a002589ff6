"""How a run spends its time.

Every part says how long it takes at a scale: 1 is a run of the usual length, and no part goes below
the least that still says something. Before each part the largest scale is taken with which all that
are left end in time, so that what took longer than it said makes the later parts shorter, and not
the run longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.chaos.figures import Figure

#: Halvings of an interval; enough for three digits of any scale.
_STEPS = 24


@dataclass(frozen=True, slots=True)
class Part:
    """A scenario or a suite, ready to be run."""

    name: str
    rows: str
    about: str
    is_extra: bool
    seconds: Callable[[float], float]  #: that it takes at a scale, about
    run: Callable[[Path, float], list[Figure]]  #: in a folder, at a scale


def scale_for(parts: Sequence[Part], seconds: float, most: float) -> float:
    """The largest scale, `most` at most, with which the parts take so long; 0 when none does."""
    if taken(parts, most) <= seconds:
        return most
    low, high = 0.0, most
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if taken(parts, middle) <= seconds:
            low = middle
        else:
            high = middle
    return low


def taken(parts: Sequence[Part], scale: float) -> float:
    """Seconds that they take at a scale, about."""
    return sum(part.seconds(scale) for part in parts)
