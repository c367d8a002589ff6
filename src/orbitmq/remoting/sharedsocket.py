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

The lock is held for one non-blocking system call at most, and never while waiting. A signal handler
may nevertheless hold up the thread that has it, for as long as it likes, and may itself wait for
the loop (it stops a client). So the loop never waits for the lock, it tries it:

* A *flush* first notes that it is wanted, then tries. Either it gets the lock, or somebody had it
  after the note was made: he looks for the note after he has let go, and wakes the loop. So does
  who is interrupted. What the loop has to write goes into the queue of the threads until then: what
  a thread writes after the loop has told something for it may not come before that. Only the last
  flush of a connection waits for a moment: nothing comes after it.
* A *look* that does not get the lock is repeated as if the transport were not empty.
* The *close* first notes that it is closed, then tries. Who comes later does not touch the
  descriptor any more; who has the lock at that moment closes it after he has let go.

A thread may be interrupted anywhere: by Ctrl-C, or by a limit on the time of a handler. Whatever it
leaves behind must not be the trouble of others. The lock is therefore taken by `with` alone, which
the interpreter does not interrupt between taking and holding; how much the socket took is noted by
the call that writes; and a thread that is interrupted has the loop look after the queue. Only if
frames were on their way out of the queue at that moment, nobody knows what became of them, and the
connection ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from orbitmq.remoting.outgoing import JOIN_BELOW, Outgoing, gathered
from orbitmq.wire.frame import Bytes

#: Seconds until the second look at a transport that is not empty, and the longest between two.
_FIRST_LOOK = 0.001
_LONGEST_LOOK = 0.02
#: Frames of other threads that one thread writes along with its own.
_MOST_FRAMES = 64
#: Pieces that one system call takes everywhere.
_MOST_PIECES = 512
#: Seconds that the last flush waits for a thread that is writing.
LAST_PATIENCE: Final = 0.5


class SharedSocket:
    """The writing half of a socket. Made and closed on the loop."""

    __slots__ = (
        "_abort",
        "_belongs_to_loop",
        "_descriptor",
        "_is_closed",
        "_is_wanted",
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
        abort: Callable[[str], None],
    ) -> None:
        """`take_over` is called on the loop when threads left something: it calls `flush`.

        `abort` is called by any thread, with the reason, when nothing can be written any more.
        """
        self._loop = loop
        self._transport = transport
        self._take_over = take_over
        self._abort = abort
        self._descriptor = second_descriptor(transport)
        self._lock = threading.Lock()
        #: Whole frames of threads that are to be written, and those of the loop that met a thread.
        self._queue: deque[Sequence[Bytes]] = deque()
        #: What is left of a write of threads that was cut short; goes first.
        self._rest: list[Bytes] = []
        self._wake_is_due = False
        self._is_watched = False
        #: Whether the loop would like to flush, and somebody else has the lock.
        self._is_wanted = False
        self._is_closed = False
        self._belongs_to_loop = True
        #: Bytes that threads wrote themselves.
        self.written = 0
        self._settle()

    def write(self, frame: Sequence[Bytes]) -> OSError | None:
        """Have the pieces of a whole frame written. Called by any thread; never waits.

        Returns the error of a socket that turns out to be broken, for which the connection is
        aborted. A frame for a closed one is dropped.
        """
        broken: OSError | None = None
        try:
            self._queue.append(frame)
            # Whoever holds the lock looks into the queue again, so nobody needs to wait for it.
            is_left = False
            while self._queue and not self._lock.locked():
                if not self._is_wanted:  # else the loop goes first: it might never find it free
                    with self._lock:
                        if not self._belongs_to_loop and not self._is_closed:
                            broken = self._write_queued()
                        is_left = self._belongs_to_loop
                # The loop notes what it wants before it tries the lock: one of both sees the other.
                if is_left or self._is_wanted or self._is_closed:
                    self._wake()
                    break
        except BaseException:
            # Others, and the loop, may have left their frames to this thread, which goes now.
            self._wake()
            raise
        return broken

    @property
    def has_work(self) -> bool:
        """Whether threads left something to the loop."""
        return bool(self._rest or self._queue)

    def flush(self, out: Outgoing, *, is_last: bool = False) -> int:
        """Write what threads left, then what the loop itself has to say. Called on the loop.

        Nothing is written while a thread writes, which has `take_over` called afterwards; `is_last`
        waits for it, for a moment.
        """
        self._is_wanted = True
        if not (self._lock.acquire(timeout=LAST_PATIENCE) if is_last else self._try_lock()):
            if out.size:
                self._queue.append(out.take())
            return 0
        try:
            self._is_wanted = False
            if self._is_closed:
                return 0
            left, self._rest = self._rest, []
            while self._queue:
                left += self._queue.popleft()
            if left:
                out.put_first(left)
            self._belongs_to_loop = True
            size = out.flush()
            self._settle()
        finally:
            self._lock.release()
        self._look_after()
        return size

    def close(self) -> None:
        """The connection has ended: nothing can be written any more."""
        self._is_closed = True
        self._let_go()

    def _let_go(self) -> None:
        """It is closed: keep nothing. Left to who has the lock; by any thread, may be repeated."""
        has_it: list[bool] = []
        try:
            # Tried and noted within one call: `with` cannot try, and a thread may be interrupted.
            has_it.extend(map(self._lock.acquire, (False,)))
            if has_it[0]:
                self._rest.clear()
                self._queue.clear()
                if self._descriptor is not None:
                    self._descriptor.close()
                    self._descriptor = None
        finally:
            if has_it and has_it[0]:
                self._lock.release()

    def _try_lock(self) -> bool:
        return self._lock.acquire(blocking=False)

    def _write_queued(self) -> OSError | None:
        """Write frames of the queue with one system call. The lock is held."""
        assert self._descriptor is not None  # noqa: S101  # it is never free without one
        pieces: Sequence[Bytes] = ()
        sent: list[int] = []
        try:
            pieces = self._take_queued()
            broken = _send(self._descriptor, pieces, sent)
            if broken is None and not (len(pieces) == 1 and sent[0] == len(pieces[0])):
                self._note(pieces, sent)
        except BaseException:
            is_noted = False
            try:
                is_noted = self._note(pieces, sent)
            finally:
                if not is_noted:
                    self._give_up("a thread was interrupted while it wrote")
            raise
        if broken is not None:
            # Frames of other threads may have gone with ours: all are told by the end of it.
            self._give_up(broken.strerror or str(broken))
        else:
            self.written += sent[0]
        return broken

    def _take_queued(self) -> Sequence[Bytes]:
        """The pieces of one write, of one frame or of several."""
        if not self._queue:
            return ()  # another thread has just written it
        frame = self._queue.popleft()
        if len(frame) == 1 and not self._queue:
            return frame
        pieces = [*frame]
        for _ in range(_MOST_FRAMES - 1):
            if not self._queue or len(pieces) > _MOST_PIECES // 2:
                break
            pieces += self._queue.popleft()
        return [b"".join(pieces)] if sum(map(len, pieces)) < JOIN_BELOW else gathered(pieces)

    def _note(self, pieces: Sequence[Bytes], sent: list[int]) -> bool:
        """Keep what the socket did not take; False when that is not known. May be repeated."""
        if not sent:
            return False
        if len(pieces) == 1 and sent[0] == len(pieces[0]):
            return True
        rest = _after(pieces, sent[0])
        if rest:
            self._rest = rest
            self._belongs_to_loop = True
        return True

    def _give_up(self, reason: str) -> None:
        """Nothing may follow what was written: it could lie in the middle of a frame."""
        self._is_closed = True
        self._abort(reason)

    def _wake(self) -> None:
        """Have the loop look after what threads left. Once is enough until it does."""
        if self._is_closed:
            self._let_go()
            return
        if self._wake_is_due:
            return
        self._wake_is_due = True
        try:
            self._loop.call_soon_threadsafe(self._woken)
        except BaseException as error:
            self._wake_is_due = False
            if not (isinstance(error, RuntimeError) and self._loop.is_closed()):
                raise  # else nobody gets an answer

    def _woken(self) -> None:
        # First this: whoever finds it set has put his frame where it is found now.
        self._wake_is_due = False
        # If it is still wanted, it is noted again; else threads would wake the loop for nothing.
        self._is_wanted = False
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
        if not self._try_lock():
            if self._is_closed:
                return
            self._loop.call_later(pause, self._look, min(2 * pause, _LONGEST_LOOK))
            return
        try:
            if self._is_closed or self._rest:
                # What was left is flushed within this step, and looked after from there.
                self._is_watched = False
            elif not self._transport.get_write_buffer_size():
                self._is_watched = False
                self._belongs_to_loop = False
            else:
                self._loop.call_later(pause, self._look, min(2 * pause, _LONGEST_LOOK))
        finally:
            self._lock.release()
        if self._is_closed:
            self._let_go()  # who had the lock at the close may have tried to just now
        self._look_after()


def second_descriptor(transport: asyncio.Transport) -> socket.socket | None:
    """A descriptor of our own for the same socket: it cannot be closed or reused under a thread."""
    shared = transport.get_extra_info("socket")
    if shared is None or transport.get_extra_info("sslcontext") is not None or os.name != "posix":
        return None
    descriptor = socket.socket(fileno=os.dup(shared.fileno()))
    descriptor.setblocking(False)
    return descriptor


def _send(descriptor: socket.socket, pieces: Sequence[Bytes], sent: list[int]) -> OSError | None:
    """Write what the socket takes; how much that is comes into `sent`. Its error if it is broken.

    Both happen within one call, so that an interrupt comes before it or finds the number.
    """
    if not pieces:
        sent.append(0)
        return None
    if len(pieces) == 1:
        writing = map(descriptor.send, pieces)
    else:
        writing = map(descriptor.sendmsg, (pieces[:_MOST_PIECES],))
    try:
        sent.extend(writing)
    except OSError as error:
        if sent:
            raise  # not of the socket: an interrupt can have any type
        if not isinstance(error, BlockingIOError | InterruptedError):
            return error
        sent.append(0)
    return None


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
