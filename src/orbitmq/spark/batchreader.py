"""A batch read: the offsets are taken once, on the driver, and then read by tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from orbitmq.client.queue import Queue
from orbitmq.client.rangecluster import RangeCluster
from orbitmq.client.ranges import QueueRange
from orbitmq.spark.errors import OptionRefused
from orbitmq.spark.offsets import queue_name
from orbitmq.spark.options import BatchOptions
from orbitmq.spark.places import available, placed, resolve, subscribed
from orbitmq.spark.plan import partition
from orbitmq.spark.schema import check_schema
from orbitmq.spark.workerends import cause_first, leave_quietly
from orbitmq.spark.workergarbage import put_modules_aside

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


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
        leave_quietly()

    @cause_first()
    def partitions(self) -> list[InputPartition]:
        read = self._options.read
        with RangeCluster(
            read.access, read.group, retries=read.offset_retries, pause=read.offset_pause
        ) as cluster:
            ranges = self._ranges(cluster)
        parts = partition(ranges, min_partitions=read.min_partitions, max_records=read.max_records)
        put_modules_aside()
        return [RangePartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without partitions Spark makes one of its own, which has nothing in it.
        if not isinstance(partition, RangePartition):
            return iter(())
        from orbitmq.spark.reading import read_partition  # noqa: PLC0415  # tasks only

        return read_partition(partition.ranges, self._options.read, self._schema)

    def _ranges(self, cluster: RangeCluster) -> list[QueueRange]:
        options, read = self._options, self._options.read
        queues = self._restricted(subscribed(cluster, read.subscription).or_raise())
        starts = resolve(read.start, queues, cluster)
        ends = resolve(options.end, queues, cluster)
        bounds = cluster.bounds(queues).or_raise()
        beyond = {
            queue: start
            for queue, start in starts.items()
            if start > max(ends[queue], bounds[queue].high)
        }
        placed(beyond, bounds, fail=read.fail_on_data_loss)
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
