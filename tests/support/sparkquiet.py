"""A local session that does a bit of everything, as a process whose error stream is looked at.

    python -m tests.support.sparkquiet NAME_SERVER TOPIC COPY FOLDER

What it writes to the error stream after `FAILING` is about a write that fails.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.errors import PythonException

from orbitmq.spark.session import local_session
from tests.support.sparking import until

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

FAILING = "now something is wrong"
#: How Spark knows that a function failed because its stream was stopped.
INTERRUPTED = "java.lang.InterruptedException"
CALL_FAILED = "py4j.protocol.Py4JJavaError: An error occurred while calling "


def main(name_server: str, topic: str, copy: str, folder: str) -> None:
    spark = local_session("quiet", cores=2, attempts=1)
    at = {"nameServer": name_server}
    frame = spark.read.format("rocketmq").options(**at, subscribe=topic).load()
    frame.select("queueOffset").show(2)
    frame.select("body").write.format("rocketmq").options(**at, topic=copy).mode("append").save()
    rows = spark.readStream.format("rocketmq").options(
        **at, subscribe=topic, startingOffsets="earliest"
    )
    query = (
        rows.load()
        .select("body")
        .writeStream.format("rocketmq")
        .options(**at, topic=copy, checkpointLocation=str(Path(folder) / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    stop_streams_in_a_batch(spark, at, topic, copy, Path(folder))
    outlast_workers(spark)
    print(FAILING, file=sys.stderr, flush=True)
    rows_to_nowhere = spark.sql("SELECT 'x' AS body, 'missing' AS topic")
    with contextlib.suppress(PythonException):
        rows_to_nowhere.write.format("rocketmq").options(**at).mode("append").save()
    spark.stop()


def stop_streams_in_a_batch(
    spark: SparkSession, at: dict[str, str], topic: str, copy: str, folder: Path
) -> None:
    """Stop a stream whose function fails with that, and one that writes."""
    begun, may_fail = threading.Event(), threading.Event()

    def fail(_: DataFrame, __: int) -> None:
        begun.set()
        may_fail.wait(60)
        raise RuntimeError(CALL_FAILED + "x" * 10_000 + INTERRUPTED)

    def rows() -> DataFrame:
        options = at | {"subscribe": topic, "startingOffsets": "earliest"}
        return spark.readStream.format("rocketmq").options(**options).load()

    query = (
        rows()
        .writeStream.foreachBatch(fail)
        .option("checkpointLocation", str(folder / "failing"))
        .trigger(processingTime="10 milliseconds")
        .start()
    )
    assert begun.wait(60)
    threading.Timer(0.5, may_fail.set).start()
    query.stop()
    query = (
        rows()
        .select("body")
        .mapInArrow(slowly, "body BINARY")
        .writeStream.format("rocketmq")
        .options(**at, topic=copy, checkpointLocation=str(folder / "writing"))
        .trigger(processingTime="10 milliseconds")
        .start()
    )
    until(lambda: bool(spark.sparkContext.statusTracker().getActiveStageIds()), "a batch runs")
    query.stop()


def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        time.sleep(1)
        yield batch


def outlast_workers(spark: SparkSession) -> None:
    """Return when Java has closed all workers: it does so when they had no work for a minute."""
    jvm = spark._jvm
    assert jvm is not None
    java = jvm.java.lang.ProcessHandle.current()
    until(lambda: java.descendants().count() == java.children().count(), "only daemons are left")


if __name__ == "__main__":
    main(*sys.argv[1:])
