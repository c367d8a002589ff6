"""What tests of the Spark source share."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pyarrow import parquet

from tests.support.command import ROOT, importing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

#: For anything that Spark does; its first batch alone may take many seconds.
DEADLINE = 90


class Cluster(Protocol):
    """Brokers of any kind."""

    @property
    def name_server(self) -> str: ...


def read(spark: SparkSession, cluster: Cluster, topic: str, **options: str) -> DataFrame:
    """A batch read of a topic."""
    reader = spark.read.format("rocketmq").option("nameServer", cluster.name_server)
    schema = options.pop("schema", None)
    if schema:
        reader = reader.schema(schema)
    given = options if topic == "" else {"subscribe": topic, **options}
    return reader.options(**given).load()


def stream(spark: SparkSession, cluster: Cluster, topic: str, **options: str) -> DataFrame:
    """A stream of a topic."""
    reader = spark.readStream.format("rocketmq").option("nameServer", cluster.name_server)
    return reader.option("subscribe", topic).options(**options).load()


def numbers(frame: DataFrame) -> list[int]:
    """The bodies of messages that are numbers, in ascending order."""
    return sorted(int(bytes(row.body)) for row in frame.select("body").collect())


def into_files(
    frame: DataFrame, folder: Path, *, available_now: bool = False, **trigger: Any
) -> StreamingQuery:
    """Write a stream to Parquet files, each message once."""
    writer = (
        frame.writeStream.format("parquet")
        .option("path", str(folder / "out"))
        .option("checkpointLocation", str(folder / "checkpoint"))
    )
    if available_now:
        writer = writer.trigger(availableNow=True)
    elif trigger:
        writer = writer.trigger(**trigger)
    return writer.start()


def into_topic(frame: DataFrame, cluster: Cluster, checkpoint: Path, **options: str) -> None:
    """Write what a stream finds to topics, and end."""
    writer = frame.writeStream.format("rocketmq").option("nameServer", cluster.name_server)
    _to_the_end(writer.options(**options), checkpoint)


def _to_the_end(writer: DataStreamWriter, checkpoint: Path, **trigger: bool) -> None:
    writer = writer.option("checkpointLocation", str(checkpoint))
    query = writer.trigger(**(trigger or {"availableNow": True})).start()
    assert query.awaitTermination(DEADLINE)


def run_over(frame: DataFrame, folder: Path) -> StreamingQuery:
    """Read what is there into files, and end."""
    query = into_files(frame, folder, available_now=True)
    assert query.awaitTermination(DEADLINE)
    return query


def in_files(folder: Path, column: str = "body") -> list[int]:
    """The numbers that a stream has written and committed, in ascending order.

    Spark's log of the files says which of them count; half-written ones lie beside them.
    """
    paths = set()
    for entry in (folder / "out" / "_spark_metadata").glob("[0-9]*"):
        for line in entry.read_text().splitlines()[1:]:
            paths.add(json.loads(line)["path"].removeprefix("file://"))
    tables = [parquet.read_table(path, columns=[column]) for path in sorted(paths)]
    return sorted(int(value) for table in tables for value in table.column(column).to_pylist())


def run_module(
    module: str, *words: str, cwd: Path = ROOT, text: str = "", without: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a module of `tests.support` to its end, which must be a good one.

    `without` are variables of the environment that it does not get.
    """
    env = {name: value for name, value in importing().items() if name not in without}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}", *words],
        cwd=cwd,
        env=env,
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def until(condition: Callable[[], object], what: str, deadline: float = DEADLINE) -> None:
    """Return when the condition holds; fail when it does not within the deadline."""
    end = time.monotonic() + deadline
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {deadline:g} s: {what}"
        pause.wait(0.02)


def batches(query: StreamingQuery) -> list[tuple[int, int]]:
    """The batches that a query has made: number and rows."""
    return [(each.batchId, each.numInputRows) for each in query.recentProgress]
