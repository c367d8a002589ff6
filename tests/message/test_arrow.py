"""Messages as Arrow columns: what the objects say, for any messages."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.message import arrow, record
from orbitmq.message.arrow import MESSAGE_SCHEMA, BadBody, messages_to_arrow
from orbitmq.message.stored import StoredMessage, compress_body, decode_message, decode_messages
from tests.support.message import (
    broken_properties,
    decoded,
    expected_row,
    mutations,
    odd_properties,
    plain_message,
    plain_properties,
    plain_pull,
    records,
    rows_of,
    with_bytes,
)

GOOD = plain_message(0, body=b"good").encode()
TORN = with_bytes(plain_message(1, body=b"torn").encode(), 88, b"T")
UNEXPANDABLE = StoredMessage.build(
    topic="orders", stored_body=b"not zlib", sys_flag=record.COMPRESSED, queue_offset=2
).encode()


def test_the_columns_are_those_that_spark_declares():
    time = pa.timestamp("us", tz="UTC")

    assert [(field.name, field.type) for field in MESSAGE_SCHEMA] == [
        ("topic", pa.string()),
        ("brokerName", pa.string()),
        ("queueId", pa.int32()),
        ("queueOffset", pa.int64()),
        ("msgId", pa.string()),
        ("tags", pa.string()),
        ("keys", pa.string()),
        ("body", pa.binary()),
        ("flag", pa.int32()),
        ("reconsumeTimes", pa.int32()),
        ("bornTimestamp", time),
        ("storeTimestamp", time),
        ("properties", pa.map_(pa.string(), pa.string())),
    ]
    assert all(field.nullable for field in MESSAGE_SCHEMA)


@pytest.mark.parametrize("pull", [b"", GOOD, GOOD * 3], ids=["none", "one", "three"])
def test_every_batch_has_exactly_the_schema(pull):
    assert messages_to_arrow(pull, broker_name="a").schema.equals(MESSAGE_SCHEMA)


@given(
    all_records=st.lists(
        st.one_of(records(), records(plain_properties), records(odd_properties)), max_size=7
    )
)
def test_columns_say_what_the_objects_say(all_records):
    batch = messages_to_arrow(b"".join(all_records), broker_name="broker-a")

    assert rows_of(batch) == [expected_row(m, "broker-a") for m in decoded(all_records)]


@given(
    strings=st.lists(
        st.one_of(plain_properties, odd_properties, broken_properties), min_size=1, max_size=12
    )
)
def test_any_property_strings_together_are_read_as_each_alone(strings):
    messages = [plain_message(n, properties=raw) for n, raw in enumerate(strings)]

    batch = messages_to_arrow(b"".join(m.encode() for m in messages), broker_name="b")

    assert rows_of(batch) == [expected_row(m, "b") for m in messages]


@pytest.mark.parametrize(
    "strings",
    [
        [b""],
        [b"", b"", b"TAGS\x01A\x02", b""],
        [b"TAGS\x01A", b"KEYS\x01k\x02", b"\x02TAGS\x01B"],
        [b"TAGS\x01A", b"\x02"],
        [b"TAGS\x01A\x02TAGS\x01B\x02", b"TAGS\x01C\x02"],
        [b"TAGS\x01A\x02TAGS\x01\x02"],
        [b"TAGS\x01\x01A\x01\x02", b"a\x01b\x01c\x02d\x02"],
        [b"\x01TAGS\x01A\x02", b"XTAGS\x01A\x02", b"TAGSX\x01A\x02", b"TAGS"],
        [b"TAGS\x01A\x00B\x02\x00\x01\x00\x02"],
        [b"\xff\x011\x02\xfe\x012\x02", b"TAGS\x01\xff"],
        [b"K%d\x01v\x02" % n for n in range(70)],
        [b"".join(b"K%d\x01v%d\x02" % (n % 60, n) for n in range(90)), b"K1\x01w\x02"],
        [b"".join(b"K%d\x01v\x02" % n for n in range(80)), b"K77\x011\x02a\x012\x02K77\x013\x02"],
    ],
)
def test_odd_property_strings(strings):
    messages = [plain_message(n, properties=raw) for n, raw in enumerate(strings)]

    batch = messages_to_arrow(b"".join(m.encode() for m in messages), broker_name="b")

    assert rows_of(batch) == [expected_row(m, "b") for m in messages]


NAMES = (b"KEYS", b"UNIQ_KEY", b"TAGS", b"a", b"country", "größe".encode())

#: What one string of a chunk may have instead of the names and values of all the others.
ODD_ONES = (
    b"",
    b"\x02",
    b"KEYS\x01k\x02",
    b"KEYS\x01k\x02UNIQ_KEY\x01u\x02TAGS\x01t\x02a\x01\x02country\x01c\x02gr\xc3\xb6\xc3\x9fe\x01g\x02",
    b"KEYS\x01k\x02UNIQ_KEX\x01u\x02TAGS\x01t\x02a\x01b\x02country\x01c\x02gr\xc3\xb6\xc3\x9fe\x01g\x02",
    b"KEYS\x01k\x02UNIQ_KEY\x01u\x02TAGS\x01t\x02KEYS\x01b\x02country\x01c\x02gr\xc3\xb6\xc3\x9fe\x01g\x02",
    b"KEYS\x01k\x02UNIQ_KEY\x01\xff\x02TAGS\x01t\x02a\x01b\x02country\x01c\x02gr\xc3\xb6\xc3\x9fe\x01g\x02",
    b"KEYS\x01k\x01\x01\x02UNIQ_KEY\x01u\x02TAGS\x01t\x02a\x01b\x02country\x01c\x02gr\xc3\xb6\xc3\x9fe\x01g",
)


@pytest.mark.parametrize("place", [0, 50, 99])
@pytest.mark.parametrize("odd", [None, *ODD_ONES])
def test_a_chunk_whose_messages_have_the_same_names_and_one_that_may_not(odd, place):
    strings = [
        b"".join(b"%b\x01%b%d\x02" % (name, name[:1], number) for name in NAMES)
        for number in range(100)
    ]
    if odd is not None:
        strings[place] = odd
    messages = [plain_message(n, properties=raw) for n, raw in enumerate(strings)]

    batch = messages_to_arrow(b"".join(m.encode() for m in messages), broker_name="b")

    assert rows_of(batch) == [expected_row(m, "b") for m in messages]


def test_topics_of_the_same_length_are_told_apart():
    topics = ["orders", "orderz", "prders"]
    pull = b"".join(StoredMessage.build(topic=each, stored_body=b"x").encode() for each in topics)

    batch = messages_to_arrow(pull, broker_name="b")

    assert batch.column("topic").to_pylist() == topics


def test_a_large_mixed_chunk_equals_the_objects():
    def message(number):
        wide = number % 11 == 0
        compressed = number % 13 == 0
        body = b"x" * (number % 40)
        return StoredMessage.build(
            topic="orders" * (30 if number % 17 == 0 else 1),
            stored_body=compress_body(body, record.COMPRESSION_ZLIB) if compressed else body,
            sys_flag=record.COMPRESSED | record.COMPRESSION_ZLIB if compressed else 0,
            properties=b"TAGS\x01T%d\x02KEYS\x01k%d" % (number % 3, number)
            + (b"" if number % 5 == 0 else b"\x02")
            + (b"UNIQ_KEY\x01U%d\x02" % number if number % 7 else b""),
            queue_offset=number,
            born_host=("::1" if wide else "127.0.0.1", 1),
            store_host=("::2" if number % 2 else "127.0.0.1", 2),
            born_ms=number,
            store_ms=-number,
        ).encode()

    pull = b"".join(message(number) for number in range(3000))

    batch = messages_to_arrow(pull, broker_name="b")

    assert rows_of(batch) == [expected_row(m, "b") for m in decode_messages(pull)]


def test_chosen_columns_come_in_the_order_asked_for():
    batch = messages_to_arrow(GOOD, broker_name="b", columns=["queueOffset", "tags", "queueId"])

    assert batch.schema.names == ["queueOffset", "tags", "queueId"]
    assert batch.to_pylist() == [{"queueOffset": 0, "tags": "A", "queueId": 1}]


def test_no_columns_still_count_the_messages():
    batch = messages_to_arrow([GOOD, GOOD, GOOD], broker_name="b", columns=[])

    assert (batch.num_rows, batch.num_columns) == (3, 0)


def test_a_record_that_holds_a_batch_is_refused_where_rows_must_be_messages():
    one_bit, both = (
        StoredMessage.build(topic="orders", stored_body=b"x", sys_flag=flag).encode()
        for flag in (record.INNER_BATCH, record.BATCH_MASK)
    )
    other_bit = StoredMessage.build(
        topic="orders", stored_body=b"x", sys_flag=record.NEED_UNWRAP
    ).encode()
    singles = GOOD + one_bit + other_bit

    assert len(messages_to_arrow(singles, broker_name="b", refuse_batches=True)) == 3
    assert len(messages_to_arrow(b"", broker_name="b", refuse_batches=True)) == 0
    assert len(messages_to_arrow(singles + both, broker_name="b")) == 4
    with pytest.raises(record.BatchInside, match="holds a batch") as raised:
        messages_to_arrow(singles + both, broker_name="b", columns=[], refuse_batches=True)
    assert raised.value.position == len(singles)


def test_unknown_columns_are_refused_by_name():
    with pytest.raises(
        record.ColumnUnknown, match="no column 'boddy'; they have topic, brokerName"
    ):
        messages_to_arrow(GOOD, broker_name="b", columns=["boddy"])


def test_a_reader_without_bodies_does_not_look_at_them():
    batch = messages_to_arrow(
        TORN + UNEXPANDABLE, broker_name="b", columns=["queueOffset", "topic"]
    )

    assert batch.column("queueOffset").to_pylist() == [1, 2]


@pytest.mark.parametrize(
    ("first", "end", "offsets"),
    [
        (None, None, [0, 1, 2, 3, 4]),
        (2, None, [2, 3, 4]),
        (None, 2, [0, 1]),
        (1, 3, [1, 2]),
        (9, None, []),
    ],
)
def test_rows_outside_the_asked_offsets_are_left_out(first, end, offsets):
    batch = messages_to_arrow(plain_pull(5), broker_name="b", first_offset=first, end_offset=end)

    assert batch.column("queueOffset").to_pylist() == offsets
    assert batch.column("body").to_pylist() == [b"body-%d" % n for n in offsets]


@given(pulls=st.lists(st.lists(records(plain_properties), max_size=3).map(b"".join), max_size=4))
def test_several_pulls_become_one_batch(pulls):
    batch = messages_to_arrow([bytearray(pull) for pull in pulls], broker_name="b")

    expected = [m for pull in pulls for m in decode_messages(pull)]
    assert rows_of(batch) == [expected_row(m, "b") for m in expected]


def test_a_record_cut_at_the_end_of_a_pull_is_not_completed_by_the_next():
    # The second pull begins with the very bytes that the first one lacks.
    first, second = GOOD + GOOD[:-10], GOOD[-10:] + GOOD

    with pytest.raises(record.RecordInvalid, match="end inside") as refused:
        messages_to_arrow([first, second], broker_name="b")

    assert refused.value.position == len(GOOD)


def test_bytes_that_are_no_records_are_refused_with_the_place():
    with pytest.raises(record.RecordInvalid, match="magic") as refused:
        messages_to_arrow(GOOD + b"x" * 200, broker_name="b")

    assert refused.value.position == len(GOOD)


def test_a_chunk_beyond_two_gigabytes_is_refused(monkeypatch):
    monkeypatch.setattr(arrow, "MAX_CHUNK", len(GOOD))

    assert len(messages_to_arrow(GOOD, broker_name="b")) == 1
    with pytest.raises(record.ChunkTooLarge, match="give fewer"):
        messages_to_arrow(GOOD * 2, broker_name="b")


def test_a_body_that_does_not_match_its_checksum_raises_by_default():
    with pytest.raises(record.BodyCorrupt, match=f"offset 1 of queue 1 .byte {len(GOOD)}."):
        messages_to_arrow(GOOD + TORN, broker_name="b")


def test_a_body_that_cannot_be_expanded_raises_by_default():
    with pytest.raises(record.CompressionFailed, match=r"offset 2 of queue 0 .* not a zlib stream"):
        messages_to_arrow(GOOD + UNEXPANDABLE, broker_name="b")


def test_bad_bodies_can_be_null_while_their_rows_are_kept():
    packed = StoredMessage.build(
        topic="orders", stored_body=compress_body(b"packed", 0), sys_flag=record.COMPRESSED
    ).encode()
    empty = plain_message(3, body=b"").encode()

    batch = messages_to_arrow(
        GOOD + TORN + UNEXPANDABLE + packed + empty, broker_name="b", bad_body=BadBody.NULL
    )

    assert batch.column("body").to_pylist() == [b"good", None, None, b"packed", b""]
    assert batch.column("topic").to_pylist() == ["orders"] * 5
    assert batch.column("tags").to_pylist() == ["A", "A", None, None, "A"]


def test_checksums_can_be_left_unchecked():
    batch = messages_to_arrow(TORN, broker_name="b", check_crc=False)

    assert batch.column("body").to_pylist() == [b"Torn"]


def test_expanded_bodies_have_a_limit_each_and_all_together(monkeypatch):
    packed = StoredMessage.build(
        topic="orders", stored_body=compress_body(bytes(1000), 0), sys_flag=record.COMPRESSED
    ).encode()

    assert len(messages_to_arrow(packed, broker_name="b", max_body=1000)) == 1
    with pytest.raises(record.BodyTooLarge, match="more than 999 bytes"):
        messages_to_arrow(packed, broker_name="b", max_body=999)
    nulls = messages_to_arrow(packed, broker_name="b", max_body=999, bad_body=BadBody.NULL)
    assert nulls.column("body").to_pylist() == [None]

    assert len(messages_to_arrow(packed * 2, broker_name="b", max_expanded=2000)) == 2
    with pytest.raises(record.ChunkTooLarge, match="the expanded bodies take more than 1999 bytes"):
        messages_to_arrow(packed * 2, broker_name="b", bad_body=BadBody.NULL, max_expanded=1999)
    monkeypatch.setattr(arrow, "MAX_CHUNK", 3 * len(packed) + 2500)
    assert len(messages_to_arrow(packed * 2, broker_name="b")) == 2
    with pytest.raises(record.ChunkTooLarge, match="the expanded bodies take more than"):
        messages_to_arrow(packed * 3, broker_name="b", bad_body=BadBody.NULL)


def test_a_missing_codec_raises_even_when_bad_bodies_may_be_null(monkeypatch):
    sys_flag = record.COMPRESSED | record.COMPRESSION_LZ4
    packed = StoredMessage.build(
        topic="T", stored_body=compress_body(b"body", record.COMPRESSION_LZ4), sys_flag=sys_flag
    )
    monkeypatch.setitem(sys.modules, "lz4.frame", None)

    with pytest.raises(record.CodecMissing, match="lz4"):
        messages_to_arrow(packed.encode(), broker_name="b", bad_body=BadBody.NULL)


@pytest.mark.parametrize(
    ("milliseconds", "time"),
    [
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        (1700000000123, datetime(2023, 11, 14, 22, 13, 20, 123000, tzinfo=UTC)),
        (-62135510400000, datetime(1, 1, 2, tzinfo=UTC)),
        (-62135510400001, None),
        (253402214399999, datetime(9999, 12, 30, 23, 59, 59, 999000, tzinfo=UTC)),
        (253402214400000, None),
        (2**63 - 1, None),
        (-(2**63), None),
    ],
)
def test_times_that_no_calendar_has_are_null(milliseconds, time):
    message = StoredMessage.build(topic="T", stored_body=b"", born_ms=milliseconds, store_ms=1)

    batch = messages_to_arrow(message.encode(), broker_name="b")

    assert batch.column("bornTimestamp").to_pylist() == [time]
    assert batch.column("storeTimestamp").to_pylist() != [None]


@given(pull=mutations(st.lists(records(), max_size=3).map(b"".join)))
def test_mutated_pulls_give_the_objects_rows_or_a_declared_error(pull):
    try:
        batch = messages_to_arrow(pull, broker_name="b", bad_body=BadBody.NULL)
    except record.RecordInvalid as refused:
        with pytest.raises(record.RecordInvalid, match=refused.reason):
            decode_messages(pull)
        return

    for row, message in zip(rows_of(batch), decode_messages(pull), strict=True):
        if row["body"] is None:
            with pytest.raises(record.MessageError):
                _ = message.body
        else:
            assert row == expected_row(message, "b")


def test_the_batch_does_not_keep_the_pull_alive():
    pull = bytearray(GOOD * 10)

    batch = messages_to_arrow(pull, broker_name="b")
    pull[:] = bytes(len(pull))

    expected = expected_row(decode_message(GOOD), "b")
    assert rows_of(batch) == [expected] * 10


@given(
    all_records=st.lists(
        st.one_of(records(), records(plain_properties), records(odd_properties)), max_size=7
    ),
    copies=st.integers(1, 40),
    parts=st.integers(1, 3),
)
def test_no_column_refers_to_the_pull_whose_memory_is_used_again(all_records, copies, parts):
    pull = b"".join(all_records)
    # Both equal ones, which are decoded at once, and different ones; alone and in several parts.
    memory = [bytearray(pull * copies) for _ in range(parts)]

    batch = messages_to_arrow([memoryview(each) for each in memory], broker_name="b")
    before = batch.to_pylist()
    for each in memory:
        each[:] = b"\xff" * len(each)

    assert batch.to_pylist() == before
