"""Reads of what the broker has deleted, from the archive of its log files."""

from __future__ import annotations

import json
import zlib
from datetime import UTC, datetime

import pytest

from orbitmq import Admin
from orbitmq.client.errors import NoNameServer
from orbitmq.spark.options import batch_options
from orbitmq.spark.readers import RocketMQBatchReader
from orbitmq.spark.source import full_schema
from tests.support.archived import archiving_cluster, expire
from tests.support.filling import Sent, fill, numbered, send_one, stop_broker
from tests.support.sparking import in_files, numbers, read, run_over, stream, until

ORDERS = 2000
PADDING = "." * 600


def orders(count: int, first: int = 0) -> list[Sent]:
    return [
        Sent(
            b"%d" % number,
            number % 2,
            {
                "UNIQ_KEY": f"id-{number}",
                "TAGS": ("red", "blue")[number % 5 > 1],
                "n": str(number),
                "padding": PADDING,
            },
        )
        for number in range(first, first + count)
    ]


def interleaved(address: str, first: int, end: int) -> None:
    """Send orders so that both queues are in every log file."""
    for number in range(first, end, 100):
        fill(address, "orders", orders(min(100, end - number), number))


def in_order(rows):
    return sorted(rows, key=lambda row: (row.queueId, row.queueOffset))


@pytest.fixture(scope="module")
def expired(spark, tmp_path_factory):
    """A topic whose older half is only in the archive, and all rows as the broker gave them."""
    folder = tmp_path_factory.mktemp("archive")
    with archiving_cluster(folder) as cluster:
        cluster.create_topic("orders", queues=2)
        address = cluster.broker_addresses[0]
        fill(address, "orders", orders(10))
        send_one(address, "orders", zlib.compress(b"10"), sys_flag=1)
        send_one(address, "orders", b"says that it is compressed", queue_id=1, sys_flag=1)
        interleaved(address, 12, ORDERS)
        cluster.clock.advance(1000)
        middle = cluster.clock.now() - 500
        interleaved(address, ORDERS, 2 * ORDERS)
        rows = read(spark, cluster, "orders").collect()
        low = expire(cluster, "orders", ORDERS // 2)
        assert low < ORDERS
        yield cluster, str(folder), in_order(rows), middle


@pytest.mark.feature("T7")
def test_a_read_across_the_border_is_what_the_broker_had(spark, expired):
    cluster, folder, before, _ = expired

    rows = read(spark, cluster, "orders", archive=folder).collect()

    assert in_order(rows) == before
    for queue in (0, 1):
        offsets = [row.queueOffset for row in rows if row.queueId == queue]
        assert offsets == list(range(ORDERS))
    assert read(spark, cluster, "orders").count() < ORDERS


def test_options_mean_the_same_in_the_archive(spark, expired):
    cluster, folder, before, middle = expired

    def found(**options):
        return numbers(
            read(spark, cluster, "orders", archive=folder, **options).dropna(subset=["body"])
        )

    everything = sorted(int(bytes(row.body)) for row in before if row.body is not None)
    at = {"orders": {"broker-a:0": 100, "broker-a:1": -2}}
    to = {"orders": {"broker-a:0": 104, "broker-a:1": 2}}
    assert found(schema="body BINARY, queueId INT") == everything
    red = [number for number in everything if number % 5 <= 1 and number not in (10, 11)]
    assert found(subExpression="red", schema="body BINARY") == red
    assert found(subExpression="n < 20", subExpressionType="SQL92") == [
        number for number in range(20) if number not in (10, 11)
    ]
    assert found(startingOffsets=json.dumps(at), endingOffsets=json.dumps(to)) == [
        *(1, 3),
        *(200, 202, 204, 206),
    ]
    time = datetime.fromtimestamp(middle, UTC).isoformat()
    assert found(startingTimestamp=time) == list(range(ORDERS, 2 * ORDERS))
    assert len(found(endingTimestamp=time, schema="body BINARY")) == ORDERS - 1
    parts = read(spark, cluster, "orders", archive=folder, minPartitions="8")
    assert parts.selectExpr("spark_partition_id() AS p").distinct().count() == 8
    text = read(spark, cluster, "orders", archive=folder, bodyFormat="text", badBodies="null")
    assert text.where("value = '17'").count() == 1


def test_a_stream_goes_from_the_archive_to_the_broker(spark, expired, tmp_path):
    cluster, folder, before, _ = expired
    options = {"archive": folder, "startingOffsets": "earliest", "maxBytesPerTrigger": "900k"}

    query = run_over(stream(spark, cluster, "orders", **options).dropna(subset=["body"]), tmp_path)
    run_over(stream(spark, cluster, "orders", **options).dropna(subset=["body"]), tmp_path)

    assert len(query.recentProgress) > 2
    assert in_files(tmp_path) == sorted(
        int(bytes(row.body)) for row in before if row.body is not None
    )


def reader_of(cluster, **options: str) -> RocketMQBatchReader:
    given = {"nameServer": cluster.name_server, "subscribe": "orders", **options}
    return RocketMQBatchReader(batch_options(given, {}), full_schema())


def test_what_is_deleted_after_planning_is_read_from_the_archive(tmp_path):
    with archiving_cluster(tmp_path) as cluster:
        cluster.create_topic("orders", queues=1)
        fill(cluster.broker_addresses[0], "orders", numbered(3000, size=800))
        (tmp_path / "_log").mkdir(exist_ok=True)
        until(lambda: any((tmp_path / "_log").iterdir()), "the archive exists")
        reader = reader_of(cluster, archive=str(tmp_path), fromOffset="5")
        planned = reader.partitions()
        expire(cluster, "orders", 1000)

        rows = [batch for part in planned for batch in reader.read(part)]

        offsets = [at for batch in rows for at in batch.column("queueOffset").to_pylist()]
        assert offsets == list(range(5, 3000))


def test_queues_that_a_topic_had_before_it_was_deleted_are_not_read(tmp_path):
    with archiving_cluster(tmp_path) as cluster:
        cluster.create_topic("orders", queues=2)
        interleaved(cluster.broker_addresses[0], 0, 3000)
        until(lambda: list(tmp_path.glob("_log/*/*.json")), "a log file is archived")
        with Admin(name_server=cluster.name_server) as admin:
            admin.topics.delete("orders")
        cluster.create_topic("orders", queues=1)
        fill(cluster.broker_addresses[0], "orders", numbered(10))
        reader = reader_of(cluster, archive=str(tmp_path))

        rows = [batch for part in reader.partitions() for batch in reader.read(part)]

        assert sum(batch.num_rows for batch in rows) == 10


def test_the_archive_is_not_enough_while_a_broker_has_archived_less(tmp_path):
    archive = tmp_path / "archive"
    with archiving_cluster(archive, brokers=2, data=tmp_path / "data") as cluster:
        cluster.create_topic("orders", queues=1)
        one, two = cluster.broker_addresses
        fill(two, "orders", numbered(10))
        fill(one, "orders", numbered(10))
        cluster.clock.advance(100)
        time = datetime.fromtimestamp(cluster.clock.now() - 50, UTC).isoformat()
        fill(one, "orders", numbered(3000, first=10, size=800))
        until(lambda: list(archive.glob("_log/broker-a/*.json")), "a log file is archived")
        reader = reader_of(cluster, archive=str(archive), endingTimestamp=time)

    with pytest.raises(NoNameServer):
        reader.partitions()


def test_the_archive_is_enough_for_what_ends_in_it(spark, tmp_path):
    archive, data = tmp_path / "archive", tmp_path / "data"
    with archiving_cluster(archive, data=data) as cluster:
        cluster.create_topic("orders", queues=1)
        address = cluster.broker_addresses[0]
        fill(address, "orders", numbered(1500, size=800))
        cluster.clock.advance(100)
        time = datetime.fromtimestamp(cluster.clock.now() - 50, UTC).isoformat()
        fill(address, "orders", numbered(3000, first=1500, size=800))
        low = expire(cluster, "orders", 2000)
        name_server = cluster.name_server
        stop_broker(cluster, 0)
        offsets = json.dumps({"orders": {"broker-a:0": 1000}})
        beyond = json.dumps({"orders": {"broker-a:0": 4400}})

        def count(**options: str) -> int:
            given = {"nameServer": name_server, "subscribe": "orders", "archive": str(archive)}
            frame = spark.read.format("rocketmq").options(**given, **options).load()
            return int(frame.count())

        assert count(endingTimestamp=time) == 1500
        assert count(startingTimestamp="0", endingOffsets=offsets) == 1000
        for options in ({}, {"endingOffsets": beyond}):
            with pytest.raises(Exception, match="no broker serves topic 'orders'"):
                count(**options)
    assert low > 1500
    # The name server is gone as well.
    assert count(endingTimestamp=time) == 1500


def test_a_gap_between_archive_and_broker_fails_or_is_left_out(spark, tmp_path):
    with archiving_cluster(tmp_path) as cluster:
        cluster.create_topic("orders", queues=1)
        fill(cluster.broker_addresses[0], "orders", numbered(4500, size=800))
        low = expire(cluster, "orders", 2000)
        entries = sorted((tmp_path / "_log" / "broker-a").glob("*.json"))
        part = json.loads(entries[1].read_text())["files"][0]["queues"][0]
        entries[1].unlink()
        options = {"archive": str(tmp_path)}

        with pytest.raises(Exception, match=f"{part['first']} to {part['last'] + 1} .exclusive"):
            read(spark, cluster, "orders", **options).count()

        left = read(spark, cluster, "orders", failOnDataLoss="false", **options).count()
        assert left == 4500 - part["rows"]
        assert low > part["last"]


@pytest.mark.parametrize("place", ["/no/such/archive", "nowhere://archive"])
def test_a_place_without_an_archive_is_refused(cluster, topic, place):
    with pytest.raises(Exception, match="option 'archive' must be the place of an archive"):
        reader_of(cluster, subscribe=topic, archive=place).partitions()
