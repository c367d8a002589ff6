"""Counts, sizes and delays of a topic, by windows of time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from orbitmq.client.durations import Duration, positive_seconds
from orbitmq.spark.pipelines.errors import PipelineRefused
from orbitmq.spark.pipelines.reading import (
    PRESENT,
    Group,
    Most,
    Start,
    Tags,
    Topic,
    named_after,
    wanted,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from orbitmq.spark.pipelines.run import Run


def statistics(
    run: Run,
    *,
    topic: Topic,
    path: Annotated[
        Path | str | None, "A folder or address for Parquet: each window once, when it is over."
    ] = None,
    into: Annotated[
        str | None, "A topic for JSON: each window again and again, as it grows.", PRESENT
    ] = None,
    window: Annotated[Duration, "How long a window is."] = 60.0,
    late: Annotated[Duration, "How long a window waits for messages that come late."] = 10.0,
    group: Group = None,
    tags: Tags = None,
    start: Start = "earliest",
    max_per_batch: Most = None,
) -> StreamingQuery:
    """Count the messages of a topic by windows of the time at which they were stored.

    For every window, topic and tag: messages, bytes, the mean and the longest time from sending
    to storing, in seconds, and the messages that were retries. Give `path`, `into`, but not both.

    A window is over when a message was read, from any queue, that is `late` younger than its end.
    Messages of a queue that lags further behind (its broker was away, or `max_per_batch` cuts old
    messages of several topics) come too late and are in no result: they are told of as `late` in
    the progress, with a warning. The first batch of a new checkpoint has no such messages.
    """
    if (path is None) == (into is None):
        raise PipelineRefused("give one of the options path and into: where the results go")
    messages = run.stream(
        topic,
        group=named_after("statistics", topic, group),
        **wanted(start, tags, max_per_batch),
    )
    length, patience = positive_seconds(window, "window"), positive_seconds(late, "late")
    results = windowed(messages, length, patience)
    if path is not None:
        writer = results.writeStream.format("parquet").option("path", str(path))
        return run.start(writer.outputMode("append"))
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # as everybody calls them

    bodies = results.select(F.to_json(F.struct("*")).alias("body"), F.col("topic").alias("keys"))
    options = {**run.options, "topic": into or ""}

    def send(batch: DataFrame, _number: int) -> None:
        batch.write.format("rocketmq").options(**options).mode("append").save()

    # Spark lets no sink that is written in Python take rows that change; a batch of them it does.
    return run.start(bodies.writeStream.outputMode("update").foreachBatch(send))


def windowed(messages: DataFrame, length: float, late: float) -> DataFrame:
    """The numbers of each window; of a stream or of a batch."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    delay = F.col("storeTimestamp").cast("double") - F.col("bornTimestamp").cast("double")
    return (
        messages.withWatermark("storeTimestamp", f"{round(late * 1000)} milliseconds")
        .groupBy(
            F.window("storeTimestamp", f"{round(length * 1000)} milliseconds").alias("window"),
            "topic",
            "tags",
        )
        .agg(
            F.count("*").alias("messages"),
            F.sum(F.octet_length("body")).alias("bytes"),
            F.avg(delay).alias("meanDelay"),
            F.max(delay).alias("longestDelay"),
            F.count_if(F.col("reconsumeTimes") > 0).alias("retries"),
        )
        .select(
            F.col("window.start").alias("windowStart"),
            F.col("window.end").alias("windowEnd"),
            *("topic", "tags", "messages", "bytes", "meanDelay", "longestDelay", "retries"),
        )
    )
