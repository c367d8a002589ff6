"""Progress: the rules of the table in memory, commits at the broker, and when they are made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.consumer import handover
from orbitmq.client.consumer import progress as progress_module
from orbitmq.client.consumer.progress import (
    BrokerProgress,
    MemoryProgress,
    OffsetCommitter,
    ProgressStore,
    ProgressStoreFailed,
    TrackedProgress,
    guarded,
)
from orbitmq.client.consumer.settings import PullSettings, RebalanceSettings
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.engine import Engine
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import Address, ConnectFailed, RemotingError
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import MessageQueue
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import OffsetResponse, UpdateConsumerOffsetRequest
from tests.support.broker import RawClient, until
from tests.support.client import (
    ScriptedBroker,
    ScriptedNameServer,
    quick_settings,
    running_engine,
    topic_route,
)
from tests.support.consumers import consumer_of, fill, new_group, own_queues, until_owned
from tests.support.consuming import received
from tests.support.rebalancing import GROUP, QUICK, TOPIC, Consumer, Group, answering, refusing
from tests.support.store import HandClock

DEADLINE = 20.0
QUEUES = [Queue(TOPIC, "broker-a", place) for place in range(4)]
FIRST = QUEUES[0]


# ---- the table in memory


class ProgressModel(RuleBasedStateMachine):
    """Against a plain description: the last position counts, forward only, unless frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryProgress()
        self.memory: dict[Queue, int] = {}
        self.frozen: set[Queue] = set()
        self.kept: dict[Queue, int] = {}

    queues = st.sampled_from(QUEUES)
    offsets = st.integers(0, 30)

    @rule(queue=queues, offset=offsets, increase_only=st.booleans())
    def update(self, queue: Queue, offset: int, increase_only: bool) -> None:
        self.store.update(queue, offset, increase_only=increase_only)
        if queue in self.frozen:
            return
        if not increase_only or offset > self.memory.get(queue, -1):
            self.memory[queue] = offset

    @rule(queue=queues, offset=offsets)
    def freeze(self, queue: Queue, offset: int) -> None:
        self.store.freeze(queue, offset)
        self.memory[queue] = offset
        self.frozen.add(queue)

    @rule(queue=queues)
    def forget(self, queue: Queue) -> None:
        self.store.forget(queue)
        self.memory.pop(queue, None)
        self.frozen.discard(queue)

    @rule(some=st.sets(queues))
    def persist(self, some: set[Queue]) -> None:
        asyncio.run(self.store.persist(some))
        self.kept |= {queue: at for queue, at in self.memory.items() if queue in some}

    @rule(queue=queues)
    def fetch(self, queue: Queue) -> None:
        assert asyncio.run(self.store.fetch(queue)) == self.kept.get(queue)
        if queue in self.kept and queue not in self.frozen:
            self.memory[queue] = self.kept[queue]

    @rule(queue=queues, offset=offsets)
    def another_member_commits(self, queue: Queue, offset: int) -> None:
        if queue not in self.memory:
            self.kept[queue] = self.store.kept[queue] = offset

    @invariant()
    def memory_is_as_described(self) -> None:
        assert self.store.positions() == self.memory
        assert {queue: self.store.read(queue) for queue in QUEUES} == {
            queue: self.memory.get(queue) for queue in QUEUES
        }

    @invariant()
    def what_is_committed_is_as_described(self) -> None:
        assert self.store.kept == self.kept


ProgressModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestProgressModel = ProgressModel.TestCase


class Slow(TrackedProgress):
    """Commits when the test lets it, and fails for chosen queues."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Mapping[Queue, int]] = []
        self.gate = asyncio.Event()
        self.failing: set[Queue] = set()

    async def stored(self, queue: Queue) -> int | None:
        return None

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        self.calls.append(dict(changed))
        await self.gate.wait()
        return {queue: BrokerUnavailable(queue.broker, "gone") for queue in self.failing}


async def test_commits_go_one_after_the_other_and_tasks_that_wait_share_the_next_one():
    store = Slow()
    for queue in QUEUES:
        store.update(queue, 5)
    waiting = [asyncio.create_task(store.persist([FIRST]))]
    await until(lambda: store.calls)
    store.update(FIRST, 6)
    waiting += [asyncio.create_task(store.persist([queue])) for queue in QUEUES]
    await asyncio.sleep(0)
    store.failing = {QUEUES[2]}

    store.gate.set()
    async with asyncio.timeout(DEADLINE):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)

    assert store.calls == [{FIRST: 5}, {**dict.fromkeys(QUEUES, 5), FIRST: 6}]
    assert [isinstance(each, BrokerUnavailable) for each in outcomes] == [
        False,
        *(queue == QUEUES[2] for queue in QUEUES),
    ]


async def test_only_what_changed_is_committed_and_what_failed_is_tried_again():
    store = Slow()
    store.gate.set()
    for queue in QUEUES:
        store.update(queue, 5)
    await store.persist(QUEUES)
    store.update(QUEUES[1], 6)
    store.update(QUEUES[2], 6)
    store.failing = {QUEUES[2]}

    with pytest.raises(BrokerUnavailable):
        await store.persist(QUEUES)
    store.failing = set()
    await store.persist(QUEUES)
    await store.persist(QUEUES)

    assert store.calls[1:] == [{QUEUES[1]: 6, QUEUES[2]: 6}, {QUEUES[2]: 6}]


# ---- at the broker


@pytest.fixture
async def engine(cluster):
    async with running_engine(cluster.name_server) as engine:
        engine.routes.track(TOPIC)
        await engine.routes.get(TOPIC)
        yield engine


async def group_exists(cluster: AsyncEmbeddedCluster) -> None:
    """A group exists once a member has sent a heartbeat."""
    async with Group(cluster.name_server) as group:
        await group.join()


@pytest.mark.usefixtures("inside")
@pytest.mark.feature("G5")
async def test_no_progress_is_not_taken_for_progress_that_cannot_be_read(cluster, engine, client):
    progress = BrokerProgress(engine, GROUP, strict_last=True)
    await client.stored(TOPIC)
    assert await progress.fetch(FIRST) is None
    assert progress.read(FIRST) is None

    with (
        refusing(cluster.brokers[0], RequestCode.QUERY_CONSUMER_OFFSET),
        pytest.raises(BrokerRefused, match="the test says so"),
    ):
        await progress.fetch(FIRST)
    with pytest.raises(BrokerUnavailable):
        await progress.fetch(Queue(TOPIC, "nowhere", 0))
    await cluster.brokers[0].stop()
    with pytest.raises(RemotingError):
        await progress.fetch(FIRST)

    assert progress.read(FIRST) is None


CLOSED = Address("127.0.0.1", 1)


class Slave:
    """The slave of a broker whose master is away."""

    def __init__(self, position: int | None) -> None:
        self.position = position
        self.broker = ScriptedBroker(
            {
                RequestCode.QUERY_CONSUMER_OFFSET: self._query,
                RequestCode.UPDATE_CONSUMER_OFFSET: self._update,
            }
        )

    def _query(self, _: Connection, request: Command) -> Command:
        if self.position is None:
            return request.answer(ResponseCode.QUERY_NOT_FOUND, remark="not found")
        return request.answer(ResponseCode.SUCCESS, OffsetResponse(offset=self.position))

    def _update(self, _: Connection, request: Command) -> Command:
        self.position = request.header(UpdateConsumerOffsetRequest).commit_offset
        return request.answer(ResponseCode.SUCCESS)


@asynccontextmanager
async def without_master(
    slave: Slave,
) -> AsyncIterator[tuple[BrokerProgress, ScriptedNameServer, Engine]]:
    """Progress of a group at a broker of which only a slave can be reached."""
    async with slave.broker.serving(), ScriptedNameServer().serving() as name_server:
        addresses = {0: CLOSED, 1: slave.broker.address}
        name_server.routes[TOPIC] = topic_route({"broker-a": addresses})
        async with running_engine(name_server.address) as engine:
            await engine.routes.get(TOPIC)
            yield BrokerProgress(engine, GROUP), name_server, engine


@pytest.mark.feature("G5")
@pytest.mark.parametrize("position", [None, 0])
async def test_a_slave_without_progress_proves_nothing(position):
    async with without_master(Slave(position)) as (progress, *_):
        with pytest.raises(BrokerUnavailable, match="proves nothing"):
            await progress.fetch(FIRST)

    assert progress.read(FIRST) is None


async def test_a_commit_that_only_a_slave_has_is_repeated_until_a_master_has_it():
    slave, master = Slave(None), Slave(None)
    async with without_master(slave) as (progress, name_server, engine), master.broker.serving():
        progress.update(FIRST, 5)
        with pytest.raises(BrokerUnavailable, match="repeated"):
            await progress.persist([FIRST])
        assert slave.position == 5

        addresses = {0: master.broker.address, 1: slave.broker.address}
        name_server.routes[TOPIC] = topic_route({"broker-a": addresses})
        await engine.routes.get(TOPIC, refresh=True)
        await progress.persist([FIRST])

        name_server.routes[TOPIC] = topic_route({"broker-a": {**addresses, 0: CLOSED}})
        await engine.routes.get(TOPIC, refresh=True)
        progress.update(FIRST, 6)
        with pytest.raises(BrokerUnavailable, match="repeated"):
            await progress.persist([FIRST])

    assert (master.position, slave.position) == (5, 6)


class ApacheOffsets:
    """Keeps offsets as Apache's brokers do: a request that finds no table makes one."""

    def __init__(self) -> None:
        self.table: dict[int, int] | None = None
        self.reports: list[int] = []

    async def take(self, _: Connection, request: Command) -> Command:
        report = request.header(UpdateConsumerOffsetRequest)
        assert report.queue_id is not None
        self.reports.append(report.queue_id)
        found = self.table
        await asyncio.sleep(0.01)  # another thread's turn
        if found is None:
            found = self.table = {}
        found[report.queue_id] = report.commit_offset or 0
        return request.answer(0)


async def test_simultaneous_first_commits_are_not_lost_at_apaches_brokers(cluster, engine):
    await group_exists(cluster)
    apache = ApacheOffsets()
    progress = BrokerProgress(engine, GROUP)
    for queue in QUEUES:
        progress.update(queue, 10)

    with answering(cluster.brokers[0], RequestCode.UPDATE_CONSUMER_OFFSET, apache.take):
        await progress.persist(QUEUES)

    assert apache.table == dict.fromkeys(range(4), 10)


async def test_first_commits_of_several_members_are_verified_and_repeated(cluster, engine):
    await group_exists(cluster)
    apache = ApacheOffsets()
    members = [BrokerProgress(engine, GROUP) for _ in QUEUES]
    for member, queue in zip(members, QUEUES, strict=True):
        member.update(queue, 10)

    with answering(cluster.brokers[0], RequestCode.UPDATE_CONSUMER_OFFSET, apache.take):
        await asyncio.gather(*(member.persist(QUEUES) for member in members))
        assert apache.table is not None
        assert len(apache.table) < 4
        for _ in range(3):
            await asyncio.gather(*(member.persist(QUEUES) for member in members))

    assert apache.table == dict.fromkeys(range(4), 10)
    assert sorted(apache.reports) == sorted([*range(4)] * 2)


@pytest.mark.feature("G3")
async def test_progress_is_committed_by_the_timer_at_release_and_at_the_end(cluster, client):
    def total():
        return sum(cluster.progress(GROUP, TOPIC).values())

    async def send(count):
        for number in range(count):
            await client.stored(TOPIC, queue_id=number % 4)

    # Pulls carry progress as well; here they must not, for the reports alone to be seen.
    often = replace(QUICK, persist=0.05)
    async with Group(cluster.name_server, settings=often, pulls_report=False) as group:
        await group.join()
        await send(8)
        await until(lambda: total() == 8, DEADLINE)
    async with Group(cluster.name_server, pulls_report=False) as group:
        first = await group.join()
        await send(8)
        await until(lambda: len(group.ledger.consumed) == 8, DEADLINE)
        assert total() == 8
        second = await group.join()
        await until(lambda: len(second.owned) == 2, DEADLINE)
        assert total() == 12
        await first.stop()

        assert total() == 16


@pytest.mark.feature("G4")
async def test_progress_only_grows_until_an_administrator_resets_it(cluster, client):
    gates = [asyncio.Event() for _ in range(6)]
    seen: list[int] = []
    for _ in gates:
        await client.stored(TOPIC)

    async def handle(message):
        seen.append(message.queue_offset)
        await gates[message.queue_offset].wait()

    consumer = consumer_of(cluster, GROUP, rebalance=RebalanceSettings(persist=0.02))
    consumer.on(TOPIC)(handle)
    async with consumer, AsyncAdmin(name_server=cluster.name_server) as admin:
        await until(lambda: len(seen) == len(gates), DEADLINE)
        for finished, position in ((4, 0), (0, 1), (2, 1), (1, 3), (5, 3), (3, 6)):
            gates[finished].set()
            await until(lambda: consumer.positions().get(FIRST, 0) == position, DEADLINE)  # noqa: B023
            assert cluster.progress(GROUP, TOPIC).get(("broker-a", 0), 0) <= position
        await until(lambda: cluster.progress(GROUP, TOPIC)["broker-a", 0] == 6, DEADLINE)
        client.report_one_way(TOPIC, 3, group=GROUP)
        await client.query(TOPIC, consumer_group=GROUP)  # answered after the commit
        assert cluster.progress(GROUP, TOPIC)["broker-a", 0] == 6

        seen.clear()
        await admin.progress.reset(GROUP, TOPIC, ResetTo.by_queue({FIRST: 4}))

        await until(lambda: sorted(seen) == [4, 5], DEADLINE)


@pytest.mark.feature("G6")
@pytest.mark.feature("G1")
async def test_an_application_can_bring_its_own_store(cluster, client):
    kept: dict[Queue, int] = {FIRST: 2}
    for _ in range(5):
        await client.stored(TOPIC)

    async def consume(count):
        own: ProgressStore = MemoryProgress(kept)
        async with Group(cluster.name_server, progress=own) as group:
            consumer: Consumer = await group.join()
            await until(lambda: len(group.ledger.consumed) == count, DEADLINE)
            await consumer.stop()
            return sorted(offset for _, offset in group.ledger.consumed)

    assert await consume(3) == [2, 3, 4]
    assert kept[FIRST] == 5
    await client.stored(TOPIC)
    assert await consume(1) == [5]


@pytest.mark.feature("G12")
@pytest.mark.feature("G7")
async def test_another_consumer_goes_on_from_the_committed_position(cluster, client):
    async def consumed(count):
        async with Group(cluster.name_server) as group:
            await group.join()
            await until(lambda: len(group.ledger.consumed) == count, DEADLINE)
            await group.end()
            return sorted(offset for _, offset in group.ledger.consumed)

    for _ in range(3):
        await client.stored(TOPIC)
    assert await consumed(3) == [0, 1, 2]
    await client.stored(TOPIC)
    assert await consumed(1) == [3]
    await cluster.restart_broker()
    again = await RawClient.open(cluster.brokers[0])
    await again.stored(TOPIC)
    await again.close()
    assert await consumed(1) == [4]


@pytest.mark.feature("G10")
async def test_a_left_over_position_is_discarded_before_a_queue_is_adopted(cluster, client):
    await group_exists(cluster)
    for _ in range(5):
        await client.stored(TOPIC)
    assert (await client.report(TOPIC, 2)).code == 0
    async with Group(cluster.name_server) as group:

        class LeftOver(BrokerProgress):
            async def load(self) -> None:
                # From an earlier ownership, ahead of where the group is, and not to be moved.
                self.freeze(FIRST, 4)

        consumer = await group.join(progress_of=lambda engine: LeftOver(engine, GROUP))
        await until(lambda: len(group.ledger.consumed) == 3, DEADLINE)

        assert sorted(offset for _, offset in group.ledger.consumed) == [2, 3, 4]
        assert consumer.progress.read(FIRST) == 5


@pytest.mark.parametrize("is_orderly", [True, False], ids=["in order", "concurrent"])
async def test_a_stop_ends_although_commits_hang(cluster, client, monkeypatch, is_orderly):
    class Hanging(MemoryProgress):
        hangs = False

        async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
            if self.hangs:
                await asyncio.Event().wait()
            return await super().store(changed)

    monkeypatch.setattr(handover, "STOP_LIMIT", 0.2)
    settings, store = replace(QUICK, handover=0.1), Hanging()
    async with Group(cluster.name_server, progress=store, settings=settings) as group:
        consumer = await group.join(is_orderly=is_orderly)
        await until(lambda: consumer.owned == set(QUEUES), DEADLINE)
        store.hangs = True
        for queue in QUEUES:
            await client.stored(TOPIC, queue_id=queue.id)
        await until(lambda: sum(group.ledger.consumed.values()) == len(QUEUES), DEADLINE)

        async with asyncio.timeout(DEADLINE):
            await consumer.stop()

        assert consumer.owned == set()


# ---- after a reconnection


@pytest.mark.parametrize(
    ("stored", "held", "then", "case"),
    [
        (10, 3, 10, "less"),
        (10, 12, 12, "more"),
        (6, 3, 3, "lost"),
        (6, 3, 3, "lost before a stop"),
        (6, 3, 3, "lost and read"),
        (6, 3, 3, "not seen"),
    ],
)
async def test_after_a_reconnection_an_offset_is_committed_again_unless_messages_were_lost(
    cluster, engine, client, monkeypatch, stored, held, then, case
):
    async def away(*_: object) -> int:
        raise ConnectFailed(cluster.brokers[0].address, "it comes back a moment later")

    await group_exists(cluster)
    for _ in range(stored):
        await client.stored(TOPIC)
    progress = BrokerProgress(engine, GROUP)
    progress.update(FIRST, 10)
    for _ in range(3):
        await progress.persist(QUEUES)
    await client.report(TOPIC, held)
    await progress.persist(QUEUES)
    assert cluster.progress(GROUP, TOPIC)["broker-a", 0] == held, "another member committed it"
    connection = engine.open_connection(cluster.brokers[0].address)
    assert connection is not None

    # As a broker that was killed comes back, or a slave that was made the master.
    connection.close()
    await until(lambda: not connection.is_open, DEADLINE)
    if case == "lost before a stop":
        progress.doubt(FIRST)
    if case == "lost and read":
        for _ in range(2):
            await progress.fetch(FIRST)
            progress.update(FIRST, 10)
    if case == "not seen":
        monkeypatch.setattr(progress_module, "end_offset", away)
    with suppress(BrokerUnavailable, ConnectFailed):
        await progress.persist(QUEUES)

    assert cluster.progress(GROUP, TOPIC)["broker-a", 0] == then


# ---- when offsets are committed


@pytest.fixture
async def committing():
    """The clock, progress and queues of a committer that only commits early."""
    clock, progress = HandClock(), MemoryProgress()
    async with Engine(quick_settings("127.0.0.1:1"), clock=clock) as engine:
        owned = {queue: OwnedQueue(queue, 0, now=clock.time) for queue in QUEUES}
        committer = OffsetCommitter(engine, GROUP, progress, owned, interval=3600.0, when_idle=0.01)
        yield clock, progress, owned, committer
        committer.stop()


async def test_idle_queues_are_committed_early_and_those_with_messages_are_not(committing):
    clock, progress, owned, committer = committing
    busy, draining, *idle = QUEUES
    for queue in QUEUES:
        progress.update(queue, 7)
    owned[busy].window.add([received(7)])
    owned[draining].is_draining = True
    clock.time += 0.02

    committer.became_empty()

    await until(lambda: progress.kept)
    assert progress.kept == dict.fromkeys(idle, 7)

    # Only what was consumed since then: the others may wait for the next commit of all.
    clock.time += 1.1
    for queue in idle:
        progress.update(queue, 8)
    owned[idle[0]].last_consumed = clock.time - 0.02
    committer.became_empty()

    await until(lambda: 8 in progress.kept.values())
    assert progress.kept == {idle[0]: 8, idle[1]: 7}


async def test_an_outage_of_commits_is_logged_once_with_its_end(caplog):
    caplog.set_level("INFO", logger="orbitmq.client.consumer.progress")
    store = Slow()
    store.gate.set()
    store.failing = {FIRST}
    async with running_engine("127.0.0.1:1") as engine:
        owned = {FIRST: OwnedQueue(FIRST, 0, now=engine.clock.monotonic())}
        committer = OffsetCommitter(engine, GROUP, store, owned, interval=0.01, when_idle=0.0)
        store.update(FIRST, 7)
        committer.start()
        await until(lambda: len(store.calls) > 3)
        store.failing = set()
        await until(lambda: "is over" in caplog.text)
        committer.stop()

    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 1
    assert f"group {GROUP} cannot be committed" in warnings[0]


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "in order"])
async def test_the_broker_knows_soon_that_all_is_consumed(cluster, ordered):
    # Pulls carry progress as well, when they begin: none begins while there are no messages.
    held = PullSettings(hold=2 * DEADLINE, timeout=3 * DEADLINE)
    seldom = RebalanceSettings(persist=3600.0)
    consumer = consumer_of(cluster, GROUP, rebalance=seldom, pull=held, ordered=ordered)
    consumer.on(TOPIC)(lambda message: None)
    async with consumer:
        for _ in range(2):
            await fill(cluster, TOPIC, 50)
            await cluster.until_consumed(GROUP, TOPIC, timeout=DEADLINE)


# ---- a store of the application, and its errors


STRICT = RebalanceSettings(handover=0.5, retry=0.2)


class Database(MemoryProgress):
    """Offsets in a table that members share, and that can be away."""

    def __init__(self, kept: dict[Queue, int]) -> None:
        super().__init__(kept)
        self.is_away = False

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        if self.is_away:
            raise ConnectionError("the database is away")
        return await super().store(changed)


def broken(error: BaseException) -> ProgressStore:
    """A store whose every method raises."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return guarded(cast(ProgressStore, type("Broken", (), dict.fromkeys(CALLS, fail))()))


CALLS: dict[str, Callable[[ProgressStore], Awaitable[object] | object]] = {
    "load": lambda store: store.load(),
    "update": lambda store: store.update(FIRST, 1),
    "freeze": lambda store: store.freeze(FIRST, 1),
    "read": lambda store: store.read(FIRST),
    "fetch": lambda store: store.fetch(FIRST),
    "persist": lambda store: store.persist([FIRST]),
    "forget": lambda store: store.forget(FIRST),
    "positions": lambda store: store.positions(),
}


@pytest.mark.parametrize("name", CALLS)
async def test_an_error_of_a_store_names_it_and_known_errors_pass(name):
    cause = ConnectionError("the database is away")

    async def call(error: BaseException) -> None:
        answer = CALLS[name](broken(error))
        if isinstance(answer, Awaitable):
            await answer

    with pytest.raises(ProgressStoreFailed, match=rf"Broken\.{name} .*database is away") as raised:
        await call(cause)
    assert raised.value.__cause__ is cause
    for error in (BrokerUnavailable("broker-a", "gone"), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            await call(error)


@pytest.mark.parametrize("ordered", [True, False], ids=["in order", "concurrent"])
async def test_a_store_that_fails_does_not_keep_a_queue_from_its_next_owner(cluster, ordered):
    group, kept = new_group(), dict[Queue, int]()
    stores = [Database(kept), Database(kept)]
    consumers = [
        consumer_of(cluster, group, ordered=ordered, progress=store, rebalance=STRICT)
        for store in stores
    ]
    seen: list[str] = []
    for consumer in consumers:
        consumer.on("orders")(lambda message: seen.append(message.text()))
    async with consumers[0]:
        await until_owned(consumers[0], 4)
        stores[0].is_away = True
        await fill(cluster, "orders", 10)
        await until(lambda: len(seen) == 10)

        async with consumers[1]:
            await until_owned(consumers[1], 2)
            await until_owned(consumers[0], 2)
            stores[0].is_away = False
            await fill(cluster, "orders", 10)

            await until(lambda: sum(kept.values()) == 20)
            assert not set(own_queues(consumers[0])) & set(own_queues(consumers[1]))


async def test_a_store_that_fails_at_the_stop_does_not_keep_locks(cluster):
    store = Database({})
    consumer = consumer_of(cluster, ordered=True, progress=store)
    seen: list[str] = []
    consumer.on("orders")(lambda message: seen.append(message.text()))
    await consumer.start()
    await until_owned(consumer, 4)
    store.is_away = True
    await fill(cluster, "orders", 10)
    await until(lambda: len(seen) == 10)

    await consumer.stop()

    locks, now = cluster.brokers[0].parts.locks, cluster.clock.monotonic()
    queues = [
        MessageQueue(topic=TOPIC, broker_name="broker-a", queue_id=each.id) for each in QUEUES
    ]
    assert {locks.owner(consumer.group, queue, now) for queue in queues} == {None}
