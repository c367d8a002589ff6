"""Hand-over: how a queue passes from one member of a group to the next.

A member that loses a queue keeps it until its handler calls have ended and its offset is committed,
and reports it as held until then. A member that gains a queue first claims it, then asks all other
members what they hold or claim, and begins when none of them names the queue. So two members never
both begin a queue, although each computes its share by itself.

Trap: the claim must be visible before the members are read again, and the offset must be fetched
after the former owner let go. `docs/internals/handover.md` explains the protocol, its time limits
and what differs for Java members.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from orbitmq.client.consumer.locks import BROKER_LOCK_LIFE
from orbitmq.client.consumer.members import CLAIMS, LEAVING, Holdings, queues_text
from orbitmq.client.consumer.progress import BrokerProgress
from orbitmq.client.consumer.strategies import AllocationError, Strategy, share
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.clock import milliseconds
from orbitmq.errors import BrokerRefused, OrbitError
from orbitmq.logonce import LogOncePerOutage
from orbitmq.remoting.settings import RemotingError
from orbitmq.wire.bodies import ConsumerRunningInfo, MessageQueue, ProcessQueueInfo

if TYPE_CHECKING:
    from orbitmq.client.consumer.locks import QueueLock, QueueLocks
    from orbitmq.client.consumer.members import GroupMembers
    from orbitmq.client.consumer.progress import ProgressStore, StartOffsets
    from orbitmq.client.consumer.pull import Refusals
    from orbitmq.client.consumer.settings import RebalanceSettings
    from orbitmq.client.engine import Engine
    from orbitmq.client.routes import Queue
    from orbitmq.clock import Clock


log = logging.getLogger(__name__)

_MIB = 1024 * 1024

#: Each repetition of an ownership query is this much slower than the one before.
_SLOWER = 1.5
#: Pauses between attempts to take a lock that was refused.
_LOCK_POLL = 0.1
_SLOWEST_LOCK_POLL = 0.5
#: Added to the longest hand-over: the time of the last commit and of the next query.
_ALLOWANCE = 1.0
#: How long a claim waits when its queue was a Java member's, which may not list it.
_UNLISTED = 0.3
#: The interval of ownership queries: at first, and later.
_QUERY = 0.02
_SLOWEST_QUERY = 0.2
#: After a release that took longer, another member may have taken the queue without waiting.
_LONG = 1.0
#: Pause between attempts to commit.
_AGAIN = 0.1
#: The longest time of a stop beside its handlers: two commits and what belongs to them.
STOP_LIMIT = 12.0


class QueueSource(Protocol):
    """Where messages of an owned queue come from."""

    def begin(self, owned: OwnedQueue) -> None: ...

    def end(self, owned: OwnedQueue) -> None: ...


class Draining(Protocol):
    """The part that calls handlers."""

    #: Whether a queue must not begin again while a handler works on it.
    is_in_order: bool

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        """Begin nothing new for a queue and wait for running calls; True when none runs."""

    def in_hand(self, owned: OwnedQueue) -> int:
        """Messages of a queue that were begun and are not settled."""


# ---- what a consumer owns and claims


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """The queues of a topic and the members of its group in one round of rebalancing."""

    queues: tuple[Queue, ...]
    members: tuple[str, ...]


@dataclass(slots=True, eq=False)
class QueueClaim:
    """A queue that the strategy gives to this member and that is not begun yet."""

    queue: Queue
    since: float  #: by the clock's `monotonic`
    #: The members before the change that made the queue ours.
    former: tuple[str, ...] = ()
    #: The number of queries sent before the claim: only answers to later ones count.
    after: int = 0
    #: Whether the members were read again from all brokers since the claim.
    is_looked_at: bool = False
    lock: QueueLock | None = None
    #: The start offset could not be read; not tried again before this time.
    not_before: float = float("-inf")


@dataclass(slots=True)
class RebalanceCounts:
    """What has happened to the queues of a consumer since it was made."""

    rounds: int = 0
    failed_rounds: int = 0  #: a topic whose queues or members could not be read
    gained: int = 0
    released: int = 0
    stalled: int = 0  #: queues that began again because their pull had stopped
    postponed: int = 0  #: attempts to begin a queue whose start offset could not be read
    overdue: int = 0  #: queues begun while another member still held them, after the longest wait
    #: Messages whose handler outlived the loss of their queue: they are delivered a second time.
    abandoned: int = 0


@dataclass(slots=True)
class OwnedQueues:
    """What is owned and what is claimed; a queue is never both."""

    owned: dict[Queue, OwnedQueue] = field(default_factory=dict)
    claims: dict[Queue, QueueClaim] = field(default_factory=dict)
    counts: RebalanceCounts = field(default_factory=RebalanceCounts)
    #: Commits of offsets that an administrator has set. Until they end, the queue is not claimed.
    resets: dict[Queue, asyncio.Task[OrbitError | None]] = field(default_factory=dict)

    def of(self, topic: str) -> list[OwnedQueue]:
        """The owned queues of a topic, those being released included."""
        return [owned for queue, owned in self.owned.items() if queue.topic == topic]

    def claims_of(self, topic: str) -> list[QueueClaim]:
        return [claim for queue, claim in self.claims.items() if queue.topic == topic]

    def running_info(self, progress: ProgressStore, clock: Clock) -> ConsumerRunningInfo:
        """The answer to an ownership query (307). A queue is in it until it is released.

        A queue that is being reset is in it as well: the next owner must find the new offset.
        """
        resetting = [queue for queue in self.resets if queue not in self.owned]
        leaving = [
            queue for queue, owned in self.owned.items() if owned.is_draining or owned.is_dropped
        ]
        properties = {CLAIMS: self.claims, LEAVING: [*leaving, *resetting]}
        held = {
            _wire(queue): _described(owned, progress.read(queue), clock)
            for queue, owned in self.owned.items()
        }
        for queue in resetting:
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
    # From the monotonic clock to the time of day.
    shift = clock.now() - clock.monotonic()
    return ProcessQueueInfo(
        cached_msg_count=len(window),
        cached_msg_max_offset=most,
        cached_msg_min_offset=least,
        cached_msg_size_in_mib=window.size // _MIB,
        commit_offset=_known(position),
        is_dropped=owned.is_dropped,
        last_consume_timestamp=milliseconds(owned.last_consumed + shift),
        last_pull_timestamp=milliseconds(owned.last_pull + shift),
        locked=lock is not None and lock.is_held(clock.monotonic()),
        transaction_msg_count=window.taken_count,
        transaction_msg_max_offset=taken_most,
        transaction_msg_min_offset=taken_least,
    )


def _known(position: int | None) -> int:
    return -1 if position is None else position


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverParts:
    """What acquisition, release and resets of one consumer share."""

    engine: Engine
    group: str
    ownership: OwnedQueues
    progress: ProgressStore
    starting: StartOffsets
    puller: QueueSource
    locks: QueueLocks | None  #: of orderly consumption
    settings: RebalanceSettings


# ---- acquisition


@dataclass(slots=True)
class _TopicAcquisition:
    """The claims of one topic under way."""

    view: TopicSnapshot
    #: None when no member has to be asked.
    query: OwnershipQuery | None
    news: asyncio.Event
    #: The number of queries sent before the members were last read.
    looked_after: int = 0
    task: asyncio.Task[None] | None = None


class QueueAcquisition:
    """Turns claims into owned queues, topic by topic.

    The order of the steps is the guarantee. The offset is fetched after the former owner let go
    and, in orderly consumption, after the lock was granted. A start offset without progress is
    committed before the first pull. A step that fails is tried again; a claim that was dropped
    ends at its next step.
    """

    def __init__(
        self,
        parts: HandoverParts,
        *,
        members: GroupMembers | None,
        strategy: Strategy,
        commits_start: bool,
        on_gained: Callable[[str], None],
        look_again: Callable[[str], None],
        refusals: Refusals,
    ) -> None:
        """Broadcasting has no `members`.

        `commits_start` is false when the application alone decides what is committed.
        """
        self._parts = parts
        self._engine = parts.engine
        self._group = parts.group
        self._ownership = parts.ownership
        self._members = members
        self._strategy = strategy
        self._commits_start = commits_start
        self._on_gained = on_gained
        self._look_again = look_again
        self._refusals = refusals
        self._gains: dict[str, _TopicAcquisition] = {}
        self._outages = LogOncePerOutage(log)

    def claim(
        self, topic: str, wanted: Iterable[Queue], view: TopicSnapshot, former: tuple[str, ...] = ()
    ) -> None:
        """Claim exactly these queues of a topic; other claims of the topic are dropped."""
        wanted = list(wanted)
        claims = self._ownership.claims
        self.drop(topic, keep=set(wanted))
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

    def drop(self, topic: str, *, keep: Collection[Queue] = ()) -> None:
        """Drop the claims of a topic."""
        for claim in self._ownership.claims_of(topic):
            if claim.queue not in keep:
                self._drop_claim(claim)

    def drop_claim(self, queue: Queue) -> None:
        """Drop the claim of a queue, if there is one."""
        if (claim := self._ownership.claims.get(queue)) is not None:
            self._drop_claim(claim)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why queues cannot begin; the first stands for all, as they usually share the reason."""
        return self._outages.current()[:1]

    async def stop(self) -> None:
        """Drop all claims and give back their locks."""
        self._ownership.claims.clear()
        tasks = [gain.task for gain in self._gains.values() if gain.task is not None]
        self._gains.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _drop_claim(self, claim: QueueClaim) -> None:
        del self._ownership.claims[claim.queue]
        self._refusals.given_up(claim.queue)
        self._outages.forget(claim.queue)
        self._forget(claim.queue)
        if self._may_be_locked(claim):
            self._engine.spawn(self._give_back(claim), f"unlock {claim.queue}")

    def _forget(self, queue: Queue) -> None:
        """Forget the position of a queue that is not ours, unless a reset is being committed."""
        ownership = self._ownership
        if not (queue in ownership.owned or queue in ownership.claims or queue in ownership.resets):
            self._parts.progress.forget(queue)

    def _begin_gain(self, topic: str, view: TopicSnapshot) -> _TopicAcquisition:
        query = None
        if self._members is not None and self._parts.locks is None:
            query = OwnershipQuery(
                self._members,
                topic,
                self._strategy,
                self._parts.settings,
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
        first, slowest = _QUERY, _SLOWEST_QUERY
        if self._parts.locks is not None:
            first, slowest = _LOCK_POLL, _SLOWEST_LOCK_POLL
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
                await self._wait(gain, self._parts.settings.retry)
                continue
            self._outages.recovered(topic)
            await asyncio.gather(*(self._begin(claim) for claim in free))
            if len(free) == len(due):
                continue
            has_news = await self._wait(gain, pause)
            pause = first if has_news else min(pause * _SLOWER, slowest)

    async def _wait(self, gain: _TopicAcquisition, pause: float) -> bool:
        """Wait for news, at most `pause`; whether there are news."""
        try:
            async with asyncio.timeout(pause):
                await gain.news.wait()
        except TimeoutError:
            return False
        return True

    async def _free(
        self, topic: str, gain: _TopicAcquisition, claims: list[QueueClaim]
    ) -> list[QueueClaim]:
        """The claims that can begin now."""
        if self._parts.locks is not None:
            return await self._locked(self._parts.locks, claims)
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
                "another member has not released %s in time; group %s starts it here",
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
        """Whether the members are still those of the snapshot.

        The first look after a claim asks all brokers. Later ones ask one broker, which is enough
        when it lists what all have listed.
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
        """Begin a queue if it is still claimed and its start offset can be read."""
        queue = claim.queue
        if not self._is_current(claim):
            await self._give_back(claim)
            return
        # What was left in memory from an earlier ownership does not count.
        self._parts.progress.forget(queue)
        try:
            if self._commits_start:
                offset = await self._parts.starting.begin(queue, lambda: self._is_current(claim))
            else:
                offset = await self._parts.starting.offset(queue)
        except OrbitError as error:
            self._postpone(claim, error)
            return
        self._outages.recovered(queue)
        self._refusals.given_up(queue)  # its pulls report refusals from here on
        if not self._is_current(claim):
            self._forget(queue)
            await self._give_back(claim)
            return
        owned = OwnedQueue(queue, offset, now=self._engine.clock.monotonic(), lock=claim.lock)
        # One step: a query sees the claim or the owner, never neither.
        del self._ownership.claims[queue]
        self._ownership.owned[queue] = owned
        self._ownership.counts.gained += 1
        log.info(
            "queue gained: %s by group %s, from offset %d",
            queue,
            self._group,
            offset,
            extra={"group": self._group, "queue": str(queue), "offset": offset},
        )
        self._parts.puller.begin(owned)
        self._on_gained(queue.topic)

    def _postpone(self, claim: QueueClaim, error: OrbitError) -> None:
        queue = claim.queue
        self._ownership.counts.postponed += 1
        if isinstance(error, BrokerRefused) and self._refusals.refused(queue, error):
            self._outages.forget(queue)
        else:
            self._outages.failed(queue, "where %s begins cannot be read: %s", queue, error)
        claim.not_before = self._engine.clock.monotonic() + self._parts.settings.retry

    def _is_current(self, claim: QueueClaim) -> bool:
        return self._ownership.claims.get(claim.queue) is claim

    async def _give_back(self, claim: QueueClaim) -> None:
        """Give back the lock of a claim that was dropped."""
        is_locked, claim.lock = self._may_be_locked(claim), None
        if self._parts.locks is not None and is_locked:
            await self._parts.locks.release([claim.queue])

    def _may_be_locked(self, claim: QueueClaim) -> bool:
        """Whether the broker may keep a lock for this claim and for no other of ours."""
        queue, locks = claim.queue, self._parts.locks
        if locks is None or queue in self._ownership.owned:
            return False
        if claim.lock is not None:
            return locks.get(queue) is claim.lock
        return locks.may_be_held(queue) and queue not in self._ownership.claims


@dataclass(frozen=True, slots=True)
class _LastAnswer:
    """What a member last answered about the queues that were claimed then."""

    at: float
    held: frozenset[Queue]
    claimed: frozenset[Queue]
    #: Queues that it is releasing, and when it first reported that.
    leaving: dict[Queue, float]


class OwnershipQuery:
    """Asks the other members what they hold, until none of them stands against a claim.

    A member that holds and claims nothing of the claimed queues is not asked again. If one of them
    becomes its own later, that member asks us.
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
        """`me` is the own client id; `route_refresh` is the interval at which routes are read."""
        self._members = members
        self._topic = topic
        self._strategy = strategy
        self._settings = settings
        self._clock = clock
        self._me = me
        #: A member that reads routes as seldom as we do knows the queues by then.
        self._heard = 2 * route_refresh
        self._said: dict[str, _LastAnswer] = {}
        #: The number of queries sent when all members concerned had last answered.
        self._asked_after = 0
        self._cleared: set[str] = set()
        #: Whether a member is a Java push consumer, as far as that is known.
        self._is_java: dict[str, bool] = {}
        #: When members that did not answer may be asked again.
        self._silent_until: dict[str, float] = {}
        self._generation = 0

    def again(self) -> None:
        """There are new claims or new members: all members are asked again."""
        self._cleared.clear()
        self._generation += 1

    async def free(
        self, claims: Iterable[QueueClaim], others: Iterable[str], queues: Iterable[Queue]
    ) -> tuple[list[QueueClaim], list[QueueClaim]]:
        """The claims without an objection, and those that have waited for long enough.

        `others` are the other members, `queues` all of the topic.
        """
        generation, others = self._generation, tuple(others)
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
            has_objection = wanted & (holdings.held | holdings.claimed)
            if not has_objection and generation == self._generation:
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
        """The longest time that the release of a queue takes."""
        return self._settings.handover + _ALLOWANCE

    def _note(self, member: str, holdings: Holdings, wanted: set[Queue]) -> None:
        now = self._clock.monotonic()
        before = self._said[member].leaving if member in self._said else {}
        leaving = {queue: before.get(queue, now) for queue in holdings.leaving & wanted}
        self._said[member] = _LastAnswer(
            now, holdings.held & wanted, holdings.claimed & wanted, leaving
        )

    def _held_until(self, claim: QueueClaim, members: list[str]) -> Iterator[float]:
        """The deadlines for members that have just reported the queue as theirs."""
        for member in members:
            said = self._said[member]
            if claim.queue in said.leaving:
                yield max(claim.since, said.leaving[claim.queue]) + self._patience
            elif claim.queue in said.claimed and self._me < member:
                # Of two that claim, the smaller client id begins when they do not agree in time.
                yield claim.since + self._patience
            elif claim.queue in said.held | said.claimed:
                # A Java member may name a queue that it has released.
                longest = 0.0 if self._is_java.get(member) else self._settings.longest_wait
                yield claim.since + max(longest, self._heard, self._patience)

    def _last_held_until(self, claim: QueueClaim, silent: list[str]) -> Iterator[float]:
        """The deadlines for silent members that held the queue in their last answer."""
        for said in map(self._said.get, silent):
            if said is not None and claim.queue in said.held | said.claimed:
                since = said.leaving.get(claim.queue, said.at)
                yield max(claim.since, since) + self._patience

    def _is_left_alone(self, member: str) -> bool:
        return self._clock.monotonic() < self._silent_until.get(member, 0.0)

    async def _find_java(self, members: list[str], after: int) -> None:
        """Find out which members are Java's; unknown ones are asked like our own."""
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
            log.debug("%s does not report what it holds: %s", member, error)
            return None

    def _may_be_held(
        self, claim: QueueClaim, silent: list[str], queues: Iterable[Queue], waited: float
    ) -> bool:
        """Whether the claim has to wait for a member that does not answer."""
        if not silent:
            return False
        if waited < self._settings.answer:
            return True
        if not self._members.may_ask:
            # Otherwise each change of members would take the longest time.
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


# ---- release


class QueueRelease:
    """Releases queues, each in a task of its own: drain, commit, give the lock back, let go.

    Other members wait as long as the queue is among the owned ones, so every step has a time limit.
    The exception is orderly consumption, in which the lock stays while a handler runs.

    The offset is committed twice: immediately, for members that do not wait (Apache's), and when
    the last handler has ended. Before a late second commit the broker is asked, so that the commit
    of another owner is not overwritten. What cannot be committed is dropped: its messages are
    delivered again.
    """

    def __init__(
        self,
        parts: HandoverParts,
        *,
        consumption: Draining,
        on_released: Callable[[str], None],
    ) -> None:
        self._parts = parts
        self._engine = parts.engine
        self._group = parts.group
        self._ownership = parts.ownership
        self._consumption = consumption
        self._is_in_order = parts.locks is not None or consumption.is_in_order
        self._on_released = on_released
        self._is_stopping = False
        self._patience = parts.settings.handover
        self._tasks: dict[OwnedQueue, asyncio.Task[None]] = {}
        #: Queues that a stop released while a handler worked on them.
        self.left_busy: set[Queue] = set()

    def is_going(self, owned: OwnedQueue) -> bool:
        """Whether a queue is being released."""
        return owned in self._tasks

    def release(self, owned: OwnedQueue, why: str, *, commits: bool = True) -> asyncio.Task[None]:
        """Release a queue; without `commits` its offset was settled already."""
        task = self._tasks.get(owned)
        if task is None:
            owned.is_draining = True
            self._parts.puller.end(owned)
            task = self._engine.spawn(
                self._release(owned, why, commits=commits), f"release {owned.queue}"
            )
            self._tasks[owned] = task
            task.add_done_callback(lambda _: self._tasks.pop(owned, None))
        return task

    async def release_all(self, why: str, *, within: float | None = None) -> None:
        """Release everything; handlers that run longer than `within` (`handover`) are left.

        Takes about as long as the handlers, and at most `STOP_LIMIT` longer, whatever brokers do.
        """
        self._is_stopping = True
        self._patience = self._parts.settings.handover if within is None else within
        all_owned = list(self._ownership.owned.values())
        tasks = [self.release(owned, why) for owned in all_owned]
        try:
            async with asyncio.timeout(self._patience + STOP_LIMIT):
                await asyncio.gather(*tasks, return_exceptions=True)
        except TimeoutError:
            log.warning(
                "not all queues of group %s could be released gracefully; messages may be "
                "delivered again",
                self._group,
                extra={"group": self._group},
            )
        self.left_busy.update(owned.queue for owned in all_owned if owned.running)

    async def _release(self, owned: OwnedQueue, why: str, *, commits: bool) -> None:
        queue = owned.queue
        began = self._engine.clock.monotonic()
        is_idle: bool | None = None
        error: OrbitError | None = None
        try:
            # Dropped for an illegal offset: what runs does not count, and is not waited for.
            if owned.is_dropped and not self._is_in_order:
                is_idle = True
            else:
                early = None
                if commits:
                    if self._is_stopping and isinstance(self._parts.progress, BrokerProgress):
                        # No later commit corrects what a former owner has set back.
                        self._parts.progress.doubt(queue)
                    early = asyncio.create_task(self._commit(owned), name=f"commit {queue}")
                try:
                    is_idle = await self._drain(owned)
                finally:
                    error = None if early is None else await early
            owned.drop()
            if not is_idle:
                self._ownership.counts.abandoned += self._consumption.in_hand(owned)
            if commits:
                await self._commit_last(owned, error, began)
        finally:
            # Whatever failed: a queue that is not pulled must not look owned, or stay locked.
            owned.drop()
            try:
                if (locks := self._parts.locks) is not None:
                    await self._reset_committed(queue)
                    was_idle = not owned.running if is_idle is None else is_idle
                    await self._unlock(locks, owned, is_idle=was_idle)
            finally:
                self._let_go(owned)
        log.info(
            "queue released: %s by group %s, %s",
            queue,
            self._group,
            why,
            extra={"group": self._group, "queue": str(queue)},
        )

    async def _drain(self, owned: OwnedQueue) -> bool:
        """Wait for running handlers; whether all have ended."""
        while not await self._consumption.drain(owned, self._patience):
            if not self._is_in_order or self._is_stopping:
                return False
            log.info(
                "a handler of group %s still runs on %s, which is being released",
                self._group,
                owned.queue,
                extra={"group": self._group, "queue": str(owned.queue)},
            )
        return True

    async def _reset_committed(self, queue: Queue) -> None:
        """Wait for a reset, as members that only look at locks must find its offset."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._parts.settings.handover):
                while (reset := self._ownership.resets.get(queue)) is not None:
                    await asyncio.wait([reset])

    def _let_go(self, owned: OwnedQueue) -> None:
        queue = owned.queue
        try:
            if self._ownership.owned.get(queue) is owned:
                del self._ownership.owned[queue]
                self._ownership.counts.released += 1
                if queue not in self._ownership.resets:
                    self._parts.progress.forget(queue)
        finally:
            self._on_released(queue.topic)

    async def _unlock(self, locks: QueueLocks, owned: OwnedQueue, *, is_idle: bool) -> None:
        """Give the lock of a queue back, unless a handler still runs under it."""
        if is_idle:
            # The lock of this ownership only: the queue may be ours again under another one.
            if locks.get(owned.queue) is owned.lock:
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

    # ---- commits

    async def _commit_last(self, owned: OwnedQueue, error: OrbitError | None, began: float) -> None:
        """Commit the final offset, as long as the next owner waits; `error` is the last one.

        After an outage of the broker nothing is committed: it may have lost messages and given
        their offsets to others, which a commit would skip.
        """
        monotonic = self._engine.clock.monotonic
        until = monotonic() + self._parts.settings.handover
        while not (owned.is_reset or _is_outage(error)):
            has_lapsed = owned.lock is not None and not owned.lock.is_held(monotonic())
            is_late = has_lapsed or monotonic() - began > _LONG
            error = await self._commit(owned, is_late=is_late)
            if error is None:
                return
            if self._is_stopping or monotonic() >= until:
                break
            await asyncio.sleep(_AGAIN)
        if error is not None and not owned.is_reset:
            log.warning(
                "the offset of group %s in %s could not be committed, its messages are delivered "
                "again: %s",
                self._group,
                owned.queue,
                error,
                extra={"group": self._group, "queue": str(owned.queue)},
            )

    async def _commit(self, owned: OwnedQueue, *, is_late: bool = False) -> OrbitError | None:
        """Commit the position of a queue; the error that prevented it.

        If it `is_late`, not over a greater offset, which another owner has committed.
        """
        queue, progress = owned.queue, self._parts.progress
        try:
            position = progress.read(queue)
            if is_late and position is not None:
                await progress.fetch(queue)
                progress.update(queue, position)
            await progress.persist([queue])
        except OrbitError as error:
            return error
        return None


def _is_outage(error: OrbitError | None) -> bool:
    return isinstance(error, RemotingError | BrokerUnavailable)
