"""Positions: the rules of the table in memory, and the stores in which they outlive a consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orbitmq.client.consumer.progress import (
    BrokerProgress,
    MemoryProgress,
    ProgressStore,
    ProgressUnknown,
    TrackedProgress,
)
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import Address, RemotingError
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import OffsetResponse, UpdateConsumerOffsetRequest
from tests.support.broker import RawClient, until
from tests.support.client import ScriptedBroker, ScriptedNameServer, running_engine, topic_route
from tests.support.rebalancing import GROUP, QUICK, TOPIC, Consumer, Group, answering, refusing

DEADLINE = 20.0
QUEUES = [Queue(TOPIC, "broker-a", place) for place in range(4)]
FIRST = QUEUES[0]


# ---- the table in memory


class ProgressModel(RuleBasedStateMachine):
    """Against a plain description: what was said last counts, forward only, unless frozen."""

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
    def somebody_else_reports(self, queue: Queue, offset: int) -> None:
        """What we believe to be put by is then wrong, but never what we have said last."""
        if queue not in self.memory:
            self.kept[queue] = self.store.kept[queue] = offset

    @invariant()
    def memory_is_as_described(self) -> None:
        assert self.store.positions() == self.memory
        assert {queue: self.store.read(queue) for queue in QUEUES} == {
            queue: self.memory.get(queue) for queue in QUEUES
        }

    @invariant()
    def what_is_put_by_is_as_described(self) -> None:
        assert self.store.kept == self.kept


ProgressModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestProgressModel = ProgressModel.TestCase


class Slow(TrackedProgress):
    """Puts by what it is told to when the test lets it, and fails for chosen queues."""

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


async def test_an_older_position_never_overtakes_a_newer_one():
    store = Slow()
    store.update(FIRST, 1)
    first = asyncio.create_task(store.persist([FIRST]))
    await until(lambda: store.calls)
    store.update(FIRST, 2)
    second = asyncio.create_task(store.persist([FIRST]))
    await asyncio.sleep(0)
    assert store.calls == [{FIRST: 1}]

    store.gate.set()
    await asyncio.gather(first, second)

    assert store.calls == [{FIRST: 1}, {FIRST: 2}]


async def test_only_what_changed_is_put_by_and_what_failed_is_tried_again():
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
async def cluster(new_cluster):
    async with new_cluster() as cluster:
        await cluster.create_topic(TOPIC, queues=4)
        yield cluster


@pytest.fixture
async def engine(cluster):
    async with running_engine(cluster.name_server) as engine:
        engine.routes.track(TOPIC)
        await engine.routes.get(TOPIC)
        yield engine


@pytest.fixture
async def client(cluster):
    client = await RawClient.open(cluster.brokers[0])
    yield client
    await client.close()


async def reported(client: RawClient, offset: int) -> None:
    """Some other member of the group has come so far."""
    answer = await client.report(TOPIC, offset)
    assert answer.code == 0


async def group_exists(cluster: AsyncEmbeddedCluster) -> None:
    """A group exists once a member has said hello."""
    async with Group(cluster.name_server) as group:
        await group.join()


@pytest.mark.usefixtures("inside")
@pytest.mark.feature("G5")
async def test_no_progress_yet_and_not_to_be_had_are_two_things(cluster, engine, client):
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


async def test_an_answer_that_is_no_position_is_an_error(cluster, engine):
    def nonsense(_, request):
        return request.answer(0, OffsetResponse(offset=-1))

    with (
        answering(cluster.brokers[0], RequestCode.QUERY_CONSUMER_OFFSET, nonsense),
        pytest.raises(ProgressUnknown, match="is at -1"),
    ):
        await BrokerProgress(engine, GROUP).fetch(FIRST)


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
async def without_master(slave: Slave) -> AsyncIterator[tuple[BrokerProgress, ScriptedNameServer]]:
    """Progress of a group at a broker of which only a slave can be reached."""
    async with slave.broker.serving(), ScriptedNameServer().serving() as name_server:
        addresses = {0: Address("127.0.0.1", 1), 1: slave.broker.address}
        name_server.routes[TOPIC] = topic_route({"broker-a": addresses})
        async with running_engine(name_server.address) as engine:
            await engine.routes.get(TOPIC)
            yield BrokerProgress(engine, GROUP), name_server


@pytest.mark.feature("G5")
@pytest.mark.parametrize("position", [None, 0])
async def test_a_slave_that_knows_of_no_progress_proves_nothing(position):
    async with without_master(Slave(position)) as (progress, _):
        with pytest.raises(BrokerUnavailable, match="proves nothing"):
            await progress.fetch(FIRST)

    assert progress.read(FIRST) is None


async def test_a_position_that_a_slave_has_is_believed():
    async with without_master(Slave(7)) as (progress, _):
        assert await progress.fetch(FIRST) == 7


async def test_a_report_that_only_a_slave_took_is_made_again_until_a_master_takes_it():
    slave, master = Slave(None), Slave(None)
    async with without_master(slave) as (progress, name_server), master.broker.serving():
        progress.update(FIRST, 5)
        with pytest.raises(BrokerUnavailable, match="repeated"):
            await progress.persist([FIRST])
        assert slave.position == 5

        addresses = {0: master.broker.address, 1: slave.broker.address}
        name_server.routes[TOPIC] = topic_route({"broker-a": addresses})
        await progress._engine.routes.get(TOPIC, refresh=True)
        await progress.persist([FIRST])

    assert master.position == 5


class ApacheOffsets:
    """Keeps positions as Apache's brokers do: whoever finds no table puts one in place."""

    def __init__(self, refused: Collection[int] = (), *, is_silent: bool = False) -> None:
        """It refuses reports of queues of these numbers; one that is silent answers none."""
        self.table: dict[int, int] | None = None
        self.reports: list[int] = []
        self._refused = refused
        self._is_silent = is_silent

    async def take(self, _: Connection, request: Command) -> Command:
        report = request.header(UpdateConsumerOffsetRequest)
        assert report.queue_id is not None
        self.reports.append(report.queue_id)
        if self._is_silent:
            await asyncio.sleep(DEADLINE)
        if report.queue_id in self._refused:
            return request.answer(ResponseCode.SYSTEM_ERROR, remark="told to")
        found = self.table
        await asyncio.sleep(0.01)  # another thread's turn
        if found is None:
            found = self.table = {}
        found[report.queue_id] = report.commit_offset or 0
        return request.answer(0)


async def test_first_reports_at_the_same_time_are_not_lost_in_a_broker_that_makes_a_table_for_each(
    cluster, engine
):
    await group_exists(cluster)
    apache = ApacheOffsets()
    progress = BrokerProgress(engine, GROUP)
    for queue in QUEUES:
        progress.update(queue, 10)

    with answering(cluster.brokers[0], RequestCode.UPDATE_CONSUMER_OFFSET, apache.take):
        await progress.persist(QUEUES)

    assert apache.table == dict.fromkeys(range(4), 10)


async def test_first_reports_go_one_by_one_until_one_of_them_was_taken(cluster, engine):
    await group_exists(cluster)
    apache = ApacheOffsets(refused={0, 1})
    progress = BrokerProgress(engine, GROUP)

    with answering(cluster.brokers[0], RequestCode.UPDATE_CONSUMER_OFFSET, apache.take):
        # Also where several callers report at the same time.
        outcomes = await asyncio.gather(
            progress.store(dict.fromkeys(QUEUES, 10)), progress.store(dict.fromkeys(QUEUES, 11))
        )

    for failed in outcomes:
        assert {queue.id for queue in failed} == {0, 1}
        assert all(isinstance(error, BrokerRefused) for error in failed.values())
    assert apache.table is not None
    assert set(apache.table) == {2, 3}


async def test_first_reports_to_a_broker_that_is_away_do_not_wait_one_after_the_other(
    cluster, engine
):
    await group_exists(cluster)
    silent = ApacheOffsets(is_silent=True)
    progress = BrokerProgress(engine, GROUP, timeout=0.2)

    with answering(cluster.brokers[0], RequestCode.UPDATE_CONSUMER_OFFSET, silent.take):
        failed = await progress.store(dict.fromkeys(QUEUES, 10))

    assert set(failed) == set(QUEUES)
    assert len(silent.reports) == 1


async def test_first_reports_of_several_members_are_repeated_and_then_believed(cluster, engine):
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
async def test_progress_reaches_the_broker_by_the_timer_at_release_and_at_the_end(cluster, client):
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
    await reported(client, 2)
    async with Group(cluster.name_server) as group:

        class LeftOver(BrokerProgress):
            async def load(self) -> None:
                # From an earlier ownership, ahead of where the group is, and not to be moved.
                self.freeze(FIRST, 4)

        consumer = await group.join(progress_of=lambda engine: LeftOver(engine, GROUP))
        await until(lambda: len(group.ledger.consumed) == 3, DEADLINE)

        assert sorted(offset for _, offset in group.ledger.consumed) == [2, 3, 4]
        assert consumer.progress.read(FIRST) == 5


# ---- together, and in bounded time


async def test_whoever_waits_for_a_broker_goes_with_all_others_who_wait():
    store = Slow()
    for queue in QUEUES:
        store.update(queue, 5)
    waiting = [asyncio.create_task(store.persist([FIRST]))]
    await until(lambda: store.calls)
    waiting += [asyncio.create_task(store.persist([queue])) for queue in QUEUES[1:]]
    await asyncio.sleep(0)
    store.failing = {QUEUES[2]}

    store.gate.set()
    async with asyncio.timeout(DEADLINE):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)

    assert store.calls == [{FIRST: 5}, dict.fromkeys(QUEUES[1:], 5)]
    assert [isinstance(each, BrokerUnavailable) for each in outcomes] == [
        queue == QUEUES[2] for queue in QUEUES
    ]


async def test_whoever_is_cancelled_leaves_the_rest_to_those_who_still_wait():
    store = Stepped()
    for queue in QUEUES[:3]:
        store.update(queue, 5)
    others = [asyncio.create_task(store.persist([queue])) for queue in QUEUES[:3]]
    await until(lambda: store.calls)
    store.steps[0].set()
    await until(lambda: len(store.calls) == 2)

    # Who is at it for both.
    others[1].cancel()
    await until(lambda: len(store.calls) == 3)
    store.steps[2].set()
    async with asyncio.timeout(DEADLINE):
        await others[2]

    assert others[1].cancelled()
    assert store.calls == [{FIRST: 5}, *[dict.fromkeys(QUEUES[1:3], 5)] * 2]


class Stepped(Slow):
    """Each time that something is put by waits for a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [asyncio.Event() for _ in range(3)]

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        self.calls.append(dict(changed))
        await self.steps[len(self.calls) - 1].wait()
        return {}


class Unheard(MemoryProgress):
    """Once deaf, it takes nothing: whoever puts something by waits for ever, or is told so."""

    def __init__(self, *, hangs: bool) -> None:
        super().__init__()
        self.calls = 0
        self.is_deaf = False
        self._hangs = hangs

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        if not self.is_deaf:
            return await super().store(changed)
        self.calls += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(None if self._hangs else 0.05):
                await asyncio.Event().wait()
        return {queue: BrokerUnavailable(queue.broker, "it is silent") for queue in changed}


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "refuses"])
@pytest.mark.parametrize("is_orderly", [True, False], ids=["in order", "concurrent"])
async def test_a_stop_finds_out_once_that_progress_is_not_taken(
    cluster, client, monkeypatch, hangs, is_orderly
):
    monkeypatch.setattr("orbitmq.client.consumer.handover._LAST_REPORT", 0.2)
    store = Unheard(hangs=hangs)
    async with Group(cluster.name_server, progress=store, is_orderly=is_orderly) as group:
        consumer = await group.join()
        await until(lambda: consumer.owned == set(QUEUES), DEADLINE)
        store.is_deaf = True
        for number in range(8):
            await client.stored(TOPIC, queue_id=number % 4)
        await until(lambda: sum(group.ledger.consumed.values()) == 8, DEADLINE)
        store.calls = 0

        async with asyncio.timeout(DEADLINE):
            await consumer.stop()

    # One was on its way, and the others went together, if at all.
    assert store.calls <= 2


# ---- a broker that does not have what it was told


@pytest.mark.parametrize(("held", "then"), [(3, 10), (20, 20)], ids=["less", "more"])
async def test_after_a_reconnection_a_broker_is_told_again_if_it_has_less(
    cluster, engine, client, held, then
):
    await group_exists(cluster)
    progress = BrokerProgress(engine, GROUP)
    progress.update(FIRST, 10)
    for _ in range(3):
        await progress.persist(QUEUES)
    await client.report(TOPIC, held)
    await progress.persist(QUEUES)
    assert cluster.progress(GROUP, TOPIC)["broker-a", 0] == held, "somebody else said so since"
    connection = engine.open_connection(cluster.brokers[0].address)
    assert connection is not None

    # As a broker that was killed comes back, or a slave that was made the master.
    connection.close()
    await until(lambda: not connection.is_open, DEADLINE)
    await progress.persist(QUEUES)

    assert cluster.progress(GROUP, TOPIC)["broker-a", 0] == then
