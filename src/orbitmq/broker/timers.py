"""Timer messages: delivered at a time that their producer names, or recalled before.

They lie in one queue of a system topic, in the order of their arrival. Memory has one number for
each, its time and its offset in that queue, in a heap: forty megabytes for a million. The queue is
read when the store has the messages, also at a start; a recall is a message in the same queue.
Nothing is delivered before the queue was read to its end, so no acknowledged recall is missed.

Messages are delivered in the order of the heap, so one number says which were delivered
(`_delivered`), with a list of exceptions. After a crash those delivered since the last save are
delivered again. Apache delivers up to a second early; here no message is early.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import logging
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orbitmq import names
from orbitmq.broker.config import ConfigFile, SavedTable
from orbitmq.broker.delays import asked_level
from orbitmq.broker.errors import PutResult, Refused
from orbitmq.broker.groups import peer_of
from orbitmq.broker.parked import (
    DeliveryRetries,
    Reading,
    Release,
    TimerCounts,
    park,
    released,
)
from orbitmq.broker.scheduler import no_wake
from orbitmq.broker.topics import may_write
from orbitmq.broker.writes import Draft, Stage
from orbitmq.clock import milliseconds, milliseconds_up
from orbitmq.message.properties import (
    BORN_TIMESTAMP,
    PRODUCER_GROUP,
    REAL_TOPIC,
    TAGS,
    TIMER_DEL_UNIQKEY,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    UNIQ_KEY,
    encode_properties,
    property_value,
    remove_properties,
    replace_property,
)
from orbitmq.message.record import TRANSACTION_COMMIT, TRANSACTION_NONE, transaction_type
from orbitmq.message.stored import StoredMessage
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import LATER, Handler, Result
from orbitmq.store.files import DiskFiles
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import RecallMessageRequest, RecallMessageResponse
from orbitmq.wire.javajson import Body, Int64

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts


log = logging.getLogger(__name__)

#: Messages of the queue read in one step.
SCAN = 1024

#: Part of every property by which a producer requests a time.
_MARK = "TIMER_DEL"
_DELIVERABLE = (TRANSACTION_NONE, TRANSACTION_COMMIT)
#: Bits of an offset in a number of the heap.
_PLACE_BITS = 40
_PLACE = (1 << _PLACE_BITS) - 1
#: Pending messages are counted per block of this many offsets, to find the first one.
_STRETCH_BITS = 12


class Timers:
    """The timer messages of a broker."""

    def __init__(self, parts: Parts, *, disk: DiskFiles | None = None) -> None:
        self._parts = parts
        self._store = parts.store
        self._clock = parts.clock
        self._batch = parts.settings.delays.step_messages
        #: Wakes the alarm: there may be work before the time that the step returned.
        self.wake: Callable[[], None] = no_wake
        #: Time and offset of messages to be delivered.
        self._heap: list[int] = []
        #: By time, the messages that were recalled.
        self._recalled: dict[int, set[str]] = {}
        self._in_stretch: dict[int, int] = {}
        self._delivered = 0
        self._late: set[int] = set()
        self._release: Release | None = None
        self._retrying = DeliveryRetries()
        self.counts = TimerCounts()
        #: The last reported progress, or the master's.
        self._told = TimerFile()
        self._is_copy = False
        #: Increases with every change of the content of the file.
        self.revision = 0
        file = ConfigFile(parts.settings.root / "config" / FILE_NAME, TimerFile, disk=disk)
        parts.config_files.append(file)
        self._before = file.load() or left_by_apache(parts.settings.root, disk)
        self._scanned = self._load()
        self.saved = SavedTable(
            file,
            revision=lambda: self.revision,
            document=self._document,
            clock=parts.clock,
            store=parts.store,
        )
        parts.writes.transformations.add(_MARK, Stage.TIMER, self.park)

    @property
    def pending(self) -> int:
        """The number of waiting messages, including recalled ones."""
        return len(self._heap)

    @property
    def unread(self) -> int:
        """The number of parked messages that were not read yet."""
        return self._store.max_offset(names.TIMER_TOPIC, 0) - self._scanned

    def late(self, now_ms: int) -> int:
        """The milliseconds by which the first one is late; 0 when none is."""
        return max(0, now_ms - (self._heap[0] >> _PLACE_BITS)) if self._heap else 0

    def due_times(self) -> Iterator[int]:
        """The times of all of them, in milliseconds and in no order."""
        return (entry >> _PLACE_BITS for entry in tuple(self._heap))

    @property
    def longest(self) -> float:
        """The longest delay of a message: no longer than the log is kept."""
        settings = self._parts.settings
        return min(settings.delays.timer_max_delay, settings.store.retention.keep)

    # Parking.

    def park(self, draft: Draft) -> None:
        """Park a message that requests a time; a transformation."""
        if transaction_type(draft.sys_flag) not in _DELIVERABLE:
            return
        if asked_level(draft.properties) > 0:
            draft.properties = remove_properties(draft.properties, ASKED)
            return
        if property_value(draft.properties, TIMER_OUT_MS) is not None:
            return
        now = self._clock.now()
        now_ms, due_ms = milliseconds(now), asked_time(draft.properties, now)
        if due_ms is None:
            return
        self._check_enabled()
        if due_ms <= now_ms:
            if property_value(draft.properties, TIMER_DEL_UNIQKEY) is not None:
                raise Refused(ResponseCode.MESSAGE_ILLEGAL, "a recall of a message that is due")
            return
        self.check_time(due_ms, now_ms)
        self.park_until(draft, due_ms)

    def park_until(self, draft: Draft, due_ms: int) -> None:
        """Park a message in the timer topic."""
        self._check_enabled()
        if self.pending >= self._parts.settings.delays.timer_max_pending:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"timer message is under flow control: {self.pending} messages wait for their "
                "time, more than delays.timer_max_pending allows",
            )
        topic = draft.topic
        draft.properties = replace_property(draft.properties, TIMER_OUT_MS, str(due_ms))
        unique_id = property_value(draft.properties, UNIQ_KEY)
        if property_value(draft.properties, TIMER_DEL_UNIQKEY) is None:
            self.counts.took(topic, max(0.0, due_ms / 1000 - self._clock.now()))
        park(draft, names.TIMER_TOPIC, 0)
        if unique_id is not None and not topic.startswith(names.RETRY_PREFIX):
            broker = self._parts.settings.name
            draft.recall_handle = RecallHandle(topic, broker, due_ms, unique_id).encode()
        self.wake()

    def check_time(self, due_ms: int, now_ms: int) -> None:
        """Refuse a time that is too far ahead."""
        if due_ms - now_ms > self.longest * 1000:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"timer message illegal, the delay time should not be bigger than the max delay "
                f"{self.longest:.0f} s",
            )

    def _check_enabled(self) -> None:
        if not self._parts.settings.timer:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                "accurate timer message is not enabled, broker.timer is off",
            )

    # Reading the queue.

    def step(self, now: float) -> float | None:
        """Read new messages, deliver some of those that are due; when there will be more."""
        if not self._read_on():
            return now
        if self._release is not None or not self._heap:
            return None
        due_ms = max(self._heap[0] >> _PLACE_BITS, self._retrying.not_before)
        if due_ms > milliseconds(now):
            return due_ms / 1000
        self._deliver(milliseconds(now))
        return None

    def _read_on(self) -> bool:
        """Read parked messages; whether there are no more."""
        end = self._store.max_offset(names.TIMER_TOPIC, 0)
        if self._scanned == end:
            return True
        reading = Reading(self._store, names.TIMER_TOPIC, 0, self._scanned)
        for messages in reading.batches(SCAN):
            for message in messages:
                self._learn(message)
        self.revision += self._scanned != reading.offset
        # A wrong offset is corrected in the next step, or there is nothing to read.
        is_stuck = self._scanned == reading.offset
        self._scanned = reading.offset
        return is_stuck or self._scanned >= end

    def _learn(self, message: StoredMessage) -> None:
        due_ms = number_in(message.get_property(TIMER_OUT_MS))
        if due_ms is None or not 0 <= due_ms < 1 << 62:
            log.error("a timer message without a time", extra={"offset": message.queue_offset})
            return
        place = message.queue_offset
        entry = due_ms << _PLACE_BITS | place
        before = self._before
        if entry <= self._delivered:
            if place < before.scanned and place not in self._late:
                return
            self._late.add(place)
        recalled = message.get_property(TIMER_DEL_UNIQKEY)
        if recalled is not None:
            self._recalled.setdefault(due_ms, set()).add(recalled)
        else:
            self.counts.waiting[message.get_property(REAL_TOPIC) or ""] += 1
        heapq.heappush(self._heap, entry)
        stretch = place >> _STRETCH_BITS
        self._in_stretch[stretch] = self._in_stretch.get(stretch, 0) + 1

    # Delivering.

    def _deliver(self, now_ms: int) -> None:
        heap = self._heap
        taken: list[int] = []
        #: The real topic of a message that is delivered or was recalled.
        topics: list[str | None] = []
        release = Release(lambda failed: self._done(release, taken, topics, failed))
        self._release = release
        while heap and heap[0] >> _PLACE_BITS <= now_ms and len(taken) < self._batch:
            entry = heapq.heappop(heap)
            taken.append(entry)
            # In the order of the heap, so that the first failed one is known by its number.
            topics.append(self._release_one(release, entry, len(taken) - 1))
        self._delivered = max(self._delivered, taken[-1])
        release.close()

    def _release_one(self, release: Release, entry: int, number: int) -> str | None:
        """Deliver the message of an entry, unless it was recalled; its topic."""
        place = entry & _PLACE
        message = self._message(place)
        if message is None:
            log.error("a timer message is missing in the log", extra={"offset": place})
            return None
        if message.get_property(TIMER_DEL_UNIQKEY) is not None:
            return None
        topic = message.get_property(REAL_TOPIC) or ""
        recalled = self._recalled.get(entry >> _PLACE_BITS)
        unique_id = message.get_property(UNIQ_KEY) or ""
        if recalled is not None and recall_key(topic, unique_id) in recalled:
            return topic
        draft = released(message, self._parts.destinations)
        if draft is None:
            release.leave_out(number)
        else:
            release.put(self._parts.writes, draft, number)
        return topic

    def _message(self, place: int) -> StoredMessage | None:
        reading = Reading(self._store, names.TIMER_TOPIC, 0, place)
        for messages in reading.batches(1):
            return messages[0] if messages[0].queue_offset == place else None
        return None

    def _done(
        self, release: Release, taken: list[int], topics: list[str | None], failed: int | None
    ) -> None:
        self._release = None
        self._parts.destinations.dropped += release.left_out(failed)
        kept = taken if failed is None else taken[:failed]
        for entry, topic in zip(kept, topics, strict=False):
            self._forget(entry)
            if topic is not None:
                self.counts.left(topic, is_known=topic in self._parts.topics)
        if failed is None:
            self._retrying.succeeded()
        else:
            self._retrying.failed(milliseconds(self._clock.now()))
            for entry in taken[failed:]:
                self._late.add(entry & _PLACE)
                heapq.heappush(self._heap, entry)
        # Recalls are needed until all messages of their time are processed.
        first = self._heap[0] >> _PLACE_BITS if self._heap else 1 << 62
        for due_ms in {entry >> _PLACE_BITS for entry in kept}:
            if due_ms < first:
                self._recalled.pop(due_ms, None)
        self.revision += 1
        self.wake()

    def _forget(self, entry: int) -> None:
        place = entry & _PLACE
        self._late.discard(place)
        stretch = place >> _STRETCH_BITS
        self._in_stretch[stretch] -= 1
        if not self._in_stretch[stretch]:
            del self._in_stretch[stretch]

    # The file, and a slave's copy.

    def progress(self) -> tuple[TimerFile, int]:
        """The progress for slaves: the messages that are delivered for certain.

        While a put is under way this is the previous one: a slave that takes over delivers these
        messages again.
        """
        document = self._document()
        if document is not None:
            self._told = document
        first_ms = self._heap[0] >> _PLACE_BITS if self._heap else milliseconds(self._clock.now())
        return self._told, min(first_ms, milliseconds(self._clock.now()))

    def replace(self, master: TimerFile) -> None:
        """Become a copy of a master's progress; for a broker that delivers nothing itself."""
        if not self._is_copy or master != self._told:
            self._is_copy = True
            self._told = master
            self.revision += 1

    def _document(self) -> TimerFile | None:
        """The progress for the file; None while a put is under way."""
        if self._is_copy:
            return self._told
        if self._release is not None:
            return None
        first = self._scanned
        if self._in_stretch:
            # Messages are read in ascending order, so the first stretch is the lowest.
            first = next(iter(self._in_stretch)) << _STRETCH_BITS
        return TimerFile(
            first_pending=first,
            scanned=self._scanned,
            delivered_ms=self._delivered >> _PLACE_BITS,
            delivered_offset=self._delivered & _PLACE,
            late=tuple(sorted(self._late)),
        )

    def _load(self) -> int:
        """Take over the file; the offset from which the queue is to be read."""
        before = self._before
        self._delivered = before.delivered_ms << _PLACE_BITS | before.delivered_offset
        low = self._store.min_offset(names.TIMER_TOPIC, 0)
        self._late = {place for place in before.late if place >= low}
        high = self._store.max_offset(names.TIMER_TOPIC, 0)
        if before.scanned > high:
            # Another queue, or one that lost its end: the file is about other messages.
            log.warning(
                "the timer queue ends before its saved progress; all of it counts as pending",
                extra={"offset": high, "stored": before.scanned},
            )
            self._before = TimerFile()
            self._delivered = 0
            self._late = set()
            return low
        return min(max(before.first_pending, low), high)


# The saved progress of timer messages.


FILE_NAME = "timerOffset.json"
#: The field in which masters of this kind send their slaves all of it, beside Apache's checkpoint.
TIMER_PROGRESS = "orbitmqTimerProgress"
#: The checkpoint of Apache's timer wheel.
APACHE_FILE_NAME = "timercheck"

#: Time up to which the wheel was read, place in its own log, offset in the timer queue.
_APACHE = struct.Struct(">qqq")
#: The same, the master's offset, and a version.
_CHECKPOINT = struct.Struct(">qqqqqqq")
#: Apache puts a late message into the next slots of its wheel, so the last slots before its time
#: may still hold some. A message may be delivered twice, but not lost.
_APACHE_SLACK_MS = 10_000


class TimerFile(Body, frozen=True, kw_only=True):
    """timerOffset.json: which messages of the timer queue were delivered."""

    #: All messages below were delivered.
    first_pending: Int64 = 0
    #: The file says nothing about messages from here on.
    scanned: Int64 = 0
    #: Up to this time, and in the queue up to this offset, everything has been delivered.
    delivered_ms: Int64 = 0
    delivered_offset: Int64 = 0
    #: Except for these.
    late: tuple[Int64, ...] = ()


def apache_checkpoint(progress: TimerFile, read_ms: int) -> bytes:
    """Apache's form of it: everything up to `read_ms` was delivered."""
    return _CHECKPOINT.pack(read_ms, 0, progress.scanned, progress.scanned, 0, 0, 0)


def from_apache(data: bytes) -> TimerFile | None:
    """The progress in Apache's checkpoint; None when it is not valid."""
    try:
        read_ms, _, queue_offset = _APACHE.unpack_from(data)
    except struct.error:
        return None
    return TimerFile(scanned=max(queue_offset, 0), delivered_ms=max(read_ms - _APACHE_SLACK_MS, 0))


def left_by_apache(root: Path, disk: DiskFiles | None = None) -> TimerFile:
    """The progress that an Apache broker left in this store, if any."""
    try:
        data = (disk or DiskFiles()).read_bytes(root / "config" / APACHE_FILE_NAME)
    except FileNotFoundError:
        return TimerFile()
    left = from_apache(data)
    if left is None:
        return TimerFile()
    log.info("timer progress taken over from Apache's broker", extra={"offset": left.scanned})
    return left


# The requested time of a message.


#: The properties that request a time.
ASKED = (TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS)

_is_number = re.compile(r"[+-]?[0-9]{1,18}").fullmatch


def asked_time(properties: bytes, now: float) -> int | None:
    """The time that a message requests, in milliseconds; None when it requests none."""
    for name, unit, is_delay in (
        (TIMER_DELAY_SEC, 1000, True),
        (TIMER_DELAY_MS, 1, True),
        (TIMER_DELIVER_MS, 1, False),
    ):
        text = property_value(properties, name)
        if text is None:
            continue
        number = number_in(text)
        if number is None:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"timer message illegal, property {name} must be a number, got {text[:64]!r}",
            )
        if not is_delay:
            return number * unit
        # A delay must not end early; a delay of 0 is over immediately.
        return number * unit + (milliseconds_up(now) if number > 0 else milliseconds(now))
    return None


def number_in(text: str | None) -> int | None:
    """A number of at most 18 digits; None for other texts."""
    return int(text) if text is not None and _is_number(text) else None


# Recall handles: the URL-safe Base64 of `v1 <topic> <broker> <time> <unique id>`. The time is a
# millisecond later than the message's, because Apache's brokers round times down and have to find
# the message by it.


_VERSION = "v1"
_PARTS = 5
_LATER_MS = 1
_LONGEST_TIME = 18


@dataclass(frozen=True, slots=True)
class RecallHandle:
    """The message that a handle means."""

    topic: str
    broker: str
    due_ms: int  #: of the message
    unique_id: str

    def encode(self) -> str:
        """The text of the handle, for producers."""
        text = f"{_VERSION} {self.topic} {self.broker} {self.due_ms + _LATER_MS} {self.unique_id}"
        return base64.urlsafe_b64encode(text.encode()).decode()


def decode_handle(text: str) -> RecallHandle:
    """The handle in a text. Raises `Refused`."""
    try:
        raw = base64.b64decode(_padded(text), altchars=b"-_", validate=True)
        parts = raw.decode().split(" ")
    except (binascii.Error, ValueError):
        parts = []
    if len(parts) < _PARTS or parts[0] != _VERSION:
        raise Refused(ResponseCode.ILLEGAL_OPERATION, "recall handle is invalid")
    _, topic, broker, time, unique_id = parts[:_PARTS]
    if not time.isascii() or not time.isdecimal() or len(time) > _LONGEST_TIME:
        raise Refused(ResponseCode.ILLEGAL_OPERATION, "recall failed, timestamp invalid")
    return RecallHandle(topic, broker, int(time) - _LATER_MS, unique_id)


def recall_key(topic: str, unique_id: str) -> str:
    """The property by which a recall names the message."""
    return f"{topic}_{unique_id}"


def _padded(text: str) -> bytes:
    # Java's decoder does not require the padding either.
    return text.encode("ascii", "replace") + b"=" * (-len(text) % 4)


# The request for a recall (370).


_RECALL_TAG = "_RECALL_TAG_"
_BODY = b"0"


class RecallHandler:
    """Recalls timer messages."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {RequestCode.RECALL_MESSAGE: self.recall}

    def recall(self, connection: Connection, request: Command) -> Result:
        """Store a message that cancels another; answered when it is stored.

        As with Apache's broker, it is not checked whether the other one exists.
        """
        header = request.header(RecallMessageRequest)
        self._check_broker()
        if header.topic not in self._parts.topics:
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"recall failed, the topic[{header.topic}] not exist",
            )
        handle = decode_handle(header.recall_handle)
        now_ms = milliseconds(self._parts.clock.now())
        self._check_handle(handle, header.topic, now_ms)
        draft = self._marker(connection, header, handle, now_ms)
        self._parts.timers.park_until(draft, handle.due_ms)

        def stored(result: PutResult) -> None:
            extra = {"MSG_REGION": self._parts.settings.send.region}
            if result.status.is_stored:
                answer = request.answer(
                    ResponseCode.SUCCESS,
                    RecallMessageResponse(msg_id=handle.unique_id),
                    extra=extra,
                )
            else:
                answer = request.answer(
                    ResponseCode.SYSTEM_ERROR,
                    remark=f"recall failed, execute error: {result.error}",
                    extra=extra,
                )
            connection.reply(request, answer)

        self._parts.writes.put(draft, stored, transform=False)
        return LATER

    def _check_broker(self) -> None:
        settings = self._parts.settings
        if not settings.delays.recall:
            raise Refused(
                ResponseCode.NO_PERMISSION,
                "recall failed, operation is forbidden: delays.recall is off",
            )
        if settings.is_slave:
            raise Refused(
                ResponseCode.SLAVE_NOT_AVAILABLE,
                "recall failed, broker service not available: it is a slave",
            )
        if settings.send.accept_from > self._parts.clock.now() or not may_write(
            settings.permission
        ):
            raise Refused(
                ResponseCode.SERVICE_NOT_AVAILABLE,
                "recall failed, broker service not available: it may not be written now",
            )

    def _check_handle(self, handle: RecallHandle, topic: str, now_ms: int) -> None:
        problem = ""
        if handle.topic != topic:
            problem = "topic not match"
        elif handle.broker != self._parts.settings.name:
            problem = f"broker service not available: the handle is of broker {handle.broker!r}"
        elif handle.due_ms <= now_ms:
            problem = "timestamp invalid: the message is due"
        elif handle.due_ms - now_ms > self._parts.timers.longest * 1000:
            problem = "timestamp invalid: no message can be so far ahead"
        if problem:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, f"recall failed, {problem}")

    def _marker(
        self,
        connection: Connection,
        header: RecallMessageRequest,
        handle: RecallHandle,
        now_ms: int,
    ) -> Draft:
        properties = encode_properties(
            {
                TAGS: _RECALL_TAG,
                TIMER_DEL_UNIQKEY: recall_key(handle.topic, handle.unique_id),
                UNIQ_KEY: handle.unique_id,
                TIMER_DELIVER_MS: str(handle.due_ms),
                BORN_TIMESTAMP: str(now_ms),
                PRODUCER_GROUP: header.producer_group,
            }
        )
        born_host = peer_of(connection).born_host
        return Draft(handle.topic, 0, _BODY, properties, now_ms, born_host)
