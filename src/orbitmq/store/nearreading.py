"""What most pulls want: everything from an offset on, of what was written lately.

The rules are those of `reading`, whose one-by-one way this gives the same answer as, in one go and
without a judgement per message. It has none for anything unusual: then it says so, nothing is done,
and the rules are followed step by step.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from orbitmq.store.checking import is_checked
from orbitmq.store.consumequeue import ENTRY_SIZE
from orbitmq.store.reading import LEAST_BYTES, ReadResult, ReadStatus
from orbitmq.store.recordviews import places, views

if TYPE_CHECKING:
    from orbitmq.store.commitlog import CommitLog
    from orbitmq.store.consumequeue import ConsumeQueue
    from orbitmq.store.settings import ReadSettings

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
