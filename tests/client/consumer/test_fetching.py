"""How messages are fetched from a broker in another process: waited for, and chosen by tags."""

from __future__ import annotations

import asyncio
import time

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.settings import PullSettings
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import ConsumerConnection, SubscriptionData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import GetConsumerConnectionRequest, PullFlag
from orbitmq.wire.javajson import decode_body
from tests.support.broker import RawClient, bodies_in
from tests.support.consumers import consumer_of, producer_of, until_retry_is_owned
from tests.support.consuming import DEADLINE, until

ONE = Queue("orders", "broker-a", 0)

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


@pytest.mark.feature("B13")
async def test_a_changed_subscription_has_a_newer_version_by_which_the_broker_chooses(cluster):
    paid: list[str] = []
    refunded: list[str] = []
    consumer = consumer_of(cluster)
    consumer.on("orders", tags="paid")(lambda message: paid.append(message.text()))

    async def send(text, tags):
        async with producer_of(cluster) as producer:
            await producer.send("orders", text, tags=tags, queue=ONE)

    async with consumer:
        await send("0", "refunded")
        await send("1", "paid")
        await until(lambda: paid == ["1"])
        before = _own(consumer)
        assert await _known(cluster, consumer) == before

        await consumer.subscribe(
            "orders", lambda message: refunded.append(message.text()), tags="refunded"
        )
        after = _own(consumer)
        assert await _known(cluster, consumer) == after
        await send("2", "paid")
        await send("3", "refunded")
        await until(lambda: refunded == ["3"])
        witness = await RawClient.open(cluster.brokers[0])

        async def pull(version, flag=0, tags=""):
            """What a member of the group that asks with this version gets, or why nothing."""
            answer = await witness.pull(
                "orders",
                consumer_group=consumer.group,
                sys_flag=flag,
                subscription=tags,
                sub_version=version,
            )
            return bodies_in(answer) if answer.code == 0 else answer.code

        try:
            assert await pull(after.sub_version) == [b"0", b"3"]
            assert await pull(before.sub_version) == [b"0", b"3"], "the newest is what counts"
            # Who asks for a version that the broker has not heard of must tell it first.
            assert await pull(after.sub_version + 1) == ResponseCode.SUBSCRIPTION_NOT_LATEST
            # Unless it brings along what it wants.
            posted = await pull(after.sub_version + 1, PullFlag.SUBSCRIPTION, "paid")
            assert posted == [b"1", b"2"]
        finally:
            await witness.close()

    assert (before.sub_string, after.sub_string) == ("paid", "refunded")
    assert after.sub_version > before.sub_version
    assert (paid, refunded) == (["1"], ["3"])


def _own(consumer: AsyncConsumer) -> SubscriptionData:
    (found,) = [each for each in consumer.running_info().subscription_set if each.topic == "orders"]
    return found


async def _known(cluster: AsyncEmbeddedCluster, consumer: AsyncConsumer) -> SubscriptionData:
    """What the broker knows of the group's wishes."""
    asking = await RawClient.open(cluster.brokers[0])
    try:
        answer = await asking.connection.request(
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            GetConsumerConnectionRequest(consumer_group=consumer.group),
        )
        return decode_body(ConsumerConnection, answer.body).subscription_table["orders"]
    finally:
        await asking.close()
