"""Reads a partition: pulled bytes become record batches, with no object per message between.

One bad message never fails a task, or its query would fail at it again after every restart. A body
that is damaged or cannot be expanded is null, in a row that has everything else. Messages that
should be there and are not are another matter: that is what `failOnDataLoss` decides.

A record may hold several messages, in topics of RocketMQ 5 that keep batches as they were sent. It
then comes once for every pull that begins inside of it. Such records are taken apart, and of their
messages each chunk has those of its own offsets.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from orbitmq.client.consumer.innerbatches import without_inner_batches
from orbitmq.client.errors import BrokerRefused
from orbitmq.client.names import TOOLS_GROUP
from orbitmq.client.queue import Queue
from orbitmq.client.rangememory import AnswerMemory
from orbitmq.client.rangepulls import ANSWER_BYTES
from orbitmq.client.rangereading import Missing, RangeSettings, read_ranges
from orbitmq.client.ranges import OffsetsGone, QueueRange
from orbitmq.client.rangewindow import Bytes, Chunk, WindowLimits
from orbitmq.filter.tags import parse_tags
from orbitmq.message.arrow import BadBody, messages_to_arrow
from orbitmq.message.errors import (
    BatchInside,
    ChunkTooLarge,
    CodecMissing,
    MessageError,
    RecordInvalid,
)
from orbitmq.message.slices import listed
from orbitmq.message.stored import StoredMessage, decode_messages
from orbitmq.spark.connections import answer_memory, links_to
from orbitmq.spark.errors import DataLost, UnnamedReadRefused
from orbitmq.spark.schema import arrow_schema
from orbitmq.spark.workerends import leave_quietly
from orbitmq.spark.workergarbage import put_modules_aside

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from orbitmq.spark.options import ReadOptions

log = logging.getLogger(__name__)

#: Bytes of messages that become one record batch. Spark's best size is 4 to 16 MiB; to decode a
#: batch costs half a millisecond whatever its size, which is a tenth of all at 4 MiB.
BATCH_BYTES: Final = 8 * 1024 * 1024


def read_partition(
    ranges: Sequence[QueueRange], options: ReadOptions, schema: StructType
) -> Iterator[pa.RecordBatch]:
    """The messages of a partition as record batches of the schema."""
    leave_quietly()
    decoder = _Decoder(options, schema)
    try:
        with answer_memory(BATCH_BYTES + 2 * ANSWER_BYTES) as memory:
            for stretch in _joined(_chunks(ranges, options, memory)):
                # What is decoded is a copy.
                batches = decoder.batches(stretch)
                memory.give_back(stretch.pieces)
                yield from batches
    except OffsetsGone as gone:
        raise DataLost.of(gone) from gone
    except BrokerRefused as refused:
        if _is_for_want_of_a_group(refused, options.group):
            raise UnnamedReadRefused(options.group, str(refused)) from refused
        raise
    put_modules_aside()


def _is_for_want_of_a_group(refused: BrokerRefused, group: str) -> bool:
    """Whether an account may not pull as the group that nobody has named. Brokers name it then."""
    is_about_it = group == TOOLS_GROUP and group in refused.remark
    return is_about_it and refused.name == "NO_PERMISSION"


def _chunks(
    ranges: Sequence[QueueRange], options: ReadOptions, memory: AnswerMemory
) -> Iterator[Chunk]:
    return read_ranges(
        links_to(options.access),
        ranges,
        group=options.group,
        wanted=options.wanted,
        settings=RangeSettings(
            missing=Missing.RAISE if options.fail_on_data_loss else Missing.SKIP,
            window=WindowLimits(messages=options.pull_size),
        ),
        memory=memory,
    )


@dataclass(slots=True)
class _Stretch:
    """Neighbouring chunks of a queue."""

    queue: Queue
    start: int
    end: int
    pieces: list[Bytes]
    #: The offsets that each of the pieces was read for, as start and end.
    bounds: list[tuple[int, int]]
    size: int

    def halves(self) -> tuple[_Stretch, _Stretch]:
        """The same in two, with bounds that only the whole knows."""
        middle = len(self.pieces) // 2
        return (
            self.with_pieces(self.pieces[:middle], self.bounds[:middle]),
            self.with_pieces(self.pieces[middle:], self.bounds[middle:]),
        )

    def with_pieces(self, pieces: list[Bytes], bounds: list[tuple[int, int]]) -> _Stretch:
        return _Stretch(self.queue, self.start, self.end, pieces, bounds, sum(map(len, pieces)))


def _joined(chunks: Iterator[Chunk]) -> Iterator[_Stretch]:
    """Chunks put together until they are worth a record batch."""
    stretch: _Stretch | None = None
    for chunk in chunks:
        if stretch is None or stretch.queue != chunk.queue or stretch.end != chunk.start:
            if stretch is not None:
                yield stretch
            stretch = _Stretch(chunk.queue, chunk.start, chunk.end, [], [], 0)
        stretch.pieces += chunk.pieces
        stretch.bounds += [(chunk.start, chunk.end)] * len(chunk.pieces)
        stretch.size += sum(map(len, chunk.pieces))
        stretch.end = chunk.end
        if stretch.size >= BATCH_BYTES:
            yield stretch
            stretch = None
    if stretch is not None:
        yield stretch


class _Decoder:
    """Turns stretches of a queue into record batches."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        wanted = options.wanted
        self._tags = None
        if wanted.kind == "TAG" and not wanted.passes_all:
            # Brokers compare hashes of tags; different tags may share one.
            tags = sorted(parse_tags(wanted.expression).tags)
            self._tags = listed([tag.encode() for tag in tags], pa.string())
        #: Columns that are decoded; `tags` at the end when it is only needed for the filter.
        self._columns = list(self._schema.names)
        if self._tags is not None and "tags" not in self._columns:
            self._columns.append("tags")

    def batches(self, stretch: _Stretch) -> list[pa.RecordBatch]:
        """One batch with everything, as a rule; nothing in it refers to the bytes any more."""
        found = self._decoded(stretch)
        if self._options.fail_on_data_loss and self._options.wanted.passes_all:
            self._check_count(stretch, sum(batch.num_rows for batch in found))
        chosen = map(self._chosen, found)
        return [self._shaped(batch) for batch in chosen if batch.num_rows]

    def _decoded(self, stretch: _Stretch) -> list[pa.RecordBatch]:
        if not stretch.pieces:
            return []
        try:
            return [
                messages_to_arrow(
                    stretch.pieces,
                    broker_name=stretch.queue.broker,
                    columns=self._columns,
                    bad_body=BadBody.NULL,
                    refuse_batches=True,
                )
            ]
        except BatchInside:
            return self._decoded(self._taken_apart(stretch))
        except ChunkTooLarge:
            # Compressed bodies that grow beyond what one column can hold.
            if len(stretch.pieces) == 1:
                raise
        except RecordInvalid as error:
            if self._options.fail_on_data_loss:
                raise DataLost(
                    [f"{stretch.queue}: what the broker sent is damaged: {error}"]
                ) from error
            if len(stretch.pieces) == 1:
                log.warning(
                    "a damaged answer of the broker is left out: %s",
                    error,
                    extra={"queue": str(stretch.queue), "offset": stretch.start},
                )
                return []
        first, second = stretch.halves()
        return self._decoded(first) + self._decoded(second)

    def _taken_apart(self, stretch: _Stretch) -> _Stretch:
        """The same with a record for each message."""
        pieces: list[Bytes] = []
        for piece, (start, end) in zip(stretch.pieces, stretch.bounds, strict=True):
            singles = [
                each for record in decode_messages(piece) for each in self._singles(stretch, record)
            ]
            pieces.append(
                b"".join(each.encode() for each in singles if start <= each.queue_offset < end)
            )
        return stretch.with_pieces(pieces, stretch.bounds)

    def _singles(self, stretch: _Stretch, record: StoredMessage) -> list[StoredMessage]:
        try:
            return without_inner_batches([record], record.queue_offset)
        except CodecMissing:
            raise
        except MessageError as error:
            problem = f"the batch at offset {record.queue_offset} cannot be taken apart: {error}"
            if self._options.fail_on_data_loss:
                raise DataLost([f"{stretch.queue}: {problem}"]) from error
            log.warning(
                "messages are left out: %s",
                problem,
                extra={"queue": str(stretch.queue), "offset": record.queue_offset},
            )
            return []

    def _check_count(self, stretch: _Stretch, count: int) -> None:
        """Without a filter every offset has a message."""
        wanted = QueueRange(stretch.queue, stretch.start, stretch.end)
        if count != len(wanted):
            problem = f"{wanted} has {count} messages instead of {len(wanted)}"
            raise DataLost([f"{problem} (a topic that its broker compacts has gaps)"])

    def _chosen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._tags is None:
            return batch
        is_wanted = pc.is_in(batch.column("tags"), value_set=self._tags)
        return batch if pc.all(is_wanted).as_py() else batch.filter(is_wanted)

    def _shaped(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = batch.columns[: len(self._schema.names)]
        if batch.schema == self._schema:
            return batch
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(columns, self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)
