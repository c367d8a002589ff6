"""Moves the progress of groups: plan, apply, read back."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from orbitmq.arguments import explained
from orbitmq.client.admin.cluster import is_orbitmq
from orbitmq.client.admin.groups import GroupConfigs, ProgressQueries
from orbitmq.client.admin.members import AsyncConsumers
from orbitmq.client.admin.messages import QueueReader
from orbitmq.client.admin.requests import (
    AdminRequests,
    BrokerNode,
    Failed,
    OfQueue,
    Topology,
)
from orbitmq.client.admin.topics import TopicQueries
from orbitmq.client.errors import BadRequest, GroupNotFound, NotEffective, QueueNotFound
from orbitmq.client.routes import Queue
from orbitmq.clock import milliseconds
from orbitmq.errors import BrokerRefused, NotSupported
from orbitmq.names import check_group, check_topic, is_retry_topic
from orbitmq.parsing import LARGEST_LONG, AnyPosition, Moment, Place, moment, position, whole
from orbitmq.wire.bodies import KVTable, SubscriptionGroupConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import ResetOffsetRequest, UpdateConsumerOffsetRequest
from orbitmq.wire.javajson import parse_properties


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


# A plan consists of offsets: what was shown is what is applied, also when messages arrive in
# between.


class _Kind(enum.Enum):
    BEGIN = "the beginning"
    END = "the end"
    TIME = "a time"
    OFFSET = "an offset"
    OFFSETS = "offsets by queue"
    SHIFT = "a number of messages"


@dataclass(frozen=True, slots=True)
class ResetTo:
    """The target of a reset. Made by `earliest()`, `latest()`, `time()`, `offset()` and so on."""

    kind: _Kind
    at: float = 0.0
    number: int = 0
    offsets: Mapping[Queue, int] = field(default_factory=dict, hash=False)

    @classmethod
    def earliest(cls) -> ResetTo:
        """The beginning of each queue."""
        return cls(_Kind.BEGIN)

    @classmethod
    def latest(cls) -> ResetTo:
        """The end of each queue."""
        return cls(_Kind.END)

    begin = first = earliest
    end = last = latest

    @classmethod
    def of(cls, wanted: ResetTo | AnyPosition) -> ResetTo:
        """The target for "earliest", "latest", a time, an offset or a `ResetTo`.

        Raises `SettingError` with what is allowed.
        """
        if isinstance(wanted, ResetTo):
            return wanted
        to = position(wanted, "the target of a reset")
        if to.offset is not None:
            return cls.offset(to.offset)
        if to.time is not None:
            return cls.time(to.time)
        return cls.earliest() if to.place is Place.EARLIEST else cls.latest()

    @classmethod
    def time(cls, at: Moment) -> ResetTo:
        """The first message of each queue that was stored at or after a time."""
        return cls(_Kind.TIME, at=moment(at, "the time of a reset"))

    @classmethod
    def offset(cls, offset: int) -> ResetTo:
        """The same offset in every queue."""
        return cls(_Kind.OFFSET, number=_whole(offset, "an offset"))

    @classmethod
    def by_queue(cls, offsets: Mapping[Queue, int]) -> ResetTo:
        """An offset for each queue; other queues are not moved."""
        if not offsets:
            raise BadRequest("a reset by queue must name at least one queue")
        checked = {queue: _whole(offset, "an offset") for queue, offset in offsets.items()}
        return cls(_Kind.OFFSETS, offsets=checked)

    @classmethod
    def shift(cls, messages: int) -> ResetTo:
        """A number of messages back (negative) or forward, within the bounds."""
        whole(messages, "a shift", least=-LARGEST_LONG, most=LARGEST_LONG)
        return cls(_Kind.SHIFT, number=messages)

    @property
    def push_millis(self) -> int | None:
        """The target as a timestamp for brokers that need one, or None."""
        match self.kind:
            case _Kind.BEGIN:
                return 0
            case _Kind.END:
                return -1
            case _Kind.TIME:
                return milliseconds(self.at)
            case _:
                return None

    def __str__(self) -> str:
        return self.kind.value


def _whole(value: object, what: str) -> int:
    return whole(value, what, least=0, most=LARGEST_LONG)


@dataclass(frozen=True, slots=True)
class QueueMove(OfQueue):
    """The move of the progress in one queue."""

    queue: Queue
    #: None: no progress in this queue.
    from_offset: int | None
    to_offset: int
    #: The bounds of the queue when the plan was made.
    min_offset: int
    max_offset: int

    @property
    def is_change(self) -> bool:
        return self.from_offset != self.to_offset

    @property
    def skipped(self) -> int:
        """Messages that the group will not get."""
        return max(0, self.to_offset - self._base)

    @property
    def replayed(self) -> int:
        """Messages that it gets again."""
        if self.from_offset is None:
            return 0
        return max(0, min(self._base, self.max_offset) - self.to_offset)

    @property
    def _base(self) -> int:
        """The position without the move; without progress the beginning."""
        return max(self.from_offset or 0, self.min_offset)


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """The moves of a reset. Nothing is changed until it is applied."""

    group: str
    topic: str
    to: ResetTo
    moves: tuple[QueueMove, ...]
    #: The members that were online when the plan was made.
    online: tuple[str, ...] = ()
    #: Whether it contains all queues of the topic.
    is_whole_topic: bool = True
    #: The group whose progress is copied, if any.
    source: str | None = None

    @property
    def skipped(self) -> int:
        return sum(move.skipped for move in self.moves)

    @property
    def replayed(self) -> int:
        return sum(move.replayed for move in self.moves)

    @property
    def is_change(self) -> bool:
        return any(move.is_change for move in self.moves)


@dataclass(frozen=True, slots=True)
class QueueOutcome:
    """The outcome of a move, read back from the broker."""

    move: QueueMove
    #: None when it could not be read.
    read_back: int | None
    #: Why it took no effect; None when it did.
    problem: str | None = None

    @property
    def is_effective(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, slots=True)
class ResetReport:
    """The outcomes of a plan."""

    plan: ResetPlan
    outcomes: tuple[QueueOutcome, ...]

    @property
    def is_effective(self) -> bool:
        return all(outcome.is_effective for outcome in self.outcomes)


class ResetFailed(NotEffective):
    """A reset that took no effect in at least one queue; see `report`."""

    def __init__(self, report: ResetReport) -> None:
        self.report = report
        super().__init__(
            f"moving group {report.plan.group!r} in topic {report.plan.topic!r}",
            (
                f"{outcome.move.queue.broker}:{outcome.move.queue.id} {outcome.problem}"
                for outcome in report.outcomes
                if outcome.problem is not None
            ),
        )


def target(
    to: ResetTo, queue: Queue, *, progress: int | None, low: int, high: int, timed: int | None
) -> int | None:
    """The new offset in a queue; None: unchanged. `timed` is the offset for `to.at`."""
    match to.kind:
        case _Kind.BEGIN:
            return low
        case _Kind.END:
            return high
        case _Kind.TIME:
            return timed
        case _Kind.OFFSET:
            return _inside(to.number, queue, low, high)
        case _Kind.OFFSETS:
            offset = to.offsets.get(queue)
            return None if offset is None else _inside(offset, queue, low, high)
        case _Kind.SHIFT:
            return min(max((progress or 0) + to.number, low), high)


def _inside(offset: int, queue: Queue, low: int, high: int) -> int:
    if not low <= offset <= high:
        raise BadRequest(
            f"offset {offset} is not in queue {queue.broker}:{queue.id} of {queue.topic!r}, which "
            f"has {low} to {high}"
        )
    return offset


# Applying a plan depends on the broker:
#
# * OrbitMQ's, and Apache's with `useServerSideResetOffset`, resets a queue to an offset, also while
#   members are online; their next pull moves them.
# * Others store a committed offset, while the group is offline.
# * While members are online, these others can only push a time to the members, for all queues of a
#   topic. The members report their new offsets within some seconds.
#
# Every queue is read back; in the third case this waits for the members' reports.


log = logging.getLogger(__name__)

#: The time limit for members to report after a pushed reset: they wait 10 s for their handlers and
#: report every 5 s.
PUSHED_WITHIN = 20.0
#: How long progress is watched after a reset of an online group.
WATCHED = 1.0
_LOOK_AGAIN = 0.2


@explained()
class AsyncProgress:
    """Plans and applies moves of progress."""

    def __init__(
        self,
        asking: AdminRequests,
        consumers: AsyncConsumers,
        progress: ProgressQueries,
    ) -> None:
        self._asking = asking
        self._consumers = consumers
        self._progress = progress
        self._configs = GroupConfigs(asking)
        self._reading = QueueReader(asking)
        self._topics = TopicQueries(asking)

    async def plan_reset(
        self,
        group: str,
        topic: str,
        to: ResetTo | AnyPosition,
        *,
        queues: Collection[Queue] | None = None,
    ) -> ResetPlan:
        """The plan of a reset, queue by queue; changes nothing.

        `to` is "earliest", "latest", a time, an offset or a `ResetTo`; `queues` limits it. Raises
        `GroupNotFound`, `TopicNotFound`, `QueueNotFound`, and `BadRequest` for an offset that a
        queue does not have.
        """
        to = ResetTo.of(to)
        check_group(group)
        check_topic(topic)
        topology = await self._asking.topology()
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
        """The plan for skipping the backlog of one topic, or of all topics of the group.

        Messages in the retry topic are kept, unless `retries`.
        """
        topics = [topic] if topic is not None else await self._consumed(group, retries=retries)
        end = ResetTo.latest()
        return tuple([await self.plan_reset(group, each, end) for each in topics])

    async def plan_clone(
        self, source: str, target_group: str, topic: str | None = None
    ) -> tuple[ResetPlan, ...]:
        """The plans for copying the progress of a group to another, in one topic or in all.

        A missing target group is created when a plan is applied, with the settings of the source.
        """
        check_group(target_group)
        if source == target_group:
            raise BadRequest(f"a group cannot be cloned onto itself: {source!r}")
        topics = [topic] if topic is not None else await self._consumed(source, retries=False)
        topology = await self._asking.topology()
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
                    # Expired messages cannot be consumed again.
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
        topology = await self._asking.topology()
        await self._configs.of(topology.readers(), group)
        progress = await self._progress.of_group(group, topology=topology)
        return [name for name in progress.topics if retries or not is_retry_topic(name)]

    async def _move(
        self, topology: Topology, group: str, queue: Queue, to: ResetTo, low: int, high: int
    ) -> QueueMove | None:
        node = topology.reader(queue.broker)
        progress = await self._progress.offset(node, group, queue)
        timed = None
        if to.kind is _Kind.TIME:
            timed = await self._reading.offset_at(node.address, queue, to.at, low, high)
        offset = target(to, queue, progress=progress, low=low, high=high, timed=timed)
        return None if offset is None else QueueMove(queue, progress, offset, low, high)

    async def reset(
        self,
        group: str,
        topic: str,
        to: ResetTo | AnyPosition,
        *,
        queues: Collection[Queue] | None = None,
    ) -> ResetReport:
        """Plan and apply in one step: `to` "earliest", "latest", a time, an offset or a `ResetTo`.

        Raises what `plan_reset` and `apply` raise.
        """
        return await self.apply(await self.plan_reset(group, topic, to, queues=queues))

    async def apply(self, plan: ResetPlan) -> ResetReport:
        """Apply a plan and read every queue back.

        Raises `ResetFailed`, which has the report, unless it took effect everywhere; and
        `NotSupported`, before anything is changed, when a broker cannot do it.
        """
        topology = await self._asking.topology()
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
        """Whether a broker resets single queues.

        Checked before, because others take the same request as a reset of all queues.
        """
        answer = await self._asking.ask(node.address, RequestCode.GET_BROKER_CONFIG)
        config = parse_properties(bytes(answer.body).decode("utf-8", "replace"))
        setting = config.get("useServerSideResetOffset")
        if setting is not None:
            return setting.strip().lower() == "true"
        code = RequestCode.GET_BROKER_RUNTIME_INFO
        try:
            info = await self._asking.ask_body(KVTable, node.address, code)
        except BrokerRefused as refusal:
            if refusal.code != ResponseCode.SYSTEM_ERROR:
                raise
            # Apache's 4.9 fails this request in its first seconds.
            return False
        return is_orbitmq(info.table)

    async def _ensure_group(
        self, topology: Topology, plan: ResetPlan, nodes: Iterable[BrokerNode]
    ) -> None:
        """Create the group on brokers without it, which would refuse its progress."""
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
        """Store an offset at a broker and read it back before a member can continue from it."""
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
        """Push the reset to the members through a broker and wait for their reports."""
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

    async def _watched(self, plan: ResetPlan, outcome: QueueOutcome) -> QueueOutcome:
        """Whether a move of an online group holds after its members have reported.

        Members advance from the target. One that missed the reset reports its old offset, which
        after a skip is below the target.
        """
        move = outcome.move
        if not outcome.is_effective:
            return outcome
        node = (await self._asking.topology()).reader(move.queue.broker)
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
            f"{', '.join(map(str, nodes))} cannot move group {plan.group!r} to {plan.to} while "
            "members are online; stop its consumers first, or reset all queues to a time, the "
            "beginning or the end"
        )


def _outcome(move: QueueMove, found: int | None) -> QueueOutcome:
    """The outcome by the offset read back; fast members may have advanced already."""
    low, high = move.to_offset, move.from_offset
    if found == low or (found is not None and found > low and (high is None or found < high)):
        return QueueOutcome(move, found)
    if found is not None and high is not None and high <= low <= found:
        return QueueOutcome(move, found)
    shown = "has no progress" if found is None else f"is at {found}"
    return QueueOutcome(move, found, f"{shown} instead of {move.to_offset}")
