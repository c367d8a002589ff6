"""Following the master: a slave takes the master's log, and says how much of it it has.

Each connection begins with a report of where the last record of this log begins. The master sends
its log from there on, and what it has where this log ends already must be the same bytes; see
`store.mirroring` for why that is enough. What follows is stored at the same offsets, which makes it
readable and wakes those who wait for it, and is reported. So it costs one record, and no question,
to know that this is the same log. When anything does not fit, or nobody speaks for too long, the
connection is given up and a new one begins with a report. So nothing has to be remembered about a
connection: a slave that was killed goes on where its log ends after recovery.

Log files are deleted as a whole. If the master has deleted the one with the last record, it has
what follows only if this log ends with that file. Then there is nothing to compare, and the next
connection begins at the end. Apache's master does not say what it has deleted: it sends nothing but
signs of life, or hangs up, as it does when its log is shorter than this one, and is not followed.

With synchronous flushing a report says what is on the disk, so that a master that waits for its
slaves waits for their disks too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from orbitmq.broker.errors import BrokerError
from orbitmq.broker.parts import Parts
from orbitmq.broker.replication.frames import FrameReader, pack_report
from orbitmq.broker.replication.master import MasterPlace
from orbitmq.errors import OrbitError
from orbitmq.remoting.address import Address
from orbitmq.remoting.occurrences import Occurrences
from orbitmq.store.mirroring import MirrorRefused
from orbitmq.store.settings import FlushPolicy

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT = 5.0
#: A master that takes no reports is not sent more of them.
_UNREAD_REPORTS = 64 * 1024


class MasterLost(BrokerError):
    """The connection to the master has ended."""


class LastRecordDeleted(BrokerError):
    """The master's log begins where this one ends: there is nothing to compare."""


class Following:
    """Keeps a slave's log a copy of its master's. A job of the background."""

    def __init__(self, parts: Parts, master: MasterPlace) -> None:
        self._parts = parts
        self._master = master
        self._settings = parts.settings.replication
        self._failures = Occurrences()
        self._stream: _Stream | None = None
        #: The master has said that there is nothing to compare.
        self._is_incomparable = False
        #: Called when the log has grown.
        self.on_growth: list[Callable[[], None]] = []
        parts.store.mirroring.follow()

    @property
    def is_connected(self) -> bool:
        """Whether the master is there, for all that is known."""
        return self._stream is not None

    @property
    def is_in_step(self) -> bool:
        """Whether the master's log goes on where this one ends, as the master itself said."""
        return self._stream is not None and self._stream.is_in_step

    @property
    def is_alone(self) -> bool:
        """Whether there is, for all that is known, no master."""
        return self._stream is None and self._master.is_told

    @property
    def address(self) -> Address | None:
        """Where the master's log is to be had."""
        return self._master.log_address

    @property
    def heard_at(self) -> float | None:
        """When the master last said something, on the monotonic clock."""
        return None if self._stream is None else self._stream.heard_at

    # The job.

    def begin(self) -> None:
        self._parts.background.spawn(self._run())

    def end(self) -> None:
        """The background ends the task."""

    async def _run(self) -> None:
        while True:
            _, address = await self._master.known()
            try:
                await self._follow(address)
            except LastRecordDeleted as error:
                self._is_incomparable = True
                log.warning("%s", error, extra={"master": str(address)})
                continue
            except (OrbitError, OSError, TimeoutError) as error:
                reason = str(error) or "it does not answer"
                if count := self._failures.note(reason):
                    log.warning(
                        "not following the master: %s; trying again every %g s (%d so far)",
                        reason,
                        self._settings.retry,
                        count,
                        extra={"master": str(address)},
                    )
            await self._master.moved(within=self._settings.retry)

    async def _follow(self, address: Address) -> None:
        """Follow until something ends it; what, is raised."""
        loop = self._parts.loop
        begin = self._begin_at()
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            transport, stream = await loop.create_connection(
                lambda: _Stream(self._parts, self._grown, begin), *address
            )
        log.info("following the master", extra={"master": str(address)})
        self._stream = stream
        if not self._parts.settings.pull.slave_read_enable:
            # Who came here because the master was gone is told to go back to it.
            self._parts.held.wake()
        try:
            while not stream.lost.done():
                await asyncio.wait((stream.lost,), timeout=self._settings.heartbeat)
                stream.look()
            raise stream.lost.result()
        finally:
            self._stream = None
            transport.abort()
            self._parts.store.mirroring.forget_rest()

    def _begin_at(self) -> int | None:
        """Where the master is to begin; None when there is no log yet."""
        mirroring = self._parts.store.mirroring
        if mirroring.is_new:
            return None
        if self._is_incomparable:
            # The next time it may be otherwise.
            self._is_incomparable = False
            return mirroring.written
        # An offset of 0 would say that there is none.
        return min(max(mirroring.last_record, 1), mirroring.written)

    def _grown(self) -> None:
        for call in self.on_growth:
            call()


class _Stream(asyncio.Protocol):
    """One connection to the master."""

    def __init__(self, parts: Parts, grown: Callable[[], None], begin: int | None) -> None:
        #: Why it ended.
        self.lost: asyncio.Future[Exception] = parts.loop.create_future()
        self.heard_at = parts.clock.monotonic()
        self._store = parts.store
        self._mirroring = parts.store.mirroring
        self._silence = parts.settings.replication.silence
        self._monotonic = parts.clock.monotonic
        self._is_sync = parts.store.settings.flush.policy is FlushPolicy.SYNC
        self._grown = grown
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._acknowledged: int | None = None
        self._reported: int | None = None
        #: Where this log ended when the connection began.
        self._had = self._mirroring.written
        #: Where the next frame must begin; anywhere when there is no log yet.
        self._next = begin
        self._is_heard = False
        self._has_fitted = False

    @property
    def is_in_step(self) -> bool:
        """Whether the end of this log came as it is here, and all else went on from there."""
        return self._has_fitted and not self.lost.done()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # That of uvloop is one in all but name.
        self._transport = cast("asyncio.Transport", transport)
        self._acknowledge(self._had if self._next is None else self._next)

    def data_received(self, data: bytes) -> None:
        if self.lost.done():
            return
        self.heard_at = self._monotonic()
        try:
            self._take(data)
        except (OrbitError, OSError) as error:
            self._give_up(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        reason = f"the connection has ended ({error or 'closed by the master'})"
        if self._is_comparing:
            # As Apache's 4.x does when it has less.
            reason += (
                f"; the master sent nothing from {self._next} on, this log ends at {self._had}"
            )
        self._give_up(MasterLost(reason))

    def look(self) -> None:
        """From time to time: report, and give up a master that is silent."""
        if self._monotonic() - self.heard_at > self._silence:
            self._give_up(MasterLost(f"the master said nothing for {self._silence:g} s"))
        elif self._reported is not None:
            self._report(self._reported)

    def _give_up(self, error: Exception) -> None:
        if not self.lost.done():
            self.lost.set_result(error)

    # The log.

    def _take(self, data: bytes) -> None:
        mirroring = self._mirroring
        first, taken = self._join(data)
        if first < self._had:
            taken = mirroring.compare(first, taken)
            first = self._had
        if not self._is_heard or self._is_comparing:
            return
        self._has_fitted = True
        before = mirroring.written
        end = mirroring.append_raw(first, taken) if taken else before
        if end != self._acknowledged:
            self._acknowledge(end)
        if end != before:
            self._grown()

    @property
    def _is_comparing(self) -> bool:
        """Whether the master has yet to send something that is here."""
        return self._next is not None and self._next < self._had

    def _join(self, data: bytes) -> tuple[int, bytes]:
        """What the frames that are complete now bring, and where it belongs."""
        first: int | None = None
        bodies: list[bytes] = []
        for offset, body in self._frames.feed(data):
            if self._next is None:
                self._next = offset
            if offset != self._next:
                raise self._elsewhere(offset)
            if not body and self._is_heard and self._is_comparing:
                # Only the first may be a sign of life: the report came late.
                raise MirrorRefused(
                    f"the master sent nothing from {offset} on, this log ends at {self._had}; "
                    "empty this folder to copy the log anew"
                )
            self._is_heard = True
            first = offset if first is None else first
            self._next = offset + len(body)
            bodies.append(body)
        if first is None:
            return self._had, b""
        return first, bodies[0] if len(bodies) == 1 else b"".join(bodies)

    def _elsewhere(self, offset: int) -> OrbitError:
        if offset == self._had and not self._is_heard:
            return LastRecordDeleted(
                f"the master has deleted the end of this log: it is followed from {offset} on "
                "without a comparison"
            )
        return MirrorRefused(
            f"the master sends its log from {offset} on, and this one ends at "
            f"{self._mirroring.expected}; empty this folder to copy the log anew"
        )

    def _acknowledge(self, end: int) -> None:
        self._acknowledged = end
        if self._is_sync:
            self._store.when_flushed(
                end, lambda failure: self._report(end) if failure is None else None
            )
        else:
            self._report(end)

    def _report(self, end: int) -> None:
        self._reported = end
        transport = self._transport
        if (
            transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() < _UNREAD_REPORTS
        ):
            transport.write(pack_report(end))
