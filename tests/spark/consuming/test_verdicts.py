"""Verdicts in DataFrames: `process`, `settle`, and what becomes of failed rows."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from orbitmq.client.consumer.verdict import DeadLetter, Retry
from orbitmq.client.idempotence import Idempotence, SeenInSqlite
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.ranges.connections import QueueRange
from orbitmq.client.routes import Queue
from orbitmq.errors import SettingError
from orbitmq.spark import dead_letters, judged, process, retries, settle, with_retries
from orbitmq.spark.consuming.progress import ReturnFailed, RowsRefused, Settled
from orbitmq.spark.consuming.returns import neighbours
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import Sent, fill, numbered
from tests.support.sparking import DEADLINE, read, stream, until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def judging() -> Callable[[ReceivedMessage], None]:
    """A handler that fails in every way there is."""

    def judge(message: ReceivedMessage) -> None:
        number = int(message.text())
        if number % 10 == 3:
            raise ValueError(f"no account for {number}")
        if number % 10 == 5:
            raise Retry("closed", delay=60)
        if number % 10 == 7:
            raise DeadLetter("no such customer")

    return judge


def filled(cluster: EmbeddedCluster, topic: str, count: int = 40) -> None:
    fill(cluster.broker_addresses[0], topic, numbered(count, queues=4))


def bodies(frame: DataFrame) -> list[int]:
    return sorted(int(bytes(row.body)) for row in frame.select("body").collect())


def test_every_row_gets_a_verdict(spark, cluster, topic):
    filled(cluster, topic)

    found = process(read(spark, cluster, topic), judging(), workers=4)

    rows = {int(bytes(row.body)): row for row in found.collect()}
    assert len(rows) == 40
    for number, row in rows.items():
        verdict = (row.outcome, row.error, row.retryAfter)
        assert row.isHeld is False
        assert verdict == {
            3: ("retry", f"ValueError: no account for {number}", None),
            5: ("retry", "closed", 60.0),
            7: ("dead", "no such customer", None),
        }.get(number % 10, ("ok", None, None))
        assert row.properties["UNIQ_KEY"] == row.msgId == f"id-{number}"
    assert found.columns[-4:] == ["outcome", "error", "retryAfter", "isHeld"]


def test_handlers_of_batches_and_coroutines_judge_rows_too(spark, cluster, topic):
    filled(cluster, topic)
    frame = read(spark, cluster, topic)

    def first_two(messages):
        assert len({message.queue for message in messages}) == 1
        return 1

    async def odd(message):
        return int(message.text()) % 2 == 1

    batches = process(frame, first_two, batch=True, batch_size=5)
    awaited = process(frame, odd)

    # Four queues of ten messages, in calls of five, of which two succeed.
    assert Counter(row.outcome for row in batches.collect()) == {"ok": 16, "retry": 24}
    assert bodies(awaited.where("outcome = 'ok'")) == list(range(1, 40, 2))


@pytest.mark.feature("M11")
@pytest.mark.feature("M12")
def test_failed_rows_of_a_stream_come_again_and_end_as_dead_letters(spark, orbit_cluster, tmp_path):
    orbit_cluster.create_topic("orders", queues=4)
    filled(orbit_cluster, "orders", 20)
    server = orbit_cluster.name_server
    fail = judging()
    good = str(tmp_path / "good")

    def each(batch, number):
        with judged(batch, fail, group="billing") as rows:
            good_ones = rows.where("outcome = 'ok'").select("body")
            good_ones.write.mode("overwrite").parquet(f"{good}/batch={number}")
            settle(rows, "billing", name_server=server, max_retries=1)

    query = (
        stream(
            spark,
            orbit_cluster,
            with_retries("orders", group="billing", name_server=server),
            startingOffsets="earliest",
        )
        .writeStream.foreachBatch(each)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        until(lambda: orbit_cluster.messages("%DLQ%billing"), "those without hope are dead")
        at_once = sorted(int(each.body) for each in orbit_cluster.messages("%DLQ%billing"))
        orbit_cluster.advance(10)
        until(lambda: len(orbit_cluster.messages("%DLQ%billing")) == 4, "the second attempt")
        until(lambda: retries(spark, "billing", name_server=server).count() == 2, "came again")
        orbit_cluster.advance(60)
        until(lambda: len(orbit_cluster.messages("%DLQ%billing")) == 6, "after its own delay")
    finally:
        query.stop()

    assert at_once == [7, 17]
    assert bodies(spark.read.parquet(good)) == [n for n in range(20) if n % 10 not in (3, 5, 7)]
    letters = {
        int(bytes(row.body)): row
        for row in dead_letters(spark, "billing", name_server=server).collect()
    }
    assert sorted(letters) == [3, 5, 7, 13, 15, 17]
    originals = {int(each.body): each for each in orbit_cluster.messages("orders")}
    for number, letter in letters.items():
        assert (letter.topic, letter.msgId) == ("orders", f"id-{number}")
        assert letter.originMsgId == originals[number].offset_id
        assert letter.attempts == (1 if number % 10 == 7 else 2)
        reasons = {3: f"ValueError: no account for {number}", 5: "closed", 7: "no such customer"}
        assert letter.reason == reasons[number % 10]
    again = {
        int(bytes(row.body)): row for row in retries(spark, "billing", name_server=server).collect()
    }
    assert sorted(again) == [3, 5, 13, 15]
    assert {(row.topic, row.attempts) for row in again.values()} == {("orders", 1)}
    assert {row.msgId for row in again.values()} == {f"id-{n}" for n in again}
    assert again[13].reason == "ValueError: no account for 13"
    assert again[15].reason == "closed"


def test_a_row_that_somebody_else_works_on_comes_again_without_an_attempt(
    spark, orbit_cluster, tmp_path
):
    from pyspark.sql.functions import expr  # only where Spark is

    orbit_cluster.create_topic("orders", queues=4)
    filled(orbit_cluster, "orders", 4)
    server = orbit_cluster.name_server
    given_up = "CASE WHEN body = '3' THEN 'dead' ELSE outcome END"
    with (
        contextlib.closing(SeenInSqlite(tmp_path / "seen.sqlite")) as elsewhere,
        contextlib.closing(SeenInSqlite(tmp_path / "seen.sqlite")) as here,
    ):
        for number in (2, 3):
            elsewhere.claim(f"billing\x00orders\x00id-{number}", time.time(), lease=3600)
        once = Idempotence(here, retry=30)

        with judged(
            read(spark, orbit_cluster, "orders"),
            lambda message: None,
            group="billing",
            middleware=[once],
        ) as rows:
            verdicts = {
                int(bytes(row.body)): (row.outcome, row.isHeld, row.retryAfter)
                for row in rows.collect()
            }
            # Who does not want to wait for one of them has the last word.
            changed = rows.withColumn("outcome", expr(given_up))
            settled = settle(changed, "billing", name_server=server)
    orbit_cluster.advance(30)
    until(lambda: orbit_cluster.messages("%RETRY%billing"), "it is delivered again")

    done, held = ("ok", False, None), ("retry", True, 30.0)
    assert verdicts == {0: done, 1: done, 2: held, 3: held}
    assert settled == Settled(retried=0, dead=1, held=1)
    until(lambda: orbit_cluster.messages("%DLQ%billing"), "the other one is given up")
    assert [each.body for each in orbit_cluster.messages("%DLQ%billing")] == [b"3"]
    (again,) = orbit_cluster.messages("%RETRY%billing")
    assert (again.body, again.unique_id, again.reconsume_times) == (b"2", "id-2", 0)


def test_a_group_without_failures_has_an_empty_table_of_them(spark, cluster):
    found = dead_letters(spark, "nobody", name_server=cluster.name_server)

    assert found.count() == 0
    assert found.columns[:5] == ["topic", "msgId", "originMsgId", "attempts", "reason"]


def test_a_row_whose_message_is_gone_is_sent_as_it_is(spark, orbit_cluster):
    """The place in the row is no longer that of the message; never may another one be sent."""
    orbit_cluster.create_topic("orders", queues=1)
    sent = [Sent(body, 0, {"UNIQ_KEY": f"id-{body.decode()}"}) for body in (b"bad", b"worse")]
    fill(orbit_cluster.broker_addresses[0], "orders", sent)
    frame = read(spark, orbit_cluster, "orders")
    moved = frame.selectExpr(
        "queueOffset + 1000 AS queueOffset", *set(frame.columns) - {"queueOffset"}
    )

    def fail(message):
        if message.body == b"worse":
            raise DeadLetter("never")
        raise ValueError("no")

    with judged(moved, fail) as rows:
        settled = settle(rows, "billing", name_server=orbit_cluster.name_server)
    orbit_cluster.advance(10)
    until(lambda: orbit_cluster.messages("%RETRY%billing"), "it is delivered again", DEADLINE)

    assert settled == Settled(retried=1, dead=1)
    (letter,) = orbit_cluster.messages("%DLQ%billing")
    assert (letter.body, letter.unique_id, letter.reconsume_times) == (b"worse", "id-worse", 1)
    assert letter.properties["DLQ_ORIGIN_TOPIC"] == "orders"
    assert letter.properties["DLQ_REASON"].endswith("never")
    (copy,) = orbit_cluster.messages("%RETRY%billing")
    assert (copy.body, copy.properties["RETRY_TOPIC"], copy.reconsume_times) == (
        b"bad",
        "orders",
        1,
    )
    assert copy.unique_id == "id-bad"


def test_rows_that_nobody_takes_back_are_an_error(spark, orbit_cluster):
    orbit_cluster.create_topic("orders", queues=1)
    fill(orbit_cluster.broker_addresses[0], "orders", [b"bad"])

    def fail(message):
        raise DeadLetter("no")

    server = orbit_cluster.name_server
    with judged(read(spark, orbit_cluster, "orders"), fail) as rows:
        orbit_cluster.stop()

        with pytest.raises(ReturnFailed, match="1 failed message"):
            settle(rows, "billing", name_server=server)


def test_what_cannot_work_is_said_on_the_driver(spark, cluster, topic):
    frame = read(spark, cluster, topic)

    with pytest.raises(RowsRefused, match="has no column body"):
        process(frame.drop("body"), judging())
    with pytest.raises(RowsRefused, match="column body must be binary, it is string"):
        process(frame.withColumn("body", frame["body"].cast("string")), judging())
    with pytest.raises(RowsRefused, match="error, which are there already"):
        process(frame.withColumnRenamed("tags", "error"), judging())
    with pytest.raises(RowsRefused, match="no column outcome"):
        settle(frame, "billing", name_server=cluster.name_server)
    with pytest.raises(SettingError, match="workers must be 1 or more"):
        process(frame, judging(), workers=0)
    with pytest.raises(SettingError, match="takes no argument"):
        process(frame, lambda: None)  # type: ignore[arg-type,misc]


def test_neighbouring_rows_are_looked_up_together():
    one, other = Queue("orders", "broker-a", 0), Queue("orders", "broker-a", 1)

    found = neighbours([(one, 9), (one, 3), (other, 4), (one, 5), (one, 500), (one, 3)])

    assert found == [QueueRange(one, 3, 10), QueueRange(one, 500, 501), QueueRange(other, 4, 5)]
