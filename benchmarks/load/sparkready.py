"""Sources for Spark that cost next to nothing: what the one that reads topics is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from benchmarks.workload import records
from orbitmq.message.arrow import messages_to_arrow
from orbitmq.spark.schema import full_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: Of one batch: what was best for Spark.
_ROWS = 10_000


class ReadySource(DataSource):
    """The same messages again and again, as record batches that are made once, or as tuples.

    Options: `rows`, `partitions`, `bodySize`, `as` (batches or tuples).
    """

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> StructType:
        return full_schema()

    def reader(self, schema: StructType) -> ReadyReader:
        return ReadyReader(
            int(self.options["rows"]),
            int(self.options["partitions"]),
            int(self.options["bodySize"]),
            self.options.get("as", "batches") == "tuples",
        )


class ReadyReader(DataSourceReader):
    """Plans partitions of equal size."""

    def __init__(self, rows: int, partitions: int, body_size: int, as_tuples: bool) -> None:
        self._share = rows // partitions
        self._count = partitions
        self._body_size = body_size
        self._as_tuples = as_tuples

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self._count)]

    def read(
        self, partition: InputPartition
    ) -> Iterator[pa.RecordBatch] | Iterator[tuple[object, ...]]:
        if self._as_tuples:
            return _tuples(_ready(self._body_size), self._share)
        return _batches(_ready(self._body_size), self._share)


def _batches(ready: pa.RecordBatch, left: int) -> Iterator[pa.RecordBatch]:
    while left > 0:
        yield ready if left >= ready.num_rows else ready.slice(0, left)
        left -= ready.num_rows


def _tuples(ready: pa.RecordBatch, left: int) -> Iterator[tuple[object, ...]]:
    for batch in _batches(ready, left):
        columns = [column.to_pylist() for column in batch.columns]
        columns[-1] = [dict(pairs) for pairs in columns[-1]]
        yield from zip(*columns, strict=True)


@lru_cache(maxsize=4)
def _ready(body_size: int) -> pa.RecordBatch:
    """A batch of messages, as pulled ones become; made once for each process."""
    return messages_to_arrow(records(_ROWS, body_size), broker_name="broker-a")
