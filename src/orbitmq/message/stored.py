"""A stored message, decoded lazily.

Decoding checks the layout of every record and cuts it into fixed fields, stored body and the rest.
Fixed fields, topic, properties and hosts are decoded at their first use; the body is verified
against its checksum and decompressed at its first read. A consumer that only reads tags pays for
tags only, and nothing that the garbage collector tracks is made for a message.

`body` never returns a body that does not match its checksum: it raises. `stored_body` is the
unverified bytes of the record. Call `verify` before copying them into a new record: that gets a new
checksum, and a damaged body would become valid.
"""

from __future__ import annotations

import struct
import zlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

import msgspec

from orbitmq.message.ids import encode_offset_id
from orbitmq.message.properties import (
    KEYS,
    TAGS,
    UNIQ_KEY,
    decode_properties,
    encode_properties,
    property_value,
)
from orbitmq.message.record import (
    BATCH_MASK,
    BORN_HOST_V6,
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_TYPE_MASK,
    COMPRESSION_UNSPECIFIED,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    CRC_BITS,
    HOSTS_V6_MASK,
    MAGIC_V1,
    MAX_TOPIC_V1,
    MIN_RECORD_SIZE,
    STORE_HOST_V6,
    TRANSACTION_MASK,
    V4_HOST_SIZE,
    V6_HOST_SIZE,
    BatchInvalid,
    BodyCorrupt,
    BodyTooLarge,
    Buffer,
    CodecMissing,
    CompressionFailed,
    RecordFault,
    RecordInvalid,
    RecordRefused,
    check_record,
    crc32,
    encode_record,
    pack_host,
    record_constants,
    topic_field,
    unpack_host,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType

    from orbitmq.message.record import Buffer

    _Codec = Callable[[Buffer, int], bytes]


# Compressed bodies. `COMPRESSED` says that a body is compressed, the type bits say how; type 0 is
# zlib, which all clients read. A few kilobytes may expand to gigabytes, so every expansion has a
# limit and stops when it exceeds that, whatever size the data claims.


#: The level of Java's producers.
DEFAULT_LEVEL: Final = 5
#: Producers refuse bodies above 4 MiB before they compress them. 16 times that leaves room for
#: clusters with a raised limit and still bounds the memory that one hostile message can use.
MAX_EXPANDED_BODY: Final = 64 * 1024 * 1024
#: The memory of Zstandard's highest usual level; a frame may request more.
_MAX_ZSTD_WINDOW: Final = 8 * 1024 * 1024


def compress_body(body: bytes, compression: int, *, level: int = DEFAULT_LEVEL) -> bytes:
    """`body` compressed for a `COMPRESSION_*` type; the caller sets the bits of the flag."""
    return _codec(_COMPRESS, compression)(body, level)


def expand_body(stored: Buffer, sys_flag: int, *, limit: int = MAX_EXPANDED_BODY) -> bytes:
    """The producer's body: decompressed if `sys_flag` says that it is compressed."""
    if not sys_flag & COMPRESSED:
        return bytes(stored)
    if not stored:
        return b""  # Java's reader ignores the flag of an empty body as well.
    return _codec(_EXPAND, sys_flag & COMPRESSION_TYPE_MASK)(stored, limit)


def _codec(table: Mapping[int, _Codec], compression: int) -> _Codec:
    codec = table.get(compression)
    if codec is None:
        text = f"compression type {compression:#x} is unknown; 0x100, 0x200, 0x300 and 0 are known"
        raise CompressionFailed(text)
    return codec


def _zlib_compress(body: Buffer, level: int) -> bytes:
    return zlib.compress(body, level)


def _zlib_expand(stored: Buffer, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        # One byte more than allowed distinguishes "at the limit" from "beyond it".
        body = inflater.decompress(stored, limit + 1)
    except zlib.error as error:
        raise CompressionFailed(f"not a zlib stream: {error}") from error
    if len(body) > limit:
        raise BodyTooLarge(limit)
    if not inflater.eof:
        raise CompressionFailed("the zlib stream ends early")
    return body


def _lz4_compress(body: Buffer, level: int) -> bytes:
    # LZ4's high-compression levels begin at 3; Java's writer has the fast mode only.
    del level
    compressed: bytes = _lz4_frame().compress(body, store_size=False)
    return compressed


def _lz4_expand(stored: Buffer, limit: int) -> bytes:
    frame = _lz4_frame()
    decompressor = frame.LZ4FrameDecompressor()
    try:
        body: bytes = decompressor.decompress(bytes(stored), max_length=limit + 1)
    except (RuntimeError, ValueError, EOFError) as error:
        raise CompressionFailed(f"not an LZ4 frame: {error}") from error
    if len(body) > limit:
        raise BodyTooLarge(limit)
    if not decompressor.eof:
        raise CompressionFailed("the LZ4 frame ends early")
    return body


def _zstd_compress(body: Buffer, level: int) -> bytes:
    return _zstandard().ZstdCompressor(level=level).compress(body)  # type: ignore[no-any-return]


def _zstd_expand(stored: Buffer, limit: int) -> bytes:
    zstandard = _zstandard()
    frame = bytes(stored)
    expander = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW)
    try:
        # The one-step call detects incomplete frames, but allocates the size that the frame
        # states. So the size is determined first: from the frame or, as Java's streams do not
        # state it, by reading up to the limit.
        size = zstandard.frame_content_size(frame)
        if size < 0:
            with expander.stream_reader(frame) as reader:
                size = len(reader.read(limit + 1))
        if size > limit:
            raise BodyTooLarge(limit)
        body: bytes = expander.decompress(frame, max_output_size=size)
    except zstandard.ZstdError as error:
        raise CompressionFailed(f"not a whole Zstandard frame: {error}") from error
    return body


def _lz4_frame() -> ModuleType:
    try:
        import lz4.frame  # noqa: PLC0415  an extra
    except ImportError as error:
        raise CodecMissing("LZ4", "lz4") from error
    return lz4.frame  # type: ignore[no-any-return]


def _zstandard() -> ModuleType:
    try:
        import zstandard  # noqa: PLC0415  an extra
    except ImportError as error:
        raise CodecMissing("Zstandard", "zstd") from error
    return zstandard


_COMPRESS: Final[Mapping[int, _Codec]] = {
    COMPRESSION_UNSPECIFIED: _zlib_compress,
    COMPRESSION_ZLIB: _zlib_compress,
    COMPRESSION_LZ4: _lz4_compress,
    COMPRESSION_ZSTD: _zstd_compress,
}
_EXPAND: Final[Mapping[int, _Codec]] = {
    COMPRESSION_UNSPECIFIED: _zlib_expand,
    COMPRESSION_ZLIB: _zlib_expand,
    COMPRESSION_LZ4: _lz4_expand,
    COMPRESSION_ZSTD: _zstd_expand,
}

#: size, magic, crc, queue id, flag, queue offset, physical offset, system flag, born, born host,
#: stored, store host, reconsume times, prepared offset, body size
_Head: TypeAlias = tuple[
    int, int, int, int, int, int, int, int, int, bytes, int, bytes, int, int, int
]

#: The fixed fields, by `sys_flag & HOSTS_V6_MASK`.
_HEADS: Final = {
    hosts: struct.Struct(
        f">iiIiiqqiq{V6_HOST_SIZE if hosts & BORN_HOST_V6 else V4_HOST_SIZE}sq"
        f"{V6_HOST_SIZE if hosts & STORE_HOST_V6 else V4_HOST_SIZE}siqi"
    )
    for hosts in (0, BORN_HOST_V6, STORE_HOST_V6, HOSTS_V6_MASK)
}
#: What decoding needs of the usual record: size, magic, queue offset, system flag, body size.
_read_v4_head = struct.Struct(">ii12xq8xi44xi").unpack_from
_read_crc = struct.Struct(">8xI").unpack_from
_read_short = struct.Struct(">h").unpack_from
_read_int = struct.Struct(">i").unpack_from
#: `MAGIC_V1` in a record.
_V1: Final = struct.pack(">i", MAGIC_V1)


def decode_messages(buffer: Buffer, at: int = 0, end: int | None = None) -> list[StoredMessage]:
    """The messages in the body of a pull's answer, or from one of them on to another.

    Raises `RecordInvalid` if any part of it is not a whole record: a broker never sends such a
    body, and a reader that continued after the good part would silently skip messages.
    """
    data = buffer if isinstance(buffer, bytes) else bytes(buffer)
    messages = []
    if end is None:
        end = len(data)
    last_head = end - MIN_RECORD_SIZE
    while at < end:
        # The usual record (v1, IPv4 hosts) is checked and cut here by hand: a client spends most of
        # its time in this loop. All other records go the general way.
        if at <= last_head:
            size, magic, queue_offset, sys_flag, body_size = _read_v4_head(data, at)
            body_at = at + 88
            topic_at = body_at + body_size
            next_at = at + size
            if (
                magic == MAGIC_V1
                and not sys_flag & HOSTS_V6_MASK
                and body_at <= topic_at < next_at <= end
            ):
                tail = data[topic_at:next_at]
                properties_at = tail[0] + 3
                properties_size = len(tail) - properties_at
                if (
                    properties_at <= MAX_TOPIC_V1 + 3
                    and properties_size >= 0
                    and _read_short(tail, properties_at - 2)[0] == properties_size
                ):
                    head, body = data[at:body_at], data[body_at:topic_at]
                    messages.append(StoredMessage(size, queue_offset, sys_flag, head, body, tail))
                    at = next_at
                    continue
        message = _decode_any(data, at, end)
        messages.append(message)
        at += message.size
    return messages


def decode_message(record: Buffer) -> StoredMessage:
    """The message of one record."""
    data = record if isinstance(record, bytes) else bytes(record)
    message = _decode_any(data, 0, len(data))
    if message.size != len(data):
        text = f"{len(data) - message.size} bytes follow the record"
        raise RecordInvalid(message.size, text)
    return message


class WholeMessage:
    """Keeps encoders of structs from writing a message with its body into a log.

    They iterate over all fields, have no encoding for this one, and raise an error with its name.
    It has no text either, for encoders that fall back to `str`.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        raise TypeError("a message is not encoded as a whole; take what is wanted of it")


_WHOLE: Final = WholeMessage()


class StoredMessage(msgspec.Struct, eq=False, gc=False):
    """One record, decoded lazily. Two are equal if their bytes are.

    Its representation has no body, which would end up in logs.
    """

    #: Bytes of the whole record.
    size: int
    queue_offset: int
    sys_flag: int
    #: The fixed fields.
    _head: bytes
    _stored_body: bytes
    #: The topic with its length prefix, and the properties with theirs.
    _tail: bytes
    _as_a_whole: WholeMessage = _WHOLE
    # Caches of decoded parts:
    _fields: _Head | None = None
    _body: bytes | None = None
    _properties: Mapping[str, str] | None = None

    @classmethod
    def build(
        cls,
        *,
        topic: str,
        stored_body: bytes,
        properties: Mapping[str, str | None] | bytes = b"",
        queue_id: int = 0,
        queue_offset: int = 0,
        physical_offset: int = 0,
        flag: int = 0,
        sys_flag: int = 0,
        born_ms: int = 0,
        born_host: tuple[str, int] = ("0.0.0.0", 0),  # noqa: S104  no listener
        store_ms: int = 0,
        store_host: tuple[str, int] = ("0.0.0.0", 0),  # noqa: S104
        reconsume_times: int = 0,
        prepared_offset: int = 0,
    ) -> StoredMessage:
        """A record of these fields; `stored_body` is compressed if `sys_flag` says so."""
        constants = record_constants(
            sys_flag,
            born_ms,
            pack_host(*born_host),
            store_ms,
            pack_host(*store_host),
            reconsume_times,
            prepared_offset,
        )
        raw = properties if isinstance(properties, bytes) else encode_properties(properties)
        _, pieces = encode_record(
            stored_body,
            topic_field(topic),
            raw,
            queue_id,
            flag,
            queue_offset,
            physical_offset,
            constants,
        )
        return decode_message(b"".join(pieces))

    def encode(self) -> bytes:
        """The bytes that this message was decoded from."""
        return b"".join((self._head, self._stored_body, self._tail))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredMessage):
            return NotImplemented
        return (
            self._head == other._head
            and self._tail == other._tail
            and self._stored_body == other._stored_body
        )

    def __hash__(self) -> int:
        return hash((self._head, self._tail))

    def __reduce__(self) -> tuple[Callable[[bytes], StoredMessage], tuple[bytes]]:
        # Pickled as the record, without the decoded parts.
        return decode_message, (self.encode(),)

    def __repr__(self) -> str:
        return f"StoredMessage({', '.join(f'{n}={v!r}' for n, v in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # Without it, structs show all of their fields.
        return [
            ("topic", self.topic),
            ("queue_id", self.queue_id),
            ("queue_offset", self.queue_offset),
            ("msg_id", self.msg_id),
        ]

    # ---- the fixed fields

    @property
    def magic(self) -> int:
        """`MAGIC_V1` or `MAGIC_V2`."""
        return (self._fields or self._read_head())[1]

    @property
    def stored_crc(self) -> int:
        """The checksum of the body in the record."""
        return cast("int", _read_crc(self._head)[0])

    @property
    def queue_id(self) -> int:
        return (self._fields or self._read_head())[3]

    @property
    def flag(self) -> int:
        """The application's number."""
        return (self._fields or self._read_head())[4]

    @property
    def physical_offset(self) -> int:
        """The offset of the record in the commit log of its broker."""
        return (self._fields or self._read_head())[6]

    @property
    def born_ms(self) -> int:
        """When the producer created it, in milliseconds as stored."""
        return (self._fields or self._read_head())[8]

    @property
    def born_at(self) -> float:
        """When the producer created it."""
        return (self._fields or self._read_head())[8] / 1000

    @property
    def born_host(self) -> tuple[str, int]:
        """Address and port of the producer."""
        return unpack_host((self._fields or self._read_head())[9])

    @property
    def store_ms(self) -> int:
        """When the broker stored it, in milliseconds as stored."""
        return (self._fields or self._read_head())[10]

    @property
    def stored_at(self) -> float:
        """When the broker stored it."""
        return (self._fields or self._read_head())[10] / 1000

    @property
    def store_host(self) -> tuple[str, int]:
        """Address and port of the broker."""
        return unpack_host((self._fields or self._read_head())[11])

    @property
    def reconsume_times(self) -> int:
        return (self._fields or self._read_head())[12]

    @property
    def prepared_offset(self) -> int:
        """The commit-log offset of the half message that this one was committed from."""
        return (self._fields or self._read_head())[13]

    @property
    def transaction_type(self) -> int:
        """One of `sysflag.TRANSACTION_*`."""
        return self.sys_flag & TRANSACTION_MASK

    def _read_head(self) -> _Head:
        layout = _HEADS[self.sys_flag & HOSTS_V6_MASK]
        fields = self._fields = cast("_Head", layout.unpack(self._head))
        return fields

    # ---- the body

    @property
    def stored_body(self) -> bytes:
        """The body in the record: possibly compressed, and not verified."""
        return self._stored_body

    @property
    def is_compressed(self) -> bool:
        return bool(self.sys_flag & COMPRESSED)

    @property
    def body(self) -> bytes:
        """The producer's body, verified and decompressed up to `MAX_EXPANDED_BODY`."""
        body = self._body
        if body is None:
            stored = self._stored_body
            if self.sys_flag & COMPRESSED or crc32(stored) & CRC_BITS != _read_crc(self._head)[0]:
                stored = self.expand()
            body = self._body = stored
        return body

    def expand(self, *, limit: int = MAX_EXPANDED_BODY) -> bytes:
        """The producer's body, verified, if it is no longer than `limit`."""
        self.verify()
        if self.sys_flag & COMPRESSED:
            return expand_body(self._stored_body, self.sys_flag, limit=limit)
        return self._stored_body

    def verify(self) -> None:
        """Raise `BodyCorrupt` if the stored body does not match its checksum."""
        # Java's readers ignore the checksum of an empty body, so it may have any value.
        if self._stored_body and crc32(self._stored_body) & CRC_BITS != self.stored_crc:
            text = (
                f"the body of the message at offset {self.queue_offset} of queue {self.queue_id} "
                f"of {self.topic!r} does not match its checksum"
            )
            raise BodyCorrupt(text)

    # ---- topic and properties

    @property
    def topic_field(self) -> bytes:
        """The topic with its length, as `encode_record` takes it."""
        return self._tail[: self._topic_end()]

    @property
    def topic(self) -> str:
        begin = 1 if self._head[4:8] == _V1 else 2
        return self._tail[begin : self._topic_end()].decode("utf-8", "replace")

    @property
    def raw_properties(self) -> bytes:
        """The property string in the record."""
        return self._tail[self._topic_end() + 2 :]

    @property
    def properties(self) -> Mapping[str, str]:
        properties = self._properties
        if properties is None:
            tail = self._tail
            raw = tail[tail[0] + 3 :] if self._head[4:8] == _V1 else self.raw_properties
            properties = self._properties = MappingProxyType(decode_properties(raw))
        return properties

    def get_property(self, name: str) -> str | None:
        """One property; for a few of them faster than decoding all."""
        if self._properties is not None:
            return self._properties.get(name)
        tail = self._tail
        raw = tail[tail[0] + 3 :] if self._head[4:8] == _V1 else self.raw_properties
        return property_value(raw, name)

    @property
    def tags(self) -> str | None:
        return self.get_property(TAGS)

    @property
    def keys(self) -> str | None:
        """The business keys, separated by one space."""
        return self.get_property(KEYS)

    @property
    def unique_id(self) -> str | None:
        """The id from the producer; the same through all retries."""
        return self.get_property(UNIQ_KEY)

    @property
    def offset_id(self) -> str:
        """The id that names the place of this copy."""
        fields = self._fields or self._read_head()
        return encode_offset_id(fields[11], fields[6])

    @property
    def msg_id(self) -> str:
        """The id that clients show: the unique id, or else the offset id."""
        return self.unique_id or self.offset_id

    def _topic_end(self) -> int:
        if self._head[4:8] == _V1:
            return 1 + self._tail[0]
        return 2 + cast("int", _read_short(self._tail)[0])


def _decode_any(data: bytes, at: int, end: int) -> StoredMessage:
    """The message at `at`, of any version and hosts; raises if there is none."""
    size = check_record(data, at, end, check_crc=False)
    if isinstance(size, RecordFault):
        raise RecordInvalid(at, size.value)
    _, _, queue_offset, sys_flag, _ = _read_v4_head(data, at)
    body_at = at + _HEADS[sys_flag & HOSTS_V6_MASK].size
    topic_at = body_at + _read_int(data, body_at - 4)[0]
    head, body, tail = data[at:body_at], data[body_at:topic_at], data[topic_at : at + size]
    return StoredMessage(size, queue_offset, sys_flag, head, body, tail)


# The body of a batch send: messages of one topic, one after the other.
#
#     size(4) magic(4) = 0  crc(4) = 0  flag(4)  bodyLength(4) body  propertiesLength(2) properties
#
# The broker computes the checksums. An element's size must be the sum of its parts, as every known
# client writes it (Apache's broker does not check); otherwise the whole batch is refused before any
# of it is stored.

#: The smallest element: with an empty body and no properties.
MIN_ELEMENT_SIZE = 22

#: An element of this size, and a batch that begins with it, is not copied.
_VIEW_FROM = 16 * 1024

_pack_head = struct.Struct(">iiIii").pack
#: Without magic and checksum, which are unused: size, flag, length of the body.
_read_head = struct.Struct(">i8xii").unpack_from
_pack_short = struct.Struct(">h").pack


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
    """The same as tuples, for many messages: body, flag, properties.

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
    """What is wrong with the invalid element at `at`."""
    left = len(batch) - at
    if left < MIN_ELEMENT_SIZE:
        return BatchInvalid(at, f"{left} bytes are left, an element has {MIN_ELEMENT_SIZE}")
    size, _, body_size = _read_head(batch, at)
    if not MIN_ELEMENT_SIZE <= size <= left:
        return BatchInvalid(at, f"its size says {size}, {left} bytes are left")
    if not 0 <= body_size <= size - MIN_ELEMENT_SIZE:
        return BatchInvalid(at, f"a body of {body_size} bytes in an element of {size}")
    return BatchInvalid(at, f"its parts do not add up to its size of {size}")


# Inner batches: a 5.x broker may store a batch as it was sent. Such a record occupies as many
# offsets as it has messages, which share everything but body, flag and properties.

#: Bits about the record itself, not about the messages in it.
_OF_THE_RECORD = BATCH_MASK | COMPRESSED | COMPRESSION_TYPE_MASK


def without_inner_batches(messages: Sequence[StoredMessage], first: int) -> list[StoredMessage]:
    """The messages one by one, from offset `first` on: a pull may begin inside of a batch.

    Raises `MessageError` when a batch cannot be decoded.
    """
    singles: list[StoredMessage] = []
    for message in messages:
        if message.sys_flag & BATCH_MASK == BATCH_MASK:
            singles += [each for each in _unwrapped(message) if each.queue_offset >= first]
        else:
            singles.append(message)
    return singles


def _unwrapped(record: StoredMessage) -> list[StoredMessage]:
    return [
        StoredMessage.build(
            topic=record.topic,
            stored_body=bytes(element.body),
            properties=element.properties,
            queue_id=record.queue_id,
            queue_offset=record.queue_offset + place,
            physical_offset=record.physical_offset,
            flag=element.flag,
            sys_flag=record.sys_flag & ~_OF_THE_RECORD,
            born_ms=record.born_ms,
            born_host=record.born_host,
            store_ms=record.store_ms,
            store_host=record.store_host,
            reconsume_times=record.reconsume_times,
            prepared_offset=record.prepared_offset,
        )
        for place, element in enumerate(split_batch(record.body))
    ]
