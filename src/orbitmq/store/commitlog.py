"""The commit log: one sequence of records over files of equal size.

A file is named by the offset of its first byte and has its full length from the beginning. Records
never cross files; an end record fills the rest. The worker creates the next file in advance, and a
flush takes files in order, so a later file is never on the disk without the earlier one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from orbitmq.atomicfile import write_all
from orbitmq.store.files import Preallocation, is_out_of_files
from orbitmq.store.settings import ReadFailed, StoreDamaged, StoreFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from orbitmq.clock import Clock
    from orbitmq.store.files import DiskFiles, Job, Worker
    from orbitmq.store.settings import FlushSettings, StoreSettings

    Post = Callable[[Callable[[], None]], object]
    WhenFlushed = Callable[[StoreFailed | None], None]


NAME_DIGITS = 20
_CHUNK = 1 << 20
_MOST_MAPS = 128


@dataclass(frozen=True, slots=True)
class ClosedLogFile:
    """A log file that never changes again."""

    path: Path
    start: int
    end: int


class LogFile:
    """One file of the log, mapped at the first read and opened at the first write.

    A log can have more files than a process may have descriptors. So the descriptor is closed when
    the file is full and flushed, and maps, which have a descriptor each in Python, are closed when
    there are many; a view of a map keeps it alive.
    """

    __slots__ = ("_fd", "_files", "_maps", "_view", "base", "end", "path", "size", "space")

    def __init__(
        self,
        path: Path,
        base: int,
        size: int,
        fd: int | None,
        files: DiskFiles,
        space: Preallocation,
        maps: _Maps,
    ) -> None:
        self.path = path
        self.base = base
        self.size = size
        self.end = base + size
        self.space = space
        self._fd = fd
        self._files = files
        self._maps = maps
        self._view: memoryview | None = None

    @property
    def fd(self) -> int:
        """The descriptor for writing; for the owner's thread."""
        if self._fd is None:
            self._fd = self._files.open(self.path)
            self.space.use(self._fd)
        return self._fd

    @property
    def written_end(self) -> int:
        """A position behind which there are only zeros, according to the file system."""
        return self._files.written_end(self.path, self.size)

    @property
    def view(self) -> memoryview:
        """The bytes of the file, with all later changes."""
        if self._view is None:
            try:
                self._view = self._map()
            except OSError as error:
                raise ReadFailed(f"{self.path} cannot be read: {error}") from error
            self._maps.add(self)
        return self._view

    def _map(self) -> memoryview:
        try:
            fd = self._files.open(self.path)
        except OSError as error:
            if not is_out_of_files(error):
                raise
            self._maps.give_up()
            fd = self._files.open(self.path)
        try:
            # Shorter only when the disk failed while the file was cleared.
            return memoryview(self._files.map(fd, min(self.size, self._files.size(fd))))
        finally:
            self._files.close(fd)

    def unmap(self) -> None:
        self._view = None

    def sync(self) -> None:
        """Returns when the file is on the disk. May be called by the flusher thread."""
        fd = self._fd
        if fd is not None:
            self._files.sync(fd)
            return
        fd = self._files.open(self.path)
        try:
            self._files.sync(fd)
        finally:
            self._files.close(fd)

    def rest(self) -> None:
        """Close the descriptor until the next use; no flush of the file may be running."""
        self.space.finish()
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._files.close(fd)

    def erase(self, position: int, stop: int) -> None:
        """Overwrite `[position, stop)` with zeros where it is not zero; a full disk allows that."""
        for at in range(position, stop, _CHUNK):
            data = self._files.pread(self.fd, min(_CHUNK, stop - at), at).rstrip(b"\0")
            if data:
                write_all(self._files, self.fd, bytes(len(data)), at)

    def clear_from(self, position: int) -> None:
        """Turn the part from `position` on into a hole."""
        self.space.finish()
        self._files.truncate(self.fd, position)
        self._files.truncate(self.fd, self.size)
        self.space.forget(position)

    def close(self) -> None:
        """Close the descriptor. The map lives as long as a view of it."""
        self._view = None
        self._maps.forget(self)
        self.rest()


class _Maps:
    """The mapped files, up to a limit; the one mapped first is unmapped first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._files: dict[LogFile, None] = {}

    def add(self, file: LogFile) -> None:
        self._files[file] = None
        if len(self._files) > self._limit:
            oldest = next(iter(self._files))
            oldest.unmap()
            del self._files[oldest]

    def forget(self, file: LogFile) -> None:
        self._files.pop(file, None)

    def give_up(self) -> None:
        """Unmap all, because descriptors are needed elsewhere."""
        for file in self._files:
            file.unmap()
        self._files.clear()


class CommitLog:
    """The files of the log, its begin and its end."""

    def __init__(
        self, folder: Path, settings: StoreSettings, files: DiskFiles, worker: Worker
    ) -> None:
        self.folder = folder
        self.file_size = settings.file_size
        self.files: list[LogFile] = []
        self.end = 0  #: the offset of the next record; all bytes below are written
        self._step = settings.preallocate_step
        self._disk = files
        self._worker = worker
        self._next: tuple[int, Job] | None = None
        self._maps = _Maps(_MOST_MAPS)

    # ---- opening

    def load(self, recorded_size: int | None) -> None:
        """Open the existing files. Recovery decides whether their content is valid.

        `recorded_size` is the file size in our own checkpoint. With it a file may be too short: the
        process died while truncating it. Without it every length must be right before anything is
        changed, as with Apache's broker.
        """
        self._disk.make_folder(self.folder)
        # `isdigit` also accepts characters such as "²".
        names = [
            name
            for name in self._disk.names(self.folder)
            if len(name) == NAME_DIGITS and name.isascii() and name.isdigit()
        ]
        if names and recorded_size is not None and recorded_size != self.file_size:
            raise self._wrong_size(recorded_size)
        for name in names:
            self._load_file(name, recorded_size, is_last=name == names[-1])
        for each in self.files:
            if self._disk.size_of(each.path) < self.file_size:
                self._disk.truncate(each.fd, self.file_size)
        self.end = self.start

    def _load_file(self, name: str, recorded_size: int | None, *, is_last: bool) -> None:
        path = self.folder / name
        found = self._adopt(int(name), None)
        size = self._disk.size_of(path)
        if size == 0 and is_last:
            self.files.pop().close()
            self._disk.unlink(path)
        elif size > self.file_size or (size < self.file_size and recorded_size is None):
            raise self._wrong_size(size)
        elif found.base != self.start + self.file_size * (len(self.files) - 1):
            raise StoreDamaged(
                f"commit-log file {path} does not follow the one before it; restore the missing "
                "file, or move those on one side of the gap away"
            )

    def _wrong_size(self, size: int) -> StoreDamaged:
        return StoreDamaged(
            f"the commit log in {self.folder} has a file of {size} bytes; "
            f"open it with file_size={size}, not {self.file_size}"
        )

    @property
    def start(self) -> int:
        """The lowest offset that can be read."""
        return self.files[0].base if self.files else self.end

    # ---- reading

    def view(self, offset: int, size: int) -> memoryview | None:
        """`size` bytes at `offset`, not copied; None when they do not exist, or no longer."""
        if size < 0 or offset + size > self.end:
            return None
        found = self.file_of(offset)
        if found is None:
            return None
        at = offset - found.base
        if at + size > self.file_size:
            return None
        return found.view[at : at + size]

    def file_of(self, offset: int) -> LogFile | None:
        files = self.files
        if not files:
            return None
        index = (offset - files[0].base) // self.file_size
        return files[index] if 0 <= index < len(files) else None

    def following_file(self, offset: int) -> int:
        """The begin of the file after that of `offset`."""
        return offset - offset % self.file_size + self.file_size

    # ---- writing

    def write(self, segments: Iterable[tuple[int, bytes]]) -> None:
        """Write each segment at its offset; the caller undoes this when one fails.

        The end moves only when all are written: the flusher reads it, and must not report bytes as
        flushed that may still be undone.
        """
        end = self.end
        for offset, data in segments:
            target = self.file_of(offset) or self._take_next(offset)
            at = offset - target.base
            stop = at + len(data)
            target.space.before_write(stop)
            write_all(self._disk, target.fd, data, at)
            end = offset + len(data)
            target.space.after_write(stop)
            if stop > self.file_size // 2 and self._next is None and self.files[-1] is target:
                self._next = (target.end, self._worker.submit(self._make, target.end))
        self.end = end

    def undo(self, segments: Iterable[tuple[int, bytes]]) -> None:
        """Clear what a failed `write` of these segments may have written."""
        for offset, data in segments:
            target = self.file_of(offset)
            if target is not None:
                at = offset - target.base
                try:
                    target.erase(at, at + len(data))
                except OSError:
                    target.clear_from(at)
                # Otherwise a power failure could restore a refused message.
                target.sync()

    def cut(self, offset: int) -> None:
        """End the log at `offset`: clear the rest of its file and delete the later files."""
        while self.files and self.files[-1].base > offset:
            last = self.files.pop()
            last.close()
            self._disk.unlink(last.path)
        if self.files and self.files[-1].end > offset:
            self.files[-1].clear_from(offset - self.files[-1].base)
            self.files[-1].sync()
        self.end = offset
        self._disk.sync_folder(self.folder)

    def drop_first(self) -> None:
        """Delete the oldest file. Running reads can finish.

        The deletion is on the disk when this returns: if a later deletion reached the disk first, a
        power failure would leave a hole in the log.
        """
        self._disk.unlink(self.files[0].path)
        self.files.pop(0).close()
        self._disk.sync_folder(self.folder)

    def rewrite(self, since: int) -> None:
        """Write the bytes from `since` on again, so that the next flush includes them."""
        at = since
        while at < self.end:
            size = min(_CHUNK, self.end - at, self.following_file(at) - at)
            target, data = self.file_of(at), self.view(at, size)
            if target is not None and data is not None:
                write_all(self._disk, target.fd, bytes(data), at - target.base)
            at += size

    def sync(self, since: int, upto: int) -> None:
        """Return when `[since, upto)` is on the disk, older files first. For the flusher."""
        for each in tuple(self.files):
            if each.base < upto and each.end > since:
                each.sync()

    def rest(self, flushed: int) -> None:
        """Close the descriptors of files that are full and flushed."""
        for each in self.files[:-1]:
            if each.end <= flushed:
                each.rest()

    def close(self) -> None:
        if self._next is not None:
            base, job = self._next
            self._next = None
            job.wait()
            if job.error is None:
                self._disk.close(job.result())
                self._disk.unlink(self._path(base))
        for each in self.files:
            each.close()
        self.files.clear()

    def _take_next(self, offset: int) -> LogFile:
        """The file that the worker has created, or one created now."""
        base = offset - offset % self.file_size
        if self._next is not None and self._next[0] == base:
            job = self._next[1]
            self._next = None
            return self._adopt(base, job.result())
        return self._adopt(base, self._make(base))

    def _adopt(self, base: int, fd: int | None) -> LogFile:
        space = Preallocation(fd, self.file_size, self._step, self._disk, self._worker)
        made = LogFile(self._path(base), base, self.file_size, fd, self._disk, space, self._maps)
        self.files.append(made)
        return made

    def _make(self, base: int) -> int:
        """Worker or owner: a file of full length whose name is on the disk."""
        fd = self._disk.open(self._path(base), create=True)
        try:
            # Data of an earlier store under this name must not be read as ours.
            self._disk.truncate(fd, 0)
            self._disk.truncate(fd, self.file_size)
            self._disk.sync(fd)
            self._disk.sync_folder(self.folder)
        except BaseException:
            self._disk.close(fd)
            raise
        return fd

    def _path(self, base: int) -> Path:
        return self.folder / f"{base:0{NAME_DIGITS}d}"


# Flushing. A thread waits in fdatasync; everything written meanwhile shares the next flush (group
# commit). The thread reports its progress, and the owner answers waiting senders in its own thread
# (`post`). A failed flush is final: a second fdatasync could report success for pages that were
# never written.


log = logging.getLogger(__name__)


class Flusher:
    """Flushes the log up to a requested offset, and periodically without a request."""

    def __init__(
        self,
        commit_log: CommitLog,
        settings: FlushSettings,
        clock: Clock,
        wake_owner: Callable[[], None],
    ) -> None:
        self.flushed = commit_log.end  #: everything below is on the disk
        self.failure: StoreFailed | None = None
        self.flush_count = 0
        self._log = commit_log
        self._settings = settings
        self._clock = clock
        self._wake_owner = wake_owner
        self._asked = commit_log.end
        self._last_thorough = clock.monotonic()
        self._is_stopping = False
        #: Wakes the thread. It costs less than a condition, and every message that waits for the
        #: disk uses it.
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._is_rung = False
        self._changed = threading.Condition()
        self._sleepers = 0  #: threads that wait for `_changed`
        self._thread: threading.Thread | None = None
        self._waiting: deque[tuple[int, WhenFlushed]] = deque()

    # ---- the owner's side

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="orbitmq-flusher", daemon=True)
        self._thread.start()

    def ask(self, upto: int) -> None:
        """Flush the log up to `upto` as soon as possible."""
        if upto > self._asked:
            self._asked = upto
            self._ring()

    def when_flushed(self, upto: int, call: WhenFlushed) -> bool:
        """`settle` makes a call when the log below `upto` is on the disk, or has failed.

        Returns whether that is already so. Even then `settle` makes the call, because earlier
        callers may still wait for theirs.
        """
        self._waiting.append((upto, call))
        self.ask(upto)
        return self.failure is not None or upto <= self.flushed

    def wait(self, upto: int, timeout: float | None) -> bool:
        """Wait until everything below `upto` is on the disk; False after the timeout."""
        self.ask(upto)
        if self._thread is None:
            self.flush_now()
        with self._changed:
            self._sleepers += 1
            self._changed.wait_for(
                lambda: self.flushed >= upto or self.failure is not None, timeout
            )
            self._sleepers -= 1
        if self.failure is not None:
            raise self.failure
        return self.flushed >= upto

    def settle(self, flushed: int) -> None:
        """Make the calls for offsets up to `flushed`, which the owner has made readable."""
        waiting = self._waiting
        if self.failure is not None:
            while waiting:
                waiting.popleft()[1](self.failure)
            return
        while waiting and waiting[0][0] <= flushed:
            waiting.popleft()[1](None)

    def flush_now(self) -> None:
        """Without a thread: do its work here."""
        if self._thread is None and self.failure is None:
            self._flush_upto(self._due())

    def stop(self) -> None:
        """Do the requested flushes and end the thread."""
        if self._thread is not None:
            self._is_stopping = True
            self._ring()
            self._thread.join()
            self._thread = None

    def _ring(self) -> None:
        if not self._is_rung and self._thread is not None:
            self._is_rung = True
            self._bell.put(None)

    # ---- the thread's side

    def _run(self) -> None:
        try:
            self._flush_until_stopped()
        except Exception as error:
            # If the thread ended silently, all waiting senders would wait indefinitely.
            log.exception("the flusher failed; writes are refused from now on")
            self.fail(error)

    def _flush_until_stopped(self) -> None:
        interval = self._settings.interval
        while self.failure is None:
            with suppress(Empty):
                self._bell.get(timeout=interval)
            # Cleared before the requests are read: a later request sets it again, and a request
            # that found it set was made before.
            self._is_rung = False
            is_stopping = self._is_stopping
            self._flush_upto(self._due())
            if is_stopping and self._asked <= self.flushed:
                return

    def _due(self) -> int:
        """How far to flush now: as requested, or everything when it is much or old."""
        now = self._clock.monotonic()
        end = self._log.end
        is_thorough = now - self._last_thorough >= self._settings.thorough_interval
        if is_thorough or end - self.flushed >= self._settings.least_bytes:
            self._last_thorough = now
            return max(self._asked, end)
        return self._asked

    def _flush_upto(self, target: int) -> None:
        if target <= self.flushed:
            return
        try:
            self._log.sync(self.flushed, target)
        except Exception as error:
            # Whatever the error is: an unflushed message must not be acknowledged.
            log.exception("flushing the commit log failed; writes are refused from now on")
            self.fail(error)
        else:
            self.flushed = target
            self.flush_count += 1
            self._rouse_sleepers()
        self._wake_owner()

    def _rouse_sleepers(self) -> None:
        # A thread counts itself before it checks, so one that comes now sees the new state.
        if self._sleepers:
            with self._changed:
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Refuse all further flushes."""
        failure = StoreFailed(
            f"the disk did not take what was written ({error}); what waits is not stored, "
            "and nothing is accepted until the store is opened again"
        )
        failure.__cause__ = error
        self.failure = self.failure or failure
        self._rouse_sleepers()
