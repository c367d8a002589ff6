"""Retention: which files are deleted, and when the disk counts as full.

Log files are deleted from the oldest on, as a whole, and never the last one: when they are older
than `keep` (in the configured hours, or when space is scarce), regardless of age when space is very
scarce, and when the log exceeds its size limit. Queue and index files follow. A log file must be
durable first, because recovery needs the queue entries of everything below its start on the disk.

A run does a bounded amount of work; the owner calls again some seconds later.
"""

from __future__ import annotations

import json
import logging
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from orbitmq.atomicfile import write_all
from orbitmq.store.settings import StoreFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from orbitmq.store.commitlog import CommitLog, LogFile
    from orbitmq.store.files import DiskFiles
    from orbitmq.store.index import Indexing
    from orbitmq.store.queues import ConsumeQueue, QueueTable
    from orbitmq.store.recovery import Durability
    from orbitmq.store.settings import RetentionSettings


log = logging.getLogger(__name__)

_QUEUES_PER_RUN = 512
#: Runs without a deletion that is due after which this is logged.
_HELD_BACK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanReport:
    """The result of one run."""

    used_ratio: float
    is_full: bool
    log_files: int = 0
    queue_files: int = 0
    index_files: int = 0


class Retention:
    """Deletes expired files and checks the disk."""

    def __init__(
        self,
        commit_log: CommitLog,
        queues: QueueTable,
        indexing: Indexing | None,
        durability: Durability,
        settings: RetentionSettings,
        files: DiskFiles,
    ) -> None:
        self.is_full = False  #: writes have to be refused
        self.used_ratio = 0.0
        #: Whether a log file, named by its first offset, may be deleted.
        self.may_delete: Callable[[int], bool] = lambda _start: True
        #: Runs in a row that found a file due and could not delete any.
        self._held_back = 0
        self._log = commit_log
        self._queues = queues
        self._indexing = indexing
        self._durability = durability
        self._settings = settings
        self._files = files
        self._manual_runs = 0
        self._corrected_to = commit_log.start
        self._to_correct: list[ConsumeQueue] = []

    def ask_for_cleaning(self) -> None:
        """Delete expired files in the next runs, at any hour."""
        self._manual_runs = self._settings.manual_runs

    def run(self, now: float) -> CleanReport:
        """Check the disk and delete expired files; `now` in seconds since the epoch."""
        self._look_at_disk()
        log_files = self._delete_log_files(now)
        queue_files = self._follow_in_queues()
        index_files = 0
        if self._indexing is not None and log_files:
            index_files = self._indexing.index.delete_below(self._log.start)
        return CleanReport(
            used_ratio=self.used_ratio,
            is_full=self.is_full,
            log_files=log_files,
            queue_files=queue_files,
            index_files=index_files,
        )

    def _look_at_disk(self) -> None:
        self.used_ratio = self._files.used_ratio(self._log.folder)
        is_full = self.used_ratio > self._settings.full_ratio
        if is_full != self.is_full:
            self.is_full = is_full
            log.warning(
                "disk full, writes are refused" if is_full else "disk has room again",
                extra={"folder": str(self._log.folder), "used": round(self.used_ratio, 4)},
            )

    def _delete_log_files(self, now: float) -> int:
        settings = self._settings
        is_forced = self.used_ratio > settings.forced_ratio
        hour = datetime.fromtimestamp(now, UTC).astimezone().hour
        is_time = (
            is_forced
            or self.used_ratio > settings.expired_ratio
            or hour in settings.delete_hours
            or self._manual_runs > 0
        )
        self._manual_runs = max(0, self._manual_runs - 1)
        deleted = 0
        is_refused = False
        while len(self._log.files) > 1 and deleted < settings.files_per_run:
            oldest = self._log.files[0]
            is_due = self._is_too_much() or (
                is_time and (is_forced or self._is_expired(oldest, now))
            )
            if not is_due or not self._is_durable(oldest):
                break
            if not self.may_delete(oldest.base):
                is_refused = True
                break
            try:
                self._log.drop_first()
            except OSError:
                log.exception("commit-log file not deleted", extra={"file": oldest.path.name})
                break
            log.info("commit-log file deleted", extra={"file": oldest.path.name})
            deleted += 1
        self._note_refusal(is_refused=is_refused and not deleted)
        return deleted

    @property
    def is_held_back(self) -> bool:
        """Whether a file is due and must not be deleted; the first refusal may be a question."""
        return self._held_back > 1

    def _note_refusal(self, *, is_refused: bool) -> None:
        self._held_back = self._held_back + 1 if is_refused else 0
        if self._held_back == _HELD_BACK:
            log.warning(
                "commit-log files are due for deletion and wait until they are archived",
                extra={"file": self._log.files[0].path.name, "used": round(self.used_ratio, 4)},
            )

    def _is_durable(self, file: LogFile) -> bool:
        if file.end > self._durability.durable:
            # Rare: runs are never far behind unless the disk has problems.
            try:
                self._durability.catch_up()
            except StoreFailed:
                log.warning("nothing is deleted, because nothing more reaches the disk")
        return file.end <= self._durability.durable

    def _is_expired(self, file: LogFile, now: float) -> bool:
        return now >= self._files.modified(file.path) + self._settings.keep

    def _is_too_much(self) -> bool:
        limit = self._settings.max_bytes
        return limit is not None and self._log.end - self._log.start > limit

    def _follow_in_queues(self) -> int:
        """Let some queues begin at the present begin of the log."""
        start = self._log.start
        if not self._to_correct and self._corrected_to != start:
            self._corrected_to = start
            self._to_correct = list(self._queues.by_key.values())
        deleted = 0
        for _ in range(min(_QUEUES_PER_RUN, len(self._to_correct))):
            queue = self._to_correct.pop()
            queue.correct_min_offset(start)
            deleted += queue.drop_files_below(start)
        return deleted


# Deleted topics. The log keeps the messages of a deleted topic until retention reaches them, and
# recovery would derive its queues again. So the deletion is written to `deleted-topics` before
# anything is removed: messages of the topic below the noted offset belong to no queue.
#
#     checksum offset "topic"
#
# The file is only appended to; the last line about a topic counts, and a line that a crash cut
# short was never confirmed. The file is deleted when the log begins above all its offsets.


class Deletions:
    """The deleted topics of a store."""

    def __init__(self, path: Path, files: DiskFiles) -> None:
        self.by_topic: dict[str, int] = {}  #: messages below belong to no queue
        self._path = path
        self._files = files
        self._size = 0  #: bytes of whole lines

    def load(self) -> None:
        """Read the file."""
        if not self._files.exists(self._path):
            return
        for line in self._files.read_bytes(self._path).splitlines(keepends=True):
            found = _parse(line)
            if found is None:
                break
            self.by_topic[found[0]] = found[1]
            self._size += len(line)

    def note(self, deleted: Mapping[str, int]) -> None:
        """Returns when the deletion of these topics' messages below an offset is on the disk."""
        is_new = not self._files.exists(self._path)
        line = b"".join(_line(topic, offset) for topic, offset in deleted.items())
        fd = self._files.open(self._path, create=True)
        try:
            self._files.truncate(fd, self._size)
            write_all(self._files, fd, line, self._size)
            self._files.sync(fd)
        finally:
            self._files.close(fd)
        if is_new:
            self._files.sync_folder(self._path.parent)
        self._size += len(line)
        self.by_topic.update(deleted)

    def fit(self, log_start: int, log_end: int) -> None:
        """Drop offsets before the begin of the log, and behind an end that was cut.

        New messages will get the offsets behind the end.
        """
        for topic, offset in list(self.by_topic.items()):
            if offset > log_end:
                self.note({topic: log_end})
        if self.by_topic and all(offset <= log_start for offset in self.by_topic.values()):
            self._files.unlink(self._path)
            self.by_topic.clear()
            self._size = 0


def _line(topic: str, offset: int) -> bytes:
    text = f"{offset} {json.dumps(topic)}"
    return f"{zlib.crc32(text.encode()):08x} {text}\n".encode()


def _parse(line: bytes) -> tuple[str, int] | None:
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return None
    offset, _, topic = text.partition(b" ")
    return json.loads(topic), int(offset)
