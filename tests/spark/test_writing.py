"""Partitions that are written to real brokers, without Spark."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pyarrow as pa
import pytest

from orbitmq.broker.settings import BrokerSettings
from orbitmq.spark import worker
from orbitmq.spark.options import write_options
from orbitmq.spark.write import Origin, PartitionWritten, RowRefused, write_partition
from orbitmq.testing.cluster import EmbeddedCluster

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def kept():
    """Tests in one process share what a worker keeps; producers end with their clusters here."""
    yield
    worker.writers.clear()


def write(
    cluster: EmbeddedCluster, rows: list[dict[str, Any]], *, origin: str = "query/1", **options: str
) -> PartitionWritten:
    texts = {"nameServer": cluster.name_server, **options}
    batch = pa.RecordBatch.from_pylist(rows)
    return write_partition(iter([batch]), write_options(texts, {}), Origin(origin, 0))


def sizes(cluster: EmbeddedCluster, topic: str) -> list[int]:
    found = sorted(cluster.messages(topic), key=lambda each: each.queue_offset)
    return [len(each.body) for each in found]


def places(cluster: EmbeddedCluster, topic: str, queues: int) -> dict[tuple[int, int], int]:
    """How many messages there are, by broker and queue."""

    def counts() -> dict[tuple[int, int], int]:
        return {
            (number, queue): broker.parts.store.max_offset(topic, queue)
            for number, broker in enumerate(cluster._cluster.brokers)
            for queue in range(queues)
        }

    return cluster._call(counts)


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param([4 * MIB], id="as large as a message may be"),
        pytest.param([200] * 900 + [4_100_000], id="large after small ones"),
        pytest.param([7, 4 * MIB, 8, 9, 300_000, 10], id="in the order of the rows"),
    ],
)
def test_every_row_that_may_be_sent_is_sent(cluster, topic, wanted):
    rows = [{"body": b"x" * size, "queueId": 1} for size in wanted]

    count = write(cluster, rows, topic=topic)

    assert count == PartitionWritten(0, len(wanted), 0)
    assert sizes(cluster, topic) == wanted


def small(settings: BrokerSettings) -> BrokerSettings:
    return dataclasses.replace(
        settings, send=dataclasses.replace(settings.send, max_message_size=10_000)
    )


def test_a_row_that_the_broker_refuses_is_named_or_left_out_and_no_other():
    """Only the broker knows what it takes; a batch of small rows may be too much for it too."""
    wanted = [3000] * 4 + [10_000, 10_001, 3001, 20_000] + [3002] * 9
    rows = [{"body": b"x" * size} for size in wanted]
    with EmbeddedCluster(adjust=small) as cluster:
        cluster.create_topic("orders", queues=1)

        with pytest.raises(RowRefused, match=r"row 5 of the partition .*limit 10000B.*badRows"):
            write(cluster, rows, topic="orders")
        cluster.create_topic("good", queues=1)
        count = write(cluster, rows, topic="good", badRows="skip")

        assert count == PartitionWritten(0, len(wanted) - 2, 2)
        assert sizes(cluster, "good") == [size for size in wanted if size <= 10_000]


def test_messages_that_were_read_go_to_the_queues_that_they_were_in():
    rows = [
        {"body": b"%d" % number, "brokerName": broker, "queueId": queue}
        for number, (broker, queue) in enumerate(
            [("broker-a", 0), ("broker-a", 1), ("broker-b", 0), ("broker-b", 1)] * 10
        )
    ]
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("same", queues=2)
        cluster.create_topic("smaller", queues=1)

        write(cluster, rows, topic="same")
        write(cluster, rows, topic="smaller")

        assert places(cluster, "same", 2) == {(0, 0): 10, (0, 1): 10, (1, 0): 10, (1, 1): 10}
        # No queue 1 here: what was in it stays together, in its order.
        found = [(each.queue_offset, int(each.body)) for each in cluster.messages("smaller")]
        assert sorted(number for _, number in found) == list(range(40))
        assert all(count % 10 == 0 for count in places(cluster, "smaller", 1).values())
        numbers = [number for _, number in found]
        for queue in range(4):
            theirs = [number for number in numbers if number % 4 == queue]
            assert theirs == sorted(theirs)


def test_without_the_name_of_a_broker_queues_are_counted_through():
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("orders", queues=2)

        write(cluster, [{"body": b"x", "queueId": number} for number in (0, 3, 3)], topic="orders")

        assert places(cluster, "orders", 2) == {(0, 0): 1, (0, 1): 0, (1, 0): 0, (1, 1): 2}


def test_writes_of_many_groups_leave_few_producers_behind(cluster, topic):
    before = threading.active_count()

    for number in range(12):
        write(cluster, [{"body": b"x"}], topic=topic, producerGroup=f"group-{number}")

    assert threading.active_count() - before <= 4
    assert len(cluster.messages(topic)) == 12
