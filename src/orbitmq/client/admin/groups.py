"""Consumer groups: listed, configured, looked into, paused.

Moving their progress is in `resetting`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

import msgspec

from orbitmq.client.admin.arguments import whole_number
from orbitmq.client.admin.asking import Asking
from orbitmq.client.admin.errors import BadRequest, NotEffective, TopicNotFound
from orbitmq.client.admin.groupconfigs import GroupConfigs, compared, group_settings
from orbitmq.client.admin.grouplooking import GroupLooking
from orbitmq.client.admin.groupvalues import (
    GroupDetails,
    GroupProgress,
    GroupSettings,
    GroupSummary,
    QueueProgress,
    TopicLag,
)
from orbitmq.client.admin.listing import Listing
from orbitmq.client.admin.members import AsyncConsumers
from orbitmq.client.admin.membervalues import Finding
from orbitmq.client.admin.progress import Progress
from orbitmq.client.admin.topics import AsyncTopics
from orbitmq.client.admin.topicstatus import TopicInsight
from orbitmq.client.admin.topology import BrokerNode, Directory, Topology, unreachable
from orbitmq.client.durations import Duration, seconds
from orbitmq.client.names import (
    check_group,
    dead_letter_topic,
    is_retry_topic,
    is_system_group,
    retry_topic,
)
from orbitmq.wire.bodies.topics import SubscriptionGroupConfig
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers.topics import DeleteGroupRequest

log = logging.getLogger(__name__)

#: Groups that brokers have for tools and for themselves.
SYSTEM_GROUPS = frozenset(
    {
        "TOOLS_CONSUMER",
        "FILTERSRV_CONSUMER",
        "SELF_TEST_C_GROUP",
        "CID_ONS-HTTP-PROXY",
        "CID_ONSAPI_PULL",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_OWNER",
    }
)


class AsyncGroups:
    """Administration of groups."""

    def __init__(
        self,
        asking: Asking,
        directory: Directory,
        topics: AsyncTopics,
        consumers: AsyncConsumers,
        progress: Progress,
    ) -> None:
        self._asking = asking
        self._directory = directory
        self._consumers = consumers
        self._progress = progress
        self._topics = topics
        self._looking = GroupLooking(asking, consumers, progress, TopicInsight(asking, directory))
        self._configs = GroupConfigs(asking)

    # Listing.

    async def list(
        self, *, members: bool = False, times: bool = False, system: bool = False
    ) -> Listing[GroupSummary]:
        """All groups with their lag: two requests per broker, however many groups there are.

        With `members` also who is online, one request more per group and broker; with `times`
        also the age of what waits, one per topic and broker of the groups that are behind.
        """
        topology = await self._directory.look()

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
        # Brokers' tables have the topics that a group reported progress in: what one that has not
        # finished anything yet is behind in is told only when asked for by name.
        told = {each.topic for each in summary.topics}
        silent = {each.topic for each in members.subscriptions} - told
        silent = {topic for topic in silent if not is_retry_topic(topic)}
        if not silent:
            return known
        progress = await self._progress.of_group(
            summary.group, subscribed=silent, topology=topology
        )
        more = (_topic_lag(topic, progress.of_topic(topic)) for topic in sorted(silent))
        return replace(known, topics=(*summary.topics, *more))

    # One group.

    async def settings(self, group: str) -> dict[str, GroupSettings]:
        """How a group is configured, by broker. Raises `GroupNotFound`."""
        topology = await self._directory.look()
        found = await self._configs.of(topology.readers(), group)
        return {node.broker: group_settings(config) for node, config in found.items()}

    async def progress(
        self, group: str, *, topic: str | None = None, owners: bool = True
    ) -> GroupProgress:
        """How far a group is, queue by queue, and who has each queue.

        Owners are asked for at the members themselves, one request each; `owners=False` leaves
        that out. Raises `GroupNotFound`.
        """
        topology = await self._directory.look()
        await self._configs.of(topology.readers(), group)
        return await self._looking.progress(group, topology, topic=topic, owners=owners)

    async def describe(self, group: str) -> GroupDetails:
        """Settings, members, findings and progress of a group. Raises `GroupNotFound`."""
        topology = await self._directory.look()
        found = await self._configs.of(topology.readers(), group)
        configured = {node.broker: group_settings(config) for node, config in found.items()}
        return await self._looking.describe(group, topology, configured)

    async def findings(self, group: str) -> tuple[Finding, ...]:
        """What is wrong inside a group: differing subscriptions, duplicate ids, stuck queues."""
        return (await self.describe(group)).findings

    # Making and changing.

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
        """Make a group on all masters, those named or those of a cluster; as read back."""
        check_group(group)
        config = SubscriptionGroupConfig(
            group_name=group,
            retry_max_times=whole_number("max_retries", max_retries, 0),
            retry_queue_nums=whole_number("retry_queues", retry_queues, 0),
            consume_message_orderly=orderly,
            consume_broadcast_enable=may_broadcast,
            consume_enable=enabled,
            consume_timeout_minute=_minutes(consume_timeout),
        )
        masters = (await self._directory.look()).masters(brokers, cluster=cluster)
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
        """Change what is given and leave the rest, where the group is; as read back.

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
        masters = (await self._directory.look()).masters(brokers)
        present = await self._configs.of(masters, group)
        return await self._apply(
            {node: msgspec.structs.replace(config, **wanted) for node, config in present.items()}
        )

    async def pause(self, group: str) -> dict[str, GroupSettings]:
        """Stop a group from pulling, on every broker; its members stay connected and wait."""
        paused = await self.update(group, enabled=False)
        log.info(
            "group %s paused at %s",
            group,
            ", ".join(sorted(paused)),
            extra={"group": group, "brokers": sorted(paused)},
        )
        return paused

    async def resume(self, group: str) -> dict[str, GroupSettings]:
        """Let a group pull again."""
        resumed = await self.update(group, enabled=True)
        log.info(
            "group %s resumed at %s",
            group,
            ", ".join(sorted(resumed)),
            extra={"group": group, "brokers": sorted(resumed)},
        )
        return resumed

    async def check_offline(self, group: str) -> None:
        """Raises `BadRequest` when a group has members online, as `delete` would."""
        await self._check_offline(group, await self._directory.look())

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
        """Delete a group's settings and progress; with `delete_topics` also its dead letters.

        That is its retry topic and its dead-letter topic, with what is in them. A group with
        members online is refused: they would make it again at once. Raises `GroupNotFound`.
        """
        topology = await self._directory.look()
        masters = topology.masters()
        await self._configs.of(masters, group)
        await self._check_offline(group, topology)
        header = DeleteGroupRequest(group_name=group, clean_offset=forget_progress)

        async def forget(node: BrokerNode) -> None:
            await self._asking.ask(node.address, RequestCode.DELETE_SUBSCRIPTIONGROUP, header)

        (await self._asking.each(masters, forget)).check(f"deleting group {group!r}")
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
        async def tell(node: BrokerNode) -> SubscriptionGroupConfig | None:
            config = wanted[node]
            await self._configs.put(node, config)
            return (await self._configs.all(node)).get(config.group_name)

        group = next(iter(wanted.values())).group_name
        after = (await self._asking.each(wanted, tell)).check(f"configuring group {group!r}")
        problems = [
            f"{node} shows {'no such group' if found is None else group_settings(found)}"
            for node, found in after.items()
            if found is None or compared(found) != compared(wanted[node])
        ]
        if problems:
            raise NotEffective(f"configuring group {group!r}", problems)
        return {node.broker: group_settings(wanted[node]) for node in after}


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
    age = max((each.lag_seconds for each in queues if each.lag_seconds), default=None)
    return TopicLag(topic, lag, len(queues), 0.0, age if lag else 0.0)


def _optional_count(name: str, value: int | None) -> int | None:
    return None if value is None else whole_number(name, value, 0)


def _minutes(timeout: Duration) -> int:
    minutes = round(seconds(timeout, "consume_timeout") / 60)
    if minutes < 1:
        raise BadRequest(f"consume_timeout must be a minute at least, got {timeout!r}")
    return minutes
