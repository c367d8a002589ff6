"""One socket that an event loop and threads take turns to read.

A thread that waits for an answer while the loop reads is woken twice over: the kernel wakes the
loop, and the loop the thread. That costs more than everything else a blocking request does. So the
loop lends the reading to threads: one of those that wait polls the socket, reads what came, and
settles the others. When it has its own answer it wakes another one to poll. A thread that sends
alone never waits for another one.

* *Polling needs no right.* Whoever waits may poll the threads' own descriptor, so that a thread
  that is held up in there, by a signal handler, holds up nobody. That only one of them does so is
  economy: two at once, or none for a moment, are not an error. When the loop reads again it rings
  a bell that they poll, too: what is read at once by another one does not wake who polls. The last
  one to leave closes the descriptors.
* *Reading needs the lock*, for one read that does not wait and the cutting of its frames, and
  `_may_read` under it. The loop tries the lock and never waits for it. The loop's transport is
  paused from `_lend` until the loop goes on in `_read_on`: at any time one of the two reads.
* *Threads read for threads only.* What is not an answer for one of them ends the lending at once:
  it is kept, in order, until the loop has handled it and only then reads on. So order and
  back-pressure are the loop's, as without threads. It lends when it has read an answer for a
  thread, nothing of its own is on its way, and no frame has been begun.
* *The loop looks* at intervals. If nobody has read since the last look, whatever the reason, it
  takes the reading back. So no error of economy lasts, and what the peer asks after the last send
  of a thread, or the news that it is gone, waits for two looks at most.
* The end of the stream is not for threads. Who finds it hands the reading back for good, and the
  loop, finding the same, ends the connection and tells all who wait. Only a reset, which the system
  reports once, is told by who finds it.

A thread may be interrupted anywhere (see `sharedsocket`), where the interpreter looks: after a call
and when a function or another round of a loop begins. What was received is noted by the very call
that receives; frames are noted as cut, and as handed out, in steps without a call; and handing out
may be repeated. So the next one with the lock goes on. Only `FrameReader.feed` can not be repeated:
who is interrupted in it leaves `_is_cutting`, and whoever finds that ends the connection.
"""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from orbitmq.remoting.onloop import call_on_loop
from orbitmq.remoting.pending import PendingRequests
from orbitmq.remoting.settings import ConnectionSettings
from orbitmq.remoting.waiter import LONGEST_SLEEP, Waiter
from orbitmq.wire.codes import Flag
from orbitmq.wire.command import decode_command
from orbitmq.wire.errors import FrameError
from orbitmq.wire.frame import Frame, FrameReader

_RESPONSE: Final = int(Flag.RESPONSE)


class Stream(Protocol):
    """What is read, as the loop knows it."""

    def frames_received(self, frames: Sequence[Frame], broken: FrameError | None) -> None:
        """What threads read and is not for them, and how the stream broke, if so. On the loop."""

    def read_again(self) -> None:
        """Have the transport read, if nothing else is in the way. On the loop."""

    def note_read(self, size: int) -> None:
        """So much was read just now. By the thread that did."""

    def abort_from_thread(self, reason: str) -> None:
        """Nothing can be read any more. By any thread."""


class SharedReading:
    """The reading half of a socket. Made, lent, taken back and closed on the loop."""

    __slots__ = (
        "_bell",
        "_broken",
        "_descriptor",
        "_frames",
        "_has_rung",
        "_is_closed",
        "_is_cutting",
        "_is_due",
        "_is_over",
        "_is_wanted",
        "_limits",
        "_lock",
        "_loop",
        "_may_read",
        "_monotonic",
        "_passed",
        "_pause",
        "_pending",
        "_pollers",
        "_read_size",
        "_reader",
        "_reads",
        "_received",
        "_ringer",
        "_stream",
        "_timer",
        "_transport",
        "is_lent",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        descriptor: socket.socket,
        reader: FrameReader,
        pending: PendingRequests,
        stream: Stream,
        settings: ConnectionSettings,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`descriptor` is the threads' own for the socket, and is closed here."""
        self._loop = loop
        self._transport = transport
        self._descriptor = descriptor
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._reader = reader
        self._pending = pending
        self._stream = stream
        self._limits = settings.limits
        self._read_size = (settings.read_size,)
        self._pause = settings.reading_look
        self._monotonic = monotonic
        self._timer: asyncio.TimerHandle | None = None
        #: Whether the transport does not read, for the sake of threads. Changed on the loop.
        self.is_lent = False
        #: Whether the bell rings. Changed on the loop.
        self._has_rung = False
        #: Whether the loop would like to read.
        self._is_wanted = False
        #: Whether it is going to, in a step that is due.
        self._is_due = False
        #: Those who poll, or are about to; a thread reads only as one of them.
        self._pollers: set[Waiter] = set()
        self._lock = threading.Lock()
        # Under the lock:
        #: Whether threads may read. The loop sets it, whoever has the lock resets it.
        self._may_read = False
        #: Whether they never may any more.
        self._is_over = False
        self._is_closed = False
        #: What was received and not cut; what was cut and not handed out; what is for the loop.
        self._received: list[bytes] = []
        self._frames: list[Frame] = []
        self._passed: list[Frame] = []
        self._broken: FrameError | None = None
        #: Whether the reader is being fed, or was when a thread was interrupted.
        self._is_cutting = False
        #: How often threads have read.
        self._reads = 0

    # On threads

    def wait(self, waiter: Waiter, deadline: float) -> None:
        """Return when there is an outcome, or the time is up. Read meanwhile, if nobody does."""
        while waiter.outcome is None:
            left = deadline - self._monotonic()
            if left <= 0:
                return
            if self._may_read and not self._pollers:
                self._poll(waiter, deadline)
            else:
                waiter.sleep(left)

    def leave(self, waiter: Waiter) -> None:
        """A thread goes without an outcome, which may have polled or have been about to."""
        self._pollers.discard(waiter)
        self._look_after()

    def _poll(self, waiter: Waiter, deadline: float) -> None:
        """Read until there is an outcome, the time is up, or threads may not read any more."""
        try:
            self._pollers.add(waiter)
            if self._is_closed:
                return  # it was not seen by who closes
            poll = select.poll()  # an object of its own: a signal handler may come here, too
            poll.register(self._descriptor, select.POLLIN)
            poll.register(self._bell, select.POLLIN)
            while waiter.outcome is None and self._may_read:
                left = deadline - self._monotonic()
                if left <= 0:
                    return
                # Somebody who was interrupted may have left what he read.
                if self._received or self._frames or poll.poll(1000 * min(left, LONGEST_SLEEP)):
                    self._read()
        finally:
            self._pollers.discard(waiter)
            self._look_after()

    def _read(self) -> None:
        with self._lock:
            if not self._may_read:
                return
            if self._received or self._frames or self._receive():
                self._hand_out()
        # The loop says what it wants before it tries the lock: one of both sees the other.
        if self._is_wanted or not self._may_read:
            call_on_loop(self._loop, self.take_back)

    def _receive(self) -> bool:
        """Whether anything came; it is noted where the next one finds it. The lock is held."""
        reading = map(self._descriptor.recv, self._read_size)
        try:
            self._received.extend(reading)
        except OSError as error:
            if self._received:
                raise  # not of the socket: an interrupt can have any type
            if not isinstance(error, BlockingIOError | InterruptedError):
                self._give_up(error.strerror or str(error))
            return False
        return True

    def _hand_out(self) -> None:
        """Give threads what is theirs of what was received. The lock is held."""
        if self._received:
            self._cut()
        others: list[Frame] = []
        pending = self._pending
        for frame in self._frames:
            try:
                command = decode_command(frame, self._limits)
            except FrameError:
                others.append(frame)  # the loop finds the same, in its turn
                continue
            if not command.flag & _RESPONSE:
                others.append(frame)
            elif not pending.answer_thread(command) and pending.is_own(command.opaque):
                others.append(frame)  # else nobody waits for it any more
        # No call from here on.
        if others:
            self._may_read = False
            self._passed += others
        self._frames = []

    def _cut(self) -> None:
        if self._is_cutting:
            self._give_up("a thread was interrupted while it read")
            return
        data = self._received[0]
        size = len(data)
        broken: FrameError | None = None
        if size:
            self._is_cutting = True
            try:
                frames: Sequence[Frame] = self._reader.feed(data)
            except FrameError as error:
                broken, frames = error, error.frames
            # No call until it is noted.
            self._frames += frames
            self._reads += 1
        if broken is not None or not size:
            # The end: of the stream, which the loop finds, too, or of what can be cut.
            self._is_over = True
            self._may_read = False
            self._broken = broken
        self._received = []
        self._is_cutting = False
        self._stream.note_read(size)

    def _give_up(self, reason: str) -> None:
        self._is_over = True
        self._may_read = False
        self._stream.abort_from_thread(reason)

    def _look_after(self) -> None:
        """One of those who polled is gone."""
        # Before looking at who polls: whoever comes after this was found finds it, too.
        is_closed = self._is_closed
        if self._pollers:
            return
        if is_closed:
            self._let_go()
        elif self._may_read:
            following = self._pending.last_thread()
            if following is not None:
                following.wake()

    # On the loop

    def turn_done(self) -> None:
        """The loop has read something: lend the reading to threads if it was for one of them."""
        pending = self._pending
        if pending.has_answered_thread:
            pending.has_answered_thread = False
            # Somebody who still polls from before may be held up there: nobody else would.
            if not (pending.has_own or self._pollers or self._reader.unfinished):
                self._lend()

    def _lend(self) -> None:
        if self.is_lent or self._is_over:
            return
        self._transport.pause_reading()
        self._silence()
        self.is_lent = True
        self._may_read = True
        self._look_after()
        self._look_later()

    def take_back(self) -> None:
        """Have the loop read again: now, or when what threads left to it is handled."""
        if not self.is_lent or self._is_closed:
            return
        self._is_wanted = True
        if not self._lock.acquire(blocking=False):
            return  # who has it sees that it is wanted
        try:
            self._may_read = False
            if self._received or self._frames:
                self._hand_out()
        finally:
            self._lock.release()
        if self._is_cutting:
            return  # nothing can follow what was read: the connection is about to end
        self._stop_looking()
        self._ring()
        if not (self._passed or self._broken is not None):
            self._read_on()
        elif not self._is_due:
            # In a step of its own: this may be called by whoever sends something. And once: a
            # second one could come when the reading is lent anew, and end that behind its back.
            self._is_due = True
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        """The lending is over: handle what threads left first."""
        self._is_due = False
        if self._is_closed:
            return
        self.is_lent = self._is_wanted = False
        passed, self._passed = self._passed, []
        if passed or self._broken is not None:
            self._stream.frames_received(passed, self._broken)
        self._stream.read_again()

    def _look(self, reads: int) -> None:
        """Take the reading back if no thread has read since the last look."""
        self._timer = None
        if self._reads == reads or not self._may_read:
            self.take_back()
        if self.is_lent:
            self._look_later()

    def _look_later(self) -> None:
        self._stop_looking()
        if not self._is_closed:
            self._timer = self._loop.call_later(self._pause, self._look, self._reads)

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """The connection has ended: nothing can be read any more."""
        self._stop_looking()
        self._is_over = True
        self._may_read = self.is_lent = False
        self._ring()
        # Not before: from here on the last who polls closes the bell, too.
        self._is_closed = True
        if not self._pollers:
            self._let_go()

    def _ring(self) -> None:
        """Have those who poll look around. Who comes later finds that he may not read."""
        if self._pollers and not self._has_rung:
            self._has_rung = True
            self._ringer.send(b"!")

    def _silence(self) -> None:
        """Nobody polls: the bell has been heard."""
        if self._has_rung:
            self._has_rung = False
            self._bell.recv(1)

    def _let_go(self) -> None:
        """It is closed, and nobody polls any more, so nobody reads. May be repeated."""
        for each in (self._descriptor, self._bell, self._ringer):
            each.close()
        self._received, self._frames, self._passed = [], [], []
        # Whoever remembers the connection does not have to remember half a frame, too.
        self._reader.abandon()
