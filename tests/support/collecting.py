"""Garbage that is collected in the middle of something.

Until Python 3.12 the collector runs whenever something is allocated, also within what is a single
call of the interpreter otherwise. What it finalises may let other threads in.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sized

#: So many entries make a table whose copy is allocated: short tuples are used again.
_MANY = 40
#: More than what any call that is tested so allocates before it is done.
_PLACES = 40


class _Garbage:
    """Does something when it is collected, and is not found before: it keeps itself."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._own = self

    def __del__(self) -> None:
        self._work()


def wherever_garbage_is_collected(
    call: Callable[[], object], meanwhile: Callable[[], object], entries: Sized
) -> int:
    """Make the call again and again, `meanwhile` at another point of it each time.

    There are many entries before each call: `meanwhile` adds one. Returns how often there was such
    a point.
    """
    before, done, is_calling = gc.get_threshold(), 0, False

    def note() -> None:
        nonlocal done
        done += is_calling
        meanwhile()

    gc.disable()
    try:
        for place in range(_PLACES):
            while len(entries) < _MANY:
                meanwhile()
            gc.collect(0)
            _Garbage(note)
            gc.set_threshold(gc.get_count()[0] + place, 1_000_000, 1_000_000)
            is_calling = True
            gc.enable()
            try:
                call()
            finally:
                gc.disable()
                is_calling = False
    finally:
        gc.set_threshold(*before)
        gc.enable()
    return done
