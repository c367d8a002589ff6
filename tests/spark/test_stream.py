"""Streams with a real Spark session and a real broker: the rules that would cost data."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException

from orbitmq import Admin
from orbitmq.clock import milliseconds
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import fill, make_topic, members, numbered
from tests.support.sparking import (
    DEADLINE,
    batches,
    in_files,
    into_files,
    read,
    run_over,
    stream,
    until,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from orbitmq.spark.readers import StreamReader


def send(cluster: EmbeddedCluster, topic: str, count: int, first: int = 0, queues: int = 4) -> None:
    fill(cluster.broker_addresses[0], topic, numbered(count, queues=queues, first=first))


@pytest.mark.feature("M7")
def test_batches_keep_to_their_limit_and_a_run_ends_where_it_began_to_look(
    spark, cluster, topic, tmp_path
):
    """Also: the last batch is told to the broker (rule 5), and a second run goes on."""
    send(cluster, topic, 1000)

    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "300", "group": "limited"}

    def run():
        return batches(run_over(stream(spark, cluster, topic, **options), tmp_path))

    first = run()
    in_between = in_files(tmp_path)
    until_told(cluster, "limited", topic, 1000)
    send(cluster, topic, 20, first=1000)
    second = run()

    assert first == [(0, 0), (1, 300), (2, 300), (3, 300), (4, 100)]  # 0 says where it begins
    assert in_between == list(range(1000))
    assert second == [(5, 20)]
    assert in_files(tmp_path) == list(range(1020))


@pytest.mark.feature("M4")
def test_an_idle_stream_has_no_lag_and_makes_no_batches(spark, cluster, topic, tmp_path):
    """Rules 2, 5 and 6: one text for one position, the last batch is told, and a good-bye."""
    send(cluster, topic, 40)
    frame = stream(spark, cluster, topic, group="idle", startingOffsets="earliest")

    query = into_files(frame, tmp_path)
    try:
        for sent, batch in ((40, 1), (80, 2), (120, 3)):
            until_told(cluster, "idle", topic, sent)
            # A batch for every time something came, and none between them.
            assert query.lastProgress is not None
            assert max(number for number, rows in batches(query) if rows) == batch
            assert len(members(cluster, "idle")) == 1
            send(cluster, topic, 40, first=sent)
        until(lambda: len(in_files(tmp_path)) == 160, "everything is in the files")
    finally:
        query.stop()

    assert in_files(tmp_path) == list(range(160))
    until(lambda: not members(cluster, "idle"), "the driver leaves its group")


def test_reads_without_a_group_leave_none_at_the_broker(spark, cluster, topic, tmp_path):
    send(cluster, topic, 40)
    before = traces(cluster, topic)

    from_a_time = read(spark, cluster, topic, startingTimestamp="2020-01-01T00:00:00Z")
    filtered = read(spark, cluster, topic, subExpressionType="SQL92", subExpression="a IS NULL")
    run_over(stream(spark, cluster, topic, startingOffsets="earliest"), tmp_path)

    assert (from_a_time.count(), filtered.count()) == (40, 40)
    assert in_files(tmp_path) == list(range(40))
    assert traces(cluster, topic) == before
    # Who wants a name of their own has one.
    assert read(spark, cluster, topic, groupPrefix="mine").count() == 40
    (made,) = traces(cluster, topic) - before
    assert made.startswith("mine-")


def traces(cluster: EmbeddedCluster, topic: str) -> frozenset[str]:
    """What the broker knows: its groups, those with progress in the topic, and retry topics."""
    parts = cluster.brokers[0].parts

    def known() -> frozenset[str]:
        groups = frozenset(config.group_name for config in parts.groups)
        topics = frozenset(config.topic_name for config in parts.topics)
        progress = frozenset(f"progress of {group}" for group in parts.progress.groups_of(topic))
        return groups | topics | progress

    return cluster.call(known)


def until_told(cluster: EmbeddedCluster, group: str, topic: str, count: int) -> None:
    """Return when the broker knows that so many messages of four queues are done."""
    expected = {("broker-a", number): count // 4 for number in range(4)}
    until(lambda: cluster.progress(group, topic) == expected, f"the broker hears of {count}")


def test_rule_1_a_stream_from_the_end_that_fails_at_once_loses_nothing(
    spark, cluster, topic, tmp_path
):
    send(cluster, topic, 40)
    found: list[int] = []
    state = {"fails": True}

    def sink(frame, batch):
        if state["fails"]:
            raise RuntimeError(f"batch {batch} fails")
        found.extend(int(bytes(row.body)) for row in frame.collect())

    def start():
        return (
            stream(spark, cluster, topic)
            .writeStream.foreachBatch(sink)
            .option("checkpointLocation", str(tmp_path))
            .start()
        )

    query = start()
    with pytest.raises(Exception, match="fails"):
        query.awaitTermination(DEADLINE)
    # Spark has logged where the first batch ends; it asks again where it begins.
    send(cluster, topic, 200, first=1000)
    state["fails"] = False
    query = start()
    try:
        until(lambda: len(found) >= 200, "everything since the first start")
    finally:
        query.stop()

    assert sorted(found) == list(range(1000, 1200))


def test_rule_7_a_queue_that_appears_is_read_without_a_restart(spark, orbit_cluster, tmp_path):
    make_topic(orbit_cluster, "growing", 10, queues=1)
    options = {"metadata.cache.ttl.ms": "100", "startingOffsets": "earliest"}

    query = into_files(stream(spark, orbit_cluster, "growing", **options), tmp_path)
    try:
        until(lambda: len(in_files(tmp_path)) == 10, "the first queue")
        orbit_cluster.create_topic("growing", queues=3)
        send(orbit_cluster, "growing", 30, first=10, queues=3)
        until(lambda: len(in_files(tmp_path)) == 40, "the queues that came later")
    finally:
        query.stop()

    assert in_files(tmp_path) == list(range(40))


@pytest.mark.feature("M5")
def test_a_stream_begins_where_it_is_told(spark, orbit_cluster, tmp_path):
    make_topic(orbit_cluster, "orders", 20, queues=2)
    orbit_cluster.clock.advance(100)
    time = milliseconds(orbit_cluster.clock.now())
    orbit_cluster.clock.advance(100)
    send(orbit_cluster, "orders", 20, first=20, queues=2)
    folders = iter(range(100))

    def found(**options):
        folder = tmp_path / str(next(folders))
        run_over(stream(spark, orbit_cluster, "orders", **options), folder)
        return in_files(folder)

    def per_queue(first, second):
        return json.dumps({"orders": {"broker-a:0": first, "broker-a:1": second}})

    assert found(startingOffsets="earliest", group="readers") == list(range(40))
    assert found(startingOffsets="latest") == []
    assert found(startingOffsets=per_queue(18, -1)) == [36, 38]
    assert found(startingTimestamp=str(time)) == list(range(20, 40))
    assert found(startingOffsetsByTimestamp=per_queue(time, 0)) == sorted(
        [*range(1, 20, 2), *range(20, 40)]
    )
    too_late = {"startingTimestamp": str(time + 10**9)}
    assert found(startingOffsetsByTimestampStrategy="latest", **too_late) == []
    with pytest.raises(Exception, match=r"no message of .* was stored at or after"):
        found(**too_late)
    # The group has read everything; what comes now is what it has not.
    send(orbit_cluster, "orders", 4, first=40, queues=2)
    assert found(startingOffsets="group", group="readers") == [40, 41, 42, 43]


def test_a_topic_that_was_created_again_is_a_loss_or_read_from_its_start(
    spark, cluster, topic, tmp_path
):
    topic = f"{topic}-again"
    make_topic(cluster, topic, 100, queues=1)
    run_over(stream(spark, cluster, topic, startingOffsets="earliest"), tmp_path)
    with Admin(name_server=cluster.name_server) as admin:
        admin.topics.delete(topic)
    cluster.create_topic(topic, queues=1)
    send(cluster, topic, 400, first=1000, queues=1)

    query = into_files(stream(spark, cluster, topic), tmp_path, available_now=True)
    with pytest.raises(StreamingQueryException, match=f"messages are gone: {topic}@broker-a:0 "):
        query.awaitTermination(DEADLINE)
    assert in_files(tmp_path) == list(range(100))
    run_over(stream(spark, cluster, topic, failOnDataLoss="false"), tmp_path)

    assert in_files(tmp_path) == [*range(100), *range(1000, 1400)]


def test_the_reader_for_older_versions_of_spark(spark, cluster, topic, tmp_path):
    """PySpark 4.0 and 4.1 call `latestOffset` without arguments; later ones still do if asked."""
    from orbitmq.spark.options import stream_options
    from orbitmq.spark.readers import PlainStreamReader
    from orbitmq.spark.source import RocketMQSource

    class OldSource(RocketMQSource):
        @classmethod
        def name(cls) -> str:
            return "rocketmq-old"

        def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  # Spark's name
            return PlainStreamReader(stream_options(self.options), schema)

    spark.dataSource.register(OldSource)
    send(cluster, topic, 40)
    options = {
        "nameServer": cluster.name_server,
        "subscribe": topic,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "30",
        "group": "old",
    }

    query = into_files(spark.readStream.format("rocketmq-old").options(**options).load(), tmp_path)
    try:
        until_told(cluster, "old", topic, 40)
    finally:
        query.stop()
    query = into_files(spark.readStream.format("rocketmq-old").options(**options).load(), tmp_path)
    try:
        send(cluster, topic, 40, first=40)
        until(lambda: len(in_files(tmp_path)) == 80, "what came after the restart")
    finally:
        query.stop()

    assert in_files(tmp_path) == list(range(80))
