"""Long loops in slices, so that nobody else has to wait for their end.

A loop over everybody who waits for something is short nearly always, and then it is best done at
once. Sometimes it has a hundred thousand rounds. So a loop is a generator that yields after every
round: its first rounds are done at once, the rest in later steps of the event loop, one slice of
one loop in each step. Loops take turns; a short one that comes later does not wait behind.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

#: How long a slice may take. Whoever else is there waits for so long, and half as much again.
SLICE_SECONDS = 0.005
#: Rounds between two looks at the clock.
_ROUNDS = 16


class Slices:
    """The loops of one broker that are not done yet."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        at_once: int,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """`before` is called before every slice but the first ones."""
        self.at_once = at_once
        self._loop = loop
        self._before = before
        self._unfinished: deque[Iterator[None]] = deque()

    def __len__(self) -> int:
        return len(self._unfinished)

    def begin(self, rounds: Iterator[None], *, is_late: bool = False) -> None:
        """Do the first rounds now, unless enough was done (`is_late`), and what is left soon."""
        if is_late or _has_more(rounds, self.at_once):
            self._unfinished.append(rounds)
            if len(self._unfinished) == 1:
                self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._before()
        rounds = self._unfinished[0]
        end = self._loop.time() + SLICE_SECONDS
        try:
            has_more = _has_more(rounds, _ROUNDS)
            while has_more and self._loop.time() < end:
                has_more = _has_more(rounds, _ROUNDS)
        except Exception:
            log.exception("a loop in slices failed")
            has_more = False
        self._unfinished.popleft()
        if has_more:
            self._unfinished.append(rounds)
        if self._unfinished:
            self._loop.call_soon(self._step)


def _has_more(rounds: Iterator[None], most: int) -> bool:
    """Do up to so many rounds; whether there may be more."""
    done = sum(1 for _ in itertools.islice(rounds, most))
    return done == most
