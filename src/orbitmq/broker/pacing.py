"""Bounded work per turn, so that reading a long backlog does not hold up what is live.

Sending a mebibyte of old messages takes longer than storing and delivering dozens of new ones, and
a consumer that replays a topic asks for many at once. So each turn may send so many bytes of
pulled messages. The pulls beyond wait, each connection's in their order, and the connections get
turns in rotation after whatever else is ready by then: somebody at the tail never waits behind
what somebody else has asked for. An empty answer counts as well, so that a turn ends after
`CALLS` of them, and so do messages that a filter had to look into: that takes a hundred times as
long as sending them. `JUDGEMENTS` of them make a turn, as does an expression that has to be
compiled, and a step of the loop has only one such turn (`is_judging`), whoever asks: what is due
otherwise waits for one of them at most.

A connection that does not take what it was sent gets no turns until it does. What it asked for
costs little while it waits here; answered, it would lie in memory until the connection had to be
given up, although its peer is merely slower than our disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from orbitmq.filter.subscription import MessageFilter
from orbitmq.remoting.connection import Connection

log = logging.getLogger(__name__)


#: Answers that a turn may give, however small they are.
CALLS = 256
#: Messages that a turn may look into for a filter by properties, unless its expression is longer
#: than so many characters: less than a millisecond.
JUDGEMENTS = 64
_SHORT_EXPRESSION = 256


def judgements(wanted: MessageFilter) -> int:
    """How many messages a turn may look into for a filter: the longer it is, the fewer."""
    if not wanted.needs_properties:
        return JUDGEMENTS
    length = max(_SHORT_EXPRESSION, len(getattr(wanted, "text", "")))
    return max(1, JUDGEMENTS * _SHORT_EXPRESSION // length)


class Pacing:
    """How much of the current turn is used up, and what waits for a later one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.limit = limit
        #: Bytes sent by pulls in this turn; whoever begins a turn sets it to 0.
        self.spent = 0
        #: Whether messages were looked into in this step, or an expression compiled: further
        #: filters wait for the next.
        self.is_judging = False
        self._loop = loop
        self._waiting: dict[Connection, deque[Callable[[], None]]] = {}
        #: What waits for connections that are slow.
        self._stalled: dict[Connection, deque[Callable[[], None]]] = {}
        self._is_scheduled = False

    def __len__(self) -> int:
        lines = (*self._waiting.values(), *self._stalled.values())
        return sum(len(calls) for calls in lines)

    @property
    def least(self) -> int:
        """What an answer counts for even if it is empty."""
        return self.limit // CALLS

    def must_wait(self, connection: Connection) -> bool:
        """Whether further work for a connection has to wait for a turn of its own."""
        return (
            self.spent >= self.limit
            or connection.is_slow
            or (bool(self._waiting) and connection in self._waiting)
        )

    def later(
        self, connection: Connection, call: Callable[[], None], *, after: float = 0.0
    ) -> None:
        """Have `call` called in a later turn, after what waits for the same connection.

        `after` is how many seconds later at the soonest.
        """
        if after > 0:
            self._loop.call_later(after, self.later, connection, call)
            return
        calls = self._stalled.get(connection)
        if calls is not None:
            calls.append(call)
            return
        calls = self._waiting.get(connection)
        if calls is None:
            calls = self._waiting[connection] = deque()
        calls.append(call)
        self._schedule()

    def judged(self, messages: int, most: int = JUDGEMENTS) -> None:
        """A filter has looked into so many messages of those that a turn may look into."""
        self.spent += messages * (self.limit // most)
        self._begin_judging()

    def compiled(self) -> None:
        """An expression was compiled, which takes longer than all that a turn may do."""
        self.spent += self.limit
        self._begin_judging()

    def _begin_judging(self) -> None:
        if not self.is_judging:
            self.is_judging = True
            self._loop.call_soon(self._end_judging)

    def forget(self, connection: Connection) -> None:
        """A connection was closed: what it asked for is not needed any more."""
        self._waiting.pop(connection, None)
        self._stalled.pop(connection, None)

    def _end_judging(self) -> None:
        self.is_judging = False

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _resume(self, connection: Connection) -> None:
        """A connection is no longer slow: it takes part again."""
        calls = self._stalled.pop(connection, None)
        if calls:
            self._waiting[connection] = calls
            self._schedule()

    def _turn(self) -> None:
        self._is_scheduled = False
        if not self._waiting:
            return
        connection = next(iter(self._waiting))
        calls = self._waiting.pop(connection)
        self.spent = 0
        least = self.least
        while calls and self.spent < self.limit and not connection.is_slow:
            call = calls.popleft()
            self.spent += least
            try:
                call()
            except Exception:
                log.exception("work that waited for its turn failed")
        if calls:
            # To the end of the line, with whatever was added meanwhile.
            calls.extend(self._waiting.pop(connection, ()))
            if connection.is_slow:
                self._stalled[connection] = calls
                connection.when_quick(self._resume)
            else:
                self._waiting[connection] = calls
        if self._waiting:
            self._schedule()
