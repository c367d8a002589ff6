"""A broker: a store and its tables, served on a port."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import random
import socket
import threading
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from orbitmq.broker.access import open_access
from orbitmq.broker.config import ConfigTables
from orbitmq.broker.counters import Counters, Latencies
from orbitmq.broker.dedup import Deduplication
from orbitmq.broker.delays import Delays
from orbitmq.broker.filters import FilterTable
from orbitmq.broker.groups import (
    Channel,
    ConsumerTable,
    Disagreements,
    GroupTable,
    ProducerTable,
    attach,
)
from orbitmq.broker.handlers.membership import FAMILIES, handlers_of
from orbitmq.broker.health import Endpoint, http_pages
from orbitmq.broker.locks import OrderLocks
from orbitmq.broker.longpoll import HeldPulls
from orbitmq.broker.parked import Destinations
from orbitmq.broker.progress import ProgressTable
from orbitmq.broker.registration import Registration
from orbitmq.broker.replication.slave import start_replication
from orbitmq.broker.scheduler import Alarm, Pacing, Scheduler
from orbitmq.broker.settings import HA_DISTANCE, WILDCARDS
from orbitmq.broker.timers import Timers
from orbitmq.broker.topics import TopicTable
from orbitmq.broker.transactions import TransactionChecks
from orbitmq.broker.writes import SendAnswers, Writes
from orbitmq.clock import Clock, SystemClock
from orbitmq.errors import OrbitError, SettingError
from orbitmq.message.ids import UniqueIds
from orbitmq.message.record import pack_host
from orbitmq.remoting.connection import Connection, Owner
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.server import Capacity, Server
from orbitmq.remoting.settings import (
    Address,
    ConnectionLost,
    ListenFailed,
    parse_address,
)
from orbitmq.store.files import DiskFiles
from orbitmq.store.store import Store
from orbitmq.wire.command import Command
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers import Header

if TYPE_CHECKING:
    from orbitmq.broker.access import Access
    from orbitmq.broker.archive import LogArchiver
    from orbitmq.broker.config import ConfigFile
    from orbitmq.broker.handlers.membership import MakeFamily
    from orbitmq.broker.replication.slave import Replication
    from orbitmq.broker.settings import BrokerSettings


log = logging.getLogger(__name__)


class Broker:
    """One broker. It belongs to the event loop that it is started on."""

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        clock: Clock | None = None,
        chance: random.Random | None = None,
        files: DiskFiles | None = None,
        disk: DiskFiles | None = None,
        families: tuple[MakeFamily, ...] = FAMILIES,
    ) -> None:
        """`files` is the disk of the store, `disk` that of the configuration."""
        self._settings = settings
        self._clock = clock or SystemClock()
        self._chance = chance or random.Random()  # noqa: S311  # spreads load, guards nothing
        self._files = files
        self._disk = disk
        self._families = families
        self.front = _Front()
        self.dispatcher: Dispatcher | None = None
        self._tables: ConfigTables | None = None
        self._parts: Parts | None = None
        self._starting: asyncio.Task[None] | None = None
        self._opening: ThreadOpening[tuple[Store, ConfigTables]] | None = None
        self._endpoint = Endpoint(settings.http, http_pages(lambda: self._parts))

    @property
    def parts(self) -> Parts:
        """The broker's parts, which handlers share. Raises `OrbitError` before the start."""
        if self._parts is None:
            raise OrbitError("the broker is not started; call start() first")
        return self._parts

    @property
    def address(self) -> Address:
        """The address for clients, with the real port."""
        return self.parts.address

    @property
    def http_address(self) -> Address | None:
        """The address of metrics and health; None when they are not served."""
        return self._endpoint.address

    @property
    def vip_address(self) -> Address | None:
        """The second port, two below the first; None when it is not served."""
        return None if self._parts is None else self._parts.listeners.vip_address

    @property
    def ha_address(self) -> Address | None:
        """The address for slaves; None when they are not served."""
        serving = None if self._parts is None else self._parts.replication.serving
        return None if serving is None else serving.address

    async def start(self) -> None:
        """Open the store, which repairs it after a crash, and serve.

        Returns when requests are answered; the registration with name servers goes on. Until then
        the pages of health are served, and clients wait two seconds at most. Raises `SettingError`,
        `ListenFailed`, `StoreLocked`, other errors of the store, and `OrbitError` when `stop()` is
        called meanwhile. When a start is cancelled while the store is being opened, the folder is
        released after that.
        """
        # A task of its own, so that `stop()` can cancel the start without cancelling the caller.
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
        listeners = Listeners(self.front, settings, self._clock)
        try:
            # Before the store is opened: its messages carry the port.
            await listeners.listen()
        except ListenFailed as error:
            raise _with_hint(error) from error.__cause__
        try:
            address = Address(host, port or listeners.address.port)
            parts = await self._assemble(address, listeners.address.port)
            parts.listeners = listeners
        except BaseException:
            await listeners.close(grace=0)
            raise
        self._parts = parts
        try:
            await listeners.open()
            await listeners.open_second()
        except BaseException:
            await self._close(grace=0)
            raise
        parts.registration.start()
        parts.scheduler.start()
        log.info("broker started", extra={"broker": settings.name, "address": str(address)})

    async def stop(self, grace: float | None = None) -> None:
        """Accept no more requests, answer those that came, unregister, save, close.

        `grace` is the time for clients and name servers, `settings.stop_grace` by default; with 0
        nothing that was acknowledged is lost either. A start that is under way is cancelled; then
        this returns when the store, whose opening cannot be interrupted, has released the folder.
        """
        starting = self._starting
        if starting is not None:
            if not starting.cancelling():  # a second cancellation would interrupt its clean-up
                starting.cancel()
            await asyncio.wait((starting,))
            if self._opening is not None:
                await self._opening.ended()
        await self._close(self._settings.stop_grace if grace is None else grace)

    async def _close(self, grace: float) -> None:
        parts = self._parts
        if parts is None or self._tables is None:
            return
        await parts.registration.stop(grace)
        await self._endpoint.stop()
        parts.writes.finish()
        parts.held.stop()
        await parts.listeners.close(grace)
        if self.dispatcher is not None:
            await self.dispatcher.stop()
        await parts.scheduler.stop()
        parts.writes.finish()
        try:
            await self._tables.close()
            await parts.dedup.close()
        finally:
            parts.store.close()
            self._parts = None
        log.info("broker stopped", extra={"broker": parts.settings.name})

    # Putting it together.

    async def _assemble(self, address: Address, port: int) -> Parts:
        parts = self._begin(address, port)
        self._opening = ThreadOpening(lambda: self._load(parts), lambda opened: opened[0].close())
        _, tables = await self._opening.opened()
        try:
            self._serve(parts, tables)
        except BaseException:
            parts.store.close()
            raise
        return parts

    def _begin(self, address: Address, port: int) -> Parts:
        """Make the parts that need no store."""
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
        parts.scheduler = Scheduler(loop, clock)
        return parts

    def _load(self, parts: Parts) -> tuple[Store, ConfigTables]:
        """Open the store and read the tables; in a thread, which alone has the parts meanwhile."""
        parts.store = store = Store(
            parts.settings.root,
            parts.settings.store,
            store_host=(parts.address.host, parts.address.port),
            clock=parts.clock,
            files=self._files,
            post=_posting(parts.loop),
        )
        try:
            self._tables = tables = ConfigTables(parts, self._disk)
            tables.load()
            parts.dedup = Deduplication(parts, self._disk)
            parts.dedup.load()
        except BaseException:
            store.close()
            raise
        return store, tables

    def _serve(self, parts: Parts, tables: ConfigTables) -> None:
        settings, store, loop = parts.settings, parts.store, parts.loop
        send = settings.send
        answers = SendAnswers(send.region, parts.store_host, trace_on=send.trace_on)
        parts.writes = Writes(store, answers, settings.send, loop, parts.latencies, parts.counters)
        parts.pacing = Pacing(loop, settings.pull.step_bytes)
        parts.held = HeldPulls(store, parts.pacing, loop, settings.pull)
        parts.registration = Registration(
            lambda: parts.settings, parts.topics, parts.address, parts.clock
        )
        parts.registration.ha_port = parts.port + HA_DISTANCE
        parts.access = open_access(parts)
        store.on_arrival(parts.held.arrived)
        start_delivery(parts, tables, self._disk)
        parts.scheduler.every(settings.tick, lambda: self._tick(parts))
        parts.scheduler.every(settings.clean_interval, store.clean)
        self.dispatcher = Dispatcher(
            handlers_of(parts, self._families),
            before=parts.access.hook,
            opened=attach,
            turn_done=self._end_of_turn(parts),
            closed=parts.connection_closed,
        )
        start_replication(parts)
        parts.archiver = None
        if settings.archive.folder is not None:
            from orbitmq.broker.archive import start_archiver  # noqa: PLC0415  # imports Arrow

            parts.archiver = start_archiver(parts)
        self.front.become(self.dispatcher)

    def _end_of_turn(self, parts: Parts) -> Callable[[Connection], None]:
        end_turn, pacing, notice = parts.writes.end, parts.pacing, parts.registration.notice

        def end(connection: Connection) -> None:
            end_turn(connection)
            pacing.spent = 0
            notice()

        return end

    def _tick(self, parts: Parts) -> None:
        """A few times a second: the store's own work, and changes outside of writes."""
        parts.store.tick()
        parts.dedup.step()
        parts.latencies.puts.tick(parts.clock.monotonic())
        parts.registration.notice()
        if self._tables is not None:
            self._tables.save_changed()


def _with_hint(error: ListenFailed) -> ListenFailed:
    """The same error with a probable cause: another broker's second port."""
    cause = error.__cause__
    if not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
        return error
    port = error.address.port
    return ListenFailed(
        error.address,
        f"{error.reason} (if a broker on port {port + VIP_DISTANCE} serves {port} as its second "
        "one, start that broker with broker.vip = false, or this one with another broker.port)",
    )


def _posting(loop: asyncio.AbstractEventLoop) -> Callable[[Callable[[], None]], None]:
    """Passes calls of the store's threads to the loop while it is open."""

    def post(call: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call)

    return post


class _Front:
    """The owner of connections until the real one is known.

    The port is taken before the store is opened, because messages carry it; the handlers need the
    store.
    """

    __slots__ = ("connection_closed", "connection_opened", "request_received", "turn_done")

    connection_opened: Callable[[Connection], None]
    request_received: Callable[[Connection, Command], None]
    turn_done: Callable[[Connection], None]
    connection_closed: Callable[[Connection], None]

    def become(self, owner: Owner) -> None:
        # Bound methods, so that a request takes no detour.
        self.connection_opened = owner.connection_opened
        self.request_received = owner.request_received
        self.turn_done = owner.turn_done
        self.connection_closed = owner.connection_closed


# The parts of a broker.


class Parts:
    """The parts of one broker. Complete before any handler is made; all belong to one loop."""

    settings: BrokerSettings
    clock: Clock
    chance: random.Random
    loop: asyncio.AbstractEventLoop
    #: The address for clients: a number and the real port.
    address: Address
    #: The port that is listened on; clients may get another one.
    port: int
    #: The address, packed, as every stored message carries it.
    store_host: bytes
    #: Epoch seconds.
    started_at: float
    store: Store
    topics: TopicTable
    groups: GroupTable
    consumers: ConsumerTable
    producers: ProducerTable
    disagreements: Disagreements
    progress: ProgressTable
    #: Returns when the present progress is on the disk. Raises `ConfigNotSaved`.
    progress_saved: Callable[[], Awaitable[None]]
    locks: OrderLocks
    filters: FilterTable
    counters: Counters
    latencies: Latencies
    unique_ids: UniqueIds
    writes: Writes
    pacing: Pacing
    held: HeldPulls
    scheduler: Scheduler
    destinations: Destinations
    dedup: Deduplication
    delays: Delays
    timers: Timers
    transactions: TransactionChecks
    registration: Registration
    listeners: Listeners
    replication: Replication
    access: Access
    archiver: LogArchiver | None
    #: The files of all saved tables.
    config_files: list[ConfigFile[Any]]

    def __init__(self) -> None:
        self.config_files = []
        self._settings_changed: list[Callable[[], None]] = []
        self._connection_closed: list[Callable[[Connection], object]] = []

    def change_settings(self, settings: BrokerSettings) -> None:
        """Take over other settings, and notify the parts that depend on them."""
        self.settings = settings
        for call in self._settings_changed:
            call()

    def on_settings_changed(self, call: Callable[[], None]) -> None:
        """Have `call` called after the settings changed."""
        self._settings_changed.append(call)

    def on_connection_closed(self, call: Callable[[Connection], object]) -> None:
        """Have `call` called for every connection that has ended."""
        self._connection_closed.append(call)

    def connection_closed(self, connection: Connection) -> None:
        """Notify the parts that a connection has ended."""
        self.held.forget(connection)
        self.pacing.forget(connection)
        for call in self._connection_closed:
            call(connection)

    def notify(
        self, channel: Channel, code: int, header: Header | None = None, *, body: Bytes = b""
    ) -> bool:
        """Send a client a one-way request; whether its connection was open."""
        if not isinstance(channel, Connection) or not channel.is_open:
            return False
        try:
            channel.notify(code, header, body=body)
        except ConnectionLost:
            return False
        return True


# The store is opened in a thread: after a crash that takes seconds or minutes, and the loop has to
# answer questions about health, and signals. The thread is a daemon, so the process can end before
# it: recovery may be interrupted anywhere, as by a crash, and starts again at the next start.


T = TypeVar("T")


class ThreadOpening(Generic[T]):
    """Makes a value in a thread; the caller may be cancelled at any moment."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], None]) -> None:
        self._make = make
        self._close = close
        self._running: Future[T] = Future()
        #: Done after `_running`, whose waiters are notified before an abandoned value is closed.
        self._ended: Future[None] = Future()

    async def opened(self) -> T:
        """The value that `make` makes in a thread.

        When the caller is cancelled, the value is closed as soon as it is there.
        """
        self.start()
        try:
            return await asyncio.wrap_future(self._running)
        except asyncio.CancelledError:
            self._running.add_done_callback(self._abandon)
            raise

    async def ended(self) -> None:
        """Return when the thread is done, and a value without a caller is closed."""
        await asyncio.wait((asyncio.wrap_future(self._ended),))

    def start(self) -> None:
        threading.Thread(target=self.run, name="orbitmq-opening", daemon=True).start()

    def run(self) -> None:
        """Make the value here; for the thread."""
        try:
            if self._running.set_running_or_notify_cancel():
                self._running.set_result(self._make())
        except BaseException as error:  # noqa: BLE001  # raised by the waiting coroutine
            self._running.set_exception(error)
        finally:
            self._ended.set_result(None)

    def _abandon(self, made: Future[T]) -> None:
        if not made.cancelled() and made.exception() is None:
            self._close(made.result())


# RocketMQ's brokers answer requests on a second port as well, two below the first. It is not in any
# route: clients with `vipChannelEnabled`, and slaves that copy their master's tables, subtract two.
# Here it is served for compatibility only, if it is free.


#: From the second port to the first.
VIP_DISTANCE = 2


class Listeners:
    """The broker's one or two listening ports, with one owner of connections."""

    def __init__(self, owner: Owner, settings: BrokerSettings, clock: Clock) -> None:
        self._owner = owner
        self._settings = settings
        self._clock = clock
        #: Shared: a connection refused at one port is refused at the other as well.
        self.capacity = Capacity(settings.server)
        self._first = Server(owner, settings.server, clock=clock, capacity=self.capacity)
        self._second: Server | None = None

    @property
    def address(self) -> Address:
        """The address of the first port, with the real number."""
        return self._first.address

    @property
    def vip_address(self) -> Address | None:
        """The second one; None when there is none."""
        return None if self._second is None else self._second.address

    @property
    def connections(self) -> Collection[Connection]:
        """Those of both ports."""
        second = () if self._second is None else self._second.connections
        return frozenset((*self._first.connections, *second))

    async def listen(self) -> None:
        """Take the broker's port without serving it. Raises `ListenFailed`, `SettingError`."""
        await self._first.listen()

    async def open(self) -> None:
        """Serve on the broker's port. Raises `ListenFailed`, `SettingError`."""
        await self._first.start()

    async def open_second(self) -> None:
        """Listen on the port two below, unless that is switched off or not possible."""
        settings = self._settings
        port = settings.server.port - VIP_DISTANCE
        if not settings.vip or port <= 0:
            return
        second = Server(
            self._owner,
            replace(settings.server, port=port),
            clock=self._clock,
            capacity=self.capacity,
        )
        try:
            await second.start()
        except ListenFailed as error:
            log.warning(
                "%s; clients with vipChannelEnabled and Apache's slaves will not find the second "
                "port; broker.vip = false does without it",
                error,
            )
        else:
            self._second = second

    async def close(self, grace: float) -> None:
        """Accept no more connections, answer open requests within `grace` seconds, close."""
        servers = [self._first] if self._second is None else [self._first, self._second]
        await asyncio.gather(*(server.stop(grace) for server in servers))
        self._second = None


# The advertised address: a number, because messages carry it.


#: An address reserved for documentation. No packet is sent to it: it makes the system choose the
#: interface that leads out of the machine.
_OUTSIDE_ADDRESS = ("198.51.100.1", 9)

_BROADCAST = ipaddress.ip_address("255.255.255.255")


async def advertised_host(settings: BrokerSettings) -> tuple[str, int | None]:
    """The advertised number, and the port if one was set.

    Raises `SettingError` when the name cannot be resolved, or no host can have the address.
    """
    if settings.advertised is not None:
        address = parse_address(settings.advertised, default_port=0)
        return await _number(address.host), address.port or None
    host = settings.server.host
    if host not in WILDCARDS:
        return await _number(host), None
    return _own_address(), None


async def _number(host: str) -> str:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SettingError(
            f"broker.advertised: {host!r} cannot be resolved ({error.strerror or error}); "
            "set it to an address that clients can reach"
        ) from error
    # Records and old clients support IPv4 best.
    number = str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0]).partition("%")[0]
    if (meaning := _unusable_meaning(ipaddress.ip_address(number))) is not None:
        raise SettingError(
            f"broker.advertised: {host!r} {meaning}; set it to an address that clients can reach"
        )
    return number


def _unusable_meaning(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """What an address means that cannot be connected to; None for others."""
    if address.is_unspecified:
        return "means every interface"
    if address.is_multicast or address == _BROADCAST:
        return "means many machines"
    return None


def _own_address() -> str:
    """The address of the interface that leads out of this machine, else the loopback."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_OUTSIDE_ADDRESS)
            return str(probe.getsockname()[0])
    except OSError:
        log.warning("this machine has no address that others could reach; clients must be local")
        return "127.0.0.1"


# Delivery of parked messages.


def start_delivery(parts: Parts, tables: ConfigTables, disk: DiskFiles | None = None) -> None:
    """Give the broker delay levels, timers and transactions; a slave only stores them."""
    parts.destinations = Destinations(parts.store, parts.topics, parts.clock)
    parts.delays = Delays(parts, disk=disk)
    parts.timers = Timers(parts, disk=disk)
    parts.transactions = TransactionChecks(parts)
    for deliverer in (parts.delays, parts.timers):
        # A slave's are its master's, kept for a takeover.
        tables.add(deliverer.saved, parts.settings.delays.save_interval)
        if not parts.settings.is_slave:
            deliverer.wake = _after_the_write(parts, parts.scheduler.at(deliverer.step))
    if not parts.settings.is_slave:
        parts.transactions.wake = parts.scheduler.at(parts.transactions.step).wake


def _after_the_write(parts: Parts, alarm: Alarm) -> Callable[[], None]:
    """Wakes an alarm when messages that were just put can be read."""
    is_due = False

    def wake() -> None:
        nonlocal is_due
        if not is_due:
            is_due = True
            parts.loop.call_soon(look)

    def look() -> None:
        nonlocal is_due
        is_due = False
        parts.writes.finish()
        if parts.writes.is_sync:
            # Messages are not visible before the flush.
            parts.store.when_flushed(parts.store.statistics().log_end, lambda _: alarm.wake())
        else:
            alarm.wake()

    return wake
