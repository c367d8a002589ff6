"""Rounds of flushing: when they begin, and how long they hold up the owner."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from orbitmq.clock import milliseconds
from orbitmq.store.recovery import Checkpoint, read_checkpoint
from orbitmq.store.settings import RetentionSettings
from tests.support.store import SMALL, HandClock, QuickFiles, put

if TYPE_CHECKING:
    from pathlib import Path

    from orbitmq.store.store import Store


SETTINGS = replace(
    SMALL,
    file_size=1 << 20,
    preallocate_step=0,
    flush=replace(SMALL.flush, durable_bytes=100_000, durable_interval=1e9, queues_per_step=1000),
)


def fill(store: Store, queues: int, size: int) -> None:
    """So many bytes of bodies, in turn to all queues."""
    for place in range(size // 1000):
        put(store, "T", place % queues, bytes(900))
    store.write()


@pytest.mark.parametrize(("queues", "is_due"), [(1, True), (16, True), (512, False)])
def test_many_queues_are_flushed_after_more_of_the_log(open_store, queues, is_due):
    store = open_store(SETTINGS)
    for queue_id in range(queues):
        put(store, "T", queue_id, b"")
    fill(store, queues, 110_000)

    for _ in range(4):
        store.tick()
    assert (store.statistics().durable > 0) is is_due

    fill(store, queues, 110_000)
    for _ in range(4):
        store.tick()
    assert store.statistics().durable > 100_000


def on_the_disk(store: Store, clock: HandClock) -> Checkpoint:
    """What the checkpoint says, which is written at least every second."""
    clock.advance(1.0)
    store.tick()
    return read_checkpoint(store.root / "checkpoint", QuickFiles())


def rounds(store: Store, count: int) -> None:
    """So many rounds of flushing, because much was written."""
    for _ in range(count):
        fill(store, 1, 110_000)
        for _ in range(4):
            store.tick()
        assert store.statistics().durable == store.statistics().log_end


def test_the_index_is_flushed_at_intervals_and_not_with_every_round(open_store, clock):
    store = open_store(replace(SETTINGS, flush=replace(SETTINGS.flush, durable_interval=10.0)))
    began = milliseconds(clock.now())

    rounds(store, 3)
    without = on_the_disk(store, clock)
    clock.advance(10.0)
    rounds(store, 2)
    with_it = on_the_disk(store, clock)
    clock.advance(10.0)
    for _ in range(4):
        store.tick()
    later = on_the_disk(store, clock)

    assert without.hint is not None
    assert with_it.hint is not None
    assert later.hint is not None
    # Apache's broker is not sent past what the index lacks.
    assert (without.hint.indexed, without.logical_ms <= began) == (0, True)
    assert 0 < with_it.hint.indexed < store.statistics().log_end
    assert with_it.logical_ms > began
    # What is indexed is flushed though nothing new comes.
    assert later.hint.indexed == store.statistics().log_end


class FullFiles(QuickFiles):
    """A disk that takes nothing for one file, and notes which folders it was told to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: Path | None = None
        self.synced: set[Path] = set()

    def open(self, path: Path, *, create: bool = False) -> int:
        if self.refused is not None and self.refused in path.parents:
            raise OSError(errno.ENOSPC, "injected")
        return super().open(path, create=create)

    def sync_folder(self, folder: Path) -> None:
        self.synced.add(folder)
        super().sync_folder(folder)


def test_a_round_that_a_full_disk_ends_forgets_no_folder(open_store, clock):
    """A new file whose name is not on the disk is lost with the power, and its entries with it."""
    files = FullFiles()
    store = open_store(SETTINGS, files=files)
    fill(store, 2, 110_000)
    folder = store.root / "consumequeue" / "T"
    files.refused = folder / "0"
    for _ in range(2):
        store.tick()  # a round begins, and writes one of the queues
    assert (folder / "1").exists()

    files.refused = None
    for _ in range(20):
        clock.advance(2.0)
        store.tick()

    assert store.statistics().durable == store.statistics().log_end
    assert {folder / "1", folder, folder.parent} <= files.synced


def test_a_topic_that_is_deleted_during_a_round_does_not_count_in_it(open_store, clock):
    """A start that finds fewer entries than it was told makes all queues anew."""
    store = open_store(SETTINGS)
    put(store, "kept", 0, bytes(900))
    fill(store, 1, 110_000)
    store.tick()  # a round begins
    target = store.statistics().log_end

    store.delete_topic("T")
    for _ in range(4):
        clock.advance(1.0)
        store.tick()
    assert store.statistics().durable == target
    store.abandon()

    assert not open_store(SETTINGS).recovery.rebuilt_all


class CrashingFiles(QuickFiles):
    """A disk before which the process ends when queues are deleted."""

    def remove_folder(self, folder: Path) -> None:
        raise RuntimeError("a crash")

    def unlink(self, path: Path) -> None:
        if path.parent.parent.name == "T":
            raise RuntimeError("a crash")
        super().unlink(path)


@pytest.mark.parametrize("is_gone", [False, True], ids=["in the log", "gone from the log"])
def test_a_deletion_that_a_crash_interrupts_is_carried_out_at_the_next_start(
    open_store, clock, is_gone
):
    settings = replace(SMALL, retention=RetentionSettings(max_bytes=9000))
    store = open_store(settings, files=CrashingFiles())
    put(store, "kept", 0, b"kept")
    put(store, "T", 0, b"gone")
    store.write()
    for _ in range(6):
        clock.advance(11)
        store.tick()
    with pytest.raises(RuntimeError, match="a crash"):
        store.delete_topic("T")
    if is_gone:
        for place in range(40):
            put(store, "kept", 0, bytes(900 + place))
        store.write()
        while store.clean().log_files:
            pass
    assert (store.statistics().log_start > 0) is is_gone
    store.abandon()

    again = open_store(settings)

    assert again.max_offset("T", 0) == 0
    assert again.max_offset("kept", 0) == (41 if is_gone else 1)
    put(again, "T", 0, b"new")
    again.write()
    assert again.max_offset("T", 0) == 1
