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

from orbitmq.broker.heldpull import HeldPull
from orbitmq.broker.pacing import Pacing
from orbitmq.broker.peers import Peer, peer_of
from orbitmq.broker.putoff import PutOff
from orbitmq.broker.settings import PullSettings
from orbitmq.broker.slices import Slices
from orbitmq.broker.waiting import WaitingTable
from orbitmq.filter.properties import Properties
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import refusal
from orbitmq.remoting.occurrences import Occurrences
from orbitmq.store.arrivals import Arrival
from orbitmq.store.errors import StoreError
from orbitmq.store.scanning import properties_of
from orbitmq.store.store import Store

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
    PUT_OFF = "put off"
    #: Nowhere: there is no room at all.
    NOT = "not"


class Holding:
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
        self._put_off = PutOff(
            loop,
            self._slices,
            self._process,
            limit=settings.put_off_requests,
            limit_of_one=settings.put_off_per_connection,
        )
        self._noted = Occurrences()

    def __len__(self) -> int:
        return self._count

    @property
    def put_off(self) -> int:
        """How many are answered a little later because they found no room."""
        return len(self._put_off)

    def apply(self, settings: PullSettings) -> None:
        """Go on with other limits; what is held or put off already stays."""
        self._settings = settings
        self._put_off.limit = settings.put_off_requests
        self._put_off.limit_of_one = settings.put_off_per_connection

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
        if self._put_off.add(pull, self._soon(pull)):
            return Kept.PUT_OFF
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
        if not self._put_off.add(pull, self._soon(pull)):
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
            self._slices.begin(self._judging(key), is_late=is_late)
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
        self._slices.begin(self._waking(self._waiting.find(topic, queue_id, group), unless))

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
        self._put_off.forget(connection)
        self._greedy.clear()

    def stop(self) -> None:
        """Answer everybody, and hold nobody any more."""
        self.is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.wake()
        self._put_off.finish()

    def _expire(self) -> None:
        self._timer = None
        self._is_expiring = True
        self._slices.begin(self._expiring())

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
            # By its turn there may be others to be written with it.
            pull.is_alone = False
            pull.judged = -1
            pacing.later(pull.connection, lambda: self._run(pull))
        else:
            pacing.spent += pacing.least
            self._run(pull)

    def _begin_slice(self) -> None:
        self._pacing.spent = 0

    def run_later(self, pull: HeldPull, after: float) -> None:
        """Process a pull that does not wait any more once again, in so many seconds."""
        pull.is_alone = False
        pull.judged = -1

        def run() -> None:
            if pull.connection.is_open:
                self._run(pull)

        self._pacing.later(pull.connection, run, after=after)

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
