"""The stored layout of a message, which is also what a pull returns. Integers are big endian.

    size magic crc queueId flag queueOffset physicalOffset        36 bytes
    sysFlag born bornHost stored storeHost reconsumed prepared    48, 60 or 72 bytes: "constants"
    bodyLength body                                               4 + n
    topicLength topic                                             1 + t (v1) or 2 + t (v2)
    propertiesLength properties                                   2 + p

A record is valid when its magic is known, no length is negative, and the lengths add up to its
size. Java's reader treats negative lengths as zero; they are refused here, because no writer
produces them, and a torn write can look like one.
"""

from __future__ import annotations

import enum
import ipaddress
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

from orbitmq.errors import OrbitError, install_command
from orbitmq.javahash import java_hash

if TYPE_CHECKING:
    from collections.abc import Sequence


# Bits of the system flag. Transaction and compression type are fields of several bits: compare them
# under their mask (a rollback has both the prepared and the commit bit set).

COMPRESSED: Final = 0x1

TRANSACTION_MASK: Final = 0xC
TRANSACTION_NONE: Final = 0x0
TRANSACTION_PREPARED: Final = 0x4
TRANSACTION_COMMIT: Final = 0x8
TRANSACTION_ROLLBACK: Final = 0xC

BORN_HOST_V6: Final = 0x10
STORE_HOST_V6: Final = 0x20
HOSTS_V6_MASK: Final = BORN_HOST_V6 | STORE_HOST_V6

#: The body is a batch, which the consumer splits.
NEED_UNWRAP: Final = 0x40
INNER_BATCH: Final = 0x80
#: Both bits say that a record holds several messages.
BATCH_MASK: Final = NEED_UNWRAP | INNER_BATCH

COMPRESSION_TYPE_MASK: Final = 0x700
#: Set by clients that know one compression only; read as zlib.
COMPRESSION_UNSPECIFIED: Final = 0x000
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300


def transaction_type(sys_flag: int) -> int:
    """One of the `TRANSACTION_*` values."""
    return sys_flag & TRANSACTION_MASK


def with_transaction_type(sys_flag: int, transaction: int) -> int:
    """`sys_flag` with its transaction field replaced."""
    return sys_flag & ~TRANSACTION_MASK | transaction & TRANSACTION_MASK


# Host and port in a record and in an offset message id: packed address, 32-bit port.


#: Packed sizes: 4 or 16 bytes of address, then the port.
V4_HOST_SIZE: Final = 8
V6_HOST_SIZE: Final = 20


def pack_host(address: str, port: int) -> bytes:
    """`address` (IPv4 or IPv6 text, no names) and `port` as 8 or 20 bytes."""
    try:
        packed = ipaddress.ip_address(address).packed
    except ValueError as error:
        raise RecordRefused(f"{address!r} is not an IPv4 or IPv6 address") from error
    if not 0 <= port <= 0x7FFFFFFF:
        raise RecordRefused(f"port {port} is not within 0 and 2147483647")
    return packed + port.to_bytes(4, "big")


def unpack_host(packed: bytes) -> tuple[str, int]:
    """The address text and the port of 8 or 20 packed bytes."""
    if len(packed) == V4_HOST_SIZE:
        address = ".".join(map(str, packed[:4]))
    elif len(packed) == V6_HOST_SIZE:
        address = ipaddress.IPv6Address(packed[:16]).compressed
    else:
        raise RecordRefused(f"a packed host has 8 or 20 bytes, not {len(packed)}")
    return address, int.from_bytes(packed[-4:], "big", signed=True)


Buffer: TypeAlias = bytes | bytearray | memoryview
PackHead: TypeAlias = Callable[..., bytes]

MAGIC_V1: Final = -626843481  # 0xDAA320A7
MAGIC_V2: Final = -626843477  # 0xDAA320AB
#: Second word of the record that fills the rest of a commit-log file.
END_OF_FILE_MAGIC: Final = -875286124  # 0xCBD43194
#: The size of such a record; every ordinary one must leave this much room behind it.
END_OF_FILE_SIZE: Final = 8

MAX_TOPIC_V1: Final = 127
MAX_TOPIC_V2: Final = 32767
MAX_PROPERTIES: Final = 32767

#: Bytes from sysFlag to preparedTransactionOffset with two IPv4 hosts.
CONSTANTS_SIZE: Final = 48
#: Everything except body, topic field and properties: head, constants and two lengths.
FIXED_SIZE: Final = 36 + CONSTANTS_SIZE + 4 + 2
#: An empty body, an empty topic, no properties.
MIN_RECORD_SIZE: Final = FIXED_SIZE + 1

#: The additional bytes of IPv6 hosts, by `sys_flag & HOSTS_V6_MASK`.
HOSTS_EXTRA: Final = {
    0: 0,
    BORN_HOST_V6: V6_HOST_SIZE - V4_HOST_SIZE,
    STORE_HOST_V6: V6_HOST_SIZE - V4_HOST_SIZE,
    HOSTS_V6_MASK: 2 * (V6_HOST_SIZE - V4_HOST_SIZE),
}

#: By the length of the constants: the packer of everything before the body, and the fixed size.
_HEADS: Final = {
    length: (struct.Struct(f">iiIiiqq{length}si").pack, FIXED_SIZE - CONSTANTS_SIZE + length)
    for length in (48, 60, 72)
}
_CONSTANTS: Final = {
    (born, store): struct.Struct(f">iq{born}sq{store}siq").pack
    for born in (V4_HOST_SIZE, V6_HOST_SIZE)
    for store in (V4_HOST_SIZE, V6_HOST_SIZE)
}
#: By the widths of the hosts: the packer of all that stands before the body of a single message,
#: the fixed size, and the bits of `sys_flag` that say so.
_WHOLE_HEADS: Final = {
    (born, store): (
        struct.Struct(f">iiIiiqqiq{born}sq{store}siqi").pack,
        FIXED_SIZE - 2 * V4_HOST_SIZE + born + store,
        BORN_HOST_V6 * (born == V6_HOST_SIZE) | STORE_HOST_V6 * (store == V6_HOST_SIZE),
    )
    for born in (V4_HOST_SIZE, V6_HOST_SIZE)
    for store in (V4_HOST_SIZE, V6_HOST_SIZE)
}
_short = struct.Struct(">h").pack
#: The length prefix of properties.
properties_size = _short
_long = struct.Struct(">q").pack
#: With an IPv4 host before it.
_STORE_TIME_AT: Final = 56
_pair = struct.Struct(">ii").pack
_read_pair = struct.Struct(">ii").unpack_from
_read_int = struct.Struct(">i").unpack_from
_read_short = struct.Struct(">h").unpack_from


# ---- writing


def topic_field(topic: str) -> bytes:
    """The topic as a record holds it: with a length of one byte, or of two above 127 bytes.

    Older clients in C++, Go and Node read the first form only.
    """
    try:
        encoded = topic.encode()
    except UnicodeEncodeError as error:
        raise RecordRefused(f"topic {topic!r} cannot be written as UTF-8") from error
    if len(encoded) <= MAX_TOPIC_V1:
        return bytes((len(encoded),)) + encoded
    if len(encoded) <= MAX_TOPIC_V2:
        return _short(len(encoded)) + encoded
    raise RecordRefused(f"a topic of {len(encoded)} bytes does not fit; {MAX_TOPIC_V2} do")


def magic_for(topic_field: bytes) -> int:
    """The magic code of a record with this topic field."""
    return MAGIC_V1 if topic_field[0] + 1 == len(topic_field) else MAGIC_V2


def record_constants(
    sys_flag: int,
    born_ms: int,
    born_host: bytes,
    store_ms: int,
    store_host: bytes,
    reconsume_times: int = 0,
    prepared_offset: int = 0,
) -> bytes:
    """The bytes from sysFlag to preparedTransactionOffset, for all messages of one request.

    The hosts are packed (`pack_host`); the IPv6 bits of `sys_flag` are set here from their widths.
    """
    sys_flag &= ~HOSTS_V6_MASK
    if len(born_host) == V6_HOST_SIZE:
        sys_flag |= BORN_HOST_V6
    if len(store_host) == V6_HOST_SIZE:
        sys_flag |= STORE_HOST_V6
    try:
        return _CONSTANTS[len(born_host), len(store_host)](
            sys_flag, born_ms, born_host, store_ms, store_host, reconsume_times, prepared_offset
        )
    except KeyError:
        raise RecordRefused("a packed host has 8 or 20 bytes; use pack_host") from None
    except struct.error as error:
        raise RecordRefused(f"a field of the record is out of its range: {error}") from error


def message_heads(store_host: bytes) -> Mapping[int, tuple[PackHead, int, int]]:
    """The start of single messages, by the size of the sender's host.

    The packer of everything before the body, which takes the fields in their order; the size of
    everything except body, topic field and properties; and the bits of `sys_flag` for the hosts.
    The caller packs, because another call would be measurable here. After the body come topic
    field, `properties_size` and properties.
    """
    try:
        return {born: _WHOLE_HEADS[born, len(store_host)] for born in (V4_HOST_SIZE, V6_HOST_SIZE)}
    except KeyError:
        raise RecordRefused("a packed host has 8 or 20 bytes; use pack_host") from None


def head_form(constants: bytes) -> tuple[PackHead, int]:
    """The same for messages that share constants: the packer takes these before the body's size."""
    try:
        return _HEADS[len(constants)]
    except KeyError:
        raise RecordRefused("constants have 48, 60 or 72 bytes; use record_constants") from None


def restamped(head: bytes, store_ms: int) -> bytes:
    """The head of a record, stored at another time."""
    at = _STORE_TIME_AT + (HOSTS_EXTRA[_read_int(head, 36)[0] & BORN_HOST_V6])
    return head[:at] + _long(store_ms) + head[at + 8 :]


def encode_record(
    body: Buffer,
    topic_field: bytes,
    properties: bytes,
    queue_id: int,
    flag: int,
    queue_offset: int,
    physical_offset: int,
    constants: bytes,
) -> tuple[int, tuple[Buffer, ...]]:
    """The size of a record and its pieces, so that a writer joins many records at the end.

    The body is not copied: it must not change until the pieces are joined.
    """
    body_size = len(body)
    topic_size = len(topic_field)
    properties_size = len(properties)
    try:
        head, fixed = _HEADS[len(constants)]
        size = fixed + body_size + topic_size + properties_size
        return size, (
            head(
                size,
                MAGIC_V1 if topic_field[0] + 1 == topic_size else MAGIC_V2,
                crc32(body) & CRC_BITS,
                queue_id,
                flag,
                queue_offset,
                physical_offset,
                constants,
                body_size,
            ),
            body,
            topic_field,
            _short(properties_size),
            properties,
        )
    except KeyError:
        raise RecordRefused("constants have 48, 60 or 72 bytes; use record_constants") from None
    except (IndexError, struct.error) as error:
        raise record_refused(error, properties_size) from error


def record_refused(error: Exception, properties_size: int) -> RecordRefused:
    """The reason for a packer's error."""
    if isinstance(error, IndexError):
        return RecordRefused("an empty topic field; use topic_field")
    if properties_size > MAX_PROPERTIES:
        return RecordRefused(
            f"properties of {properties_size} bytes do not fit; {MAX_PROPERTIES} do"
        )
    return RecordRefused(f"a field of the record is out of its range: {error}")


def end_of_file_record(remaining: int) -> bytes:
    """The first 8 bytes of the record that fills the `remaining` bytes of a commit-log file."""
    if not END_OF_FILE_SIZE <= remaining <= 0x7FFFFFFF:
        raise RecordRefused(f"an end-of-file record cannot fill {remaining} bytes; 8 are the least")
    return _pair(remaining, END_OF_FILE_MAGIC)


# ---- checking


class RecordFault(enum.Enum):
    """Why there is no valid record at a position; the value is the reason in words."""

    EMPTY = "nothing was written here"
    END_OF_FILE = "the rest of the file is filled"
    CUT_SHORT = "the bytes end inside the record"
    UNKNOWN_MAGIC = "the magic code is not a message's"
    BAD_SIZE = "the sizes of the parts do not add up to the size of the record"
    BAD_CRC = "the body does not match its checksum"
    LOST_PAGE = "a page of its topic or properties never reached the disk"


def check_record(buffer: Buffer, at: int, end: int, *, check_crc: bool = True) -> int | RecordFault:
    """The size of the valid record at `at` in `buffer[at:end]`, or the reason if it is invalid."""
    if end - at < END_OF_FILE_SIZE:
        return RecordFault.CUT_SHORT
    size: int
    magic: int
    size, magic = _read_pair(buffer, at)
    if magic != MAGIC_V1 and magic != MAGIC_V2:
        if magic == END_OF_FILE_MAGIC:
            return RecordFault.END_OF_FILE
        return RecordFault.UNKNOWN_MAGIC if size or magic else RecordFault.EMPTY
    if size < MIN_RECORD_SIZE:
        return RecordFault.BAD_SIZE
    record_end = at + size
    if record_end > end:
        return RecordFault.CUT_SHORT
    body_at = at + 88 + HOSTS_EXTRA[_read_int(buffer, at + 36)[0] & HOSTS_V6_MASK]
    # After every part there must be room for the lengths of a topic and of properties.
    if body_at + 3 > record_end:
        return RecordFault.BAD_SIZE
    body_size = _read_int(buffer, body_at - 4)[0]
    topic_at = body_at + body_size
    if body_size < 0 or topic_at + 3 > record_end:
        return RecordFault.BAD_SIZE
    if magic == MAGIC_V1:
        topic_size = buffer[topic_at]
        properties_at = topic_at + topic_size + 3
        if topic_size > MAX_TOPIC_V1 or properties_at > record_end:
            return RecordFault.BAD_SIZE
    else:
        topic_size = _read_short(buffer, topic_at)[0]
        properties_at = topic_at + topic_size + 4
        if topic_size < 0 or properties_at > record_end:
            return RecordFault.BAD_SIZE
    properties_size = _read_short(buffer, properties_at - 2)[0]
    if properties_size < 0 or properties_at + properties_size != record_end:
        return RecordFault.BAD_SIZE
    if check_crc and body_size:
        stored_crc = _read_int(buffer, at + 8)[0]
        if crc32(memoryview(buffer)[body_at:topic_at]) & CRC_BITS != stored_crc:
            return RecordFault.BAD_CRC
    return size


# The checksum of a body is CRC-32 without its highest bit, because Java clears the sign of a signed
# int. isal computes the same sum, from 100 bytes on 3 to 10 times faster.

if TYPE_CHECKING:
    from zlib import crc32 as crc32  # noqa: PLC0414  # exported for other modules
else:
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        from zlib import crc32

CRC_BITS = 0x7FFFFFFF


# The tag code, by which a consume queue filters without reading the message.


def tag_code(tags: str | None) -> int:
    """The 64-bit signed code of the TAGS property; 0 for a message without tags.

    It is the 32-bit Java hash with its sign kept, so readers that compare 32 bits agree with those
    that compare 64. Several tags joined by `||` are hashed as one text, as Apache's broker does.
    """
    return _cached_hash(tags) if tags else 0


# A topic has few distinct tags; the limit is for producers that put an id into the tag.

_cached_hash = lru_cache(maxsize=8192)(java_hash)


# Errors in the bytes of a message, by what the reader does next.


class MessageError(OrbitError):
    """Bytes, or values to be turned into bytes, that are not a message."""


class RecordInvalid(MessageError):
    """The bytes at `position` are not a stored message; what follows cannot be found either."""

    def __init__(self, position: int, reason: str) -> None:
        self.position = position
        self.reason = reason
        super().__init__(f"no stored message at byte {position}: {reason}")


class RecordRefused(MessageError):
    """A message that the stored layout cannot hold, because a part of it is out of range."""


class BodyCorrupt(MessageError):
    """The record is whole but its body is not the one that was stored; others may be good."""


class CompressionFailed(MessageError):
    """A body that cannot be compressed or expanded as its flags say."""


class BodyTooLarge(CompressionFailed):
    """A compressed body that would expand beyond the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"the body expands to more than {limit} bytes; raise the limit to read it")


class CodecMissing(CompressionFailed):
    """The library for this compression is not installed; the message itself may be good."""

    def __init__(self, codec: str, extra: str) -> None:
        self.codec = codec
        self.extra = extra
        super().__init__(f"{codec} bodies need a library; install it: {install_command(extra)}")


class PropertiesRefused(MessageError):
    """Properties that cannot be written: a separator inside, or more bytes than a record takes."""


class BatchInvalid(MessageError):
    """The element at `position` of a batch body is not one; the whole batch is refused."""

    def __init__(self, position: int, reason: str) -> None:
        self.position = position
        self.reason = reason
        super().__init__(f"no batch element at byte {position}: {reason}")


class BatchInside(MessageError):
    """The record at `position` holds several messages, where only single ones are wanted."""

    def __init__(self, position: int) -> None:
        self.position = position
        super().__init__(f"the record at byte {position} holds a batch; take it apart first")


class MessageIdInvalid(MessageError):
    """A text that is not a message id of the expected kind."""

    def __init__(self, text: str, expected: str) -> None:
        self.text = text
        super().__init__(f"{text[:64]!r} is not {expected}")


class ChunkTooLarge(MessageError):
    """More bytes than one batch of columns can hold; use fewer messages."""

    def __init__(self, what: str, limit: int) -> None:
        self.limit = limit
        super().__init__(f"{what} take more than {limit} bytes in one batch; give fewer at a time")


class ColumnUnknown(MessageError):
    """A requested column that messages do not have."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        super().__init__(f"messages have no column {name!r}; they have {', '.join(known)}")
