"""Requests of threads that block until they are answered.

The thread notes that it waits, writes its request to the socket and sleeps on a lock; the loop,
which is woken by the answer and by nothing else, releases it. Its deadline is its own: the thread
wakes by itself, so no timer of the loop has to be set from outside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from orbitmq.remoting.errors import ConnectionLost, RemotingError, RequestTimedOut
from orbitmq.remoting.pending import PendingRequests
from orbitmq.remoting.sharedsocket import SharedSocket
from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes

if TYPE_CHECKING:
    from orbitmq.remoting.connection import Connection

#: Makes the pieces of a request's frame, given its opaque.
Encode: TypeAlias = Callable[[int], Sequence[Bytes]]


class BlockingSide:
    """What threads may do with a connection; get it with `Connection.for_threads`."""

    __slots__ = ("_opaques", "_pending", "_socket", "connection")

    def __init__(
        self,
        connection: Connection,
        shared: SharedSocket,
        pending: PendingRequests,
        opaques: Iterator[int],
    ) -> None:
        self.connection = connection
        self._socket = shared
        self._pending = pending
        self._opaques = opaques

    @property
    def is_open(self) -> bool:
        return self.connection.is_open

    def ask(self, code: int, encode: Encode, timeout: float) -> Command:
        """Ask the peer and block until it answers. Not to be called on the loop's own thread.

        Raises what `Connection.request` raises, and what `encode` does.
        """
        opaque = next(self._opaques) & 0x7FFFFFFF
        pieces = encode(opaque)
        waiting = _Waiter()
        try:
            self._pending.add_from_thread(opaque, code, timeout, waiting.settle)
            self._write(pieces)
            outcome = waiting.wait(timeout)
        except BaseException:
            # Also a KeyboardInterrupt: nobody waits for this answer any more.
            self._pending.give_up(opaque)
            raise
        if outcome is None:
            if self._pending.give_up(opaque):
                self.connection.was_late_from_thread(timeout)
                raise RequestTimedOut(self.connection.remote, code, timeout)
            # It was taken off the table in this instant, and is being handed over.
            outcome = waiting.wait(timeout)
        if isinstance(outcome, Command):
            return outcome
        raise outcome or RequestTimedOut(self.connection.remote, code, timeout)

    def tell(self, encode: Encode) -> None:
        """Tell the peer something that it does not answer. Raises `ConnectionLost`."""
        if not self.connection.is_open:
            raise ConnectionLost(self.connection.remote, self.connection.reason)
        self._write(encode(next(self._opaques) & 0x7FFFFFFF))

    def _write(self, frame: Sequence[Bytes]) -> None:
        broken = self._socket.write(frame)
        if broken is not None:
            reason = broken.strerror or str(broken)
            raise ConnectionLost(self.connection.remote, reason) from broken


class _Waiter:
    """A thread that waits for one outcome."""

    __slots__ = ("_gate", "_outcome")

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self._outcome: Command | RemotingError | None = None

    def settle(self, outcome: Command | RemotingError) -> None:
        """Called once, on the loop."""
        self._outcome = outcome
        self._gate.release()

    def wait(self, timeout: float) -> Command | RemotingError | None:
        """The outcome, or None when it did not come in time."""
        return self._outcome if self._gate.acquire(timeout=max(0.0, timeout)) else None
