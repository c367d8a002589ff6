"""The stored layout, as it is written and checked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.message.record import (
    CRC_BITS,
    HOSTS_V6_MASK,
    MAGIC_V1,
    MAGIC_V2,
    MAX_PROPERTIES,
    MIN_RECORD_SIZE,
    RecordFault,
    RecordRefused,
    check_record,
    crc32,
    encode_record,
    end_of_file_record,
    magic_for,
    message_heads,
    pack_host,
    properties_size,
    record_constants,
    restamped,
    topic_field,
    unpack_host,
)
from tests.support.message import VECTOR_RECORD, hosts, mutations, records, topics, with_bytes

V4 = pack_host("127.0.0.1", 10911)
V6 = pack_host("::1", 10911)
CONSTANTS = record_constants(
    0, 1700000000000, pack_host("127.0.0.1", 1234), 1700000000001, pack_host("127.0.0.1", 10911)
)


def encode(body: bytes = b"hi", properties: bytes = b"", constants: bytes = CONSTANTS) -> bytes:
    _, pieces = encode_record(body, topic_field("T"), properties, 1, 0, 5, 100, constants)
    return b"".join(pieces)


def test_the_documented_record_is_written_byte_for_byte():
    size, pieces = encode_record(b"hi", topic_field("T"), b"TAGS\x01A\x02", 1, 0, 5, 100, CONSTANTS)

    assert b"".join(pieces) == VECTOR_RECORD
    assert size == len(VECTOR_RECORD) == 101


@given(record=records())
def test_a_written_record_is_valid_and_has_the_announced_size(record):
    assert check_record(record, 0, len(record)) == len(record)
    assert check_record(memoryview(b"??" + record + b"?"), 2, len(record) + 2) == len(record)


@given(topic=topics, body=st.binary(max_size=50), born=hosts, store=hosts)
def test_the_size_is_known_before_the_record_is_written(topic, body, born, store):
    constants = record_constants(0, 0, pack_host(*born), 0, pack_host(*store))
    field = topic_field(topic)

    size, pieces = encode_record(body, field, b"a\x01b\x02", 0, 0, 0, 0, constants)

    assert size == len(b"".join(pieces))


@given(
    topic=topics,
    body=st.binary(max_size=50),
    born=hosts,
    store=hosts,
    sys_flag=st.integers(0, 0xFF),
    numbers=st.lists(st.integers(0, 2**31 - 1), min_size=8, max_size=8),
)
def test_a_message_by_itself_is_written_like_one_of_a_batch(
    topic, body, born, store, sys_flag, numbers
):
    queue_id, flag, number, at, born_ms, store_ms, reconsumed, prepared = numbers
    field, born_host, store_host = topic_field(topic), pack_host(*born), pack_host(*store)
    constants = record_constants(
        sys_flag, born_ms, born_host, store_ms, store_host, reconsumed, prepared
    )
    size, pieces = encode_record(body, field, b"p", queue_id, flag, number, at, constants)

    pack, fixed, hosts = message_heads(store_host)[len(born_host)]
    alone = pack(
        *(fixed + len(body) + len(field) + 1, magic_for(field), crc32(body) & CRC_BITS),
        *(queue_id, flag, number, at, sys_flag & ~HOSTS_V6_MASK | hosts),
        *(born_ms, born_host, store_ms, store_host, reconsumed, prepared, len(body)),
    )

    assert (alone, properties_size(1)) == (pieces[0], pieces[3])
    assert fixed + len(body) + len(field) + 1 == size


@given(born=hosts, store=hosts, before=st.integers(0, 1 << 62), after=st.integers(0, 1 << 62))
def test_the_head_of_a_record_can_be_given_another_time(born, store, before, after):
    def head(store_ms):
        constants = record_constants(0, 1, pack_host(*born), store_ms, pack_host(*store))
        return bytes(encode_record(b"body", topic_field("T"), b"", 1, 2, 3, 4, constants)[1][0])

    assert restamped(head(before), after) == head(after)


def test_only_packed_hosts_have_heads():
    with pytest.raises(RecordRefused, match="8 or 20 bytes"):
        message_heads(b"1234")


def test_the_smallest_record_has_an_empty_body_topic_and_no_properties():
    _, pieces = encode_record(b"", topic_field(""), b"", 0, 0, 0, 0, CONSTANTS)

    assert check_record(b"".join(pieces), 0, MIN_RECORD_SIZE) == MIN_RECORD_SIZE == 91


@pytest.mark.parametrize(
    ("length", "prefix", "magic"),
    [(0, b"\x00", MAGIC_V1), (127, b"\x7f", MAGIC_V1), (128, b"\x00\x80", MAGIC_V2)],
)
def test_topics_above_127_bytes_take_the_second_version(length, prefix, magic):
    field = topic_field("t" * length)

    assert field == prefix + b"t" * length
    assert magic_for(field) == magic


@given(topic=st.text(st.characters(codec="utf-8"), max_size=400))
def test_a_topic_field_never_looks_like_the_other_version(topic):
    encoded = topic.encode()
    short_form = len(encoded).to_bytes(1, "big") + encoded if len(encoded) < 128 else None
    long_form = len(encoded).to_bytes(2, "big") + encoded

    assert magic_for(long_form) == MAGIC_V2
    assert short_form is None or magic_for(short_form) == MAGIC_V1


def test_topics_that_do_not_fit_are_refused():
    with pytest.raises(RecordRefused, match="32768 bytes does not fit"):
        topic_field("t" * 32768)
    with pytest.raises(RecordRefused, match="cannot be written"):
        topic_field("\ud800")


def test_properties_of_32767_bytes_fit_and_no_more():
    largest = encode(properties=b"x" * MAX_PROPERTIES)

    assert check_record(largest, 0, len(largest)) == 94 + MAX_PROPERTIES
    with pytest.raises(RecordRefused, match="32768 bytes do not fit; 32767 do"):
        encode(properties=b"x" * (MAX_PROPERTIES + 1))


@pytest.mark.parametrize(
    ("born", "store", "bits"), [(V4, V4, 0), (V6, V4, 0x10), (V4, V6, 0x20), (V6, V6, 0x30)]
)
def test_the_ipv6_bits_follow_the_hosts(born, store, bits):
    constants = record_constants(0x30 | 0x1, 1, born, 2, store)

    assert int.from_bytes(constants[:4], "big") == bits | 0x1
    assert len(constants) == 32 + len(born) + len(store)


def test_values_out_of_range_are_refused_by_name():
    with pytest.raises(RecordRefused, match="out of its range"):
        encode_record(b"", topic_field("T"), b"", 2**31, 0, 0, 0, CONSTANTS)
    with pytest.raises(RecordRefused, match="out of its range"):
        record_constants(0, 2**63, V4, 0, V4)
    with pytest.raises(RecordRefused, match="8 or 20 bytes"):
        record_constants(0, 0, b"1234", 0, V4)
    with pytest.raises(RecordRefused, match="48, 60 or 72"):
        encode_record(b"", topic_field("T"), b"", 0, 0, 0, 0, b"")
    with pytest.raises(RecordRefused, match="topic field"):
        encode_record(b"", b"", b"", 0, 0, 0, 0, CONSTANTS)


@given(host=hosts)
def test_hosts_are_read_as_they_were_packed(host):
    assert unpack_host(pack_host(*host)) == host


@pytest.mark.parametrize(
    ("address", "port"), [("localhost", 1), ("", 1), ("1.2.3.4", -1), ("1.2.3.4", 2**31)]
)
def test_what_is_no_address_cannot_be_packed(address, port):
    with pytest.raises(RecordRefused):
        pack_host(address, port)


def test_packed_hosts_of_another_length_are_refused():
    with pytest.raises(RecordRefused, match="8 or 20 bytes, not 9"):
        unpack_host(bytes(9))


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (b"", RecordFault.CUT_SHORT),
        (bytes(7), RecordFault.CUT_SHORT),
        (bytes(200), RecordFault.EMPTY),
        (end_of_file_record(4096), RecordFault.END_OF_FILE),
        (VECTOR_RECORD[:-1], RecordFault.CUT_SHORT),
        (VECTOR_RECORD[:8], RecordFault.CUT_SHORT),
        (with_bytes(VECTOR_RECORD, 4, b"\x00"), RecordFault.UNKNOWN_MAGIC),
        (with_bytes(VECTOR_RECORD, 0, b"\x80"), RecordFault.BAD_SIZE),
        (with_bytes(VECTOR_RECORD, 3, b"\x5a"), RecordFault.BAD_SIZE),
        (with_bytes(VECTOR_RECORD, 3, b"\x64"), RecordFault.BAD_SIZE),
        (with_bytes(VECTOR_RECORD, 84, b"\xff"), RecordFault.BAD_SIZE),
        (with_bytes(VECTOR_RECORD, 84, b"\x7f"), RecordFault.BAD_SIZE),
        (with_bytes(VECTOR_RECORD, 90, b"\x80"), RecordFault.BAD_SIZE),
        (with_bytes(VECTOR_RECORD, 90, b"\x02"), RecordFault.BAD_SIZE),
        (with_bytes(VECTOR_RECORD, 92, b"\xff"), RecordFault.BAD_SIZE),
        (with_bytes(VECTOR_RECORD, 36, b"\x00\x00\x00\x30"), RecordFault.BAD_SIZE),
        (with_bytes(VECTOR_RECORD, 88, b"ho"), RecordFault.BAD_CRC),
        (with_bytes(VECTOR_RECORD, 8, b"\xd8"), RecordFault.BAD_CRC),
    ],
)
def test_every_fault_has_its_name(record, fault):
    assert check_record(record, 0, len(record)) is fault


def test_the_checksum_is_looked_at_only_when_asked():
    torn = with_bytes(VECTOR_RECORD, 88, b"ho")

    assert check_record(torn, 0, len(torn), check_crc=False) == len(torn)


def test_the_checksum_of_an_empty_body_does_not_matter():
    record = with_bytes(encode(body=b""), 8, b"\x12\x34\x56\x78")

    assert check_record(record, 0, len(record)) == len(record)


@given(record=mutations(records()), check_crc=st.booleans())
def test_mutated_records_are_valid_within_their_bounds_or_have_a_fault(record, *, check_crc):
    verdict = check_record(record, 0, len(record), check_crc=check_crc)

    assert isinstance(verdict, RecordFault) or MIN_RECORD_SIZE <= verdict <= len(record)


def test_an_end_of_file_record_states_what_it_fills():
    assert end_of_file_record(100).hex() == "00000064cbd43194"
    with pytest.raises(RecordRefused, match="8 are the least"):
        end_of_file_record(7)
