"""A consumer whose broker comes back with fewer messages than it had."""

from __future__ import annotations

import shutil
import signal

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer
from orbitmq.client.routes import Queue
from tests.support.brokerlives import BrokerLives
from tests.support.client import quick_settings
from tests.support.consuming import until
from tests.support.polling import BY_HAND

TOPIC = "orders"
GROUP = "billing"
QUEUE = Queue(TOPIC, "broker-a", 0)


async def fill(broker: BrokerLives, *bodies: str) -> None:
    async with AsyncProducer(name_server=broker.name_server) as producer:
        for body in bodies:
            await producer.send(TOPIC, body)


async def test_a_consumer_begins_again_at_the_committed_offset_of_a_broker_that_lost_messages(
    tmp_path,
):
    seen: list[tuple[int, str]] = []
    async with BrokerLives(tmp_path / "data") as broker, BrokerLives(tmp_path / "twin") as twin:
        await broker.begin()
        async with AsyncAdmin(name_server=broker.name_server) as admin:
            await admin.topics.create(TOPIC, queues=1)
        await fill(broker, *"012345")
        async with AsyncPullConsumer(
            GROUP, name_server=broker.name_server, polling=BY_HAND, consume_from="first"
        ) as member:
            await member.assign([QUEUE])
            await member.commit({QUEUE: 4})
        await broker.end(signal.SIGTERM)
        shutil.copytree(broker.data, twin.data)
        await broker.begin()
        consumer = AsyncConsumer(GROUP, client=quick_settings(broker.name_server))
        consumer.on(TOPIC)(lambda each: seen.append((each.queue_offset, each.text())))
        async with consumer:
            await fill(broker, *"6789")
            await until(lambda: consumer.positions().get(QUEUE) == 10)
            seen.clear()

            # The broker loses what was stored since, and first gets another message.
            await twin.begin()
            await fill(twin, "new")
            await twin.end(signal.SIGTERM)
            await broker.end(signal.SIGKILL)
            shutil.rmtree(broker.data)
            shutil.copytree(twin.data, broker.data)
            await broker.begin()
            await until(lambda: (6, "new") in seen)

    assert seen[0] == (4, "4")
