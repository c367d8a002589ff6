"""A broker: a store and its tables, served on a port."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
from collections.abc import Callable

from orbitmq.broker.access import open_access
from orbitmq.broker.addresses import advertised_host
from orbitmq.broker.answers import SendAnswers
from orbitmq.broker.background import Background
from orbitmq.broker.configfile import ConfigDisk
from orbitmq.broker.consumers import ConsumerTable
from orbitmq.broker.counters import Counters
from orbitmq.broker.delivering import begin_delivering
from orbitmq.broker.disagreements import Disagreements
from orbitmq.broker.doors import VIP_DISTANCE, Doors
from orbitmq.broker.endpoint import Endpoint
from orbitmq.broker.filters import FilterTable
from orbitmq.broker.groups import GroupTable
from orbitmq.broker.handlers.family import MakeFamily
from orbitmq.broker.handlers.table import FAMILIES, handlers_of
from orbitmq.broker.health import pages_of
from orbitmq.broker.holding import Holding
from orbitmq.broker.keeping import Keeping
from orbitmq.broker.latencies import Latencies
from orbitmq.broker.locks import OrderLocks
from orbitmq.broker.opening import Opening
from orbitmq.broker.pacing import Pacing
from orbitmq.broker.parts import Parts
from orbitmq.broker.peers import meet
from orbitmq.broker.producers import ProducerTable
from orbitmq.broker.progress import ProgressTable
from orbitmq.broker.registration import Registration
from orbitmq.broker.replication.roles import begin_replicating
from orbitmq.broker.settings import HA_DISTANCE, BrokerSettings
from orbitmq.broker.topics import TopicTable
from orbitmq.broker.turns import Turns
from orbitmq.clock import Clock, SystemClock
from orbitmq.errors import OrbitError
from orbitmq.message.hosts import pack_host
from orbitmq.message.ids import UniqueIds
from orbitmq.remoting.address import Address
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.errors import ListenFailed
from orbitmq.remoting.owner import Owner
from orbitmq.store.files import DiskFiles
from orbitmq.store.store import Store
from orbitmq.wire.command import Command

log = logging.getLogger(__name__)


class Broker:
    """One broker. It lives on the loop that it is started on."""

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        clock: Clock | None = None,
        chance: random.Random | None = None,
        files: DiskFiles | None = None,
        disk: ConfigDisk | None = None,
        families: tuple[MakeFamily, ...] = FAMILIES,
    ) -> None:
        """`files` is the disk of the store, `disk` that of the configuration."""
        self._settings = settings
        self._clock = clock or SystemClock()
        self._chance = chance or random.Random()  # noqa: S311  # spreads load, guards nothing
        self._files = files
        self._disk = disk
        self._families = families
        self._front = _Front()
        self._doors: Doors | None = None
        self._dispatcher: Dispatcher | None = None
        self._keeping: Keeping | None = None
        self._parts: Parts | None = None
        self._starting: asyncio.Task[None] | None = None
        self._opening: Opening[Store] | None = None
        self._endpoint = Endpoint(settings.http, pages_of(lambda: self._parts))

    @property
    def parts(self) -> Parts:
        """What the handlers share, from the start on."""
        if self._parts is None:
            raise OrbitError("the broker is not started; call start() first")
        return self._parts

    @property
    def address(self) -> Address:
        """Where clients reach it, with the real port."""
        return self.parts.address

    @property
    def http_address(self) -> Address | None:
        """Where metrics and the state of health can be had; None when nowhere."""
        return self._endpoint.address

    @property
    def vip_address(self) -> Address | None:
        """The second port, two below the first; None when it is not served."""
        return None if self._doors is None else self._doors.vip_address

    @property
    def ha_address(self) -> Address | None:
        """Where slaves are served; None when they are not."""
        serving = None if self._parts is None else self._parts.replication.serving
        return None if serving is None else serving.address

    async def start(self) -> None:
        """Open the store, which repairs it after a crash, and serve.

        Returns when requests are answered; the name servers are told in the background. Until then
        the pages of health are served, and clients wait two seconds at most. Raises `SettingError`,
        `ListenFailed`, `StoreLocked` and whatever else the store has to say, and `OrbitError` when
        `stop()` is called meanwhile. A start that is cancelled while the store is opened lets go of
        the folder when that is done.
        """
        # A task of its own: `stop()` may end it, and must not cancel whatever else the caller does.
        self._starting = starting = asyncio.create_task(self._start())
        try:
            await starting
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if starting.cancelled():
                if caller is None or not caller.cancelling():
                    raise OrbitError("the broker was stopped while it was starting") from None
            elif starting.exception() is None:
                # It had just started when the caller was cancelled.
                await self._close(grace=0)
            raise
        finally:
            self._starting = None

    async def _start(self) -> None:
        await self._endpoint.start()
        try:
            await self._open()
        except BaseException:
            await self._endpoint.stop()
            raise

    async def _open(self) -> None:
        settings = self._settings
        host, port = await advertised_host(settings)
        self._doors = doors = Doors(self._front, settings, self._clock)
        try:
            # Before the store is opened: its messages carry the port.
            await doors.listen()
        except ListenFailed as error:
            raise _with_hint(error) from error.__cause__
        try:
            address = Address(host, port or doors.address.port)
            parts = await self._assemble(address, doors.address.port)
            parts.capacity = doors.capacity
        except BaseException:
            await doors.close(grace=0)
            raise
        self._parts = parts
        try:
            await doors.open()
            await doors.open_second()
        except BaseException:
            await self._close(grace=0)
            raise
        parts.registration.start()
        parts.background.start()
        log.info("broker started", extra={"broker": settings.name, "address": str(address)})

    async def stop(self, grace: float | None = None) -> None:
        """Accept nothing more, answer what was asked, tell the name servers, save, close.

        `grace` is how long clients and name servers may take, `settings.stop_grace` unless given;
        0 is for somebody in a hurry, and costs nothing that was acknowledged. A broker that is
        still starting is given up; then this returns when the store, whose opening cannot be
        interrupted, has let go of the folder.
        """
        starting = self._starting
        if starting is not None:
            if not starting.cancelling():  # a second time would cut off how it cleans up
                starting.cancel()
            await asyncio.wait((starting,))
            if self._opening is not None:
                await self._opening.ended()
        await self._close(self._settings.stop_grace if grace is None else grace)

    async def _close(self, grace: float) -> None:
        parts = self._parts
        if parts is None or self._doors is None or self._keeping is None:
            return
        await parts.registration.stop(grace)
        await self._endpoint.stop()
        parts.turns.finish()
        parts.held.stop()
        await self._doors.close(grace)
        if self._dispatcher is not None:
            await self._dispatcher.stop()
        await parts.background.stop()
        parts.stopping()
        parts.turns.finish()
        try:
            await self._keeping.close()
        finally:
            parts.store.close()
            self._parts = None
        log.info("broker stopped", extra={"broker": parts.settings.name})

    # Putting it together.

    async def _assemble(self, address: Address, port: int) -> Parts:
        parts = self._begin(address, port)
        self._opening = Opening(lambda: self._load(parts), lambda store: store.close())
        await self._opening.opened()
        try:
            self._serve(parts)
        except BaseException:
            parts.store.close()
            raise
        return parts

    def _begin(self, address: Address, port: int) -> Parts:
        """What there is without the store."""
        settings, clock = self._settings, self._clock
        loop = asyncio.get_running_loop()
        parts = Parts()
        parts.settings = settings
        parts.clock = clock
        parts.chance = self._chance
        parts.loop = loop
        parts.address = address
        parts.port = port
        parts.store_host = pack_host(*address)
        parts.started_at = clock.now()
        parts.counters = Counters()
        parts.latencies = Latencies(clock.monotonic)
        parts.unique_ids = UniqueIds(address.host, clock=clock)
        parts.consumers = ConsumerTable(
            life=settings.client_life, connection_room=settings.max_consumer_bytes
        )
        parts.producers = ProducerTable(
            life=settings.client_life, most=settings.max_producer_groups
        )
        parts.disagreements = Disagreements(parts.consumers)
        pause = settings.lock_pause
        parts.locks = OrderLocks(
            granting_from=clock.monotonic() + pause if pause else None,
            most=settings.max_order_locks,
        )
        parts.topics = TopicTable(settings.topics, now=clock.now())
        parts.groups = GroupTable(
            auto_create=settings.auto_create_group,
            max_auto=settings.max_auto_groups,
            max_queues=settings.max_topic_queues,
            now=clock.now(),
        )
        parts.progress = ProgressTable(wall=clock.now(), rule=settings.progress.rule)
        parts.filters = FilterTable(
            is_enabled=settings.pull.enable_property_filter, monotonic=clock.monotonic
        )
        parts.background = Background(loop)
        return parts

    def _load(self, parts: Parts) -> Store:
        """Open the store and read the tables: in a thread, while nobody else has the parts."""
        parts.store = store = Store(
            parts.settings.root,
            parts.settings.store,
            store_host=(parts.address.host, parts.address.port),
            clock=parts.clock,
            files=self._files,
            post=_posting(parts.loop),
        )
        try:
            self._keeping = Keeping(parts, self._disk)
            self._keeping.load()
        except BaseException:
            store.close()
            raise
        return store

    def _serve(self, parts: Parts) -> None:
        settings, store, loop = parts.settings, parts.store, parts.loop
        send = settings.send
        answers = SendAnswers(send.region, parts.store_host, trace_on=send.trace_on)
        parts.turns = Turns(store, answers, settings.send, loop, parts.latencies, parts.counters)
        parts.pacing = Pacing(loop, settings.pull.step_bytes)
        parts.held = Holding(store, parts.pacing, loop, settings.pull)
        parts.registration = Registration(
            lambda: parts.settings, parts.topics, parts.address, parts.clock
        )
        parts.registration.ha_port = parts.port + HA_DISTANCE
        parts.access = open_access(parts)
        store.on_arrival(parts.held.arrived)
        begin_delivering(parts, self._disk)
        parts.background.every(settings.tick, lambda: self._tick(parts))
        parts.background.every(settings.clean_interval, lambda: _clean(parts))
        self._dispatcher = Dispatcher(
            handlers_of(parts, self._families),
            before=parts.access.hook,
            opened=meet,
            turn_done=self._end_of_turn(parts),
            closed=parts.connection_closed,
        )
        begin_replicating(parts)
        self._front.become(self._dispatcher)

    def _end_of_turn(self, parts: Parts) -> Callable[[Connection], None]:
        end_turn, pacing, notice = parts.turns.end, parts.pacing, parts.registration.notice

        def end(connection: Connection) -> None:
            end_turn(connection)
            pacing.spent = 0
            notice()

        return end

    def _tick(self, parts: Parts) -> None:
        """A few times a second: the store's own work, and what changed outside of turns."""
        parts.store.tick()
        parts.latencies.puts.tick(parts.clock.monotonic())
        parts.registration.notice()
        if self._keeping is not None:
            self._keeping.save_changed()


def _with_hint(error: ListenFailed) -> ListenFailed:
    """The same, with the neighbour named who may be in the way: another broker's second port."""
    cause = error.__cause__
    if not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
        return error
    port = error.address.port
    return ListenFailed(
        error.address,
        f"{error.reason} (if a broker on port {port + VIP_DISTANCE} serves {port} as its second "
        "one, start that broker with broker.vip = false, or this one with another broker.port)",
    )


def _clean(parts: Parts) -> None:
    parts.store.clean()
    parts.filters.clean(parts.clock.now())


def _posting(loop: asyncio.AbstractEventLoop) -> Callable[[Callable[[], None]], None]:
    """Hands calls of the store's threads to the loop, as long as there is one."""

    def post(call: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call)

    return post


class _Front:
    """The owner of connections, which becomes the real one before any connection is made.

    The port has to be taken before the store is opened, because messages carry it; and the handlers
    need the store.
    """

    __slots__ = ("connection_closed", "connection_opened", "request_received", "turn_done")

    connection_opened: Callable[[Connection], None]
    request_received: Callable[[Connection, Command], None]
    turn_done: Callable[[Connection], None]
    connection_closed: Callable[[Connection], None]

    def become(self, owner: Owner) -> None:
        # Bound methods, so that a request makes no detour.
        self.connection_opened = owner.connection_opened
        self.request_received = owner.request_received
        self.turn_done = owner.turn_done
        self.connection_closed = owner.connection_closed
