"""The compressed form of a broker's registration.

zlib over: the DataVersion, the topics as lines of text, the filter servers and, from 5.0.0 on, the
queue mappings; each with its length before it. A name server has to accept it, though brokers of
today send the JSON form. What it inflates to is limited: two kilobytes can promise two megabytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import msgspec

from orbitmq.wire.bodies.base import decode_body, encode_body
from orbitmq.wire.bodies.route import QueueMappingInfo
from orbitmq.wire.bodies.topics import (
    DataVersion,
    RegisterBroker,
    TopicConfig,
    TopicConfigTable,
)
from orbitmq.wire.coerce import Mismatch, coerce
from orbitmq.wire.errors import BodyError
from orbitmq.wire.limits import DEFAULT_LIMITS, WireLimits
from orbitmq.wire.versions import Gate

_unpack_int = struct.Struct(">i").unpack_from
_pack_int = struct.Struct(">i").pack
_NAME = RegisterBroker.__name__


def body_crc32(body: bytes | memoryview) -> int:
    """The checksum that a registration carries in `body_crc32`."""
    return zlib.crc32(body) & 0x7FFFFFFF


def compress_registration(registration: RegisterBroker) -> bytes:
    """A registration in the compressed form."""
    table = registration.topic_config_serialize_wrapper
    mappings = table.topic_queue_mapping_info_map or {}
    pieces = [
        *_sized(encode_body(table.data_version or DataVersion())),
        _pack_int(len(table.topic_config_table)),
        *(p for topic in table.topic_config_table.values() for p in _sized(_line(topic))),
        *_sized(msgspec.json.encode(registration.filter_server_list)),
        _pack_int(len(mappings)),
        *(p for mapping in mappings.values() for p in _sized(encode_body(mapping))),
    ]
    return zlib.compress(b"".join(pieces), 9)


def decompress_registration(
    data: bytes | memoryview, version: int, limits: WireLimits = DEFAULT_LIMITS
) -> RegisterBroker:
    """A compressed registration of a broker that announces `version`. Raises `BodyError`."""
    rest = _Rest(_inflated(data, limits))
    data_version = decode_body(DataVersion, rest.sized(), limits)
    topics = [_topic(rest.sized(), limits) for _ in rest.counted()]
    try:
        filter_servers = msgspec.json.decode(rest.sized(), type=tuple[str, ...])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BodyError(_NAME, f"a list of filter servers that is not one: {error}") from error
    mappings = []
    if version >= Gate.QUEUE_MAPPINGS:
        mappings = [decode_body(QueueMappingInfo, rest.sized(), limits) for _ in rest.counted()]
    return RegisterBroker(
        filter_server_list=filter_servers,
        topic_config_serialize_wrapper=TopicConfigTable(
            data_version=data_version,
            topic_config_table={topic.topic_name: topic for topic in topics},
            topic_queue_mapping_info_map={
                mapping.topic: mapping for mapping in mappings if mapping.topic is not None
            },
        ),
    )


def _inflated(data: bytes | memoryview, limits: WireLimits) -> bytes:
    inflater = zlib.decompressobj()
    try:
        inflated = inflater.decompress(data, limits.inflated)
    except zlib.error as error:
        raise BodyError(_NAME, f"not zlib: {error}") from error
    if not inflater.eof:
        # Either the stream was cut, or it would go on beyond the limit.
        raise BodyError(_NAME, f"cut short, or of more than {limits.inflated} bytes")
    return inflated


class _Rest:
    """What of an inflated body has not been read yet."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def sized(self) -> bytes:
        size = self._integer()
        start = self._at
        if not 0 <= size <= len(self._data) - start:
            raise BodyError(_NAME, f"{size} bytes announced, {len(self._data) - start} left")
        self._at = start + size
        return self._data[start : self._at]

    def counted(self) -> Iterator[int]:
        count = self._integer()
        if count < 0:
            raise BodyError(_NAME, f"a count of {count}")
        # Not a list: the count is only a claim, and every entry must still be there to be read.
        return iter(range(count))

    def _integer(self) -> int:
        try:
            (number,) = _unpack_int(self._data, self._at)
        except struct.error:
            raise BodyError(_NAME, "ends within a length") from None
        self._at += 4
        return int(number)


def _topic(line: bytes, limits: WireLimits) -> TopicConfig:
    """`name readQueues writeQueues perm filterType {attributes}`; the last may be missing."""
    try:
        name, reads, writes, perm, filter_type, *attributes = line.decode().split(" ", 5)
        topic = coerce(
            TopicConfig,
            {
                "topicName": name,
                "readQueueNums": reads,
                "writeQueueNums": writes,
                "perm": perm,
                "topicFilterType": filter_type,
            },
            limits,
        )
    except (ValueError, Mismatch) as error:
        raise BodyError(_NAME, f"a topic that cannot be read: {line[:80]!r}") from error
    return msgspec.structs.replace(
        topic, attributes=_attributes(attributes[0] if attributes else "")
    )


def _attributes(text: str) -> dict[str, str]:
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # Apache's name server registers a topic without the attributes that it cannot read.
        return {}


def _line(topic: TopicConfig) -> bytes:
    return b"%b %d %d %d %b %b" % (
        topic.topic_name.encode(),
        topic.read_queue_nums,
        topic.write_queue_nums,
        topic.perm,
        topic.topic_filter_type.encode(),
        msgspec.json.encode(topic.attributes),
    )


def _sized(data: bytes) -> tuple[bytes, bytes]:
    return _pack_int(len(data)), data
