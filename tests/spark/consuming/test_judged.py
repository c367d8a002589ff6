"""Verdicts that stay: what is written and what is given back go by the same call of the handler."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orbitmq.client.message import ReceivedMessage
from orbitmq.errors import SettingError
from orbitmq.spark import judged, process, settle, with_retries
from orbitmq.spark.consuming.progress import RowsRefused, Settled
from tests.support.filling import make_topic
from tests.support.sparking import DEADLINE, numbers, read, stream, until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Handler = Callable[[ReceivedMessage], None]


def failing_once(body: str, folder: Path) -> Handler:
    """A handler that fails a message when it is first called with it, and never again."""
    flag = str(folder / f"seen-{body}")

    def handle(message: ReceivedMessage) -> None:
        if message.text() == body and not os.path.exists(flag):  # noqa: PTH110  # travels alone
            os.close(os.open(flag, os.O_CREAT | os.O_WRONLY))
            raise ValueError("away for a moment")

    return handle


def kept_blocks(spark: SparkSession) -> list[int]:
    """The numbers of what Spark keeps computed."""
    return [int(number) for number in spark.sparkContext._jsc.getPersistentRDDs()]


def lose_blocks(spark: SparkSession) -> None:
    """All that executors keep is gone, as when they die."""
    for kept in spark.sparkContext._jsc.getPersistentRDDs().values():
        kept.unpersist(True)


def test_a_row_is_written_or_given_back_by_one_verdict(spark, orbit_cluster, tmp_path):
    """The handler would say something else the second time: it is not asked."""
    make_topic(orbit_cluster, "orders", 6, queues=2)
    frame = read(spark, orbit_cluster, "orders")
    before = set(kept_blocks(spark))

    with judged(frame, failing_once("3", tmp_path)) as rows:
        written = numbers(rows.where("outcome = 'ok'"))
        settled = settle(rows, "billing", name_server=orbit_cluster.name_server)
        during = set(kept_blocks(spark))

    assert written == [0, 1, 2, 4, 5]
    assert settled == Settled(retried=1, dead=0)
    assert during > before
    assert set(kept_blocks(spark)) == before


def test_a_row_without_a_verdict_comes_again(spark, orbit_cluster):
    """An expression that says nothing about some rows must not count them as done."""
    from pyspark.sql.functions import expr

    make_topic(orbit_cluster, "orders", 6, queues=2)

    with judged(read(spark, orbit_cluster, "orders"), lambda message: None) as rows:
        changed = rows.withColumn("outcome", expr("CASE WHEN body <> '3' THEN outcome END"))
        settled = settle(changed, "billing", name_server=orbit_cluster.name_server)

    assert settled == Settled(retried=1, dead=0)
    orbit_cluster.advance(10)
    until(lambda: orbit_cluster.messages("%RETRY%billing"), "it is delivered again")
    assert [each.body for each in orbit_cluster.messages("%RETRY%billing")] == [b"3"]


def test_verdicts_that_are_lost_fail_the_batch_and_are_not_made_again(
    spark, orbit_cluster, tmp_path
):
    make_topic(orbit_cluster, "orders", 6, queues=1)
    frame = read(spark, orbit_cluster, "orders")

    with judged(frame, failing_once("3", tmp_path)) as rows:
        written = numbers(rows.where("outcome = 'ok'"))
        lose_blocks(spark)

        with pytest.raises(Exception, match=r"(?i)checkpoint block"):
            settle(rows, "billing", name_server=orbit_cluster.name_server)

    assert written == [0, 1, 2, 4, 5]


def test_rows_whose_handler_would_be_called_again_are_refused(spark, cluster, topic):
    """A cache does not help: what is lost of it is computed again."""
    frame = read(spark, cluster, topic)
    fresh = process(frame, lambda message: None)
    server = cluster.name_server

    with pytest.raises(RowsRefused, match="with judged"):
        settle(fresh, "billing", name_server=server)
    cached = fresh.persist()
    try:
        with pytest.raises(RowsRefused, match="with judged"):
            settle(cached.where("outcome = 'retry'"), "billing", name_server=server)
    finally:
        cached.unpersist()


def test_what_cannot_be_kept_is_refused(spark, cluster, topic, monkeypatch):
    frame = read(spark, cluster, topic)
    endless = stream(spark, cluster, topic)

    with pytest.raises(RowsRefused, match="inside of foreachBatch"), judged(endless, print):
        pass
    monkeypatch.setattr(type(spark.conf), "get", lambda *_: "true")
    with pytest.raises(SettingError, match=r"spark\.speculation"), judged(frame, print):
        pass


def test_a_repeated_batch_replaces_what_it_wrote(spark, orbit_cluster, tmp_path):
    """As the guide and the example do it: a folder for each batch."""
    make_topic(orbit_cluster, "orders", 20, queues=2)
    server, billed = orbit_cluster.name_server, tmp_path / "billed"
    topics = with_retries("orders", group="billing", name_server=server)
    batches: list[int] = []

    def each(batch, number):
        batches.append(number)
        with judged(batch, lambda message: None, group="billing") as rows:
            rows.where("outcome = 'ok'").write.mode("overwrite").parquet(f"{billed}/batch={number}")
            if len(batches) == 1:
                raise ConnectionError("as a broker that takes nothing back")
            settle(rows, "billing", name_server=server)

    def run():
        return (
            stream(spark, orbit_cluster, topics, startingOffsets="earliest", group="billing")
            .writeStream.foreachBatch(each)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )

    with pytest.raises(Exception, match="takes nothing back"):
        run().awaitTermination(DEADLINE)
    assert run().awaitTermination(DEADLINE)

    assert batches[:2] == [0, 0]
    assert numbers(spark.read.parquet(str(billed))) == list(range(20))
