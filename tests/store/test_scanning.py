"""Walking through the log by columns, against looking at one record after the other."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.message.record import RecordFault, check_record, tag_code
from orbitmq.message.stored import StoredMessage, decode_message
from orbitmq.store.verify import (
    TopicNumbers,
    find_record,
    properties_of,
    scan_log,
    store_time,
    tag_codes_of,
)

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
    first, *_, last = [*scan_log(view, base, start=0)] * 2
    found = first.records

    assert (last.stopped_at, last.fault) == (len(data), RecordFault.EMPTY)
    assert found.starts.tolist() == [m.physical_offset - base for m in messages]
    assert found.sizes.tolist() == [m.size for m in messages]
    assert found.queue_ids.tolist() == [m.queue_id for m in messages]
    assert found.queue_offsets.tolist() == [m.queue_offset for m in messages]
    assert found.sys_flags.tolist() == [m.sys_flag for m in messages]
    assert found.store_ms.tolist() == [m.store_ms for m in messages]
    topics = TopicNumbers()
    numbers = topics.of(view, found).tolist()
    assert [topics.names[number] for number in numbers] == [m.topic for m in messages]
    assert tag_codes_of(view, found).tolist() == [tag_code(m.tags) for m in messages]
    for message in messages:
        at = message.physical_offset - base
        record = memoryview(data)[at : at + message.size]
        assert bytes(properties_of(record)) == message.raw_properties
        assert store_time(record) == message.store_ms


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

    blocks = list(scan_log(view, 0, start=0))

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

    found = find_record(memoryview(damage + data), 4000, 0, len(damage + data))

    assert found == 1000
    assert messages[0].physical_offset == 4000 + found
