"""Administration of consumer groups: settings, members, progress and findings.

Moving progress is in `resets`.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from orbitmq.arguments import explained
from orbitmq.client.admin.members import (
    AsyncConsumers,
    Finding,
    FindingKind,
    Members,
    RunningInfo,
    Variant,
)
from orbitmq.client.admin.requests import (
    AdminRequests,
    BrokerNode,
    Listing,
    OfQueue,
    Topology,
    Unreachable,
    unreachable,
)
from orbitmq.client.admin.topics import AsyncTopics, TopicQueries, queue_of
from orbitmq.client.consumer.statistics import CallTimes
from orbitmq.client.errors import BadRequest, GroupNotFound, NotEffective, TopicNotFound
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused, InvalidFilter
from orbitmq.filter.tags import parse_tags
from orbitmq.names import (
    SYSTEM_GROUPS,
    check_group,
    dead_letter_topic,
    is_retry_topic,
    is_system_group,
    retry_topic,
)
from orbitmq.parsing import LARGEST_INT, Duration, seconds, whole
from orbitmq.remoting.settings import ConnectionLost
from orbitmq.wire.bodies import (
    ConsumeStats,
    ConsumeStatsList,
    ConsumeTimeSpans,
    QueueTimeSpan,
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
)
from orbitmq.wire.bodies import QueueProgress as QueueProgressBody
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import (
    DeleteGroupRequest,
    GetBrokerConsumeStatsRequest,
    GetConsumeStatsRequest,
    OffsetResponse,
    QueryConsumerOffsetRequest,
    QueryConsumeTimeSpanRequest,
)
from orbitmq.wire.javajson import decode_body, encode_body

log = logging.getLogger(__name__)


@explained()
class AsyncGroups:
    """Administration of groups."""

    def __init__(
        self,
        asking: AdminRequests,
        topics: AsyncTopics,
        consumers: AsyncConsumers,
        progress: ProgressQueries,
    ) -> None:
        self._asking = asking
        self._consumers = consumers
        self._progress = progress
        self._topics = topics
        self._topic_queries = TopicQueries(asking)
        self._configs = GroupConfigs(asking)

    async def list(
        self, *, members: bool = False, times: bool = False, system: bool = False
    ) -> Listing[GroupSummary]:
        """All groups with their lag, in two requests per broker.

        `members` adds the members, in one request per group and broker. `times` adds the age of the
        lag, in one request per topic and broker of each group with lag.
        """
        topology = await self._asking.topology()

        async def ask(
            node: BrokerNode,
        ) -> tuple[dict[str, SubscriptionGroupConfig], dict[str, dict[str, TopicLag]]]:
            configs = await self._configs.all(node)
            lags = await self._progress.of_all_groups(node, configs)
            if times:
                lags = await self._with_ages(node, lags)
            return configs, lags

        outcomes = await self._asking.each(topology.readers(), ask)
        configured: dict[str, dict[str, SubscriptionGroupConfig]] = {}
        lags: dict[str, dict[str, TopicLag]] = {}
        for node, (configs, here) in outcomes.done.items():
            for group, config in configs.items():
                if system or not (group in SYSTEM_GROUPS or is_system_group(group)):
                    configured.setdefault(group, {})[node.broker] = config
            for group, topics in here.items():
                _merge(lags.setdefault(group, {}), topics)
        summaries = [
            GroupSummary(
                group_settings(next(iter(configs.values()))),
                tuple(sorted(configs)),
                tuple(lag for _, lag in sorted(lags.get(group, {}).items())),
                is_uniform=len({compared(config) for config in configs.values()}) == 1,
            )
            for group, configs in sorted(configured.items())
        ]
        if members:
            summaries = await self._asking.all(
                self._with_members(summary, topology) for summary in summaries
            )
        return Listing(tuple(summaries), unreachable(outcomes))

    async def _with_ages(
        self, node: BrokerNode, lags: Mapping[str, Mapping[str, TopicLag]]
    ) -> dict[str, dict[str, TopicLag]]:
        async def aged(group: str, lag: TopicLag) -> TopicLag:
            if not lag.lag:
                return replace(lag, lag_seconds=0.0)
            ages = await self._progress.ages(node, group, lag.topic)
            known = [age for age in ages.values() if age is not None]
            return replace(lag, lag_seconds=max(known, default=None))

        places = [(group, lag) for group, topics in lags.items() for lag in topics.values()]
        found = await self._asking.all(aged(group, lag) for group, lag in places)
        after: dict[str, dict[str, TopicLag]] = {group: {} for group in lags}
        for (group, _), lag in zip(places, found, strict=True):
            after[group][lag.topic] = lag
        return after

    async def _with_members(self, summary: GroupSummary, topology: Topology) -> GroupSummary:
        members, _ = await self._consumers.look(summary.group, topology)
        known = replace(summary, members=members, was_asked_for_members=True)
        if members is None or members.model == "broadcasting":
            return known
        # Brokers' tables have only topics in which the group has progress; the lag of others is
        # known only by asking for them by name.
        reported = {each.topic for each in summary.topics}
        silent = {each.topic for each in members.subscriptions} - reported
        silent = {topic for topic in silent if not is_retry_topic(topic)}
        if not silent:
            return known
        progress = await self._progress.of_group(
            summary.group, subscribed=silent, topology=topology
        )
        more = (_topic_lag(topic, progress.of_topic(topic)) for topic in sorted(silent))
        return replace(known, topics=(*summary.topics, *more))

    async def settings(self, group: str) -> dict[str, GroupSettings]:
        """The settings of a group, by broker. Raises `GroupNotFound`."""
        topology = await self._asking.topology()
        found = await self._configs.of(topology.readers(), group)
        return {node.broker: group_settings(config) for node, config in found.items()}

    async def progress(
        self, group: str, *, topic: str | None = None, owners: bool = True
    ) -> GroupProgress:
        """The progress of a group in every queue, and the owners of the queues.

        Owners take a request to each member; `owners=False` omits them. Raises `GroupNotFound`.
        """
        topology = await self._asking.topology()
        await self._configs.of(topology.readers(), group)
        members, _ = await self._consumers.look(group, topology)
        running = await self._running(members, topology) if owners else {}
        return await self._progress_with(running, group, members, topology, topic=topic)

    async def describe(self, group: str) -> GroupDetails:
        """Settings, members, findings and progress of a group. Raises `GroupNotFound`."""
        topology = await self._asking.topology()
        found = await self._configs.of(topology.readers(), group)
        configured = {node.broker: group_settings(config) for node, config in found.items()}
        members, findings = await self._consumers.look(group, topology)
        running = await self._running(members, topology)
        progress = await self._progress_with(running, group, members, topology)
        return GroupDetails(
            group,
            configured,
            members,
            self._found(members, findings, running, progress),
            progress,
            await self._dead_letters(topology, group),
            running,
        )

    async def findings(self, group: str) -> tuple[Finding, ...]:
        """Problems inside a group: differing subscriptions, duplicate ids, stalled queues."""
        return (await self.describe(group)).findings

    async def create(
        self,
        group: str,
        *,
        max_retries: int = 16,
        retry_queues: int = 1,
        orderly: bool = False,
        may_broadcast: bool = True,
        enabled: bool = True,
        consume_timeout: Duration = 900.0,
        brokers: Collection[str] | None = None,
        cluster: str | None = None,
    ) -> dict[str, GroupSettings]:
        """Create a group on all, the named or a cluster's masters; returns settings read back."""
        check_group(group)
        config = SubscriptionGroupConfig(
            group_name=group,
            retry_max_times=whole(max_retries, "max_retries", least=0, most=LARGEST_INT),
            retry_queue_nums=whole(retry_queues, "retry_queues", least=0, most=LARGEST_INT),
            consume_message_orderly=orderly,
            consume_broadcast_enable=may_broadcast,
            consume_enable=enabled,
            consume_timeout_minute=_minutes(consume_timeout),
        )
        masters = (await self._asking.topology()).masters(brokers, cluster=cluster)
        return await self._apply(dict.fromkeys(masters, config))

    async def update(
        self,
        group: str,
        *,
        max_retries: int | None = None,
        retry_queues: int | None = None,
        orderly: bool | None = None,
        may_broadcast: bool | None = None,
        enabled: bool | None = None,
        consume_timeout: Duration | None = None,
        brokers: Collection[str] | None = None,
    ) -> dict[str, GroupSettings]:
        """Change the given settings on all brokers that have the group; returns them read back.

        Raises `GroupNotFound`.
        """
        changes = {
            "retry_max_times": _optional_count("max_retries", max_retries),
            "retry_queue_nums": _optional_count("retry_queues", retry_queues),
            "consume_message_orderly": orderly,
            "consume_broadcast_enable": may_broadcast,
            "consume_enable": enabled,
            "consume_timeout_minute": None
            if consume_timeout is None
            else _minutes(consume_timeout),
        }
        wanted = {name: value for name, value in changes.items() if value is not None}
        masters = (await self._asking.topology()).masters(brokers)
        present = await self._configs.of(masters, group)
        return await self._apply(
            {node: msgspec.structs.replace(config, **wanted) for node, config in present.items()}
        )

    async def pause(self, group: str) -> dict[str, GroupSettings]:
        """Stop a group from pulling, on every broker; its members stay connected and wait."""
        return await self._switch(group, "paused", enabled=False)

    async def resume(self, group: str) -> dict[str, GroupSettings]:
        """Allow a group to pull again."""
        return await self._switch(group, "resumed", enabled=True)

    async def _switch(self, group: str, what: str, *, enabled: bool) -> dict[str, GroupSettings]:
        after = await self.update(group, enabled=enabled)
        brokers = sorted(after)
        extra = {"group": group, "brokers": brokers}
        log.info("group %s %s at %s", group, what, ", ".join(brokers), extra=extra)
        return after

    async def check_offline(self, group: str) -> None:
        """Raises `BadRequest` when members of the group are online, as `delete` does."""
        await self._check_offline(group, await self._asking.topology())

    async def _check_offline(self, group: str, topology: Topology) -> None:
        members, _ = await self._consumers.look(group, topology)
        if members is not None:
            raise BadRequest(
                f"group {group!r} has members online ({', '.join(members.client_ids)}); stop them "
                "first, they would create it again"
            )

    async def delete(
        self, group: str, *, forget_progress: bool = True, delete_topics: bool = False
    ) -> None:
        """Delete a group's settings and progress.

        `delete_topics` also deletes its retry and dead-letter topic with their messages. A group
        with online members is refused: they would create it again. Raises `GroupNotFound`.
        """
        topology = await self._asking.topology()
        masters = topology.masters()
        await self._configs.of(masters, group)
        await self._check_offline(group, topology)
        header = DeleteGroupRequest(group_name=group, clean_offset=forget_progress)

        code = RequestCode.DELETE_SUBSCRIPTIONGROUP
        await self._asking.change(f"deleting group {group!r}", masters, code, header)
        left = [node for node in masters if group in await self._configs.all(node)]
        if left:
            names = ", ".join(map(str, left))
            raise NotEffective(f"deleting group {group!r}", [f"{names} has it again"])
        for topic in (retry_topic(group), dead_letter_topic(group)) if delete_topics else ():
            with contextlib.suppress(TopicNotFound):
                await self._topics.delete(topic)

    async def _apply(
        self, wanted: Mapping[BrokerNode, SubscriptionGroupConfig]
    ) -> dict[str, GroupSettings]:
        async def put(node: BrokerNode) -> SubscriptionGroupConfig | None:
            config = wanted[node]
            await self._configs.put(node, config)
            return (await self._configs.all(node)).get(config.group_name)

        group = next(iter(wanted.values())).group_name
        after = (await self._asking.each(wanted, put)).check(f"configuring group {group!r}")
        problems = [
            f"{node} shows {'no such group' if found is None else group_settings(found)}"
            for node, found in after.items()
            if found is None or compared(found) != compared(wanted[node])
        ]
        if problems:
            raise NotEffective(f"configuring group {group!r}", problems)
        return {node.broker: group_settings(wanted[node]) for node in after}

    async def _progress_with(
        self,
        running: Mapping[str, RunningInfo],
        group: str,
        members: Members | None,
        topology: Topology,
        *,
        topic: str | None = None,
    ) -> GroupProgress:
        """The progress of a group, with the reports of its members."""
        progress = await self._progress.of_group(
            group,
            topic=topic,
            subscribed=_subscribed(members),
            topology=topology,
            owners=_owners(running),
        )
        times = call_times(running.values())
        if topic is not None:
            times = {name: each for name, each in times.items() if name == topic}
        return replace(progress, call_times=times)

    def _found(
        self,
        members: Members | None,
        reported: Sequence[str],
        running: Mapping[str, RunningInfo],
        progress: GroupProgress,
    ) -> tuple[Finding, ...]:
        if members is None:
            return ()
        found = {(each.kind, each.topic, each.client_id): each for each in told_findings(reported)}
        # Apache's brokers do not look for this; OrbitMQ's have reported it already.
        for each in (
            *duplicate_clients(members),
            *different_subscriptions(members.group, running),
        ):
            found.setdefault((each.kind, each.topic, each.client_id), each)
        queues: tuple[Finding, ...] = ()
        # A queue without an owner is certain only when every member has reported its queues, which
        # push consumers do.
        is_shared = (members.model, members.consume_type) == ("clustering", "push")
        if is_shared and running.keys() >= set(members.client_ids):
            queues = queue_findings(progress, running, self._asking.clock.now())
        return (*found.values(), *queues)

    async def _running(self, members: Members | None, topology: Topology) -> dict[str, RunningInfo]:
        """The reports of the members that answer, by client id."""
        if members is None:
            return {}
        nodes = topology.readers()

        async def ask(client_id: str) -> RunningInfo:
            return await self._consumers.running_info_of(nodes, members.group, client_id)

        return dict((await self._asking.each(members.client_ids, ask)).done)

    async def _dead_letters(self, topology: Topology, group: str) -> int:
        topic = dead_letter_topic(group)

        async def count(node: BrokerNode) -> int:
            stats = await self._topic_queries.stats(node, topic)
            bounds = () if stats is None else stats.offset_table.values()
            return sum(max(0, each.max_offset - each.min_offset) for each in bounds)

        return sum((await self._asking.each(topology.readers(), count)).done.values())


def _merge(into: dict[str, TopicLag], more: Mapping[str, TopicLag]) -> None:
    for topic, lag in more.items():
        before = into.get(topic)
        if before is None:
            into[topic] = lag
            continue
        ages = [age for age in (before.lag_seconds, lag.lag_seconds) if age is not None]
        into[topic] = TopicLag(
            topic,
            before.lag + lag.lag,
            before.queues + lag.queues,
            before.consume_rate + lag.consume_rate,
            max(ages, default=None),
        )


def _topic_lag(topic: str, queues: Collection[QueueProgress]) -> TopicLag:
    lag = sum(each.lag for each in queues)
    return TopicLag(topic, lag, len(queues), 0.0, _oldest(lag, queues))


def _oldest(lag: int, parts: Iterable[TopicLag | QueueProgress]) -> float | None:
    """The age of the oldest message that waits in some parts; 0 without lag, None if unknown."""
    if not lag:
        return 0.0
    return max((each.lag_seconds for each in parts if each.lag_seconds), default=None)


def _optional_count(name: str, value: int | None) -> int | None:
    return None if value is None else whole(value, name, least=0, most=LARGEST_INT)


def _minutes(timeout: Duration) -> int:
    minutes = round(seconds(timeout, "consume_timeout") / 60)
    if minutes < 1:
        raise BadRequest(f"consume_timeout must be a minute at least, got {timeout!r}")
    return minutes


class GroupConfigs:
    """Reads and writes the settings of groups at single brokers."""

    def __init__(self, asking: AdminRequests) -> None:
        self._asking = asking

    async def all(self, node: BrokerNode) -> dict[str, SubscriptionGroupConfig]:
        """All groups of a broker."""
        # Apache's broker creates a group that it is asked for; the table is read instead.
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        table = await self._asking.ask_body(SubscriptionGroupTable, node.address, code)
        return table.subscription_group_table

    async def of(
        self, nodes: Iterable[BrokerNode], group: str
    ) -> dict[BrokerNode, SubscriptionGroupConfig]:
        """The brokers that have a group, with its settings. Raises `GroupNotFound`."""
        check_group(group)
        outcomes = await self._asking.each(nodes, self.all)
        found = {node: table[group] for node, table in outcomes.done.items() if group in table}
        if not found:
            outcomes.check(f"looking group {group!r} up")
            raise GroupNotFound(group)
        return found

    async def put(self, node: BrokerNode, config: SubscriptionGroupConfig) -> None:
        """Create or change a group on a broker."""
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        await self._asking.ask(node.address, code, body=encode_body(config))


def group_settings(config: SubscriptionGroupConfig) -> GroupSettings:
    """The public form of a broker's configuration."""
    return GroupSettings(
        group=config.group_name,
        is_enabled=config.consume_enable,
        may_broadcast=config.consume_broadcast_enable,
        may_start_at_min=config.consume_from_min_enable,
        is_orderly=config.consume_message_orderly,
        retry_queues=config.retry_queue_nums,
        max_retries=config.retry_max_times,
        consume_timeout=config.consume_timeout_minute * 60.0,
        notifies_members=config.notify_consumer_ids_changed_enable,
        attributes=dict(config.attributes),
    )


def compared(config: SubscriptionGroupConfig) -> tuple[object, ...]:
    """The fields to compare among brokers and after a change; 4.9 lacks timeout and order."""
    return (
        config.consume_enable,
        config.consume_broadcast_enable,
        config.retry_queue_nums,
        config.retry_max_times,
    )


def _subscribed(members: Members | None) -> tuple[str, ...]:
    return () if members is None else tuple(each.topic for each in members.subscriptions)


def _owners(running: Mapping[str, RunningInfo]) -> dict[Queue, str]:
    return {
        each.queue: client_id
        for client_id, info in running.items()
        for each in info.queues
        if not each.is_dropped
    }


def call_times(infos: Iterable[RunningInfo]) -> dict[str, CallTimes]:
    """Handler durations by topic, over all consumers that report them."""
    parts: dict[str, list[CallTimes]] = {}
    for info in infos:
        for topic, each in info.topics.items():
            if each.consume_times is not None:
                parts.setdefault(topic, []).append(each.consume_times)
    return {topic: CallTimes.together(each) for topic, each in sorted(parts.items())}


class GroupState(enum.StrEnum):
    """Whether a group consumes."""

    ONLINE = "online"
    OFFLINE = "offline"
    PAUSED = "paused"
    #: Members were not asked.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of a group on a broker."""

    group: str
    is_enabled: bool = True
    may_broadcast: bool = True
    may_start_at_min: bool = True
    is_orderly: bool = False
    retry_queues: int = 1
    max_retries: int = 16
    consume_timeout: float = 900.0
    notifies_members: bool = True
    attributes: Mapping[str, str] | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True)
class TopicLag:
    """How far a group is behind in a topic."""

    topic: str
    lag: int  #: messages
    queues: int
    consume_rate: float  #: messages per second that it pulls, over the last minute
    #: Age of the oldest message that waits; 0 without lag, None when not asked for.
    lag_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A group in a list."""

    settings: GroupSettings
    brokers: tuple[str, ...]
    topics: tuple[TopicLag, ...]
    #: None when no member is online, or when members were not asked.
    members: Members | None = None
    was_asked_for_members: bool = False
    #: Whether all brokers have the same settings.
    is_uniform: bool = True

    @property
    def group(self) -> str:
        return self.settings.group

    @property
    def state(self) -> GroupState:
        if not self.settings.is_enabled:
            return GroupState.PAUSED
        if not self.was_asked_for_members:
            return GroupState.UNKNOWN
        return GroupState.ONLINE if self.members is not None else GroupState.OFFLINE

    @property
    def lag(self) -> int:
        """Messages that wait, including retries."""
        return sum(each.lag for each in self.topics)

    @property
    def retry_lag(self) -> int:
        """The lag in the retry topic."""
        return sum(each.lag for each in self.topics if is_retry_topic(each.topic))

    @property
    def lag_seconds(self) -> float | None:
        """Age of the oldest message that waits; 0 without lag."""
        return _oldest(self.lag, self.topics)

    @property
    def consume_rate(self) -> float:
        return sum(each.consume_rate for each in self.topics)


@dataclass(frozen=True, slots=True)
class QueueProgress(OfQueue):
    """How far a group is in a queue."""

    queue: Queue
    #: Where the next message will be stored.
    broker_offset: int
    #: The next message to finish (the committed offset).
    consumer_offset: int
    #: The next message to pull; None when the broker does not report it.
    pull_offset: int | None
    #: When the last finished message was stored; None without one.
    last_consumed_at: float | None
    #: Age of the oldest message that waits; 0 without lag, None when unknown.
    lag_seconds: float | None
    #: The client id of the owner; None when unknown.
    owner: str | None = None

    @property
    def finished_stored_at(self) -> float | None:
        return self.last_consumed_at

    @property
    def lag(self) -> int:
        return max(0, self.broker_offset - self.consumer_offset)

    @property
    def in_flight(self) -> int | None:
        """Pulled and not finished."""
        if self.pull_offset is None:
            return None
        return max(0, self.pull_offset - self.consumer_offset)


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How far a group is in all its queues."""

    group: str
    queues: tuple[QueueProgress, ...]
    #: Pulled messages per second.
    consume_rate: float
    unreachable: tuple[Unreachable, ...] = ()
    #: Handler durations of the last minute by topic, over all members that report them; other
    #: clients do not.
    call_times: Mapping[str, CallTimes] = field(default_factory=dict, hash=False)

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.queue.topic for each in self.queues))

    @property
    def lag(self) -> int:
        return sum(each.lag for each in self.queues)

    @property
    def retry_lag(self) -> int:
        return sum(each.lag for each in self.queues if is_retry_topic(each.queue.topic))

    @property
    def lag_seconds(self) -> float | None:
        """Age of the oldest message that waits; 0 without lag."""
        return _oldest(self.lag, self.queues)

    def of_topic(self, topic: str) -> tuple[QueueProgress, ...]:
        return tuple(each for each in self.queues if each.queue.topic == topic)


@dataclass(frozen=True, slots=True)
class GroupDetails:
    """Everything about one group."""

    group: str
    #: By broker.
    settings: Mapping[str, GroupSettings] = field(hash=False)
    members: Members | None
    findings: tuple[Finding, ...]
    progress: GroupProgress
    #: Messages in its dead-letter topic.
    dead_letters: int
    #: The reports of the members that answered, by client id.
    running: Mapping[str, RunningInfo] = field(default_factory=dict, hash=False)

    @property
    def state(self) -> GroupState:
        if any(not each.is_enabled for each in self.settings.values()):
            return GroupState.PAUSED
        return GroupState.ONLINE if self.members is not None else GroupState.OFFLINE


# Findings. OrbitMQ's broker compares the heartbeats of members (field `findings` of the answer to
# GET_CONSUMER_CONNECTION_LIST). With Apache's broker the members are asked for their subscriptions,
# one request each, and connections are compared.


#: Seconds without a pull after which an owned queue with lag is stalled.
STALLED_AFTER = 120.0


class _VariantText(msgspec.Struct, rename="camel"):
    clients: tuple[str, ...] = ()
    expression: str | None = None
    expression_type: str | None = None


class _FindingText(msgspec.Struct, rename="camel"):
    kind: str
    group: str
    text: str
    topic: str | None = None
    variants: tuple[_VariantText, ...] = ()
    client_id: str | None = None
    addresses: tuple[str, ...] = ()


def told_findings(texts: Iterable[str]) -> tuple[Finding, ...]:
    """The findings of brokers, without duplicates."""
    found: dict[object, Finding] = {}
    for text in texts:
        try:
            entries = msgspec.json.decode(text, type=tuple[_FindingText, ...])
        except msgspec.MsgspecError:
            # A newer version's finding is skipped.
            continue
        for entry in entries:
            if entry.kind not in tuple(FindingKind):
                continue
            finding = Finding(
                FindingKind(entry.kind),
                entry.group,
                entry.text,
                entry.topic,
                tuple(
                    Variant(each.clients, each.expression, each.expression_type)
                    for each in entry.variants
                ),
                entry.client_id,
                entry.addresses,
            )
            found.setdefault((finding.kind, finding.topic, finding.client_id), finding)
    return tuple(found.values())


def duplicate_clients(members: Members) -> tuple[Finding, ...]:
    """Client ids with more than one connection to a single broker."""
    addresses: dict[str, list[str]] = {}
    for client in members.clients:
        addresses.setdefault(client.client_id, []).append(client.address)
    return tuple(
        Finding(
            FindingKind.DUPLICATE_CLIENT,
            members.group,
            f"group {members.group!r} has {len(where)} consumers with the client id "
            f"{client_id!r} ({', '.join(where)}): they consume the same queues; give each an "
            "instance name of its own",
            client_id=client_id,
            addresses=tuple(where),
        )
        for client_id, where in addresses.items()
        if len(where) > 1
    )


def different_subscriptions(group: str, running: Mapping[str, RunningInfo]) -> tuple[Finding, ...]:
    """The topics with different subscriptions, by the reports of members."""
    topics = {each.topic for info in running.values() for each in info.subscriptions}
    found = []
    for topic in sorted(topics):
        variants: dict[object, list[tuple[str, str | None, str | None]]] = {}
        for client_id, info in sorted(running.items()):
            mine = next((each for each in info.subscriptions if each.topic == topic), None)
            expression = None if mine is None else mine.expression
            kind = None if mine is None else mine.expression_type
            key = None if expression is None else (kind, _meaning(kind, expression))
            variants.setdefault(key, []).append((client_id, expression, kind))
        if len(variants) > 1:
            found.append(_difference(group, topic, tuple(variants.values())))
    return tuple(found)


def _difference(
    group: str, topic: str, variants: Sequence[Sequence[tuple[str, str | None, str | None]]]
) -> Finding:
    shown = tuple(
        Variant(tuple(client for client, _, _ in same), same[0][1], same[0][2]) for same in variants
    )
    texts = (
        f"{', '.join(each.clients)} "
        + (
            "without it"
            if each.expression is None
            else f"with {each.expression_type} {each.expression!r}"
        )
        for each in shown
    )
    return Finding(
        FindingKind.DIFFERENT_SUBSCRIPTIONS,
        group,
        f"members of group {group!r} subscribe differently to topic {topic!r}: "
        f"{'; '.join(texts)}; messages will be missed until they agree",
        topic,
        shown,
    )


def _meaning(kind: str | None, expression: str) -> object:
    """A key that is equal for expressions that select the same messages."""
    if kind not in (None, "", "TAG"):
        return expression.strip()
    try:
        parsed = parse_tags(expression)
    except InvalidFilter:
        return expression
    return (parsed.tags, parsed.matches_all)


def queue_findings(
    progress: GroupProgress, running: Mapping[str, RunningInfo], now: float
) -> tuple[Finding, ...]:
    """Queues with lag that have no owner, or whose owner does not pull."""
    group = progress.group
    owned = {
        each.queue: (client_id, each)
        for client_id, info in running.items()
        for each in info.queues
        if not each.is_dropped
    }
    found = []
    for place in progress.queues:
        if not place.lag:
            continue
        if place.queue not in owned:
            found.append(
                Finding(
                    FindingKind.UNOWNED_QUEUE,
                    group,
                    f"{place.lag} messages wait in {place.queue} and no member of {group!r} has "
                    "it; check that all members subscribe to the topic and use one strategy",
                    place.queue.topic,
                    queue=place.queue,
                )
            )
            continue
        client_id, held = owned[place.queue]
        if held.last_pull_at is not None and now - held.last_pull_at > STALLED_AFTER:
            found.append(
                Finding(
                    FindingKind.STALLED_QUEUE,
                    group,
                    f"{place.lag} messages wait in {place.queue}, and {client_id} has not pulled "
                    f"it for {now - held.last_pull_at:.0f} s; its handler may hang: ask for its "
                    "stack",
                    place.queue.topic,
                    client_id=client_id,
                    queue=place.queue,
                )
            )
    return tuple(found)


def retries_for_ever(info: RunningInfo) -> bool:
    """Whether a consumer is orderly and retries without end."""
    text = info.properties.get("maxReconsumeTimes", "")
    if not info.is_orderly or not text.lstrip("-").isdecimal():
        return False
    # Without the setting (-1) Java retries up to its largest integer.
    return int(text) < 0 or int(text) >= 2**31 - 1


def decode_lags(body: bytes | memoryview) -> dict[str, dict[str, TopicLag]]:
    """The lags of all groups of a broker, by group and topic. Raises `BodyError`."""
    return {group: _sums(tables) for group, tables in decode_progress_tables(body).items()}


def lags_of(stats: Iterable[ConsumeStats]) -> dict[str, TopicLag]:
    """The lags of one group, by topic."""
    return _sums(map(ProgressTable.of, stats))


def _sums(tables: Iterable[ProgressTable]) -> dict[str, TopicLag]:
    lags: dict[str, int] = {}
    queues: dict[str, int] = {}
    rates: dict[str, float] = {}
    for rate, places in tables:
        for queue, place in places.items():
            topic = queue.topic
            lags[topic] = lags.get(topic, 0) + max(0, place.broker_offset - place.consumer_offset)
            queues[topic] = queues.get(topic, 0) + 1
            rates[topic] = rate
    return {topic: TopicLag(topic, lags[topic], queues[topic], rates[topic]) for topic in lags}


# Lags. The lag in seconds is the age of the oldest unfinished message by its broker's clock, 0 when
# none waits. (Now minus the time of the last consumed message would grow for a group that has
# consumed everything.) All groups of a broker take one request, the ages one more for each topic
# with lag.


#: A broker with thousands of groups needs longer.
ALL_GROUPS_TIMEOUT = 30.0


class ProgressQueries:
    """Reads progress and lags from brokers."""

    def __init__(self, asking: AdminRequests) -> None:
        self._asking = asking
        self._topics = TopicQueries(asking)

    async def of_group(
        self,
        group: str,
        *,
        topic: str | None = None,
        subscribed: Collection[str] = (),
        topology: Topology | None = None,
        owners: Mapping[Queue, str] | None = None,
    ) -> GroupProgress:
        """The progress of one group in every queue, with the age of the lag.

        Brokers report topics with progress; `subscribed` topics without progress are asked for by
        name. The retry topic of an offline group without progress in it counts from its first
        message, where the group will continue.
        """
        retries = retry_topic(group)

        async def ask(
            node: BrokerNode,
        ) -> tuple[list[ConsumeStats], dict[Queue, float | None]]:
            parts = [await self._stats(node, group, topic)]
            known = {key.topic for key in parts[0].offset_table}
            silent = [name for name in subscribed if name not in known and topic in (None, name)]
            parts += await self._asking.all(self._stats(node, group, name) for name in silent)
            if not subscribed and retries not in known and topic in (None, retries):
                parts.append(await self._unbegun(node, retries))
            behind = {
                key.topic
                for part in parts
                for key, place in part.offset_table.items()
                if place.broker_offset > place.consumer_offset
            }
            ages = await self._asking.all(self.ages(node, group, name) for name in sorted(behind))
            return parts, {queue: age for part in ages for queue, age in part.items()}

        nodes = (topology or await self._asking.topology()).readers()
        outcomes = await self._asking.each(nodes, ask)
        queues: dict[Queue, QueueProgress] = {}
        rate = 0.0
        for parts, ages in outcomes.done.values():
            for part in parts:
                rate += part.consume_tps
                queues |= {each.queue: each for each in _queues(part, ages, owners or {})}
        shown = tuple(place for _, place in sorted(queues.items()))
        return GroupProgress(group, shown, rate, unreachable(outcomes))

    async def _stats(self, node: BrokerNode, group: str, topic: str | None) -> ConsumeStats:
        return await self._asking.ask_body(
            ConsumeStats,
            node.address,
            RequestCode.GET_CONSUME_STATS,
            GetConsumeStatsRequest(consumer_group=group, topic=topic),
        )

    async def _unbegun(self, node: BrokerNode, topic: str) -> ConsumeStats:
        """The queues of a topic with messages, for a group that begins with the first."""
        stats = await self._topics.stats(node, topic)
        bounds = {} if stats is None else stats.offset_table
        return ConsumeStats(
            offset_table={
                queue: QueueProgressBody(
                    broker_offset=each.max_offset,
                    consumer_offset=each.min_offset,
                    pull_offset=each.min_offset,
                )
                for queue, each in bounds.items()
                if each.max_offset > each.min_offset
            }
        )

    async def ages(self, node: BrokerNode, group: str, topic: str) -> dict[Queue, float | None]:
        """The age of the oldest message that waits, by queue."""
        found = await self._asking.find_body(
            ConsumeTimeSpans,
            node.address,
            RequestCode.QUERY_CONSUME_TIME_SPAN,
            QueryConsumeTimeSpanRequest(topic=topic, group=group),
            absent=ResponseCode.TOPIC_NOT_EXIST,
        )
        return {
            queue_of(span.message_queue): self._age(span)
            for span in (() if found is None else found.consume_time_span_set)
            if span.message_queue is not None
        }

    def _age(self, span: QueueTimeSpan) -> float | None:
        delay = span.delay_time / 1000
        if span.min_time_stamp <= 0:
            return None
        # Without progress Apache's broker returns a time in 1969: the oldest message waits.
        oldest = self._asking.clock.now() - span.min_time_stamp / 1000
        return max(0.0, oldest if delay > oldest + 3600 else delay)

    async def offset(self, node: BrokerNode, group: str, queue: Queue) -> int | None:
        """The committed offset in one queue; None without one."""
        header = QueryConsumerOffsetRequest(
            consumer_group=group,
            topic=queue.topic,
            queue_id=queue.id,
            # Otherwise a queue without progress would look like one at offset 0.
            set_zero_if_not_found=False,
        )
        code, absent = RequestCode.QUERY_CONSUMER_OFFSET, ResponseCode.QUERY_NOT_FOUND
        answer = await self._asking.find(node.address, code, header, absent=absent)
        return None if answer is None else answer.header(OffsetResponse).offset

    async def of_all_groups(
        self, node: BrokerNode, groups: Iterable[str]
    ) -> dict[str, dict[str, TopicLag]]:
        """The lags of all groups of a broker by group and topic, in one answer if possible."""
        try:
            answer = await self._asking.ask(
                node.address,
                RequestCode.GET_BROKER_CONSUME_STATS,
                GetBrokerConsumeStatsRequest(is_order=False),
                timeout=ALL_GROUPS_TIMEOUT,
            )
        except (BrokerRefused, ConnectionLost) as error:
            # An old broker, or an answer larger than a frame.
            log.info(
                "the lag of each group is requested separately from %s: %s",
                node.broker,
                error,
                extra={"broker": node.broker},
            )
            return await self._one_by_one(node, groups)
        return decode_lags(answer.body)

    async def _one_by_one(
        self, node: BrokerNode, groups: Iterable[str]
    ) -> dict[str, dict[str, TopicLag]]:
        names = tuple(groups)
        stats = await self._asking.all(self._stats(node, group, None) for group in names)
        return {group: _shared(lags_of([part])) for group, part in zip(names, stats, strict=True)}


def _queues(
    stats: ConsumeStats, ages: Mapping[Queue, float | None], owners: Mapping[Queue, str]
) -> Iterable[QueueProgress]:
    for key, place in stats.offset_table.items():
        queue = queue_of(key)
        waits = place.broker_offset > place.consumer_offset
        # 4.x does not report pull offsets.
        knows_pulls = place.pull_offset >= place.consumer_offset > 0
        yield QueueProgress(
            queue,
            place.broker_offset,
            max(0, place.consumer_offset),
            place.pull_offset if knows_pulls else None,
            place.last_timestamp / 1000 if place.last_timestamp > 0 else None,
            ages.get(queue) if waits else 0.0,
            owners.get(queue),
        )


def _shared(lags: Mapping[str, TopicLag]) -> dict[str, TopicLag]:
    """The lags by topic from one table for all topics, each with an equal part of the rate."""
    return {
        topic: replace(lag, consume_rate=lag.consume_rate / len(lags))
        for topic, lag in lags.items()
    }


# Decoding GET_BROKER_CONSUME_STATS. The answer of a big broker is megabytes of tables whose keys
# are objects, which is not JSON. The tolerant decoder would block the event loop for half a second,
# so keys of the usual shape are first turned into strings for the fast decoder.


#: A queue as a key of a table. Inside a string its quotes would be escaped.
_KEY = re.compile(rb'\{"brokerName":"([^"\\ ]*)","queueId":(\d+),"topic":"([^"\\ ]*)"\}:')


class ProgressTable(NamedTuple):
    """The progress of a group in some queues; most brokers return one table per topic."""

    #: Consumed messages per second, in all of them.
    rate: float
    places: Mapping[Queue, QueueProgressBody]

    @classmethod
    def of(cls, stats: ConsumeStats) -> ProgressTable:
        places = {
            Queue(key.topic, key.broker_name, key.queue_id): place
            for key, place in stats.offset_table.items()
        }
        return cls(stats.consume_tps, places)


class _Stats(msgspec.Struct, rename="camel"):
    consume_tps: float = 0.0
    #: By `broker queue topic`.
    offset_table: dict[str, QueueProgressBody] = msgspec.field(default_factory=dict)


class _StatsList(msgspec.Struct, rename="camel"):
    consume_stats_list: tuple[dict[str, tuple[_Stats, ...]], ...] = ()


_decode = msgspec.json.Decoder(_StatsList, strict=False).decode


def decode_progress_tables(
    body: bytes | memoryview, known: dict[str, Queue] | None = None
) -> dict[str, list[ProgressTable]]:
    """The tables of each group. Raises `BodyError`.

    `known` caches the queues between calls.
    """
    data = bytes(body) or b"{}"
    if b'"$ref"' not in data:
        try:
            return _decoded_fast(data, {} if known is None else known)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # Another spelling.
            pass
    general = decode_body(ConsumeStatsList, data)
    return {
        group: [ProgressTable.of(part) for part in stats]
        for entry in general.consume_stats_list
        for group, stats in entry.items()
    }


def _decoded_fast(data: bytes, queues: dict[str, Queue]) -> dict[str, list[ProgressTable]]:
    table = _decode(_KEY.sub(rb'"\1 \2 \3":', data))
    return {
        group: [
            ProgressTable(
                part.consume_tps,
                {
                    queues.get(key) or _queue(key, queues): place
                    for key, place in part.offset_table.items()
                },
            )
            for part in stats
        ]
        for entry in table.consume_stats_list
        for group, stats in entry.items()
    }


def _queue(key: str, known: dict[str, Queue]) -> Queue:
    """The queue of a key. Raises `ValueError` for another shape."""
    broker, number, topic = key.split(" ")
    queue = known[key] = Queue(topic, broker, int(number))
    return queue
