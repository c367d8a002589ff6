"""Order locks: two owners never overlap, whatever is delayed, paused or lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orbitmq.broker.broker import Broker
from orbitmq.broker.locks import OrderLocks
from orbitmq.client.consumer.locks import LockSettings, QueueLock, QueueLocks
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.routes import Queue
from orbitmq.errors import SettingError
from orbitmq.remoting.connection import Connection
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import MessageQueue
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command
from tests.support.broker import RawClient, until
from tests.support.client import running_engine
from tests.support.rebalancing import GROUP, TOPIC, Consumer, Group, answering, refusing

DEADLINE = 20.0
COUNT = 4
QUEUES = [Queue(TOPIC, "broker-a", place) for place in range(COUNT)]
ON_THE_WIRE = [
    MessageQueue(topic=TOPIC, broker_name="broker-a", queue_id=place) for place in range(COUNT)
]


# ---- the model: clients that are paused, requests and answers that are late or lost


@dataclass
class _Request:
    client: int
    sent_at: float
    #: Whether it takes, renews or gives back.
    kind: str
    #: What the broker said, once it has come there.
    granted: bool | None = None


@dataclass
class _Client:
    lock: QueueLock | None = None
    #: One question at a time.
    waits: _Request | None = None
    #: When its owner last consumed under the lock.
    consumed_at: float | None = None
    gains: list[float] = field(default_factory=list)


class PausedClients(RuleBasedStateMachine):
    """Three clients want one queue. Time passes in any steps between anything.

    A client is paused simply by not being stepped: what it believes is asked by the clock alone.
    Requests and answers travel for as long as they like, and may be lost.
    """

    CLIENTS = 3
    clients_ = st.integers(0, CLIENTS - 1)

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.broker = OrderLocks()
        self.queue = ON_THE_WIRE[0]
        self.clients = [_Client() for _ in range(self.CLIENTS)]
        self.life = LockSettings().life

    @rule(seconds=st.sampled_from([0.01, 1.0, 5.0, 10.0, 20.0, 29.9, 30.0, 31.0, 60.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(client=clients_)
    def asks(self, client: int) -> None:
        me = self.clients[client]
        if me.waits is None:
            kind = "take" if me.lock is None else "renew"
            me.waits = _Request(client, self.now, kind)

    @rule(client=clients_)
    def gives_back(self, client: int) -> None:
        me = self.clients[client]
        if me.waits is None and me.lock is not None:
            me.lock.give_up()
            me.lock = None
            me.waits = _Request(client, self.now, "give")

    @rule(client=clients_)
    def comes_to_the_broker(self, client: int) -> None:
        request = self.clients[client].waits
        if request is None or request.granted is not None:
            return
        if request.kind == "give":
            self.broker.unlock(GROUP, str(client), [self.queue])
            request.granted = True
        else:
            held = self.broker.lock(GROUP, str(client), [self.queue], self.now)
            request.granted = bool(held)

    @rule(client=clients_)
    def is_answered(self, client: int) -> None:
        me = self.clients[client]
        request = me.waits
        if request is None or request.granted is None:
            return
        me.waits = None
        if request.kind == "take" and request.granted:
            lock = QueueLock(QUEUES[0], sent_at=request.sent_at, life=self.life)
            if lock.is_held(self.now):
                me.lock = lock
                me.gains.append(self.now)
        elif request.kind == "renew" and me.lock is not None:
            is_kept = request.granted and me.lock.renew(sent_at=request.sent_at, now=self.now)
            if not is_kept:
                me.lock.give_up()
                me.lock = None

    @rule(client=clients_)
    def gives_up_waiting(self, client: int) -> None:
        """The request may have come there or not; one that has not never will."""
        self.clients[client].waits = None

    @rule(client=clients_, there=st.sampled_from([0.0, 0.1]), back=st.sampled_from([0.0, 0.1]))
    def asks_and_is_answered(self, client: int, there: float, back: float) -> None:
        """What usually happens."""
        self.asks(client)
        self.now += there
        self.comes_to_the_broker(client)
        self.now += back
        self.is_answered(client)
        if self._believes(self.clients[client]):
            self.clients[client].consumed_at = self.now

    @rule(client=clients_)
    def gives_back_and_is_heard(self, client: int) -> None:
        self.gives_back(client)
        self.comes_to_the_broker(client)
        self.is_answered(client)

    @precondition(lambda self: any(self._believes(client) for client in self.clients))
    @rule()
    def consumes(self) -> None:
        for client in self.clients:
            if self._believes(client):
                client.consumed_at = self.now

    def _believes(self, client: _Client) -> bool:
        return client.lock is not None and client.lock.is_held(self.now)

    @invariant()
    def at_most_one_believes(self) -> None:
        assert sum(self._believes(client) for client in self.clients) <= 1

    @invariant()
    def whoever_believes_is_the_owner_at_the_broker(self) -> None:
        for number, client in enumerate(self.clients):
            if self._believes(client):
                assert self.broker.owner(GROUP, self.queue, self.now) == str(number)

    @invariant()
    def nobody_consumed_between_a_renewed_lock(self) -> None:
        """As long as a lock was kept, nobody else has consumed: progress need not be read anew."""
        for number, client in enumerate(self.clients):
            if not self._believes(client):
                continue
            for other, each in enumerate(self.clients):
                if other != number and each.consumed_at is not None:
                    assert each.consumed_at <= client.gains[-1]


PausedClients.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestPausedClients = pytest.mark.feature("E1")(PausedClients.TestCase)


@pytest.mark.feature("E2")
def test_a_lock_lapses_at_the_client_before_it_does_at_the_broker():
    broker = OrderLocks()
    broker.lock(GROUP, "a", [ON_THE_WIRE[0]], 100.0)
    lock = QueueLock(QUEUES[0], sent_at=100.0, life=LockSettings().life)

    assert lock.is_held(129.9)
    assert not lock.is_held(130.0)
    assert not broker.lock(GROUP, "b", [ON_THE_WIRE[0]], 130.0)
    assert not broker.lock(GROUP, "b", [ON_THE_WIRE[0]], 160.0)
    assert broker.lock(GROUP, "b", [ON_THE_WIRE[0]], 160.1)
    assert LockSettings().renewal == 20.0


def test_a_renewal_counts_from_its_sending_and_never_brings_a_lapsed_lock_back():
    lock = QueueLock(QUEUES[0], sent_at=100.0, life=30.0)

    assert lock.renew(sent_at=110.0, now=125.0)
    assert lock.is_held(139.9)
    assert not lock.is_held(140.0)
    assert not lock.renew(sent_at=135.0, now=141.0)
    assert not lock.is_held(141.0)


@pytest.mark.parametrize(
    "wrong", [{"life": 60.0}, {"renewal": 30.0}, {"timeout": 0}, {"life": True}, {"retry": -1}]
)
def test_lives_that_guarantee_nothing_are_refused(wrong):
    with pytest.raises(SettingError, match="locks"):
        LockSettings(**wrong)


# ---- at a real broker


@pytest.fixture
async def cluster(new_cluster):
    async with new_cluster() as cluster:
        await cluster.create_topic(TOPIC, queues=COUNT)
        yield cluster


@pytest.fixture
async def engines(cluster):
    async with (
        running_engine(cluster.name_server) as one,
        running_engine(cluster.name_server) as two,
    ):
        for engine in (one, two):
            engine.routes.track(TOPIC)
            await engine.routes.get(TOPIC)
        yield one, two


async def test_a_queue_is_locked_by_one_client_only(engines):
    one, two = (QueueLocks(engine, GROUP) for engine in engines)

    first = await one.acquire(QUEUES[:3])
    second = await two.acquire(QUEUES)

    assert set(first) == set(QUEUES[:3])
    assert set(second) == set(QUEUES[3:])
    assert one.is_held(QUEUES[0])
    assert not two.is_held(QUEUES[0])
    assert two.get(QUEUES[0]) is None
    await one.release([QUEUES[0]])
    assert not one.is_held(QUEUES[0])
    assert not first[QUEUES[0]].is_held(engines[0].clock.monotonic())
    assert set(await two.acquire(QUEUES)) == {QUEUES[0], QUEUES[3]}


class SlowLocking:
    """A broker that takes locks at once, and says so when the test lets it."""

    def __init__(self, broker: Broker) -> None:
        dispatcher = broker._dispatcher
        assert dispatcher is not None
        self._usual = dispatcher._handlers[RequestCode.LOCK_BATCH_MQ]
        #: When requests came, by the clock that clients go by.
        self.came_at: list[float] = []
        self.may_answer = asyncio.Event()

    def __call__(
        self, connection: Connection, request: Command
    ) -> Coroutine[object, object, Command]:
        self.came_at.append(asyncio.get_running_loop().time())
        answer = self._usual(connection, request)
        assert isinstance(answer, Command)
        return self._answer(answer)

    async def _answer(self, answer: Command) -> Command:
        await self.may_answer.wait()
        return answer


def owners(cluster: AsyncEmbeddedCluster) -> list[str | None]:
    """Who has the locks, by what the broker knows."""
    locks = cluster.brokers[0].parts.locks
    now = cluster.clock.monotonic()
    return [locks.owner(GROUP, queue, now) for queue in ON_THE_WIRE]


async def test_the_life_of_a_lock_is_counted_from_before_the_request_was_sent(cluster, engines):
    broker = cluster.brokers[0]
    locks = QueueLocks(engines[0], GROUP)
    takes: list[Callable[[], Coroutine[object, object, object]]] = [
        lambda: locks.acquire(QUEUES[:1]),
        locks.renew,
    ]
    for take in takes:
        slow = SlowLocking(broker)
        with answering(broker, RequestCode.LOCK_BATCH_MQ, slow):
            asking = asyncio.create_task(take())
            await until(lambda: slow.came_at, DEADLINE)  # noqa: B023  # waited for here
            came_at = slow.came_at[0]
            await until(lambda: asyncio.get_running_loop().time() > came_at, DEADLINE)  # noqa: B023
            slow.may_answer.set()
            await asking

        lock = locks.get(QUEUES[0])
        assert lock is not None
        assert lock.granted_at <= came_at
        assert not lock.is_held(came_at + LockSettings().life)


async def test_a_lock_that_nobody_waits_for_any_more_is_given_back_all_the_same(cluster, engines):
    broker, locks = cluster.brokers[0], QueueLocks(engines[0], GROUP)
    slow = SlowLocking(broker)
    with answering(broker, RequestCode.LOCK_BATCH_MQ, slow):
        asking = asyncio.create_task(locks.acquire(QUEUES))
        await until(lambda: slow.came_at, DEADLINE)
        asking.cancel()
        await asyncio.wait([asking])
        giving_back = asyncio.create_task(locks.release_all())
        slow.may_answer.set()
        await giving_back

    assert owners(cluster) == [None] * COUNT


async def test_a_lock_that_was_asked_for_in_vain_is_given_back_too(cluster, engines):
    broker = cluster.brokers[0]
    locks = QueueLocks(engines[0], GROUP, LockSettings(timeout=0.1))
    with answering(broker, RequestCode.LOCK_BATCH_MQ, SlowLocking(broker)):
        assert await locks.acquire(QUEUES) == {}
    assert owners(cluster) == [engines[0].client_id] * COUNT

    await locks.release_all(but=QUEUES[:1])
    assert owners(cluster) == [engines[0].client_id] + [None] * (COUNT - 1)
    await locks.release_all()

    assert owners(cluster) == [None] * COUNT


async def test_giving_back_never_takes_what_was_taken_anew(cluster, engines):
    broker, locks = cluster.brokers[0], QueueLocks(engines[0], GROUP)
    await locks.acquire(QUEUES[:1])
    slow = SlowLocking(broker)
    with answering(broker, RequestCode.LOCK_BATCH_MQ, slow):
        again = asyncio.create_task(locks.acquire(QUEUES[:1]))
        await until(lambda: slow.came_at, DEADLINE)
        giving_back = asyncio.create_task(locks.release(QUEUES[:1]))
        await asyncio.sleep(0)
        slow.may_answer.set()
        await asyncio.wait([again, giving_back])

    assert locks.is_held(QUEUES[0]) == (owners(cluster)[0] == engines[0].client_id)
    assert set(await again) == {QUEUES[0]}
    assert locks.is_held(QUEUES[0])


async def test_a_client_that_cannot_renew_stops_to_believe_and_says_so(cluster, engines, caplog):
    lost: list[Queue] = []
    locks = QueueLocks(
        engines[0], GROUP, LockSettings(life=1.0, renewal=0.05, retry=0.02), on_lost=lost.append
    )
    locks.start()
    held = await locks.acquire(QUEUES[:2])
    with refusing(cluster.brokers[0], RequestCode.LOCK_BATCH_MQ):
        assert locks.is_held(QUEUES[0])
        await until(lambda: len(lost) == 2, DEADLINE)

        now = engines[0].clock.monotonic()
        assert not any(lock.is_held(now) for lock in held.values())
        # The broker still keeps them from everybody else.
        assert cluster.brokers[0].parts.locks.owner(GROUP, ON_THE_WIRE[0], now)
    locks.stop()

    assert caplog.text.count("queues cannot be locked at broker-a") == 1


async def test_a_lock_that_the_broker_gave_away_is_lost(cluster, engines):
    lost: list[Queue] = []
    locks = QueueLocks(engines[0], GROUP, on_lost=lost.append)
    await locks.acquire(QUEUES)
    broker = cluster.brokers[0].parts.locks
    broker.unlock(GROUP, engines[0].client_id, [ON_THE_WIRE[2]])
    await QueueLocks(engines[1], GROUP).acquire([QUEUES[2]])

    await locks.renew()

    assert lost == [QUEUES[2]]
    assert [locks.is_held(queue) for queue in QUEUES] == [True, True, False, True]


# ---- hand-over with locks


SETTINGS = RebalanceSettings(interval=60.0, retry=0.2, persist=60.0, handover=0.2)


@pytest.fixture
async def group(cluster):
    async with Group(cluster.name_server, is_orderly=True, settings=SETTINGS) as group:
        yield group


@pytest.fixture
async def client(cluster):
    client = await RawClient.open(cluster.brokers[0])
    yield client
    await client.close()


async def settled(group: Group) -> None:
    await until(lambda: group.ledger.is_settled(QUEUES), DEADLINE)


@pytest.mark.feature("E10")
async def test_a_queue_whose_lock_is_refused_is_skipped_and_taken_when_it_is_free(
    cluster, group, engines
):
    somebody = QueueLocks(engines[0], GROUP)
    await somebody.acquire(QUEUES[:1])

    consumer = await group.join()
    await until(lambda: consumer.owned == set(QUEUES[1:]), DEADLINE)
    assert consumer.rebalancer.claimed == {QUEUES[0]}
    await somebody.release(QUEUES[:1])

    await until(lambda: consumer.owned == set(QUEUES), DEADLINE)


@pytest.mark.usefixtures("inside")
@pytest.mark.feature("E5")
async def test_progress_is_read_after_the_lock_was_taken_and_again_after_it_was_lost(
    cluster, group, engines, client
):
    for _ in range(10):
        await client.stored(TOPIC)
    consumer = await group.join(locks=LockSettings(life=20.0, renewal=0.05))
    await until(lambda: len(group.ledger.consumed) == 10, DEADLINE)
    old = consumer.rebalancer.owned[QUEUES[0]]
    # Somebody else has had the queue, has come to another place, and has given it back.
    broker = cluster.brokers[0]
    somebody = QueueLocks(engines[0], GROUP)
    # In one step: in between, the consumer would renew its lock.
    locks, now = broker.parts.locks, cluster.clock.monotonic()
    locks.unlock(GROUP, consumer.client_id, ON_THE_WIRE[:1])
    locks.lock(GROUP, engines[0].client_id, ON_THE_WIRE[:1], now)
    await somebody.acquire(QUEUES[:1])
    await until(lambda: old.is_dropped, DEADLINE)
    for _ in range(5):
        await client.stored(TOPIC)
    await client.report(TOPIC, 13)
    await somebody.release(QUEUES[:1])

    await until(lambda: len(group.ledger.consumed) == 12, DEADLINE)

    assert sorted(offset for _, offset in group.ledger.consumed)[10:] == [13, 14]
    assert [each.offset for each in group.ledger.begun if each.queue == QUEUES[0]] == [0, 13]


async def test_a_lock_taken_for_a_queue_that_goes_to_somebody_else_is_given_back(cluster, group):
    def owners():
        locks = cluster.brokers[0].parts.locks
        now = cluster.clock.monotonic()
        return {locks.owner(GROUP, queue, now) for queue in ON_THE_WIRE}

    with refusing(cluster.brokers[0], RequestCode.QUERY_CONSUMER_OFFSET):
        first = await group.join()
        await until(lambda: first.rebalancer.counts.postponed >= COUNT, DEADLINE)
        assert owners() == {first.client_id}
        assert first.owned == set()

        second = await group.join()
        await until(lambda: owners() == {first.client_id, second.client_id}, DEADLINE)

    await settled(group)
    assert group.ledger.overlaps == []


async def test_a_stop_that_comes_between_a_lock_and_its_answer_leaves_no_lock(cluster, group):
    broker = cluster.brokers[0]
    slow = SlowLocking(broker)
    with answering(broker, RequestCode.LOCK_BATCH_MQ, slow):
        consumer = await group.join()
        await until(lambda: slow.came_at, DEADLINE)
        stopping = asyncio.create_task(consumer.stop())
        # The stop must be where it waits for the answer, or be at its end if it does not.
        await until(lambda: stopping.done() or not consumer.rebalancer.claimed, DEADLINE)
        slow.may_answer.set()
        await stopping

    assert owners(cluster) == [None] * COUNT


@pytest.mark.usefixtures("inside")
@pytest.mark.feature("E4")
async def test_a_stop_leaves_the_lock_of_a_queue_whose_handler_still_runs(
    cluster, group, client, caplog
):
    gate = asyncio.Event()

    async def waits(_, __):
        await gate.wait()

    await client.stored(TOPIC, queue_id=1)
    first = await group.join(handler=waits)
    await until(lambda: sum(group.ledger.running.values()) == 1, DEADLINE)
    await until(lambda: len(first.owned) == COUNT, DEADLINE)

    await first.stop()
    assert owners(cluster) == [None, first.client_id, None, None]
    assert "still runs at the stop" in caplog.text
    second = await group.join()
    await until(lambda: len(second.owned) == COUNT - 1, DEADLINE)

    assert second.rebalancer.claimed == {QUEUES[1]}
    gate.set()
    await until(lambda: not +group.ledger.running, DEADLINE)
    assert group.ledger.overlaps == []


async def regained(consumer: Consumer, queue: Queue, before: object) -> None:
    owned = consumer.rebalancer.owned
    await until(lambda: queue in owned and owned[queue] is not before, DEADLINE)


@pytest.mark.parametrize("way", ["begun anew", "released"])
async def test_whoever_is_late_with_a_former_ownership_leaves_the_lock_of_the_present_one(
    cluster, way
):
    queue = QUEUES[0]
    async with Group(cluster.name_server, is_orderly=True) as group:
        consumer = await group.join()
        await until(lambda: consumer.owned == set(QUEUES), DEADLINE)
        former = consumer.rebalancer.owned[queue]
        consumer.rebalancer.rebuild(former)
        await regained(consumer, queue, former)
        present = consumer.rebalancer.owned[queue]

        if way == "begun anew":
            consumer.rebalancer.rebuild(former)
        releases = consumer.rebalancer._releases
        if way == "released" or releases.is_going(former):
            async with asyncio.timeout(DEADLINE):
                await releases.release(former, "late", commits=False)

        assert consumer.rebalancer.owned[queue] is present
        assert consumer.locks is not None
        assert consumer.locks.get(queue) is present.lock
        assert consumer.locks.is_held(queue)
        assert owners(cluster)[0] == consumer.client_id
