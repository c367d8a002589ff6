"""Following the master: a slave takes the master's log, and says how much of it it has.

Each connection begins with a report of where this log ends. What the master sends must go on
exactly there; it is stored at the same offsets, which makes it readable and wakes those who wait
for it, and is reported. When anything does not fit, or nobody speaks for too long, the connection
is given up and a new one begins with a report. So nothing has to be remembered about a connection:
a slave that was killed goes on where its log ends after recovery.

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


class Following:
    """Keeps a slave's log a copy of its master's. A job of the background."""

    def __init__(self, parts: Parts, master: MasterPlace) -> None:
        self._parts = parts
        self._master = master
        self._settings = parts.settings.replication
        self._failures = Occurrences()
        self._stream: _Stream | None = None
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
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            transport, stream = await loop.create_connection(
                lambda: _Stream(self._parts, self._grown), *address
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

    def _grown(self) -> None:
        for call in self.on_growth:
            call()


class _Stream(asyncio.Protocol):
    """One connection to the master."""

    def __init__(self, parts: Parts, grown: Callable[[], None]) -> None:
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
        self._reported: int | None = None
        self._has_fitted = False

    @property
    def is_in_step(self) -> bool:
        """Whether something came, and all of it went on where the log ended."""
        return self._has_fitted and not self.lost.done()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # That of uvloop is one in all but name.
        self._transport = cast("asyncio.Transport", transport)
        self._acknowledge(self._mirroring.expected)

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
        self._give_up(MasterLost(f"the connection has ended ({error or 'closed by the master'})"))

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
        first: int | None = None
        expected = mirroring.expected
        bodies: list[bytes] = []
        for offset, body in self._frames.feed(data):
            if first is None and mirroring.is_new:
                expected = offset
            if offset != expected:
                raise MirrorRefused(
                    f"the master sends its log from {offset} on, and this one ends at {expected}; "
                    "empty this folder to copy the log anew"
                )
            if body:
                first = offset if first is None else first
                expected += len(body)
                bodies.append(body)
            self._has_fitted = True
        if first is None:
            return
        before = mirroring.written
        end = mirroring.append_raw(first, bodies[0] if len(bodies) == 1 else b"".join(bodies))
        if end != before:
            self._acknowledge(end)
            self._grown()

    def _acknowledge(self, end: int) -> None:
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
