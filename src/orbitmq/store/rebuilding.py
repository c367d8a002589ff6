"""Making queue entries from the records of the log.

Blocks of records are taken apart by columns, collected, and brought into the order of their queues
by one sort; what a queue gets is then one piece of a column. The order of the log is kept within a
queue. No checksum covers the number that a record has in its queue, so every number is compared
with what the queue expects: see `_is_plausible`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from orbitmq.message.record import MIN_RECORD_SIZE
from orbitmq.store.consumequeue import ENTRY, SCHEDULE_TOPIC, pack_entry
from orbitmq.store.damage import Damage
from orbitmq.store.errors import TopicRefused
from orbitmq.store.scanning import TopicNumbers, tag_codes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from orbitmq.message.scan import Int32s, Int64s, RecordArrays
    from orbitmq.store.consumequeue import ConsumeQueue
    from orbitmq.store.damage import Losses
    from orbitmq.store.queues import QueueTable

    #: topic, properties, store time -> last field of the queue entry
    EntryCode = Callable[[bytes, int], int]
    Entries = NDArray[np.void]

#: Set in messages that have no place in a queue: prepared and rolled back.
_NO_ENTRY = 0x4
#: More lost messages in a row are not believed of a single record, and not filled with entries.
_LARGEST_GAP = 100_000


class QueueGap(Exception):
    """A record does not continue its queue: the queues must be made from an earlier record on."""


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
        self.rebuilt = 0  #: entries made
        self._queues = queues
        self._entry_code = entry_code
        self._losses = losses
        self._deleted = deleted  #: topic -> offset below which its messages have no queue
        self._is_from_first = is_from_first  #: there are no earlier records
        self._topics = TopicNumbers()
        # Of records that are not in the queues yet: topics, queue ids, numbers in the queue, and
        # what entries hold: offsets, sizes, codes.
        self._columns: list[tuple[Int64s, Int32s, Int64s, Int64s, Int32s, Int64s]] = []

    def add(self, view: memoryview, base: int, records: RecordArrays) -> None:
        """Take the records of a block of the file that begins at offset `base` of the log."""
        has_entry = records.sys_flags & _NO_ENTRY == 0
        if not has_entry.all():
            records = records.rows(has_entry)
        if not len(records):
            return
        topics = self._topics.of(view, records)
        for topic in self._deleted.keys() & set(self._topics.names):
            is_old = records.starts + base < self._deleted[topic]
            is_kept = (topics != self._topics.names.index(topic)) | ~is_old
            if not is_kept.all():
                records, topics = records.rows(is_kept), topics[is_kept]
        if not len(records):
            return
        self._columns.append(
            (
                topics,
                records.queue_ids,
                records.queue_offsets,
                records.starts + base,
                records.sizes,
                self._codes(view, records, topics),
            )
        )

    def _codes(self, view: memoryview, records: RecordArrays, topics: Int64s) -> Int64s:
        codes = tag_codes_of(view, records)
        if SCHEDULE_TOPIC in self._topics.names:
            ends = records.ends
            number = self._topics.names.index(SCHEDULE_TOPIC)
            for index in np.flatnonzero(topics == number).tolist():
                raw = view[int(records.properties_at[index]) : int(ends[index])]
                stored = int(records.store_ms[index])
                codes[index] = self._entry_code(bytes(raw), stored)
        return codes

    def fill_queues(self) -> None:
        """Give the queues what was added since the last time."""
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
        # Numbers that rise all along and by as much as there are of them have no gap.
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
        if queue.max_offset and gap <= self._losses.lost_bytes // MIN_RECORD_SIZE:
            return True
        if not self._is_from_first:
            raise QueueGap
        # Nothing is left to look at: the messages between were in files that are gone. No number
        # may be given twice, so the queue goes on here. (A far jump needs a witness.)
        if queue.max_offset and gap > _LARGEST_GAP:
            if after is not None:
                queue.restart()
            return after is not None
        return True


def _by_queue(topics: Int64s, queue_ids: Int32s) -> NDArray[np.intp]:
    """The order that brings records of a queue together and keeps the order within it."""
    spread = int(queue_ids.max()) + 1
    keys = topics * spread + queue_ids
    if queue_ids.min() >= 0 and keys.max() <= np.iinfo(np.uint16).max:
        # Numbers of 16 bits are sorted by counting, ten times as fast.
        return np.argsort(keys.astype(np.uint16), kind="stable")
    return np.lexsort((queue_ids, topics))
