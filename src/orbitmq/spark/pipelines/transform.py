"""Topic to topic, with a SQL query between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

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
from orbitmq.spark.writeschema import WRITABLE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from orbitmq.spark.pipelines.run import Run

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
    shardingKey, delayLevel, deliverAt and identity as it has them; of any other result each row
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
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # as everybody calls them

    found = messages.withColumn("text", F.col("body").cast("string"))
    return found if schema is None else found.withColumn("value", F.from_json("text", schema))


def queried(spark: SparkSession, messages: DataFrame, sql: str) -> DataFrame:
    """What a query over the view `messages` gives; the view is there only while it is planned."""
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
