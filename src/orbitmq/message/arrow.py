"""Stored messages as Arrow columns, without a Python object per message.

The columns hold what `stored.StoredMessage` returns, field by field. Bad input:

* Bytes that are no records raise `RecordInvalid` with the position.
* A topic or a property that is not UTF-8 is read with U+FFFD, as every client does.
* A body whose checksum is wrong, or that does not expand, raises; with `BadBody.NULL` it is null
  and the rest of the row is kept. A missing codec library always raises.
* A time outside the calendar is null.

Only requested columns are computed. Without `body`, checksums are not verified.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import starmap
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from orbitmq.message.properties import KEYS, TAGS, UNIQ_KEY
from orbitmq.message.record import (
    BATCH_MASK,
    BORN_HOST_V6,
    COMPRESSED,
    CRC_BITS,
    STORE_HOST_V6,
    V4_HOST_SIZE,
    V6_HOST_SIZE,
    BatchInside,
    BodyCorrupt,
    BodyTooLarge,
    ChunkTooLarge,
    CodecMissing,
    ColumnUnknown,
    CompressionFailed,
    RecordFault,
    RecordInvalid,
    crc32,
)
from orbitmq.message.scan import good_bodies, overlapping, scan_records, starts_with
from orbitmq.message.stored import MAX_EXPANDED_BODY, expand_body

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

#: What else a record has, for those that keep messages elsewhere; chosen by name only. Hosts are as
#: stored (4 or 16 bytes and a port of 4), `storedBody` is null unless `body` cannot be made of it.
RECORD_SCHEMA: Final = pa.schema(
    [
        ("sysFlag", pa.int32()),
        ("bodyCrc", pa.int32()),
        ("logOffset", pa.int64()),
        ("preparedLogOffset", pa.int64()),
        ("bornHost", pa.binary()),
        ("storeHost", pa.binary()),
        ("storedBody", pa.binary()),
    ]
)
_ALL_FIELDS: Final = {field.name: field for field in (*MESSAGE_SCHEMA, *RECORD_SCHEMA)}

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

    `columns` chooses names of `MESSAGE_SCHEMA` and `RECORD_SCHEMA`, in the order given. Rows whose
    queue offset is not within `first_offset` and `end_offset` (exclusive) are left out: a pull may
    return more than was asked for. `max_body` bounds one expanded body, `max_expanded` all of them
    together: beyond it `ChunkTooLarge` is raised. A record that holds a batch of messages is one
    row, or with `refuse_batches` raises `BatchInside`. Positions in errors count through all
    buffers. Chunks of a thousand messages and more are what this is made for: join small pulls by
    giving several.
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
        if name not in _ALL_FIELDS:
            raise ColumnUnknown(name, MESSAGE_SCHEMA.names)
    return pa.schema([_ALL_FIELDS[name] for name in columns])


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

    @cached_property
    def bodies(self) -> pa.BinaryArray:
        """The bodies, checked and expanded."""
        return _bodies(self)


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


def _hosts(chunk: _Chunk, at: Int64s, v6: int) -> pa.BinaryArray:
    is_v6 = chunk.records.sys_flags & v6 != 0
    return cut(chunk.data, at, at + np.where(is_v6, V6_HOST_SIZE, V4_HOST_SIZE))


def _stored_bodies(chunk: _Chunk) -> pa.BinaryArray:
    """The stored bytes of bodies that are null."""
    records, is_bad = chunk.records, chunk.bodies.is_null()
    if not chunk.bodies.null_count:
        return pa.nulls(len(records), _BINARY)
    stored = cut(chunk.data, records.body_at, records.body_at + records.body_sizes)
    return pc.if_else(is_bad, stored, pa.nulls(len(records), _BINARY))


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
    "body": lambda chunk: chunk.bodies,
    "flag": lambda chunk: numbers(chunk.records.flags),
    "reconsumeTimes": lambda chunk: numbers(chunk.records.reconsume_times),
    "bornTimestamp": lambda chunk: _times(chunk.records.born_ms),
    "storeTimestamp": lambda chunk: _times(chunk.records.store_ms),
    "properties": lambda chunk: chunk.items.map_column(),
    "sysFlag": lambda chunk: numbers(chunk.records.sys_flags),
    "bodyCrc": lambda chunk: numbers(chunk.records.crcs),
    "logOffset": lambda chunk: numbers(chunk.records.physical_offsets),
    "preparedLogOffset": lambda chunk: numbers(
        overlapping(chunk.data, ">i8")[chunk.records.body_at - 12].astype(np.int64)
    ),
    "bornHost": lambda chunk: _hosts(chunk, chunk.records.starts + 48, BORN_HOST_V6),
    "storeHost": lambda chunk: _hosts(chunk, chunk.records.store_host_at, STORE_HOST_V6),
    "storedBody": _stored_bodies,
}


# Pieces of a buffer as Arrow columns. An Arrow binary array is bytes and ascending offsets, so
# ascending cut points are an array already; every second slot is a wanted piece, and one `take`
# copies those. Columns are built from memory, not with `pa.array` or `pa.scalar`: these import
# pandas where it is installed, a quarter of a second and 40 MiB for every Spark worker.

_BINARY: Final = pa.binary()
_STRING: Final = pa.string()


def cut(
    buffer: Any, begins: Int64s, ends: Int64s, kind: pa.DataType = _BINARY
) -> pa.BinaryArray | pa.StringArray:
    """`buffer[begin:end]` of every row; the pieces ascend and do not overlap.

    Raw bytes, which `text` turns into text; or text at once, where it is known to be UTF-8.
    """
    count = len(begins)
    if not count:
        return pa.nulls(0, kind)
    cuts = np.empty(2 * count + 1, np.int32)
    cuts[:-1:2] = begins
    cuts[1::2] = ends
    cuts[-1] = cuts[-2]
    offsets, octets = pa.py_buffer(cuts), pa.py_buffer(buffer)
    pieces_and_gaps = pa.Array.from_buffers(kind, 2 * count, [None, offsets, octets])
    return pieces_and_gaps.take(numbers(np.arange(0, 2 * count, 2)))


def numbers(
    values: npt.NDArray[Any], kind: pa.DataType | None = None, *, valid: Bools | None = None
) -> pa.Array:
    """Numbers as a column over the same memory, null where they are not valid."""
    kind = kind or pa.from_numpy_dtype(values.dtype)
    bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [bits, pa.py_buffer(values)])


def flags(values: Bools) -> pa.BooleanArray:
    """Truth values as a column."""
    bits = pa.py_buffer(np.packbits(values, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, bits])


def truths(column: pa.BooleanArray) -> Bools:
    """The truth values of a column without nulls."""
    begin, count = column.offset, len(column)
    octets = np.frombuffer(column.buffers()[1], np.uint8)
    bits = np.unpackbits(octets, count=begin + count, bitorder="little")
    return bits[begin:].astype(np.bool_)


def listed(values: Sequence[bytes | None], kind: pa.DataType = _BINARY) -> pa.Array:
    """A column of these values."""
    sizes = [0 if value is None else len(value) for value in values]
    bounds = np.cumsum([0, *sizes], dtype=np.int32)
    valid = np.array([value is not None for value in values], np.bool_)
    octets = b"".join(value or b"" for value in values)
    bits = pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [bits, pa.py_buffer(bounds), pa.py_buffer(octets)]
    return pa.Array.from_buffers(kind, len(values), buffers)


def repeated(value: str, count: int) -> pa.StringArray:
    """The same text in every row."""
    octets = value.encode()
    bounds = np.arange(count + 1, dtype=np.int32) * np.int32(len(octets))
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(octets * count)]
    return pa.Array.from_buffers(_STRING, count, buffers)


def side_by_side(buffers: Sequence[Buffer]) -> memoryview | None:
    """Pieces of one buffer that lie one behind the other, as one piece; None if they do not."""
    owner = getattr(buffers[0], "obj", None) if buffers else None
    if owner is None or any(getattr(each, "obj", None) is not owner for each in buffers):
        return None
    places = [_address(each) for each in buffers]
    ends = [place + len(each) for place, each in zip(places, buffers, strict=True)]
    if places[1:] != ends[:-1]:
        return None
    begin = places[0] - _address(owner)
    return memoryview(owner)[begin : begin + ends[-1] - places[0]]


def _address(buffer: Buffer) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def text(pieces: pa.BinaryArray | pa.StringArray) -> pa.StringArray:
    """The pieces as text. What is not UTF-8 becomes U+FFFD: one bad message must not stop a job."""
    if pieces.type == _STRING:
        return pieces
    try:
        return pieces.cast(pa.string())
    except pa.ArrowInvalid:
        decoded = [
            None if piece is None else piece.decode("utf-8", "replace").encode()
            for piece in pieces.to_pylist()
        ]
        return listed(decoded, _STRING)


def is_utf8(octets: npt.NDArray[np.uint8]) -> bool:
    """Whether all of it is one valid text."""
    bounds = np.array([0, len(octets)], np.int32)
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(octets)]
    whole = pa.Array.from_buffers(pa.string(), 1, buffers)
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


# Property strings of many messages, decoded together. All separators are found in one pass over one
# array of bytes. The rules are those of `properties.decode_properties`: a missing last separator is
# added, a name ends at the first separator, items without name or value do not count, and the last
# of equal names wins. Strings as producers write them have one separator of each kind per item;
# that is checked first, and then no item needs a search.

_NAME_END: Final = 1
_ITEM_END: Final = 2
#: As many names as can be told apart by the bits of one number, with room for their sums: a
#: message has less than 2**14 items.
_BITS_FOR_NAMES: Final = 48


@dataclass(frozen=True, slots=True)
class PropertyItems:
    """Every property of a chunk of messages, as places in the bytes of their strings."""

    octets: npt.NDArray[np.uint8]
    #: Slots 0, 4, 8 ... are the names, slots 2, 6, 10 ... the values; what separates them is
    #: between. Text if all of it is UTF-8, else bytes.
    pieces: pa.StringArray | pa.BinaryArray
    name_at: Int64s
    name_sizes: Int64s
    #: Items of row `i` are those from `first_items[i]` to `first_items[i + 1]`.
    first_items: Int64s
    #: The row of each item.
    rows: Int64s

    def column(self, name: str) -> pa.StringArray:
        """The value of one property in every row, null where a row has none."""
        found = self._named(name.encode())
        rows = self.rows[found]
        count = len(self.first_items) - 1
        if len(found) == count and (rows[1:] != rows[:-1]).all():
            return text(self.pieces.take(numbers(found * 4 + 2)))
        if len(found):
            is_last = np.append(rows[1:] != rows[:-1], True)
            found, rows = found[is_last], rows[is_last]
        slots = np.zeros(count, np.int64)
        missing = np.ones(count, np.bool_)
        slots[rows] = found * 4 + 2
        missing[rows] = False
        return text(self.pieces.take(numbers(slots, valid=~missing)))

    def map_column(self) -> pa.MapArray:
        """All properties of every row."""
        items = np.arange(len(self.rows))
        names = text(self.pieces.take(numbers(items * 4)))
        first_items = self.first_items
        # Names are compared as text: two that are not UTF-8 may have become one.
        encoded = names.dictionary_encode()
        codes = np.frombuffer(encoded.indices.buffers()[1], np.int32, len(names)).astype(np.int64)
        if self._repeats_a_name(codes, len(encoded.dictionary)):
            items = _last_of_each(self.rows * len(encoded.dictionary) + codes)
            names = names.take(numbers(items))
            first_items = np.searchsorted(items, first_items)
        values = text(self.pieces.take(numbers(items * 4 + 2)))
        return pa.MapArray.from_arrays(numbers(first_items.astype(np.int32)), names, values)

    def _repeats_a_name(self, codes: Int64s, names: int) -> bool:
        """Whether any row has two items of one name; `codes` number the names."""
        if names > _BITS_FOR_NAMES:
            labels = self.rows * names + codes
            return len(np.unique(labels)) != len(labels)
        # One bit per name: the sum of a row's bits equals their union only if none comes twice.
        begins = self.first_items[:-1][np.diff(self.first_items) > 0]
        if not len(begins):
            return False
        bits = np.int64(1) << codes
        union, total = np.bitwise_or.reduceat(bits, begins), np.add.reduceat(bits, begins)
        return bool((union != total).any())

    def _named(self, name: bytes) -> Int64s:
        """The items of this name."""
        found = np.flatnonzero(self.name_sizes == len(name))
        return found[starts_with(self.octets, self.name_at[found], name)]


def find_items(strings: pa.BinaryArray) -> PropertyItems | UniformItems:
    """The items of the property strings of a chunk, one string per row."""
    _, offsets, data = strings.buffers()
    first_octets = np.frombuffer(offsets, np.int32, len(strings) + 1, strings.offset * 4)
    begin, end = int(first_octets[0]), int(first_octets[-1])
    octets = np.frombuffer(data, np.uint8)[begin:end] if end > begin else np.empty(0, np.uint8)
    octets, bounds = _end_all_items(octets, first_octets.astype(np.int64) - begin)
    uniform = find_uniform(octets, bounds)
    if uniform is not None:
        return uniform

    name_ends, item_ends = _separators(octets)
    item_at = np.empty_like(item_ends)
    item_at[:1] = 0
    item_at[1:] = item_ends[:-1] + 1
    if len(name_ends) != len(item_ends) or not _count(item_at, name_ends, item_ends).all():
        item_at, name_ends, item_ends = _search_items(item_at, name_ends, item_ends)
    first_items = np.searchsorted(item_ends, bounds)
    rows = np.repeat(np.arange(len(strings)), np.diff(first_items))
    pieces = _pieces(octets, item_at, name_ends, item_ends)
    return PropertyItems(octets, pieces, item_at, name_ends - item_at, first_items, rows)


def _end_all_items(
    octets: npt.NDArray[np.uint8], bounds: Int64s
) -> tuple[npt.NDArray[np.uint8], Int64s]:
    """The strings with a `\\x02` after the last item of each, and where they begin then."""
    ends = bounds[1:]
    filled = ends > bounds[:-1]
    unended = np.zeros(len(ends), np.bool_)
    unended[filled] = octets[ends[filled] - 1] != _ITEM_END
    if not unended.any():
        return octets, bounds
    moved = bounds.copy()
    moved[1:] += np.cumsum(unended)
    return np.insert(octets, ends[unended], _ITEM_END), moved


def _separators(octets: npt.NDArray[np.uint8]) -> tuple[Int64s, Int64s]:
    """The places of all `\\x01` and of all `\\x02`."""
    places = np.flatnonzero(octets <= _ITEM_END)
    kinds = octets[places]
    if (kinds[::2] == _NAME_END).all() and (kinds[1::2] == _ITEM_END).all():
        return places[::2], places[1::2]
    return places.compress(kinds == _NAME_END), places.compress(kinds == _ITEM_END)


def _count(item_at: Int64s, name_ends: Int64s, item_ends: Int64s) -> Bools:
    """Which items have a name and a value, given where their names end."""
    counting: Bools = (item_at < name_ends) & (name_ends < item_ends - 1)
    return counting


def _search_items(
    item_at: Int64s, name_ends: Int64s, item_ends: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """The items that count, where some hold no `\\x01`, several of them, or nothing beside it."""
    # Beyond every item, for those after which no \x01 follows at all.
    name_ends = np.append(name_ends, np.iinfo(np.int64).max)
    first_ends = name_ends[np.searchsorted(name_ends, item_at)]
    counting = _count(item_at, first_ends, item_ends)
    return item_at[counting], first_ends[counting], item_ends[counting]


def _pieces(
    octets: npt.NDArray[np.uint8], item_at: Int64s, name_ends: Int64s, item_ends: Int64s
) -> pa.StringArray | pa.BinaryArray:
    """Names and values of all items, and the separators, as one array over the bytes."""
    count = len(item_at)
    cuts = np.empty(4 * count + 1, np.int32)
    cuts[:-1:4] = item_at
    cuts[1::4] = name_ends
    cuts[2::4] = name_ends + 1
    cuts[3::4] = item_ends
    cuts[-1] = len(octets)
    # Separators are never part of a longer character: if the whole is UTF-8, so is every piece.
    kind = pa.string() if is_utf8(octets) else pa.binary()
    buffers = [None, pa.py_buffer(cuts), pa.py_buffer(octets)]
    return pa.Array.from_buffers(kind, 4 * count, buffers)


def _last_of_each(labels: Int64s) -> Int64s:
    """The places at which a number occurs for the last time, in order."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    is_last = np.append(ordered[1:] != ordered[:-1], True)
    return np.sort(order[is_last])


# Property strings with the same names in the same order, as one producer writes them. The first
# string gives the names. The others are checked, not assumed: each has as many items, and each item
# begins with its name and a separator and is not empty. The rest of the item is the value.

#: A chunk of fewer messages is not worth the fixed cost of looking at each name by itself.
_LEAST_ROWS: Final = 64
_MOST_NAMES: Final = 64


@dataclass(frozen=True, slots=True)
class UniformItems:
    """Every property of a chunk of messages that all have the same names."""

    names: tuple[bytes, ...]
    rows: int
    #: Those of the first row, in the order of the names, then those of the second, and so on.
    values: pa.StringArray

    def column(self, name: str) -> pa.StringArray:
        """The value of one property in every row, null where a row has none."""
        try:
            place = self.names.index(name.encode())
        except ValueError:
            return pa.nulls(self.rows, pa.string())
        count = len(self.names)
        return self.values.take(numbers(np.arange(place, count * self.rows, count)))

    def map_column(self) -> pa.MapArray:
        """All properties of every row."""
        count = len(self.names)
        first_items = np.arange(0, count * self.rows + 1, count, dtype=np.int32)
        return pa.MapArray.from_arrays(numbers(first_items), self._all_names(), self.values)

    def _all_names(self) -> pa.StringArray:
        text = b"".join(self.names)
        begins = np.cumsum([0, *map(len, self.names[:-1])], dtype=np.int32)
        bounds = np.empty(len(self.names) * self.rows + 1, np.int32)
        in_rows = bounds[:-1].reshape(self.rows, len(self.names))
        np.add.outer(np.arange(self.rows, dtype=np.int32) * len(text), begins, out=in_rows)
        bounds[-1] = len(text) * self.rows
        buffers = [None, pa.py_buffer(bounds), pa.py_buffer(text * self.rows)]
        return pa.Array.from_buffers(pa.string(), len(bounds) - 1, buffers)


def find_uniform(octets: npt.NDArray[np.uint8], bounds: Int64s) -> UniformItems | None:
    """The items of strings that lie side by side; None if their names differ, or are not simple."""
    rows = len(bounds) - 1
    if rows < _LEAST_ROWS:
        return None
    names = _names_of(octets[: bounds[1]].tobytes())
    if names is None:
        return None
    item_ends = np.flatnonzero(octets == _ITEM_END).astype(np.int32)
    if len(item_ends) != rows * len(names):
        return None
    ends = item_ends.reshape(rows, len(names))
    if (ends[:, -1] != bounds[1:] - 1).any():
        return None
    # Of every item the name with its end, the value, and the end of the item, one after the other.
    cuts = np.empty(3 * len(item_ends) + 1, np.int32)
    cuts[0] = 0
    cuts[2::3] = item_ends
    cuts[3::3] = item_ends + 1
    starts = [name + b"\x01" for name in names]
    parts = cuts[:-1].reshape(rows, len(names), 3)
    np.add(parts[:, :, 0], np.array([len(start) for start in starts], np.int32), parts[:, :, 1])
    # Separators are never part of a longer character: if the whole is UTF-8, so is every piece.
    if (parts[:, :, 1] >= ends).any() or not is_utf8(octets):
        return None
    buffers = [None, pa.py_buffer(cuts), pa.py_buffer(octets)]
    pieces = pa.Array.from_buffers(pa.string(), len(cuts) - 1, buffers)
    places = np.arange(0, len(cuts) - 1, 3)
    if not _are_repeated(pieces.take(numbers(places)), b"".join(starts), rows):
        return None
    return UniformItems(names, rows, pieces.take(numbers(places + 1)))


def _are_repeated(pieces: pa.StringArray, text: bytes, times: int) -> bool:
    """Whether texts, one after the other, are one text again and again."""
    octets = pieces.buffers()[2].slice(0, len(text) * times)
    return bool(octets.equals(pa.py_buffer(text * times)))


def _names_of(string: bytes) -> tuple[bytes, ...] | None:
    """The names of a string in which nothing is out of the ordinary."""
    items = string.split(b"\x02")
    if items.pop() or not 0 < len(items) <= _MOST_NAMES:
        return None
    pairs = [item.partition(b"\x01") for item in items]
    names = tuple(name for name, _, _ in pairs)
    is_plain = all(name and value for name, _, value in pairs)
    return names if is_plain and len(set(names)) == len(names) else None
