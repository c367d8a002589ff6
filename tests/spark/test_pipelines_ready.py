"""The ready pipelines, as functions, with a real session and a real broker."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.consumer.verdict import DeadLetter
from orbitmq.client.message import ReceivedMessage
from orbitmq.spark import judged
from orbitmq.spark.pipelines import Run, archive, backfill, statistics, transform, triage
from orbitmq.spark.pipelines.builtin import day
from orbitmq.spark.pipelines.definition import PipelineRefused
from orbitmq.spark.pipelines.run import StreamTarget, started
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.sparking import DEADLINE, until

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


@pytest.fixture
def run_in(spark, orbit_cluster, tmp_path):
    """Makes runs over what is there, whose checkpoints are in a folder."""

    def make(folder: str = ".") -> Run:
        server, checkpoint = orbit_cluster.name_server, tmp_path / folder / "ck"
        return Run(spark, name="tested", name_server=server, checkpoint=checkpoint, once=True)

    return make


def to_the_end(query: StreamingQuery) -> None:
    assert query.awaitTermination(DEADLINE)
    assert query.exception() is None


def bodies(cluster: EmbeddedCluster, topic: str) -> list[bytes]:
    return sorted(bytes(each.body) for each in cluster.messages(topic))


def test_archive_keeps_every_message_once_by_day_and_reports_progress(
    run_in, spark, orbit_cluster, tmp_path
):
    orbit_cluster.create_topic("kept", queues=2)
    orbit_cluster.send("kept", *[b"%d" % number for number in range(20)], tags="paid")
    orbit_cluster.send("kept", b"unwanted", tags="other")
    lake = tmp_path / "lake"

    to_the_end(archive(run_in(), topic="kept", path=lake, tags="paid"))
    orbit_cluster.send("kept", *[b"%d" % number for number in range(20, 25)], tags="paid")
    to_the_end(archive(run_in(), topic="kept", path=lake, tags="paid"))

    rows = spark.read.parquet(str(lake))
    kept = sorted(int(bytes(row.body)) for row in rows.collect())
    assert kept == list(range(25))
    assert rows.where("tags <> 'paid'").count() == 0
    today = {f"day={datetime.fromtimestamp(each, UTC):%Y-%m-%d}" for each in (time.time(),)}
    assert {each.name for each in lake.glob("day=*")} & today
    assert sum(orbit_cluster.progress("archive-kept", "kept").values()) == 26


def test_a_day_begins_at_midnight_of_the_zone_whatever_the_zone_of_the_session(spark):
    from pyspark.sql import functions as F  # noqa: N812

    before = spark.conf.get("spark.sql.session.timeZone") or "UTC"
    moments = spark.createDataFrame([(1_767_225_599,), (1_767_225_600,)], "at BIGINT").select(
        F.timestamp_seconds("at").alias("at")
    )
    try:
        for session_zone in ("UTC", "Asia/Tokyo", "America/Los_Angeles"):
            spark.conf.set("spark.sql.session.timeZone", session_zone)
            days = moments.select(
                day(F.col("at"), "UTC").cast("string").alias("utc"),
                day(F.col("at"), "Europe/Berlin").cast("string").alias("berlin"),
            )

            assert [tuple(row) for row in days.collect()] == [
                ("2025-12-31", "2026-01-01"),
                ("2026-01-01", "2026-01-01"),
            ]
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_transform_sends_what_a_query_makes_of_json_bodies(run_in, spark, orbit_cluster):
    for topic in ("orders", "big", "rows"):
        orbit_cluster.create_topic(topic, queues=2)
    for cents in (50, 150, 250):
        body = json.dumps({"order": f"o-{cents}", "cents": cents})
        orbit_cluster.send("orders", body, keys=(f"o-{cents}",))
    schema = "order STRING, cents BIGINT"

    to_the_end(
        transform(
            run_in("a"),
            topic="orders",
            into="big",
            schema=schema,
            sql="SELECT upper(value.order) AS body, keys, 'big' AS tags FROM messages "
            "WHERE value.cents > 100",
        )
    )
    to_the_end(
        transform(
            run_in("b"),
            topic="orders",
            into="rows",
            schema=schema,
            sql="SELECT value.cents * 2 AS doubled, text FROM messages WHERE value.cents = 50",
        )
    )

    assert bodies(orbit_cluster, "big") == [b"O-150", b"O-250"]
    (row,) = bodies(orbit_cluster, "rows")
    assert json.loads(row)["doubled"] == 100
    assert not spark.catalog.tableExists("messages")


def test_statistics_count_messages_and_bytes_of_windows(run_in, orbit_cluster):
    for topic in ("counted", "numbers"):
        orbit_cluster.create_topic(topic, queues=2)
    orbit_cluster.send("counted", *[b"12345"] * 8, tags="paid")
    orbit_cluster.send("counted", b"123")

    to_the_end(statistics(run_in(), topic="counted", into="numbers", window=86_400.0))

    found: dict[str | None, tuple[int, int]] = {}
    for body in bodies(orbit_cluster, "numbers"):
        row = json.loads(body)
        messages, size = found.get(row.get("tags"), (0, 0))
        found[row.get("tags")] = (max(messages, row["messages"]), max(size, row["bytes"]))
    assert found == {"paid": (8, 40), None: (1, 3)}


def test_statistics_say_what_they_left_out(run_in, orbit_cluster, tmp_path):
    """Batches that are cut take a part of each topic, and the older one comes too late."""
    for topic in ("older", "newer"):
        orbit_cluster.create_topic(topic, queues=1)
    orbit_cluster.send("older", *[b"x"] * 3)
    orbit_cluster.advance(3600)
    orbit_cluster.send("newer", *[b"x"] * 3)
    run = run_in()

    # What the first batch says about time, Spark holds against rows from the third one on.
    query = statistics(run, topic="older,newer", path=tmp_path / "out", max_per_batch=2)
    to_the_end(query)

    assert StreamTarget(query, run).look().late == 1


def test_a_table_is_shown_and_a_stream_without_a_sink_is_refused(run_in, spark, orbit_cluster):
    run = run_in()
    table = spark.range(2)

    assert started(table, run) == ([], table)
    with pytest.raises(PipelineRefused, match="a stream without a sink"):
        started(run.stream("orders"), run)


def test_what_goes_back_is_counted_for_the_stream_that_gave_it(run_in, orbit_cluster):
    """Streams of one run, at the same time: Spark says whose batch a thread works on."""
    for topic in ("bad", "good"):
        orbit_cluster.create_topic(topic, queues=1)
        orbit_cluster.send(topic, *[b"%d" % number for number in range(8)])
    run = run_in()
    are_watched = threading.Event()

    def refuse(message):
        if message.topic == "bad" or message.text() == "3":
            raise ValueError("no account")

    def writer(topic):
        def each(batch, number):
            assert are_watched.wait(DEADLINE)
            with judged(batch, refuse, group=topic) as rows:
                run.settle(rows, topic)

        return run.stream(topic, startingOffsets="earliest").writeStream.foreachBatch(each)

    targets, _ = started({topic: writer(topic) for topic in ("bad", "good")}, run)
    are_watched.set()
    try:
        until(lambda: all(target.is_over for target in targets), "both are over", DEADLINE)
    finally:
        for target in targets:
            target.stop()

    seen = {each.query: each for each in (target.look() for target in targets)}
    assert {name: (each.error, each.rows, each.retried) for name, each in seen.items()} == {
        "bad": (None, 8, 8),
        "good": (None, 8, 1),
    }
    assert (seen["bad"].failed_share, seen["good"].failed_share) == (1.0, 1 / 8)


def test_backfill_sends_what_archive_kept_once_and_later_files_by_the_next_run(
    run_in, orbit_cluster, tmp_path
):
    for topic in ("first", "again"):
        orbit_cluster.create_topic(topic, queues=2)
    sent = [b"%d" % number for number in range(12)]
    orbit_cluster.send("first", *sent, tags="t", keys=("k",), properties={"region": "eu"})
    lake = tmp_path / "lake"
    to_the_end(archive(run_in("a"), topic="first", path=lake))
    filling = run_in("b")

    to_the_end(backfill(filling, path=lake, into="again", where="body <> '11'", rate=10_000))
    to_the_end(backfill(filling, path=lake, into="again", where="body <> '11'", rate=10_000))

    copies = orbit_cluster.messages("again")
    assert sorted(int(each.body) for each in copies) == list(range(11))
    assert {
        (each.properties.get("TAGS"), each.properties["KEYS"], each.properties["region"])
        for each in copies
    } == {("t", "k", "eu")}


def test_a_batch_of_backfill_that_is_repeated_in_other_tasks_is_stored_once(
    run_in, spark, orbit_cluster, tmp_path
):
    orbit_cluster.create_topic("repeated", queues=2)
    table = tmp_path / "table"
    # An equal body in each file: two messages, not one twice.
    frame = spark.range(30).selectExpr("CAST(id % 15 AS STRING) AS body", "'own' AS identity")
    frame.repartition(3).write.parquet(str(table))
    run = run_in()

    to_the_end(backfill(run, path=table, into="repeated"))
    shutil.rmtree(tmp_path / "ck" / "tested" / "commits")
    repeated = backfill(run, path=table, into="repeated", rate=10_000)
    to_the_end(repeated)

    assert sum(each.numInputRows for each in repeated.recentProgress) == 30
    found = orbit_cluster.messages("repeated")
    ids = Counter((each.properties["UNIQ_KEY"], bytes(each.body)) for each in found)
    assert len(ids) == len({unique_id for unique_id, _ in ids}) == 30
    assert set(ids.values()) == {1}


def test_backfill_keeps_to_its_rate_and_makes_messages_of_any_table(
    run_in, spark, orbit_cluster, tmp_path
):
    orbit_cluster.create_topic("paced", queues=1)
    table = tmp_path / "table"
    spark.range(30).selectExpr("id", "concat('u-', id) AS user").write.parquet(str(table))
    run = run_in()

    to_the_end(backfill(run, path=table, into="paced", rate=20.0, keys="user", tags="'backfilled'"))

    messages = orbit_cluster.messages("paced")
    assert sorted(json.loads(each.body)["id"] for each in messages) == list(range(30))
    assert {each.properties["TAGS"] for each in messages} == {"backfilled"}
    assert {each.properties["KEYS"] for each in messages} == {f"u-{n}" for n in range(30)}


def test_triage_groups_samples_exports_and_replays_once(run_in, spark, orbit_cluster, tmp_path):
    orbit_cluster.create_topic("billed", queues=2)
    die(orbit_cluster, "billed", "billing", 5)
    run = run_in()

    looked = {row["reason"]: row for row in triage(run, group="billing", sample=2).collect()}
    exported = triage(run, group="billing", export=tmp_path / "letters", form="json").collect()
    replayed = triage(run, group="billing", where="reason LIKE '%account%'", replay="origin")
    again = triage(run, group="billing", where="reason LIKE '%account%'", replay="origin")

    accounts = next(row for reason, row in looked.items() if "no such account" in reason)
    assert (accounts["topic"], accounts["letters"], len(accounts["samples"])) == ("billed", 3, 2)
    assert sum(row["letters"] for row in looked.values()) == 5
    assert sum(row["exported"] for row in exported) == 5
    assert spark.read.json(str(tmp_path / "letters")).where("topic = 'billed'").count() == 5
    (row,) = replayed.collect()
    assert (row["letters"], row["sent"], row["failed"]) == (3, 3, 0)
    (row,) = again.collect()
    assert (row["sent"], row["alreadySent"]) == (0, 3)
    assert len(orbit_cluster.messages("billed")) == 8


def die(cluster: EmbeddedCluster, topic: str, group: str, count: int) -> None:
    """Have a group give up messages: one after the other for two reasons."""
    cluster.send(topic, *[b"%d" % number for number in range(count)])
    consumer = Consumer(group, name_server=cluster.name_server, consume_from="first")

    @consumer.on(topic)
    def judge(message: ReceivedMessage) -> None:
        reason = "no such account" if int(message.text()) % 2 == 0 else "not enough money"
        raise DeadLetter(reason)

    with consumer:
        until(lambda: len(cluster.messages(f"%DLQ%{group}")) == count, "all are dead letters")
