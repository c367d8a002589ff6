"""Reads a partition: pulled bytes become record batches, without an object for each message.

Invariant: a bad message never fails a task, or the query would fail at it after every restart. A
body that is damaged or cannot be decompressed is null. Missing messages fail the task or not, as
`failOnDataLoss` says.

Record batches are limited by their decompressed size, which is estimated from earlier messages.
Trap: in RocketMQ 5 a record may hold several messages, and comes with every pull that starts
inside it. Such records are split, and each chunk takes the messages of its own offsets.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orbitmq.client.ranges.connections import OffsetsGone, QueueRange
from orbitmq.client.ranges.read import (
    ANSWER_BYTES,
    Bytes,
    Chunk,
    Missing,
    RangeSettings,
    ReceiveBuffer,
    WindowLimits,
    read_ranges,
)
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused
from orbitmq.filter.tags import SQL92, MessageFilter, compile_filter, parse_tags
from orbitmq.message.arrow import BadBody, flags, listed, messages_to_arrow
from orbitmq.message.record import (
    BatchInside,
    BodyCorrupt,
    ChunkTooLarge,
    CodecMissing,
    CompressionFailed,
    MessageError,
    RecordInvalid,
)
from orbitmq.message.stored import (
    MAX_EXPANDED_BODY,
    StoredMessage,
    decode_messages,
    without_inner_batches,
)
from orbitmq.names import TOOLS_GROUP
from orbitmq.spark.archived import ArchivedRange, archived_batches, archived_since
from orbitmq.spark.bodies import CORRUPT, VALUE, BodyDecoder, BodyRefused, value_in
from orbitmq.spark.internals import (
    cause_first,
    connections_to,
    exit_quietly,
    freeze_modules,
    receive_buffer,
)
from orbitmq.spark.options import DataLost, UnnamedReadRefused
from orbitmq.spark.source import COLUMNS, arrow_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from orbitmq.spark.options import ReadOptions


log = logging.getLogger(__name__)

#: Bytes of messages in one record batch. Spark's best size is 4 to 16 MiB; decoding a batch costs
#: half a millisecond plus its bytes, a tenth of the time at 4 MiB.
BATCH_BYTES: Final = 8 * 1024 * 1024
#: The assumed growth of compressed bodies: at first zlib's maximum, and the least later.
_FIRST_GROWTH: Final = 1024.0
_LEAST_GROWTH: Final = 4.0
#: The decompressed bytes of a batch with several compressed bodies.
_MOST_EXPANDED: Final = 2 * BATCH_BYTES

_SIZE_BYTES: Final = 4
_read_size = struct.Struct(">i").unpack_from


def read_partition(
    ranges: Sequence[QueueRange],
    options: ReadOptions,
    schema: StructType,
    archived: Sequence[ArchivedRange] = (),
) -> Iterator[pa.RecordBatch]:
    """The messages of a partition as record batches of the schema, archived ones first."""
    exit_quietly()
    with cause_first():
        decoder = _Decoder(options, schema)
        for each in archived:
            yield from decoder.archived(each)
        yield from _record_batches(ranges, options, decoder)
    freeze_modules()


def _record_batches(
    ranges: Sequence[QueueRange], options: ReadOptions, decoder: _Decoder
) -> Iterator[pa.RecordBatch]:
    left, may_skip = tuple(ranges), not options.fail_on_data_loss and options.archive is None
    while True:
        try:
            with receive_buffer(BATCH_BYTES + 2 * ANSWER_BYTES) as memory:
                for stretch in _joined(_chunks(left, options, memory, may_skip=may_skip)):
                    yield from decoder.batches(stretch)
                    # Decoding copies.
                    memory.release(stretch.pieces)
                    left = _left_after(left, stretch)
        except OffsetsGone as gone:
            # Deleted since the read was planned: it is in the archive, if there is one.
            older = archived_since(gone, left, options.archive)
            if older is None and options.fail_on_data_loss:
                raise DataLost([str(gone)]) from gone
            if older is None:
                may_skip = True
                continue
            yield from decoder.archived(older)
            left = _left_after(left, older.wanted)
            if not left:
                return
        except BrokerRefused as refused:
            if _is_for_want_of_a_group(refused, options.group):
                raise UnnamedReadRefused(options.group, str(refused)) from refused
            raise
        else:
            return


def _left_after(
    ranges: tuple[QueueRange, ...], done: _Stretch | QueueRange
) -> tuple[QueueRange, ...]:
    """What is left of ranges that are read in order, after a part of one of them."""
    left = []
    for each in ranges:
        if each.queue == done.queue and each.start < done.end and done.start < each.end:
            each = QueueRange(each.queue, min(done.end, each.end), each.end)
        if len(each):
            left.append(each)
    return tuple(left)


def _is_for_want_of_a_group(refused: BrokerRefused, group: str) -> bool:
    """Whether an account lacks the permission for the default group, which the broker names."""
    is_about_it = group == TOOLS_GROUP and group in refused.remark
    return is_about_it and refused.name == "NO_PERMISSION"


def _chunks(
    ranges: Sequence[QueueRange], options: ReadOptions, memory: ReceiveBuffer, *, may_skip: bool
) -> Iterator[Chunk]:
    return read_ranges(
        connections_to(options.access),
        ranges,
        group=options.group,
        wanted=options.wanted,
        settings=RangeSettings(
            missing=Missing.SKIP if may_skip else Missing.RAISE,
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
    #: The offsets of each piece, as start and end.
    bounds: list[tuple[int, int]]
    size: int

    def halves(self) -> tuple[_Stretch, _Stretch]:
        """The stretch in two halves."""
        middle = len(self.pieces) // 2
        return (
            self.with_pieces(self.pieces[:middle], self.bounds[:middle]),
            self.with_pieces(self.pieces[middle:], self.bounds[middle:]),
        )

    def with_pieces(self, pieces: list[Bytes], bounds: list[tuple[int, int]]) -> _Stretch:
        return _Stretch(self.queue, self.start, self.end, pieces, bounds, sum(map(len, pieces)))

    def first(self, most: int) -> tuple[_Stretch, _Stretch]:
        """The first records with at most `most` bytes, at least one; and the rest."""
        count, room = 0, most
        while count < len(self.pieces) and len(self.pieces[count]) <= room:
            room -= len(self.pieces[count])
            count += 1
        pieces, bounds = self.pieces[:count], self.bounds[:count]
        rest, rest_bounds = self.pieces[count:], self.bounds[count:]
        if rest and (cut := _whole_records(rest[0], room, at_least_one=not count)):
            pieces, bounds = [*pieces, rest[0][:cut]], [*bounds, rest_bounds[0]]
            if cut < len(rest[0]):
                rest = [rest[0][cut:], *rest[1:]]
            else:
                rest, rest_bounds = rest[1:], rest_bounds[1:]
        return self.with_pieces(pieces, bounds), self.with_pieces(rest, rest_bounds)


def _whole_records(piece: Bytes, most: int, *, at_least_one: bool) -> int:
    """The end of the last record within `most` bytes; damaged records are not cut."""
    at = 0
    while len(piece) - at >= _SIZE_BYTES:
        end = at + _read_size(piece, at)[0]
        if not at < end <= len(piece):
            return len(piece) if at_least_one and not at else at
        if end > most and (at or not at_least_one):
            return at
        at = end
    return len(piece) if at_least_one and not at else at


def _joined(chunks: Iterator[Chunk]) -> Iterator[_Stretch]:
    """Join chunks until they fill a record batch."""
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
            # Brokers compare hashes of tags, which different tags may share.
            tags = sorted(parse_tags(wanted.expression).tags)
            self._tags = listed([tag.encode() for tag in tags], pa.string())
        #: The growth of bodies, and whether the last ones were compressed.
        self._growth = _FIRST_GROWTH
        self._are_packed = False
        #: The decoded columns; `tags` comes last when only the filter needs it.
        self._columns = [name for name in self._schema.names if name in COLUMNS]
        if self._tags is not None and "tags" not in self._columns:
            self._columns.append("tags")
        self._bodies: BodyDecoder | None = None
        if options.body is not None and (kind := value_in(schema)) is not None:
            self._bodies = BodyDecoder(options.body, kind)
            self._columns += [n for n in ("body", "queueOffset") if n not in self._columns]
        #: The condition that brokers check for the messages that they have.
        self._condition: MessageFilter | None = None
        if options.archive is not None and wanted.kind == SQL92:
            self._condition = compile_filter(wanted.expression, SQL92)

    def archived(self, each: ArchivedRange) -> Iterator[pa.RecordBatch]:
        """The record batches of a range in the archive."""
        count, columns = 0, list(self._columns)
        if self._condition is not None and "properties" not in columns:
            columns.append("properties")
        for batch in archived_batches(each, self._options.archive or "", columns):
            count += batch.num_rows
            chosen = self._chosen(self._fulfilling(batch))
            if chosen.num_rows:
                yield self._shaped(chosen, each.wanted.queue)
        if self._options.fail_on_data_loss and count != len(each.wanted):
            raise DataLost(
                [f"{each.wanted} has {count} messages instead of {len(each.wanted)} in the archive"]
            )

    def _fulfilling(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The messages that fulfil the condition; each is looked at by itself."""
        if self._condition is None:
            return batch
        accepts = self._condition.accepts_properties
        rows = batch.column("properties").to_pylist()
        return batch.filter(flags(np.array([accepts(dict(each)) for each in rows], np.bool_)))

    def batches(self, stretch: _Stretch) -> Iterator[pa.RecordBatch]:
        """The record batches of a stretch, usually one; they do not refer to its bytes."""
        count = 0
        for batch in self._bounded(stretch):
            count += batch.num_rows
            chosen = self._chosen(batch)
            if chosen.num_rows:
                yield self._shaped(chosen, stretch.queue)
        if self._options.fail_on_data_loss and self._options.wanted.passes_all:
            self._check_count(stretch, count)

    def _bounded(self, stretch: _Stretch) -> Iterator[pa.RecordBatch]:
        """Record batches of bounded decompressed size."""
        if not self._are_packed and (plain := self._plain(stretch)) is not None:
            yield plain
            return
        expanded, left = 0, stretch
        while left.pieces:
            some, left = left.first(int(BATCH_BYTES / self._growth))
            grown = 0
            for batch in self._decoded(some):
                if "body" in self._columns:
                    grown += batch.column("body").nbytes
                yield batch
            expanded += grown
            self._growth = max(_LEAST_GROWTH, self._growth / 4, grown / max(1, some.size))
        # Otherwise bodies are uncompressed by now, and decoded together again.
        self._are_packed = expanded > stretch.size

    def _plain(self, stretch: _Stretch) -> pa.RecordBatch | None:
        """All messages in one batch; None if one is compressed or bad."""
        if not stretch.pieces:
            return None
        try:
            return self._converted(stretch, BadBody.RAISE, max_expanded=0)
        except CodecMissing:
            raise
        except (BatchInside, BodyCorrupt, CompressionFailed, ChunkTooLarge, RecordInvalid):
            return None

    def _converted(self, stretch: _Stretch, bad_body: BadBody, max_expanded: int) -> pa.RecordBatch:
        return messages_to_arrow(
            stretch.pieces,
            broker_name=stretch.queue.broker,
            columns=self._columns,
            bad_body=bad_body,
            max_expanded=max_expanded,
            refuse_batches=True,
        )

    def _decoded(self, stretch: _Stretch) -> Iterator[pa.RecordBatch]:
        """The messages in batches of bounded size, usually one."""
        if not stretch.pieces:
            return
        try:
            batch = self._converted(stretch, BadBody.NULL, _MOST_EXPANDED)
        except BatchInside:
            parts: Iterable[_Stretch] = self._taken_apart(stretch)
        except ChunkTooLarge:
            parts = stretch.first(stretch.size // 2)
            if not parts[1].pieces:
                # A single large message.
                yield self._converted(stretch, BadBody.NULL, MAX_EXPANDED_BODY)
                return
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
                return
            parts = stretch.halves()
        else:
            yield batch
            return
        for part in parts:
            yield from self._decoded(part)

    def _taken_apart(self, stretch: _Stretch) -> Iterator[_Stretch]:
        """Split records with several messages, up to the size of a record batch at a time."""
        pieces: list[Bytes] = []
        bounds: list[tuple[int, int]] = []
        size = 0
        for piece, (start, end) in zip(stretch.pieces, stretch.bounds, strict=True):
            for record in decode_messages(piece):
                singles = self._singles(stretch, record)
                pieces.append(
                    b"".join(each.encode() for each in singles if start <= each.queue_offset < end)
                )
                bounds.append((start, end))
                size += len(pieces[-1])
                if size >= BATCH_BYTES:
                    yield stretch.with_pieces(pieces, bounds)
                    pieces, bounds, size = [], [], 0
        yield stretch.with_pieces(pieces, bounds)

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

    def _shaped(self, batch: pa.RecordBatch, queue: Queue) -> pa.RecordBatch:
        if batch.schema == self._schema:
            return batch
        found = dict(zip(batch.schema.names, batch.columns, strict=True))
        if self._bodies is not None:
            found |= self._decoded_bodies(batch, queue)
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in ((found[field.name], field) for field in self._schema)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _decoded_bodies(self, batch: pa.RecordBatch, queue: Queue) -> dict[str, pa.Array]:
        """The columns of decoded bodies. Raises `BodyRefused`."""
        body = self._options.body
        assert body is not None  # noqa: S101  # the caller has a decoder
        assert self._bodies is not None  # noqa: S101
        bodies = batch.column("body")
        found = self._bodies.decode(bodies)
        if found.problems and body.bad == "fail":
            row, reason = min(found.problems.items())
            place = f"{queue} at offset {batch.column('queueOffset')[row].as_py()}"
            raise BodyRefused(place, body.form, reason)
        columns = {VALUE: found.value}
        if CORRUPT in self._schema.names:
            columns[CORRUPT] = found.corrupt(bodies)
        return columns
