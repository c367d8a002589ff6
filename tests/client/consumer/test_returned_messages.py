"""Failed messages on their way back to brokers in another process, which take them or do not."""

from __future__ import annotations

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.settings import ConsumeSettings
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from tests.support.client import quick_settings
from tests.support.consumers import committed, consumer_of, done_here, send
from tests.support.consuming import until

#: What an administrator sets a broker to that is to take nothing.
READ_ONLY = {"brokerPermission": "4"}


@pytest.mark.feature("F1")
async def test_each_failed_message_comes_again_from_the_broker_that_stored_it(new_cluster):
    calls: list[ReceivedMessage] = []

    def fail_once(message):
        calls.append(message)
        if message.attempt == 1:
            raise ValueError("no such order")

    async with new_cluster(brokers=2) as cluster:
        await cluster.create_topic("orders", queues=1)
        # That the retry topic is on the second broker as well is told by a later route.
        client = quick_settings(cluster.name_server, route_refresh=0.1)
        consumer = consumer_of(cluster, client=client)
        consumer.on("orders")(fail_once)
        async with consumer:
            for broker in ("broker-a", "broker-b"):
                bodies = [f"{broker} {number}" for number in range(3)]
                await send(cluster, "orders", bodies, queue=Queue("orders", broker, 0))
            await until(lambda: consumer.statistics().sent_back == 6)
            await until(lambda: len(_retry_brokers(consumer.assignment())) == 2)
            cluster.advance(10)
            await until(lambda: len(calls) == 12)
        parked = cluster.messages("SCHEDULE_TOPIC_XXXX")

    first, again = ([each for each in calls if each.attempt == number] for number in (1, 2))
    # Each of them once. Both brokers have messages at the same places, and could be mistaken.
    assert sorted(map(ReceivedMessage.text, again)) == sorted(map(ReceivedMessage.text, first))
    assert len(parked) == 6
    for message in again:
        assert message.queue.topic == f"%RETRY%{consumer.group}"
        assert message.text().startswith(message.queue.broker)


@pytest.mark.feature("F8")
async def test_a_message_that_its_broker_refuses_to_take_back_is_tried_again_here(new_cluster):
    attempts: list[int] = []
    progress: list[int] = []

    def fail_twice(message):
        attempts.append(message.attempt)
        progress.append(committed(cluster, consumer.group, "orders"))
        if len(attempts) < 3:
            raise ValueError("not yet")

    async with new_cluster() as cluster:
        await cluster.create_topic("orders", queues=1)
        consumer = consumer_of(cluster, consume=ConsumeSettings(local_retry=0.05))
        consumer.on("orders")(fail_twice)
        await send(cluster, "orders", ["x"])
        async with AsyncAdmin(name_server=cluster.name_server) as admin:
            await admin.config.update_broker("broker-a", READ_ONLY)
        async with consumer:
            await until(lambda: done_here(consumer) == 1)

        statistics = consumer.statistics()
        assert attempts == [1, 2, 3]
        assert progress == [0, 0, 0], "what is not done would be forgotten in a crash"
        assert (statistics.sent_back, statistics.kept_back) == (0, 2)
        assert committed(cluster, consumer.group, "orders") == 1
    assert ConsumeSettings().local_retry == 5.0


def _retry_brokers(queues: frozenset[Queue]) -> set[str]:
    return {queue.broker for queue in queues if queue.topic.startswith("%RETRY%")}
