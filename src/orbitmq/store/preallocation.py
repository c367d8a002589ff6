"""Disk space taken ahead of the writing, in steps, so that a small store stays small.

Where a file system cannot take space in advance, the C library reads and rewrites a byte of every
block instead, which would undo a write to the same block at the same moment. So a write never
enters a range that is being taken: it waits for that range, which it reaches only when it is
faster than the disk by half a step.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orbitmq.store.files import DiskFiles
    from orbitmq.store.working import Job, Worker

log = logging.getLogger(__name__)


class Preallocation:
    """Takes the space of one file. `step` 0 takes none."""

    __slots__ = ("_begin", "_end", "_fd", "_files", "_job", "_ready", "_size", "_step", "_worker")

    def __init__(
        self, fd: int | None, size: int, step: int, files: DiskFiles, worker: Worker
    ) -> None:
        self._fd = fd
        self._size = size
        self._step = step
        self._files = files
        self._worker = worker
        self._ready = 0 if step else size  #: space is taken up to here
        self._job: Job | None = None
        self._begin = self._end = 0  #: the range that the job takes

    def use(self, fd: int) -> None:
        """The file was opened anew."""
        self._fd = fd

    def before_write(self, stop: int) -> None:
        """Wait if bytes below `stop` are being taken right now."""
        if self._job is not None and stop > self._begin:
            self.finish()

    def after_write(self, position: int) -> None:
        """Take the next step when the writing has come within half a step of the last one."""
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
        """Wait for the range that is being taken."""
        if self._job is not None:
            self._job.wait()
            self._job = None
            self._ready = self._end

    def forget(self, position: int) -> None:
        """What lies above `position` was given back."""
        self._ready = min(self._ready, position)

    def _take(self, fd: int, begin: int, size: int) -> None:
        """Worker: a full disk is told by the write that needs the space, not here."""
        try:
            self._files.allocate(fd, begin, size)
        except OSError as error:
            log.debug("no space taken in advance", extra={"reason": str(error)})
