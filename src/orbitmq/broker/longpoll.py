"""Long polling: pulls that found nothing are held until a message arrives or their time is up.

A held pull is an entry in the table of its queue and in one heap of deadlines, not a task. Its
`offset` is always the first message that its filter has not judged: it is held only if its queue
has nothing from that offset on, and every later message is announced to `arrived`. So no message is
missed. A pull leaves exactly once: woken, timed out, displaced, closed or stopped; it is then
processed again from the first check on, with holding disabled.

See docs/internals/long-polling.md for the sharing of room and the work in slices.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from orbitmq.broker.errors import Refused
from orbitmq.broker.filters import memory_of
from orbitmq.broker.groups import Peer, peer_of
from orbitmq.broker.scheduler import Pacing, Slices
from orbitmq.filter.tags import MessageFilter, Properties
from orbitmq.logonce import LogEveryNth
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import refusal
from orbitmq.store.append import Arrival, Arrivals, single_arrivals
from orbitmq.store.settings import StoreError
from orbitmq.store.store import Store
from orbitmq.store.verify import properties_of
from orbitmq.wire.command import Command
from orbitmq.wire.headers import PullMessageRequest

if TYPE_CHECKING:
    from orbitmq.broker.settings import PullSettings


log = logging.getLogger(__name__)

#: Below this many entries a heap of deadlines is not cleaned.
_SMALL_HEAP = 256
#: Pulls held for one queue that are judged immediately; more are judged in slices.
AT_ONCE = 32
#: Messages of one queue that its held pulls may be behind. Beyond that the store is read instead.
_MOST_UNJUDGED = 256


class Kept(enum.Enum):
    """Where a pull is kept that is answered later."""

    HELD = "held"
    DEFERRED = "deferred"
    #: There is no room at all.
    NOT = "not"


class HeldPulls:
    """All held pulls of a broker."""

    def __init__(
        self,
        store: Store,
        pacing: Pacing,
        loop: asyncio.AbstractEventLoop,
        settings: PullSettings,
        *,
        at_once: int = AT_ONCE,
    ) -> None:
        self._settings = settings
        self.is_stopped = False
        #: Pulls that found no room, those of them that were refused, and displaced held pulls.
        self.crowded_out = 0
        self.refused = 0
        self.displaced = 0
        #: Processes a pull again and answers it; set by the handler of pulls.
        self.again: Callable[[HeldPull], None] = _nobody
        self._store = store
        self._pacing = pacing
        self._loop = loop
        self.table = WaitingTable()
        self._count = 0
        self._weight = 0
        #: Connections with held pulls, and those that recently had more than their share.
        self._holders: dict[Connection, None] = {}
        self._greedy: list[Connection] = []
        #: Arrivals in queues whose held pulls are being judged in slices.
        self._unjudged: dict[tuple[str, int], list[Arrival]] = {}
        self.slices = Slices(loop, at_once=at_once, before=self._begin_slice)
        self._deadlines = Deadlines(loop, self.slices, lambda pull: pull.is_held, self._answer)
        self._deferred = DeferredPulls(
            loop,
            self.slices,
            self._process,
            limit=settings.put_off_requests,
            limit_of_one=settings.put_off_per_connection,
        )
        self._noted = LogEveryNth()

    def __len__(self) -> int:
        return self._count

    @property
    def deferred(self) -> int:
        """The number of pulls without room that are answered a little later."""
        return len(self._deferred)

    def apply(self, settings: PullSettings) -> None:
        """Take over other limits; pulls that are held or deferred stay."""
        self._settings = settings
        self._deferred.limit = settings.put_off_requests
        self._deferred.limit_of_one = settings.put_off_per_connection

    def hold(self, pull: HeldPull, seconds: float) -> Kept:
        """Hold a pull for `seconds`, or defer or refuse it when there is no room."""
        peer = peer_of(pull.connection)
        pull.since = self._loop.time()
        pull.deadline = pull.since + seconds
        if not self._has_room(peer, pull.weight):
            return self._crowd_out(pull, peer)
        pull.is_held = True
        self._count += 1
        self._weight += pull.weight
        self.table.add(pull)
        if not peer.held:
            self._holders[pull.connection] = None
        peer.held[pull] = None
        peer.held_weight += pull.weight
        self._deadlines.add(pull.deadline, pull, self._count)
        return Kept.HELD

    def age_of(self, pull: HeldPull) -> float:
        """Seconds since a pull was held."""
        return self._loop.time() - pull.since

    def _has_room(self, peer: Peer, weight: int) -> bool:
        """Whether a pull can be held, possibly by displacing another connection's."""
        limit = 0 if self.is_stopped else self._settings.held_requests
        if peer.held_weight + weight > self._settings.held_per_connection:
            return False
        while self._weight + weight > limit:
            share = limit // (len(self._holders) + (not peer.held))
            if peer.held_weight + weight > share or not self._displace(share):
                return False
        return True

    def _crowd_out(self, pull: HeldPull, peer: Peer) -> Kept:
        self.crowded_out += 1
        if count := self._noted.note(pull.connection.remote.host):
            log.warning(
                "a client has more pulls waiting than there is room for (time %d): %d of %d held "
                "pulls are its own, and further ones are answered late",
                count,
                len(peer.held),
                self._count,
                extra={"client": peer.name, "group": pull.group, "topic": pull.topic},
            )
        if self._deferred.add(pull, self._soon(pull)):
            return Kept.DEFERRED
        self.refused += 1
        return Kept.NOT

    def _soon(self, pull: HeldPull) -> float:
        return min(pull.deadline, self._loop.time() + self._settings.short_hold)

    def _displace(self, share: int) -> bool:
        """Displace the oldest pull of a connection that holds more than a share."""
        greedy = self._greedy
        while greedy and peer_of(greedy[-1]).held_weight <= share:
            greedy.pop()
        if not greedy:
            # There is one: together they hold more than all shares.
            greedy += [each for each in self._holders if peer_of(each).held_weight > share]
        if not greedy:
            return False
        pull = next(iter(peer_of(greedy[-1]).held))
        self._remove(pull)
        self.displaced += 1
        if not self._deferred.add(pull, self._soon(pull)):
            # At this limit a connection is answered SYSTEM_BUSY when it pulls again.
            self._pacing.later(pull.connection, lambda: self._run(pull))
        return True

    # What ends the waiting.

    def arrived(self, arrivals: Sequence[Arrivals]) -> None:
        """Messages became readable: wake the pulls that wait for one of them."""
        if not self._count:
            return
        try:
            self._wake(arrivals)
        except Exception:
            # The write that announces these messages has to answer its senders.
            log.exception("held pulls could not be woken")

    def _wake(self, arrivals: Sequence[Arrivals]) -> None:
        of_queue = self.table.of_queue
        at_once = self.slices.at_once
        woken: list[HeldPull] = []
        try:
            for arrival in self._awaited(arrivals):
                key = (arrival[0].topic, arrival[0].queue_id)
                waiting = of_queue(*key)
                if not waiting:
                    continue
                if key not in self._unjudged and (
                    len(waiting) <= at_once or self._is_quick(waiting)
                ):
                    seen: dict[int, Properties | None] = {}
                    for pull in tuple(waiting):
                        if pull.wanted.needs_properties:
                            at_once -= 1  # reading properties takes as long as all the rest
                        if self._is_woken(pull, arrival, seen):
                            self._remove(pull)
                            woken.append(pull)
                else:
                    self._judge_in_slices(key, arrival, is_late=at_once < self.slices.at_once)
        finally:
            # They are removed already, so they are processed whatever happened to the others.
            if woken:
                self._process_woken(woken, arrivals)

    def _awaited(self, arrivals: Sequence[Arrivals]) -> Iterator[Arrival]:
        """The messages one by one, while pulls wait for their queue."""
        of_queue = self.table.of_queue
        for each in arrivals:
            topic, queue_id = each[0].topic, each[0].queue_id
            if of_queue(topic, queue_id):
                for arrival in single_arrivals(each):
                    yield arrival
                    if not of_queue(topic, queue_id):
                        break

    def _process_woken(self, woken: list[HeldPull], arrivals: Sequence[Arrivals]) -> None:
        first = woken[0]
        if len(woken) == 1:
            first.is_alone = True
            if len(arrivals) == 1 and not first.wanted.needs_properties:
                _, number, code, _, _ = arrivals[0]
                if isinstance(code, int):
                    first.judged = number
        for pull in woken:
            self._process(pull)
        # Not left to the end of the step, which would add latency.
        if first.is_alone:
            first.connection.flush()
        else:
            for connection in {pull.connection for pull in woken}:
                connection.flush()

    def _is_quick(self, waiting: Collection[HeldPull]) -> bool:
        """Whether these pulls are few and filter by tags alone."""
        return len(waiting) <= self.slices.at_once and not any(
            pull.wanted.needs_properties for pull in waiting
        )

    def _judge_in_slices(self, key: tuple[str, int], arrival: Arrival, *, is_late: bool) -> None:
        unjudged = self._unjudged.get(key)
        if unjudged is None:
            self._unjudged[key] = [arrival]
            self.slices.in_slices(self._judging(key), is_late=is_late)
        else:
            if len(unjudged) >= _MOST_UNJUDGED:
                unjudged.clear()
            unjudged.append(arrival)

    def _judging(self, key: tuple[str, int]) -> Iterator[None]:
        """Judge the arrivals of a queue for all pulls that are held for it, until none is left."""
        unjudged = self._unjudged[key]
        try:
            while unjudged and self.table.of_queue(*key):
                arrivals = tuple(unjudged)
                unjudged.clear()
                seen: dict[int, Properties | None] = {}
                for pull in tuple(self.table.of_queue(*key)):
                    for arrival in arrivals:
                        if not pull.is_held:
                            break
                        if self._is_woken(pull, arrival, seen):
                            self._answer(pull)
                        if pull.wanted.needs_properties:
                            yield
                    yield
        finally:
            del self._unjudged[key]

    def _is_woken(
        self, pull: HeldPull, arrival: Arrival, seen: dict[int, Properties | None]
    ) -> bool:
        """Judge a message for a held pull; whether that ends its waiting."""
        _, number, code, at, _ = arrival
        if number < pull.offset:
            return False
        wanted = pull.wanted
        is_wanted = wanted.accepts_code(code)
        if is_wanted and wanted.needs_properties:
            if at not in seen:
                seen[at] = self._properties_at(at)
            properties = seen[at]
            is_wanted = properties is None or wanted.accepts_properties(properties)
        # After a gap the store is to judge.
        if is_wanted or number != pull.offset:
            return True
        pull.offset = number + 1
        return False

    def _properties_at(self, at: int) -> Properties | None:
        try:
            return properties_of(self._store.message_at(at))
        except StoreError:
            return None

    def wake(
        self,
        topic: str | None = None,
        queue_id: int | None = None,
        group: str | None = None,
        *,
        unless: Callable[[HeldPull], bool] | None = None,
    ) -> None:
        """Process the held pulls of a queue, a topic, a group or all again.

        For events other than messages: a reset, a deleted topic, a permission. Pulls for which
        `unless` is true stay. Deferred pulls are processed again soon in any case.
        """
        self.slices.in_slices(self._waking(self.table.find(topic, queue_id, group), unless))

    def _waking(
        self, found: Iterator[HeldPull], unless: Callable[[HeldPull], bool] | None
    ) -> Iterator[None]:
        for pull in found:
            if pull.is_held and (unless is None or not unless(pull)):
                self._answer(pull)
            yield

    def forget(self, connection: Connection) -> None:
        """Drop the pulls of a closed connection."""
        for pull in tuple(peer_of(connection).held):
            self._remove(pull)
        self._deferred.forget(connection)
        self._greedy.clear()

    def stop(self) -> None:
        """Answer all pulls, and hold no more."""
        self.is_stopped = True
        self._deadlines.stop()
        self.wake()
        self._deferred.finish()

    # The structures.

    def _answer(self, pull: HeldPull) -> None:
        self._remove(pull)
        self._process(pull)

    def _process(self, pull: HeldPull) -> None:
        pacing = self._pacing
        if pacing.must_wait(pull.connection):
            self.run_later(pull)  # then there may be other answers to be written with its own
        else:
            pacing.spent += pacing.least
            self._run(pull)

    def _begin_slice(self) -> None:
        self._pacing.spent = 0

    def run_later(self, pull: HeldPull) -> None:
        """Process a pull that is no longer held again, in a later step."""
        pull.is_alone = False
        pull.judged = -1
        self._pacing.later(pull.connection, lambda: self._run(pull))

    def _run(self, pull: HeldPull) -> None:
        try:
            self.again(pull)
        except Exception as error:
            log.exception("a held pull could not be answered")
            if not pull.is_answered:
                # Without an answer the client would wait for its own timeout.
                pull.is_answered = True
                pull.connection.reply(pull.request, refusal(pull.request, error))

    def _remove(self, pull: HeldPull) -> None:
        pull.is_held = False
        self._count -= 1
        self._weight -= pull.weight
        self.table.remove(pull)
        peer: Peer = pull.connection.context
        del peer.held[pull]
        peer.held_weight -= pull.weight
        if not peer.held:
            del self._holders[pull.connection]


def _nobody(_: HeldPull) -> None:
    """Stands for the handler of pulls before there is one."""


# A held pull.


#: Bytes of a request that count as one held pull.
_USUAL_BYTES = 4 * 1024
#: Bytes of a filter that count as one; the filter of a shorter request is no larger.
_USUAL_FILTER = 16 * 1024
_SHORT_REQUEST = 512


class HeldPull:
    """A pull that waits: what it asked for, and what its filter has judged since."""

    __slots__ = (
        "connection",
        "deadline",
        "group",
        "header",
        "is_alone",
        "is_answered",
        "is_deferred",
        "is_held",
        "judged",
        "offset",
        "queue_id",
        "refusal",
        "request",
        "rules",
        "since",
        "topic",
        "wanted",
        "weight",
    )

    def __init__(
        self,
        connection: Connection,
        request: Command,
        header: PullMessageRequest,
        wanted: MessageFilter,
        *,
        rules: int = 0,
    ) -> None:
        self.connection = connection
        self.request = request
        self.header = header
        self.topic = header.topic
        self.queue_id = header.queue_id
        self.group = header.consumer_group
        #: The first message that the filter has not judged.
        self.offset = header.queue_offset
        self.wanted = wanted
        #: The version of the access rules (`Access.version`) that allowed it.
        self.rules = rules
        #: Why it may no longer be answered with messages.
        self.refusal: Refused | None = None
        #: The number of usual pulls that it counts for.
        size = request.kept_bytes
        self.weight = 1 + size // _USUAL_BYTES
        if size > _SHORT_REQUEST:
            self.weight += memory_of(wanted) // _USUAL_FILTER
        self.since = 0.0
        self.deadline = 0.0
        self.is_held = False
        #: Whether no other answer is written together with its own, which is then written directly.
        self.is_alone = False
        #: Whether it was answered; its connection no longer counts it as open.
        self.is_answered = False
        self.is_deferred = False
        #: The message that woke it, if it is the last of its queue and was accepted by its tag
        #: alone; else -1.
        self.judged = -1

    @property
    def key(self) -> tuple[str, int]:
        """The queue that it waits for."""
        return (self.topic, self.queue_id)


# Pulls by queue and by group: a message concerns a queue; a reset or a permission concerns a topic,
# a group, or a group's part of a topic. There may be a hundred thousand pulls, so each is found
# without looking at the others.


#: An ordered set.
_Pulls = dict[HeldPull, None]


class WaitingTable:
    """All held pulls, by queue and by group."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[int, _Pulls]] = {}
        self._groups: dict[str, dict[str, _Pulls]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, pull: HeldPull) -> None:
        of_topic = self._queues.get(pull.topic)
        if of_topic is None:
            of_topic = self._queues[pull.topic] = {}
        waiting = of_topic.get(pull.queue_id)
        if waiting is None:
            waiting = of_topic[pull.queue_id] = {}
        waiting[pull] = None
        of_group = self._groups.get(pull.group)
        if of_group is None:
            of_group = self._groups[pull.group] = {}
        waiting = of_group.get(pull.topic)
        if waiting is None:
            waiting = of_group[pull.topic] = {}
        waiting[pull] = None

    def remove(self, pull: HeldPull) -> None:
        of_topic = self._queues[pull.topic]
        waiting = of_topic[pull.queue_id]
        del waiting[pull]
        if not waiting:
            del of_topic[pull.queue_id]
            if not of_topic:
                del self._queues[pull.topic]
        of_group = self._groups[pull.group]
        waiting = of_group[pull.topic]
        del waiting[pull]
        if not waiting:
            del of_group[pull.topic]
            if not of_group:
                del self._groups[pull.group]

    def of_queue(self, topic: str, queue_id: int) -> Collection[HeldPull]:
        """The pulls held for a queue, oldest first; changes with the table."""
        of_topic = self._queues.get(topic)
        return () if of_topic is None else of_topic.get(queue_id, ())

    def find(
        self, topic: str | None, queue_id: int | None, group: str | None
    ) -> Iterator[HeldPull]:
        """The pulls of a queue, a topic, a group or all.

        The table may change during the iteration; pulls that are added then may be left out.
        """
        if group is None:
            for name in tuple(self._queues) if topic is None else (topic,):
                of_topic = self._queues.get(name, {})
                for number in tuple(of_topic) if queue_id is None else (queue_id,):
                    yield from tuple(of_topic.get(number, ()))
            return
        for name in tuple(self._groups.get(group, ())) if topic is None else (topic,):
            for pull in tuple(self._groups.get(group, {}).get(name, ())):
                if queue_id is None or pull.queue_id == queue_id:
                    yield pull


# An empty answer makes most clients pull again immediately, so a pull without room is answered
# after `short_hold`, without a look at what arrives. Beyond a second bound it is refused with
# SYSTEM_BUSY, after which Java's push consumer waits for 3 s and its lite pull consumer for 1 s.
# (With FLOW_CONTROL both wait for only 20 ms.)


class DeferredPulls:
    """Pulls without room, answered a little later."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        slices: Slices,
        answer: Callable[[HeldPull], None],
        *,
        limit: int,
        limit_of_one: int,
    ) -> None:
        #: The largest weight of all deferred pulls, and of those of one connection.
        self.limit = limit
        self.limit_of_one = limit_of_one
        self._deadlines = Deadlines(loop, slices, lambda pull: pull.is_deferred, self._expired)
        self._answer = answer
        #: The pulls of each connection, and their weight.
        self._of: dict[Connection, dict[HeldPull, None]] = {}
        self._weights: dict[Connection, int] = {}
        self._weight = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, pull: HeldPull, until: float) -> bool:
        """Have a pull answered at this time of the loop; False when there is no room."""
        weight = self._weights.get(pull.connection, 0) + pull.weight
        if weight > self.limit_of_one or self._weight + pull.weight > self.limit:
            return False
        pull.is_deferred = True
        self._weights[pull.connection] = weight
        self._of.setdefault(pull.connection, {})[pull] = None
        self._weight += pull.weight
        self._count += 1
        self._deadlines.add(until, pull, self._count)
        return True

    def forget(self, connection: Connection) -> None:
        """Drop the pulls of a closed connection."""
        for pull in tuple(self._of.get(connection, ())):
            self._remove(pull)

    def finish(self) -> None:
        """Answer all pulls now, in slices."""
        self._deadlines.finish()

    def _expired(self, pull: HeldPull) -> None:
        self._remove(pull)
        self._answer(pull)

    def _remove(self, pull: HeldPull) -> None:
        pull.is_deferred = False
        connection = pull.connection
        self._count -= 1
        self._weight -= pull.weight
        self._weights[connection] -= pull.weight
        mine = self._of[connection]
        del mine[pull]
        if not mine:
            del self._of[connection], self._weights[connection]


# Deadlines of pulls.


class Deadlines:
    """Calls `expire` for each pull at its time, in slices. Pulls that left earlier are skipped."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        slices: Slices,
        is_there: Callable[[HeldPull], bool],
        expire: Callable[[HeldPull], None],
    ) -> None:
        self._loop = loop
        self._slices = slices
        self._is_there = is_there
        self._expire = expire
        self._heap: list[tuple[float, int, HeldPull]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._is_expiring = False

    def add(self, when: float, pull: HeldPull, count: int) -> None:
        """Add a pull; `count` are there with it."""
        heapq.heappush(self._heap, (when, next(self._order), pull))
        if len(self._heap) > _SMALL_HEAP + 2 * count:
            self._heap = [entry for entry in self._heap if self._is_there(entry[2])]
            heapq.heapify(self._heap)
        if self._timer is None or when < self._timer.when():
            self._set_timer()

    def finish(self) -> None:
        """Let the time of all pulls come now."""
        self._heap = [(0.0, number, pull) for _, number, pull in self._heap]
        heapq.heapify(self._heap)
        self._begin()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        if not self._is_expiring and self._heap:
            self.stop()
            self._timer = self._loop.call_at(self._heap[0][0], self._begin)

    def _begin(self) -> None:
        self.stop()
        if not self._is_expiring:
            self._is_expiring = True
            self._slices.in_slices(self._expiring())

    def _expiring(self) -> Iterator[None]:
        try:
            while self._is_due():
                _, _, pull = heapq.heappop(self._heap)
                if self._is_there(pull):
                    self._expire(pull)
                yield
        finally:
            self._is_expiring = False
        self._set_timer()

    def _is_due(self) -> bool:
        if not self._heap:
            return False
        when, _, pull = self._heap[0]
        return when <= self._loop.time() or not self._is_there(pull)
