"""What can be asked of a busy machine about time: what something took at best.

Neighbours on the machine, other threads and the collector of garbage make one try longer than the
work needs, never shorter. So the shortest of several tries is what says something of the code, and
one that was short enough is all the proof there is to have.
"""

from __future__ import annotations

from collections.abc import Callable

#: So many in a row are not all disturbed.
TRIES = 10


def shortest_of(attempt: Callable[[], float], enough: float, tries: int = TRIES) -> float:
    """The least time that an attempt took; the first that took less than is enough is the last."""
    least = attempt()
    for _ in range(tries - 1):
        if least < enough:
            break
        least = min(least, attempt())
    return least
