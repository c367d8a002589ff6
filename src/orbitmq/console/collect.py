"""Looks at the cluster every few seconds, and keeps the picture.

One look is a fixed number of requests per broker, whatever the number of topics and groups, plus
the budget of `questions`. Between its steps the loop gets a turn: pages are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from orbitmq.client.admin import (
    AsyncAdmin,
    BrokerNode,
    ClusterStatus,
    GroupSettings,
    GroupSummary,
    Topic,
    TopicKind,
    Unreachable,
)
from orbitmq.client.admin.groups import decode_progress_tables, duplicate_clients, told_findings
from orbitmq.client.admin.members import Finding
from orbitmq.client.engine import Engine
from orbitmq.client.routes import Queue
from orbitmq.clock import Clock, milliseconds
from orbitmq.console.history import REPORT_INTERVAL, WINDOW, HeatMaps, RateMeter
from orbitmq.console.resends import Resent, ResentLetters
from orbitmq.console.settings import TIMEOUT, Budget
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

# What brokers tell only one by one: asked in turn, within a budget, and remembered.
#
# Who is online, how old the oldest waiting message is, what is in a topic, how many messages died:
# each is a question for a single group or topic. A look asks some of them; the others keep the
# answer they had.


log = logging.getLogger(__name__)

T = TypeVar("T")

_HOUR = 3600.0
#: Single questions that may be under way at the same time.
_AT_ONCE = 16

#: A group in a topic.
Pair = tuple[str, str]


class ClusterPoller:
    """Asks in turn."""

    def __init__(
        self, admin: AsyncAdmin, tables: BrokerTables, budget: Budget, clock: Clock
    ) -> None:
        self._admin = admin
        self._tables = tables
        self._clock = clock
        self._budget = budget
        #: How many members a group has, and how they share messages.
        self.members: dict[str, tuple[int, str]] = {}
        #: And their ids.
        self.clients: dict[str, tuple[str, ...]] = {}
        #: What is wrong among the members of a group.
        self.findings: dict[str, tuple[Finding, ...]] = {}
        #: Dead letters of a group, and of them those of the last hour.
        self.dead: dict[str, tuple[int, int]] = {}
        #: And those that were sent again.
        self.resent: dict[str, Resent] = {}
        #: What is in a topic, and how fast it grows.
        self.contents: dict[str, tuple[TopicContent, float]] = {}
        #: When the oldest waiting message was stored, and the progress at which that was so.
        self._oldest: dict[Pair, tuple[float, int]] = {}
        self._growths: dict[str, RateMeter] = {}
        #: How much a broker had deleted of a topic, and when the oldest that was left was stored.
        self._first: dict[tuple[str, str], tuple[int, float | None]] = {}
        #: Topics that a group subscribes to and has not reported from: brokers' tables lack them.
        self._unreported: dict[str, dict[Queue, QueuePosition]] = {}
        #: What is known of the groups of brokers that do not tell of all at once.
        self._one_by_one: dict[str, tuple[GroupPositions, Rotation]] = {}
        self._members_turn = Rotation(budget.members)
        self._ages_turn = Rotation(budget.ages)
        self._dead_turn = Rotation(budget.dead_letters)
        self._resent_turn = Rotation(budget.resent)
        self._letters = ResentLetters(
            admin, tables, most=budget.letters, older=budget.older_letters
        )
        self._dead_counted: dict[str, _Counted] = {}
        self._contents_turn = Rotation(budget.topics)

    def age(self, pair: Pair) -> float | None:
        """How long the oldest message has waited; None: not known yet."""
        found = self._oldest.get(pair)
        return None if found is None else max(0.0, self._clock.now() - found[0])

    # Progress.

    async def positions(
        self, brokers: Collection[BrokerNode], groups: Collection[str]
    ) -> GroupPositions:
        """The progress of all groups, by one table of each broker."""

        async def ask(node: BrokerNode) -> GroupPositions:
            try:
                return await self._tables.positions(node.address)
            except (BrokerRefused, ConnectionLost) as error:
                # Not known there, or more than a frame can hold: groups are asked for in turn.
                log.debug("groups are asked for one by one: %s", error)
                return await self._in_turn(node, groups)

        merged: GroupPositions = {}
        for part in await self._each(brokers, ask):
            for group, queues in part.items():
                if group in groups:
                    merged.setdefault(group, {}).update(queues)
        return merged

    async def _in_turn(self, node: BrokerNode, groups: Collection[str]) -> GroupPositions:
        fresh: tuple[GroupPositions, Rotation] = ({}, Rotation(self._budget.members))
        known, turn = self._one_by_one.setdefault(str(node), fresh)

        async def ask(group: str) -> tuple[str, dict[Queue, QueuePosition]]:
            return group, await self._tables.group_positions(node.address, group)

        known |= dict(await self._each(turn.next(groups), ask))
        return known

    # Members.

    async def ask_members(
        self, brokers: Collection[BrokerNode], positions: GroupPositions, groups: Collection[str]
    ) -> None:
        """Who is online; adds to `positions` what a group has not reported from yet."""
        behind = {group for group, queues in positions.items() if _is_behind(queues)}

        async def ask(group: str) -> None:
            members, told = await self._admin.consumers.look(group)
            self.findings.pop(group, None)
            self._unreported.pop(group, None)
            if members is None:
                self.members[group] = (0, "")
                self.clients.pop(group, None)
                return
            self.clients[group] = tuple(sorted({each.client_id for each in members.clients}))
            self.members[group] = (len(members.clients), members.model)
            if found := (*told_findings(told), *duplicate_clients(members)):
                self.findings[group] = found
            if members.model != "broadcasting":
                topics = [each.topic for each in members.subscriptions]
                await self._ask_unreported(brokers, group, topics, positions.get(group, {}))

        if brokers:
            urgent = behind | self._unreported.keys()
            await self._each(self._members_turn.next(groups, urgent), ask)
        for gone in self.clients.keys() - set(groups):
            del self.clients[gone]
        for group, queues in self._unreported.items():
            if group in groups:
                positions[group] = queues | positions.get(group, {})

    async def _ask_unreported(
        self,
        brokers: Collection[BrokerNode],
        group: str,
        topics: Iterable[str],
        reported: Mapping[Queue, QueuePosition],
    ) -> None:
        known = {queue.topic for queue in reported}
        silent: dict[Queue, QueuePosition] = {}
        for topic in topics:
            if topic in known or is_retry_topic(topic):
                continue
            for node in brokers:
                silent |= await self._tables.group_positions(node.address, group, topic)
        if silent:
            self._unreported[group] = silent

    # Ages.

    async def ask_ages(self, brokers: Collection[BrokerNode], behind: Mapping[Pair, int]) -> None:
        """How old what waits is; `behind` has the progress of each pair with messages waiting."""
        names = {f"{group} {topic}": (group, topic) for group, topic in behind}
        # While progress rests, the oldest message is the one it was.
        moved = [
            name
            for name, pair in names.items()
            if pair not in self._oldest or self._oldest[pair][1] != behind[pair]
        ]

        async def ask(name: str) -> tuple[Pair, float | None]:
            group, topic = names[name]
            ages = [await self._tables.age(node.address, group, topic) for node in brokers]
            return (group, topic), max((age for age in ages if age is not None), default=None)

        now = self._clock.now()
        for pair, age in await self._each(self._ages_turn.next(moved), ask):
            if age is not None:
                self._oldest[pair] = (now - age, behind[pair])
        for gone in self._oldest.keys() - behind.keys():
            del self._oldest[gone]

    # Dead letters and contents.

    async def ask_dead_letters(
        self,
        brokers: Collection[BrokerNode],
        topics: Iterable[Topic],
        groups: Collection[str],
        *,
        resent: bool = True,
    ) -> None:
        """How many there are, how many died in the last hour, and which were sent again.

        Without `resent` nobody is asked about the last.
        """
        dying = [
            group
            for topic in topics
            if topic.kind is TopicKind.DEAD_LETTER
            and (group := topic.name.removeprefix(dead_letter_topic(""))) in groups
        ]
        since = self._clock.now() - _HOUR
        names = frozenset(node.broker for node in brokers)

        async def ask(group: str) -> None:
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
            self.dead[group] = (count, recent)
            self._dead_counted[group] = _Counted(bounds, names, since)

        await self._each(self._dead_turn.next(dying), ask)
        for gone in self.dead.keys() - set(dying):
            del self.dead[gone]
            self._dead_counted.pop(gone, None)
            self.resent.pop(gone, None)
            self._letters.forget(gone)
        if resent:
            recent = [group for group, (_, recent) in self.dead.items() if recent]
            some = [group for group, (count, _) in self.dead.items() if count]
            chosen = self._resent_turn.next(some if self._budget.older_letters else recent, recent)
            looked = {
                group: counted.bounds
                for group in chosen
                # Counted at others, it has its turn when it is counted again.
                if (counted := self._dead_counted[group]).brokers == names
            }
            await self._letters.look(looked, brokers, since)
        # Of the same hour and brokers as the numbers that these are compared with.
        for group, counted in self._dead_counted.items():
            self.resent[group] = self._letters.known(group, counted.since, counted.brokers)

    async def ask_contents(self, brokers: Collection[BrokerNode], topics: Iterable[Topic]) -> None:
        """What is in topics."""
        names = [topic.name for topic in topics if topic.kind is not TopicKind.SYSTEM]

        async def ask(topic: str) -> None:
            found = [await self._content(node, topic) for node in brokers]
            parts = [part for part in found if part is not None]
            content = TopicContent(
                sum(part.messages for part in parts),
                sum(part.total for part in parts),
                sum(part.deleted for part in parts),
                max((part.last_stored_at for part in parts if part.last_stored_at), default=None),
                min((part.first_stored_at for part in parts if part.first_stored_at), default=None),
            )
            self.contents[topic] = (content, self._growth(topic, content))

        await self._each(self._contents_turn.next(names), ask)
        for gone in self.contents.keys() - set(names):
            del self.contents[gone]
            self._growths.pop(gone, None)
        self._first = {key: each for key, each in self._first.items() if key[1] in self.contents}

    async def _content(self, node: BrokerNode, topic: str) -> TopicContent | None:
        """What a broker has of a topic; its oldest message is looked up when that has changed."""
        content = await self._tables.content(node.address, topic)
        if content is None or not content.messages:
            return content
        key = (str(node), topic)
        deleted, first = self._first.get(key, (-1, None))
        if deleted != content.deleted:
            first = await self._tables.first_stored(node.address, topic)
            self._first[key] = (content.deleted, first)
        return replace(content, first_stored_at=first)

    def _growth(self, topic: str, content: TopicContent) -> float:
        """Messages per second, over the same time as all rates unless its turns are rarer."""
        meter = self._growths.setdefault(topic, RateMeter())
        meter.add(self._clock.monotonic(), content.total, 0)
        return meter.rates[0]

    async def _each(self, keys: Iterable[object], ask: Callable[..., Awaitable[T]]) -> list[T]:
        """The answers that came; a question that failed is asked again in its next turn."""
        free = asyncio.Semaphore(_AT_ONCE)
        answers: list[T] = []

        async def tried(key: object) -> None:
            async with free:
                try:
                    answers.append(await ask(key))
                except OrbitError as error:
                    log.debug("not answered: %s", error)

        await asyncio.gather(*map(tried, keys))
        return answers


@dataclass(frozen=True, slots=True)
class _Counted:
    """How the dead letters of a group were counted last."""

    #: Its queues, from the first to the next offset.
    bounds: Mapping[Queue, tuple[int, int]]
    #: Who was asked.
    brokers: frozenset[str]
    #: When the hour began.
    since: float


def _is_behind(queues: Mapping[Queue, QueuePosition]) -> bool:
    return any(place.lag for place in queues.values())


# Taking turns: more things to ask about than questions that may be asked.
#
# Every name gets its turn before any gets a second one; those that are urgent come first, but never
# take all places: a third is kept for the others.


class Rotation:
    """Remembers when each name had its turn."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._turns: dict[str, int] = {}
        self._turn = 0

    def next(self, names: Iterable[str], urgent: Collection[str] = ()) -> list[str]:
        """Whose turn it is now."""
        everybody = list(names)
        present = set(everybody)
        for gone in self._turns.keys() - present:
            del self._turns[gone]
        if len(everybody) <= self._size:
            chosen = everybody
        else:
            first = sorted(present.intersection(urgent), key=self._waited)
            reserved = max(1, self._size // 3)
            chosen = first[: self._size - reserved]
            taken = set(chosen)
            rest = sorted((name for name in everybody if name not in taken), key=self._waited)
            chosen += rest[: self._size - len(chosen)]
        self._turn += 1
        for name in chosen:
            self._turns[name] = self._turn
        return chosen

    def _waited(self, name: str) -> tuple[int, str]:
        return self._turns.get(name, 0), name


# What single brokers keep in tables, read with one question each.
#
# Administration sums these tables up; the console needs what is in them: offsets of every queue
# give rates without asking, the progress of a sample ago tells a stalled group from one that
# drains.


#: A broker with thousands of groups takes its time.
TABLE_TIMEOUT = 30.0
#: Bytes of an answer that is read aside.
_LARGE = 100_000

_THERE_OR_NOT = frozenset({int(ResponseCode.SUCCESS), int(ResponseCode.TOPIC_NOT_EXIST)})


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """How far a group is in a queue."""

    #: Where the next message will be stored.
    end: int
    #: The next message that is not finished.
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
    #: The sum of the next offsets: how many messages it has ever had.
    total: int
    #: The sum of the first offsets: grows when old messages are deleted.
    deleted: int
    last_stored_at: float | None
    first_stored_at: float | None = None
    #: The first and the next offset of each queue.
    queues: Mapping[int, tuple[int, int]] = field(default_factory=dict, hash=False)


class BrokerTables:
    """Asks brokers for their tables."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: Queues by the text that names them: they are the same in every look.
        self._queues: dict[str, Queue] = {}

    async def positions(self, broker: Address) -> GroupPositions:
        """The progress of all groups of a broker."""
        answer = await self._engine.ask(
            broker,
            RequestCode.GET_BROKER_CONSUME_STATS,
            GetBrokerConsumeStatsRequest(is_order=False),
            timeout=TABLE_TIMEOUT,
        )
        body = bytes(answer.body)
        if len(body) < _LARGE:
            return decode_positions(body, self._queues)
        # A tenth of a second of work: pages are answered meanwhile.
        return await asyncio.to_thread(decode_positions, body, self._queues)

    async def group_positions(
        self, broker: Address, group: str, topic: str | None = None
    ) -> dict[Queue, QueuePosition]:
        """The progress of a group; in one topic also when it has not reported any yet."""
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
        """The times of a topic's messages, by queue; of the queue itself whoever the group is."""
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
        """What is in a topic; None when the broker does not have it."""
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


# The cluster as the console last saw it: values that views are made of.


#: Seconds that a message waits, and without progress, after which a group is called stalled.
STALLED_AFTER = 60.0
#: Seconds until the next report of a member that is a little late with it.
_LATE_REPORT = 1.1 * REPORT_INTERVAL
NONE_RESENT = Resent()


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
    """A group now."""

    name: str
    settings: GroupSettings
    brokers: tuple[str, ...]
    parts: tuple[TopicPart, ...]
    is_uniform: bool = True
    #: None: it had no turn yet.
    members: int | None = None
    model: str = ""
    #: Seconds since its progress last moved while messages waited; 0 when it moves.
    still: float = 0.0
    #: All of them, and those of the last hour; whether they were sent again or not.
    dead_letters: int = 0
    dead_last_hour: int = 0
    resent: Resent = NONE_RESENT
    #: What brokers and connections say is wrong among its members.
    findings: tuple[Finding, ...] = ()
    #: Seconds without progress after which it is called stalled.
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
        """Dead letters that were looked up and that nobody has sent again."""
        return self.resent.open

    @property
    def open_last_hour(self) -> int:
        """Of these, those that died in the last hour."""
        return self.resent.open_last_hour

    @property
    def unknown_letters(self) -> int:
        """Dead letters that were not looked up: nobody knows whether they were sent again."""
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
        # Members report every few seconds: what one report tells, more or less, is noise.
        noise = self.in_rate * _LATE_REPORT / max(self.measured, _LATE_REPORT)
        margin = max(0.5, noise)
        if gain > margin:
            return Pace.DRAINING
        is_judged = self.measured >= WINDOW
        return Pace.GROWING if is_judged and gain < -margin else Pace.KEEPING


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSample:
    """A topic now."""

    topic: Topic
    in_rate: float = 0.0
    #: None: it had no turn yet.
    messages: int | None = None
    first_stored_at: float | None = None
    last_stored_at: float | None = None
    #: The groups that have progress in it, and how far each is behind.
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
    """Everything at one time."""

    at: float
    cluster: ClusterStatus
    topics: Mapping[str, TopicSample] = field(hash=False)
    groups: Mapping[str, GroupSample] = field(hash=False)
    unreachable: tuple[Unreachable, ...] = ()
    #: Messages per second that are stored and that are finished, by broker.
    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    #: Requests that this look took.
    requests: int = 0
    seconds: float = 0.0

    @property
    def in_rate(self) -> float:
        return sum(came for came, _ in self.rates.values())

    @property
    def out_rate(self) -> float:
        """What groups finish."""
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


#: Looks between two readings of the configuration of all topics and groups.
CONFIGURATION_EVERY = 6

#: Next offset, progress, lag and number of queues of a group in each of its topics.
Totals = dict[str, tuple[int, int, int, int]]


class Collector:
    """Keeps the picture."""

    def __init__(
        self,
        admin: AsyncAdmin,
        tables: BrokerTables,
        budget: Budget,
        clock: Clock,
        *,
        every: float = 5.0,
        patience: float = STALLED_AFTER,
        on_sample: Callable[[Snapshot], Awaitable[None]] | None = None,
    ) -> None:
        self._admin = admin
        self._clock = clock
        self._every = every
        self._patience = patience
        self._on_sample = on_sample
        self._questions = ClusterPoller(admin, tables, budget, clock)
        self._wake = asyncio.Event()
        self._looks = 0
        self._is_stale = True
        self._topics: tuple[Topic, ...] = ()
        self._groups: dict[str, GroupSummary] = {}
        self._unreachable: tuple[Unreachable, ...] = ()
        self._meters: dict[Pair, RateMeter] = {}
        self._broker_meters: dict[str, RateMeter] = {}
        #: The last look, and why there is none.
        self.snapshot: Snapshot | None = None
        self.problem: str | None = None
        self.heat = HeatMaps()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self._wake.clear()
            await self._try()
            try:
                async with asyncio.timeout(self._every):
                    await self._wake.wait()
            except TimeoutError:
                continue

    @property
    def clients(self) -> Mapping[str, tuple[str, ...]]:
        """The ids of the consumers of each group, as far as known."""
        return self._questions.clients

    def look_soon(self, *, configuration: bool = True) -> None:
        """Something was changed: look now instead of later."""
        self._is_stale = self._is_stale or configuration
        self._wake.set()

    async def _try(self) -> None:
        try:
            snapshot = await self.look()
        except OrbitError as error:
            if self.problem is None:
                log.warning("the cluster cannot be seen: %s", error)
            self.problem = str(error)
            return
        self.problem = None
        if self._on_sample is not None:
            await self._on_sample(snapshot)

    async def look(self, *, resent: bool = True) -> Snapshot:
        """One look. Raises `OrbitError` when no name server answers.

        Without `resent` nobody is asked which dead letters were sent again meanwhile.
        """
        began, before = self._clock.monotonic(), self._admin.requests
        questions = self._questions
        cluster = await self._admin.cluster()
        if self._is_stale or self._looks % CONFIGURATION_EVERY == 0:
            await self._read_configuration()
        self._looks += 1
        brokers = readers(cluster)
        positions = await questions.positions(brokers, self._groups)
        await questions.ask_members(brokers, positions, self._groups)
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
        await questions.ask_ages(brokers, behind)
        await questions.ask_dead_letters(brokers, self._topics, self._groups, resent=resent)
        await questions.ask_contents(brokers, self._topics)
        groups = {name: self._group(name, totals.get(name, {})) for name in self._groups}
        await asyncio.sleep(0)
        topics = self._all_topics(groups)
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
        # A broker that the cluster's status shows as down is said to be so there.
        self._unreachable = tuple(dict.fromkeys((*topics.unreachable, *groups.unreachable)))

    # The picture.

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
        """Of a broker: all messages that it has stored, and all that groups have finished there.

        What brokers tell as their rates is of other seconds, and counts what is pulled.
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

    def _group(self, name: str, totals: Totals) -> GroupSample:
        questions, summary = self._questions, self._groups[name]
        monotonic = self._clock.monotonic()
        parts, still, measured = [], [], []
        for topic, (_, _, lag, count) in sorted(totals.items()):
            meter = self._meters[(name, topic)]
            came, went = meter.rates
            age = questions.age((name, topic)) if lag else 0.0
            parts.append(TopicPart(topic, lag, count, came, went, age))
            if lag and meter.moved_at is not None:
                still.append(monotonic - meter.moved_at)
                measured.append(meter.seconds)
        members, model = questions.members.get(name, (None, ""))
        dead, recent = questions.dead.get(name, (0, 0))
        return GroupSample(
            name=name,
            settings=summary.settings,
            brokers=summary.brokers,
            parts=tuple(parts),
            is_uniform=summary.is_uniform,
            members=members,
            model=model,
            # It moves as long as it moves anywhere.
            still=min(still, default=0.0),
            dead_letters=dead,
            dead_last_hour=recent,
            resent=questions.resent.get(name, NONE_RESENT),
            findings=questions.findings.get(name, ()),
            patience=self._patience,
            measured=min(measured, default=0.0),
        )

    def _all_topics(self, groups: Mapping[str, GroupSample]) -> dict[str, TopicSample]:
        readers: dict[str, dict[str, int]] = {}
        rates: dict[str, float] = {}
        for group in groups.values():
            for part in group.parts:
                readers.setdefault(part.topic, {})[group.name] = part.lag
                rates[part.topic] = max(rates.get(part.topic, 0.0), part.in_rate)
        return {
            topic.name: self._topic(topic, readers.get(topic.name, {}), rates.get(topic.name))
            for topic in self._topics
        }

    def _topic(self, topic: Topic, groups: dict[str, int], rate: float | None) -> TopicSample:
        found = self._questions.contents.get(topic.name)
        if found is None:
            return TopicSample(topic=topic, in_rate=rate or 0.0, groups=groups)
        content, counted = found
        return TopicSample(
            topic=topic,
            in_rate=counted if rate is None else rate,
            messages=content.messages,
            first_stored_at=content.first_stored_at,
            last_stored_at=content.last_stored_at,
            groups=groups,
        )


def readers(cluster: ClusterStatus) -> list[BrokerNode]:
    """One of every broker name that answers, the master if it does."""
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
