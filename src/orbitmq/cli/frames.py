"""What `orbitmq top` shows at a time, and how it is found out: rates out of two looks.

One look takes a fixed number of requests per broker, and some for each group that is behind; topics
are asked for one by one, so that only the first thousand are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from orbitmq.cli.clusters import BrokerRecord
from orbitmq.cli.grouprecords import CallTimesRecord, QueueProgressRecord, call_times_of
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.errors import AdminError
from orbitmq.client.admin.groupvalues import GroupProgress, GroupSummary
from orbitmq.client.admin.topicvalues import NOT_LISTED, TopicKind, TopicStatus
from orbitmq.clock import Clock

#: More topics would make a look take seconds.
MOST_TOPICS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTopicRecord:
    """A topic; the busiest come first."""

    topic: str
    messages: int
    in_rate: float  #: messages per second since the frame before


@dataclass(frozen=True, slots=True, kw_only=True)
class TopGroupRecord:
    """A group; those with most lag come first."""

    group: str
    state: str
    members: int
    lag: int
    lag_change: float | None  #: messages per second since the frame before; negative: it drains
    lag_seconds: float | None
    out_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRecord:
    """A cluster at a time."""

    at: float
    in_rate: float  #: messages per second, of all brokers
    out_rate: float
    brokers: tuple[BrokerRecord, ...]
    topics: tuple[TopTopicRecord, ...]
    groups: tuple[TopGroupRecord, ...]
    group: str | None  #: whose queues these are: the one asked for, or the one with most lag
    queues: tuple[QueueProgressRecord, ...]
    handlers: tuple[CallTimesRecord, ...]  #: how long its handlers take, as far as members tell
    problem: str | None = None  #: why a part is missing


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    stored: Mapping[str, int]
    lags: Mapping[str, int]


class Frames:
    """Looks at a cluster again and again."""

    def __init__(self, admin: AsyncAdmin, clock: Clock, group: str | None = None) -> None:
        self._admin = admin
        self._clock = clock
        self._group = group
        self._before: _Look | None = None

    def choose(self, group: str | None) -> None:
        """Show the queues of this group from now on; None: of the one with most lag."""
        self._group = group

    async def next(self) -> FrameRecord:
        """The cluster now."""
        admin = self._admin
        cluster = await admin.cluster()
        listing = await admin.groups.list(members=True, times=True)
        statuses = await self._topics()
        now = self._clock.monotonic()
        look = _Look(
            now,
            {name: sum(q.max_offset for q in each.queues) for name, each in statuses.items()},
            {each.group: each.lag for each in listing},
        )
        before, self._before = self._before, look
        topics = [_topic(each, look, before) for each in statuses.values()]
        groups = [_group(each, look, before) for each in listing]
        groups.sort(key=lambda each: (-each.lag, each.group))
        shown = self._group or (groups[0].group if groups and groups[0].lag else None)
        progress, problem = await self._progress(shown)
        missing = [f"{each.server}: {each.reason}" for each in listing.unreachable]
        return FrameRecord(
            at=self._clock.now(),
            in_rate=cluster.in_rate,
            out_rate=cluster.out_rate,
            brokers=tuple(map(BrokerRecord.of, cluster.brokers)),
            topics=tuple(sorted(topics, key=lambda each: (-each.in_rate, each.topic))),
            groups=tuple(groups),
            group=shown,
            queues=() if progress is None else _queues(progress),
            handlers=() if progress is None else call_times_of(progress),
            problem="; ".join([*missing, *([problem] if problem else [])]) or None,
        )

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


def _topic(status: TopicStatus, now: _Look, before: _Look | None) -> TopTopicRecord:
    in_rate = status.in_rate
    if before is not None and status.topic in before.stored and now.at > before.at:
        stored = now.stored[status.topic] - before.stored[status.topic]
        in_rate = max(0.0, stored / (now.at - before.at))
    return TopTopicRecord(topic=status.topic, messages=status.messages, in_rate=in_rate)


def _group(group: GroupSummary, now: _Look, before: _Look | None) -> TopGroupRecord:
    change = None
    if before is not None and group.group in before.lags and now.at > before.at:
        change = (group.lag - before.lags[group.group]) / (now.at - before.at)
    return TopGroupRecord(
        group=group.group,
        state=group.state.value,
        members=0 if group.members is None else len(group.members.client_ids),
        lag=group.lag,
        lag_change=change,
        lag_seconds=group.lag_seconds,
        out_rate=group.consume_rate,
    )
