"""Turns large batches into stored records by columns: checked, numbered and laid out as a whole.

The elements of a batch and the records of the log hold the same parts in the same order with the
same lengths before them; a record has more fields in front, and its topic between body and
properties. So heads are made as one array, and bodies and properties are cut out as they are.

The records are equal to those that `batch_fields` and `encode_record` make one by one. A batch with
anything unusual in it is left to these, which know what is wrong with it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orbitmq.message.record import CONSTANTS_SIZE, CRC_BITS, FIXED_SIZE, Buffer, crc32, magic_for
from orbitmq.message.stored import MIN_ELEMENT_SIZE

if TYPE_CHECKING:
    from orbitmq.message.scan import Int64s

#: Batches of fewer messages are faster one by one.
LARGE: Final = 64

#: Bodies of this size and larger are not copied on their way.
_VIEW_FROM: Final = 512

_read_int = struct.Struct(">i").unpack_from
_INT, _SHORT = np.dtype(">i4"), np.dtype(">i2")
#: Where the body of an element begins. Before it stand five numbers, of which three mean something.
_BODY_AT: Final = 20
_ANY_HEAD: Final = np.dtype(f"V{_BODY_AT}")
_SIZE, _FLAG, _BODY_SIZE = 0, 3, 4

#: What stands before the body of a record, by the length of its constants.
_HEADS: Final = {
    length: np.dtype(
        [
            ("size", ">i4"),
            ("magic", ">i4"),
            ("crc", ">i4"),
            ("queue_id", ">i4"),
            ("flag", ">i4"),
            ("number", ">i8"),
            ("at", ">i8"),
            ("constants", f"V{length}"),
            ("body_size", ">i4"),
        ]
    )
    for length in (48, 60, 72)
}


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """The parts of the messages of a large batch, whose layout and properties are checked."""

    batch: Buffer
    bodies: list[Buffer]
    body_sizes: Int64s
    tails: list[bytes]  #: properties, with their length before them
    joined_tails: bytes
    sizes: Int64s  #: of whole elements
    flags: Int64s

    def __len__(self) -> int:
        return len(self.bodies)


def batch_columns(batch: Buffer) -> BatchColumns | None:
    """The columns of a large batch; None if it is small or anything about it is unusual."""
    end = len(batch)
    # Small ones are told by their first element, without a walk.
    if end < LARGE * MIN_ELEMENT_SIZE or 2 * LARGE * _read_int(batch)[0] > 3 * end:
        return None
    data = bytes(batch)
    any_head = np.ndarray((end - _BODY_AT + 1,), _ANY_HEAD, data, strides=(1,))
    at = _equal_starts(any_head, end, _read_int(data)[0])
    starts = _starts(data) if at is None else at.tolist()
    if at is None:
        at = np.array(starts, np.int64)
    heads = any_head[at]
    count = len(starts)
    if count < LARGE:
        return None
    fields = heads.view(_INT).reshape(count, -1).astype(np.int64)
    sizes, body_sizes = fields[:, _SIZE], fields[:, _BODY_SIZE]
    properties_sizes = sizes - body_sizes - MIN_ELEMENT_SIZE
    if (body_sizes | properties_sizes).min() < 0:
        return None
    tails_at = at + body_sizes + _BODY_AT
    lengths = np.ndarray((end - 1,), _SHORT, data, strides=(1,))[tails_at]
    if (lengths != properties_sizes).any():
        return None
    cuts = tails_at.tolist()
    tails = [data[cut:stop] for cut, stop in zip(cuts, [*starts[1:], end], strict=True)]
    joined = b"".join(tails)
    if joined.count(0) != lengths.tobytes().count(0):
        return None  # zeros in properties are looked at more closely
    whole: Buffer = data if end < count * _VIEW_FROM else memoryview(data)
    return BatchColumns(
        batch=data,
        bodies=[whole[start + _BODY_AT : cut] for start, cut in zip(starts, cuts, strict=True)],
        body_sizes=body_sizes,
        tails=tails,
        joined_tails=joined,
        sizes=sizes,
        flags=fields[:, _FLAG],
    )


def _equal_starts(any_head: NDArray[np.void], end: int, size: int) -> Int64s | None:
    """Where the elements begin if all have this size."""
    if size < MIN_ELEMENT_SIZE or end % size:
        return None
    at: Int64s = np.arange(0, end, size)
    sizes = any_head[at].view(_INT)[_SIZE :: _BODY_AT // _INT.itemsize]
    return at if (sizes == size).all() else None


def _starts(data: bytes) -> list[int]:
    """Where the elements begin, up to the end; nothing if their sizes do not lead there."""
    at, end, starts = 0, len(data), []
    read_int, least = _read_int, MIN_ELEMENT_SIZE
    try:
        while at < end:
            starts.append(at)
            (size,) = read_int(data, at)
            if size < least:
                return []
            at += size
    except struct.error:
        return []
    return starts if at == end else []


class Records(NamedTuple):
    """Records side by side in the log."""

    pieces: list[Buffer]
    offsets: Int64s
    sizes: Int64s
    end: int  #: in the log


def records_of(
    columns: BatchColumns,
    topic_field: bytes,
    queue_id: int,
    number: int,
    at: int,
    constants: bytes,
) -> Records:
    """The records of a batch, from `number` on in its queue and from offset `at` on in the log."""
    count, layout = len(columns), _HEADS[len(constants)]
    fixed = FIXED_SIZE - CONSTANTS_SIZE + len(constants)
    sizes = columns.sizes + (fixed + len(topic_field) - MIN_ELEMENT_SIZE)
    ends = sizes.cumsum() + at
    offsets = ends - sizes
    rows = np.empty(count, layout)
    rows["size"] = sizes
    rows["magic"] = magic_for(topic_field)
    rows["crc"] = np.fromiter(map(crc32, columns.bodies), np.int64, count) & CRC_BITS
    rows["queue_id"] = queue_id
    rows["flag"] = columns.flags
    rows["number"] = np.arange(number, number + count)
    rows["at"] = offsets
    rows["constants"] = np.void(constants)
    rows["body_size"] = columns.body_sizes
    pieces: list[Buffer] = [topic_field] * (4 * count)
    pieces[0::4] = rows.view(f"V{layout.itemsize}").tolist()
    pieces[1::4] = columns.bodies
    pieces[3::4] = columns.tails
    return Records(pieces, offsets, sizes, int(ends[-1]))
