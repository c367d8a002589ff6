"""Files that are replaced as a whole, and folders with one owner at a time.

At every instant a replaced file holds its old or its new content: the new content is written to
`<name>.tmp`, synchronised, and renamed. A lock is a record lock of the operating system, which ends
with its process and which Apache's broker takes as well. Such a lock does not exclude the process
that holds it, and ends when that process closes any descriptor of the file; therefore the locks of
this process are also registered here, and a second one is refused before its file is opened.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

if sys.platform == "win32":  # pragma: no cover
    import msvcrt

    def _lock_first_byte(fd: int) -> None:
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock_first_byte(fd: int) -> None:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)


_data_sync = getattr(os, "fdatasync", os.fsync)


class Disk:
    """The file system, one system call a method. Tests pass a subclass that fails or forgets."""

    def open(self, path: Path, *, create: bool = False) -> int:
        """A descriptor for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pread(self, fd: int, size: int, at: int) -> bytes:
        return os.pread(fd, size, at)

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> int:
        """Write at a position; the number of bytes written may be too small."""
        return os.pwrite(fd, data, at)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Return when the bytes of the file are on the disk."""
        _data_sync(fd)

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in the folder are on the disk."""
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def exists(self, path: Path) -> bool:
        return path.exists()

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file; it atomically replaces the file that had the name."""
        source.replace(target)

    def lock(self, fd: int) -> bool:
        """Lock the first byte for this process, as Java's FileLock does; False when it is taken."""
        try:
            _lock_first_byte(fd)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def process_id(self) -> int:
        return os.getpid()


DISK: Final = Disk()


def write_all(disk: Disk, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
    """Write everything or raise; a short write is repeated once, which reports the reason."""
    written = disk.pwrite(fd, data, at)
    if written != len(data):
        rest = memoryview(data)[written:]
        more = disk.pwrite(fd, rest, at + written)
        if more != len(rest):
            raise OSError(errno.ENOSPC, f"only {written + more} of {len(data)} bytes were written")


def replace_file(path: Path, data: bytes, *, disk: Disk = DISK, backup: Path | None = None) -> None:
    """Make `data` the content of the file; it is on the disk when this returns. Raises `OSError`.

    The old content becomes `backup`. Between the two renames there is no current file, and the
    backup holds what was current.
    """
    # The same name for all attempts: the remains of an interrupted one are overwritten.
    fresh = path.with_name(path.name + ".tmp")
    disk.make_folder(path.parent)
    fd = disk.open(fresh, create=True)
    try:
        disk.truncate(fd, 0)
        write_all(disk, fd, data, 0)
        disk.sync(fd)
    finally:
        disk.close(fd)
    if backup is not None and disk.exists(path):
        disk.rename(path, backup)
    disk.rename(fresh, path)
    disk.sync_folder(path.parent)


_locked_here: set[str] = set()
# Reentrant: a garbage collection inside `take` may release another lock.
_register = threading.RLock()


class FolderLock:
    """Exclusive use of a folder, from `take` to `release` or until this object is collected."""

    def __init__(self, path: Path, disk: Disk = DISK) -> None:
        """`path` is a file in the folder, which stays when the lock ends."""
        self._path = path
        self._disk = disk
        self._end: weakref.finalize[..., FolderLock] | None = None
        #: The process that has the folder, if `take` returned False and it is known.
        self.holder: int | None = None

    def take(self) -> bool:
        """Whether the folder is locked by this object now. Creates it; raises `OSError`."""
        if self._end is not None:
            return True
        disk, name = self._disk, str(self._path.resolve())
        with _register:
            if name in _locked_here:
                self.holder = disk.process_id()
                return False
            disk.make_folder(self._path.parent)
            fd = disk.open(self._path, create=True)
            try:
                is_ours = disk.lock(fd)
                self.holder = None if is_ours else _holder(disk.pread(fd, 64, 0))
            except BaseException:
                disk.close(fd)
                raise
            if not is_ours:
                disk.close(fd)
                return False
            # For people; on a full disk the lock holds without it.
            with suppress(OSError):
                disk.truncate(fd, 0)
                disk.pwrite(fd, f"lock {disk.process_id()}\n".encode(), 0)
            _locked_here.add(name)
        self._end = weakref.finalize(self, _release, disk, fd, name)
        return True

    def release(self) -> None:
        """End the lock. May be repeated."""
        if self._end is not None:
            self._end()
            self._end = None


def _holder(content: bytes) -> int | None:
    words = content.split()
    return int(words[1]) if len(words) == 2 and words[1].isdigit() else None


def _release(disk: Disk, fd: int, name: str) -> None:
    with _register:
        disk.close(fd)
        _locked_here.discard(name)
