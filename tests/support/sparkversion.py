"""Everything that OrbitMQ does on Spark, once, with whatever PySpark the interpreter has.

    python -m tests.support.sparkversion NAME_SERVER FOLDER (classic|connect|plain)

Reads `numbers` (500 messages), writes `copies` and `streamed`, consumes `work`; prints what it saw
as JSON. A process of its own, because it runs in an environment without the rest of the tests.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orbitmq.client.admin.admin import Admin
from orbitmq.client.consumer.verdict import DeadLetter
from orbitmq.client.errors import AdminError
from orbitmq.client.message import ReceivedMessage
from orbitmq.spark import consume, dead_letters, judged, settle
from orbitmq.spark.internals import pyspark_features
from orbitmq.spark.pipelines import Run, archive
from orbitmq.spark.pipelines.run import QueryWatch
from orbitmq.spark.session import local_session, prepare

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

DEADLINE = 90


def main(name_server: str, folder: str, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PySpark's own, at import and start
        spark = _connected() if kind == "connect" else _classic()
        said = _everything(spark, name_server, Path(folder))
        said["version"] = spark.version
        said["is_known"] = pyspark_features().is_known
        said["kind"] = type(spark).__module__
        spark.stop()
    print(json.dumps(said), flush=True)


def _classic() -> SparkSession:
    return local_session(
        "versions",
        cores=2,
        attempts=1,
        settings={
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.log.level": "ERROR",
        },
    )


def _connected() -> SparkSession:
    prepare(os.environ)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.remote("local[2]")
    return builder.config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1").getOrCreate()


def _everything(spark: SparkSession, name_server: str, folder: Path) -> dict[str, Any]:
    source = {"nameServer": name_server, "subscribe": "numbers"}
    frame = spark.read.format("rocketmq").options(**source).load()
    narrow = spark.read.format("rocketmq").options(**source).schema("queueId INT").load()
    frame.select("body").write.format("rocketmq").options(
        nameServer=name_server, topic="copies"
    ).mode("append").save()

    streamed = spark.readStream.format("rocketmq").options(**source, startingOffsets="earliest")
    into_topic = _run(
        streamed.load()
        .select("body", "tags")
        .writeStream.format("rocketmq")
        .options(nameServer=name_server, topic="streamed")
        .option("checkpointLocation", str(folder / "to-topic"))
        .trigger(availableNow=True)
        .start()
    )

    run = Run(spark, name_server=name_server, checkpoint=folder / "archived", once=True)
    kept = archive(run, topic="numbers", path=folder / "lake", max_per_batch=200)
    watch = _run(kept)

    return {
        "rows": frame.count(),
        "columns": narrow.columns,
        "narrow": narrow.where("queueId >= 0").count(),
        "into_topic": into_topic.rows,
        "archived": spark.read.parquet(str(folder / "lake")).count(),
        "archived_rows": watch.rows,
        "lag": sum(watch.lag.values()) if watch.lag else None,
        "followed": _followed(spark, name_server, folder),
        **_verdicts(spark, frame, name_server),
        **_group(spark, name_server),
    }


def _followed(spark: SparkSession, name_server: str, folder: Path) -> int:
    """The group's lag at the broker once a stream that goes on has read everything."""
    run = Run(spark, name="following", name_server=name_server, checkpoint=folder / "followed")
    stream = run.stream(
        "numbers", group="following", startingOffsets="earliest", maxOffsetsPerTrigger="200"
    )
    query = run.start(stream.writeStream.format("noop"))
    pause = threading.Event()
    end = time.monotonic() + DEADLINE
    try:
        with Admin(name_server=name_server) as admin:
            while time.monotonic() < end:
                assert query.isActive, query.exception()
                try:
                    lag: int = admin.groups.progress("following").lag
                except AdminError:
                    lag = -1  # not known to the broker yet
                if lag == 0:
                    break
                pause.wait(0.2)
    finally:
        query.stop()
    return lag


def _run(query: StreamingQuery) -> QueryWatch:
    assert query.awaitTermination(DEADLINE), query.status
    assert query.exception() is None
    watch = QueryWatch()
    watch.look(query)
    return watch


def judge(message: ReceivedMessage) -> None:
    if message.text() in ("7", "8"):
        raise DeadLetter("no such customer")


def _verdicts(spark: SparkSession, frame: DataFrame, name_server: str) -> dict[str, Any]:
    with judged(frame.where("queueOffset < 5"), judge, group="judging") as rows:
        settled = settle(rows, "judging", name_server=name_server)
        good = rows.where("outcome = 'ok'").count()
    letters = dead_letters(spark, "judging", name_server=name_server)
    return {
        "good": good,
        "dead": settled.dead,
        "reasons": sorted({row["reason"] for row in letters.select("reason").collect()}),
    }


def _group(spark: SparkSession, name_server: str) -> dict[str, Any]:
    group = consume(spark, "working", name_server=name_server, consume_from="first")
    group.on("work")(judge)
    with group:
        is_idle = group.until_idle(DEADLINE)
        progress = group.progress()
    return {"is_idle": is_idle, "worked": progress.done, "given_up": progress.dead}


if __name__ == "__main__":
    main(*sys.argv[1:])
