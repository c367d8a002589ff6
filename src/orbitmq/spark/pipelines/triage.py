"""Dead letters of a group: counted by reason, sampled, exported, sent again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from orbitmq.client.admin.deadletters import UNKNOWN_REASON, DeadLetterFilter
from orbitmq.client.admin.resending import ResendResult
from orbitmq.client.admin.sync import Admin
from orbitmq.spark.pipelines.errors import PipelineRefused
from orbitmq.spark.pipelines.reading import LETTERS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

    from orbitmq.spark.pipelines.run import Run

#: Letters whose ids the driver takes at most.
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

    Gives one row for each reason and topic: how many letters, up to how many attempts, when the
    first and the last died, samples, and what became of those that were sent again. A letter that
    was sent again before is left out, so that a run that was cut off can be repeated.
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
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # as everybody calls them

    from orbitmq.spark.consuming.deadletters import dead_letters  # noqa: PLC0415  # needs Spark

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

    # By a hash: not the newest or oldest, and the same ones each time.
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
    """Send letters again as the command and the console do, one by one, and say what became."""
    piles = {
        row["msgId"]: (row["reason"], row["topic"])
        for row in letters.select("msgId", "reason", "topic").limit(MOST_REPLAYED + 1).collect()
    }
    if len(piles) > MOST_REPLAYED:
        raise PipelineRefused(
            f"more than {MOST_REPLAYED:,} letters cannot be sent again at once; "
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
