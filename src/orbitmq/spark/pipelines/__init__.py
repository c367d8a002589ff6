"""Pipelines that `orbitmq pipeline run` runs, ready ones and those of users alike.

    definition: a function and its options      ready: five of them, useful as they are
    run:        what a function works with      sessions: the Spark session that it gets
    supervising: start, watch, bring to rest, start again       progress: what is seen meanwhile

A pipeline is a function whose first parameter is a `Run` and whose keyword-only parameters are its
options. It gives back what is to run: writers of streams, queries, a consumer group; or a DataFrame
to be shown.
"""

from __future__ import annotations

from orbitmq.spark.pipelines.builtin import archive, backfill, statistics, transform, triage
from orbitmq.spark.pipelines.run import Run

__all__ = [
    # What a pipeline works with
    "Run",
    # Ready pipelines
    "archive",
    "backfill",
    "statistics",
    "transform",
    "triage",
]
