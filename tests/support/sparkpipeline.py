"""A streaming job as a process of its own: topic to Parquet files, until it is ended.

    python -m tests.support.sparkpipeline NAME_SERVER TOPIC GROUP FOLDER

Prints a line for every batch.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from orbitmq.spark.session import local_session


def main(name_server: str, topic: str, group: str, folder: str) -> None:
    spark = local_session(
        "killed",
        cores=2,
        settings={
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.log.level": "ERROR",
        },
    )
    query = (
        spark.readStream.format("rocketmq")
        .option("nameServer", name_server)
        .option("subscribe", topic)
        .option("group", group)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", "100")
        .option("minPartitions", "2")
        .load()
        .writeStream.format("parquet")
        .option("path", str(Path(folder) / "out"))
        .option("checkpointLocation", str(Path(folder) / "checkpoint"))
        .start()
    )
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    last = -1
    while query.isActive and not is_over.wait(0.02):
        progress = query.lastProgress
        if progress is not None and progress.batchId != last and progress.numInputRows:
            last = progress.batchId
            print(f"batch {last}", flush=True)
    failure = query.exception()
    query.stop()
    spark.stop()
    if failure is not None:
        raise failure


if __name__ == "__main__":
    main(*sys.argv[1:])
