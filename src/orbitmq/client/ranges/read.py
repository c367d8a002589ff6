"""Reads ranges of queues as the bytes that brokers keep, in order, in the calling thread.

What to ask for is decided by `rangewindow`; here are the sockets and what can go wrong with them.
A range is read from one end to the other or an error is raised: there is no third way. A broker
that does not answer, is busy or restarts is asked again until nothing has come from it for
`patience` seconds. Offsets that do not exist (expired, or lost with the disk of a broker) are an
`OffsetsGone` with what is wanted and what there is, or are skipped if the caller said so.

That something does not exist, only a master can say. Its replicas copy later than it answers, may
have begun later and delete when they like: one that lacks or refuses something is left for the
master, and as long as that one is away, so is what only it has.
"""

from __future__ import annotations

import enum
import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from orbitmq.client.errors import BrokerUnavailable, NoNameServer, refused_by
from orbitmq.client.ranges.links import (
    OffsetsGone,
    QueueRange,
    RangeFilter,
    RangeLinks,
)
from orbitmq.client.routes import Queue
from orbitmq.clock import Clock, SystemClock
from orbitmq.errors import BrokerRefused, ClientError, NoRoute, OrbitError
from orbitmq.parsing import Fields
from orbitmq.remoting.blocking import BlockingConnection
from orbitmq.remoting.settings import RemotingError
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command, Credentials, encode_command, encode_header, sign
from orbitmq.wire.headers import PullFlag, PullMessageRequest, PullMessageResponse

# Which pulls to make for a list of ranges, several at a time, and their answers in order.
#
# A range is cut into slots of consecutive offsets. Each slot is pulled on its own: an answer may
# cover less than the slot, then the rest is asked for. Several slots are out at once, so that the
# broker always has something to do, and they leave the window in order. Every offset is in one slot
# only, and a slot ends when answers have covered all of it; so every message leaves once and in its
# place, however the answers come, and a pull that was lost is simply made again.
#
# Without a filter a pull covers as many offsets as it brings messages, and brokers limit their
# number (Apache's 32 unless configured otherwise) and their bytes. The first pull asks for as much
# as there may be, alone, and its slot ends where its answer does: that is what the broker gives.
# Slots then take the size of the answers: they shrink to what an answer covered, and now and then a
# larger one is tried. With a filter a pull covers what the broker looked through, up to 800
# offsets; slots have that size, and what an answer brings beyond its slot is cut off, because the
# next slot brings it as well.
#
# What was asked for and has not left is bounded by its number and its expected bytes.


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


log = logging.getLogger(__name__)


class Missing(enum.Enum):
    """What becomes of wanted messages that are not there."""

    RAISE = "raise"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeSettings:
    """How ranges are read."""

    missing: Missing = Missing.RAISE
    window: WindowLimits = field(default_factory=WindowLimits)
    patience: float = 60.0  #: how long a broker may give nothing before it is given up
    #: How long a master may not have the end of a range before it counts as gone: one that has
    #: just been a replica, or has restarted, may still be catching up.
    lag_patience: float = 5.0
    first_pause: float = 0.05  #: before a broker is asked again; doubles each time
    longest_pause: float = 1.0
    #: Whether a reset of the group's progress is a `ProgressReset`; for those who go by that
    #: progress. A broker of OrbitMQ tells them until somebody else of the group has pulled, others
    #: do so once. Whoever does not want to know it reads on.
    tells_resets: bool = False

    def __post_init__(self) -> None:
        fields = Fields(self, "ranges")
        fields.durations("patience", "lag_patience", "first_pause", "longest_pause")
        fields.switches("tells_resets")


class ProgressReset(ClientError):
    """An administrator wants the group to go on elsewhere in a queue."""

    def __init__(self, queue: Queue, offset: int) -> None:
        self.queue = queue
        self.offset = offset
        super().__init__(f"the progress of the group in {queue} was reset to {offset}")


class NextStep(enum.Enum):
    """What an answer to a pull leads to."""

    GO_ON = "go on"  #: it covered something
    LOOK = "look"  #: nothing there: what is depends on the bounds that it tells
    ASK_AGAIN = "ask again"  #: the broker cannot now
    RECONNECT = "reconnect"  #: it sends us away


#: Every other answer is a refusal that asking again would not change.
AFTER_ANSWER: Final[Mapping[int, NextStep]] = {
    ResponseCode.SUCCESS: NextStep.GO_ON,
    ResponseCode.PULL_RETRY_IMMEDIATELY: NextStep.LOOK,
    ResponseCode.PULL_NOT_FOUND: NextStep.LOOK,
    ResponseCode.PULL_OFFSET_MOVED: NextStep.LOOK,
    ResponseCode.SYSTEM_ERROR: NextStep.ASK_AGAIN,
    ResponseCode.SYSTEM_BUSY: NextStep.ASK_AGAIN,
    ResponseCode.SERVICE_NOT_AVAILABLE: NextStep.ASK_AGAIN,
    ResponseCode.FLOW_CONTROL: NextStep.ASK_AGAIN,
    ResponseCode.POLLING_FULL: NextStep.ASK_AGAIN,
    ResponseCode.POLLING_TIMEOUT: NextStep.ASK_AGAIN,
    ResponseCode.GO_AWAY: NextStep.RECONNECT,
}
#: What a broker says to a group whose progress was reset.
_RESET: Final = "OFFSET_RESET"
#: What a broker says about messages that a filter keeps back.
_UNMATCHED: Final = "NO_MATCHED_MESSAGE"
#: What a broker says about messages whose log file it has deleted.
_REMOVED: Final = "MESSAGE_WAS_REMOVING"
#: What a broker says when its queue has a gap: no entry there, though it begins before and ends
#: after.
_NO_ENTRY: Final = "OFFSET_FOUND_NULL"
#: While a broker restarts, a topic that lives on it alone has no route either.
_NOBODY_THERE: Final = (RemotingError, NoNameServer, NoRoute, BrokerUnavailable)
#: Pauses have long reached their limit by then.
_MOST_DOUBLINGS: Final = 16


def read_ranges(
    links: RangeLinks,
    ranges: Sequence[QueueRange],
    *,
    group: str,
    wanted: RangeFilter | None = None,
    settings: RangeSettings | None = None,
    memory: ReceiveBuffer | None = None,
    clock: Clock | None = None,
    wait: Callable[[float], object] | None = None,
    notes: GapTracker | None = None,
) -> Iterator[Chunk]:
    """The messages of `ranges`, one range after the other, in chunks of a few each.

    `group` is the name under which the broker is asked; its progress is neither read nor changed.
    Messages of a tag filter still have to be compared by text: brokers compare hashes. Chunks are
    received into `memory`, to which the caller gives them back, or into memory of their own.
    What is found out beside messages is in `notes`, which a later reading may be given as well.
    Raises `OffsetsGone`, `BrokerUnavailable` or `BrokerRefused`, and `ProgressReset` if wanted.
    """
    reading = _Reading(
        links,
        ranges,
        group,
        wanted or RangeFilter(),
        settings or RangeSettings(),
        memory,
        clock or SystemClock(),
        wait or threading.Event().wait,
        notes,
    )
    try:
        while (chunk := reading.next_chunk()) is not None:
            yield chunk
    finally:
        reading.finish()


class _Reading:
    """One run through a list of ranges."""

    def __init__(
        self,
        links: RangeLinks,
        ranges: Sequence[QueueRange],
        group: str,
        wanted: RangeFilter,
        settings: RangeSettings,
        memory: ReceiveBuffer | None,
        clock: Clock,
        wait: Callable[[float], object],
        notes: GapTracker | None,
    ) -> None:
        self._links = links
        self._ranges = ranges
        self._filter = wanted
        self._pulls = Pulls(
            group, wanted, links.access.credentials, keeps_resets=settings.tells_resets
        )
        self._settings = settings
        self._memory = memory
        self._room = None if memory is None else self._lend
        #: Lent for what is being received, and given back unless the window keeps it.
        self._loose: list[memoryview] = []
        self._monotonic = clock.monotonic
        self._wait = wait
        self._window = RangeWindow(
            ranges, is_filtered=not wanted.passes_all, limits=settings.window
        )
        self._peers: dict[str, _Peer] = {}
        #: Slots beyond the end of their queue, and since when that is known.
        self._beyond: dict[Slot, float] = {}
        self._notes = GapTracker(clock) if notes is None else notes
        self._notes.resume({each.queue for each in ranges})
        #: Queues of which it was said that something is missing.
        self._incomplete: set[Queue] = set()

    def next_chunk(self) -> Chunk | None:
        """The next chunk; None at the end."""
        window = self._window
        while True:
            for slot in window.due():
                self._pull(slot)
            self._flush()
            if (chunk := window.take()) is not None:
                return chunk
            if window.head is None:
                return None
            # Everything that is due has been asked for, so an answer for the head is on its way;
            # unless the connection was lost just now, and then all of it is due again.
            self._receive(self._peer(window.head.queue))

    def finish(self) -> None:
        """Give memory and connections back; those with unread answers are closed."""
        if self._memory is not None:
            self._memory.give_back(self._window.abandon())
        for peer in self._peers.values():
            if peer.connection is not None:
                self._links.give_back(peer.connection)
        self._peers.clear()
        self._notes.pause()

    # Asking

    def _pull(self, slot: Slot) -> None:
        """Make a pull ready; it is sent with the others of its broker."""
        peer = self._peer(slot.queue)
        try:
            if peer.connection is None:
                lent = self._links.borrow(slot.queue, attempt=peer.attempt)
                peer.connection, peer.is_at_master = lent
        except _NOBODY_THERE as error:
            self._window.lost(slot)
            self._links.forget(slot.queue.topic)
            self._lose(peer, error)
            return
        opaque = peer.connection.next_opaque()
        peer.slots[opaque] = slot
        peer.unsent.append(
            self._pulls.encoded(slot.queue, slot.at, self._window.wanted(slot), opaque)
        )

    def _flush(self) -> None:
        for peer in self._peers.values():
            if not peer.unsent or peer.connection is None:
                continue
            count, encoded = len(peer.unsent), b"".join(peer.unsent)
            peer.unsent.clear()
            try:
                peer.connection.send(encoded, count)
            except RemotingError as error:
                self._lose(peer, error)

    def _peer(self, queue: Queue) -> _Peer:
        peer = self._peers.get(queue.broker)
        if peer is None:
            peer = self._peers[queue.broker] = _Peer(queue.broker, self._monotonic())
        return peer

    # What comes back

    def _receive(self, peer: _Peer) -> None:
        try:
            self._receive_one(peer)
        finally:
            if self._memory is not None and self._loose:
                self._memory.give_back(self._loose)
                self._loose.clear()

    def _lend(self, size: int) -> memoryview:
        assert self._memory is not None  # noqa: S101  # else nobody asks here
        piece = self._memory.room(size)
        self._loose.append(piece)
        return piece

    def _receive_one(self, peer: _Peer) -> None:
        connection = peer.connection
        if connection is None:
            return
        try:
            answer = connection.receive(self._room)
        except RemotingError as error:
            self._lose(peer, error)
            return
        slot = peer.slots.pop(answer.opaque, None)
        if slot is None:
            return
        match AFTER_ANSWER.get(answer.code):
            case NextStep.GO_ON:
                self._progress(peer)
                following = answer.header(PullMessageResponse).next_begin_offset
                self._notes.found(slot.queue, slot.at, following)
                if self._window.answered(slot, answer.body, following) and self._loose:
                    # The last one: before it there may have been what was no answer.
                    self._loose.pop()
            case NextStep.LOOK:
                self._look(peer, slot, answer)
            case NextStep.ASK_AGAIN:
                self._ask_again(peer, slot, _refusal(answer, connection))
            case NextStep.RECONNECT:
                self._window.lost(slot)
                self._lose(peer, _refusal(answer, connection))
            case None if not peer.is_at_master:
                # It may not have heard yet of a topic, a group or a permission.
                self._ask_again(peer, slot, _refusal(answer, connection))
            case None:
                raise _refusal(answer, connection)

    def _look(self, peer: _Peer, slot: Slot, answer: Command) -> None:
        """A pull brought no message: nothing matched, or nothing is there, or not yet."""
        header = answer.header(PullMessageResponse)
        low, high, following = header.min_offset, header.max_offset, header.next_begin_offset
        is_reset = answer.code == ResponseCode.PULL_OFFSET_MOVED and answer.remark == _RESET
        if is_reset and self._settings.tells_resets:
            raise ProgressReset(slot.queue, following)
        if slot.at < low:
            self._miss(peer, slot, low, low, high)
        elif slot.at >= high and peer.is_at_master and self._may_still_come(slot):
            self._ask_again(peer, slot, OffsetsGone(self._range_of(slot), low, high))
        elif slot.at >= high:
            self._miss(peer, slot, slot.end, low, high)
        elif following <= slot.at or answer.code == ResponseCode.PULL_OFFSET_MOVED:
            # A replica that lags, or an answer meant for the group: its progress was reset.
            self._ask_again(peer, slot, _refusal(answer, peer.connection))
        elif not peer.is_at_master and not self._is_unmatched(answer):
            # It may call any of its gaps by any code, and none of them is a gap of the master.
            self._ask_again(peer, slot, _refusal(answer, peer.connection))
        elif answer.remark == _NO_ENTRY:
            self._pass_gap(peer, slot, min(following, high), low, high)
        elif answer.remark == _REMOVED:
            # With a filter, too: it has let pass what is not there.
            self._miss(peer, slot, following, following, high)
        else:
            self._progress(peer)
            self._notes.found(slot.queue, slot.at, following)
            self._window.answered(slot, b"", following)

    def _is_unmatched(self, answer: Command) -> bool:
        """Whether messages are there and not wanted."""
        return answer.remark == _UNMATCHED and not self._filter.passes_all

    def _may_still_come(self, slot: Slot) -> bool:
        """Whether a slot has not been beyond the end of its queue for long."""
        since = self._beyond.setdefault(slot, self._monotonic())
        return self._monotonic() - since < self._settings.lag_patience

    def _pass_gap(self, peer: _Peer, slot: Slot, end: int, low: int, high: int) -> None:
        """Go on behind a gap, as far as it is known for long, from this slot or another."""
        enough = self._settings.lag_patience
        believed = self._notes.said(slot.queue, slot.at, end, enough=enough)
        if believed > slot.at:
            self._miss(peer, slot, believed, believed, high)
        else:
            self._ask_again(peer, slot, OffsetsGone(self._range_of(slot), low, high))

    def _miss(self, peer: _Peer, slot: Slot, resume_at: int, low: int, high: int) -> None:
        gone = OffsetsGone(self._range_of(slot), low, high)
        if not peer.is_at_master:
            self._ask_again(peer, slot, OrbitError(f"a replica lacks messages: {gone}"))
            return
        if self._settings.missing is Missing.RAISE:
            raise gone
        if slot.queue not in self._incomplete:
            self._incomplete.add(slot.queue)
            log.warning(
                "messages are missing and left out: %s",
                gone,
                extra={"queue": str(slot.queue), "offset": slot.at},
            )
        resume_at = min(resume_at, slot.end)
        self._notes.leave_out(slot.queue, slot.at, resume_at)
        self._window.skip(slot, resume_at)

    def _range_of(self, slot: Slot) -> QueueRange:
        return next(
            each
            for each in self._ranges
            if each.queue == slot.queue and each.start <= slot.start < each.end
        )

    # Trouble

    def _progress(self, peer: _Peer) -> None:
        peer.failures = 0
        peer.last_progress = self._monotonic()

    def _ask_again(self, peer: _Peer, slot: Slot, error: OrbitError) -> None:
        """Make a pull later once more; where a replica has answered it, at the master."""
        self._window.lost(slot)
        if peer.is_at_master:
            self._pause(peer, error)
        else:
            self._links.forget(slot.queue.topic)
            self._lose(peer, error)

    def _lose(self, peer: _Peer, error: OrbitError) -> None:
        """The connection is of no use any more: whatever was asked on it is asked again."""
        for slot in peer.slots.values():
            self._window.lost(slot)
            self._links.forget(slot.queue.topic)
        peer.slots.clear()
        peer.unsent.clear()
        if peer.connection is None or peer.is_at_master:
            # The master is the first to be asked: when nobody could be, it could not.
            self._notes.lose(peer.broker)
        if peer.connection is not None:
            peer.connection.close()
            peer.connection = None
        peer.attempt += 1
        unavailable = BrokerUnavailable(peer.broker, str(error))
        unavailable.__cause__ = error
        self._pause(peer, unavailable)

    def _pause(self, peer: _Peer, error: OrbitError) -> None:
        """Wait a little before the next attempt; raise the error when that was often enough."""
        settings = self._settings
        if self._monotonic() - peer.last_progress >= settings.patience:
            raise error
        pause = min(settings.first_pause * 2**peer.failures, settings.longest_pause)
        peer.failures = min(peer.failures + 1, _MOST_DOUBLINGS)
        self._wait(pause)


@dataclass(slots=True)
class _Peer:
    """A broker, and what was asked of it."""

    broker: str
    last_progress: float
    connection: BlockingConnection | None = None
    is_at_master: bool = True
    #: How often a connection was of no use: who is tried next depends on it.
    attempt: int = 0
    #: Since something came; pauses grow with them.
    failures: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    #: Encoded pulls that are sent together.
    unsent: list[bytes] = field(default_factory=list)


def _refusal(answer: Command, connection: BlockingConnection | None) -> BrokerRefused:
    address = "" if connection is None else str(connection.address)
    return refused_by(answer, address, RequestCode.PULL_MESSAGE)


# What a master said that is not there, and for how long: notes that outlive a reading.


class Gap(NamedTuple):
    """Offsets of a queue at which its master has said for so long that it has no entries."""

    start: int
    end: int
    seconds: float


@dataclass(slots=True)
class _Saying:
    """For how many seconds a gap was said to be there, and when it was last, if that goes on."""

    seconds: float = 0.0
    last: float | None = None


class GapTracker:
    """What readings find out beside messages.

    A gap has to be said for a while before it is believed. Whoever reads for a short time, and then
    again, keeps the notes of one reading for the next, or a gap would stop each of them anew. Only
    the time between two words of a master on one connection counts: when nobody asks it, it says
    nothing, and one that was out of reach may have restarted, and have to be waited for again. What
    earlier readings have found counts as a word when the next one of the queue begins: whoever
    passes it on knows that the master has been there since. So one word in each reading is enough.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._monotonic = (clock or SystemClock()).monotonic
        #: What is said about gaps, by their start and end.
        self._gaps: dict[Queue, dict[tuple[int, int], _Saying]] = {}
        self._left_out: dict[Queue, list[tuple[int, int]]] = {}

    def know(self, queue: Queue, gap: Gap) -> None:
        """Take what an earlier reading has found; its master must have been in reach since."""
        self._gaps.setdefault(queue, {}).setdefault((gap.start, gap.end), _Saying(gap.seconds))

    def resume(self, queues: Iterable[Queue]) -> None:
        """A reading of these queues begins; others may have been read since they were."""
        now = self._monotonic()
        for queue in queues:
            for saying in self._gaps.get(queue, {}).values():
                saying.last = now

    def said(self, queue: Queue, at: int, end: int, *, enough: float) -> int:
        """A master says now that it has nothing from `at` to `end`; up to where it is believed.

        That is as far as it has said so for `enough` seconds: a gap may have grown since.
        """
        now = self._monotonic()
        gaps = self._gaps.setdefault(queue, {})
        known = {bounds: saying for bounds, saying in gaps.items() if bounds[0] <= at < bounds[1]}
        if not known:
            known[at, end] = gaps[at, end] = _Saying()
        for saying in known.values():
            if saying.last is not None:
                saying.seconds += now - saying.last
            saying.last = now
        believed = [stop for (_, stop), saying in known.items() if saying.seconds >= enough]
        return min(end, max(believed, default=at))

    def pause(self) -> None:
        """A reading ends: nothing is said before the next one."""
        for gaps in self._gaps.values():
            for saying in gaps.values():
                saying.last = None

    def lose(self, broker: str) -> None:
        """A master was out of reach. What it said before it may not say any more."""
        for queue in [each for each in self._gaps if each.broker == broker]:
            del self._gaps[queue]

    def found(self, queue: Queue, start: int, end: int) -> None:
        """There are messages between two offsets: what was said of them does not hold."""
        gaps = self._gaps.get(queue)
        if not gaps:
            return
        for gap in [each for each in gaps if start < each[1] and each[0] < end]:
            del gaps[gap]

    def gaps(self, within: QueueRange) -> list[Gap]:
        """The gaps that reach into a range."""
        return [
            Gap(start, end, saying.seconds)
            for (start, end), saying in sorted(self._gaps.get(within.queue, {}).items())
            if start < within.end and within.start < end
        ]

    def leave_out(self, queue: Queue, start: int, end: int) -> None:
        """There is nothing between two offsets, and nobody waits for it any more."""
        stretches = self._left_out.setdefault(queue, [])
        if stretches and stretches[-1][1] == start:
            start = stretches.pop()[0]
        stretches.append((start, end))

    def left_out(self, within: QueueRange) -> int:
        """How many offsets of a range were left out."""
        count, upto = 0, within.start
        for start, end in sorted(self._left_out.get(within.queue, ())):
            count += max(0, min(end, within.end) - max(start, upto))
            upto = max(upto, end)
        return count


# Memory that answers are received into, one behind the other, and again when they are done with.
#
# New memory costs more than what is done with it: the kernel has to clear every page and to map it,
# which takes longer than to copy a message there. And answers that lie side by side can be decoded
# together as they are. A piece is used until it is given back, in whatever order that happens; only
# when all of them were is the memory used from its beginning again. Who does not give a piece back
# loses nothing but the advantage.


class ReceiveBuffer:
    """Lends pieces of one block of memory. For one thread."""

    def __init__(self, size: int) -> None:
        self._block = bytearray(size)
        self._view = memoryview(self._block)
        self._at = 0
        self._lent = 0

    @property
    def size(self) -> int:
        return len(self._block)

    @property
    def is_unused(self) -> bool:
        """Whether all pieces were given back."""
        return not self._lent

    def room(self, size: int) -> memoryview:
        """A piece of this size; of its own where there is no room in the block."""
        end = self._at + size
        if end > len(self._block):
            return memoryview(bytearray(size))
        piece = self._view[self._at : end]
        self._at = end
        self._lent += 1
        return piece

    def give_back(self, pieces: Iterable[Bytes]) -> None:
        """Say that nobody looks at these pieces any more; each may be given back once."""
        for piece in pieces:
            # Some are of other origin.
            if isinstance(piece, memoryview) and piece.obj is self._block:
                self._lent -= 1
        if not self._lent:
            self._at = 0


# Pull requests, of which only the place and the number of messages differ.
#
# A reader makes one for every few messages. Encoding each by itself would cost as much as decoding
# the messages that it brings; so one is encoded, with marks in the place of what differs, and the
# rest is filled in. The bytes are those of the ordinary encoder. Signed requests differ as a whole
# and are encoded one by one.


_BROUGHT_SUBSCRIPTION: Final = int(PullFlag.SUBSCRIPTION)
_PULL: Final = int(RequestCode.PULL_MESSAGE)
#: What one answer may have. OrbitMQ's brokers then give more messages at a time than they usually
#: do; Apache's have limits of their own, whatever is asked (`maxTransferBytesOnMessageInMemory`).
ANSWER_BYTES: Final = 1024 * 1024
_pack_prefix = struct.Struct(">iI").pack

#: Stand for what differs until it is filled in. No name or expression is likely to have them; one
#: that does is found when the template is made.
_OFFSET_MARK: Final = 7_304_196_113_405_128
_COUNT_MARK: Final = 1_870_352_149
_OPAQUE_MARK: Final = 1_970_352_151


class Pulls:
    """Makes the pulls of one group with one filter."""

    def __init__(
        self,
        group: str,
        wanted: RangeFilter,
        credentials: Credentials | None,
        *,
        keeps_resets: bool = False,
    ) -> None:
        self._group = group
        self._wanted = wanted
        self._credentials = credentials
        self._keep_reset = keeps_resets or None
        self._templates: dict[Queue, bytes | None] = {}

    def encoded(self, queue: Queue, offset: int, count: int, opaque: int) -> bytes:
        """A pull of at most `count` messages from `offset` on."""
        if queue not in self._templates:
            self._templates[queue] = self._template(queue)
        template = self._templates[queue]
        if template is None:
            request = self._request(queue, offset, count, opaque)
            if self._credentials is not None:
                request = sign(request, self._credentials)
            return encode_command(request)
        # In the order in which they stand in the header.
        header = template % (offset, count, opaque)
        size = len(header)
        return _pack_prefix(4 + size, size) + header

    def _template(self, queue: Queue) -> bytes | None:
        if self._credentials is not None:
            return None
        request = self._request(queue, _OFFSET_MARK, _COUNT_MARK, _OPAQUE_MARK)
        text = encode_header(request).replace(b"%", b"%%")
        marks = [b"%d" % mark for mark in (_OFFSET_MARK, _COUNT_MARK, _OPAQUE_MARK)]
        places = [text.find(mark) for mark in marks]
        if places != sorted(places) or any(text.count(mark) != 1 for mark in marks):
            return None
        for mark in marks:
            text = text.replace(mark, b"%d")
        return text

    def _request(self, queue: Queue, offset: int, count: int, opaque: int) -> Command:
        header = PullMessageRequest(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=queue.id,
            queue_offset=offset,
            max_msg_nums=count,
            sys_flag=_BROUGHT_SUBSCRIPTION,
            commit_offset=0,
            suspend_timeout_millis=0,
            sub_version=0,
            subscription=self._wanted.expression,
            expression_type=self._wanted.kind,
            max_msg_bytes=ANSWER_BYTES,
            keep_reset=self._keep_reset,
        )
        return Command.request(_PULL, header, opaque=opaque)
