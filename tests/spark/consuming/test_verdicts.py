"""Verdicts in DataFrames: `process`, `settle`, and what becomes of failed rows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812  # the name that everybody uses
from pyspark.sql import types

from orbitmq.client.consumer.verdict import DeadLetter, Retry
from orbitmq.client.idempotence import Idempotence, SeenInSqlite
from orbitmq.client.message import ReceivedMessage
from orbitmq.errors import SettingError
from orbitmq.spark import dead_letters, judged, process, retries, settle, with_retries
from orbitmq.spark.consuming.progress import ReturnFailed, RowsRefused, Settled
from orbitmq.spark.consuming.verdicts import OPTIONAL, PLACE, REQUIRED, check_columns, messages_of
from tests.support.filling import Sent, fill, make_topic
from tests.support.sparking import DEADLINE, numbers, read, stream, until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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


def bodies(frame: DataFrame) -> list[int]:
    return sorted(int(bytes(row.body)) for row in frame.select("body").collect())


def test_every_row_gets_a_verdict(spark, cluster, topic):
    make_topic(cluster, topic, 40, queues=4)

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
    make_topic(cluster, topic, 40, queues=4)
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
    make_topic(orbit_cluster, "orders", 20, queues=4)
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

    make_topic(orbit_cluster, "orders", 4, queues=4)
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


def test_texts_may_have_a_collation(spark, cluster, topic):
    frame = read(spark, cluster, topic)
    collated = frame.withColumn("tags", F.collate(F.lit("Paid"), "UTF8_LCASE"))

    outcomes = process(collated, judging()).where("tags = 'paid'").select("outcome")

    assert outcomes.columns == ["outcome"]


def test_what_cannot_work_is_said_on_the_driver(spark, cluster, topic):
    frame = read(spark, cluster, topic)

    with pytest.raises(RowsRefused, match="has no column body"):
        process(frame.drop("body"), judging())
    with pytest.raises(RowsRefused, match="error, which are there already"):
        process(frame.withColumnRenamed("tags", "error"), judging())
    with pytest.raises(RowsRefused, match="no column outcome"):
        settle(frame, "billing", name_server=cluster.name_server)
    with pytest.raises(SettingError, match="workers must be 1 or more"):
        process(frame, judging(), workers=0)
    with pytest.raises(SettingError, match="takes no argument"):
        process(frame, lambda: None)


# ---- verdicts that are kept


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


# ---- rows with rare values


FIRST, LAST = -62_135_596_800_000, 253_402_300_799_999


def places(count: int, **changed: pa.Array) -> pa.RecordBatch:
    columns = {
        "topic": pa.array(["orders"] * count),
        "brokerName": pa.array(["broker-a"] * count),
        "queueId": pa.array([0] * count, pa.int32()),
        "queueOffset": pa.array(range(count), pa.int64()),
        "body": pa.array([b"x"] * count),
    } | changed
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def rows(born: Any, kind: pa.DataType) -> pa.RecordBatch:
    return places(1, bornTimestamp=pa.array([born], kind))


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York", None])
@pytest.mark.parametrize("born", [FIRST, LAST, 0, 1_700_000_000_123, None])
def test_a_time_is_the_same_in_every_zone(born, zone):
    """Spark gives times in the zone of its session, where the first and the last have no date."""
    micros = None if born is None else born * 1000

    (message,) = messages_of(rows(micros, pa.timestamp("us", zone)))

    assert message.stored.born_ms == (born or 0)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Speechless(), "Speechless: (no text: ValueError)"),
        (ValueError("\udcff broken"), "ValueError: ? broken"),
        (Retry("\udcff broken"), "? broken"),
        (Retry(Speechless()), "Speechless: (no text: ValueError)"),
        (Retry(404), "404"),
    ],
)
def test_an_error_whose_text_is_none_is_a_verdict_like_others(error, said):
    def fail(message):
        raise error

    (found,) = in_a_task(fail, rows(0, pa.timestamp("us", "UTC")))

    assert found.column("outcome").to_pylist() == ["retry"]
    assert found.column("error").to_pylist() == [said]


@pytest.mark.parametrize("name", PLACE)
def test_a_row_without_a_place_is_refused_by_its_column(name):
    whole = places(3)
    holes = pa.array([*whole.column(name).to_pylist()[:2], None], whole.column(name).type)

    with pytest.raises(RowsRefused, match=f"column {name} is null in row 2 of a batch of 3"):
        messages_of(places(3, **{name: holes}))


def test_a_coroutine_has_one_event_loop_in_a_task():
    """What it keeps, a client of a database say, belongs to the loop that it was made on."""
    loops: list[asyncio.AbstractEventLoop] = []
    made: list[asyncio.Queue[int]] = []

    async def handle(message):
        loops.append(asyncio.get_running_loop())
        if not made:
            made.append(asyncio.Queue())
        waiting = asyncio.create_task(made[0].get())  # the first who waits binds it to a loop
        await asyncio.sleep(0)
        made[0].put_nowait(message.queue_offset)
        assert await waiting == message.queue_offset

    found = in_a_task(handle, places(3), places(2), places(0), places(4))

    outcomes = [each.column("outcome").to_pylist() for each in found]
    assert outcomes == [["ok"] * 3, ["ok"] * 2, [], ["ok"] * 4]
    assert len(set(loops)) == 1
    assert loops[0].is_closed()


def in_a_task(handler: Any, *batches: pa.RecordBatch) -> list[pa.RecordBatch]:
    """What `process` makes of record batches in a task."""
    judge: Any = process(frame(), handler)
    return list(judge(iter(batches)))


def frame(**changed: types.DataType) -> Any:
    """The columns of a DataFrame; its step of a job is the function of that step."""
    columns: dict[str, types.DataType] = {
        "topic": types.StringType(),
        "brokerName": types.StringType(),
        "queueId": types.IntegerType(),
        "queueOffset": types.LongType(),
        "body": types.BinaryType(),
        "properties": types.MapType(types.StringType(), types.StringType()),
    } | changed
    schema = types.StructType([types.StructField(*each) for each in columns.items()])
    step: Any = lambda function, _: function  # noqa: E731
    return SimpleNamespace(columns=schema.names, schema=schema, mapInArrow=step)


@pytest.mark.parametrize(
    ("column", "kind", "said"),
    [
        ("body", types.StringType(), "column body must be binary, it is string"),
        ("queueId", types.StringType(), "column queueId must be int, it is string"),
        ("queueOffset", types.DoubleType(), "column queueOffset must be bigint, it is double"),
        ("tags", types.ArrayType(types.StringType()), "tags must be string, it is array<string>"),
        ("reconsumeTimes", types.StringType(), "reconsumeTimes must be int, it is string"),
        (
            "properties",
            types.MapType(types.StringType(), types.IntegerType()),
            "properties must be map<string,string>, it is map<string,int>",
        ),
    ],
)
def test_a_column_of_another_type_is_refused_before_any_task(column, kind, said):
    with pytest.raises(RowsRefused) as raised:
        check_columns(frame(**{column: kind}), REQUIRED, optional=OPTIONAL)

    assert said in str(raised.value)
