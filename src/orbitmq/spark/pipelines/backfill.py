"""Parquet files into a topic, at a given rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from orbitmq.clock import SystemClock
from orbitmq.spark.consuming.job import parallelism
from orbitmq.spark.pipelines.errors import PipelineRefused
from orbitmq.spark.pipelines.pacing import Pace
from orbitmq.spark.pipelines.reading import PRESENT
from orbitmq.spark.writeschema import WRITABLE

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from orbitmq.spark.pipelines.run import Run

#: What one task sends per second without trouble; a higher rate is shared by several.
_RATE_OF_TASK: Final = 20_000.0
#: Where a message was, which is not where it goes.
_OLD_PLACE: Final = ("topic", "queueId", "brokerName")


def backfill(
    run: Run,
    *,
    path: Annotated[Path | str, "The folder or address of the Parquet files."],
    into: Annotated[str, "The topic that rows are sent to.", PRESENT],
    rate: Annotated[float | None, "Messages per second at most; no limit by default."] = None,
    where: Annotated[str | None, "Only rows for which this SQL condition holds."] = None,
    body: Annotated[
        str, "An SQL expression for the body; by default the column body, else the row as JSON."
    ] = "",
    keys: Annotated[str | None, "An SQL expression for the keys."] = None,
    tags: Annotated[str | None, "An SQL expression for the tag."] = None,
    sharding_key: Annotated[str | None, "An SQL expression: equal ones stay in order."] = None,
    files_per_batch: Annotated[int, "Files that are sent before progress is stored."] = 10,
) -> StreamingQuery:
    """Send the rows of Parquet files to a topic, at a given rate; ends when all are sent.

    What `archive` kept is sent as it was: body, tags, keys and properties. Progress is kept for
    each batch of files. A batch that is repeated has the same unique ids, at another rate and on
    other machines too, so that a consumer can recognise what it has already. Files that are added
    later are sent by the next run.
    """
    if rate is not None and not rate > 0:
        raise PipelineRefused(f"option rate must be above 0, got {rate!r}")
    if files_per_batch < 1:
        raise PipelineRefused(f"option files_per_batch must be above 0, got {files_per_batch!r}")
    schema = run.spark.read.parquet(str(path)).schema
    rows = (
        run.spark.readStream.schema(schema)
        .option("maxFilesPerTrigger", files_per_batch)
        .parquet(str(path))
    )
    if where is not None:
        rows = rows.where(where)
    messages = _messages(
        rows, run.checkpoint(run.name), body=body, keys=keys, tags=tags, sharding_key=sharding_key
    )
    if rate is not None:
        messages = paced(messages, rate, most_tasks=parallelism(run.spark))
    writer = messages.writeStream.format("rocketmq").options(**run.options).option("topic", into)
    return run.start(writer, once=True)


def _messages(rows: DataFrame, checkpoint: str, **expressions: str | None) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # as everybody calls them

    columns: dict[str, Column] = {
        name: F.col(name) for name in rows.columns if name in WRITABLE and name not in _OLD_PLACE
    }
    if "body" not in columns:
        # Somebody's table, whose columns mean what they mean there.
        columns = {"body": F.to_json(F.struct("*"))}
    for name, expression in expressions.items():
        if expression:
            column = "shardingKey" if name == "sharding_key" else name
            columns[column] = F.expr(expression)
            if column != "body":
                columns[column] = columns[column].cast("string")
    columns["identity"] = _place(rows, checkpoint)
    return rows.select(*(column.alias(name) for name, column in columns.items()))


def _place(rows: DataFrame, checkpoint: str) -> Column:
    """Which row of which file this is: the same however files are dealt out to tasks.

    A file that was written anew is another one, and so is the same file in another run, which
    somebody wants to have sent again.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    file = rows.metadataColumn("_metadata")
    modified = F.unix_micros(file["file_modification_time"])
    return F.concat_ws(
        "\n",
        F.lit(checkpoint),
        file["file_path"],
        modified.cast("string"),
        file["row_index"].cast("string"),
    )


def paced(frame: DataFrame, rate: float, *, most_tasks: int) -> DataFrame:
    """The same rows, that come no faster than so many per second, all tasks together."""
    tasks = max(1, min(most_tasks, math.ceil(rate / _RATE_OF_TASK)))
    return frame.coalesce(tasks).mapInArrow(_slowly(rate / tasks), frame.schema)


def _slowly(rate: float) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def pace(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = Pace(rate, SystemClock())
        # A tenth of a second at once: even enough, and few batches.
        portion = max(1, int(rate / 10))
        for batch in batches:
            for at in range(0, batch.num_rows, portion):
                piece = batch.slice(at, portion)
                held.take(piece.num_rows)
                yield piece

    return pace
