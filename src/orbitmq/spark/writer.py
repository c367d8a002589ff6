"""Writes of DataFrames and streams to topics: at least once.

A task returns when brokers have stored all its rows. A task that fails may have sent some of them,
and sends them again when it is tried again, under the same ids (see `rows`). There is nothing to
undo and nothing to make visible afterwards: commit and abort only say what happened.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)

from orbitmq.client.errors import BrokerRefused, NoNameServer, NoRoute
from orbitmq.spark.connections import links_to
from orbitmq.spark.errors import SourceError, TopicMissing
from orbitmq.spark.options import WriteOptions
from orbitmq.spark.rows import Origin
from orbitmq.spark.workerends import cause_first, leave_quietly
from orbitmq.spark.writeschema import check_writable, written_columns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import Row, StructType

log = logging.getLogger(__name__)

#: Rows that are made into a record batch where Spark gives single ones.
_ROWS_AT_ONCE = 4096


@dataclass
class PartitionWritten(WriterCommitMessage):
    """What a task reports."""

    partition: int
    sent: int
    skipped: int


def check_topic(options: WriteOptions) -> None:
    """Raises `TopicMissing` on the driver, once, for a topic that every row is to go to.

    Tasks look themselves, for any topic: what nobody can say here is no reason to stop.
    """
    if options.topic is None or options.create_topic:
        return
    with suppress(NoNameServer, BrokerRefused):
        try:
            links_to(options.access).check_topic(options.topic)
        except NoRoute as missing:
            raise TopicMissing(missing) from None


class TopicWriter:
    """What batch writes and streams share."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise SourceError(
                "messages cannot be overwritten; use mode('append'), and outputMode('append') in "
                "a stream"
            )
        check_writable(schema, topic=options.topic)
        self._options = options
        self._schema = schema
        #: Names this write where there is no query that would.
        self._job = uuid.uuid4().hex

    @cause_first()
    def write(self, batches: Iterator[pa.RecordBatch]) -> PartitionWritten:
        from orbitmq.spark.writing import write_partition  # noqa: PLC0415  # tasks only

        leave_quietly()
        origin = self._origin()
        count = write_partition(batches, self._options, origin)
        return PartitionWritten(origin.partition, count.sent, count.skipped)

    def _origin(self) -> Origin:
        context = TaskContext.get()
        if context is None:
            return Origin(self._job, 0)
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        writer = f"{query}/{batch}" if query and batch is not None else self._job
        return Origin(writer, context.partitionId())

    def _tell(self, what: str, messages: Iterable[WriterCommitMessage | None]) -> None:
        leave_quietly()  # in a worker that does nothing else
        done = [each for each in messages if isinstance(each, PartitionWritten)]
        log.info(
            what,
            extra={
                "topic": self._options.topic or "by row",
                "partitions": len(done),
                "sent": sum(each.sent for each in done),
                "skipped": sum(each.skipped for each in done),
            },
        )


class RocketMQWriter(TopicWriter, DataSourceArrowWriter):
    """Writes a DataFrame."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._tell("DataFrame written", messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._tell("writing failed; what was sent stays, and is sent again when tried", messages)


class TopicStreamWriter(TopicWriter):
    """What the two kinds of stream writers share."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._tell(f"batch {batchId} written", messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._tell(f"batch {batchId} failed; what was sent stays, and is sent again", messages)


class RocketMQRowStreamWriter(TopicStreamWriter, DataSourceStreamWriter):
    """Writes a stream row by row, for PySpark 4.0, which has no other way."""

    def write(self, iterator: Iterator[Row]) -> PartitionWritten:
        return super().write(self._batches(iterator))

    def _batches(self, rows: Iterator[Row]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415  # tasks only

        schema = written_columns(self._schema)
        pending: list[dict[str, Any]] = []
        for row in rows:
            pending.append({name: _with_zone(row[name]) for name in schema.names})
            if len(pending) >= _ROWS_AT_ONCE:
                yield pa.RecordBatch.from_pylist(pending, schema=schema)
                pending = []
        if pending:
            yield pa.RecordBatch.from_pylist(pending, schema=schema)


def _with_zone(value: Any) -> Any:
    """Times in rows are local ones and do not say so; Arrow would take them for UTC."""
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def stream_writer(
    options: WriteOptions, schema: StructType, *, overwrite: bool
) -> TopicStreamWriter:
    """The writer of streams for the PySpark that is installed."""
    try:
        from orbitmq.spark.arrowstreamwriter import (  # noqa: PLC0415  # from 4.1 on
            RocketMQStreamWriter,
        )
    except ImportError:
        return RocketMQRowStreamWriter(options, schema, overwrite=overwrite)
    return RocketMQStreamWriter(options, schema, overwrite=overwrite)
