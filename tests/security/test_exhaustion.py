"""One client that wants too much: it gets an answer, and others are served all the while.

Held pulls, heartbeats, filters and order locks are limited too: their tests are in tests/broker.
"""

from __future__ import annotations

import asyncio

import pytest

from orbitmq.wire.bodies import SubscriptionData
from orbitmq.wire.codes import ResponseCode
from tests.support.broker import RawClient, bodies_in

#: Nobody who behaves waits longer, however slow the machine is.
DEADLINE = 60.0


@pytest.fixture
async def greedy(broker, open_client):
    return await open_client(broker)


@pytest.fixture
async def modest(broker, open_client):
    return await open_client(broker)


async def assert_served(client: RawClient) -> None:
    async with asyncio.timeout(DEADLINE):
        stored = await client.stored("modest", b"mine")
        pulled = await client.pull("modest", offset=stored.queue_offset)
    assert bodies_in(pulled) == [b"mine"]


@pytest.mark.timeout(300)
async def test_topics_made_by_one_client_do_not_keep_others_waiting(greedy, modest):
    async def make(first):
        for number in range(first, 600, 20):
            await greedy.send(f"topic-{number}")

    making = asyncio.gather(*(make(first) for first in range(20)))
    for _ in range(20):
        await assert_served(modest)
    async with asyncio.timeout(DEADLINE):
        await making

    await assert_served(modest)


@pytest.mark.timeout(300)
async def test_questions_that_cost_much_are_bounded(greedy, modest):
    for text in (
        "a > 0 AND " * 20_000 + "a > 0",
        "(" * 50_000,
        "a IN (" + "'x'," * 50_000 + "'y')",
    ):
        wanted = SubscriptionData(
            topic="orders", sub_string=text, sub_version=1, expression_type="SQL92"
        )
        async with asyncio.timeout(DEADLINE):
            await greedy.heartbeat("greedy", wanted)
            pulled = await greedy.pull(
                "orders", subscription=text, expression_type="SQL92", sys_flag=4
            )
        assert pulled.code != ResponseCode.SUCCESS
        await assert_served(modest)
