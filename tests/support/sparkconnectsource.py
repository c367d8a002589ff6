"""Reads, streams and writes through Spark Connect, as a process of its own.

    python -m tests.support.sparkconnectsource NAME_SERVER TOPIC COPY FOLDER

Prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from orbitmq.spark.pipelines.run import Run
from orbitmq.spark.session import prepare
from orbitmq.spark.streamprogress import ProgressListener, StreamProgress, progress
from orbitmq.spark.tables import register_tables
from tests.support.sparking import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def main(name_server: str, topic: str, copy: str, folder: str) -> None:
    prepare(os.environ)
    from pyspark.sql import SparkSession

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Spark's own
        spark = SparkSession.builder.remote("local[2]").getOrCreate()
    source = {"nameServer": name_server, "subscribe": topic}
    frame = spark.read.format("rocketmq").options(**source).load()
    frame.select("body").write.format("rocketmq").options(nameServer=name_server, topic=copy).mode(
        "append"
    ).save()
    reports: list[StreamProgress] = []
    listener = ProgressListener(reports.append)
    spark.streams.addListener(listener)
    query = (
        spark.readStream.format("rocketmq")
        .options(**source, startingOffsets="earliest", group="connected")
        .load()
        .writeStream.format("parquet")
        .queryName("files")
        .option("path", str(Path(folder) / "out"))
        .option("checkpointLocation", str(Path(folder) / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(60)
    until(lambda: sum(each.num_input_rows for each in reports) >= 500, "the rows are reported")
    last = progress(query)
    spark.streams.removeListener(listener)
    run = Run(spark, name_server=name_server, checkpoint=str(Path(folder) / "runs"), once=True)

    def both(batch: DataFrame, _number: int) -> None:
        """In a process of the server, with the session of the batch and no other."""
        rows = batch.union(run.read(topic)).count()
        (Path(folder) / f"together-{rows}").touch()

    run.start(
        run.stream(topic, startingOffsets="latest").writeStream.foreachBatch(both)
    ).awaitTermination(60)
    said = {
        "kind": type(spark).__module__,
        "rows": frame.count(),
        "reported": sum(topic.num_input_rows or 0 for each in reports for topic in each.topics),
        "last": None if last is None else [(each.topic, each.lag) for each in last.topics],
        **by_sql(spark, name_server, topic),
        "archived": in_archive(spark, Path(folder) / "archive"),
    }
    print(json.dumps(said), flush=True)
    spark.stop()


def in_archive(spark: SparkSession, archive: Path) -> int:
    """The messages up to an offset, which are read without a name server or a broker."""
    ends = json.dumps({"orders": {"broker-a:0": 10, "broker-a:1": 10}})
    given = {"nameServer": "127.0.0.1:1", "subscribe": "orders", "archive": str(archive)}
    frame = spark.read.format("rocketmq").options(**given, endingOffsets=ends).load()
    return int(frame.count())


def by_sql(spark: SparkSession, name_server: str, topic: str) -> dict[str, object]:
    """What SQL finds in a view and in tables, and whether errors tell of the latter."""
    options = f"USING rocketmq OPTIONS (nameServer '{name_server}', subscribe '{topic}')"
    spark.sql(f"CREATE TEMPORARY VIEW incoming {options}")
    (found,) = spark.sql("SELECT COUNT(*) AS rows FROM incoming").collect()
    from pyspark.errors import AnalysisException

    # With columns of its own, the source is not asked for any.
    spark.sql(f"CREATE TABLE unasked (body STRING) {options}")
    told = []
    for statement in ("SELECT * FROM unasked", "INSERT INTO unasked VALUES ('x')"):
        try:
            spark.sql(statement).collect()
        except AnalysisException as error:
            told.append("without columns" in str(error))
    spark.sql(f"CREATE TABLE asked {options.replace('subscribe', 'topic')}")
    in_table = [spark.table("asked").count()]
    spark.sql("INSERT INTO asked (body) VALUES (CAST('x' AS BINARY))")
    (again,) = spark.sql("SELECT COUNT(*) AS rows FROM asked").collect()
    in_table.append(again.rows)
    of_cluster = register_tables(spark, name_server=name_server, topics=[topic])
    in_table += [spark.table(f"rocketmq.{table}").count() for table in of_cluster]
    return {"in_view": found.rows, "told": told, "in_table": in_table}


if __name__ == "__main__":
    main(*sys.argv[1:])
