"""Pieces of a buffer as Arrow columns, cut without a Python object per piece.

An Arrow binary array is bytes and ascending offsets into them, so any ascending cut points are an
array already, over the buffer as it is. Every second slot of it is a wanted piece, the others are
the gaps between; one `take` copies the wanted ones together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import numpy.typing as npt

    from orbitmq.message.scan import Int64s

_BINARY: Final = pa.binary()


def cut(
    buffer: Any, begins: Int64s, ends: Int64s, kind: pa.DataType = _BINARY
) -> pa.BinaryArray | pa.StringArray:
    """`buffer[begin:end]` of every row; the pieces ascend and do not overlap.

    Raw bytes, which `text` turns into text; or text at once, where it is known to be UTF-8.
    """
    count = len(begins)
    if not count:
        return pa.array([], kind)
    cuts = np.empty(2 * count + 1, np.int32)
    cuts[:-1:2] = begins
    cuts[1::2] = ends
    cuts[-1] = cuts[-2]
    offsets, octets = pa.py_buffer(cuts), pa.py_buffer(buffer)
    pieces_and_gaps = pa.Array.from_buffers(kind, 2 * count, [None, offsets, octets])
    return pieces_and_gaps.take(pa.array(np.arange(0, 2 * count, 2)))


def text(pieces: pa.BinaryArray | pa.StringArray) -> pa.StringArray:
    """The pieces as text. What is not UTF-8 becomes U+FFFD: one bad message must not stop a job."""
    if pieces.type == pa.string():
        return pieces
    try:
        return pieces.cast(pa.string())
    except pa.ArrowInvalid:
        decoded = [
            None if piece is None else piece.decode("utf-8", "replace")
            for piece in pieces.to_pylist()
        ]
        return pa.array(decoded, pa.string())


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
