"""The built-in pipelines: archive, backfill, statistics, transform and triage."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from orbitmq.client.admin.admin import Admin
from orbitmq.client.admin.deadletters import UNKNOWN_REASON, DeadLetterFilter, ResendResult
from orbitmq.clock import Clock, SystemClock
from orbitmq.parsing import Duration, Zone, duration
from orbitmq.spark.consuming.batches import parallelism
from orbitmq.spark.pipelines.definition import (
    LETTERS,
    PRESENT,
    Definition,
    Group,
    Most,
    PipelineRefused,
    Start,
    Tags,
    Topic,
    named_after,
    wanted,
)
from orbitmq.spark.write import WRITABLE

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, Row, SparkSession
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

    Every message is stored once, also after restarts: Spark's log says which files count. All
    columns of the source are stored, so `backfill` can send them again.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # the usual name

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
    """The day of a moment in a zone, independent of the session's zone."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    local = F.unix_seconds(F.from_utc_timestamp(moment, zone))
    return F.date_from_unix_date(F.floor(local / 86_400).cast("int"))


# backfill

#: Messages per second of one task; a higher rate is shared by several.
_RATE_OF_TASK: Final = 20_000.0
#: The old place of a message.
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
    ordering_key: Annotated[str | None, "An SQL expression: equal ones stay in order."] = None,
    files_per_batch: Annotated[int, "Files that are sent before progress is stored."] = 10,
) -> StreamingQuery:
    """Send the rows of Parquet files to a topic, at a given rate; ends when all are sent.

    Messages of `archive` are sent unchanged: body, tags, keys and properties. Progress is stored
    for each batch of files. A repeated batch has the same unique ids, even at another rate and on
    other machines, so that consumers can recognise duplicates. The next run sends files that were
    added.
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
        rows, run.checkpoint(run.name), body=body, keys=keys, tags=tags, ordering_key=ordering_key
    )
    if rate is not None:
        messages = paced(messages, rate, most_tasks=parallelism(run.spark))
    writer = messages.writeStream.format("rocketmq").options(**run.options).option("topic", into)
    return run.start(writer, once=True)


def _messages(rows: DataFrame, checkpoint: str, **expressions: str | None) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # the usual name

    columns: dict[str, Column] = {
        name: F.col(name) for name in rows.columns if name in WRITABLE and name not in _OLD_PLACE
    }
    if "body" not in columns:
        # Any table, whose columns have other meanings.
        columns = {"body": F.to_json(F.struct("*"))}
    for name, expression in expressions.items():
        if expression:
            column = "orderingKey" if name == "ordering_key" else name
            columns[column] = F.expr(expression)
            if column != "body":
                columns[column] = columns[column].cast("string")
    columns["identity"] = _place(rows, checkpoint)
    return rows.select(*(column.alias(name) for name, column in columns.items()))


def _place(rows: DataFrame, checkpoint: str) -> Column:
    """The identity of a row by file and index, independent of tasks.

    A rewritten file is another one, and so is the same file in another run.
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
    """The same rows at most at a rate per second, all tasks together."""
    tasks = max(1, min(most_tasks, math.ceil(rate / _RATE_OF_TASK)))
    return frame.coalesce(tasks).mapInArrow(_slowly(rate / tasks), frame.schema)


def _slowly(rate: float) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def pace(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = RateLimit(rate, SystemClock())
        # A tenth of a second in one batch.
        portion = max(1, int(rate / 10))
        for batch in batches:
            for at in range(0, batch.num_rows, portion):
                piece = batch.slice(at, portion)
                held.take(piece.num_rows)
                yield piece

    return pace


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

    A window ends when a message of any queue was read that is `late` younger than its end. Messages
    of a queue that lags further behind (its broker was away, or `max_per_batch` limits old messages
    of several topics) are in no result: they count as `late` in the progress, with a warning. The
    first batch of a new checkpoint has no such messages.
    """
    if (path is None) == (into is None):
        raise PipelineRefused("give one of the options path and into: where the results go")
    messages = run.stream(
        topic,
        group=named_after("statistics", topic, group),
        **wanted(start, tags, max_per_batch),
    )
    length, patience = duration(window, "window"), duration(late, "late")
    results = windowed(messages, length, patience)
    if path is not None:
        writer = results.writeStream.format("parquet").option("path", str(path))
        return run.start(writer.outputMode("append"))
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # the usual name

    bodies = results.select(F.to_json(F.struct("*")).alias("body"), F.col("topic").alias("keys"))
    options = {**run.options, "topic": into or ""}

    def send(batch: DataFrame, _number: int) -> None:
        batch.write.format("rocketmq").options(**options).mode("append").save()

    # Spark refuses Python sinks in update mode, but not batch writes of the changed rows.
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


VIEW = "messages"


def transform(
    run: Run,
    *,
    topic: Topic,
    into: Annotated[str, "The topic that results are sent to.", PRESENT],
    sql: Annotated[
        str, "A query FROM messages: the columns of the source, text (the body), and value."
    ],
    schema: Annotated[
        str | None, "Bodies are JSON of this form, as in 'order STRING, cents BIGINT': value."
    ] = None,
    group: Group = None,
    tags: Tags = None,
    start: Start = "earliest",
    max_per_batch: Most = None,
) -> StreamingQuery:
    """Send what a SQL query makes of a topic to another topic.

    A result with a column `body` is sent as it is, with the columns tags, keys, properties,
    orderingKey, delayLevel, deliverAt and identity as it has them; of any other result each row
    becomes a JSON object. At least once: a batch that is repeated has the same unique ids, if its
    rows come in the same partitions and order; those of a result with `identity` always.
    """
    messages = run.stream(
        topic,
        group=named_after("transform", topic, group),
        **wanted(start, tags, max_per_batch),
    )
    results = sendable(queried(run.spark, with_value(messages, schema), sql))
    writer = results.writeStream.format("rocketmq").options(**run.options).option("topic", into)
    return run.start(writer)


def with_value(messages: DataFrame, schema: str | None) -> DataFrame:
    """Messages with their bodies as text, and with a schema as values."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # the usual name

    found = messages.withColumn("text", F.col("body").cast("string"))
    return found if schema is None else found.withColumn("value", F.from_json("text", schema))


def queried(spark: SparkSession, messages: DataFrame, sql: str) -> DataFrame:
    """The result of a query over the view `messages`, which exists only during planning."""
    if spark.catalog.tableExists(VIEW):
        raise PipelineRefused(
            f"this session has a table or view named {VIEW!r} already, which is how the query "
            "names what it reads; drop or rename it"
        )
    messages.createTempView(VIEW)
    try:
        return spark.sql(sql)
    finally:
        spark.catalog.dropTempView(VIEW)


def sendable(results: DataFrame) -> DataFrame:
    """Rows as messages: as they are when they have a body, else as JSON."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    if "body" in results.columns:
        kept = [name for name in results.columns if name in WRITABLE and name != "topic"]
        return results.select(*kept)
    return results.select(F.to_json(F.struct("*")).alias("body"))


# triage

#: Dead letters whose ids the driver holds at most.
MOST_REPLAYED: Final = 1_000_000
_LONGEST_SAMPLE: Final = 200
_SCHEMA: Final = (
    "reason STRING, topic STRING, letters BIGINT, attempts INT, firstAt TIMESTAMP, "
    "lastAt TIMESTAMP, samples ARRAY<STRUCT<msgId: STRING, keys: STRING, text: STRING>>, "
    "exported BIGINT, sent BIGINT, alreadySent BIGINT, failed BIGINT, problem STRING"
)


def triage(
    run: Run,
    *,
    group: Annotated[str, "The group whose dead letters these are.", LETTERS],
    where: Annotated[
        str | None,
        "Only letters for which this SQL condition holds: reason, topic, tags, keys, attempts, "
        "sentAt, storedAt, text (the body), properties['name'].",
    ] = None,
    sample: Annotated[int, "Letters of each reason that are shown."] = 3,
    export: Annotated[Path | str | None, "Write the letters to this new folder or address."] = None,
    form: Annotated[Literal["parquet", "json"], "What they are exported as."] = "parquet",
    replay: Annotated[
        Literal["no", "retry", "origin"],
        "Send the letters again: retry: only this group gets them; origin: every group does.",
    ] = "no",
    rate: Annotated[float | None, "Letters per second at most that are sent again."] = None,
    limit: Annotated[int | None, "Letters at most that are sent again."] = None,
    again: Annotated[bool, "Send also letters that were sent again before."] = False,
) -> DataFrame:
    """Group dead letters by reason, show samples, export them, send them again.

    Returns a row for each reason and topic: the number of letters, the most attempts, the times of
    the first and the last, samples, and the results of sending again. Letters that were sent again
    before are left out, so that an interrupted run can be repeated.
    """
    if sample < 0:
        raise PipelineRefused(f"option sample must be 0 or more, got {sample!r}")
    letters = _letters(run, group, where).persist()
    try:
        exported = _export(letters, export, form) if export is not None else {}
        piles = _piles(letters, sample)
        outcomes: Mapping[tuple[str, str], Counter[str]] = {}
        problems: Mapping[tuple[str, str], str] = {}
        if replay != "no":
            outcomes, problems = _replay(
                run, letters, group, to=replay, rate=rate, limit=limit, again=again
            )
    finally:
        letters.unpersist()
    rows = []
    for pile in piles:
        key = (pile["reason"], pile["topic"])
        became = outcomes.get(key, Counter())
        rows.append(
            (
                *pile,
                exported.get(key, 0),
                became[ResendResult.SENT],
                became[ResendResult.ALREADY_SENT],
                became[ResendResult.FAILED],
                problems.get(key),
            )
        )
    return run.spark.createDataFrame(rows, _SCHEMA)


def _letters(run: Run, group: str, where: str | None) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # the usual name

    from orbitmq.spark.consuming.returns import dead_letters  # noqa: PLC0415  # needs Spark

    access = run.access
    letters = (
        dead_letters(
            run.spark,
            group,
            name_server=access.name_servers,
            credentials=access.credentials,
            tls=access.tls,
        )
        .withColumn("reason", F.coalesce("reason", F.lit(UNKNOWN_REASON)))
        .withColumn("text", F.col("body").cast("string"))
    )
    return letters if where is None else letters.where(where)


def _piles(letters: DataFrame, sample: int) -> list[Row]:
    from pyspark.sql import Window  # noqa: PLC0415
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    # By a hash: neither the newest nor the oldest, and the same ones each time.
    order = Window.partitionBy("reason", "topic").orderBy(F.xxhash64("msgId"))
    shown = F.struct("msgId", "keys", F.substring("text", 1, _LONGEST_SAMPLE).alias("text"))
    return list(
        letters.withColumn("place", F.row_number().over(order))
        .groupBy("reason", "topic")
        .agg(
            F.count("*").alias("letters"),
            F.max("attempts").alias("attempts"),
            F.min("storedAt").alias("firstAt"),
            F.max("storedAt").alias("lastAt"),
            F.collect_list(F.when(F.col("place") <= sample, shown)).alias("samples"),
        )
        .orderBy(F.desc("letters"), "reason", "topic")
        .collect()
    )


def _export(letters: DataFrame, path: Path | str, form: str) -> dict[tuple[str, str], int]:
    letters.write.mode("errorifexists").format(form).save(str(path))
    counted = letters.groupBy("reason", "topic").count().collect()
    return {(row["reason"], row["topic"]): row["count"] for row in counted}


def _replay(
    run: Run,
    letters: DataFrame,
    group: str,
    *,
    to: str,
    rate: float | None,
    limit: int | None,
    again: bool,
) -> tuple[dict[tuple[str, str], Counter[str]], dict[tuple[str, str], str]]:
    """Send letters again one by one, as the command and the console do; returns the results."""
    piles = {
        row["msgId"]: (row["reason"], row["topic"])
        for row in letters.select("msgId", "reason", "topic").limit(MOST_REPLAYED + 1).collect()
    }
    if len(piles) > MOST_REPLAYED:
        raise PipelineRefused(
            f"more than {MOST_REPLAYED:,} letters cannot be sent again in one run; "
            "choose some with the option where"
        )
    outcomes: dict[tuple[str, str], Counter[str]] = {}
    problems: dict[tuple[str, str], str] = {}
    if not piles:
        return outcomes, problems
    with Admin(client=run.access.settings()) as admin:
        for outcome in admin.dead_letters.resending(
            group,
            DeadLetterFilter(ids=frozenset(piles)),
            to=to,
            rate=rate,
            limit=limit,
            again=again,
        ):
            message = outcome.letter.message
            pile = piles.get(message.msg_id) or piles.get(outcome.letter.id)
            if pile is None:
                continue
            outcomes.setdefault(pile, Counter())[outcome.result] += 1
            if outcome.problem is not None:
                problems[pile] = outcome.problem
    return outcomes, problems


class RateLimit:
    """Limits a thread to a rate.

    When `take(n)` returns, at most `rate * seconds` were taken since the first call, plus one
    portion. Unused time is lost: there are no bursts after a pause.
    """

    def __init__(
        self, rate: float, clock: Clock, wait: Callable[[float], object] | None = None
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._wait = wait or threading.Event().wait
        self._next_at: float | None = None

    def take(self, number: int) -> None:
        """Wait until `number` more may be sent."""
        now = self._clock.monotonic()
        due = now if self._next_at is None else self._next_at
        if due > now:
            self._wait(due - now)
        self._next_at = max(due, now) + number / self._rate


READY: Final[Mapping[str, Callable[..., Any]]] = {
    "archive": archive,
    "triage": triage,
    "backfill": backfill,
    "transform": transform,
    "statistics": statistics,
}


def ready(name: str) -> Definition:
    """The built-in pipeline of a name in `READY`."""
    return Definition.of(READY[name], name)
