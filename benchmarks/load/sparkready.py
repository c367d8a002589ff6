"""Sources for Spark that cost next to nothing: what the one that reads topics is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)

from orbitmq.spark.internals import exit_quietly, freeze_modules
from orbitmq.spark.source import full_schema

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType


class ReadySource(DataSource):
    """The rows of a file again and again, as record batches that are read once, or as tuples.

    As a stream it has the row whose number stands in another file, as soon as it does. Options:
    `file` with one record batch of all columns of a topic, `rows`, `partitions`, `as` (batches or
    tuples), and `there`, the other file.

    It spares its workers a look through all modules after every task, as ours does: a ceiling must
    lack nothing that has nothing to do with reading.
    """

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        exit_quietly()
        freeze_modules()

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> StructType:
        return full_schema()

    def reader(self, schema: StructType) -> ReadyReader:
        return ReadyReader(
            self.options["file"],
            int(self.options["rows"]),
            int(self.options["partitions"]),
            self.options.get("as", "batches") == "tuples",
        )

    def streamReader(self, schema: StructType) -> ReadyStreamReader:  # noqa: N802  # Spark's name
        return ReadyStreamReader(self.options["file"], self.options["there"])


class ReadyReader(DataSourceReader):
    """Plans partitions of equal size."""

    def __init__(self, file: str, rows: int, partitions: int, as_tuples: bool) -> None:
        self._file = file
        self._share = rows // partitions
        self._count = partitions
        self._as_tuples = as_tuples

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self._count)]

    def read(
        self, partition: InputPartition
    ) -> Iterator[pa.RecordBatch] | Iterator[tuple[object, ...]]:
        ready = _ready(self._file)
        if self._as_tuples:
            return _tuples(ready, self._share)
        return _batches(ready, self._share)


class ReadyStreamReader(DataSourceStreamReader):
    """A stream whose rows are there when somebody says so."""

    def __init__(self, file: str, there: str) -> None:
        self._file = file
        self._there = there

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {"at": 0}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        return {"at": int(Path(self._there).read_text())}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(end["at"] - start["at"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _batches(_ready(self._file), partition.value)


def _batches(ready: pa.RecordBatch, left: int) -> Iterator[pa.RecordBatch]:
    while left > 0:
        yield ready if left >= ready.num_rows else ready.slice(0, left)
        left -= ready.num_rows
    freeze_modules()


def _tuples(ready: pa.RecordBatch, left: int) -> Iterator[tuple[object, ...]]:
    for batch in _batches(ready, left):
        columns = [column.to_pylist() for column in batch.columns]
        columns[-1] = [dict(pairs) for pairs in columns[-1]]
        yield from zip(*columns, strict=True)


@lru_cache(maxsize=4)
def _ready(file: str) -> pa.RecordBatch:
    """The batch of a file, read once in each process."""
    with pa.OSFile(file) as source, pa.ipc.open_file(source) as reader:
        return reader.get_batch(0)
