"""Rounds of flushing: when they begin, and how long they hold up the owner."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from orbitmq.clock import milliseconds
from orbitmq.store.settings import RetentionSettings
from tests.support.store import SMALL, HandClock, QuickFiles, put

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orbitmq.store.store import Store

    OpenStore = Callable[..., Store]

SETTINGS = replace(
    SMALL,
    file_size=1 << 20,
    preallocate_step=0,
    flush=replace(SMALL.flush, durable_bytes=100_000, durable_interval=1e9, queues_per_step=1000),
)


class SlowFiles(QuickFiles):
    """A disk on which opening a file takes a millisecond."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self.opened = 0
        self._clock = clock

    def open(self, path: Path, *, create: bool = False) -> int:
        self.opened += 1
        self._clock.advance(0.001)
        return super().open(path, create=create)


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


def test_a_step_does_not_write_queues_for_long(open_store, clock):
    files = SlowFiles(clock)
    store = open_store(SETTINGS, files=files)
    fill(store, 100, 150_000)
    store.tick()  # a round begins
    files.opened = 0

    store.tick()
    assert 1 <= files.opened <= 16

    steps = 0
    while not store.statistics().durable:
        store.tick()
        steps += 1
        assert steps < 100
    end = store.statistics().log_end
    assert store.statistics().durable == end


def test_a_busy_log_does_not_have_its_index_flushed_with_every_round(open_store, clock):
    settings = replace(SETTINGS, flush=replace(SETTINGS.flush, durable_interval=10.0))
    store = open_store(settings)
    indexing = store._indexing
    assert indexing is not None

    def rounds(count):
        for _ in range(count):
            fill(store, 1, 110_000)
            for _ in range(4):
                store.tick()
            assert store.statistics().durable == store.statistics().log_end

    rounds(3)
    assert indexing.durable_position == 0

    clock.advance(10.0)
    rounds(2)
    assert 0 < indexing.durable_position < store.statistics().log_end


def test_what_is_indexed_is_flushed_though_nothing_new_comes(open_store, clock):
    settings = replace(SETTINGS, flush=replace(SETTINGS.flush, durable_interval=10.0))
    store = open_store(settings)
    fill(store, 1, 110_000)
    for _ in range(4):
        store.tick()

    clock.advance(10.0)
    for _ in range(4):
        store.tick()

    assert store._indexing is not None
    assert store._indexing.durable_position == store.statistics().log_end


def test_the_index_is_flushed_after_some_rounds_whatever_the_time(open_store):
    store = open_store(SETTINGS)
    assert store._indexing is not None

    for _ in range(6):
        fill(store, 1, 110_000)
        for _ in range(4):
            store.tick()

    assert store._indexing.durable_position >= 4 * SETTINGS.flush.durable_bytes


def test_the_index_does_not_wait_for_a_second_interval_where_little_comes(open_store, clock):
    store = open_store(replace(SETTINGS, flush=replace(SETTINGS.flush, durable_interval=10.0)))
    indexing = store._indexing
    assert indexing is not None
    clock.advance(9.0)
    fill(store, 1, 110_000)
    for _ in range(4):
        store.tick()  # a round, without the index
    assert indexing.durable_position == 0

    clock.advance(1.0)
    fill(store, 1, 1000)
    for _ in range(4):
        store.tick()

    assert indexing.durable_position > 0


def test_apache_is_not_sent_past_what_the_index_lacks(open_store, clock):
    store = open_store(replace(SETTINGS, flush=replace(SETTINGS.flush, durable_interval=10.0)))
    began = milliseconds(clock.now())
    clock.advance(5.0)
    fill(store, 1, 110_000)
    for _ in range(4):
        store.tick()  # a round, without the index
    assert store.statistics().durable == store.statistics().log_end
    without = store._durability._current()

    clock.advance(5.0)
    fill(store, 1, 110_000)
    for _ in range(4):
        store.tick()

    assert without.logical_ms <= began
    assert store._durability._current().logical_ms == began + 10_000


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
    queues = store._queues.by_key
    files.refused = queues["T", 0].folder
    store.tick()  # a round begins
    written = queues["T", 1]
    store.tick()
    assert written.written == written.max_offset

    files.refused = None
    clock.advance(2.0)
    for _ in range(20):
        store.tick()
        clock.advance(2.0)
        store._durability.catch_up()

    assert store.statistics().durable == store.statistics().log_end
    assert {written.folder, written.folder.parent, written.folder.parent.parent} <= files.synced


def test_a_topic_that_is_deleted_during_a_round_does_not_count_in_it(open_store):
    """A start that finds fewer entries than it was told makes all queues anew."""
    store = open_store(SETTINGS)
    put(store, "kept", 0, bytes(900))
    fill(store, 1, 110_000)
    store.tick()  # a round begins
    target = store.statistics().log_end

    store.delete_topic("T")
    store._durability._advance_round(1000)  # writes the queues
    store._durability._advance_round(1000, wait=True)

    assert store.statistics().durable == target
    assert store._durability._entries == 1


def test_a_deletion_that_was_interrupted_is_carried_out_also_when_its_messages_are_gone(
    open_store, monkeypatch
):
    settings = replace(SMALL, retention=RetentionSettings(max_bytes=9000))
    store = open_store(settings)
    put(store, "deleted", 0, b"gone")
    store.write()

    def crash(_):
        raise RuntimeError("a crash")

    monkeypatch.setattr(store._queues, "delete_topic", crash)
    with pytest.raises(RuntimeError, match="a crash"):
        store.delete_topic("deleted")
    fill(store, 1, 40_000)
    while store.clean().log_files:
        pass
    assert store.max_offset("deleted", 0) == 1
    store.abandon()

    again = open_store(settings)

    assert again.statistics().log_start > 0
    assert again.max_offset("deleted", 0) == 0


def test_a_deletion_that_a_crash_interrupts_is_carried_out_at_the_next_start(
    open_store, monkeypatch
):
    store = open_store(SETTINGS)
    put(store, "kept", 0, b"kept")
    put(store, "T", 0, b"gone")
    store.write()
    store._durability.catch_up()
    store._durability.write_first_checkpoint()

    def crash(_):
        raise RuntimeError("a crash")

    monkeypatch.setattr(store._queues, "delete_topic", crash)
    with pytest.raises(RuntimeError, match="a crash"):
        store.delete_topic("T")
    store.abandon()
    again = open_store(SETTINGS)

    assert again.max_offset("T", 0) == 0
    assert again.max_offset("kept", 0) == 1
    put(again, "T", 0, b"new")
    again.write()
    assert again.max_offset("T", 0) == 1
