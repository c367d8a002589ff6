"""Making plans for moving progress: asks, and changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime

from orbitmq.client.admin.asking import Asking
from orbitmq.client.admin.errors import BadRequest, QueueNotFound
from orbitmq.client.admin.groupconfigs import GroupConfigs
from orbitmq.client.admin.members import AsyncConsumers
from orbitmq.client.admin.progress import Progress
from orbitmq.client.admin.reading import Reading
from orbitmq.client.admin.resetplan import QueueMove, ResetPlan, ResetTo, is_by_time, target
from orbitmq.client.admin.topicstatus import TopicInsight
from orbitmq.client.admin.topology import Directory, Topology
from orbitmq.client.names import check_group, check_topic, is_retry_topic
from orbitmq.client.queue import Queue


class AsyncPlanning:
    """Says what moving progress would do."""

    def __init__(
        self,
        asking: Asking,
        directory: Directory,
        consumers: AsyncConsumers,
        progress: Progress,
    ) -> None:
        self._asking = asking
        self._directory = directory
        self._consumers = consumers
        self._progress = progress
        self._configs = GroupConfigs(asking)
        self._reading = Reading(asking)
        self._topics = TopicInsight(asking, directory)

    async def plan_reset(
        self,
        group: str,
        topic: str,
        to: ResetTo | datetime | str,
        *,
        queues: Collection[Queue] | None = None,
    ) -> ResetPlan:
        """What a reset would do, queue by queue; changes nothing.

        `to` is "first", "last", a time or a `ResetTo`; `queues` limits it to some. Raises
        `GroupNotFound`, `TopicNotFound`, `QueueNotFound`, and `BadRequest` for an offset that a
        queue does not have.
        """
        to = ResetTo.of(to)
        check_group(group)
        check_topic(topic)
        topology = await self._directory.look()
        await self._configs.of(topology.readers(), group)
        bounds = await self._topics.bounds(topology, topic)
        wanted = _wanted(bounds, queues, to)
        moves = await self._asking.all(
            self._move(topology, group, queue, to, *bounds[queue]) for queue in wanted
        )
        members, _ = await self._consumers.look(group, topology)
        return ResetPlan(
            group,
            topic,
            to,
            tuple(move for move in moves if move is not None),
            () if members is None else members.client_ids,
            is_whole_topic=len(wanted) == len(bounds),
        )

    async def plan_skip(
        self, group: str, topic: str | None = None, *, retries: bool = False
    ) -> tuple[ResetPlan, ...]:
        """What skipping the backlog would do: of one topic, or of all that the group consumes.

        Messages that failed before and wait for their next attempt are left, unless `retries`.
        """
        topics = [topic] if topic is not None else await self._consumed(group, retries=retries)
        end = ResetTo.end()
        return tuple([await self.plan_reset(group, each, end) for each in topics])

    async def plan_clone(
        self, source: str, target_group: str, topic: str | None = None
    ) -> tuple[ResetPlan, ...]:
        """What giving a group the progress of another would do: in one topic, or in all of them.

        A target group that does not exist yet is made when the plan is applied, with the settings
        of the source.
        """
        check_group(target_group)
        if source == target_group:
            raise BadRequest(f"a group cannot be cloned onto itself: {source!r}")
        topics = [topic] if topic is not None else await self._consumed(source, retries=False)
        topology = await self._directory.look()
        await self._configs.of(topology.readers(), source)
        members, _ = await self._consumers.look(target_group, topology)
        plans = []
        for name in topics:
            bounds = await self._topics.bounds(topology, name)
            offsets = await self._asking.each(
                bounds,
                lambda queue: self._progress.offset(topology.reader(queue.broker), source, queue),
            )
            known = offsets.check(f"reading the progress of {source!r}")
            copied = {queue: offset for queue, offset in known.items() if offset is not None}
            if not copied:
                continue
            moves = [
                QueueMove(
                    queue,
                    await self._progress.offset(topology.reader(queue.broker), target_group, queue),
                    # What is gone cannot be gone back to.
                    min(max(offset, bounds[queue][0]), bounds[queue][1]),
                    *bounds[queue],
                )
                for queue, offset in sorted(copied.items())
            ]
            plans.append(
                ResetPlan(
                    target_group,
                    name,
                    ResetTo.by_queue(copied),
                    tuple(moves),
                    () if members is None else members.client_ids,
                    is_whole_topic=len(copied) == len(bounds),
                    source=source,
                )
            )
        return tuple(plans)

    async def _consumed(self, group: str, *, retries: bool) -> list[str]:
        topology = await self._directory.look()
        await self._configs.of(topology.readers(), group)
        progress = await self._progress.of_group(group, topology=topology)
        return [name for name in progress.topics if retries or not is_retry_topic(name)]

    async def _move(
        self, topology: Topology, group: str, queue: Queue, to: ResetTo, low: int, high: int
    ) -> QueueMove | None:
        node = topology.reader(queue.broker)
        progress = await self._progress.offset(node, group, queue)
        timed = None
        if is_by_time(to):
            timed = await self._reading.offset_at(node.address, queue, to.at, low, high)
        offset = target(to, queue, progress=progress, low=low, high=high, timed=timed)
        return None if offset is None else QueueMove(queue, progress, offset, low, high)


def _wanted(
    bounds: Mapping[Queue, object], queues: Collection[Queue] | None, to: ResetTo
) -> tuple[Queue, ...]:
    named = queues if queues is not None else (tuple(to.offsets) or None)
    if named is None:
        return tuple(bounds)
    for queue in (*named, *to.offsets):
        if queue not in bounds:
            raise QueueNotFound(queue, bounds)
    return tuple(queue for queue in bounds if queue in named)
