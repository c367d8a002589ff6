"""Messages that failed, as DataFrames: what waits for its next attempt, and what was given up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from orbitmq.client.errors import NoRoute
from orbitmq.client.names import check_group, dead_letter_topic, retry_topic
from orbitmq.client.rangecluster import RangeCluster
from orbitmq.message.wellknown import (
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
)
from orbitmq.spark.consuming.reaching import options_of, reach

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from orbitmq.client.rangeaccess import ClientTls, Credentials, RangeAccess

#: The property in which OrbitMQ's brokers and clients keep what went wrong.
_REASON: Final = "DLQ_REASON"


def dead_letters(
    spark: SparkSession,
    group: str,
    *,
    name_server: str | Iterable[str] | None = None,
    credentials: Credentials | None = None,
    tls: ClientTls | None = None,
) -> DataFrame:
    """The dead letters of a group; empty as long as it has none.

    Columns: `topic` and `msgId` of the message that was sent, `originMsgId` (where it was stored),
    `attempts`, `reason`, `sentAt`, `storedAt` (when it was given up), `body`, `tags`, `keys`,
    `properties`, and where the copy is: `brokerName`, `queueId`, `queueOffset`.
    """
    topic = dead_letter_topic(check_group(group))
    return _failed(spark, topic, reach(name_server, credentials, tls), group)


def retries(
    spark: SparkSession,
    group: str,
    *,
    name_server: str | Iterable[str] | None = None,
    credentials: Credentials | None = None,
    tls: ClientTls | None = None,
) -> DataFrame:
    """The copies of failed messages that became due for another attempt, as `dead_letters`.

    `attempts` are those made before. Copies that still wait for their time are not in it.
    """
    topic = retry_topic(check_group(group))
    return _failed(spark, topic, reach(name_server, credentials, tls), group)


def _failed(spark: SparkSession, topic: str, access: RangeAccess, group: str) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # as everybody calls them

    frame = _read(spark, topic, access, group)
    properties = F.col("properties")

    def first_of(*names: str) -> list[Column]:
        return [properties.getItem(name) for name in names]

    return frame.select(
        F.coalesce(*first_of(DLQ_ORIGIN_TOPIC, RETRY_TOPIC), F.col("topic")).alias("topic"),
        F.col("msgId"),
        F.coalesce(*first_of(DLQ_ORIGIN_MESSAGE_ID, ORIGIN_MESSAGE_ID)).alias("originMsgId"),
        F.col("reconsumeTimes").alias("attempts"),
        properties.getItem(_REASON).alias("reason"),
        F.col("bornTimestamp").alias("sentAt"),
        F.col("storeTimestamp").alias("storedAt"),
        *map(F.col, ("body", "tags", "keys", "properties")),
        *map(F.col, ("brokerName", "queueId", "queueOffset")),
    )


def _read(spark: SparkSession, topic: str, access: RangeAccess, group: str) -> DataFrame:
    """The topic; without rows when nobody has made it yet, because nothing has failed."""
    from orbitmq.spark.schema import full_schema  # noqa: PLC0415  # only where Spark is

    with RangeCluster(access, group) as cluster:
        try:
            cluster.queues([topic])
        except NoRoute:
            return spark.createDataFrame([], full_schema())
    # As the group itself: where there are accounts, others may not read its failures.
    options = {**options_of(access), "subscribe": topic, "group": group}
    return spark.read.format("rocketmq").options(**options).load()
