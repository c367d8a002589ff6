"""How far streams are behind, out of the offsets that Spark reports of their sources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from orbitmq.spark.errors import SourceError
from orbitmq.spark.offsets import from_json, is_starting

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import SourceProgress

    from orbitmq.client.queue import Queue


def lag_of(sources: Iterable[SourceProgress]) -> dict[Queue, int]:
    """Messages that waited in each queue of our sources when a batch was planned."""
    lag: dict[Queue, int] = {}
    for source in sources:
        reached, latest = _positions(source.endOffset), _positions(source.latestOffset)
        for queue, at in reached.items():
            lag[queue] = max(0, latest.get(queue, at) - at)
    return lag


def _positions(text: str | None) -> Mapping[Queue, int]:
    """The positions in an offset of ours; empty for one of another source."""
    try:
        offset = json.loads(text or "null")
        if not isinstance(offset, dict) or is_starting(offset):
            return {}
        return from_json(offset)
    except (ValueError, SourceError):
        return {}
