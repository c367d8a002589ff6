"""One socket that an event loop and other threads write to, without tearing each other's frames.

Waking a loop that sleeps on another thread costs more than everything else a blocking request does,
so a thread writes its frame itself. Two rules, both kept under one lock, make that safe:

* As long as the socket is *free*, nothing that was begun is unfinished: the loop's transport holds
  no bytes. Whoever has the lock may write whole frames.
* From the moment at which a write is cut short until everything before and after it has been
  written, the socket *belongs to the loop*. What threads have to write then waits for the loop, in
  order and behind the rest of the frame that was cut.

Threads do not wait for each other. Each puts its frame into a queue and tries the lock; whoever
gets it writes all that is in the queue, at once. A thread that does not get it may leave: the
holder looks into the queue again after it has let go of the lock.

The transport does not tell when it has become empty, and may only be asked on the loop. It is
asked there after each write, at growing intervals: a late look costs a detour over the loop, never
order. Without a descriptor of its own (TLS, systems that cannot share one) the socket belongs to
the loop for ever, and threads use the same calls.

The lock is held for one non-blocking system call at most, and never while waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from orbitmq.remoting.outgoing import JOIN_BELOW, Outgoing, gathered
from orbitmq.wire.frame import Bytes

#: Seconds until the second look at a transport that is not empty, and the longest between two.
_FIRST_LOOK = 0.001
_LONGEST_LOOK = 0.02
#: Frames of other threads that one thread writes along with its own.
_MOST_FRAMES = 64
#: Pieces that one system call takes everywhere.
_MOST_PIECES = 512


class SharedSocket:
    """The writing half of a socket. Made and closed on the loop."""

    __slots__ = (
        "_belongs_to_loop",
        "_descriptor",
        "_is_closed",
        "_is_watched",
        "_lock",
        "_loop",
        "_queue",
        "_rest",
        "_take_over",
        "_transport",
        "_wake_is_due",
        "written",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        take_over: Callable[[], None],
    ) -> None:
        """`take_over` is called on the loop when threads left something: it calls `flush`."""
        self._loop = loop
        self._transport = transport
        self._take_over = take_over
        self._descriptor = _second_descriptor(transport)
        self._lock = threading.Lock()
        #: Whole frames of threads that are to be written.
        self._queue: deque[Sequence[Bytes]] = deque()
        #: What is left of a write of threads that was cut short; goes first.
        self._rest: list[Bytes] = []
        self._wake_is_due = False
        self._is_watched = False
        self._is_closed = False
        self._belongs_to_loop = True
        #: Bytes that threads wrote themselves.
        self.written = 0
        self._settle()

    def write(self, frame: Sequence[Bytes]) -> None:
        """Have the pieces of a whole frame written. Called by any thread; never waits.

        Raises `OSError` when the socket turns out to be broken. A frame for a closed one is
        dropped.
        """
        self._queue.append(frame)
        while self._queue and self._lock.acquire(blocking=False):
            try:
                if not self._belongs_to_loop and not self._is_closed:
                    self._write_queued()
                is_left = self._belongs_to_loop or self._is_closed
            finally:
                self._lock.release()
            if is_left:
                self._wake()
                return

    @property
    def has_work(self) -> bool:
        """Whether threads left something to the loop."""
        return bool(self._rest or self._queue)

    def flush(self, out: Outgoing) -> int:
        """Write what threads left, then what the loop itself has to say. Called on the loop."""
        with self._lock:
            left, self._rest = self._rest, []
            while self._queue:
                left += self._queue.popleft()
            if left:
                out.put_first(left)
            self._belongs_to_loop = True
            size = out.flush()
            self._settle()
        self._look_after()
        return size

    def close(self) -> None:
        """The connection has ended: nothing can be written any more."""
        with self._lock:
            self._is_closed = True
            self._rest.clear()
            self._queue.clear()
            if self._descriptor is not None:
                self._descriptor.close()
                self._descriptor = None

    def _write_queued(self) -> None:
        """Write frames of the queue with one system call. The lock is held."""
        pieces = [*self._queue.popleft()]
        for _ in range(_MOST_FRAMES - 1):
            if not self._queue or len(pieces) > _MOST_PIECES // 2:
                break
            pieces += self._queue.popleft()
        rest = self._send(pieces)
        if rest:
            self._rest = rest
            self._belongs_to_loop = True

    def _send(self, pieces: list[Bytes]) -> list[Bytes]:
        """What the socket did not take."""
        assert self._descriptor is not None  # noqa: S101  # it is never free without one
        if len(pieces) > 1:
            size = sum(map(len, pieces))
            pieces = [b"".join(pieces)] if size < JOIN_BELOW else gathered(pieces)
        else:
            size = len(pieces[0])
        try:
            if len(pieces) == 1:
                sent = self._descriptor.send(pieces[0])
            else:
                sent = self._descriptor.sendmsg(pieces[:_MOST_PIECES])
        except (BlockingIOError, InterruptedError):
            sent = 0
        self.written += sent
        return [] if sent == size else _after(pieces, sent)

    def _wake(self) -> None:
        """Have the loop look after what threads left. Once is enough until it does."""
        if not self._wake_is_due:
            self._wake_is_due = True
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody gets an answer
                self._loop.call_soon_threadsafe(self._woken)

    def _woken(self) -> None:
        # First this: whoever finds it set has put his frame where it is found now.
        self._wake_is_due = False
        self._take_over()

    def _look_after(self) -> None:
        """On the loop, after the lock: a thread may have come meanwhile, and not have waited."""
        if self._queue:
            self._loop.call_soon(self._take_over)

    def _settle(self) -> None:
        """Set the socket free if the transport is empty, else look again. The lock is held."""
        if self._descriptor is None:
            return
        if not self._transport.get_write_buffer_size():
            self._belongs_to_loop = False
        elif not self._is_watched:
            self._is_watched = True
            # uvloop writes at the end of a step: at the next one it is usually done.
            self._loop.call_soon(self._look, _FIRST_LOOK)

    def _look(self, pause: float) -> None:
        with self._lock:
            if self._is_closed or self._rest:
                # What was left is flushed within this step, and looked after from there.
                self._is_watched = False
            elif not self._transport.get_write_buffer_size():
                self._is_watched = False
                self._belongs_to_loop = False
            else:
                self._loop.call_later(pause, self._look, min(2 * pause, _LONGEST_LOOK))
        self._look_after()


def _second_descriptor(transport: asyncio.Transport) -> socket.socket | None:
    """A descriptor of our own for the same socket: it cannot be closed or reused under a thread."""
    shared = transport.get_extra_info("socket")
    if shared is None or transport.get_extra_info("sslcontext") is not None or os.name != "posix":
        return None
    descriptor = socket.socket(fileno=os.dup(shared.fileno()))
    descriptor.setblocking(False)
    return descriptor


def _after(pieces: Sequence[Bytes], sent: int) -> list[Bytes]:
    """The pieces without their first `sent` bytes."""
    rest: list[Bytes] = []
    for piece in pieces:
        if sent >= len(piece):
            sent -= len(piece)
        else:
            rest.append(memoryview(piece)[sent:] if sent else piece)
            sent = 0
    return rest
