"""Queues change hands without anybody in the middle, and are never in two hands.

A member that loses a queue holds it until its handler calls are done and its progress is with the
broker, and says so whenever it is asked what it holds. A member that gains a queue first *claims*
it, which it says when asked as well, and then asks everybody else; it begins when nobody holds or
claims the queue. Asking goes through the broker, with the request that tools use to look at a
consumer (GET_CONSUMER_RUNNING_INFO), so that Java members and Apache's brokers take part.

Why two members never both begin a queue, although each works out its share by itself and their
views of the group may differ for a moment:

* Both claim before they ask. Of two who claim the same queue, the later asker is told of the
  other's claim, or of its ownership, and waits. Both waiting is possible, and ends as soon as the
  views agree: for one of them the queue is then not its own, and the claim is dropped.
* Asking presupposes that one knows the other. So the members are read once more *after* claiming,
  from all brokers of the topic: not each of them knows everybody (see `survey`). A newcomer
  registers before it asks anything: either it is in that second list, and everything is worked out
  again, or it registered later and finds our claim.

What ends the wait otherwise:

* A member that lets go of a queue for longer than it may (`handover`) and a little. It says that it
  is letting go; the time begins when we first hear that. A member that holds the queue and does not
  say so consumes it, and may be right: it looks at routes less often than we, or cannot. As long as
  it answers it keeps the queue, up to `longest_wait` (or two of our own looks at routes, if that is
  longer): something is wrong by then, which only somebody who looks at both can mend, and a queue
  with two owners is better than one that nobody may ever have. Java's members do not say that they
  let go, and are not believed for so long: see below.
* Two that claim a queue, and do not agree for longer than a hand-over takes: the one whose client
  id is less begins then, and the other is told that it holds the queue.
* A member that does not answer. If it last said that it holds the queue, it is waited for from then
  on as if it were letting go; if it never said anything, from the claim on, and only if the queue
  was its own before, by the strategy; else for one `answer`.

Java members are asked otherwise. A Java client of 5.x answers from as many threads as it has
processors, asks the broker itself while it describes what it does (for progress that it does not
remember, five seconds long), and needs one of these threads to hear the broker's answer: as many
such questions at once as it has processors block it, and repeated, for good. So it is asked for its
positions (GET_CONSUMER_STATUS_FROM_CLIENT), which it answers from memory. A position is there
before a queue is begun, and goes when the queue was let go and reported. That is not all:

* A pull that is answered after the queue was let go puts its position back. The member takes it
  away with its next report, within seconds, but makes none while it has no queue at all: then it
  names a queue for good that it has no longer. So a Java member that names a queue is waited for as
  long as a hand-over takes, or until it must have heard of the change: two of our looks at routes.
* A queue without any progress, of which the broker did not say 0, has none while it is consumed. So
  a queue that a Java member had before is begun a moment after it was claimed (`_UNLISTED`), by
  when the member has heard of the change as well.

One that does not answer is left alone for a while (`silence`). Where accounts are checked, and the
group's may not ask (in ACL 2.0 that is Get on the group), a claim waits for one `answer`, no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from orbitmq.client.consumer.locks import BROKER_LOCK_LIFE
from orbitmq.client.consumer.members import CLAIMS, LEAVING, Holdings, queues_text
from orbitmq.client.consumer.progress import Doubting
from orbitmq.client.consumer.resets import ResetUnsettled
from orbitmq.client.consumer.strategies import AllocationError, Strategy, share
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.routes import MASTER
from orbitmq.clock import milliseconds
from orbitmq.errors import BrokerRefused, OrbitError
from orbitmq.logonce import LogOncePerOutage
from orbitmq.remoting.settings import ConnectFailed, RemotingError
from orbitmq.wire.bodies import ConsumerRunningInfo, MessageQueue, ProcessQueueInfo

if TYPE_CHECKING:
    from orbitmq.client.consumer.locks import QueueLock, QueueLocks
    from orbitmq.client.consumer.members import GroupMembers
    from orbitmq.client.consumer.progress import ProgressStore, StartOffsets, Unreported
    from orbitmq.client.consumer.pull import Refusals
    from orbitmq.client.consumer.settings import RebalanceSettings
    from orbitmq.client.engine import Engine
    from orbitmq.client.routes import Queue
    from orbitmq.clock import Clock


log = logging.getLogger(__name__)

#: What is added to the longest hand-over, for the way of the last report and the next question.
_ALLOWANCE = 1.0
#: How long a claim waits when its queue was a Java member's, which does not name it.
_UNLISTED = 0.3


@dataclass(frozen=True, slots=True)
class _LastAnswer:
    """What a member said last of the queues that were claimed then."""

    at: float
    held: frozenset[Queue]
    claimed: frozenset[Queue]
    #: Those that it is letting go of, and when it said so first.
    leaving: dict[Queue, float]


class OwnershipQuery:
    """Asks the other members of a group what they hold, until nothing stands against a claim.

    A member that holds nothing of what is claimed is not asked again: should the queue become its
    own later, it will ask us.
    """

    def __init__(
        self,
        members: GroupMembers,
        topic: str,
        strategy: Strategy,
        settings: RebalanceSettings,
        clock: Clock,
        *,
        me: str,
        route_refresh: float = 0.0,
    ) -> None:
        """`me` is the client id of who asks; every `route_refresh` it looks at routes."""
        self._members = members
        self._topic = topic
        self._strategy = strategy
        self._settings = settings
        self._clock = clock
        self._me = me
        #: Who looks at routes as seldom as we do has heard of the queues by then.
        self._heard = 2 * route_refresh
        self._said: dict[str, _LastAnswer] = {}
        #: How many questions had been sent when everybody concerned had answered last.
        self._asked_after = 0
        self._cleared: set[str] = set()
        #: The members of which it is known, and whether they are Java push consumers.
        self._is_java: dict[str, bool] = {}
        #: When those who did not answer may be asked again.
        self._silent_until: dict[str, float] = {}
        self._time = 0

    def again(self) -> None:
        """Something was claimed since, or somebody came: everybody is to be asked."""
        self._cleared.clear()
        self._time += 1

    async def free(
        self, claims: Iterable[QueueClaim], others: Iterable[str], queues: Iterable[Queue]
    ) -> tuple[list[QueueClaim], list[QueueClaim]]:
        """The claims that nobody else stands against, and those that were waited for long enough.

        `others` are the other members, `queues` all of the topic.
        """
        time, others = self._time, tuple(others)
        concerned = [member for member in dict.fromkeys(others) if member not in self._cleared]
        asked = [member for member in concerned if not self._is_left_alone(member)]
        claims, queues = list(claims), tuple(queues)
        after = max((self._asked_after, *(claim.after for claim in claims)))
        await self._find_java(asked, after)
        answers = await asyncio.gather(*(self._holdings(member, after) for member in asked))
        self._asked_after = self._members.asked
        java = [member for member in dict.fromkeys(others) if self._is_java.get(member)]
        wanted = {claim.queue for claim in claims}
        answered: list[str] = []
        silent = [member for member in concerned if member not in asked]
        for member, holdings in zip(asked, answers, strict=True):
            if holdings is None:
                silent.append(member)
                self._silent_until[member] = self._clock.monotonic() + self._settings.silence
                continue
            answered.append(member)
            self._note(member, holdings, wanted)
            if not wanted & (holdings.held | holdings.claimed) and time == self._time:
                # Unless there is more to ask about than when this was asked.
                self._cleared.add(member)
        free, overdue = [], []
        now = self._clock.monotonic()
        for claim in claims:
            ends = [
                *self._held_until(claim, answered),
                *self._last_held_until(claim, silent),
            ]
            waited = now - claim.since
            if self._may_be_held(claim, silent, queues, waited) or (
                waited < _UNLISTED and self._was_owned(java, claim, queues)
            ):
                ends.append(claim.since + self._patience)
            if not ends:
                free.append(claim)
            elif now >= max(ends):
                overdue.append(claim)
        return free, overdue

    @property
    def _patience(self) -> float:
        """How long it takes at most to let go of a queue."""
        return self._settings.handover + _ALLOWANCE

    def _note(self, member: str, holdings: Holdings, wanted: set[Queue]) -> None:
        now = self._clock.monotonic()
        before = self._said[member].leaving if member in self._said else {}
        leaving = {queue: before.get(queue, now) for queue in holdings.leaving & wanted}
        self._said[member] = _LastAnswer(
            now, holdings.held & wanted, holdings.claimed & wanted, leaving
        )

    def _held_until(self, claim: QueueClaim, members: list[str]) -> Iterator[float]:
        """When those are overdue with a queue who have just said that they hold it."""
        for member in members:
            said = self._said[member]
            if claim.queue in said.leaving:
                yield max(claim.since, said.leaving[claim.queue]) + self._patience
            elif claim.queue in said.claimed and self._me < member:
                yield claim.since + self._patience
            elif claim.queue in said.held | said.claimed:
                # What a Java member names, it need not have any more.
                longest = 0.0 if self._is_java.get(member) else self._settings.longest_wait
                yield claim.since + max(longest, self._heard, self._patience)

    def _last_held_until(self, claim: QueueClaim, silent: list[str]) -> Iterator[float]:
        """When those are overdue with a queue who held it when they last said anything."""
        for said in map(self._said.get, silent):
            if said is not None and claim.queue in said.held | said.claimed:
                since = said.leaving.get(claim.queue, said.at)
                yield max(claim.since, since) + self._patience

    def _is_left_alone(self, member: str) -> bool:
        return self._clock.monotonic() < self._silent_until.get(member, 0.0)

    async def _find_java(self, members: list[str], after: int) -> None:
        """Learn which members are Java's; if nobody can say, they are asked as ours are."""
        if all(member in self._is_java for member in members):
            return
        try:
            self._is_java.update(await self._members.java(self._topic, members, after=after))
        except OrbitError as error:
            log.debug("the languages of members are not known: %s", error)

    async def _holdings(self, member: str, after: int) -> Holdings | None:
        try:
            if self._is_java.get(member):
                return Holdings(await self._members.begun(member, self._topic))
            return await self._members.holdings(member, self._topic, after=after)
        except OrbitError as error:
            log.debug("%s does not say what it holds: %s", member, error)
            return None

    def _may_be_held(
        self, claim: QueueClaim, silent: list[str], queues: Iterable[Queue], waited: float
    ) -> bool:
        """Whether a member that does not answer has to be waited for."""
        if not silent:
            return False
        if waited < self._settings.answer:
            return True
        if not self._members.may_ask:
            # They would be waited for as long as can be, whenever anybody comes or goes.
            return False
        return self._was_owned(silent, claim, queues)

    def _was_owned(self, members: list[str], claim: QueueClaim, queues: Iterable[Queue]) -> bool:
        return any(self._was_owner(member, claim, queues) for member in members)

    def _was_owner(self, member: str, claim: QueueClaim, queues: Iterable[Queue]) -> bool:
        if member not in claim.former:
            return False
        try:
            return claim.queue in share(self._strategy, queues, claim.former, member)
        except AllocationError:
            return True


# Acquiring queues: claim, wait until nobody else holds them, work out where they begin, begin.
#
# The order of these steps is the guarantee. Progress is read after the former owner let go, and, in
# orderly consumption, after the lock was taken; what was left in memory from an earlier ownership
# is forgotten before, unless nobody could be told (`unreported`). Where a queue begins without
# progress is put by before it is pulled. A step that fails leaves the claim as it is, and it is
# tried again; a claim that was dropped meanwhile, because the queue went to somebody else, ends at
# the next step.
#
# What is kept of a queue cannot be proven while only a slave of its broker is there. Then the queue
# begins where the slave says, and what was kept is thrown away: whatever is done with the queue
# from here on, by a seek or a reset as well, is not moved by it later.
#
# A reset that comes while a queue is claimed may come after its progress was read. It is noted, and
# the queue begins there, whatever was read (`resetting`).


#: How much slower a question is repeated each time.
_SLOWER = 1.5
#: A lock that was refused is not asked for again sooner.
_LOCK_POLL = 0.1
_SLOWEST_LOCK_POLL = 0.5


class QueueSource(Protocol):
    """Where messages of an owned queue come from."""

    def begin(self, owned: OwnedQueue) -> None: ...

    def end(self, owned: OwnedQueue) -> None: ...


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic and its group as one round of rebalancing saw them."""

    queues: tuple[Queue, ...]
    members: tuple[str, ...]


@dataclass(slots=True)
class _TopicAcquisition:
    """The claims of one topic on their way."""

    view: TopicSnapshot
    #: None when nobody has to be asked.
    query: OwnershipQuery | None
    news: asyncio.Event
    #: How many questions had been sent when the members were looked at last.
    looked_after: int = 0
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class PendingReset:
    """Where a claimed queue is to begin, because its progress was reset."""

    offset: int
    is_followed: bool = False


class QueueAcquisition:
    """Turns claims into owned queues, topic by topic."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        ownership: Ownership,
        *,
        members: GroupMembers | None,
        starting: StartOffsets,
        progress: ProgressStore,
        unreported: Unreported,
        puts_start_by: bool,
        puller: QueueSource,
        strategy: Strategy,
        locks: QueueLocks | None,
        settings: RebalanceSettings,
        on_gained: Callable[[str], None],
        look_again: Callable[[str], None],
        refusals: Refusals,
    ) -> None:
        """Without `members` nobody is asked: broadcasting. With `locks` the broker is: orderly.

        `puts_start_by` unless the application alone says what is progress.
        """
        self._engine = engine
        self._group = group
        self._ownership = ownership
        self._members = members
        self._starting = starting
        self._progress = progress
        self._unreported = unreported
        self._puts_start_by = puts_start_by
        self._puller = puller
        self._strategy = strategy
        self._locks = locks
        self._settings = settings
        self._on_gained = on_gained
        self._look_again = look_again
        self._refusals = refusals
        self._gains: dict[str, _TopicAcquisition] = {}
        self._resets: dict[QueueClaim, PendingReset] = {}
        self._outages = LogOncePerOutage(log)

    def claim(
        self, topic: str, wanted: Iterable[Queue], view: TopicSnapshot, former: tuple[str, ...] = ()
    ) -> None:
        """Claim exactly these queues of a topic; others that were claimed are so no longer."""
        wanted = list(wanted)
        claims = self._ownership.claims
        self._drop(topic, keep=set(wanted))
        now = self._engine.clock.monotonic()
        after = 0 if self._members is None else self._members.asked
        fresh = [queue for queue in wanted if queue not in claims]
        for queue in fresh:
            claims[queue] = QueueClaim(queue, now, former, after)
        gain = self._gains.get(topic)
        if not wanted:
            if gain is not None:
                gain.news.set()
            return
        if gain is None or gain.task is None or gain.task.done():
            self._gains[topic] = self._begin_gain(topic, view)
            return
        is_news = bool(fresh) or set(view.members) != set(gain.view.members)
        gain.view = view
        if is_news:
            if gain.query is not None:
                gain.query.again()
            gain.news.set()

    def drop(self, topic: str) -> None:
        """Claim nothing of a topic any more."""
        self._drop(topic, keep=frozenset())

    @property
    def troubles(self) -> tuple[str, ...]:
        """What keeps queues from being begun; one stands for all, as they have it in common."""
        return self._outages.current()[:1]

    def reset(self, queue: Queue, offset: int) -> PendingReset | None:
        """Begin a queue there, if it is claimed; None if it is not."""
        claim = self._ownership.claims.get(queue)
        if claim is None:
            return None
        reset = self._resets[claim] = PendingReset(offset)
        return reset

    async def stop(self) -> None:
        """Claim nothing at all; what is half-way is given back."""
        self._ownership.claims.clear()
        self._resets.clear()
        tasks = [gain.task for gain in self._gains.values() if gain.task is not None]
        self._gains.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _drop(self, topic: str, *, keep: set[Queue] | frozenset[Queue]) -> None:
        for claim in self._ownership.claims_of(topic):
            if claim.queue in keep:
                continue
            del self._ownership.claims[claim.queue]
            self._refusals.given_up(claim.queue)
            self._outages.forget(claim.queue)
            self._resets.pop(claim, None)
            self._forget(claim.queue)
            if self._may_be_locked(claim):
                self._engine.spawn(self._give_back(claim), f"unlock {claim.queue}")

    def _forget(self, queue: Queue) -> None:
        """Keep no position of a queue that is not to be ours, unless a reset is to be put by."""
        ownership = self._ownership
        if not (queue in ownership.owned or queue in ownership.claims or queue in ownership.resets):
            self._progress.forget(queue)

    def _begin_gain(self, topic: str, view: TopicSnapshot) -> _TopicAcquisition:
        query = None
        if self._members is not None and self._locks is None:
            query = OwnershipQuery(
                self._members,
                topic,
                self._strategy,
                self._settings,
                self._engine.clock,
                me=self._engine.client_id,
                route_refresh=self._engine.settings.route_refresh,
            )
        gain = _TopicAcquisition(view, query, asyncio.Event())
        gain.task = self._engine.spawn(
            self._gain(topic, gain), f"gain queues of {topic} for {self._group}"
        )
        return gain

    async def _gain(self, topic: str, gain: _TopicAcquisition) -> None:
        """Go on until every claim of a topic is owned or dropped."""
        first, slowest = self._pace()
        pause = first
        while claims := self._ownership.claims_of(topic):
            gain.news.clear()
            now = self._engine.clock.monotonic()
            due = [claim for claim in claims if claim.not_before <= now]
            if not due:
                await self._wait(gain, min(claim.not_before for claim in claims) - now)
                continue
            try:
                free = await self._free(topic, gain, due)
            except OrbitError as error:
                self._outages.failed(topic, "queues of %s cannot be begun: %s", topic, error)
                await self._wait(gain, self._settings.retry)
                continue
            self._outages.recovered(topic)
            await asyncio.gather(*(self._begin(claim) for claim in free))
            if len(free) == len(due):
                continue
            has_news = await self._wait(gain, pause)
            pause = first if has_news else min(pause * _SLOWER, slowest)

    def _pace(self) -> tuple[float, float]:
        if self._locks is not None:
            return _LOCK_POLL, _SLOWEST_LOCK_POLL
        return self._settings.first_poll, self._settings.slowest_poll

    async def _wait(self, gain: _TopicAcquisition, pause: float) -> bool:
        """Wait for news, or a while; whether there are news."""
        try:
            async with asyncio.timeout(pause):
                await gain.news.wait()
        except TimeoutError:
            return False
        return True

    async def _free(
        self, topic: str, gain: _TopicAcquisition, claims: list[QueueClaim]
    ) -> list[QueueClaim]:
        """The claims that can be begun now."""
        if self._locks is not None:
            return await self._locked(self._locks, claims)
        if self._members is None or gain.query is None:
            return claims
        view = gain.view
        if not await self._is_as_seen(self._members, topic, gain, claims):
            gain.query.again()
            self._look_again(topic)
            return []
        others = [member for member in view.members if member != self._engine.client_id]
        free, overdue = await gain.query.free(claims, others, view.queues)
        for claim in overdue:
            self._ownership.counts.overdue += 1
            log.warning(
                "somebody else does not let go of %s; group %s begins it here all the same",
                claim.queue,
                self._group,
                extra={"group": self._group, "queue": str(claim.queue)},
            )
        return free + overdue

    async def _is_as_seen(
        self,
        group_members: GroupMembers,
        topic: str,
        gain: _TopicAcquisition,
        claims: list[QueueClaim],
    ) -> bool:
        """Whether the members are those of the view: the second look of `handover`, and later ones.

        One broker is enough for the later ones, if it says what all have said.
        """
        view = gain.view
        after = max(gain.looked_after, *(claim.after for claim in claims))
        members, broker = await group_members.listed(topic, after=after)
        is_as_seen = set(members) == set(view.members)
        if not is_as_seen or not all(each.is_looked_at for each in claims):
            found = await group_members.everywhere(topic, members, broker, after=after)
            is_as_seen = set(found.members) == set(view.members)
            for claim in claims:
                claim.is_looked_at = is_as_seen
        gain.looked_after = group_members.asked
        return is_as_seen

    async def _locked(self, locks: QueueLocks, claims: list[QueueClaim]) -> list[QueueClaim]:
        granted = await locks.acquire(claim.queue for claim in claims)
        for claim in claims:
            claim.lock = granted.get(claim.queue)
        return [claim for claim in claims if claim.lock is not None]

    async def _begin(self, claim: QueueClaim) -> None:
        """Begin a queue, if it is still to be begun and can be said where."""
        queue = claim.queue
        if not self._is_current(claim):
            await self._give_back(claim)
            return
        try:
            offset = await self._settled_start(queue)
        except OrbitError as error:
            self._ownership.counts.postponed += 1
            if isinstance(error, BrokerRefused) and self._refusals.refused(queue, error):
                self._outages.forget(queue)
            else:
                self._outages.failed(queue, "where %s begins cannot be said: %s", queue, error)
            claim.not_before = self._engine.clock.monotonic() + self._settings.retry
            return
        self._outages.recovered(queue)
        self._refusals.given_up(queue)  # its pulls are the next to ask
        if not self._is_current(claim):
            self._forget(queue)
            await self._give_back(claim)
            return
        if (reset := self._resets.pop(claim, None)) is not None:
            offset = self._follow(queue, reset)
        owned = OwnedQueue(queue, offset, now=self._engine.clock.monotonic(), lock=claim.lock)
        # One step: whoever asks sees the claim or the owner, never neither.
        del self._ownership.claims[queue]
        self._ownership.owned[queue] = owned
        self._unreported.drop([queue])
        self._ownership.counts.gained += 1
        log.info(
            "queue gained: %s by group %s, from offset %d",
            queue,
            self._group,
            offset,
            extra={"group": self._group, "queue": str(queue), "offset": offset},
        )
        self._puller.begin(owned)
        self._on_gained(queue.topic)

    def _follow(self, queue: Queue, reset: PendingReset) -> int:
        """Where a queue begins that was reset on its way; whoever resets it puts that by."""
        self._progress.forget(queue)
        self._progress.update(queue, reset.offset)
        reset.is_followed = True
        return reset.offset

    async def _settled_start(self, queue: Queue) -> int:
        """Where a queue begins once what is kept of it is put by, or is not to be: see the head."""
        self._progress.forget(queue)
        try:
            await self._unreported.settle(queue)
        except (ConnectFailed, BrokerUnavailable):
            self._progress.forget(queue)
            offset = await self._start(queue)
            if self._has_master(queue):
                # It is back, and can be told.
                raise
            return offset
        return await self._start(queue)

    def _has_master(self, queue: Queue) -> bool:
        master = self._engine.routes.brokers.get(queue.broker, {}).get(MASTER)
        return master is not None and self._engine.open_connection(master) is not None

    async def _start(self, queue: Queue) -> int:
        if self._puts_start_by:
            return await self._starting.begin(queue)
        return await self._starting.offset(queue)

    def _is_current(self, claim: QueueClaim) -> bool:
        return self._ownership.claims.get(claim.queue) is claim

    async def _give_back(self, claim: QueueClaim) -> None:
        """A claim that was dropped half-way keeps nothing."""
        is_locked, claim.lock = self._may_be_locked(claim), None
        if self._locks is not None and is_locked:
            await self._locks.release([claim.queue])

    def _may_be_locked(self, claim: QueueClaim) -> bool:
        """Whether the broker may keep a queue for this claim, and for no other of ours."""
        queue, locks = claim.queue, self._locks
        if locks is None or queue in self._ownership.owned:
            return False
        if claim.lock is not None:
            return locks.get(queue) is claim.lock
        return locks.may_be_held(queue) and queue not in self._ownership.claims


# Giving queues up: let running handlers finish, report progress, and only then let go.
#
# As long as a queue is in the table of owned ones, whoever is to have it next waits. So nothing
# here may last for ever, except in orderly consumption: there the lock is what others wait for, and
# to give it back while a handler runs would put two handlers on one queue. So would, in
# broadcasting, to gain a queue once more. A stop does not wait for ever either; it leaves the lock
# of such a queue to itself. Nor does it wait for a broker that is silent, be it for a report that
# was on its way before: that is found out once, not once for every queue.
#
# Progress is reported twice: at once, for an owner-to-be that does not wait (Apache's clients do
# not), and when the last handler has finished. Before the second report the broker is asked when
# some time has passed, or the lock was lost: what another owner has reported meanwhile is not taken
# back. At a stop the broker is asked for what it is believed to have, too: nobody would say it
# later. Otherwise, what a broker could not be told is kept, and told later if it still counts then
# (`unreported`): a broker that was away may be back with other messages under the same numbers.
#
# A queue that is reset (`resetting`) is given up as well, and begun anew. The offset is frozen and
# told in the moment in which it comes, once, and the queue is held until that has ended, one way or
# the other: whoever has it next finds the offset. It is never told again, here or elsewhere: an
# owner that did not wait for us may have gone on from there. So a queue that was reset reports
# nothing of its own any more.


#: A loss that took longer may have been noticed by an owner that did not wait for us.
_LONG = 1.0
#: Pause between attempts to report progress.
_AGAIN = 0.1
#: How long one report may take at a stop. A store that takes longer is given up.
_LAST_REPORT = 5.0
#: How long a stop takes at most beside its handlers: two reports, and what comes with them.
_STOP = 2 * _LAST_REPORT + 2.0


class Draining(Protocol):
    """Who calls handlers."""

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        """Begin nothing new for a queue and wait for what runs; true when nothing does."""


@runtime_checkable
class Counting(Protocol):
    """Who knows which messages handlers are at work on; a call may have several."""

    def in_hand(self, owned: OwnedQueue) -> int:
        """Messages of a queue that were begun and are not settled."""


@runtime_checkable
class InOrder(Protocol):
    """Who calls handlers of a queue one after the other: with locks of brokers or, in broadcasting,
    without any."""

    #: Whether a queue must not be begun anew as long as a handler is at work on it.
    is_in_order: bool


class QueueRelease:
    """Gives queues up, each in a task of its own."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        ownership: Ownership,
        *,
        progress: ProgressStore,
        unreported: Unreported,
        puller: QueueSource,
        consumption: Draining,
        locks: QueueLocks | None,
        settings: RebalanceSettings,
        on_released: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._group = group
        self._ownership = ownership
        self._progress = progress
        self._unreported = unreported
        self._puller = puller
        self._consumption = consumption
        self._locks = locks
        is_in_order = isinstance(consumption, InOrder) and consumption.is_in_order
        self._is_in_order = locks is not None or is_in_order
        self._settings = settings
        self._on_released = on_released
        self._is_stopping = False
        self._patience = settings.handover
        #: For all reports of the consumer that a stop may have to wait for.
        self.limit = CommitDeadline()
        self._tasks: dict[OwnedQueue, asyncio.Task[None]] = {}
        #: Queues that were given up by a stop while a handler was at work on them.
        self.left_busy: set[Queue] = set()
        #: Queues whose broker was away when it was to be told, and why.
        self._cut_off: dict[OwnedQueue, OrbitError] = {}
        #: Brokers that did not answer at a stop, and are told nothing more.
        self._given_up: set[str] = set()
        #: Resets on their way to be put by.
        self._resets: dict[OwnedQueue, set[asyncio.Task[OrbitError | None]]] = {}
        #: Queues whose locks are on their way back: somebody else may have them already.
        self._unlocking: set[OwnedQueue] = set()

    def is_going(self, owned: OwnedQueue) -> bool:
        """Whether a queue is being given up."""
        return owned in self._tasks

    def release(self, owned: OwnedQueue, why: str, *, reports: bool = True) -> asyncio.Task[None]:
        """Give a queue up; `reports` unless its progress has been settled already."""
        task = self._tasks.get(owned)
        if task is None:
            owned.is_draining = True
            self._puller.end(owned)
            task = self._engine.spawn(
                self._release(owned, why, reports=reports), f"release {owned.queue}"
            )
            self._tasks[owned] = task
            task.add_done_callback(lambda _: self._tasks.pop(owned, None))
        return task

    def is_held(self, owned: OwnedQueue) -> bool:
        """Whether nobody else may begin a queue yet: it can still be reset."""
        return self._ownership.owned.get(owned.queue) is owned and owned not in self._unlocking

    def reset(self, owned: OwnedQueue, offset: int) -> asyncio.Task[OrbitError | None]:
        """Give a queue that is held up, with another offset, whatever else it is given up for.

        Returns what puts the offset by, and says what prevented that, if anything did.
        """
        self._progress.freeze(owned.queue, offset)
        owned.is_reset = True
        resets = self._resets.setdefault(owned, set())
        reset = self._engine.spawn(self._tell(owned), f"reset {owned.queue}")
        resets.add(reset)
        reset.add_done_callback(resets.discard)
        self.release(owned, "its progress was reset", reports=False)
        return reset

    async def _tell(self, owned: OwnedQueue) -> OrbitError | None:
        """Put by where a queue was reset to; what prevented it, if anything did."""
        error = await self._persist(owned)
        if error is None and self._ownership.owned.get(owned.queue) is not owned:
            # A stop that was cut short has let go of it, and of the offset, before it was told.
            return ResetUnsettled(owned.queue)
        return error

    async def release_all(self, why: str, *, within: float | None = None) -> None:
        """Give up everything; handlers that run longer than `within` (`handover`) are left.

        Takes about as long as the handlers; and at most `_STOP` more, whatever brokers do.
        """
        self._is_stopping = True
        self.limit.begin(_LAST_REPORT)
        self._patience = self._settings.handover if within is None else within
        all_owned = list(self._ownership.owned.values())
        tasks = [self.release(owned, why) for owned in all_owned]
        try:
            async with asyncio.timeout(self._patience + _STOP):
                await asyncio.gather(*tasks, return_exceptions=True)
        except TimeoutError:
            log.warning(
                "not all queues of group %s could be given up in order; messages may come again",
                self._group,
                extra={"group": self._group},
            )
        self.left_busy.update(owned.queue for owned in all_owned if owned.running)

    async def _release(self, owned: OwnedQueue, why: str, *, reports: bool) -> None:
        queue = owned.queue
        began = self._engine.clock.monotonic()
        is_idle: bool | None = None
        try:
            is_idle = await self._drain(owned, reports=reports)
            owned.drop()
            if not is_idle:
                self._ownership.counts.abandoned += self._in_hand(owned)
            if reports and not owned.is_reset:
                lasted = self._engine.clock.monotonic() - began
                is_careful = lasted > _LONG or not self._is_locked(owned)
                await self._report(owned, is_careful=is_careful)
        finally:
            # Whatever went wrong: a queue that nobody pulls must not look owned, or stay locked.
            owned.drop()
            try:
                await self._resets_are_put_by(owned)
                # Nothing is waited for between this and letting go, but the way of a lock.
                if self._locks is not None:
                    was_idle = not owned.running if is_idle is None else is_idle
                    await self._unlock(self._locks, owned, is_idle=was_idle)
            finally:
                self._let_go(owned)
        log.info(
            "queue released: %s by group %s, %s",
            queue,
            self._group,
            why,
            extra={"group": self._group, "queue": str(queue)},
        )

    def _in_hand(self, owned: OwnedQueue) -> int:
        consumption = self._consumption
        return consumption.in_hand(owned) if isinstance(consumption, Counting) else owned.running

    def _let_go(self, owned: OwnedQueue) -> None:
        queue = owned.queue
        self._cut_off.pop(owned, None)
        self._resets.pop(owned, None)
        self._unlocking.discard(owned)
        try:
            if self._ownership.owned.get(queue) is owned:
                del self._ownership.owned[queue]
                self._ownership.counts.released += 1
                self._progress.forget(queue)
        finally:
            self._on_released(queue.topic)

    def _is_locked(self, owned: OwnedQueue) -> bool:
        """Whether nobody else has begun the queue, as far as locks can tell."""
        return owned.lock is None or owned.lock.is_held(self._engine.clock.monotonic())

    async def _drain(self, owned: OwnedQueue, *, reports: bool) -> bool:
        """Wait for running handlers; whether none runs any more."""
        if owned.is_dropped and not self._is_in_order:
            # Dropped for a wrong offset: what runs does not count, and nobody waits for it.
            return True
        early = None
        if reports:
            if self._is_stopping:
                self._doubt(owned.queue)
            early = asyncio.create_task(self._persist(owned), name=f"report {owned.queue}")
        try:
            while not await self._consumption.drain(owned, self._patience):
                if not self._is_in_order or self._is_stopping:
                    return False
                log.info(
                    "a handler of group %s still runs on %s, which is to be given up",
                    self._group,
                    owned.queue,
                    extra={"group": self._group, "queue": str(owned.queue)},
                )
            return True
        finally:
            if early is not None:
                await asyncio.gather(early, return_exceptions=True)

    async def _unlock(self, locks: QueueLocks, owned: OwnedQueue, *, is_idle: bool) -> None:
        """Give the lock of a queue back, unless a handler still runs under it."""
        if is_idle:
            # The lock of this ownership only: the queue may be ours again under another one.
            if locks.get(owned.queue) is owned.lock:
                self._unlocking.add(owned)
                await locks.release([owned.queue])
            return
        self.left_busy.add(owned.queue)
        log.warning(
            "a handler of group %s still runs at the stop; its queue %s stays locked until the "
            "lock lapses, %g s after its last renewal",
            self._group,
            owned.queue,
            BROKER_LOCK_LIFE,
            extra={"group": self._group, "queue": str(owned.queue)},
        )

    async def _report(self, owned: OwnedQueue, *, is_careful: bool) -> None:
        """Put the progress by, trying for as long as the next owner waits."""
        until = self._engine.clock.monotonic() + self._settings.handover
        while owned not in self._cut_off and not owned.is_reset:
            error = await self._persist(owned, is_careful=is_careful)
            if error is None:
                return
            if self._is_stopping or self._engine.clock.monotonic() >= until:
                self._keep(owned)
                self._not_reported(owned, error)
                return
            if isinstance(error, BrokerRefused):
                await asyncio.sleep(_AGAIN)
        if not owned.is_reset:
            await self._report_again(owned, self._cut_off[owned], until)

    async def _report_again(self, owned: OwnedQueue, error: OrbitError, until: float) -> None:
        """The same after a broker was away: it may have lost messages, so that proof is needed."""
        self._keep(owned)
        while not self._is_stopping and self._engine.clock.monotonic() < until:
            await asyncio.sleep(_AGAIN)
            try:
                await self._unreported.settle(owned.queue)
            except OrbitError as failed:
                error = failed
            else:
                return
        self._not_reported(owned, error)

    def _keep(self, owned: OwnedQueue) -> None:
        position = self._progress.read(owned.queue)
        if position is not None and not (self._is_stopping or owned.is_reset):
            self._unreported.keep(owned.queue, position, owned.landmark)

    def _not_reported(self, owned: OwnedQueue, error: OrbitError) -> None:
        log.warning(
            "progress of group %s in %s could not be reported, %s: %s",
            self._group,
            owned.queue,
            "its messages come again" if self._is_stopping else "and is when its broker is back",
            error,
            extra={"group": self._group, "queue": str(owned.queue)},
        )

    async def _persist(self, owned: OwnedQueue, *, is_careful: bool = False) -> OrbitError | None:
        """Put the progress by; what prevented it, if anything did."""
        broker = owned.queue.broker
        if broker in self._given_up:
            return BrokerUnavailable(broker, "it did not answer before, and is not asked again")
        try:
            async with self.limit.kept(broker):
                await self._put_by(owned, is_careful=is_careful)
        except OrbitError as error:
            if self._is_stopping and isinstance(error, RemotingError | BrokerUnavailable):
                self._given_up.add(broker)
            if not (self._is_stopping or isinstance(error, BrokerRefused)):
                self._cut_off[owned] = error
            return error
        return None

    async def _put_by(self, owned: OwnedQueue, *, is_careful: bool) -> None:
        queue = owned.queue
        position = self._progress.read(queue)
        if position is None:
            return
        if is_careful:
            await self._progress.fetch(queue)
            if owned.is_reset:
                return
            self._progress.update(queue, position)
        await self._progress.persist([queue])

    async def _resets_are_put_by(self, owned: OwnedQueue) -> None:
        """Wait for all resets of a queue, also those that come meanwhile."""
        while resets := self._resets.get(owned):
            await asyncio.wait(resets)

    def _doubt(self, queue: Queue) -> None:
        if isinstance(self._progress, Doubting):
            self._progress.doubt([queue])


# The queues of one consumer: owned, and claimed on the way to that.


_MIB = 1024 * 1024


@dataclass(slots=True, eq=False)
class QueueClaim:
    """A queue that belongs to us by the rules, and that we have not begun yet."""

    queue: Queue
    since: float  #: by the clock's `monotonic`
    #: The members before the change that made the queue ours.
    former: tuple[str, ...] = ()
    #: How many questions had been sent when it was made: only answers to later ones matter.
    after: int = 0
    #: Whether all brokers were asked for the members since: the second look of `handover`.
    is_looked_at: bool = False
    lock: QueueLock | None = None
    #: Not tried again before, because where the queue begins could not be said.
    not_before: float = float("-inf")


@dataclass(slots=True)
class RebalanceCounts:
    """What has happened to the queues of a consumer since it was made."""

    rounds: int = 0
    failed_rounds: int = 0  #: a topic that was left as it was, for want of an answer
    gained: int = 0
    released: int = 0
    stalled: int = 0  #: queues begun anew because their pull had stopped
    postponed: int = 0  #: attempts to begin a queue whose start could not be worked out
    overdue: int = 0  #: queues begun while somebody else still held them, after the longest wait
    #: Messages whose handler outlived the loss of their queue: they come a second time.
    abandoned: int = 0


@dataclass(slots=True)
class Ownership:
    """What is owned and what is claimed; a queue is never both."""

    owned: dict[Queue, OwnedQueue] = field(default_factory=dict)
    claims: dict[Queue, QueueClaim] = field(default_factory=dict)
    counts: RebalanceCounts = field(default_factory=RebalanceCounts)
    #: Queues that are not owned, and that are being reset: how often at once (`resetting`).
    resets: Counter[Queue] = field(default_factory=Counter)

    def reset_begins(self, queue: Queue) -> None:
        self.resets[queue] += 1

    def reset_ended(self, queue: Queue) -> None:
        self.resets[queue] -= 1
        if not self.resets[queue]:
            del self.resets[queue]

    def of(self, topic: str) -> list[OwnedQueue]:
        """The owned queues of a topic, also those that are being given up."""
        return [owned for queue, owned in self.owned.items() if queue.topic == topic]

    def claims_of(self, topic: str) -> list[QueueClaim]:
        return [claim for queue, claim in self.claims.items() if queue.topic == topic]

    def running_info(self, progress: ProgressStore, clock: Clock) -> ConsumerRunningInfo:
        """What others are told when they ask (307). A queue is in it until it is given up.

        One that was claimed is, until the reset that it has met is put by: whoever has it next has
        to find that.
        """
        leaving = [
            queue for queue, owned in self.owned.items() if owned.is_draining or owned.is_dropped
        ]
        given_up = [
            queue for queue in self.resets if queue not in self.owned and queue not in self.claims
        ]
        properties = {CLAIMS: self.claims, LEAVING: [*leaving, *given_up]}
        held = {
            _wire(queue): _described(owned, progress.read(queue), clock)
            for queue, owned in self.owned.items()
        }
        for queue in given_up:
            held[_wire(queue)] = ProcessQueueInfo(
                commit_offset=_known(progress.read(queue)), is_dropped=True
            )
        return ConsumerRunningInfo(
            mq_table=held,
            properties={name: queues_text(queues) for name, queues in properties.items() if queues},
        )


def _wire(queue: Queue) -> MessageQueue:
    return MessageQueue(topic=queue.topic, broker_name=queue.broker, queue_id=queue.id)


def _described(owned: OwnedQueue, position: int | None, clock: Clock) -> ProcessQueueInfo:
    window = owned.window
    least, most = window.bounds or (0, 0)
    taken_least, taken_most = window.taken_bounds or (0, 0)
    lock = owned.lock
    times = _epoch_millis(clock, pull=owned.last_pull, consumed=owned.last_consumed)
    return ProcessQueueInfo(
        cached_msg_count=len(window),
        cached_msg_max_offset=most,
        cached_msg_min_offset=least,
        cached_msg_size_in_mib=window.size // _MIB,
        commit_offset=_known(position),
        is_dropped=owned.is_dropped,
        last_consume_timestamp=times["consumed"],
        last_pull_timestamp=times["pull"],
        locked=lock is not None and lock.is_held(clock.monotonic()),
        transaction_msg_count=window.taken_count,
        transaction_msg_max_offset=taken_most,
        transaction_msg_min_offset=taken_least,
    )


def _known(position: int | None) -> int:
    return -1 if position is None else position


def _epoch_millis(clock: Clock, **instants: float) -> Mapping[str, int]:
    """Instants of the clock that never goes back, as times of the day."""
    offset = clock.now() - clock.monotonic()
    return {name: milliseconds(instant + offset) for name, instant in instants.items()}


# How long reports may take: as long as they do, and once the consumer stops, a little.


class CommitDeadline:
    """Bounds reports once the consumer stops, also those that are on their way by then."""

    def __init__(self) -> None:
        self._within: float | None = None
        self._under_way: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def kept(self, broker: str) -> AsyncIterator[None]:
        """Raises `BrokerUnavailable` when a report to a broker takes too long."""
        try:
            async with asyncio.timeout(self._within) as timeout:
                self._under_way.add(timeout)
                try:
                    yield
                finally:
                    self._under_way.discard(timeout)
        except TimeoutError as error:
            reason = f"progress was not taken within {self._within:g} s"
            raise BrokerUnavailable(broker, reason) from error

    def begin(self, within: float) -> None:
        """Give every report so many seconds from now on."""
        self._within = within
        until = asyncio.get_running_loop().time() + within
        for timeout in self._under_way:
            if timeout.when() is None:
                timeout.reschedule(until)
