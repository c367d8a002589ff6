"""The master's side of replication: serves slaves on a port of its own, and waits for their copies.

Every client of the port gets every message, so it is for the machines of the cluster only.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from orbitmq.broker.errors import BrokerError, PutStatus
from orbitmq.broker.settings import HA_DISTANCE
from orbitmq.clock import Clock
from orbitmq.remoting.settings import Address, ListenFailed, socket_address
from orbitmq.store.append import Arrivals
from orbitmq.store.mirror import Mirroring

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts
    from orbitmq.broker.settings import ReplicationSettings


log = logging.getLogger(__name__)

_BACKLOG = 16
_ACCEPT_PAUSE = 1.0
#: Checks of silent slaves within a heartbeat interval.
_LOOKS = 5


class ReplicaServer:
    """The slaves of a master. A job of the scheduler; listens from its construction on."""

    def __init__(self, parts: Parts) -> None:
        """Raises `ListenFailed`."""
        self._parts = parts
        self._settings = settings = parts.settings.replication
        self._mirroring = parts.store.mirroring
        self._listener = _listen(parts)
        self.address = Address(parts.address.host, self._listener.getsockname()[1])
        self.replicas: set[Replica] = set()
        self.copies: ReplicaAcks | None = None
        if settings.in_sync_replicas > 1:
            self.copies = ReplicaAcks(
                settings.in_sync_replicas - 1,
                settings.copy_timeout,
                lambda: self.replicas,
                parts.loop,
            )
            parts.writes.wait_for_copies(self.copies.when_copied)
        parts.scheduler.every(settings.heartbeat / _LOOKS, self._look)

    @property
    def in_sync(self) -> int:
        """The number of slaves that are close behind."""
        return sum(1 for replica in self.replicas if replica.is_in_sync)

    def arrived(self, _: Sequence[Arrivals]) -> None:
        """New messages can be sent."""
        for replica in self.replicas:
            replica.wake()

    # The job.

    def start(self) -> None:
        if self._listener.fileno() >= 0:
            self._parts.loop.add_reader(self._listener, self._accept)

    def stop(self) -> None:
        self._parts.loop.remove_reader(self._listener)
        self._listener.close()
        for replica in tuple(self.replicas):
            replica.close("this broker stops")
        if self.copies is not None:
            self.copies.end()

    # Slaves.

    def _accept(self) -> None:
        try:
            accepted, name = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Probably no more file descriptors; wait until some are closed.
            log.warning("a slave could not be accepted: %s", error)
            self._parts.loop.remove_reader(self._listener)
            self._parts.loop.call_later(_ACCEPT_PAUSE, self.start)
            return
        address = socket_address(name)
        if len(self.replicas) >= self._settings.replicas:
            log.warning(
                "slave refused: %d are connected", len(self.replicas), extra={"slave": address}
            )
            accepted.close()
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.replicas.add(
            Replica(
                accepted,
                address,
                self._mirroring,
                self._settings,
                self._parts.loop,
                self._parts.clock,
                reported=self._reported,
                closed=self.replicas.discard,
            )
        )

    def _reported(self, _: Replica) -> None:
        if self.copies is not None:
            self.copies.acknowledged()

    def _look(self) -> None:
        now = self._parts.clock.monotonic()
        for replica in tuple(self.replicas):
            replica.look(now)


def _listen(parts: Parts) -> socket.socket:
    host, port = parts.settings.server.host, parts.settings.replication.port
    if port is None:
        port = parts.port + HA_DISTANCE
    address = Address(host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ListenFailed(
            address, f"{error} (slaves are served there; broker.replication.port chooses it)"
        ) from error
    listener.setblocking(False)
    return listener


# A slave, as its master sees it. The log is sent from the mapped files, some frames at a time and
# never more than the socket accepts. So a slave that does not read costs only these frames, and a
# fast one shares the loop with other work.


#: Frames that are given to the socket together.
_BURST = 16
_READ = 64 * 1024


class Replica:
    """One connected slave. Belongs to the loop."""

    def __init__(
        self,
        accepted: socket.socket,
        address: Address,
        mirroring: Mirroring,
        settings: ReplicationSettings,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        *,
        reported: Callable[[Replica], None],
        closed: Callable[[Replica], None],
    ) -> None:
        self.address = address
        #: The end of its log in its last report; None before the first.
        self.acknowledged: int | None = None
        #: The offset of the next frame.
        self.position = 0
        self.sent_bytes = 0
        #: Whether it was in sync recently.
        self.bytes_per_second = 0.0
        self._socket = accepted
        self._mirroring = mirroring
        self._settings = settings
        self._loop = loop
        self._monotonic = clock.monotonic
        self._reported = reported
        self._closed = closed
        self._reports = ReportReader()
        self._unsent: list[bytes | memoryview] = []
        self._is_woken = False
        self._waits_for_socket = False
        self._is_open = True
        self._is_stray = False  #: its log is not a part of this one
        self._heard_at = self._sent_at = self._looked_at = clock.monotonic()
        self._sent_then = 0
        loop.add_reader(accepted, self._read)

    @property
    def is_in_sync(self) -> bool:
        """Whether it is close enough behind to be waited for."""
        if self.acknowledged is None or self._is_stray:
            return False
        return self.behind < self._settings.max_gap

    @property
    def behind(self) -> int:
        """Bytes of the log that it has not reported."""
        return self._mirroring.end - (self.acknowledged or 0)

    @property
    def unsent(self) -> int:
        """Bytes that were taken from the log and not sent yet."""
        return sum(len(each) for each in self._unsent)

    # Reports.

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ)
            if not data:
                self.close("it has closed the connection")
                return
            offset = self._reports.feed(data)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, FrameRefused) as error:
            self.close(str(error))
            return
        self._heard_at = self._monotonic()
        if offset is None:
            return
        if self.acknowledged is None:
            self._begin(offset)
        # It cannot have more than was sent, unless its log is another one.
        self.acknowledged = 0 if self._is_stray else min(offset, self.position)
        self._reported(self)

    def _begin(self, asked: int) -> None:
        mirroring = self._mirroring
        if asked == 0:
            self.position = mirroring.start if self._settings.whole_log else mirroring.last_file
        else:
            self.position = min(max(asked, mirroring.start), mirroring.end)
            if self.position != asked:
                self._is_stray = True
                # The first frame shows the slave that this does not continue its log.
                log.error(
                    "slave %s has a log up to %d, and this one holds %d to %d: it cannot follow; "
                    "empty its folder to copy the log again",
                    self.address,
                    asked,
                    mirroring.start,
                    mirroring.end,
                )
                self._unsent.append(pack_head(self.position, 0))
        log.info("slave follows", extra={"slave": str(self.address), "offset": self.position})
        self.wake()

    # Frames.

    def wake(self) -> None:
        """Have new messages sent soon."""
        if not self._is_woken and not self._waits_for_socket and self.acknowledged is not None:
            self._is_woken = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._is_woken = False
        if not self._is_open:
            return
        if not self._unsent and not self._take_frames():
            self._wait_for_socket(is_wanted=False)
            return
        try:
            sent = self._socket.sendmsg(self._unsent)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self.close(str(error))
            return
        if sent:
            self._sent_at = self._monotonic()
            self.sent_bytes += sent
            _drop(self._unsent, sent)
        self._wait_for_socket(is_wanted=bool(self._unsent) or self._has_more)

    def _take_frames(self) -> bool:
        """Take the next frames from the log; False when there are none."""
        for _ in range(_BURST):
            if not self._has_more:
                break
            piece = self._mirroring.stretch(self.position, self._settings.transfer_size)
            if not piece:
                self.close("what it needs next has been deleted")
                return False
            self._unsent += (pack_head(self.position, len(piece)), piece)
            self.position += len(piece)
        return bool(self._unsent)

    @property
    def _has_more(self) -> bool:
        return self.position < self._mirroring.end

    def _wait_for_socket(self, *, is_wanted: bool) -> None:
        if is_wanted is self._waits_for_socket:
            return
        self._waits_for_socket = is_wanted
        if is_wanted:
            self._loop.add_writer(self._socket, self._send)
        else:
            self._loop.remove_writer(self._socket)

    # Time.

    def look(self, now: float) -> None:
        """Send a heartbeat to a slave that got nothing, and close one that is silent."""
        if now > self._looked_at:
            self.bytes_per_second = (self.sent_bytes - self._sent_then) / (now - self._looked_at)
        self._looked_at, self._sent_then = now, self.sent_bytes
        if now - self._heard_at > self._settings.silence:
            self.close(f"it was silent for {self._settings.silence:g} s")
            return
        if self.acknowledged is None:
            return
        is_idle = not self._unsent and not self._has_more
        if is_idle and now - self._sent_at >= self._settings.heartbeat:
            self._unsent.append(pack_head(self.position, 0))
        # Also in case of messages that were not announced.
        self.wake()

    def close(self, reason: str) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._socket)
        self._wait_for_socket(is_wanted=False)
        self._unsent.clear()
        self._socket.close()
        log.info("slave left: %s", reason, extra={"slave": str(self.address)})
        self._closed(self)


def _drop(pieces: list[bytes | memoryview], sent: int) -> None:
    """Remove the first `sent` bytes."""
    whole = 0
    for piece in pieces:
        if len(piece) > sent:
            break
        sent -= len(piece)
        whole += 1
    del pieces[:whole]
    if sent:
        pieces[0] = memoryview(pieces[0])[sent:]


# Waiting for copies. The waiting messages are in the order of the log, so one offset, which enough
# slaves have reached, decides about all of them; after `copy_timeout` they are answered
# FLUSH_SLAVE_TIMEOUT. Without enough slaves in sync the answer comes immediately.


Copied: TypeAlias = Callable[[PutStatus], None]


class ReplicaAcks:
    """The messages that wait for slaves. Belongs to the loop."""

    def __init__(
        self,
        needed: int,
        timeout: float,
        followers: Callable[[], Iterable[Replica]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`needed` slaves must have a message, besides the master."""
        self._needed = needed
        self._timeout = timeout
        self._followers = followers
        self._loop = loop
        #: End of the message, deadline, callback; the first two increase.
        self._waiting: deque[tuple[int, float, Copied]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def when_copied(self, end: int, call: Copied) -> None:
        """Call, possibly immediately, when the log below `end` is on enough brokers, or why not."""
        in_sync = sum(1 for follower in self._followers() if follower.is_in_sync)
        if in_sync < self._needed:
            call(PutStatus.SLAVE_NOT_AVAILABLE)
        elif self._reached() >= end:
            call(PutStatus.PUT_OK)
        else:
            deadline = self._loop.time() + self._timeout
            self._waiting.append((end, deadline, call))
            if self._timer is None:
                self._timer = self._loop.call_at(deadline, self._expire)

    def acknowledged(self) -> None:
        """A slave has reported; answer the messages that enough of them have."""
        if not self._waiting:
            return
        reached = self._reached()
        while self._waiting and self._waiting[0][0] <= reached:
            self._waiting.popleft()[2](PutStatus.PUT_OK)

    def _reached(self) -> int:
        """The offset up to which enough slaves have everything."""
        offsets = [follower.acknowledged or 0 for follower in self._followers()]
        if len(offsets) < self._needed:
            return 0
        return heapq.nlargest(self._needed, offsets)[-1]

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._waiting and self._waiting[0][1] <= now:
            self._waiting.popleft()[2](PutStatus.FLUSH_SLAVE_TIMEOUT)
        if self._waiting:
            self._timer = self._loop.call_at(self._waiting[0][1], self._expire)

    def end(self) -> None:
        """End all waiting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            self._waiting.popleft()[2](PutStatus.FLUSH_SLAVE_TIMEOUT)


# The protocol: reports of the slave, frames of the master (RocketMQ's HA protocol).
#
#     report   offset          8 bytes    the end of the slave's log
#     frame    offset  size    12 bytes   then `size` bytes of the master's log from `offset` on
#
# Numbers are big endian. A frame of size 0 is a heartbeat. Frames are cut regardless of messages.
# The first report is the offset to begin at. There is no authentication.


REPORT_SIZE = 8
HEAD_SIZE = 12
#: The buffer of Apache's slave, and so the limit of any frame.
LARGEST_FRAME = 4 * 1024 * 1024

_report = struct.Struct(">q")
_head = struct.Struct(">qi")

pack_report = _report.pack
pack_head = _head.pack


class FrameRefused(BrokerError):
    """The peer sent something that is not of this protocol."""


class ReportReader:
    """Decodes reports. Holds no socket."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> int | None:
        """The newest complete report, or None."""
        data = self._rest + data
        whole = len(data) - len(data) % REPORT_SIZE
        self._rest = data[whole:]
        if not whole:
            return None
        offset: int = _report.unpack_from(data, whole - REPORT_SIZE)[0]
        if offset < 0:
            raise FrameRefused(f"a slave must report an offset of 0 or more, got {offset}")
        return offset


class FrameReader:
    """Decodes frames. Holds no socket, and at most one frame."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The frames that are complete now: offset and bytes."""
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        try:
            while end - at >= HEAD_SIZE:
                offset, size = _head.unpack_from(data, at)
                if offset < 0 or not 0 <= size <= LARGEST_FRAME - HEAD_SIZE:
                    raise FrameRefused(
                        f"a frame of {size} bytes at offset {offset} cannot be; the size must be "
                        f"from 0 to {LARGEST_FRAME - HEAD_SIZE}"
                    )
                body = at + HEAD_SIZE
                if body + size > end:
                    break
                at = body + size
                yield offset, data[body:at]
        finally:
            self._rest = data[at:]
