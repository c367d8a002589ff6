"""What a batch read plans on the driver, without Spark: ends, losses, and what is left of them."""

from __future__ import annotations

import json
import re

import pytest

from orbitmq.client.ranges.cluster import RangeCluster
from orbitmq.client.ranges.connections import RangeAccess, RangeFilter
from orbitmq.client.routes import Queue
from orbitmq.errors import NoRoute
from orbitmq.spark.options import DataLost, batch_options
from orbitmq.spark.readers import RangePartition, RocketMQBatchReader
from orbitmq.spark.source import full_schema
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import fill, numbered


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
def topic(cluster, topic):
    """Four queues of ten messages."""
    fill(cluster.broker_addresses[0], topic, numbered(40, queues=4))
    return topic


def test_of_a_topic_that_is_not_there_the_one_is_named_that_was_perhaps_meant(orbit_cluster):
    orbit_cluster.create_topic("sales", queues=1)

    with pytest.raises(NoRoute, match=r"do you mean 'sales'\? If not, create it"):
        planned(orbit_cluster, "saels")


@pytest.mark.parametrize(
    ("starts", "ends", "problems", "left"),
    [
        (
            (1, 99999, 0, 11),
            None,
            [f"broker-a:{n} is to be read from offset {at} on" for n, at in ((1, 99999), (3, 11))],
            {0: (1, 10), 2: (0, 10)},
        ),
        (
            (50, 5, 0, 99),
            (60, 60, 0, 99),  # nothing of the last two queues
            [f"broker-a:{n} was asked for offsets {at} to 60 (" for n, at in ((0, 50), (1, 5))],
            {1: (5, 10)},
        ),
        ((1, 10, 10, 10), None, [], {0: (1, 10)}),
    ],
)
def test_offsets_that_do_not_exist_are_a_loss_or_left_out(
    cluster, topic, caplog, starts, ends, problems, left
):
    options = {"startingOffsets": at(topic, *starts)}
    if ends is not None:
        options["endingOffsets"] = at(topic, *ends)

    found = planned(cluster, topic, failOnDataLoss="false", **options)

    assert found == left
    for problem in problems:
        assert f"{topic}@{problem}" in caplog.text
        with pytest.raises(DataLost, match=re.escape(problem)) as raised:
            planned(cluster, topic, **options)
        assert len(raised.value.problems) == len(problems)


def test_the_progress_of_a_group_in_a_topic_that_was_made_anew_is_a_loss(cluster, topic):
    group = f"readers-of-{topic}"
    reported = {Queue(topic, "broker-a", number): 5 * number for number in range(4)}
    with RangeCluster(RangeAccess(name_servers=(cluster.name_server,)), group) as known:
        known.queues([topic])
        known.join([topic], RangeFilter())
        assert not known.report(reported).failures
    options = {"startingOffsets": "group", "group": group}

    with pytest.raises(DataLost, match=r"broker-a:3 is to be read from offset 15 on and has 0 to"):
        planned(cluster, topic, **options)
    found = planned(cluster, topic, failOnDataLoss="false", **options)
    assert found == {0: (0, 10), 1: (5, 10)}
    # A group that has read more than is wanted leaves nothing to read, which is no loss.
    assert planned(cluster, topic, queues="0,1,2", endingOffsets=at(topic, 3, 3, 3), **options) == {
        0: (0, 3)
    }
