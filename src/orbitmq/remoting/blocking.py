"""Requests of threads that block until they are answered.

The thread notes that it waits, writes its request to the socket, and reads until the answer is
there, or sleeps while another thread or the loop reads. Its deadline is its own: the thread wakes
by itself, so no timer of the loop has to be set from outside. Threads that keep meeting each other
there get sockets of their own (`lanes`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeAlias

from orbitmq.remoting.outgoing import JOIN_BELOW, Outgoing, call_on_loop, gathered
from orbitmq.remoting.settings import Address, ConnectionLost, ConnectionSettings, RequestTimedOut
from orbitmq.wire.codes import Flag, FrameError, WireLimits
from orbitmq.wire.command import Command, decode_command
from orbitmq.wire.frame import Bytes, Frame, FrameReader

if TYPE_CHECKING:
    from orbitmq.remoting.connection import Connection, PendingRequests
    from orbitmq.remoting.settings import RemotingError


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


# A thread that waits for one outcome, at a gate of its own.


#: Seconds that a thread sleeps at most before it looks at the time again: no clock of the system
#: has to understand a wait without an end.
LONGEST_SLEEP: Final = 3600.0


class Waiter:
    """Waits on its thread; is settled and woken by any other one."""

    __slots__ = ("_gate", "outcome")

    def __init__(self) -> None:
        # A lock would complain about being opened twice, by an error that an interrupt, which can
        # have any type, could not be told from.
        self._gate: SimpleQueue[None] = SimpleQueue()
        #: The answer, or why there is none; None as long as nothing is known.
        self.outcome: Command | RemotingError | None = None

    def settle(self, outcome: Command | RemotingError) -> None:
        """Here is the outcome. May be repeated: the first one counts."""
        if self.outcome is None:
            self.outcome = outcome
        self._gate.put(None)

    def wake(self) -> None:
        """Have it look around: there is an outcome, or something to do."""
        self._gate.put(None)

    def sleep(self, timeout: float) -> None:
        """Until it is woken, or for so long, or for no reason. A wake that came before counts."""
        if not 0.0 < timeout < LONGEST_SLEEP:
            timeout = max(0.0, min(timeout, LONGEST_SLEEP))
        try:  # noqa: SIM105  # `suppress` costs as much as the rest
            self._gate.get(True, timeout)
        except Empty:
            pass


# Sockets of their own for threads that ask at the same time.
#
# Threads that share one socket have to wake each other: whoever reads wakes the one whose answer it
# is, and all of them wait for the interpreter. With eight threads that is five changes of the
# thread for each request. With a socket each it is one, by the kernel, and a request costs two
# thirds.
#
# So a thread that keeps finding others at the shared socket gets a *lane*: a second connection to
# the same peer, on which only that thread asks, one request at a time, blocking. Nobody introduces
# himself on a lane, so the peer asks nothing there. The loop opens lanes, while the thread goes on
# with the shared socket, and hands one out when the peer has answered a question on it: a system
# takes connections also for a server that does not. A peer that lets no more in is asked again only
# after a pause. A thread that has ended leaves its lane to the next one. The loop closes lanes that
# were not used for a while, and all of them with the connection.
#
# * A thread uses its lane under the lane's lock, which it never waits for: a signal handler that
#   asks while its own thread does, takes the shared socket. So does a thread whose lane the loop
#   looks at.
# * The loop closes descriptors, and nobody else, so that no number is used again under a call. A
#   thread in the middle of a request is woken by shutting the socket down: when the connection is
#   ended here, and when its time is up and signals keep it from seeing that (after each of them the
#   system waits anew). When the peer ends the connection in order, it may still answer on lanes.
# * After anything but an answer - a late one, an interrupt - a lane is not used any more: nobody
#   knows what comes next on it. Nor is one that the peer has closed meanwhile, which is looked for
#   after a while without use: what was never sent must not count as a failure.
# * What a thread has told the peer one-way is on the shared socket, and may not be overtaken by
#   what it asks after that. That next request therefore goes the same way.


log = logging.getLogger(__name__)

_RESPONSE: Final = int(Flag.RESPONSE)
#: How often threads have to find others at the shared socket before one of them gets a lane.
_MEETINGS: Final = 16
#: The same when there are as many lanes as may be: to see whether one has become free.
_MEETINGS_OF_MANY: Final = 1024
#: Longer frames take the shared socket, which does not join their pieces.
_LARGEST: Final = 64 * 1024
#: An answer to a send is shorter; larger buffers take longer to get.
_READ_SIZE: Final = (4096,)
#: Seconds of one wait in the kernel, after which a thread looks at its deadline.
_PATIENCE: Final = 0.5
_SHORTEST_PATIENCE: Final = 0.001
#: Seconds without use after which a lane may have been closed.
_FRESH: Final = 1.0
#: Seconds for opening a lane, and until the next try after a failed one.
_OPENING: Final = 3.0
_PAUSE: Final = 10.0
#: Seconds between two looks at the lanes.
_LOOK: Final = 1.0


class Late(Exception):
    """The time for an answer is up."""


class Lane:
    """A connection of one thread. Closed on the loop."""

    __slots__ = (
        "_limits",
        "_monotonic",
        "_patience",
        "_reader",
        "_remote",
        "_socket",
        "deadline",
        "is_open",
        "lock",
        "requests",
        "used_at",
    )

    def __init__(
        self,
        connected: socket.socket,
        reader: FrameReader,
        remote: Address,
        limits: WireLimits,
        monotonic: Callable[[], float],
    ) -> None:
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._remote = remote
        self._limits = limits
        self._monotonic = monotonic
        self._reader = reader
        self._patience = 0.0
        self._be_patient(_PATIENCE)
        self.lock = threading.Lock()
        self.is_open = True
        #: How many were answered.
        self.requests = 0
        #: When the last one was begun, and until when it may take.
        self.used_at = self.deadline = monotonic()

    def ask(
        self, opaque: int, pieces: Sequence[Bytes], now: float, deadline: float
    ) -> Command | None:
        """The answer; None, with nothing sent, when it may not be used now.

        Raises `Late` or `ConnectionLost`.
        """
        if self.lock.locked():
            return None
        with self.lock:
            may_be_closed = now - self.used_at > _FRESH
            # Before the look at `is_open`, on which `wake_if_late` relies.
            self.used_at, self.deadline = now, deadline
            if may_be_closed and not self._is_silent():
                self.is_open = False
            if not self.is_open:
                return None
            try:
                self._write(b"".join(pieces), deadline)
                while (answer := self._read(opaque, deadline)) is None:
                    pass
            except BaseException:
                self.is_open = False
                raise
            self.requests += 1
        return answer

    def _is_silent(self) -> bool:
        """Whether nothing has come that was not asked for, such as the end."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError as error:
            if error.errno is None:
                raise  # not of the socket
            return isinstance(error, BlockingIOError)
        return False

    def _write(self, frame: bytes, deadline: float) -> None:
        rest: Bytes = frame
        self._look_at_time(deadline)
        while True:
            sent: list[int] = []
            writing = map(self._socket.send, (rest,))
            try:
                sent.extend(writing)
            except OSError as error:
                self._look_at(error, bool(sent))
                self._check_time(deadline)
                continue
            if sent[0] == len(rest):
                return
            rest = memoryview(rest)[sent[0] :]
            self._check_time(deadline)

    def _read(self, opaque: int, deadline: float) -> Command | None:
        """The answer, if what comes next completes it."""
        self._look_at_time(deadline)
        received: list[bytes] = []
        reading = map(self._socket.recv, _READ_SIZE)
        try:
            received.extend(reading)
        except OSError as error:
            self._look_at(error, bool(received))
            self._check_time(deadline)
            return None
        if not received[0]:
            self._look_at_time(deadline)
            raise ConnectionLost(self._remote, "closed by the peer")
        try:
            for frame in self._reader.feed(received[0]):
                command = decode_command(frame, self._limits)
                if command.opaque == opaque and command.flag & _RESPONSE:
                    return command
        except FrameError as error:
            reason = f"it sent bytes that are no frame: {error}"
            raise ConnectionLost(self._remote, reason) from error
        return None

    def _look_at(self, error: OSError, is_done: bool) -> None:
        """Raises what ended a call, unless it was its time."""
        if is_done or error.errno is None:
            raise error  # not of the socket: an interrupt can have any type
        if not isinstance(error, BlockingIOError):
            raise ConnectionLost(self._remote, error.strerror or str(error)) from error

    def _look_at_time(self, deadline: float) -> None:
        """The same, when less is left than the kernel would wait; else it costs nothing."""
        if deadline - self._monotonic() < self._patience:
            self._check_time(deadline)

    def _check_time(self, deadline: float) -> None:
        """Wait no longer than until the deadline. Raises `Late` after it."""
        left = deadline - self._monotonic()
        if left <= 0:
            raise Late
        self._be_patient(min(_PATIENCE, max(left, _SHORTEST_PATIENCE)))

    def _be_patient(self, seconds: float) -> None:
        """How long the kernel waits in one call; a timeout of Python's takes two."""
        if seconds != self._patience:
            self._patience = seconds
            whole = int(seconds)
            limit = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            except OSError as error:
                self._look_at(error, False)

    # On the loop

    def close(self) -> bool:
        """Close it unless a thread uses it now; whether it is closed."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            self.is_open = False
            self.wake()  # a process that was forked may have the socket as well
            self._socket.close()
        finally:
            self.lock.release()
        return True

    def wake_if_late(self, now: float) -> None:
        """Wake the thread if it should have seen by itself that its time is up.

        It may be done meanwhile, and about to ask something else, which has its own time. So the
        lane is first withdrawn from use, and then looked at again: whoever begins a request before
        that look has changed the deadline, and whoever begins one later finds the lane withdrawn.
        """
        deadline = self.deadline
        if deadline + _PATIENCE > now or not self.lock.locked():
            return
        self.is_open = False
        if self.deadline == deadline:
            self.wake()

    def wake(self) -> None:
        """Have the thread that uses it leave."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("a lane was lost before: %s", error)


class Lanes:
    """The lanes of one connection. Made and closed on the loop."""

    __slots__ = (
        "_address",
        "_family",
        "_idle",
        "_is_closed",
        "_is_opening",
        "_lanes",
        "_left",
        "_limits",
        "_loop",
        "_meetings",
        "_monotonic",
        "_most",
        "_opening",
        "_probe",
        "_remote",
        "_timer",
        "_told",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        remote: Address,
        probe: Callable[[], bytes],
        settings: ConnectionSettings,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`probe` makes the frame of a question that any peer answers."""
        self._loop = loop
        self._address: Any = transport.get_extra_info("peername")
        self._family = transport.get_extra_info("socket").family
        self._remote = remote
        self._limits = settings.limits
        self._most = settings.lanes
        self._idle = settings.lane_idle
        self._probe = probe
        self._monotonic = monotonic
        #: By thread. Lanes come and go on the loop alone.
        self._lanes: dict[int, Lane] = {}
        #: Lanes that are to be closed, and whose threads have not left them yet.
        self._left: set[Lane] = set()
        #: Threads that have told the peer something since they last asked it.
        self._told: set[int] = set()
        self._meetings = 0
        self._is_opening = False
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._lanes)

    # On threads

    def ask(
        self,
        opaque: int,
        pieces: Sequence[Bytes],
        now: float,
        deadline: float,
        *,
        is_crowded: bool,
    ) -> Command | None:
        """The answer; None, with nothing sent, when it is a case for the shared socket.

        `is_crowded` says that others are at that. Raises `Late` or `ConnectionLost`.
        """
        thread = get_ident()
        lane = self._lanes.get(thread)
        if lane is None and not is_crowded:
            return None
        if thread in self._told:
            self._told.discard(thread)
            return None
        if sum(map(len, pieces)) > _LARGEST:
            return None
        if lane is None:
            self._meet(thread)
            return None
        try:
            answer = lane.ask(opaque, pieces, now, deadline)
        except BaseException:
            self._leave(lane)
            raise
        if not lane.is_open or self._is_closed:
            self._leave(lane)
        return answer

    def _leave(self, lane: Lane) -> None:
        """Have a lane closed that is of no use any more."""
        if self._is_closed:
            lane.close()  # the loop has done with it, and may be gone
        else:
            call_on_loop(self._loop, self._drop, lane)

    def told(self) -> None:
        """This thread tells the peer something over the shared socket, or the loop does for it."""
        self._told.add(get_ident())

    def _meet(self, thread: int) -> None:
        """This thread has found others at the shared socket, and might do without it."""
        self._meetings += 1
        enough = _MEETINGS if len(self._lanes) < self._most else _MEETINGS_OF_MANY
        if self._meetings >= enough and not self._is_opening:
            self._meetings = 0
            call_on_loop(self._loop, self._open_for, thread)

    # On the loop

    def _open_for(self, thread: int) -> None:
        if self._is_closed or self._is_opening or thread in self._lanes:
            return
        # Not by `threading.enumerate`: its lock may be held by a thread that waits for the loop.
        living = sys._current_frames()
        for owner in self._lanes:
            if owner not in living:
                self._lanes[thread] = self._lanes.pop(owner)
                return
        if len(self._lanes) < self._most:
            self._is_opening = True
            self._opening = self._loop.create_task(self._open(thread))

    async def _open(self, thread: int) -> None:
        made: socket.socket | None = None
        try:
            made = socket.socket(self._family, socket.SOCK_STREAM)
            async with asyncio.timeout(_OPENING):
                reader = await self._greeted(made)
            lane = Lane(made, reader, self._remote, self._limits, self._monotonic)
        except BaseException as error:
            if made is not None:
                made.close()
            if not self._is_closed:
                self._loop.call_later(_PAUSE, self._may_open)
            if not isinstance(error, OSError | TimeoutError | FrameError | ConnectionLost):
                raise
            log.debug("no lane: %s", error, extra={"client": str(self._remote)})
            return
        self._lanes[thread] = lane
        self._may_open()
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK, self._look)

    async def _greeted(self, made: socket.socket) -> FrameReader:
        """Connect, and ask something: what reads on from the answer."""
        made.setblocking(False)
        await self._loop.sock_connect(made, self._address)
        await self._loop.sock_sendall(made, self._probe())
        reader = FrameReader(self._limits)
        while data := await self._loop.sock_recv(made, _READ_SIZE[0]):
            if reader.feed(data):
                return reader
        raise ConnectionLost(self._remote, "closed by the peer")

    def _may_open(self) -> None:
        self._is_opening = False

    def _look(self) -> None:
        """Close lanes that were not used for a while, and wake who should have left his."""
        now = self._monotonic()
        for lane in list(self._lanes.values()):
            if lane.lock.locked():
                lane.wake_if_late(now)
            elif now - lane.used_at > self._idle:
                self._drop(lane)
        for lane in list(self._left):
            self._close(lane)
        living = sys._current_frames()
        for thread in list(self._told):
            if thread not in living:
                self._told.discard(thread)
        is_needed = bool(self._lanes or self._left)
        self._timer = self._loop.call_later(_LOOK, self._look) if is_needed else None

    def _drop(self, lane: Lane) -> None:
        for thread, each in self._lanes.items():
            if each is lane:
                del self._lanes[thread]
                break
        self._close(lane)

    def _close(self, lane: Lane) -> None:
        if lane.close():
            self._left.discard(lane)
        else:
            self._left.add(lane)

    def close(self, *, is_in_order: bool) -> None:
        """The connection has ended: who waits on a lane is woken, and told so by what it reads.

        If the peer ended it in order (`is_in_order`), what it has got is left to be answered.
        """
        if self._opening is not None:
            self._opening.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for lane in list(self._lanes.values()):
            self._drop(lane)
        if not is_in_order:
            for lane in self._left:
                lane.wake()
        # Not before: from here on threads close what they leave, and nothing else may be done to a
        # lane that one of them uses. Who has left before is found here.
        self._is_closed = True
        for lane in list(self._left):
            self._close(lane)


# One socket that an event loop and threads take turns to read.
#
# A thread that waits for an answer while the loop reads is woken twice over: the kernel wakes the
# loop, and the loop the thread. That costs more than everything else a blocking request does. So
# the loop lends the reading to threads: one of those that wait polls the socket, reads what came,
# and settles the others. When it has its own answer it wakes another one to poll. A thread that
# sends alone never waits for another one.
#
# * *Polling needs no right.* Whoever waits may poll the threads' own descriptor, so that a thread
#   that is held up in there, by a signal handler, holds up nobody. That only one of them does so is
#   economy: two at once, or none for a moment, are not an error. When the loop reads again it rings
#   a bell that they poll, too: what is read at once by another one does not wake who polls. The
#   last one to leave closes the descriptors.
# * *Reading needs the lock*, for one read that does not wait and the cutting of its frames, and
#   `_may_read` under it. The loop tries the lock and never waits for it. The loop's transport is
#   paused from `_lend` until the loop goes on in `_read_on`: at any time one of the two reads.
# * *Threads read for threads only.* What is not an answer for one of them ends the lending at once:
#   it is kept, in order, until the loop has handled it and only then reads on. So order and back-
#   pressure are the loop's, as without threads. It lends when it has read an answer for a thread,
#   nothing of its own is on its way, and no frame has been begun.
# * *The loop looks* at intervals. If nobody has read since the last look, whatever the reason, it
#   takes the reading back. So no error of economy lasts, and what the peer asks after the last send
#   of a thread, or the news that it is gone, waits for two looks at most.
# * The end of the stream is not for threads. Who finds it hands the reading back for good, and the
#   loop, finding the same, ends the connection and tells all who wait. Only a reset, which the
#   system reports once, is told by who finds it.
#
# A thread may be interrupted anywhere (see `sharedsocket`), where the interpreter looks: after a
# call and when a function or another round of a loop begins. What was received is noted by the very
# call that receives; frames are noted as cut, and as handed out, in steps without a call; and
# handing out may be repeated. So the next one with the lock goes on. Only `FrameReader.feed` can
# not be repeated: who is interrupted in it leaves `_is_cutting`, and whoever finds that ends the
# connection.


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


# One socket that an event loop and other threads write to, without tearing each other's frames.
#
# Waking a loop that sleeps on another thread costs more than everything else a blocking request
# does, so a thread writes its frame itself. Two rules, both kept under one lock, make that safe:
#
# * As long as the socket is *free*, nothing that was begun is unfinished: the loop's transport
#   holds no bytes. Whoever has the lock may write whole frames.
# * From the moment at which a write is cut short until everything before and after it has been
#   written, the socket *belongs to the loop*. What threads have to write then waits for the loop,
#   in order and behind the rest of the frame that was cut.
#
# Threads do not wait for each other. Each puts its frame into a queue and tries the lock; whoever
# gets it writes all that is in the queue, at once. A thread that does not get it may leave: the
# holder looks into the queue again after it has let go of the lock.
#
# The transport does not tell when it has become empty, and may only be asked on the loop. It is
# asked there after each write, at growing intervals: a late look costs a detour over the loop,
# never order. Without a descriptor of its own (TLS, systems that cannot share one) the socket
# belongs to the loop for ever, and threads use the same calls.
#
# The lock is held for one non-blocking system call at most, and never while waiting. A signal
# handler may nevertheless hold up the thread that has it, for as long as it likes, and may itself
# wait for the loop (it stops a client). So the loop never waits for the lock, it tries it:
#
# * A *flush* first notes that it is wanted, then tries. Either it gets the lock, or somebody had it
#   after the note was made: he looks for the note after he has let go, and wakes the loop. So does
#   who is interrupted. What the loop has to write goes into the queue of the threads until then:
#   what a thread writes after the loop has told something for it may not come before that. Only the
#   last flush of a connection waits for a moment: nothing comes after it.
# * A *look* that does not get the lock is repeated as if the transport were not empty.
# * The *close* first notes that it is closed, then tries. Who comes later does not touch the
#   descriptor any more; who has the lock at that moment closes it after he has let go.
#
# A thread may be interrupted anywhere: by Ctrl-C, or by a limit on the time of a handler. Whatever
# it leaves behind must not be the trouble of others. The lock is therefore taken by `with` alone,
# which the interpreter does not interrupt between taking and holding; how much the socket took is
# noted by the call that writes; and a thread that is interrupted has the loop look after the queue.
# Only if frames were on their way out of the queue at that moment, nobody knows what became of
# them, and the connection ends.


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
