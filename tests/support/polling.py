"""What tests of the pull consumer share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from orbitmq.client.consumer.settings import PullSettings, RebalanceSettings
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer, PollSettings
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.broker import RawClient

TOPIC = "orders"
GROUP = "billing"
DEADLINE = 20.0
#: Waits of a test, not of a user.
PULLS = PullSettings(hold=1.0, timeout=5.0, error_delay=0.05, paused_delay=0.05)
#: No automatic commit comes between: only polls and the end of the consumer count.
NO_TIMER = PollSettings(auto_commit_interval=3600.0, pull=PULLS)
BY_HAND = PollSettings(auto_commit=False, pull=PULLS)
REBALANCE = RebalanceSettings(persist=3600.0)


def queue(number: int = 0, topic: str = TOPIC) -> Queue:
    return Queue(topic, "broker-a", number)


class HasNameServer(Protocol):
    """A cluster of any kind."""

    @property
    def name_server(self) -> str: ...


def consumer(cluster: HasNameServer, **changes: Any) -> AsyncPullConsumer:
    """A consumer that begins with the first message."""
    given: dict[str, Any] = {
        "name_server": cluster.name_server,
        "polling": NO_TIMER,
        "consume_from": "first",
        "rebalance": REBALANCE,
    }
    return AsyncPullConsumer(GROUP, **(given | changes))


def polling(**changes: Any) -> PollSettings:
    return replace(NO_TIMER, **changes)


async def send(client: RawClient, count: int, *, queues: int = 1, topic: str = TOPIC) -> None:
    """Messages `0`, `1`, ... spread over the queues."""
    for number in range(count):
        await client.stored(topic, b"%d" % number, queue_id=number % queues)


async def poll_until(
    consumer: AsyncPullConsumer, enough: Callable[[list[ReceivedMessage]], bool]
) -> list[ReceivedMessage]:
    """Poll until there is enough."""
    clock = consumer.clock
    until = clock.monotonic() + DEADLINE
    found: list[ReceivedMessage] = []
    while not enough(found):
        assert clock.monotonic() < until, f"only {len(found)} messages came"
        found += await consumer.poll(0.2)
    return found


async def poll_count(consumer: AsyncPullConsumer, count: int) -> list[ReceivedMessage]:
    found = await poll_until(consumer, lambda found: len(found) >= count)
    assert len(found) == count
    return found


def progress(cluster: AsyncEmbeddedCluster, topic: str = TOPIC) -> dict[int, int]:
    """What the broker knows, by queue."""
    return {number: offset for (_, number), offset in cluster.progress(GROUP, topic).items()}
