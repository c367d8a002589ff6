"""Reads ranges of queues as the bytes that brokers store, in order, in the calling thread.

Invariant: a range is read completely or an error is raised. A broker that does not answer is asked
again until it was silent for `patience` seconds. Missing offsets (expired, or lost with a disk)
raise `OffsetsGone` or are skipped, as the caller chooses.

Trap: only a master can tell that an offset does not exist. Replicas lag, may have started later
and delete independently, so what a replica lacks is asked of the master.
"""

from __future__ import annotations

import enum
import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from orbitmq.client.errors import BrokerUnavailable, NoNameServer, refused_by
from orbitmq.client.ranges.connections import (
    OffsetsGone,
    QueueRange,
    RangeConnections,
    RangeFilter,
)
from orbitmq.client.routes import Queue
from orbitmq.clock import Clock, SystemClock
from orbitmq.errors import BrokerRefused, ClientError, NoRoute, OrbitError
from orbitmq.parsing import Fields
from orbitmq.remoting.blocking import BlockingConnection
from orbitmq.remoting.settings import RemotingError
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command, Credentials, RequestTemplate, encode_command, sign
from orbitmq.wire.headers import PullFlag, PullMessageRequest, PullMessageResponse

Bytes: TypeAlias = bytes | bytearray | memoryview

KIB: Final = 1024
MIB: Final = 1024 * KIB

#: Offsets that a broker scans for one filtered pull.
SCANNED: Final = 800
#: Messages that every broker gives in one answer.
_USUAL_ANSWER: Final = 32
#: The assumed size of a message before any was received.
_USUAL_MESSAGE: Final = KIB
#: Complete answers before a larger pull is tried; doubles while that fails.
_FIRST_PATIENCE: Final = 2
#: After an answer that showed the broker's limit, which seldom changes.
_LONG_PATIENCE: Final = 64
_LAST_PATIENCE: Final = 1024

_read_size = struct.Struct(">i").unpack_from
_read_offset = struct.Struct(">q").unpack_from
_OFFSET_AT: Final = 20
_LEAST_RECORD: Final = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLimits:
    """How much is requested ahead."""

    requests: int = 64  #: pulls in flight, or answered and not yet taken
    bytes: int = 8 * MIB  #: their expected size; one pull is always allowed
    messages: int = 2048  #: requested in one pull; brokers mostly give less

    def __post_init__(self) -> None:
        Fields(self, "window").whole("requests", "bytes", "messages")


@dataclass(slots=True, eq=False)
class Slot:
    """Consecutive offsets of a range that are being pulled."""

    queue: Queue
    start: int
    end: int
    #: The start of the next pull: everything before it was received.
    at: int
    pieces: list[Bytes] = field(default_factory=list)
    missing: int = 0  #: offsets that were skipped

    @property
    def is_whole(self) -> bool:
        return self.at >= self.end


@dataclass(frozen=True, slots=True)
class Chunk:
    """The messages of consecutive offsets, or those that passed the filter."""

    queue: Queue
    start: int
    end: int
    pieces: Sequence[Bytes]
    missing: int = 0  #: offsets without a message that were skipped


class RangeWindow:
    """Which pulls to make for a list of ranges, and their answers in order. Does no I/O.

    A range is cut into slots that are pulled in parallel and taken in order. Each offset is in one
    slot, which ends when answers have covered it, so every message is taken once and a lost pull is
    repeated. The first pull asks for the maximum, and its slot ends where the answer does; later
    slots follow the size of the answers. A filtered pull covers what the broker scans, up to 800
    offsets; what an answer has beyond its slot is cut off, because the next slot has it too.
    """

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
        #: Not yet cut into slots.
        self._left = deque(each for each in ranges if len(each))
        self._slots: deque[Slot] = deque()
        self._due: deque[Slot] = deque()
        self._is_filling = False
        self._first = self._first_slot()

    @property
    def is_finished(self) -> bool:
        """Whether all chunks were taken."""
        return not self._slots and not self._left

    @property
    def head(self) -> Slot | None:
        """The slot that is taken next."""
        return self._slots[0] if self._slots else None

    def due(self) -> Iterator[Slot]:
        """The slots to pull now. Each must be passed to `answered`, `skip` or `lost`."""
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
        """The number of messages to request."""
        if self._is_filtered:
            return self._limits.messages
        return min(slot.end - slot.at, self._limits.messages)

    def answered(self, slot: Slot, data: Bytes, next_offset: int) -> bool:
        """Take the answer of a pull that covers everything below `next_offset`.

        Returns whether any of the data is kept.
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
        """Repeat a pull that brought nothing."""
        if slot not in self._due:
            self._due.append(slot)

    def skip(self, slot: Slot, offset: int) -> None:
        """Skip the missing offsets of a slot below `offset`."""
        slot.missing += offset - slot.at
        self._reached(slot, offset)

    def take(self) -> Chunk | None:
        """The next chunk, if it is complete."""
        if not self._slots or not self._slots[0].is_whole:
            return None
        slot = self._slots.popleft()
        return Chunk(slot.queue, slot.start, slot.end, slot.pieces, slot.missing)

    def abandon(self) -> list[Bytes]:
        """End the reading; returns the data that was not taken."""
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
        """Whether to request more: pulls in groups cost both sides less."""
        most = min(self._limits.requests, self._limits.bytes / self._sizing.slot_bytes)
        return not self._slots or 2 * len(self._slots) <= most

    def _first_slot(self) -> Slot | None:
        """A slot of the maximum of one pull, to learn the broker's limit."""
        if self._is_filtered or not self._left or len(self._left[0]) <= _USUAL_ANSWER:
            return None
        slot = self._cut(self._limits.messages)
        self._slots.append(slot)
        self._due.append(slot)
        return slot

    def _cut(self, size: int) -> Slot:
        """A slot of at most `size` offsets."""
        whole = self._left.popleft()
        end = min(whole.start + size, whole.end)
        if end < whole.end:
            self._left.appendleft(QueueRange(whole.queue, end, whole.end))
        return Slot(whole.queue, whole.start, end, whole.start)

    def _end_early(self, slot: Slot, end: int) -> None:
        """Return what lies behind `end` to the rest."""
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
    """How many messages fit into an answer, learned from the answers."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.size = min(most, _USUAL_ANSWER)
        self._message_bytes: float | None = None
        self._patience = _FIRST_PATIENCE
        self._whole_answers = 0

    @property
    def slot_bytes(self) -> float:
        """The expected size of a slot."""
        return max(1.0, self.size * (self._message_bytes or _USUAL_MESSAGE))

    def learn(self, asked: int, covered: int, size: int) -> None:
        """Learn from a pull for `asked` messages that covered offsets with `size` bytes."""
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
    """A slot size that the next answer is likely to cover.

    Where a broker limits bytes, the number of messages varies, and each answer that does not cover
    its slot costs another pull.
    """
    return covered if covered <= _USUAL_ANSWER else covered - covered // 16


def before(data: Bytes, end: int) -> Bytes:
    """The records of an answer whose queue offset is below `end`; offsets ascend."""
    at, size = 0, len(data)
    while at < size:
        length = _read_size(data, at)[0] if size - at >= _LEAST_RECORD else 0
        if length < _LEAST_RECORD:
            # Not a record: decoding reports it, with the position.
            return data
        if _read_offset(data, at + _OFFSET_AT)[0] >= end:
            return data[:at]
        at += length
    return data


log = logging.getLogger(__name__)


class Missing(enum.Enum):
    """What to do about messages that do not exist."""

    RAISE = "raise"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeSettings:
    """How ranges are read."""

    missing: Missing = Missing.RAISE
    window: WindowLimits = field(default_factory=WindowLimits)
    patience: float = 60.0  #: seconds without an answer before a broker is given up
    #: Seconds that a master may lack the end of a range before it counts as gone: after a restart
    #: or a promotion it may still be recovering.
    lag_patience: float = 5.0
    #: Whether a reset of the group's offset raises `ProgressReset`. A broker of OrbitMQ reports a
    #: reset until another member of the group has pulled, others report it once.
    tells_resets: bool = False

    def __post_init__(self) -> None:
        fields = Fields(self, "ranges")
        fields.durations("patience", "lag_patience")
        fields.switches("tells_resets")


class ProgressReset(ClientError):
    """An administrator has reset the offset of the group in a queue."""

    def __init__(self, queue: Queue, offset: int) -> None:
        self.queue = queue
        self.offset = offset
        super().__init__(f"the offset of the group in {queue} was reset to {offset}")


class NextStep(enum.Enum):
    """What an answer to a pull leads to."""

    GO_ON = "go on"  #: it covered offsets
    LOOK = "look"  #: no message: the bounds in the answer decide
    ASK_AGAIN = "ask again"  #: the broker cannot answer now
    RECONNECT = "reconnect"  #: the broker closes the connection


#: Any other answer is a final refusal.
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
#: A broker's remark for a group whose offset was reset.
_RESET: Final = "OFFSET_RESET"
#: For messages that do not match the filter.
_UNMATCHED: Final = "NO_MATCHED_MESSAGE"
#: For messages whose log file was deleted.
_REMOVED: Final = "MESSAGE_WAS_REMOVING"
#: For a gap: no entry at the offset, which lies between the bounds of the queue.
_NO_ENTRY: Final = "OFFSET_FOUND_NULL"
#: While a broker restarts, a topic that only it has lacks a route, too.
_NOBODY_THERE: Final = (RemotingError, NoNameServer, NoRoute, BrokerUnavailable)
#: Seconds before a broker is asked again; doubles each time.
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0
#: Keeps the powers of two small; every pause has reached its limit before.
_MOST_DOUBLINGS: Final = 16


def read_ranges(
    connections: RangeConnections,
    ranges: Sequence[QueueRange],
    *,
    group: str,
    wanted: RangeFilter | None = None,
    settings: RangeSettings | None = None,
    memory: ReceiveBuffer | None = None,
    clock: Clock | None = None,
    wait: Callable[[float], object] | None = None,
) -> Iterator[Chunk]:
    """The messages of `ranges`, one range after the other, in chunks.

    Pulls are made as `group`, whose offset is neither read nor changed. Tags must still be compared
    by text, because brokers compare hashes. Chunks are received into `memory`, if given, and the
    caller releases them there. Raises `OffsetsGone`, `BrokerUnavailable` or `BrokerRefused`, and
    `ProgressReset` if requested.
    """
    reading = _Reading(
        connections,
        ranges,
        group,
        wanted or RangeFilter(),
        settings or RangeSettings(),
        memory,
        clock or SystemClock(),
        wait or threading.Event().wait,
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
        connections: RangeConnections,
        ranges: Sequence[QueueRange],
        group: str,
        wanted: RangeFilter,
        settings: RangeSettings,
        memory: ReceiveBuffer | None,
        clock: Clock,
        wait: Callable[[float], object],
    ) -> None:
        self._connections = connections
        self._ranges = ranges
        self._filter = wanted
        self._pulls = Pulls(
            group, wanted, connections.access.credentials, keeps_resets=settings.tells_resets
        )
        self._settings = settings
        self._memory = memory
        self._room = None if memory is None else self._allocate
        #: Allocated for the answer being received, released unless the window keeps it.
        self._loose: list[memoryview] = []
        self._monotonic = clock.monotonic
        self._wait = wait
        self._window = RangeWindow(
            ranges, is_filtered=not wanted.passes_all, limits=settings.window
        )
        self._peers: dict[str, _Peer] = {}
        #: Slots beyond the end of their queue, and since when.
        self._beyond: dict[Slot, float] = {}
        #: Gaps that masters report: start and end, and since when.
        self._gaps: dict[Queue, dict[tuple[int, int], float]] = {}
        #: Queues whose missing messages were logged.
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
            # All due slots were requested, so an answer for the head is on its way, unless the
            # connection was just lost; then the slots are due again.
            self._receive(self._peer(window.head.queue))

    def finish(self) -> None:
        """Release memory and connections."""
        if self._memory is not None:
            self._memory.release(self._window.abandon())
        for peer in self._peers.values():
            if peer.connection is not None:
                self._connections.release(peer.connection)
        self._peers.clear()

    # Asking

    def _pull(self, slot: Slot) -> None:
        """Prepare a pull; it is sent together with others to its broker."""
        peer = self._peer(slot.queue)
        try:
            if peer.connection is None:
                leased = self._connections.lease(slot.queue, attempt=peer.attempt)
                peer.connection, peer.is_at_master = leased
        except _NOBODY_THERE as error:
            self._window.lost(slot)
            self._connections.forget(slot.queue.topic)
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

    # Receiving

    def _receive(self, peer: _Peer) -> None:
        try:
            self._receive_one(peer)
        finally:
            if self._memory is not None and self._loose:
                self._memory.release(self._loose)
                self._loose.clear()

    def _allocate(self, size: int) -> memoryview:
        assert self._memory is not None  # noqa: S101  # only called then
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
                self._close_gaps(slot, following)
                if self._window.answered(slot, answer.body, following) and self._loose:
                    # The last one; earlier ones belong to frames that were no answers.
                    self._loose.pop()
            case NextStep.LOOK:
                self._look(peer, slot, answer)
            case NextStep.ASK_AGAIN:
                self._ask_again(peer, slot, _refusal(answer, connection))
            case NextStep.RECONNECT:
                self._window.lost(slot)
                self._lose(peer, _refusal(answer, connection))
            case None if not peer.is_at_master:
                # A replica may not know a topic, a group or a permission yet.
                self._ask_again(peer, slot, _refusal(answer, connection))
            case None:
                raise _refusal(answer, connection)

    def _look(self, peer: _Peer, slot: Slot, answer: Command) -> None:
        """Decide what a pull without a message means, by the bounds in its answer."""
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
            # A replica that lags, or a reset of the group's offset.
            self._ask_again(peer, slot, _refusal(answer, peer.connection))
        elif not peer.is_at_master and not self._is_unmatched(answer):
            # A replica may answer with any code for its gaps, which the master need not have.
            self._ask_again(peer, slot, _refusal(answer, peer.connection))
        elif answer.remark == _NO_ENTRY:
            self._pass_gap(peer, slot, min(following, high), low, high)
        elif answer.remark == _REMOVED:
            # With a filter, too.
            self._miss(peer, slot, following, following, high)
        else:
            self._progress(peer)
            self._close_gaps(slot, following)
            self._window.answered(slot, b"", following)

    def _is_unmatched(self, answer: Command) -> bool:
        """Whether messages exist and do not match the filter."""
        return answer.remark == _UNMATCHED and not self._filter.passes_all

    def _may_still_come(self, slot: Slot) -> bool:
        """Whether the end of the queue may still reach a slot."""
        since = self._beyond.setdefault(slot, self._monotonic())
        return self._monotonic() - since < self._settings.lag_patience

    def _pass_gap(self, peer: _Peer, slot: Slot, end: int, low: int, high: int) -> None:
        """Skip a gap as far as it was reported for long enough."""
        now, gaps = self._monotonic(), self._gaps.setdefault(slot.queue, {})
        known = {each: since for each, since in gaps.items() if each[0] <= slot.at < each[1]}
        if not known:
            known[slot.at, end] = gaps[slot.at, end] = now
        # A gap may have grown since it was reported.
        enough = self._settings.lag_patience
        old = [stop for (_, stop), since in known.items() if now - since >= enough]
        believed = min(end, max(old, default=slot.at))
        if believed > slot.at:
            self._miss(peer, slot, believed, believed, high)
        else:
            self._ask_again(peer, slot, OffsetsGone(self._range_of(slot), low, high))

    def _close_gaps(self, slot: Slot, end: int) -> None:
        """There are messages from the slot's position on: forget gaps there."""
        if gaps := self._gaps.get(slot.queue):
            for gap in [each for each in gaps if slot.at < each[1] and each[0] < end]:
                del gaps[gap]

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
        self._window.skip(slot, resume_at)

    def _range_of(self, slot: Slot) -> QueueRange:
        return next(
            each
            for each in self._ranges
            if each.queue == slot.queue and each.start <= slot.start < each.end
        )

    # Errors

    def _progress(self, peer: _Peer) -> None:
        peer.failures = 0
        peer.last_progress = self._monotonic()

    def _ask_again(self, peer: _Peer, slot: Slot, error: OrbitError) -> None:
        """Repeat a pull later; after an answer of a replica, at the master."""
        self._window.lost(slot)
        if peer.is_at_master:
            self._pause(peer, error)
        else:
            self._connections.forget(slot.queue.topic)
            self._lose(peer, error)

    def _lose(self, peer: _Peer, error: OrbitError) -> None:
        """Close a connection and repeat its pulls on another."""
        for slot in peer.slots.values():
            self._window.lost(slot)
            self._connections.forget(slot.queue.topic)
        peer.slots.clear()
        peer.unsent.clear()
        if peer.connection is None or peer.is_at_master:
            # The first attempt is at the master, which may have restarted and be recovering.
            for queue in [each for each in self._gaps if each.broker == peer.broker]:
                del self._gaps[queue]
        if peer.connection is not None:
            peer.connection.close()
            peer.connection = None
        peer.attempt += 1
        unavailable = BrokerUnavailable(peer.broker, str(error))
        unavailable.__cause__ = error
        self._pause(peer, unavailable)

    def _pause(self, peer: _Peer, error: OrbitError) -> None:
        """Wait before the next attempt; raises the error when `patience` is over."""
        if self._monotonic() - peer.last_progress >= self._settings.patience:
            raise error
        pause = min(_FIRST_PAUSE * 2**peer.failures, _LONGEST_PAUSE)
        peer.failures = min(peer.failures + 1, _MOST_DOUBLINGS)
        self._wait(pause)


@dataclass(slots=True)
class _Peer:
    """A broker, its connection and its pulls."""

    broker: str
    last_progress: float
    connection: BlockingConnection | None = None
    is_at_master: bool = True
    #: The number of lost connections, which decides the server that is tried next.
    attempt: int = 0
    #: Since the last progress; pauses grow with them.
    failures: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    #: Encoded pulls that are sent together.
    unsent: list[bytes] = field(default_factory=list)


def _refusal(answer: Command, connection: BlockingConnection | None) -> BrokerRefused:
    address = "" if connection is None else str(connection.address)
    return refused_by(answer, address, RequestCode.PULL_MESSAGE)


class ReceiveBuffer:
    """One block of memory that answers are received into, one behind the other. For one thread.

    New memory is expensive: the kernel clears and maps every page. Answers side by side can be
    decoded together. The block is reused from its start when all pieces were released, in any
    order; a piece that is never released costs only that advantage.
    """

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
        """Whether all pieces were released."""
        return not self._lent

    def room(self, size: int) -> memoryview:
        """A piece of this size; separate memory when the block is full."""
        end = self._at + size
        if end > len(self._block):
            return memoryview(bytearray(size))
        piece = self._view[self._at : end]
        self._at = end
        self._lent += 1
        return piece

    def release(self, pieces: Iterable[Bytes]) -> None:
        """Release pieces, each once; the caller must not use them any more."""
        for piece in pieces:
            # Some are separate memory.
            if isinstance(piece, memoryview) and piece.obj is self._block:
                self._lent -= 1
        if not self._lent:
            self._at = 0


_BROUGHT_SUBSCRIPTION: Final = int(PullFlag.SUBSCRIPTION)
_PULL: Final = int(RequestCode.PULL_MESSAGE)
#: The requested size of one answer. OrbitMQ's brokers follow it; Apache's have limits of their own
#: (`maxTransferBytesOnMessageInMemory`).
ANSWER_BYTES: Final = 1024 * 1024


class Pulls:
    """Encodes the pulls of one group with one filter, from a template for each queue.

    Encoding each pull in full would cost as much as decoding its messages. Signed pulls are.
    """

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
        self._templates: dict[Queue, RequestTemplate[PullMessageRequest]] = {}

    def encoded(self, queue: Queue, offset: int, count: int, opaque: int) -> bytes:
        """A pull of at most `count` messages from `offset` on."""
        if self._credentials is not None:
            header = PullMessageRequest(
                queue_offset=offset,
                max_msg_nums=count,
                **self._constant(queue),  # type: ignore[arg-type]  # named as declared
            )
            request = Command.request(_PULL, header, opaque=opaque)
            return encode_command(sign(request, self._credentials))
        template = self._templates.get(queue)
        if template is None:
            template = self._templates[queue] = RequestTemplate(
                _PULL,
                PullMessageRequest,
                ("queue_offset", "max_msg_nums"),
                constant=self._constant(queue),
            )
        (encoded,) = template.filled((offset, count, opaque), b"")
        return bytes(encoded)

    def _constant(self, queue: Queue) -> dict[str, object]:
        return {
            "consumer_group": self._group,
            "topic": queue.topic,
            "queue_id": queue.id,
            "sys_flag": _BROUGHT_SUBSCRIPTION,
            "commit_offset": 0,
            "suspend_timeout_millis": 0,
            "sub_version": 0,
            "subscription": self._wanted.expression,
            "expression_type": self._wanted.kind,
            "max_msg_bytes": ANSWER_BYTES,
            "keep_reset": self._keep_reset,
        }
