"""Looks at the cluster every few seconds and keeps the last picture of it.

A look takes a fixed number of requests per broker, whatever the number of topics and groups, and
one request each for a bounded number of groups and topics, in turn. The event loop gets a turn
between the steps of a look, so that pages are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import statistics
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.cluster import ClusterStatus
from orbitmq.client.admin.groups import (
    GroupSettings,
    GroupSummary,
    decode_progress_tables,
    different_subscriptions,
    duplicate_clients,
    queue_findings,
    retries_for_ever,
    told_findings,
)
from orbitmq.client.admin.members import Finding, RunningInfo
from orbitmq.client.admin.requests import BrokerNode, Unreachable
from orbitmq.client.admin.topics import Topic, TopicKind
from orbitmq.client.consumer.statistics import CallTimes
from orbitmq.client.engine import Engine
from orbitmq.client.routes import Queue
from orbitmq.clock import Clock, milliseconds
from orbitmq.console.history import REPORT_INTERVAL, WINDOW, HeatMaps, RateMeter
from orbitmq.console.resends import Resent, ResentLetters
from orbitmq.console.settings import TIMEOUT
from orbitmq.errors import BrokerRefused, OrbitError
from orbitmq.names import TOOLS_GROUP, dead_letter_topic, is_retry_topic
from orbitmq.remoting.settings import Address, ConnectionLost
from orbitmq.wire.bodies import (
    ConsumeStats,
    ConsumeTimeSpans,
    QueueProgress,
    QueueTimeSpan,
    TopicStats,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import (
    GetBrokerConsumeStatsRequest,
    GetConsumeStatsRequest,
    OffsetResponse,
    QueryConsumeTimeSpanRequest,
    SearchOffsetRequest,
    TopicRequest,
)
from orbitmq.wire.javajson import decode_body

log = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")

#: Seconds that a message waits, and without progress, after which a group is called stalled.
STALLED_AFTER = 60.0
#: Looks between two readings of the configuration of all topics and groups.
CONFIGURATION_EVERY = 6
#: Seconds for a table of all groups: a broker with thousands of groups takes its time.
TABLE_TIMEOUT = 30.0
#: Bytes from which a table is decoded on a thread.
_LARGE = 100_000
#: Groups or topics of each subject that one look polls; the others have their turn later.
PER_LOOK = 40
#: Groups whose dead letters one look looks up, and letters of these together, the newest first.
RESENT_GROUPS = 3
LETTERS = 20
#: Letters that a thorough look looks up; each takes some requests to every broker.
THOROUGH_LETTERS = 300
#: Requests about single groups or topics that are under way at the same time.
_CONCURRENT = 16
_HOUR = 3600.0
#: Seconds until the next report of a member that is a little late.
_LATE_REPORT = 1.1 * REPORT_INTERVAL
_THERE_OR_NOT = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.TOPIC_NOT_EXIST)})
NONE_RESENT = Resent()

#: A group in a topic.
Pair = tuple[str, str]
#: Next offset, committed offset, lag and number of queues of a group in each of its topics.
Totals = dict[str, tuple[int, int, int, int]]


class Pace(enum.StrEnum):
    """What a group's lag does."""

    DONE = "up to date"
    KEEPING = "keeping up"
    DRAINING = "draining"
    GROWING = "falling behind"
    STALLED = "stalled"
    SILENT = "nobody consumes"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class TopicPart:
    """A group in a topic."""

    topic: str
    lag: int
    queues: int
    in_rate: float = 0.0
    out_rate: float = 0.0
    #: Age of the oldest message that waits; None: not known yet.
    lag_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSample:
    """A group at the time of a look."""

    name: str
    settings: GroupSettings
    brokers: tuple[str, ...]
    parts: tuple[TopicPart, ...]
    is_uniform: bool = True
    #: None: not polled yet.
    members: int | None = None
    model: str = ""
    #: Seconds since its progress last moved while messages waited; 0 when it moves.
    still: float = 0.0
    #: All of them, and those of the last hour; those sent again included.
    dead_letters: int = 0
    dead_last_hour: int = 0
    resent: Resent = NONE_RESENT
    #: What brokers and connections say is wrong among its members.
    findings: tuple[Finding, ...] = ()
    #: Seconds without progress after which the group is called stalled.
    patience: float = STALLED_AFTER
    #: Seconds over which its rates were measured.
    measured: float = WINDOW

    @property
    def lag(self) -> int:
        return sum(part.lag for part in self.parts)

    @property
    def retry_lag(self) -> int:
        return sum(part.lag for part in self.parts if is_retry_topic(part.topic))

    @property
    def lag_seconds(self) -> float | None:
        """Age of the oldest message that waits; 0 when none does."""
        if not self.lag:
            return 0.0
        return max((part.lag_seconds for part in self.parts if part.lag_seconds), default=None)

    @property
    def open_letters(self) -> int:
        """Dead letters that are not known to be sent again: the number that every page shows."""
        return max(0, self.dead_letters - self.resent.count)

    @property
    def open_last_hour(self) -> int:
        """Of these, those that died in the last hour."""
        return max(0, self.dead_last_hour - self.resent.resent_last_hour)

    @property
    def unknown_letters(self) -> int:
        """Open letters that were not looked up, so that they may have been sent again."""
        return max(0, self.dead_letters - self.resent.looked)

    @property
    def unknown_last_hour(self) -> int:
        """Of these, those that died in the last hour."""
        looked = self.resent.open_last_hour + self.resent.resent_last_hour
        return max(0, self.dead_last_hour - looked)

    @property
    def in_rate(self) -> float:
        return sum(part.in_rate for part in self.parts)

    @property
    def out_rate(self) -> float:
        return sum(part.out_rate for part in self.parts)

    @property
    def drains_in(self) -> float | None:
        """Seconds until nothing waits, at the present pace; None: never."""
        if not self.lag:
            return 0.0
        gain = self.out_rate - self.in_rate
        return self.lag / gain if gain > 0.01 else None

    @property
    def pace(self) -> Pace:
        if not self.settings.is_enabled:
            return Pace.PAUSED
        if not self.lag:
            return Pace.DONE
        if self.members == 0 and self.out_rate <= 0:
            return Pace.SILENT
        age = self.lag_seconds
        if self.still >= self.patience and (age is None or age >= STALLED_AFTER):
            return Pace.STALLED
        gain = self.out_rate - self.in_rate
        # Members commit every few seconds: one commit more or less is noise.
        noise = self.in_rate * _LATE_REPORT / max(self.measured, _LATE_REPORT)
        margin = max(0.5, noise)
        if gain > margin:
            return Pace.DRAINING
        is_judged = self.measured >= WINDOW
        return Pace.GROWING if is_judged and gain < -margin else Pace.KEEPING


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSample:
    """A topic at the time of a look."""

    topic: Topic
    in_rate: float = 0.0
    #: None: not polled yet.
    messages: int | None = None
    first_stored_at: float | None = None
    last_stored_at: float | None = None
    #: The groups that have committed in it, and their lags.
    groups: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return self.topic.name

    @property
    def worst(self) -> tuple[str, int] | None:
        """The group that is furthest behind."""
        return max(self.groups.items(), key=lambda each: each[1], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The cluster at the time of a look."""

    at: float
    cluster: ClusterStatus
    topics: Mapping[str, TopicSample] = field(hash=False)
    groups: Mapping[str, GroupSample] = field(hash=False)
    unreachable: tuple[Unreachable, ...] = ()
    #: Messages per second that are stored and that are finished, by broker.
    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    #: Requests of the admin for this look.
    requests: int = 0
    seconds: float = 0.0

    @property
    def is_partial(self) -> bool:
        """Whether a server did not answer, so that topics and groups may be missing."""
        return bool(self.unreachable) or not all(each.is_up for each in self.cluster.brokers)

    @property
    def in_rate(self) -> float:
        return sum(came for came, _ in self.rates.values())

    @property
    def out_rate(self) -> float:
        """Messages per second that groups finish."""
        return sum(group.out_rate for group in self.groups.values())

    @property
    def lag(self) -> int:
        return sum(group.lag for group in self.groups.values())

    @property
    def oldest(self) -> float:
        return max((group.lag_seconds or 0.0 for group in self.groups.values()), default=0.0)

    @property
    def open_letters(self) -> int:
        return sum(group.open_letters for group in self.groups.values())

    @property
    def unknown_letters(self) -> int:
        return sum(group.unknown_letters for group in self.groups.values())

    @property
    def resent_letters(self) -> int:
        return sum(group.resent.count for group in self.groups.values())

    @property
    def open_last_hour(self) -> int:
        return sum(group.open_last_hour for group in self.groups.values())

    @property
    def unknown_last_hour(self) -> int:
        return sum(group.unknown_last_hour for group in self.groups.values())

    @property
    def dead_letters(self) -> int:
        return sum(group.dead_letters for group in self.groups.values())

    @property
    def dead_last_hour(self) -> int:
        return sum(group.dead_last_hour for group in self.groups.values())


class Collector:
    """Looks at the cluster and keeps the last snapshot."""

    def __init__(
        self,
        admin: AsyncAdmin,
        tables: BrokerTables,
        clock: Clock,
        *,
        every: float = 5.0,
        patience: float = STALLED_AFTER,
        is_thorough: bool = False,
        on_sample: Callable[[Snapshot], Awaitable[None]] | None = None,
        on_problem: Callable[[], None] | None = None,
    ) -> None:
        """A thorough look polls everything, but of dead letters only those of the last hour."""
        self._admin = admin
        self._clock = clock
        self._every = every
        self._patience = patience
        self._on_sample = on_sample
        self._on_problem = on_problem
        self._poller = ClusterPoller(admin, tables, clock, is_thorough=is_thorough)
        self._wake = asyncio.Event()
        self._looks = 0
        self._is_stale = True
        self._topics: tuple[Topic, ...] = ()
        self._groups: dict[str, GroupSummary] = {}
        self._unreachable: tuple[Unreachable, ...] = ()
        self._meters: dict[Pair, RateMeter] = {}
        self._broker_meters: dict[str, RateMeter] = {}
        #: The last look, and why the latest one failed.
        self.snapshot: Snapshot | None = None
        self.problem: str | None = None
        self.heat = HeatMaps()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self._wake.clear()
            await self._look_or_log()
            try:
                async with asyncio.timeout(self._every):
                    await self._wake.wait()
            except TimeoutError:
                continue

    @property
    def clients(self) -> Mapping[str, tuple[str, ...]]:
        """The ids of the consumers of each group, as far as known."""
        members = self._poller.members.answers
        return {group: each.clients for group, each in members.items() if each.clients}

    def resent_letters(self, group: str) -> frozenset[str]:
        """The ids of a group's dead letters that are known to be sent again."""
        return self._poller.resent_letters(group)

    def look_soon(self, *, configuration: bool = True) -> None:
        """Look now: something was changed."""
        self._is_stale = self._is_stale or configuration
        self._wake.set()

    async def _look_or_log(self) -> None:
        try:
            snapshot = await self.look()
        except OrbitError as error:
            if self.problem is None:
                log.warning("the cluster cannot be seen: %s", error)
            self.problem = str(error)
            if self._on_problem is not None:
                self._on_problem()
            return
        self.problem = None
        if self._on_sample is not None:
            await self._on_sample(snapshot)

    async def look(self, *, resent: bool = True) -> Snapshot:
        """One look. Raises `OrbitError` when no name server answers.

        Without `resent` dead letters are not looked up.
        """
        began, before = self._clock.monotonic(), self._admin.requests
        poller = self._poller
        cluster = await self._admin.cluster()
        if self._is_stale or self._looks % CONFIGURATION_EVERY == 0:
            await self._read_configuration()
        self._looks += 1
        brokers = readers(cluster)
        positions = await poller.positions(brokers, self._groups)
        await poller.poll_members(brokers, positions, self._groups)
        totals = {group: _totals(queues) for group, queues in positions.items()}
        await asyncio.sleep(0)
        self._measure(totals)
        self._measure_brokers(cluster, positions)
        behind = {
            (group, topic): done
            for group, topics in totals.items()
            for topic, (_, done, lag, _) in topics.items()
            if lag
        }
        await poller.poll_ages(brokers, behind)
        await poller.poll_dead_letters(brokers, self._topics, self._groups, resent=resent)
        await poller.poll_contents(brokers, self._topics)
        groups = {name: self._group_sample(name, totals.get(name, {})) for name in self._groups}
        await asyncio.sleep(0)
        topics = self._topic_samples(groups)
        await asyncio.sleep(0)
        now = self._clock.now()
        self.heat.add(now, positions)
        self.snapshot = Snapshot(
            at=now,
            cluster=cluster,
            topics=topics,
            groups=groups,
            unreachable=self._unreachable,
            rates={name: meter.rates for name, meter in self._broker_meters.items()},
            requests=self._admin.requests - before,
            seconds=self._clock.monotonic() - began,
        )
        return self.snapshot

    async def _read_configuration(self) -> None:
        self._is_stale = False
        topics = await self._admin.topics.list()
        groups = await self._admin.groups.list()
        self._topics = topics.items
        self._groups = {each.group: each for each in groups}
        self._unreachable = tuple(dict.fromkeys((*topics.unreachable, *groups.unreachable)))

    def _measure(self, totals: Mapping[str, Totals]) -> None:
        now = self._clock.monotonic()
        meters: dict[Pair, RateMeter] = {}
        for group, topics in totals.items():
            for topic, (end, done, _, _) in topics.items():
                key = (group, topic)
                meter = meters[key] = self._meters.get(key) or RateMeter()
                meter.add(now, end, done)
        self._meters = meters

    def _measure_brokers(
        self, cluster: ClusterStatus, positions: Mapping[str, Mapping[Queue, QueuePosition]]
    ) -> None:
        """Measure brokers: the messages stored, and those that groups have finished there.

        The rates that brokers report are of other seconds and count what is pulled.
        """
        done: dict[str, int] = {}
        for queues in positions.values():
            for queue, place in queues.items():
                done[queue.broker] = done.get(queue.broker, 0) + place.done
        now = self._clock.monotonic()
        meters: dict[str, RateMeter] = {}
        for status in cluster.brokers:
            if status.runtime is None or not status.node.is_master:
                continue
            name = status.node.broker
            stored = status.runtime.raw.get("msgPutTotalTodayNow", "")
            meter = meters[name] = self._broker_meters.get(name) or RateMeter()
            meter.add(now, int(stored) if stored.isdecimal() else 0, done.get(name, 0))
        self._broker_meters = meters

    def _group_sample(self, name: str, totals: Totals) -> GroupSample:
        poller, summary = self._poller, self._groups[name]
        monotonic = self._clock.monotonic()
        parts, still, measured = [], [], []
        for topic, (_, _, lag, count) in sorted(totals.items()):
            meter = self._meters[(name, topic)]
            came, went = meter.rates
            age = poller.age((name, topic)) if lag else 0.0
            parts.append(TopicPart(topic, lag, count, came, went, age))
            if lag and meter.moved_at is not None:
                still.append(monotonic - meter.moved_at)
                measured.append(meter.seconds)
        members = poller.members.answers.get(name)
        dead = poller.dead.answers.get(name)
        return GroupSample(
            name=name,
            settings=summary.settings,
            brokers=summary.brokers,
            parts=tuple(parts),
            is_uniform=summary.is_uniform,
            members=None if members is None else members.count,
            model="" if members is None else members.model,
            # A group moves as long as it moves in any topic.
            still=min(still, default=0.0),
            dead_letters=0 if dead is None else dead.count,
            dead_last_hour=0 if dead is None else dead.recent,
            resent=poller.resent.get(name, NONE_RESENT),
            findings=() if members is None else members.findings,
            patience=self._patience,
            measured=min(measured, default=0.0),
        )

    def _topic_samples(self, groups: Mapping[str, GroupSample]) -> dict[str, TopicSample]:
        readers: dict[str, dict[str, int]] = {}
        rates: dict[str, float] = {}
        for group in groups.values():
            for part in group.parts:
                readers.setdefault(part.topic, {})[group.name] = part.lag
                rates[part.topic] = max(rates.get(part.topic, 0.0), part.in_rate)
        samples: dict[str, TopicSample] = {}
        for topic in self._topics:
            name = topic.name
            content, counted = self._poller.contents.answers.get(name, (None, 0.0))
            sample = TopicSample(
                topic=topic, in_rate=rates.get(name, counted), groups=readers.get(name, {})
            )
            if content is not None:
                sample = replace(
                    sample,
                    messages=content.messages,
                    first_stored_at=content.first_stored_at,
                    last_stored_at=content.last_stored_at,
                )
            samples[name] = sample
        return samples


def readers(cluster: ClusterStatus) -> list[BrokerNode]:
    """One node of every broker name that answers, the master if it does."""
    first: dict[str, BrokerNode] = {}
    for each in cluster.brokers:
        if each.is_up:
            first.setdefault(each.node.broker, each.node)
    return list(first.values())


def _totals(queues: Mapping[Queue, QueuePosition]) -> Totals:
    sums: Totals = {}
    for queue, place in queues.items():
        end, done, lag, count = sums.get(queue.topic, (0, 0, 0, 0))
        sums[queue.topic] = (end + place.end, done + place.done, lag + place.lag, count + 1)
    return sums


class ClusterPoller:
    """What brokers answer only for a single group or topic.

    Members, the age of the oldest waiting message, the content of a topic, dead letters: a look
    asks about some of them, and the others keep their last answer.
    """

    def __init__(
        self, admin: AsyncAdmin, tables: BrokerTables, clock: Clock, *, is_thorough: bool
    ) -> None:
        self._admin = admin
        self._tables = tables
        self._clock = clock
        self._is_thorough = is_thorough
        self._size = None if is_thorough else PER_LOOK
        self.members: Poller[str, GroupMembers] = Poller(self._size)
        self.dead: Poller[str, DeadLetters] = Poller(self._size)
        #: Dead letters that were sent again, by group.
        self.resent: dict[str, Resent] = {}
        #: What is in a topic, and how fast it grows.
        self.contents: Poller[str, tuple[TopicContent, float]] = Poller(self._size)
        #: When the oldest waiting message was stored, and the committed offsets at that time.
        self._oldest: Poller[Pair, tuple[float | None, int]] = Poller(self._size)
        self._growths: dict[str, RateMeter] = {}
        #: The deleted part of a topic on a broker, and when the oldest message left was stored.
        self._first: dict[tuple[str, str], tuple[int, float | None]] = {}
        #: Positions on brokers that have no table of all groups.
        self._by_group: dict[str, Poller[str, dict[Queue, QueuePosition]]] = {}
        self._letters = ResentLetters(
            admin, most=THOROUGH_LETTERS if is_thorough else LETTERS, only_last_hour=is_thorough
        )
        self._resent_turns: Poller[str, None] = Poller(None if is_thorough else RESENT_GROUPS)

    def age(self, pair: Pair) -> float | None:
        """How long the oldest message has waited; None: not known yet."""
        stored_at, _ = self._oldest.answers.get(pair, (None, 0))
        return None if stored_at is None else max(0.0, self._clock.now() - stored_at)

    async def positions(
        self, brokers: Collection[BrokerNode], groups: Collection[str]
    ) -> GroupPositions:
        """The positions of all groups, from one table of each broker."""

        async def ask(node: BrokerNode) -> GroupPositions:
            try:
                return await self._tables.positions(node.address)
            except (BrokerRefused, ConnectionLost) as error:
                # The broker does not know the request, or the table is larger than a frame.
                log.debug("groups are polled one by one: %s", error)
            poller = self._by_group.setdefault(str(node), Poller(self._size))
            await poller.refresh(
                groups, lambda group: self._tables.group_positions(node.address, group)
            )
            return poller.answers

        merged: GroupPositions = {}
        for part in (await gather_answers(brokers, ask)).values():
            for group, queues in part.items():
                if group in groups:
                    merged.setdefault(group, {}).update(queues)
        return merged

    async def poll_members(
        self, brokers: Collection[BrokerNode], positions: GroupPositions, groups: Collection[str]
    ) -> None:
        """Poll members; adds to `positions` the topics that a group has not committed in yet."""

        async def ask(group: str) -> GroupMembers:
            members, warnings = await self._admin.consumers.look(group)
            if members is None:
                return GroupMembers()
            topics = [each.topic for each in members.subscriptions]
            return GroupMembers(
                count=len(members.clients),
                model=members.model,
                clients=tuple(sorted({each.client_id for each in members.clients})),
                findings=(*told_findings(warnings), *duplicate_clients(members)),
                uncommitted={}
                if members.model == "broadcasting"
                else await self._uncommitted(brokers, group, topics, positions.get(group, {})),
            )

        if brokers:
            urgent = {
                *(group for group, queues in positions.items() if _is_behind(queues)),
                *(group for group, each in self.members.answers.items() if each.uncommitted),
            }
            await self.members.refresh(groups, ask, urgent=urgent)
        for group, each in self.members.answers.items():
            if each.uncommitted:
                positions[group] = {**each.uncommitted, **positions.get(group, {})}

    async def _uncommitted(
        self,
        brokers: Collection[BrokerNode],
        group: str,
        topics: Iterable[str],
        committed: Mapping[Queue, QueuePosition],
    ) -> Mapping[Queue, QueuePosition]:
        known = {queue.topic for queue in committed}
        found: dict[Queue, QueuePosition] = {}
        try:
            for topic in topics:
                if topic not in known and not is_retry_topic(topic):
                    for node in brokers:
                        found |= await self._tables.group_positions(node.address, group, topic)
        except OrbitError as error:
            log.debug("topics that %s has not committed in are not known: %s", group, error)
            return {}
        return found

    async def poll_ages(self, brokers: Collection[BrokerNode], behind: Mapping[Pair, int]) -> None:
        """Poll the ages of what waits; `behind` has the committed offsets of each pair with lag."""
        known = self._oldest.answers
        # While nothing is committed, the oldest message stays the same.
        moved = [pair for pair in behind if pair not in known or known[pair][1] != behind[pair]]
        now = self._clock.now()

        async def ask(pair: Pair) -> tuple[float | None, int]:
            ages = [await self._tables.age(node.address, *pair) for node in brokers]
            age = max((age for age in ages if age is not None), default=None)
            if age is None:
                return known.get(pair, (None, -1))
            return now - age, behind[pair]

        await self._oldest.refresh(behind, ask, due=moved)

    async def poll_dead_letters(
        self,
        brokers: Collection[BrokerNode],
        topics: Iterable[Topic],
        groups: Collection[str],
        *,
        resent: bool = True,
    ) -> None:
        """Count the dead letters, those of the last hour, and with `resent` those sent again."""
        dying = [
            group
            for topic in topics
            if topic.kind is TopicKind.DEAD_LETTER
            and (group := topic.name.removeprefix(dead_letter_topic(""))) in groups
        ]
        since = self._clock.now() - _HOUR
        names = frozenset(node.broker for node in brokers)

        async def ask(group: str) -> DeadLetters:
            count = recent = 0
            bounds: dict[Queue, tuple[int, int]] = {}
            topic = dead_letter_topic(group)
            for node in brokers:
                found = await self._tables.content(node.address, topic)
                if found is None or not found.messages:
                    continue
                count += found.messages
                bounds |= {Queue(topic, node.broker, each): at for each, at in found.queues.items()}
                if found.last_stored_at is None or found.last_stored_at >= since:
                    recent += await self._tables.stored_since(node.address, topic, since)
            return DeadLetters(count, recent, bounds, names, since)

        await self.dead.refresh(dying, ask)
        counted = self.dead.answers
        self._letters.keep(counted)
        if resent:
            recent = [group for group, each in counted.items() if each.recent]
            some = [group for group, each in counted.items() if each.count]
            chosen = self._resent_turns.choose(recent if self._is_thorough else some, recent)
            bounds = {group: counted[group].bounds for group in chosen}
            totals = {topic: found.total for topic, (found, _) in self.contents.answers.items()}
            await self._letters.look(bounds, brokers, totals, since)
        # For the hour and the brokers of the counts that these are compared with.
        self.resent = {
            group: self._letters.known(group, each.since, each.brokers)
            for group, each in counted.items()
        }

    def resent_letters(self, group: str) -> frozenset[str]:
        return self._letters.resent(group)

    async def poll_contents(self, brokers: Collection[BrokerNode], topics: Iterable[Topic]) -> None:
        """Poll how much is in topics."""
        names = [topic.name for topic in topics if topic.kind is not TopicKind.SYSTEM]

        async def ask(topic: str) -> tuple[TopicContent, float]:
            found = [await self._content(node, topic) for node in brokers]
            parts = [part for part in found if part is not None]
            content = TopicContent(
                sum(part.messages for part in parts),
                sum(part.total for part in parts),
                sum(part.deleted for part in parts),
                max((part.last_stored_at for part in parts if part.last_stored_at), default=None),
                min((part.first_stored_at for part in parts if part.first_stored_at), default=None),
            )
            # Over the same time as all rates, unless the turns of the topic are rarer.
            meter = self._growths.setdefault(topic, RateMeter())
            meter.add(self._clock.monotonic(), content.total, 0)
            return content, meter.rates[0]

        await self.contents.refresh(names, ask)
        known = self.contents.answers
        self._growths = {name: each for name, each in self._growths.items() if name in known}
        self._first = {key: each for key, each in self._first.items() if key[1] in known}

    async def _content(self, node: BrokerNode, topic: str) -> TopicContent | None:
        """A topic on one broker; the oldest message is looked up again after a deletion."""
        content = await self._tables.content(node.address, topic)
        if content is None or not content.messages:
            return content
        key = (str(node), topic)
        deleted, first = self._first.get(key, (-1, None))
        if deleted != content.deleted:
            first = await self._tables.first_stored(node.address, topic)
            self._first[key] = (content.deleted, first)
        return replace(content, first_stored_at=first)


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The members of a group; without any, it is offline."""

    count: int = 0
    model: str = ""
    clients: tuple[str, ...] = ()
    #: What brokers and connections say is wrong among them.
    findings: tuple[Finding, ...] = ()
    #: Queues of subscribed topics that the group has not committed in: brokers' tables lack them.
    uncommitted: Mapping[Queue, QueuePosition] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """How the dead letters of a group were counted last."""

    count: int
    #: Those of the last hour.
    recent: int
    #: The first and the next offset of each queue.
    bounds: Mapping[Queue, tuple[int, int]]
    #: The brokers that were asked.
    brokers: frozenset[str]
    #: When the hour began.
    since: float


def _is_behind(queues: Mapping[Queue, QueuePosition]) -> bool:
    return any(position.lag for position in queues.values())


class Poller(Generic[K, T]):
    """The last answer about each name, of which some are refreshed at a time.

    Every name has a turn before any has a second one. Urgent names come first, but leave a third of
    the places to the others. A request that fails is repeated in the next turn of its name.
    """

    def __init__(self, size: int | None) -> None:
        """`size` names have their turn at a time; None: all."""
        self.answers: dict[K, T] = {}
        self._size = size
        self._turns: dict[K, int] = {}
        self._turn = 0

    async def refresh(
        self,
        names: Collection[K],
        ask: Callable[[K], Awaitable[T]],
        *,
        due: Collection[K] | None = None,
        urgent: Collection[K] = (),
    ) -> None:
        """Ask about some of the names that are due, by default all; forget other names."""
        present = set(names)
        chosen = self.choose(names if due is None else due, urgent)
        self.answers |= await gather_answers(chosen, ask)
        self.answers = {name: each for name, each in self.answers.items() if name in present}

    def choose(self, names: Iterable[K], urgent: Collection[K] = ()) -> list[K]:
        """The names that have their turn now."""
        waiting = list(names)
        present = set(waiting)
        self._turns = {name: turn for name, turn in self._turns.items() if name in present}
        if self._size is None or len(waiting) <= self._size:
            chosen = waiting
        else:
            reserved = max(1, self._size // 3)
            chosen = sorted(present.intersection(urgent), key=self._order)[: self._size - reserved]
            rest = sorted(present.difference(chosen), key=self._order)
            chosen += rest[: self._size - len(chosen)]
        self._turn += 1
        self._turns |= dict.fromkeys(chosen, self._turn)
        return chosen

    def _order(self, name: K) -> tuple[int, str]:
        return self._turns.get(name, 0), str(name)


async def gather_answers(
    names: Iterable[K], ask: Callable[[K], Awaitable[T]], concurrent: int = _CONCURRENT
) -> dict[K, T]:
    """The answers that came; requests that failed are left out."""
    free = asyncio.Semaphore(concurrent)
    answers: dict[K, T] = {}

    async def one(name: K) -> None:
        async with free:
            try:
                answers[name] = await ask(name)
            except OrbitError as error:
                log.debug("no answer about %s: %s", name, error)

    await asyncio.gather(*map(one, names))
    return answers


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Where a group is in a queue."""

    #: Where the next message will be stored.
    end: int
    #: The committed offset.
    done: int

    @property
    def lag(self) -> int:
        return max(0, self.end - self.done)


#: The queues of each group.
GroupPositions = dict[str, dict[Queue, QueuePosition]]


@dataclass(frozen=True, slots=True)
class TopicContent:
    """What is in a topic on one broker."""

    messages: int
    #: The sum of the next offsets: all messages that were ever stored.
    total: int
    #: The sum of the first offsets: grows when old messages are deleted.
    deleted: int
    last_stored_at: float | None
    first_stored_at: float | None = None
    #: The first and the next offset of each queue.
    queues: Mapping[int, tuple[int, int]] = field(default_factory=dict, hash=False)


class BrokerTables:
    """The tables of single brokers, one request each.

    The admin sums these tables up; the console needs the offsets of every queue, which give rates.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: Queues by the text that names them: they are the same in every look.
        self._queues: dict[str, Queue] = {}

    async def positions(self, broker: Address) -> GroupPositions:
        """The positions of all groups of a broker."""
        answer = await self._engine.ask(
            broker,
            RequestCode.GET_BROKER_CONSUME_STATS,
            GetBrokerConsumeStatsRequest(is_order=False),
            timeout=TABLE_TIMEOUT,
        )
        body = bytes(answer.body)
        if len(body) < _LARGE:
            return decode_positions(body, self._queues)
        # Takes a tenth of a second: pages are answered meanwhile.
        return await asyncio.to_thread(decode_positions, body, self._queues)

    async def group_positions(
        self, broker: Address, group: str, topic: str | None = None
    ) -> dict[Queue, QueuePosition]:
        """The positions of a group; in one topic also before its first commit."""
        answer = await self._engine.ask(
            broker,
            RequestCode.GET_CONSUME_STATS,
            GetConsumeStatsRequest(consumer_group=group, topic=topic),
            timeout=TIMEOUT,
        )
        table = decode_body(ConsumeStats, answer.body or b"{}").offset_table
        return {
            Queue(key.topic, key.broker_name, key.queue_id): _position(place)
            for key, place in table.items()
        }

    async def age(self, broker: Address, group: str, topic: str) -> float | None:
        """How long the oldest message of a topic has waited for a group; None: not known."""
        ages = map(self._age, await self._spans(broker, group, topic))
        return max((age for age in ages if age is not None), default=None)

    async def _spans(self, broker: Address, group: str, topic: str) -> Collection[QueueTimeSpan]:
        """The times of a topic's messages, by queue; those of a queue depend on no group."""
        answer = await self._engine.ask(
            broker,
            RequestCode.QUERY_CONSUME_TIME_SPAN,
            QueryConsumeTimeSpanRequest(topic=topic, group=group),
            accept=_THERE_OR_NOT,
            timeout=TIMEOUT,
        )
        if answer.code != ResponseCode.SUCCESS:
            return ()
        return decode_body(ConsumeTimeSpans, answer.body or b"{}").consume_time_span_set

    def _age(self, span: QueueTimeSpan) -> float | None:
        if span.min_time_stamp <= 0:
            return None
        delay = span.delay_time / 1000
        # For a group without progress Apache counts from the year 1969: its oldest message is the
        # oldest there is.
        oldest = self._engine.clock.now() - span.min_time_stamp / 1000
        return max(0.0, oldest if delay > oldest + 3600 else delay)

    async def content(self, broker: Address, topic: str) -> TopicContent | None:
        """What is in a topic; None: the broker does not have the topic."""
        queues = await self._stats(broker, topic)
        bounds = queues.values()
        if not bounds:
            return None
        times = [last for _, _, last in bounds if last > 0]
        return TopicContent(
            sum(max(0, high - low) for low, high, _ in bounds),
            sum(high for _, high, _ in bounds),
            sum(low for low, _, _ in bounds),
            max(times) / 1000 if times else None,
            queues={number: (low, max(low, high)) for number, (low, high, _) in queues.items()},
        )

    async def first_stored(self, broker: Address, topic: str) -> float | None:
        """When the oldest message of a topic was stored; None: not known."""
        spans = await self._spans(broker, TOOLS_GROUP, topic)
        times = [span.min_time_stamp for span in spans if span.min_time_stamp > 0]
        return min(times) / 1000 if times else None

    async def stored_since(self, broker: Address, topic: str, since: float) -> int:
        """How many messages of a topic were stored from a time on."""
        count, since_ms = 0, milliseconds(since)
        for queue_id, (low, high, last) in (await self._stats(broker, topic)).items():
            if high <= low or last < since_ms:
                continue
            header = SearchOffsetRequest(topic=topic, queue_id=queue_id, timestamp=since_ms)
            code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
            answer = await self._engine.ask(broker, code, header, timeout=TIMEOUT)
            count += high - min(max(answer.header(OffsetResponse).offset, low), high)
        return count

    async def _stats(self, broker: Address, topic: str) -> Mapping[int, tuple[int, int, int]]:
        answer = await self._engine.ask(
            broker,
            RequestCode.GET_TOPIC_STATS_INFO,
            TopicRequest(topic=topic),
            accept=_THERE_OR_NOT,
            timeout=TIMEOUT,
        )
        if answer.code != ResponseCode.SUCCESS:
            return {}
        table = decode_body(TopicStats, answer.body or b"{}").offset_table
        return {
            key.queue_id: (each.min_offset, each.max_offset, each.last_update_timestamp)
            for key, each in table.items()
        }


def decode_positions(data: bytes, known: dict[str, Queue] | None = None) -> GroupPositions:
    """The answer to GET_BROKER_CONSUME_STATS. Raises `BodyError`.

    `known` has the queues of earlier answers, and gets those of this one.
    """
    return {
        group: {
            queue: _position(place) for table in tables for queue, place in table.places.items()
        }
        for group, tables in decode_progress_tables(data, known).items()
    }


def _position(place: QueueProgress) -> QueuePosition:
    return QueuePosition(place.broker_offset, max(0, place.consumer_offset))


#: Consumers of one group that are polled, unless thoroughly; all of a group do the same work.
MOST_MEMBERS = 8
#: Seconds for the answer of a consumer, and for those of brokers about its group.
_MEMBER_TIMEOUT = 3.0
#: Groups whose consumers are polled at once, those of them in parallel, and consumers in parallel.
_MEMBER_GROUPS = 10
_CONCURRENT_GROUPS = 4
_CONCURRENT_CONSUMERS = 32
#: Seconds that queues must be shared unevenly. Members that come and go are noticed in 20 s, but
#: the queues of an orderly consumer that died are taken over only when its locks are 60 s old.
UNEVEN_AFTER = 90.0
#: Polls in which members must have had the same numbers of queues, the first and the last included:
#: a group that rebalances meanwhile is not stuck.
UNEVEN_POLLS = 3
#: The property that names the allocation strategy; Java's clients put a class name there.
_STRATEGY = "allocateMessageQueueStrategy"
_EVEN = ("avg", "averagely")
_BY_ROOM = ("machine_room", "machineroom")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerTimes:
    """The handlers of a group; rates are those of all polled members together."""

    #: Mean seconds of a call: of the median member, and of the slowest one.
    median: float
    slowest: float
    #: Messages per second that went well, that failed, and that were pulled.
    ok_rate: float
    failed_rate: float
    pull_rate: float
    #: Mean seconds from asking a broker for messages to having some, of the slowest member.
    pull_time: float
    #: Percentiles of the last minute, of all members that report them; None: none does. Consumers
    #: with other clients report means only.
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    longest: float | None = None


class MemberPoller:
    """Polls the consumers of groups in turn: how long handlers take, and what is wrong among them.

    A broker passes the question on to each consumer, which may answer slowly or not at all, so
    that these polls are not part of a look.
    """

    def __init__(self, admin: AsyncAdmin, clock: Clock, *, is_thorough: bool = False) -> None:
        self._admin = admin
        self._clock = clock
        self._most = None if is_thorough else MOST_MEMBERS
        self._free = asyncio.Semaphore(_CONCURRENT_CONSUMERS)
        self._groups: Poller[str, None] = Poller(None if is_thorough else _MEMBER_GROUPS)
        self.times: dict[str, HandlerTimes] = {}
        #: What is wrong among the members of a group.
        self.findings: dict[str, MemberFindings] = {}
        #: Topics of groups that are shared unevenly; since when and in how many polls, unchanged.
        self.uneven: dict[str, dict[Uneven, tuple[float, int]]] = {}

    async def poll(
        self,
        clients: Mapping[str, tuple[str, ...]],
        behind: Collection[str],
        only: Collection[str] | None = None,
    ) -> None:
        """Poll the groups whose turn it is, or `only` these, given the ids of their consumers.

        `behind` names the groups with lag: only their queues can be stuck.
        """
        chosen = self._groups.choose(clients) if only is None else clients.keys() & set(only)
        await gather_answers(
            chosen,
            lambda group: self._poll(group, clients[group], is_behind=group in behind),
            _CONCURRENT_GROUPS,
        )
        for known in (self.times, self.findings, self.uneven):
            for gone in known.keys() - clients.keys():
                known.pop(gone)

    async def _poll(self, group: str, clients: Sequence[str], *, is_behind: bool) -> None:
        asked = (self._info(group, each) for each in clients[: self._most])
        infos = [info for info in await asyncio.gather(*asked) if info is not None]
        running = {info.client_id: info for info in infos}
        # What brokers report about a group, and its connections, is part of a look.
        findings = different_subscriptions(group, running)
        if is_behind:
            findings += await self._stuck(group, running)
        endless = next(filter(retries_for_ever, infos), None)
        self.findings[group] = MemberFindings(
            findings,
            None if endless is None else endless.client_id,
            await self._uneven(group, running),
        )
        self.times.pop(group, None)
        if found := times_of(infos):
            self.times[group] = found

    async def _info(self, group: str, client_id: str) -> RunningInfo | None:
        async with self._free:
            return await _in_time(self._admin.consumers.running_info(group, client_id))

    async def _uneven(self, group: str, running: Mapping[str, RunningInfo]) -> tuple[Uneven, ...]:
        """Topics that have been shared unevenly for long enough."""
        found = list(uneven_topics(running))
        if not found or not await self._are_all(group, running):
            self.uneven.pop(group, None)
            return ()
        now, before = self._clock.monotonic(), self.uneven.get(group, {})
        lasting: dict[Uneven, tuple[float, int]] = {}
        for each in found:
            since, polls = before.get(each, (now, 0))
            lasting[each] = since, polls + 1
        self.uneven[group] = lasting
        return tuple(
            each
            for each, (since, polls) in lasting.items()
            if polls >= UNEVEN_POLLS and now - since >= UNEVEN_AFTER
        )

    async def _are_all(self, group: str, running: Mapping[str, RunningInfo]) -> bool:
        """Whether these are all members, and of a group that shares queues."""
        # Asked afterwards: a member that joined meanwhile may own what seems to have no owner.
        members, _ = await _in_time(self._admin.consumers.look(group)) or (None, ())
        return (
            members is not None
            and running.keys() >= set(members.client_ids)
            and (members.model, members.consume_type) == ("clustering", "push")
        )

    async def _stuck(self, group: str, running: Mapping[str, RunningInfo]) -> tuple[Finding, ...]:
        """Queues without an owner, or whose owner does not pull.

        Known only when all members have reported what they own, which push consumers do.
        """
        if not await self._are_all(group, running):
            return ()
        # None if the group was deleted meanwhile, or its brokers do not answer: a fault of its own.
        progress = await _in_time(self._admin.groups.progress(group, owners=False))
        return () if progress is None else queue_findings(progress, running, self._clock.now())


async def _in_time(asked: Awaitable[T]) -> T | None:
    """An answer about a group or a consumer; None: there was none in time."""
    try:
        async with asyncio.timeout(_MEMBER_TIMEOUT):
            return await asked
    except (OrbitError, TimeoutError) as error:
        log.debug("no answer about the members of a group: %s", error)
        return None


def times_of(infos: Iterable[RunningInfo]) -> HandlerTimes | None:
    """The handlers of a group by the reports of its consumers; None: none has worked."""
    topics = [each for info in infos for each in info.topics.items()]
    working = [each for each in topics if each[1].ok_rate + each[1].failed_rate > 0]
    if not working:
        return None
    # Retried messages are rare and say little about the usual time of a handler.
    usual = [each for name, each in working if not is_retry_topic(name)]
    chosen = usual or [each for _, each in working]
    times = [each.consume_time for each in chosen]
    reported = [each.consume_times for each in chosen if each.consume_times is not None]
    calls = CallTimes.together(reported)
    return HandlerTimes(
        median=statistics.median(times),
        slowest=max(times),
        ok_rate=sum(each.ok_rate for _, each in working),
        failed_rate=sum(each.failed_rate for _, each in working),
        pull_rate=sum(each.pull_rate for _, each in topics),
        pull_time=max(each.pull_time for _, each in topics),
        p50=calls.p50,
        p95=calls.p95,
        p99=calls.p99,
        longest=calls.longest,
    )


@dataclass(frozen=True, slots=True)
class MemberFindings:
    """What is wrong with a group by the reports of its members."""

    findings: tuple[Finding, ...] = ()
    #: An orderly member that retries without a limit.
    endless: str | None = None
    #: Topics whose queues have not been shared evenly for some time.
    uneven: tuple[Uneven, ...] = ()


@dataclass(frozen=True, slots=True)
class Uneven:
    """A topic whose queues are not shared evenly."""

    topic: str
    #: How many queues each member has, those with the most first.
    counts: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """`client-1 has 4 of its queues and client-2 has none`"""
        (most, many), (least, few) = self.counts[0], self.counts[-1]
        return f"{most} has {many} of its queues and {least} has {few or 'none'}"


def uneven_topics(running: Mapping[str, RunningInfo]) -> Iterator[Uneven]:
    """The topics of a group that are shared unevenly, by the reports of all its members.

    The usual strategies give every member as many queues as any other, or one less. A difference of
    two shows that members see different groups, use different strategies, or keep queues too long.
    Strategies that are uneven on purpose (hash, machine room, by hand) are not judged.
    """
    if any(_is_uneven_on_purpose(info) for info in running.values()):
        return
    topics = {each.topic for info in running.values() for each in info.subscriptions}
    for topic in sorted(topics):
        if is_retry_topic(topic):
            continue
        counts = {
            client_id: sum(each.queue.topic == topic for each in info.queues if not each.is_dropped)
            for client_id, info in running.items()
            if any(each.topic == topic for each in info.subscriptions)
        }
        if max(counts.values()) - min(counts.values()) > 1:
            ranked = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
            yield Uneven(topic, tuple(ranked))


def _is_uneven_on_purpose(info: RunningInfo) -> bool:
    # Java's default prints an object: `org.apache…AllocateMessageQueueAveragely@1b2c`.
    said = info.properties.get(_STRATEGY, "").partition("@")[0].lower()
    is_even = any(word in said for word in _EVEN) and not any(word in said for word in _BY_ROOM)
    return bool(said) and not is_even
