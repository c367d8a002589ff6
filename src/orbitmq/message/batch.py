"""The body of a batch send: messages of one topic, one after the other.

    size(4) magic(4) = 0  crc(4) = 0  flag(4)  bodyLength(4) body  propertiesLength(2) properties

The sender's checksum is 0 and means nothing; the broker computes its own when it expands the batch
into ordinary records. Apache's broker does not look at an element's size either. Here it must be
the sum of the parts, as every known client writes it: a batch whose elements cannot be told apart
with certainty is refused as a whole, before anything of it is stored.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from orbitmq.message.errors import BatchInvalid, RecordRefused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orbitmq.message.record import Buffer

#: An element with an empty body and no properties.
MIN_ELEMENT_SIZE = 22

#: An element of this size, and a batch that begins with it, is not copied.
_VIEW_FROM = 16 * 1024

_element_head = struct.Struct(">iiIii")
_pack_head = _element_head.pack
_read_head = _element_head.unpack_from
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
    elements: list[tuple[Buffer, int, bytes]] = []
    add, read_head, read_short = elements.append, _read_head, _read_short
    while at < end:
        if end - at < MIN_ELEMENT_SIZE:
            raise BatchInvalid(at, f"{end - at} bytes are left, an element has {MIN_ELEMENT_SIZE}")
        size, _, _, flag, body_size = read_head(whole, at)
        if not MIN_ELEMENT_SIZE <= size <= end - at:
            raise BatchInvalid(at, f"its size says {size}, {end - at} bytes are left")
        if not 0 <= body_size <= size - MIN_ELEMENT_SIZE:
            raise BatchInvalid(at, f"a body of {body_size} bytes in an element of {size}")
        body_end = at + 20 + body_size
        (properties_size,) = read_short(whole, body_end)
        next_at = at + size
        if properties_size < 0 or body_end + 2 + properties_size != next_at:
            raise BatchInvalid(at, f"its parts do not add up to its size of {size}")
        add((whole[at + 20 : body_end], flag, bytes(whole[body_end + 2 : next_at])))
        at = next_at
    return elements
