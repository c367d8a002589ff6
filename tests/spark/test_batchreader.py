"""What a batch read plans on the driver, without Spark: ends, losses, and what is left of them."""

from __future__ import annotations

import json

import pytest

from orbitmq.client.ranges.cluster import RangeCluster
from orbitmq.client.ranges.connections import RangeAccess, RangeFilter
from orbitmq.client.routes import Queue
from orbitmq.errors import NoRoute
from orbitmq.spark.options import DataLost, batch_options
from orbitmq.spark.readers import RangePartition, RocketMQBatchReader
from orbitmq.spark.source import full_schema
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import fill, forget_old, numbered, with_small_files


def planned(cluster: EmbeddedCluster, topic: str, **options: str) -> dict[int, tuple[int, int]]:
    """The offsets that tasks would read, by queue."""
    given = {"nameServer": cluster.name_server, "subscribe": topic} | options
    reader = RocketMQBatchReader(batch_options(given, {}), full_schema(include_properties=True))
    found: dict[int, tuple[int, int]] = {}
    for part in reader.partitions():
        assert isinstance(part, RangePartition)
        for each in part.ranges:
            assert each.queue.id not in found
            found[each.queue.id] = (each.start, each.end)
    return found


def at(topic: str, *offsets: int) -> str:
    return json.dumps({topic: {f"broker-a:{number}": each for number, each in enumerate(offsets)}})


@pytest.fixture
def topic(orbit_shared_cluster, orbit_shared_topic):
    """Four queues of ten messages."""
    fill(orbit_shared_cluster.broker_addresses[0], orbit_shared_topic, numbered(40, queues=4))
    return orbit_shared_topic


def test_of_a_topic_that_is_not_there_the_one_is_named_that_was_perhaps_meant(orbit_cluster):
    orbit_cluster.create_topic("sales", queues=1)

    with pytest.raises(NoRoute, match=r"do you mean 'sales'\? If not, create it"):
        planned(orbit_cluster, "saels")


def test_a_start_beyond_the_end_of_a_queue_is_a_loss_and_not_an_empty_table(
    orbit_shared_cluster, topic
):
    with pytest.raises(DataLost) as raised:
        planned(orbit_shared_cluster, topic, startingOffsets=at(topic, 1, 99999, 0, 11))

    words = str(raised.value)
    assert f"{topic}@broker-a:1 is to be read from offset 99999 on and has 0 to 10" in words
    assert f"{topic}@broker-a:3 is to be read from offset 11 on and has 0 to 10" in words
    assert "broker-a:0" not in words
    # At its end a queue may be begun.
    assert planned(orbit_shared_cluster, topic, startingOffsets=at(topic, 1, 10, 10, 10)) == {
        0: (1, 10)
    }


def test_where_losses_are_allowed_nothing_is_read_of_a_queue_that_ends_before_its_start(
    orbit_shared_cluster, topic, caplog
):
    found = planned(
        orbit_shared_cluster,
        topic,
        startingOffsets=at(topic, 10, 99999, 7, 10),
        failOnDataLoss="false",
    )

    assert found == {2: (7, 10)}
    (warning,) = (each.getMessage() for each in caplog.records if "broker-a:1" in each.message)
    assert "is to be read from offset 99999 on and has 0 to 10; nothing of it is read" in warning
    assert "read it with a new checkpointLocation, or with startingOffsets" in warning


def test_offsets_that_are_not_there_are_a_loss_or_left_out(orbit_shared_cluster, topic, caplog):
    options = {
        "startingOffsets": at(topic, 50, 5, 0, 99),
        "endingOffsets": at(topic, 60, 60, 0, 99),  # of the last two, nothing is wanted
    }

    with pytest.raises(DataLost) as raised:
        planned(orbit_shared_cluster, topic, **options)
    assert len(raised.value.problems) == 2
    assert "offsets 50 to 60 (exclusive) and has 0 to 10" in str(raised.value)

    found = planned(orbit_shared_cluster, topic, failOnDataLoss="false", **options)
    assert found == {1: (5, 10)}
    assert caplog.text.count("messages are gone and left out") == 2


def test_the_progress_of_a_group_in_a_topic_that_was_made_anew_is_a_loss(
    orbit_shared_cluster, topic
):
    group = f"readers-of-{topic}"
    reported = {Queue(topic, "broker-a", number): 5 * number for number in range(4)}
    with RangeCluster(
        RangeAccess(name_servers=(orbit_shared_cluster.name_server,)), group
    ) as known:
        known.queues([topic])
        known.join([topic], RangeFilter())
        assert not known.report(reported).failures
    options = {"startingOffsets": "group", "group": group}

    with pytest.raises(DataLost, match=r"broker-a:3 is to be read from offset 15 on and has 0 to"):
        planned(orbit_shared_cluster, topic, **options)
    found = planned(orbit_shared_cluster, topic, failOnDataLoss="false", **options)
    assert found == {0: (0, 10), 1: (5, 10)}
    # A group that has read more than is wanted leaves nothing to read, which is no loss.
    assert planned(
        orbit_shared_cluster, topic, queues="0,1,2", endingOffsets=at(topic, 3, 3, 3), **options
    ) == {0: (0, 3)}


@pytest.fixture
def forgetful():
    with EmbeddedCluster(adjust=with_small_files) as cluster:
        cluster.create_topic("orders", queues=1)
        fill(cluster.broker_addresses[0], "orders", numbered(5000, size=300))
        yield cluster, forget_old(cluster, "orders")


def test_what_has_expired_is_left_out_with_a_warning(forgetful, caplog):
    cluster, low = forgetful

    found = planned(cluster, "orders", startingOffsets=at("orders", 5), failOnDataLoss="false")

    assert found == {0: (low, 5000)}
    assert (
        "messages are gone and left out: orders@broker-a:0 was asked for offsets 5" in caplog.text
    )
    # From the earliest on nothing is missing, also when the end is gone.
    assert planned(cluster, "orders", endingOffsets=at("orders", 5)) == {}
