"""Replicates another broker's log: its bytes are stored at the same offsets.

Invariant: the log is a prefix of the master's, byte by byte, and ends between two records. So
recovery, readers and the index work as on the master, and a slave continues where its log ends.

A master that lost its unflushed tail writes other records to the same offsets. Therefore the last
record here is requested once more and compared: it states its offset, queue number and store time,
so no later record at its place has the same bytes. (Apache's slave compares offsets alone.) Bytes
that are no record at their place are refused: the logs have diverged, or file sizes differ.
"""

from __future__ import annotations

import logging
import struct
from typing import TYPE_CHECKING

from orbitmq.message.record import END_OF_FILE_SIZE, RecordFault
from orbitmq.store.queues import SCHEDULE_TOPIC
from orbitmq.store.settings import StoreError, TopicRefused, WriteRefused
from orbitmq.store.verify import TopicNumbers, entry_codes, find_last_record, scan_log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orbitmq.message.scan import RecordArrays
    from orbitmq.store.append import Appender, Placed
    from orbitmq.store.commitlog import CommitLog
    from orbitmq.store.queues import ConsumeQueue, QueueTable


log = logging.getLogger(__name__)

#: Set in messages that have no place in a queue: prepared and rolled back.
_NO_ENTRY = 0x4
_read_int = struct.Struct(">i").unpack_from


class MirrorRefused(StoreError):
    """Bytes that cannot be the next ones of this log; none of them was stored."""


class Mirroring:
    """The log as masters send it and slaves receive it. Belongs to the store's owner."""

    def __init__(
        self,
        commit_log: CommitLog,
        queues: QueueTable,
        appender: Appender,
        write: Callable[[], int],
        refusal: Callable[[], WriteRefused | None],
        *,
        deleted: Mapping[str, int],
    ) -> None:
        """`deleted` gives the offset below which the messages of a topic belong to no queue."""
        self._log = commit_log
        self._queues = queues
        self._appender = appender
        self._write = write
        self._refusal = refusal
        self._deleted = deleted
        self._topics = TopicNumbers()
        #: The number of queues created by received messages.
        self.new_queues = 0
        # A partial record: its bytes, their number, and the number needed to continue.
        self._pieces: list[bytes] = []
        self._waiting = 0
        self._needed = 0

    # ---- sending

    @property
    def start(self) -> int:
        """The first offset that can be sent."""
        return self._log.start

    @property
    def end(self) -> int:
        """The end of the log that readers may see."""
        return self._appender.dispatched

    @property
    def last_file(self) -> int:
        """The begin of the last file of the log."""
        return max(self.end - self.end % self._log.file_size, self.start)

    def stretch(self, offset: int, size: int) -> memoryview | None:
        """At most `size` bytes from `offset` on, not copied; None when they do not exist."""
        room = min(size, self.end - offset, self._log.following_file(offset) - offset)
        return self._log.view(offset, room) if room >= 0 else None

    # ---- receiving

    def follow(self) -> None:
        """From now on only `append_raw` writes to the log.

        Messages can be read before they are flushed, whatever the policy, because the master has
        them.
        """
        self._appender.is_mirror = True
        self._appender.is_held_back = False

    @property
    def is_new(self) -> bool:
        """Whether the log is empty: it then begins with the first received bytes."""
        return self._log.end == 0 and not self._log.files and not self._waiting

    @property
    def written(self) -> int:
        """The end of the log."""
        return self._log.end

    @property
    def expected(self) -> int:
        """The offset of the first byte that was not received yet."""
        return self._log.end + self._waiting

    @property
    def last_record(self) -> int:
        """The begin of the last record, which the master must also have; the end without one."""
        end = self._log.end
        file = self._log.file_of(end - 1)
        if file is None or end <= file.base:
            return end
        at = find_last_record(file.view[: end - file.base], file.base)
        # Without a valid record in it, the whole file is compared.
        return file.base + (at or 0)

    def compare(self, offset: int, data: bytes) -> bytes:
        """The part of the master's bytes from `offset` on that is beyond this log.

        Raises `MirrorRefused` if the part before it is missing here or differs.
        """
        size = min(self._log.end - offset, len(data))
        if size <= 0:
            return data
        mine = self._log.view(offset, size)
        if mine is None or bytes(mine) != data[:size]:
            raise MirrorRefused(
                f"what the master has as its log from {offset} on is not what is here: "
                "the logs have parted, empty this folder to copy the master again"
            )
        return data[size:]

    def forget_rest(self) -> None:
        """Drop a partial record: it will be received again as a whole."""
        self._pieces = []
        self._waiting = self._needed = 0

    def append_raw(self, offset: int, data: bytes) -> int:
        """Append the bytes at `offset` of the master's log; returns the new end of this log.

        Raises `MirrorRefused`, or `WriteRefused` when the disk is the reason. Earlier records of
        the bytes are stored in both cases; `forget_rest` prepares for another attempt.
        """
        if self.is_new:
            self._begin_at(offset)
        if offset != self.expected:
            raise MirrorRefused(
                f"the master sends its log from {offset} on, and this one ends at {self.expected}"
            )
        if (refusal := self._refusal()) is not None:
            raise refusal
        self._pieces.append(data)
        self._waiting += len(data)
        if self._waiting >= self._needed:
            taken = data if len(self._pieces) == 1 else b"".join(self._pieces)
            self.forget_rest()
            rest = self._take(taken)
            if rest:
                self._pieces = [rest]
                self._waiting = len(rest)
        return self._log.end

    def _begin_at(self, offset: int) -> None:
        if offset % self._log.file_size:
            raise MirrorRefused(
                f"the master sends its log from {offset} on, where no file of "
                f"{self._log.file_size} bytes begins; both need the same file_size"
            )
        self._log.end = offset

    def _take(self, data: bytes) -> bytes:
        """Store the whole records at the beginning; returns the rest."""
        taking = _Taking(memoryview(data), self._log.end)
        try:
            while taking.at < len(data) and self._take_some(taking):
                pass
        finally:
            # Whatever is wrong with the rest: these records have their offsets.
            self._store(taking)
        return data[taking.at :]

    def _take_some(self, taking: _Taking) -> bool:
        """Append the next record; False when it was not received as a whole."""
        fault = self._take_records(taking)
        if fault is RecordFault.BAD_CRC:
            self._take_damaged(taking)
        elif fault is RecordFault.END_OF_FILE:
            return self._take_end_of_file(taking)
        elif fault is RecordFault.CUT_SHORT:
            self._await_rest(taking)
            return False
        elif fault is not None:
            raise MirrorRefused(
                f"what the master sends as its log at {taking.offset} is no record there "
                f"({fault.value}): the logs have parted, empty this folder to copy the master again"
            )
        return True

    def _take_records(self, taking: _Taking) -> RecordFault | None:
        """Append valid records; returns why there are no more of them, None at the end."""
        view, base = taking.view, taking.base
        fault: RecordFault | None = None
        for block in scan_log(view, base, start=taking.at):
            fault = block.fault
            if len(block.records):
                self._check_room(taking, base + block.stopped_at)
                self._add(taking, block.records)
        return fault

    def _take_damaged(self, taking: _Taking) -> None:
        size: int = _read_int(taking.view, taking.at)[0]
        self._check_room(taking, taking.offset + size)
        log.warning("the master has a damaged message", extra={"offset": taking.offset})
        found = scan_log(
            taking.view, taking.base, start=taking.at, end=taking.at + size, check_crc=False
        )
        records = next(found).records
        if not len(records):
            raise MirrorRefused(f"the record at {taking.offset} belongs to another place")
        self._add(taking, records)
        for queue, number, _, _, _ in taking.arrivals[-1:]:
            queue.trusted_from = number + 1

    def _take_end_of_file(self, taking: _Taking) -> bool:
        """Append the record that fills a file; False when it was not received as a whole."""
        size: int = _read_int(taking.view, taking.at)[0]
        if taking.offset + size != self._log.following_file(taking.offset):
            raise self._other_file_size(taking.offset)
        if taking.at + size > len(taking.view):
            self._needed = size
            return False
        taking.at += size
        self._close_segment(taking)
        return True

    def _await_rest(self, taking: _Taking) -> None:
        left = len(taking.view) - taking.at
        self._needed = END_OF_FILE_SIZE
        if left >= END_OF_FILE_SIZE:
            self._needed = _read_int(taking.view, taking.at)[0]
            self._check_room(taking, taking.offset + self._needed)

    def _check_room(self, taking: _Taking, end: int) -> None:
        """Records do not cross files, and leave room for the record that fills the file."""
        if end > self._log.following_file(taking.offset) - END_OF_FILE_SIZE:
            raise self._other_file_size(taking.offset)

    def _other_file_size(self, offset: int) -> MirrorRefused:
        return MirrorRefused(
            f"the record of the master at {offset} does not fit a log file of "
            f"{self._log.file_size} bytes; both need the same file_size"
        )

    # ---- entries

    def _add(self, taking: _Taking, records: RecordArrays) -> None:
        taking.store_ms = max(taking.store_ms, int(records.store_ms[-1]))
        end = int(records.ends[-1])
        has_entry = records.sys_flags & _NO_ENTRY == 0
        if not has_entry.all():
            records = records.rows(has_entry)
        topics = self._topics.of(taking.view, records)
        is_scheduled = self._topics.is_in(SCHEDULE_TOPIC, topics)
        codes = entry_codes(taking.view, records, is_scheduled, self._appender.codes.in_schedule)
        rows = zip(
            topics.tolist(),
            records.queue_ids.tolist(),
            records.queue_offsets.tolist(),
            codes.tolist(),
            records.starts.tolist(),
            records.sizes.tolist(),
            strict=True,
        )
        names, base, by_key = self._topics.names, taking.base, self._queues.by_key
        for topic, queue_id, number, code, start, size in rows:
            queue = by_key.get((names[topic], queue_id)) or self._new(
                names[topic], queue_id, base + start
            )
            if queue is None:
                continue
            if number != queue.next_offset:
                # Earlier entries have to be in the queue first.
                taking.at = start
                self._store(taking)
                _make_fit(queue, number, base + start)
            queue.next_offset = number + 1
            taking.arrivals.append((queue, number, code, base + start, size))
        taking.at = end

    def _new(self, topic: str, queue_id: int, at: int) -> ConsumeQueue | None:
        # Existing queues have no such messages: they were dropped when the deletion was received.
        if at < self._deleted.get(topic, 0):
            return None
        try:
            queue = self._queues.create(topic, queue_id)
        except TopicRefused as refused:
            log.warning("messages of the master cannot be read here: %s", refused)
            return None
        self.new_queues += 1
        return queue

    # ---- storing

    def _close_segment(self, taking: _Taking) -> None:
        if taking.at > taking.stored:
            data = bytes(taking.view[taking.stored : taking.at])
            arrivals, taking.arrivals = taking.arrivals, []
            self._appender.adopt(taking.base + taking.stored, data, arrivals, taking.store_ms)
            taking.stored = taking.at

    def _store(self, taking: _Taking) -> None:
        self._close_segment(taking)
        self._write()


class _Taking:
    """How much of one received piece of the master's log has been appended."""

    __slots__ = ("arrivals", "at", "base", "store_ms", "stored", "view")

    def __init__(self, view: memoryview, base: int) -> None:
        self.view = view
        self.base = base  #: the offset in the log of its first byte
        self.at = 0  #: records below are appended
        self.stored = 0  #: and these given to the appender
        self.arrivals: list[Placed] = []
        self.store_ms = 0

    @property
    def offset(self) -> int:
        return self.base + self.at


def _make_fit(queue: ConsumeQueue, number: int, at: int) -> None:
    """Let the queue continue at `number`."""
    if number < queue.max_offset:
        log.info(
            "a queue of the master starts over",
            extra={"topic": queue.topic, "queue": queue.queue_id, "offset": number},
        )
        queue.restart()
    if number > queue.max_offset:
        queue.push(b"", number, at)
    queue.next_offset = number
