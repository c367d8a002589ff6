"""Finding a place in a queue by time.

Store times do not fall within a queue, so the place is found by halving. Messages with equal times
are common, many are stored in one millisecond: of a run of them the lower bound is the first, the
upper bound the last. Every probe reads one queue entry and eight bytes of one record.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from orbitmq.message.record import MIN_RECORD_SIZE
from orbitmq.store.scanning import store_time

if TYPE_CHECKING:
    from orbitmq.store.commitlog import CommitLog
    from orbitmq.store.consumequeue import ConsumeQueue


class Boundary(enum.Enum):
    """Which end of the messages of an instant is meant."""

    LOWER = "LOWER"  #: the first message stored at that time or later; the end if there is none
    UPPER = "UPPER"  #: the last message stored at that time or earlier; the first if there is none


def offset_by_time(
    queue: ConsumeQueue | None, commit_log: CommitLog, time_ms: int, boundary: Boundary
) -> int:
    """The offset in the queue that belongs to an instant, within the bounds of the queue."""
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
        # A lost record has no time of its own; it is taken for as old as can be.
        if stored < time_ms or (is_upper and stored == time_ms):
            first = middle + 1
        else:
            end = middle
    return max(first - 1, low) if is_upper else first


def time_of(queue: ConsumeQueue, commit_log: CommitLog, number: int) -> int:
    """When the message of an entry was stored, in milliseconds; -1 when it is not there."""
    offset, size, _ = queue.entry(number)
    record = commit_log.view(offset, size) if size >= MIN_RECORD_SIZE else None
    return -1 if record is None else store_time(record)
