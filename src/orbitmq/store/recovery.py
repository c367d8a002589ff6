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
everything is made anew from the first file.

Where the log ends. Above the offset that is known to be flushed, the first bad record is the torn
tail of a write that was acknowledged to nobody: the log is cut there. Apache's broker does this
wherever it finds a bad record, deleting all the good ones behind it. Here a bad record below the
flushed offset is what it must be, damage done by the disk: the records behind it are found again
and kept, the damage is reported, and whoever reads the lost messages is told so. Without a
checkpoint of ours the flushed offset is not known; then a record behind a bad one proves damage if
it was stored later than the last good one and, after a crash, early enough to have been flushed.
(Later, because Apache's broker does not wipe what it cuts: behind a new record there may be the
rest of an old one, and behind that old records in their places.)

What is cut is wiped in the file, too, and later files are deleted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from orbitmq.message.record import MIN_RECORD_SIZE, RecordFault
from orbitmq.store.consumequeue import SCHEDULE_TOPIC, pack_entry
from orbitmq.store.errors import TopicRefused
from orbitmq.store.scanning import (
    Records,
    find_record,
    is_record,
    scan,
    store_time,
    tag_codes_of,
    topics_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from orbitmq.clock import Clock
    from orbitmq.store.checkpoint import Checkpoint
    from orbitmq.store.commitlog import CommitLog, LogFile
    from orbitmq.store.consumequeue import ConsumeQueue
    from orbitmq.store.queues import QueueTable

    #: topic, properties, store time -> last field of the queue entry
    EntryCode = Callable[[str, bytes, int], int]

log = logging.getLogger(__name__)

_ENTRY = np.dtype([("offset", ">i8"), ("size", ">i4"), ("code", ">i8")])
#: Set in messages that have no place in a queue: prepared and rolled back.
_NO_ENTRY = 0x4
#: Apache's times may be ahead of its disk by this much.
_MARGIN_MS = 3000
#: More lost messages in a row are not believed without damage that explains them.
_LARGEST_GAP = 100_000


@dataclass(frozen=True, slots=True)
class Damage:
    """A stretch of the log whose records are lost."""

    offset: int
    size: int
    reason: str


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


class _QueueGap(Exception):
    """A record does not continue its queue: another pass is needed."""


@dataclass(slots=True)
class _Walk:
    """What one pass through the log has found so far."""

    position: int
    records: int = 0
    rebuilt: int = 0
    last_store_ms: int = 0
    end_fault: RecordFault | None = None
    damage: list[Damage] = field(default_factory=list)
    lost_bytes: int = 0

    def note(self, damage: Damage) -> None:
        log.error(
            "commit log damaged, the records behind are kept",
            extra={"offset": damage.offset, "size": damage.size, "reason": damage.reason},
        )
        self.damage.append(damage)
        self.lost_bytes += damage.size


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
        clock: Clock,
    ) -> None:
        self._log = commit_log
        self._queues = queues
        self._checkpoint = checkpoint
        self._was_clean = was_clean
        self._chunk = chunk
        self._entry_code = entry_code
        self._clock = clock
        hint = checkpoint.hint
        files = commit_log.files
        self._hint = hint if hint and files and hint.durable <= files[-1].end else None
        self._start = 0
        self._start_entries = 0

    def run(self) -> RecoveryReport:
        """Recover; log and queues are ready for use afterwards."""
        begun = self._clock.monotonic()
        rebuilt_all = False
        self._start = self._choose_start()
        try:
            walk = self._pass(self._hint.entries if self._hint else None)
        except _QueueGap:
            log.warning("queues do not fit the log and are made anew from its first file")
            rebuilt_all = True
            self._start = self._log.start
            walk = self._pass(None)
        cut_bytes, removed = self._end_log(walk)
        for queue in self._queues.by_key.values():
            queue.next_offset = queue.max_offset
            if walk.damage:
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
            rebuilt_entries=walk.rebuilt,
            rebuilt_all=rebuilt_all,
            damage=tuple(walk.damage),
            seconds=self._clock.monotonic() - begun,
            last_store_ms=walk.last_store_ms,
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
            return _Walk(0)
        for queue in self._queues.by_key.values():
            queue.cut_to(self._start)
            if queue.unsynced:
                self._queues.mark_dirty(queue)
        self._start_entries = sum(queue.max_offset for queue in self._queues.by_key.values())
        if expected_entries not in (None, self._start_entries) and self._start > self._log.start:
            raise _QueueGap
        walk = _Walk(self._start)
        while (file := self._log.file_of(walk.position)) is not None:
            if not self._walk_file(file, walk):
                break
        return walk

    def _walk_file(self, file: LogFile, walk: _Walk) -> bool:
        """Walk to the end of a file; False when the log ends in it."""
        while True:
            at = walk.position - file.base
            found = scan(file.view[at : at + self._chunk], walk.position)
            if not len(found) and found.fault is RecordFault.CUT_SHORT:
                # Maybe only the chunk is too short for the record.
                found = scan(file.view[at:], walk.position)
            if len(found):
                self._dispatch(found, walk)
                walk.position += found.end
                walk.records += len(found)
                walk.last_store_ms = max(walk.last_store_ms, int(found.store_ms.max()))
                continue
            walk.end_fault = found.fault
            if found.fault is RecordFault.END_OF_FILE:
                if self._log.file_of(file.end) is None:
                    return False
                walk.position = file.end
                return True
            behind = self._behind_damage(file, at, found.fault, walk)
            if behind is None:
                return False
            reason = found.fault.value if found.fault else "the file ends"
            damage = Damage(walk.position, behind - walk.position, reason)
            walk.note(damage)
            self._keep_place(file, at, walk)
            walk.position = behind
            if behind >= file.end:
                return True

    def _keep_place(self, file: LogFile, at: int, walk: _Walk) -> None:
        """Keep the number of a lost message if its head can be read, so that no other gets it."""
        found = scan(file.view[at:], walk.position, check_crc=False)
        if len(found):
            size = int(found.sizes[0])
            self._dispatch(scan(file.view[at : at + size], walk.position, check_crc=False), walk)

    def _behind_damage(
        self, file: LogFile, at: int, fault: RecordFault | None, walk: _Walk
    ) -> int | None:
        """Where good records go on behind a bad one; None when the log just ends there."""
        if self._hint is not None:
            flushed = self._hint.flushed
            if file.base + at >= flushed:
                return None
            limit = min(file.size, flushed - file.base)
            found = find_record(file.view, file.base, at + 1, limit)
            if found is not None:
                return file.base + found
            return file.end if flushed > file.end and self._log.file_of(file.end) else None
        if fault is not RecordFault.EMPTY:
            found = find_record(file.view, file.base, at + 1, file.size)
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

    def _was_flushed(self, store_ms: int, walk: _Walk) -> bool:
        if store_ms < walk.last_store_ms:
            return False
        return self._was_clean or store_ms <= self._checkpoint.physical_ms - _MARGIN_MS

    # ---- queue entries

    def _dispatch(self, records: Records, walk: _Walk) -> None:
        wanted = np.flatnonzero(records.sys_flags & _NO_ENTRY == 0)
        if not len(wanted):
            return
        topics, which = topics_of(records)
        entries = np.zeros(len(records), _ENTRY)
        entries["offset"] = records.starts + records.base
        entries["size"] = records.sizes
        entries["code"] = self._codes(records, topics, which)
        # Bring the entries of a queue together without changing their order.
        order = wanted[np.lexsort((wanted, records.queue_ids[wanted], which[wanted]))]
        topic_numbers, queue_ids = which[order], records.queue_ids[order]
        changes = (np.diff(topic_numbers) != 0) | (np.diff(queue_ids) != 0)
        for group in np.split(order, np.flatnonzero(changes) + 1):
            topic = topics[int(which[group[0]])]
            queue_id = int(records.queue_ids[group[0]])
            try:
                queue = self._queues.get(topic, queue_id) or self._queues.create(topic, queue_id)
            except TopicRefused:
                for entry in entries[group]:
                    walk.note(Damage(int(entry["offset"]), int(entry["size"]), "no such topic"))
                continue
            self._fill(queue, entries[group], records.queue_offsets[group], walk)
            walk.rebuilt += len(group)

    def _codes(
        self, records: Records, topics: list[str], which: NDArray[np.intp]
    ) -> NDArray[np.int64]:
        codes = tag_codes_of(records)
        if SCHEDULE_TOPIC in topics:
            ends = records.starts + records.sizes
            for index in np.flatnonzero(which == topics.index(SCHEDULE_TOPIC)).tolist():
                raw = records.view[int(records.properties_at[index]) : int(ends[index])]
                stored = int(records.store_ms[index])
                codes[index] = self._entry_code(SCHEDULE_TOPIC, bytes(raw), stored)
        return codes

    def _fill(
        self,
        queue: ConsumeQueue,
        entries: NDArray[np.void],
        numbers: NDArray[np.int64],
        walk: _Walk,
    ) -> None:
        first = int(numbers[0])
        last_end = int(entries["offset"][-1]) + int(entries["size"][-1])
        if first == queue.max_offset and (np.diff(numbers) == 1).all():
            queue.push(entries.tobytes(), first, last_end)
        else:
            found = numbers.tolist()
            following = [*found[1:], None]
            for number, after, entry in zip(found, following, entries.tolist(), strict=True):
                if self._is_plausible(queue, number, after, walk):
                    offset, size, code = entry
                    queue.push(pack_entry(offset, size, code), number, offset + size)
                else:
                    walk.note(Damage(entry[0], entry[1], "its number does not fit its queue"))
        self._queues.mark_dirty(queue)
        if len(queue.tail) > self._queues.tail_limit:
            self._queues.spill(queue)

    def _is_plausible(
        self, queue: ConsumeQueue, number: int, after: int | None, walk: _Walk
    ) -> bool:
        """Whether a record can have this number; no checksum covers it.

        Normally it continues its queue. If not, there must be a reason: records before it were
        lost, or the topic was deleted and made again. The next record of the queue is a witness.
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
        if queue.max_offset and gap <= walk.lost_bytes // MIN_RECORD_SIZE:
            return True
        if self._start > self._log.start:
            raise _QueueGap
        # Nothing is left to look at. A queue may begin anywhere, its older files may be gone.
        return queue.max_offset == 0 or (after is not None and gap <= _LARGEST_GAP)

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
