"""Writes with a real Spark session and a real broker."""

from __future__ import annotations

import re
import shutil
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException

from orbitmq import Admin
from orbitmq.broker.settings import DedupSettings
from orbitmq.javahash import java_hash
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import fill, numbered
from tests.support.sparking import into_topic, stream, until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def write(frame: DataFrame, cluster: EmbeddedCluster, **options: str) -> None:
    frame.write.format("rocketmq").option("nameServer", cluster.name_server).options(
        **options
    ).mode("append").save()


@pytest.fixture(scope="module")
def two_brokers():
    with EmbeddedCluster(brokers=2) as cluster:
        yield cluster


def test_rows_become_messages(spark, cluster, topic):
    frame = spark.range(0, 1000, 1, 3).selectExpr(
        "CAST(id AS STRING) AS body",
        "CONCAT('t', id % 3) AS tags",
        "ARRAY(CONCAT('k', id), 'all') AS keys",
        "MAP('shop', 'Köln') AS properties",
        "CAST(id % 7 AS INT) AS flag",
    )

    write(frame, cluster, topic=topic)

    found = {int(each.body): each for each in cluster.messages(topic)}
    assert sorted(found) == list(range(1000))
    for number, message in found.items():
        properties = message.properties
        assert (properties["TAGS"], properties["KEYS"]) == (f"t{number % 3}", f"k{number} all")
        assert (properties["shop"], message.flag) == ("Köln", number % 7)
    assert len({each.properties["UNIQ_KEY"] for each in found.values()}) == 1000
    # Rows without a wish are dealt out evenly.
    counts = Counter(message.queue_id for message in found.values())
    assert max(counts.values()) - min(counts.values()) <= 3


def test_rows_say_where_they_go(spark, cluster, topic):
    frame = spark.range(200).selectExpr(
        "CAST(id AS STRING) AS body",
        f"IF(id % 2 = 0, '{topic}', 'elsewhere') AS topic",
        "IF(id < 100, 2, NULL) AS queueId",
        "IF(id >= 100, CONCAT('customer-', id % 5), NULL) AS orderingKey",
    )
    cluster.create_topic("elsewhere", queues=3)

    # One task: the order of rows that several tasks write beside each other is nobody's.
    write(frame.coalesce(1), cluster)

    for name, queues in ((topic, 4), ("elsewhere", 3)):
        found = cluster.messages(name)
        assert len(found) == 100
        for message in found:
            number = int(message.body)
            expected = 2 if number < 100 else abs(java_hash(f"customer-{number % 5}")) % queues
            assert message.queue_id == expected
        by_queue: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for message in found:
            by_queue[message.queue_id].append((message.queue_offset, int(message.body)))
        assert all(
            [number for _, number in sorted(pairs)] == sorted(number for _, number in pairs)
            for pairs in by_queue.values()
        )


def test_messages_can_be_delivered_later(spark, orbit_cluster, orbit_topic):
    now = orbit_cluster.clock.now()
    frame = spark.range(3).selectExpr(
        "CAST(id AS STRING) AS body",
        "IF(id = 1, 5, NULL) AS delayLevel",
        f"IF(id = 2, TIMESTAMP_SECONDS({round(now) + 600}), NULL) AS deliverAt",
    )

    write(frame, orbit_cluster, topic=orbit_topic)

    def there():
        return sorted(int(each.body) for each in orbit_cluster.messages(orbit_topic))

    assert there() == [0]
    orbit_cluster.advance(61)
    until(lambda: there() == [0, 1], "the message of level 5 after a minute")
    orbit_cluster.advance(600)
    until(lambda: there() == [0, 1, 2], "the message for that time")


def sent_again(frame: DataFrame, cluster: EmbeddedCluster, folder: Path, **options: str) -> None:
    """Write a batch, and again as after a crash before Spark's note that the batch is done."""
    into_topic(frame, cluster, folder, **options)
    shutil.rmtree(folder / "commits")
    into_topic(frame, cluster, folder, **options)


@pytest.mark.feature("M3")
def test_a_repeated_batch_sends_the_same_ids(spark, cluster, topic, tmp_path):
    fill(cluster.broker_addresses[0], topic, numbered(500, queues=4))
    cluster.create_topic("sent-again", queues=4)
    frame = stream(spark, cluster, topic, startingOffsets="earliest").select("body")

    sent_again(frame, cluster, tmp_path, topic="sent-again", exactlyOnce="false")
    twice = cluster.messages("sent-again")

    assert len(twice) == 1000
    ids = Counter((each.properties["UNIQ_KEY"], each.body, each.queue_id) for each in twice)
    assert set(ids.values()) == {2}


@pytest.mark.feature("T4")
@pytest.mark.parametrize(
    "columns",
    [("body",), ("body", "CONCAT('k', body) AS identity"), ("body", "MAP('a', 'b') AS properties")],
    ids=["plain", "identity", "checked"],
)
def test_brokers_store_a_repeated_batch_once(spark, two_brokers, columns, tmp_path):
    source, target = f"in-{tmp_path.name}", f"out-{tmp_path.name}"
    for topic in (source, target):
        two_brokers.create_topic(topic, queues=4)
    fill(two_brokers.broker_addresses[0], source, numbered(500, queues=4))
    frame = stream(spark, two_brokers, source, startingOffsets="earliest").selectExpr(*columns)

    sent_again(frame, two_brokers, tmp_path, topic=target)

    found = two_brokers.messages(target)
    assert sorted(int(each.body) for each in found) == list(range(500))
    brokers = Counter(each.store_host for each in found)
    assert len(brokers) == 2
    assert min(brokers.values()) > 150


def test_exactly_once_is_refused_where_a_broker_does_not_de_duplicate(spark, tmp_path):
    off = DedupSettings(enabled=False)
    with EmbeddedCluster(adjust=lambda settings: replace(settings, dedup=off)) as cluster:
        cluster.create_topic("orders")
        with pytest.raises(Exception, match="exactlyOnce is true, and broker-a does not de-dupl"):
            write(
                spark.range(3).selectExpr("'x' AS body"),
                cluster,
                topic="orders",
                exactlyOnce="true",
            )


def test_a_row_that_is_no_message_fails_or_is_left_out(spark, cluster, topic):
    frame = spark.range(10).selectExpr("IF(id = 5, NULL, CAST(id AS STRING)) AS body")

    with pytest.raises(Exception, match=r"message.body must not be empty; set the option badRows"):
        write(frame.coalesce(1), cluster, topic=topic)
    cluster.create_topic("good-rows", queues=1)
    write(frame, cluster, topic="good-rows", badRows="skip")

    found = sorted(int(each.body) for each in cluster.messages("good-rows"))
    assert found == [0, 1, 2, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ("id AS body", {}, "column 'body' must be binary or string, it is bigint"),
        ("'x' AS text", {}, "a column 'body' .* is needed"),
        ("'x' AS body, id AS amount", {}, "column 'amount' cannot be written"),
        ("'x' AS body, id AS tags", {}, "column 'tags' must be string, it is bigint"),
        ("'x' AS body", {"topic": ""}, "either the option 'topic' or a column 'topic'"),
        ("'x' AS body", {"topic": "a/b"}, "'topic' must be the name of a topic"),
        ("'x' AS body, 99 AS queueId", {}, "queueId is 99, .* has 4 queues"),
        ("'x' AS body", {"badRows": "hide"}, "'badRows' must be one of fail, skip"),
    ],
)
def test_what_cannot_be_written_is_named(spark, cluster, topic, columns, options, words):
    frame = spark.range(1).selectExpr(*columns.split(", "))

    with pytest.raises(Exception, match=words):
        write(frame, cluster, **{"topic": topic, **options})


def test_a_wrong_address_is_found_on_the_driver_before_any_task(spark):
    frame = spark.range(1).selectExpr("'x' AS body")
    writer = frame.write.format("rocketmq").option("nameServer", "127.0.0.1:1")

    with pytest.raises(AnalysisException, match=r"no name server answers.*127\.0\.0\.1:1"):
        writer.option("topic", "nowhere").mode("append").save()


# ---- topics that do not exist


def test_rows_for_a_topic_that_does_not_exist_are_refused_before_any_task(spark, cluster, topic):
    slip = f"{topic}s"
    frame = spark.range(1).selectExpr("'x' AS body")
    said = (
        f"no broker serves topic '{slip}' according to {cluster.name_server} (it does not exist, "
        f"or its brokers are away); do you mean '{topic}'? If not, create it with: "
        f"orbitmq topic create {slip}, or set the option createTopic to true"
    )

    with pytest.raises(AnalysisException, match=re.escape(said)):
        write(frame, cluster, topic=slip)
    assert not exists(cluster, slip)
    write(frame, cluster, topic=slip, createTopic="true")

    assert [bytes(each.body) for each in cluster.messages(slip)] == [b"x"]


def test_a_stream_into_a_topic_that_does_not_exist_ends_before_it_sends(
    spark, cluster, topic, tmp_path
):
    slip = f"{topic}s"
    fill(cluster.broker_addresses[0], topic, numbered(4))
    frame = stream(spark, cluster, topic, startingOffsets="earliest").select("body")

    with pytest.raises(StreamingQueryException, match=f"no broker serves topic '{slip}'"):
        into_topic(frame, cluster, tmp_path, topic=slip)
    assert not exists(cluster, slip)
    into_topic(frame, cluster, tmp_path, topic=slip, createTopic="true")

    assert sorted(int(each.body) for each in cluster.messages(slip)) == [0, 1, 2, 3]


def exists(cluster: EmbeddedCluster, topic: str) -> bool:
    with Admin(name_server=cluster.name_server) as admin:
        return topic in {each.name for each in admin.topics.list()}


# ---- tables of SQL


def test_a_temporary_view_of_sql_reads_a_topic_and_takes_rows(spark, cluster, topic):
    reached = f"nameServer '{cluster.name_server}'"
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW incoming USING rocketmq "
        f"OPTIONS ({reached}, subscribe '{topic}')"
    )
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW outgoing (body STRING, tags STRING) USING rocketmq "
        f"OPTIONS ({reached}, topic '{topic}')"
    )

    spark.sql("INSERT INTO outgoing VALUES ('one', 'a'), ('two', 'b')")
    found = spark.sql("SELECT CAST(body AS STRING) AS body, tags FROM incoming").collect()

    assert sorted(map(tuple, found)) == [("one", "a"), ("two", "b")]
