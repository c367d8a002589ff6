"""Looking into a group: its members, what they say, how far they are, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from orbitmq.client.admin import findings
from orbitmq.client.admin.asking import Asking
from orbitmq.client.admin.groupvalues import GroupDetails, GroupProgress, GroupSettings
from orbitmq.client.admin.members import AsyncConsumers
from orbitmq.client.admin.membervalues import Finding, Members, RunningInfo
from orbitmq.client.admin.progress import Progress
from orbitmq.client.admin.topicstatus import TopicInsight
from orbitmq.client.admin.topology import BrokerNode, Topology
from orbitmq.client.calltimes import CallTimes
from orbitmq.client.names import dead_letter_topic
from orbitmq.client.queue import Queue


class GroupLooking:
    """Asks members and brokers about groups that are known to be there."""

    def __init__(
        self, asking: Asking, consumers: AsyncConsumers, progress: Progress, insight: TopicInsight
    ) -> None:
        self._asking = asking
        self._consumers = consumers
        self._progress = progress
        self._insight = insight

    async def progress(
        self, group: str, topology: Topology, *, topic: str | None, owners: bool
    ) -> GroupProgress:
        """How far a group is, and with `owners`, who has each queue."""
        members, _ = await self._consumers.look(group, topology)
        running = await self._running(members, topology) if owners else {}
        return await self._progress_with(running, group, members, topology, topic=topic)

    async def describe(
        self, group: str, topology: Topology, settings: dict[str, GroupSettings]
    ) -> GroupDetails:
        """Everything about a group that is configured like this."""
        members, told = await self._consumers.look(group, topology)
        running = await self._running(members, topology)
        progress = await self._progress_with(running, group, members, topology)
        return GroupDetails(
            group,
            settings,
            members,
            self._found(members, told, running, progress),
            progress,
            await self._dead_letters(topology, group),
            running,
        )

    async def _progress_with(
        self,
        running: Mapping[str, RunningInfo],
        group: str,
        members: Members | None,
        topology: Topology,
        *,
        topic: str | None = None,
    ) -> GroupProgress:
        """How far a group is, with what its members say of themselves."""
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
        told: Sequence[str],
        running: Mapping[str, RunningInfo],
        progress: GroupProgress,
    ) -> tuple[Finding, ...]:
        if members is None:
            return ()
        found = {
            (each.kind, each.topic, each.client_id): each for each in findings.told_findings(told)
        }
        # What Apache's brokers do not look for; ours has said it already.
        for each in (
            *findings.duplicate_clients(members),
            *findings.different_subscriptions(members.group, running),
        ):
            found.setdefault((each.kind, each.topic, each.client_id), each)
        queues: tuple[Finding, ...] = ()
        # Whether a queue has an owner is known only when every member has said what it owns, which
        # is what members that are pushed to do.
        is_shared = (members.model, members.consume_type) == ("clustering", "push")
        if is_shared and running.keys() >= set(members.client_ids):
            queues = findings.queue_findings(progress, running, self._asking.clock.now())
        return (*found.values(), *queues)

    async def _running(self, members: Members | None, topology: Topology) -> dict[str, RunningInfo]:
        """What members say of themselves; those that do not answer are missing."""
        if members is None:
            return {}
        nodes = topology.readers()

        async def ask(client_id: str) -> RunningInfo:
            return await self._consumers.running_info_of(nodes, members.group, client_id)

        return dict((await self._asking.each(members.client_ids, ask)).done)

    async def _dead_letters(self, topology: Topology, group: str) -> int:
        topic = dead_letter_topic(group)

        async def count(node: BrokerNode) -> int:
            stats = await self._insight.stats(node, topic)
            bounds = () if stats is None else stats.offset_table.values()
            return sum(max(0, each.max_offset - each.min_offset) for each in bounds)

        return sum((await self._asking.each(topology.readers(), count)).done.values())


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
    """How long calls of handlers took, by topic, of all consumers together that tell it."""
    told: dict[str, list[CallTimes]] = {}
    for info in infos:
        for topic, each in info.topics.items():
            if each.consume_times is not None:
                told.setdefault(topic, []).append(each.consume_times)
    return {topic: CallTimes.together(parts) for topic, parts in sorted(told.items())}
