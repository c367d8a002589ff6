"""The slave's side of replication: copies the master's log and tables.

Each connection begins with a report of where the last record of this log begins. The master sends
its log from there on, and the part that is here already must be the same bytes (`store.mirror`).
What follows is stored at the same offsets and reported. After any mismatch or silence a new
connection starts over, so there is no state to keep. With synchronous flushing a report is about
what is on the disk.

If the master has deleted the file with the last record, there is nothing to compare, and the next
connection begins at the end of this log. Apache's master does not report deletions: it sends only
heartbeats, or closes the connection, and is not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, TypeVar, cast

from orbitmq.broker.errors import BrokerError
from orbitmq.broker.groups import consumption
from orbitmq.broker.progress import encode_progress
from orbitmq.broker.registration import outward_channels
from orbitmq.broker.replication.master import FrameReader, ReplicaServer, pack_report
from orbitmq.broker.settings import DEFAULT_PORT, HA_DISTANCE
from orbitmq.broker.timers import TIMER_PROGRESS, TimerFile, apache_checkpoint, from_apache
from orbitmq.broker.topics import reading
from orbitmq.clock import milliseconds
from orbitmq.errors import OrbitError
from orbitmq.logonce import LogEveryNth
from orbitmq.remoting.channels import Channels
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.remoting.settings import Address, AddressError, parse_address
from orbitmq.store.append import Arrivals
from orbitmq.store.mirror import MirrorRefused
from orbitmq.store.settings import FlushPolicy
from orbitmq.wire.bodies import (
    ConsumerOffsets,
    DataVersion,
    DelayOffsets,
    HAClientInfo,
    HAConnectionInfo,
    HARuntimeInfo,
    KVTable,
    RequestModes,
    SubscriptionGroupTable,
    TimerMetrics,
    TimingCount,
    TopicConfigTable,
)
from orbitmq.wire.codes import Gate, RequestCode, ResponseCode, named
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import Body, decode_body, encode_body

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts
    from orbitmq.broker.settings import ReplicationSettings


log = logging.getLogger(__name__)

_CONNECT_TIMEOUT = 5.0
#: A master that does not read reports gets no more of them.
_UNREAD_REPORTS = 64 * 1024


class MasterLost(BrokerError):
    """The connection to the master has ended."""


class LastRecordDeleted(BrokerError):
    """The master's log begins where this one ends: there is nothing to compare."""


class LogFollower:
    """Keeps a slave's log a copy of its master's. A job of the scheduler."""

    def __init__(self, parts: Parts, master: MasterPlace) -> None:
        self._parts = parts
        self._master = master
        self._settings = parts.settings.replication
        self._failures = LogEveryNth()
        self._stream: _Stream | None = None
        #: Whether the master has reported that there is nothing to compare.
        self._is_incomparable = False
        #: Called when the log has grown.
        self.on_growth: list[Callable[[], None]] = []
        parts.store.mirroring.follow()

    @property
    def is_connected(self) -> bool:
        """Whether the master is believed to be there."""
        return self._stream is not None

    @property
    def is_in_step(self) -> bool:
        """Whether the master's log continues this one, as the master itself has shown."""
        return self._stream is not None and self._stream.is_in_step

    @property
    def is_alone(self) -> bool:
        """Whether there is believed to be no master."""
        return self._stream is None and self._master.is_told

    @property
    def address(self) -> Address | None:
        """The address of the master's log."""
        return self._master.log_address

    @property
    def heard_at(self) -> float | None:
        """When the master last sent something, on the monotonic clock."""
        return None if self._stream is None else self._stream.heard_at

    # The job.

    def start(self) -> None:
        self._parts.scheduler.spawn(self._run())

    def stop(self) -> None:
        """The scheduler cancels the task."""

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
        """Follow the master; raises the reason for the end."""
        loop = self._parts.loop
        begin = self._begin_at()
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            transport, stream = await loop.create_connection(
                lambda: _Stream(self._parts, self._grown, begin), *address
            )
        log.info("following the master", extra={"master": str(address)})
        self._stream = stream
        if not self._parts.settings.pull.slave_read_enable:
            # Clients that came because the master was gone are sent back to it.
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
        """The offset to begin at; None when there is no log yet."""
        mirroring = self._parts.store.mirroring
        if mirroring.is_new:
            return None
        if self._is_incomparable:
            # The next time this may be different.
            self._is_incomparable = False
            return mirroring.written
        # An offset of 0 would mean that there is no log.
        return min(max(mirroring.last_record, 1), mirroring.written)

    def _grown(self) -> None:
        for call in self.on_growth:
            call()


class _Stream(asyncio.Protocol):
    """One connection to the master."""

    def __init__(self, parts: Parts, grown: Callable[[], None], begin: int | None) -> None:
        #: The reason of its end.
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
        #: The end of this log when the connection began.
        self._had = self._mirroring.written
        #: The offset of the next frame; None when there is no log yet.
        self._next = begin
        self._is_heard = False
        self._has_fitted = False

    @property
    def is_in_step(self) -> bool:
        """Whether the end of this log was received as it is here, and the rest followed it."""
        return self._has_fitted and not self.lost.done()

    # Calls of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's class is one in everything but name.
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
        """Periodically: report, and close the connection to a silent master."""
        if self._monotonic() - self.heard_at > self._silence:
            self._give_up(MasterLost(f"the master was silent for {self._silence:g} s"))
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
        """Whether the master has not yet sent all that is here."""
        return self._next is not None and self._next < self._had

    def _join(self, data: bytes) -> tuple[int, bytes]:
        """The bytes of the complete frames, and their offset."""
        first: int | None = None
        bodies: list[bytes] = []
        for offset, body in self._frames.feed(data):
            if self._next is None:
                self._next = offset
            if offset != self._next:
                raise self._elsewhere(offset)
            if not body and self._is_heard and self._is_comparing:
                # Only the first may be a heartbeat: the report came late.
                raise MirrorRefused(
                    f"the master sent nothing from {offset} on, this log ends at {self._had}; "
                    "empty this folder to copy the log again"
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
            f"{self._mirroring.expected}; empty this folder to copy the log again"
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


# Tables: topics, groups, progress, also of delays. They are requested at the start, every
# `state_interval`, and when messages of an unknown topic arrive. Topics, groups and progress become
# copies of the master's.
#
# A topic that the master no longer has was deleted there, and is deleted here with its queues and
# parked messages. The end of the master's log is requested before its topics: below it messages of
# that topic were deleted, beyond it the topic may have been created again. Nothing is deleted
# unless this log is known to continue in the master's, because a master with an empty disk knows no
# topic. A master of this kind also reports how far its deletions reached, for topics that were
# created again in between.
#
# The progress of delay levels and timers must not be ahead of the log: if this broker took over,
# no broker would deliver the messages in between. So the end of the master's log is requested after
# it, and the progress is applied when this log has that end.


B = TypeVar("B", bound=Body)

_TIMEOUT = 5.0
_LOG_END = "commitLogMaxOffset"


class TableCopier:
    """Keeps a slave's tables copies of its master's. A job of the scheduler."""

    def __init__(
        self,
        parts: Parts,
        master: MasterPlace,
        is_in_step: Callable[[], bool],
        channels: Channels | None = None,
    ) -> None:
        """`is_in_step`: whether this log is known to be the beginning of the master's."""
        self._parts = parts
        self._master = master
        self._is_in_step = is_in_step
        self._channels = channels or outward_channels(parts.settings.outward, parts.clock)
        self._failures = LogEveryNth()
        self._wanted = asyncio.Event()
        self._seen_queues = 0
        #: Topics that the master had, and those of them that it deleted and that are here.
        self._mastered = {each.topic_name for each in parts.topics}
        self._doomed: set[str] = set()
        #: The end of the log at which this progress may be applied.
        self._delivered: tuple[int, DelayOffsets, TimerFile | None] | None = None
        #: The number of complete copies.
        self.rounds = 0

    # The job.

    def start(self) -> None:
        self._parts.scheduler.spawn(self._run())

    def stop(self) -> None:
        """The scheduler cancels the task."""

    async def _run(self) -> None:
        settings = self._parts.settings.replication
        try:
            while True:
                address, _ = await self._master.known()
                pause = settings.state_interval
                if not await self._copy(address):
                    pause = min(pause, settings.retry)
                try:
                    async with asyncio.timeout(pause):
                        await self._wanted.wait()
                except TimeoutError:
                    pass
                self._wanted.clear()
        finally:
            await self._channels.close()

    def grown(self) -> None:
        """The log has grown: perhaps by messages of a new topic, or to an awaited end."""
        mirroring, parts = self._parts.store.mirroring, self._parts
        if self._delivered is not None:
            self._take_delivered()
        if mirroring.new_queues != self._seen_queues:
            self._seen_queues = mirroring.new_queues
            if any(queue.topic not in parts.topics for queue in parts.store.queues()):
                self._wanted.set()

    # Copying.

    async def _copy(self, address: Address) -> bool:
        """Copy everything; whether all requests were answered."""
        parts = self._parts
        try:
            log_end = await self._log_end(address)
            self._take_topics(
                await self._ask(address, RequestCode.GET_ALL_TOPIC_CONFIG, TopicConfigTable),
                log_end,
            )
            parts.progress.replace(
                await self._ask(address, RequestCode.GET_ALL_CONSUMER_OFFSET, ConsumerOffsets)
            )
            delays = await self._ask(address, RequestCode.GET_ALL_DELAY_OFFSET, DelayOffsets)
            timers = await self._timers(address)
            self._delivered = (await self._log_end(address), delays, timers)
            self._take_delivered()
            self._take_groups(
                await self._ask(
                    address, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, SubscriptionGroupTable
                )
            )
        except OrbitError as error:
            if count := self._failures.note(str(error)):
                log.warning("the master's tables were not copied: %s (%d so far)", error, count)
            return False
        self.rounds += 1
        return True

    # Held pulls are processed again if they are no longer allowed.

    def _take_topics(self, master: TopicConfigTable, log_end: int) -> None:
        topics, held = self._parts.topics, self._parts.held
        before = {each.topic_name: reading(each) for each in topics}
        topics.replace(master)
        for name, rule in before.items():
            topic = topics.get(name)
            if topic is None or reading(topic) != rule:
                held.wake(name)
        if self._is_in_step() and master.deleted_topics:
            self._parts.store.follow_deletions(master.deleted_topics)
        self._delete_topics(master.topic_config_table.keys(), log_end)

    def _delete_topics(self, mastered: AbstractSet[str], log_end: int) -> None:
        """Delete what the master no longer has, when its log ended at `log_end`, or later."""
        parts = self._parts
        # A group's topic that was created here first was never the master's.
        candidates = self._doomed | self._mastered | {each.topic for each in parts.store.queues()}
        self._mastered = set(mastered)
        self._doomed = {name for name in candidates - mastered if not parts.topics.is_system(name)}
        if not self._is_in_step():
            return
        for name in tuple(self._doomed):
            if parts.store.delete_topic_below(name, log_end):
                self._doomed.discard(name)
                parts.counters.forget_topic(name)
                parts.dedup.forget(name)
                log.info("topic deleted, as on the master", extra={"topic": name})

    def _take_groups(self, master: SubscriptionGroupTable) -> None:
        groups, held = self._parts.groups, self._parts.held
        before = {each.group_name: consumption(each) for each in groups}
        groups.replace(master)
        may_be_made = self._parts.settings.auto_create_group
        for name, rule in before.items():
            group = groups.get(name)
            if group is None and may_be_made:
                # A held pull would only create it again.
                continue
            if group is None or consumption(group) != rule:
                held.wake(group=name)

    async def _ask(self, address: Address, code: RequestCode, kind: type[B]) -> B:
        answer = await self._channels.request(address, code, timeout=_TIMEOUT)
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(
                f"the master refused {named(RequestCode, code)!r}: "
                f"{answer.remark or named(ResponseCode, answer.code)}"
            )
        return decode_body(kind, answer.body)

    async def _log_end(self, address: Address) -> int:
        state = await self._ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, KVTable)
        return _number(state.table.get(_LOG_END))

    async def _timers(self, address: Address) -> TimerFile | None:
        """The progress of timers; None from a master without it, such as Apache's 4.x."""
        answer = await self._channels.request(
            address, RequestCode.GET_TIMER_CHECK_POINT, timeout=_TIMEOUT
        )
        if answer.code != ResponseCode.SUCCESS:
            return None
        ours = answer.ext_fields.get(TIMER_PROGRESS)
        if ours is not None:
            return decode_body(TimerFile, ours.encode())
        return from_apache(bytes(answer.body))

    def _take_delivered(self) -> None:
        if self._delivered is None or self._parts.store.mirroring.end < self._delivered[0]:
            return
        _, delays, timers = self._delivered
        self._parts.delays.replace(delays)
        if timers is not None:
            self._parts.timers.replace(timers)
        self._delivered = None


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


# The address of the master.


class MasterPlace:
    """Two addresses: for requests, and for the log.

    They come from the settings, or from a name server with every registration. If the name server
    forgets the master, the last addresses stay.
    """

    def __init__(self, settings: ReplicationSettings) -> None:
        self.address: Address | None = None
        self.log_address: Address | None = None
        self._known = asyncio.Event()
        self._is_fixed = settings.master is not None
        #: Whether it is known where the master is, or that there is none.
        self.is_told = self._is_fixed
        if settings.master is not None:
            address = parse_address(settings.master, default_port=DEFAULT_PORT)
            log_port = address.port + HA_DISTANCE
            if settings.master_ha is None:
                self._become(address, Address(address.host, log_port))
            else:
                self._become(address, parse_address(settings.master_ha, default_port=log_port))

    def learn(self, address: str | None, log_address: str | None) -> None:
        """Take the addresses of a name server."""
        self.is_told = True
        if self._is_fixed or not address or not log_address:
            return
        try:
            self._become(parse_address(address), parse_address(log_address))
        except AddressError as error:
            log.warning("the name server has a wrong address of the master: %s", error)

    def _become(self, address: Address, log_address: Address) -> None:
        if (address, log_address) != (self.address, self.log_address):
            self.address, self.log_address = address, log_address
            log.info("master known", extra={"master": str(address), "log": str(log_address)})
            self._known.set()

    async def known(self) -> tuple[Address, Address]:
        """Both addresses, when they are known."""
        while self.address is None or self.log_address is None:
            await self._known.wait()
        return self.address, self.log_address

    async def moved(self, *, within: float) -> None:
        """Return when they have changed, or when the time has passed."""
        self._known.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._known.wait()


# The role of a broker in replication.


class Replication:
    """A broker's part in replication: at most one of both sides."""

    def __init__(
        self,
        serving: ReplicaServer | None = None,
        following: LogFollower | None = None,
        copying: TableCopier | None = None,
    ) -> None:
        self.serving = serving
        self.following = following
        self.copying = copying

    @property
    def is_master_gone(self) -> bool:
        """Whether this slave has no master: then it serves all clients."""
        return self.following is not None and self.following.is_alone


def start_replication(parts: Parts) -> None:
    """Start the broker's part; its jobs start with the scheduler.

    All other parts must be complete. Raises `ListenFailed`.
    """
    settings = parts.settings
    if settings.is_slave:
        parts.replication = _follow(parts)
    elif settings.replication.serve:
        parts.replication = Replication(serving=_serve(parts))
    else:
        parts.replication = Replication()


def _serve(parts: Parts) -> ReplicaServer:
    serving = ReplicaServer(parts)
    parts.registration.ha_port = serving.address.port
    parts.scheduler.add(serving)
    held = parts.held

    def arrived(arrivals: Sequence[Arrivals]) -> None:
        serving.arrived(arrivals)
        held.arrived(arrivals)

    parts.store.on_arrival(arrived)
    return serving


def _follow(parts: Parts) -> Replication:
    master = MasterPlace(parts.settings.replication)
    parts.registration.on_master = master.learn
    following = LogFollower(parts, master)
    copying = TableCopier(parts, master, lambda: following.is_in_step)
    following.on_growth.append(copying.grown)
    parts.scheduler.add(following)
    parts.scheduler.add(copying)
    return Replication(following=following, copying=copying)


# Requests of slaves, and the state of replication (43, 45, 60, 61, 402, 907).


#: Exceptions to the order of delivery that fit into the header of an answer.
_FEW_LATE = 1000


class ReplicationHandler:
    """Answers from the tables that slaves copy."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.GET_ALL_CONSUMER_OFFSET: self.consumer_offsets,
            RequestCode.GET_ALL_DELAY_OFFSET: self.delay_offsets,
            RequestCode.GET_TIMER_CHECK_POINT: self.timer_progress,
            RequestCode.GET_TIMER_METRICS: self.timer_counts,
            RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: self.request_modes,
            RequestCode.GET_BROKER_HA_STATUS: self.status,
        }

    def consumer_offsets(self, _: Connection, request: Command) -> Command:
        table = self._parts.progress.body(wall=self._parts.clock.now())
        if _reads_bare_keys(request):
            return _answer(request, table)
        # Slaves ask every few seconds, and the table may be long: the fast encoder.
        return request.answer(ResponseCode.SUCCESS, body=encode_progress(table))

    def delay_offsets(self, _: Connection, request: Command) -> Command:
        return _answer(request, self._parts.delays.offsets())

    def timer_progress(self, _: Connection, request: Command) -> Command:
        """The progress of timer messages, for slaves of either kind."""
        progress, read_ms = self._parts.timers.progress()
        extra: dict[str, str] = {}
        if len(progress.late) <= _FEW_LATE:
            # Too many: the checkpoint alone, so a takeover delivers more of them twice.
            extra = {TIMER_PROGRESS: encode_body(progress).decode()}
        body = apache_checkpoint(progress, read_ms)
        return request.answer(ResponseCode.SUCCESS, body=body, extra=extra)

    def timer_counts(self, _: Connection, request: Command) -> Command:
        """The number of waiting timer messages, by topic."""
        now_ms = milliseconds(self._parts.clock.now())
        waiting = self._parts.timers.counts.waiting
        counts = {
            topic: TimingCount(count=count, time_stamp=now_ms)
            for topic, count in waiting.items()
            if count
        }
        version = DataVersion(counter=len(counts), state_version=0, timestamp=now_ms)
        return _answer(request, TimerMetrics(data_version=version, timing_count=counts))

    def request_modes(self, _: Connection, request: Command) -> Command:
        """All groups pull, so the table is empty."""
        return _answer(request, RequestModes())

    def status(self, _: Connection, request: Command) -> Command:
        replication = self._parts.replication
        if replication.following is not None:
            return _answer(request, self._as_slave(replication.following))
        return _answer(request, self._as_master(replication.serving))

    def _as_master(self, serving: ReplicaServer | None) -> HARuntimeInfo:
        replicas = () if serving is None else serving.replicas
        return HARuntimeInfo(
            master=True,
            master_commit_log_max_offset=self._parts.store.statistics().log_end,
            in_sync_slave_nums=0 if serving is None else serving.in_sync,
            ha_connection_info=tuple(
                HAConnectionInfo(
                    addr=str(replica.address),
                    slave_ack_offset=replica.acknowledged or 0,
                    diff=replica.behind,
                    in_sync=replica.is_in_sync,
                    transferred_byte_in_second=round(replica.bytes_per_second),
                    transfer_from_where=replica.position,
                )
                for replica in replicas
            ),
        )

    def _as_slave(self, following: LogFollower) -> HARuntimeInfo:
        clock = self._parts.clock
        heard = following.heard_at
        ago = None if heard is None else clock.monotonic() - heard
        return HARuntimeInfo(
            ha_client_runtime_info=HAClientInfo(
                activated=following.is_connected,
                master_addr=None if following.address is None else str(following.address),
                max_offset=self._parts.store.mirroring.written,
                last_read_timestamp=0 if ago is None else milliseconds(clock.now() - ago),
            )
        )


def _reads_bare_keys(request: Command) -> bool:
    return request.version < Gate.STANDARD_JSON


def _answer(request: Command, body: Body) -> Command:
    encoded = encode_body(body, bare_integer_keys=_reads_bare_keys(request))
    return request.answer(ResponseCode.SUCCESS, body=encoded)
