"""Reading a queue: which messages one pull gets, and where the next pull begins.

The rules are those of Apache's broker, because clients count on them. Of the entries from the
asked offset on, at most 800 are looked at (more if more messages are asked for; see below), all in
one queue file. They are taken in order until the answer is full: by the number asked for, or by
the limits for messages in memory or on the disk. "In memory" is an estimate by the distance to the
end of the log. The first message is returned however large it is.

Messages are views of the mapped log; nothing is copied. If they lie side by side, as those of a
lightly mixed log do, one view spans them all.

What is asked for has a limit where Apache's has none, because a read holds up everybody else: a
filter that has to look into the messages never gets more than the 800 entries, any other one
never more than `MOST_ENTRIES`. And 800 messages take milliseconds to look into. So such a read can
be done in parts (`judge`): the result has then a `rest`, which goes on where the part before ended,
and the last part is what one read in one go would have given.

Most reads have no filter and want what was written lately: `nearreading` answers those by itself.

What comes from the disk is checked before it is served: the head against the place it was read
from, the body against its checksum. (No checksum covers the other fields: Apache's format has
none.) What this process wrote or checked itself, entry and record, is taken as it is while it is
near the end of the log; what lies there from an earlier life is checked in stretches, when it is
read for the first time (see `checking`). A damaged message is skipped and named in `damaged`; the
others are served.
"""

from __future__ import annotations

import enum
import logging
import struct
from dataclasses import dataclass
from struct import iter_unpack
from typing import TYPE_CHECKING

import numpy as np

from orbitmq.filter.tags import TagFilter
from orbitmq.message.record import MIN_RECORD_SIZE
from orbitmq.store.checking import is_checked
from orbitmq.store.consumequeue import ENTRY, ENTRY_SIZE
from orbitmq.store.errors import DamagedRecord
from orbitmq.store.recordviews import places, views
from orbitmq.store.scanning import properties_of, verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from orbitmq.filter.subscription import MessageFilter
    from orbitmq.store.commitlog import CommitLog
    from orbitmq.store.consumequeue import ConsumeQueue
    from orbitmq.store.settings import ReadSettings

log = logging.getLogger(__name__)

#: Up to this many entries a loop is faster than columns.
_FEW = 16
#: One in so many entries is expected to match a filter by tag; all are looked at if it is fewer.
_ONE_OF = 8
#: Entries that are looked at, however many messages are asked for: one by one, 2 ms.
MOST_ENTRIES = 16_384
#: Bytes of messages that a part may check: as long as it takes to look into some dozens.
_CHECKED_BYTES = 1024 * 1024
#: An answer is never limited to less than this by its asker.
LEAST_BYTES = 100
_BLANK_SIZE = 0x7FFFFFFF
#: Entries as mere bytes are gathered several times faster than as fields.
_OPAQUE_ENTRY = np.dtype(f"V{ENTRY_SIZE}")
_read_offset = struct.Struct(">q").unpack_from
_read_entry = struct.Struct(">qiq").unpack


class ReadStatus(enum.Enum):
    """How a read ended; the names are Apache's, which brokers put into their answers."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


@dataclass(slots=True)
class ReadResult:
    """What one read found."""

    status: ReadStatus
    next_offset: int  #: where the next read begins
    min_offset: int
    max_offset: int
    count: int = 0
    size: int = 0
    pieces: Sequence[memoryview] = ()  #: the messages' bytes; one piece may hold several
    suggest_replica: bool = False  #: so far behind that a replica should serve
    damaged: tuple[int, ...] = ()  #: queue offsets of messages that the disk destroyed
    judged: int = 0  #: messages that a filter had to look into, in this part
    rest: Rest | None = None  #: what a read in parts has not looked at yet


def read_queue(
    queue: ConsumeQueue | None,
    commit_log: CommitLog,
    settings: ReadSettings,
    offset: int,
    max_messages: int,
    wanted: MessageFilter | None,
    max_bytes: int,
    judge: int = 0,
) -> ReadResult:
    """The messages of a queue from `offset` on that a filter lets pass.

    If the filter has to look into them, into no more than `judge`, if given; then there is a rest.
    """
    if queue is None:
        return ReadResult(ReadStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0)
    low, high = queue.min_offset, queue.max_offset
    if high == 0:
        return ReadResult(ReadStatus.NO_MESSAGE_IN_QUEUE, 0, low, high)
    if offset < low:
        return ReadResult(ReadStatus.OFFSET_TOO_SMALL, low, low, high)
    if offset == high:
        return ReadResult(ReadStatus.OFFSET_OVERFLOW_ONE, offset, low, high)
    if offset > high:
        return ReadResult(ReadStatus.OFFSET_OVERFLOW_BADLY, high, low, high)
    scope = needed = -(-settings.scan_bytes // ENTRY_SIZE)
    if wanted is None or not wanted.needs_properties:
        scope = needed = max(scope, min(max_messages, MOST_ENTRIES))
        judge = 0
    if isinstance(wanted, TagFilter):
        # Fewer entries are usually enough.
        most = min(max_messages, max(settings.memory_count, settings.disk_count))
        needed = min(max(most, 1) * _ONE_OF, scope)
    raw = queue.entries(offset, needed)
    if not raw:
        following = queue.following_file(offset)
        return ReadResult(ReadStatus.OFFSET_FOUND_NULL, following, low, high)
    result = ReadResult(ReadStatus.NO_MATCHED_MESSAGE, offset, low, high)
    if (
        wanted is not None
        and len(raw) == ENTRY_SIZE
        and _take_only(raw, wanted, queue, commit_log, settings, result)
    ):
        return result
    reading = Reading(
        commit_log,
        settings,
        queue,
        max_messages,
        min(max(max_bytes, LEAST_BYTES), settings.max_bytes),
        result,
    )
    if isinstance(wanted, TagFilter):
        is_part = needed < scope and len(raw) == needed * ENTRY_SIZE
        if reading.take_at_once(raw, wanted, is_part=is_part):
            return result
        if is_part:
            raw = queue.entries(offset, scope) or raw
            if reading.take_at_once(raw, wanted):
                return result
    reading.take_one_by_one(raw, wanted, judge)
    return result


class Rest:
    """What a read in parts has not looked at yet."""

    __slots__ = ("_raw", "_reading", "_wanted")

    def __init__(self, reading: Reading, raw: bytes, wanted: MessageFilter | None) -> None:
        self._reading = reading
        self._raw = raw
        self._wanted = wanted

    def go_on(self, judge: int) -> None:
        """Do the next part: the result is completed, and has another rest or none."""
        self._reading.take_one_by_one(self._raw, self._wanted, judge)


def _take_only(
    raw: bytes,
    wanted: MessageFilter,
    queue: ConsumeQueue,
    commit_log: CommitLog,
    settings: ReadSettings,
    result: ReadResult,
) -> bool:
    """Take the one message that there is: most often it has just come, and a pull waits for it.

    False, with nothing done, when it is not wanted for certain, not near or not known to be good.
    """
    at, size, code = _read_entry(raw)
    if wanted.needs_properties or not wanted.accepts_code(code):
        return False
    if (
        (result.next_offset < queue.trusted_from and settings.check_crc)
        or commit_log.end - at > settings.memory_distance
        or size < MIN_RECORD_SIZE
        or (record := commit_log.view(at, size)) is None
    ):
        return False
    result.status = ReadStatus.FOUND
    result.next_offset += 1
    result.pieces = (record,)
    result.count = 1
    result.size = size
    return True


class Reading:
    """One read that has found its entries. Two ways lead to the same result.

    `take_one_by_one` is the rule itself. `take_at_once` does the same for the usual filter, by tag,
    and messages that are in memory and need no check, on whole columns.
    """

    __slots__ = (
        "_checked",
        "_log",
        "_max_bytes",
        "_max_messages",
        "_queue",
        "_result",
        "_settings",
    )

    def __init__(
        self,
        commit_log: CommitLog,
        settings: ReadSettings,
        queue: ConsumeQueue,
        max_messages: int,
        max_bytes: int,
        result: ReadResult,
    ) -> None:
        self._log = commit_log
        self._settings = settings
        self._queue = queue
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._result = result
        self._checked = 0  #: bytes of messages, in this part

    # ---- the usual case

    def take_at_once(self, raw: bytes, wanted: TagFilter, *, is_part: bool = False) -> bool:
        """Take what fits; False, with nothing done, when this is not the usual case.

        It is not, either, when `raw` is a part of the entries to look at and does not fill the
        answer.
        """
        count = len(raw) // ENTRY_SIZE
        if count <= _FEW:
            return False
        last = _read_offset(raw, len(raw) - ENTRY_SIZE)[0]
        if not self._is_near(count, _read_offset(raw)[0], last):
            return False
        return self._take_matching(raw, wanted, is_part=is_part)

    def _is_near(self, count: int, first: int, end: int) -> bool:
        """Whether the messages at these offsets and all between are in memory and good."""
        commit_log, number = self._log, self._result.next_offset
        return (
            commit_log.end - first <= self._settings.memory_distance
            and first >= commit_log.start
            and end <= commit_log.end
            and (
                number >= self._queue.trusted_from
                or not self._settings.check_crc
                or is_checked(self._queue, commit_log, number, count)
            )
        )

    def _take_matching(self, raw: bytes, wanted: TagFilter, *, is_part: bool) -> bool:
        settings = self._settings
        most = min(max(self._max_messages, 1), settings.memory_count)
        limit = min(self._max_bytes, settings.memory_bytes)
        entries = np.frombuffer(raw, ENTRY)
        chosen = wanted.mask(entries["code"]).nonzero()[0][:most]
        # The entry after the last message that may be taken ends the answer, matching or not.
        is_filled = len(chosen) == most
        stop = int(chosen[-1]) + 1 if is_filled else len(entries)
        offsets, sizes = _pick(raw, chosen)
        total = sum(sizes)
        all_sizes = entries["size"][:stop]
        if total + int(all_sizes.max()) > limit:
            # So does an entry whose size, matching or not, the answer cannot take any more.
            stop = _first_too_large(all_sizes.astype(np.int64), chosen, limit)
            is_filled = is_filled or stop < len(entries)
            offsets, sizes = _pick(raw, chosen[chosen < stop])
            total = sum(sizes)
        if is_part and not is_filled:
            return False
        return self._finish(offsets, sizes, total, stop, int(entries["offset"][stop - 1]))

    def _finish(
        self, offsets: Sequence[int], sizes: Sequence[int], total: int, looked_at: int, last: int
    ) -> bool:
        result = self._result
        if sizes:
            pieces = views(self._log, offsets, sizes, total)
            if pieces is None:
                return False
            result.status = ReadStatus.FOUND
            result.pieces = pieces
            result.count = len(offsets)
            result.size = total
        result.next_offset += looked_at
        result.suggest_replica = self._log.end - last > self._settings.memory_distance
        return True

    # ---- the rule

    def take_one_by_one(self, raw: bytes, wanted: MessageFilter | None, judge: int = 0) -> None:
        """Look at one entry after the other until the answer is full or the scope ends.

        Or until a part is done, of `judge` entries.
        """
        result = self._result
        first = number = result.next_offset
        pieces = list(result.pieces)
        damaged = list(result.damaged)
        last = 0
        skip_to = -1
        self._checked = 0
        result.rest = None
        for offset, size, code in iter_unpack(">qiq", raw):
            if pieces and self._is_full(len(pieces), result.size, offset, size):
                break
            if judge and (number - first >= judge or self._checked >= _CHECKED_BYTES):
                result.rest = Rest(self, raw[(number - first) * ENTRY_SIZE :], wanted)
                break
            last = offset
            number += 1
            if 0 <= offset < skip_to or (wanted is not None and not wanted.accepts_code(code)):
                continue
            record = self._log.view(offset, size)
            if record is None:
                if not pieces:
                    result.status = ReadStatus.MESSAGE_WAS_REMOVING
                if size == _BLANK_SIZE:
                    pass
                elif 0 <= offset < self._log.start:
                    # Whatever lies in the same deleted file is gone as well.
                    skip_to = self._log.following_file(offset)
                else:
                    # Nothing was ever deleted there: the entry itself is damaged.
                    log.error("entry points outside of the log", extra={"offset": number - 1})
                    damaged.append(number - 1)
                continue
            if not self._is_good(record, offset, number - 1):
                damaged.append(number - 1)
                if not pieces:
                    result.status = ReadStatus.MESSAGE_WAS_REMOVING
                continue
            if (
                wanted is not None
                and wanted.needs_properties
                and not wanted.accepts_properties(properties_of(record))
            ):
                if not pieces:
                    result.status = ReadStatus.NO_MATCHED_MESSAGE
                continue
            pieces.append(record)
            result.size += size
            result.status = ReadStatus.FOUND
            skip_to = -1
        if wanted is not None and wanted.needs_properties:
            result.judged = number - first
        result.next_offset = number
        result.pieces = pieces
        result.count = len(pieces)
        result.damaged = tuple(damaged)
        result.suggest_replica = self._log.end - last > self._settings.memory_distance

    def _is_full(self, count: int, total: int, offset: int, size: int) -> bool:
        settings = self._settings
        if count + 1 > self._max_messages or total + size > self._max_bytes:
            return True
        if self._log.end - offset <= settings.memory_distance:
            return total + size > settings.memory_bytes or count > settings.memory_count - 1
        return total + size > settings.disk_bytes or count > settings.disk_count - 1

    def _is_good(self, record: memoryview, offset: int, number: int) -> bool:
        if len(record) < MIN_RECORD_SIZE:
            return False
        is_near = self._log.end - offset <= self._settings.memory_distance
        if not self._settings.check_crc or (number >= self._queue.trusted_from and is_near):
            return True
        self._checked += len(record)
        try:
            verify(record, offset, number, self._queue)
        except DamagedRecord:
            log.exception("damaged message skipped", extra={"offset": number})
            return False
        return True


def _first_too_large(sizes: NDArray[np.int64], chosen: NDArray[np.intp], limit: int) -> int:
    """The first entry that the chosen ones before it leave no room for; the end if all have."""
    taken = np.zeros(len(sizes), np.int64)
    taken[chosen] = sizes[chosen]
    before = np.cumsum(taken) - taken
    full = (before > 0) & (before + sizes > limit)
    return int(np.argmax(full)) if full.any() else len(sizes)


def _pick(raw: bytes, chosen: NDArray[np.intp]) -> tuple[Sequence[int], Sequence[int]]:
    """Offsets and sizes of the chosen entries."""
    picked = np.frombuffer(raw, _OPAQUE_ENTRY)[chosen].tobytes()
    return places(picked, len(chosen))
