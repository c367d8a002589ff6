"""A disk that keeps, when power is lost, only what it was told to keep, and any part of the rest.

Written pages reach the disk in any order, or not at all, until the file is flushed; so does its
length. Names are something else than files: a name that was made, taken away or given to another
file since its folder was flushed may be as before or as now, each by itself (a rename is one step,
as every file system promises). The files themselves are real; `lose_power` makes a copy of what a
machine would find after the next start.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from orbitmq.store.files import DiskFiles

PAGE = 4096


@dataclass(eq=False, slots=True)
class _File:
    """One file, whatever it is called: what was written, and what of it is certainly there."""

    now: bytearray = field(default_factory=bytearray)
    kept: bytearray = field(default_factory=bytearray)
    dirty: set[int] = field(default_factory=set)
    is_folder: bool = False

    def write(self, data: bytes | bytearray | memoryview, at: int) -> None:
        end = at + len(data)
        if len(self.now) < end:
            self.now.extend(bytes(end - len(self.now)))
        self.now[at:end] = data
        self.touch(at, end)

    def resize(self, size: int) -> None:
        before = len(self.now)
        if size < before:
            del self.now[size:]
        else:
            self.now.extend(bytes(size - before))
        self.touch(min(before, size), max(before, size))

    def touch(self, begin: int, end: int) -> None:
        self.dirty.update(range(begin // PAGE, -(-end // PAGE)))

    def sync(self) -> None:
        size = len(self.now)
        if len(self.kept) != size:
            self.kept = self.kept[:size].ljust(size, b"\0")
        for page in self.dirty:
            piece = self.now[page * PAGE : (page + 1) * PAGE]
            self.kept[page * PAGE : page * PAGE + len(piece)] = piece
        self.dirty.clear()

    def after_power_loss(self, dice: random.Random) -> bytes:
        now, kept = self.now, self.kept
        size = len(now) if len(now) == len(kept) or dice.random() < 0.5 else len(kept)
        content = kept[:size].ljust(size, b"\0")
        share = dice.choice([0.0, 0.3, 0.7, 1.0])
        for page in sorted(self.dirty):
            if dice.random() < share:
                piece = now[page * PAGE : (page + 1) * PAGE]
                content[page * PAGE : page * PAGE + len(piece)] = piece
        return bytes(content[:size])


@dataclass(frozen=True, slots=True)
class _Renaming:
    """One change of names: `name` is of `file` now, and `before` is no longer."""

    name: Path | None
    file: _File
    before: Path | None = None

    def apply(self, names: dict[Path, _File]) -> None:
        if self.before is not None and names.get(self.before) is self.file:
            del names[self.before]
        if self.name is not None:
            names[self.name] = self.file


class ForgetfulFiles(DiskFiles):
    """Remembers for every file what is certainly on the disk, and which pages may be."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: dict[int, _File] = {}
        self._names: dict[Path, _File] = {}
        for path in sorted(root.rglob("*")):
            content = b"" if path.is_dir() else path.read_bytes()
            self._names[path] = _File(
                bytearray(content), bytearray(content), is_folder=path.is_dir()
            )
        #: The names that are certainly there, and what was done to them since.
        self._durable = dict(self._names)
        self._changes: list[_Renaming] = []
        #: How often something was flushed.
        self.syncs = 0

    # ---- what the store does

    def open(self, path: Path, *, create: bool = False) -> int:
        fd = super().open(path, create=create)
        self._open[fd] = self._file(path)
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        del self._open[fd]

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> int:
        written = super().pwrite(fd, data, at)
        self._open[fd].write(memoryview(data)[:written], at)
        return written

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self._open[fd].resize(size)

    def allocate(self, fd: int, at: int, size: int) -> None:
        pass

    def write_bytes(self, path: Path, data: bytes) -> None:
        super().write_bytes(path, data)
        file = self._file(path)
        file.resize(0)
        file.write(data, 0)

    def sync(self, fd: int) -> None:
        self.syncs += 1
        self._open[fd].sync()

    def sync_folder(self, folder: Path) -> None:
        self.syncs += 1
        left: list[_Renaming] = []
        for change in self._changes:
            place = change.before if change.name is None else change.name
            if place is not None and place.parent == folder:
                change.apply(self._durable)
            else:
                left.append(change)
        self._changes = left

    def make_folder(self, folder: Path) -> None:
        super().make_folder(folder)
        for path in (*reversed(folder.parents), folder):
            if path.is_relative_to(self._root) and path != self._root and path not in self._names:
                self._change(_Renaming(path, _File(is_folder=True)))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._change(_Renaming(target, self._names[source], source))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if path in self._names:
            self._change(_Renaming(None, self._names[path], path))

    def remove_folder(self, folder: Path) -> None:
        super().remove_folder(folder)
        for path in sorted(self._names, reverse=True):
            if path == folder or folder in path.parents:
                self._change(_Renaming(None, self._names[path], path))

    def _file(self, path: Path) -> _File:
        if path not in self._names:
            self._change(_Renaming(path, _File()))
        return self._names[path]

    def _change(self, change: _Renaming) -> None:
        self._changes.append(change)
        change.apply(self._names)

    # ---- what happens to it

    def lose_power(self, target: Path, dice: random.Random) -> None:
        """Make in `target` what is left."""
        names = dict(self._durable)
        if dice.random() < 0.5:
            # A journal: changes of names come to the disk in their order.
            survived = self._changes[: dice.randint(0, len(self._changes))]
        else:
            survived = [change for change in self._changes if dice.random() < 0.5]
        for change in survived:
            change.apply(names)
        target.mkdir(parents=True)
        for path in sorted(names):
            there = target / path.relative_to(self._root)
            if not there.parent.is_dir():
                continue  # the folder is gone, and everything in it
            if names[path].is_folder:
                there.mkdir()
            else:
                there.write_bytes(names[path].after_power_loss(dice))

    def lose_process(self, target: Path) -> None:
        """Make in `target` what the death of the process leaves: all that was written."""
        target.mkdir(parents=True)
        for path in sorted(self._names):
            there = target / path.relative_to(self._root)
            if self._names[path].is_folder:
                there.mkdir()
            else:
                there.write_bytes(self._names[path].now)
