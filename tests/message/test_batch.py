"""The body of a batch send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.message.record import BatchInvalid, MessageError, RecordRefused
from orbitmq.message.stored import BatchElement, encode_batch, split_batch
from tests.support.message import INT32, any_properties, bodies, mutations, with_bytes

VECTOR = bytes.fromhex("0000001f00000000000000000000000000000002686900075441475301" + "4102")

elements = st.lists(st.builds(BatchElement, bodies, INT32, any_properties), max_size=5)


def test_the_documented_element_is_written_byte_for_byte():
    assert encode_batch([(b"hi", 0, b"TAGS\x01A\x02")]) == VECTOR


@given(batch=elements)
def test_what_was_written_is_split_again(batch):
    encoded = encode_batch(batch)

    assert split_batch(encoded) == batch
    assert encode_batch(split_batch(memoryview(encoded))) == encoded


def test_large_bodies_are_slices_of_the_batch():
    batch = bytearray(encode_batch([(b"." * 20_000, 0, b""), (b"two", 0, b"")]))

    second = split_batch(batch)[1]
    batch[batch.index(b"two")] = ord("T")

    assert second.body == b"Two"


def test_small_bodies_are_copies():
    batch = bytearray(encode_batch([(b"one", 0, b""), (b"two", 0, b"")]))

    second = split_batch(batch)[1]
    batch[batch.index(b"two")] = ord("T")

    assert second.body == b"two"


def test_an_empty_body_is_a_batch_of_nothing():
    assert split_batch(b"") == []


@pytest.mark.parametrize(
    ("batch", "position", "reason"),
    [
        (VECTOR + VECTOR[:21], 31, "21 bytes are left"),
        (VECTOR[:-1], 0, "its size says 31, 30 bytes are left"),
        (with_bytes(VECTOR, 0, b"\xff"), 0, "its size says -"),
        (with_bytes(VECTOR, 3, b"\x15"), 0, "its size says 21"),
        (with_bytes(VECTOR, 16, b"\xff"), 0, "a body of -"),
        (with_bytes(VECTOR, 19, b"\x0a"), 0, "a body of 10 bytes in an element of 31"),
        (with_bytes(VECTOR, 23, b"\x06"), 0, "do not add up"),
        (with_bytes(VECTOR, 22, b"\xff"), 0, "do not add up"),
    ],
)
def test_a_batch_with_a_bad_element_is_refused_with_its_place(batch, position, reason):
    with pytest.raises(BatchInvalid, match=reason) as refused:
        split_batch(batch)

    assert refused.value.position == position


@given(batch=mutations(elements.map(encode_batch)))
def test_mutated_batches_are_split_exactly_or_refused(batch):
    try:
        found = split_batch(batch)
    except MessageError:
        return

    assert sum(22 + len(e.body) + len(e.properties) for e in found) == len(batch)


def test_elements_that_do_not_fit_are_refused():
    with pytest.raises(RecordRefused, match="does not fit"):
        encode_batch([(b"", 0, bytes(32768))])
    with pytest.raises(RecordRefused, match="does not fit"):
        encode_batch([(b"", 2**31, b"")])
