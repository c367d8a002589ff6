"""What a store does when something else than the disk goes wrong, or the disk only for a while."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orbitmq.message.stored import decode_message
from orbitmq.store.settings import (
    DiskFull,
    FlushPolicy,
    MessageTooLarge,
    RetentionSettings,
    StoreClosed,
    StoreFailed,
    TopicRefused,
)
from tests.support.store import (
    BORN_HOST,
    SMALL,
    FailingFiles,
    QuickFiles,
    bodies,
    lookup,
    put,
    with_policy,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class InterruptedFiles(QuickFiles):
    """A disk whose next write, or flush, is interrupted by something that is not its fault."""

    def __init__(self) -> None:
        self.write_error: BaseException | None = None
        self.sync_error: BaseException | None = None

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> int:
        written = super().pwrite(fd, data, at)
        error, self.write_error = self.write_error, None
        if error is not None:
            raise error
        return written

    def sync(self, fd: int) -> None:
        if self.sync_error is not None:
            raise self.sync_error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_an_interrupted_write_takes_its_numbers_back(open_store, error):
    disk = InterruptedFiles()
    store = open_store(files=disk)
    put(store, "T", 0, b"first")
    store.write()
    put(store, "T", 0, b"interrupted")
    put(store, "new", 0, b"interrupted")
    disk.write_error = error

    with pytest.raises(type(error)):
        store.write()

    assert put(store, "T", 0, b"second")[1] == 1
    store.write()
    assert [state.topic for state in store.queues()] == ["T"]
    store.abandon()
    assert bodies(open_store(), "T", 0) == [b"first", b"second"]


def test_a_flush_that_dies_of_anything_refuses_writes(open_store):
    disk = InterruptedFiles()
    store = open_store(with_policy(SMALL, FlushPolicy.SYNC), files=disk, background=True)
    put(store, "T", 0, b"stored")
    assert store.wait_flushed(store.write(), 30)
    put(store, "T", 0, b"x")
    disk.sync_error = MemoryError()

    with pytest.raises(StoreFailed):
        store.wait_flushed(store.write(), 30)

    with pytest.raises(StoreFailed):
        put(store, "T", 0, b"y")
    assert store.max_offset("T", 0) == 1


def test_a_queue_file_not_flushed_for_any_reason_does_not_count_as_durable(open_store, clock):
    disk = InterruptedFiles()
    store = open_store(files=disk)
    put(store, "T", 0, b"x")
    store.wait_flushed(store.write())
    disk.sync_error = MemoryError()
    for _ in range(4):
        clock.advance(11)
        store.tick()

    assert store.statistics().durable == 0
    assert store.statistics().refusal


def test_a_listener_that_fails_does_not_undo_what_is_stored(open_store):
    store = open_store()

    def fail(_):
        raise ZeroDivisionError

    store.on_arrival(fail)
    put(store, "T", 0, b"x")

    assert store.write() > 0
    assert bodies(store, "T", 0) == [b"x"]


def test_refused_messages_leave_no_queues(open_store):
    store = open_store()
    with pytest.raises(MessageTooLarge):
        put(store, "a", 0, bytes(9000))
    with pytest.raises(MessageTooLarge):
        store.append_batch("b", 0, [(bytes(9000), 0, b"")], 1, BORN_HOST)
    with pytest.raises(TopicRefused):
        put(store, "c/d", 0, b"")
    put(store, "e", 0, b"x")
    store.discard()
    store.append_batch("f", 0, [], 1, BORN_HOST)
    put(store, "half", 0, b"x", sys_flag=0x4)
    store.write()

    assert store.queues() == []


def test_a_closed_store_reads_nothing_and_opens_nothing(open_store):
    store = open_store()
    for _ in range(100):
        put(store, "T", 0, b"x", {"KEYS": "k"})
        store.write()
    store.close()
    before = descriptors()

    calls: list[Callable[[], object]] = [
        lambda: put(store, "T", 0, b"x"),
        lambda: store.read("T", 0, 0),
        lambda: store.read("T", 0, 99),
        lambda: store.read("unknown", 0, 0),
        lambda: store.min_offset("T", 0),
        lambda: store.max_offset("T", 0),
        lambda: store.offset_by_time("T", 0, 0),
        lambda: store.earliest_store_time("T", 0),
        lambda: store.store_time("T", 0, 0),
        lambda: store.queue_entries("T", 0, 0, 1),
        lambda: store.message_at(0),
        lambda: store.message_by_offset_id("7F00000100002A9F0000000000000000"),
        lambda: lookup(store, "T", "k"),
    ]
    for call in calls:
        with pytest.raises(StoreClosed):
            call()
    assert descriptors() == before


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_store_on_a_disk_that_takes_no_writes_can_be_read(open_store, code, is_clean):
    settings = replace(
        SMALL, retention=RetentionSettings(max_bytes=20_000, full_ratio=1.0, forced_ratio=1.0)
    )
    store = open_store(settings)
    for number in range(300):
        put(store, "T", 0, b"%d" % number * 20)
        store.write()
    before = bodies(store, "T", 0)
    if is_clean:
        store.close()
    else:
        store.abandon()
    disk = FailingFiles()
    disk.fail("pwrite", code)

    store = open_store(settings, files=disk)

    assert bodies(store, "T", 0) == before
    assert "took no writes" in store.statistics().refusal
    with pytest.raises(DiskFull):
        put(store, "T", 0, b"refused")
    store.tick()
    store.clean()
    assert (store.statistics().log_start > 0) is is_clean
    disk.heal()
    store.clean()
    assert store.statistics().refusal == ""
    assert put(store, "T", 0, b"accepted")[1] == 300
    store.write()
    store.abandon()
    after = open_store(settings)
    assert not after.recovery.was_clean
    assert bodies(after, "T", 0)[-2:] == [before[-1], b"accepted"]


def test_the_index_goes_on_when_the_disk_has_room_again(open_store, disk, clock):
    store = open_store(files=disk)
    put(store, "T", 0, b"x", {"KEYS": "k0"})
    store.write()
    disk.fail("pwrite", errno.ENOSPC)
    assert lookup(store, "T", "k0") == []
    disk.heal()
    assert lookup(store, "T", "k0") == []

    clock.advance(6)

    put(store, "T", 0, b"x", {"KEYS": "k1"})
    store.write()
    assert [len(lookup(store, "T", key)) for key in ("k0", "k1")] == [1, 1]


def test_a_crash_under_load_keeps_what_the_index_had_flushed(open_store, disk, clock):
    store = open_store(files=disk)
    for number in range(40):
        put(store, "T", 0, b"%d" % number, {"KEYS": f"k{number}"})
    store.write()
    for _ in range(6):
        clock.advance(11)
        store.tick()
    flushed = store.statistics().indexed
    for number in range(40, 80):
        put(store, "T", 0, b"%d" % number, {"KEYS": f"k{number}"})
    store.write()
    clock.advance(1)
    lookup(store, "T", "k0")

    def die_among_the_slots(call, size):
        if call == "pwrite" and size == 4 * SMALL.index_file.slots:
            raise OSError(errno.EIO, "died")

    disk.before = die_among_the_slots
    for _ in range(3):
        clock.advance(11)
        store.tick()
    store.abandon()

    store = open_store()

    assert store.statistics().indexed >= flushed > 0
    for number in range(80):
        (record,) = lookup(store, "T", f"k{number}")
        assert decode_message(record).body == b"%d" % number


def test_a_log_of_many_files_needs_few_descriptors(open_store, clock):
    store = open_store(replace(SMALL, file_size=4096, index=False))
    before = descriptors()
    for number in range(300):
        put(store, "T", 0, bytes(3900) + b"%d" % number)
        store.write()
        clock.advance(1)
        store.tick()

    assert store.statistics().log_files == 300
    assert len(bodies(store, "T", 0)) == 300
    assert descriptors() - before < 150
