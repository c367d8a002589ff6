"""Makes the files of a store consistent at a start.

The log is the truth; queues and index are derived from it. Recovery trusts everything below the
`durable` offset of the checkpoint, checks the log from there on and derives the queue entries
again. A torn tail that was never acknowledged is cut; damage in the middle is reported and kept.

Trap: behind the end of the log there must be only zeros, so everything that is cut is cleared.
The rules and their reasons: docs/internals/recovery.md.
"""

from __future__ import annotations

import logging
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from orbitmq.atomicfile import write_all
from orbitmq.message.record import MIN_RECORD_SIZE, RecordFault, check_record
from orbitmq.message.scan import ScanResult
from orbitmq.store.queues import ENTRY, SCHEDULE_TOPIC, pack_entry
from orbitmq.store.settings import StoreDamaged, TopicRefused
from orbitmq.store.verify import (
    TopicNumbers,
    entry_codes,
    find_end_of_file,
    find_record,
    first_torn,
    has_lost_page,
    is_record,
    scan_log,
    store_time,
    was_end_of_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from orbitmq.clock import Clock
    from orbitmq.message.scan import Int32s, Int64s, RecordArrays
    from orbitmq.store.append import Appender
    from orbitmq.store.commitlog import CommitLog, Flusher, LogFile
    from orbitmq.store.files import DiskFiles, Job, Worker
    from orbitmq.store.index import Indexing
    from orbitmq.store.queues import ConsumeQueue, QueueTable
    from orbitmq.store.settings import FlushSettings

    EntryCode = Callable[[bytes, int], int]
    Entries = NDArray[np.void]


log = logging.getLogger(__name__)

#: The times in Apache's checkpoint may be ahead of its disk by this much.
_MARGIN_MS = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """The result of a recovery."""

    was_clean: bool  #: the last run was shut down gracefully
    used_hint: bool  #: the start came from our own checkpoint
    start: int  #: where the scan of the log began
    start_entries: int  #: entries of all queues below the start, counted from 0
    end: int  #: the end of the log now
    records: int  #: the number of checked records
    cut_bytes: int  #: bytes of the torn tail that was removed
    cut_reason: str  #: why the log ends there, if something was removed
    removed_files: int
    rebuilt_entries: int
    rebuilt_all: bool  #: the queues did not match and were rebuilt from the first file
    damage: tuple[Damage, ...]
    seconds: float
    last_store_ms: int


@dataclass(slots=True)
class _Walk:
    """The state of one pass through the log."""

    position: int
    filled: int  #: the queues have the entries of all records below
    rebuilding: Rebuilding
    losses: Losses
    records: int = 0
    last_store_ms: int = 0
    end_fault: RecordFault | None = None


class Recovery:
    """One recovery of one store."""

    def __init__(
        self,
        commit_log: CommitLog,
        queues: QueueTable,
        checkpoint: Checkpoint,
        *,
        was_clean: bool,
        chunk: int,
        entry_code: EntryCode,
        deleted: dict[str, int],
        clock: Clock,
    ) -> None:
        self._log = commit_log
        self._queues = queues
        self._checkpoint = checkpoint
        self._was_clean = was_clean
        self._chunk = chunk
        self._entry_code = entry_code
        self._deleted = deleted
        self._clock = clock
        self._hint = checkpoint.hint
        self._start = 0
        self._start_entries = 0

    def run(self) -> RecoveryReport:
        """Recover; log and queues are ready for use afterwards."""
        begun = self._clock.monotonic()
        self._refuse_missing_files()
        rebuilt_all = False
        self._start = self._choose_start()
        try:
            walk = self._pass(self._hint.entries if self._hint else None)
        except QueueGap:
            log.warning("queues do not fit the log and are rebuilt from its first file")
            rebuilt_all = True
            self._start = self._log.start
            walk = self._pass(None)
        cut_bytes, removed = self._end_log(walk)
        for queue in self._queues.by_key.values():
            queue.next_offset = queue.max_offset
            if walk.losses.damage:
                queue.trusted_from = queue.max_offset
            queue.correct_min_offset(self._log.start)
        return RecoveryReport(
            was_clean=self._was_clean,
            used_hint=self._hint is not None,
            start=self._start,
            start_entries=self._start_entries,
            end=self._log.end,
            records=walk.records,
            cut_bytes=cut_bytes,
            cut_reason=walk.end_fault.value if cut_bytes and walk.end_fault else "",
            removed_files=removed,
            rebuilt_entries=walk.rebuilding.rebuilt,
            rebuilt_all=rebuilt_all,
            damage=tuple(walk.losses.damage),
            seconds=self._clock.monotonic() - begun,
            last_store_ms=walk.last_store_ms,
        )

    def _refuse_missing_files(self) -> None:
        files = self._log.files
        hint = self._hint
        advice = (
            "restore the missing files (is the disk mounted?), or delete `checkpoint` and "
            "`consumequeue` to go on without their messages"
        )
        end = files[-1].end if files else 0
        if hint is not None and hint.entries and hint.durable > end:
            raise StoreDamaged(
                f"the commit log in {self._log.folder} ends at {end}, and its files must reach "
                f"{hint.durable}; {advice}"
            )
        if not files and any(queue.end_of_files() for queue in self._queues.by_key.values()):
            raise StoreDamaged(
                f"the commit log in {self._log.folder} is empty, and the queues have entries; "
                f"{advice}"
            )

    # ---- the start

    def _choose_start(self) -> int:
        if not self._log.files:
            return 0
        if self._hint is not None:
            return max(self._hint.durable, self._log.start)
        if self._was_clean:
            known = max((queue.end_of_files() for queue in self._queues.by_key.values()), default=0)
            return self._newest_file(lambda file: file.base <= known)
        safe = self._checkpoint.safe_ms
        return self._newest_file(lambda file: 0 < store_time(file.view) <= safe)

    def _newest_file(self, is_early: Callable[[LogFile], bool]) -> int:
        for each in reversed(self._log.files):
            if is_record(each.view, each.base, 0) and is_early(each):
                return each.base
        return self._log.start

    # ---- the scan

    def _pass(self, expected_entries: int | None) -> _Walk:
        if not self._log.files:
            self._queues.clear()
            return self._begin_walk()
        for queue in self._queues.by_key.values():
            queue.cut_to(self._start)
            if queue.unsynced:
                self._queues.mark_dirty(queue)
        self._start_entries = sum(queue.max_offset for queue in self._queues.by_key.values())
        if expected_entries not in (None, self._start_entries) and self._start > self._log.start:
            raise QueueGap
        walk = self._begin_walk()
        while (file := self._log.file_of(walk.position)) is not None:
            if not self._walk_file(file, walk):
                break
        walk.rebuilding.fill_queues()
        if self._hint is not None and walk.position < self._hint.flushed:
            reason = walk.end_fault.value if walk.end_fault else "the file ends"
            lost = self._hint.flushed - walk.position
            walk.losses.note(Damage(walk.position, lost, f"{reason}, up to the end of the log"))
        return walk

    def _begin_walk(self) -> _Walk:
        losses = Losses()
        is_from_first = self._start <= self._log.start
        rebuilding = Rebuilding(
            self._queues, self._entry_code, losses, self._deleted, is_from_first=is_from_first
        )
        return _Walk(self._start, self._start, rebuilding, losses)

    def _walk_file(self, file: LogFile, walk: _Walk) -> bool:
        """Scan to the end of a file; False when the log ends in it."""
        while True:
            fault = self._walk_good_records(file, walk)
            walk.end_fault = fault
            if fault is RecordFault.END_OF_FILE:
                if self._log.file_of(file.end) is None:
                    return False
                walk.position = file.end
                return True
            at = walk.position - file.base
            behind = self._behind_damage(file, at, fault, walk)
            if behind is None:
                return False
            # Lost records affect only the numbers of later ones.
            walk.rebuilding.fill_queues()
            reason = fault.value if fault else "the file ends"
            walk.losses.note(Damage(walk.position, behind - walk.position, reason))
            self._keep_place(file, at, walk)
            walk.position = behind
            if behind >= file.end:
                return True

    def _walk_good_records(self, file: LogFile, walk: _Walk) -> RecordFault | None:
        """Scan to the first place without a good record; returns the reason, None at the end."""
        for found in scan_log(file.view, file.base, start=walk.position - file.base):
            block = self._without_torn(file, found)
            records = block.records
            if len(records):
                walk.rebuilding.add(file.view, file.base, records)
                walk.position = file.base + block.stopped_at
                walk.records += len(records)
                walk.last_store_ms = max(walk.last_store_ms, int(records.store_ms.max()))
            if walk.position - walk.filled >= self._chunk:
                walk.rebuilding.fill_queues()
                walk.filled = walk.position
            if block.fault is not None:
                break
        return block.fault

    def _without_torn(self, file: LogFile, block: ScanResult) -> ScanResult:
        """The records of a block up to the first that lost a page in a power failure."""
        records = block.records
        if self._was_clean:
            return block
        if self._hint is not None:
            is_doubtful = records.starts + file.base >= self._hint.flushed
        elif self._checkpoint.physical_ms > 0:
            is_doubtful = records.store_ms > self._checkpoint.physical_ms - _MARGIN_MS
        else:
            # The age of the record is unknown, and so is how much would be cut with it.
            return block
        torn = first_torn(file.view, records, is_doubtful)
        if torn is None:
            return block
        stopped_at = int(records.starts[torn])
        return ScanResult(records.rows(slice(torn)), stopped_at, RecordFault.LOST_PAGE)

    def _keep_place(self, file: LogFile, at: int, walk: _Walk) -> None:
        """Reserve the number of a lost message whose head can be read: it must not be reused."""
        size = check_record(file.view, at, file.size, check_crc=False)
        if isinstance(size, int):
            found = scan_log(file.view, file.base, start=at, end=at + size, check_crc=False)
            walk.rebuilding.add(file.view, file.base, next(found).records)
            walk.rebuilding.fill_queues()

    def _behind_damage(
        self, file: LogFile, at: int, fault: RecordFault | None, walk: _Walk
    ) -> int | None:
        """Where good records continue behind a bad one; None when the log ends there."""
        if fault is RecordFault.LOST_PAGE:
            return None
        if self._hint is not None:
            return self._behind_damage_of_ours(file, at, self._hint.flushed)
        if fault is not RecordFault.EMPTY:
            found = find_record(file.view, file.base, at + 1, file.written_end)
            if found is not None and self._was_flushed(store_time(file.view[found:]), walk):
                return file.base + found
        following = self._log.file_of(file.end)
        if (
            following is not None
            and is_record(following.view, following.base, 0)
            and self._was_flushed(store_time(following.view), walk)
        ):
            return file.end
        return None

    def _behind_damage_of_ours(self, file: LogFile, at: int, flushed: int) -> int | None:
        view = file.view
        following = self._log.file_of(file.end)
        is_flushed = file.base + at < flushed
        # Without this bound a start would read a gigabyte of zeros.
        written = file.written_end
        found = find_record(view, file.base, at + 1, written)
        if found is None and following is not None:
            found = find_end_of_file(view, at + 1, file.size, written)
        if found is not None:
            if is_flushed or not has_lost_page(view, at, found):
                return file.base + found
        elif following is not None and (
            flushed > file.end
            or (was_end_of_file(view, at) and is_record(following.view, following.base, 0))
        ):
            return file.end
        return None

    def _was_flushed(self, store_ms: int, walk: _Walk) -> bool:
        if store_ms < walk.last_store_ms:
            return False
        return self._was_clean or store_ms <= self._checkpoint.physical_ms - _MARGIN_MS

    # ---- the end

    def _end_log(self, walk: _Walk) -> tuple[int, int]:
        """End the log where the scan ended; returns the removed bytes and files."""
        commit_log = self._log
        if not commit_log.files:
            commit_log.end = 0
            return 0, 0
        end = walk.position
        last = commit_log.files[-1]
        # After a graceful shutdown of ours there is nothing behind the end.
        is_ours = self._hint is not None and self._hint.is_clean and walk.records == 0
        if is_ours and last.base <= end and walk.end_fault in (RecordFault.EMPTY, None):
            commit_log.end = end
            return 0, 0
        holding = commit_log.file_of(end)
        torn = _used_bytes(holding, end - holding.base) if holding is not None else 0
        removed = sum(1 for each in commit_log.files if each.base > end)
        commit_log.cut(end)
        if torn or removed:
            log.warning(
                "commit log cut",
                extra={"offset": end, "bytes": torn, "files": removed},
            )
        return torn, removed


def _used_bytes(file: LogFile, at: int) -> int:
    """How many bytes of the next MiB from `at` on precede its zeros at the end."""
    rest = bytes(file.view[at : at + (1 << 20)])
    return len(rest.rstrip(b"\0"))


# Queue entries from records. Blocks of records are decoded by columns and sorted by queue; within a
# queue the order of the log is kept. No checksum covers the number of a record in its queue, so
# each number is compared with the expected one (`_is_plausible`).


#: Set in messages that have no place in a queue: prepared and rolled back.
_NO_ENTRY = 0x4
#: A single record that implies more lost messages than this is not believed.
_LARGEST_GAP = 100_000


class QueueGap(Exception):
    """A record does not continue its queue: the queues must be rebuilt from an earlier record."""


class Rebuilding:
    """Fills queues from records, which are added in the order of the log."""

    def __init__(
        self,
        queues: QueueTable,
        entry_code: EntryCode,
        losses: Losses,
        deleted: dict[str, int],
        *,
        is_from_first: bool,
    ) -> None:
        self.rebuilt = 0  #: created entries
        self._queues = queues
        self._entry_code = entry_code
        self._losses = losses
        self._deleted = deleted  #: by topic: the offset below which its messages have no queue
        self._is_from_first = is_from_first  #: there are no earlier records
        self._topics = TopicNumbers()
        # Records that are not in the queues yet: topics, queue ids, numbers in the queue, and the
        # contents of entries: offsets, sizes, codes.
        self._columns: list[tuple[Int64s, Int32s, Int64s, Int64s, Int32s, Int64s]] = []

    def add(self, view: memoryview, base: int, records: RecordArrays) -> None:
        """Add the records of a block of the file that begins at offset `base` of the log."""
        has_entry = records.sys_flags & _NO_ENTRY == 0
        if not has_entry.all():
            records = records.rows(has_entry)
        if not len(records):
            return
        topics = self._topics.of(view, records)
        for topic in self._deleted.keys() & set(self._topics.names):
            is_kept = ~self._topics.is_in(topic, topics)
            is_kept |= records.starts + base >= self._deleted[topic]
            if not is_kept.all():
                records, topics = records.rows(is_kept), topics[is_kept]
        if not len(records):
            return
        is_scheduled = self._topics.is_in(SCHEDULE_TOPIC, topics)
        self._columns.append(
            (
                topics,
                records.queue_ids,
                records.queue_offsets,
                records.starts + base,
                records.sizes,
                entry_codes(view, records, is_scheduled, self._entry_code),
            )
        )

    def fill_queues(self) -> None:
        """Append the records added since the last time to the queues."""
        if not self._columns:
            return
        columns = [np.concatenate(parts) for parts in zip(*self._columns, strict=True)]
        self._columns = []
        order = _by_queue(columns[0], columns[1])
        topics, queue_ids, numbers, offsets, sizes, codes = (column[order] for column in columns)
        entries: Entries = np.empty(len(order), ENTRY)
        entries["offset"], entries["size"], entries["code"] = offsets, sizes, codes
        changes = (np.diff(topics) != 0) | (np.diff(queue_ids) != 0)
        ends = [*(np.flatnonzero(changes) + 1).tolist(), len(order)]
        first = 0
        for end in ends:
            topic, queue_id = self._topics.names[int(topics[first])], int(queue_ids[first])
            self._fill(topic, queue_id, entries[first:end], numbers[first:end])
            first = end

    def _fill(self, topic: str, queue_id: int, entries: Entries, numbers: Int64s) -> None:
        try:
            queue = self._queues.get(topic, queue_id) or self._queues.create(topic, queue_id)
        except TopicRefused:
            for offset, size, _ in entries.tolist():
                self._losses.note(Damage(offset, size, "no such topic"))
            return
        count = len(numbers)
        first = int(numbers[0])
        # Numbers that always rise, and by as much as there are records, have no gap.
        is_rising = int(numbers[-1]) - first == count - 1 and (numbers[1:] > numbers[:-1]).all()
        if first == queue.max_offset and is_rising:
            offset, size, _ = entries[-1].tolist()
            queue.push(entries.tobytes(), first, offset + size)
        else:
            self._fill_one_by_one(queue, entries, numbers)
        self.rebuilt += count
        self._queues.mark_dirty(queue)
        if len(queue.tail) > self._queues.tail_limit:
            self._queues.spill(queue)

    def _fill_one_by_one(self, queue: ConsumeQueue, entries: Entries, numbers: Int64s) -> None:
        found = numbers.tolist()
        following = [*found[1:], None]
        for number, after, entry in zip(found, following, entries.tolist(), strict=True):
            offset, size, code = entry
            if self._is_plausible(queue, number, after):
                queue.push(pack_entry(offset, size, code), number, offset + size)
            else:
                self._losses.note(Damage(offset, size, "its number does not fit its queue"))

    def _is_plausible(self, queue: ConsumeQueue, number: int, after: int | None) -> bool:
        """Whether a record can have this number; no checksum covers it.

        Normally it continues its queue. If not, there must be a reason: earlier records were lost,
        or the topic was deleted and created again. The next record of the queue is a witness.
        """
        gap = number - queue.max_offset
        if gap == 0:
            return True
        is_alone = after is not None and after != number + 1
        if is_alone:
            return False
        if gap < 0:
            if number == 0:
                queue.restart()
            return number == 0
        if queue.max_offset and gap <= self._losses.lost_bytes // MIN_RECORD_SIZE:
            return True
        if not self._is_from_first:
            raise QueueGap
        # Nothing is left to compare: the messages between were in deleted files. No number may be
        # used twice, so the queue continues here. (A large gap needs a witness.)
        if queue.max_offset and gap > _LARGEST_GAP:
            if after is not None:
                queue.restart()
            return after is not None
        return True


def _by_queue(topics: Int64s, queue_ids: Int32s) -> NDArray[np.intp]:
    """The order that groups records by queue and keeps their order within it."""
    spread = int(queue_ids.max()) + 1
    keys = topics * spread + queue_ids
    if queue_ids.min() >= 0 and keys.max() <= np.iinfo(np.uint16).max:
        # Numbers of 16 bits are sorted by counting, ten times as fast.
        return np.argsort(keys.astype(np.uint16), kind="stable")
    return np.lexsort((queue_ids, topics))


@dataclass(frozen=True, slots=True)
class Damage:
    """A range of the log whose records are lost."""

    offset: int
    size: int
    reason: str


class Losses:
    """The damage found so far."""

    def __init__(self) -> None:
        self.damage: list[Damage] = []
        self.lost_bytes = 0

    def note(self, damage: Damage) -> None:
        log.error(
            "commit log damaged",
            extra={"offset": damage.offset, "size": damage.size, "reason": damage.reason},
        )
        self.damage.append(damage)
        self.lost_bytes += damage.size


# The checkpoint file. Apache's 40 bytes come first; ours are bytes 64 to 139, and their checksum
# covers Apache's, too. docs/internals/recovery.md has the fields.

CHECKPOINT_PAGE = 4096
_times = struct.Struct(">5q")
_hint = struct.Struct(">8sqqqqqqqq")
_checksum = struct.Struct(">I")
_HINT_AT = 64
_MAGIC = b"ORBITMQ\x02"
_CLEAN = 1


class Hint(NamedTuple):
    """The state of our own broker at a checkpoint."""

    file_size: int
    queue_file_entries: int
    durable: int
    entries: int
    flushed: int
    indexed: int
    index_last: int
    is_clean: bool = False  #: written last, by a graceful shutdown


class Checkpoint(NamedTuple):
    """The content of the checkpoint file; times in milliseconds, as stored."""

    physical_ms: int = 0
    logical_ms: int = 0
    index_ms: int = 0
    master_flushed: int = 0
    confirmed: int = 0
    hint: Hint | None = None

    @property
    def safe_ms(self) -> int:
        """Messages stored before this are on the disk, in log and queues."""
        return max(0, min(self.physical_ms, self.logical_ms) - _MARGIN_MS)

    def pack(self) -> bytes:
        *times, hint = self
        page = _times.pack(*times).ljust(_HINT_AT, b"\0")
        if hint is not None:
            page += _hint.pack(_MAGIC, *hint)
            page += _checksum.pack(zlib.crc32(page))
        return page.ljust(CHECKPOINT_PAGE, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> Checkpoint:
        page = page.ljust(CHECKPOINT_PAGE, b"\0")
        return cls._make((*_times.unpack_from(page), _unpack_hint(page)))


def read_checkpoint(path: Path, files: DiskFiles) -> Checkpoint:
    """The checkpoint of a store; an empty one when there is no file."""
    if not files.exists(path):
        return Checkpoint()
    return Checkpoint.unpack(files.read_bytes(path)[:CHECKPOINT_PAGE])


def write_checkpoint(path: Path, checkpoint: Checkpoint, files: DiskFiles) -> None:
    """Replace the file; returns when it is on the disk."""
    is_new = not files.exists(path)
    fd = files.open(path, create=True)
    try:
        write_all(files, fd, checkpoint.pack(), 0)
        files.sync(fd)
    finally:
        files.close(fd)
    if is_new:
        files.sync_folder(path.parent)


def _unpack_hint(page: bytes) -> Hint | None:
    magic, *numbers, flags = _hint.unpack_from(page, _HINT_AT)
    checked = _HINT_AT + _hint.size
    if magic != _MAGIC or _checksum.unpack_from(page, checked)[0] != zlib.crc32(page[:checked]):
        return None
    hint = Hint._make((*numbers, bool(flags & _CLEAN)))
    return hint if 0 <= hint.durable <= hint.flushed else None


# Durability rounds: everything that is stored now is flushed in steps, then the checkpoint's
# `durable` offset moves. docs/internals/recovery.md says when a round begins and how the index
# takes part.

#: This number of queues doubles the amount of log that a round waits for.
_QUEUES_TO_DOUBLE = 512
#: After this many rounds' worth of log the index takes part in one, whatever the time.
_INDEX_ROUNDS = 4
#: How long a step may write queues, in seconds, and after how many it checks the clock.
_STEP = 0.005
_BETWEEN_LOOKS = 8
#: Seconds until a queue that the disk refused is tried again; nothing is stored meanwhile.
_RETRY = 1.0


class Durability:
    """Rounds of flushing, and the checkpoint that records them."""

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
        self.is_wanted = False  #: a round begins at the next step, and is recorded
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
        #: When the index last had to be flushed, and its position then.
        self._index_tried = (self._round_ended, indexing.position if indexing else 0)
        self._checkpoint_job: Job | None = None
        self._is_checkpoint_wanted = False
        # A position in the log and its time, recorded when the log is flushed beyond it.
        self._mark = (commit_log.end, appender.last_store_ms)

    def step(self) -> None:
        """Do a bounded part of the due work."""
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
        """Flush everything now; for a graceful shutdown."""
        self.catch_up()
        if self._checkpoint_job is not None:
            self._checkpoint_job.wait()
        self._take_times()
        self._write(self._current(is_clean=self.durable == self._log.end))

    def catch_up(self) -> None:
        """Move `durable` to the present end of the queues, unless the disk refuses."""
        # One round may be running that began with less.
        for _ in range(2):
            if self._round is None:
                self._begin_round()
            while self._round is not None and not self._advance_round(1 << 30, wait=True):
                pass

    def write_first_checkpoint(self) -> None:
        """Write a first checkpoint immediately; the next start relies on it."""
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
        # Since the last attempt: a file that cannot be flushed must not be tried all the time.
        tried_at, position = self._index_tried
        return (
            now - tried_at >= self._settings.durable_interval
            or indexing.position - position >= _INDEX_ROUNDS * self._settings.durable_bytes
        )

    def _begin_round(self) -> None:
        is_wanted, self.is_wanted = self.is_wanted, False
        queues, self._queues.dirty = self._queues.dirty, []
        self._round = _Round(
            self._appender.dispatched,
            self._appender.last_store_ms,
            queues,
            {queue: queue.max_offset for queue in self._queues.by_key.values()},
            is_wanted,
        )

    def _advance_round(self, queue_count: int, *, wait: bool = False) -> bool:
        """One step of a round; True when it is complete."""
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
            self._checkpoint = self._checkpoint._replace(logical_ms=current.store_ms)
        self._queues.trim()
        return True

    def _write_queues(self, current: _Round, queue_count: int) -> bool:
        began = self._clock.monotonic()
        for count in range(min(queue_count, len(current.queues))):
            # New files take ten times as long as existing ones.
            is_look = count % _BETWEEN_LOOKS == _BETWEEN_LOOKS - 1
            if is_look and self._clock.monotonic() - began > _STEP:
                break
            queue = current.queues[-1]
            if not self._queues.write(queue):
                # The disk is full. The rest stays in memory and takes part in the next round; this
                # one must not count it as durable.
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
        """Worker: flush the files of the round. Files that were deleted meanwhile need no flush."""
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
        # The time of the last flushed message, not the latest time: after a clock that was ahead
        # was corrected, the latest time would count messages as safe for as long as it had been
        # ahead.
        end, store_ms = self._mark
        if self._flusher.flushed >= end:
            self._mark = (self._log.end, self._appender.last_store_ms)
            if self._flusher.flushed >= self._log.end:
                store_ms = self._appender.last_store_ms
            self._checkpoint = self._checkpoint._replace(physical_ms=store_ms)

    def _current(self, *, is_clean: bool = False) -> Checkpoint:
        indexing = self._indexing
        return self._checkpoint._replace(
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


@dataclass(slots=True)
class _Round:
    """One round from memory to disk."""

    target: int  #: durable when the round is complete
    store_ms: int
    queues: list[ConsumeQueue]  #: queues that are not written yet
    #: The number of entries of each queue at the start of the round.
    entries: dict[ConsumeQueue, int]
    is_wanted: bool  #: a caller waits for it: the checkpoint follows immediately
    written: list[ConsumeQueue] = field(default_factory=list)
    bases: dict[ConsumeQueue, set[int]] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    folders: set[Path] = field(default_factory=set)
    job: Job | None = None
    has_index: bool = False  #: the index takes part in it, if there is one
