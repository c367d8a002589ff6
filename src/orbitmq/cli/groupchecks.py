"""What can be wrong with consumer groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence

from orbitmq.cli.diagnosis import Found
from orbitmq.cli.wording import duration, several
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.errors import ConsumerNotOnline, GroupNotFound
from orbitmq.client.admin.findings import retries_for_ever
from orbitmq.client.admin.groupvalues import GroupProgress, GroupState, GroupSummary
from orbitmq.client.admin.membervalues import Finding, FindingKind, RunningInfo
from orbitmq.client.queue import Queue

#: A group that nobody consumes in is a mistake when something has waited as long.
ABANDONED_AFTER = 600.0
#: And one that is online and finishes nothing, when something has waited as long.
IDLE_AFTER = 60.0
#: Within less time a group that works may finish nothing.
SHORTEST_WATCH = 1.0

#: What to do about what is found inside a group; the group's name goes in.
_REMEDIES: Mapping[FindingKind, str] = {
    FindingKind.DIFFERENT_SUBSCRIPTIONS: (
        "let all members subscribe alike, or give those that differ another group"
    ),
    FindingKind.DUPLICATE_CLIENT: (
        "give each process an instance name of its own (ClientSettings.instance, or none at all)"
    ),
    FindingKind.UNOWNED_QUEUE: (
        "check that all members subscribe to the topic and use one allocation strategy"
    ),
    FindingKind.STALLED_QUEUE: "see where its handler hangs: orbitmq group member {group} --stack",
}
#: Findings by the name of the check that they belong to.
_CHECKS: Mapping[FindingKind, str] = {
    FindingKind.DIFFERENT_SUBSCRIPTIONS: "subscriptions",
    FindingKind.DUPLICATE_CLIENT: "client ids",
    FindingKind.UNOWNED_QUEUE: "stuck queues",
    FindingKind.STALLED_QUEUE: "stuck queues",
}
INSIDE_CHECKS = tuple(dict.fromkeys(_CHECKS.values()))


async def inside(admin: AsyncAdmin, groups: Iterable[GroupSummary]) -> Sequence[tuple[str, Found]]:
    """What is wrong inside groups that are online: the check that it belongs to, and it."""

    async def ask(group: str) -> tuple[Finding, ...]:
        try:
            return await admin.groups.findings(group)
        except GroupNotFound:
            # Deleted meanwhile.
            return ()

    online = [each.group for each in groups if each.state is GroupState.ONLINE]
    found = await asyncio.gather(*map(ask, online))
    return [explained(finding) for part in found for finding in part]


def explained(finding: Finding) -> tuple[str, Found]:
    """The check that a finding belongs to, and what is wrong apart from what to do."""
    problem = finding.text.rpartition("; ")[0] or finding.text
    remedy = _REMEDIES[finding.kind].format(group=finding.group)
    return _CHECKS[finding.kind], Found(finding.group, problem, remedy)


def growing(before: Iterable[GroupSummary], after: Iterable[GroupSummary]) -> Iterator[Found]:
    """Groups online whose lag grows while they consume nothing at all."""
    earlier = {group.group: group for group in before}
    for group in after:
        known = earlier.get(group.group)
        if known is None or known.state is not GroupState.ONLINE:
            continue
        if group.lag > known.lag > 0 and group.consume_rate == 0:
            yield Found(
                group.group,
                f"group {group.group} is online and consumes nothing, while its lag grows "
                f"({known.lag} to {group.lag})",
                f"see what its members do: orbitmq group member {group.group} --stack",
            )


async def waiting(admin: AsyncAdmin, groups: Iterable[GroupSummary]) -> Mapping[str, GroupProgress]:
    """How far the groups are that are online and whose oldest message has waited for long."""
    slow = [
        each.group
        for each in groups
        if each.state is GroupState.ONLINE and each.lag and (each.lag_seconds or 0) >= IDLE_AFTER
    ]

    async def ask(group: str) -> GroupProgress | None:
        try:
            return await admin.groups.progress(group, owners=False)
        except GroupNotFound:
            # Deleted meanwhile.
            return None

    found = await asyncio.gather(*map(ask, slow))
    return {each.group: each for each in found if each is not None}


def idle(
    before: Mapping[str, GroupProgress], after: Mapping[str, GroupProgress], watched: float
) -> Iterator[Found]:
    """Groups that finish nothing although they are online: their handlers hang, or fail for ever.

    What they pull tells nothing: a consumer goes on to fetch while its handlers hang.
    """
    for group, now in after.items():
        if group not in before or _finished(before[group]) != _finished(now) or not now.lag:
            continue
        yield Found(
            group,
            f"group {group} is online and finished nothing while it was watched for "
            f"{duration(watched)}; {_waiting(now.lag)}, the oldest for "
            f"{duration(now.lag_seconds)}",
            f"see where its handlers are: orbitmq group member {group} --stack",
        )


def _waiting(messages: int) -> str:
    return several(messages, "message waits", "messages wait")


def _finished(progress: GroupProgress) -> Mapping[Queue, int]:
    return {each.queue: each.consumer_offset for each in progress.queues}


def abandoned(groups: Iterable[GroupSummary]) -> Iterator[Found]:
    """Groups that nobody consumes in although something waits for long."""
    for group in groups:
        waits = group.lag_seconds or 0.0
        if group.state is GroupState.OFFLINE and group.lag and waits >= ABANDONED_AFTER:
            yield Found(
                group.group,
                f"nobody consumes in group {group.group}, and {_waiting(group.lag)},"
                f" the oldest for {duration(waits)}",
                f"start its consumers, skip what waits (orbitmq group skip {group.group}), or "
                f"delete it (orbitmq group delete {group.group})",
            )
        elif group.state is GroupState.PAUSED:
            yield Found(
                group.group,
                f"group {group.group} is paused, and {_waiting(group.lag)}",
                f"orbitmq group resume {group.group}",
            )


async def endless(admin: AsyncAdmin, groups: Iterable[GroupSummary]) -> Sequence[Found]:
    """Groups whose members consume in order and never give a message up."""

    async def ask(group: str, client_id: str) -> RunningInfo | None:
        try:
            return await admin.consumers.running_info(group, client_id)
        except ConsumerNotOnline:
            return None

    # All members of a group are set up alike: the first speaks for them.
    first = [
        (each.group, each.members.client_ids[0])
        for each in groups
        if each.members is not None and each.members.client_ids
    ]
    told = await asyncio.gather(*(ask(group, client_id) for group, client_id in first))
    return [
        Found(
            info.group,
            f"{info.client_id} of group {info.group} consumes in order and retries for ever, so "
            "that one message that cannot be processed stops its queue",
            "limit its retries (max_retries=16, setMaxReconsumeTimes in Java)",
        )
        for info in told
        if info is not None and retries_for_ever(info)
    ]
