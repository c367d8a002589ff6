"""Messages of every kind, made by hypothesis: what clients send, and what nobody should send."""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from orbitmq.message.record import (
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_UNSPECIFIED,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    encode_record,
    pack_host,
    record_constants,
    topic_field,
)
from orbitmq.message.stored import StoredMessage, compress_body, decode_message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)

#: The record of the documented vector, byte for byte.
VECTOR_RECORD = bytes.fromhex(
    "00000065daa320a758932aac000000010000000000000000000000050000000000000064"
    "000000000000018bcfe568007f000001000004d20000018bcfe568017f00000100002a9f"
    "00000000000000000000000000000002686901540007544147530141" + "02"
)

hosts = st.tuples(
    st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str), st.integers(0, 65535)
)

#: Topics on both sides of the length at which the layout changes.
topics = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12),
    st.sampled_from(["T", "orders", "%RETRY%group", "t" * 127, "t" * 128, "t" * 300]),
)

names = st.one_of(
    st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "WAIT", "CLUSTER", "TAGSX", "KEY", "a", "顺序"]),
    st.text(
        st.characters(codec="utf-8", exclude_characters="\x01\x02", exclude_categories=["Cs"]),
        min_size=1,
        max_size=9,
    ),
)
values = st.text(
    st.characters(codec="utf-8", exclude_characters="\x02", exclude_categories=["Cs"]),
    min_size=1,
    max_size=9,
)

#: Strings as a producer writes them.
plain_properties = st.dictionaries(names, values.filter(lambda v: "\x01" not in v), max_size=6).map(
    lambda found: "".join(f"{n}\x01{v}\x02" for n, v in found.items()).encode()
)
#: Anything between separators: no names, no values, several separators, repeats, no last one.
odd_properties = st.lists(
    st.one_of(
        st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "\x01", "\x02", "\x00", "x", "é"]),
        names,
        values,
    ),
    max_size=14,
).map(lambda parts: "".join(parts).encode())
#: Not even UTF-8.
broken_properties = st.lists(
    st.sampled_from(
        [b"TAGS", b"KEYS", b"\x01", b"\x02", b"\xff", b"\xed\xa0\x80", b"\xe8", b"a", b"\xc0\x80"]
    ),
    max_size=14,
).map(b"".join)
any_properties = st.one_of(plain_properties, plain_properties, odd_properties, broken_properties)

#: A few values of each, so that equal ones come together as they do in real pulls.
bodies = st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"hi", b"x" * 100, b"y" * 1024]))
compressions = st.sampled_from(
    [COMPRESSION_UNSPECIFIED, COMPRESSION_ZLIB, COMPRESSION_LZ4, COMPRESSION_ZSTD]
)


@st.composite
def records(draw: st.DrawFn, properties: st.SearchStrategy[bytes] = any_properties) -> bytes:
    """One valid record of any kind."""
    sys_flag = draw(st.sampled_from([0, 0, 0, 0x2, 0x4, 0x8, 0xC, 0x40]))
    body = draw(bodies)
    if draw(st.booleans()) and draw(st.booleans()):
        compression = draw(compressions)
        body = compress_body(body, compression)
        sys_flag |= COMPRESSED | compression
    field = topic_field(draw(topics))
    if draw(st.booleans()) and len(field) <= 128:
        field = draw(st.sampled_from([field, struct.pack(">h", len(field) - 1) + field[1:]]))
    constants = record_constants(
        sys_flag,
        draw(st.one_of(st.integers(0, 2**41), INT64)),
        pack_host(*draw(hosts)),
        draw(st.one_of(st.integers(0, 2**41), INT64)),
        pack_host(*draw(hosts)),
        draw(st.integers(0, 16)),
        draw(INT64),
    )
    _, pieces = encode_record(
        body,
        field,
        draw(properties),
        draw(INT32),
        draw(INT32),
        draw(st.one_of(st.integers(0, 50), INT64)),
        draw(INT64),
        constants,
    )
    return b"".join(pieces)


@st.composite
def mutations(draw: st.DrawFn, base: st.SearchStrategy[bytes]) -> bytes:
    """Bytes that were good once: some overwritten, cut out, doubled, cut off or added."""
    octets = bytearray(draw(base))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(octets) - 1)))
        change = draw(st.sampled_from(["set", "word", "cut", "double", "end", "more"]))
        if change == "set" and octets:
            octets[at] = draw(st.integers(0, 255))
        elif change == "word":
            octets[at : at + 4] = draw(
                st.sampled_from(
                    [b"\x00" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00"]
                )
            )
        elif change == "cut":
            del octets[at : at + draw(st.integers(1, 9))]
        elif change == "double":
            octets[at:at] = octets[at : at + draw(st.integers(1, 9))]
        elif change == "end":
            del octets[at:]
        else:
            octets += draw(st.binary(max_size=9))
    return bytes(octets)


def plain_message(
    number: int = 0, *, body: bytes = b"hello", properties: bytes = b"TAGS\x01A\x02"
) -> StoredMessage:
    """A message as most are: v1, IPv4."""
    return StoredMessage.build(
        topic="orders",
        stored_body=body,
        properties=properties,
        queue_id=1,
        queue_offset=number,
        physical_offset=number * 200,
        born_ms=1_700_000_000_000 + number,
        born_host=("10.0.0.7", 40001),
        store_ms=1_700_000_000_100 + number,
        store_host=("10.0.0.1", 10911),
    )


def plain_pull(count: int, make_body: Callable[[int], bytes] = lambda n: b"body-%d" % n) -> bytes:
    """The body of a pull of `count` plain messages."""
    return b"".join(plain_message(n, body=make_body(n)).encode() for n in range(count))


def with_bytes(record: bytes, at: int, new: bytes) -> bytes:
    """`record` with some of its bytes overwritten."""
    return record[:at] + new + record[at + len(new) :]


def _negative_topic_length() -> bytes:
    """A length of -128 that leads back into the body, where properties of the right size begin."""
    record = bytearray(plain_message(body=bytes(200)).encode())
    field_at = 88 + 200
    record[field_at] = 0x80
    size = len(record) - (field_at - 125)
    record[field_at - 127 : field_at - 125] = size.to_bytes(2, "big")
    return bytes(record)


def _first_version_topic(length: int) -> bytes:
    """A record of the first version whose parts add up around a topic of this length."""
    field = bytes([length]) + b"t" * length
    constants = record_constants(0, 0, bytes(8), 0, bytes(8))
    return b"".join(encode_record(b"hi", field, b"a\x01b\x02", 0, 0, 0, 0, constants)[1])


#: What random changes hardly ever make: damage that most checks agree with.
CRAFTED_DAMAGE = {
    "a size one too large at the end": with_bytes(VECTOR_RECORD, 3, b"\x66"),
    "a topic that ends behind the record": with_bytes(VECTOR_RECORD, 90, b"\x7f"),
    "a topic above 127 in the first version": _first_version_topic(200),
    "a negative topic length": _negative_topic_length(),
    "wider hosts than the record has room for": with_bytes(VECTOR_RECORD, 36, b"\x00\x00\x00\x30"),
    "no room for the lengths after wide hosts": with_bytes(VECTOR_RECORD, 36, b"\x00\x00\x00\x10"),
}


def decoded(all_records: Sequence[bytes]) -> list[StoredMessage]:
    """Each record decoded alone."""
    return [decode_message(record) for record in all_records]


def _time(milliseconds: int) -> datetime | None:
    """What a time column holds: nothing for times that some time zone's calendar does not have."""
    try:
        found = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)
        for day in (timedelta(days=-1), timedelta(days=1)):
            found + day
    except OverflowError:
        return None
    return found


def expected_row(message: StoredMessage, broker_name: str) -> dict[str, Any]:
    """The row of the Arrow columns that says what the message object says."""
    return {
        "topic": message.topic,
        "brokerName": broker_name,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "msgId": message.msg_id,
        "tags": message.tags,
        "keys": message.keys,
        "body": message.body,
        "flag": message.flag,
        "reconsumeTimes": message.reconsume_times,
        "bornTimestamp": _time(message.born_ms),
        "storeTimestamp": _time(message.store_ms),
        "properties": dict(message.properties),
    }


def rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a record batch, with maps as dictionaries; repeated keys are an error."""
    batch.validate(full=True)
    rows: list[dict[str, Any]] = batch.to_pylist()
    for row in rows:
        if "properties" in row:
            items = row["properties"]
            row["properties"] = dict(items)
            assert len(row["properties"]) == len(items), f"repeated names in {items}"
    return rows
