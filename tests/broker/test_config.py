"""Configuration files: at every instant a complete document can be read."""

from __future__ import annotations

import errno
import itertools
import logging
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from orbitmq.broker.config import ConfigFile, SavedTable
from orbitmq.broker.errors import ConfigNotSaved, ConfigUnreadable
from orbitmq.clock import SystemClock
from orbitmq.store.files import DiskFiles
from orbitmq.store.settings import StoreFailed
from orbitmq.store.store import Store
from orbitmq.wire.bodies import ConsumerOffsets
from tests.support.broker import until
from tests.support.powerloss import ForgetfulFiles

NAME = "consumerOffset.json"


def progress(offset: int) -> ConsumerOffsets:
    # Long enough that half of it is certainly not a document.
    return ConsumerOffsets(offset_table={f"T{n}@g": {0: offset} for n in range(5)})


def opened(root: Path, disk: DiskFiles | None = None) -> ConfigFile[ConsumerOffsets]:
    return ConfigFile(root / "config" / NAME, ConsumerOffsets, disk=disk)


def offset_in(root: Path) -> int | None:
    value = opened(root).load()
    return None if value is None else value.offset_table["T0@g"][0]


class Stopped(Exception):
    """The process ends here."""


class StagedFiles(ForgetfulFiles):
    """Counts the steps that change something, and raises `error` before one of them."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.error: Exception | None = None
        self.kind = ""  #: of the steps that are counted; empty: all
        self.left = 0  #: steps before the one that fails

    def fail(self, error: Exception, left: int, kind: str = "") -> None:
        self.error, self.left, self.kind = error, left, kind

    def _before(self, kind: str) -> None:
        if self.error is not None and self.kind in ("", kind):
            self.left -= 1
            if self.left < 0:
                raise self.error

    def open(self, path: Path, *, create: bool = False) -> int:
        self._before("open")
        return super().open(path, create=create)

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> int:
        self._before("write")
        return super().pwrite(fd, data, at)

    def truncate(self, fd: int, size: int) -> None:
        self._before("truncate")
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._before("sync")
        super().sync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._before("rename")
        super().rename(source, target)

    def sync_folder(self, folder: Path) -> None:
        self._before("sync folder")
        super().sync_folder(folder)


@pytest.fixture
def root(tmp_path):
    """A folder of data, beside which tests put what is left of it."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.feature("H4")
@pytest.mark.parametrize(
    ("history", "is_folder_there"), [(0, False), (0, True), (1, False), (2, False), (3, False)]
)
def test_a_complete_document_remains_wherever_the_process_or_the_machine_stops(
    tmp_path, history, is_folder_there
):
    """And what is left can be gone on with. The last step is one that is not reached any more."""
    before = None if history == 0 else history - 1
    is_done = False
    for step in itertools.count():
        root = tmp_path / f"data-{step}"
        root.mkdir()
        disk = StagedFiles(root)
        if is_folder_there:  # by a life that ended before it had saved anything
            disk.make_folder(root / "config")
        file = opened(root, disk)
        for offset in range(history):
            file.save(progress(offset))
        disk.fail(Stopped(), step)
        try:
            file.save(progress(history))
            is_done = True
        except Stopped:
            pass
        allowed = {history} if is_done else {before, history}
        for seed in range(12):
            left = tmp_path / f"left-{step}-{seed}"
            if seed:
                disk.lose_power(left, random.Random(seed))
            else:
                disk.lose_process(left)

            assert offset_in(left) in allowed
            opened(left).save(progress(99))
            assert offset_in(left) == 99
        if is_done:
            break

    assert step >= 6


@pytest.mark.parametrize(
    ("failing", "nth"),
    [
        *(("open", 0), ("write", 0), ("truncate", 0), ("sync", 0), ("sync folder", 0)),
        *(("rename", 0), ("rename", 1)),
    ],
)
def test_a_failing_disk_is_reported_and_costs_nothing_that_was_saved(root, failing, nth):
    disk = StagedFiles(root)
    file = opened(root, disk)
    file.save(progress(1))

    disk.fail(OSError(errno.ENOSPC, "no space left"), nth, failing)
    with pytest.raises(ConfigNotSaved, match="no space left") as refusal:
        file.save(progress(2))
    disk.error = None

    assert refusal.value.retriable
    assert offset_in(root) in (1, 2)
    file.save(progress(3))
    assert offset_in(root) == 3
    (root / "config" / NAME).unlink()
    assert offset_in(root) in (1, 2)


class BrokenDisk(DiskFiles):
    """Has the file, and cannot give it out, or cannot rename it."""

    def __init__(self, error: OSError, *, can_read: bool) -> None:
        self._error = error
        self._can_read = can_read

    def read_bytes(self, path: Path) -> bytes:
        if self._can_read:
            return super().read_bytes(path)
        raise self._error

    def rename(self, source: Path, target: Path) -> None:
        raise self._error


@pytest.mark.parametrize("can_read", [False, True], ids=["unreadable", "damaged for good"])
def test_a_file_that_can_neither_be_used_nor_set_aside_stops_the_start(root, can_read):
    (root / "config").mkdir()
    (root / "config" / NAME).write_bytes(b"{torn")
    file = opened(root, BrokenDisk(OSError(errno.EIO, "input/output error"), can_read=can_read))

    with pytest.raises(ConfigUnreadable, match="input/output error"):
        file.load()
    with pytest.raises(ConfigUnreadable):
        file.save(progress(1))

    assert [path.name for path in (root / "config").iterdir()] == [NAME]


@pytest.mark.feature("H4")
@pytest.mark.parametrize(
    "torn", [b"", b"{", b'{"offsetTable":{"T@g":{0:', b"\xff\xfe", b"[]", b"null"]
)
def test_a_torn_file_falls_back_to_the_backup_and_is_kept(torn, root, caplog):
    file = opened(root)
    file.save(progress(1))
    file.save(progress(2))
    file.path.write_bytes(torn)

    with caplog.at_level(logging.WARNING, logger="orbitmq.broker"):
        loaded = opened(root).load()

    assert loaded == progress(1)
    assert file.path.with_name(f"{NAME}.damaged-1").read_bytes() == torn
    assert "damaged" in caplog.text
    assert "taken from its backup" in caplog.text


def test_a_torn_file_never_becomes_the_backup(root):
    file = opened(root)
    file.save(progress(1))
    file.save(progress(2))
    file.path.write_bytes(b"{torn")

    opened(root).save(progress(3))
    file.path.unlink()

    assert offset_in(root) == 1


class Log:
    """As much of a store as a table that follows it looks at."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[StoreFailed | None], None]] = []
        self.can_flush = True
        self.waits = 0

    def statistics(self) -> SimpleNamespace:
        return SimpleNamespace(log_end=100)

    def when_flushed(self, upto: int, call: Callable[[StoreFailed | None], None]) -> None:
        self.waiting.append(call)

    def wait_flushed(self, upto: int, timeout: float) -> bool:
        self.waits += 1
        return self.can_flush

    def flush(self, failure: StoreFailed | None = None) -> None:
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call(failure)


async def test_progress_is_written_after_the_flush_and_says_what_was_true_before_it(root):
    log, now = Log(), 0
    table = SavedTable(
        opened(root),
        revision=lambda: now,
        document=lambda: progress(now),
        clock=SystemClock(),
        store=cast(Store, log),
    )
    await table.close()
    waits_unchanged = log.waits
    now = 1
    table.save_soon()
    log.flush(StoreFailed("the disk is gone"))
    table.save_soon()
    now = 2
    before = offset_in(root)

    log.flush()
    await until(lambda: offset_in(root) is not None)
    after = offset_in(root)
    log.can_flush = False
    await table.close()
    unflushed = offset_in(root)
    log.can_flush = True
    await table.close()

    assert (before, after, unflushed, offset_in(root)) == (None, 1, 1, 2)
    assert waits_unchanged == 0


async def test_progress_that_follows_the_log_and_cannot_be_saved_at_the_stop_is_logged(
    root, caplog
):
    now = 0
    table = SavedTable(
        opened(root, BrokenDisk(OSError(errno.ENOSPC, "no space left"), can_read=True)),
        revision=lambda: now,
        document=lambda: progress(now),
        clock=SystemClock(),
        store=cast(Store, Log()),
    )
    now = 1

    await table.close()

    assert "progress was not saved at the stop" in caplog.text
