"""The key index against a plain list of what was put into it."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from orbitmq.errors import SettingError
from orbitmq.store.files import DiskFiles
from orbitmq.store.index import KeyIndex, index_hash
from orbitmq.store.settings import IndexSettings

if TYPE_CHECKING:
    pass

TINY = IndexSettings(slots=3, entries=12)
START = 1_700_000_000_000


@dataclass(slots=True)
class StandingClock:
    """A clock that a test moves by hand."""

    seconds: float = START / 1000

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Put:
    offset: int
    store_ms: int
    topic: str
    unique_key: str | None
    keys: str | None

    def hashes(self) -> set[int]:
        words = [self.unique_key] if self.unique_key else []
        words += [word for word in (self.keys or "").split(" ") if word]
        return {index_hash(self.topic, word) for word in words}


@dataclass(slots=True)
class Model:
    """What an index that was given `puts` has to find: everything, hash by hash."""

    puts: list[Put] = field(default_factory=list)

    def lookup(self, topic: str, key: str) -> list[int]:
        wanted = index_hash(topic, key)
        return [put.offset for put in reversed(self.puts) if wanted in put.hashes()]


def append(index: KeyIndex, puts: list[Put]) -> int:
    return index.append(
        [put.offset for put in puts],
        [put.store_ms for put in puts],
        [put.topic for put in puts],
        [put.unique_key for put in puts],
        [put.keys for put in puts],
    )


def numbered(first: int, count: int, key: str = "k") -> list[Put]:
    """Messages 100 bytes and 100 ms apart; each has a key of its own and `key`."""
    return [Put(n * 100, START + n * 100, "T", f"u{n}", key) for n in range(first, first + count)]


def open_tiny(
    folder: Path, *, safe_until_ms: int | None = None, log_end: int | None = None
) -> KeyIndex:
    return KeyIndex.open(
        folder, settings=TINY, clock=StandingClock(), safe_until_ms=safe_until_ms, log_end=log_end
    )


def index_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- the bytes


def test_a_file_has_exactly_the_bytes_that_apache_would_write(tmp_path):
    """Worked out by hand: 2 slots, 4 places, three entries."""
    index = KeyIndex.open(
        tmp_path, settings=IndexSettings(slots=2, entries=4), clock=StandingClock()
    )

    # The hash of T#a is 84 times 961 and 35 times 31 and 97: 81906, slot 0. Those of T#b and
    # T#c follow.
    index.append([100, 228], [START, START + 2999], ["T", "T"], ["a", None], [None, " b  c "])
    index.close()

    (file,) = tmp_path.iterdir()
    header = struct.pack(">qqqqii", START, START + 2999, 100, 228, 2, 4)
    slots = struct.pack(">ii", 3, 2)
    nothing = bytes(20)
    first = struct.pack(">iqii", 81906, 100, 0, 0)
    second = struct.pack(">iqii", 81907, 228, 2, 0)
    third = struct.pack(">iqii", 81908, 228, 2, 1)
    assert file.read_bytes() == header + slots + nothing + first + second + third


def test_the_default_file_has_apaches_size_and_takes_no_space_before_it_is_filled(tmp_path):
    index = KeyIndex.open(tmp_path)

    append(index, numbered(0, 1))
    index.flush()

    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == 420_000_040
    assert file.stat().st_blocks * 512 < 1 << 20
    index.close()


def test_a_file_is_named_after_the_local_time_of_its_creation(tmp_path, local_time):
    local_time("Asia/Shanghai")
    clock = StandingClock(1_700_000_000.123)  # 2023-11-14 22:13:20.123 in Greenwich

    index = KeyIndex.open(tmp_path, settings=TINY, clock=clock)
    append(index, numbered(0, 1))

    assert index_names(tmp_path) == ["20231115061320123"]
    index.close()


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
    index.close()

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


def test_keys_with_equal_hashes_find_each_others_messages(tmp_path):
    index = open_tiny(tmp_path)
    index.append([0, 100], [START, START], ["T", "T"], [None, None], ["Aa", "BB"])

    assert index.lookup("T", "Aa") == [100, 0]
    assert index.lookup("T", "BB") == [100, 0]
    index.close()


def test_a_message_that_has_a_key_twice_is_found_once(tmp_path):
    index = open_tiny(tmp_path)
    index.append([0], [START], ["T"], ["Aa"], ["Aa BB Aa"])

    assert index.lookup("T", "Aa") == [0]
    index.close()


def test_a_message_whose_keys_are_in_two_files_is_found_once(tmp_path):
    index = open_tiny(tmp_path)
    append(index, numbered(0, 5))
    append(index, [Put(500, START + 500, "T", None, "k Aa k"), *numbered(6, 1)])

    assert index.file_count == 2
    assert index.lookup("T", "k") == [600, 500, 400, 300, 200, 100, 0]
    index.close()


def test_a_walk_along_a_chain_remembers_nothing_of_it(tmp_path):
    count = 20_000
    index = KeyIndex.open(tmp_path, settings=IndexSettings(slots=7, entries=count + 1))
    index.append(range(count), [START] * count, ["T"] * count, [None] * count, ["Aa"] * count)
    found = 0

    tracemalloc.start()
    try:
        for offset in index.candidates("T", "BB", 0, 2**63 - 1):
            found += offset is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        index.close()

    assert found == count
    assert peak < 100_000  # a set of the offsets would take 3,000,000


def test_the_newest_results_come_first_and_no_more_than_asked_for(tmp_path):
    index = open_tiny(tmp_path)
    append(index, numbered(0, 20))

    assert index.lookup("T", "k", max_results=3) == [1900, 1800, 1700]
    assert index.lookup("T", "k", max_results=0) == []
    assert len(index.lookup("T", "k")) == 20
    index.close()


def test_the_time_window_counts_in_whole_seconds_since_the_file_began(tmp_path):
    index = open_tiny(tmp_path)
    index.append(
        [0, 100, 200], [START, START + 999, START + 1000], ["T"] * 3, [None] * 3, ["k"] * 3
    )

    # The second message counts as stored at START.
    assert index.lookup("T", "k", begin_ms=START, end_ms=START) == [100, 0]
    assert index.lookup("T", "k", begin_ms=START + 1, end_ms=START + 1000) == [200]
    assert index.lookup("T", "k", begin_ms=START + 1001) == []
    assert index.lookup("T", "k", end_ms=START - 1) == []
    index.close()


def test_a_window_of_time_spans_files(tmp_path):
    index = open_tiny(tmp_path)
    # A second apart; 11 keys fill a file.
    puts = [Put(n * 10, START + n * 1000, "T", None, "k") for n in range(40)]
    append(index, puts)

    found = index.lookup("T", "k", begin_ms=START + 5000, end_ms=START + 30_000)

    assert index.file_count == 4
    assert found == [n * 10 for n in range(30, 4, -1)]
    index.close()


class CountingFiles(DiskFiles):
    """Counts what is read."""

    reads = 0

    def pread(self, fd: int, size: int, at: int) -> bytes:
        self.reads += 1
        return super().pread(fd, size, at)


def test_a_walk_along_a_chain_can_be_interrupted_at_every_read(tmp_path):
    files = CountingFiles()
    settings = IndexSettings(slots=3, entries=2000)
    index = KeyIndex.open(tmp_path, settings=settings, files=files, clock=StandingClock())
    append(index, [Put(n * 10, START + n * 1000, "T", None, "k") for n in range(1500)])
    files.reads = 0

    found, reads = [], []
    for offset in index.candidates("T", "k", START, START + 1000):
        if offset is None:
            reads.append(files.reads)
        else:
            found.append(offset)

    assert found == [10, 0]
    assert reads == list(range(8))
    index.close()


def test_a_file_that_begins_after_the_time_asked_for_is_not_read(tmp_path):
    files = CountingFiles()
    index = KeyIndex.open(tmp_path, settings=TINY, files=files, clock=StandingClock())
    append(index, [Put(n * 10, START + n * 1000, "T", None, "k") for n in range(40)])
    files.reads = 0

    before = index.lookup("T", "k", end_ms=START - 1)
    unread = files.reads
    oldest = index.lookup("T", "k", end_ms=START + 5000)

    assert index.file_count == 4
    assert (before, unread) == ([], 0)
    assert oldest == [50, 40, 30, 20, 10, 0]
    assert files.reads == 2  # the oldest one's slot and its entries
    index.close()


def test_a_walk_ends_at_files_that_were_deleted_meanwhile(tmp_path):
    index = open_tiny(tmp_path)
    append(index, [Put(n * 10, START + n * 1000, "T", None, "k") for n in range(40)])
    walk = (offset for offset in index.candidates("T", "k", 0, 2**63 - 1) if offset is not None)
    found = [next(walk) for _ in range(3)]

    index.delete_below(220)
    append(index, [Put(1000, START + 90_000, "T", None, "k")])
    found += walk

    assert index.file_count == 2
    assert found == [n * 10 for n in range(39, 21, -1)]
    index.close()


def test_a_chain_that_leads_in_a_circle_ends(tmp_path):
    index = open_tiny(tmp_path)
    append(index, [Put(n * 10, START, "T", None, "k") for n in range(5)])
    index.close()
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    # Entry 3 names entry 4, which names entry 3.
    struct.pack_into(">i", data, TINY.entries_at + 3 * 20 + 16, 4)
    file.write_bytes(data)

    index = open_tiny(tmp_path)

    assert index.lookup("T", "k") == [40, 30, 20]
    index.close()


@given(st.binary(min_size=32, max_size=200), st.integers(0, 300))
@settings(max_examples=50, deadline=None)
def test_garbage_between_the_header_and_the_last_entry_never_hurts(tmp_path_factory, garbage, at):
    folder = tmp_path_factory.mktemp("index")
    index = open_tiny(folder)
    append(index, numbered(0, 5))
    index.close()
    (file,) = folder.iterdir()
    data = bytearray(file.read_bytes())
    at = 40 + at % (len(data) - 40)
    data[at : at + len(garbage)] = garbage[: len(data) - at]
    file.write_bytes(data)

    index = open_tiny(folder)
    found = index.lookup("T", "k")
    append(index, numbered(5, 5))

    assert len(found) <= 11
    assert index.resume_offset == 900
    index.close()


# ---- filling, rolling, deleting


def test_a_full_file_is_followed_by_another_one_with_a_later_name(tmp_path):
    index = open_tiny(tmp_path)  # the clock stands still

    append(index, numbered(0, 13))  # 26 entries into files of 11

    names = index_names(tmp_path)
    assert [int(name) - int(names[0]) for name in names] == [0, 1, 2]
    assert index.lookup("T", "u0") == [0]
    assert index.lookup("T", "u12") == [1200]
    index.close()


def test_only_files_that_lie_wholly_below_an_offset_are_deleted(tmp_path):
    index = open_tiny(tmp_path)
    append(index, [Put(n * 10, START, "T", None, "k") for n in range(30)])  # ends: 100, 210, 290
    names = index_names(tmp_path)

    assert index.delete_below(100) == 0
    assert index.delete_below(101) == 1
    assert index_names(tmp_path) == names[1:]
    assert index.lookup("T", "k")[-1] == 110
    assert index.delete_below(1 << 62) == 1
    assert index_names(tmp_path) == names[2:]
    assert index.resume_offset == 290
    index.close()


def test_what_was_indexed_before_is_not_indexed_again(tmp_path):
    index = open_tiny(tmp_path)
    puts = numbered(0, 9)
    append(index, puts)

    added = append(index, puts) + append(index, puts[5:] + numbered(9, 1))

    assert added == 2
    assert index.lookup("T", "k") == [n * 100 for n in range(9, -1, -1)]
    index.close()


def test_records_without_keys_leave_no_trace(tmp_path):
    index = open_tiny(tmp_path)

    added = index.append([0, 100], [START, START], ["T", "T"], [None, ""], [None, "   "])

    assert added == 0
    assert index_names(tmp_path) == []
    index.close()


def test_impossible_shapes_are_refused_by_name():
    with pytest.raises(SettingError, match=r"index\.slots must be positive, got 0"):
        IndexSettings(slots=0)
    with pytest.raises(SettingError, match=r"index\.entries must be 2 or more, got 1"):
        IndexSettings(entries=1)
    with pytest.raises(SettingError, match="2147483647 are allowed"):
        IndexSettings(entries=200_000_000)


# ---- closing, crashing, opening


def test_everything_is_found_after_closing_and_opening(tmp_path):
    index = open_tiny(tmp_path)
    append(index, numbered(0, 8))
    index.close()

    index = open_tiny(tmp_path)
    append(index, numbered(8, 8))

    assert index.lookup("T", "k") == [n * 100 for n in range(15, -1, -1)]
    assert all(index.lookup("T", f"u{n}") == [n * 100] for n in range(16))
    index.close()


def test_after_a_crash_the_index_is_as_it_was_flushed(tmp_path):
    index = open_tiny(tmp_path)
    append(index, numbered(0, 3))
    safe_until_ms = index.flush()
    append(index, numbered(3, 2))
    index.abandon()

    index = open_tiny(tmp_path, safe_until_ms=safe_until_ms)

    assert safe_until_ms == START + 200
    assert index.resume_offset == 200
    assert index.lookup("T", "k") == [200, 100, 0]
    append(index, numbered(2, 5))
    assert index.lookup("T", "k") == [n * 100 for n in range(6, -1, -1)]
    index.close()


def test_after_a_crash_files_later_than_the_checkpoint_are_made_again(tmp_path):
    index = open_tiny(tmp_path)
    append(index, numbered(0, 14))
    index.close()
    names = index_names(tmp_path)
    assert len(names) == 3

    index = open_tiny(tmp_path, safe_until_ms=START + 500)

    assert index_names(tmp_path) == names[:1]
    assert index.resume_offset == 500
    append(index, numbered(5, 9))
    assert index.lookup("T", "k") == [n * 100 for n in range(13, -1, -1)]
    index.close()


def test_a_file_that_was_never_flushed_does_not_survive_a_crash(tmp_path):
    index = open_tiny(tmp_path)
    append(index, numbered(0, 2))
    index.abandon()
    # Apache's broker deletes what ends after its checkpoint.
    (file,) = tmp_path.iterdir()
    assert struct.unpack_from(">q", file.read_bytes(), 8) == ((1 << 63) - 1,)

    index = open_tiny(tmp_path)

    assert index_names(tmp_path) == []
    assert index.resume_offset == 0
    index.close()


def test_the_keys_of_a_message_cut_in_two_by_a_crash_are_completed(tmp_path):
    words = " ".join(f"w{n}" for n in range(15))  # 11 go into the first file
    index = open_tiny(tmp_path)
    index.append([700], [START], ["T"], [None], [words])
    index.close()
    first, second = index_names(tmp_path)
    (tmp_path / second).unlink()

    index = open_tiny(tmp_path)
    added = index.append([700], [START], ["T"], [None], [words])

    assert added == 4
    assert all(index.lookup("T", f"w{n}") == [700] for n in range(15))
    assert index_names(tmp_path)[0] == first
    index.close()


def test_an_index_that_goes_beyond_the_end_of_the_log_is_made_again(tmp_path):
    index = open_tiny(tmp_path)
    append(index, numbered(0, 11))  # 500 is in the first file, 1000 in the second
    index.close()

    index = open_tiny(tmp_path, log_end=1000)

    assert index.resume_offset == 500
    assert index.lookup("T", "u10") == []
    index.close()


def test_a_clock_that_was_set_back_does_not_condemn_flushed_files(tmp_path):
    index = open_tiny(tmp_path)
    append(index, numbered(0, 6))
    index.append([600, 700], [START - 9000] * 2, ["T"] * 2, [None] * 2, ["late later"] * 2)
    safe_until_ms = index.flush()
    assert index.file_count == 2
    index.abandon()

    index = open_tiny(tmp_path, safe_until_ms=safe_until_ms)

    assert index.resume_offset == 700
    index.close()


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
    index.close()
    names = index_names(tmp_path)
    middle = tmp_path / names[1]
    middle.write_bytes(damage(middle.read_bytes()))

    index = open_tiny(tmp_path)

    assert index_names(tmp_path) == names[:1]
    assert index.resume_offset == 500
    append(index, numbered(0, 14))
    assert index.lookup("T", "k") == [n * 100 for n in range(13, -1, -1)]
    index.close()


def test_opening_that_fails_leaves_no_file_open(tmp_path):
    class FailingDisk(DiskFiles):
        def __init__(self) -> None:
            self.opened: set[int] = set()

        def open(self, path: Path, *, create: bool = False) -> int:
            if len(self.opened) == 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            fd = super().open(path, create=create)
            self.opened.add(fd)
            return fd

        def close(self, fd: int) -> None:
            super().close(fd)
            self.opened.remove(fd)

    index = open_tiny(tmp_path)
    append(index, numbered(0, 14))
    index.close()
    disk = FailingDisk()

    with pytest.raises(OSError, match="Too many open files"):
        KeyIndex.open(tmp_path, settings=TINY, files=disk)

    assert disk.opened == set()
    assert len(index_names(tmp_path)) == 3


def test_files_that_are_not_of_the_index_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "2023111422132000x").write_text("mine")

    index = open_tiny(tmp_path)
    append(index, numbered(0, 1))
    index.close()

    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "2023111422132000x").read_text() == "mine"


# ---- a disk that refuses


class StubbornDisk(DiskFiles):
    """Lets so many bytes be written, then says that the disk is full; counts what is synced."""

    def __init__(self, allowed: int = 1 << 40) -> None:
        self.allowed = allowed
        self.sync_fails = False

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> int:
        taken = min(len(data), self.allowed)
        self.allowed -= taken
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwrite(fd, memoryview(data)[:taken], at)

    def sync(self, fd: int) -> None:
        if self.sync_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)


@pytest.mark.parametrize("allowed", [0, 1, 39, 40, 41, 150, 250, 300, 350])
def test_a_full_disk_is_an_error_and_what_was_refused_can_be_given_again(tmp_path, allowed):
    disk = StubbornDisk()
    index = KeyIndex.open(tmp_path, settings=TINY, files=disk, clock=StandingClock())
    append(index, numbered(0, 4))

    disk.allowed = allowed
    with pytest.raises(OSError, match=r"space|bytes were written"):
        append(index, numbered(4, 12))
    disk.allowed = 1 << 40
    append(index, numbered(4, 12))

    assert index.lookup("T", "k") == [n * 100 for n in range(15, -1, -1)]
    index.close()
    index = open_tiny(tmp_path)
    assert index.lookup("T", "k") == [n * 100 for n in range(15, -1, -1)]
    index.close()


def test_a_flush_that_failed_counts_for_nothing_and_can_be_repeated(tmp_path):
    disk = StubbornDisk()
    index = KeyIndex.open(tmp_path, settings=TINY, files=disk, clock=StandingClock())
    append(index, numbered(0, 3))
    disk.sync_fails = True

    with pytest.raises(OSError, match="Input/output error"):
        index.flush()

    assert index.durable_until_ms == 0
    disk.sync_fails = False
    assert index.flush() == START + 200
    index.abandon()
    index = open_tiny(tmp_path, safe_until_ms=START + 200)
    assert index.lookup("T", "k") == [200, 100, 0]
    index.close()


def test_a_flush_that_breaks_off_leaves_a_file_that_is_not_trusted(tmp_path):
    disk = StubbornDisk()
    index = KeyIndex.open(tmp_path, settings=TINY, files=disk, clock=StandingClock())
    append(index, numbered(0, 2))
    index.flush()
    append(index, numbered(2, 2))
    disk.allowed = 44  # the mark in the header and one of the three slots
    with pytest.raises(OSError, match=r"space|bytes were written"):
        index.flush()
    index.abandon()

    index = open_tiny(tmp_path)

    assert index_names(tmp_path) == []
    assert index.resume_offset == 0
    index.close()


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
    assert index.lookup("T", "k") == [n * 100 for n in range(9, -1, -1)]
    index.abandon()
    index = open_tiny(tmp_path, safe_until_ms=START + 100)
    assert index.lookup("T", "k") == [100, 0]
    assert index.resume_offset == 100
    index.close()


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
        self.clock = StandingClock()
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
            self.clock.seconds += 0.3
            store_ms = int(self.clock.seconds * 1000)
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
        self.index.flush()

    @rule()
    def reopen(self) -> None:
        self.index.close()
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

    @precondition(lambda self: self.index.file_count > 1)
    @rule(share=st.floats(0, 1))
    def delete(self, share: float) -> None:
        below = int(self.log_end * share)
        self.index.delete_below(below)
        self.deleted_below = max(self.deleted_below, below)

    @rule(topic=st.sampled_from(["T", "订", "orders"]), key=_words)
    def look_up(self, topic: str, key: str) -> None:
        found = self.index.lookup(topic, key, max_results=10_000)

        expected = self.model.lookup(topic, key)
        still_there = [offset for offset in expected if offset >= self.deleted_below]
        assert found[: len(still_there)] == still_there
        assert found == expected[: len(found)]

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.index.close()
            self.temporary.cleanup()


IndexLife.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_any_life_of_an_index_finds_what_a_plain_list_finds = IndexLife.TestCase
