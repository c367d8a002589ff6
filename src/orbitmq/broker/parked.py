"""Parked messages: delivery of delayed messages, timer messages and half messages.

A parked message is stored in a system topic, with its real topic and queue as `REAL_TOPIC` and
`REAL_QID`. When its time comes it is stored again, there, with its body, born data, flags and
attempts, and, as with Apache's broker, with its whole property string unless it was committed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from orbitmq import names
from orbitmq.broker.counters import Histogram
from orbitmq.broker.errors import PutResult, PutStatus
from orbitmq.broker.topics import READ_WRITE, TopicTable
from orbitmq.broker.writes import Draft
from orbitmq.clock import Clock
from orbitmq.logonce import LogEveryNth
from orbitmq.message.properties import (
    REAL_QUEUE_ID,
    REAL_TOPIC,
    TIMER_OUT_MS,
    append_property,
    remove_properties,
)
from orbitmq.message.record import BodyCorrupt, pack_host
from orbitmq.message.stored import StoredMessage, decode_messages
from orbitmq.store.read import ReadStatus
from orbitmq.store.store import Store
from orbitmq.wire.bodies import TopicConfig

if TYPE_CHECKING:
    from orbitmq.broker.writes import Done, Writes


log = logging.getLogger(__name__)

#: Properties with the real topic and queue of a parked message.
ADDRESS = (REAL_TOPIC, REAL_QUEUE_ID)
_LARGEST_QUEUE = 0x7FFFFFFF
_LONGEST_QUEUE = len(str(_LARGEST_QUEUE))
#: The most that parking adds, without the topic: a time has at most 15 digits.
_NOTES = ((REAL_TOPIC, ""), (REAL_QUEUE_ID, "9" * _LONGEST_QUEUE), (TIMER_OUT_MS, "9" * 15))
_NOTES_SIZE = sum(len(name) + len(value) + 2 for name, value in _NOTES)
#: Results of a read after which there is nothing more to read for now.
_AT_THE_END = frozenset({ReadStatus.OFFSET_OVERFLOW_ONE, ReadStatus.NO_MESSAGE_IN_QUEUE})


def park(draft: Draft, topic: str, queue_id: int) -> None:
    """Store the draft in `topic`, with its real topic and queue as properties."""
    properties = remove_properties(draft.properties, ADDRESS)
    properties = append_property(properties, REAL_TOPIC, draft.topic)
    draft.properties = append_property(properties, REAL_QUEUE_ID, str(draft.queue_id))
    draft.topic = topic
    draft.queue_id = queue_id


def room_to_park(topic: str) -> int:
    """Bytes of properties that parking, for a level or a time, adds to a message of `topic`."""
    return _NOTES_SIZE + len(topic.encode())


def copied(message: StoredMessage, topic: str, queue_id: int) -> Draft:
    """A draft of the same message for another queue. Raises `BodyCorrupt`."""
    message.verify()
    return Draft(
        topic,
        queue_id,
        message.stored_body,
        message.raw_properties,
        message.born_ms,
        pack_host(*message.born_host),
        message.sys_flag,
        message.flag,
        message.reconsume_times,
        # Its sender was answered long ago.
        waits=False,
    )


def decimal(text: str | None, digits: int) -> int | None:
    """A number without a sign and with at most `digits` digits; None for other texts."""
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > digits:
        return None
    return int(text)


def real_place(message: StoredMessage) -> tuple[str, int] | None:
    """The real topic and queue of a parked message; None when it has none."""
    topic = message.get_property(REAL_TOPIC)
    queue = decimal(message.get_property(REAL_QUEUE_ID), _LONGEST_QUEUE)
    if not topic or queue is None or queue > _LARGEST_QUEUE:
        return None
    return None if names.topic_problem(topic) is not None else (topic, queue)


def released(message: StoredMessage, destinations: Destinations) -> Draft | None:
    """A parked message for its real queue; None when that is not possible.

    It then stays where it is, and is logged, or its topic was deleted.
    """
    place = real_place(message)
    reason = ""
    if place is None:
        reason = "it does not say where it belongs"
    elif place[0] in names.NOT_FOR_PRODUCERS:
        # For instance a half message that was sent with a delay.
        reason = f"{place[0]} is a topic of the broker"
    elif not destinations.takes(*place, message.physical_offset):
        return None
    else:
        try:
            return copied(message, *place)
        except BodyCorrupt as error:
            reason = str(error)
    log.error(
        "a parked message cannot be delivered: %s",
        reason,
        extra={"topic": message.topic, "queue": message.queue_id, "offset": message.queue_offset},
    )
    return None


class Reading:
    """Reads a queue from an offset to its end, and follows corrections of the offset."""

    def __init__(self, store: Store, topic: str, queue_id: int, offset: int) -> None:
        self._store = store
        self._topic = topic
        self._queue_id = queue_id
        #: The offset of the next read, behind all messages that were returned or are deleted.
        self.offset = offset

    def batches(self, most: int) -> Iterator[list[StoredMessage]]:
        """Batches of at most `most` messages together.

        `offset` is behind a batch when the next one is requested, not before.
        """
        left = most
        while left > 0:
            result = self._store.read(self._topic, self._queue_id, self.offset, left)
            if result.status is ReadStatus.FOUND:
                messages = decode_messages(b"".join(result.pieces))
                left -= len(messages)
                yield messages
            elif result.status in _AT_THE_END and result.max_offset >= self.offset:
                return
            if result.damaged:
                log.error(
                    "parked messages were destroyed on the disk",
                    extra={"topic": self._topic, "queue": self._queue_id}
                    | {"offset": list(result.damaged)},
                )
            if result.next_offset == self.offset:
                return
            if result.status is not ReadStatus.FOUND and not result.damaged:
                log.warning(
                    "there is nothing at offset %d of %s queue %d (%s); going on at %d",
                    self.offset,
                    self._topic,
                    self._queue_id,
                    result.status.value,
                    result.next_offset,
                )
            self.offset = result.next_offset


# Delivery of a batch: all of it, or again from the first message that failed.


#: Pauses after the first and after many failures in a row.
FIRST_PAUSE_MS = 100
LONGEST_PAUSE_MS = 5000


class Release:
    """A batch on its way into the store."""

    __slots__ = ("_done", "_failed", "_is_closed", "_left_out", "_waiting", "end", "next_due")

    def __init__(self, done: Callable[[int | None], None]) -> None:
        """`done` gets the first offset that the store did not take, or None."""
        self._done = done
        self._failed: int | None = None
        self._waiting = 0
        self._is_closed = False
        self._left_out: list[int] = []
        #: Behind the last message of the batch.
        self.end = 0
        #: When the message behind the batch is due; None when that is not known.
        self.next_due: int | None = None

    def put(self, writes: Writes, draft: Draft, offset: int, then: Done | None = None) -> None:
        """Put one message that was parked at `offset`; `then` is called when it is stored."""
        self._waiting += 1

        def told(result: PutResult) -> None:
            self._waiting -= 1
            try:
                if not result.status.is_stored:
                    self._refused(draft, offset, result)
                elif then is not None:
                    then(result)
            finally:
                self._settle()

        writes.put(draft, told, transform=False)

    def leave_out(self, offset: int) -> None:
        """The message that was parked at `offset` is dropped."""
        self._left_out.append(offset)

    def left_out(self, failed: int | None) -> int:
        """The number of dropped messages of what is done; the rest of the batch comes again."""
        if failed is None:
            return len(self._left_out)
        return sum(1 for offset in self._left_out if offset < failed)

    def close(self) -> None:
        """The batch is complete."""
        self._is_closed = True
        self._settle()

    def _refused(self, draft: Draft, offset: int, result: PutResult) -> None:
        if result.status is PutStatus.MESSAGE_ILLEGAL:
            # It will never be accepted, and must not block the messages behind it.
            log.error(
                "a parked message cannot be stored where it belongs: %s",
                result.error,
                extra={"topic": draft.topic, "queue": draft.queue_id, "offset": offset},
            )
        elif self._failed is None or offset < self._failed:
            self._failed = offset

    def _settle(self) -> None:
        if self._is_closed and not self._waiting:
            self._is_closed = False
            self._done(self._failed)


class DeliveryRetries:
    """The backoff after the store refused."""

    __slots__ = ("_pause_ms", "not_before")

    def __init__(self) -> None:
        self._pause_ms = FIRST_PAUSE_MS
        #: Milliseconds of the time of day; 0: immediately.
        self.not_before = 0

    def failed(self, now_ms: int) -> None:
        self.not_before = now_ms + self._pause_ms
        self._pause_ms = min(self._pause_ms * 2, LONGEST_PAUSE_MS)

    def succeeded(self) -> None:
        self.not_before = 0
        self._pause_ms = FIRST_PAUSE_MS


# Deleted topics. Deleting a topic deletes its messages, also parked ones: stored under its name
# they would create its queues again, as they do with Apache's broker. So they are dropped, counted
# and logged. The store records how far every deletion reaches in the log (`Store.deleted_below`),
# so a topic that was created again gets what was sent to it since. A topic that is unknown but was
# not deleted was lost in a crash before its table was saved; it is created again.


class Destinations:
    """The topics of a broker, for messages that are stored a second time."""

    def __init__(self, store: Store, topics: TopicTable, clock: Clock) -> None:
        self._store = store
        self._topics = topics
        self._clock = clock
        self._seen = LogEveryNth()
        #: Messages that were dropped, for any reason.
        self.dropped = 0

    def was_deleted(self, topic: str) -> bool:
        """Whether the topic was deleted once, as far as the log records it."""
        return self._store.deleted_below(topic) > 0

    def takes(self, topic: str, queue_id: int, sent_at: int) -> bool:
        """Whether a message that was sent at this offset of the log may still be delivered."""
        if sent_at < self._store.deleted_below(topic):
            if count := self._seen.note(topic):
                log.warning(
                    "a message was not delivered: its topic was deleted after it was sent "
                    "(%d so far)",
                    count,
                    extra={"topic": topic, "queue": queue_id},
                )
            return False
        if topic not in self._topics:
            adopt(self._topics, topic, queue_id + 1, now=self._clock.now())
        return True


def adopt(topics: TopicTable, topic: str, queues: int, *, now: float) -> None:
    """Create a topic that has messages and is in no table."""
    log.warning("topic found in the store only", extra={"topic": topic, "queues": queues})
    topics.ensure(
        TopicConfig(
            topic_name=topic, read_queue_nums=queues, write_queue_nums=queues, perm=READ_WRITE
        ),
        now=now,
    )


# Counts of half messages and timer messages, by real topic.


#: RocketMQ's, which are called milliseconds and chosen like seconds.
FINISH_BOUNDS = (5.0, 60.0, 600.0, 3600.0, 43_200.0, 86_400.0)
#: Seconds.
DELAY_BOUNDS = (60.0, 600.0, 3600.0, 43_200.0, 86_400.0, 259_200.0)


class TransactionCounts:
    """Ends of transactions since the start."""

    __slots__ = ("committed", "latencies", "rolled_back")

    def __init__(self) -> None:
        self.committed: Counter[str] = Counter()
        self.rolled_back: Counter[str] = Counter()
        #: From the birth of a half message to its end.
        self.latencies: dict[str, Histogram] = {}

    def ended(self, topic: str, *, is_commit: bool, seconds: float) -> None:
        (self.committed if is_commit else self.rolled_back)[topic] += 1
        histogram = self.latencies.get(topic)
        if histogram is None:
            histogram = self.latencies[topic] = Histogram(FINISH_BOUNDS)
        histogram.note(max(0.0, seconds * 1000))

    def forget(self, topic: str) -> None:
        """A topic was deleted."""
        for table in (self.committed, self.rolled_back, self.latencies):
            table.pop(topic, None)


class TimerCounts:
    """Timer messages that were parked, wait, and were delivered."""

    __slots__ = ("delays", "given", "taken", "waiting")

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.given: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        #: The requested delays, in seconds.
        self.delays: dict[str, Histogram] = {}

    def took(self, topic: str, seconds: float) -> None:
        """A message was parked for `seconds`."""
        self.taken[topic] += 1
        histogram = self.delays.get(topic)
        if histogram is None:
            histogram = self.delays[topic] = Histogram(DELAY_BOUNDS)
        histogram.note(seconds)

    def left(self, topic: str, *, is_known: bool = True) -> None:
        """A message was delivered, or dropped at its time."""
        self.waiting[topic] -= 1
        if is_known:
            self.given[topic] += 1
        elif not self.waiting[topic]:
            del self.waiting[topic]

    def forget(self, topic: str) -> None:
        """A topic was deleted: only the waiting messages are still counted."""
        for table in (self.taken, self.given, self.delays):
            table.pop(topic, None)
