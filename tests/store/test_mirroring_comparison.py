"""Comparing the end of a log with the master's: where it begins, and what it lets pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.message.record import MAGIC_V1, MAGIC_V2
from orbitmq.store.mirror import MirrorRefused
from orbitmq.store.store import Store
from orbitmq.store.verify import find_last_record
from tests.support.store import SMALL, HandClock, QuickFiles, put

if TYPE_CHECKING:
    from pathlib import Path

MAGICS = [magic.to_bytes(4, "big", signed=True) for magic in (MAGIC_V1, MAGIC_V2)]


@pytest.fixture
def store(tmp_path):
    opened = open_store(tmp_path)
    yield opened
    opened.abandon()


def open_store(root: Path, file_size: int = SMALL.file_size) -> Store:
    store_settings = replace(SMALL, file_size=file_size)
    return Store(
        root / "store", store_settings, clock=HandClock(), files=QuickFiles(), background=False
    )


def log_of(store: Store, start: int, end: int) -> bytes:
    return bytes(store.mirroring.stretch(start, end - start) or b"")


BODIES = st.one_of(
    st.binary(max_size=40),
    st.integers(0, 3000).map(bytes),
    st.tuples(st.sampled_from(MAGICS), st.integers(0, 300)).map(lambda pair: pair[0] * pair[1]),
)


@settings(max_examples=50, deadline=None)
@given(
    puts=st.lists(st.tuples(BODIES, st.sampled_from([1, 40, 200])), min_size=1, max_size=15),
    is_opened_again=st.booleans(),
)
def test_the_last_record_is_found_whatever_lies_in_the_log(
    tmp_path_factory, puts, *, is_opened_again
):
    root = tmp_path_factory.mktemp("log")
    store = open_store(root)
    try:
        for body, topic_size in puts:
            # Long names make records of the second kind.
            place, _ = put(store, "T" * topic_size, 0, body)
            store.write()
            assert store.mirroring.last_record == place
        if is_opened_again:
            store.close()
            store = open_store(root)

        assert store.mirroring.last_record == place
    finally:
        store.abandon()


def test_a_record_that_lies_in_a_body_is_not_the_last_one(store):
    put(store, "T", 0, b"first", {"TAGS": "A"})
    store.write()
    record = log_of(store, 0, store.mirroring.end)

    place, _ = put(store, "T", 0, record * 5)
    store.write()

    assert store.mirroring.last_record == place


def test_the_search_goes_on_behind_what_it_looks_at_at_a_time(tmp_path):
    store = open_store(tmp_path, file_size=4 << 20)
    put(store, "T", 0, b"first")
    place, _ = put(store, "T", 0, bytes((2 << 20) + 5))
    store.write()

    assert store.mirroring.last_record == place
    store.abandon()


def test_a_damaged_record_is_the_last_one_all_the_same(store):
    put(store, "T", 0, b"first")
    place, _ = put(store, "T", 0, b"second")
    store.write()
    data = bytearray(log_of(store, 0, store.mirroring.end))

    data[data.index(b"second")] ^= 1
    by_body = find_last_record(memoryview(data), 0)
    data[place + 4] ^= 1
    by_magic = find_last_record(memoryview(data), 0)

    assert by_body == place
    assert by_magic == 0
    assert find_last_record(memoryview(data), 8192) is None
    assert find_last_record(memoryview(b""), 0) is None


def test_an_empty_log_has_nothing_to_compare(store):
    assert store.mirroring.last_record == store.mirroring.written == 0


def test_what_is_here_already_is_compared_and_the_rest_is_given_back(store):
    put(store, "T", 0, b"first")
    place, _ = put(store, "T", 0, b"second")
    store.write()
    mirroring, end = store.mirroring, store.mirroring.written
    last = log_of(store, place, end)

    assert mirroring.compare(place, last[:7]) == b""
    assert mirroring.compare(place + 7, last[7:]) == b""
    assert mirroring.compare(place, last + b"more") == b"more"
    assert mirroring.compare(end, b"more") == b"more"
    for at in range(len(last)):
        other = bytearray(last + b"more")
        other[at] ^= 1
        with pytest.raises(MirrorRefused, match="the logs have parted"):
            mirroring.compare(place, bytes(other))
    assert mirroring.written == end
