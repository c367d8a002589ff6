"""Keeps a topic as Parquet, partitioned by day."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from orbitmq.spark.pipelines.optionkinds import Zone
from orbitmq.spark.pipelines.reading import Group, Most, Start, Tags, Topic, named_after, wanted

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.streaming.query import StreamingQuery

    from orbitmq.spark.pipelines.run import Run

_UTC = Zone("UTC")


def archive(
    run: Run,
    *,
    topic: Topic,
    path: Annotated[Path | str, "The folder or address that the files are written to."],
    group: Group = None,
    tags: Tags = None,
    start: Start = "earliest",
    zone: Annotated[Zone, "Where a day begins at midnight."] = _UTC,
    by: Annotated[
        Literal["stored", "born"], "Whether the day is that of storing or of sending."
    ] = "stored",
    bodies: Annotated[Literal["binary", "text"], "What bodies become."] = "binary",
    max_per_batch: Most = None,
) -> StreamingQuery:
    """Keep a topic as Parquet, partitioned by day.

    Every message is kept once, whatever is restarted: Spark's log says which files count. All
    columns of the source are kept, so `backfill` can send them again.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # as everybody calls them

    messages = run.stream(
        topic,
        group=named_after("archive", topic, group),
        **wanted(start, tags, max_per_batch),
    )
    if bodies == "text":
        messages = messages.withColumn("body", F.col("body").cast("string"))
    moment = F.col("storeTimestamp" if by == "stored" else "bornTimestamp")
    writer = (
        messages.withColumn("day", day(moment, zone))
        .writeStream.format("parquet")
        .option("path", str(path))
        .partitionBy("day")
    )
    return run.start(writer)


def day(moment: Column, zone: str) -> Column:
    """The day of a moment in a zone, whatever the zone of the session."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    local = F.unix_seconds(F.from_utc_timestamp(moment, zone))
    return F.date_from_unix_date(F.floor(local / 86_400).cast("int"))
