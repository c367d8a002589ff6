"""Pulls that found no room among those who wait: answered a little later, not at once.

An empty answer makes most clients ask again at once, Apache's Java client among them, and whoever
is turned away would go round as fast as the network does. So the answer comes after a second or
so. Meanwhile the pull is an entry in one line with one timer: nobody looks whether something
arrives for it, and it is processed from the first check on when its time is up.

The line has a bound, and so has the part of it that one connection may take, which is also a bound
on how many such answers are given in a second. A pull that does not even find room here is told
that the broker is busy (`SystemBusy`): Java's push consumer then waits for three seconds, its lite
pull consumer for one. (FLOW_CONTROL would be the better word, but with it both wait for 20 ms.)
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterator

from orbitmq.broker.heldpull import HeldPull
from orbitmq.broker.slices import Slices
from orbitmq.remoting.connection import Connection

#: Below this many entries a line is not worth cleaning.
_SMALL_LINE = 256


class PutOff:
    """The line of those who are answered a little later."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        slices: Slices,
        answer: Callable[[HeldPull], None],
        *,
        limit: int,
        limit_of_one: int,
    ) -> None:
        #: How many may be in the line, and how many of one connection; who is in it already stays.
        self.limit = limit
        self.limit_of_one = limit_of_one
        self._loop = loop
        self._slices = slices
        self._answer = answer
        #: Those of each connection, and what they weigh together.
        self._of: dict[Connection, dict[HeldPull, None]] = {}
        self._weights: dict[Connection, int] = {}
        self._weight = 0
        self._count = 0
        self._line: list[tuple[float, int, HeldPull]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._is_answering = False

    def __len__(self) -> int:
        return self._count

    def add(self, pull: HeldPull, until: float) -> bool:
        """Have a pull answered at this time of the loop; False when there is no room."""
        weight = self._weights.get(pull.connection, 0) + pull.weight
        if weight > self.limit_of_one or self._weight + pull.weight > self.limit:
            return False
        pull.is_put_off = True
        self._weights[pull.connection] = weight
        self._of.setdefault(pull.connection, {})[pull] = None
        self._weight += pull.weight
        self._count += 1
        heapq.heappush(self._line, (until, next(self._order), pull))
        self._set_timer()
        return True

    def forget(self, connection: Connection) -> None:
        """A connection was closed: nobody is there to be answered."""
        for pull in tuple(self._of.get(connection, ())):
            self._remove(pull)
        if len(self._line) > _SMALL_LINE + 2 * self._count:
            self._line = [entry for entry in self._line if entry[2].is_put_off]
            heapq.heapify(self._line)

    def finish(self) -> None:
        """Answer everybody now, in slices."""
        self._line = [(0.0, number, pull) for _, number, pull in self._line]
        heapq.heapify(self._line)
        self._begin()

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._is_answering:
            self._is_answering = True
            self._slices.begin(self._answering())

    def _answering(self) -> Iterator[None]:
        try:
            while self._line and self._line[0][0] <= self._loop.time():
                _, _, pull = heapq.heappop(self._line)
                # Those whose connection was closed may still be in the line.
                if pull.is_put_off:
                    self._remove(pull)
                    self._answer(pull)
                yield
        finally:
            self._is_answering = False
        self._set_timer()

    def _set_timer(self) -> None:
        if self._is_answering or not self._line:
            return
        when = self._line[0][0]
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._due)

    def _due(self) -> None:
        self._timer = None
        self._begin()

    def _remove(self, pull: HeldPull) -> None:
        pull.is_put_off = False
        connection = pull.connection
        self._count -= 1
        self._weight -= pull.weight
        self._weights[connection] -= pull.weight
        mine = self._of[connection]
        del mine[pull]
        if not mine:
            del self._of[connection], self._weights[connection]
