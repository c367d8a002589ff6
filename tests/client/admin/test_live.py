"""Administration of groups whose consumers really consume."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.producer.producer import AsyncProducer
from tests.support.broker import until
from tests.support.client_admin import GROUP, World

DEADLINE = 30.0


@asynccontextmanager
async def _consuming(
    world: World, handle: Callable[[ReceivedMessage], Awaitable[None]]
) -> AsyncIterator[AsyncConsumer]:
    consumer = AsyncConsumer(
        GROUP,
        name_server=world.cluster.name_server,
        consume_from="first",
        rebalance=RebalanceSettings(persist=0.2),
    )
    consumer.on("orders")(handle)
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


async def _produce(world: World, count: int) -> None:
    async with AsyncProducer("makers", name_server=world.cluster.name_server) as producer:
        for number in range(count):
            await producer.send("orders", b"%d" % number, keys=f"k{number}")


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not await condition():  # noqa: ASYNC110  # asks a broker
            await asyncio.sleep(0.05)


@pytest.mark.feature("L3")
async def test_a_group_at_work_goes_back_and_gets_everything_again(world):
    got: list[bytes] = []

    async def handle(message):
        got.append(message.body)

    await _produce(world, 20)
    async with _consuming(world, handle):
        await until(lambda: len(got) == 20, DEADLINE)

        async def is_reported():
            return (await world.admin.groups.progress(GROUP)).lag == 0

        await _until(is_reported)
        plan = await world.admin.progress.plan_reset(GROUP, "orders", ResetTo.begin())
        report = await world.admin.progress.apply(plan)
        await until(lambda: len(got) == 40, DEADLINE)

    assert plan.replayed == 20
    assert report.is_effective
    assert sorted(got, key=int) == sorted(got[:20] * 2, key=int)
