"""Requests of threads that block until they are answered.

The thread notes that it waits, writes its request to the socket, and reads until the answer is
there, or sleeps while another thread or the loop reads. Its deadline is its own: the thread wakes
by itself, so no timer of the loop has to be set from outside. Threads that keep meeting each other
there get sockets of their own (`lanes`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from orbitmq.remoting.errors import ConnectionLost, RequestTimedOut
from orbitmq.remoting.lanes import Lanes, Late
from orbitmq.remoting.pending import PendingRequests
from orbitmq.remoting.sharedreading import SharedReading
from orbitmq.remoting.sharedsocket import SharedSocket
from orbitmq.remoting.waiter import Waiter
from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes

if TYPE_CHECKING:
    from orbitmq.remoting.connection import Connection

#: Makes the pieces of a request's frame, given its opaque.
Encode: TypeAlias = Callable[[int], Sequence[Bytes]]


class BlockingSide:
    """What threads may do with a connection; get it with `Connection.for_threads`."""

    __slots__ = (
        "_lanes",
        "_monotonic",
        "_opaques",
        "_pending",
        "_reading",
        "_socket",
        "connection",
    )

    def __init__(
        self,
        connection: Connection,
        shared: SharedSocket,
        reading: SharedReading | None,
        pending: PendingRequests,
        opaques: Iterator[int],
        lanes: Lanes | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `reading` the loop reads for threads, without `lanes` all share one socket."""
        self.connection = connection
        self._socket = shared
        self._reading = reading
        self._lanes = lanes
        self._pending = pending
        self._opaques = opaques
        self._monotonic = monotonic

    @property
    def is_open(self) -> bool:
        return self.connection.is_open

    def ask(self, code: int, encode: Encode, timeout: float) -> Command:
        """Ask the peer and block until it answers. Not to be called on the loop's own thread.

        Raises what `Connection.request` raises, and what `encode` does.
        """
        now = self._monotonic()
        deadline = now + timeout
        opaque = next(self._opaques) & 0x7FFFFFFF
        pieces = encode(opaque)
        if self._lanes is not None:
            answer = self._ask_on_lane(self._lanes, code, opaque, pieces, now, timeout)
            if answer is not None:
                return answer
        waiter = Waiter()
        try:
            self._pending.add_thread(opaque, waiter)
            broken = self._socket.write(pieces)
            if broken is not None:
                self._end_with(broken)
            if self._reading is None:
                self._sleep(waiter, deadline)
            else:
                self._reading.wait(waiter, deadline)
            if waiter.outcome is None:
                self._was_late(opaque, waiter, timeout)
        except BaseException:
            # Also a KeyboardInterrupt: nobody waits for this answer any more.
            self._leave(opaque, waiter)
            raise
        outcome = waiter.outcome
        if isinstance(outcome, Command):
            return outcome
        raise outcome or RequestTimedOut(self.connection.remote, code, timeout)

    def _ask_on_lane(
        self,
        lanes: Lanes,
        code: int,
        opaque: int,
        pieces: Sequence[Bytes],
        now: float,
        timeout: float,
    ) -> Command | None:
        """The answer; None, with nothing sent, when it is a case for the shared socket."""
        connection = self.connection
        try:
            answer = lanes.ask(
                opaque, pieces, now, now + timeout, is_crowded=self._pending.has_threads
            )
        except Late:
            connection.was_late_from_thread(timeout)
            raise RequestTimedOut(connection.remote, code, timeout) from None
        except ConnectionLost as lost:
            if connection.is_open:
                raise
            raise ConnectionLost(connection.remote, connection.reason) from lost
        if answer is not None:
            connection.note_heard(now)
        return answer

    def tell(self, encode: Encode) -> None:
        """Tell the peer something that it does not answer. Raises `ConnectionLost`."""
        if not self.connection.is_open:
            raise ConnectionLost(self.connection.remote, self.connection.reason)
        self.told()
        broken = self._socket.write(encode(next(self._opaques) & 0x7FFFFFFF))
        if broken is not None:
            self._end_with(broken)

    def told(self) -> None:
        """This thread has the peer told something, or has had: it may not be overtaken."""
        if self._lanes is not None:
            self._lanes.told()

    def _end_with(self, broken: OSError) -> NoReturn:
        reason = broken.strerror or str(broken)
        raise ConnectionLost(self.connection.remote, reason) from broken

    def _sleep(self, waiter: Waiter, deadline: float) -> None:
        """While the loop reads."""
        while waiter.outcome is None and (left := deadline - self._monotonic()) > 0:
            waiter.sleep(left)

    def _was_late(self, opaque: int, waiter: Waiter, timeout: float) -> None:
        """Its time is up. It may be answered in this very instant: then that counts."""
        self._leave(opaque, waiter)
        if waiter.outcome is None:
            self.connection.was_late_from_thread(timeout)

    def _leave(self, opaque: int, waiter: Waiter) -> None:
        self._pending.give_up_thread(opaque)
        if self._reading is not None:
            self._reading.leave(waiter)
