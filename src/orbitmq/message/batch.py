"""The body of a batch send: messages of one topic, one after the other.

    size(4) magic(4) = 0  crc(4) = 0  flag(4)  bodyLength(4) body  propertiesLength(2) properties

The sender's checksum is 0 and means nothing; the broker computes its own when it expands the batch
into ordinary records. Apache's broker does not look at an element's size either. Here it must be
the sum of the parts, as every known client writes it: a batch whose elements cannot be told apart
with certainty is refused as a whole, before anything of it is stored.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, cast

from orbitmq.message.errors import BatchInvalid, RecordRefused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orbitmq.message.record import Buffer

#: An element with an empty body and no properties.
MIN_ELEMENT_SIZE = 22

#: An element of this size, and a batch that begins with it, is not copied.
_VIEW_FROM = 16 * 1024

_pack_head = struct.Struct(">iiIii").pack
#: Without magic and checksum, which mean nothing: size, flag, length of the body.
_read_head = struct.Struct(">i8xii").unpack_from
_pack_short = struct.Struct(">h").pack
_read_short = struct.Struct(">h").unpack_from


class BatchElement(NamedTuple):
    """One message of a batch."""

    body: Buffer
    flag: int
    properties: bytes


def encode_batch(elements: Iterable[BatchElement | tuple[Buffer, int, bytes]]) -> bytes:
    """The body of a batch send of these messages."""
    pieces: list[Buffer] = []
    for body, flag, properties in elements:
        try:
            pieces += (
                _pack_head(MIN_ELEMENT_SIZE + len(body) + len(properties), 0, 0, flag, len(body)),
                body,
                _pack_short(len(properties)),
                properties,
            )
        except struct.error as error:
            raise RecordRefused(f"a message does not fit into a batch: {error}") from error
    return b"".join(pieces)


def split_batch(batch: Buffer) -> list[BatchElement]:
    """The messages of a batch body. Raises `BatchInvalid`."""
    return [BatchElement._make(fields) for fields in batch_fields(batch)]


def batch_fields(batch: Buffer) -> list[tuple[Buffer, int, bytes]]:
    """The same without names, for those who have many: body, flag, properties.

    Large bodies are views of the batch and copy nothing. Small ones are copies, which cost less
    than views.
    """
    whole: Buffer = memoryview(batch)
    end = len(whole)
    if end >= MIN_ELEMENT_SIZE and _read_head(whole, 0)[0] < _VIEW_FROM:
        whole = bytes(batch)
    at = 0
    elements: list[tuple[Buffer, int, Buffer]] = []
    add, read_head, read_short = elements.append, _read_head, _read_short
    try:
        while at < end:
            size, flag, body_size = read_head(whole, at)
            body_end = at + 20 + body_size
            (properties_size,) = read_short(whole, body_end)
            next_at = at + size
            if (
                body_end + 2 + properties_size != next_at
                or body_size < 0
                or properties_size < 0
                or next_at > end
            ):
                raise _invalid(whole, at)
            add((whole[at + 20 : body_end], flag, whole[body_end + 2 : next_at]))
            at = next_at
    except struct.error:
        raise _invalid(whole, at) from None
    if isinstance(whole, bytes):
        return cast("list[tuple[Buffer, int, bytes]]", elements)
    return [(body, flag, bytes(properties)) for body, flag, properties in elements]


def _invalid(batch: Buffer, at: int) -> BatchInvalid:
    """What is wrong with the element at `at`, of which something is."""
    left = len(batch) - at
    if left < MIN_ELEMENT_SIZE:
        return BatchInvalid(at, f"{left} bytes are left, an element has {MIN_ELEMENT_SIZE}")
    size, _, body_size = _read_head(batch, at)
    if not MIN_ELEMENT_SIZE <= size <= left:
        return BatchInvalid(at, f"its size says {size}, {left} bytes are left")
    if not 0 <= body_size <= size - MIN_ELEMENT_SIZE:
        return BatchInvalid(at, f"a body of {body_size} bytes in an element of {size}")
    return BatchInvalid(at, f"its parts do not add up to its size of {size}")
