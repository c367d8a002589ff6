"""A broker that comes back with less than it had: an older copy of its store."""

from __future__ import annotations

import logging
import shutil
import signal
from pathlib import Path

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.pull import PullDelay
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer
from orbitmq.client.routes import Queue
from tests.support.brokerlives import BrokerLives
from tests.support.client import quick_settings
from tests.support.consuming import until
from tests.support.polling import BY_HAND, poll_count

TOPIC = "orders"
QUEUE = Queue(TOPIC, "broker-a", 0)


@pytest.mark.feature("B16")
async def test_a_queue_that_goes_back_is_told_of_once_and_counted(tmp_path, caplog):
    async with BrokerLives(tmp_path / "data") as broker:
        await broker.begin()
        async with AsyncAdmin(name_server=broker.name_server) as admin:
            await admin.topics.create(TOPIC, queues=1)
        client = quick_settings(broker.name_server)
        async with AsyncPullConsumer(
            "billing", client=client, polling=BY_HAND, consume_from="first"
        ) as consumer:
            await consumer.assign([QUEUE])
            await send(broker, 4)
            await poll_count(consumer, 4)
            await until(lambda: is_copied(broker.folder, tmp_path / "copy"))
            await send(broker, 6)
            await poll_count(consumer, 6)

            await broker.end(signal.SIGKILL)
            shutil.rmtree(broker.folder)
            (tmp_path / "copy").rename(broker.folder)
            await broker.begin()
            await until(lambda: went_back(consumer) > 0)
            # What comes now has the offset of a message that was consumed before.
            await send(broker, 1)
            (again,) = await poll_count(consumer, 1)

            assert again.queue_offset == 4
            assert went_back(consumer) == 1
    told = [each for each in caplog.records if "offset 10 " in each.getMessage()]
    assert [(each.levelno, each.__dict__["queue"]) for each in told] == [
        (logging.WARNING, "orders@broker-a:0")
    ]
    assert told[0].getMessage() == (
        "offset 10 of group billing in orders@broker-a:0 is illegal, the queue has 0 to 4: "
        "going on from 4"
    )


def is_copied(folder: Path, target: Path) -> bool:
    """Copy a folder; False if the broker replaced a file meanwhile."""
    try:
        shutil.copytree(folder, target, dirs_exist_ok=True)
    except shutil.Error:
        return False
    return True


def went_back(consumer: AsyncPullConsumer) -> int:
    """How often the broker named an offset before the one asked for."""
    counts = consumer.statistics().delays
    return sum(
        counts.get((QUEUE, each), 0) for each in (PullDelay.ILLEGAL_OFFSET, PullDelay.WENT_BACK)
    )


async def send(broker: BrokerLives, count: int) -> None:
    async with AsyncProducer(client=quick_settings(broker.name_server)) as producer:
        for number in range(count):
            await producer.send(TOPIC, str(number))
