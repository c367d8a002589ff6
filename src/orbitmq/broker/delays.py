"""Delay levels: messages that are delivered a fixed time after they were stored.

A message of level n lies in queue n-1 of the schedule topic. All messages of a queue wait for the
same time, so one number per level is the progress: the first that was not delivered. A level puts a
batch into the real topics and goes on when the store has all of it, so no message is skipped, and
after a crash those delivered since the last save are delivered again. The longest overdue level
comes first, in bounded steps. Apache polls every level ten times a second; here a level knows when
its first message is due.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from orbitmq import names
from orbitmq.broker.config import ConfigFile, SavedTable
from orbitmq.broker.errors import Refused
from orbitmq.broker.parked import (
    DeliveryRetries,
    Reading,
    Release,
    park,
    released,
)
from orbitmq.broker.scheduler import no_wake
from orbitmq.broker.topics import first_version, next_version
from orbitmq.broker.writes import Stage
from orbitmq.clock import milliseconds, milliseconds_up
from orbitmq.message.properties import (
    DELAY,
    property_value,
    replace_property,
)
from orbitmq.message.record import (
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
        #: Wakes the alarm: there may be work before the time that the step returned.
        self.wake: Callable[[], None] = no_wake
        self._levels = [
            _Level(number, milliseconds_up(delay))
            for number, delay in enumerate(parts.settings.store.delay_levels, start=1)
        ]
        self._version = first_version(parts.clock.now())
        #: Increases with every change of the content of the file.
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
