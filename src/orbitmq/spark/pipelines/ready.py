"""The ready pipelines, by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from orbitmq.spark.pipelines.archive import archive
from orbitmq.spark.pipelines.backfill import backfill
from orbitmq.spark.pipelines.definition import Definition
from orbitmq.spark.pipelines.statistics import statistics
from orbitmq.spark.pipelines.transform import transform
from orbitmq.spark.pipelines.triage import triage

READY: Final[Mapping[str, Callable[..., Any]]] = {
    "archive": archive,
    "triage": triage,
    "backfill": backfill,
    "transform": transform,
    "statistics": statistics,
}


def ready(name: str) -> Definition:
    """The ready pipeline of a name, which is one of `READY`."""
    return Definition.of(READY[name], name)
