"""Records by columns against one after the other, and records that lost a page with the power."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.message.record import RecordFault, RecordRefused, check_record, tag_code
from orbitmq.message.stored import StoredMessage, decode_message
from orbitmq.store import verify

HOSTS = [("1.2.3.4", 5), ("::1", 6)]
TOPICS = ["a", "TopicTest", "TopicTesu", "ä", "x" * 200, *(f"t{n}" for n in range(12))]

fields = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(TOPICS),
        "stored_body": st.binary(max_size=60),
        "properties": st.one_of(
            st.fixed_dictionaries(
                {"TAGS": st.sampled_from(["", "A", "TagB", "Größe", "x" * 40]), "k": st.just("v")}
            ),
            st.binary(max_size=30),
            st.sampled_from(
                [b"TAGS\x01A\x02TAGS\x01B", b"XTAGS\x01A\x02", b"TAGS\x01A\x02TAGS\x01\x02"]
            ),
        ),
        "queue_id": st.integers(0, 7),
        "queue_offset": st.integers(0, 1 << 40),
        "sys_flag": st.sampled_from([0, 4, 8, 12]),
        "born_host": st.sampled_from(HOSTS),
        "store_host": st.sampled_from(HOSTS),
        "store_ms": st.integers(0, 1 << 42),
    }
)


def encode(records: list[dict[str, object]], base: int) -> tuple[bytes, list[StoredMessage]]:
    data = b""
    messages = []
    for each in records:
        message = StoredMessage.build(physical_offset=base + len(data), **each)  # type: ignore[arg-type]
        messages.append(message)
        data += message.encode()
    return data, messages


@settings(max_examples=150, deadline=None)
@given(records=st.lists(fields, max_size=20), base=st.integers(0, 1 << 40))
def test_the_columns_hold_what_the_records_do(records, base):
    data, messages = encode(records, base)

    view = memoryview(data + bytes(40))
    first, *_, last = [*verify.scan_log(view, base, start=0)] * 2
    found = first.records

    assert (last.stopped_at, last.fault) == (len(data), RecordFault.EMPTY)
    assert found.starts.tolist() == [m.physical_offset - base for m in messages]
    assert found.sizes.tolist() == [m.size for m in messages]
    assert found.queue_ids.tolist() == [m.queue_id for m in messages]
    assert found.queue_offsets.tolist() == [m.queue_offset for m in messages]
    assert found.sys_flags.tolist() == [m.sys_flag for m in messages]
    assert found.store_ms.tolist() == [m.store_ms for m in messages]
    topics = verify.TopicNumbers()
    numbers = topics.of(view, found).tolist()
    assert [topics.names[number] for number in numbers] == [m.topic for m in messages]
    assert verify.tag_codes_of(view, found).tolist() == [tag_code(m.tags) for m in messages]
    for message in messages:
        at = message.physical_offset - base
        record = memoryview(data)[at : at + message.size]
        assert bytes(verify.properties_of(record)) == message.raw_properties
        assert verify.store_time(record) == message.store_ms


@settings(max_examples=200, deadline=None)
@given(
    records=st.lists(fields, min_size=1, max_size=8),
    flips=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 7)), max_size=3),
    cut=st.one_of(st.none(), st.floats(0, 1)),
)
def test_the_walk_ends_where_looking_one_by_one_ends(records, flips, cut):
    data, _ = encode(records, 0)
    torn = bytearray(data)
    for where, bit in flips:
        torn[int(where * len(torn))] ^= 1 << bit
    if cut is not None:
        del torn[int(cut * len(torn)) :]
    view = memoryview(bytes(torn))
    at = 0
    good = []
    while isinstance(size := check_record(view, at, len(view)), int):
        if decode_message(view[at : at + size]).physical_offset != at:
            break
        good.append(at)
        at += size

    blocks = list(verify.scan_log(view, 0, start=0))

    assert [at for block in blocks for at in block.records.starts.tolist()] == good
    assert blocks[-1].stopped_at == at


@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(fields, min_size=2, max_size=6),
    noise=st.binary(max_size=300),
    copies_a_record=st.booleans(),
)
def test_records_are_found_again_behind_damage(records, noise, copies_a_record):
    data, messages = encode(records[1:], 5000)
    strange, _ = encode(records[:1], 123)
    # A record that says it belongs elsewhere is noise as well.
    damage = (noise + (strange if copies_a_record else b"")).ljust(1000, b"\xda")[:1000]

    found = verify.find_record(memoryview(damage + data), 4000, 0, len(damage + data))

    assert found == 1000
    assert messages[0].physical_offset == 4000 + found


Fields = dict[str, Any]

V6 = ("2001:db8::1", 10911)
#: Behind the properties there are three pages at least.
FILE = 16 * verify.PAGE

#: Zeros in every place where a record may have them, and no page of them in the properties.
SHAPES: dict[str, Fields] = {
    "usual": {"topic": "T", "stored_body": b"body", "properties": b"TAGS\x01A\x02KEYS\x01k\x02"},
    "no properties": {"topic": "orders", "stored_body": b"body"},
    "nothing but a topic": {"topic": "T", "stored_body": b""},
    "body of zeros": {"topic": "T", "stored_body": bytes(40), "properties": b"TAGS\x01A\x02"},
    "wide hosts": {
        "topic": "T",
        "stored_body": b"body",
        "properties": b"k\x01v\x02",
        "born_host": V6,
        "store_host": V6,
    },
    "long topic": {"topic": "t" * 256, "stored_body": b"b", "properties": b"k\x01v\x02"},
    "round length": {"topic": "T", "stored_body": b"b", "properties": b"k\x01" + b"v" * 254},
    "zeros at the end": {"topic": "T", "stored_body": b"b", "properties": b"k\x01" + bytes(60)},
    "zeros in the name": {"topic": "T", "stored_body": b"b", "properties": bytes(60) + b"\x01v"},
}

#: Records of several pages, by what may be lost in their middle.
LARGE: dict[str, Fields] = {
    "properties": {"topic": "T", "stored_body": b"b", "properties": b"k\x01" + b"v" * 12_000},
    "zeros in them": {
        "topic": "T",
        "stored_body": b"b",
        "properties": b"k\x01" + (bytes(verify.PAGE - 2) + b"v") * 3,
    },
    "topic": {"topic": "t" * 12_000, "stored_body": b"b"},
    "body": {"topic": "T", "stored_body": b"b" * 12_000, "properties": b"k\x01v\x02"},
    "body of zeros": {"topic": "T", "stored_body": bytes(12_000), "properties": b"k\x01v\x02"},
}


def place(records: list[Fields], begin: int) -> tuple[bytes, list[int]]:
    """A log file with these records from `begin` on, as the store writes them; where each ends."""
    data = bytearray(StoredMessage.build(topic="F", stored_body=b"f" * (begin - 92)).encode())
    ends = [len(data)]
    assert ends == [begin]
    for each in records:
        raw = each.get("properties", b"")
        fields = each | {"properties": verify.distinct(raw) if 0 in raw else raw}
        data += StoredMessage.build(**fields, physical_offset=len(data)).encode()
        ends.append(len(data))
    assert len(data) < FILE
    return bytes(data).ljust(FILE, b"\0"), ends


def walk(data: bytes, flushed: int) -> int:
    """Where the first record begins that is not good, or lost a page."""
    view = memoryview(data)
    for block in verify.scan_log(view, 0, start=0):
        torn = verify.first_torn(view, block.records, block.records.starts >= flushed)
        if torn is not None:
            return int(block.records.starts[torn])
    return block.stopped_at


def first_changed(before: bytes, after: bytes, ends: list[int]) -> int:
    """Where the first record begins that is not as it was; the end of the log without one."""
    begin = 0
    for end in ends:
        if before[begin:end] != after[begin:end]:
            return begin
        begin = end
    return begin


def lose(data: bytes, page: int, since: int) -> bytes:
    """The file without what was written to a page since the log ended at `since`."""
    begin, end = max(page, since), page + verify.PAGE
    return data[:begin] + bytes(max(0, end - begin)) + data[max(begin, end) :]


@pytest.mark.parametrize("is_last", [True, False], ids=["at the end", "with good ones behind"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_record_is_cut_if_a_page_was_lost_that_begins_at_any_byte_of_it(shape, is_last):
    behind = [] if is_last else [{"topic": "T", "stored_body": b"b" * 5000}, SHAPES["usual"]]
    size = len(StoredMessage.build(**SHAPES[shape]).encode()) + 1

    for room in range(1, size + 1, 1 if is_last else 3):
        begin = 2 * verify.PAGE - room
        data, ends = place([SHAPES[shape], *behind], begin)
        assert walk(data, begin) == ends[-1]
        torn = lose(data, 2 * verify.PAGE, begin)
        assert walk(torn, begin) == first_changed(data, torn, ends), room


@pytest.mark.parametrize("shape", LARGE)
def test_a_page_that_was_lost_inside_a_record_is_known_though_later_ones_were_kept(shape):
    for room in range(1, verify.PAGE, 97):
        begin = 2 * verify.PAGE - room
        data, ends = place([LARGE[shape], SHAPES["usual"]], begin)
        assert walk(data, begin) == ends[-1]
        for page in (2 * verify.PAGE, 3 * verify.PAGE, 4 * verify.PAGE):
            torn = lose(data, page, begin)
            assert walk(torn, begin) == first_changed(data, torn, ends), (room, page)


def test_a_record_is_cut_if_all_that_was_lost_is_the_length_of_its_topic():
    # Without it the topic is read as the length of the properties, and everything adds up.
    size = int.from_bytes(b"TS")
    record = {"topic": "T", "stored_body": bytes(5000), "properties": b"k\x01".ljust(size, b"v")}
    begin = 3 * verify.PAGE - 1 - 88 - 5000
    data, ends = place([record, SHAPES["usual"]], begin)
    torn = lose(data, 2 * verify.PAGE, begin)
    assert [*verify.scan_log(memoryview(torn), 0, start=0)][-1].stopped_at == ends[-1]

    assert walk(data, begin) == ends[-1]
    assert walk(torn, begin) == begin


@pytest.mark.parametrize("seed", range(60))
def test_whatever_pages_are_lost_the_log_ends_before_the_first_record_that_lacks_something(seed):
    dice = random.Random(seed)
    shapes = [*SHAPES.values(), *LARGE.values()]
    records = [dice.choice(shapes) for _ in range(dice.randrange(2, 6))]
    data, ends = place(records[:4], dice.randrange(92, verify.PAGE))
    flushed = dice.choice(ends)
    torn = data
    for page in range(flushed - flushed % verify.PAGE, ends[-1], verify.PAGE):
        if dice.random() < 0.3:
            # The kernel may have written it before, as it was at the end of any record.
            torn = lose(torn, page, dice.choice([end for end in ends if end >= flushed]))

    end = walk(torn, flushed)

    assert end == first_changed(data, torn, ends)


def test_only_doubtful_records_are_looked_at_whatever_lies_around_them():
    size = len(StoredMessage.build(**SHAPES["usual"]).encode())
    data, _ = place([SHAPES["usual"]] * 2, 2 * verify.PAGE - size + 5)
    records = next(verify.scan_log(memoryview(data), 0, start=0)).records
    torn = memoryview(lose(data, 2 * verify.PAGE, 0))
    assert len(records) == 3

    assert verify.first_torn(torn, records, np.array([True, False, True])) is None
    assert verify.first_torn(torn, records, np.array([False, True, False])) == 1


def test_properties_with_a_page_of_zeros_are_refused():
    most = b"k\x01" + bytes(verify.PAGE - 2) + b"\x02"

    assert verify.distinct(most) == most
    with pytest.raises(RecordRefused, match="4095 zeros"):
        verify.distinct(b"k\x01" + bytes(verify.PAGE - 1) + b"\x02")


def test_the_length_of_properties_and_the_most_zeros_do_not_make_a_page():
    properties = bytes(verify.PAGE - 2) + b"n\x01" + b"v" * 255 + b"\x02"
    assert len(properties) % 256 == 0
    # The page begins with the second byte of the length, which is zero.
    begin = 2 * verify.PAGE - 88 - len(b"body\x01T") - 1
    record = {"topic": "T", "stored_body": b"body", "properties": properties}
    data, ends = place([record], begin)

    assert not any(data[2 * verify.PAGE : 3 * verify.PAGE - 1])
    assert walk(data, begin) == ends[-1]
