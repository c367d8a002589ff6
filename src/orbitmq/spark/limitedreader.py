"""A stream for PySpark 4.2 and later, which say how much a batch may take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from orbitmq.spark.streamreader import StreamReader
from orbitmq.spark.workerends import cause_first

if TYPE_CHECKING:
    from orbitmq.spark.offsets import Json

#: Stands for no limit. A trigger that makes one batch and ends asks for "all available", and only
#: because our own default is never that, the two can be told apart.
_NO_LIMIT: Final = 2**53


class LimitedStreamReader(StreamReader, SupportsTriggerAvailableNow):
    """Takes limits from Spark, and ends a run where the queues ended when it began."""

    @cause_first()
    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:  # noqa: N802  # Spark's name
        take_all = isinstance(limit, ReadAllAvailable)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else _NO_LIMIT
        return self._running().latest_offset(
            start, limit=None if most >= _NO_LIMIT else most, take_all=take_all
        )

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.max_offsets or _NO_LIMIT)

    @cause_first()
    def reportLatestOffset(self) -> Json | None:  # noqa: N802
        return self._running().latest_known()

    @cause_first()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._running().take_only_what_is_there()
