"""Members get the queues that are written down here, as an administrator's tool shows them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.strategies import ByConfig, MachineRoomNearby
from orbitmq.client.routes import Queue
from orbitmq.names import is_retry_topic
from tests.support.client import quick_settings
from tests.support.consumers import consumer_of
from tests.support.consuming import DEADLINE

GROUP = "sharing"
NAMES = ("c1", "c2", "c3")


def named(text: str) -> frozenset[Queue]:
    """Queues of the topic, such as `broker-a:0,1 broker-b:3`."""
    found = set()
    for part in text.split():
        broker, _, numbers = part.partition(":")
        found |= {Queue("orders", broker, int(number)) for number in numbers.split(",")}
    return frozenset(found)


async def held(admin: AsyncAdmin, name: str) -> frozenset[Queue]:
    """The queues that a member reports as its own."""
    info = await admin.consumers.running_info(GROUP, f"127.0.0.1@{name}")
    return frozenset(each.queue for each in info.queues if not is_retry_topic(each.queue.topic))


def whole_brokers(queues: Sequence[Queue], client_ids: Sequence[str], me: str) -> list[Queue]:
    """An application's own strategy: to each member one broker, the last one to the first."""
    brokers = sorted({queue.broker for queue in queues}, reverse=True)
    return [queue for queue in queues if brokers.index(queue.broker) == client_ids.index(me)]


NEARBY = MachineRoomNearby(
    room_of_broker={"broker-a": "r1", "broker-b": "r2", "broker-c": "r3"}.__getitem__,
    room_of_client={"127.0.0.1@c1": "r1", "127.0.0.1@c2": "r1", "127.0.0.1@c3": "r2"}.__getitem__,
)


@pytest.mark.feature("A7")
@pytest.mark.parametrize(
    ("strategies", "shares"),
    [
        pytest.param(
            ["AVG_BY_CIRCLE"] * 3,
            [
                "broker-a:0,3 broker-b:2 broker-c:1",
                "broker-a:1 broker-b:0,3 broker-c:2",
                "broker-a:2 broker-b:1 broker-c:0,3",
            ],
            id="by circle",
        ),
        pytest.param(
            [ByConfig(tuple(named(text))) for text in ("broker-a:0 broker-c:3", "broker-b:2", "")],
            ["broker-a:0 broker-c:3", "broker-b:2", ""],
            id="by configuration",
        ),
        pytest.param(
            [NEARBY] * 3,
            ["broker-a:0,1 broker-c:0,1", "broker-a:2,3 broker-c:2", "broker-b:0,1,2,3 broker-c:3"],
            id="machine room nearby",
        ),
        pytest.param(
            [whole_brokers] * 3,
            ["broker-c:0,1,2,3", "broker-b:0,1,2,3", "broker-a:0,1,2,3"],
            id="a callable",
        ),
    ],
)
async def test_members_hold_what_their_strategy_gives_them(new_cluster, strategies, shares):
    wanted = list(map(named, shares))
    async with new_cluster(brokers=3) as cluster, contextlib.AsyncExitStack() as stack:
        await cluster.create_topic("orders", queues=4)
        for name, strategy in zip(NAMES, strategies, strict=True):
            client = quick_settings(cluster.name_server, instance=name)
            member = consumer_of(cluster, GROUP, client=client, strategy=strategy)
            member.on("orders")(lambda message: None)
            await stack.enter_async_context(member)
        async with AsyncAdmin(name_server=cluster.name_server) as admin, asyncio.timeout(DEADLINE):
            while [await held(admin, name) for name in NAMES] != wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
