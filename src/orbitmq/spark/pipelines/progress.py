"""Where what a pipeline runs stands, in one form for streams and consumer groups."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where one stream or consumer group of a pipeline stands."""

    query: str  #: its name
    state: str  #: starting, running, waiting (for messages), stopped, finished or failed
    batch: int | None = None  #: the last batch that is done
    rows: int = 0  #: read since it was started
    rows_per_second: float | None = None  #: of the last batch
    batch_seconds: float | None = None
    #: Messages that wait, by `topic@broker:queue`; empty when that is not known.
    lag: Mapping[str, int] = field(default_factory=dict)
    retried: int = 0  #: sent back, to be delivered again
    dead: int = 0  #: given up
    late: int = 0  #: rows, or rows summed up already, that came after their window: in no result
    error: str | None = None

    @property
    def total_lag(self) -> int | None:
        return sum(self.lag.values()) if self.lag else None


class QueryWatch:
    """Follows the reports that a stream makes of its batches."""

    def __init__(self) -> None:
        self.batch: int | None = None
        self.rows = 0
        self.rows_per_second: float | None = None
        self.batch_seconds: float | None = None
        self.lag: dict[str, int] = {}
        self.late = 0
        self._seen = ""

    def look(self, query: StreamingQuery) -> bool:
        """Take in what is new; whether there was anything."""
        last = query.lastProgress
        if last is None or last.timestamp == self._seen:
            return False
        # Several batches may have ended since; Spark keeps the last hundred.
        for each in query.recentProgress:
            if each.timestamp > self._seen:
                self.take(each)
        return True

    def take(self, progress: StreamingQueryProgress) -> None:
        """Take in one report. An idle stream reports too: those have no rows."""
        self._seen = progress.timestamp
        rows = max(0, progress.numInputRows or 0)
        if rows or self.batch is None:
            self.batch = progress.batchId
            self.batch_seconds = (progress.batchDuration or 0) / 1000
            self.rows_per_second = progress.processedRowsPerSecond if rows else None
        self.rows += rows
        self.late += sum(each.numRowsDroppedByWatermark for each in progress.stateOperators)
        if lag := lag_of(progress):
            self.lag = lag


def lag_of(progress: StreamingQueryProgress) -> dict[str, int]:
    """Messages that waited in each queue when a batch was planned; empty if nobody says."""
    lag: dict[str, int] = {}
    for source in progress.sources:
        ends = _positions(source.endOffset)
        for queue, latest in _positions(source.latestOffset).items():
            if queue in ends:
                lag[queue] = max(0, latest - ends[queue])
    return lag


def _positions(offset: object) -> dict[str, int]:
    """Positions by `topic@broker:queue`, if this is an offset of the `rocketmq` source."""
    try:
        topics: Any = json.loads(offset) if isinstance(offset, str) else offset
        return {
            f"{topic}@{queue}": int(position)
            for topic, positions in topics.items()
            for queue, position in positions.items()
        }
    except (AttributeError, TypeError, ValueError):
        return {}
