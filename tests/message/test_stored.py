"""Stored messages as objects."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.pretty import pretty_repr

from orbitmq.message.record import (
    COMPRESSED,
    COMPRESSION_LZ4,
    MAGIC_V1,
    MAGIC_V2,
    TRANSACTION_ROLLBACK,
    BodyCorrupt,
    BodyTooLarge,
    MessageError,
    RecordFault,
    RecordInvalid,
    check_record,
)
from orbitmq.message.stored import StoredMessage, compress_body, decode_message, decode_messages
from tests.support.message import (
    CRAFTED_DAMAGE,
    VECTOR_RECORD,
    decoded,
    mutations,
    plain_message,
    plain_pull,
    records,
    with_bytes,
)


def test_the_documented_record_says_what_is_documented():
    message = decode_message(VECTOR_RECORD)

    assert message.topic == "T"
    assert message.body == b"hi"
    assert message.properties == {"TAGS": "A"}
    assert (message.tags, message.keys, message.unique_id) == ("A", None, None)
    assert (message.queue_id, message.queue_offset, message.physical_offset) == (1, 5, 100)
    assert (message.born_ms, message.born_at) == (1700000000000, 1700000000.0)
    assert (message.store_ms, message.stored_at) == (1700000000001, 1700000000.001)
    assert message.born_host == ("127.0.0.1", 1234)
    assert message.store_host == ("127.0.0.1", 10911)
    assert (message.flag, message.sys_flag, message.reconsume_times) == (0, 0, 0)
    assert (message.prepared_offset, message.transaction_type) == (0, 0)
    assert (message.magic, message.size, message.stored_crc) == (MAGIC_V1, 101, 1486039724)
    assert message.offset_id == message.msg_id == "7F00000100002A9F0000000000000064"


def test_every_field_of_a_built_message_is_read_back():
    message = StoredMessage.build(
        topic="主题" * 50,
        stored_body=b"body",
        properties={"KEYS": "k1 k2", "UNIQ_KEY": "ID", "none": None},
        queue_id=-1,
        queue_offset=2**62,
        physical_offset=2**40,
        flag=-7,
        sys_flag=TRANSACTION_ROLLBACK,
        born_ms=-5,
        born_host=("fd00::1", 5),
        store_ms=6,
        store_host=("fd00::2", 7),
        reconsume_times=8,
        prepared_offset=9,
    )

    assert message.topic == "主题" * 50
    assert message.magic == MAGIC_V2
    assert message.properties == {"KEYS": "k1 k2", "UNIQ_KEY": "ID"}
    assert (message.keys, message.msg_id, message.unique_id) == ("k1 k2", "ID", "ID")
    assert (message.queue_id, message.flag, message.reconsume_times) == (-1, -7, 8)
    assert (message.queue_offset, message.physical_offset) == (2**62, 2**40)
    assert (message.born_ms, message.store_ms, message.prepared_offset) == (-5, 6, 9)
    assert (message.born_host, message.store_host) == (("fd00::1", 5), ("fd00::2", 7))
    assert message.transaction_type == TRANSACTION_ROLLBACK
    assert message.sys_flag == TRANSACTION_ROLLBACK | 0x30


@given(all_records=st.lists(records(), max_size=6))
def test_decoding_and_encoding_gives_the_same_bytes(all_records):
    pull = b"".join(all_records)

    messages = decode_messages(memoryview(pull))

    assert b"".join(message.encode() for message in messages) == pull
    assert messages == decoded(all_records)
    assert decode_messages(b"".join(m.encode() for m in messages)) == messages


@given(record=records())
def test_a_message_is_equal_to_one_of_the_same_bytes_only(record):
    message = decode_message(record)
    other = decode_message(with_bytes(record, 19, bytes([record[19] ^ 1])))

    assert message == decode_message(record)
    assert hash(message) == hash(decode_message(record))
    assert message != other
    assert message != record


@given(record=records())
def test_parts_can_be_given_to_a_new_record(record):
    message = decode_message(record)
    raw = message.topic_field + len(message.raw_properties).to_bytes(2, "big")

    assert record.endswith(message.stored_body + raw + message.raw_properties)


@given(record=records())
def test_single_properties_equal_those_of_the_map(record):
    asked_alone, all_read = decode_message(record), decode_message(record)
    properties = all_read.properties

    for name in ("TAGS", "KEYS", "UNIQ_KEY", "a", *properties):
        assert asked_alone.get_property(name) == properties.get(name)
        assert all_read.get_property(name) == properties.get(name)


def test_properties_cannot_be_changed_behind_the_message():
    message = plain_message()

    with pytest.raises(TypeError):
        message.properties["TAGS"] = "B"  # type: ignore[index]


def test_a_corrupt_body_is_never_handed_out():
    record = with_bytes(VECTOR_RECORD, 88, b"ho")
    message = decode_message(record)

    for read in (lambda: message.body, message.expand, message.verify, lambda: message.body):
        with pytest.raises(BodyCorrupt, match="offset 5 of queue 1 of 'T'"):
            read()
    assert message.stored_body == b"ho"
    assert message.tags == "A"


def test_encoding_a_corrupt_message_does_not_make_it_valid():
    record = with_bytes(VECTOR_RECORD, 88, b"ho")

    again = decode_message(record).encode()

    assert check_record(again, 0, len(again)) is RecordFault.BAD_CRC


def test_an_empty_body_is_good_whatever_its_checksum():
    record = with_bytes(plain_message(body=b"").encode(), 8, b"\x12\x34\x56\x78")

    assert decode_message(record).body == b""


def test_a_compressed_body_is_expanded_once_it_is_asked_for():
    stored = compress_body(b"x" * 5000, COMPRESSION_LZ4)
    message = StoredMessage.build(
        topic="T", stored_body=stored, sys_flag=COMPRESSED | COMPRESSION_LZ4
    )

    assert message.is_compressed
    assert message.stored_body == stored
    assert message.body == b"x" * 5000
    assert message.body is message.body
    assert message.expand(limit=5000) == b"x" * 5000
    with pytest.raises(BodyTooLarge):
        message.expand(limit=4999)


def test_a_text_that_is_not_utf8_is_read_with_replacement_characters():
    record = plain_message(properties=b"TAGS\x01\xff\x02").encode()
    message = decode_message(record.replace(b"orders", b"order\xff"))

    assert message.topic == "order\ufffd"
    assert message.tags == message.properties["TAGS"] == "\ufffd"


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (b"\x00", "end inside"),
        (VECTOR_RECORD[:-1], "end inside"),
        (bytes(100), "nothing was written"),
        (with_bytes(VECTOR_RECORD, 90, b"\x02"), "do not add up"),
        (with_bytes(VECTOR_RECORD, 4, b"\x01"), "magic"),
    ],
)
def test_a_pull_with_something_else_in_it_is_refused_with_the_place(tail, reason):
    good = plain_pull(3)

    with pytest.raises(RecordInvalid, match=reason) as refused:
        decode_messages(good + tail)

    assert refused.value.position == len(good)


@pytest.mark.parametrize("damaged", CRAFTED_DAMAGE.values(), ids=CRAFTED_DAMAGE.keys())
def test_crafted_damage_is_refused_with_the_reason_of_the_check(damaged):
    verdict = check_record(damaged, 0, len(damaged), check_crc=False)
    assert isinstance(verdict, RecordFault)

    with pytest.raises(RecordInvalid, match=verdict.value) as refused:
        decode_messages(VECTOR_RECORD + damaged)

    assert refused.value.position == len(VECTOR_RECORD)


def test_a_record_with_something_behind_it_is_not_one_message():
    with pytest.raises(RecordInvalid, match="7 bytes follow"):
        decode_message(VECTOR_RECORD + bytes(7))


@given(pull=mutations(st.lists(records(), max_size=3).map(b"".join)))
def test_mutated_pulls_are_decoded_exactly_or_refused(pull):
    at: int | RecordFault = 0
    whole = 0
    while whole < len(pull) and isinstance(at, int):
        at = check_record(pull, whole, len(pull), check_crc=False)
        whole += at if isinstance(at, int) else 0
    if isinstance(at, RecordFault):
        with pytest.raises(RecordInvalid) as refused:
            decode_messages(pull)
        assert (refused.value.position, refused.value.reason) == (whole, at.value)
        return

    messages = decode_messages(pull)

    assert b"".join(message.encode() for message in messages) == pull
    for message in messages:
        try:
            assert len(message.body) <= 64 * 1024 * 1024
        except MessageError:
            continue


@given(record=records())
def test_a_message_travels_to_other_processes_as_its_record(record):
    message = decode_message(record)
    assert message.properties is not None  # decoded, which must not stop it from travelling

    again = pickle.loads(pickle.dumps(message))  # noqa: S301  made here

    assert again == message
    assert again.properties == message.properties


def test_a_message_shows_which_it_is():
    assert repr(plain_message(3)) == (
        "StoredMessage(topic='orders', queue_id=1, queue_offset=3, "
        "msg_id='0A00000100002A9F0000000000000258')"
    )


def test_a_message_is_never_shown_with_its_body():
    message = StoredMessage.build(topic="orders", stored_body=b"secret", queue_offset=42)

    shown = [repr(message), pretty_repr(message), str(message.__rich_repr__())]

    assert all("orders" in each and "42" in each for each in shown)
    assert not any("secret" in each for each in shown)


@pytest.mark.parametrize("hook", [None, repr, str])
@pytest.mark.parametrize("has_properties", [False, True])
def test_a_message_is_not_encoded_with_its_body(hook, has_properties):
    message = StoredMessage.build(topic="orders", stored_body=b"secret", properties={"TAGS": "A"})
    if has_properties:
        assert message.properties  # from now on it has them as a map

    for encode in (msgspec.json.encode, msgspec.msgpack.encode, msgspec.to_builtins):
        with pytest.raises(TypeError, match=r"WholeMessage|not encoded as a whole"):
            encode(message, enc_hook=hook)
