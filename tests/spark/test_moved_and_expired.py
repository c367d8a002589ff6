"""Streams whose broker moves to another address, or deletes what they have not read yet."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orbitmq.client.admin.admin import Admin
from orbitmq.client.ranges.cluster import Bounds, RangeCluster
from orbitmq.client.ranges.connections import RangeAccess, RangeFilter
from orbitmq.client.routes import Queue
from orbitmq.spark import consume
from orbitmq.spark.consuming.pipeline import BatchSettings
from tests.support.brokerlives import SMALL
from tests.support.filling import Sent, fill, numbered
from tests.support.movingbroker import MovingBroker, moving_broker
from tests.support.sparkheld import TASKS, Hold, passing
from tests.support.sparking import DEADLINE, in_files, into_files, stream, until
from tests.support.sparkkilling import lag

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


TOPIC, GROUP = "orders", "archive"
QUEUES = [Queue(TOPIC, "broker-a", number) for number in range(4)]


@contextlib.contextmanager
def running(frame: DataFrame, folder: Path) -> Iterator[StreamingQuery]:
    """A query that writes a stream into files."""
    query = into_files(frame, folder)
    try:
        yield query
    finally:
        query.stop()


# ---- a broker that moves


@pytest.mark.timeout(300)
def test_a_stream_follows_its_broker_to_another_address(spark, tmp_path):
    """Once while it waits for messages, and once in the middle of a batch."""
    hold = Hold(tmp_path)
    with moving_broker(tmp_path / "data") as broker:
        send(broker, 0)
        options = {
            "group": GROUP,
            "startingOffsets": "earliest",
            "minPartitions": str(TASKS),
            "metadata.cache.ttl.ms": "100",  # else routes are believed for half a minute
        }
        frame = stream(spark, broker, TOPIC, **options)
        frame = frame.mapInArrow(passing(str(tmp_path)), frame.schema)

        with running(frame, tmp_path) as query:
            until(lambda: len(in_files(tmp_path)) >= 40, "the messages before")
            broker.move()
            send(broker, 40)
            until(lambda: len(in_files(tmp_path)) >= 80, "the messages after the first move")
            hold.begin()
            try:
                send(broker, 80)
                until(hold.holders, "a task is held")
                broker.move()
                assert hold.is_batch_open(), "the broker moved between two batches"
            finally:
                hold.end()
            send(broker, 120)
            until(lambda: len(in_files(tmp_path)) >= 160, "the messages after the second move")
            until(lambda: lag(broker.name_server, GROUP, TOPIC) == 0, "the broker knows of it")
            assert query.isActive

    assert in_files(tmp_path) == list(range(160))


def send(broker: MovingBroker, first: int) -> None:
    fill(broker.address, TOPIC, numbered(40, queues=len(QUEUES), first=first))


# ---- messages that expire

#: Nothing is deleted before it is asked for, and then all but the last file of the log. How full
#: the disk of the machine is does not matter.
FORGETFUL = (
    *SMALL,
    "broker.clean_interval=3600",
    "broker.store.retention.keep=0",
    "broker.store.retention.full_ratio=1",
)
#: Digits of a number; 250 of them fill a file of the log.
DIGITS = 4000
#: Messages of a batch, those that are there when some of them expire, and those in the end.
BATCH, SENT, ALL = 300, 900, 940


@pytest.fixture
def forgetful(tmp_path):
    """A broker with messages for three batches, of which it is going to delete some."""
    with moving_broker(tmp_path / "data", *FORGETFUL) as broker:
        send_large(broker, 0, SENT)
        yield broker


@pytest.mark.feature("M9")
@pytest.mark.timeout(300)
def test_a_stream_under_which_messages_expire_ends_and_names_them(spark, forgetful, tmp_path):
    """Also: begun again it names all of them, and goes on when it is to leave them out."""
    hold = Hold(tmp_path)
    frame = batches_of(spark, forgetful, tmp_path)

    hold.begin()
    with running(frame, tmp_path) as query:
        left = expire_behind_a_batch(forgetful, hold)
        with pytest.raises(Exception, match="messages are gone") as ended:
            query.awaitTermination(DEADLINE)
    found = in_files(tmp_path)
    with (
        running(frame, tmp_path) as query,
        pytest.raises(Exception, match="messages are gone") as reread_from,
    ):
        query.awaitTermination(DEADLINE)
    with running(batches_of(spark, forgetful, tmp_path, failOnDataLoss="false"), tmp_path) as query:
        until(lambda: len(in_files(tmp_path)) >= len(readable(left)), "what is left")
        send_large(forgetful, SENT, ALL)
        until(lambda: len(in_files(tmp_path)) >= len(readable(left, ALL)), "what came later")
        until(lambda: lag(forgetful.name_server, GROUP, TOPIC) == 0, "the broker knows of it")
        assert query.isActive

    assert any(is_named(queue, left[queue], str(ended.value)) for queue in QUEUES)
    assert all(is_named(queue, left[queue], str(reread_from.value)) for queue in QUEUES)
    assert found == list(range(BATCH))
    assert in_files(tmp_path) == readable(left, ALL)


def test_a_group_that_follows_its_queues_goes_on_behind_messages_that_expired(spark, forgetful):
    servers = (forgetful.name_server,)
    with RangeCluster(RangeAccess(name_servers=servers), GROUP) as cluster:
        cluster.queues([TOPIC])
        cluster.join([TOPIC], RangeFilter())
        assert not cluster.report(dict.fromkeys(QUEUES, 1)).failures
        with Admin(name_server=servers) as admin:
            admin.config.delete_expired_log()
        left = cluster.bounds(QUEUES).or_raise()
    run = consume(spark, GROUP, name_server=servers, batch=BatchSettings(follow=3600.0))
    run.on(TOPIC)(lambda message: None)

    with run:
        until(lambda: lag(servers[0], GROUP, TOPIC) == 0, "all is handled")
        assert run.until_idle(DEADLINE)
        found = run.progress()

    assert found.done == sum(each.high - each.low for each in left.values())
    assert found.missing == sum(each.low - 1 for each in left.values()) > 0


def send_large(broker: MovingBroker, first: int, end: int) -> None:
    """Numbers that fill files of the log, in each of which are some of every queue."""
    step = 20 * len(QUEUES)
    for begin in range(first, end, step):
        some = range(begin, min(begin + step, end))
        messages = [Sent(b"%0*d" % (DIGITS, each), each % len(QUEUES)) for each in some]
        fill(broker.address, TOPIC, messages)


def batches_of(
    spark: SparkSession, broker: MovingBroker, folder: Path, **options: str
) -> DataFrame:
    """The topic as a stream in three batches that can be held, each when it has been read."""
    given = {"group": GROUP, "startingOffsets": "earliest", "maxOffsetsPerTrigger": str(BATCH)}
    frame = stream(spark, broker, TOPIC, **given, **options)
    return frame.mapInArrow(staying(str(folder)), frame.schema)


def staying(folder: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A step of a job that lets rows pass, and then does not end while it is to be held."""

    hold = passing(folder)

    def stay(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        yield from hold(iter(()))

    return stay


def expire_behind_a_batch(broker: MovingBroker, hold: Hold) -> dict[Queue, Bounds]:
    """Have messages deleted while the first batch is held, and let it go; what is left of queues.

    The batch is small enough for one task, so all of it has been read when that is held.
    """
    try:
        until(hold.holders, "the first batch is read")
        with Admin(name_server=broker.name_server) as admin:
            admin.config.delete_expired_log()
        with RangeCluster(RangeAccess(name_servers=(broker.name_server,)), GROUP) as cluster:
            left = cluster.bounds(QUEUES).or_raise()
        assert hold.is_batch_open()
    finally:
        hold.end()

    # Of every queue the whole second batch is gone, a part of the third, and something is left.
    second, sent = 2 * BATCH // len(QUEUES), SENT // len(QUEUES)
    assert all(second < each.low < each.high == sent for each in left.values()), left
    return left


def readable(left: dict[Queue, Bounds], end: int = SENT) -> list[int]:
    """What a stream gets that has read one batch and then all that was left."""
    return [
        number
        for number in range(end)
        if number < BATCH or number // len(QUEUES) >= left[QUEUES[number % len(QUEUES)]].low
    ]


def is_named(queue: Queue, left: Bounds, words: str) -> bool:
    """Whether it is said from where to where a queue was to be read, and what it has.

    The driver says it or a task, whichever looks first.
    """
    at, end = BATCH // len(QUEUES), 2 * BATCH // len(QUEUES)
    wanted = rf"is to be read from offset {at} on|was asked for offsets {at} to {end} \(exclusive\)"
    return bool(re.search(rf"{queue} (?:{wanted}) and has {left.low} to {left.high}\b", words))
