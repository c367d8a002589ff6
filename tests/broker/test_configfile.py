"""Configuration files: at every instant a complete document can be read."""

from __future__ import annotations

import errno
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orbitmq.broker.configfile import ConfigFile, Origin
from orbitmq.broker.errors import ConfigNotSaved, ConfigUnreadable
from orbitmq.store.files import DiskFiles
from orbitmq.wire.bodies import ConsumerOffsets
from tests.support.delivery import QuickConfigDisk
from tests.support.powerloss import ForgetfulFiles

FOLDER = Path("/config")
PATH = FOLDER / "consumerOffset.json"


def progress(offset: int) -> ConsumerOffsets:
    # Long enough that half of it is certainly not a document.
    return ConsumerOffsets(offset_table={f"T{n}@g": {0: offset} for n in range(5)})


# A file system in memory that remembers what is on the disk and what only the kernel knows.


class Inode:
    """The bytes of a file, and what of them would survive a power cut."""

    def __init__(self) -> None:
        self.data = bytearray()
        #: Bytes that a cut may leave: one of these.
        self.possible: list[bytes] = [b""]

    def changed(self) -> None:
        half = bytes(self.data[: len(self.data) // 2])
        self.possible += [half, bytes(self.data)]

    def synced(self) -> None:
        self.possible = [bytes(self.data)]


class MemoryDisk(DiskFiles):
    """Calls `before_each` before every step that changes something."""

    def __init__(self) -> None:
        self.names_now: dict[Path, Inode] = {}
        self.names_synced: dict[Path, Inode] = {}
        self.unsynced: list[Callable[[dict[Path, Inode]], None]] = []
        self.before_each: Callable[[str], None] = lambda _: None
        self._open: dict[int, Inode] = {}

    def open(self, path: Path, *, create: bool = False) -> int:
        self.before_each("open")
        if path not in self.names_now:
            if not create:
                raise FileNotFoundError(path)
            inode = Inode()
            self._rename_later(lambda names: names.__setitem__(path, inode))
        fd = len(self._open) + 3
        self._open[fd] = self.names_now[path]
        return fd

    def close(self, fd: int) -> None:
        self._open[fd] = Inode()

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> int:
        self.before_each("write")
        inode = self._open[fd]
        inode.data[at : at + len(data)] = data
        inode.changed()
        return len(data)

    def truncate(self, fd: int, size: int) -> None:
        self.before_each("truncate")
        del self._open[fd].data[size:]
        self._open[fd].changed()

    def sync(self, fd: int) -> None:
        self.before_each("sync")
        self._open[fd].synced()

    def rename(self, source: Path, target: Path) -> None:
        self.before_each("rename")
        inode = self.names_now[source]

        def apply(names: dict[Path, Inode]) -> None:
            if names.get(source) is inode:
                del names[source]
            names[target] = inode

        self._rename_later(apply)

    def sync_folder(self, folder: Path) -> None:
        self.before_each("sync folder")
        self.names_synced = dict(self.names_now)
        self.unsynced.clear()

    def make_folder(self, folder: Path) -> None:
        pass

    def exists(self, path: Path) -> bool:
        return path in self.names_now

    def names(self, folder: Path) -> list[str]:
        return sorted(path.name for path in self.names_now)

    def read_bytes(self, path: Path) -> bytes:
        if path not in self.names_now:
            raise FileNotFoundError(path)
        return bytes(self.names_now[path].data)

    def _rename_later(self, step: Callable[[dict[Path, Inode]], None]) -> None:
        step(self.names_now)
        self.unsynced.append(step)

    def after_kill(self) -> MemoryDisk:
        """What the next process sees when this one is killed: all that the kernel knows."""
        return _disk_with({path: bytes(inode.data) for path, inode in self.names_now.items()})

    def after_power_cut(self) -> Iterator[MemoryDisk]:
        """Everything that may be there after a power cut: any of the unsynced names and bytes."""
        for kept in itertools.product((False, True), repeat=len(self.unsynced)):
            names = dict(self.names_synced)
            for step, is_kept in zip(self.unsynced, kept, strict=True):
                if is_kept:
                    step(names)
            choices = [inode.possible for inode in names.values()]
            for contents in itertools.product(*choices):
                yield _disk_with(dict(zip(names, contents, strict=True)))


def _disk_with(files: dict[Path, bytes]) -> MemoryDisk:
    disk = MemoryDisk()
    for path, data in files.items():
        inode = Inode()
        inode.data += data
        inode.synced()
        disk.names_now[path] = inode
    disk.names_synced = dict(disk.names_now)
    return disk


def opened(disk: DiskFiles, path: Path = PATH) -> ConfigFile[ConsumerOffsets]:
    return ConfigFile(path, ConsumerOffsets, disk=disk)


class Stopped(Exception):
    """The process ends here."""


def saved_until(step: int, history: int) -> tuple[MemoryDisk, bool]:
    """A disk on which `history` documents were saved and one more until the given step."""
    disk = MemoryDisk()
    file = opened(disk)
    for offset in range(history):
        file.save(progress(offset))
    steps = itertools.count()

    def stop_at(_: str) -> None:
        if next(steps) == step:
            raise Stopped

    disk.before_each = stop_at
    try:
        file.save(progress(history))
    except Stopped:
        return disk, False
    return disk, True


def offset_in(disk: MemoryDisk) -> int | None:
    value = opened(disk).load().value
    return None if value is None else value.offset_table["T0@g"][0]


@pytest.mark.feature("H4")
@pytest.mark.parametrize("history", [0, 1, 2, 3])
def test_a_complete_document_remains_wherever_the_process_or_the_machine_stops(history):
    before = None if history == 0 else history - 1
    looked_at = 0
    for step in itertools.count():
        disk, is_done = saved_until(step, history)
        allowed = {history} if is_done else {before, history}

        assert offset_in(disk.after_kill()) in allowed
        for left in disk.after_power_cut():
            assert offset_in(left) in allowed
            looked_at += 1
        if is_done:
            break

    assert step >= 6
    assert looked_at > 10


@pytest.mark.parametrize("is_made_before", [False, True])
def test_the_folder_that_a_document_is_saved_in_survives_as_well(tmp_path, is_made_before):
    root = tmp_path / "data"
    root.mkdir()
    disk = ForgetfulFiles(root)
    if is_made_before:  # by a life that ended before it had saved anything
        disk.make_folder(root / "config")

    ConfigFile(root / "config" / PATH.name, ConsumerOffsets, disk=disk).save(progress(7))

    for seed in range(8):
        left = tmp_path / f"left-{seed}"
        disk.lose_power(left, random.Random(seed))
        loaded = ConfigFile(left / "config" / PATH.name, ConsumerOffsets).load()
        assert loaded.value == progress(7)


class ClosedParent(QuickConfigDisk):
    """A disk where the folder above that of the configuration cannot be opened."""

    def __init__(self, folder: Path) -> None:
        self._above = folder.parent
        self.attempts = 0

    def sync_folder(self, folder: Path) -> None:
        if folder == self._above:
            self.attempts += 1
            raise PermissionError(errno.EACCES, "Permission denied")


def test_a_folder_above_that_cannot_be_opened_is_told_once_and_hinders_no_save(tmp_path, caplog):
    path = tmp_path / "config" / PATH.name
    disk = ClosedParent(path.parent)
    file = opened(disk, path)

    for offset in range(3):
        file.save(progress(offset))

    assert opened(disk, path).load().value == progress(2)
    assert (file.failures, file.problem, disk.attempts) == (0, None, 1)
    assert len([line for line in caplog.messages if "Permission denied" in line]) == 1


@pytest.mark.parametrize("history", [1, 2])
def test_saving_goes_on_from_every_state_that_a_stop_can_leave(history):
    for step in itertools.count():
        stopped, is_done = saved_until(step, history)
        for left in [stopped.after_kill(), *stopped.after_power_cut()]:
            opened(left).save(progress(99))

            assert offset_in(left.after_kill()) == 99
            assert all(offset_in(cut) == 99 for cut in left.after_power_cut())
        if is_done:
            break


@pytest.mark.parametrize("failing", ["open", "write", "truncate", "sync", "rename", "sync folder"])
def test_a_failing_disk_is_reported_and_costs_nothing_that_was_saved(failing):
    disk = MemoryDisk()
    file = opened(disk)
    file.save(progress(1))

    def fail(step):
        if step == failing:
            raise OSError(errno.ENOSPC, "no space left")

    disk.before_each = fail
    with pytest.raises(ConfigNotSaved, match="no space left") as refusal:
        file.save(progress(2))
    disk.before_each = lambda _: None

    assert refusal.value.retriable
    assert offset_in(disk) in (1, 2)
    file.save(progress(3))
    assert offset_in(disk) == 3


def test_a_second_rename_that_fails_leaves_the_backup_and_the_next_save_keeps_it():
    disk = MemoryDisk()
    file = opened(disk)
    file.save(progress(1))
    renames = itertools.count()

    def fail_second(step):
        if step == "rename" and next(renames) == 1:
            raise OSError(errno.EIO, "input/output error")

    disk.before_each = fail_second
    with pytest.raises(ConfigNotSaved):
        file.save(progress(2))
    disk.before_each = lambda _: None

    assert opened(disk).load().origin is Origin.BACKUP
    assert offset_in(disk) == 1
    file.save(progress(3))
    assert offset_in(disk) == 3
    del disk.names_now[PATH]
    assert offset_in(disk) == 1


class UnreadableDisk(MemoryDisk):
    """Has the file, and cannot give it out."""

    def read_bytes(self, path: Path) -> bytes:
        raise OSError(errno.EIO, "input/output error")


def test_a_file_that_the_disk_does_not_give_out_is_not_taken_for_a_missing_one():
    disk = UnreadableDisk()

    with pytest.raises(ConfigUnreadable, match="input/output error"):
        opened(disk).load()
    with pytest.raises(ConfigUnreadable):
        opened(disk).save(progress(1))

    assert disk.names_now == {}


def test_a_damaged_file_that_cannot_be_set_aside_stops_the_start():
    disk = _disk_with({PATH: b"{torn"})

    def fail(step):
        raise OSError(errno.EROFS, "read-only file system")

    disk.before_each = fail

    with pytest.raises(ConfigUnreadable, match="read-only"):
        opened(disk).load()


# On a real disk.


def test_the_document_before_is_the_backup(tmp_path):
    path = tmp_path / "config" / "consumerOffset.json"
    file = opened(DiskFiles(), path)

    file.save(progress(1))
    file.save(progress(2))

    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name, path.name + ".bak"]
    assert file.load().value == progress(2)
    path.unlink()
    assert file.load().value == progress(1)


def test_nothing_there_is_no_error(tmp_path):
    loaded = opened(DiskFiles(), tmp_path / "none" / "topics.json").load()

    assert loaded.value is None
    assert loaded.origin is Origin.NOWHERE
    assert loaded.set_aside == ()


@pytest.mark.feature("H4")
@pytest.mark.parametrize(
    "torn", [b"", b"{", b'{"offsetTable":{"T@g":{0:', b"\xff\xfe", b"[]", b"null"]
)
def test_a_torn_file_falls_back_to_the_backup_and_is_kept(torn, tmp_path, caplog):
    path = tmp_path / "consumerOffset.json"
    file = opened(DiskFiles(), path)
    file.save(progress(1))
    file.save(progress(2))
    path.write_bytes(torn)

    with caplog.at_level(logging.WARNING, logger="orbitmq.broker"):
        loaded = opened(DiskFiles(), path).load()

    assert loaded.value == progress(1)
    assert loaded.origin is Origin.BACKUP
    assert [aside.read_bytes() for aside in loaded.set_aside] == [torn]
    assert "damaged" in caplog.text


def test_a_torn_file_never_becomes_the_backup(tmp_path):
    path = tmp_path / "consumerOffset.json"
    first = opened(DiskFiles(), path)
    first.save(progress(1))
    first.save(progress(2))
    path.write_bytes(b"{torn")

    opened(DiskFiles(), path).save(progress(3))
    path.unlink()

    assert opened(DiskFiles(), path).load().value == progress(1)


def test_every_damaged_file_is_kept_under_its_own_name(tmp_path):
    path = tmp_path / "consumerOffset.json"
    for text in (b"one", b"two"):
        path.write_bytes(text)
        path.with_name(path.name + ".bak").write_bytes(b"bak of " + text)
        assert opened(DiskFiles(), path).load().value is None

    kept = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    assert kept == {
        "consumerOffset.json.damaged-1": b"one",
        "consumerOffset.json.damaged-2": b"two",
        "consumerOffset.json.bak.damaged-1": b"bak of one",
        "consumerOffset.json.bak.damaged-2": b"bak of two",
    }


def test_a_shorter_document_replaces_a_longer_one_that_was_cut_short(tmp_path):
    path = tmp_path / "consumerOffset.json"
    path.with_name(path.name + ".tmp").write_bytes(b"x" * 10_000)

    opened(DiskFiles(), path).save(progress(1))

    assert opened(DiskFiles(), path).load().value == progress(1)
