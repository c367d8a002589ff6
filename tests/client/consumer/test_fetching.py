"""How messages are fetched from a broker in another process: waited for, and chosen by tags."""

from __future__ import annotations

import asyncio
import time

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.settings import PullSettings
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.consumers import consumer_of, producer_of, until_retry_is_owned
from tests.support.consuming import DEADLINE, until

#: Seconds for which a pull is watched while it waits: far longer than one that is not held.
WATCHED = 10 * PullSettings().flow_delay


@pytest.fixture
async def cluster(new_cluster):
    async with new_cluster() as running:
        await running.create_topic("orders", queues=1)
        yield running


# ---- waiting


@pytest.mark.feature("B5")
async def test_a_pull_without_messages_waits_at_the_broker_and_is_answered_by_their_arrival(
    cluster,
):
    came_at: list[float] = []
    consumer = consumer_of(cluster)
    consumer.on("orders")(lambda message: came_at.append(time.monotonic()))
    async with consumer, producer_of(cluster) as producer:
        await until_retry_is_owned(consumer)
        # One for the topic, and one for the retry topic.
        await _until_held(cluster, 2)
        await until(lambda: cluster.clock.now() - _last_pull(consumer) > WATCHED)
        sent_at = time.monotonic()
        await producer.send("orders", "x")
        await until(lambda: came_at)
        fetched = consumer.statistics().topics["orders"]
        await _until_held(cluster, 2)

    assert PullSettings().hold == 15.0
    assert came_at[0] - sent_at < PullSettings().hold - 5, "it came with the end of the hold"
    assert fetched.pulled == 1
    assert fetched.pull_time > WATCHED, "the pull that was held is the one that was answered"


async def _until_held(cluster: AsyncEmbeddedCluster, count: int) -> None:
    """Wait until so many pulls wait at the broker, by its own account."""
    async with AsyncAdmin(name_server=cluster.name_server) as admin, asyncio.timeout(DEADLINE):
        while (await admin.runtime("broker-a")).raw["heldPulls"] != str(count):  # noqa: ASYNC110  # is asked for
            await asyncio.sleep(0.01)


def _last_pull(consumer: AsyncConsumer) -> float:
    """When the queue was last asked for, in epoch seconds."""
    table = consumer.running_info().mq_table
    (asked,) = [
        info.last_pull_timestamp for queue, info in table.items() if queue.topic == "orders"
    ]
    return asked / 1000


# ---- choosing
