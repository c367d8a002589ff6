"""The store: all messages of a broker in one folder, in Apache RocketMQ's formats.

    commitlog/  consumequeue/<topic>/<queue>/  index/  checkpoint  abort  lock

One owner uses a store from one thread: it appends messages, writes them once per turn, reads, and
calls `tick` several times a second. Three threads only touch files: one flushes the log, one the
queues and the index, one creates the log's next file. `post` passes their results to the owner's
thread, for example `loop.call_soon_threadsafe`. With `background=False` there are no threads, and
everything happens inside the owner's calls, in a repeatable order.

When a message counts as stored: docs/internals/durability.md.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from orbitmq.atomicfile import FolderLock
from orbitmq.clock import SystemClock
from orbitmq.filter.tags import TagFilter
from orbitmq.message.record import pack_host
from orbitmq.store.append import Appender
from orbitmq.store.commitlog import ClosedLogFile, CommitLog, Flusher
from orbitmq.store.files import DiskFiles, Worker, is_full, takes_no_writes
from orbitmq.store.index import Indexing, KeyIndex
from orbitmq.store.mirror import Mirroring
from orbitmq.store.queues import QueueTable, check_topic
from orbitmq.store.read import Boundary, Finding, offset_by_time, read_near, read_queue, time_of
from orbitmq.store.recovery import Durability, Recovery, read_checkpoint
from orbitmq.store.retention import Deletions, Retention
from orbitmq.store.settings import (
    DiskFull,
    FlushPolicy,
    StoreClosed,
    StoreError,
    StoreFailed,
    StoreLocked,
    StoreSettings,
    WriteFailed,
    WriteRefused,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from orbitmq.clock import Clock
    from orbitmq.filter.tags import MessageFilter
    from orbitmq.store.append import Arrivals
    from orbitmq.store.commitlog import Post, WhenFlushed
    from orbitmq.store.queues import ConsumeQueue
    from orbitmq.store.read import ReadResult
    from orbitmq.store.recovery import Checkpoint
    from orbitmq.store.retention import CleanReport


log = logging.getLogger(__name__)

_UNLIMITED: Final = 1 << 62


class Store:
    """The messages of one broker. Creating it opens the folder and repairs it after a crash."""

    def __init__(
        self,
        root: Path | str,
        settings: StoreSettings | None = None,
        *,
        store_host: tuple[str, int] = ("127.0.0.1", 10911),
        clock: Clock | None = None,
        files: DiskFiles | None = None,
        post: Post | None = None,
        background: bool = True,
    ) -> None:
        self.root = Path(root)
        self.settings = settings or StoreSettings()
        self._clock: Clock = clock or SystemClock()
        self._files = files or DiskFiles()
        self._post = post
        self._is_sync = self.settings.flush.policy is FlushPolicy.SYNC
        self._read_in_bulk = self.settings.read.in_bulk()
        self._parts = parts = StoreParts(
            self.root,
            self.settings,
            pack_host(*store_host),
            self._clock,
            self._files,
            self._wake,
            background=background,
        )
        self.recovery = parts.recovery  #: the result of recovery
        self._log = parts.log
        self._queues = parts.queues
        self._appender = parts.appender
        self._flusher = parts.flusher
        self._indexing = parts.indexing
        self._finding = parts.finding
        self._durability = parts.durability
        self._retention = parts.retention
        #: the log as masters send it and slaves receive it
        self.mirroring = Mirroring(
            parts.log,
            parts.queues,
            parts.appender,
            self.write,
            parts.refusal,
            deleted=parts.deletions.by_topic,
        )
        # Called for every message, so it is not wrapped.
        self.append = self._appender.append
        self.append_batch = self._appender.append_batch
        self.take_time_anew = self._appender.take_time_anew

    # ---- writing

    def on_arrival(self, call: Callable[[Sequence[Arrivals]], None] | None) -> None:
        """Announce messages as soon as they can be read: in `write`, or after the flush."""
        self._appender.arrived = call

    def write(self) -> int:
        """Write what was appended in this turn, all or nothing; returns the end of the log."""
        end = self._appender.write()
        if self._is_sync:
            self._flusher.ask(end)
        return end

    def discard(self) -> None:
        """Drop what was appended since the last `write`."""
        self._appender.discard()

    def when_flushed(self, upto: int, call: WhenFlushed) -> None:
        """Call in the owner's thread when the log below `upto` is on the disk, or has failed."""
        if self._flusher.when_flushed(upto, call):
            self.settle()

    def wait_flushed(self, upto: int, timeout: float | None = None) -> bool:
        """Wait for the same; False after the timeout, `StoreFailed` when the disk failed."""
        try:
            return self._flusher.wait(upto, timeout)
        finally:
            self.settle()

    def settle(self) -> None:
        """Announce messages that became readable, and answer requests that wait for a flush."""
        # Read once: the flusher continues meanwhile, and no send may be acknowledged before readers
        # can see its message.
        flushed = self._flusher.flushed
        if self._is_sync:
            self._appender.publish(flushed)
        self._flusher.settle(flushed)

    def tick(self) -> None:
        """Do a bounded part of the background work; to be called a few times a second."""
        self._flusher.flush_now()
        self.settle()
        self._log.rest(self._flusher.flushed)
        if self._indexing is not None:
            self._indexing.step(self._appender.dispatched, self.settings.index_step)
        if self._flusher.failure is None and not self._parts.is_read_only:
            self._durability.step()

    def clean(self) -> CleanReport:
        """Delete expired files and check the disk; to be called about every ten seconds."""
        report = self._retention.run(self._clock.now())
        self._parts.try_to_write()
        return report

    def delete_only_if(self, condition: Callable[[int], bool]) -> None:
        """Delete no log file, named by its first offset, that does not fulfil the condition."""
        self._retention.may_delete = condition

    def closed_log_files(self) -> list[ClosedLogFile]:
        """The log files that are full and on the disk: they never change again."""
        flushed = self._flusher.flushed
        return [
            ClosedLogFile(file.path, file.base, file.end)
            for file in self._log.files[:-1]
            if file.end <= flushed
        ]

    def ask_for_cleaning(self) -> None:
        """Delete expired files at any hour in the next runs of `clean`."""
        self._retention.ask_for_cleaning()

    # ---- reading

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = 32,
        wanted: MessageFilter | None = None,
        max_bytes: int = _UNLIMITED,
        *,
        in_bulk: bool = False,
        judge: int = 0,
    ) -> ReadResult:
        """The messages of a queue from `offset` on that match the filter.

        A filter that has to inspect messages inspects `judge` at a time, if given; the result may
        then have a `rest` to continue with.
        """
        if not self._parts.is_open:
            raise StoreClosed(self.root)
        queue = self._queues.by_key.get((topic, queue_id))
        settings = self._read_in_bulk if in_bulk else self.settings.read
        if wanted is None or (isinstance(wanted, TagFilter) and wanted.matches_all):
            wanted = None
            if queue is not None and (
                near := read_near(queue, self._log, settings, offset, max_messages, max_bytes)
            ):
                return near
        return read_queue(
            queue, self._log, settings, offset, max_messages, wanted, max_bytes, judge
        )

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The first offset that can be read; 0 for an unknown queue."""
        queue = self._queue(topic, queue_id)
        return queue.min_offset if queue else 0

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The offset of the next message to become readable; 0 for an unknown queue."""
        queue = self._queue(topic, queue_id)
        return queue.max_offset if queue else 0

    def offset_by_time(
        self, topic: str, queue_id: int, time_ms: int, boundary: Boundary = Boundary.LOWER
    ) -> int:
        """The offset for a time, within the bounds of the queue."""
        return offset_by_time(self._queue(topic, queue_id), self._log, time_ms, boundary)

    def earliest_store_time(self, topic: str, queue_id: int) -> int:
        """When the first readable message was stored, in milliseconds; -1 when there is none."""
        queue = self._queue(topic, queue_id)
        if queue is None or queue.min_offset >= queue.max_offset:
            return -1
        return time_of(queue, self._log, queue.min_offset)

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """When a message of a queue was stored, in milliseconds; -1 if it does not exist."""
        queue = self._queue(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.max_offset:
            return -1
        return time_of(queue, self._log, offset)

    def queue_entries(
        self, topic: str, queue_id: int, first: int, count: int
    ) -> list[tuple[int, int, int]] | None:
        """Offset in the log, size and tag code of entries of a queue; None without any."""
        queue = self._queue(topic, queue_id)
        if queue is None:
            return None
        if first < queue.min_offset:
            return []
        return [
            queue.entry(number) for number in range(first, min(first + count, queue.max_offset))
        ]

    def message_at(self, physical_offset: int) -> memoryview:
        """The verified record that begins at an offset of the log."""
        self._check_open()
        return self._finding.message_at(physical_offset)

    def written_at(self, physical_offset: int) -> memoryview:
        """The same, also if it is not flushed yet: no consumer may see it before.

        Messages that are stored because of it come behind it in the log, so the disk has both, or
        only this one, or neither.
        """
        self._check_open()
        return self._finding.written_at(physical_offset)

    def message_by_offset_id(self, offset_id: str) -> memoryview:
        """The verified record of an offset id."""
        self._check_open()
        return self._finding.message_by_offset_id(offset_id)

    def looking_up(
        self, topic: str, key: str, begin_ms: int = 0, end_ms: int = _UNLIMITED
    ) -> Iterator[memoryview | None]:
        """Messages of a topic with this key or this unique id, newest first, in short rounds.

        None stands for a round without a result. The store may be used between two rounds; if it is
        closed, the next one raises. All readable messages are found, unless the index is further
        behind than a look-up may catch up with (`StoreSettings.index_catch_up`).
        """
        self._check_open()
        return self._while_open(self._finding.looking_up(topic, key, begin_ms, end_ms))

    def _while_open(self, rounds: Iterator[memoryview | None]) -> Iterator[memoryview | None]:
        for found in rounds:
            yield found
            self._check_open()

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        self._check_open()
        return self._queues.get(topic, queue_id)

    def _check_open(self) -> None:
        if not self._parts.is_open:
            raise StoreClosed(self.root)

    # ---- the whole store

    def queues(self) -> list[QueueState]:
        """All queues and their bounds."""
        return [
            QueueState(queue.topic, queue.queue_id, queue.min_offset, queue.max_offset)
            for queue in self._queues.by_key.values()
        ]

    def deleted_below(self, topic: str) -> int:
        """The end of the log at the topic's last deletion: messages below are deleted; else 0."""
        return self._parts.deletions.by_topic.get(topic, 0)

    def delete_topic(self, topic: str, *, is_noted: bool = False) -> int:
        """Drop the queues of a topic and its messages; returns the number of queues.

        A topic without queues is unknown to the store, but `is_noted` records its deletion anyway,
        for code that keeps its messages elsewhere and calls `deleted_below`. The deletion is on the
        disk when this returns. Recovery's start is moved beyond the messages soon, because missing
        queues would make it begin at the first file.
        """
        self.write()
        check_topic(topic)
        if not is_noted and not any(queue.topic == topic for queue in self._queues.by_key.values()):
            return 0
        self._note_deletions({topic: self._log.end})
        return self._forget_queues(topic)

    def delete_topic_below(self, topic: str, below: int) -> bool:
        """Delete a topic as a master has: its messages below this offset.

        Messages that are still to be received get no queue. Does nothing and returns False when
        there are messages beyond the offset: the topic may have been created again.
        """
        self.write()
        check_topic(topic)
        queues = [queue for queue in self._queues.by_key.values() if queue.topic == topic]
        if any(queue.last_end > below for queue in queues):
            return False
        self._note_deletions({topic: below})
        self._forget_queues(topic)
        return True

    def deletions(self) -> dict[str, int]:
        """The topics with an entry in `deleted_below`."""
        return dict(self._parts.deletions.by_topic)

    def follow_deletions(self, master: Mapping[str, int]) -> None:
        """Delete what a master has deleted: of every topic the messages below an offset.

        A queue that continues beyond it belongs to a topic that was created again. Its numbers
        started over, so nothing in it is older.
        """
        known, start = self._parts.deletions.by_topic, self._log.start
        news = {
            topic: below
            for topic, below in master.items()
            if below > max(known.get(topic, 0), start)
        }
        if news:
            self.write()
            self._note_deletions(news)
            self._durability.is_wanted = True
            self._queues.delete_below(news)

    def _forget_queues(self, topic: str) -> int:
        self._appender.forget_topic(topic)
        self._durability.is_wanted = True
        return self._queues.delete_topic(topic)

    def statistics(self) -> StoreStatistics:
        """Figures for operators."""
        refusal = self._parts.refusal()
        return StoreStatistics(
            log_start=self._log.start,
            log_end=self._log.end,
            flushed=self._flusher.flushed,
            durable=self._durability.durable,
            dispatched=self._appender.dispatched,
            indexed=self._indexing.position if self._indexing else 0,
            indexed_ms=self._indexing.index.last_ms if self._indexing else 0,
            log_files=len(self._log.files),
            queues=len(self._queues.by_key),
            queue_memory=self._queues.memory,
            flushes=self._flusher.flush_count,
            used_ratio=self._retention.used_ratio,
            is_held_back=self._retention.is_held_back,
            refusal=str(refusal) if refusal else "",
        )

    def close(self) -> None:
        """Flush everything and release the folder.

        If that fails, the folder is released all the same, marked as after a crash.
        """
        if not self._parts.is_open:
            return
        self._post = None
        try:
            if self._flusher.failure is None and not self._parts.is_read_only:
                end = self._appender.write()
                self.wait_flushed(end)
                if self._indexing is not None:
                    self._indexing.advance(self._appender.dispatched, _UNLIMITED)
                self._durability.finish()
                if self._durability.durable == self._log.end:
                    self._files.unlink(self.root / "abort")
                    self._files.sync_folder(self.root)
        except OSError as error:
            raise WriteFailed(f"the store in {self.root} was not closed properly ({error})") from (
                error
            )
        finally:
            self._leave()

    def abandon(self) -> None:
        """Release the folder as after a crash: nothing more is written or flushed."""
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _note_deletions(self, deleted: Mapping[str, int]) -> None:
        try:
            self._parts.deletions.note(deleted)
        except OSError as error:
            kind = DiskFull if is_full(error) else WriteFailed
            topics = ", ".join(map(repr, deleted))
            raise kind(f"topic {topics} was not deleted: {error}") from error

    def _leave(self) -> None:
        self._post = None
        self._parts.release()

    def _wake(self) -> None:
        """Flusher thread: notify the owner, if it still exists."""
        post = self._post
        if post is not None:
            try:
                post(self.settle)
            except RuntimeError:
                log.debug("the owner's loop is closed")


# Opening, in the order of trust: lock the folder; open log and queues as they are; recover; flush
# what recovery accepted; only then start the parts that rely on it and set the mark of a crash,
# which a graceful shutdown removes. On a read-only disk the last step is left out and retried
# later; nothing may be written before it, or the next start would assume a graceful shutdown.


class StoreParts:
    """The parts of an open store. Creating it opens them; a failure leaves nothing open."""

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
        self.is_read_only = True  #: the disk is read-only
        self._why_read_only: OSError | None = None
        self._root = root
        self._settings = settings
        self._clock = clock
        self._files = files
        # Two, so that a long round of flushing never delays the next file of the log.
        self._maker = Worker("orbitmq-file-maker")
        self._syncer = Worker("orbitmq-queue-syncer")
        self._lock = _lock_folder(root, files)
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
        """Make a store writable that was opened on a read-only disk."""
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
        # A crash may have come between the record of a deletion and the deletion of the files. Done
        # before the records are trimmed, which drops those of messages that have left the log.
        self.durability.is_wanted |= self.queues.delete_below(self.deletions.by_topic) > 0
        self.deletions.fit(self.log.start, self.log.end)
        files.write_bytes(root / "abort", str(files.process_id()).encode())
        files.sync_folder(root)
        self.durability.write_first_checkpoint()
        self.is_read_only = False

    def _trust_what_was_found(self) -> None:
        """Flush what recovery accepted before a caller relies on it.

        It may be in the page cache only: never flushed, or after a failed flush, when its pages
        count as clean. Writing it again makes sure.
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
        """The reason why nothing can be written now."""
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


# Statistics of a store.


@dataclass(frozen=True, slots=True)
class QueueState:
    """The bounds of one queue."""

    topic: str
    queue_id: int
    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics:
    """Numbers of an open store; offsets are offsets of the log."""

    log_start: int
    log_end: int
    flushed: int
    durable: int  #: where recovery would begin
    dispatched: int  #: readers see everything below
    indexed: int
    indexed_ms: int  #: when the last message that can be found by key was stored
    log_files: int
    queues: int
    queue_memory: int  #: bytes of entries held in memory
    flushes: int
    used_ratio: float  #: of the disk, at the last cleaning
    is_held_back: bool  #: whether a log file is due for deletion and must not be deleted
    refusal: str  #: why writes are refused; empty when they are not


def _lock_folder(root: Path, files: DiskFiles) -> FolderLock:
    lock = FolderLock(root / "lock", files)
    try:
        is_ours = lock.take()
    except OSError as error:
        raise StoreError(_unusable(root, error)) from error
    if not is_ours:
        raise StoreLocked(root, lock.holder)
    return lock


def _unusable(root: Path, error: OSError) -> str:
    if error.errno == errno.EROFS:
        return (
            f"the folder {root} is on a disk that is mounted read-only, and a store cannot be "
            "opened there, not even to be read; mount it for writing, or open a copy of the folder"
        )
    return f"the folder {root} cannot be used: {error}"
