"""Keeps the queues of one consumer what its group's strategy says they are.

A round looks at every subscribed topic: its queues, its members, our share. Queues that are not in
the share any more are released, those that are new in it are claimed (`releasing`, `gaining`; why
that is safe, in `handover`). Rounds are at the start, every 20 s, 1 s after one that left something
undone or brokers at odds about who is there, and at once when there are news: members came or went,
a route or a subscription changed, a broker was connected to. Whatever cannot be found out leaves
the topic as it is.

Broadcasting takes every queue and asks nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from orbitmq.client.consumer.allocation import Averagely, Strategy, in_order, share
from orbitmq.client.consumer.assignmentnews import AssignmentListener, AssignmentNews
from orbitmq.client.consumer.gaining import Beginning, Gaining, View
from orbitmq.client.consumer.members import GroupMembers
from orbitmq.client.consumer.ownership import Ownership, RebalanceCounts
from orbitmq.client.consumer.rebalancesettings import RebalanceSettings
from orbitmq.client.consumer.refusals import Refusals, is_access_denied
from orbitmq.client.consumer.releasing import Draining, Releasing
from orbitmq.client.consumer.reporting import Reporting
from orbitmq.client.consumer.resetting import Resetting
from orbitmq.client.consumer.spells import Spells
from orbitmq.client.consumer.starting import ConsumeFrom, Starting
from orbitmq.client.consumer.survey import Survey
from orbitmq.client.consumer.unreported import Unreported
from orbitmq.client.errors import AccessDenied, BrokerRefused, GroupRefused
from orbitmq.client.names import is_retry_topic
from orbitmq.client.serving import NOT_MINE, NotMine
from orbitmq.errors import OrbitError
from orbitmq.wire.bodies.base import encode_body
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.membership import NotifyConsumerIdsChangedRequest
from orbitmq.wire.headers.stats import GetConsumerRunningInfoRequest

if TYPE_CHECKING:
    from orbitmq.client.consumer.locks import QueueLocks
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.engine import Engine
    from orbitmq.client.periodic import Periodic
    from orbitmq.client.queue import Queue
    from orbitmq.client.topicroute import TopicRoute
    from orbitmq.remoting.address import Address
    from orbitmq.remoting.connection import Connection
    from orbitmq.wire.bodies.stats import ConsumerRunningInfo
    from orbitmq.wire.command import Command

log = logging.getLogger(__name__)

#: Adds to what others are told when they ask what this consumer does.
Describe: TypeAlias = Callable[["ConsumerRunningInfo"], "ConsumerRunningInfo"]

_NOBODY = View((), ())
#: What the trouble of a member without a queue is about, and after how many seconds it is told:
#: before, somebody may be on the way in or out.
_NO_QUEUE: Final = "queues"
_IDLE: Final = 2.0


class Rebalancer:
    """Gains and releases the queues of one consumer. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        topics: Callable[[], Iterable[str]],
        *,
        progress: ProgressStore,
        puller: Beginning,
        consumption: Draining,
        strategy: Strategy | None = None,
        consume_from: ConsumeFrom = ConsumeFrom.LAST,
        is_broadcasting: bool = False,
        locks: QueueLocks | None = None,
        settings: RebalanceSettings | None = None,
        listener: AssignmentListener | None = None,
        describe: Describe | None = None,
        puts_start_by: bool = True,
        refusals: Refusals | None = None,
    ) -> None:
        """`topics` are those subscribed to now; with `locks` queues are consumed in order.

        `refusals` are shared with who pulls.

        `puts_start_by`: where a queue without progress is begun is its progress from then on.
        """
        self._engine = engine
        self._group = group
        self._topics = topics
        self._progress = progress
        self._strategy: Strategy = strategy or Averagely()
        self._settings = settings = settings or RebalanceSettings()
        self._locks = None if is_broadcasting else locks
        self._refusals = refusals or Refusals(group, engine.clock)
        self._describe = describe
        self._members = (
            None
            if is_broadcasting
            else GroupMembers(
                engine, group, answer_within=settings.answer, silence=settings.silence
            )
        )
        self._ownership = Ownership()
        self._news = AssignmentNews(engine, group, listener, self._assignment)
        starting = Starting(engine, progress, consume_from)
        self._unreported = Unreported(engine, group, progress, self._ownership, starting)
        self._gaining = Gaining(
            engine,
            group,
            self._ownership,
            members=self._members,
            starting=starting,
            progress=progress,
            unreported=self._unreported,
            puts_start_by=puts_start_by,
            puller=puller,
            strategy=self._strategy,
            locks=self._locks,
            settings=settings,
            on_gained=self._news.changed,
            look_again=self._other_members,
            refusals=self._refusals,
        )
        self._releasing = Releasing(
            engine,
            group,
            self._ownership,
            progress=progress,
            unreported=self._unreported,
            puller=puller,
            consumption=consumption,
            locks=self._locks,
            settings=settings,
            on_released=self._released,
        )
        if self._locks is not None:
            self._locks.on_lost = self._lock_lost
        self.reporting = Reporting(
            engine,
            group,
            progress,
            self._ownership.owned,
            interval=settings.persist,
            # Nobody looks into the file of a broadcasting consumer, which is written as a whole.
            when_idle=0.0 if is_broadcasting else settings.persist_idle,
        )
        self._resetting = Resetting(
            engine,
            group,
            self._ownership,
            progress=progress,
            unreported=self._unreported,
            gaining=self._gaining,
            releasing=self._releasing,
            reporting=self.reporting,
            is_own=self._is_own,
            is_locked=self._locks is not None,
        )
        self._spells = Spells(log)
        self._survey = Survey(
            engine, group, self._members, self._spells, return_grace=settings.return_grace
        )
        self._views: dict[str, View] = {}
        #: What was ours in the last round, by topic.
        self._shares: dict[str, set[Queue]] = {}
        self._tracked: set[str] = set()
        #: How often a topic was looked for in vain.
        self._missing: dict[str, int] = {}
        #: Since when members share all queues out and none is ours.
        self._idle_since: float | None = None
        self._is_stopping = False
        self._rounds: Periodic | None = None
        self._last_round = float("-inf")
        self._undo: list[Callable[[], None]] = []

    # ---- life

    async def start(self) -> None:
        """Be known to the brokers, and begin."""
        engine, settings = self._engine, self._settings
        self._undo = [
            engine.serve(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, self._ids_changed),
            engine.serve(RequestCode.GET_CONSUMER_RUNNING_INFO, self._asked),
            engine.routes.on_change(self._route_changed),
            engine.on_connected(self._connected),
        ]
        self._track(set(self._topics()))
        # Others must be able to find us before we look at them: see `handover`.
        await asyncio.gather(*(self._survey.queues(topic) for topic in self._tracked))
        await engine.heartbeat()
        if self._locks is not None:
            self._locks.start()
        self._rounds = engine.every(
            settings.interval, self._round, first=0.0, name=f"rebalance {self._group}"
        )
        self.reporting.start()
        self._unreported.start(settings.persist)

    async def stop(self, *, within: float | None = None) -> None:
        """Give everything up: handlers finish, progress is reported, locks are given back.

        Handlers that run longer than `within` (unless given, a hand-over) are not waited for; in
        order, their queues stay locked until the broker's lock lapses.
        """
        self._is_stopping = True
        if self._rounds is not None:
            self._rounds.stop()
        self._unreported.stop()
        self.reporting.stop()
        try:
            await self._gaining.stop()
            await self._releasing.release_all("the consumer stops", within=within)
            await self._resetting.settled()
            if self._locks is not None:
                self._locks.stop()
                await self._locks.release_all(but=self._releasing.left_busy)
        finally:
            if self._locks is not None:
                self._locks.stop()
            for undo in self._undo:
                undo()
            self._undo.clear()
            self._track(set())
            await self._news.stop()

    def wake(self) -> None:
        """Have a round soon: at once, unless the last one was just now."""
        if self._rounds is not None and not self._is_stopping:
            self._rounds.wake()

    # ---- what is wrong

    @property
    def obstacle(self) -> OrbitError | None:
        """Why none of the topics was ever consumed, if something is known to be in the way."""
        return self._survey.obstacle

    @property
    def denial(self) -> AccessDenied | None:
        """Why nothing can arrive until an account is changed, if that is so for every topic."""
        shares = {topic: self._shares.get(topic, ()) for topic in self._ordinary_topics()}
        return self._refusals.denial(shares, self._ownership.owned)

    @property
    def troubles(self) -> tuple[str, ...]:
        """What is wrong now, a sentence each; what pulls come to is not among it."""
        locks = () if self._locks is None else self._locks.troubles
        return (*self._spells.standing(), *self._gaining.troubles, *locks)

    # ---- what is owned

    @property
    def counts(self) -> RebalanceCounts:
        return self._ownership.counts

    @property
    def owned(self) -> Mapping[Queue, OwnedQueue]:
        """The owned queues, also those that are being given up."""
        return self._ownership.owned

    @property
    def claimed(self) -> frozenset[Queue]:
        """The queues that are ours by the strategy, and that we wait for."""
        return frozenset(self._ownership.claims)

    def rebuild(self, owned: OwnedQueue) -> None:
        """Begin a queue anew that was dropped, and whose progress is settled.

        Meanwhile it may have gone, and even have come back: then there is nothing to do.
        """
        if self._is_current(owned):
            self._releasing.release(owned, "it is begun anew", reports=False)

    def lock_lapsed(self, owned: OwnedQueue) -> None:
        """The lock of a queue is held no more: to be consumed again it has to be gained anew."""
        if self._is_current(owned):
            self._releasing.release(owned, "its lock has lapsed")

    def _is_current(self, owned: OwnedQueue) -> bool:
        return self._ownership.owned.get(owned.queue) is owned

    async def reset(self, offsets: Mapping[Queue, int]) -> None:
        """Go on from other offsets, as an administrator wants; what runs does not count.

        Offsets of queues that are not ours, and are not about to be, are left to those whose they
        are. Returns when the others are put by; raises when one could not be.
        """
        await self._resetting.reset(offsets)

    def _is_own(self, queue: Queue) -> bool:
        """Whether a queue is ours by the last round, and is to be claimed if it is not owned."""
        return not self._is_stopping and queue in self._shares.get(queue.topic, ())

    def running_info(self) -> ConsumerRunningInfo:
        """What others are told when they ask what this consumer does."""
        info = self._ownership.running_info(self._progress, self._engine.clock)
        return info if self._describe is None else self._describe(info)

    # ---- a round

    async def _round(self) -> float | None:
        clock, settings = self._engine.clock, self._settings
        early = self._last_round + settings.spacing - clock.monotonic()
        if early > 0:
            await asyncio.sleep(early)
        topics = set(self._topics())
        self._track(topics)
        self._release_others(topics)
        self.counts.rounds += 1
        # Topics share what is asked about members from here on.
        after = self._survey.asked
        pauses = await asyncio.gather(*(self._balance(topic, after) for topic in sorted(topics)))
        self._last_round = clock.monotonic()
        if self._is_idle():
            pauses.append(settings.retry)
        return min(pauses, default=settings.interval)

    async def _balance(self, topic: str, after: int) -> float:
        """Look at a topic; in how many seconds it should be looked at again."""
        settings = self._settings
        queues = await self._survey.queues(topic)
        if queues is None:
            self.counts.failed_rounds += 1
            # A topic that is made on demand comes soon after its first user, or not for long.
            times = self._missing[topic] = self._missing.get(topic, 0) + 1
            return self._ever_later(times)
        self._missing.pop(topic, None)
        try:
            before = self._views.get(topic, _NOBODY).members
            members = await self._survey.members(topic, before, after=after)
            if members is None:
                return settings.retry
            own = (
                tuple(queues)
                if self._members is None
                else share(self._strategy, queues, members, self._engine.client_id)
            )
        except OrbitError as error:
            self.counts.failed_rounds += 1
            if isinstance(error, BrokerRefused) and is_access_denied(error):
                error = AccessDenied(self._group, error)
                self._refusals.hidden(topic, error)
            self._survey.hindered(topic, error)
            if isinstance(error, GroupRefused | AccessDenied):
                # Told by the broker that refuses, not by topic.
                self._spells.forget(("share", topic))
            else:
                self._spells.trouble(
                    ("share", topic), "the share of %s stays as it is: %s", topic, error
                )
            return settings.retry
        self._spells.over(("share", topic))
        self._refusals.seen(topic)
        self._survey.succeeded(topic)
        if self._is_stopping or topic not in self._tracked:
            return settings.interval
        is_done = self._apply(topic, View(tuple(in_order(queues)), members), own)
        if not is_done:
            return settings.retry
        split = self._survey.split_rounds(topic)
        return self._ever_later(split) if split else settings.interval

    def _ever_later(self, times: int) -> float:
        """When to look the next time for what was looked for so often."""
        return min(self._settings.interval, self._settings.retry * (1 << min(times - 1, 10)))

    def _apply(self, topic: str, view: View, own: tuple[Queue, ...]) -> bool:
        """Release and claim; whether nothing is left to be done."""
        former = self._former(topic, view)
        if self._views.get(topic, _NOBODY).queues != view.queues:
            self._news.changed(topic)
        self._views[topic] = view
        share_now = self._shares[topic] = set(own)
        for owned in self._ownership.of(topic):
            if owned.queue not in share_now:
                self._releasing.release(owned, "it belongs to somebody else")
            elif self._is_stalled(owned):
                self.counts.stalled += 1
                self._releasing.release(owned, "its pull has stopped")
        missing = [queue for queue in own if queue not in self._ownership.owned]
        self._gaining.claim(topic, missing, view, former)
        return share_now == set(self._ownership.owned) & set(view.queues)

    def _former(self, topic: str, view: View) -> tuple[str, ...]:
        """The members before the latest change; before we joined, all but us."""
        before = self._views.get(topic)
        if before is None:
            return tuple(each for each in view.members if each != self._engine.client_id)
        return before.members

    def _is_stalled(self, owned: OwnedQueue) -> bool:
        idle = self._engine.clock.monotonic() - owned.last_pull
        return idle > self._settings.stalled and not self._releasing.is_going(owned)

    def _release_others(self, topics: set[str]) -> None:
        """Give up what is not subscribed to any more."""
        for owned in list(self._ownership.owned.values()):
            if owned.queue.topic not in topics:
                self._releasing.release(owned, "its topic is not subscribed to any more")
        for topic in {*self._views, *self._survey.topics} - topics:
            self._gaining.drop(topic)
            self._views.pop(topic, None)
            self._shares.pop(topic, None)
            self._survey.forget(topic)
            self._refusals.seen(topic)
            self._spells.forget(("share", topic))

    def _ordinary_topics(self) -> set[str]:
        """All but the group's own one, in which messages are only after some have failed."""
        return {topic for topic in self._topics() if not is_retry_topic(topic)}

    def _is_idle(self) -> bool:
        """Whether there is not a queue for this member; told when it has been so for a while."""
        topics = self._ordinary_topics()
        views = [self._views[topic] for topic in topics if topic in self._views]
        is_idle = (
            self._members is not None
            and len(views) == len(topics)
            and any(view.queues for view in views)
            and not any(self._shares[topic] for topic in topics)
        )
        now = self._engine.clock.monotonic()
        if not is_idle:
            self._idle_since = None
            self._spells.over(_NO_QUEUE)
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= _IDLE:
            queues = sum(len(view.queues) for view in views)
            members = max(len(view.members) for view in views)
            names = sorted(topics)
            self._spells.trouble(
                _NO_QUEUE,
                "group %s has no queue for this member: %d members share %d of %s; it waits until "
                "one of them leaves, or for more queues: orbitmq topic update %s --queues N",
                self._group,
                members,
                queues,
                ", ".join(names),
                names[0],
            )
        return is_idle and not self._spells.is_in_trouble(_NO_QUEUE)

    def _track(self, topics: set[str]) -> None:
        routes = self._engine.routes
        for topic in topics - self._tracked:
            routes.track(topic)
        for topic in self._tracked - topics:
            routes.untrack(topic)
        self._tracked = topics

    # ---- news

    def _ids_changed(self, _: Connection, request: Command) -> Command | NotMine | None:
        header = request.header(NotifyConsumerIdsChangedRequest)
        if header.consumer_group != self._group:
            return NOT_MINE
        self._survey.happened()
        self.wake()
        return None if request.is_one_way else request.answer(ResponseCode.SUCCESS)

    def _asked(self, _: Connection, request: Command) -> Command | NotMine:
        if request.header(GetConsumerRunningInfoRequest).consumer_group != self._group:
            return NOT_MINE
        return request.answer(ResponseCode.SUCCESS, body=encode_body(self.running_info()))

    def _route_changed(self, topic: str, _: TopicRoute) -> None:
        if topic in self._tracked:
            self.wake()

    def _other_members(self, topic: str) -> None:
        self._survey.happened(topic)
        self.wake()

    def _connected(self, where: Address) -> None:
        self._survey.connected(where)
        self.wake()
        self._unreported.wake()

    def _lock_lost(self, queue: Queue) -> None:
        owned = self._ownership.owned.get(queue)
        if owned is not None:
            self._releasing.release(owned, "its lock was lost")

    def _released(self, topic: str) -> None:
        self._news.changed(topic)
        self.wake()

    def _assignment(self, topic: str) -> tuple[tuple[Queue, ...], tuple[Queue, ...]]:
        own = in_order(owned.queue for owned in self._ownership.of(topic))
        return self._views.get(topic, _NOBODY).queues, tuple(own)
