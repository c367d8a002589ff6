"""Messages encoded from Arrow columns: the same bytes as one by one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.message.columns import (
    encode_messages,
    id_items,
    item,
    joined_items,
    text_of,
    unique_ids,
)
from orbitmq.message.ids import UniqueIds, decode_unique_id
from orbitmq.message.properties import decode_properties
from orbitmq.message.record import MAX_PROPERTIES, PropertiesRefused
from orbitmq.message.stored import encode_batch
from tests.support.message import INT32, any_properties, bodies

rows = st.lists(st.tuples(bodies, INT32, any_properties), max_size=20)
texts = st.text(st.characters(min_codepoint=3, codec="utf-8"), min_size=1, max_size=10)
maps = st.lists(st.none() | st.dictionaries(texts, st.none() | texts, max_size=4), max_size=10)


@given(rows=rows, start=st.integers(0, 5), most=st.integers(1, 8), size=st.integers(1, 500))
def test_rows_are_encoded_as_one_by_one(rows, start, most, size):
    body_column = pa.array([row[0] for row in rows], pa.binary())
    property_column = pa.array([row[2] for row in rows], pa.binary())
    flags = pa.array([row[1] for row in rows], pa.int32()).to_numpy()

    encoded = encode_messages(body_column[start:], property_column[start:], flags[start:])

    assert bytes(encoded.data) == encode_batch(rows[start:])
    every_other = encoded.take(np.arange(0, len(encoded), 2))
    assert bytes(every_other.data) == encode_batch(rows[start::2])
    frames = encoded.frames(size, most)
    assert [row for begin, end in frames for row in range(begin, end)] == list(range(len(encoded)))
    for begin, end in frames:
        cut = encoded.rows(begin, end)
        assert bytes(cut) == encode_batch(rows[start:][begin:end])
        assert end - begin == 1 or (end - begin <= most and len(cut) <= size)


@given(given_maps=maps, start=st.integers(0, 3))
def test_maps_become_properties_and_values_that_are_none_do_not_count(given_maps, start):
    column = pa.array(
        [each if each is None else list(each.items()) for each in given_maps],
        pa.map_(pa.string(), pa.string()),
    )

    joined = joined_items(column[start:])

    wanted = [
        {name: value for name, value in (each or {}).items() if value is not None}
        for each in given_maps[start:]
    ]
    assert [decode_properties(text) for text in joined.to_pylist()] == wanted


def test_a_text_column_becomes_one_property():
    assert item("TAGS", pa.array(["a", None, "b"])).to_pylist() == [
        "TAGS\x01a\x02",
        "",
        "TAGS\x01b\x02",
    ]


@pytest.mark.parametrize("address", ["10.1.2.3", "fd00::1"])
def test_ids_of_many_messages_are_like_those_of_single_ones(address):
    ids = UniqueIds(address)
    first = ids()

    many = text_of(unique_ids(ids, 70_000)).to_pylist()

    last = ids()
    assert len({first, *many, last}) == 70_002
    decoded = [decode_unique_id(each) for each in (first, *many[:2], many[-1], last)]
    assert {each.address for each in decoded} == {address}
    assert {each.pid for each in decoded} == {decoded[0].pid}
    assert [each.counter for each in decoded] == [0, 1, 2, 70_000 & 0xFFFF, 70_001 & 0xFFFF]
    start = decoded[0].process_number
    assert [each.process_number - start for each in decoded] == [0, 0, 0, 1, 1]
    assert id_items(unique_ids(ids, 1)).to_pylist()[0].startswith("UNIQ_KEY\x01")


def test_more_properties_than_a_message_can_hold_are_refused():
    long = pa.array([b"", b"x" * (MAX_PROPERTIES + 1)], pa.binary())
    with pytest.raises(PropertiesRefused, match="of message 1 take 32768 bytes"):
        encode_messages(pa.array([b"a", b"b"], pa.binary()), long)
