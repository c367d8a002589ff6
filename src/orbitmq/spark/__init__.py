"""RocketMQ topics as DataFrames, consumer groups on Spark, and what Spark needs on a laptop.

Spark imports this package in every session where it is installed, when it looks for data
sources. So nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from orbitmq.spark.bodies import body_serializer
    from orbitmq.spark.consolelink import TopicProgress
    from orbitmq.spark.consuming.pipeline import BatchSettings, ConsumePipeline, consume
    from orbitmq.spark.consuming.progress import BatchReport, PipelineProgress
    from orbitmq.spark.consuming.returns import dead_letters, retries, settle, with_retries
    from orbitmq.spark.consuming.verdicts import judged, process
    from orbitmq.spark.streamprogress import (
        ProgressListener,
        StreamProgress,
        measured,
        progress,
    )
    from orbitmq.spark.tables import register_tables

__all__ = [  # noqa: RUF022  # grouped by what they are for
    # Consumer groups
    "consume",
    "ConsumePipeline",
    "body_serializer",
    "BatchSettings",
    "BatchReport",
    "PipelineProgress",
    # Verdicts in DataFrames
    "process",
    "judged",
    "settle",
    "with_retries",
    # Topics as tables
    "register_tables",
    # Progress of streams
    "progress",
    "measured",
    "ProgressListener",
    "StreamProgress",
    "TopicProgress",
    # Messages that failed
    "dead_letters",
    "retries",
]

_HOMES: Final = {
    "consume": "orbitmq.spark.consuming.pipeline",
    "ConsumePipeline": "orbitmq.spark.consuming.pipeline",
    "body_serializer": "orbitmq.spark.bodies",
    "BatchSettings": "orbitmq.spark.consuming.pipeline",
    "BatchReport": "orbitmq.spark.consuming.progress",
    "PipelineProgress": "orbitmq.spark.consuming.progress",
    "process": "orbitmq.spark.consuming.verdicts",
    "judged": "orbitmq.spark.consuming.verdicts",
    "settle": "orbitmq.spark.consuming.returns",
    "with_retries": "orbitmq.spark.consuming.returns",
    "register_tables": "orbitmq.spark.tables",
    "progress": "orbitmq.spark.streamprogress",
    "measured": "orbitmq.spark.streamprogress",
    "ProgressListener": "orbitmq.spark.streamprogress",
    "StreamProgress": "orbitmq.spark.streamprogress",
    "TopicProgress": "orbitmq.spark.consolelink",
    "dead_letters": "orbitmq.spark.consuming.returns",
    "retries": "orbitmq.spark.consuming.returns",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
