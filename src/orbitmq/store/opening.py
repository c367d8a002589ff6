"""Opening a store: its parts are made, each after those it needs, and brought to agree.

The order is that of trust. The folder is locked; the log and the queues are seen as they lie there;
recovery makes them agree; what it accepted is brought to the disk; only then do the parts begin to
work that rely on it, and the mark of a crash is set that a proper shutdown will remove.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbitmq.store.appending import Appender
from orbitmq.store.checkpoint import read_checkpoint
from orbitmq.store.commitlog import CommitLog
from orbitmq.store.durability import Durability
from orbitmq.store.errors import (
    DiskFull,
    StoreClosed,
    StoreError,
    StoreFailed,
    WriteFailed,
    WriteRefused,
)
from orbitmq.store.files import is_full
from orbitmq.store.finding import Finding
from orbitmq.store.flushing import Flusher
from orbitmq.store.indexing import Indexing
from orbitmq.store.keyindex import KeyIndex
from orbitmq.store.locking import FolderLock
from orbitmq.store.queues import QueueTable
from orbitmq.store.recovery import Recovery
from orbitmq.store.retention import Retention
from orbitmq.store.settings import FlushPolicy
from orbitmq.store.working import Worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orbitmq.clock import Clock
    from orbitmq.store.checkpoint import Checkpoint
    from orbitmq.store.files import DiskFiles
    from orbitmq.store.settings import StoreSettings


class StoreParts:
    """The parts of an open store. Constructing it opens them; a failure leaves nothing open."""

    def __init__(
        self,
        root: Path,
        settings: StoreSettings,
        store_host: bytes,
        clock: Clock,
        files: DiskFiles,
        wake_owner: Callable[[], None],
        *,
        background: bool,
    ) -> None:
        self.is_open = True
        self._root = root
        self._settings = settings
        self._clock = clock
        self._files = files
        # Two, so that a long round of flushing never delays the next file of the log.
        self._maker = Worker("orbitmq-file-maker")
        self._syncer = Worker("orbitmq-queue-syncer")
        self._lock = FolderLock(root, files)
        self._lock.acquire()
        try:
            self._open(store_host, wake_owner)
        except OSError as error:
            self.release()
            raise StoreError(f"the store in {root} cannot be opened: {error}") from error
        except BaseException:
            self.release()
            raise
        if background:
            self._maker.start()
            self._syncer.start()
            self.flusher.start()

    def _open(self, store_host: bytes, wake_owner: Callable[[], None]) -> None:
        root, settings, files, clock = self._root, self._settings, self._files, self._clock
        checkpoint = read_checkpoint(root / "checkpoint", files)
        was_clean = not files.exists(root / "abort")
        self.log = CommitLog(root / "commitlog", settings, files, self._maker)
        self.queues = QueueTable(root / "consumequeue", settings, files)
        self.log.load(checkpoint.hint.file_size if checkpoint.hint else None)
        self.queues.load()
        self.flusher = Flusher(self.log, settings.flush, clock, wake_owner)
        self.appender = Appender(
            self.log, self.queues, settings, clock, store_host, self.refusal, self.flusher.fail
        )
        self.recovery = Recovery(
            self.log,
            self.queues,
            checkpoint,
            was_clean=was_clean,
            chunk=settings.recovery_chunk,
            entry_code=self.appender.entry_code,
            clock=clock,
        ).run()
        self._trust_what_was_found(checkpoint)
        self.indexing = self._open_index(checkpoint, was_clean=was_clean)
        self.finding = Finding(
            self.log, self.indexing, lambda: self.appender.dispatched, settings.index_catch_up
        )
        self.durability = Durability(
            root / "checkpoint",
            self.log,
            self.queues,
            self.appender,
            self.indexing,
            self.flusher,
            self._syncer,
            settings.flush,
            files,
            clock,
            checkpoint,
            self.recovery.start,
            self.recovery.start_entries,
        )
        self.retention = Retention(
            self.log, self.queues, self.indexing, self.flusher, settings.retention, files
        )
        files.write_bytes(root / "abort", str(files.process_id()).encode())
        files.sync_folder(root)
        self.durability.write_first_checkpoint()

    def _trust_what_was_found(self, checkpoint: Checkpoint) -> None:
        """Bring what recovery accepted to the disk before anybody relies on it.

        It may be in the page cache only: never flushed, or not written by a flush that failed,
        after which the pages count as clean. Writing it once more makes sure.
        """
        report = self.recovery
        try:
            if report.end > report.start and not report.was_clean:
                if report.used_hint and checkpoint.hint is not None:
                    self.log.rewrite(max(checkpoint.hint.flushed, report.start))
                self.log.sync(report.start, report.end)
        except OSError as error:
            raise StoreFailed(f"the disk of {self._root} cannot be written ({error})") from error
        self.flusher.flushed = self.log.end
        self.appender.last_store_ms = max(report.last_store_ms, checkpoint.physical_ms)
        self.appender.is_held_back = self._settings.flush.policy is FlushPolicy.SYNC

    def _open_index(self, checkpoint: Checkpoint, *, was_clean: bool) -> Indexing | None:
        if not self._settings.index:
            return None
        index = KeyIndex.open(
            self._root / "index",
            settings=self._settings.index_file,
            files=self._files,
            clock=self._clock,
            safe_until_ms=None if was_clean else checkpoint.index_ms,
            log_end=self.log.end,
        )
        position = index.resume_offset
        hint = checkpoint.hint
        if hint is not None and self.recovery.used_hint and hint.index_last == position:
            position = max(position, hint.indexed)
        return Indexing(index, self.log, min(position, self.log.end))

    def refusal(self) -> WriteRefused | None:
        """Why nothing can be written now."""
        root = self._root
        if not self.is_open:
            return StoreClosed(root)
        if self.flusher.failure is not None:
            return self.flusher.failure
        if self.retention.is_full:
            return DiskFull(
                f"the disk of {root} is {self.retention.used_ratio:.0%} full, more than "
                f"{self._settings.retention.full_ratio:.0%}: make room, or keep messages shorter"
            )
        error = self.queues.write_error
        if error is not None:
            text = f"a consume queue in {root} cannot be written ({error})"
            return DiskFull(text) if is_full(error) else WriteFailed(text)
        return None

    def release(self) -> None:
        """End the threads and leave the folder as it is."""
        self.is_open = False
        if hasattr(self, "flusher"):
            self.flusher.stop()
        self._syncer.stop()
        self._maker.stop()
        if hasattr(self, "indexing") and self.indexing is not None:
            self.indexing.abandon()
        if hasattr(self, "log"):
            self.log.close()
            self.queues.close()
        self._lock.release()
