"""Stored messages as Arrow columns, without a Python object per message.

The columns hold what `stored.StoredMessage` would say, field by field. Where the two could differ
in what they do about bad input, the rule is:

* Bytes that are no records raise `RecordInvalid` with the position; nothing after it can be found.
* A topic or a property that is not UTF-8 is read with U+FFFD in it, as by every client.
* A body that does not match its checksum, or does not expand, raises by default. With
  `BadBody.NULL` it is null (no other body is) and the rest of the row is kept, so that a job can
  count such rows, set them aside and go on. A missing codec library raises in any case: then it is
  not the message that is bad.
* A time that no calendar has (a producer may send any number) is null.

Only what the asked columns need is computed. Without `body`, checksums are not looked at.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import starmap
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orbitmq.message.checksum import CRC_BITS, crc32
from orbitmq.message.compression import MAX_EXPANDED_BODY, expand_body
from orbitmq.message.errors import (
    BatchInside,
    BodyCorrupt,
    BodyTooLarge,
    ChunkTooLarge,
    CodecMissing,
    ColumnUnknown,
    CompressionFailed,
    RecordInvalid,
)
from orbitmq.message.hosts import V4_HOST_SIZE, V6_HOST_SIZE
from orbitmq.message.propertycolumns import PropertyItems, find_items
from orbitmq.message.propertylayout import UniformItems
from orbitmq.message.record import RecordFault
from orbitmq.message.scan import good_bodies, scan_records, starts_with
from orbitmq.message.slices import cut, flags, listed, numbers, repeated, side_by_side, text, truths
from orbitmq.message.sysflag import BATCH_MASK, COMPRESSED, STORE_HOST_V6
from orbitmq.message.wellknown import KEYS, TAGS, UNIQ_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orbitmq.message.record import Buffer
    from orbitmq.message.scan import Bools, Int64s, RecordArrays

_TIME: Final = pa.timestamp("us", tz="UTC")

#: All columns, in the order and with the types in which the Spark source declares them.
MESSAGE_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("brokerName", pa.string()),
        ("queueId", pa.int32()),
        ("queueOffset", pa.int64()),
        ("msgId", pa.string()),
        ("tags", pa.string()),
        ("keys", pa.string()),
        ("body", pa.binary()),
        ("flag", pa.int32()),
        ("reconsumeTimes", pa.int32()),
        ("bornTimestamp", _TIME),
        ("storeTimestamp", _TIME),
        ("properties", pa.map_(pa.string(), pa.string())),
    ]
)

#: Offsets in a column are 32 bits wide.
MAX_CHUNK: Final = 0x7FFFFFFF

#: Bodies that are copied in less time than a reference to them is made.
_UNPACKED: Final = 2048

#: The years 1 to 9999, in milliseconds: beyond them neither Python nor Spark has dates. Without the
#: first and the last day, which lie beyond in some time zone.
_DAY_MS: Final = 86_400_000
_FIRST_MS: Final = -62_135_596_800_000 + _DAY_MS
_LAST_MS: Final = 253_402_300_799_999 - _DAY_MS


class BadBody(enum.Enum):
    """What becomes of a body that is damaged or cannot be expanded."""

    RAISE = "raise"
    NULL = "null"


def messages_to_arrow(
    buffers: Buffer | Sequence[Buffer],
    *,
    broker_name: str,
    columns: Sequence[str] | None = None,
    first_offset: int | None = None,
    end_offset: int | None = None,
    bad_body: BadBody = BadBody.RAISE,
    check_crc: bool = True,
    max_body: int = MAX_EXPANDED_BODY,
    max_expanded: int = MAX_CHUNK,
    refuse_batches: bool = False,
) -> pa.RecordBatch:
    """The messages of one or several pulls as one record batch.

    `columns` chooses names of `MESSAGE_SCHEMA`, in the order given. Rows whose queue offset is not
    within `first_offset` and `end_offset` (exclusive) are left out: a pull may return more than
    was asked for. `max_body` bounds one expanded body, `max_expanded` all of them together: beyond
    it `ChunkTooLarge` is raised. A record that holds a batch of messages is one row, or with
    `refuse_batches` raises `BatchInside`. Positions in errors count through all buffers. Chunks of
    a thousand messages and more are what this is made for: join small pulls by giving several.
    """
    schema = MESSAGE_SCHEMA if columns is None else _chosen(tuple(columns))
    data = _joined(buffers)
    records = _within(_whole_records(data, buffers), first_offset, end_offset)
    if refuse_batches:
        _check_single(records)
    if not schema.names:
        # A count needs no column, and a batch without columns would otherwise have no rows.
        return pa.RecordBatch.from_struct_array(
            pa.Array.from_buffers(pa.struct([]), len(records), [None])
        )
    chunk = _Chunk(data, records, broker_name, bad_body, check_crc, max_body, max_expanded)
    return pa.RecordBatch.from_arrays([_COLUMNS[n](chunk) for n in schema.names], schema=schema)


@lru_cache(maxsize=64)
def _chosen(columns: tuple[str, ...]) -> pa.Schema:
    for name in columns:
        if name not in MESSAGE_SCHEMA.names:
            raise ColumnUnknown(name, MESSAGE_SCHEMA.names)
    return pa.schema([MESSAGE_SCHEMA.field(name) for name in columns])


# ---- finding the records


def _joined(buffers: Buffer | Sequence[Buffer]) -> memoryview:
    if isinstance(buffers, bytes | bytearray | memoryview):
        data = memoryview(buffers).cast("B")
    elif len(buffers) == 1:
        data = memoryview(buffers[0]).cast("B")
    else:
        data = side_by_side(buffers) or memoryview(b"".join(buffers))
    if len(data) > MAX_CHUNK:
        raise ChunkTooLarge("the messages", MAX_CHUNK)
    return data


def _whole_records(data: memoryview, buffers: Buffer | Sequence[Buffer]) -> RecordArrays:
    found = scan_records(data, check_crc=False)
    if found.fault is not None:
        raise RecordInvalid(found.stopped_at, found.fault.value)
    records = found.records
    if isinstance(buffers, bytes | bytearray | memoryview) or len(buffers) < 2:
        return records
    # A record cut off at the end of one pull must not be completed by the beginning of the next.
    seams = np.cumsum([memoryview(b).nbytes for b in buffers[:-1]])
    bounds = np.append(records.starts, len(data))
    rows = np.searchsorted(bounds, seams)
    if (is_inside := bounds[rows] != seams).any():
        row = int(rows[is_inside.argmax()])
        raise RecordInvalid(int(records.starts[row - 1]), RecordFault.CUT_SHORT.value)
    return records


def _within(records: RecordArrays, first: int | None, end: int | None) -> RecordArrays:
    wanted = np.ones(len(records), np.bool_)
    if first is not None:
        wanted &= records.queue_offsets >= first
    if end is not None:
        wanted &= records.queue_offsets < end
    return records if wanted.all() else records.rows(wanted)


def _check_single(records: RecordArrays) -> None:
    flags_of_all = int(np.bitwise_or.reduce(records.sys_flags, initial=0))
    # Hardly ever is a bit of it in any record: then one pass is all that this costs.
    if flags_of_all & BATCH_MASK == BATCH_MASK:
        are_batches = records.sys_flags & BATCH_MASK == BATCH_MASK
        if are_batches.any():
            raise BatchInside(int(records.starts[are_batches.argmax()]))


# ---- making columns of them


@dataclass(frozen=True)
class _Chunk:
    """The records of one batch, and how they are to be read."""

    data: memoryview
    records: RecordArrays
    broker_name: str
    bad_body: BadBody
    check_crc: bool
    max_body: int
    max_expanded: int

    @cached_property
    def items(self) -> PropertyItems | UniformItems:
        """The properties of all rows: several columns come from them."""
        return find_items(cut(self.data, self.records.properties_at, self.records.ends))


def _topics(chunk: _Chunk) -> pa.StringArray:
    records = chunk.records
    if len(records) and (records.topic_sizes == records.topic_sizes[0]).all():
        # All of one queue have the same: to look for it costs less than to cut it out.
        at = int(records.topic_at[0])
        first = bytes(chunk.data[at : at + int(records.topic_sizes[0])])
        if starts_with(np.frombuffer(chunk.data, np.uint8), records.topic_at, first).all():
            return repeated(first.decode("utf-8", "replace"), len(records))
    return text(cut(chunk.data, records.topic_at, records.topic_at + records.topic_sizes))


def _broker_names(chunk: _Chunk) -> pa.StringArray:
    return repeated(chunk.broker_name, len(chunk.records))


def _message_ids(chunk: _Chunk) -> pa.StringArray:
    unique = chunk.items.column(UNIQ_KEY)
    if not unique.null_count:
        return unique
    without = unique.is_null()
    offset_ids = _offset_ids(chunk.data, chunk.records.rows(truths(without)))
    return pc.replace_with_mask(unique, without, offset_ids)


def _times(milliseconds: Int64s) -> pa.TimestampArray:
    unreal = (milliseconds < _FIRST_MS) | (milliseconds > _LAST_MS)
    if not unreal.any():
        return numbers(milliseconds * 1000, _TIME)
    return numbers(np.where(unreal, 0, milliseconds) * 1000, _TIME, valid=~unreal)


def _bodies(chunk: _Chunk) -> pa.BinaryArray:
    """The bodies as their producers gave them: checked and expanded."""
    records = chunk.records
    bodies = cut(chunk.data, records.body_at, records.body_at + records.body_sizes)
    bad = np.zeros(len(records), np.bool_)
    if chunk.check_crc:
        bad = ~_match_sums(bodies, chunk)
        if chunk.bad_body is BadBody.RAISE and bad.any():
            row = int(bad.argmax())
            raise BodyCorrupt(f"{_place(records, row)} does not match its checksum")
    packed = (records.sys_flags & COMPRESSED).astype(np.bool_) & (records.body_sizes > 0)
    changed = bad | packed
    if not changed.any():
        return bodies
    return pc.replace_with_mask(bodies, flags(changed), _expanded(chunk, changed, bad))


def _match_sums(bodies: pa.BinaryArray, chunk: _Chunk) -> Bools:
    """Which bodies match their checksums."""
    records = chunk.records
    size = int(records.body_sizes[0]) if len(records) else 0
    if not 0 < size <= _UNPACKED or (records.body_sizes != size).any():
        return good_bodies(chunk.data, records)
    # Side by side and of one size: they need not be cut out one by one.
    octets = memoryview(bodies.buffers()[2])[: size * len(records)]
    each = starmap(crc32, struct.iter_unpack(f"{size}s", octets))
    matching: Bools = np.fromiter(each, np.int64, len(records)) & CRC_BITS == records.crcs
    return matching


def _expanded(chunk: _Chunk, changed: Bools, bad: Bools) -> pa.BinaryArray:
    """The bodies of the `changed` rows: null if they are bad, else expanded."""
    # All of it must fit into one column beside what is not compressed.
    room = min(MAX_CHUNK - len(chunk.data), chunk.max_expanded)
    expanded: list[bytes | None] = []
    for row in np.flatnonzero(changed).tolist():
        body = None if bad[row] else _expand(chunk, row, room)
        room -= len(body or b"")
        expanded.append(body)
    return listed(expanded)


def _expand(chunk: _Chunk, row: int, room: int) -> bytes | None:
    records = chunk.records
    at, size = int(records.body_at[row]), int(records.body_sizes[row])
    limit = min(chunk.max_body, room)
    try:
        return expand_body(chunk.data[at : at + size], int(records.sys_flags[row]), limit=limit)
    except CodecMissing:
        raise
    except CompressionFailed as error:
        if isinstance(error, BodyTooLarge) and limit < chunk.max_body:
            most = min(MAX_CHUNK, chunk.max_expanded)
            raise ChunkTooLarge("the expanded bodies", most) from error
        if chunk.bad_body is BadBody.NULL:
            return None
        if isinstance(error, BodyTooLarge):
            raise
        reason = f"{_place(records, row)} cannot be expanded: {error}"
        raise CompressionFailed(reason) from error


def _place(records: RecordArrays, row: int) -> str:
    return (
        f"the body of the message at offset {records.queue_offsets[row]} "
        f"of queue {records.queue_ids[row]} (byte {records.starts[row]})"
    )


def _offset_ids(data: memoryview, records: RecordArrays) -> pa.StringArray:
    """The offset ids of all rows: store host and commit-log offset in hexadecimal."""
    octets = np.frombuffer(data, np.uint8)
    is_v6 = (records.sys_flags & STORE_HOST_V6).astype(np.bool_)
    parts, order = [], []
    for size, wanted in ((V4_HOST_SIZE, ~is_v6), (V6_HOST_SIZE, is_v6)):
        rows = np.flatnonzero(wanted)
        hosts = octets[records.store_host_at[rows, None] + np.arange(size)]
        offsets = octets[records.starts[rows, None] + np.arange(28, 36)]
        digits = _HEX_DIGITS[np.hstack((hosts, offsets))].reshape(-1)
        width = 2 * (size + 8)
        bounds = np.arange(0, len(digits) + 1, width, dtype=np.int32)
        buffers = [None, pa.py_buffer(bounds), pa.py_buffer(digits)]
        parts.append(pa.Array.from_buffers(pa.string(), len(rows), buffers))
        order.append(rows)
    return pa.concat_arrays(parts).take(numbers(np.argsort(np.concatenate(order))))


_HEX_DIGITS: Final = np.array(
    [tuple(f"{octet:02X}".encode()) for octet in range(256)], dtype=np.uint8
)

_COLUMNS: Final[Mapping[str, Callable[[_Chunk], pa.Array]]] = {
    "topic": _topics,
    "brokerName": _broker_names,
    "queueId": lambda chunk: numbers(chunk.records.queue_ids),
    "queueOffset": lambda chunk: numbers(chunk.records.queue_offsets),
    "msgId": _message_ids,
    "tags": lambda chunk: chunk.items.column(TAGS),
    "keys": lambda chunk: chunk.items.column(KEYS),
    "body": _bodies,
    "flag": lambda chunk: numbers(chunk.records.flags),
    "reconsumeTimes": lambda chunk: numbers(chunk.records.reconsume_times),
    "bornTimestamp": lambda chunk: _times(chunk.records.born_ms),
    "storeTimestamp": lambda chunk: _times(chunk.records.store_ms),
    "properties": lambda chunk: chunk.items.map_column(),
}
