"""Moving a group's progress: plan, apply, read back.

Three kinds of broker are told in three ways.

* One that resets by itself (OrbitMQ's, and Apache's with `useServerSideResetOffset`) takes a queue
  and an offset, whether anybody is online or not; members are sent there by their next pull.
* Others store the offset that a tool reports for a group that is offline.
* While members of the group are online, these others can only push a time to them, for all queues
  of a topic; the members then report where they are, within some seconds.

Nothing counts as done because a server said so: every queue is read back. In the third case that
takes until the members have reported.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime

import msgspec

from orbitmq.client.admin.asking import Failed
from orbitmq.client.admin.errors import GroupNotFound, NotSupported
from orbitmq.client.admin.planning import AsyncPlanning
from orbitmq.client.admin.resetplan import (
    QueueMove,
    QueueOutcome,
    ResetFailed,
    ResetPlan,
    ResetReport,
    ResetTo,
)
from orbitmq.client.admin.runtime import is_orbitmq
from orbitmq.client.admin.topology import BrokerNode, Topology
from orbitmq.client.errors import BrokerRefused
from orbitmq.client.queue import Queue
from orbitmq.wire.bodies.properties import parse_properties
from orbitmq.wire.bodies.route import KVTable
from orbitmq.wire.bodies.topics import SubscriptionGroupConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers.offsets import ResetOffsetRequest, UpdateConsumerOffsetRequest

log = logging.getLogger(__name__)

#: How long members may take to report where a pushed reset sent them: they wait 10 s for their
#: handlers, and report every 5 s.
PUSHED_WITHIN = 20.0
#: How long progress is watched after a reset of a group that is online.
WATCHED = 1.0
_LOOK_AGAIN = 0.2


class AsyncProgress(AsyncPlanning):
    """Moves progress, and says beforehand what that will do."""

    async def reset(
        self,
        group: str,
        topic: str,
        to: ResetTo | datetime | str,
        *,
        queues: Collection[Queue] | None = None,
    ) -> ResetReport:
        """Plan and apply in one step: `to` "first", "last", a time or a `ResetTo`.

        Raises what `plan_reset` and `apply` raise.
        """
        return await self.apply(await self.plan_reset(group, topic, to, queues=queues))

    async def apply(self, plan: ResetPlan) -> ResetReport:
        """Do what a plan says, and read every queue back.

        Raises `ResetFailed`, which has the report, unless it took effect everywhere; and
        `NotSupported`, before anything is changed, when a broker cannot do it.
        """
        topology = await self._directory.look()
        members, _ = await self._consumers.look(plan.group, topology)
        by_broker: dict[BrokerNode, list[QueueMove]] = {}
        for move in plan.moves:
            by_broker.setdefault(topology.master(move.queue.broker), []).append(move)
        serves = await self._asking.each(by_broker, self._resets_by_itself)
        by_itself = serves.check(f"asking how to move group {plan.group!r}")
        is_online = members is not None
        pushed = [node for node in by_broker if is_online and not by_itself[node]]
        if pushed:
            _check_pushable(plan, pushed)
        await self._ensure_group(topology, plan, by_broker)

        async def move_all(node: BrokerNode) -> list[QueueOutcome]:
            moves = by_broker[node]
            if node in pushed:
                return await self._push(node, plan, moves)
            return [await self._stored(node, plan, move, by_itself[node]) for move in moves]

        done = await self._asking.each(by_broker, move_all)
        outcomes = [outcome for part in done.done.values() for outcome in part]
        for node, error in done.failed.items():
            outcomes += [QueueOutcome(move, None, f"failed: {error}") for move in by_broker[node]]
        if is_online:
            outcomes = await self._asking.all(self._watched(plan, each) for each in outcomes)
        outcomes.sort(key=lambda outcome: outcome.move.queue)
        report = ResetReport(plan, tuple(outcomes))
        log.info(
            "progress of group %s in %s %s to %s: %d skipped, %d replayed",
            plan.group,
            plan.topic,
            "moved" if report.is_effective else "could not be moved",
            plan.to if plan.source is None else f"where group {plan.source} is",
            plan.skipped,
            plan.replayed,
            extra={"group": plan.group, "topic": plan.topic, "to": str(plan.to)}
            | {"skipped": plan.skipped, "replayed": plan.replayed, "source": plan.source},
        )
        if not report.is_effective:
            raise ResetFailed(report)
        return report

    async def _resets_by_itself(self, node: BrokerNode) -> bool:
        """Whether a broker takes a queue and an offset.

        It must be known before: others would take the same request for a reset of all queues.
        """
        answer = await self._asking.ask(node.address, RequestCode.GET_BROKER_CONFIG)
        config = parse_properties(bytes(answer.body).decode("utf-8", "replace"))
        setting = config.get("useServerSideResetOffset")
        if setting is not None:
            return setting.strip().lower() == "true"
        code = RequestCode.GET_BROKER_RUNTIME_INFO
        try:
            info = await self._asking.told(KVTable, node.address, code)
        except BrokerRefused as refusal:
            if refusal.code != ResponseCode.SYSTEM_ERROR:
                raise
            # Apache's 4.9 fails at this question in its first seconds; ours never does.
            return False
        return is_orbitmq(info.table)

    async def _ensure_group(
        self, topology: Topology, plan: ResetPlan, nodes: Iterable[BrokerNode]
    ) -> None:
        """Make the group where it is not known yet: progress of an unknown group is refused."""
        known = await self._known(topology, plan.group)
        models = known or await self._known(topology, plan.source or plan.group)
        model = next(iter(models.values()), SubscriptionGroupConfig(group_name=plan.group))
        config = msgspec.structs.replace(model, group_name=plan.group)
        brokers = {node.broker for node in known}
        for node in nodes:
            if node.broker not in brokers:
                await self._configs.put(node, config)

    async def _known(
        self, topology: Topology, group: str
    ) -> Mapping[BrokerNode, SubscriptionGroupConfig]:
        try:
            return await self._configs.of(topology.readers(), group)
        except GroupNotFound:
            return {}

    async def _stored(
        self, node: BrokerNode, plan: ResetPlan, move: QueueMove, by_itself: bool
    ) -> QueueOutcome:
        """Have a broker store an offset, and read it back before any member can go on from it."""
        try:
            await self._store(node, plan, move, by_itself)
            return _outcome(move, await self._progress.offset(node, plan.group, move.queue))
        except Failed as error:
            return QueueOutcome(move, None, f"failed: {error}")

    async def _store(
        self, node: BrokerNode, plan: ResetPlan, move: QueueMove, by_itself: bool
    ) -> None:
        if by_itself:
            header = ResetOffsetRequest(
                group=plan.group,
                topic=plan.topic,
                queue_id=move.queue.id,
                offset=move.to_offset,
                is_force=True,
            )
            code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
            await self._asking.ask(node.address, code, header)
            return
        report = UpdateConsumerOffsetRequest(
            consumer_group=plan.group,
            topic=plan.topic,
            queue_id=move.queue.id,
            commit_offset=move.to_offset,
        )
        await self._asking.ask(node.address, RequestCode.UPDATE_CONSUMER_OFFSET, report)

    async def _push(
        self, node: BrokerNode, plan: ResetPlan, moves: Sequence[QueueMove]
    ) -> list[QueueOutcome]:
        """Have a broker tell the members, and wait until they report to be there."""
        millis = plan.to.push_millis
        header = ResetOffsetRequest(
            group=plan.group, topic=plan.topic, timestamp=millis or 0, is_force=True
        )
        await self._asking.ask(node.address, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
        deadline = self._asking.clock.monotonic() + PUSHED_WITHIN
        outcomes: list[QueueOutcome] = []
        for move in moves:
            outcome = _outcome(move, await self._progress.offset(node, plan.group, move.queue))
            while not outcome.is_effective and self._asking.clock.monotonic() < deadline:
                await asyncio.sleep(_LOOK_AGAIN)
                outcome = _outcome(move, await self._progress.offset(node, plan.group, move.queue))
            outcomes.append(outcome)
        return outcomes

    # Reading back.

    async def _watched(self, plan: ResetPlan, outcome: QueueOutcome) -> QueueOutcome:
        """Whether a move of a group that is online still holds after its members had a word.

        Members go up from the target. One that knows nothing of the reset reports what it had in
        mind; after a skip that is below the target.
        """
        move = outcome.move
        if not outcome.is_effective:
            return outcome
        node = (await self._directory.look()).reader(move.queue.broker)
        deadline = self._asking.clock.monotonic() + WATCHED
        found: int | None = outcome.read_back
        while found == move.to_offset and self._asking.clock.monotonic() < deadline:
            await asyncio.sleep(_LOOK_AGAIN)
            found = await self._progress.offset(node, plan.group, move.queue)
        if found is None or found < move.to_offset:
            return QueueOutcome(
                move, found, f"was at {move.to_offset}, and a member put it back to {found}"
            )
        return outcome


def _check_pushable(plan: ResetPlan, nodes: Iterable[BrokerNode]) -> None:
    if plan.to.push_millis is None or not plan.is_whole_topic:
        raise NotSupported(
            f"move group {plan.group!r} to {plan.to} while members are online",
            ", ".join(map(str, nodes)),
            "stop its consumers first, or reset all queues to a time, the beginning or the end",
        )


def _outcome(move: QueueMove, found: int | None) -> QueueOutcome:
    """What reading back says. Members that are fast may have gone on from the target already."""
    low, high = move.to_offset, move.from_offset
    if found == low or (found is not None and found > low and (high is None or found < high)):
        return QueueOutcome(move, found)
    if found is not None and high is not None and high <= low <= found:
        return QueueOutcome(move, found)
    shown = "has no progress" if found is None else f"is at {found}"
    return QueueOutcome(move, found, f"{shown} instead of {move.to_offset}")
