"""Requests of ours that wait for an answer, each with a deadline.

Every request leaves in exactly one way: answered, late, given up by its sender, or lost with the
connection. One timer serves them all. It is set for the earliest deadline; deadlines of requests
that were answered meanwhile stay in the heap and are thrown away when they make up most of it, so
that an answer costs one lookup and nothing else.

Everything happens on the loop, with one exception: threads that block may add requests of their
own, and give them up. They watch their own deadlines. The lock is there for one moment, the end of
the connection: a request is either failed with all others, or its thread is told at once.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from orbitmq.remoting.address import Address
from orbitmq.remoting.errors import (
    ConnectionLost,
    RemotingError,
    RequestTimedOut,
    TooManyRequests,
)
from orbitmq.wire.command import Command

log = logging.getLogger(__name__)

#: Gets the answer, or why there is none. Called once, on the loop.
Outcome: TypeAlias = Callable[[Command | RemotingError], None]
#: Is told for how long an answer was waited for in vain; on the loop.
Late: TypeAlias = Callable[[float], None]

#: Below this many entries a heap is not worth cleaning.
_SMALL_HEAP = 256


class _Waiting(NamedTuple):
    outcome: Outcome
    code: int
    timeout: float


class PendingRequests:
    """The requests of one connection that are on their way."""

    __slots__ = (
        "_deadlines",
        "_limit",
        "_lock",
        "_loop",
        "_lost_by",
        "_on_late",
        "_remote",
        "_timer",
        "_waiting",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        remote: Address,
        limit: int,
        on_late: Late | None = None,
    ) -> None:
        self._loop = loop
        self._on_late = on_late
        self._remote = remote
        self._limit = limit
        self._waiting: dict[int, _Waiting] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()
        #: Why the connection ended, once it has.
        self._lost_by: str | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, opaque: int, code: int, timeout: float, outcome: Outcome) -> None:
        """Wait for the answer to `opaque`. Raises `TooManyRequests`."""
        if len(self._waiting) >= self._limit:
            raise TooManyRequests(self._remote, self._limit)
        self._waiting[opaque] = _Waiting(outcome, code, timeout)
        deadline = self._loop.time() + timeout
        heapq.heappush(self._deadlines, (deadline, opaque))
        if self._timer is None or deadline < self._timer.when():
            self._set_timer()
        elif len(self._deadlines) > _SMALL_HEAP + 2 * len(self._waiting):
            self._forget_answered()

    def add_from_thread(self, opaque: int, code: int, timeout: float, outcome: Outcome) -> None:
        """Wait for the answer to `opaque` without a deadline kept here; called by any thread.

        Raises `TooManyRequests`, or `ConnectionLost` when the connection has ended.
        """
        with self._lock:
            if self._lost_by is not None:
                raise ConnectionLost(self._remote, self._lost_by)
            if len(self._waiting) >= self._limit:
                raise TooManyRequests(self._remote, self._limit)
            self._waiting[opaque] = _Waiting(outcome, code, timeout)

    def answer(self, answer: Command) -> bool:
        """Hand an answer to whoever waits for it; False when nobody does, not or no longer."""
        waiting = self._waiting.pop(answer.opaque, None)
        if waiting is None:
            return False
        _tell(waiting, answer)
        return True

    def give_up(self, opaque: int) -> bool:
        """Nobody waits for this answer any more; False when nobody did. Called by any thread."""
        return self._waiting.pop(opaque, None) is not None

    def fail_all(self, reason: str) -> None:
        """The connection ended: nothing will be answered."""
        with self._lock:
            self._lost_by = reason
            waiting, self._waiting = self._waiting, {}
        self._deadlines.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for each in waiting.values():
            # Each in a step of its own: one that fails must not keep the others waiting.
            self._loop.call_soon(each.outcome, ConnectionLost(self._remote, reason))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadlines[0][0], self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._forget_answered()
        now = self._loop.time()
        waited = 0.0
        while self._deadlines and self._deadlines[0][0] <= now:
            _, opaque = heapq.heappop(self._deadlines)
            late = self._waiting.pop(opaque, None)
            if late is not None:
                waited = max(waited, late.timeout)
                _tell(late, RequestTimedOut(self._remote, late.code, late.timeout))
        if self._deadlines:
            self._set_timer()
        if waited and self._on_late is not None:
            self._on_late(waited)

    def _forget_answered(self) -> None:
        waiting = self._waiting
        self._deadlines = [entry for entry in self._deadlines if entry[1] in waiting]
        heapq.heapify(self._deadlines)


def _tell(waiting: _Waiting, outcome: Command | RemotingError) -> None:
    """Hand the outcome over; a callback that fails must not take the rest of the turn with it."""
    try:
        waiting.outcome(outcome)
    except Exception:
        log.exception("a callback failed on an answer", extra={"code": waiting.code})


def settling(answered: asyncio.Future[Command]) -> Outcome:
    """Brings what becomes of a request into a future."""

    def settle(outcome: Command | RemotingError) -> None:
        if answered.done():
            return
        if isinstance(outcome, Command):
            answered.set_result(outcome)
        else:
            answered.set_exception(outcome)

    return settle
