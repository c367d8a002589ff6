"""A stored message as an object that is taken apart no further than it is asked.

Decoding checks the layout of every record, reads its fixed fields in one step and cuts out the
stored body and what follows it. Topic, properties and hosts are decoded when they are asked for;
the body is checked against its checksum, and expanded if it is compressed, when it is asked for
first. A consumer that only looks at tags pays for tags.

A body that does not match its checksum is never handed out: `body` raises. `stored_body` is the
bytes as they lie in the record, unchecked; who copies them into a new record, which gets a new
checksum, calls `verify` first, or a torn body would become a valid one.
"""

from __future__ import annotations

import struct
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgspec

from orbitmq.message.checksum import CRC_BITS, crc32
from orbitmq.message.compression import MAX_EXPANDED_BODY, expand_body
from orbitmq.message.errors import BodyCorrupt, RecordInvalid
from orbitmq.message.hosts import V4_HOST_SIZE, V6_HOST_SIZE, unpack_host
from orbitmq.message.ids import encode_offset_id
from orbitmq.message.properties import decode_properties, encode_properties, property_value
from orbitmq.message.record import (
    MAGIC_V1,
    MAX_TOPIC_V1,
    MIN_RECORD_SIZE,
    Buffer,
    RecordFault,
    check_record,
    encode_record,
    pack_host,
    record_constants,
    topic_field,
)
from orbitmq.message.sysflag import (
    BORN_HOST_V6,
    COMPRESSED,
    HOSTS_V6_MASK,
    STORE_HOST_V6,
    TRANSACTION_MASK,
)
from orbitmq.message.wellknown import KEYS, TAGS, UNIQ_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
_read_v4_head = _HEADS[0].unpack_from
_read_short = struct.Struct(">h").unpack_from


def decode_messages(buffer: Buffer) -> list[StoredMessage]:
    """The messages of a pull's body.

    Raises `RecordInvalid` if anything in it is not a whole record: a broker never sends such a
    body, and a reader that took the good part and went on would skip messages unnoticed.
    """
    data = buffer if isinstance(buffer, bytes) else bytes(buffer)
    messages = []
    at, end = 0, len(data)
    last_head = end - MIN_RECORD_SIZE
    while at < end:
        # The usual kind of record (v1, IPv4 hosts) is checked and cut here, by hand: this loop is
        # what a client spends its time in. Whatever is not certainly one goes the general way.
        if at <= last_head:
            head: _Head = _read_v4_head(data, at)
            body_at = at + 88
            topic_at = body_at + head[14]
            next_at = at + head[0]
            if (
                head[1] == MAGIC_V1
                and not head[7] & HOSTS_V6_MASK
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
                    messages.append(StoredMessage(head, data[body_at:topic_at], tail))
                    at = next_at
                    continue
        message = _decode_any(data, at, end)
        messages.append(message)
        at += message.size
    return messages


def decode_message(record: Buffer) -> StoredMessage:
    """The one message whose record `record` is."""
    data = record if isinstance(record, bytes) else bytes(record)
    message = _decode_any(data, 0, len(data))
    if message.size != len(data):
        text = f"{len(data) - message.size} bytes follow the record"
        raise RecordInvalid(message.size, text)
    return message


class WholeMessage:
    """Keeps encoders of structs from writing a message out, body and all, into some log.

    They go through all fields, and know nothing to write for this one: they refuse it by its name.
    Nor is there a text of it, for those who have a text written of what cannot be encoded.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        raise TypeError("a message is not encoded as a whole; take what is wanted of it")


_WHOLE: Final = WholeMessage()


class StoredMessage(msgspec.Struct, eq=False, gc=False):
    """One record, decoded as far as it was asked for. Equal to another if the bytes are.

    Never shown with its body, which would end up in logs.
    """

    _head: _Head
    _stored_body: bytes
    #: The topic with its length, the properties with theirs.
    _tail: bytes
    _as_a_whole: WholeMessage = _WHOLE
    # Once they were asked for:
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
        born_host: tuple[str, int] = ("0.0.0.0", 0),  # noqa: S104  nobody listens here
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
        """The record: the very bytes that this message was decoded from."""
        head = self._head
        return b"".join(
            (_HEADS[head[7] & HOSTS_V6_MASK].pack(*head), self._stored_body, self._tail)
        )

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
        # To other processes it travels as the record, without what was decoded of it here.
        return decode_message, (self.encode(),)

    def __repr__(self) -> str:
        return f"StoredMessage({', '.join(f'{n}={v!r}' for n, v in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # Without it, structs show all of their fields to whoever asks for this.
        return [
            ("topic", self.topic),
            ("queue_id", self.queue_id),
            ("queue_offset", self.queue_offset),
            ("msg_id", self.msg_id),
        ]

    # ---- the fixed fields

    @property
    def size(self) -> int:
        """Bytes of the whole record."""
        return self._head[0]

    @property
    def magic(self) -> int:
        """`MAGIC_V1` or `MAGIC_V2`."""
        return self._head[1]

    @property
    def stored_crc(self) -> int:
        """The checksum that the record carries for its body."""
        return self._head[2]

    @property
    def queue_id(self) -> int:
        return self._head[3]

    @property
    def flag(self) -> int:
        """The application's own number."""
        return self._head[4]

    @property
    def queue_offset(self) -> int:
        return self._head[5]

    @property
    def physical_offset(self) -> int:
        """Where the record begins in the commit log of its broker."""
        return self._head[6]

    @property
    def sys_flag(self) -> int:
        return self._head[7]

    @property
    def born_ms(self) -> int:
        """When the producer made it, in milliseconds as stored."""
        return self._head[8]

    @property
    def born_at(self) -> float:
        """When the producer made it."""
        return self._head[8] / 1000

    @property
    def born_host(self) -> tuple[str, int]:
        """Address and port of the producer."""
        return unpack_host(self._head[9])

    @property
    def store_ms(self) -> int:
        """When the broker stored it, in milliseconds as stored."""
        return self._head[10]

    @property
    def stored_at(self) -> float:
        """When the broker stored it."""
        return self._head[10] / 1000

    @property
    def store_host(self) -> tuple[str, int]:
        """Address and port of the broker."""
        return unpack_host(self._head[11])

    @property
    def reconsume_times(self) -> int:
        return self._head[12]

    @property
    def prepared_offset(self) -> int:
        """Commit-log offset of the half message that was committed to make this one."""
        return self._head[13]

    @property
    def transaction_type(self) -> int:
        """One of `sysflag.TRANSACTION_*`."""
        return self._head[7] & TRANSACTION_MASK

    # ---- the body

    @property
    def stored_body(self) -> bytes:
        """The body as it lies in the record: maybe compressed, and not checked."""
        return self._stored_body

    @property
    def is_compressed(self) -> bool:
        return bool(self._head[7] & COMPRESSED)

    @property
    def body(self) -> bytes:
        """The body as its producer gave it, checked, and expanded up to `MAX_EXPANDED_BODY`."""
        body = self._body
        if body is None:
            stored = self._stored_body
            if self._head[7] & COMPRESSED or crc32(stored) & CRC_BITS != self._head[2]:
                stored = self.expand()
            body = self._body = stored
        return body

    def expand(self, *, limit: int = MAX_EXPANDED_BODY) -> bytes:
        """The checked body as its producer gave it, if it is no longer than `limit`."""
        self.verify()
        if self._head[7] & COMPRESSED:
            return expand_body(self._stored_body, self._head[7], limit=limit)
        return self._stored_body

    def verify(self) -> None:
        """Raise `BodyCorrupt` if the stored body is not the one the checksum was made of."""
        # Java's readers do not look at the checksum of an empty body, so it may be anything.
        if self._stored_body and crc32(self._stored_body) & CRC_BITS != self._head[2]:
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
        begin = 1 if self._head[1] == MAGIC_V1 else 2
        return self._tail[begin : self._topic_end()].decode("utf-8", "replace")

    @property
    def raw_properties(self) -> bytes:
        """The property string as it lies in the record."""
        return self._tail[self._topic_end() + 2 :]

    @property
    def properties(self) -> Mapping[str, str]:
        properties = self._properties
        if properties is None:
            tail = self._tail
            raw = tail[tail[0] + 3 :] if self._head[1] == MAGIC_V1 else self.raw_properties
            properties = self._properties = MappingProxyType(decode_properties(raw))
        return properties

    def get_property(self, name: str) -> str | None:
        """One property; cheaper than all of them for the first few."""
        if self._properties is not None:
            return self._properties.get(name)
        tail = self._tail
        raw = tail[tail[0] + 3 :] if self._head[1] == MAGIC_V1 else self.raw_properties
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
        """The id that its producer gave it; the same through all retries."""
        return self.get_property(UNIQ_KEY)

    @property
    def offset_id(self) -> str:
        """The id that says where this copy of it lies."""
        return encode_offset_id(self._head[11], self._head[6])

    @property
    def msg_id(self) -> str:
        """What clients show as its id: the unique one, or the place if it has none."""
        return self.unique_id or self.offset_id

    def _topic_end(self) -> int:
        if self._head[1] == MAGIC_V1:
            return 1 + self._tail[0]
        return 2 + cast("int", _read_short(self._tail)[0])


def _decode_any(data: bytes, at: int, end: int) -> StoredMessage:
    """The message at `at`, whatever its version and hosts; raises if there is none."""
    size = check_record(data, at, end, check_crc=False)
    if isinstance(size, RecordFault):
        raise RecordInvalid(at, size.value)
    head = cast("_Head", _read_v4_head(data, at))
    layout = _HEADS[head[7] & HOSTS_V6_MASK]
    head = cast("_Head", layout.unpack_from(data, at))
    body_at = at + layout.size
    topic_at = body_at + head[14]
    return StoredMessage(head, data[body_at:topic_at], data[topic_at : at + size])
