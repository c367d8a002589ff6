"""Which pulls to make for a list of ranges, several at a time, and their answers in order.

A range is cut into slots of consecutive offsets. Each slot is pulled on its own: an answer may
cover less than the slot, then the rest is asked for. Several slots are out at once, so that the
broker always has something to do, and they leave the window in order. Every offset is in one slot
only, and a slot ends when answers have covered all of it; so every message leaves once and in its
place, however the answers come, and a pull that was lost is simply made again.

Without a filter a pull covers as many offsets as it brings messages, and brokers limit their
number (Apache's 32 unless configured otherwise) and their bytes. The first pull asks for as much as
there may be, alone, and its slot ends where its answer does: that is what the broker gives. Slots
then take the size of the answers: they shrink to what an answer covered, and now and then a larger
one is tried. With a filter a pull covers what the broker looked through, up to 800 offsets; slots
have that size, and what an answer brings beyond its slot is cut off, because the next slot brings
it as well.

What was asked for and has not left is bounded by its number and its expected bytes.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from orbitmq.client.checks import Fields
from orbitmq.client.queue import Queue
from orbitmq.client.ranges import QueueRange

Bytes: TypeAlias = bytes | bytearray | memoryview

KIB: Final = 1024
MIB: Final = 1024 * KIB

#: Offsets that a broker looks through for one filtered pull.
SCANNED: Final = 800
#: What every broker gives in one answer: no more than that needs no trying.
_USUAL_ANSWER: Final = 32
#: Taken for the size of a message before any was seen.
_USUAL_MESSAGE: Final = KIB
#: Whole answers between two attempts to get more into one; doubles while that fails.
_FIRST_PATIENCE: Final = 2
#: After one that has said what the limit is, which is seldom another later.
_LONG_PATIENCE: Final = 64
_LAST_PATIENCE: Final = 1024

_read_size = struct.Struct(">i").unpack_from
_read_offset = struct.Struct(">q").unpack_from
_OFFSET_AT: Final = 20
_LEAST_RECORD: Final = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLimits:
    """How much is asked for ahead of its use."""

    requests: int = 64  #: pulls on their way, or answered and not yet taken
    bytes: int = 8 * MIB  #: expected size of them all; one pull is made in any case
    messages: int = 2048  #: asked for in one pull; brokers mostly give less

    def __post_init__(self) -> None:
        Fields(self, "window").whole("requests", "bytes", "messages")


@dataclass(slots=True, eq=False)
class Slot:
    """A few offsets of a range, on their way."""

    queue: Queue
    start: int
    end: int
    #: Where the next pull begins: everything before it is here.
    at: int
    pieces: list[Bytes] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.at >= self.end


@dataclass(frozen=True, slots=True)
class Chunk:
    """The messages of some offsets of a queue: all of them, or those that passed the filter."""

    queue: Queue
    start: int
    end: int
    pieces: Sequence[Bytes]


class RangeWindow:
    """The slots between what was not asked for yet and what was taken. Does no I/O."""

    def __init__(
        self,
        ranges: Sequence[QueueRange],
        *,
        is_filtered: bool = False,
        limits: WindowLimits | None = None,
    ) -> None:
        self._limits = limits or WindowLimits()
        self._is_filtered = is_filtered
        self._sizing = Sizing(self._limits.messages)
        #: What no slot was cut from yet.
        self._left = deque(each for each in ranges if len(each))
        self._slots: deque[Slot] = deque()
        self._due: deque[Slot] = deque()
        self._is_filling = False
        self._first = self._first_slot()

    @property
    def is_finished(self) -> bool:
        """Whether everything was taken."""
        return not self._slots and not self._left

    @property
    def head(self) -> Slot | None:
        """The slot that is taken next."""
        return self._slots[0] if self._slots else None

    def due(self) -> Iterator[Slot]:
        """The slots that a pull is to be made for now; each must come back, or be lost."""
        while self._due:
            yield self._due.popleft()
        if self._first is not None or not (self._is_filling or self._is_half_empty()):
            return
        self._is_filling = True
        while self._left and self._has_room():
            slot = self._cut(SCANNED if self._is_filtered else self._sizing.size)
            self._slots.append(slot)
            yield slot
        self._is_filling = False

    def wanted(self, slot: Slot) -> int:
        """How many messages to ask for."""
        if self._is_filtered:
            return self._limits.messages
        return min(slot.end - slot.at, self._limits.messages)

    def answered(self, slot: Slot, data: Bytes, next_offset: int) -> bool:
        """A pull brought `data` and says that it has covered everything before `next_offset`.

        Whether any of the data is kept until it is taken.
        """
        asked = min(slot.end - slot.at, self._limits.messages)
        if next_offset > slot.end:
            data = before(data, slot.end)
            next_offset = slot.end
        if len(data):
            slot.pieces.append(data)
        if not self._is_filtered and next_offset > slot.at:
            self._sizing.learn(asked, next_offset - slot.at, len(data))
            if slot is self._first and next_offset < slot.end:
                self._end_early(slot, next_offset)
        self._reached(slot, next_offset)
        return len(data) > 0

    def lost(self, slot: Slot) -> None:
        """A pull was not answered, or not with messages: it is to be made again."""
        if slot not in self._due:
            self._due.append(slot)

    def skip(self, slot: Slot, offset: int) -> None:
        """There is nothing before `offset`; the rest of the slot may be there."""
        self._reached(slot, offset)

    def take(self) -> Chunk | None:
        """What comes next, if it is here."""
        if not self._slots or not self._slots[0].is_whole:
            return None
        slot = self._slots.popleft()
        return Chunk(slot.queue, slot.start, slot.end, slot.pieces)

    def abandon(self) -> list[Bytes]:
        """End it; what was kept and is never taken."""
        pieces = [piece for slot in self._slots for piece in slot.pieces]
        for each in (self._slots, self._due, self._left):
            each.clear()
        return pieces

    def _has_room(self) -> bool:
        count = len(self._slots)
        if count >= self._limits.requests:
            return False
        return not count or (count + 1) * self._sizing.slot_bytes <= self._limits.bytes

    def _is_half_empty(self) -> bool:
        """Whether it is time for more: pulls that are made together cost both sides less."""
        most = min(self._limits.requests, self._limits.bytes / self._sizing.slot_bytes)
        return not self._slots or 2 * len(self._slots) <= most

    def _first_slot(self) -> Slot | None:
        """A slot of all that one pull may bring, where that is more than every broker gives."""
        if self._is_filtered or not self._left or len(self._left[0]) <= _USUAL_ANSWER:
            return None
        slot = self._cut(self._limits.messages)
        self._slots.append(slot)
        self._due.append(slot)
        return slot

    def _cut(self, size: int) -> Slot:
        """A slot of at most so many offsets, from the beginning of what is left."""
        whole = self._left.popleft()
        end = min(whole.start + size, whole.end)
        if end < whole.end:
            self._left.appendleft(QueueRange(whole.queue, end, whole.end))
        return Slot(whole.queue, whole.start, end, whole.start)

    def _end_early(self, slot: Slot, end: int) -> None:
        """Give back what lies behind `end`, when nothing was cut after this slot."""
        rest = slot.end
        if self._left and (self._left[0].queue, self._left[0].start) == (slot.queue, rest):
            rest = self._left.popleft().end
        self._left.appendleft(QueueRange(slot.queue, end, rest))
        slot.end = end

    def _reached(self, slot: Slot, offset: int) -> None:
        slot.at = max(slot.at, offset)
        if not slot.is_whole:
            self._due.append(slot)
        elif slot is self._first:
            self._first = None


class Sizing:
    """How many messages fit into an answer, learned from answers."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.size = min(most, _USUAL_ANSWER)
        self._message_bytes: float | None = None
        self._patience = _FIRST_PATIENCE
        self._whole_answers = 0

    @property
    def slot_bytes(self) -> float:
        """What a slot is expected to weigh."""
        return max(1.0, self.size * (self._message_bytes or _USUAL_MESSAGE))

    def learn(self, asked: int, covered: int, size: int) -> None:
        """An answer to a pull for `asked` messages covered so many offsets with `size` bytes."""
        if self._message_bytes is None:
            self._message_bytes = size / covered
            self.size = max(self.size, asked)
            self._patience = _LONG_PATIENCE if covered < asked else _FIRST_PATIENCE
        self._message_bytes += (size / covered - self._message_bytes) / 8
        if covered < asked:
            if covered < self.size:
                self._patience = min(self._patience * 2, _LAST_PATIENCE)
                self.size = _safely(covered)
            self._whole_answers = 0
            return
        self._whole_answers += asked >= self.size
        if self._whole_answers >= self._patience:
            self._whole_answers = 0
            self.size = min(self.size * 2, self._most)


def _safely(covered: int) -> int:
    """How many messages the next answer brings when one brought so many.

    Where their bytes are limited, and not their number, it may be a few less; and each answer that
    does not cover its slot costs another pull.
    """
    return covered if covered <= _USUAL_ANSWER else covered - covered // 16


def before(data: Bytes, end: int) -> Bytes:
    """The records of an answer whose queue offset is below `end`; offsets ascend."""
    at, size = 0, len(data)
    while at < size:
        length = _read_size(data, at)[0] if size - at >= _LEAST_RECORD else 0
        if length < _LEAST_RECORD:
            # No record. Whoever decodes it says so, with the place.
            return data
        if _read_offset(data, at + _OFFSET_AT)[0] >= end:
            return data[:at]
        at += length
    return data
