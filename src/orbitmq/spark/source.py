"""The `rocketmq` data source: `spark.read.format("rocketmq")` and its three sisters.

Spark imports this module once per session, for everybody who has it installed, and makes instances
in several processes, each of which is asked for one thing. So nothing is imported before it is
needed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from orbitmq.client.ranges.cluster import RangeCluster
from orbitmq.client.ranges.links import QueueRange
from orbitmq.client.routes import Queue
from orbitmq.spark.options import (
    BatchOptions,
    OptionRefused,
    SchemaRefused,
    StreamOptions,
    queue_name,
)
from orbitmq.spark.plan import available, clamp_to_bounds, partition, resolve, subscribed_queues
from orbitmq.spark.stream import StreamDriver
from orbitmq.spark.worker import (
    STREAM_RUNNER,
    cause_first,
    exit_quietly,
    freeze_modules,
    main_module,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from orbitmq.spark.options import Json
    from orbitmq.spark.write import RocketMQWriter, TopicStreamWriter


class RocketMQSource(DataSource):
    """Topics as DataFrames."""

    def __init__(self, options: dict[str, str]) -> None:
        from orbitmq.spark.worker import freeze_modules  # noqa: PLC0415

        super().__init__(options)
        exit_quietly()
        freeze_modules()

    @classmethod
    def name(cls) -> str:
        # All that Spark asks of the worker that looks for sources.
        exit_quietly()
        return "rocketmq"

    @cause_first()
    def schema(self) -> StructType:
        from orbitmq.spark.options import (  # noqa: PLC0415
            OptionsNotPassed,
            include_properties,
        )

        if "provider" in self.options:
            # CREATE TABLE asks for the columns, with the options, as it does never again.
            raise OptionsNotPassed
        return full_schema(include_properties=include_properties(self.options))

    @cause_first()
    def reader(self, schema: StructType) -> RocketMQBatchReader:
        from orbitmq.spark.options import batch_options  # noqa: PLC0415

        with _told_of_tables(self.options):
            return RocketMQBatchReader(batch_options(self.options), schema)

    @cause_first()
    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  # Spark's name
        from orbitmq.spark.options import stream_options  # noqa: PLC0415

        return stream_reader(stream_options(self.options), schema)

    @cause_first()
    def writer(self, schema: StructType, overwrite: bool) -> RocketMQWriter:
        from orbitmq.spark.options import write_options  # noqa: PLC0415
        from orbitmq.spark.worker import connections_to  # noqa: PLC0415
        from orbitmq.spark.write import RocketMQWriter, check_topic  # noqa: PLC0415

        with _told_of_tables(self.options):
            options = write_options(self.options)
            writer = RocketMQWriter(options, schema, overwrite=overwrite)
        # On the driver: of a wrong address every task would tell, again and again.
        connections_to(options.access).reach()
        check_topic(options)
        return writer

    @cause_first()
    def streamWriter(  # type: ignore[override]  # either kind of writer  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> TopicStreamWriter:
        from orbitmq.spark.options import write_options  # noqa: PLC0415
        from orbitmq.spark.write import check_topic, stream_writer  # noqa: PLC0415

        options = write_options(self.options)
        writer = stream_writer(options, schema, overwrite=overwrite)
        check_topic(options)
        return writer


@contextmanager
def _told_of_tables(options: Mapping[str, str]) -> Iterator[None]:
    """Whoever reads or writes without any option may have given some to a table."""
    from orbitmq.spark.options import OptionsNotPassed, SourceError  # noqa: PLC0415

    try:
        yield
    except SourceError as error:
        if options:
            raise
        raise OptionsNotPassed(str(error)) from error


# A batch read: the offsets are taken once, on the driver, and then read by tasks.


@dataclass
class RangePartition(InputPartition):
    """What one task reads."""

    ranges: tuple[QueueRange, ...]


class RocketMQBatchReader(DataSourceReader):
    """Reads what a topic has. Plans on the driver, reads in tasks; both only need the options.

    There is no `pushFilters`: in PySpark 4.3 what one query pushes stays in the DataFrame and
    restricts every other query on it. Ranges, queues, tags and times are options instead.
    """

    def __init__(self, options: BatchOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        exit_quietly()

    @cause_first()
    def partitions(self) -> list[InputPartition]:
        read = self._options.read
        with RangeCluster(
            read.access, read.group, retries=read.offset_retries, pause=read.offset_pause
        ) as cluster:
            ranges = self._ranges(cluster)
        parts = partition(ranges, min_partitions=read.min_partitions, max_records=read.max_records)
        freeze_modules()
        return [RangePartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without partitions Spark makes one of its own, which has nothing in it.
        if not isinstance(partition, RangePartition):
            return iter(())
        from orbitmq.spark.read import read_partition  # noqa: PLC0415  # tasks only

        return read_partition(partition.ranges, self._options.read, self._schema)

    def _ranges(self, cluster: RangeCluster) -> list[QueueRange]:
        options, read = self._options, self._options.read
        queues = self._restricted(subscribed_queues(cluster, read.subscription).or_raise())
        starts = resolve(read.start, queues, cluster)
        ends = resolve(options.end, queues, cluster)
        bounds = cluster.bounds(queues).or_raise()
        beyond = {
            queue: start
            for queue, start in starts.items()
            if start > max(ends[queue], bounds[queue].high)
        }
        clamp_to_bounds(beyond, bounds, fail=read.fail_on_data_loss)
        wanted = [
            # A queue may end before it is to be read, a time before another begins, and a group
            # have read more than up to the end that is asked for: there is nothing between them.
            QueueRange(queue, starts[queue], max(starts[queue], ends[queue]))
            for queue in queues
        ]
        found = available(wanted, bounds, fail=read.fail_on_data_loss)
        return [self._within(each) for each in found]

    def _restricted(self, queues: tuple[Queue, ...]) -> tuple[Queue, ...]:
        only = set(self._options.only_queues)
        if not only:
            return queues
        chosen = tuple(
            queue for queue in queues if queue_name(queue) in only or str(queue.id) in only
        )
        known = {name for queue in queues for name in (queue_name(queue), str(queue.id))}
        if unknown := sorted(only - known):
            raise OptionRefused(
                "queues", ", ".join(unknown), f"of {', '.join(map(queue_name, queues))}"
            )
        return chosen

    def _within(self, each: QueueRange) -> QueueRange:
        """The part of a range that `fromOffset` and `toOffset` leave."""
        options = self._options
        start, end = each.start, each.end
        if options.from_offset is not None:
            start = max(start, options.from_offset)
        if options.to_offset is not None:
            end = min(end, options.to_offset)
        return QueueRange(each.queue, start, max(start, end))


# A stream, as Spark wants one: the driver decides, tasks read.
#
# Spark makes the reader three times. One instance lives with the query and answers where batches
# begin and end; another is pickled into tasks, where it only reads. So what tasks need is set when
# the reader is made, and what the driver needs is made when it is first asked.


class StreamReader(DataSourceStreamReader):
    """What all versions of PySpark share. See `stream_reader` for those that differ."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._driver: StreamDriver | None = None
        exit_quietly()

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
        from orbitmq.spark.read import read_partition  # noqa: PLC0415  # tasks only

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
        pass  # 4.2 and on
    except ImportError:
        return PlainStreamReader(options, schema)
    return LimitedStreamReader(options, schema)


# A stream for PySpark 4.2 and later, which say how much a batch may take.


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


# The columns that can be read, and what a schema given by the user asks for.
#
# Spark passes a schema on to the source but prunes nothing by itself; so a schema without `body` or
# `properties` is how a query says that it does not need them, and they are then not decoded.


#: Every column, in order. The types are those of `message.arrow.MESSAGE_SCHEMA`.
COLUMNS: Final[Mapping[str, DataType]] = {
    "topic": StringType(),
    "brokerName": StringType(),
    "queueId": IntegerType(),
    "queueOffset": LongType(),
    "msgId": StringType(),
    "tags": StringType(),
    "keys": StringType(),
    "body": BinaryType(),
    "flag": IntegerType(),
    "reconsumeTimes": IntegerType(),
    "bornTimestamp": TimestampType(),
    "storeTimestamp": TimestampType(),
    "properties": MapType(StringType(), StringType()),
}
#: Null in some messages: a producer need not give them, and may give what cannot be read.
NULLABLE: Final = frozenset({"tags", "keys", "body", "bornTimestamp", "storeTimestamp"})


def full_schema(*, include_properties: bool = True) -> StructType:
    """What a query gets that gives no schema of its own."""
    return StructType(
        [
            StructField(name, kind)
            for name, kind in COLUMNS.items()
            if include_properties or name != "properties"
        ]
    )


def check_schema(schema: StructType) -> None:
    """Refuse a schema that messages cannot be read into."""
    seen: set[str] = set()
    for column in schema.fields:
        kind = COLUMNS.get(column.name)
        if kind is None:
            raise SchemaRefused(f"{_unknown(column.name)}; there are: {_declared()}")
        if column.name in seen:
            raise SchemaRefused(f"column {column.name!r} is in the schema twice")
        seen.add(column.name)
        if not _is_same(column.dataType, kind):
            raise SchemaRefused(
                f"column {column.name!r} is {kind.simpleString()}, the schema says "
                f"{column.dataType.simpleString()}; cast it after loading"
            )
        if not column.nullable and column.name in NULLABLE:
            raise SchemaRefused(
                f"column {column.name!r} is null in some messages, so it cannot be NOT NULL"
            )


def arrow_schema(schema: StructType) -> pa.Schema:
    """The same for Arrow: Spark compares types and nullability exactly."""
    import pyarrow as pa  # noqa: PLC0415  # planning needs no Arrow

    from orbitmq.message.arrow import MESSAGE_SCHEMA  # noqa: PLC0415

    fields = []
    for column in schema.fields:
        field = MESSAGE_SCHEMA.field(column.name).with_nullable(column.nullable)
        if isinstance(column.dataType, MapType) and not column.dataType.valueContainsNull:
            texts = pa.field("value", pa.string(), nullable=False)
            field = field.with_type(pa.map_(pa.string(), texts))
        fields.append(field)
    return pa.schema(fields)


def _is_same(given: DataType, kind: DataType) -> bool:
    if isinstance(kind, MapType):
        return (
            isinstance(given, MapType)
            and given.keyType == kind.keyType
            and given.valueType == kind.valueType
        )
    return given == kind


def _unknown(name: str) -> str:
    for known in COLUMNS:
        if known.lower() == name.lower():
            return f"there is no column {name!r}, but {known!r}: names are compared with their case"
    return f"there is no column {name!r}"


def _declared() -> str:
    return ", ".join(f"{name} {kind.simpleString()}" for name, kind in COLUMNS.items())
