"""The file system, as the store sees it: the only module of the store that calls `os`.

Tests pass a subclass that fails or forgets on purpose. Each function is about one system call and
releases the interpreter lock while it waits. `mmap.flush` does not, so it is never used: files are
written with `pwrite` and read through read-only maps.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import shutil
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from orbitmq.atomicfile import Disk

if TYPE_CHECKING:
    from collections.abc import Callable


#: The errors of a full disk, an exceeded quota and an exceeded file-size limit.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskFiles(Disk):
    """The real file system."""

    def allocate(self, fd: int, at: int, size: int) -> None:
        """Allocate disk space for a part of a file."""
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
        """An offset behind which nothing was ever written; the size where that is unknown."""
        if not hasattr(os, "SEEK_DATA"):
            return size
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        end = 0
        try:
            while end < size:
                end = os.lseek(fd, os.lseek(fd, end, os.SEEK_DATA), os.SEEK_HOLE)
        except OSError as error:
            # There is no more data, or this file system does not report holes.
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

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def read_bytes(self, path: Path) -> bytes:
        return path.read_bytes()

    def write_bytes(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def used_ratio(self, folder: Path) -> float:
        """The used share of the disk, as a process without privileges sees it."""
        stat = os.statvfs(folder)
        used = stat.f_blocks - stat.f_bfree
        usable = used + stat.f_bavail
        return used / usable if usable else 0.0


def is_full(error: OSError) -> bool:
    """Whether the error is a full disk."""
    return error.errno in FULL


def takes_no_writes(error: OSError) -> bool:
    """Whether the error is a read-only disk."""
    return error.errno in FULL or error.errno == errno.EROFS


def is_out_of_files(error: OSError) -> bool:
    """Whether the error is the limit of open files."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


# The worker thread makes system calls for the owner. A job is a function of files; the owner
# handles its result. Without a thread (before `start`) a job runs in the submitting thread.


class Job:
    """A call by the worker, done or to be done."""

    __slots__ = ("_args", "_call", "_done", "_result", "error")

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._call = call
        self._args = args
        self._done = threading.Event()
        self._result: Any = None
        self.error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()

    def result(self) -> Any:
        """The result of the call, or its error."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self._result

    def run(self) -> None:
        try:
            self._result = self._call(*self._args)
        except Exception as error:  # noqa: BLE001  # the owner must see every error
            self.error = error
        finally:
            self._done.set()


class Worker:
    """Runs jobs one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Any], *args: Any) -> Job:
        job = Job(call, args)
        if self._thread is None:
            job.run()
        else:
            self._jobs.put(job)
        return job

    def stop(self) -> None:
        """Finish the submitted jobs and end the thread; later jobs run in the submitting thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()


# Disk space is allocated ahead of the writes, in steps, so that a small store stays small. Where a
# file system cannot allocate, the C library reads and rewrites a byte of every block, which could
# undo a concurrent write. A write therefore waits for a range that is being allocated.

log = logging.getLogger(__name__)


class Preallocation:
    """Allocates the space of one file. `step` 0 allocates none."""

    __slots__ = ("_begin", "_end", "_fd", "_files", "_job", "_ready", "_size", "_step", "_worker")

    def __init__(
        self, fd: int | None, size: int, step: int, files: DiskFiles, worker: Worker
    ) -> None:
        self._fd = fd
        self._size = size
        self._step = step
        self._files = files
        self._worker = worker
        self._ready = 0 if step else size  #: space is allocated up to here
        self._job: Job | None = None
        self._begin = self._end = 0  #: the range that the job allocates

    def use(self, fd: int) -> None:
        """The file was opened again."""
        self._fd = fd

    def before_write(self, stop: int) -> None:
        """Wait if bytes below `stop` are being allocated now."""
        if self._job is not None and stop > self._begin:
            self.finish()

    def after_write(self, position: int) -> None:
        """Allocate the next step when the writes are within half a step of the last one."""
        wanted = position + self._step // 2
        if wanted <= self._ready or self._ready >= self._size:
            return
        if self._job is not None:
            if not self._job.is_done:
                return
            self.finish()
        # Half a step is left free before the first range, so that the next writes need not wait.
        if self._fd is None:
            return
        begin = max(self._ready, wanted)
        end = min(begin + self._step, self._size)
        if begin < end:
            self._begin, self._end = begin, end
            self._job = self._worker.submit(self._take, self._fd, begin, end - begin)

    def finish(self) -> None:
        """Wait for the range that is being allocated."""
        if self._job is not None:
            self._job.wait()
            self._job = None
            self._ready = self._end

    def forget(self, position: int) -> None:
        """The space above `position` was freed."""
        self._ready = min(self._ready, position)

    def _take(self, fd: int, begin: int, size: int) -> None:
        """Worker: a full disk is reported by the write that needs the space, not here."""
        try:
            self._files.allocate(fd, begin, size)
        except OSError as error:
            log.debug("no space taken in advance", extra={"reason": str(error)})


# File handles. Connections and files share one limit: a quarter is for queue files that are read
# often, the rest for connections, the log and the index. When none is left, a store continues with
# a single queue file, and a server with the present connections.

if sys.platform != "win32":
    import resource

_SHARE = 4
_LEAST = 256
_MOST = 4096
#: More is not useful, and some systems report the highest possible number as no limit.
_HIGHEST_LIMIT = 1 << 20


def queue_files_to_keep() -> int:
    """How many queue files a store keeps open by default."""
    if sys.platform == "win32":
        return _LEAST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(_LEAST, min(soft // _SHARE, _MOST))


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files as far as allowed.

    Only the entry point of a server process may call this: a library does not change the limits of
    its process.
    """
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _HIGHEST_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _HIGHEST_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some systems have a lower limit than they report.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
