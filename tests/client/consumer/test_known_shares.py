"""Members with chosen names get the queues that are written down here, told by themselves.

Nothing is worked out with the code under test: a share is what Java's classes give by their rules,
and what each member holds is asked through a broker in another process, as operators ask it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.strategies import ByConfig, MachineRoomNearby, Strategy
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.names import is_retry_topic
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import quick_settings
from tests.support.consumers import consumer_of
from tests.support.consuming import DEADLINE

GROUP = "sharing"


def named(text: str) -> frozenset[Queue]:
    """Queues of the topic, such as `broker-a:0,1 broker-b:3`."""
    found = set()
    for part in text.split():
        broker, _, numbers = part.partition(":")
        found |= {Queue("orders", broker, int(number)) for number in numbers.split(",")}
    return frozenset(found)


@contextlib.asynccontextmanager
async def joined(
    cluster: AsyncEmbeddedCluster,
    strategies: Mapping[str, Strategy | str],
    seen: dict[str, set[str]] | None = None,
) -> AsyncIterator[None]:
    """Members of these names join one after the other; `seen` is what each of them consumes."""
    async with contextlib.AsyncExitStack() as members:
        for name, strategy in strategies.items():
            client = quick_settings(cluster.name_server, instance=name)
            member = consumer_of(cluster, GROUP, client=client, strategy=strategy)
            _listen(member, set() if seen is None else seen.setdefault(name, set()))
            await members.enter_async_context(member)
        yield


def _listen(member: AsyncConsumer, texts: set[str]) -> None:
    @member.on("orders")
    def note(message: ReceivedMessage) -> None:
        texts.add(message.text())


async def until_told(cluster: AsyncEmbeddedCluster, wanted: Mapping[str, frozenset[Queue]]) -> None:
    """Wait until every member says that it holds its share, and nothing else."""
    told: dict[str, frozenset[Queue]] = {}
    async with AsyncAdmin(name_server=cluster.name_server) as admin:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE):
                while (told := await _told(admin, wanted)) != wanted:  # noqa: ASYNC110  # is asked for
                    await asyncio.sleep(0.02)
    assert told == wanted


async def _told(admin: AsyncAdmin, names: Iterable[str]) -> dict[str, frozenset[Queue]]:
    infos = [await admin.consumers.running_info(GROUP, f"127.0.0.1@{name}") for name in names]
    return {
        name: frozenset(each.queue for each in info.queues if not is_retry_topic(each.queue.topic))
        for name, info in zip(names, infos, strict=True)
    }


# ---- the order of queues and members


# ---- strategies


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
    ("strategies", "wanted"),
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
            [
                ByConfig((Queue("orders", "broker-a", 0), Queue("orders", "broker-c", 3))),
                ByConfig((Queue("orders", "broker-b", 2),)),
                ByConfig(()),
            ],
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
async def test_members_hold_what_their_strategy_gives_them(new_cluster, strategies, wanted):
    names = ["c1", "c2", "c3"]
    async with new_cluster(brokers=3) as cluster:
        await cluster.create_topic("orders", queues=4)
        async with joined(cluster, dict(zip(names, strategies, strict=True))):
            await until_told(cluster, dict(zip(names, map(named, wanted), strict=True)))
