"""A store of progress that the application brought, and what becomes of its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

import pytest

from orbitmq.client.consumer.progress import (
    GuardedProgressStore,
    MemoryProgress,
    ProgressStoreFailed,
)
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import MessageQueue
from tests.support.consumers import consumer_of, fill, new_group, own_queues, until_owned
from tests.support.consuming import until

QUEUE = Queue("orders", "broker-a", 0)
QUICK = RebalanceSettings(handover=0.5, retry=0.2)


class Database(MemoryProgress):
    """Positions in a table that members share, and that is away when a test says so."""

    def __init__(self, kept: dict[Queue, int]) -> None:
        super().__init__(kept)
        self.is_away = False

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        if self.is_away:
            raise ConnectionError("the database is away")
        return await super().store(changed)


class Broken:
    """Raises in every method."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def load(self) -> None:
        raise self._error

    def update(self, queue: Queue, offset: int, *, increase_only: bool = True) -> None:
        raise self._error

    def freeze(self, queue: Queue, offset: int) -> None:
        raise self._error

    def read(self, queue: Queue) -> int | None:
        raise self._error

    async def fetch(self, queue: Queue) -> int | None:
        raise self._error

    async def persist(self, queues: Iterable[Queue]) -> None:
        raise self._error

    def forget(self, queue: Queue) -> None:
        raise self._error

    def positions(self, topic: str | None = None) -> dict[Queue, int]:
        raise self._error


CALLS: dict[str, Callable[[GuardedProgressStore], Awaitable[object] | object]] = {
    "load": lambda store: store.load(),
    "update": lambda store: store.update(QUEUE, 1),
    "freeze": lambda store: store.freeze(QUEUE, 1),
    "read": lambda store: store.read(QUEUE),
    "fetch": lambda store: store.fetch(QUEUE),
    "persist": lambda store: store.persist([QUEUE]),
    "forget": lambda store: store.forget(QUEUE),
    "positions": lambda store: store.positions(),
}


async def call(name: str, store: GuardedProgressStore) -> None:
    answer = CALLS[name](store)
    if isinstance(answer, Awaitable):
        await answer


@pytest.mark.parametrize("name", CALLS)
async def test_whatever_a_store_raises_is_an_error_that_names_it(name):
    cause = ConnectionError("the database is away")

    with pytest.raises(
        ProgressStoreFailed, match=rf"Broken\.{name} .*the database is away"
    ) as told:
        await call(name, GuardedProgressStore(Broken(cause)))

    assert told.value.__cause__ is cause


@pytest.mark.parametrize("error", [BrokerUnavailable("broker-a", "gone"), asyncio.CancelledError()])
@pytest.mark.parametrize("name", CALLS)
async def test_errors_that_are_understood_and_cancellation_pass(name, error):
    with pytest.raises(type(error)) as told:
        await call(name, GuardedProgressStore(Broken(error)))

    assert told.value is error


@pytest.fixture
async def cluster():
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic("orders", queues=2)
        yield cluster


@pytest.mark.parametrize("ordered", [True, False], ids=["in order", "concurrent"])
async def test_a_store_that_fails_does_not_keep_a_queue_from_its_next_owner(cluster, ordered):
    group, kept = new_group(), dict[Queue, int]()
    stores = [Database(kept), Database(kept)]
    consumers = [
        consumer_of(cluster, group, ordered=ordered, progress=store, rebalance=QUICK)
        for store in stores
    ]
    seen: list[str] = []
    for consumer in consumers:
        consumer.on("orders")(lambda message: seen.append(message.text()))
    async with consumers[0]:
        await until_owned(consumers[0], 2)
        stores[0].is_away = True
        await fill(cluster, "orders", 10)
        await until(lambda: len(seen) == 10)

        async with consumers[1]:
            await until_owned(consumers[1], 1)
            await until_owned(consumers[0], 1)
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
    await until_owned(consumer, 2)
    store.is_away = True
    await fill(cluster, "orders", 10)
    await until(lambda: len(seen) == 10)

    await consumer.stop()

    locks, now = cluster.brokers[0].parts.locks, cluster.clock.monotonic()
    queues = [
        MessageQueue(topic="orders", broker_name="broker-a", queue_id=place) for place in range(2)
    ]
    assert [locks.owner(consumer.group, queue, now) for queue in queues] == [None, None]
