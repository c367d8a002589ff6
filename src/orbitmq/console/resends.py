"""Dead letters and retries: which were sent again, resending, triage, and later attempts.

Looking up a letter takes requests to every broker that answers, so that a look does some of them.
Until its turn a letter counts as open. A resent letter is not looked up
again, and an open one only after a topic that its copy would be in has grown, or when a broker
answers that did not.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.deadletters import (
    DeadLetter,
    LetterTrace,
    ResendOutcome,
    ResendResult,
)
from orbitmq.client.admin.messages import ALL, BATCH, QueueReader, whole_topic
from orbitmq.client.admin.requests import AdminRequests, BrokerNode
from orbitmq.client.engine import Engine
from orbitmq.client.routes import Queue
from orbitmq.console.settings import TIMEOUT, BadInput, NotThere
from orbitmq.console.words import several
from orbitmq.errors import OrbitError
from orbitmq.message.properties import REAL_TOPIC
from orbitmq.names import dead_letter_topic, retry_topic
from orbitmq.wire.bodies import DelayOffsets
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.javajson import decode_body

if TYPE_CHECKING:
    from orbitmq.console.collect import BrokerTables, DeadLetters
    from orbitmq.console.history import Audit
    from orbitmq.console.http import Events


log = logging.getLogger(__name__)

#: The newest letters of a group that are known.
NEWEST = 200

#: The first and the next offset of each queue of a group's dead letters.
Bounds = Mapping[Queue, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Resent:
    """Dead letters of a group, as far as they were looked up."""

    looked: int = 0  #: letters that were looked up
    count: int = 0  #: of these, sent again
    open_last_hour: int = 0  #: of the others, those that died in the last hour
    resent_last_hour: int = 0  #: of those sent again, likewise

    @property
    def open(self) -> int:
        """Letters that were not sent again."""
        return self.looked - self.count


class ResentLetters:
    """Looks up which letters were sent again, and keeps the answers."""

    def __init__(self, admin: AsyncAdmin, *, most: int, only_last_hour: bool = False) -> None:
        """A look looks up `most` letters, of all groups together."""
        self._admin = admin
        self._most = most
        self._only_last_hour = only_last_hour
        self._turn = 0
        self._groups: dict[str, dict[str, _Letter]] = {}
        #: The offsets up to which the queues of a group were read.
        self._ends: dict[str, dict[Queue, int]] = {}

    async def look(
        self,
        groups: Mapping[str, Bounds],
        brokers: Collection[BrokerNode],
        totals: Mapping[str, int],
        since: float,
    ) -> None:
        """Look up some letters of these groups at the brokers that answer.

        `totals` says how many messages each topic has ever had, as far as known; `since` is the
        beginning of the last hour.
        """
        self._turn += 1
        left = self._most
        names = {node.broker for node in brokers}
        for waiting, (group, bounds) in zip(range(len(groups), 0, -1), groups.items(), strict=True):
            # What one group does not need is left for the next ones.
            share = -(-left // waiting)
            # A broker may have stopped answering since the letters were counted.
            there = {queue: at for queue, at in bounds.items() if queue.broker in names}
            try:
                await self._read(group, there, since)
            except OrbitError as error:
                # Letters that were read before have their turn.
                log.debug("dead letters of %s were not read: %s", group, error)
            left -= await self._look_up(self._groups.get(group, {}), brokers, totals, share)

    def known(self, group: str, since: float, brokers: Collection[str]) -> Resent:
        """What is known of a group's letters at these brokers."""
        letters = [
            each
            for each in self._groups.get(group, {}).values()
            if each.is_known and each.queue.broker in brokers
        ]
        recent = [each.is_resent for each in letters if each.trace.died_at >= since]
        resent = sum(each.is_resent for each in letters)
        return Resent(len(letters), resent, recent.count(False), recent.count(True))

    def resent(self, group: str) -> frozenset[str]:
        """The ids of a group's letters that are known to be sent again."""
        letters = self._groups.get(group, {}).items()
        return frozenset(name for name, each in letters if each.is_known and each.is_resent)

    def keep(self, counted: Mapping[str, DeadLetters]) -> None:
        """Forget letters that were deleted, and other groups."""
        for gone in self._groups.keys() - counted.keys():
            del self._groups[gone], self._ends[gone]
        for group, ends in self._ends.items():
            bounds, brokers = counted[group].bounds, counted[group].brokers
            for queue, end in list(ends.items()):
                # The queue was deleted, and perhaps created again. A broker that does not answer
                # keeps its letters.
                if queue.broker in brokers and bounds.get(queue, (0, 0))[1] < end:
                    del ends[queue]
            self._groups[group] = {
                name: each
                for name, each in self._groups[group].items()
                if each.queue in ends and each.offset >= bounds.get(each.queue, (0, 0))[0]
            }

    async def _read(self, group: str, bounds: Bounds, since: float) -> None:
        """Read the letters that died since the last look."""
        ends = self._ends.get(group, {})
        # Clocks of brokers differ, so that the times of letters do not say which ones are new.
        new = {queue: (max(low, ends.get(queue, 0)), end) for queue, (low, end) in bounds.items()}
        found = await self._newest(group, new)
        if self._only_last_hour:
            found = [each for each in found if each.died_at >= since]
        letters = self._groups.get(group, {}) | {each.id: _Letter.of(each) for each in found}
        newest = sorted(letters.values(), key=lambda each: -each.trace.died_at)[:NEWEST]
        self._groups[group] = {each.trace.letter_id: each for each in newest}
        self._ends[group] = ends | {queue: end for queue, (_, end) in bounds.items()}

    async def _newest(self, group: str, bounds: Bounds) -> list[DeadLetter]:
        """The newest letters within these bounds."""
        topic = dead_letter_topic(group)
        cursor = whole_topic(topic, bounds, ALL, backwards=True)
        if not cursor.left:
            return []
        page = await self._admin.messages.page(topic, cursor=cursor.text, size=NEWEST)
        return [DeadLetter(group, message) for message in page.messages]

    async def _look_up(
        self,
        letters: Mapping[str, _Letter],
        brokers: Collection[BrokerNode],
        totals: Mapping[str, int],
        most: int,
    ) -> int:
        """Look up at most `most` letters, those whose turn was longest ago first; their number."""
        due = [each for each in letters.values() if each.is_due(brokers, totals)]
        chosen = sorted(due, key=lambda each: (each.turn, -each.trace.died_at))[:most]
        for letter in chosen:
            letter.turn = self._turn
        # The admin itself limits how many requests wait at a time.
        await asyncio.gather(*(self._look_up_one(each, brokers, totals) for each in chosen))
        return len(chosen)

    async def _look_up_one(
        self, letter: _Letter, brokers: Collection[BrokerNode], totals: Mapping[str, int]
    ) -> None:
        try:
            copy = await letter.trace.copy(self._admin.messages, brokers=brokers)
        except OrbitError as error:
            log.debug("letter %s was not looked up: %s", letter.trace.letter_id, error)
            return
        letter.is_known = True
        letter.is_resent = copy is not None
        letter.brokers = frozenset(node.broker for node in brokers)
        letter.totals = letter.totals_in(totals)


@dataclass(slots=True)
class _Letter:
    """A letter, and what was found when it was looked up."""

    queue: Queue
    offset: int
    trace: LetterTrace
    is_known: bool = False
    is_resent: bool = False
    #: The brokers that were asked for copies when it was looked up.
    brokers: frozenset[str] = frozenset()
    #: How many messages the topics of its copies had ever had then.
    totals: list[int | None] = field(default_factory=list)
    #: The look in which it last had its turn.
    turn: int = 0

    @classmethod
    def of(cls, letter: DeadLetter) -> _Letter:
        message = letter.message
        # Without a unique id it has no copies that could be found.
        is_known = message.unique_id is None
        return cls(message.queue, message.queue_offset, LetterTrace.of(letter), is_known)

    def is_due(self, brokers: Iterable[BrokerNode], totals: Mapping[str, int]) -> bool:
        """Whether there may be a copy that was not found when it was looked up."""
        if self.is_resent or self.trace.unique_id is None:
            return False
        if not self.is_known or self.totals != self.totals_in(totals):
            return True
        return any(node.broker not in self.brokers for node in brokers)

    def totals_in(self, totals: Mapping[str, int]) -> list[int | None]:
        return [totals.get(topic) for topic in self.trace.topics]


SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
#: Messages that are read at one broker, those of other groups included.
MOST = 512
#: Requests that wait for an answer at the same time.
_CONCURRENT = 8


@dataclass(frozen=True, slots=True)
class LaterAttempts:
    """How many messages of a group wait for the delay before their next attempt.

    No lag includes them. A broker keeps them in its schedule topic, one queue per delay level,
    among the messages of other groups, so that they are read and counted up to a limit.
    """

    count: int
    #: False: more may wait, among those that were not read.
    is_all: bool = True

    def __str__(self) -> str:
        """`13 messages wait for a later attempt`, with `at least` if not all were read."""
        if not self.count and not self.is_all:
            return "not known: too many wait for later, of all groups together"
        waits = several(self.count, "message waits", "messages wait")
        return f"{'' if self.is_all else 'at least '}{waits} for a later attempt"


async def later_attempts(
    engine: Engine,
    tables: BrokerTables,
    brokers: Iterable[BrokerNode],
    group: str,
    *,
    most: int = MOST,
) -> LaterAttempts | None:
    """The later attempts of a group at all brokers; None: a broker does not answer."""
    reading = QueueReader(AdminRequests(engine, at_once=_CONCURRENT, timeout=TIMEOUT))

    async def at(node: BrokerNode) -> LaterAttempts:
        return await _at_broker(engine, tables, reading, node, retry_topic(group), most)

    try:
        found = await asyncio.gather(*map(at, brokers))
    except OrbitError:
        return None
    return LaterAttempts(sum(each.count for each in found), all(each.is_all for each in found))


async def _at_broker(
    engine: Engine,
    tables: BrokerTables,
    reading: QueueReader,
    node: BrokerNode,
    topic: str,
    most: int,
) -> LaterAttempts:
    answer = await engine.ask(node.address, RequestCode.GET_ALL_DELAY_OFFSET, timeout=TIMEOUT)
    delivered = decode_body(DelayOffsets, answer.body or b"{}").offset_table
    content = await tables.content(node.address, SCHEDULE_TOPIC)
    count, left = 0, most
    for number, (low, end) in sorted(content.queues.items() if content else ()):
        queue = Queue(SCHEDULE_TOPIC, node.broker, number)
        # Levels are counted from 1, their queues from 0.
        offset = max(low, delivered.get(number + 1, low))
        while offset < end:
            if left <= 0:
                return LaterAttempts(count, is_all=False)
            pulled = await reading.pull(node.address, queue, offset, most=min(BATCH, left))
            here = [each for each in pulled.messages if each.queue_offset < end]
            count += sum(each.properties.get(REAL_TOPIC) == topic for each in here)
            left -= len(here)
            if pulled.next_offset <= offset:
                break
            offset = pulled.next_offset
    return LaterAttempts(count)


#: Outcomes that are kept; further ones are only counted.
MOST_OUTCOMES = 10_000
_MOST_REPLAYS = 100


@dataclass(slots=True)
class Replay:
    """A resending, running or ended."""

    id: str
    group: str
    command: str
    is_dry_run: bool
    started_at: float
    ended_at: float | None = None
    counts: dict[str, int] = field(default_factory=dict)
    outcomes: list[ResendOutcome] = field(default_factory=list)
    problem: str | None = None
    was_stopped: bool = False

    @property
    def is_running(self) -> bool:
        return self.ended_at is None

    def add(self, outcome: ResendOutcome) -> None:
        self.counts[outcome.result] = self.counts.get(outcome.result, 0) + 1
        if len(self.outcomes) < MOST_OUTCOMES:
            self.outcomes.append(outcome)

    @property
    def summary(self) -> str:
        """`10 sent, 1 failed`"""
        parts = [f"{number} {result}" for result, number in sorted(self.counts.items())]
        text = ", ".join(parts) or "no letter matched"
        if self.problem is not None:
            return f"{text}; ended by: {self.problem}"
        return f"{text}; stopped" if self.was_stopped else text


class Replays:
    """Resends dead letters in the background."""

    def __init__(self, audit: Audit, events: Events) -> None:
        self._audit = audit
        self._events = events
        self._all: dict[str, Replay] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(
        self,
        group: str,
        outcomes: AsyncGenerator[ResendOutcome, None],
        *,
        dry_run: bool,
        who: str,
        command: str,
    ) -> Replay:
        """Start to send letters. Raises `BadInput` while others of the group are sent."""
        if any(each.group == group and each.is_running for each in self._all.values()):
            raise BadInput(f"dead letters of {group!r} are being sent already; wait, or stop that")
        replay = Replay(secrets.token_urlsafe(9), group, command, dry_run, self._audit.now())
        self._all[replay.id] = replay
        self._forget_some()
        work = self._run(replay, outcomes, who)
        self._tasks[replay.id] = asyncio.create_task(work, name=f"replay of {group}")
        return replay

    def get(self, identity: str) -> Replay:
        """Raises `NotThere`."""
        if identity not in self._all:
            raise NotThere("no such replay; it was long ago, or the console was started since")
        return self._all[identity]

    async def end(self, identity: str) -> Replay:
        """Stop a resending; what was sent stays sent."""
        replay = self.get(identity)
        task = self._tasks.get(identity)
        if task is not None and not task.done():
            replay.was_stopped = True
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return replay

    async def stop(self) -> None:
        for identity in list(self._tasks):
            await self.end(identity)

    @property
    def all(self) -> list[Replay]:
        """The newest first."""
        return list(reversed(self._all.values()))

    async def _run(
        self, replay: Replay, outcomes: AsyncGenerator[ResendOutcome, None], who: str
    ) -> None:
        try:
            async with aclosing(outcomes):
                async for outcome in outcomes:
                    replay.add(outcome)
                    self._events.publish("replay", {"id": replay.id, "counts": replay.counts})
        except OrbitError as error:
            replay.problem = str(error)
        finally:
            replay.ended_at = self._audit.now()
            self._tasks.pop(replay.id, None)
            self._events.publish("replay", {"id": replay.id, "counts": replay.counts})
            if not replay.is_dry_run:
                is_done = replay.problem is None and not replay.counts.get(ResendResult.FAILED)
                await self._audit.note(who, replay.command, replay.summary, is_done=is_done)

    def _forget_some(self) -> None:
        for identity, each in list(self._all.items()):
            if len(self._all) <= _MOST_REPLAYS:
                return
            if not each.is_running:
                del self._all[identity]


#: Letters that a triage reads, the newest first.
LOOKED_AT = 20_000


@dataclass(slots=True)
class Reason:
    """Letters with the same reason: the exception and its first line."""

    name: str
    count: int = 0
    #: How many of them are not known to be sent again.
    open: int = 0
    first_died_at: float = 0.0
    last_died_at: float = 0.0
    #: How many of them were sent again before and died again.
    resent: int = 0
    topics: dict[str, int] = field(default_factory=dict)
    #: The newest.
    sample: DeadLetter | None = None
    #: By age: within the hour, the day, the week, and before.
    ages: list[int] = field(default_factory=lambda: [0, 0, 0, 0])


@dataclass(slots=True)
class Triage:
    """The letters of a group by reason."""

    count: int = 0
    is_complete: bool = True
    reasons: dict[str, Reason] = field(default_factory=dict)

    @property
    def open(self) -> int:
        """Letters that are not known to be sent again."""
        return sum(pile.open for pile in self.reasons.values())

    @property
    def piles(self) -> list[Reason]:
        """Those with the most open letters first."""
        return sorted(self.reasons.values(), key=lambda pile: (-pile.open, -pile.count, pile.name))


_AGES = (3600.0, 86_400.0, 604_800.0)


async def triage(
    letters: AsyncIterator[DeadLetter], now: float, resent: Collection[str] = ()
) -> Triage:
    """Sort letters, the newest first, by reason; `resent` has the ids of those sent again."""
    found = Triage()
    async for letter in letters:
        if found.count == LOOKED_AT:
            found.is_complete = False
            break
        found.count += 1
        _add(found.reasons, letter, now, is_open=letter.id not in resent)
    return found


def _add(piles: dict[str, Reason], letter: DeadLetter, now: float, *, is_open: bool) -> None:
    name = letter.pile
    pile = piles.get(name)
    if pile is None:
        pile = piles[name] = Reason(name, sample=letter, last_died_at=letter.died_at)
    pile.count += 1
    pile.open += is_open
    pile.first_died_at = letter.died_at
    pile.resent += letter.resent_times > 0
    topic = letter.topic or "unknown"
    pile.topics[topic] = pile.topics.get(topic, 0) + 1
    pile.ages[_place(_AGES, now - letter.died_at)] += 1


def _place(limits: Iterable[float], age: float) -> int:
    return sum(age >= limit for limit in limits)
