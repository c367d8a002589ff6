"""Batch reads with a real Spark session and a real broker."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import (
    Sent,
    fill,
    forget_old,
    make_topic,
    numbered,
    send_one,
    with_small_files,
)
from tests.support.sparking import numbers, read


def send(cluster: EmbeddedCluster, topic: str, count: int, *, queues: int = 4) -> None:
    fill(cluster.broker_addresses[0], topic, numbered(count, queues=queues))


@pytest.mark.feature("M1")
def test_a_topic_is_a_table(spark, cluster, topic):
    """Nothing was registered: Spark found the source by itself."""
    fill(
        cluster.broker_addresses[0],
        topic,
        [
            Sent(b"\x00\xff%d" % n, n % 2, {"TAGS": "paid", "KEYS": f"o-{n} c-7", "shop": "Köln"})
            for n in range(1000)
        ]
        + [Sent(b"plain", 3)],
    )

    rows = read(spark, cluster, topic).collect()

    expected = {
        (message.queue_id, message.queue_offset): message for message in cluster.messages(topic)
    }
    assert len(rows) == len(expected) == 1001
    for row in rows:
        message = expected[row.queueId, row.queueOffset]
        assert (row.topic, row.brokerName) == (topic, "broker-a")
        assert bytes(row.body) == message.body
        assert row.properties == message.properties
        assert row.tags == message.properties.get("TAGS")
        assert row["keys"] == message.properties.get("KEYS")
        assert (row.flag, row.reconsumeTimes) == (message.flag, message.reconsume_times)
        assert row.msgId == message.properties.get("UNIQ_KEY", row.msgId)
        stored = datetime.fromtimestamp(message.store_ms / 1000, UTC)
        assert abs(row.storeTimestamp.astimezone(UTC) - stored) < timedelta(milliseconds=1)
        assert row.bornTimestamp.astimezone(UTC) == datetime.fromtimestamp(1_700_000_000, UTC)


def test_several_topics_are_one_table(spark, cluster):
    for topic, count in (("several-a", 3), ("several-b", 5), ("severally", 7)):
        make_topic(cluster, topic, count, queues=1)

    named = read(spark, cluster, "several-a, several-b")
    matched = read(spark, cluster, "", subscribePattern="several-.")

    assert {row.topic: row["count"] for row in named.groupBy("topic").count().collect()} == {
        "several-a": 3,
        "several-b": 5,
    }
    assert matched.count() == 8


@pytest.mark.feature("M6")
def test_ends_are_exclusive_however_they_are_said(spark, orbit_cluster):
    make_topic(orbit_cluster, "orders", 20, queues=2)
    orbit_cluster.clock.advance(100)
    time = datetime.fromtimestamp(orbit_cluster.clock.now(), UTC)
    orbit_cluster.clock.advance(100)
    fill(orbit_cluster.broker_addresses[0], "orders", numbered(20, queues=2, first=20))

    def between(**options):
        return numbers(read(spark, orbit_cluster, "orders", **options))

    def offsets(first, second):
        return json.dumps({"orders": {"broker-a:0": first, "broker-a:1": second}})

    milliseconds = {"broker-a:0": round(time.timestamp() * 1000), "broker-a:1": 0}
    assert between() == list(range(40))
    assert between(endingOffsets=offsets(3, 2)) == [0, 1, 2, 3, 4]
    assert between(startingOffsets=offsets(18, -2), endingOffsets=offsets(-1, 1)) == [1, 36, 38]
    assert between(endingTimestamp=time.isoformat()) == list(range(20))
    assert between(startingTimestamp=time.isoformat()) == list(range(20, 40))
    assert between(endingOffsetsByTimestamp=json.dumps({"orders": milliseconds})) == list(
        range(0, 20, 2)
    )
    # No message is that young: everything.
    assert between(endingTimestamp=(time + timedelta(days=1)).isoformat()) == list(range(40))
    assert between(startingTimestamp="0", endingTimestamp="0") == []


def test_a_table_stays_as_it_was_when_it_was_first_used(spark, cluster, topic):
    send(cluster, topic, 10)
    frame = read(spark, cluster, topic)
    before = frame.count()

    send(cluster, topic, 10)

    assert (before, frame.count()) == (10, 10)
    assert read(spark, cluster, topic).count() == 20


@pytest.mark.feature("M8")
def test_queues_are_cut_and_put_together(spark, cluster, topic):
    send(cluster, topic, 1000)

    def shape(**options):
        frame = read(spark, cluster, topic, **options)
        rows = frame.selectExpr("spark_partition_id() AS part", "body").collect()
        counts = Counter(row.part for row in rows).values()
        return len(counts), max(counts), sorted(int(bytes(row.body)) for row in rows)

    everything = list(range(1000))
    assert shape() == (1, 1000, everything)
    assert shape(minPartitions="10") == (10, 125, everything)
    assert shape(maxRecordsPerPartition="100") == (12, 84, everything)


@pytest.mark.feature("M10")
def test_what_is_not_wanted_stays_at_the_broker(spark, cluster, topic):
    tags = ("red", "green", "blue", "Aa", "BB")  # the last two have one hash
    fill(
        cluster.broker_addresses[0],
        topic,
        [
            Sent(b"%d" % n + b"." * 0, n % 2, {"TAGS": tags[n % 5], "size": str(n)})
            for n in range(1000)
        ],
    )

    def pulled(**options):
        group = f"watched-{len(options)}-{'-'.join(sorted(options))}"
        found = numbers(read(spark, cluster, topic, group=group, **options))
        return found, pulled_bytes(cluster, topic, group)

    everything, all_bytes = pulled()
    red, red_bytes = pulled(subExpression="red")
    assert everything == list(range(1000))
    assert red == list(range(0, 1000, 5))
    assert 0 < red_bytes < all_bytes / 4
    big, big_bytes = pulled(subExpression="size >= 900", subExpressionType="SQL92")
    assert big == list(range(900, 1000))
    assert 0 < big_bytes < all_bytes / 8
    one_queue, queue_bytes = pulled(queues="1")
    assert one_queue == list(range(1, 1000, 2))
    assert queue_bytes < all_bytes * 0.51
    part, _ = pulled(queues="broker-a:0", fromOffset="100", toOffset="110")
    assert part == list(range(200, 220, 2))
    # The broker compares hashes; the text is compared here.
    collided, _ = pulled(subExpression="Aa", schema="body BINARY")
    assert collided == list(range(3, 1000, 5))


def pulled_bytes(cluster: EmbeddedCluster, topic: str, group: str) -> int:
    broker = cluster.brokers[0]
    return cluster.call(lambda: broker.parts.counters.group(topic, group).get_bytes)


def test_columns_are_chosen_by_the_schema(spark, cluster, topic):
    send(cluster, topic, 100)
    ddl = "queueOffset BIGINT, queueId INT NOT NULL, properties MAP<STRING, STRING>"

    frame = read(spark, cluster, topic, schema=ddl)

    assert frame.columns == ["queueOffset", "queueId", "properties"]
    rows = frame.collect()
    assert sorted((row.queueId, row.queueOffset) for row in rows) == [
        (queue, offset) for queue in range(4) for offset in range(25)
    ]
    assert {row.properties["UNIQ_KEY"] for row in rows} == {f"id-{n}" for n in range(100)}
    without = read(spark, cluster, topic, includeProperties="false")
    assert "properties" not in without.columns
    assert without.count() == 100


def test_rule_3_what_one_query_filters_does_not_filter_another(spark, cluster, topic):
    send(cluster, topic, 100)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = read(spark, cluster, topic)
        first, second = frame.where("queueId = 1"), frame.where("queueId = 2")

        assert first.count() == 25
        assert frame.count() == 100
        assert sorted(row.queueId for row in first.union(second).collect()) == [1] * 25 + [2] * 25
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_rule_4_a_bad_body_is_null_and_stops_nothing(spark, cluster, topic):
    address = cluster.broker_addresses[0]
    fill(address, topic, numbered(10))
    send_one(address, topic, b"says that it is compressed", sys_flag=1)
    fill(address, topic, numbered(10, first=10))

    rows = read(spark, cluster, topic).orderBy("queueOffset").collect()

    assert [row.queueOffset for row in rows] == list(range(21))
    assert [row.queueOffset for row in rows if row.body is None] == [10]


@pytest.fixture
def forgetful():
    with EmbeddedCluster(adjust=with_small_files) as cluster:
        cluster.create_topic("orders", queues=1)
        fill(cluster.broker_addresses[0], "orders", numbered(5000, size=300))
        yield cluster, forget_old(cluster, "orders")


@pytest.mark.feature("M9")
def test_messages_that_are_gone_are_told_of_or_left_out(spark, forgetful):
    cluster, low = forgetful
    offsets = {"startingOffsets": '{"orders": {"broker-a:0": 5}}'}

    with pytest.raises(Exception, match="messages are gone") as raised:
        read(spark, cluster, "orders", **offsets).count()
    words = str(raised.value)
    assert f"orders@broker-a:0 was asked for offsets 5 to 5000 (exclusive) and has {low}" in words
    assert "set failOnDataLoss to false" in words
    assert read(spark, cluster, "orders", failOnDataLoss="false", **offsets).count() == 5000 - low
    assert read(spark, cluster, "orders").count() == 5000 - low

    beyond = {"startingOffsets": '{"orders": {"broker-a:0": 9999}}'}
    with pytest.raises(Exception, match="messages are gone") as raised:
        read(spark, cluster, "orders", **beyond).count()
    assert f"is to be read from offset 9999 on and has {low} to 5000" in str(raised.value)
    assert "goes on at the present end" in str(raised.value)
    assert read(spark, cluster, "orders", failOnDataLoss="false", **beyond).count() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schema": "queueOffset INT"}, "column 'queueOffset' is bigint, the schema says int"),
        ({"queues": "broker-z:9"}, "'queues' must be of broker-a:0, broker-a:1"),
        ({"subscribe": "no-such-topic"}, "no broker serves topic 'no-such-topic'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_read(spark, cluster, topic, options, words):
    topic = options.pop("subscribe", topic)

    with pytest.raises(Exception, match=words):
        read(spark, cluster, topic, **options).count()
