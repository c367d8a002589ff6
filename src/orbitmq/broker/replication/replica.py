"""A slave as its master sees it: what it has, and what is on its way to it.

The log goes from the mapped files straight into the socket, some frames at a time and never more
than the socket takes. So a slave that does not read costs nothing but these few frames, and one
that reads fast shares the loop with everybody else.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from orbitmq.broker.replication.frames import FrameRefused, ReportReader, pack_head
from orbitmq.broker.settings import ReplicationSettings
from orbitmq.clock import Clock
from orbitmq.remoting.address import Address
from orbitmq.store.mirroring import Mirroring

log = logging.getLogger(__name__)

#: Frames that are given to the socket at once.
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
        #: Where its log ends, as it said last; None before it has said anything.
        self.acknowledged: int | None = None
        #: What it is sent next.
        self.position = 0
        self.sent_bytes = 0
        #: Of late.
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
        """Bytes of the log that it has not said to have."""
        return self._mirroring.end - (self.acknowledged or 0)

    @property
    def unsent(self) -> int:
        """Bytes that are taken from the log and not given to the system yet."""
        return sum(len(each) for each in self._unsent)

    # Hearing.

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
        # What it has must be ours: more than was sent is another log.
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
                # It sees from the first frame that this does not go on where its log ends.
                log.error(
                    "slave %s has a log up to %d, and this one holds %d to %d: it cannot follow; "
                    "empty its folder to copy the log anew",
                    self.address,
                    asked,
                    mirroring.start,
                    mirroring.end,
                )
                self._unsent.append(pack_head(self.position, 0))
        log.info("slave follows", extra={"slave": str(self.address), "offset": self.position})
        self.wake()

    # Sending.

    def wake(self) -> None:
        """Have what is new in the log sent, soon."""
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
        """Say something to a slave that has heard nothing, and give up one that says nothing."""
        if now > self._looked_at:
            self.bytes_per_second = (self.sent_bytes - self._sent_then) / (now - self._looked_at)
        self._looked_at, self._sent_then = now, self.sent_bytes
        if now - self._heard_at > self._settings.silence:
            self.close(f"it said nothing for {self._settings.silence:g} s")
            return
        if self.acknowledged is None:
            return
        is_idle = not self._unsent and not self._has_more
        if is_idle and now - self._sent_at >= self._settings.heartbeat:
            self._unsent.append(pack_head(self.position, 0))
        # Also in case of records that nobody was told of.
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
