"""Looks at the cluster every few seconds, and keeps the picture.

One look is a fixed number of requests per broker, whatever the number of topics and groups, plus
the budget of `questions`. Between its steps the loop gets a turn: pages are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from orbitmq.client.admin import (
    AsyncAdmin,
    BrokerNode,
    ClusterStatus,
    GroupSummary,
    Topic,
    Unreachable,
)
from orbitmq.client.queue import Queue
from orbitmq.clock import Clock
from orbitmq.console.heat import HeatMaps
from orbitmq.console.questions import Pair, Questions
from orbitmq.console.rates import Meter
from orbitmq.console.samples import (
    NONE_RESENT,
    STALLED_AFTER,
    GroupSample,
    Snapshot,
    TopicPart,
    TopicSample,
)
from orbitmq.console.settings import Budget
from orbitmq.console.tables import BrokerTables, Place
from orbitmq.errors import OrbitError

log = logging.getLogger(__name__)

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
        self._questions = Questions(admin, tables, budget, clock)
        self._wake = asyncio.Event()
        self._looks = 0
        self._is_stale = True
        self._topics: tuple[Topic, ...] = ()
        self._groups: dict[str, GroupSummary] = {}
        self._unreachable: tuple[Unreachable, ...] = ()
        self._meters: dict[Pair, Meter] = {}
        self._broker_meters: dict[str, Meter] = {}
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
        places = await questions.places(brokers, self._groups)
        await questions.ask_members(brokers, places, self._groups)
        totals = {group: _totals(queues) for group, queues in places.items()}
        await asyncio.sleep(0)
        self._measure(totals)
        self._measure_brokers(cluster, places)
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
        self.heat.add(now, places)
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
        meters: dict[Pair, Meter] = {}
        for group, topics in totals.items():
            for topic, (end, done, _, _) in topics.items():
                key = (group, topic)
                meter = meters[key] = self._meters.get(key) or Meter()
                meter.add(now, end, done)
        self._meters = meters

    def _measure_brokers(
        self, cluster: ClusterStatus, places: Mapping[str, Mapping[Queue, Place]]
    ) -> None:
        """Of a broker: all messages that it has stored, and all that groups have finished there.

        What brokers tell as their rates is of other seconds, and counts what is pulled.
        """
        done: dict[str, int] = {}
        for queues in places.values():
            for queue, place in queues.items():
                done[queue.broker] = done.get(queue.broker, 0) + place.done
        now = self._clock.monotonic()
        meters: dict[str, Meter] = {}
        for status in cluster.brokers:
            if status.runtime is None or not status.node.is_master:
                continue
            name = status.node.broker
            stored = status.runtime.raw.get("msgPutTotalTodayNow", "")
            meter = meters[name] = self._broker_meters.get(name) or Meter()
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


def _totals(queues: Mapping[Queue, Place]) -> Totals:
    sums: Totals = {}
    for queue, place in queues.items():
        end, done, lag, count = sums.get(queue.topic, (0, 0, 0, 0))
        sums[queue.topic] = (end + place.end, done + place.done, lag + place.lag, count + 1)
    return sums
