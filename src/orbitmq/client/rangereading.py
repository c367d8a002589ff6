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
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from orbitmq.client.checks import Fields
from orbitmq.client.errors import (
    BrokerRefused,
    BrokerUnavailable,
    ClientError,
    NoNameServer,
    NoRoute,
)
from orbitmq.client.queue import Queue
from orbitmq.client.rangeconnection import RangeConnection
from orbitmq.client.rangelinks import RangeLinks
from orbitmq.client.rangememory import AnswerMemory
from orbitmq.client.rangenotes import RangeNotes
from orbitmq.client.rangepulls import Pulls
from orbitmq.client.ranges import OffsetsGone, QueueRange, RangeFilter
from orbitmq.client.rangewindow import Chunk, RangeWindow, Slot, WindowLimits
from orbitmq.clock import Clock, SystemClock
from orbitmq.errors import OrbitError
from orbitmq.remoting.errors import RemotingError
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.pull import PullMessageResponse

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
    memory: AnswerMemory | None = None,
    clock: Clock | None = None,
    wait: Callable[[float], object] | None = None,
    notes: RangeNotes | None = None,
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
        memory: AnswerMemory | None,
        clock: Clock,
        wait: Callable[[float], object],
        notes: RangeNotes | None,
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
        self._notes = RangeNotes(clock) if notes is None else notes
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
    connection: RangeConnection | None = None
    is_at_master: bool = True
    #: How often a connection was of no use: who is tried next depends on it.
    attempt: int = 0
    #: Since something came; pauses grow with them.
    failures: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    #: Encoded pulls that are sent together.
    unsent: list[bytes] = field(default_factory=list)


def _refusal(answer: Command, connection: RangeConnection | None) -> BrokerRefused:
    address = "" if connection is None else str(connection.address)
    return BrokerRefused(answer.code, answer.remark, address, RequestCode.PULL_MESSAGE)
