"""One owner per folder: across processes by a file lock, inside this one by a register.

A POSIX record lock excludes other processes, also Apache's broker, which takes the same lock on
the same byte. It does not exclude the process that holds it, and is lost when that process closes
any descriptor of the file; so a second store of this process must be refused before it opens the
file. That is what the register is for.
"""

from __future__ import annotations

import errno
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from orbitmq.store.settings import StoreError, StoreLocked

if TYPE_CHECKING:
    from pathlib import Path

    from orbitmq.store.files import DiskFiles

_open_here: set[str] = set()
_register_lock = threading.Lock()


class FolderLock:
    """Holds a store's folder from `acquire` to `release`."""

    def __init__(self, root: Path, files: DiskFiles) -> None:
        self._root = root
        self._files = files
        self._name = str(root.resolve())
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the folder or raise StoreLocked, naming who has it if that is known."""
        with _register_lock:
            if self._name in _open_here:
                raise StoreLocked(self._root, self._files.process_id())
            try:
                self._files.make_folder(self._root)
                fd = self._files.open(self._root / "lock", create=True)
            except OSError as error:
                raise StoreError(_unusable(self._root, error)) from error
            try:
                is_ours = self._files.lock(fd)
                holder = None if is_ours else self._holder(fd)
            except BaseException:
                self._files.close(fd)
                raise
            if not is_ours:
                self._files.close(fd)
                raise StoreLocked(self._root, holder)
            # Only for people who look: on a full disk the lock holds without it.
            with suppress(OSError):
                self._files.truncate(fd, 0)
                self._files.pwrite(fd, f"lock {self._files.process_id()}\n".encode(), 0)
            self._fd = fd
            _open_here.add(self._name)

    def release(self) -> None:
        with _register_lock:
            if self._fd is not None:
                self._files.close(self._fd)
                self._fd = None
                _open_here.discard(self._name)

    def _holder(self, fd: int) -> int | None:
        words = self._files.pread(fd, 64, 0).split()
        return int(words[1]) if len(words) == 2 and words[1].isdigit() else None


def _unusable(root: Path, error: OSError) -> str:
    if error.errno == errno.EROFS:
        return (
            f"the folder {root} is on a disk that is mounted read-only, and a store cannot be "
            "opened there, not even to be read; mount it for writing, or open a copy of the folder"
        )
    return f"the folder {root} cannot be used: {error}"
