"""When a message is on the disk, who is told, and what a failing disk means."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from orbitmq.store.settings import FlushPolicy, FlushSettings, StoreFailed
from orbitmq.store.store import Store
from tests.support.store import SMALL, FailingFiles, QuickFiles, bodies, put, with_policy

if TYPE_CHECKING:
    from pathlib import Path


SYNC = with_policy(SMALL, FlushPolicy.SYNC)


class GatedFiles(QuickFiles):
    """A disk whose flushes wait until they are let through; it counts them."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.is_gated = False
        self.flushes = 0

    def sync(self, fd: int) -> None:
        if self.is_gated and threading.current_thread().name == "orbitmq-flusher":
            self.begun.release()
            assert self.gate.acquire(timeout=30)
            self.flushes += 1


def test_nothing_is_visible_before_it_is_on_the_disk(open_store):
    store = open_store(SYNC)
    announced: list[object] = []
    store.on_arrival(announced.extend)
    put(store, "T", 0, b"x")
    end = store.write()

    assert (store.max_offset("T", 0), announced) == (0, [])
    assert store.wait_flushed(end)
    assert store.max_offset("T", 0) == 1
    assert len(announced) == 1
    assert bodies(store, "T", 0) == [b"x"]


@pytest.mark.feature("N2")
def test_who_waits_is_answered_only_after_fdatasync_has_returned(tmp_path):
    disk = GatedFiles()
    store = Store(tmp_path / "store", SYNC, files=disk, background=True)
    disk.is_gated = True
    answers: list[object] = []
    put(store, "T", 0, b"x")
    store.when_flushed(store.write(), answers.append)

    assert disk.begun.acquire(timeout=30)
    store.settle()
    assert answers == []
    assert store.max_offset("T", 0) == 0

    disk.gate.release()
    assert store.wait_flushed(store.statistics().log_end, 30)
    assert answers == [None]
    assert store.max_offset("T", 0) == 1
    disk.is_gated = False
    store.close()


def test_what_comes_during_a_flush_shares_the_next_one(tmp_path):
    disk = GatedFiles()
    store = Store(tmp_path / "store", replace(SYNC, file_size=1 << 20), files=disk)
    disk.is_gated = True
    answered: list[int] = []
    put(store, "T", 0, b"first")
    store.when_flushed(store.write(), lambda error: answered.append(0))
    assert disk.begun.acquire(timeout=30)

    for number in range(1, 101):
        put(store, "T", 0, b"more")
        store.when_flushed(store.write(), lambda error, number=number: answered.append(number))  # type: ignore[misc]
    disk.gate.release()
    assert disk.begun.acquire(timeout=30)
    disk.gate.release()
    assert store.wait_flushed(store.statistics().log_end, 30)

    assert answered == list(range(101))
    assert disk.flushes == 2
    disk.is_gated = False
    store.close()


async def _answers_on_a_loop(root: Path) -> list[int]:
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    owner = threading.get_ident()
    answered: list[int] = []
    store = Store(root, SYNC, post=loop.call_soon_threadsafe)
    for number in range(20):
        put(store, "T", 0, b"x")

        def answer(error: StoreFailed | None, number: int = number) -> None:
            assert error is None
            assert threading.get_ident() == owner
            assert store.max_offset("T", 0) > number
            answered.append(number)
            if number == 19:
                done.set()

        store.when_flushed(store.write(), answer)
    await asyncio.wait_for(done.wait(), 30)
    store.close()
    return answered


def test_answers_come_in_the_owners_thread(tmp_path):
    assert asyncio.run(_answers_on_a_loop(tmp_path / "store")) == list(range(20))


def test_after_a_failed_flush_nobody_is_told_yes_and_nothing_more_is_taken(open_store):
    disk = FailingFiles()
    store = open_store(SYNC, files=disk)
    put(store, "T", 0, b"kept")
    store.wait_flushed(store.write())
    answers: list[StoreFailed | None] = []
    disk.fail("sync")
    put(store, "T", 0, b"doubtful")
    end = store.write()
    store.when_flushed(end, answers.append)

    with pytest.raises(StoreFailed):
        store.wait_flushed(end)
    disk.heal()

    assert len(answers) == 1
    assert isinstance(answers[0], StoreFailed)
    assert isinstance(answers[0].__cause__, OSError)
    with pytest.raises(StoreFailed):
        put(store, "T", 0, b"refused")
    with pytest.raises(StoreFailed):
        store.wait_flushed(end)
    assert bodies(store, "T", 0) == [b"kept"]
    assert "opened again" in store.statistics().refusal
    store.close()
    assert (store.root / "abort").exists()


def test_what_a_failed_flush_left_in_the_page_cache_is_written_again_at_the_next_start(open_store):
    disk = FailingFiles()
    store = open_store(SYNC, files=disk)
    put(store, "T", 0, b"doubtful")
    end = store.write()
    disk.fail("sync")
    with pytest.raises(StoreFailed):
        store.wait_flushed(end)
    disk.heal()
    store.close()
    calls: list[tuple[str, int]] = []
    disk.before = lambda call, size: calls.append((call, size))

    store = open_store(SYNC, files=disk)

    assert calls.index(("pwrite", end)) < calls.index(("sync", 0), calls.index(("pwrite", end)))
    assert bodies(store, "T", 0) == [b"doubtful"]


def test_a_failed_flush_of_a_queue_file_ends_writing_too(open_store, clock):
    disk = FailingFiles()
    store = open_store(files=disk)
    put(store, "T", 0, b"x")
    store.wait_flushed(store.write())
    disk.fail("sync")
    for _ in range(4):
        clock.advance(11)
        store.tick()
    disk.heal()

    with pytest.raises(StoreFailed):
        put(store, "T", 0, b"refused")
    assert bodies(store, "T", 0) == [b"x"]


class NamedSyncs(QuickFiles):
    """Notes which files are flushed."""

    def __init__(self) -> None:
        self.synced: list[str] = []
        self._names: dict[int, str] = {}

    def open(self, path: Path, *, create: bool = False) -> int:
        fd = super().open(path, create=create)
        self._names[fd] = path.name
        return fd

    def sync(self, fd: int) -> None:
        self.synced.append(self._names[fd])


def test_the_old_file_is_flushed_before_the_new_one(open_store):
    files = NamedSyncs()
    store = open_store(SYNC, files=files)
    put(store, "T", 0, bytes(5000))
    put(store, "T", 0, bytes(5000))
    end = store.write()
    made = len(files.synced)  # the new file itself, before anything was in it
    store.wait_flushed(end)

    assert files.synced[made:] == [f"{0:020d}", f"{8192:020d}"]


@pytest.mark.parametrize(
    ("written", "seconds", "is_flushed"), [(100, 1.0, False), (5000, 1.0, True), (100, 11.0, True)]
)
def test_an_asynchronous_store_flushes_much_soon_and_little_later(
    open_store, clock, written, seconds, is_flushed
):
    store = open_store(replace(SMALL, flush=FlushSettings(least_bytes=4096)))
    put(store, "T", 0, bytes(written))
    end = store.write()

    clock.advance(seconds)
    store.tick()

    assert (store.statistics().flushed == end) is is_flushed


def test_recovery_begins_where_a_round_of_flushing_ended(open_store, clock):
    store = open_store()
    for number in range(50):
        put(store, "T", number % 3, bytes(100))
    end = store.write()
    for _ in range(5):
        clock.advance(11)
        store.tick()
    put(store, "T", 0, b"later")
    store.write()
    store.abandon()

    store = open_store()

    assert store.recovery.used_hint
    assert (store.recovery.start, store.recovery.records) == (end, 1)
    assert store.max_offset("T", 0) == 18
