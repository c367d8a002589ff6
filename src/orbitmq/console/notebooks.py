"""PySpark snippets: what the page shows, in a notebook, with the filter filled in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from orbitmq.client.admin import DeadLetterFilter
from orbitmq.client.admin.deadletters import LONGEST_NAME, UNKNOWN_REASON
from orbitmq.client.admin.moments import moment
from orbitmq.clock import milliseconds


def dead_letter_snippet(
    name_servers: Iterable[str], group: str, where: DeadLetterFilter, pile: str | None = None
) -> str:
    """Reads the dead letters of a group; texts are Python literals, whatever is in them."""
    conditions = "".join(
        f"letters = letters.where({each})\n" for each in _conditions(where, pile or where.pile)
    )
    return f"""import pyspark_orbitmq
from orbitmq.spark import dead_letters
from pyspark.sql import SparkSession, functions as F

spark = SparkSession.builder.getOrCreate()
spark.dataSource.register(pyspark_orbitmq.DefaultSource)
letters = dead_letters(spark, {group!r}, name_server={";".join(name_servers)!r})
{conditions}letters.select(
    "storedAt", "topic", "keys", "attempts", "reason", F.col("body").cast("string")
).orderBy(F.desc("storedAt")).show(20, truncate=80)
"""


def _conditions(where: DeadLetterFilter, pile: str | None) -> Iterator[str]:
    """What chooses the letters, as expressions of Spark."""
    if where.since is not None:
        yield f'F.col("storedAt") >= F.timestamp_millis(F.lit({_millis(where.since)}))'
    if where.until is not None:
        yield f'F.col("storedAt") < F.timestamp_millis(F.lit({_millis(where.until)}))'
    if where.topic is not None:
        yield f'F.col("topic") == {where.topic!r}'
    if where.keys:
        wanted = ", ".join(f"F.lit({key!r})" for key in where.keys)
        yield f'F.arrays_overlap(F.split("keys", " "), F.array({wanted}))'
    if where.min_attempts is not None:
        yield f'F.col("attempts") >= {where.min_attempts}'
    if where.max_attempts is not None:
        yield f'F.col("attempts") <= {where.max_attempts}'
    if where.reason is not None:
        yield f'F.lower("reason").contains({where.reason.lower()!r})'
    if pile == UNKNOWN_REASON:
        yield f'F.coalesce("reason", F.lit({UNKNOWN_REASON!r})) == {UNKNOWN_REASON!r}'
    elif pile is not None:
        first = r'F.trim(F.substring_index(F.trim("reason"), "\n", 1))'
        yield f"F.substring({first}, 1, {LONGEST_NAME}) == {pile!r}"


def _millis(value: object) -> int:
    return milliseconds(moment(value))  # type: ignore[arg-type]  # a `Moment`: the filter saw to it
