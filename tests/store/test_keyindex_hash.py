"""The vectorised hash against the plain one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.javahash import java_hash
from orbitmq.store.index import hash_pieces, hash_texts, index_hash, index_hashes, utf16_lengths

# All code points, also those outside of the basic plane and lone surrogates.
any_text = st.text(st.characters(exclude_categories=()), max_size=40)
ascii_text = st.text(st.characters(max_codepoint=127), max_size=200)


@given(st.lists(any_text | ascii_text, max_size=20))
@settings(deadline=None)
def test_many_texts_hash_as_java_hashes_each(texts):
    hashes = hash_texts(texts).view(np.int32).tolist()

    assert hashes == [java_hash(text) for text in texts]


@given(ascii_text, st.data())
@settings(deadline=None)
def test_pieces_may_overlap_and_come_in_any_order(text, data):
    bound = st.integers(0, len(text))
    pieces = data.draw(st.lists(st.tuples(bound, bound).map(sorted), max_size=20))
    units = np.frombuffer(text.encode(), np.uint8)

    starts = np.array([start for start, _ in pieces], np.int64)
    ends = np.array([end for _, end in pieces], np.int64)
    hashes = hash_pieces(units, starts, ends).view(np.int32).tolist()

    assert hashes == [java_hash(text[start:end]) for start, end in pieces]


@given(st.lists(st.tuples(any_text, any_text), max_size=20))
@settings(deadline=None)
def test_topic_and_key_are_hashed_apart_and_combined(pairs):
    topics = hash_texts([topic for topic, _ in pairs])
    words = [key for _, key in pairs]

    hashes = index_hashes(topics, hash_texts(words), utf16_lengths(words)).tolist()

    # A surrogate pair split between topic and key cannot arise: a "#" stands between them.
    assert hashes == [index_hash(topic, key) for topic, key in pairs]


def test_hash_vectors_of_the_format_description():
    texts = ["A", "TagA", "hello world", "订单", ""]

    hashes = hash_texts(texts).view(np.int32).tolist()

    assert hashes == [65, 2598919, 1794106052, 1129459, 0]


def test_a_long_text_is_hashed_beyond_the_first_table_of_powers():
    text = "0123456789abcdef" * 10_000

    assert hash_texts([text]).view(np.int32).tolist() == [java_hash(text)]


def test_a_negative_hash_is_made_positive_and_the_smallest_one_zero():
    # "T#" + key: the first is negative in Java; the second is exactly Integer.MIN_VALUE.
    negative = next(f"key-{n}" for n in range(1000) if java_hash(f"T#key-{n}") < 0)
    smallest = _key_with_hash("T#", -(1 << 31))

    assert index_hash("T", negative) == -java_hash(f"T#{negative}")
    assert java_hash(f"T#{smallest}") == -(1 << 31)
    assert index_hash("T", smallest) == 0
    words = [negative, smallest]
    hashes = index_hashes(hash_texts(["T", "T"]), hash_texts(words), utf16_lengths(words))
    assert hashes.tolist() == [-java_hash(f"T#{negative}"), 0]


def _key_with_hash(prefix: str, wanted: int) -> str:
    """A key of five characters that gives `prefix + key` the wanted hash: base 31, with slack."""
    rest = (wanted - java_hash(prefix + "\0\0\0\0\0")) % (1 << 32)
    units = []
    for power in (31**4, 31**3, 31**2, 31, 1):
        unit = min(rest // power, 0xD7FF)
        units.append(unit)
        rest -= unit * power
    assert rest == 0
    return "".join(map(chr, units))
