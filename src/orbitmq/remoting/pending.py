"""Requests of ours that wait for an answer, each with a deadline.

Every request leaves in exactly one way: answered, late, given up by its sender, or lost with the
connection. One timer serves them all. It is set for the earliest deadline; deadlines of requests
that were answered meanwhile stay in the heap and are thrown away when they make up most of it, so
that an answer costs one lookup and nothing else.

Everything happens on the loop, with one exception: threads that block have a table of their own, to
which they add their requests and from which they give them up. They watch their own deadlines, and
whoever reads answers them, be it the loop or one of them. A thread is told before its request
leaves the table: one that is interrupted between the two leaves nobody behind who waits and is not
known any more.

There is no lock, for which the loop might have to wait while a signal handler holds a thread up. At
the end of the connection the loop first notes that it has ended, then fails what is in the table; a
thread first enters its request into the table, then looks whether the connection has ended. So one
of the two sees the other, and if both do, the thread hears the same twice. Several threads at once
may exceed the limit, by one request each.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from orbitmq.remoting.address import Address
from orbitmq.remoting.errors import (
    ConnectionLost,
    RemotingError,
    RequestTimedOut,
    TooManyRequests,
)
from orbitmq.remoting.waiter import Waiter
from orbitmq.wire.command import Command

log = logging.getLogger(__name__)

#: Gets the answer, or why there is none. Called once, on the loop.
Outcome: TypeAlias = Callable[[Command | RemotingError], None]
#: Is told for how long an answer was waited for in vain; on the loop.
Late: TypeAlias = Callable[[float], None]

#: Below this many entries a heap is not worth cleaning.
_SMALL_HEAP = 256


class _Waiting(msgspec.Struct, frozen=True, eq=False):
    outcome: Outcome
    code: int
    timeout: float


class PendingRequests:
    """The requests of one connection that are on their way."""

    __slots__ = (
        "_deadlines",
        "_limit",
        "_loop",
        "_lost_by",
        "_on_late",
        "_remote",
        "_threads",
        "_timer",
        "_timer_at",
        "_waiting",
        "has_answered_thread",
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
        self._timer_at = 0.0
        self._threads: dict[int, Waiter] = {}
        #: Whether the loop has answered a thread; reset by whoever wants to know.
        self.has_answered_thread = False
        #: Why the connection ended, once it has.
        self._lost_by: str | None = None

    def __len__(self) -> int:
        return len(self._waiting) + len(self._threads)

    @property
    def has_own(self) -> bool:
        """Whether anything on the loop waits for an answer."""
        return bool(self._waiting)

    @property
    def has_threads(self) -> bool:
        """Whether any thread waits for an answer. Called by any thread."""
        return bool(self._threads)

    def check_room(self) -> int:
        """How many wait. Raises `TooManyRequests` when there is no room for another one."""
        count = len(self._waiting) + len(self._threads)
        if count >= self._limit:
            raise TooManyRequests(self._remote, self._limit)
        return count

    def add(self, opaque: int, code: int, timeout: float, outcome: Outcome) -> None:
        """Wait for the answer to `opaque`, for which there is room."""
        self._waiting[opaque] = _Waiting(outcome, code, timeout)
        deadline = self._loop.time() + timeout
        heapq.heappush(self._deadlines, (deadline, opaque))
        if self._timer is None or deadline < self._timer_at:
            self._set_timer()
        elif len(self._deadlines) > _SMALL_HEAP + 2 * len(self._waiting):
            self._forget_answered()

    def answer(self, answer: Command) -> bool:
        """Hand an answer to whoever waits for it; False when nobody does, not or no longer."""
        waiting = self._waiting.pop(answer.opaque, None)
        if waiting is None:
            self.has_answered_thread = is_known = self.answer_thread(answer)
            return is_known
        try:
            waiting.outcome(answer)
        except Exception:
            log.exception("a callback failed on an answer", extra={"code": waiting.code})
        return True

    def give_up(self, opaque: int) -> None:
        """Nobody waits for this answer any more."""
        self._waiting.pop(opaque, None)

    def forget_own(self) -> None:
        """The loop is about to end, and with it whatever waits there: nobody is told anything."""
        self._waiting.clear()

    # Threads

    def add_thread(self, opaque: int, waiter: Waiter) -> None:
        """Let a thread wait for the answer to `opaque`, without a deadline kept here.

        Called by any thread. Raises `TooManyRequests`, or `ConnectionLost` when the connection has
        ended.
        """
        if len(self._waiting) + len(self._threads) >= self._limit and self._lost_by is None:
            raise TooManyRequests(self._remote, self._limit)
        self._threads[opaque] = waiter
        # Not before: see the head of the module.
        if self._lost_by is not None:
            self._threads.pop(opaque, None)
            raise ConnectionLost(self._remote, self._lost_by)

    def answer_thread(self, answer: Command) -> bool:
        """Hand an answer to the thread that waits for it; False when none does. By any thread."""
        waiter = self._threads.get(answer.opaque)
        if waiter is None:
            return False
        waiter.settle(answer)
        self._threads.pop(answer.opaque, None)
        return True

    def is_own(self, opaque: int) -> bool:
        """Whether anything on the loop waits for this answer. Called by any thread."""
        return opaque in self._waiting

    def give_up_thread(self, opaque: int) -> None:
        """A thread does not wait any more. Called by itself."""
        self._threads.pop(opaque, None)

    def last_thread(self) -> Waiter | None:
        """The thread that came last of those that wait. Called by any thread."""
        if not self._threads:
            return None
        waiters = self._all_threads()
        return waiters[-1] if waiters else None

    def _all_threads(self) -> list[Waiter]:
        # A list: it is there before the iterator is. A tuple is made after that, which may begin a
        # collection of garbage, and let another thread change the table meanwhile.
        return list(self._threads.values())

    def fail_all(self, reason: str) -> None:
        """The connection ended: nothing will be answered."""
        # First this: a thread that does not find it has put its request where it is found now.
        self._lost_by = reason
        waiting, self._waiting = self._waiting, {}
        threads = self._all_threads()
        self._threads.clear()
        self._deadlines.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for each in waiting.values():
            # Each in a step of its own: one that fails must not keep the others waiting.
            self._loop.call_soon(each.outcome, ConnectionLost(self._remote, reason))
        for waiter in threads:
            waiter.settle(ConnectionLost(self._remote, reason))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._deadlines[0][0]
        self._timer = self._loop.call_at(self._timer_at, self._expire)

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
