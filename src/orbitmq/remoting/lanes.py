"""Sockets of their own for threads that ask at the same time.

Threads that share one socket have to wake each other: whoever reads wakes the one whose answer it
is, and all of them wait for the interpreter. With eight threads that is five changes of the thread
for each request. With a socket each it is one, by the kernel, and a request costs two thirds.

So a thread that keeps finding others at the shared socket gets a *lane*: a second connection to the
same peer, on which only that thread asks, one request at a time, blocking. Nobody introduces
himself on a lane, so the peer asks nothing there. The loop opens lanes, while the thread goes on
with the shared socket, and hands one out when the peer has answered a question on it: a system
takes connections also for a server that does not. A peer that lets no more in is asked again only
after a pause. A thread that has ended leaves its lane to the next one. The loop closes lanes that
were not used for a while, and all of them with the connection.

* A thread uses its lane under the lane's lock, which it never waits for: a signal handler that asks
  while its own thread does, takes the shared socket. So does a thread whose lane the loop looks at.
* The loop closes descriptors, and nobody else, so that no number is used again under a call. A
  thread in the middle of a request is woken by shutting the socket down: when the connection is
  ended here, and when its time is up and signals keep it from seeing that (after each of them the
  system waits anew). When the peer ends the connection in order, it may still answer on lanes.
* After anything but an answer - a late one, an interrupt - a lane is not used any more: nobody
  knows what comes next on it. Nor is one that the peer has closed meanwhile, which is looked for
  after a while without use: what was never sent must not count as a failure.
* What a thread has told the peer one-way is on the shared socket, and may not be overtaken by what
  it asks after that. That next request therefore goes the same way.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Final

from orbitmq.remoting.address import Address
from orbitmq.remoting.errors import ConnectionLost
from orbitmq.remoting.onloop import call_on_loop
from orbitmq.remoting.settings import ConnectionSettings
from orbitmq.wire.codes import Flag
from orbitmq.wire.command import Command, decode_command
from orbitmq.wire.errors import FrameError
from orbitmq.wire.frame import Bytes, FrameReader
from orbitmq.wire.limits import WireLimits

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
