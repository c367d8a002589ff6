"""The key index against a plain list of what was put into it, and its keys against the records."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from orbitmq.errors import SettingError
from orbitmq.javahash import java_hash
from orbitmq.message.record import (
    TRANSACTION_COMMIT,
    TRANSACTION_NONE,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    encode_record,
    record_constants,
    topic_field,
)
from orbitmq.store.files import DiskFiles
from orbitmq.store.index import (
    KeyEntries,
    KeyIndex,
    entries_of_log,
    hash_pieces,
    index_hash,
    index_hashes,
)
from orbitmq.store.settings import IndexSettings
from tests.support.store import HandClock

TINY = IndexSettings(slots=3, entries=12)
START = 1_700_000_000_000


@dataclass(frozen=True, slots=True)
class Put:
    offset: int
    store_ms: int
    topic: str
    unique_key: str | None
    keys: str | None

    def hashes(self) -> list[int]:
        words = [self.unique_key] if self.unique_key else []
        words += [word for word in (self.keys or "").split(" ") if word]
        return [index_hash(self.topic, word) for word in words]


@dataclass(slots=True)
class Model:
    """What an index that was given `puts` has to find: everything, hash by hash."""

    puts: list[Put] = field(default_factory=list)

    def lookup(self, topic: str, key: str) -> list[int]:
        wanted = index_hash(topic, key)
        return [put.offset for put in reversed(self.puts) if wanted in put.hashes()]


def append(index: KeyIndex, puts: list[Put]) -> int:
    rows = [(hashed, put.offset, put.store_ms) for put in puts for hashed in put.hashes()]
    hashes, offsets, times = np.array(rows, np.int64).reshape(-1, 3).T
    return index.add(KeyEntries(hashes.astype(np.int32), offsets, times))


def lookup(index: KeyIndex, key: str, begin_ms: int = 0, end_ms: int = 1 << 62) -> list[int]:
    """Everything that may have a key of topic T, newest first."""
    found = index.candidates("T", key, begin_ms, end_ms)
    return [offset for offset in found if offset is not None]


def flush(index: KeyIndex) -> int:
    """Bring everything to the disk; up to when that is."""
    under_way = index.begin_flush()
    try:
        under_way.run()
    finally:
        index.end_flush(under_way)
    return index.durable_until_ms


def close(index: KeyIndex) -> None:
    flush(index)
    index.abandon()


def numbered(first: int, count: int) -> list[Put]:
    """Messages 100 bytes and 100 ms apart; each has a key of its own and `k`."""
    return [Put(n * 100, START + n * 100, "T", f"u{n}", "k") for n in range(first, first + count)]


def open_tiny(
    folder: Path, *, safe_until_ms: int | None = None, log_end: int | None = None
) -> KeyIndex:
    return KeyIndex.open(
        folder, settings=TINY, clock=HandClock(), safe_until_ms=safe_until_ms, log_end=log_end
    )


def index_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- the bytes


def test_a_file_has_exactly_the_bytes_that_apache_would_write(tmp_path):
    """Worked out by hand: 2 slots, 4 places, three entries."""
    index = KeyIndex.open(tmp_path, settings=IndexSettings(slots=2, entries=4), clock=HandClock())

    # The hash of T#a is 84 times 961 and 35 times 31 and 97: 81906, slot 0. Those of T#b and
    # T#c follow.
    append(index, [Put(100, START, "T", "a", None), Put(228, START + 2999, "T", None, " b  c ")])
    close(index)

    (file,) = tmp_path.iterdir()
    header = struct.pack(">qqqqii", START, START + 2999, 100, 228, 2, 4)
    slots = struct.pack(">ii", 3, 2)
    nothing = bytes(20)
    first = struct.pack(">iqii", 81906, 100, 0, 0)
    second = struct.pack(">iqii", 81907, 228, 2, 0)
    third = struct.pack(">iqii", 81908, 228, 2, 1)
    assert file.read_bytes() == header + slots + nothing + first + second + third


def test_a_file_is_named_after_the_local_time_of_its_creation(tmp_path, local_time):
    local_time("Asia/Shanghai")
    clock = HandClock(1_700_000_000.123)  # 2023-11-14 22:13:20.123 in Greenwich

    index = KeyIndex.open(tmp_path, settings=TINY, clock=clock)
    append(index, numbered(0, 1))

    assert index_names(tmp_path) == ["20231115061320123"]
    close(index)


@pytest.fixture
def local_time(monkeypatch):
    def use(zone):
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield use
    monkeypatch.undo()
    time.tzset()


def test_an_index_written_entry_by_entry_as_apache_does_is_understood(tmp_path):
    puts = numbered(0, 4)
    apache = ApacheFile(TINY)
    for put in puts:
        for word in (put.unique_key, put.keys):
            apache.put_key(index_hash(put.topic, str(word)), put.offset, put.store_ms)
    (tmp_path / "20231114221320000").write_bytes(apache.data)

    index = open_tiny(tmp_path)
    append(index, numbered(4, 1))
    close(index)

    more = numbered(4, 1)[0]
    for word in (more.unique_key, more.keys):
        apache.put_key(index_hash("T", str(word)), more.offset, more.store_ms)
    assert (tmp_path / "20231114221320000").read_bytes() == bytes(apache.data)


class ApacheFile:
    """A file filled one entry at a time, in the plainest way."""

    def __init__(self, shape: IndexSettings) -> None:
        self.shape = shape
        self.data = bytearray(shape.file_size)
        struct.pack_into(">i", self.data, 36, 1)

    def put_key(self, hashed: int, offset: int, store_ms: int) -> None:
        begin_ms, _, begin, _, used, number = struct.unpack_from(">qqqqii", self.data)
        slot_at = 40 + hashed % self.shape.slots * 4
        (previous,) = struct.unpack_from(">i", self.data, slot_at)
        if number == 1:
            begin_ms, begin = store_ms, offset
        entry_at = 40 + self.shape.slots * 4 + number * 20
        seconds = (store_ms - begin_ms) // 1000
        struct.pack_into(">iqii", self.data, entry_at, hashed, offset, seconds, previous)
        struct.pack_into(">i", self.data, slot_at, number)
        used += previous == 0
        struct.pack_into(
            ">qqqqii", self.data, 0, begin_ms, store_ms, begin, offset, used, number + 1
        )


# ---- finding


def test_the_time_window_counts_in_whole_seconds_since_the_file_began(tmp_path):
    index = open_tiny(tmp_path)
    append(index, [Put(ms, START + ms, "T", None, "k") for ms in (0, 999, 1000)])

    # The second message counts as stored at START.
    assert lookup(index, "k", begin_ms=START, end_ms=START) == [999, 0]
    assert lookup(index, "k", begin_ms=START + 1, end_ms=START + 1000) == [1000]
    assert lookup(index, "k", begin_ms=START + 1001) == []
    assert lookup(index, "k", end_ms=START - 1) == []
    close(index)


class CountingFiles(DiskFiles):
    """Counts what is read."""

    reads = 0

    def pread(self, fd: int, size: int, at: int) -> bytes:
        self.reads += 1
        return super().pread(fd, size, at)


def test_a_file_that_begins_after_the_time_asked_for_is_not_read(tmp_path):
    files = CountingFiles()
    index = KeyIndex.open(tmp_path, settings=TINY, files=files, clock=HandClock())
    append(index, [Put(n * 10, START + n * 1000, "T", None, "k") for n in range(40)])
    files.reads = 0

    before = lookup(index, "k", end_ms=START - 1)
    unread = files.reads
    oldest = lookup(index, "k", end_ms=START + 5000)

    assert len(index_names(tmp_path)) == 4
    assert (before, unread) == ([], 0)
    assert oldest == [50, 40, 30, 20, 10, 0]
    assert files.reads == 2  # the oldest one's slot and its entries
    close(index)


@given(st.binary(min_size=32, max_size=200), st.integers(0, 300))
@settings(max_examples=50, deadline=None)
def test_garbage_between_the_header_and_the_last_entry_never_hurts(tmp_path_factory, garbage, at):
    folder = tmp_path_factory.mktemp("index")
    index = open_tiny(folder)
    append(index, numbered(0, 5))
    close(index)
    (file,) = folder.iterdir()
    data = bytearray(file.read_bytes())
    at = 40 + at % (len(data) - 40)
    data[at : at + len(garbage)] = garbage[: len(data) - at]
    file.write_bytes(data)

    index = open_tiny(folder)
    found = lookup(index, "k")
    append(index, numbered(5, 5))

    assert len(found) <= 11
    assert index.resume_offset == 900
    close(index)


# ---- filling, rolling, deleting


def test_impossible_shapes_are_refused_by_name():
    with pytest.raises(SettingError, match=r"index\.slots must be positive, got 0"):
        IndexSettings(slots=0)
    with pytest.raises(SettingError, match=r"index\.entries must be 2 or more, got 1"):
        IndexSettings(entries=1)
    with pytest.raises(SettingError, match="2147483647 are allowed"):
        IndexSettings(entries=200_000_000)


# ---- closing, crashing, opening


def test_after_a_crash_files_later_than_the_checkpoint_are_made_again(tmp_path):
    index = open_tiny(tmp_path)
    append(index, numbered(0, 14))
    close(index)
    names = index_names(tmp_path)
    assert len(names) == 3

    index = open_tiny(tmp_path, safe_until_ms=START + 500)

    assert index_names(tmp_path) == names[:1]
    assert index.resume_offset == 500
    append(index, numbered(5, 9))
    assert lookup(index, "k") == [n * 100 for n in range(13, -1, -1)]
    close(index)


def test_the_keys_of_a_message_cut_in_two_by_a_crash_are_completed(tmp_path):
    words = " ".join(f"w{n}" for n in range(15))  # 11 go into the first file
    index = open_tiny(tmp_path)
    append(index, [Put(700, START, "T", None, words)])
    close(index)
    first, second = index_names(tmp_path)
    (tmp_path / second).unlink()

    index = open_tiny(tmp_path)
    added = append(index, [Put(700, START, "T", None, words)])

    assert added == 4
    assert all(lookup(index, f"w{n}") == [700] for n in range(15))
    assert index_names(tmp_path)[0] == first
    close(index)


def test_an_index_that_goes_beyond_the_end_of_the_log_is_made_again(tmp_path):
    index = open_tiny(tmp_path)
    append(index, numbered(0, 11))  # 500 is in the first file, 1000 in the second
    close(index)

    index = open_tiny(tmp_path, log_end=1000)

    assert index.resume_offset == 500
    assert lookup(index, "u10") == []
    close(index)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"",
        lambda data: bytes(len(data)),
        lambda data: b"\xff" * 40 + data[40:],
        lambda data: data[:36] + struct.pack(">i", 9) + data[40:],  # more entries than there are
        lambda data: data[:36] + struct.pack(">i", 13) + data[40:],  # more than fit
        lambda data: data[:32] + struct.pack(">i", 4) + data[36:],  # more slots than there are
        lambda data: data[:24] + struct.pack(">q", 1) + data[32:],  # ends elsewhere
        lambda data: data[:40] + bytes(len(data) - 40),  # the entries were lost
    ],
)
def test_a_file_that_contradicts_itself_is_dropped_with_all_after_it(tmp_path, damage):
    index = open_tiny(tmp_path)
    append(index, numbered(0, 14))
    close(index)
    names = index_names(tmp_path)
    middle = tmp_path / names[1]
    middle.write_bytes(damage(middle.read_bytes()))

    index = open_tiny(tmp_path)

    assert index_names(tmp_path) == names[:1]
    assert index.resume_offset == 500
    append(index, numbered(0, 14))
    assert lookup(index, "k") == [n * 100 for n in range(13, -1, -1)]
    close(index)


# ---- a disk that refuses


class StubbornDisk(DiskFiles):
    """Lets so many bytes be written, then says that the disk is full."""

    def __init__(self, allowed: int = 1 << 40) -> None:
        self.allowed = allowed

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> int:
        taken = min(len(data), self.allowed)
        self.allowed -= taken
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwrite(fd, memoryview(data)[:taken], at)


@pytest.mark.parametrize("allowed", [0, 1, 39, 40, 41, 150, 250, 300, 350])
def test_a_full_disk_is_an_error_and_what_was_refused_can_be_given_again(tmp_path, allowed):
    disk = StubbornDisk()
    index = KeyIndex.open(tmp_path, settings=TINY, files=disk, clock=HandClock())
    append(index, numbered(0, 4))

    disk.allowed = allowed
    with pytest.raises(OSError, match=r"space|bytes were written"):
        append(index, numbered(4, 12))
    disk.allowed = 1 << 40
    append(index, numbered(4, 12))

    assert lookup(index, "k") == [n * 100 for n in range(15, -1, -1)]
    close(index)
    index = open_tiny(tmp_path)
    assert lookup(index, "k") == [n * 100 for n in range(15, -1, -1)]
    close(index)


def test_a_flush_that_breaks_off_leaves_a_file_that_is_not_trusted(tmp_path):
    disk = StubbornDisk()
    index = KeyIndex.open(tmp_path, settings=TINY, files=disk, clock=HandClock())
    append(index, numbered(0, 2))
    flush(index)
    append(index, numbered(2, 2))
    disk.allowed = 44  # the mark in the header and one of the three slots
    with pytest.raises(OSError, match=r"space|bytes were written"):
        flush(index)
    index.abandon()

    index = open_tiny(tmp_path)

    assert index_names(tmp_path) == []
    assert index.resume_offset == 0
    close(index)


def test_messages_are_indexed_and_found_while_a_flush_is_under_way(tmp_path):
    index = open_tiny(tmp_path)
    append(index, numbered(0, 2))

    flush = index.begin_flush()
    append(index, numbered(2, 8))  # fills the file and begins another
    assert index.delete_below(1 << 62) == 0
    with pytest.raises(RuntimeError, match="under way"):
        index.begin_flush()
    flush.run()
    index.end_flush(flush)

    assert index.durable_until_ms == START + 100
    assert lookup(index, "k") == [n * 100 for n in range(9, -1, -1)]
    index.abandon()
    index = open_tiny(tmp_path, safe_until_ms=START + 100)
    assert lookup(index, "k") == [100, 0]
    assert index.resume_offset == 100
    close(index)


# ---- anything, in any order

_words = st.sampled_from(["Aa", "BB", "k", "订单", "😀", "x" * 70]) | st.text("abAB", max_size=3)
_keys = st.none() | st.lists(_words, max_size=4).map(" ".join)


class IndexLife(RuleBasedStateMachine):
    """Random puts, flushes, crashes and deletions against a plain list."""

    folder: Path

    @initialize(slots=st.sampled_from([1, 2, 7, 1000]), entries=st.sampled_from([2, 5, 40, 5000]))
    def begin(self, slots: int, entries: int) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.shape = IndexSettings(slots=slots, entries=entries)
        self.clock = HandClock()
        self.model = Model()
        self.log_end = 0
        self.deleted_below = 0
        self.open()

    def open(self, safe_until_ms: int | None = None) -> None:
        self.index = KeyIndex.open(
            Path(self.temporary.name),
            settings=self.shape,
            clock=self.clock,
            safe_until_ms=safe_until_ms,
        )

    @rule(
        rows=st.lists(
            st.tuples(st.sampled_from(["T", "订", "orders"]), st.none() | _words, _keys),
            max_size=12,
        )
    )
    def put(self, rows: list[tuple[str, str | None, str | None]]) -> None:
        puts = []
        for topic, unique_key, keys in rows:
            self.clock.advance(0.3)
            store_ms = int(self.clock.now() * 1000)
            puts.append(Put(self.log_end, store_ms, topic, unique_key, keys))
            self.log_end += 100
        append(self.index, puts)
        self.model.puts += puts

    @rule(again=st.integers(0, 10))
    def put_again(self, again: int) -> None:
        puts = self.model.puts[len(self.model.puts) - again :]
        assert append(self.index, [put for put in puts if put.offset >= self.deleted_below]) == 0

    @rule()
    def flush(self) -> None:
        flush(self.index)

    @rule()
    def reopen(self) -> None:
        close(self.index)
        self.open()
        self.feed_the_rest()

    @rule()
    def crash(self) -> None:
        safe_until_ms = self.index.durable_until_ms
        self.index.abandon()
        self.open(safe_until_ms)
        self.feed_the_rest()

    def feed_the_rest(self) -> None:
        resume = self.index.resume_offset
        append(self.index, [put for put in self.model.puts if put.offset >= resume])

    @rule(share=st.floats(0, 1))
    def delete(self, share: float) -> None:
        below = int(self.log_end * share)
        self.index.delete_below(below)
        self.deleted_below = max(self.deleted_below, below)

    @rule(topic=st.sampled_from(["T", "订", "orders"]), key=_words)
    def look_up(self, topic: str, key: str) -> None:
        found = [each for each in self.index.candidates(topic, key, 0, 1 << 62) if each is not None]

        expected = self.model.lookup(topic, key)
        still_there = [offset for offset in expected if offset >= self.deleted_below]
        assert found[: len(still_there)] == still_there
        assert found == expected[: len(found)]

    def teardown(self) -> None:
        if hasattr(self, "index"):
            close(self.index)
            self.temporary.cleanup()


IndexLife.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_any_life_of_an_index_finds_what_a_plain_list_finds = IndexLife.TestCase


# ---- hashes of many pieces at once

ascii_text = st.text(st.characters(max_codepoint=127), max_size=200)


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


def test_a_negative_hash_is_made_positive_and_the_smallest_one_zero():
    # "T#" + key: the first is negative in Java; the second is exactly Integer.MIN_VALUE.
    negative = next(f"key-{n}" for n in range(1000) if java_hash(f"T#key-{n}") < 0)
    smallest = _key_with_hash("T#", -(1 << 31))
    words = [negative, smallest]

    hashes = index_hashes(
        np.array([java_hash("T")] * 2, np.uint32),
        np.array([java_hash(word) & 0xFFFFFFFF for word in words], np.uint32),
        np.array([len(word) for word in words]),
    )

    assert java_hash(f"T#{smallest}") == -(1 << 31)
    assert hashes.tolist() == [-java_hash(f"T#{negative}"), 0]
    assert hashes.tolist() == [index_hash("T", word) for word in words]


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


# ---- keys from the bytes of the log, against reading record by record

V4 = bytes(8)
V6 = bytes(20)

names = st.sampled_from(["KEYS", "UNIQ_KEY", "TAGS", "KEY", "KEYSS", "UNIQ_KEYS", "", "订单"])
values = st.text(st.sampled_from("ab KE\x01\x00#") | st.characters(codec="utf-8"), max_size=12).map(
    lambda text: text.replace("\x02", "")
)
property_texts = st.lists(st.tuples(names, values), max_size=6).map(
    lambda pairs: "\x02".join(f"{name}\x01{value}" for name, value in pairs)
) | st.text(st.sampled_from("KEYS\x01\x02 a"), max_size=20)
topics = st.sampled_from(["T", "orders", "订单", "%RETRY%g", "t" * 200, "KEYS\x01a", ""])


@dataclass(frozen=True, slots=True)
class Written:
    topic: str
    properties: bytes
    body: bytes
    store_ms: int
    sys_flag: int
    born_host: bytes
    store_host: bytes

    def record(self, offset: int) -> bytes:
        constants = record_constants(
            self.sys_flag, 0, self.born_host, self.store_ms, self.store_host
        )
        _, pieces = encode_record(
            self.body, topic_field(self.topic), self.properties, 0, 0, 0, offset, constants
        )
        return b"".join(pieces)

    def expected_hashes(self) -> list[int]:
        """What Apache's reader makes of the record, one property after the other."""
        if self.sys_flag == TRANSACTION_ROLLBACK:
            return []
        found: dict[str, str] = {}
        for item in self.properties.decode(errors="replace").split("\x02"):
            name, separator, value = item.partition("\x01")
            if separator and name and value:
                found[name] = value
        keys = [found["UNIQ_KEY"]] if "UNIQ_KEY" in found else []
        keys += [word for word in found.get("KEYS", "").split(" ") if word]
        return [index_hash(self.topic, key) for key in keys]


written = st.builds(
    Written,
    topic=topics,
    properties=property_texts.map(str.encode) | st.binary(max_size=30),
    body=st.binary(max_size=40),
    store_ms=st.integers(1, 1 << 50),
    sys_flag=st.sampled_from(
        [TRANSACTION_NONE, TRANSACTION_PREPARED, TRANSACTION_COMMIT, TRANSACTION_ROLLBACK]
    ),
    born_host=st.sampled_from([V4, V6]),
    store_host=st.sampled_from([V4, V6]),
)


def log_of(messages: list[Written], base: int) -> tuple[memoryview, list[int]]:
    log, starts = bytearray(), []
    for message in messages:
        starts.append(len(log))
        log += message.record(base + len(log))
    return memoryview(bytes(log)), starts


def as_rows(entries: KeyEntries) -> list[tuple[int, int, int]]:
    return list(
        zip(
            entries.hashes.tolist(),
            entries.offsets.tolist(),
            entries.store_ms.tolist(),
            strict=True,
        )
    )


@given(st.lists(written, max_size=12), st.sampled_from([0, 1 << 40]))
@settings(deadline=None)
def test_a_chunk_of_the_log_gives_the_keys_that_reading_each_record_gives(messages, base):
    chunk, starts = log_of(messages, base)

    entries = entries_of_log(chunk, starts, base)

    assert as_rows(entries) == [
        (hashed, base + start, message.store_ms)
        for message, start in zip(messages, starts, strict=True)
        for hashed in message.expected_hashes()
    ]


@given(
    st.lists(written, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=12),
    st.integers(0, 400),
    st.lists(st.integers(-10, 500), max_size=4),
)
@settings(deadline=None)
def test_damaged_bytes_and_wrong_starts_never_raise(messages, changes, cut, more_starts):
    chunk, starts = log_of(messages, 0)
    damaged = bytearray(chunk)
    for at, value in changes:
        damaged[at % len(damaged)] = value
    shortened = memoryview(bytes(damaged))[: max(0, len(damaged) - cut)]

    entries = entries_of_log(shortened, starts + more_starts, 0)

    assert set(entries.offsets.tolist()) <= set(starts + more_starts)


def test_a_record_whose_lengths_do_not_add_up_is_left_out():
    good = Written("T", b"KEYS\x01a", b"body", 1, 0, V4, V4)
    chunk, starts = log_of([good, good, good], 0)
    damaged = bytearray(chunk)
    struct.pack_into(">i", damaged, starts[1] + 84, 0x7FFFFFFF)

    entries = entries_of_log(memoryview(damaged), np.array(starts), 0)

    assert entries.offsets.tolist() == [starts[0], starts[2]]
