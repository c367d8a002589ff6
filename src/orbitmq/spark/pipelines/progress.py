"""Where what a pipeline runs stands, in one form for streams and consumer groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orbitmq.spark.lags import lag_of

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where one stream or consumer group of a pipeline stands."""

    query: str  #: its name
    #: starting, running, waiting (for messages), failing (it runs, and what it handles comes back),
    #: stopped, finished or failed
    state: str
    batch: int | None = None  #: the last batch that is done
    rows: int = 0  #: read since it was started
    rows_per_second: float | None = None  #: of the last batch
    batch_seconds: float | None = None
    #: Messages that wait, by `topic@broker:queue`; empty when that is not known.
    lag: Mapping[str, int] = field(default_factory=dict)
    retried: int = 0  #: sent back, to be delivered again
    dead: int = 0  #: given up
    #: Of what was handled in the last five minutes, the share that failed; None: nothing was.
    failed_share: float | None = None
    late: int = 0  #: rows, or rows summed up already, that came after their window: in no result
    error: str | None = None

    @property
    def total_lag(self) -> int | None:
        return sum(self.lag.values()) if self.lag else None


class QueryWatch:
    """Follows the reports that a stream makes of its batches."""

    def __init__(self) -> None:
        self.batch: int | None = None
        #: The last that had rows. An idle stream reports under the number of the next one.
        self.full_batch: int | None = None
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
        if rows:
            self.full_batch = progress.batchId
        self.rows += rows
        self.late += sum(each.numRowsDroppedByWatermark for each in progress.stateOperators)
        if lag := lag_of(progress.sources):
            self.lag = {str(queue): waiting for queue, waiting in lag.items()}
