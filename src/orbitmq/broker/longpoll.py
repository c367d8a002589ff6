"""Long polling: pulls that found nothing wait here until something arrives or their time is up.

A held pull is an entry in two structures, not a task: in the table of its queue, and in one heap of
deadlines with one timer. Thousands of them cost memory and nothing else.

**Nothing is missed.** A pull is held only if its queue has nothing at or after its offset, and the
decision and the entry are made in one step of the loop. Every message that arrives afterwards is
announced to `arrived`, in order. So the pull's `offset` is always the first number that its
filter has not judged yet: a message that the filter refuses moves it on by one, one that passes
wakes the pull. The filter is the one that the store would apply, by the tag code of the queue entry
and, where it asks for them, by the properties of the message. A pull that is held for its whole
time in a busy queue whose messages it does not want is therefore answered with an offset behind
all of them, and they are never looked at again. (Apache's broker keeps the offset and wakes such
pulls every five seconds to read the stretch again.)

**In the same turn.** `arrived` is called by the write that stored the messages. Woken pulls are
processed there and then, up to the turn's budget; the rest follows in later turns (`Pacing`). Where
more wait than can be looked at in passing, they are looked at in slices (`Slices`), with what
arrives in their queue meanwhile; who has not been asked about a message yet still has an offset
that is not beyond it, so nothing is missed then either.

**Fairly.** There is room for so many (`held_requests`), and for so many of one connection
(`held_per_connection`); one with much in its request counts for several. When all room is taken,
whoever has less than an equal share of it gets it from somebody who has more: the oldest pull of
that one gives way. So nobody who waits for a few queues is turned away, whatever others do. What
exceeds a share, or gives way, is put off (`putoff`): answered after `short_hold`, or sooner if it
asked for that, and not woken before.

**Once.** A pull leaves by exactly one of: woken, timed out, put off and its time is up, its
connection closed, the broker stops. Where there is somebody to answer, the pull is processed again
from the first check on, with holding disabled, so what they are told is up to date.
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
from orbitmq.store.append import Arrival
from orbitmq.store.settings import StoreError
from orbitmq.store.store import Store
from orbitmq.store.verify import properties_of
from orbitmq.wire.command import Command
from orbitmq.wire.headers import PullMessageRequest

if TYPE_CHECKING:
    from orbitmq.broker.settings import PullSettings


log = logging.getLogger(__name__)

#: Below this many entries a heap is not worth cleaning.
_SMALL_HEAP = 256
#: Those who wait for one queue, as far as they are looked at in passing.
AT_ONCE = 32
#: Messages of one queue that those who wait for it may be behind. More are as good as unheard of:
#: the store is asked then.
_MOST_UNJUDGED = 256


class Kept(enum.Enum):
    """Where a pull is that is to be answered later."""

    HELD = "held"
    DEFERRED = "deferred"
    #: Nowhere: there is no room at all.
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
        #: How many found no room, how many of those not even to be put off, and how many gave way.
        self.crowded_out = 0
        self.refused = 0
        self.displaced = 0
        #: Processes a pull again and answers it; set by the handler of pulls.
        self.again: Callable[[HeldPull], None] = _nobody
        self._store = store
        self._pacing = pacing
        self._loop = loop
        self._waiting = WaitingTable()
        self._deadlines: list[tuple[float, int, HeldPull]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._is_expiring = False
        self._count = 0
        self._weight = 0
        #: Connections that have somebody here, and those that had more than their share of late.
        self._holders: dict[Connection, None] = {}
        self._greedy: list[Connection] = []
        #: What has arrived in queues where not everybody has been asked about it yet.
        self._unjudged: dict[tuple[str, int], list[Arrival]] = {}
        self._slices = Slices(loop, at_once=at_once, before=self._begin_slice)
        self._deferred = DeferredPulls(
            loop,
            self._slices,
            self._process,
            limit=settings.put_off_requests,
            limit_of_one=settings.put_off_per_connection,
        )
        self._noted = LogEveryNth()

    def __len__(self) -> int:
        return self._count

    @property
    def deferred(self) -> int:
        """How many are answered a little later because they found no room."""
        return len(self._deferred)

    def apply(self, settings: PullSettings) -> None:
        """Go on with other limits; what is held or put off already stays."""
        self._settings = settings
        self._deferred.limit = settings.put_off_requests
        self._deferred.limit_of_one = settings.put_off_per_connection

    def hold(self, pull: HeldPull, seconds: float) -> Kept:
        """Keep a pull for so long, or for a little while, or not at all: as there is room."""
        peer = peer_of(pull.connection)
        pull.since = self._loop.time()
        pull.deadline = pull.since + seconds
        if not self._has_room(peer, pull.weight):
            return self._crowd_out(pull, peer)
        pull.is_held = True
        self._count += 1
        self._weight += pull.weight
        self._waiting.add(pull)
        if not peer.held:
            self._holders[pull.connection] = None
        peer.held[pull] = None
        peer.held_weight += pull.weight
        heapq.heappush(self._deadlines, (pull.deadline, next(self._order), pull))
        if self._timer is None or pull.deadline < self._timer.when():
            self._set_timer()
        elif len(self._deadlines) > _SMALL_HEAP + 2 * self._count:
            self._forget_gone()
        return Kept.HELD

    def age_of(self, pull: HeldPull) -> float:
        """How long ago a pull was held, in seconds."""
        return self._loop.time() - pull.since

    def _has_room(self, peer: Peer, weight: int) -> bool:
        """Whether somebody may be held, possibly because somebody else gives way."""
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
                "a client waits for more than there is room for (time %d): it has %d pulls held of "
                "%d in all, and is answered late",
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
        """Have the oldest pull of somebody who holds more than a share give way."""
        greedy = self._greedy
        while greedy and peer_of(greedy[-1]).held_weight <= share:
            greedy.pop()
        if not greedy:
            # There is somebody: together they hold more than everybody's share.
            greedy += [each for each in self._holders if peer_of(each).held_weight > share]
        if not greedy:
            return False
        pull = next(iter(peer_of(greedy[-1]).held))
        self._remove(pull)
        self.displaced += 1
        if not self._deferred.add(pull, self._soon(pull)):
            # Who has so many is told that we are busy when it asks again.
            self._pacing.later(pull.connection, lambda: self._run(pull))
        return True

    # What ends the waiting.

    def arrived(self, arrivals: Sequence[Arrival]) -> None:
        """Messages can be read now: wake those who wait for one of them."""
        if not self._count:
            return
        try:
            self._wake(arrivals)
        except Exception:
            # The write that announces these messages has to answer its senders.
            log.exception("those who wait could not be woken")

    def _wake(self, arrivals: Sequence[Arrival]) -> None:
        of_queue = self._waiting.of_queue
        at_once = self._slices.at_once
        woken: list[HeldPull] = []
        try:
            for arrival in arrivals:
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
                            at_once -= 1  # takes as long as all the rest
                        if self._is_woken(pull, arrival, seen):
                            self._remove(pull)
                            woken.append(pull)
                else:
                    self._judge_in_slices(key, arrival, is_late=at_once < self._slices.at_once)
        finally:
            # They wait nowhere any more, whatever has become of the others.
            if woken:
                self._process_woken(woken, arrivals)

    def _process_woken(self, woken: list[HeldPull], arrivals: Sequence[Arrival]) -> None:
        first = woken[0]
        if len(woken) == 1:
            first.is_alone = True
            if len(arrivals) == 1 and not first.wanted.needs_properties:
                first.judged = arrivals[0][1]
        for pull in woken:
            self._process(pull)
        # Not left to the end of the step: whoever waits has waited long enough.
        if first.is_alone:
            first.connection.flush()
        else:
            for connection in {pull.connection for pull in woken}:
                connection.flush()

    def _is_quick(self, waiting: Collection[HeldPull]) -> bool:
        """Whether these few look at tags alone: they do not wait behind those who do not."""
        return len(waiting) <= self._slices.at_once and not any(
            pull.wanted.needs_properties for pull in waiting
        )

    def _judge_in_slices(self, key: tuple[str, int], arrival: Arrival, *, is_late: bool) -> None:
        unjudged = self._unjudged.get(key)
        if unjudged is None:
            self._unjudged[key] = [arrival]
            self._slices.in_slices(self._judging(key), is_late=is_late)
        else:
            if len(unjudged) >= _MOST_UNJUDGED:
                unjudged.clear()
            unjudged.append(arrival)

    def _judging(self, key: tuple[str, int]) -> Iterator[None]:
        """Ask everybody who waits for a queue about what arrives there, until nothing does."""
        unjudged = self._unjudged[key]
        try:
            while unjudged and self._waiting.of_queue(*key):
                arrivals = tuple(unjudged)
                unjudged.clear()
                seen: dict[int, Properties | None] = {}
                for pull in tuple(self._waiting.of_queue(*key)):
                    for arrival in arrivals:
                        if not pull.is_held:
                            break
                        if self._is_woken(pull, arrival, seen):
                            self._remove(pull)
                            self._process(pull)
                        if pull.wanted.needs_properties:
                            yield
                    yield
        finally:
            del self._unjudged[key]

    def _is_woken(
        self, pull: HeldPull, arrival: Arrival, seen: dict[int, Properties | None]
    ) -> bool:
        """Judge a message for somebody who waits; whether that ends the waiting."""
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
        # A gap would mean that something arrived unheard of: then the store is to judge.
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
        """Process again those who wait for a queue, a topic or anything, or only a group's.

        For what concerns them and is no message: a reset, a deleted topic, a permission. Those for
        whom `unless` is true go on waiting. Who is put off is processed again soon in any case.
        """
        self._slices.in_slices(self._waking(self._waiting.find(topic, queue_id, group), unless))

    def _waking(
        self, found: Iterator[HeldPull], unless: Callable[[HeldPull], bool] | None
    ) -> Iterator[None]:
        for pull in found:
            if pull.is_held and (unless is None or not unless(pull)):
                self._remove(pull)
                self._process(pull)
            yield

    def forget(self, connection: Connection) -> None:
        """A connection was closed: nobody is there to be answered."""
        for pull in tuple(peer_of(connection).held):
            self._remove(pull)
        self._deferred.forget(connection)
        self._greedy.clear()

    def stop(self) -> None:
        """Answer everybody, and hold nobody any more."""
        self.is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.wake()
        self._deferred.finish()

    def _expire(self) -> None:
        self._timer = None
        self._is_expiring = True
        self._slices.in_slices(self._expiring())

    def _expiring(self) -> Iterator[None]:
        try:
            while self._is_due():
                _, _, pull = heapq.heappop(self._deadlines)
                if pull.is_held:
                    self._remove(pull)
                    self._process(pull)
                yield
        finally:
            self._is_expiring = False
        if self._deadlines:
            self._set_timer()

    def _is_due(self) -> bool:
        if not self._deadlines:
            return False
        deadline, _, pull = self._deadlines[0]
        return deadline <= self._loop.time() or not pull.is_held

    # The structures.

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
                # Who hears nothing waits until its own time is up.
                pull.is_answered = True
                pull.connection.reply(pull.request, refusal(pull.request, error))

    def _remove(self, pull: HeldPull) -> None:
        pull.is_held = False
        self._count -= 1
        self._weight -= pull.weight
        self._waiting.remove(pull)
        peer: Peer = pull.connection.context
        del peer.held[pull]
        peer.held_weight -= pull.weight
        if not peer.held:
            del self._holders[pull.connection]

    def _set_timer(self) -> None:
        if self._is_expiring:
            return  # it is set when that is done
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadlines[0][0], self._expire)

    def _forget_gone(self) -> None:
        self._deadlines = [entry for entry in self._deadlines if entry[2].is_held]
        heapq.heapify(self._deadlines)


def _nobody(_: HeldPull) -> None:
    """Before there is a handler of pulls nothing is held."""


# A pull that found nothing and waits: what it asked for, and what it has seen since.


#: So many bytes of a request count for one that waits.
_USUAL_BYTES = 4 * 1024
#: So many of a filter that it brought; what comes with a shorter request is no larger.
_USUAL_FILTER = 16 * 1024
_SHORT_REQUEST = 512


class HeldPull:
    """A pull that waits."""

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
        topic: str,
        queue_id: int,
        group: str,
        offset: int,
        wanted: MessageFilter,
        *,
        rules: int = 0,
        header: PullMessageRequest | None = None,
    ) -> None:
        self.connection = connection
        self.request = request
        #: The request's, if it is kept: it shares its texts with this.
        self.header = header
        self.topic = topic
        self.queue_id = queue_id
        self.group = group
        #: The first message that the filter has not judged.
        self.offset = offset
        self.wanted = wanted
        #: The state of the access rules (`Access.version`) that let it pass.
        self.rules = rules
        #: Why it may not be answered with messages any more.
        self.refusal: Refused | None = None
        #: How many usual ones it counts for.
        size = request.kept_bytes
        self.weight = 1 + size // _USUAL_BYTES
        if size > _SHORT_REQUEST:
            self.weight += memory_of(wanted) // _USUAL_FILTER
        self.since = 0.0
        self.deadline = 0.0
        self.is_held = False
        #: Whether nothing else is to be written with its answer: then that is written at once.
        self.is_alone = False
        #: Whether an answer was given to its connection, which does not count it as open any more.
        self.is_answered = False
        self.is_deferred = False
        #: The message that woke it, if that is the last of its queue and the filter, which looks at
        #: the tag alone, lets it pass; else -1.
        self.judged = -1

    @property
    def key(self) -> tuple[str, int]:
        """The queue that it waits for."""
        return (self.topic, self.queue_id)


# Who waits for which queue, and for which group.
#
# Messages arrive in queues; everything else that concerns those who wait concerns a topic, a group,
# or a group's part of a topic. So there are two ways to a pull, and nobody has to look at those
# whom something does not concern: there may be a hundred thousand of them.


#: An ordered set.
_Pulls = dict[HeldPull, None]


class WaitingTable:
    """All pulls that wait for messages."""

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
        """Those who wait for a queue, who came first first; changes with the table."""
        of_topic = self._queues.get(topic)
        return () if of_topic is None else of_topic.get(queue_id, ())

    def find(
        self, topic: str | None, queue_id: int | None, group: str | None
    ) -> Iterator[HeldPull]:
        """Those who wait for a queue, a topic or anything, or only a group's.

        The table may change meanwhile; whoever comes then may be left out.
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


# Pulls that found no room among those who wait: answered a little later, not at once.
#
# An empty answer makes most clients ask again at once, Apache's Java client among them, and whoever
# is turned away would go round as fast as the network does. So the answer comes after a second or
# so. Meanwhile the pull is an entry in one line with one timer: nobody looks whether something
# arrives for it, and it is processed from the first check on when its time is up.
#
# The line has a bound, and so has the part of it that one connection may take, which is also a
# bound on how many such answers are given in a second. A pull that does not even find room here is
# told that the broker is busy (`SystemBusy`): Java's push consumer then waits for three seconds,
# its lite pull consumer for one. (FLOW_CONTROL would be the better word, but with it both wait for
# 20 ms.)


#: Below this many entries a line is not worth cleaning.
_SMALL_LINE = 256


class DeferredPulls:
    """The line of those who are answered a little later."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        slices: Slices,
        answer: Callable[[HeldPull], None],
        *,
        limit: int,
        limit_of_one: int,
    ) -> None:
        #: How many may be in the line, and how many of one connection; who is in it already stays.
        self.limit = limit
        self.limit_of_one = limit_of_one
        self._loop = loop
        self._slices = slices
        self._answer = answer
        #: Those of each connection, and what they weigh together.
        self._of: dict[Connection, dict[HeldPull, None]] = {}
        self._weights: dict[Connection, int] = {}
        self._weight = 0
        self._count = 0
        self._line: list[tuple[float, int, HeldPull]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._is_answering = False

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
        heapq.heappush(self._line, (until, next(self._order), pull))
        self._set_timer()
        return True

    def forget(self, connection: Connection) -> None:
        """A connection was closed: nobody is there to be answered."""
        for pull in tuple(self._of.get(connection, ())):
            self._remove(pull)
        if len(self._line) > _SMALL_LINE + 2 * self._count:
            self._line = [entry for entry in self._line if entry[2].is_deferred]
            heapq.heapify(self._line)

    def finish(self) -> None:
        """Answer everybody now, in slices."""
        self._line = [(0.0, number, pull) for _, number, pull in self._line]
        heapq.heapify(self._line)
        self._begin()

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._is_answering:
            self._is_answering = True
            self._slices.in_slices(self._answering())

    def _answering(self) -> Iterator[None]:
        try:
            while self._line and self._line[0][0] <= self._loop.time():
                _, _, pull = heapq.heappop(self._line)
                # Those whose connection was closed may still be in the line.
                if pull.is_deferred:
                    self._remove(pull)
                    self._answer(pull)
                yield
        finally:
            self._is_answering = False
        self._set_timer()

    def _set_timer(self) -> None:
        if self._is_answering or not self._line:
            return
        when = self._line[0][0]
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._due)

    def _due(self) -> None:
        self._timer = None
        self._begin()

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
