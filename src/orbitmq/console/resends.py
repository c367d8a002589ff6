"""Dead letters and retries: which were sent again, resending, triage, and later attempts.

Looking up a letter takes a request to every broker, so that a look does some of them. Until its
turn a letter counts neither as open nor as resent. A resent letter is not looked up again, and an
open one only after a topic that its copy would be in has grown. What is known of a broker's letters
is kept while the broker does not answer, and not counted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.deadletters import (
    DeadLetter,
    DeadLetterFilter,
    LetterTrace,
    ResendOutcome,
    ResendResult,
    ResendTo,
)
from orbitmq.client.admin.messages import ALL, BATCH, Cursor, QueueReader, Stretch, whole_topic
from orbitmq.client.admin.requests import AdminRequests, BrokerNode
from orbitmq.client.engine import Engine
from orbitmq.client.routes import Queue
from orbitmq.console.errors import BadInput, NotThere
from orbitmq.console.settings import TIMEOUT
from orbitmq.console.words import several
from orbitmq.errors import OrbitError
from orbitmq.message.properties import REAL_TOPIC
from orbitmq.names import dead_letter_topic, retry_topic
from orbitmq.wire.bodies import DelayOffsets
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.javajson import decode_body

if TYPE_CHECKING:
    from orbitmq.console.answers import Events
    from orbitmq.console.collect import BrokerTables
    from orbitmq.console.history import Audit


log = logging.getLogger(__name__)

#: Letters of a group that are kept, the newest ones.
_KEPT = 1000

#: The first and the next offset of each queue of a group's dead letters.
Bounds = Mapping[Queue, tuple[int, int]]
#: Where a letter lies.
_Place = tuple[Queue, int]
#: How many messages a topic has ever had, by broker.
_Size = tuple[int, ...]


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

    def __init__(
        self, admin: AsyncAdmin, tables: BrokerTables, *, most: int, older: bool = True
    ) -> None:
        """A look looks up `most` letters; without `older` only those of the last hour."""
        self._admin = admin
        self._tables = tables
        self._most = most
        self._older = older
        self._turn = 0
        self._groups: dict[str, _Group] = {}

    async def look(
        self, groups: Mapping[str, Bounds], brokers: Collection[BrokerNode], since: float
    ) -> dict[str, Resent]:
        """Look up some letters; what is known of these groups then.

        `since` is the beginning of the last hour. The bounds are of all queues of `brokers`.
        """
        self._turn += 1
        answered = frozenset(node.broker for node in brokers)
        sizes = _Sizes(self._tables, brokers)
        left = self._most
        found: dict[str, Resent] = {}
        for waiting, (name, bounds) in zip(range(len(groups), 0, -1), groups.items(), strict=True):
            # What one group does not need is left for the next ones.
            share = -(-left // waiting)
            group = self._groups.setdefault(name, _Group(name))
            group.cut(bounds, answered)
            try:
                left -= await self._look_at(group, bounds, share, sizes, since)
            except OrbitError as error:
                log.debug("dead letters of %s were not looked up: %s", name, error)
                left -= share
            found[name] = group.counts(since, answered)
        return found

    def known(self, group: str, since: float, brokers: Collection[str]) -> Resent:
        """What is known of a group's letters at these brokers, without a look."""
        found = self._groups.get(group)
        return Resent() if found is None else found.counts(since, brokers)

    def forget(self, group: str) -> None:
        """Forget a group that is gone."""
        self._groups.pop(group, None)

    async def _look_at(
        self, group: _Group, bounds: Bounds, share: int, sizes: _Sizes, since: float
    ) -> int:
        """Use up to `share` requests for a group; the number used."""
        if (fresh := group.fresh) < share:
            try:
                await self._read(group, bounds, share - fresh, since)
            except OrbitError as error:
                # Letters that were read before have their turn.
                log.debug("dead letters of %s were not read: %s", group.name, error)
        chosen: list[tuple[_Letter, list[str]]] = []
        spent = 0
        for letter in group.in_turn():
            if spent >= share:
                break
            if not self._older and letter.trace.died_at < since:
                continue
            letter.turn = self._turn
            spent += await sizes.measure(letter.trace.topics)
            if not sizes.has(letter.trace.topics):
                continue
            grown = [each for each in letter.trace.topics if letter.sizes.get(each) != sizes[each]]
            if grown:
                chosen.append((letter, grown))
                spent += 1
        # The admin itself limits how many requests wait at a time.
        answers = await asyncio.gather(
            *(self._was_sent(letter, grown, sizes.brokers) for letter, grown in chosen)
        )
        for (letter, grown), was_sent in zip(chosen, answers, strict=True):
            if was_sent:
                group.settle(letter)
            elif was_sent is not None:
                letter.sizes |= {topic: sizes[topic] for topic in grown}
        return spent

    async def _was_sent(
        self, letter: _Letter, topics: list[str], brokers: Collection[BrokerNode]
    ) -> bool | None:
        """Whether a copy is in one of these topics; None: not known."""
        try:
            copy = await letter.trace.copy(self._admin.messages, topics=topics, brokers=brokers)
        except OrbitError as error:
            log.debug("letter %s was not looked up: %s", letter.trace.letter_id, error)
            return None
        return copy is not None

    async def _read(self, group: _Group, bounds: Bounds, most: int, since: float) -> None:
        """Read some letters: first those that died since the last look, then older ones."""
        most = min(most, _KEPT)
        for queue, (_, high) in bounds.items():
            group.read.setdefault(queue, (high, high))
        newer = {queue: (group.read[queue][1], high) for queue, (_, high) in bounds.items()}
        before = group.held
        if any(low < high for low, high in newer.values()):
            left = await self._page(group, newer, most, backwards=False)
            for queue, (_, high) in newer.items():
                group.read[queue] = (group.read[queue][0], left.get(queue, (high, high))[0])
            group.shrink(_KEPT)
        most -= group.held - before
        most = min(most, _KEPT - group.held)
        older = {queue: (low, group.read[queue][0]) for queue, (low, _) in bounds.items()}
        if most <= 0 or not any(low < high for low, high in older.values()):
            return
        if not self._older and group.oldest < since:
            return
        left = await self._page(group, older, most, backwards=True)
        for queue, (low, _) in older.items():
            group.read[queue] = (left.get(queue, (low, low))[1], group.read[queue][1])

    async def _page(
        self, group: _Group, stretches: Bounds, most: int, *, backwards: bool
    ) -> dict[Queue, tuple[int, int]]:
        """Read some letters between these bounds; what is left of each queue."""
        topic = dead_letter_topic(group.name)
        cursor = whole_topic(topic, stretches, ALL, backwards=backwards)
        page = await self._admin.messages.page(topic, cursor=cursor.text, size=most)
        for message in page.messages:
            letter = DeadLetter(group.name, message)
            group.add((message.queue, message.queue_offset), LetterTrace.of(letter))
        left: Iterable[Stretch] = () if page.cursor is None else Cursor.of(page.cursor).left
        return {Queue(topic, each.broker, each.queue_id): (each.start, each.end) for each in left}


@dataclass(slots=True)
class _Letter:
    """A letter of which no copy was found yet."""

    place: _Place
    trace: LetterTrace
    #: The sizes of topics when the letter was last looked for in them; empty: never.
    sizes: dict[str, _Size] = field(default_factory=dict)
    #: The look in which it last had its turn.
    turn: int = 0

    @property
    def is_known(self) -> bool:
        # Without a unique id it has no copies that could be found.
        return bool(self.sizes) or self.trace.unique_id is None


class _Group:
    """What is known of the letters of a group."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: The offsets of each queue between which letters were read.
        self.read: dict[Queue, tuple[int, int]] = {}
        self._waiting: dict[_Place, _Letter] = {}
        #: Those that were sent again, and when they died.
        self._resent: dict[_Place, float] = {}

    @property
    def held(self) -> int:
        return len(self._waiting) + len(self._resent)

    @property
    def fresh(self) -> int:
        """The number of letters that were read and not looked up."""
        return sum(not each.turn and not each.is_known for each in self._waiting.values())

    @property
    def oldest(self) -> float:
        """When the oldest of them died."""
        return min(self._times().values(), default=float("inf"))

    def in_turn(self) -> list[_Letter]:
        """The letters by their last turn, of equal ones the newest first."""
        return sorted(self._waiting.values(), key=lambda each: (each.turn, -each.trace.died_at))

    def add(self, place: _Place, trace: LetterTrace) -> None:
        if place not in self._resent:
            self._waiting[place] = _Letter(place, trace)

    def settle(self, letter: _Letter) -> None:
        """Note that a letter was sent again."""
        del self._waiting[letter.place]
        self._resent[letter.place] = letter.trace.died_at

    def counts(self, since: float, brokers: Collection[str]) -> Resent:
        """What is known of the letters of these brokers."""
        known = [
            each.trace.died_at
            for each in self._waiting.values()
            if each.is_known and each.place[0].broker in brokers
        ]
        resent = [at for (queue, _), at in self._resent.items() if queue.broker in brokers]
        return Resent(
            len(known) + len(resent),
            len(resent),
            sum(at >= since for at in known),
            sum(at >= since for at in resent),
        )

    def cut(self, bounds: Bounds, brokers: Collection[str]) -> None:
        """Forget letters that these brokers have deleted."""
        for queue, (start, end) in list(self.read.items()):
            if queue.broker not in brokers:
                # A broker that does not answer keeps its letters.
                continue
            low, high = bounds.get(queue, (0, 0))
            if high < end:
                # The queue was deleted, and perhaps created again.
                self._drop(place for place in self._times() if place[0] == queue)
                del self.read[queue]
            elif start < low:
                gone = [p for p in self._times() if p[0] == queue and p[1] < low]
                self._drop(gone)
                self.read[queue] = (low, max(low, end))

    def shrink(self, most: int) -> None:
        """Keep the newest letters."""
        times = self._times()
        gone = sorted(times, key=lambda place: (times[place], place))[: max(0, self.held - most)]
        self._drop(gone)
        for queue, offset in gone:
            start, end = self.read[queue]
            self.read[queue] = (max(start, offset + 1), end)

    def _drop(self, places: Iterable[_Place]) -> None:
        for place in list(places):
            self._waiting.pop(place, None)
            self._resent.pop(place, None)

    def _times(self) -> dict[_Place, float]:
        waiting = {place: each.trace.died_at for place, each in self._waiting.items()}
        return waiting | self._resent


class _Sizes:
    """The sizes of topics, each requested once in a look."""

    def __init__(self, tables: BrokerTables, brokers: Collection[BrokerNode]) -> None:
        self.brokers = brokers
        self._tables = tables
        self._found: dict[str, _Size] = {}
        self._failed: set[str] = set()

    def has(self, topics: Iterable[str]) -> bool:
        """Whether the sizes of all of these are known."""
        return all(topic in self._found for topic in topics)

    def __getitem__(self, topic: str) -> _Size:
        return self._found[topic]

    async def measure(self, topics: Iterable[str]) -> int:
        """Request the sizes that are missing; the number of requests."""
        new = [each for each in topics if each not in self._found and each not in self._failed]
        for topic in new:
            try:
                parts = [await self._tables.content(each.address, topic) for each in self.brokers]
            except OrbitError as error:
                log.debug("the size of topic %s is not known: %s", topic, error)
                self._failed.add(topic)
                continue
            self._found[topic] = tuple(-1 if part is None else part.total for part in parts)
        return len(new)


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

    def __init__(self, admin: AsyncAdmin, audit: Audit, events: Events) -> None:
        self._admin = admin
        self._audit = audit
        self._events = events
        self._all: dict[str, Replay] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(
        self,
        group: str,
        where: DeadLetterFilter,
        *,
        to: ResendTo,
        rate: float | None,
        limit: int | None,
        again: bool,
        dry_run: bool,
        who: str,
        command: str,
        now: float,
    ) -> Replay:
        """Start to send letters. Raises `BadInput` while others of the group are sent."""
        if any(each.group == group and each.is_running for each in self._all.values()):
            raise BadInput(f"dead letters of {group!r} are being sent already; wait, or stop that")
        replay = Replay(secrets.token_urlsafe(9), group, command, dry_run, now)
        self._all[replay.id] = replay
        self._forget_some()
        work = self._run(replay, where, to, rate, limit, again, who)
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
        self,
        replay: Replay,
        where: DeadLetterFilter,
        to: ResendTo,
        rate: float | None,
        limit: int | None,
        again: bool,
        who: str,
    ) -> None:
        outcomes = self._admin.dead_letters.resending(
            replay.group,
            where,
            to=to,
            rate=rate,
            limit=limit,
            again=again,
            dry_run=replay.is_dry_run,
        )
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
    def piles(self) -> list[Reason]:
        """The largest first."""
        return sorted(self.reasons.values(), key=lambda pile: (-pile.count, pile.name))


_AGES = (3600.0, 86_400.0, 604_800.0)


async def triage(letters: AsyncIterator[DeadLetter], now: float) -> Triage:
    """Sort letters, the newest first, by reason."""
    found = Triage()
    async for letter in letters:
        if found.count == LOOKED_AT:
            found.is_complete = False
            break
        found.count += 1
        _add(found.reasons, letter, now)
    return found


def _add(piles: dict[str, Reason], letter: DeadLetter, now: float) -> None:
    name = letter.pile
    pile = piles.get(name)
    if pile is None:
        pile = piles[name] = Reason(name, sample=letter, last_died_at=letter.died_at)
    pile.count += 1
    pile.first_died_at = letter.died_at
    pile.resent += letter.resent_times > 0
    topic = letter.topic or "unknown"
    pile.topics[topic] = pile.topics.get(topic, 0) + 1
    pile.ages[_place(_AGES, now - letter.died_at)] += 1


def _place(limits: Iterable[float], age: float) -> int:
    return sum(age >= limit for limit in limits)
