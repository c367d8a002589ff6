"""What one read returns, where the next one begins, and how a long one is done in parts."""

from __future__ import annotations

import errno
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitmq.filter.sql import compile_sql
from orbitmq.filter.tags import Properties, TagFilter, parse_tags
from orbitmq.store.read import ReadResult, ReadStatus
from orbitmq.store.settings import ReadSettings, WriteFailed
from orbitmq.store.store import Store
from tests.support.store import SMALL, QuickFiles, messages_of, put

LARGE = replace(SMALL, file_size=1 << 20, queue_file_entries=2000)


def filled(store: Store, count: int, size: int = 10) -> Store:
    for number in range(count):
        put(store, "T", 0, bytes([number % 256]) * size, {"TAGS": "A"})
    store.write()
    return store


def but_pieces(result: ReadResult) -> ReadResult:
    """The result without what depends on the way."""
    return msgspec.structs.replace(result, pieces=(), judged=0)


@pytest.mark.parametrize("one_in", [2, 7, 9, 40, 300, 900])
@pytest.mark.parametrize("asked", [1, 5, 32])
def test_rare_tags_are_looked_for_in_the_same_scope_as_common_ones(open_store, one_in, asked):
    store = open_store(LARGE)
    for number in range(1000):
        tag = "rare" if number % one_in == one_in - 1 else "usual"
        put(store, "T", 0, b"%d" % number, {"TAGS": tag})
    store.write()
    matching = [number for number in range(800) if number % one_in == one_in - 1][:asked]

    result = store.read("T", 0, 0, asked, parse_tags("rare"))

    assert [int(message.body) for message in messages_of(result)] == matching
    assert result.next_offset == (matching[-1] + 1 if len(matching) == asked else 800)


@pytest.mark.parametrize(("runs", "pieces"), [((30, 1, 20), 3), ((3, 1, 2), 6)])
def test_what_lies_side_by_side_in_a_long_answer_is_one_piece(open_store, runs, pieces):
    store = open_store(replace(LARGE, read=ReadSettings(memory_count=64)))
    for run in runs:
        for number in range(run):
            put(store, "T", 0, b"%d of %d" % (number, run))
        put(store, "T", 1, b"of another queue")
    store.write()

    result = store.read("T", 0, 0, 64)

    bodies = [bytes(message.body) for message in messages_of(result)]
    assert bodies == [b"%d of %d" % (number, run) for run in runs for number in range(run)]
    assert len(result.pieces) == pieces


# ---- the table of statuses


def test_an_offset_below_the_first_kept_message_is_corrected(open_store):
    store = open_store(
        replace(SMALL, retention=replace(SMALL.retention, max_bytes=10_000, full_ratio=1.0))
    )
    filled(store, 100, 200)
    store.wait_flushed(store.statistics().log_end)
    store.clean()
    lowest = store.min_offset("T", 0)

    result = store.read("T", 0, 0)

    assert lowest > 0
    assert (result.status, result.next_offset) == (ReadStatus.OFFSET_TOO_SMALL, lowest)
    assert messages_of(store.read("T", 0, lowest))[0].queue_offset == lowest


def test_a_missing_queue_file_leads_to_the_next_one(open_store):
    store = filled(open_store(), 100)
    store.close()
    files = sorted((store.root / "consumequeue/T/0").iterdir())
    files[1].unlink()
    store = open_store()

    result = store.read("T", 0, 40)

    assert (result.status, result.next_offset) == (ReadStatus.OFFSET_FOUND_NULL, 64)


# ---- limits


def test_only_one_queue_file_is_read(open_store):
    store = filled(open_store(), 100)

    result = store.read("T", 0, 20)

    assert (result.count, result.next_offset) == (12, 32)


# ---- the fast way and the rule


class ByTheRule:
    """A filter in a form that has every message looked at by itself."""

    needs_properties = True
    matches_all = False

    def __init__(self, wanted: TagFilter | None) -> None:
        self._wanted = wanted

    def accepts_code(self, code: int) -> bool:
        return self._wanted is None or self._wanted.accepts_code(code)

    def accepts_properties(self, _: Properties) -> bool:
        return True


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    messages=st.lists(
        st.tuples(st.integers(0, 900), st.sampled_from("AB"), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    repeats=st.sampled_from([1, 5, 10]),
    is_reopened=st.booleans(),
    limits=st.fixed_dictionaries(
        {
            "memory_distance": st.sampled_from([1 << 40, 1 << 40, 1 << 40, 5000, 0]),
            "memory_count": st.sampled_from([32, 1024, 1]),
            "memory_bytes": st.sampled_from([1 << 30, 20_000, 2000, 50]),
            "check_crc": st.booleans(),
        }
    ),
    begin=st.integers(0, 60),
)
def test_every_fast_way_does_what_the_rule_says(
    open_store, tmp_path_factory, messages, repeats, is_reopened, limits, begin
):
    store_settings = replace(SMALL, queue_file_entries=200, read=ReadSettings(**limits))
    root = tmp_path_factory.mktemp("ways")
    store = open_store(store_settings, root=root)
    for size, tag, has_neighbour in messages * repeats:
        put(store, "T", 0, bytes(size), {"TAGS": tag})
        if has_neighbour:
            put(store, "T", 1, bytes(300))
    store.write()
    if is_reopened:
        store.close()
        store = open_store(store_settings, root=root)

    filters = [None, *map(parse_tags, ("*", "A", "A || B", "C"))]
    for offset, asked, wanted in product((0, begin), (5, 32, 0), filters):
        rule = ByTheRule(wanted)
        # Limits that some messages fill exactly.
        sizes = [store.read("T", 0, offset, count, rule).size for count in (asked, 3)]
        for max_bytes in (1 << 40, *sizes, 100):
            fast = store.read("T", 0, offset, asked, wanted, max_bytes)
            slow = store.read("T", 0, offset, asked, rule, max_bytes)

            assert b"".join(fast.pieces) == b"".join(slow.pieces)
            assert but_pieces(fast) == but_pieces(slow)
    store.abandon()


class ScarceFiles(QuickFiles):
    """A system that allows so many descriptors more."""

    left = 1000

    def open(self, path: Path, *, create: bool = False) -> int:
        if self.left <= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        self.left -= 1
        return super().open(path, create=create)

    def close(self, fd: int) -> None:
        super().close(fd)
        self.left += 1


def write_for_a_while(store: Store) -> None:
    for number in range(400):
        put(store, "T", number % 4, bytes(100))
        store.write()


def test_running_out_of_descriptors_refuses_writes_and_reads_go_on(open_store, clock):
    files = ScarceFiles()
    store = open_store(files=files)
    for number in range(400):
        put(store, "T", number % 4, b"%d" % number)
    store.write()
    for queue_id in range(4):
        assert store.read("T", queue_id, 0).count > 0
    files.left = 0

    for offset in range(0, 100, 10):
        for queue_id in range(4):
            assert store.read("T", queue_id, offset).status is ReadStatus.FOUND
    with pytest.raises(WriteFailed):
        write_for_a_while(store)
    files.left = 100
    for _ in range(6):
        clock.advance(11)
        store.tick()
    put(store, "T", 0, b"accepted")
    store.write()


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
        assert but_pieces(result) == but_pieces(whole)
        assert max(judged) <= judge
        assert sum(judged) == whole.judged
