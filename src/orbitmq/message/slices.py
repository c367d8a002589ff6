"""Pieces of a buffer as Arrow columns, cut without a Python object per piece.

An Arrow binary array is bytes and ascending offsets into them, so any ascending cut points are an
array already, over the buffer as it is. Every second slot of it is a wanted piece, the others are
the gaps between; one `take` copies the wanted ones together.

Columns are made of their memory, and not with `pa.array` or `pa.scalar`: those import pandas where
it is installed, which costs every worker of Spark a quarter of a second and 40 MiB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from orbitmq.message.record import Buffer
    from orbitmq.message.scan import Bools, Int64s

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
