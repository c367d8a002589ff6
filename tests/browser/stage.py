"""A cluster with some life in it, as a shop might have it, and a console that watches."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from orbitmq.broker.broker import Broker
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.consumer.verdict import DeadLetter
from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.routes import Queue
from orbitmq.console.app import Console
from orbitmq.testing import AsyncEmbeddedCluster, MovableClock
from orbitmq.wire.bodies import SubscriptionGroupConfig, TopicConfig
from tests.support.client import quick_settings
from tests.support.client_admin import World
from tests.support.consoles import HOSTILE, Browser, settings_for
from tests.support.consuming import until

STEP = 30.0
#: Topics and groups of a large shop.
TOPICS = 1000
GROUPS = 2500
REASONS = (
    "ValueError: amount must be positive, got -12.50",
    "KeyError: 'customer_id'",
    "TimeoutError: inventory did not answer within 2 s",
)


class StageClock:
    """The cluster's clock, whose monotonic time moves along: minutes pass in a moment."""

    def __init__(self, clock: MovableClock) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock.now()

    def monotonic(self) -> float:
        return time.monotonic() + self._clock.now() - time.time()


@dataclass
class Stage:
    """What tests look at and change."""

    cluster: AsyncEmbeddedCluster
    console: Console
    browser: Browser
    world: World
    producer: AsyncProducer
    chance: random.Random
    step: float = STEP
    #: How often it has ticked.
    ticks: int = 0

    @property
    def url(self) -> str:
        return self.browser.url

    async def tick(self) -> None:
        """Half a minute of a shop's day."""
        number = self.chance.randint(1, 9999)
        batches = {
            "orders": [self._order(number + each) for each in range(24)],
            "payments": [Message("payments", f'{{"payment": {number}}}', tags="card")] * 3,
            "clicks": [Message("clicks", f"page={each}") for each in range(60)],
            "orders-by-city": [Message("orders-by-city", '{"city": "Porto", "orders": 24}')] * 5,
        }
        for messages in batches.values():
            await self.producer.send_batch(messages)
        if self.step:
            self.cluster.advance(self.step)
        else:
            await asyncio.sleep(1.0)
        await self.looked()
        self.ticks += 1

    def _order(self, number: int) -> Message:
        return Message(
            "orders",
            f'{{"order": {number}, "city": "Porto", "amount": {self.chance.randint(5, 90)}.5}}',
            tags=self.chance.choice(("paid", "shipped")),
            keys=f"order-{number}",
        )

    async def looked(self) -> None:
        """Wait until the console has seen how things are now."""
        collector = self.console.state.collector
        now = self.cluster.clock.now()
        collector.look_soon()
        await until(
            lambda: collector.snapshot is not None and collector.snapshot.at > now, deadline=30
        )

    async def member(self, group: str) -> str:
        """The id of the only consumer of a group, as it stands in addresses."""
        found = await self.world.admin.consumers.members(group)
        (client_id,) = found.client_ids
        return quote(client_id, safe="")

    async def report(self, name: str = "orders-by-city", **fields: Any) -> None:
        """What a driver reports."""
        content: dict[str, Any] = {
            "state": "running",
            "batch": 412,
            "rows": 5200,
            "rows_per_second": 5180.0,
            "input_rows_per_second": 5100.0,
            "batch_seconds": 0.82,
            "trigger_seconds": 1.0,
            "group": "analytics",
            "topics": ["orders"],
            "output": ["orders-by-city"],
            "lag": {"orders@broker-a:0": 12, "orders@broker-b:1": 3},
        }
        await self.browser.post(f"/pipelines/{name}", content | fields, 204)


@contextlib.asynccontextmanager
async def lively_stage(
    ticks: int = 6,
    *,
    step: float = STEP,
    is_crowded: bool = False,
    has_reports: bool = True,
    **settings: Any,
) -> AsyncIterator[Stage]:
    """A shop: some groups keep up, one is slow, one hangs, one has nobody left.

    With a `step` of 0 it runs in real time, a second for a tick: for pictures. When it is crowded,
    there are thousands of other topics and groups besides. `has_reports` is whether pipelines are
    told of that nobody runs.
    """
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(AsyncEmbeddedCluster(brokers=2))
        for topic, queues in (("orders", 4), ("payments", 2), ("clicks", 4), ("orders-by-city", 2)):
            await cluster.create_topic(topic, queues=queues)
        if is_crowded:
            crowd(cluster.brokers[0])
        client = quick_settings(cluster.name_server)
        admin = await stack.enter_async_context(AsyncAdmin(client=client, clock=cluster.clock))
        world = World(cluster, admin)
        stack.push_async_callback(world.close)
        producer = await stack.enter_async_context(AsyncProducer("shop", client=client))
        for consumer in _consumers(client):
            await stack.enter_async_context(consumer)
        console = Console(settings_for(cluster, **settings), clock=StageClock(cluster.clock))
        await stack.enter_async_context(console)
        stage = Stage(cluster, console, Browser(console), world, producer, random.Random(7), step)
        await stage.browser.begin()
        await admin.groups.create("archive")
        for broker in ("broker-a", "broker-b"):
            for number in range(4):
                await world.report(Queue("clicks", broker, number), 0, "archive")
        await world.send(Queue("orders", "broker-a", 1), HOSTILE.encode(), KEYS="hostile")
        await _die(world)
        for _ in range(ticks):
            await stage.tick()
        if has_reports:
            await stage.report()
            await stage.report("clicks-to-parquet", state="waiting", group=None, topics=["clicks"],
                               output=[], lag={}, rows_per_second=840.0)  # fmt: skip
        await stage.looked()
        yield stage


def _consumers(client: Any) -> list[AsyncConsumer]:
    billing = AsyncConsumer("billing", client=client, consume_from="first")
    mailer = AsyncConsumer("mailer", client=client, consume_from="first", workers=1, batch_size=1)
    impatient = RebalanceSettings(handover=0.2)
    fraud = AsyncConsumer("fraud-check", client=client, consume_from="first", rebalance=impatient)

    @billing.on("orders")
    async def bill(message: ReceivedMessage) -> None:
        if message.text().startswith("<"):
            raise DeadLetter("JSONDecodeError: Expecting value")

    @mailer.on("orders", tags="paid")
    async def mail(_: ReceivedMessage) -> None:
        await asyncio.sleep(0.1)

    @fraud.on("payments")
    async def check(_: ReceivedMessage) -> None:
        await asyncio.Event().wait()

    return [billing, mailer, fraud]


async def _die(world: World) -> None:
    """Letters of several reasons, some of them an hour old."""
    for number in range(26):
        reason = REASONS[number % 9 % 4 % 3]
        broker = ("broker-a", "broker-b")[number % 2]
        await world.die(
            Queue("orders", broker, number % 4),
            f'{{"order": {number}, "amount": -12.5}}'.encode(),
            reason,
            group="billing",
            KEYS=f"order-{number}",
            UNIQ_KEY=f"7F0000010000000000000000000000{number:02}",
        )


def crowd(broker: Broker) -> None:
    """Fill a broker: each group reads one of the topics, and is at its beginning."""
    parts = broker.parts
    now = parts.clock.now()
    for number in range(TOPICS):
        name = f"topic-{number:04}"
        config = TopicConfig(topic_name=name, read_queue_nums=4, write_queue_nums=4, perm=6)
        parts.topics.update(config, now=now)
    for number in range(GROUPS):
        name = f"group-{number:04}"
        parts.groups.update(SubscriptionGroupConfig(group_name=name), now=now)
        for queue_id in range(4):
            parts.progress.reset(f"topic-{number % TOPICS:04}", name, queue_id, 0)
    parts.registration.notice()
