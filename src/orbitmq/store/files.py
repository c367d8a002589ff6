"""The file system, as the store sees it: the only module of the store that calls `os`.

A test gives the store a subclass that fails or forgets on purpose. Everything here is one system
call, or as good as one, and lets other threads run while it waits; `mmap.flush` does not and is
therefore never used: files are written with `pwrite` and read through read-only maps, which on
Linux show at once what was written.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
from pathlib import Path

#: What a disk says when there is no room; a quota and a file-size limit say it differently.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_data_sync = getattr(os, "fdatasync", os.fsync)


class DiskFiles:
    """The real file system."""

    def open(self, path: Path, *, create: bool = False) -> int:
        """A descriptor for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> int:
        """Write at a position; the number of bytes written may be too small."""
        return os.pwrite(fd, data, at)

    def pread(self, fd: int, size: int, at: int) -> bytes:
        return os.pread(fd, size, at)

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

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def allocate(self, fd: int, at: int, size: int) -> None:
        """Take disk space for a part of a file."""
        os.posix_fallocate(fd, at, size)

    def map(self, fd: int, size: int) -> mmap.mmap:
        """A read-only view of the file."""
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)

    def has_data(self, fd: int, at: int) -> bool:
        """Whether anything may have been written at `at` or behind it."""
        if not hasattr(os, "SEEK_DATA"):
            return True
        try:
            os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return False
            raise
        return True

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def size_of(self, path: Path) -> int:
        return path.stat().st_size

    def written_end(self, path: Path, size: int) -> int:
        """An offset behind which nothing was ever written; the size where nobody can say."""
        if not hasattr(os, "SEEK_DATA"):
            return size
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        end = 0
        try:
            while end < size:
                end = os.lseek(fd, os.lseek(fd, end, os.SEEK_DATA), os.SEEK_HOLE)
        except OSError as error:
            # There is no more data, or this file system does not know its holes.
            return end if error.errno == errno.ENXIO else size
        finally:
            os.close(fd)
        return end

    def modified(self, path: Path) -> float:
        """When the file was last written, in seconds since the epoch."""
        return path.stat().st_mtime

    def names(self, folder: Path) -> list[str]:
        """The names in a folder in order; none when there is no such folder."""
        try:
            return sorted(os.listdir(folder))  # noqa: PTH208 - names are wanted, not paths
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, path: Path) -> bool:
        return path.exists()

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def read_bytes(self, path: Path) -> bytes:
        return path.read_bytes()

    def write_bytes(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def used_ratio(self, folder: Path) -> float:
        """The share of the disk that is in use, counted as the person who may write sees it."""
        stat = os.statvfs(folder)
        used = stat.f_blocks - stat.f_bfree
        usable = used + stat.f_bavail
        return used / usable if usable else 0.0

    def process_id(self) -> int:
        return os.getpid()

    def lock(self, fd: int) -> bool:
        """Lock the first byte for this process, as Java's FileLock does; False when it is taken."""
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True


def is_full(error: OSError) -> bool:
    """Whether the error says that there is no room."""
    return error.errno in FULL


def takes_no_writes(error: OSError) -> bool:
    """Whether the error says that the disk can only be read, for now."""
    return error.errno in FULL or error.errno == errno.EROFS


def is_out_of_files(error: OSError) -> bool:
    """Whether the error says that no more files can be open."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def write_all(files: DiskFiles, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
    """Write everything or raise; a short write is tried again once, which names the reason."""
    written = files.pwrite(fd, data, at)
    if written != len(data):
        rest = memoryview(data)[written:]
        more = files.pwrite(fd, rest, at + written)
        if more != len(rest):
            raise OSError(errno.ENOSPC, f"only {written + more} of {len(data)} bytes were written")
