"""A streaming job as a process of its own: topic to Parquet files, until it is ended.

    python -m tests.support.sparkpipeline NAME_SERVER TOPIC GROUP FOLDER [MASTER]

On the machine itself, or on the cluster of a Spark master. Prints a line for every batch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from orbitmq.spark.session import local_session, prepare

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

QUICK = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1", "spark.log.level": "ERROR"}
ON_A_CLUSTER = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.ui.enabled": "false",
}


def main(name_server: str, topic: str, group: str, folder: str, master: str | None = None) -> None:
    spark = session() if master is None else session_on(master)
    run(spark, messages(spark, name_server, topic, group), folder)


def messages(
    spark: SparkSession,
    name_server: str,
    topic: str,
    group: str,
    *,
    partitions: int = 2,
    most: int = 100,
) -> DataFrame:
    """The topic as a stream, in small batches."""
    return (
        spark.readStream.format("rocketmq")
        .option("nameServer", name_server)
        .option("subscribe", topic)
        .option("group", group)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", str(most))
        .option("minPartitions", str(partitions))
        .load()
    )


def run(spark: SparkSession, frame: DataFrame, folder: str) -> None:
    """Write a stream into files until a signal comes."""
    query = (
        frame.writeStream.format("parquet")
        .option("path", str(Path(folder) / "out"))
        .option("checkpointLocation", str(Path(folder) / "checkpoint"))
        .start()
    )
    follow(spark, query)


def follow(
    spark: SparkSession, query: StreamingQuery, again: Callable[[], StreamingQuery] | None = None
) -> None:
    """Print a line for every batch, until a signal comes.

    `again` starts a query that has failed: Spark ends one whose process for commits has died.
    """
    endings: list[int] = []
    # Setting the event that this thread waits for could wait for this thread.
    signal.signal(signal.SIGTERM, lambda number, _: endings.append(number))
    pause = threading.Event()
    last = -1
    while (query.isActive or again) and not endings:
        pause.wait(0.02)
        if not query.isActive and again:
            query = again()
        progress = query.lastProgress
        if progress is not None and progress.batchId != last and progress.numInputRows:
            last = progress.batchId
            print(f"batch {last}", flush=True)
    failure = query.exception()
    query.stop()
    spark.stop()
    if failure is not None:
        raise failure


def session() -> SparkSession:
    return local_session("killed", cores=2, settings=QUICK)


def session_on(master: str) -> SparkSession:
    prepare(os.environ)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName("on a cluster")
    for name, value in {**QUICK, **ON_A_CLUSTER}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


if __name__ == "__main__":
    main(*sys.argv[1:])
