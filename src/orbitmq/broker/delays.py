"""Delay levels and retries: messages that are delivered a fixed time after they were stored.

A message of level n lies in queue n-1 of the schedule topic. All messages of a queue wait for the
same time, so one number per level is the progress: the first that was not delivered. A level puts a
batch into the real topics and goes on when the store has all of it, so no message is skipped, and
after a crash those delivered since the last save are delivered again. The longest overdue level
comes first, in bounded steps. Apache polls every level ten times a second; here a level knows when
its first message is due.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, AnyStr

from orbitmq import names
from orbitmq.broker.config import ConfigFile, SavedTable
from orbitmq.broker.errors import Refused
from orbitmq.broker.parked import (
    ADDRESS,
    DeliveryRetries,
    Reading,
    Release,
    copied,
    park,
    released,
    room_to_park,
)
from orbitmq.broker.scheduler import no_wake
from orbitmq.broker.topics import first_version, next_version
from orbitmq.broker.writes import Stage
from orbitmq.clock import milliseconds, milliseconds_up
from orbitmq.message.properties import (
    DELAY,
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    WAIT,
    append_property,
    property_value,
    remove_properties,
    replace_property,
)
from orbitmq.message.record import (
    MAX_PROPERTIES,
    TRANSACTION_COMMIT,
    TRANSACTION_NONE,
    transaction_type,
)
from orbitmq.message.stored import StoredMessage
from orbitmq.store.files import DiskFiles
from orbitmq.wire.bodies import DelayOffsets
from orbitmq.wire.codes import ResponseCode

if TYPE_CHECKING:
    from orbitmq.broker.broker import Parts
    from orbitmq.broker.writes import Draft


log = logging.getLogger(__name__)

FILE_NAME = "delayOffset.json"
#: A due time further ahead than the delay plus this comes from a wrong clock.
_CLOCK_SLACK_MS = 1000
_DELIVERABLE = (TRANSACTION_NONE, TRANSACTION_COMMIT)


class Delays:
    """The delay levels of a broker."""

    def __init__(self, parts: Parts, *, disk: DiskFiles | None = None) -> None:
        self._store = parts.store
        self._turns = parts.writes
        self._destinations = parts.destinations
        self._clock = parts.clock
        self._batch = parts.settings.delays.step_messages
        #: Wakes the alarm: there may be something to do earlier than the step said.
        self.wake: Callable[[], None] = no_wake
        self._levels = [
            _Level(number, milliseconds_up(delay))
            for number, delay in enumerate(parts.settings.store.delay_levels, start=1)
        ]
        self._version = first_version(parts.clock.now())
        #: Increases with every change of what the file says.
        self.revision = 0
        self._versioned = 0
        file = ConfigFile(parts.settings.root / "config" / FILE_NAME, DelayOffsets, disk=disk)
        parts.config_files.append(file)
        self._load(file.load())
        self.saved = SavedTable(
            file,
            revision=lambda: self.revision,
            document=self.offsets,
            clock=parts.clock,
            store=parts.store,
        )
        parts.writes.transformations.add(DELAY + "\x01", Stage.DELAY_LEVEL, self.park)

    # Parking.

    def park(self, draft: Draft) -> None:
        """Park a message that requests a level; a transformation."""
        level = asked_level(draft.properties)
        if level <= 0 or transaction_type(draft.sys_flag) not in _DELIVERABLE:
            return
        if level > len(self._levels):
            level = len(self._levels)
            draft.properties = replace_property(draft.properties, DELAY, str(level))
        park(draft, names.SCHEDULE_TOPIC, level - 1)
        self.wake()

    # Delivering.

    def step(self, now: float) -> float | None:
        """Deliver a bounded number of due messages; when there will be more."""
        now_ms = milliseconds(now)
        waiting: list[tuple[int, int, _Level]] = []
        for level in self._levels:
            due = self._due(level, now_ms)
            if due is not None:
                waiting.append((due, level.number, level))
        waiting.sort()
        left = self._batch
        for due, _, level in waiting:
            if due > now_ms:
                return due / 1000
            if left <= 0:
                return now
            left -= self._deliver(level, now_ms, left)
        return None

    def _due(self, level: _Level, now_ms: int) -> int | None:
        """When the level has something to do; None: not by itself, or not known yet."""
        if level.release is not None:
            return None
        if level.first_due is None:
            reading = Reading(self._store, names.SCHEDULE_TOPIC, level.number - 1, level.next)
            for messages in reading.batches(1):
                level.first_due = level.due(messages[0], now_ms)
                break
            self._advance(level, reading.offset)
        if level.first_due is None:
            return None
        return max(level.first_due, level.retrying.not_before)

    def _deliver(self, level: _Level, now_ms: int, most: int) -> int:
        """Put due messages of one level, at most `most`; how many."""
        reading = Reading(self._store, names.SCHEDULE_TOPIC, level.number - 1, level.next)
        release = Release(lambda failed: self._delivered(level, release, failed))
        count = 0
        first_due: int | None = None
        for messages in reading.batches(most):
            for message in messages:
                due = level.due(message, now_ms)
                if due > now_ms:
                    first_due = due
                    break
                count += 1
                release.end = message.queue_offset + 1
                draft = released(message, self._destinations)
                if draft is None:
                    release.leave_out(message.queue_offset)
                else:
                    release.put(self._turns, draft, message.queue_offset)
            if first_due is not None:
                break
        else:
            release.end = max(release.end, reading.offset)
        release.next_due = first_due
        level.release = release
        release.close()
        return count

    def _delivered(self, level: _Level, release: Release, failed: int | None) -> None:
        level.release = None
        self._destinations.dropped += release.left_out(failed)
        if failed is None:
            level.retrying.succeeded()
            level.first_due = release.next_due
            self._advance(level, release.end)
        else:
            self._advance(level, failed)
            level.first_due = 0
            level.retrying.failed(milliseconds(self._clock.now()))
        self.wake()

    def _advance(self, level: _Level, offset: int) -> None:
        if offset != level.next:
            level.next = offset
            self.revision += 1

    # The state of the levels.

    def offsets(self) -> DelayOffsets:
        """A copy of the progress, for the file and for slaves."""
        if self.revision != self._versioned:
            self._versioned = self.revision
            self._version = next_version(self._version, self._clock.now())
        return DelayOffsets(
            data_version=self._version,
            offset_table={level.number: level.next for level in self._levels},
        )

    def replace(self, master: DelayOffsets) -> None:
        """Become a copy of a master's progress; for a broker that delivers nothing itself."""
        for level in self._levels:
            self._advance(level, master.offset_table.get(level.number, level.next))

    def _load(self, file: DelayOffsets | None) -> None:
        if file is not None and file.data_version is not None:
            self._version = file.data_version
        table = {} if file is None else file.offset_table
        for level in self._levels:
            low = self._store.min_offset(names.SCHEDULE_TOPIC, level.number - 1)
            high = self._store.max_offset(names.SCHEDULE_TOPIC, level.number - 1)
            saved = table.get(level.number, low)
            level.next = min(max(saved, low), high)
            if level.next != saved:
                log.warning(
                    "saved progress of delay level %d is outside of its queue",
                    level.number,
                    extra={"offset": level.next, "stored": saved},
                )


class _Level:
    """One level."""

    __slots__ = ("delay_ms", "first_due", "next", "number", "release", "retrying")

    def __init__(self, number: int, delay_ms: int) -> None:
        self.number = number
        self.delay_ms = delay_ms
        #: The first message that is not delivered.
        self.next = 0
        #: When it is due; None when that is not known.
        self.first_due: int | None = None
        #: The batch that is being stored.
        self.release: Release | None = None
        self.retrying = DeliveryRetries()

    def due(self, message: StoredMessage, now_ms: int) -> int:
        """When a message is due, by the delay that its level has now."""
        due = message.store_ms + self.delay_ms
        # It was stored with a clock far ahead, and would wait until that time comes.
        return now_ms if due > now_ms + self.delay_ms + _CLOCK_SLACK_MS else due


def asked_level(properties: bytes) -> int:
    """The level that a message requests; 0 or less: none."""
    text = property_value(properties, DELAY)
    if text is None:
        return 0
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 10:
        raise Refused(
            ResponseCode.MESSAGE_ILLEGAL,
            f"property {DELAY} must be a level, a number from 1 on, got {text[:64]!r}",
        )
    return int(text)


# Failed messages: a consumer sends back the offset of a message that it could not process. The
# broker stores a copy for the group, with one attempt more, that becomes visible after 10 s, 30 s,
# 1 m up to 2 h; after the allowed attempts the copy is a dead letter. The copy carries:
#
#     RETRY_TOPIC             the topic that the message was sent to
#     ORIGIN_MESSAGE_ID       the offset id of the message that was sent
#     DLQ_ORIGIN_TOPIC        of a dead letter: the same as RETRY_TOPIC
#     DLQ_ORIGIN_MESSAGE_ID   of a dead letter: the same as ORIGIN_MESSAGE_ID
#     DLQ_REASON              the reason of the last failure, or of the dead letter
#
# Apache reserves two of the last three names and never writes them. `DLQ_REASON` is the field
# `reason` of the request, which Apache's clients do not send; an orderly consumer, which sends the
# message to the retry topic itself, sets the property.
#
# A record has room for 32767 bytes of properties. What does not fit is left out of a dead letter,
# from the end of the reason on. A copy for another attempt needs all of it, so a message without
# room is a dead letter at its first failure. (Apache's broker refuses it, and the client repeats
# the request without end.)
#
# A message to a retry topic whose group holds order locks was given up by its consumer, unless it
# has the property `__ORBIT_PUT_OFF`: then its handler was not called, and it waits.


#: The reason of a dead letter whose consumer gave none.
DLQ_REASON = "DLQ_REASON"
#: Marks a message to a retry topic that no handler has got.
PUT_OFF = "__ORBIT_PUT_OFF"
#: The level of the first attempt; each further one is a level up.
FIRST_LEVEL = 3
LONGEST_REASON = 1024

_REWRITTEN = (
    WAIT,
    DELAY,
    RETRY_TOPIC,
    ORIGIN_MESSAGE_ID,
    # Of the previous attempt.
    DLQ_REASON,
    # It must not become a timer message again.
    TIMER_DELAY_SEC,
    TIMER_DELAY_MS,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
)
_DEAD = (DLQ_ORIGIN_TOPIC, DLQ_ORIGIN_MESSAGE_ID, DLQ_REASON)


@dataclass(frozen=True, slots=True)
class Failure:
    """A message that a group could not process."""

    message: StoredMessage
    #: As the consumer requests: negative: dead letter; 0: by the attempts; else this level.
    level: int
    #: The group's attempts after the first.
    allowed: int
    reason: str | None = None

    @property
    def is_final(self) -> bool:
        """Whether this was the last attempt."""
        return self.level < 0 or self.message.reconsume_times >= self.allowed

    @property
    def next_level(self) -> int:
        """The delay level of the next attempt."""
        return self.level or FIRST_LEVEL + self.message.reconsume_times

    @property
    def origin_topic(self) -> str:
        return self.message.get_property(RETRY_TOPIC) or self.message.topic

    @property
    def origin_id(self) -> str:
        return self.message.get_property(ORIGIN_MESSAGE_ID) or self.message.offset_id

    def for_retry_in(self, topic: str) -> Failure:
        """The same, or a final one if a copy in `topic` has no room for what it needs."""
        message = self.message
        # Where the last copy belonged is overwritten in the next one.
        size = len(remove_properties(message.raw_properties, (*_REWRITTEN, *ADDRESS))) + 1
        size += sum(len(f"{name}{value}".encode()) + 2 for name, value in self._notes())
        if self.is_final or size + room_to_park(topic) <= MAX_PROPERTIES:
            return self
        why = (
            f"its properties of {len(message.raw_properties)} bytes leave no room for a retry, "
            f"{MAX_PROPERTIES} fit"
        )
        return replace(self, level=-1, reason=f"{why}: {self.reason}" if self.reason else why)

    def retry(self, topic: str, queue_id: int) -> Draft:
        """The copy that is consumed again, after `DELAY`. Raises `BodyCorrupt`.

        Only for a failure that is `for_retry_in` its topic.
        """
        draft = self._copy(topic, queue_id)
        room = MAX_PROPERTIES - room_to_park(topic)
        draft.properties = _with_reason(draft.properties, self.reason or "", room)
        return draft

    def dead_letter(self, topic: str) -> Draft:
        """The dead letter. Raises `BodyCorrupt`."""
        draft = self._copy(topic, 0)
        draft.properties = dead_letter_properties(
            draft.properties, self.origin_topic, self.origin_id, self.reason or self._why()
        )
        return draft

    def _copy(self, topic: str, queue_id: int) -> Draft:
        draft = copied(self.message, topic, queue_id)
        draft.reconsume_times += 1
        properties = remove_properties(draft.properties, _REWRITTEN)
        draft.properties = _with_what_fits(properties, self._notes(), MAX_PROPERTIES)
        return draft

    def _notes(self) -> Iterable[tuple[str, str]]:
        return (
            (RETRY_TOPIC, self.origin_topic),
            (ORIGIN_MESSAGE_ID, self.origin_id),
            (WAIT, "false"),
            (DELAY, "0" if self.is_final else str(self.next_level)),
        )

    def _why(self) -> str:
        if self.level < 0:
            return "the consumer gave it up"
        return f"attempt {self.message.reconsume_times + 1} failed, {self.allowed} retries allowed"


def given_up_properties(properties: str, reason: str, *, limit: int = MAX_PROPERTIES) -> str:
    """The properties of a dead letter that an orderly consumer sends itself.

    It has its origin and the reason already.
    """
    return dead_letter_properties(
        properties,
        property_value(properties, RETRY_TOPIC) or "",
        property_value(properties, ORIGIN_MESSAGE_ID) or "",
        property_value(properties, DLQ_REASON) or reason,
        limit=limit,
    )


def dead_letter_properties(
    properties: AnyStr,
    origin_topic: str,
    origin_id: str,
    reason: str,
    *,
    limit: int = MAX_PROPERTIES,
) -> AnyStr:
    """The properties of a message that becomes a dead letter, as far as they fit."""
    properties = remove_properties(properties, _DEAD)
    origin = ((DLQ_ORIGIN_TOPIC, origin_topic), (DLQ_ORIGIN_MESSAGE_ID, origin_id))
    properties = _with_what_fits(properties, origin, limit)
    return _with_reason(properties, reason, limit)


def _with_what_fits(properties: AnyStr, items: Iterable[tuple[str, str]], limit: int) -> AnyStr:
    for name, value in items:
        if value:
            grown = append_property(properties, name, value)
            if _size(grown) <= limit:
                properties = grown
    return properties


def _with_reason(properties: AnyStr, reason: str, limit: int) -> AnyStr:
    # One byte more: the last item may not have been ended yet.
    room = limit - _size(properties) - len(DLQ_REASON) - 3
    text = _one_line(reason).encode("utf-8", "replace")[: max(0, room)].decode("utf-8", "ignore")
    return append_property(properties, DLQ_REASON, text) if text else properties


def _size(properties: str | bytes) -> int:
    return len(properties if isinstance(properties, bytes) else properties.encode())


def _one_line(reason: str) -> str:
    """A reason in the form of a property's value."""
    text = "".join(each if each.isprintable() else " " for each in reason[: LONGEST_REASON * 2])
    return " ".join(text.split())[:LONGEST_REASON]
