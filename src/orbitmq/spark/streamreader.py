"""A stream, as Spark wants one: the driver decides, tasks read.

Spark makes the reader three times. One instance lives with the query and answers where batches
begin and end; another is pickled into tasks, where it only reads. So what tasks need is set when
the reader is made, and what the driver needs is made when it is first asked.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from orbitmq.spark.batchreader import RangePartition
from orbitmq.spark.options import StreamOptions
from orbitmq.spark.schema import check_schema
from orbitmq.spark.sparkprocesses import STREAM_RUNNER, main_module
from orbitmq.spark.streamdriver import StreamDriver
from orbitmq.spark.workerends import cause_first, leave_quietly

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from orbitmq.spark.offsets import Json


class StreamReader(DataSourceStreamReader):
    """What all versions of PySpark share. See `stream_reader` for those that differ."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._driver: StreamDriver | None = None
        leave_quietly()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_driver": None}

    @cause_first()
    def initialOffset(self) -> Json:  # noqa: N802  # Spark's name
        return self._running().initial_offset()

    @cause_first()
    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        return [RangePartition(part) for part in self._running().partitions(start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RangePartition):
            return iter(())
        from orbitmq.spark.reading import read_partition  # noqa: PLC0415  # tasks only

        return read_partition(partition.ranges, self._options.read, self._schema)

    @cause_first()
    def commit(self, end: Json) -> None:
        self._running().finished(end)

    def stop(self) -> None:
        if self._driver is not None:
            self._driver.stop()
            self._driver = None
        if _has_java_hung_up():
            # All is done. PySpark would tell Java of the end, which does not listen any more, and
            # end this process with a traceback on the terminal.
            os._exit(0)

    def _running(self) -> StreamDriver:
        if self._driver is None:
            driver = StreamDriver(self._options)
            driver.start()
            self._driver = driver
            # The process of a query is ended by this signal. Made an exit, `stop` runs.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        return self._driver


def _has_java_hung_up() -> bool:
    """Whether the process of a query ends because Java wants it to, and not for an error.

    Java does so by a signal, or closes the connection, which PySpark notices when it reads from it
    or writes to it. Connections of ours may fail in the same way: of that Java has to hear.
    """
    if main_module() != STREAM_RUNNER:
        return False
    error = sys.exception()
    if isinstance(error, EOFError | BrokenPipeError | ConnectionResetError):
        return not _passed_through_us(error.__traceback__)
    return isinstance(error, SystemExit)


def _passed_through_us(traceback: TracebackType | None) -> bool:
    """Whether an error came out of code of this package."""
    ours = __name__.partition(".")[0]
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0] == ours:
            return True
        traceback = traceback.tb_next
    return False


class PlainStreamReader(StreamReader):
    """For PySpark 4.0 and 4.1, which say neither where a batch begins nor how much it may take.

    Both are known here from the batch before. The first batch after a restart is without limit.
    """

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._position: Json | None = None

    def initialOffset(self) -> Json:  # noqa: N802
        self._position = super().initialOffset()
        return self._position

    @cause_first()
    def latestOffset(self) -> Json:  # type: ignore[override]  # noqa: N802  # as those call it
        driver = self._running()
        if self._position is None:
            return driver.ends()
        # Spark asks for the next batch only when the one before is done.
        return driver.latest_offset(self._position, limit=self._options.max_offsets)

    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        self._position = end
        return super().partitions(start, end)


def stream_reader(options: StreamOptions, schema: StructType) -> StreamReader:
    """The reader for the PySpark that is installed."""
    try:
        from orbitmq.spark.limitedreader import LimitedStreamReader  # noqa: PLC0415  # 4.2 and on
    except ImportError:
        return PlainStreamReader(options, schema)
    return LimitedStreamReader(options, schema)
