"""Gaining queues: claim, wait until nobody else holds them, work out where they begin, begin.

The order of these steps is the guarantee. Progress is read after the former owner let go, and, in
orderly consumption, after the lock was taken; what was left in memory from an earlier ownership is
forgotten before, unless nobody could be told (`unreported`). Where a queue begins without progress
is put by before it is pulled. A step that fails leaves the claim as it is, and it is tried again; a
claim that was dropped meanwhile, because the queue went to somebody else, ends at the next step.

What is kept of a queue cannot be proven while only a slave of its broker is there. Then the queue
begins where the slave says, and what was kept is thrown away: whatever is done with the queue from
here on, by a seek or a reset as well, is not moved by it later.

A reset that comes while a queue is claimed may come after its progress was read. It is noted, and
the queue begins there, whatever was read (`resetting`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from orbitmq.client.consumer.handover import Inquiry
from orbitmq.client.consumer.owned import OwnedQueue
from orbitmq.client.consumer.ownership import Claim, Ownership
from orbitmq.client.consumer.spells import Spells
from orbitmq.client.errors import BrokerRefused, BrokerUnavailable
from orbitmq.client.topicroute import MASTER
from orbitmq.errors import OrbitError
from orbitmq.remoting.errors import ConnectFailed

if TYPE_CHECKING:
    from orbitmq.client.consumer.allocation import Strategy
    from orbitmq.client.consumer.locks import QueueLocks
    from orbitmq.client.consumer.members import GroupMembers
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.rebalancesettings import RebalanceSettings
    from orbitmq.client.consumer.refusals import Refusals
    from orbitmq.client.consumer.starting import Starting
    from orbitmq.client.consumer.unreported import Unreported
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue

log = logging.getLogger(__name__)

#: How much slower a question is repeated each time.
_SLOWER = 1.5
#: A lock that was refused is not asked for again sooner.
_LOCK_POLL = 0.1
_SLOWEST_LOCK_POLL = 0.5


class Beginning(Protocol):
    """Where messages of an owned queue come from."""

    def begin(self, owned: OwnedQueue) -> None: ...

    def end(self, owned: OwnedQueue) -> None: ...


@dataclass(frozen=True, slots=True)
class View:
    """A topic and its group as one round of rebalancing saw them."""

    queues: tuple[Queue, ...]
    members: tuple[str, ...]


@dataclass(slots=True)
class _Gain:
    """The claims of one topic on their way."""

    view: View
    #: None when nobody has to be asked.
    inquiry: Inquiry | None
    news: asyncio.Event
    #: How many questions had been sent when the members were looked at last.
    looked_after: int = 0
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class PendingReset:
    """Where a claimed queue is to begin, because its progress was reset."""

    offset: int
    is_followed: bool = False


class Gaining:
    """Turns claims into owned queues, topic by topic."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        ownership: Ownership,
        *,
        members: GroupMembers | None,
        starting: Starting,
        progress: ProgressStore,
        unreported: Unreported,
        puts_start_by: bool,
        puller: Beginning,
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
        self._gains: dict[str, _Gain] = {}
        self._resets: dict[Claim, PendingReset] = {}
        self._spells = Spells(log)

    def claim(
        self, topic: str, wanted: Iterable[Queue], view: View, former: tuple[str, ...] = ()
    ) -> None:
        """Claim exactly these queues of a topic; others that were claimed are so no longer."""
        wanted = list(wanted)
        claims = self._ownership.claims
        self._drop(topic, keep=set(wanted))
        now = self._engine.clock.monotonic()
        after = 0 if self._members is None else self._members.asked
        fresh = [queue for queue in wanted if queue not in claims]
        for queue in fresh:
            claims[queue] = Claim(queue, now, former, after)
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
            if gain.inquiry is not None:
                gain.inquiry.again()
            gain.news.set()

    def drop(self, topic: str) -> None:
        """Claim nothing of a topic any more."""
        self._drop(topic, keep=frozenset())

    @property
    def troubles(self) -> tuple[str, ...]:
        """What keeps queues from being begun; one stands for all, as they have it in common."""
        return self._spells.standing()[:1]

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
            self._spells.forget(claim.queue)
            self._resets.pop(claim, None)
            self._forget(claim.queue)
            if self._may_be_locked(claim):
                self._engine.spawn(self._give_back(claim), f"unlock {claim.queue}")

    def _forget(self, queue: Queue) -> None:
        """Keep no position of a queue that is not to be ours, unless a reset is to be put by."""
        ownership = self._ownership
        if not (queue in ownership.owned or queue in ownership.claims or queue in ownership.resets):
            self._progress.forget(queue)

    def _begin_gain(self, topic: str, view: View) -> _Gain:
        inquiry = None
        if self._members is not None and self._locks is None:
            inquiry = Inquiry(
                self._members,
                topic,
                self._strategy,
                self._settings,
                self._engine.clock,
                me=self._engine.client_id,
                route_refresh=self._engine.settings.route_refresh,
            )
        gain = _Gain(view, inquiry, asyncio.Event())
        gain.task = self._engine.spawn(
            self._gain(topic, gain), f"gain queues of {topic} for {self._group}"
        )
        return gain

    async def _gain(self, topic: str, gain: _Gain) -> None:
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
                self._spells.trouble(topic, "queues of %s cannot be begun: %s", topic, error)
                await self._wait(gain, self._settings.retry)
                continue
            self._spells.over(topic)
            await asyncio.gather(*(self._begin(claim) for claim in free))
            if len(free) == len(due):
                continue
            has_news = await self._wait(gain, pause)
            pause = first if has_news else min(pause * _SLOWER, slowest)

    def _pace(self) -> tuple[float, float]:
        if self._locks is not None:
            return _LOCK_POLL, _SLOWEST_LOCK_POLL
        return self._settings.first_poll, self._settings.slowest_poll

    async def _wait(self, gain: _Gain, pause: float) -> bool:
        """Wait for news, or a while; whether there are news."""
        try:
            async with asyncio.timeout(pause):
                await gain.news.wait()
        except TimeoutError:
            return False
        return True

    async def _free(self, topic: str, gain: _Gain, claims: list[Claim]) -> list[Claim]:
        """The claims that can be begun now."""
        if self._locks is not None:
            return await self._locked(self._locks, claims)
        if self._members is None or gain.inquiry is None:
            return claims
        view = gain.view
        if not await self._is_as_seen(self._members, topic, gain, claims):
            gain.inquiry.again()
            self._look_again(topic)
            return []
        others = [member for member in view.members if member != self._engine.client_id]
        free, overdue = await gain.inquiry.free(claims, others, view.queues)
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
        self, group_members: GroupMembers, topic: str, gain: _Gain, claims: list[Claim]
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

    async def _locked(self, locks: QueueLocks, claims: list[Claim]) -> list[Claim]:
        granted = await locks.acquire(claim.queue for claim in claims)
        for claim in claims:
            claim.lock = granted.get(claim.queue)
        return [claim for claim in claims if claim.lock is not None]

    async def _begin(self, claim: Claim) -> None:
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
                self._spells.forget(queue)
            else:
                self._spells.trouble(queue, "where %s begins cannot be said: %s", queue, error)
            claim.not_before = self._engine.clock.monotonic() + self._settings.retry
            return
        self._spells.over(queue)
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

    def _is_current(self, claim: Claim) -> bool:
        return self._ownership.claims.get(claim.queue) is claim

    async def _give_back(self, claim: Claim) -> None:
        """A claim that was dropped half-way keeps nothing."""
        is_locked, claim.lock = self._may_be_locked(claim), None
        if self._locks is not None and is_locked:
            await self._locks.release([claim.queue])

    def _may_be_locked(self, claim: Claim) -> bool:
        """Whether the broker may keep a queue for this claim, and for no other of ours."""
        queue, locks = claim.queue, self._locks
        if locks is None or queue in self._ownership.owned:
            return False
        if claim.lock is not None:
            return locks.get(queue) is claim.lock
        return locks.may_be_held(queue) and queue not in self._ownership.claims
