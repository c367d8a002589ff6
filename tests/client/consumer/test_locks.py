"""Order locks: two owners never overlap, whatever is delayed, paused or lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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
from tests.support.broker import until
from tests.support.client import running_engine
from tests.support.rebalancing import GROUP, TOPIC, Group, answering, refusing, usual_handler

DEADLINE = 20.0
QUEUE_COUNT = 4
QUEUES = [Queue(TOPIC, "broker-a", place) for place in range(QUEUE_COUNT)]
ON_THE_WIRE = [
    MessageQueue(topic=TOPIC, broker_name="broker-a", queue_id=each.id) for each in QUEUES
]


# ---- the model: clients that are paused, requests and answers that are late or lost


@dataclass
class _Request:
    client: int
    sent_at: float
    #: Whether it takes, renews or gives back.
    kind: str
    #: The broker's answer, once the request has come there.
    granted: bool | None = None


@dataclass
class _Client:
    lock: QueueLock | None = None
    #: One question at a time.
    waits: _Request | None = None


class PausedClients(RuleBasedStateMachine):
    """Three clients want one queue. Time passes in any steps between anything.

    A client that is not stepped is paused. Requests and answers take any time, and may be lost.
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
        elif request.kind == "renew" and me.lock is not None:
            is_kept = request.granted and me.lock.renew(sent_at=request.sent_at, now=self.now)
            if not is_kept:
                me.lock.give_up()
                me.lock = None

    @rule(client=clients_)
    def gives_up_waiting(self, client: int) -> None:
        self.clients[client].waits = None

    @rule(client=clients_, there=st.sampled_from([0.0, 0.1]), back=st.sampled_from([0.0, 0.1]))
    def asks_and_is_answered(self, client: int, there: float, back: float) -> None:
        """The usual course."""
        self.asks(client)
        self.now += there
        self.comes_to_the_broker(client)
        self.now += back
        self.is_answered(client)

    @rule(client=clients_)
    def gives_back_and_is_heard(self, client: int) -> None:
        self.gives_back(client)
        self.comes_to_the_broker(client)
        self.is_answered(client)

    def _relies(self, client: _Client) -> bool:
        return client.lock is not None and client.lock.is_held(self.now)

    @invariant()
    def at_most_one_relies_on_its_lock(self) -> None:
        assert sum(self._relies(client) for client in self.clients) <= 1

    @invariant()
    def a_client_that_relies_on_its_lock_has_it_at_the_broker(self) -> None:
        for number, client in enumerate(self.clients):
            if self._relies(client):
                assert self.broker.owner(GROUP, self.queue, self.now) == str(number)


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


@pytest.mark.parametrize(
    "wrong", [{"life": 60.0}, {"renewal": 30.0}, {"timeout": 0}, {"life": True}, {"retry": -1}]
)
def test_lives_that_guarantee_nothing_are_refused(wrong):
    with pytest.raises(SettingError, match="locks"):
        LockSettings(**wrong)


# ---- at a real broker


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
    """A broker that grants locks immediately, and answers when the test lets it."""

    def __init__(self, broker: Broker) -> None:
        self._usual = usual_handler(broker, RequestCode.LOCK_BATCH_MQ)
        #: When requests came, by the clock of the clients.
        self.came_at: list[float] = []
        self.may_answer = asyncio.Event()

    def __call__(
        self, connection: Connection, request: Command
    ) -> Coroutine[object, object, Command]:
        self.came_at.append(asyncio.get_running_loop().time())
        return self._answer(self._usual(connection, request))

    async def _answer(self, answer: Command) -> Command:
        await self.may_answer.wait()
        return answer


def owners(cluster: AsyncEmbeddedCluster) -> list[str | None]:
    """The owners of the locks at the broker."""
    locks = cluster.brokers[0].parts.locks
    now = cluster.clock.monotonic()
    return [locks.owner(GROUP, queue, now) for queue in ON_THE_WIRE]


@pytest.mark.parametrize("is_renewal", [False, True], ids=["granted", "renewed"])
async def test_the_life_of_a_lock_is_counted_from_before_the_request_was_sent(
    cluster, engines, is_renewal
):
    locks = QueueLocks(engines[0], GROUP)
    if is_renewal:
        await locks.acquire(QUEUES[:1])
    slow = SlowLocking(cluster.brokers[0])
    with answering(cluster.brokers[0], RequestCode.LOCK_BATCH_MQ, slow):
        asking = asyncio.ensure_future(locks.renew() if is_renewal else locks.acquire(QUEUES[:1]))
        await until(lambda: slow.came_at, DEADLINE)
        (came_at,) = slow.came_at
        await until(lambda: asyncio.get_running_loop().time() > came_at, DEADLINE)
        slow.may_answer.set()
        await asking

    lock = locks.get(QUEUES[0])
    assert lock is not None
    assert not lock.is_held(came_at + LockSettings().life)


async def test_a_lock_whose_answer_came_too_late_is_given_back(cluster, engines):
    broker = cluster.brokers[0]
    locks = QueueLocks(engines[0], GROUP, LockSettings(timeout=0.1))
    with answering(broker, RequestCode.LOCK_BATCH_MQ, SlowLocking(broker)):
        assert await locks.acquire(QUEUES) == {}
    assert owners(cluster) == [engines[0].client_id] * QUEUE_COUNT

    await locks.release_all(but=QUEUES[:1])
    assert owners(cluster) == [engines[0].client_id] + [None] * (QUEUE_COUNT - 1)
    await locks.release_all()

    assert owners(cluster) == [None] * QUEUE_COUNT


async def test_a_client_that_cannot_renew_its_locks_stops_relying_on_them(cluster, engines, caplog):
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
    with refusing(cluster.brokers[0], RequestCode.QUERY_CONSUMER_OFFSET):
        first = await group.join()
        await until(lambda: first.rebalancer.counts.postponed >= QUEUE_COUNT, DEADLINE)
        assert set(owners(cluster)) == {first.client_id}
        assert first.owned == set()

        second = await group.join()
        await until(lambda: set(owners(cluster)) == {first.client_id, second.client_id}, DEADLINE)

    await settled(group)
    assert group.ledger.overlaps == []


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
    await until(lambda: len(first.owned) == QUEUE_COUNT, DEADLINE)

    await first.stop()
    assert owners(cluster) == [None, first.client_id, None, None]
    assert "still runs at the stop" in caplog.text
    second = await group.join()
    await until(lambda: len(second.owned) == QUEUE_COUNT - 1, DEADLINE)

    assert second.rebalancer.claimed == {QUEUES[1]}
    gate.set()
    await until(lambda: not +group.ledger.running, DEADLINE)
    assert group.ledger.overlaps == []
