"""Rebalancing: keeps the queues of one consumer equal to its share by the group's strategy.

A round reads, for every subscribed topic, its queues and the members of the group, and computes the
own share. Queues outside of the share are released, new ones are claimed (see `handover`). A round
runs at the start, every 20 s, 1 s after one that could not finish, and immediately after an event:
members joined or left, a route or a subscription changed, a broker was connected to.

What cannot be read leaves the topic as it is. Broadcasting takes every queue without asking.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias

from orbitmq.client.consumer.handover import (
    Draining,
    HandoverParts,
    OwnedQueues,
    QueueAcquisition,
    QueueRelease,
    QueueSource,
    RebalanceCounts,
    TopicSnapshot,
)
from orbitmq.client.consumer.members import GroupMembers, Listing
from orbitmq.client.consumer.progress import OffsetCommitter, StartOffsets
from orbitmq.client.consumer.pull import Refusals, is_access_denied
from orbitmq.client.consumer.resets import OffsetResets
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.consumer.strategies import Averagely, Strategy, in_order, share
from orbitmq.client.engine import NOT_MINE, NotMine
from orbitmq.client.errors import GroupRefused, NoNameServer, NotANameServer
from orbitmq.client.routes import Queue, similar_topic
from orbitmq.errors import AccessDenied, BrokerRefused, NoRoute, OrbitError
from orbitmq.logonce import LogOncePerOutage
from orbitmq.names import is_retry_topic
from orbitmq.parsing import Position
from orbitmq.remoting.settings import parse_address
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import GetConsumerRunningInfoRequest, NotifyConsumerIdsChangedRequest
from orbitmq.wire.javajson import encode_body

if TYPE_CHECKING:
    from orbitmq.client.consumer.locks import QueueLocks
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.window import OwnedQueue
    from orbitmq.client.engine import Engine, Periodic
    from orbitmq.client.routes import TopicRoute
    from orbitmq.remoting.connection import Connection
    from orbitmq.remoting.settings import Address
    from orbitmq.wire.bodies import ConsumerRunningInfo
    from orbitmq.wire.command import Command


log = logging.getLogger(__name__)

_EMPTY = TopicSnapshot((), ())
#: The subject of the warning about a member without a queue, and its delay in seconds: during a
#: change of members the state is normal.
_NO_QUEUE: Final = "queues"
_IDLE: Final = 2.0


class Rebalancer:
    """Acquires and releases the queues of one consumer. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        topics: Callable[[], Iterable[str]],
        *,
        progress: ProgressStore,
        puller: QueueSource,
        consumption: Draining,
        strategy: Strategy | None = None,
        consume_from: Position = Position.LATEST,
        is_broadcasting: bool = False,
        locks: QueueLocks | None = None,
        settings: RebalanceSettings | None = None,
        listener: AssignmentListener | None = None,
        commits_start: bool = True,
        refusals: Refusals | None = None,
    ) -> None:
        """`topics` returns the topics subscribed to now; orderly consumption passes `locks`.

        `refusals` are shared with the puller. With `commits_start` the start offset of a queue
        without progress is committed.
        """
        self._engine = engine
        self._group = group
        self._topics = topics
        self._progress = progress
        self._strategy: Strategy = strategy or Averagely()
        self._settings = settings = settings or RebalanceSettings()
        self._locks = None if is_broadcasting else locks
        self._refusals = refusals or Refusals(group, engine.clock)
        self._members = (
            None
            if is_broadcasting
            else GroupMembers(
                engine, group, answer_within=settings.answer, silence=settings.silence
            )
        )
        self._ownership = OwnedQueues()
        self._news = AssignmentNotifier(engine, group, listener, self._assignment)
        parts = HandoverParts(
            engine=engine,
            group=group,
            ownership=self._ownership,
            progress=progress,
            starting=StartOffsets(engine, progress, consume_from),
            puller=puller,
            locks=self._locks,
            settings=settings,
        )
        self._acquisition = QueueAcquisition(
            parts,
            members=self._members,
            strategy=self._strategy,
            commits_start=commits_start,
            on_gained=self._news.changed,
            look_again=self._other_members,
            refusals=self._refusals,
        )
        self._releases = QueueRelease(parts, consumption=consumption, on_released=self._released)
        if self._locks is not None:
            self._locks.on_lost = self._lock_lost
        self.committer = OffsetCommitter(
            engine,
            group,
            progress,
            self._ownership.owned,
            interval=settings.persist,
            # The file of a broadcasting consumer has no other reader, and is written as a whole.
            when_idle=0.0 if is_broadcasting else settings.persist_idle,
        )
        self._resetting = OffsetResets(
            parts,
            acquisition=self._acquisition,
            releases=self._releases,
            committer=self.committer,
            is_own=self._is_own,
            on_committed=self.wake,
        )
        self._outages = LogOncePerOutage(log)
        self._group_view = GroupView(
            engine, group, self._members, self._outages, return_grace=settings.return_grace
        )
        self._views: dict[str, TopicSnapshot] = {}
        #: The own queues of the last round, by topic.
        self._shares: dict[str, set[Queue]] = {}
        self._tracked: set[str] = set()
        #: How often the route of a topic was missing, in a row.
        self._missing: dict[str, int] = {}
        #: Since when all queues belong to other members.
        self._idle_since: float | None = None
        self._is_stopping = False
        self._rounds: Periodic | None = None
        self._last_round = float("-inf")
        self._undo: list[Callable[[], None]] = []

    # ---- start and stop

    async def start(self) -> None:
        """Register at the brokers and begin."""
        engine, settings = self._engine, self._settings
        self._undo = [
            engine.serve(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, self._ids_changed),
            engine.serve(RequestCode.GET_CONSUMER_RUNNING_INFO, self._asked),
            engine.routes.on_change(self._route_changed),
            engine.on_connected(self._connected),
        ]
        self._track(set(self._topics()))
        # Other members must be able to find us before we read the members: see `handover`.
        await asyncio.gather(*(self._group_view.queues(topic) for topic in self._tracked))
        await engine.heartbeat()
        if self._locks is not None:
            self._locks.start()
        self._rounds = engine.every(
            settings.interval, self._round, first=0.0, name=f"rebalance {self._group}"
        )
        self.committer.start()

    async def stop(self, *, within: float | None = None) -> None:
        """Release everything: handlers finish, offsets are committed, locks are given back.

        Handlers that run longer than `within` (by default a hand-over) are not waited for; in
        order, their queues stay locked until the broker's lock lapses.
        """
        self._is_stopping = True
        if self._rounds is not None:
            self._rounds.stop()
        self.committer.stop()
        try:
            await self._acquisition.stop()
            await self._releases.release_all("the consumer stops", within=within)
            await self._resetting.settled()
            if self._locks is not None:
                self._locks.stop()
                await self._locks.release_all(but=self._releases.left_busy)
        finally:
            if self._locks is not None:
                self._locks.stop()
            for undo in self._undo:
                undo()
            self._undo.clear()
            self._track(set())
            await self._news.stop()

    def wake(self) -> None:
        """Run a round soon: immediately, unless the last one was just before."""
        if self._rounds is not None and not self._is_stopping:
            self._rounds.wake()

    # ---- diagnosis

    @property
    def obstacle(self) -> OrbitError | None:
        """Why no topic was ever consumed, if the reason is known."""
        return self._group_view.obstacle

    @property
    def denial(self) -> AccessDenied | None:
        """Why nothing can arrive until an account changes, if that holds for every topic."""
        shares = {topic: self._shares.get(topic, ()) for topic in self._ordinary_topics()}
        return self._refusals.denial(shares, self._ownership.owned)

    @property
    def troubles(self) -> tuple[str, ...]:
        """What is wrong now, a sentence each; without the troubles of pulls."""
        locks = () if self._locks is None else self._locks.troubles
        return (*self._outages.current(), *self._acquisition.troubles, *locks)

    # ---- owned queues

    @property
    def counts(self) -> RebalanceCounts:
        return self._ownership.counts

    @property
    def owned(self) -> Mapping[Queue, OwnedQueue]:
        """The owned queues, those being released included."""
        return self._ownership.owned

    @property
    def claimed(self) -> frozenset[Queue]:
        """The queues that the strategy gives to us and that are not begun yet."""
        return frozenset(self._ownership.claims)

    def rebuild(self, owned: OwnedQueue) -> None:
        """Release a dropped queue whose offset is settled, so that it begins again.

        Does nothing if the queue was released, and maybe acquired again, meanwhile.
        """
        if self._is_current(owned):
            self._releases.release(owned, "it begins again", commits=False)

    def lock_lapsed(self, owned: OwnedQueue) -> None:
        """The lock of a queue has lapsed: the queue must be acquired again."""
        if self._is_current(owned):
            self._releases.release(owned, "its lock has lapsed")

    def _is_current(self, owned: OwnedQueue) -> bool:
        return self._ownership.owned.get(owned.queue) is owned

    async def reset(self, offsets: Mapping[Queue, int]) -> None:
        """Go on from offsets that an administrator has set; what runs does not count.

        Queues of other members are left to them. Returns when the offsets are committed; raises
        when one could not be.
        """
        await self._resetting.reset(offsets)

    def _is_own(self, queue: Queue) -> bool:
        """Whether the last round gave a queue to us."""
        return not self._is_stopping and queue in self._shares.get(queue.topic, ())

    def running_info(self) -> ConsumerRunningInfo:
        """The answer to a request for running info."""
        return self._ownership.running_info(self._progress, self._engine.clock)

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
        # From here on the topics share the answers about members.
        after = self._group_view.asked
        pauses = await asyncio.gather(*(self._balance(topic, after) for topic in sorted(topics)))
        self._last_round = clock.monotonic()
        if self._is_idle():
            pauses.append(settings.retry)
        return min(pauses, default=settings.interval)

    async def _balance(self, topic: str, after: int) -> float:
        """Rebalance a topic; returns the seconds until the next look at it."""
        settings = self._settings
        queues = await self._group_view.queues(topic)
        if queues is None:
            self.counts.failed_rounds += 1
            # A topic that is created on demand appears soon after its first use, or late.
            times = self._missing[topic] = self._missing.get(topic, 0) + 1
            return self._ever_later(times)
        self._missing.pop(topic, None)
        try:
            before = self._views.get(topic, _EMPTY).members
            members = await self._group_view.members(topic, before, after=after)
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
            self._group_view.hindered(topic, error)
            if isinstance(error, GroupRefused | AccessDenied):
                # Logged for the broker that refuses, not for each topic.
                self._outages.forget(("share", topic))
            else:
                self._outages.failed(
                    ("share", topic), "the share of %s stays as it is: %s", topic, error
                )
            return settings.retry
        self._outages.recovered(("share", topic))
        self._refusals.seen(topic)
        self._group_view.succeeded(topic)
        if self._is_stopping or topic not in self._tracked:
            return settings.interval
        is_done = self._apply(topic, TopicSnapshot(tuple(in_order(queues)), members), own)
        if not is_done:
            return settings.retry
        split = self._group_view.split_rounds(topic)
        return self._ever_later(split) if split else settings.interval

    def _ever_later(self, times: int) -> float:
        """The pause after a number of attempts in vain."""
        return min(self._settings.interval, self._settings.retry * (1 << min(times - 1, 10)))

    def _apply(self, topic: str, view: TopicSnapshot, own: tuple[Queue, ...]) -> bool:
        """Release and claim; whether nothing is left to do."""
        former = self._former(topic, view)
        if self._views.get(topic, _EMPTY).queues != view.queues:
            self._news.changed(topic)
        self._views[topic] = view
        share_now = self._shares[topic] = set(own)
        for owned in self._ownership.of(topic):
            if owned.queue not in share_now:
                self._releases.release(owned, "it belongs to another member")
            elif self._is_stalled(owned):
                self.counts.stalled += 1
                self._releases.release(owned, "its pull has stopped")
        ownership = self._ownership
        missing = [
            queue for queue in own if not (queue in ownership.owned or queue in ownership.resets)
        ]
        self._acquisition.claim(topic, missing, view, former)
        return share_now == set(self._ownership.owned) & set(view.queues)

    def _former(self, topic: str, view: TopicSnapshot) -> tuple[str, ...]:
        """The members before the latest change; before we joined, all but us."""
        before = self._views.get(topic)
        if before is None:
            return tuple(each for each in view.members if each != self._engine.client_id)
        return before.members

    def _is_stalled(self, owned: OwnedQueue) -> bool:
        idle = self._engine.clock.monotonic() - owned.last_pull
        return idle > self._settings.stalled and not self._releases.is_going(owned)

    def _release_others(self, topics: set[str]) -> None:
        """Release the queues of topics that are no longer subscribed."""
        for owned in list(self._ownership.owned.values()):
            if owned.queue.topic not in topics:
                self._releases.release(owned, "its topic is no longer subscribed")
        for topic in {*self._views, *self._group_view.topics} - topics:
            self._acquisition.drop(topic)
            self._views.pop(topic, None)
            self._shares.pop(topic, None)
            self._group_view.forget(topic)
            self._refusals.seen(topic)
            self._outages.forget(("share", topic))

    def _ordinary_topics(self) -> set[str]:
        """All topics but the retry topic, which has messages only after failures."""
        return {topic for topic in self._topics() if not is_retry_topic(topic)}

    def _is_idle(self) -> bool:
        """Whether this member has no queue; logged when that lasts."""
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
            self._outages.recovered(_NO_QUEUE)
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= _IDLE:
            queues = sum(len(view.queues) for view in views)
            members = max(len(view.members) for view in views)
            names = sorted(topics)
            self._outages.failed(
                _NO_QUEUE,
                "group %s has no queue for this member: %d members share %d of %s; it waits until "
                "one of them leaves, or for more queues: orbitmq topic update %s --queues N",
                self._group,
                members,
                queues,
                ", ".join(names),
                names[0],
            )
        return is_idle and not self._outages.is_failing(_NO_QUEUE)

    def _track(self, topics: set[str]) -> None:
        routes = self._engine.routes
        for topic in topics - self._tracked:
            routes.track(topic)
        for topic in self._tracked - topics:
            routes.untrack(topic)
        self._tracked = topics

    # ---- events

    def _ids_changed(self, _: Connection, request: Command) -> Command | NotMine | None:
        header = request.header(NotifyConsumerIdsChangedRequest)
        if header.consumer_group != self._group:
            return NOT_MINE
        self._group_view.happened()
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
        self._group_view.happened(topic)
        self.wake()

    def _connected(self, where: Address) -> None:
        self._group_view.connected(where)
        self.wake()

    def _lock_lost(self, queue: Queue) -> None:
        owned = self._ownership.owned.get(queue)
        if owned is not None:
            self._releases.release(owned, "its lock was lost")

    def _released(self, topic: str) -> None:
        self._news.changed(topic)
        self.wake()

    def _assignment(self, topic: str) -> tuple[tuple[Queue, ...], tuple[Queue, ...]]:
        own = in_order(owned.queue for owned in self._ownership.of(topic))
        return self._views.get(topic, _EMPTY).queues, tuple(own)


# ---- what a round reads


#: The subject of warnings about name servers.
_NAME_SERVERS: Final = "name servers"
#: Obstacles that the user can remove.
_OBSTACLES: Final = (NoNameServer, NoRoute, GroupRefused, AccessDenied)

#: How Apache's brokers begin to say that a group has no member, with a general code.
_NO_MEMBER: Final = "no consumer for this group"
#: After as many such answers, each after an accepted heartbeat, the broker does not have the group
#: and does not create it: it accepts heartbeats of missing groups without looking at them.
_ROUNDS_UNLISTED: Final = 3


class GroupView:
    """Reads the queues of a topic and the members of the group for one consumer.

    A member is an id that any broker of the topic lists, and has left only when all brokers say so.
    In quiet times one broker is asked; after an event, or when its list differs from the last one,
    all are. `docs/internals/handover.md` gives the reasons.

    An error is logged once, and again while it lasts. What has kept a consumer from all of its
    topics since the start is an obstacle: a wrong address, a mistyped name, a group that is not
    created. It is raised to callers that wait for messages. After the first topic was consumed,
    errors pass.
    """

    def __init__(
        self,
        engine: Engine,
        group: str,
        members: GroupMembers | None,
        outages: LogOncePerOutage,
        *,
        return_grace: float,
    ) -> None:
        """Broadcasting has no `members`."""
        self._engine = engine
        self._group = group
        self._members = members
        self._outages = outages
        self._return_grace = return_grace
        #: Why a topic was never consumed so far.
        self._hindered: dict[str, OrbitError] = {}
        self._consumed: set[str] = set()
        #: Brokers that do not have the group.
        self._refused_by: set[str] = set()
        #: In how many rounds brokers have listed no member, although we are registered.
        self._unlisted: dict[str, int] = {}
        #: Missing topics, and the existing topic with a similar name.
        self._similar: dict[str, str | None] = {}
        self._connected_to: set[Address] = set()
        self._returned_at = float("-inf")
        #: What all brokers of a topic list, as long as no event has occurred since.
        self._agreed: dict[str, frozenset[str]] = {}
        self._happenings = 0
        #: The number of requests sent before the last event.
        self._happened_after = 0
        #: In how many rounds in a row brokers have listed different members.
        self._split: dict[str, int] = {}
        #: Since when a member is missing that a silent broker may list.
        self._unheard: dict[str, float] = {}

    def connected(self, where: Address) -> None:
        """A broker was connected to; it may have been away."""
        if where in self._connected_to or self._consumed:
            self._returned_at = self._engine.clock.monotonic()
        self._connected_to.add(where)
        self.happened()

    def happened(self, topic: str | None = None) -> None:
        """An event: the members, maybe of one topic only, may have changed."""
        self._happenings += 1
        self._happened_after = self.asked
        if topic is None:
            self._agreed.clear()
        else:
            self._agreed.pop(topic, None)

    @property
    def asked(self) -> int:
        """The number of requests about members sent so far."""
        return 0 if self._members is None else self._members.asked

    def split_rounds(self, topic: str) -> int:
        """For how many rounds the brokers of a topic have listed different members."""
        return self._split.get(topic, 0)

    # ---- obstacles

    @property
    def obstacle(self) -> OrbitError | None:
        """What has always kept all topics from being consumed, if it is one of the known reasons.

        One of `NoNameServer`, `NoRoute`, `GroupRefused`, `AccessDenied`.
        """
        if self._consumed:
            return None
        return next(
            (each for each in self._hindered.values() if isinstance(each, _OBSTACLES)), None
        )

    @property
    def topics(self) -> set[str]:
        """The topics with any state here."""
        return self._consumed.union(self._hindered)

    def hindered(self, topic: str, error: OrbitError) -> None:
        """A topic cannot be consumed now."""
        if topic not in self._consumed and not is_retry_topic(topic):
            self._hindered[topic] = error

    def succeeded(self, topic: str) -> None:
        """Queues and members of a topic were read."""
        self._consumed.add(topic)
        self._hindered.pop(topic, None)
        self._similar.pop(topic, None)

    def forget(self, topic: str) -> None:
        """A topic is no longer subscribed."""
        self._consumed.discard(topic)
        self._hindered.pop(topic, None)
        self._similar.pop(topic, None)
        self._unlisted.pop(topic, None)
        self._agreed.pop(topic, None)
        self._split.pop(topic, None)
        self._unheard.pop(topic, None)
        self._outages.forget(_route(topic))
        # The other topics find again which brokers do not have the group.
        self._forget_refusals(set(self._refused_by))

    # ---- requests

    async def queues(self, topic: str) -> tuple[Queue, ...] | None:
        """The readable queues; None when they cannot be read."""
        about = _route(topic)
        try:
            queues = await self._engine.routes.subscribe_queues(topic)
        except NoRoute as error:
            if is_retry_topic(topic):
                # Brokers create it with the first heartbeat of the group, which is under way.
                log.debug("%s", error)
            else:
                missing = await self._with_similar(error)
                self.hindered(topic, missing)
                self._outages.failed(about, "group %s waits for a topic: %s", self._group, missing)
            # A name server without the topic has answered, all the same.
            self._outages.recovered(_NAME_SERVERS)
            return None
        except (NoNameServer, NotANameServer) as error:
            self.hindered(topic, _as_no_name_server(error))
            # Logged once for all topics, which share the reason.
            self._outages.failed(
                _NAME_SERVERS,
                "group %s consumes nothing new until a name server answers: %s",
                self._group,
                error,
            )
            return None
        except OrbitError as error:
            self.hindered(topic, error)
            self._outages.failed(about, "the route of %s is not known: %s", topic, error)
            return None
        self._outages.recovered(_NAME_SERVERS)
        if queues or is_retry_topic(topic):
            self._outages.recovered(about)
        else:
            self._outages.failed(
                about,
                "group %s gets nothing of %s for now: its read permission is off, at the topic or "
                "at its broker; turn it on with: orbitmq topic update %s --permission rw, or with "
                "permission = 6 in the settings of the broker",
                self._group,
                topic,
                topic,
            )
        return queues

    async def _with_similar(self, error: NoRoute) -> NoRoute:
        """The same error with a similar topic's name, which is looked up once."""
        topic = error.topic
        if topic not in self._similar:
            self._similar[topic] = await similar_topic(self._engine, topic)
        return NoRoute(topic, error.name_servers, similar=self._similar[topic])

    async def members(
        self, topic: str, before: Collection[str], *, after: int | None = None
    ) -> tuple[str, ...] | None:
        """The members of the group; None while some of those `before` may still return.

        An answer for another topic is shared if its request was not among the first `after`.
        """
        group = self._members
        if group is None:
            return ()
        after = self.asked if after is None else max(after, self._happened_after)
        # Events during the requests count as later ones.
        happenings, agreed = self._happenings, self._agreed.pop(topic, None)
        members, broker, after, failed = await self._listed(group, topic, after)
        if agreed is not None and agreed == members and agreed.issuperset(before):
            found = Listing(members)
        else:
            found = await group.everywhere(topic, members, broker, after=after)
        if found.is_agreed:
            self._split.pop(topic, None)
            if found.is_whole and happenings == self._happenings:
                self._agreed[topic] = found.members
        else:
            self._split[topic] = self._split.get(topic, 0) + 1
        if self._engine.client_id not in found.members:
            self._check_welcome(topic, failed)
        if self._may_come(topic, before, found):
            return None
        return await group.as_counted(topic, found.members, after=after)

    async def _listed(
        self, group_members: GroupMembers, topic: str, after: int
    ) -> tuple[frozenset[str], Address, int, Mapping[Address, OrbitError]]:
        """The list of one broker that knows us, that broker, and the number of requests before it.

        Also the brokers that refused the heartbeat, if one was sent.
        """
        members = frozenset[str]()
        failed: Mapping[Address, OrbitError] = {}
        # Apache's brokers say so when a group has no member, not even us.
        with suppress(BrokerRefused):
            members, broker = await group_members.listed(topic, after=after)
        if self._engine.client_id not in members:
            # A restarted broker, or one that has dropped us, gets a heartbeat first.
            failed = await self._engine.heartbeat()
            after = self.asked
            try:
                members, broker = await group_members.listed(topic, after=after)
            except BrokerRefused as refused:
                self._check_welcome(topic, failed)
                if self._is_no_group(topic, refused, failed):
                    raise self._refused(refused) from refused
                raise
        self._has_group(topic, str(broker))
        return members, broker, after, failed

    def _check_welcome(self, topic: str, failed: Mapping[Address, OrbitError]) -> None:
        """Raise the error if every broker of a topic has refused us as a member."""
        route = self._engine.routes.known(topic)
        brokers = [] if route is None else [set(each.values()) for each in route.brokers.values()]
        refused = {
            where: error for where, error in failed.items() if isinstance(error, BrokerRefused)
        }
        if brokers and all(each & refused.keys() for each in brokers):
            raise copy.copy(refused[next(iter(brokers[0] & refused.keys()))])

    def _may_come(self, topic: str, before: Collection[str], found: Listing) -> bool:
        """Whether a missing member may still return, so that no list proves its absence.

        A broker knows only the members that have connected to it again; the others go on consuming.
        """
        is_missing = not set(before) <= set(found.members)
        now, grace = self._engine.clock.monotonic(), self._return_grace
        if not is_missing or found.is_whole:
            self._unheard.pop(topic, None)
        if not is_missing:
            return False
        if now - self._returned_at < grace:
            return True
        return not found.is_whole and now - self._unheard.setdefault(topic, now) < grace

    # ---- brokers without the group

    def _is_no_group(self, topic: str, refused: BrokerRefused, failed: Collection[Address]) -> bool:
        """Whether a broker does not have the group, or repeatedly behaves so.

        `failed` are the brokers that did not accept the heartbeat.
        """
        if refused.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
            return True
        is_unlisted = (
            refused.code == ResponseCode.SYSTEM_ERROR
            and refused.remark.startswith(_NO_MEMBER)
            and refused.address not in map(str, failed)
        )
        if not is_unlisted:
            self._unlisted.pop(topic, None)
            return False
        times = self._unlisted[topic] = self._unlisted.get(topic, 0) + 1
        return times >= _ROUNDS_UNLISTED

    def _refused(self, refused: BrokerRefused) -> GroupRefused:
        """Note that a broker does not have the group, until it is created."""
        refusal = GroupRefused(self._group, refused)
        self._refused_by.add(refused.address)
        # Logged once for all topics, which share the reason.
        self._outages.failed(_group_at(refused.address), "%s", refusal, level=logging.ERROR)
        return refusal

    def _has_group(self, topic: str, broker: str) -> None:
        """A broker has listed the group, so it has it. Brokers that are gone are forgotten."""
        self._unlisted.pop(topic, None)
        if broker in self._refused_by:
            self._refused_by.remove(broker)
            self._outages.recovered(_group_at(broker))
        brokers = self._engine.routes.brokers.values()
        known = {str(each) for found in brokers for each in found.values()}
        self._forget_refusals(self._refused_by - known)

    def _forget_refusals(self, brokers: Collection[str]) -> None:
        self._refused_by.difference_update(brokers)
        for broker in brokers:
            self._outages.forget(_group_at(broker))


def _route(topic: str) -> tuple[str, str]:
    """The subject of warnings about the route of a topic."""
    return ("route", topic)


def _group_at(broker: str) -> tuple[str, str]:
    """The subject of warnings about the group at a broker."""
    return ("group", broker)


def _as_no_name_server(error: NoNameServer | NotANameServer) -> NoNameServer:
    """The same error to callers that wait for messages: the address is no name server."""
    if isinstance(error, NoNameServer):
        return error
    return NoNameServer([(parse_address(error.address), str(error))])


# ---- notifications of the application


#: Called on the loop with a topic, all its queues and the own ones, when either has changed.
AssignmentListener: TypeAlias = Callable[
    [str, tuple[Queue, ...], tuple[Queue, ...]], Awaitable[None] | None
]
#: Returns all queues of a topic and the own ones.
Assignment: TypeAlias = Callable[[str], tuple[tuple[Queue, ...], tuple[Queue, ...]]]


class AssignmentNotifier:
    """Calls a listener, one change after the other, and logs its exceptions."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        listener: AssignmentListener | None,
        assignment: Assignment,
    ) -> None:
        self._engine = engine
        self._group = group
        self._listener = listener
        self._assignment = assignment
        self._pending: dict[str, None] = {}
        self._last_notified: dict[str, object] = {}
        self._task: asyncio.Task[None] | None = None

    def changed(self, topic: str) -> None:
        """The queues of a topic, or the own ones, have changed."""
        if self._listener is None:
            return
        self._pending[topic] = None
        if self._task is None or self._task.done():
            self._task = self._engine.spawn(
                self._notify(self._listener), f"notify {self._group} of its queues"
            )

    async def stop(self) -> None:
        """Wait for the pending notifications, at most `stop_timeout`."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=self._engine.settings.stop_timeout)

    async def _notify(self, listener: AssignmentListener) -> None:
        while self._pending:
            # Changes of one turn are reported together.
            await asyncio.sleep(0)
            topic = next(iter(self._pending))
            del self._pending[topic]
            queues, own = self._assignment(topic)
            if self._last_notified.get(topic) == (queues, own):
                continue
            self._last_notified[topic] = (queues, own)
            try:
                result = listener(topic, queues, own)
                if inspect.isawaitable(result):
                    await result
            except Exception:
                log.exception(
                    "the assignment listener of group %s failed on %s",
                    self._group,
                    topic,
                    extra={"group": self._group, "topic": topic},
                )
