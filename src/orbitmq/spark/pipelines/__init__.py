"""Pipelines for `orbitmq pipeline run`, built-in ones and those of users.

    definition: a function and its options      load:    from Python and TOML files
    run:        `Run`, sessions, supervision    builtin: five pipelines

A pipeline is a function whose first parameter is a `Run` and whose keyword-only parameters are its
options. It returns what is to run: writers of streams, queries, a consumer group; or a DataFrame
to show.
"""

from __future__ import annotations

from orbitmq.spark.pipelines.builtin import archive, backfill, statistics, transform, triage
from orbitmq.spark.pipelines.run import Run

__all__ = [
    # For functions of pipelines
    "Run",
    # Built-in pipelines
    "archive",
    "backfill",
    "statistics",
    "transform",
    "triage",
]
