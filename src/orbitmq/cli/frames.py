"""What `orbitmq top` shows at a time, and how it is found out: rates out of several looks.

One look takes a fixed number of requests per broker, and some for each group that is behind; topics
are asked for one by one, so that only the first thousand are.

All rates of a frame are differences of offsets over the same seconds, the last thirty at most, so
that they add up: what topics get is what brokers get and what the cluster gets, what groups finish
likewise, and a group's lag grows by what comes and is not finished. Brokers count by themselves as
well, over other spans and other things (10 s, a minute; what is pulled): those numbers stand in
only in the first frame, which has nothing to compare with.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from orbitmq.cli.clusters import BrokerRecord
from orbitmq.cli.grouprecords import CallTimesRecord, QueueProgressRecord, call_times_of
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.cluster import ClusterStatus
from orbitmq.client.admin.errors import AdminError
from orbitmq.client.admin.groupvalues import GroupProgress, GroupSummary
from orbitmq.client.admin.topicvalues import NOT_LISTED, TopicKind, TopicStatus
from orbitmq.clock import Clock
from orbitmq.console.collecting import readers
from orbitmq.console.rates import WINDOW
from orbitmq.console.tables import BrokerTables
from orbitmq.errors import OrbitError

K = TypeVar("K", bound=Hashable)

#: More topics would make a look take seconds.
MOST_TOPICS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTopicRecord:
    """A topic; the busiest come first."""

    topic: str
    messages: int
    in_rate: float  #: messages per second that are stored


@dataclass(frozen=True, slots=True, kw_only=True)
class TopGroupRecord:
    """A group; those with most lag come first."""

    group: str
    state: str
    members: int
    lag: int
    lag_change: float | None  #: messages per second; negative: it drains; null in the first frame
    lag_seconds: float | None
    out_rate: float  #: messages per second that are finished; in the first frame: that are pulled


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRecord:
    """A cluster at a time."""

    at: float
    #: Over how many seconds all rates are measured, 30 at most; null in the first frame, whose
    #: rates are those that brokers tell: of the last minute, and its brokers' of the last 10 s.
    rate_seconds: float | None
    in_rate: float  #: messages per second, of all topics below
    out_rate: float  #: messages per second, of all groups below
    brokers: tuple[BrokerRecord, ...]
    topics: tuple[TopTopicRecord, ...]
    groups: tuple[TopGroupRecord, ...]
    group: str | None  #: whose queues these are: the one asked for, or the one with most lag
    queues: tuple[QueueProgressRecord, ...]
    handlers: tuple[CallTimesRecord, ...]  #: how long its handlers take, as far as members tell
    problem: str | None = None  #: why a part is missing


@dataclass(frozen=True, slots=True)
class _Look:
    """Counters at a time."""

    at: float
    #: Next offsets, by topic and broker.
    stored: Mapping[tuple[str, str], int]
    #: Offsets of progress, by group, topic and broker.
    done: Mapping[tuple[str, str, str], int]
    #: Messages that wait, by group.
    lags: Mapping[str, int]


class Frames:
    """Looks at a cluster again and again."""

    def __init__(
        self, admin: AsyncAdmin, tables: BrokerTables, clock: Clock, group: str | None = None
    ) -> None:
        self._admin = admin
        self._tables = tables
        self._clock = clock
        self._group = group
        #: Those that rates are made of, the oldest first.
        self._looks: deque[_Look] = deque()

    def choose(self, group: str | None) -> None:
        """Show the queues of this group from now on; None: of the one with most lag."""
        self._group = group

    async def next(self) -> FrameRecord:
        """The cluster now."""
        admin = self._admin
        cluster = await admin.cluster()
        listing = await admin.groups.list(members=True, times=True)
        statuses = await self._topics()
        lags = {each.group: each.lag for each in listing}
        look = _Look(self._clock.monotonic(), _stored(statuses), await self._done(cluster), lags)
        rates = self._rates(look)
        topics = [_topic(each, rates) for each in statuses.values()]
        groups = [_group(each, rates) for each in listing]
        groups.sort(key=lambda each: (-each.lag, each.group))
        shown = self._group or (groups[0].group if groups and groups[0].lag else None)
        progress, problem = await self._progress(shown)
        missing = [f"{each.server}: {each.reason}" for each in listing.unreachable]
        return FrameRecord(
            at=self._clock.now(),
            rate_seconds=None if rates is None else rates.seconds,
            in_rate=sum(each.in_rate for each in topics),
            out_rate=sum(each.out_rate for each in groups),
            brokers=tuple(_broker(BrokerRecord.of(each), rates) for each in cluster.brokers),
            topics=tuple(sorted(topics, key=lambda each: (-each.in_rate, each.topic))),
            groups=tuple(groups),
            group=shown,
            queues=() if progress is None else _queues(progress),
            handlers=() if progress is None else call_times_of(progress),
            problem="; ".join([*missing, *([problem] if problem else [])]) or None,
        )

    def _rates(self, look: _Look) -> _Rates | None:
        """Rates up to a look; None: it is the first."""
        looks = self._looks
        looks.append(look)
        while len(looks) > 2 and looks[1].at <= look.at - WINDOW:
            looks.popleft()
        return _Rates(tuple(looks)) if looks[0].at < look.at else None

    async def _done(self, cluster: ClusterStatus) -> dict[tuple[str, str, str], int]:
        found: dict[tuple[str, str, str], int] = {}
        for node in readers(cluster):
            try:
                places = await self._tables.places(node.address)
            except OrbitError:
                # It is named as unreachable by the list of groups.
                continue
            for group, queues in places.items():
                for queue, place in queues.items():
                    key = (group, queue.topic, queue.broker)
                    found[key] = found.get(key, 0) + place.done
        return found

    async def _topics(self) -> dict[str, TopicStatus]:
        listing = await self._admin.topics.list(kinds=set(TopicKind) - NOT_LISTED)
        names = [topic.name for topic in listing.items[:MOST_TOPICS]]
        statuses = await asyncio.gather(*map(self._status, names))
        return {each.topic: each for each in statuses if each is not None}

    async def _status(self, topic: str) -> TopicStatus | None:
        try:
            return await self._admin.topics.status(topic)
        except AdminError:
            # Deleted meanwhile.
            return None

    async def _progress(self, group: str | None) -> tuple[GroupProgress | None, str]:
        if group is None:
            return None, ""
        try:
            return await self._admin.groups.progress(group), ""
        except AdminError as error:
            return None, str(error)


def _queues(progress: GroupProgress) -> tuple[QueueProgressRecord, ...]:
    places = sorted(progress.queues, key=lambda each: (-each.lag, each.queue))
    return tuple(map(QueueProgressRecord.of, places))


class _Rates:
    """What changed over some looks, per second, by what it belongs to."""

    def __init__(self, looks: Sequence[_Look]) -> None:
        now = looks[-1]
        self.seconds = now.at - looks[0].at
        self._lags = _changed([each.lags for each in looks])
        self.topics: defaultdict[str, float] = defaultdict(float)
        self.groups: defaultdict[str, float] = defaultdict(float)
        #: Stored and finished, by broker.
        self.stored: defaultdict[str, float] = defaultdict(float)
        self.done: defaultdict[str, float] = defaultdict(float)
        # What was set back has not grown.
        for (topic, broker), change in _changed([each.stored for each in looks]).items():
            self.topics[topic] += max(0, change) / self.seconds
            self.stored[broker] += max(0, change) / self.seconds
        for (group, _, broker), change in _changed([each.done for each in looks]).items():
            self.groups[group] += max(0, change) / self.seconds
            self.done[broker] += max(0, change) / self.seconds

    def lag_change(self, group: str) -> float | None:
        change = self._lags.get(group)
        return None if change is None else change / self.seconds


def _changed(counts: Sequence[Mapping[K, int]]) -> dict[K, int]:
    """How much each counter changed since it was first there; not those that are new."""
    first: dict[K, int] = {}
    for each in reversed(counts[:-1]):
        first.update(each)
    return {key: count - first[key] for key, count in counts[-1].items() if key in first}


def _stored(statuses: Mapping[str, TopicStatus]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for topic, status in statuses.items():
        for each in status.queues:
            key = (topic, each.queue.broker)
            found[key] = found.get(key, 0) + each.max_offset
    return found


def _broker(broker: BrokerRecord, rates: _Rates | None) -> BrokerRecord:
    if rates is None or not broker.is_up:
        return broker
    if broker.id:
        # The same messages as its master's, which are counted there.
        return replace(broker, in_rate=None, out_rate=None)
    name = broker.broker
    return replace(broker, in_rate=rates.stored[name], out_rate=rates.done[name])


def _topic(status: TopicStatus, rates: _Rates | None) -> TopTopicRecord:
    name = status.topic
    in_rate = status.in_rate if rates is None else rates.topics[name]
    return TopTopicRecord(topic=name, messages=status.messages, in_rate=in_rate)


def _group(group: GroupSummary, rates: _Rates | None) -> TopGroupRecord:
    name = group.group
    # Of a broker that does not tell offsets by group, as old ones, its own count has to do.
    out_rate = group.consume_rate if rates is None else rates.groups.get(name, group.consume_rate)
    return TopGroupRecord(
        group=name,
        state=group.state.value,
        members=0 if group.members is None else len(group.members.client_ids),
        lag=group.lag,
        lag_change=None if rates is None else rates.lag_change(name),
        lag_seconds=group.lag_seconds,
        out_rate=out_rate,
    )
