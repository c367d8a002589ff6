"""A name server, brokers, producers and consumer groups on simulated machines.

Everything here is the code that users run; what is simulated is below it: time, the network, the
disk and the machines themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from orbitmq.broker import broker as broker_module
from orbitmq.broker.broker import Broker, ThreadOpening
from orbitmq.broker.locks import OrderLocks
from orbitmq.broker.settings import BrokerSettings
from orbitmq.broker.topics import READ_WRITE
from orbitmq.client.consumer.consumer import ConsumerCore, ConsumerOptions, Registrations
from orbitmq.client.consumer.locks import LockSettings
from orbitmq.client.engine import Engine
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.settings import ClientSettings
from orbitmq.errors import BrokerRefused, MessageRefused, NoRoute, OrbitError
from orbitmq.message.stored import decode_messages
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.parsing import Position
from orbitmq.remoting import channels as channels_module
from orbitmq.remoting import server as server_module
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import ServerSettings
from orbitmq.store.settings import (
    DELAY_LEVELS,
    FlushPolicy,
    FlushSettings,
    IndexSettings,
    ReadSettings,
    StoreSettings,
)
from orbitmq.store.store import Store
from orbitmq.wire.bodies import TopicConfig
from tests.support.powerloss import ForgetfulFiles
from tests.support.simulation_history import History, Moment, Outcome, Place
from tests.support.simulation_loop import Machine, VirtualLoop
from tests.support.simulation_network import Network, SimulatedListener, speaks_no_tls

TOPIC = "orders"
QUEUES = 2
PLAIN, ORDERED = "plain", "ordered"
GROUPS = (PLAIN, ORDERED)
NAME_SERVER = "10.0.0.1"
#: The share of messages whose handler fails, at their first two attempts.
HANDLER_FAILURES = 0.1
#: How long handlers take. In order some take nearly as long as a member believes in its lock, so
#: that messages wait in its memory while it is cut off, the lock lapses, and others take over.
HANDLING = {PLAIN: (0.0, 0.01, 0.2, 1.0), ORDERED: (0.0, 0.01, 0.2, 1.0, 5.0)}

#: The share of messages that are delivered a while after they were sent.
DELAYED = 0.1
#: Shorter than usual, so that locks lapse, silent members count as gone and retries come within a
#: simulation, and most of its time is not spent on waiting for them. The broker keeps locks twice
#: as long as members believe in them, as usual.
LOCKS = LockSettings(life=6.0, renewal=4.0)
BROKER_LOCK_LIFE = 12.0
CLIENT_LIFE = 15.0
_DELAY_LEVELS = tuple(each * 0.4 for each in DELAY_LEVELS)

_STORE = StoreSettings(
    file_size=16 * 1024,
    queue_file_entries=64,
    preallocate_step=0,
    delay_levels=_DELAY_LEVELS,
    index_file=IndexSettings(slots=64, entries=512),
    read=ReadSettings(memory_distance=1 << 30),
    flush=FlushSettings(queue_tail_bytes=400, checkpoint_interval=1.0, durable_interval=5.0),
)


class HandlerFailed(RuntimeError):
    """What handlers of the simulation raise now and then."""


@contextlib.contextmanager
def simulated_edges(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """The places at which the real code takes its sockets, its threads and its chance."""
    chance = random.Random(seed)

    def number_of(connection: Connection) -> int:
        # Sets of connections are walked through; their order must not depend on memory.
        number: int = connection.__dict__.setdefault("_number", next(loop.numbers))
        return number

    def without_threads(*args: object, **options: object) -> Store:
        return Store(*args, **options, background=False)  # type: ignore[arg-type]

    with (
        mock.patch.object(server_module, "Listener", SimulatedListener),
        mock.patch.object(server_module, "speaks_tls", speaks_no_tls),
        mock.patch.object(broker_module, "Store", without_threads),
        mock.patch.object(broker_module, "OrderLocks", partial(OrderLocks, life=BROKER_LOCK_LIFE)),
        mock.patch.object(ThreadOpening, "start", ThreadOpening.run),
        mock.patch.object(Connection, "__hash__", number_of),
        # A broker's connections to name servers draw their pauses themselves.
        mock.patch.object(channels_module, "random", SimpleNamespace(Random=lambda: chance)),
    ):
        yield


@dataclass(slots=True)
class BrokerNode:
    """A broker, its machine and its disk."""

    name: str
    host: str
    root: Path
    machine: Machine | None = None
    broker: Broker | None = None
    disk: ForgetfulFiles | None = None
    lives: int = 0


@dataclass(slots=True)
class MemberNode:
    """A member of a consumer group."""

    group: str
    machine: Machine
    core: ConsumerCore
    engine: Engine
    is_stopping: bool = False


class World:
    """The whole system. Belongs to one `VirtualLoop`."""

    def __init__(
        self,
        loop: VirtualLoop,
        dice: random.Random,
        folder: Path,
        history: History,
        *,
        brokers: int,
        policy: FlushPolicy,
    ) -> None:
        self.loop = loop
        self.dice = dice
        self.history = history
        self.network = Network(loop, random.Random(dice.random()), history.note)
        self.policy = policy
        self.folder = folder
        self.brokers = [
            BrokerNode(f"broker-{name}", f"10.0.1.{number}", folder / f"{name}0")
            for number, name in zip(range(1, brokers + 1), "abcdef", strict=False)
        ]
        self.members: list[MemberNode] = []
        self.name_server: NameServer | None = None
        self.name_server_machine: Machine | None = None
        self._hosts = iter(range(1, 250))
        self._numbers = iter(range(1, 1_000_000))
        #: Everything that ever ran, to be ended in the end.
        self._machines: list[Machine] = []

    def machine(self, name: str, host: str | None = None) -> Machine:
        made = Machine(self.loop, name, host or f"10.0.2.{next(self._hosts)}")
        self._machines.append(made)
        self.network.add(made)
        return made

    @property
    def living(self) -> list[Machine]:
        return [machine for machine in self._machines if machine.is_alive]

    # ---- servers

    async def start_name_server(self) -> None:
        self.name_server_machine = machine = self.machine("namesrv", NAME_SERVER)
        settings = NameServerSettings(server=ServerSettings(host=NAME_SERVER, port=9876))
        self.name_server = NameServer(settings, clock=machine)
        await machine.run(self.name_server.start())

    async def crash_name_server(self) -> None:
        assert self.name_server_machine is not None
        await self._end(self.name_server_machine, abruptly=False)

    async def start_broker(self, node: BrokerNode) -> None:
        """On whatever is on the disk."""
        node.machine = machine = self.machine(node.name, node.host)
        node.root.mkdir(exist_ok=True)
        node.disk = disk = ForgetfulFiles(node.root)
        flush = replace(_STORE.flush, policy=self.policy)
        settings = BrokerSettings(
            root=node.root,
            name=node.name,
            name_servers=(f"{NAME_SERVER}:9876",),
            vip=False,
            # As long as it would have kept the locks that it forgot: whoever believed in one may
            # have begun a message just before that ended.
            lock_pause=BROKER_LOCK_LIFE if node.lives else 0.0,
            client_life=CLIENT_LIFE,
            tick=0.2,
            store=replace(_STORE, flush=flush),
            server=ServerSettings(host=node.host, port=10911),
        )
        chance = random.Random(self.dice.random())
        node.broker = broker = Broker(settings, clock=machine, chance=chance, files=disk, disk=disk)
        await machine.run(broker.start())
        machine.context.run(self._make_topic, broker)
        store = broker.parts.store
        if store.recovery.damage:
            self.history.violations.append(f"lost: {node.name} found {store.recovery.damage}")
        for group in GROUPS:
            offsets = broker.parts.progress.offsets(TOPIC, group)
            self.history.check_saved(group, node.name, offsets)
        self.history.note("up", node.name, store.statistics().log_end)

    def _make_topic(self, broker: Broker) -> None:
        config = TopicConfig(
            topic_name=TOPIC, read_queue_nums=QUEUES, write_queue_nums=QUEUES, perm=READ_WRITE
        )
        broker.parts.topics.update(config, now=broker.parts.clock.now())
        broker.parts.registration.notice()

    async def crash_broker(self, node: BrokerNode, *, power: bool, abruptly: bool) -> None:
        """The process ends at once; with `power` the machine does, and forgets what it may."""
        assert node.machine is not None
        assert node.broker is not None
        assert node.disk is not None
        self.history.note("crash", node.name, power, abruptly)
        self.history.broker_died(node.name)
        node.lives += 1
        after = self.folder / f"{node.name}-{node.lives}"
        if power:
            node.disk.lose_power(after, self.dice)
        else:
            node.disk.lose_process(after)
        store = node.broker.parts.store
        await self._end(node.machine, abruptly=abruptly)
        store.abandon()
        node.broker = None
        node.root = after

    async def _end(self, machine: Machine, *, abruptly: bool) -> None:
        self.network.silence(machine, abruptly=abruptly)
        machine.die()
        for _ in range(1000):
            if not machine.tasks:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{machine.name} does not end")

    # ---- clients

    def _engine(self, machine: Machine) -> Engine:
        settings = ClientSettings(
            name_servers=(f"{NAME_SERVER}:9876",),
            client_ip=machine.host,
            instance=machine.name,
            heartbeat=5.0,
            route_refresh=10.0,
        )
        return Engine(settings, clock=machine, chance=random.Random(self.dice.random()))

    async def produce(self, name: str, count: int) -> None:
        """One producer's life: `count` messages, one after the other."""
        machine = self.machine(name)
        await machine.run(self._produce(machine, name, count))

    async def _produce(self, machine: Machine, name: str, count: int) -> None:
        dice = random.Random(self.dice.random())
        engine = self._engine(machine)
        await engine.start()
        producer = AsyncProducer.on(engine, "service")
        await producer.start()
        for number in range(count):
            body = f"{name}-{number}".encode()
            await self._send(producer, name, body, dice)
            await asyncio.sleep(dice.choice((0.0, 0.05, 0.3, 2.0, 8.0)))
        await producer.stop()
        await engine.stop()

    async def _send(
        self, producer: AsyncProducer, name: str, body: bytes, dice: random.Random
    ) -> None:
        history = self.history
        history.begin_send(body, name)
        level = dice.choice((1, 2)) if dice.random() < DELAYED else 0
        try:
            result = await producer.send(TOPIC, body, keys=body.decode(), delay_level=level)
        except (NoRoute, MessageRefused, BrokerRefused):
            history.end_send(body, Outcome.REFUSED)
        except OrbitError:
            history.end_send(body, Outcome.OPEN)
        else:
            where = result.queue
            # One that comes later has no place yet.
            place = None if level else (where.broker, where.id, result.queue_offset)
            outcome = Outcome.ACKED if result.is_ok else Outcome.OPEN
            history.end_send(body, outcome, place)

    async def join(self, group: str) -> MemberNode:
        """One member more of a group."""
        name = f"{group}-{next(self._numbers)}"
        machine = self.machine(name)
        return await machine.run(self._join(machine, group))

    async def _join(self, machine: Machine, group: str) -> MemberNode:
        engine = self._engine(machine)
        await engine.start()
        registrations = Registrations(group)
        registrations.handler(TOPIC, self._handler(machine, group))
        options = ConsumerOptions(
            ordered=group == ORDERED, consume_from=Position.FIRST, locks=LOCKS
        )
        core = ConsumerCore(engine, group, registrations.all(), options)
        await core.start()
        member = MemberNode(group, machine, core, engine)
        self.members.append(member)
        self.history.note("joined", machine.name)
        return member

    def _handler(self, machine: Machine, group: str) -> Callable[[ReceivedMessage], object]:
        history, dice = self.history, random.Random(self.dice.random())
        name, is_ordered = machine.name, group == ORDERED

        async def handle(message: ReceivedMessage) -> None:
            is_first = message.queue.topic == TOPIC
            queue = message.queue
            place = (queue.broker, queue.id, message.queue_offset) if is_first else None
            body = message.body
            history.begin_handling(group, name, body, place, is_ordered=is_ordered)
            await asyncio.sleep(dice.choice(HANDLING[group]))
            if not machine.is_alive:
                return
            fails = message.reconsume_times < 2 and dice.random() < HANDLER_FAILURES
            history.end_handling(group, name, body, place, is_done=not fails)
            if fails:
                if not is_ordered:
                    history.sent_back(group, place)
                raise HandlerFailed(body)
            history.succeeded[group].add(body)

        return handle

    async def leave(self, member: MemberNode) -> None:
        """A member stops in order."""
        member.is_stopping = True
        self.members.remove(member)
        self.history.note("leaves", member.machine.name)
        await member.machine.run(_stop(member))

    async def kill(self, member: MemberNode, *, abruptly: bool) -> None:
        """A member ends at once."""
        self.members.remove(member)
        self.history.note("kill", member.machine.name, abruptly)
        await self._end(member.machine, abruptly=abruptly)
        self.history.member_died(member.machine.name)

    # ---- looking

    async def until(self, moment: Moment, broker: str, most: float) -> None:
        """Returns when it is this moment at a broker, or after so many seconds."""
        come: asyncio.Future[None] = self.loop.create_future()

        def look(now: Moment, where: str) -> None:
            if (now, where) == (moment, broker) and not come.done():
                come.set_result(None)

        self.history.watchers.append(look)
        await asyncio.wait((come,), timeout=most)
        self.history.watchers.remove(look)

    def check_progress(self) -> None:
        for node in self.brokers:
            if node.broker is not None and node.machine is not None and node.machine.is_alive:
                for group in GROUPS:
                    with contextlib.suppress(OrbitError):  # it is about to start
                        offsets = node.broker.parts.progress.offsets(TOPIC, group)
                        self.history.check_progress(group, node.name, offsets)

    def log(self) -> dict[Place, bytes]:
        """Everything in the topic, by its place."""
        found: dict[Place, bytes] = {}
        for node in self.brokers:
            assert node.broker is not None
            store = node.broker.parts.store
            for queue_id in range(QUEUES):
                offset = 0
                while offset < store.max_offset(TOPIC, queue_id):
                    result = store.read(TOPIC, queue_id, offset)
                    for message in decode_messages(b"".join(result.pieces)):
                        found[node.name, queue_id, message.queue_offset] = message.body
                    offset = result.next_offset
        return found

    async def end(self) -> None:
        """Stop everything in order, as far as it runs."""
        for member in tuple(self.members):
            await self.leave(member)
        for node in self.brokers:
            if node.broker is not None and node.machine is not None:
                await node.machine.run(node.broker.stop())
        if self.name_server is not None and self.name_server_machine is not None:
            await self.name_server_machine.run(self.name_server.stop())

    async def end_machines(self) -> None:
        """Whatever is left."""
        for machine in self._machines:
            if machine.is_alive:
                await self._end(machine, abruptly=True)

    def abandon_stores(self) -> None:
        for node in self.brokers:
            if node.broker is not None:
                with contextlib.suppress(OrbitError):
                    node.broker.parts.store.abandon()


async def _stop(member: MemberNode) -> None:
    await member.core.stop()
    await member.engine.stop()
