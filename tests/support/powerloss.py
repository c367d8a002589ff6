"""A disk that keeps, when power is lost, only what it was told to keep, and any part of the rest.

Written pages reach the disk in any order, or not at all, until the file is flushed; names in a
folder come and go until the folder is. The files themselves are real; `lose_power` makes a copy
of what a machine would find after the next start.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from orbitmq.store.files import DiskFiles

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4096


class ForgetfulFiles(DiskFiles):
    """Remembers for every file what is certainly on the disk, and which pages may be."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._paths: dict[int, Path] = {}
        self._kept: dict[Path, bytes] = {
            path: path.read_bytes() for path in root.rglob("*") if path.is_file()
        }
        self._names: set[Path] = set(root.rglob("*"))
        self._dirty: dict[Path, set[int]] = {}

    # ---- what the store does

    def open(self, path: Path, *, create: bool = False) -> int:
        fd = super().open(path, create=create)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        del self._paths[fd]

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> int:
        written = super().pwrite(fd, data, at)
        self._touch(self._paths[fd], at, at + written)
        return written

    def truncate(self, fd: int, size: int) -> None:
        before = self.size(fd)
        super().truncate(fd, size)
        self._touch(self._paths[fd], min(before, size), max(before, size))

    def allocate(self, fd: int, at: int, size: int) -> None:
        pass

    def write_bytes(self, path: Path, data: bytes) -> None:
        super().write_bytes(path, data)
        self._touch(path, 0, len(data))

    def sync(self, fd: int) -> None:
        path = self._paths[fd]
        self._kept[path] = path.read_bytes()
        self._dirty.pop(path, None)

    def sync_folder(self, folder: Path) -> None:
        now = set(folder.iterdir())
        self._names = {name for name in self._names if name.parent != folder} | now

    def _touch(self, path: Path, begin: int, end: int) -> None:
        pages = range(begin // PAGE, -(-end // PAGE))
        self._dirty.setdefault(path, set()).update(pages)

    # ---- what happens to it

    def lose_power(self, target: Path, dice: random.Random) -> None:
        """Make in `target` what is left."""
        target.mkdir(parents=True)
        self._copy(self._root, target, dice)

    def _copy(self, folder: Path, target: Path, dice: random.Random) -> None:
        present = set(folder.iterdir()) if folder.exists() else set()
        durable = {name for name in self._names if name.parent == folder}
        for path in sorted(present | durable):
            is_settled = path in present and path in durable
            if not is_settled and dice.random() < 0.5:
                continue
            if path.is_dir():
                (target / path.name).mkdir()
                self._copy(path, target / path.name, dice)
            elif path in present or path in self._kept:
                (target / path.name).write_bytes(self._content(path, dice))

    def _content(self, path: Path, dice: random.Random) -> bytes:
        kept = self._kept.get(path, b"")
        if not path.exists():
            return kept
        now = path.read_bytes()
        size = len(now) if len(now) == len(kept) or dice.random() < 0.5 else len(kept)
        content = bytearray(kept[:size].ljust(size, b"\0"))
        share = dice.choice([0.0, 0.3, 0.7, 1.0])
        for page in self._dirty.get(path, ()):
            if dice.random() < share:
                piece = now[page * PAGE : (page + 1) * PAGE]
                content[page * PAGE : page * PAGE + len(piece)] = piece
        return bytes(content[:size])
