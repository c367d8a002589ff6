"""PySpark snippets: what the page shows, in a notebook, with the filter filled in."""

from __future__ import annotations

from orbitmq.client.names import dead_letter_topic


def dead_letter_snippet(name_servers: str, group: str, reason: str | None) -> str:
    """Reads the dead letters of a group; texts are Python literals, whatever is in them."""
    condition = (
        ""
        if reason is None
        else f"""letters = letters.where(
    F.col("properties")["DLQ_REASON"].startswith({reason!r})
)
"""
    )
    return f"""from pyspark.sql import SparkSession, functions as F

spark = SparkSession.builder.getOrCreate()
letters = (
    spark.read.format("rocketmq")
    .option("nameServer", {name_servers!r})
    .option("subscribe", {dead_letter_topic(group)!r})
    .load()
)
{condition}letters.select(
    F.col("body").cast("string").alias("body"),
    F.col("properties")["DLQ_REASON"].alias("reason"),
    "storeTimestamp",
).show(20, truncate=80)
"""
