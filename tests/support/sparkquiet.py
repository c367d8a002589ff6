"""A local session that does a bit of everything, as a process whose error stream is looked at.

    python -m tests.support.sparkquiet NAME_SERVER TOPIC COPY FOLDER

What it writes to the error stream after `FAILING` is about a write that fails.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.errors import PythonException

from orbitmq.spark.session import local_session
from tests.support.sparking import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FAILING = "now something is wrong"


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
    outlast_workers(spark)
    print(FAILING, file=sys.stderr, flush=True)
    rows_to_nowhere = spark.sql("SELECT 'x' AS body, 'missing' AS topic")
    with contextlib.suppress(PythonException):
        rows_to_nowhere.write.format("rocketmq").options(**at).mode("append").save()
    spark.stop()


def outlast_workers(spark: SparkSession) -> None:
    """Return when Java has closed all workers: it does so when they had no work for a minute."""
    jvm = spark._jvm
    assert jvm is not None
    java = jvm.java.lang.ProcessHandle.current()
    until(lambda: java.descendants().count() == java.children().count(), "only daemons are left")


if __name__ == "__main__":
    main(*sys.argv[1:])
