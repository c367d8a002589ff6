"""What brokers tell only one by one: asked in turn, within a budget, and remembered.

Who is online, how old the oldest waiting message is, what is in a topic, how many messages died:
each is a question for a single group or topic. A look asks some of them; the others keep the answer
they had.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from orbitmq.client.admin import AsyncAdmin, BrokerNode, Topic, TopicKind
from orbitmq.client.admin.findings import duplicate_clients, told_findings
from orbitmq.client.admin.membervalues import Finding
from orbitmq.client.errors import BrokerRefused
from orbitmq.client.names import dead_letter_topic, is_retry_topic
from orbitmq.client.queue import Queue
from orbitmq.clock import Clock
from orbitmq.console.rates import Meter
from orbitmq.console.resentletters import Resent, ResentLetters
from orbitmq.console.rotation import Rotation
from orbitmq.console.settings import Budget
from orbitmq.console.tables import BrokerTables, Content, Place, Places
from orbitmq.errors import OrbitError
from orbitmq.remoting.errors import ConnectionLost

log = logging.getLogger(__name__)

T = TypeVar("T")

_HOUR = 3600.0
#: Single questions that may be under way at the same time.
_AT_ONCE = 16

#: A group in a topic.
Pair = tuple[str, str]


class Questions:
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
        self.contents: dict[str, tuple[Content, float]] = {}
        #: When the oldest waiting message was stored, and the progress at which that was so.
        self._oldest: dict[Pair, tuple[float, int]] = {}
        self._growths: dict[str, Meter] = {}
        #: How much a broker had deleted of a topic, and when the oldest that was left was stored.
        self._first: dict[tuple[str, str], tuple[int, float | None]] = {}
        #: Topics that a group subscribes to and has not reported from: brokers' tables lack them.
        self._unreported: dict[str, dict[Queue, Place]] = {}
        #: What is known of the groups of brokers that do not tell of all at once.
        self._one_by_one: dict[str, tuple[Places, Rotation]] = {}
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

    async def places(self, brokers: Collection[BrokerNode], groups: Collection[str]) -> Places:
        """The progress of all groups, by one table of each broker."""

        async def ask(node: BrokerNode) -> Places:
            try:
                return await self._tables.places(node.address)
            except (BrokerRefused, ConnectionLost) as error:
                # Not known there, or more than a frame can hold: groups are asked for in turn.
                log.debug("groups are asked for one by one: %s", error)
                return await self._in_turn(node, groups)

        merged: Places = {}
        for part in await self._each(brokers, ask):
            for group, queues in part.items():
                if group in groups:
                    merged.setdefault(group, {}).update(queues)
        return merged

    async def _in_turn(self, node: BrokerNode, groups: Collection[str]) -> Places:
        fresh: tuple[Places, Rotation] = ({}, Rotation(self._budget.members))
        known, turn = self._one_by_one.setdefault(str(node), fresh)

        async def ask(group: str) -> tuple[str, dict[Queue, Place]]:
            return group, await self._tables.places_of(node.address, group)

        known |= dict(await self._each(turn.next(groups), ask))
        return known

    # Members.

    async def ask_members(
        self, brokers: Collection[BrokerNode], places: Places, groups: Collection[str]
    ) -> None:
        """Who is online; adds to `places` what a group has not reported from yet."""
        behind = {group for group, queues in places.items() if _is_behind(queues)}

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
                await self._ask_unreported(brokers, group, topics, places.get(group, {}))

        if brokers:
            urgent = behind | self._unreported.keys()
            await self._each(self._members_turn.next(groups, urgent), ask)
        for gone in self.clients.keys() - set(groups):
            del self.clients[gone]
        for group, queues in self._unreported.items():
            if group in groups:
                places[group] = queues | places.get(group, {})

    async def _ask_unreported(
        self,
        brokers: Collection[BrokerNode],
        group: str,
        topics: Iterable[str],
        reported: Mapping[Queue, Place],
    ) -> None:
        known = {queue.topic for queue in reported}
        silent: dict[Queue, Place] = {}
        for topic in topics:
            if topic in known or is_retry_topic(topic):
                continue
            for node in brokers:
                silent |= await self._tables.places_of(node.address, group, topic)
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
            content = Content(
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

    async def _content(self, node: BrokerNode, topic: str) -> Content | None:
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

    def _growth(self, topic: str, content: Content) -> float:
        """Messages per second, over the same time as all rates unless its turns are rarer."""
        meter = self._growths.setdefault(topic, Meter())
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


def _is_behind(queues: Mapping[Queue, Place]) -> bool:
    return any(place.lag for place in queues.values())
