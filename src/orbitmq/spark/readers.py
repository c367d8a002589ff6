"""Readers of the `rocketmq` source: the driver plans ranges of offsets, tasks read them.

Spark makes a reader several times: one instance plans and lives as long as the query, others are
pickled into tasks, where they only read. So what tasks need is set when a reader is made, and what
the driver needs when Spark first asks for it. Modules for planning are loaded by the instance that
plans: tasks, and the process that prepares a query, need none of them.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from orbitmq.client.ranges.connections import QueueRange
from orbitmq.errors import OrbitError
from orbitmq.spark.internals import (
    cause_first,
    exit_quietly,
    freeze_modules,
    pyspark_features,
    stop_quietly,
)
from orbitmq.spark.options import BatchOptions, OptionRefused, StreamOptions, queue_name
from orbitmq.spark.source import check_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from orbitmq.client.ranges.cluster import RangeCluster
    from orbitmq.client.routes import Queue
    from orbitmq.spark.archived import ArchivedRange
    from orbitmq.spark.options import Json
    from orbitmq.spark.stream import StreamDriver


Options = TypeVar("Options", bound=BatchOptions | StreamOptions)


@dataclass
class RangePartition(InputPartition):
    """What one task reads."""

    ranges: tuple[QueueRange, ...]
    archived: tuple[ArchivedRange, ...] = ()


class RangeReader(Generic[Options]):
    """What readers need in tasks."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_schema(schema, options.read.body)
        self._options = options
        self._schema = schema
        exit_quietly()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without partitions Spark makes an empty one of its own.
        if not isinstance(partition, RangePartition):
            return iter(())
        from orbitmq.spark.partition import read_partition  # noqa: PLC0415  # tasks only

        options, schema = self._options.read, self._schema
        return read_partition(partition.ranges, options, schema, partition.archived)


class RocketMQBatchReader(RangeReader[BatchOptions], DataSourceReader):
    """Reads what a topic has when the read is planned.

    Trap: no `pushFilters`. In PySpark 4.3 a filter that one query pushes stays in the DataFrame
    and restricts every other query on it. Ranges, queues, tags and times are options instead.
    """

    @cause_first()
    def partitions(self) -> list[InputPartition]:
        from orbitmq.spark.archived import (  # noqa: PLC0415  # the driver only
            ArchiveAlone,
            may_do_alone,
            open_archive,
            planning_cluster,
        )

        read = self._options.read
        try:
            with planning_cluster(read) as cluster:
                parts = self._parts(cluster)
        except OrbitError as error:
            if read.archive is None or not may_do_alone(error):
                raise
            alone = ArchiveAlone(open_archive(read.archive), error)
            alone.check_end(self._options.end)
            parts = self._parts(alone)
        freeze_modules()
        return parts

    def _parts(self, cluster: RangeCluster) -> list[InputPartition]:
        from orbitmq.spark.archived import divided  # noqa: PLC0415  # the driver only
        from orbitmq.spark.plan import partition  # noqa: PLC0415

        read = self._options.read
        ranges = self._ranges(cluster)
        parts = partition(ranges, min_partitions=read.min_partitions, max_records=read.max_records)
        return [
            RangePartition(*divided(part, cluster, fail=read.fail_on_data_loss)) for part in parts
        ]

    def _ranges(self, cluster: RangeCluster) -> list[QueueRange]:
        from orbitmq.spark.plan import (  # noqa: PLC0415  # the driver only
            available,
            clamp_to_bounds,
            resolve,
            subscribed_queues,
        )

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
            # The end may lie before the start: of two times, or of a group's offset and an option.
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


class StreamReader(RangeReader[StreamOptions], DataSourceStreamReader):
    """Reads a stream: what the readers for all versions of PySpark share."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._driver: StreamDriver | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_driver": None}

    @cause_first()
    def initialOffset(self) -> Json:  # noqa: N802  # Spark's name
        return self._running().initial_offset()

    @cause_first()
    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        driver = self._running()
        return [RangePartition(*driver.divided(part)) for part in driver.partitions(start, end)]

    @cause_first()
    def commit(self, end: Json) -> None:
        self._running().finished(end)

    def stop(self) -> None:
        if self._driver is not None:
            self._driver.stop()
            self._driver = None
        stop_quietly()

    def _running(self) -> StreamDriver:
        if self._driver is None:
            from orbitmq.spark.stream import StreamDriver  # noqa: PLC0415  # the driver only

            driver = StreamDriver(self._options)
            driver.start()
            self._driver = driver
            # Spark ends the process of a query with this signal. As an exit, it runs `stop`.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        return self._driver


class PlainStreamReader(StreamReader):
    """For PySpark 4.0 and 4.1, which pass neither the start of a batch nor a limit.

    Both are known from the batch before. The first batch after a restart has no limit.
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


#: Stands for no limit. The default must not be "all available": a trigger that makes a single
#: batch asks for that, and the two have to differ.
_NO_LIMIT: Final = 2**53


if pyspark_features().has_read_limits:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )

    class LimitedStreamReader(StreamReader, SupportsTriggerAvailableNow):
        """For PySpark 4.2 and later, which pass a limit and announce runs that end."""

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


def stream_reader(options: StreamOptions, schema: StructType) -> StreamReader:
    """The reader for the installed PySpark."""
    if pyspark_features().has_read_limits:
        return LimitedStreamReader(options, schema)
    return PlainStreamReader(options, schema)
