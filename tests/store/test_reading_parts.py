"""How long one read may take: what it looks at, and how it is done in parts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import pytest

from orbitmq.filter.sql import compile_sql
from orbitmq.store import read as reading
from orbitmq.store.settings import ReadSettings
from tests.support.store import SMALL, put

if TYPE_CHECKING:
    from orbitmq.store.store import Store


LARGE = replace(SMALL, file_size=1 << 20, queue_file_entries=2000)


def filled(store: Store, count: int, size: int = 10) -> Store:
    for _ in range(count):
        put(store, "T", 0, bytes(size), {"TAGS": "A"})
    store.write()
    return store


def test_a_sql_filter_looks_at_800_entries_however_many_messages_are_asked_for(open_store):
    store = filled(open_store(LARGE), 1000)

    result = store.read("T", 0, 10, 2**31 - 1, compile_sql("n = 1"))

    assert (result.next_offset, result.judged) == (810, 800)


@pytest.mark.parametrize("distance", [0, 10_000, 2**40])
@pytest.mark.parametrize("text", ["n >= 0", "n = 3", "n = 1 OR n = 2", "n = 99"])
def test_a_read_in_parts_ends_with_what_one_in_one_go_gives(open_store, distance, text):
    read = ReadSettings(memory_distance=distance, scan_bytes=2000)
    store = open_store(replace(SMALL, queue_file_entries=2000, read=read))
    for number in range(120):
        put(store, "T", 0, b"%d" % number, {"n": str(number % 7)} if number % 11 else {})
    store.write()

    for judge, most, offset in product((1, 7, 64), (0, 3, 32, 1000), (5, 60)):
        whole = store.read("T", 0, offset, most, compile_sql(text))
        result = store.read("T", 0, offset, most, compile_sql(text), judge=judge)
        judged = [result.judged]
        while result.rest is not None:
            result.rest.go_on(judge)
            judged.append(result.judged)

        assert list(result.pieces) == list(whole.pieces)
        assert replace(result, pieces=(), judged=0) == replace(whole, pieces=(), judged=0)
        assert max(judged) <= judge
        assert sum(judged) == whole.judged


def test_a_part_ends_early_when_much_has_to_be_checked(open_store, monkeypatch):
    monkeypatch.setattr(reading, "_CHECKED_BYTES", 5000)
    store = filled(open_store(replace(LARGE, read=ReadSettings(memory_distance=0))), 20, 1000)

    result = store.read("T", 0, 0, 32, compile_sql("n = 1"), judge=64)
    first = result.next_offset
    while result.rest is not None:
        result.rest.go_on(64)

    assert first == 5
    assert result.next_offset == 20
