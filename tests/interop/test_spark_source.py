"""The Spark source and consumer groups on Spark with Apache's broker."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException

from orbitmq import Admin
from orbitmq.client.consumer.verdict import DeadLetter
from orbitmq.spark import consume, dead_letters, judged, settle, with_retries
from tests.interop.beside import Beside, number_in, number_of
from tests.interop.session import body
from tests.support.sparkconsuming import QUICK, SOON, Journal, idle
from tests.support.sparking import DEADLINE, batches, into_files, read, run_over, stream, until
from tests.support.sparksession import running_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]


@pytest.fixture(scope="session")
def spark():
    with running_session("interop") as session:
        yield session


def made(beside: Beside, topic: str, *, queues: int = 4) -> str:
    asyncio.run(beside.create_topic(topic, queues=queues))
    return topic


def sent_by_java(
    beside: Beside, topic: str, count: int, **settings: object
) -> list[dict[str, int]]:
    lines = beside.session.run("send", {"topic": topic, "count": count, **settings})
    assert all(line["status"] == "SEND_OK" for line in lines)
    return lines


def texts(frame: DataFrame) -> list[str]:
    return sorted(bytes(row.body).decode() for row in frame.select("body").collect())


def bodies(*numbers: int, prefix: str = "body-") -> list[str]:
    return sorted(f"{prefix}{number}" for number in numbers)


def all_consumed(beside: Beside, group: str, topic: str) -> None:
    asyncio.run(beside.until_all_consumed(group, topic))


def test_a_topic_of_java_messages_is_a_table(spark, beside):
    topic = made(beside, "SparkTable")
    lines = sent_by_java(beside, topic, 40, tag="red,blue", keys="k-", property="shop:Köln")

    frame = read(spark, beside, topic)

    rows = {row.msgId: row for row in frame.collect()}
    assert len(rows) == 40
    for number, line in enumerate(lines):
        row = rows[line["msgId"]]
        assert bytes(row.body).decode() == f"body-{number}"
        assert (row.topic, row.brokerName) == (topic, "broker-a")
        assert (row.queueId, row.queueOffset) == (line["queueId"], line["queueOffset"])
        assert (row.tags, row.keys) == (("red", "blue")[number % 2], f"k-{number}")
        assert (row.properties["shop"], row.properties["number"]) == ("Köln", str(number))
        assert row.reconsumeTimes == 0
        assert row.bornTimestamp is not None
        assert row.storeTimestamp >= row.bornTimestamp


def test_bodies_that_java_compressed_are_expanded(spark, beside):
    topic = made(beside, "SparkLarge")
    kinds = ("ZLIB",) if beside.release.is_old_line else ("ZLIB", "LZ4", "ZSTD")
    for kind in kinds:
        sent_by_java(beside, topic, 2, size=20_000, compression=kind, prefix=f"{kind}-")

    found = texts(read(spark, beside, topic))

    assert [text.split(" ")[0] for text in found] == sorted(
        f"{kind}-{number}" for kind in kinds for number in range(2)
    )
    assert all(len(text) >= 20_000 for text in found)


def test_reads_are_restricted_by_offsets_times_and_filters(spark, beside):
    topic = made(beside, "SparkRanges", queues=2)
    for queue in range(2):
        sent_by_java(
            beside, topic, 100, queue=queue, tag="red,blue", property="a:b", prefix=f"{queue}-"
        )
    stored = {
        (row.queueId, row.queueOffset): row.storeTimestamp.timestamp()
        for row in read(spark, beside, topic).collect()
    }

    def found(**options):
        return texts(read(spark, beside, topic, **options))

    def per_queue(first, second):
        return json.dumps({topic: {"broker-a:0": first, "broker-a:1": second}})

    assert found(startingOffsets=per_queue(98, -2), endingOffsets=per_queue(-1, 3)) == sorted(
        [*bodies(98, 99, prefix="0-"), *bodies(0, 1, 2, prefix="1-")]
    )
    assert found(queues="1", fromOffset="10", toOffset="12") == bodies(10, 11, prefix="1-")
    middle = stored[1, 50]
    expected = {f"{queue}-{offset}" for (queue, offset), time in stored.items() if time >= middle}
    since = round(middle * 1000)
    # Of a queue whose messages are all older, Apache's broker of the old line gives the last one.
    later = {"startingTimestamp": str(since), "startingOffsetsByTimestampStrategy": "latest"}
    assert set(found(**later)) == expected
    assert (
        set(found(endingTimestamp=str(since)))
        == {f"{queue}-{offset}" for queue, offset in stored} - expected
    )
    assert found(subExpression="red || green") == sorted(
        f"{queue}-{number}" for queue in range(2) for number in range(0, 100, 2)
    )
    sql = {
        "subExpressionType": "SQL92",
        "subExpression": "TAGS = 'blue' AND number BETWEEN 1 AND 3",
    }
    assert found(**sql) == sorted(["0-1", "0-3", "1-1", "1-3"])


def test_a_large_queue_is_read_whole_by_several_tasks(spark, beside):
    """Answers are limited by the broker in number and size; compaction files roll in between."""
    topic = made(beside, "SparkMany", queues=1)
    spark.range(0, 20_000, 1, 2).selectExpr(
        "CONCAT(id, REPEAT('.', 300)) AS body", "0 AS queueId"
    ).write.format("rocketmq").options(nameServer=beside.name_server, topic=topic).mode(
        "append"
    ).save()

    frame = read(spark, beside, topic, minPartitions="4")

    rows = frame.selectExpr("queueOffset", "CAST(body AS STRING) AS text").collect()
    assert sorted(row.queueOffset for row in rows) == list(range(20_000))
    assert sorted(int(row.text.rstrip(".")) for row in rows) == list(range(20_000))
    assert frame.rdd.getNumPartitions() == 4


def test_a_stream_goes_on_from_its_checkpoint_and_tells_the_broker(spark, beside, tmp_path):
    topic = made(beside, "SparkStream")
    group = "spark-stream"
    sent_by_java(beside, topic, 100, prefix="1-")
    options = {"group": group, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "40"}

    first = batches(run_over(stream(spark, beside, topic, **options), tmp_path))
    all_consumed(beside, group, topic)
    sent_by_java(beside, topic, 20, prefix="2-")
    query = into_files(stream(spark, beside, topic, **options), tmp_path)
    try:
        all_consumed(beside, group, topic)
        members = asyncio.run(members_of(beside, group))
        sent_by_java(beside, topic, 20, prefix="3-")
        all_consumed(beside, group, topic)
    finally:
        query.stop()

    assert sum(rows for _, rows in first) == 100
    assert len(first) >= 3
    assert members == 1
    written = spark.read.parquet(str(tmp_path / "out"))
    assert texts(written) == sorted(
        bodies(*range(100), prefix="1-")
        + bodies(*range(20), prefix="2-")
        + bodies(*range(20), prefix="3-")
    )


async def members_of(beside: Beside, group: str) -> int:
    async with beside.admin() as admin:
        details = await admin.groups.describe(group)
    return 0 if details.members is None else len(details.members.clients)


def test_a_stream_from_the_end_takes_what_comes_after_its_start(spark, beside, tmp_path):
    topic = made(beside, "SparkLatest")
    sent_by_java(beside, topic, 20, prefix="before-")
    query = into_files(stream(spark, beside, topic, group="spark-latest"), tmp_path)
    try:
        # Its first batch takes nothing, and says where it begins.
        until(lambda: query.lastProgress and query.lastProgress.batchId >= 0, "it has begun")
        sent_by_java(beside, topic, 20, prefix="after-")
        all_consumed(beside, "spark-latest", topic)
    finally:
        query.stop()

    written = spark.read.parquet(str(tmp_path / "out"))
    assert texts(written) == bodies(*range(20), prefix="after-")


@pytest.mark.parametrize("count", [8, 60])
def test_a_topic_that_was_made_anew_is_not_read_on_where_the_former_one_ended(
    spark, beside, tmp_path, count
):
    topic = made(beside, f"SparkAnew{count}", queues=1)
    sent_by_java(beside, topic, 20, prefix="former-")
    run_over(stream(spark, beside, topic, startingOffsets="earliest"), tmp_path)
    with Admin(name_server=beside.name_server) as admin:
        admin.topics.delete(topic)
    made(beside, topic, queues=1)
    sent_by_java(beside, topic, count, prefix="present-")

    query = into_files(stream(spark, beside, topic), tmp_path, available_now=True)
    with pytest.raises(StreamingQueryException, match=f"messages are gone: {topic}@broker-a:0 "):
        query.awaitTermination(DEADLINE)
    run_over(stream(spark, beside, topic, failOnDataLoss="false"), tmp_path)

    written = spark.read.parquet(str(tmp_path / "out"))
    assert texts(written) == [
        *bodies(*range(20), prefix="former-"),
        *bodies(*range(count), prefix="present-"),
    ]


def test_java_consumes_what_is_written(spark, beside):
    topic = made(beside, "SparkWritten", queues=2)
    frame = spark.range(0, 50, 1, 2).selectExpr(
        "CONCAT('row-', id) AS body",
        "IF(id % 2 = 0, 'even', 'odd') AS tags",
        "ARRAY(CONCAT('k', id), 'all') AS keys",
        "MAP('shop', 'Köln') AS properties",
        "IF(id < 10, 1, NULL) AS queueId",
        "IF(id >= 40, 1, NULL) AS delayLevel",
    )

    frame.write.format("rocketmq").options(nameServer=beside.name_server, topic=topic).mode(
        "append"
    ).save()
    lines = beside.session.run(
        "consume", {"topic": topic, "group": "java-of-spark", "count": 50, "deadline": 60}
    )

    found = {number_of(line): line for line in lines}
    assert sorted(found) == list(range(50))
    for number, line in found.items():
        properties = line["properties"]
        assert body(line) == f"row-{number}"
        assert properties["TAGS"] == ("odd" if number % 2 else "even")
        assert (properties["KEYS"], properties["shop"]) == (f"k{number} all", "Köln")
        assert line["msgId"] == properties["UNIQ_KEY"]
    assert {found[number]["queueId"] for number in range(10)} == {1}
    assert {line["queueId"] for line in lines} == {0, 1}
    assert len({line["msgId"] for line in lines}) == 50


def test_a_stream_is_copied_to_another_topic(spark, beside, tmp_path):
    topic, copy = made(beside, "SparkOrigin"), made(beside, "SparkCopy")
    sent_by_java(beside, topic, 60, tag="red,blue", property="shop:Köln")

    query = (
        stream(spark, beside, topic, startingOffsets="earliest")
        .writeStream.format("rocketmq")
        .options(nameServer=beside.name_server, topic=copy, checkpointLocation=str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(DEADLINE)

    rows = read(spark, beside, copy).collect()
    assert sorted(number_in(bytes(row.body).decode()) for row in rows) == list(range(60))
    assert {row.properties["shop"] for row in rows} == {"Köln"}
    assert Counter(row.tags for row in rows) == {"red": 30, "blue": 30}


def test_a_group_on_spark_retries_and_gives_up(spark, beside, tmp_path):
    topic, group = made(beside, "SparkGroup", queues=2), "spark-group"
    lines = sent_by_java(beside, topic, 20, tag="red", keys="k-")
    journal = Journal(tmp_path / "journal")

    def bill(message):
        number = message.text().rsplit("-", 1)[1]
        if number == "7" or (number == "8" and message.attempt == 1):
            raise ValueError("no account")
        if number == "9":
            raise DeadLetter("no such customer")

    def letters():
        return texts(dead_letters(spark, group, name_server=beside.name_server))

    run = consume(
        spark,
        group,
        name_server=beside.name_server,
        consume_from="first",
        max_retries=2,
        batch=QUICK,
        rebalance=SOON,
    )
    run.on(topic, tags="red")(journal.writing(bill))
    with run:
        until(lambda: letters() == ["body-7", "body-9"], "both are given up")
        idle(run)
        progress = run.progress()

    attempts: dict[str, list[int]] = defaultdict(list)
    for entry in journal.entries():
        attempts[entry.body].append(entry.attempt)
    expected = {f"body-{number}": [1] for number in range(20)}
    assert attempts == expected | {"body-7": [1, 2, 3], "body-8": [1, 2]}
    assert (progress.done, progress.retried, progress.dead) == (18, 3, 2)
    all_consumed(beside, group, topic)
    given_up = {
        bytes(row.body).decode(): row
        for row in dead_letters(spark, group, name_server=beside.name_server).collect()
    }
    for number in (7, 9):
        row = given_up[f"body-{number}"]
        assert (row.topic, row.msgId) == (topic, lines[number]["msgId"])
        assert (row.tags, row.keys) == ("red", f"k-{number}")


def test_a_group_in_order_holds_its_queue_at_a_failing_message(spark, beside, tmp_path):
    topic, group = made(beside, "SparkOrder", queues=2), "spark-order"
    sent_by_java(beside, topic, 20, ordered=4)
    journal = Journal(tmp_path / "journal")

    def bill(message):
        if message.text().endswith("5") and message.attempt < 3:
            raise ValueError("not yet")

    run = consume(
        spark,
        group,
        name_server=beside.name_server,
        ordered=True,
        consume_from="first",
        batch=QUICK,
        rebalance=SOON,
    )
    run.on(topic)(journal.writing(bill))
    with run:
        until(lambda: len(set(journal.bodies())) == 20, "every message was tried")
        until(lambda: len(journal.bodies()) >= 24, "and those that failed twice again")
        idle(run)

    by_queue: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for entry in journal.entries():
        by_queue[entry.queue].append((entry.offset, entry.attempt))
    for calls in by_queue.values():
        assert calls == sorted(calls)
    tried = Counter(journal.bodies())
    assert tried == {f"body-{n}": 3 if n in (5, 15) else 1 for n in range(20)}
    all_consumed(beside, group, topic)


def test_a_group_is_shared_with_a_java_consumer(spark, beside, tmp_path):
    topic, group = made(beside, "SparkShared"), "spark-shared"
    journal = Journal(tmp_path / "journal")
    java = beside.session.start(
        "consume", {"topic": topic, "group": group, "hold": "", "deadline": 240}
    )
    run = consume(
        spark,
        group,
        name_server=beside.name_server,
        consume_from="first",
        batch=QUICK,
        rebalance=SOON,
    )
    run.on(topic)(journal.writing())
    try:
        with run:
            until(
                lambda: sum(queue.topic == topic for queue in run.assignment()) == 2,
                "each has half of the queues",
            )
            sent_by_java(beside, topic, 40)
            until(
                lambda: {*java.bodies, *journal.bodies()} >= set(bodies(*range(40))),
                "everything was handled by one or the other",
            )
            idle(run)
    finally:
        java.release()

    assert len(journal.bodies()) == 20
    assert Counter([*java.bodies, *journal.bodies()]) == Counter(bodies(*range(40)))
    all_consumed(beside, group, topic)


def test_rows_that_failed_come_again_through_the_retry_topic(spark, beside, tmp_path):
    topic, group = made(beside, "SparkVerdicts", queues=2), "spark-verdicts"
    sent_by_java(beside, topic, 20)
    server = beside.name_server
    good = str(tmp_path / "good")

    def judge(message):
        number = int(message.text().rsplit("-", 1)[1])
        if number == 3 or (number == 4 and message.attempt == 1):
            raise ValueError(f"no account for {number}")

    def each(batch, number):
        with judged(batch, judge, group=group) as rows:
            rows.where("outcome = 'ok'").select("body").write.mode("append").parquet(good)
            settle(rows, group, name_server=server, max_retries=1)

    def letters():
        return texts(dead_letters(spark, group, name_server=server))

    query = (
        stream(
            spark,
            beside,
            with_retries(topic, group=group, name_server=server),
            startingOffsets="earliest",
            group=group,
        )
        .writeStream.foreachBatch(each)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        until(lambda: letters() == ["body-3"], "one is given up")
        until(lambda: len(texts(spark.read.parquet(good))) == 19, "the others went well")
        all_consumed(beside, group, topic)
    finally:
        query.stop()

    assert texts(spark.read.parquet(good)) == bodies(*(n for n in range(20) if n != 3))
