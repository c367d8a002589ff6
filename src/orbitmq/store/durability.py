"""Moving the point from which a crash has to be repaired.

From time to time everything that is known is brought to the disk in rounds: the entries that the
queues hold in memory are written, a few hundred queues at a step so that the owner is never held
up for long; the worker flushes their files and the index; the flusher the log. When all of it is
done, everything that was in the queues when the round began is `durable`, and the next checkpoint
says so. Recovery begins there.

What a round costs grows with the queues that have something new, each of which has a file to be
flushed, and what it saves grows with the log. So the more queues there are, the more log a round
waits for: a thousand queues would otherwise make every message half as dear again.

The index takes part in a round only if it did not for `durable_interval`, or for several rounds'
worth of log, because its slots are scattered over a whole file: a busy log would have all of them
written several times a second. What a crash takes from the index is made again from the log in the
background; until that is done, look-ups by key do not find the newest messages.

Apache's broker begins its recovery, and with it the making of its index, by the times that the
checkpoint has for log and queues. So the time for the queues moves on only with a round in which
the index took part.

A queue file that cannot be flushed ends the store's writing life as a log file does.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from orbitmq.store.checkpoint import Checkpoint, Hint, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from orbitmq.clock import Clock
    from orbitmq.store.appending import Appender
    from orbitmq.store.commitlog import CommitLog
    from orbitmq.store.consumequeue import ConsumeQueue
    from orbitmq.store.files import DiskFiles
    from orbitmq.store.flushing import Flusher
    from orbitmq.store.indexing import Indexing
    from orbitmq.store.queues import QueueTable
    from orbitmq.store.settings import FlushSettings
    from orbitmq.store.working import Job, Worker

log = logging.getLogger(__name__)

#: Queues that double the log that a round waits for.
_QUEUES_TO_DOUBLE = 512
#: Rounds' worth of log after which the index takes part in one, whatever the time.
_INDEX_ROUNDS = 4
#: How long a step may write queues, in seconds, and how many it writes between looks at the clock.
_STEP = 0.005
_BETWEEN_LOOKS = 8
#: When a queue that the disk did not take is tried again, in seconds: nothing is stored meanwhile.
_RETRY = 1.0


class Durability:
    """Rounds of flushing, and the checkpoint that tells of them."""

    def __init__(
        self,
        path: Path,
        commit_log: CommitLog,
        queues: QueueTable,
        appender: Appender,
        indexing: Indexing | None,
        flusher: Flusher,
        worker: Worker,
        settings: FlushSettings,
        files: DiskFiles,
        clock: Clock,
        checkpoint: Checkpoint,
        durable: int,
        entries: int,
    ) -> None:
        self.durable = durable
        self._entries = entries  #: entries of all queues that point below `durable`
        self.is_wanted = False  #: a round is to begin at the next step, and to be told of at once
        self._path = path
        self._log = commit_log
        self._queues = queues
        self._appender = appender
        self._indexing = indexing
        self._flusher = flusher
        self._worker = worker
        self._settings = settings
        self._files = files
        self._clock = clock
        self._checkpoint = checkpoint
        self._written = checkpoint
        self._round: _Round | None = None
        self._round_ended = self._checkpoint_begun = clock.monotonic()
        #: When the index was last to be flushed, and how far it was.
        self._index_tried = (self._round_ended, indexing.position if indexing else 0)
        self._checkpoint_job: Job | None = None
        self._is_checkpoint_wanted = False
        # A point in the log and its time, to be told when the log is flushed beyond it.
        self._mark = (commit_log.end, appender.last_store_ms)

    def step(self) -> None:
        """Do a bounded part of what is due."""
        now = self._clock.monotonic()
        if self._round is None:
            if self._is_round_due(now):
                self._begin_round()
        elif self._advance_round(self._settings.queues_per_step):
            self._round_ended = now
        is_due = now - self._checkpoint_begun >= self._settings.checkpoint_interval
        if is_due or self._is_checkpoint_wanted:
            self._checkpoint_begun = now
            self._is_checkpoint_wanted = False
            self._write_checkpoint_if_changed()

    def finish(self) -> None:
        """Bring everything to the disk now; for a proper shutdown."""
        self.catch_up()
        if self._checkpoint_job is not None:
            self._checkpoint_job.wait()
        self._take_times()
        self._write(self._current(is_clean=self.durable == self._log.end))

    def catch_up(self) -> None:
        """Move `durable` to all that is in the queues now, unless the disk does not take it."""
        # One round may be under way that began with less.
        for _ in range(2):
            if self._round is None:
                self._begin_round()
            while self._round is not None and not self._advance_round(1 << 30, wait=True):
                pass

    def write_first_checkpoint(self) -> None:
        """Say at once what this store is made of; the next start relies on it."""
        self._write(self._current())

    # ---- rounds

    def _is_round_due(self, now: float) -> bool:
        grown = self._appender.dispatched - self.durable
        dirty = len(self._queues.dirty)
        if grown <= 0 and not dirty:
            return self.is_wanted or self._is_index_due(now)
        return (
            self.is_wanted
            or self._is_index_due(now)
            or grown >= self._settings.durable_bytes * (1 + dirty / _QUEUES_TO_DOUBLE)
            or now - self._round_ended >= self._settings.durable_interval
            or (self._queues.write_error is not None and now - self._round_ended >= _RETRY)
        )

    def _is_index_due(self, now: float) -> bool:
        indexing = self._indexing
        if indexing is None or indexing.position <= indexing.durable_position:
            return False
        # Since it was last tried: what cannot be flushed is not to be tried all the time.
        tried_at, position = self._index_tried
        return (
            now - tried_at >= self._settings.durable_interval
            or indexing.position - position >= _INDEX_ROUNDS * self._settings.durable_bytes
        )

    def _begin_round(self) -> None:
        is_wanted, self.is_wanted = self.is_wanted, False
        queues, self._queues.dirty = self._queues.dirty, []
        self._round = _Round(self._appender.dispatched, self._appender.last_store_ms, queues)
        self._round.is_wanted = is_wanted
        self._round.entries = {queue: queue.max_offset for queue in self._queues.by_key.values()}

    def _advance_round(self, queue_count: int, *, wait: bool = False) -> bool:
        """One step of a round; True when it is over."""
        current = self._round
        assert current is not None  # noqa: S101 - the caller has looked
        if current.queues:
            return self._write_queues(current, queue_count)
        if current.job is None:
            self._flusher.ask(current.target)
            now = self._clock.monotonic()
            if self._indexing is None:
                current.has_index = True
            elif wait or self._is_index_due(now):
                current.has_index = True
                self._index_tried = (now, self._indexing.position)
                self._indexing.begin_flush()
            current.job = self._worker.submit(self._sync, current)
        if wait:
            current.job.wait()
            self._flusher.wait(current.target, None)
        if not current.job.is_done or self._flusher.flushed < current.target:
            return self._flusher.failure is not None
        self._round = None
        if self._indexing is not None:
            self._indexing.end_flush()
        if current.job.error is not None:
            self._flusher.fail(current.job.error)
            return True
        self.durable = current.target
        # Without those of topics that were deleted meanwhile: no start will find them.
        there = self._queues.by_key.values()
        self._entries = sum(current.entries.get(queue, 0) for queue in there)
        self._is_checkpoint_wanted |= current.is_wanted
        if current.has_index:
            self._checkpoint = replace(self._checkpoint, logical_ms=current.store_ms)
        self._queues.trim()
        return True

    def _write_queues(self, current: _Round, queue_count: int) -> bool:
        began = self._clock.monotonic()
        for count in range(min(queue_count, len(current.queues))):
            # New files take ten times as long as those that are there.
            is_look = count % _BETWEEN_LOOKS == _BETWEEN_LOOKS - 1
            if is_look and self._clock.monotonic() - began > _STEP:
                break
            queue = current.queues[-1]
            if not self._queues.write(queue):
                # The disk is full. All that is left stays in memory and takes part in the next
                # round; this one must not say that it is durable.
                for left in current.queues:
                    left.is_dirty = False
                    self._queues.mark_dirty(left)
                for written in current.written:
                    self._queues.mark_dirty(written)
                    written.unsynced |= current.bases[written]
                    written.has_new_names |= written.folder in current.folders
                self._round = None
                return True
            current.queues.pop()
            queue.is_dirty = False
            current.written.append(queue)
            current.bases[queue] = set(queue.unsynced)
            current.paths += queue.unsynced_paths()
            queue.unsynced.clear()
            if queue.has_new_names:
                queue.has_new_names = False
                current.folders.add(queue.folder)
                current.folders.add(queue.folder.parent)
                current.folders.add(queue.folder.parent.parent)
        return False

    def _sync(self, current: _Round) -> None:
        """Worker: flush what the round has written. What was deleted meanwhile needs no flush."""
        for path in current.paths:
            try:
                fd = self._files.open(path)
            except FileNotFoundError:
                continue
            try:
                self._files.sync(fd)
            finally:
                self._files.close(fd)
        for folder in current.folders:
            try:
                self._files.sync_folder(folder)
            except FileNotFoundError:
                continue
        if self._indexing is not None:
            self._indexing.run_flush()

    # ---- the checkpoint

    def _take_times(self) -> None:
        # The time of the last flushed message, not the latest of all: after a clock that was ahead
        # was corrected, the latest would call messages safe for as long as it had been ahead.
        end, store_ms = self._mark
        if self._flusher.flushed >= end:
            self._mark = (self._log.end, self._appender.last_store_ms)
            if self._flusher.flushed >= self._log.end:
                store_ms = self._appender.last_store_ms
            self._checkpoint = replace(self._checkpoint, physical_ms=store_ms)

    def _current(self, *, is_clean: bool = False) -> Checkpoint:
        indexing = self._indexing
        return replace(
            self._checkpoint,
            index_ms=indexing.durable_ms if indexing else self._checkpoint.index_ms,
            hint=Hint(
                file_size=self._log.file_size,
                queue_file_entries=self._queues.file_entries,
                durable=self.durable,
                entries=self._entries,
                flushed=max(self._flusher.flushed, self.durable),
                indexed=indexing.durable_position if indexing else 0,
                index_last=indexing.durable_last if indexing else 0,
                is_clean=is_clean,
            ),
        )

    def _write_checkpoint_if_changed(self) -> None:
        if self._checkpoint_job is not None:
            if not self._checkpoint_job.is_done:
                return
            if self._checkpoint_job.error is not None:
                # Recovery then begins at an older one; that costs time, not messages.
                log.error("checkpoint not written", extra={"why": self._checkpoint_job.error})
            self._checkpoint_job = None
        self._take_times()
        current = self._current()
        if current != self._written:
            self._written = current
            self._checkpoint_job = self._worker.submit(
                write_checkpoint, self._path, current, self._files
            )

    def _write(self, checkpoint: Checkpoint) -> None:
        write_checkpoint(self._path, checkpoint, self._files)
        self._written = checkpoint


class _Round:
    """One way from memory to disk."""

    __slots__ = (
        "bases",
        "entries",
        "folders",
        "has_index",
        "is_wanted",
        "job",
        "paths",
        "queues",
        "store_ms",
        "target",
        "written",
    )

    def __init__(self, target: int, store_ms: int, queues: list[ConsumeQueue]) -> None:
        self.target = target  #: durable when the round is over
        self.store_ms = store_ms
        self.queues = queues  #: still to be written
        self.written: list[ConsumeQueue] = []
        self.bases: dict[ConsumeQueue, set[int]] = {}
        self.paths: list[Path] = []
        self.folders: set[Path] = set()
        self.job: Job | None = None
        #: how many each queue had when the round began
        self.entries: dict[ConsumeQueue, int] = {}
        self.is_wanted = False  #: somebody relies on it: the checkpoint follows at once
        self.has_index = False  #: the index takes part in it, if there is one
