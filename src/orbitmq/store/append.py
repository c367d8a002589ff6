"""Appending: many messages, one write for each turn of the event loop.

`append` gives a message its place and collects its bytes. `write` writes the turn with one system
call and makes it visible: entries go to the queues, and the listener is notified.

Invariant: a turn is stored as a whole or not at all. After a failed write all places are taken back
and the bytes are wiped; if that fails too, the store refuses writes until it is opened again.
docs/internals/durability.md has the reasons.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from orbitmq.clock import milliseconds, milliseconds_up
from orbitmq.message.batchrecords import BatchColumns, records_of
from orbitmq.message.properties import DELAY, TAGS, property_value
from orbitmq.message.record import (
    CRC_BITS,
    END_OF_FILE_SIZE,
    HOSTS_V6_MASK,
    RecordRefused,
    crc32,
    end_of_file_record,
    head_form,
    message_heads,
    properties_size,
    record_constants,
    record_refused,
    restamped,
    tag_code,
)
from orbitmq.message.stored import batch_fields
from orbitmq.store.files import is_full
from orbitmq.store.queues import ENTRY, ENTRY_SIZE, ConsumeQueue, iter_entries, pack_entry
from orbitmq.store.settings import (
    BatchRefused,
    DiskFull,
    MessageTooLarge,
    StoreFailed,
    WriteFailed,
    WriteRefused,
)
from orbitmq.store.verify import distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from orbitmq.clock import Clock
    from orbitmq.message.record import Buffer
    from orbitmq.message.scan import Int64s
    from orbitmq.store.commitlog import CommitLog
    from orbitmq.store.queues import QueueTable
    from orbitmq.store.settings import StoreSettings


log = logging.getLogger(__name__)

#: Set in prepared and in rolled-back messages of old brokers, which have no place in a queue.
_NO_ENTRY = 0x4
#: Set in prepared, committed and rolled-back messages.
_TRANSACTION = 0xC
_NO_HOSTS_V6 = ~HOSTS_V6_MASK
#: Of a record: everything before the body, body, topic, length of the properties, properties.
_PIECES = 5
#: A clock set back by less than this is not followed; see `_store_time`.
_CLOCK_SLACK_MS = 1000


class Appender:
    """The writing end of the log."""

    def __init__(
        self,
        commit_log: CommitLog,
        queues: QueueTable,
        settings: StoreSettings,
        clock: Clock,
        store_host: bytes,
        refusal: Callable[[], WriteRefused | None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.last_store_ms = 0
        self.arrived: Callable[[Sequence[Arrivals]], None] | None = None
        self.is_held_back = False  #: entries wait for `publish`, because the disk must come first
        self.is_mirror = False  #: the log is another broker's; see `mirroring`
        self._log = commit_log
        self._queues = queues
        self._by_key = queues.by_key
        self._clock = clock
        self._store_host = store_host
        self._refusal = refusal
        self._fail = fail
        self._heads = message_heads(store_host)
        self.codes = EntryCodes(settings.delay_levels)
        self._code_of = self.codes.of
        self._max_record = min(settings.max_record, settings.file_size - END_OF_FILE_SIZE)
        self._max_batch = settings.file_size - END_OF_FILE_SIZE
        self._unpublished: deque[Placed] = deque()
        # The turn:
        self._store_ms = 0  #: the time of its last message; 0 between turns
        self._now_ms = 0  #: the time of the next message; 0: the clock is to be asked
        self._position = 0  #: where the next record goes
        self._limit = 0  #: where a record must end in this file
        self._segment_at = 0
        self._pieces: list[Buffer] = []
        self._segments: list[tuple[int, list[Buffer]]] = []
        self._turn: list[Placed] = []
        #: Messages that wait for their time: where their heads are, and their places in the turn.
        self._scheduled: list[tuple[list[Buffer], int, int]] = []

    # ---- collecting

    def append(
        self,
        topic: str,
        queue_id: int,
        body: Buffer,
        properties: bytes,
        born_ms: int,
        born_host: bytes,
        sys_flag: int = 0,
        flag: int = 0,
        reconsume_times: int = 0,
        prepared_offset: int = 0,
    ) -> tuple[int, int]:
        """Collect a message; its offset in the log and its number in the queue.

        The body must stay as it is until `write`. Hosts are packed, properties encoded.
        """
        store_ms = self._now_ms or self._take_time()
        try:
            pack, fixed, hosts = self._heads[len(born_host)]
        except KeyError:
            raise RecordRefused("a packed host has 8 or 20 bytes; use pack_host") from None
        queue = self._by_key.get((topic, queue_id)) or self._queues.create(topic, queue_id)
        has_entry = not sys_flag & _NO_ENTRY
        number = queue.next_offset if has_entry else 0
        at = self._position
        try:
            if 0 in properties:
                properties = distinct(properties)
            body_size, properties_length = len(body), len(properties)
            size = fixed + body_size + queue.topic_size + properties_length
            if at + size > self._limit or size > self._max_record:
                properties_size(properties_length)  # or there would be no room for it anywhere
                at = self._make_room(size, self._max_record, "a record")
            # In one expression: an error leaves nothing behind.
            self._pieces += (
                pack(
                    size,
                    queue.magic,
                    crc32(body) & CRC_BITS,
                    queue_id,
                    flag,
                    number,
                    at,
                    sys_flag & _NO_HOSTS_V6 | hosts,
                    born_ms,
                    born_host,
                    store_ms,
                    self._store_host,
                    reconsume_times,
                    prepared_offset,
                    body_size,
                ),
                body,
                queue.topic_field,
                properties_size(properties_length),
                properties,
            )
        except BaseException as error:
            self._queues.forget_unused(queue)
            if isinstance(error, struct.error):
                raise record_refused(error, len(properties)) from error
            raise
        self._position = at + size
        if has_entry:
            queue.next_offset = number + 1
            if queue.is_schedule:
                self._scheduled.append((self._pieces, len(self._pieces) - _PIECES, len(self._turn)))
            self._turn.append((queue, number, self._code_of(queue, properties, store_ms), at, size))
        else:
            self._queues.forget_unused(queue)
        return at, number

    def append_batch(
        self,
        topic: str,
        queue_id: int,
        elements: Iterable[tuple[Buffer, int, bytes]] | BatchColumns,
        born_ms: int,
        born_host: bytes,
        sys_flag: int = 0,
        reconsume_times: int = 0,
    ) -> tuple[Sequence[int] | Int64s, int]:
        """Collect messages (body, flag, properties) side by side; offsets and the first number."""
        if sys_flag & _TRANSACTION:
            raise BatchRefused(
                f"messages of a transaction (flags {sys_flag:#x}) have no place in a batch; send "
                "each by itself"
            )
        store_ms = self._now_ms or self._take_time()
        queue = self._by_key.get((topic, queue_id)) or self._queues.create(topic, queue_id)
        constants = record_constants(
            sys_flag, born_ms, born_host, store_ms, self._store_host, reconsume_times
        )
        first = queue.next_offset
        if isinstance(elements, BatchColumns):
            offsets = self._collect_columns(queue, elements, constants)
            if offsets is not None:
                return offsets, first
            elements = batch_fields(elements.batch)
        try:
            elements = list(elements)
            at = self._position
            collected = self._encode_batch(queue, elements, first, at, constants, store_ms)
            if collected[2] > self._limit:
                at = self._make_room(collected[2] - at, self._max_batch, "a batch")
                collected = self._encode_batch(queue, elements, first, at, constants, store_ms)
        except BaseException:
            self._queues.forget_unused(queue)
            raise
        pieces, arrivals, end = collected
        self._pieces += pieces
        self._position = end
        queue.next_offset = first + len(elements)
        self._turn += arrivals
        if not elements:
            self._queues.forget_unused(queue)
        return [arrival[3] for arrival in arrivals], first

    def _collect_columns(
        self, queue: ConsumeQueue, columns: BatchColumns, constants: bytes
    ) -> Int64s | None:
        """Collect a large batch; its offsets, or None if it is to be taken one by one."""
        if queue.is_schedule:
            return None
        at, number = self._position, queue.next_offset
        records = records_of(columns, queue.topic_field, queue.queue_id, number, at, constants)
        if records.end > self._limit or int(records.sizes.max()) > self._max_record:
            return None  # once in a file, or refused
        entries = np.empty(len(columns), ENTRY)
        entries["offset"] = records.offsets
        entries["size"] = records.sizes
        entries["code"] = self.codes.of_columns(queue, columns)
        self._pieces += records.pieces
        self._position = records.end
        queue.next_offset = number + len(columns)
        self._turn.append((queue, number, entries.tobytes(), at, records.end - at))
        return records.offsets

    def _encode_batch(
        self,
        queue: ConsumeQueue,
        elements: list[tuple[Buffer, int, bytes]],
        number: int,
        at: int,
        constants: bytes,
        store_ms: int,
    ) -> tuple[list[Buffer], list[Placed], int]:
        topic_field, topic_size, magic = queue.topic_field, queue.topic_size, queue.magic
        queue_id, max_record, code_of = queue.queue_id, self._max_record, self._code_of
        pack, fixed = head_form(constants)
        pieces: list[Buffer] = []
        arrivals: list[Placed] = []
        properties = b""
        try:
            for body, flag, given in elements:
                properties = distinct(given) if 0 in given else given
                body_size, properties_length = len(body), len(properties)
                size = fixed + body_size + topic_size + properties_length
                if size > max_record:
                    raise MessageTooLarge(size, max_record)
                crc = crc32(body) & CRC_BITS
                pieces += (
                    pack(size, magic, crc, queue_id, flag, number, at, constants, body_size),
                    body,
                    topic_field,
                    properties_size(properties_length),
                    properties,
                )
                arrivals.append((queue, number, code_of(queue, properties, store_ms), at, size))
                number += 1
                at += size
        except struct.error as error:
            raise record_refused(error, len(properties)) from error
        return pieces, arrivals, at

    def take_time_anew(self) -> None:
        """Have the next message of the turn stored at the time of its own `append`.

        Messages share a time until this is called: reading the clock for each would cost. It is
        called before messages are appended that may have been sent after others of the turn were
        appended, because no message may be stored before it was sent.
        """
        self._now_ms = 0

    def _take_time(self) -> int:
        """The time of messages that are appended from now on.

        It does not fall when the clock is corrected by a little, so that messages can be searched
        by time. A clock that was far ahead is followed back, or delayed messages would wait for
        as long as it was wrong; a search by time is then inexact in that stretch.
        """
        last = self._store_ms
        if not last:
            self._begin_turn()
        now = milliseconds(self._clock.now())
        if now < last:
            now = last
        elif now < self.last_store_ms <= now + _CLOCK_SLACK_MS:
            now = self.last_store_ms
        self._store_ms = self._now_ms = max(now, 1)
        return self._now_ms

    def _begin_turn(self) -> None:
        if self.is_mirror:
            raise WriteRefused("this log is a copy of the master's, and only the master adds to it")
        refusal = self._refusal()
        if refusal is not None:
            raise refusal
        self._position = self._segment_at = self._log.end
        self._limit = self._log.following_file(self._position) - END_OF_FILE_SIZE

    def _make_room(self, size: int, allowed: int, what: str) -> int:
        """End the current file and begin the next one; where the record goes."""
        if size > allowed:
            raise MessageTooLarge(size, allowed, what)
        rest = self._limit + END_OF_FILE_SIZE - self._position
        if rest < self._log.file_size:
            self._pieces.append(end_of_file_record(rest))
            self._close_segment()
            self._position = self._segment_at = self._log.following_file(self._position)
        self._limit = self._log.following_file(self._position) - END_OF_FILE_SIZE
        return self._position

    def _close_segment(self) -> None:
        if self._pieces:
            self._segments.append((self._segment_at, self._pieces))
            self._pieces = []

    def adopt(self, at: int, data: bytes, arrivals: list[Placed], store_ms: int) -> None:
        """Collect records of one file that another broker has given their places."""
        self._segments.append((at, [data]))
        self._turn += arrivals
        self._store_ms = max(self._store_ms, store_ms, 1)

    # ---- writing

    def write(self) -> int:
        """Write what was collected, all or nothing, and make it known; where the log ends now."""
        if not self._store_ms:
            return self._log.end
        self._close_segment()
        if self._scheduled:
            self._stamp_scheduled()
        segments = [(at, b"".join(pieces)) for at, pieces in self._segments]
        self._segments = []
        turn, self._turn = self._turn, []
        store_ms, self._store_ms, self._now_ms = self._store_ms, 0, 0
        try:
            self._log.write(segments)
        except OSError as error:
            self._take_back(segments, turn)
            if is_full(error):
                raise DiskFull(
                    f"the disk of {self._log.folder} is full ({error}); nothing was stored: "
                    "make room or let retention delete more"
                ) from error
            raise WriteFailed(f"writing the commit log failed ({error}); nothing was stored") from (
                error
            )
        except BaseException:
            # Interrupted, or out of memory: the caller that catches it must find the log as it was.
            self._take_back(segments, turn)
            raise
        self.last_store_ms = store_ms
        if self.is_held_back:
            self._unpublished += turn
        elif turn:
            self._dispatch(turn)
        return self._log.end

    def _stamp_scheduled(self) -> None:
        """Have the delays of a turn's messages begin now.

        A turn may be long. A message that is to be delivered a minute after it was stored must not
        be delivered a minute after it was appended, which is too early. So its own time is that of
        the write, and no fraction of a millisecond before it.
        """
        scheduled, self._scheduled = self._scheduled, []
        now = max(self._store_ms, milliseconds_up(self._clock.now()))
        for pieces, place, order in scheduled:
            pieces[place] = restamped(bytes(pieces[place]), now)
            queue, number, _, at, size = self._turn[order]
            code = self.codes.in_schedule(bytes(pieces[place + _PIECES - 1]), now)
            self._turn[order] = (queue, number, code, at, size)
        self._store_ms = now

    def discard(self) -> None:
        """Forget what was collected since the last `write`."""
        self._pieces = []
        self._segments = []
        self._scheduled = []
        turn, self._turn = self._turn, []
        self._store_ms = self._now_ms = 0
        self._return_numbers(turn)

    def forget_topic(self, topic: str) -> None:
        """Make nothing known of a topic that is being deleted."""
        self._unpublished = deque(each for each in self._unpublished if each[0].topic != topic)

    def publish(self, flushed: int) -> None:
        """Make known what waited for the disk."""
        waiting = self._unpublished
        ready: list[Placed] = []
        while waiting and waiting[0][3] + waiting[0][4] <= flushed:
            ready.append(waiting.popleft())
        if ready:
            self._dispatch(ready)

    @property
    def dispatched(self) -> int:
        """Everything in the log below this offset is in the queues."""
        return self._unpublished[0][3] if self._unpublished else self._log.end

    def _dispatch(self, arrivals: list[Placed]) -> None:
        dirty = self._queues.dirty
        limit = self._queues.tail_limit
        for queue, number, code, at, size in arrivals:
            if number != queue.max_offset:
                raise self._out_of_order(queue, number)
            tail = queue.tail
            if isinstance(code, int):
                tail += pack_entry(at, size, code)
                queue.max_offset = number + 1
            else:
                tail += code
                queue.max_offset = number + len(code) // ENTRY_SIZE
            queue.last_end = at + size
            if not queue.is_dirty:
                queue.is_dirty = True
                dirty.append(queue)
            if len(tail) > limit:
                self._queues.spill(queue)
        if self.arrived is not None:
            try:
                self.arrived(arrivals)
            except Exception:
                # The messages are stored, whatever becomes of the waiting requests.
                log.exception("a listener for arriving messages failed")

    def _out_of_order(self, queue: ConsumeQueue, number: int) -> StoreFailed:
        """Stop before an entry is written in the place of another; a start rebuilds them."""
        failure = StoreFailed(
            f"message {number} of {queue!r} does not follow the one before it; nothing is accepted "
            "until the store is opened again"
        )
        self._fail(failure)
        return failure

    def _take_back(self, segments: list[tuple[int, bytes]], turn: list[Placed]) -> None:
        self._return_numbers(turn)
        try:
            self._log.undo(segments)
        except OSError as error:
            log.exception("a failed write could not be undone; writes are refused from now on")
            self._fail(error)

    def _return_numbers(self, turn: list[Placed]) -> None:
        for queue, number, _, _, _ in reversed(turn):
            queue.next_offset = number
            if not number:
                self._queues.forget_unused(queue)


# Stored messages, as the listener sees them.


class ArrivedIn(Protocol):
    """The queue of an arrival, as far as it concerns others: which one it is."""

    @property
    def topic(self) -> str: ...

    @property
    def queue_id(self) -> int: ...


#: A message that readers can see now: its queue, its number there, its tag code (the time of
#: delivery in the schedule topic), its offset in the log and its size.
Arrival: TypeAlias = tuple[ArrivedIn, int, int, int, int]
#: The same, or all messages of a large batch: the number and offset of the first, their entries in
#: place of a tag code, and the size of all.
Arrivals: TypeAlias = tuple[ArrivedIn, int, int | bytes, int, int]
#: The same before it is announced, with the queue that it is to be written to.
Placed: TypeAlias = tuple[ConsumeQueue, int, int | bytes, int, int]


def single_arrivals(arrivals: Arrivals) -> Iterator[Arrival]:
    """The messages one by one."""
    queue, first, codes, at, size = arrivals
    if isinstance(codes, int):
        yield queue, first, codes, at, size
        return
    for number, (at, size, code) in enumerate(iter_entries(codes), first):
        yield queue, number, code, at, size


# The last field of a queue entry: the tag code, by which readers filter without the message (0
# without a tag). In the schedule topic it is the delivery time in milliseconds.

_TAGS = b"TAGS\x01"
_ITEM_END = b"\x02"
_TAGS_ITEM = _ITEM_END + _TAGS
#: Few tags make up a topic; the bound is for applications that put an id into the tag.
_KNOWN_TAGS = 8192


class EntryCodes:
    """The codes of new entries. Remembers tags."""

    def __init__(self, delay_levels: Sequence[float]) -> None:
        self._delays_ms = [milliseconds_up(delay) for delay in delay_levels]
        self._known: dict[bytes, int] = {}  #: by tags as they lie in properties

    def of(self, queue: ConsumeQueue, properties: bytes, store_ms: int) -> int:
        """The code of a message with these properties."""
        if queue.is_schedule:
            return self.in_schedule(properties, store_ms)
        # The usual case by hand, an eighth of what the general way takes: a tag that is known.
        _, name, rest = properties.rpartition(_TAGS_ITEM)
        if not name:
            if not properties.startswith(_TAGS):
                return 0
            rest = properties[len(_TAGS) :]
        code = self._known.get(rest.partition(_ITEM_END)[0])
        return self._learn(properties) if code is None else code

    def of_columns(self, queue: ConsumeQueue, columns: BatchColumns) -> list[int]:
        """The codes of a large batch to a queue of no schedule.

        Properties have their length before them, two bytes, which may look like the start of an
        item.
        """
        if _TAGS not in columns.joined_tails:
            return [0] * len(columns)
        known, codes = self._known, []
        for tail in columns.tails:
            before, _, rest = tail.rpartition(_TAGS_ITEM)
            code = known.get(rest.partition(_ITEM_END)[0]) if before else None
            codes.append(self.of(queue, tail[2:], 0) if code is None else code)
        return codes

    def in_schedule(self, properties: bytes, store_ms: int) -> int:
        """The same in the schedule topic."""
        level = property_value(properties, DELAY)
        if level is not None and level.isdecimal() and int(level) > 0:
            delays = self._delays_ms
            return store_ms + delays[min(int(level), len(delays)) - 1]
        return tag_code(property_value(properties, TAGS))

    def _learn(self, properties: bytes) -> int:
        tag = property_value(properties, TAGS)
        if not tag:
            return 0
        if len(self._known) >= _KNOWN_TAGS:
            self._known.clear()
        code = tag_code(tag)
        self._known[tag.encode("utf-8", "replace")] = code
        return code
