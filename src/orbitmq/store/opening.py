"""Opening a store: its parts are made, each after those it needs, and brought to agree.

The order is that of trust. The folder is locked; the log and the queues are seen as they lie there;
recovery makes them agree; what it accepted is brought to the disk; only then do the parts begin to
work that rely on it, and the mark of a crash is set that a proper shutdown will remove.

A disk that takes no writes can be read all the same. Then the last step is left out, which makes
it necessary that nothing is written: a start would take what it finds for the end of a proper
shutdown. The step is tried again from time to time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from orbitmq.store.appending import Appender
from orbitmq.store.checkpoint import read_checkpoint
from orbitmq.store.commitlog import CommitLog
from orbitmq.store.deletions import Deletions
from orbitmq.store.durability import Durability
from orbitmq.store.errors import (
    DiskFull,
    StoreClosed,
    StoreError,
    StoreFailed,
    WriteFailed,
    WriteRefused,
)
from orbitmq.store.files import is_full, takes_no_writes
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

log = logging.getLogger(__name__)


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
        self.is_read_only = True  #: the disk takes no writes
        self._why_read_only: OSError | None = None
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
        self.queues.load(checkpoint.hint.queue_file_entries if checkpoint.hint else None)
        self.deletions = Deletions(root / "deleted-topics", files)
        self.deletions.load()
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
            entry_code=self.appender.codes.in_schedule,
            deleted=self.deletions.by_topic,
            clock=clock,
        ).run()
        self.flusher.flushed = self.log.end
        self.appender.last_store_ms = max(self.recovery.last_store_ms, checkpoint.physical_ms)
        self.appender.is_held_back = settings.flush.policy is FlushPolicy.SYNC
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
            self.log, self.queues, self.indexing, self.durability, settings.retention, files
        )
        self._rewrite_from = checkpoint.hint.flushed if checkpoint.hint else None
        try:
            self._begin_writing()
        except OSError as error:
            if not takes_no_writes(error):
                raise
            log.warning("the store can only be read", extra={"root": str(root), "why": str(error)})
            self._why_read_only = error

    def try_to_write(self) -> None:
        """Make a store writable that was opened while the disk took no writes."""
        if self.is_open and self.is_read_only and self.flusher.failure is None:
            try:
                self._begin_writing()
            except OSError as error:
                self._why_read_only = error
            except StoreFailed as failure:
                self.flusher.fail(failure)

    def _begin_writing(self) -> None:
        root, files = self._root, self._files
        self._trust_what_was_found()
        # A crash may have come between the note of a deletion and the end of the files. Before the
        # notes are fitted: those of messages that are gone from the log are forgotten there.
        self.durability.is_wanted |= self.queues.delete_below(self.deletions.by_topic) > 0
        self.deletions.fit(self.log.start, self.log.end)
        files.write_bytes(root / "abort", str(files.process_id()).encode())
        files.sync_folder(root)
        self.durability.write_first_checkpoint()
        self.is_read_only = False

    def _trust_what_was_found(self) -> None:
        """Bring what recovery accepted to the disk before anybody relies on it.

        It may be in the page cache only: never flushed, or not written by a flush that failed,
        after which the pages count as clean. Writing it once more makes sure.
        """
        report = self.recovery
        try:
            if report.end > report.start and not report.was_clean:
                if self._rewrite_from is not None:
                    self.log.rewrite(max(self._rewrite_from, report.start))
                self.log.sync(report.start, report.end)
        except OSError as error:
            if takes_no_writes(error):
                raise
            raise StoreFailed(f"the disk of {self._root} cannot be written ({error})") from error

    def _open_index(self, checkpoint: Checkpoint, *, was_clean: bool) -> Indexing | None:
        if not self._settings.index:
            return None
        hint = checkpoint.hint
        index = KeyIndex.open(
            self._root / "index",
            settings=self._settings.index_file,
            files=self._files,
            clock=self._clock,
            safe_until_ms=None if was_clean or hint is not None else checkpoint.index_ms,
            log_end=self.log.end,
            known_last=hint.index_last if hint is not None and not was_clean else None,
        )
        position = index.resume_offset
        if hint is not None and self.recovery.used_hint and hint.index_last == position:
            position = max(position, hint.indexed)
        return Indexing(index, self.log, min(position, self.log.end), self._clock)

    def refusal(self) -> WriteRefused | None:
        """Why nothing can be written now."""
        root = self._root
        if not self.is_open:
            return StoreClosed(root)
        if self.flusher.failure is not None:
            return self.flusher.failure
        if self.is_read_only:
            return DiskFull(f"the disk of {root} took no writes ({self._why_read_only}): make room")
        if self.retention.is_full:
            return DiskFull(
                f"the disk of {root} is {self.retention.used_ratio * 100:.0f} percent full, more "
                f"than {self._settings.retention.full_ratio * 100:.0f}: make room, or keep "
                "messages shorter"
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
