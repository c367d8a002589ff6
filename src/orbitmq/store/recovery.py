"""Making the files of a store agree with each other after a start.

The log is the truth, the queues are made from it. Recovery chooses an offset `start` such that
everything below it is known to be on the disk, in the log as in the queues; cuts every queue to
the entries that point below `start`; and walks through the log from there, checking every record
and making the queue entries anew. It never looks at what the queue files said above `start`: after
a power loss any page of theirs may be missing, and an entry can be wrong without looking wrong.

Where to start, the best that applies:

    our own checkpoint is valid      its `durable` offset (the end, after a proper shutdown)
    proper shutdown by Apache        the newest file that begins below the last queue entry
    crash of Apache's broker         the newest file that begins before the checkpoint's time
    nothing known                    the first file

If a record does not continue its queue, the queue files are not what they should be, and
everything is made anew from the first file. Files that must be there and are not end the attempt:
whoever lost them may still find them.

Where the log ends. Apache's broker cuts it at the first bad record, deleting all the good ones
behind it. Here the log is cut there if the record is the torn tail of a write that was acknowledged
to nobody; if it is damage done by the disk, the records behind it are found again and kept, the
damage is reported, and whoever reads the lost messages is told so. What tells them apart:

    below the flushed offset    it is damage: all of it was on the disk
    above, nothing good behind  it is the tail
    above, good ones behind     a tail if pages between never reached the disk, damage if not

The last line rests on this: nothing but zeros lies behind the end of the log, because what is cut
or taken back is wiped. So a record with its own offset, found at its place behind a bad one, was
written there by this log, and a page that was lost with the power reads as it was before, which is
as zeros from some record's end to the end of the page. (A page may be lost though the next good
record begins in its last bytes: the size of a record begins with zeros.) Where no page between
looks like that, all of them reached the disk, and bytes have changed afterwards. The flushed offset
of a checkpoint can be a second old, and messages above may have been acknowledged; a doubt is
therefore decided for damage. (Then a message may be kept that nobody was promised, behind one that
is reported lost. That harms nobody.)

A record can also be the tail though it looks good: a lost page may have held nothing but a part of
its topic or properties, which no checksum covers. Such a record ends the log as a bad one does, if
the last run did not end properly and the record is above the flushed offset: see `lostpages`.

Without a checkpoint of ours the flushed offset is not known, and Apache's broker does not wipe:
behind a new record there may be the rest of an old one, and behind that old records in their
places. Then a record behind a bad one proves damage if it was stored later than the last good one
and, after a crash, early enough to have been flushed; and one that looks good is the tail only if
it was stored too late for that. (If no time is known, it is good.)

What is cut is wiped in the file, too, and later files are deleted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbitmq.message.record import RecordFault, check_record
from orbitmq.message.scan import ScanResult
from orbitmq.store.damage import Damage, Losses
from orbitmq.store.errors import StoreDamaged
from orbitmq.store.lostpages import first_torn, has_lost_page
from orbitmq.store.rebuilding import QueueGap, Rebuilding
from orbitmq.store.scanning import (
    find_end_of_file,
    find_record,
    is_record,
    scan_log,
    store_time,
    was_end_of_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from orbitmq.clock import Clock
    from orbitmq.store.checkpoint import Checkpoint
    from orbitmq.store.commitlog import CommitLog, LogFile
    from orbitmq.store.queues import QueueTable
    from orbitmq.store.rebuilding import EntryCode

log = logging.getLogger(__name__)

#: Apache's times may be ahead of its disk by this much.
_MARGIN_MS = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What a start found and did."""

    was_clean: bool  #: the last run ended properly
    used_hint: bool  #: the start came from our own checkpoint
    start: int  #: where the walk through the log began
    start_entries: int  #: entries of all queues below the start, counted from 0
    end: int  #: where the log ends now
    records: int  #: how many were checked
    cut_bytes: int  #: torn tail that was removed
    cut_reason: str  #: why the log ends where it does, when something was removed
    removed_files: int
    rebuilt_entries: int
    rebuilt_all: bool  #: the queues did not fit and were made anew from the first file
    damage: tuple[Damage, ...]
    seconds: float
    last_store_ms: int


@dataclass(slots=True)
class _Walk:
    """What one pass through the log has found so far."""

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
            log.warning("queues do not fit the log and are made anew from its first file")
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

    # ---- where to start

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

    # ---- the walk

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
        """Walk to the end of a file; False when the log ends in it."""
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
            # What was lost bears on the numbers of later records only.
            walk.rebuilding.fill_queues()
            reason = fault.value if fault else "the file ends"
            walk.losses.note(Damage(walk.position, behind - walk.position, reason))
            self._keep_place(file, at, walk)
            walk.position = behind
            if behind >= file.end:
                return True

    def _walk_good_records(self, file: LogFile, walk: _Walk) -> RecordFault | None:
        """Walk to the first place without a good record; why there is none, None at the end."""
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
        """The records of a block up to the first that lost a page with the power."""
        records = block.records
        if self._was_clean:
            return block
        if self._hint is not None:
            is_doubtful = records.starts + file.base >= self._hint.flushed
        elif self._checkpoint.physical_ms > 0:
            is_doubtful = records.store_ms > self._checkpoint.physical_ms - _MARGIN_MS
        else:
            # How old the record is cannot be known, nor how much would be cut with it.
            return block
        torn = first_torn(file.view, records, is_doubtful)
        if torn is None:
            return block
        stopped_at = int(records.starts[torn])
        return ScanResult(records.rows(slice(torn)), stopped_at, RecordFault.LOST_PAGE)

    def _keep_place(self, file: LogFile, at: int, walk: _Walk) -> None:
        """Keep the number of a lost message if its head can be read, so that no other gets it."""
        size = check_record(file.view, at, file.size, check_crc=False)
        if isinstance(size, int):
            found = scan_log(file.view, file.base, start=at, end=at + size, check_crc=False)
            walk.rebuilding.add(file.view, file.base, next(found).records)
            walk.rebuilding.fill_queues()

    def _behind_damage(
        self, file: LogFile, at: int, fault: RecordFault | None, walk: _Walk
    ) -> int | None:
        """Where good records go on behind a bad one; None when the log just ends there."""
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
        """Let the log end where the walk ended; the bytes and files that were removed."""
        commit_log = self._log
        if not commit_log.files:
            commit_log.end = 0
            return 0, 0
        end = walk.position
        last = commit_log.files[-1]
        # Nothing lies behind a proper end of ours.
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
    """How many bytes from `at` on, up to the last one that is not zero, lie in the next MiB."""
    rest = bytes(file.view[at : at + (1 << 20)])
    return len(rest.rstrip(b"\0"))
