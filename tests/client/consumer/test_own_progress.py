"""A progress store of the application, and its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import pytest

from orbitmq.client.consumer.progress import (
    MemoryProgress,
    ProgressStore,
    ProgressStoreFailed,
    guarded,
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
    "update": lambda store: store.update(QUEUE, 1),
    "freeze": lambda store: store.freeze(QUEUE, 1),
    "read": lambda store: store.read(QUEUE),
    "fetch": lambda store: store.fetch(QUEUE),
    "persist": lambda store: store.persist([QUEUE]),
    "forget": lambda store: store.forget(QUEUE),
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
