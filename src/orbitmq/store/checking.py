"""Checking old messages of a queue in stretches, once in the life of a process.

After a start nothing is known of the messages that recovery did not look at. Checking each one when
it is served costs ten times as much as serving it, and every group that reads them pays again. So
the first read of a stretch checks all its entries and messages by columns, with the same rule as
`scanning.verify`, and the stretch is remembered. One that holds anything bad, or large messages
for which the detour does not pay, is remembered too: its messages are checked one by one, as they
are served, and the bad ones are named.

Stretches are aligned: stretch s of a queue are the entries from s * 1024 on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from orbitmq.message.checksum import CRC_BITS, crc32
from orbitmq.message.record import MAGIC_V1, MAGIC_V2, MIN_RECORD_SIZE
from orbitmq.message.scan import overlapping
from orbitmq.message.sysflag import HOSTS_V6_MASK
from orbitmq.store.consumequeue import ENTRY

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from orbitmq.message.scan import Int64s
    from orbitmq.store.commitlog import CommitLog
    from orbitmq.store.consumequeue import ConsumeQueue

STRETCH: Final = 1024
#: The owner can do nothing else while a stretch is being checked.
_MOST_BYTES: Final = 4 << 20
#: What lies before the body when both hosts are IPv4.
_HEAD: Final = np.dtype(
    {
        "names": ["size", "magic", "crc", "queue", "number", "place", "sys_flag", "body_size"],
        "formats": [">i4", ">i4", ">i4", ">i4", ">i8", ">i8", ">i4", ">i4"],
        "offsets": [0, 4, 8, 12, 20, 28, 36, 84],
        "itemsize": 88,
    }
)


def is_checked(queue: ConsumeQueue, commit_log: CommitLog, first: int, count: int) -> bool:
    """Whether these entries and their messages are known to be good, now at the latest."""
    last = min(first + count, queue.trusted_from) - 1
    known = queue.checked
    for stretch in range(first // STRETCH, last // STRETCH + 1):
        is_good = known.get(stretch)
        if is_good is None:
            is_good = known[stretch] = _is_good(queue, commit_log, stretch * STRETCH)
        if not is_good:
            return False
    return True


def _is_good(queue: ConsumeQueue, commit_log: CommitLog, begin: int) -> bool:
    number = max(begin, queue.min_offset)
    end = min(begin + STRETCH, queue.trusted_from)
    while number < end:
        raw = queue.entries(number, end - number)
        if not raw:
            return False
        entries = np.frombuffer(raw, ENTRY)
        offsets, sizes = entries["offset"].astype(np.int64), entries["size"].astype(np.int64)
        if sizes.min() < MIN_RECORD_SIZE or int(sizes.sum()) > _MOST_BYTES:
            return False
        bases = offsets - offsets % commit_log.file_size
        # Messages lie in the order of the log: those of a file are side by side.
        for part in np.split(np.arange(len(bases)), np.flatnonzero(np.diff(bases)) + 1):
            file = commit_log.file_of(int(offsets[part[0]]))
            if file is None or int((offsets[part] + sizes[part]).max()) > commit_log.end:
                return False
            at = offsets[part] - file.base
            if not _are_records(file.view, file.base, at, sizes[part], number + part, queue):
                return False
        number += len(entries)
    return True


def _are_records(
    view: memoryview,
    base: int,
    at: Int64s,
    sizes: Int64s,
    numbers: NDArray[np.intp],
    queue: ConsumeQueue,
) -> bool:
    """Whether just these messages of the queue lie at these places of a file."""
    ends = at + sizes
    if int(at.min()) < 0 or int(ends.max()) > len(view):
        return False
    heads = overlapping(view, f"V{_HEAD.itemsize}")[at].view(_HEAD)
    body_sizes = heads["body_size"].astype(np.int64)
    topic = queue.topic_field
    body_at = at + _HEAD.itemsize
    topic_at = body_at + body_sizes
    properties_at = topic_at + len(topic) + 2
    is_sound = (
        (heads["size"] == sizes)
        & ((heads["magic"] == MAGIC_V1) | (heads["magic"] == MAGIC_V2))
        & (heads["sys_flag"] & HOSTS_V6_MASK == 0)
        & (heads["place"] == at + base)
        & (heads["queue"] == queue.queue_id)
        & (heads["number"] == numbers)
        & (body_sizes >= 0)
        & (properties_at <= ends)
    )
    # Only now all these places are known to lie inside the records.
    if not (
        is_sound.all()
        and (overlapping(view, f"S{len(topic)}")[topic_at] == topic).all()
        and (overlapping(view, ">i2")[properties_at - 2] == ends - properties_at).all()
    ):
        return False
    bounds = zip(body_at.tolist(), topic_at.tolist(), strict=True)
    sums = np.array([crc32(view[begin:end]) for begin, end in bounds], np.int64) & CRC_BITS
    return bool(((sums == heads["crc"]) | (body_sizes == 0)).all())
