"""What is deleted, and what a full disk means."""

from __future__ import annotations

import os
import resource
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from orbitmq.errors import SettingError
from orbitmq.store.settings import DiskFull, RetentionSettings
from tests.support.store import NOW, SMALL, FailingFiles, bodies, lookup, put, with_retention

if TYPE_CHECKING:
    from pathlib import Path

    from orbitmq.store.store import Store


HOUR = 3600.0


def fill(store: Store, count: int = 200) -> None:
    for number in range(count):
        put(store, "T", number % 2, b"%06d" % number + bytes(150), {"KEYS": f"k{number}"})
    store.write()
    store.wait_flushed(store.statistics().log_end)
    set_age(store, [0.0] * 100)


def log_files(store: Store) -> list[Path]:
    return sorted(path for path in (store.root / "commitlog").iterdir())


def set_age(store: Store, ages: list[float]) -> None:
    """Let the files of the log have been written so many hours ago, from the oldest on."""
    for path, hours in zip(log_files(store), ages, strict=False):
        os.utime(path, (NOW - hours * HOUR, NOW - hours * HOUR))


def any_hour(**changes: object) -> RetentionSettings:
    return replace(
        RetentionSettings(delete_hours=tuple(range(24)), full_ratio=1.0, forced_ratio=1.0),
        **changes,  # type: ignore[arg-type]
    )


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_files_older_than_three_days_are_deleted_from_the_oldest_on(open_store):
    store = open_store(with_retention(SMALL, any_hour()))
    fill(store)
    set_age(store, [100, 73, 71, 200])

    report = store.clean()

    assert report.log_files == 2
    assert log_files(store)[0].name == f"{2 * 8192:020d}"
    for queue_id in (0, 1):
        lowest = store.min_offset("T", queue_id)
        assert lowest > 0
        kept = bodies(store, "T", queue_id)
        assert len(kept) == 100 - lowest
        assert int(kept[0][:6]) == lowest * 2 + queue_id


def test_queue_and_index_files_follow(open_store):
    store = open_store(with_retention(SMALL, any_hour()))
    for _ in range(8):
        fill(store)
        store.tick()
        lookup(store, "T", "k1")
    files_before = len(list((store.root / "consumequeue/T/0").iterdir()))
    index_before = len(list((store.root / "index").iterdir()))
    set_age(store, [100] * (len(log_files(store)) - 1))

    reports = [store.clean() for _ in range(10)]

    assert sum(report.queue_files for report in reports) > 0
    assert len(list((store.root / "consumequeue/T/0").iterdir())) < files_before
    assert sum(report.index_files for report in reports) > 0
    assert len(list((store.root / "index").iterdir())) < index_before
    assert len(log_files(store)) <= 2
    assert bodies(store, "T", 0)
    assert lookup(store, "T", "k0") == lookup(store, "T", "k0")
    lowest = store.min_offset("T", 0)
    store.close()
    after = open_store(with_retention(SMALL, any_hour()))
    assert after.min_offset("T", 0) == lowest
    assert bodies(after, "T", 0)


def test_nothing_goes_that_the_queues_do_not_have_on_the_disk(open_store):
    settings = with_retention(SMALL, any_hour(max_bytes=16384))
    store = open_store(settings)
    for number in range(15):
        put(store, "quiet", 0, b"%d" % number)
    fill(store, 300)
    assert store.statistics().durable == 0
    while store.clean().log_files:
        pass
    put(store, "quiet", 0, b"the last")
    store.wait_flushed(store.write())
    store.clean()
    assert 0 < store.statistics().log_start <= store.statistics().durable
    before = store.queues()
    store.abandon()

    store = open_store(settings)

    assert store.recovery.damage == ()
    assert sorted(store.queues(), key=repr) == sorted(before, key=repr)
    assert bodies(store, "quiet", 0) == [b"the last"]
    assert put(store, "quiet", 0, b"next")[1] == 16


def test_nothing_goes_while_queues_cannot_be_flushed(open_store):
    disk = FailingFiles()
    store = open_store(with_retention(SMALL, any_hour(max_bytes=16384)), files=disk)
    fill(store, 300)
    disk.fail("sync")

    assert store.clean().log_files == 0

    disk.heal()
    assert store.statistics().log_start == 0
    assert "opened again" in store.statistics().refusal


@pytest.mark.parametrize(("hour", "deleted"), [(3, 0), (4, 2), (5, 0)])
def test_expired_files_go_in_their_hour(open_store, clock, hour, deleted):
    disk = FailingFiles()
    disk.ratio = 0.5
    store = open_store(files=disk)
    fill(store)
    set_age(store, [100, 100])
    clock.time = NOW - NOW % 86400 + hour * HOUR + 60

    assert store.clean().log_files == deleted


@pytest.mark.parametrize(
    ("ratio", "deleted", "is_full"),
    [(0.74, 0, False), (0.76, 1, False), (0.86, 10, False), (0.91, 10, True)],
)
def test_a_scarce_disk_deletes_sooner(open_store, clock, ratio, deleted, is_full):
    disk = FailingFiles()
    disk.ratio = ratio
    store = open_store(files=disk)
    fill(store)
    files = len(log_files(store))
    set_age(store, [100])
    clock.time = NOW - NOW % 86400 + 12 * HOUR

    report = store.clean()

    assert (report.log_files, report.is_full) == (min(deleted, files - 1), is_full)


@pytest.mark.feature("N3")
def test_old_and_surplus_files_go_and_a_full_disk_refuses_writes_but_not_reads(open_store):
    """Retention by time, retention by size, and a full disk, in one life of a store."""
    disk = FailingFiles()
    disk.ratio = 0.5
    store = open_store(
        with_retention(SMALL, any_hour(max_bytes=20_000, forced_ratio=0.9, full_ratio=0.9)),
        files=disk,
    )
    fill(store)
    size_before = store.statistics().log_end - store.statistics().log_start

    store.clean()
    by_size = store.statistics()
    assert size_before > 20_000 >= by_size.log_end - by_size.log_start
    set_age(store, [73])
    assert store.clean().log_files == 1

    disk.ratio = 0.95
    store.clean()
    with pytest.raises(DiskFull, match="95 percent full"):
        put(store, "T", 0, b"refused")
    assert bodies(store, "T", 0)
    assert "full" in store.statistics().refusal

    disk.ratio = 0.5
    store.clean()
    put(store, "T", 0, b"accepted")
    store.write()
    assert bodies(store, "T", 0)[-1] == b"accepted"


def test_a_real_limit_of_the_file_size_is_a_full_disk(open_store):
    store = open_store(replace(SMALL, file_size=1 << 20, preallocate_step=0))
    put(store, "T", 0, b"before")
    store.write()
    # The kernel itself refuses what goes beyond, after taking a part of it.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        put(store, "T", 0, bytes(3000))
        store.write()
        put(store, "T", 0, bytes(3000))
        with pytest.raises(DiskFull):
            store.write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)

    assert bodies(store, "T", 0) == [b"before", bytes(3000)]


def test_a_reader_can_finish_with_a_file_that_was_deleted(open_store):
    store = open_store(with_retention(SMALL, any_hour(keep=0.0)))
    fill(store)
    result = store.read("T", 0, 0)
    before = [bytes(piece) for piece in result.pieces]

    store.clean()

    assert store.min_offset("T", 0) > 0
    assert [bytes(piece) for piece in result.pieces] == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"expired_ratio": 0.95}, "expired_ratio"),
        ({"full_ratio": 1.5}, "full_ratio"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"delete_hours": (24,)}, "delete_hours"),
        ({"files_per_run": 0}, "files_per_run"),
    ],
)
def test_a_wrong_setting_is_named(changes, named):
    with pytest.raises(SettingError, match=named):
        replace(RetentionSettings(), **changes)
