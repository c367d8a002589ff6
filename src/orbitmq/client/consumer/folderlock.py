"""Keeps a folder for one user at a time, in this process and in all others of the machine.

The lock is the operating system's, on a file that stays: it ends with the process, however that
ends. (A file that is there or not would outlive a process that is killed.)
"""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path

#: In the folder that is locked.
FILE = "in-use.lock"


class FolderLock:
    """The right to a folder, once taken. Given back by `release`, or when nobody keeps it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._end: weakref.finalize[[int], FolderLock] | None = None

    def take(self) -> bool:
        """Whether the folder is ours now. Makes it if it is missing; raises `OSError`."""
        if self._end is not None:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not _lock(fd):
            os.close(fd)
            return False
        self._end = weakref.finalize(self, _unlock, fd)
        return True

    def release(self) -> None:
        """Let others have it. May be repeated."""
        if self._end is not None:
            self._end()
            self._end = None


if sys.platform == "win32":  # pragma: no cover
    import msvcrt

    def _lock(fd: int) -> bool:
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(fd: int) -> None:
        os.close(fd)

else:
    import fcntl

    def _lock(fd: int) -> bool:
        try:
            # Belongs to the open file and not to the process: it keeps us from ourselves, too.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(fd: int) -> None:
        # Said aloud: a process that was forked meanwhile has the same open file, and lives on.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
