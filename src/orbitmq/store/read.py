"""Reading a queue: which messages one pull gets, and where the next pull begins.

The rules are Apache's, because clients rely on them. A read examines up to 800 entries of one queue
file (more if more messages are requested) and stops at the requested number or at the limits for
messages in memory or on the disk; "in memory" is estimated by the distance to the end of the log.
The first message is returned whatever its size. Messages are views of the mapped log.

A read blocks the event loop, so a filter that inspects messages gets at most 800 entries, and the
read is done in parts (`judge` and `rest`). Messages from the disk are verified before they are
returned; a damaged one is skipped and listed in `damaged`.
"""

from __future__ import annotations

import enum
import logging
import struct
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate, compress, repeat
from operator import add, ne
from struct import iter_unpack
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from orbitmq.filter.tags import TagFilter
from orbitmq.message.ids import decode_offset_id
from orbitmq.message.record import MIN_RECORD_SIZE
from orbitmq.message.stored import decode_message
from orbitmq.store.queues import ENTRY, ENTRY_SIZE
from orbitmq.store.settings import DamagedRecord, NoSuchRecord
from orbitmq.store.verify import is_checked, properties_of, store_time, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from orbitmq.filter.tags import MessageFilter
    from orbitmq.store.commitlog import CommitLog
    from orbitmq.store.index import Indexing
    from orbitmq.store.queues import ConsumeQueue
    from orbitmq.store.settings import ReadSettings


log = logging.getLogger(__name__)

#: Up to this many entries a loop is faster than columns.
_FEW = 16
#: A filter by tag is expected to match one entry in this many; if fewer match, all are examined.
_ONE_OF = 8
#: Entries that are examined, however many messages are requested: one by one, 2 ms.
MOST_ENTRIES = 16_384
#: Bytes of messages that a part may verify: the time of inspecting some dozens of messages.
_CHECKED_BYTES = 1024 * 1024
#: The smallest limit of an answer that a request can set.
LEAST_BYTES = 100
_BLANK_SIZE = 0x7FFFFFFF
#: Entries are gathered several times faster as bytes than as fields.
_OPAQUE_ENTRY = np.dtype(f"V{ENTRY_SIZE}")
_read_offset = struct.Struct(">q").unpack_from
_read_entry = struct.Struct(">qiq").unpack


class ReadStatus(enum.Enum):
    """How a read ended; the names are Apache's, which are in the answers of brokers."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


class ReadResult(msgspec.Struct):
    """The result of one read. A struct: a pull of few messages would spend 2 % on a dataclass."""

    status: ReadStatus
    next_offset: int  #: where the next read begins
    min_offset: int
    max_offset: int
    count: int = 0
    size: int = 0
    pieces: Sequence[memoryview] = ()  #: the messages' bytes; one piece may hold several messages
    suggest_replica: bool = False  #: so far behind that a replica should serve
    damaged: tuple[int, ...] = ()  #: queue offsets of messages that the disk destroyed
    judged: int = 0  #: messages that a filter had to inspect, in this part
    rest: Rest | None = None  #: the entries that a read in parts has not examined yet


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
    """The messages of a queue from `offset` on that match a filter.

    If the filter has to inspect them, at most `judge` of them, if given; then there is a rest.
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
    """The entries that a read in parts has not examined yet."""

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
    """Take a single message: most often it has just arrived, and a pull waits for it.

    Returns False and does nothing unless it certainly matches, is in memory and is known to be
    good.
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
    """One read with its entries. Two methods give the same result.

    `take_one_by_one` is the general rule. `take_at_once` works on whole columns, for the common
    case: a filter by tag, and messages in memory that need no verification.
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

    # ---- the common case

    def take_at_once(self, raw: bytes, wanted: TagFilter, *, is_part: bool = False) -> bool:
        """Take what fits; False, with nothing done, when this is not the common case.

        That includes the case that `raw` is only a part of the entries to examine and does not fill
        the answer.
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
        # The entry after the last allowed message ends the answer, matching or not.
        is_filled = len(chosen) == most
        stop = int(chosen[-1]) + 1 if is_filled else len(entries)
        offsets, sizes = _pick(raw, chosen)
        total = sum(sizes)
        all_sizes = entries["size"][:stop]
        if total + int(all_sizes.max()) > limit:
            # So does an entry whose size exceeds the rest of the answer, matching or not.
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

    # ---- the general rule

    def take_one_by_one(self, raw: bytes, wanted: MessageFilter | None, judge: int = 0) -> None:
        """Examine one entry after the other until the answer is full or the entries end.

        Or until a part is done, after `judge` entries.
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
                    # All entries of the same deleted file are gone as well.
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
    """The first entry that has no room after the chosen ones before it; the end if all have."""
    taken = np.zeros(len(sizes), np.int64)
    taken[chosen] = sizes[chosen]
    before = np.cumsum(taken) - taken
    full = (before > 0) & (before + sizes > limit)
    return int(np.argmax(full)) if full.any() else len(sizes)


def _pick(raw: bytes, chosen: NDArray[np.intp]) -> tuple[Sequence[int], Sequence[int]]:
    """Offsets and sizes of the chosen entries."""
    picked = np.frombuffer(raw, _OPAQUE_ENTRY)[chosen].tobytes()
    return places(picked, len(chosen))


# The fast path of most pulls: all recently written messages from an offset on, without a filter. It
# gives the same result as the general way, and returns None for every unusual case.

_FOUND = ReadStatus.FOUND


def read_near(
    queue: ConsumeQueue,
    commit_log: CommitLog,
    settings: ReadSettings,
    offset: int,
    max_messages: int,
    max_bytes: int,
) -> ReadResult | None:
    """The messages of a queue from `offset` on, if all are in memory and known to be good."""
    low, high = queue.min_offset, queue.max_offset
    if not low <= offset < high:
        return None
    most = settings.memory_count
    if max_messages < most:
        most = max(1, max_messages)
    raw = queue.entries(offset, most)
    if not raw:
        return None
    count = len(raw) // ENTRY_SIZE
    offsets, sizes = places(raw, count)
    log_end = commit_log.end
    if log_end - offsets[0] > settings.memory_distance or offsets[-1] + sizes[-1] > log_end:
        return None
    if (
        offset < queue.trusted_from
        and settings.check_crc
        and not is_checked(queue, commit_log, offset, count)
    ):
        return None
    total = sum(sizes)
    if total > max_bytes or total > settings.memory_bytes or total > settings.max_bytes:
        limit = min(max(max_bytes, LEAST_BYTES), settings.max_bytes, settings.memory_bytes)
        count = max(1, bisect_right(list(accumulate(sizes)), limit))
        offsets, sizes = offsets[:count], sizes[:count]
        total = sum(sizes)
    pieces = views(commit_log, offsets, sizes, total)
    if pieces is None:
        return None
    return ReadResult(_FOUND, offset + count, low, high, count, total, pieces)


# Views of the log for queue entries, in as few pieces as is worthwhile.

#: Up to this many entries are unpacked with a cached format, more by columns.
_MANY = 128
#: Up to this many entries sending each separately is cheaper than joining neighbours.
_WORTH_JOINING = 32


def places(raw: bytes, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """Offsets in the log and sizes of `count` entries."""
    if count > _MANY:
        entries = np.frombuffer(raw, ENTRY)
        return entries["offset"].tolist(), entries["size"].tolist()
    fields = _places(count).unpack(raw)
    return fields[0::2], fields[1::2]


def views(
    commit_log: CommitLog, offsets: Sequence[int], sizes: Sequence[int], total: int
) -> list[memoryview] | None:
    """The messages at these places, `total` bytes; None when one of them cannot be read."""
    first = offsets[0]
    end = offsets[-1] + sizes[-1]
    file = commit_log.file_of(first)
    if file is None or min(sizes) < MIN_RECORD_SIZE:
        return None
    if end <= file.end:
        base, view = file.base, file.view
        if end - first == total:
            return [view[first - base : end - base]]
        if len(offsets) > _WORTH_JOINING:
            return [view[begin - base : stop - base] for begin, stop in _runs(offsets, sizes)]
        return [
            view[(at := offset - base) : at + size]
            for offset, size in zip(offsets, sizes, strict=True)
        ]
    pieces = []
    for offset, size in zip(offsets, sizes, strict=True):
        piece = commit_log.view(offset, size)
        if piece is None:
            return None
        pieces.append(piece)
    return pieces


def _runs(offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The ranges of consecutive messages: batches are consecutive between other queues."""
    ends = list(map(add, offsets, sizes))
    breaks = list(compress(range(1, len(ends)), map(ne, ends, offsets[1:])))
    firsts = [offsets[0], *(offsets[place] for place in breaks)]
    return zip(firsts, [*(ends[place - 1] for place in breaks), ends[-1]], strict=True)


@lru_cache(maxsize=_MANY)
def _places(count: int) -> struct.Struct:
    # The tag codes are left out: of three numbers each would cost as much as the others.
    return struct.Struct(">" + "qi8x" * count)


# Look-ups of single messages: by place in the log, offset id, key or unique id.

_read_head = struct.Struct(">ii12xqq").unpack_from
#: The index knows whole seconds only.
_INDEX_STEP_MS = 1000
#: Bytes of a message that are verified in the time of a round.
_ROUND_BYTES = 128 * 1024


class Finding:
    """Looks messages up. Every returned message has been verified."""

    def __init__(
        self,
        commit_log: CommitLog,
        indexing: Indexing | None,
        visible_end: Callable[[], int],
        catch_up: int,
    ) -> None:
        self._log = commit_log
        self._indexing = indexing
        self._visible_end = visible_end
        self._catch_up = catch_up

    def message_at(self, physical_offset: int) -> memoryview:
        """The record that begins at an offset of the log, if readers may see it."""
        if physical_offset >= self._visible_end():
            raise NoSuchRecord(physical_offset, self._log.start, self._log.end)
        return self.written_at(physical_offset)

    def written_at(self, physical_offset: int) -> memoryview:
        """The same, also if it waits for the disk and is not visible yet."""
        head = self._log.view(physical_offset, MIN_RECORD_SIZE) if physical_offset >= 0 else None
        if head is not None:
            size, _, _, place = _read_head(head)
            if place == physical_offset:
                record = self._log.view(physical_offset, size)
                if record is None:
                    raise DamagedRecord(physical_offset, f"its size is {size}")
                verify(record, physical_offset)
                return record
        raise NoSuchRecord(physical_offset, self._log.start, self._log.end)

    def message_by_offset_id(self, offset_id: str) -> memoryview:
        """The record of an offset id, whichever broker's address the id holds."""
        return self.message_at(decode_offset_id(offset_id).offset)

    def looking_up(
        self, topic: str, key: str, begin_ms: int, end_ms: int
    ) -> Iterator[memoryview | None]:
        """Messages of a topic that have this key or this unique id, newest first.

        They are found up to the index's position after a chance to catch up. A key may be on
        millions of messages of other times, and different keys may share a hash. Long searches are
        therefore divided into rounds of a fraction of a millisecond: None stands for a round
        without a result.
        """
        if self._indexing is None:
            return iter(())
        self._indexing.advance(self._visible_end(), self._catch_up)
        return self._looking_up(self._indexing, topic, key, begin_ms, end_ms)

    def _looking_up(
        self, indexing: Indexing, topic: str, key: str, begin_ms: int, end_ms: int
    ) -> Iterator[memoryview | None]:
        earliest = max(begin_ms - _INDEX_STEP_MS, 0)
        for offset in indexing.index.candidates(topic, key, earliest, end_ms):
            if offset is None:
                yield None
                continue
            try:
                record = self.message_at(offset)
            except (NoSuchRecord, DamagedRecord):
                yield None
                continue
            is_meant = begin_ms <= store_time(record) <= end_ms and _has_key(record, topic, key)
            yield record if is_meant else None
            # Verifying a long message took as long as many rounds.
            yield from repeat(None, len(record) // _ROUND_BYTES)


def _has_key(record: memoryview, topic: str, key: str) -> bool:
    message = decode_message(record)
    return message.topic == topic and (
        message.unique_id == key or key in (message.keys or "").split(" ")
    )


# Search by time. Store times never decrease in a queue, so the place is found by bisection. Many
# messages have equal times: the lower bound is the first of them, the upper bound the last. A probe
# reads one queue entry and eight bytes of a record.


class Boundary(enum.Enum):
    """Which end of the messages with the same time is meant."""

    LOWER = "LOWER"  #: the first message stored at that time or later; the end if there is none
    UPPER = "UPPER"  #: the last message stored at that time or earlier; the first if there is none


def offset_by_time(
    queue: ConsumeQueue | None, commit_log: CommitLog, time_ms: int, boundary: Boundary
) -> int:
    """The offset in the queue for a time, within the bounds of the queue."""
    if queue is None or queue.max_offset == 0:
        return 0
    low, high = queue.min_offset, queue.max_offset
    if low >= high:
        return high
    is_upper = boundary is Boundary.UPPER
    first, end = low, high
    while first < end:
        middle = (first + end) // 2
        stored = time_of(queue, commit_log, middle)
        # A lost record has no time; it counts as the oldest.
        if stored < time_ms or (is_upper and stored == time_ms):
            first = middle + 1
        else:
            end = middle
    return max(first - 1, low) if is_upper else first


def time_of(queue: ConsumeQueue, commit_log: CommitLog, number: int) -> int:
    """When the message of an entry was stored, in milliseconds; -1 if it does not exist."""
    offset, size, _ = queue.entry(number)
    record = commit_log.view(offset, size) if size >= MIN_RECORD_SIZE else None
    return -1 if record is None else store_time(record)
