"""What one read returns, and where the next one begins."""

from __future__ import annotations

import errno
import struct
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.filter.sql import compile_sql
from orbitmq.filter.tags import parse_tags
from orbitmq.store.files import DiskFiles
from orbitmq.store.queues import ConsumeQueue, QueueFiles
from orbitmq.store.read import Reading, ReadResult, ReadStatus, read_near, read_queue
from orbitmq.store.settings import ReadSettings, WriteFailed
from tests.support.store import SMALL, QuickFiles, messages_of, put

if TYPE_CHECKING:
    from collections.abc import Callable

    from orbitmq.store.store import Store

    OpenStore = Callable[..., Store]

LARGE = replace(SMALL, file_size=1 << 20, queue_file_entries=2000)


def filled(store: Store, count: int, size: int = 10, tag: str = "A") -> Store:
    for number in range(count):
        put(store, "T", 0, bytes([number % 256]) * size, {"TAGS": tag})
    store.write()
    return store


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


@pytest.mark.parametrize(
    ("offset", "status", "next_offset"),
    [
        (-1, ReadStatus.OFFSET_TOO_SMALL, 0),
        (0, ReadStatus.FOUND, 5),
        (4, ReadStatus.FOUND, 5),
        (5, ReadStatus.OFFSET_OVERFLOW_ONE, 5),
        (6, ReadStatus.OFFSET_OVERFLOW_BADLY, 5),
    ],
)
def test_the_offset_decides_the_status(open_store, offset, status, next_offset):
    result = filled(open_store(), 5).read("T", 0, offset)

    assert (result.status, result.next_offset) == (status, next_offset)
    assert (result.min_offset, result.max_offset) == (0, 5)


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


@pytest.mark.parametrize(
    ("count", "asked", "next_offset"), [(30, 32, 30), (1000, 32, 803), (1000, 900, 903)]
)
def test_nothing_that_matches_is_told_with_the_offset_after_the_last_look(
    open_store, count, asked, next_offset
):
    result = filled(open_store(LARGE), count).read("T", 0, 3, asked, parse_tags("B"))

    assert (result.status, result.count) == (ReadStatus.NO_MATCHED_MESSAGE, 0)
    assert result.next_offset == next_offset


# ---- limits


def test_only_one_queue_file_is_read(open_store):
    store = filled(open_store(), 100)

    result = store.read("T", 0, 20)

    assert (result.count, result.next_offset) == (12, 32)


@pytest.mark.parametrize(
    ("asked", "size", "count"),
    [(5, 10, 5), (100, 10, 32), (32, 20_000, 13), (32, 300_000, 1), (0, 10, 1)],
)
def test_an_answer_from_memory_is_limited_by_count_and_bytes(open_store, asked, size, count):
    store = filled(open_store(LARGE), 40 if size < 1000 else 20, size)

    result = store.read("T", 0, 0, asked)

    assert (result.count, result.next_offset) == (count, count)
    assert sum(map(len, result.pieces)) == result.size


@pytest.mark.parametrize(("size", "count"), [(10, 8), (20_000, 3), (100_000, 1)])
def test_an_answer_from_the_disk_is_limited_more(open_store, size, count):
    store = filled(open_store(replace(LARGE, read=ReadSettings(memory_distance=0))), 20, size)

    result = store.read("T", 0, 0, 32)

    assert (result.count, result.suggest_replica) == (count, True)


def test_the_asker_may_limit_the_bytes(open_store):
    store = filled(open_store(LARGE), 10, 1000)

    assert store.read("T", 0, 0, 32, None, 3500).count == 3
    assert store.read("T", 0, 0, 32, None, 1).count == 1


def test_a_sql_filter_looks_at_the_properties(open_store):
    store = open_store(LARGE)
    for number in range(50):
        put(store, "T", 0, b"%d" % number, {"n": str(number)})
    store.write()

    result = store.read("T", 0, 0, 32, compile_sql("n >= 10 AND n < 20"))

    assert [message.body for message in messages_of(result)] == [b"%d" % n for n in range(10, 20)]
    assert result.next_offset == 50


def test_what_comes_from_the_disk_is_checked_and_damage_is_named(open_store):
    store = filled(open_store(), 5, 50)
    place = messages_of(store.read("T", 0, 2, 1))[0].physical_offset
    store.close()
    log_file = store.root / "commitlog" / f"{0:020d}"
    data = bytearray(log_file.read_bytes())
    data[place + 95] ^= 0x40
    log_file.write_bytes(data)

    store = open_store()
    result = store.read("T", 0, 0)

    assert result.damaged == (2,)
    assert [message.queue_offset for message in messages_of(result)] == [0, 1, 3, 4]
    assert [each.queue_offset for each in messages_of(store.read("T", 0, 2, 1))] == [3]


def test_reading_does_not_copy(open_store):
    store = filled(open_store(LARGE), 3)

    piece = store.read("T", 0, 0).pieces[0]

    assert piece.readonly
    assert type(piece.obj).__name__ == "mmap"


# ---- the fast way and the rule


class Log:
    """Stands for a log all of whose files are there."""

    def __init__(self, start: int, end: int, content: bytes | None = None) -> None:
        self.start, self.end = start, end
        self._view = memoryview(bytes(end) if content is None else content)

    def view(self, offset: int, size: int) -> memoryview | None:
        if offset < self.start or offset + size > self.end:
            return None
        return self._view[offset : offset + size]

    def file_of(self, offset: int) -> File | None:
        return File(self._view, self.end) if offset >= self.start else None

    def following_file(self, offset: int) -> int:
        return offset - offset % 4096 + 4096


class File:
    def __init__(self, view: memoryview, end: int, base: int = 0) -> None:
        self.view, self.end, self.base = view, end, base


#: Longer than all messages of an example together.
FILE_SIZE = 1 << 19
#: No two places of the log look alike.
CONTENT = struct.pack(f">{FILE_SIZE // 2}i", *range(FILE_SIZE // 2))


class TwoFiles(Log):
    """Stands for a log of two files."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__(start, end, CONTENT)

    def file_of(self, offset: int) -> File | None:
        if offset < self.start:
            return None
        base = offset - offset % FILE_SIZE
        return File(self._view[base : base + FILE_SIZE], base + FILE_SIZE, base)


@settings(max_examples=300, deadline=None)
@given(
    messages=st.lists(
        st.tuples(st.integers(91, 2000), st.sampled_from([1, 2, 3]), st.booleans()),
        min_size=1,
        max_size=120,
    ),
    asked=st.integers(0, 60),
    max_bytes=st.sampled_from([100, 3000, 1 << 40]),
    memory_bytes=st.sampled_from([2000, 20_000, 1 << 30]),
    codes=st.sampled_from([(1,), (1, 2), (9,)]),
)
def test_the_fast_way_does_what_the_rule_says(messages, asked, max_bytes, memory_bytes, codes):
    raw, at = entries_of(messages)
    read_settings = ReadSettings(memory_bytes=memory_bytes, memory_distance=1 << 40)
    wanted = replace(parse_tags("x"), codes=codes)

    def reading():
        result = ReadResult(ReadStatus.NO_MATCHED_MESSAGE, 0, 0, len(messages))
        log = Log(0, at)
        queue = ConsumeQueue("T", 0, Path(), 32, DiskFiles(), QueueFiles(DiskFiles(), 1))
        return Reading(log, read_settings, queue, asked, max_bytes, result), result  # type: ignore[arg-type]

    fast, fast_result = reading()
    slow, slow_result = reading()
    slow.take_one_by_one(raw, wanted)

    assert fast.take_at_once(raw, wanted) or len(messages) <= 16
    if fast_result.next_offset:
        assert (fast_result.status, fast_result.next_offset) == (
            slow_result.status,
            slow_result.next_offset,
        )
        assert fast_result.size == slow_result.size
        assert fast_result.count == slow_result.count
        assert fast_result.suggest_replica == slow_result.suggest_replica


class Queue:
    """Stands for a queue in memory, of which it is known whether what is old is good."""

    topic_field = b""

    def __init__(self, raw: bytes, min_offset: int, trusted_from: int, *, is_good: bool) -> None:
        self._raw = raw
        self.min_offset, self.max_offset = min_offset, len(raw) // 20
        self.trusted_from = trusted_from
        self.checked = {0: is_good}

    def entries(self, first: int, count: int) -> bytes:
        return self._raw[first * 20 : (first + count) * 20]


@settings(max_examples=300, deadline=None)
@given(
    messages=st.lists(
        st.tuples(st.integers(91, 2000), st.just(1), st.booleans()), min_size=1, max_size=180
    ),
    data=st.data(),
    # Most are read this way: then it matters how the answer is limited.
    asked=st.sampled_from([5, 32, 60, 500, 1, 0, -1]),
    max_bytes=st.sampled_from([1 << 40, 1 << 40, 3000, 100, 0]),
    memory_count=st.sampled_from([32, 1024, 1]),
    memory_bytes=st.sampled_from([1 << 30, 20_000, 2000, 50]),
    nearness=st.sampled_from([1 << 40, 1 << 40, 0, -1]),
    short_by=st.sampled_from([0, 0, 0, 1, 3000]),
    is_good=st.booleans(),
    check_crc=st.booleans(),
)
def test_the_near_way_does_what_the_rule_says(
    messages,
    data,
    asked,
    max_bytes,
    memory_count,
    memory_bytes,
    nearness,
    short_by,
    is_good,
    check_crc,
):
    number = st.integers(0, len(messages))
    raw, at = entries_of(messages, data.draw(number, "first of the second file"))
    low = data.draw(st.just(0) | number, "lowest")
    trusted_from = data.draw(st.just(0) | number, "trusted from")
    first = data.draw(st.integers(0, len(messages) // 2) | number, "first")
    queue = Queue(raw, low, trusted_from, is_good=is_good)
    log = TwoFiles(0, max(0, at - short_by))
    # As far as some message, or a little less, or all of them.
    some = data.draw(st.integers(0, len(messages) - 1), "near from")
    distance = max(0, log.end - struct.unpack_from(">q", raw, some * 20)[0] + nearness)
    read_settings = ReadSettings(
        memory_count=memory_count,
        memory_bytes=memory_bytes,
        memory_distance=distance,
        check_crc=check_crc,
    )

    result = read_near(queue, log, read_settings, first, asked, max_bytes)  # type: ignore[arg-type]

    looked_at = list(struct.iter_unpack(">qiq", queue.entries(first, clamped(asked, memory_count))))
    is_served = (
        low <= first < len(messages)
        and log.end - looked_at[0][0] <= distance
        and looked_at[-1][0] + looked_at[-1][1] <= log.end
        and (first >= trusted_from or is_good or not check_crc)
    )
    assert (result is not None) == is_served
    if result is None:
        return
    # What is known to be good is not checked by the rule either.
    known = replace(read_settings, check_crc=False)
    expected = ReadResult(ReadStatus.NO_MATCHED_MESSAGE, first, low, len(messages))
    rule = Reading(log, known, queue, asked, max(max_bytes, 100), expected)  # type: ignore[arg-type]
    rule.take_one_by_one(raw[first * 20 :], None)
    assert b"".join(result.pieces) == b"".join(expected.pieces)
    assert replace(result, pieces=()) == replace(expected, pieces=())


def clamped(asked: int, most: int) -> int:
    return max(1, min(asked, most))


def entries_of(
    messages: list[tuple[int, int, bool]], second_file: int | None = None
) -> tuple[bytes, int]:
    """Entries of messages with these sizes and codes, some with others behind; where they end.

    The message with the number `second_file` is the first of that file.
    """
    raw, at = b"", 0
    for number, (size, code, has_neighbour) in enumerate(messages):
        if number == second_file:
            at = FILE_SIZE
        raw += struct.pack(">qiq", at, size, code)
        at += size + (500 if has_neighbour else 0)
    return raw, at


class Alone:
    """Stands for a queue that has one message."""

    min_offset, max_offset, trusted_from, topic_field = 7, 8, 0, b""

    def __init__(self, entry: bytes) -> None:
        self._entry = entry

    def entries(self, first: int, _: int) -> bytes:
        assert first == 7
        return self._entry


@settings(max_examples=300, deadline=None)
@given(
    size=st.sampled_from([-1, 0, 50, 91, 2000, 0x7FFFFFFF]),
    at=st.sampled_from([-20, 0, 1000, 3000, 8000]),
    start=st.sampled_from([0, 2000]),
    distance=st.sampled_from([100, 1 << 40]),
    asked=st.sampled_from([0, 1, 32]),
    wanted=st.sampled_from(
        [None, parse_tags("*"), replace(parse_tags("x"), codes=(1,)), compile_sql("a = '1'")]
    ),
    code=st.sampled_from([1, 2]),
)
def test_a_message_that_is_alone_is_read_as_the_rule_says(
    size, at, start, distance, asked, wanted, code
):
    read_settings = ReadSettings(memory_distance=distance, check_crc=False)
    log, queue = Log(start, 4000), Alone(struct.pack(">qiq", at, size, code))
    expected = ReadResult(ReadStatus.NO_MATCHED_MESSAGE, 7, 7, 8)
    rule = Reading(log, read_settings, queue, asked, 1 << 30, expected)  # type: ignore[arg-type]
    rule.take_one_by_one(queue.entries(7, 1), wanted)

    results = [read_queue(queue, log, read_settings, 7, asked, wanted, 1 << 30)]  # type: ignore[arg-type]
    near = read_near(queue, log, read_settings, 7, asked, 1 << 30)  # type: ignore[arg-type]
    if near is not None and (wanted is None or wanted == parse_tags("*")):
        results.append(near)

    for result in results:
        assert list(result.pieces) == list(expected.pieces)
        assert replace(result, pieces=()) == replace(expected, pieces=())


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
