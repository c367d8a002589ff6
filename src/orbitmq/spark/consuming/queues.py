"""The owned queues of a driver, and which of their messages are in the running batch.

For rebalancing this is both where messages come from and who handles them. Queues come and go at
any time; a batch takes what is owned when it is planned. A queue that is being given up is planned
no more, and whoever takes it waits until the batch has ended that it is in. What a batch says about
a queue that was lost all the same does not count: the next owner has those messages.

One batch runs at a time. Results are taken, and progress is reported, before the next is planned.

An administrator may reset the progress of the group: what the batch did in that queue counts no
more (`orbitmq.spark.consuming.queues`).

A master that says for long enough that a queue has a gap is believed, and the gap is passed. A task
is too short for that: for how long it has heard so is given to the next one. When the master was
out of reach, or the connection to it is another one, this begins anew: one that has restarted may
still be catching up. That may also happen after the look, before a task begins: when a gap was
passed, the connection must be the one of the look.

A broker that does not answer is left alone for a while, so that the others do not wait for it at
every batch. What was last heard to be in its queues may still be had from a replica.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.progress import TrackedProgress, end_offset, first_offset
from orbitmq.client.consumer.resets import reset_told
from orbitmq.client.ranges.links import QueueRange
from orbitmq.client.ranges.read import Gap
from orbitmq.client.routes import MASTER, Queue
from orbitmq.errors import BrokerRefused, OrbitError
from orbitmq.spark.stream import BrokerBackoff

if TYPE_CHECKING:
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.window import OwnedQueue
    from orbitmq.client.engine import Engine
    from orbitmq.spark.consuming.progress import PieceReport


log = logging.getLogger(__name__)

#: Seconds for which a broker that does not answer is left alone at least.
_SILENCE: Final = 1.0
#: Pauses have long reached their limit by then.
_MOST_DOUBLINGS: Final = 16


@dataclass(slots=True)
class BatchPlan:
    """A batch, as planned and until it is settled."""

    pieces: tuple[Piece, ...] = ()
    states: tuple[QueueState, ...] = ()
    #: Why queues could not be looked at.
    errors: dict[Queue, OrbitError] = field(default_factory=dict)

    @property
    def messages(self) -> int:
        return sum(len(piece.range) for piece in self.pieces)


class OwnedQueues:
    """Plans batches of owned queues. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        *,
        ordered: bool,
        first_pause: float = 0.5,
        longest_pause: float = 30.0,
    ) -> None:
        """A queue whose task fails is left alone for `first_pause`, and longer each time."""
        self._engine = engine
        self._ordered = ordered
        self._first_pause, self._longest_pause = first_pause, longest_pause
        self._monotonic = engine.clock.monotonic
        self._states: dict[Queue, QueueState] = {}
        self._in_batch: dict[OwnedQueue, asyncio.Future[None]] = {}
        #: In order: until when a task that Spark has lost may begin calls.
        self._lost_until: dict[OwnedQueue, float] = {}
        self._pauses = BrokerBackoff(_SILENCE)
        #: Why queues could not be looked at the last time, and what brokers were left alone for.
        self._errors: dict[Queue, OrbitError] = {}
        self._silent: dict[str, OrbitError] = {}
        #: The connections on which masters were last looked at.
        self._looked_on: dict[str, object | None] = {}
        self._group_offsets = GroupOffsets(engine, group)

    @property
    def progress(self) -> ProgressStore | None:
        """Where the group's progress is kept; there before any queue is."""
        return self._group_offsets.progress

    @progress.setter
    def progress(self, progress: ProgressStore) -> None:
        self._group_offsets.progress = progress

    # ---- what rebalancing does

    def begin(self, owned: OwnedQueue) -> None:
        """A queue is ours now."""
        at = owned.next_offset
        self._states[owned.queue] = QueueState(owned, UnsettledMessages(at), at)

    def end(self, owned: OwnedQueue) -> None:
        """A queue is not ours any more, or soon will not be."""
        state = self._states.get(owned.queue)
        if state is not None and state.owned is owned:
            del self._states[owned.queue]
            self._errors.pop(owned.queue, None)

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        """Plan nothing more of a queue, and wait for the batch that it is in, and for lost tasks.

        Such a task has the order lock in our name. Were it given back, somebody else would begin.
        """
        owned.is_draining = True
        try:
            async with asyncio.timeout(timeout):
                if (ended := self._in_batch.get(owned)) is not None:
                    await asyncio.shield(ended)
                if (lost_until := self._lost_until.get(owned)) is not None:
                    await asyncio.sleep(lost_until - self._monotonic())
        except TimeoutError:
            return False
        self._lost_until.pop(owned, None)
        return True

    # ---- what the driver does

    @property
    def lag(self) -> Mapping[Queue, int]:
        """Messages that wait in each queue, as was last heard."""
        return {queue: state.unsettled.backlog(state.end) for queue, state in self._states.items()}

    @property
    def failed_in_a_row(self) -> int:
        """How many tasks in a row have failed with the same queue; of all queues, the most."""
        return max((each.failures for each in self._states.values()), default=0)

    async def plan(self, limit: int) -> BatchPlan:
        """Look for messages, and take at most `limit` of them into a batch."""
        planned = BatchPlan()
        states = [each for each in self._states.values() if self._may_plan(each)]
        await self._look_at(states)
        planned.errors = {
            each.owned.queue: self._errors[each.owned.queue]
            for each in states
            if each.owned.queue in self._errors
        }
        # Queues may have gone while brokers were asked.
        states = [
            each
            for each in states
            if self._may_plan(each)
            and self._states.get(each.owned.queue) is each
            # Its broker is away, perhaps for long: a task would wait for it in vain.
            and (each.owned.queue not in planned.errors or self._has_replica(each.owned.queue))
        ]
        backlog = {each.owned.queue: each.unsettled.backlog(each.end) for each in states}
        shares = fair_shares({queue: size for queue, size in backlog.items() if size}, limit)
        taken = [each for each in states if each.owned.queue in shares]
        planned.pieces = tuple(
            piece for each in taken for piece in self._pieces(each, shares[each.owned.queue])
        )
        planned.states = tuple(taken)
        loop = asyncio.get_running_loop()
        for each in taken:
            self._in_batch[each.owned] = loop.create_future()
            self._lost_until.pop(each.owned, None)
            each.owned.running = shares[each.owned.queue]
        return planned

    async def settle(self, planned: BatchPlan, reports: Iterable[PieceReport]) -> int:
        """Take what came of a batch, and report progress; returns when brokers know it.

        How many offsets were passed over for good, at which brokers have no messages.
        """
        by_queue: dict[Queue, list[tuple[QueueRange, PieceReport]]] = {}
        for report in await self._believed(planned, list(reports)):
            whole = planned.pieces[report.place].range
            by_queue.setdefault(whole.queue, []).append((whole, report))
        moved = await self._follow_resets(planned.states, by_queue)
        queues, missing = [], 0
        for state in planned.states:
            owned = state.owned
            if state not in moved:
                told = by_queue.get(owned.queue, ())
                self._take_all(state, told)
                # Else they are passed over again, here or by the next owner.
                missing += 0 if owned.is_dropped else sum(each.missing for _, each in told)
            owned.running = 0
            owned.last_consumed = self._monotonic()
            is_news = owned.queue in by_queue and not owned.is_dropped
            if is_news and self.progress is not None:
                self.progress.update(
                    owned.queue, state.unsettled.committed, increase_only=not self._ordered
                )
                queues.append(owned.queue)
        await self._group_offsets.report(queues)
        for state in planned.states:
            ended = self._in_batch.pop(state.owned, None)
            if ended is not None and not ended.done():
                ended.set_result(None)
        return missing

    # ---- planning

    def _may_plan(self, state: QueueState) -> bool:
        owned, now = state.owned, self._monotonic()
        if owned.is_draining or now < state.not_before:
            return False
        return owned.lock is None or owned.lock.is_held(now)

    def _has_replica(self, queue: Queue) -> bool:
        return any(number != MASTER for number in self._engine.routes.brokers.get(queue.broker, ()))

    async def _look_at(self, states: Sequence[QueueState]) -> None:
        """Hear of the ends of queues, but for those of brokers that are left alone."""
        by_broker: dict[str, list[QueueState]] = {}
        now = self._monotonic()
        for each in states:
            queue = each.owned.queue
            if self._pauses.is_over(queue.broker, now):
                by_broker.setdefault(queue.broker, []).append(each)
            else:
                # A queue may have come since.
                self._errors.setdefault(queue, self._silent[queue.broker])
        await asyncio.gather(*(self._look_at_broker(*some) for some in by_broker.items()))

    async def _look_at_broker(self, broker: str, states: Sequence[QueueState]) -> None:
        began = self._monotonic()
        errors = await asyncio.gather(*(self._look(each) for each in states))
        now = self._monotonic()
        # One that refuses something of one queue is there for the others.
        silence = [each for each in errors if each and not isinstance(each, BrokerRefused)]
        if silence:
            self._silent[broker] = silence[0]
        before, connection = self._looked_on.get(broker), self._connection_to(broker)
        self._looked_on[broker] = connection
        if silence or connection is None or connection is not before:
            for each in self._states.values():
                if each.owned.queue.broker == broker:
                    # It may have restarted, or have when it is next heard of, and be catching up.
                    each.gaps.clear()
        self._pauses.note([broker], {broker: now - began} if silence else {}, now)

    def _connection_to(self, broker: str) -> object | None:
        """The open connection to a master; only whether it is the same one matters here."""
        master = self._engine.routes.brokers.get(broker, {}).get(MASTER)
        return None if master is None else self._engine.open_connection(master)

    async def _look(self, state: QueueState) -> OrbitError | None:
        """Hear of the end of a queue; why that was not possible, if it was not."""
        queue, unsettled = state.owned.queue, state.unsettled
        state.owned.last_pull = self._monotonic()
        try:
            end = await end_offset(self._engine, queue)
            if await self._group_offsets.is_moved(state):
                # It may be further than that end.
                end = await end_offset(self._engine, queue)
            if end < unsettled.committed:
                await self._correct(state, end)
            state.end = state.owned.max_offset = end
        except OrbitError as error:
            self._errors[queue] = error
            return error
        self._errors.pop(queue, None)
        return None

    async def _correct(self, state: QueueState, end: int) -> None:
        """The broker has lost the end of the queue: go on from where it ends now."""
        queue = state.owned.queue
        offset = max(end, await first_offset(self._engine, queue))
        log.warning(
            "the queue ends before the progress of the group, which is set back",
            extra={"queue": str(queue), "offset": state.unsettled.committed, "end": end},
        )
        state.move(offset)
        if self.progress is not None:
            self.progress.update(queue, offset, increase_only=False)

    def _pieces(self, state: QueueState, share: int) -> Iterable[Piece]:
        queue = state.owned.queue
        stretches = state.unsettled.open(state.end, share)
        for start, end in stretches[:1] if self._ordered else stretches:
            yield Piece(
                QueueRange(queue, start, end),
                state.attempts_in(start, end),
                state.unsettled.committed,
                is_doubtful=queue in self._errors,
                gaps=state.gaps_in(start, end),
            )

    # ---- settling

    async def _believed(
        self, planned: BatchPlan, reports: Sequence[PieceReport]
    ) -> list[PieceReport]:
        """Reports without what tasks did behind gaps of a master that may have restarted."""
        first_gaps = {
            report.place: first_gap
            for report in reports
            if report.missing and (first_gap := planned.pieces[report.place].first_gap) is not None
        }
        by_broker = {
            queue.broker: queue
            for queue in (planned.pieces[each].range.queue for each in first_gaps)
        }
        are_same = await asyncio.gather(*map(self._is_master_of_look, by_broker.values()))
        doubted = {broker for broker, same in zip(by_broker, are_same, strict=True) if not same}
        for broker in doubted:
            log.info("a gap is waited for again: %s may have restarted", broker)
        return [
            report.below(first_gaps[report.place])
            if report.place in first_gaps
            and planned.pieces[report.place].range.queue.broker in doubted
            else report
            for report in reports
        ]

    async def _is_master_of_look(self, queue: Queue) -> bool:
        """Whether a master has been connected ever since the batch was planned."""
        try:
            # One that has lost its power has not closed the connection, and does so when asked.
            await end_offset(self._engine, queue)
        except OrbitError:
            return False
        connection = self._connection_to(queue.broker)
        return connection is not None and connection is self._looked_on.get(queue.broker)

    async def _follow_resets(
        self,
        states: Iterable[QueueState],
        by_queue: Mapping[Queue, Sequence[tuple[QueueRange, PieceReport]]],
    ) -> set[QueueState]:
        """Follow the resets that tasks were told of; the queues that they were of.

        What the batch did in them counts no more, also where it had begun at that very place.
        """
        told = {
            state: report.reset_to
            for state in states
            for _, report in by_queue.get(state.owned.queue, ())
            if report.reset_to is not None
        }
        await asyncio.gather(*(self._group_offsets.follow(*each) for each in told.items()))
        return set(told)

    def _take_all(
        self, state: QueueState, reports: Sequence[tuple[QueueRange, PieceReport]]
    ) -> None:
        for whole, report in reports:
            self._take(state, whole, report)
        state.update_gaps(
            [
                (whole, report.known_gaps)
                for whole, report in reports
                if report.task_error is None and not report.is_postponed
            ]
        )
        state.drop_passed_gaps()

    def _take(self, state: QueueState, whole: QueueRange, report: PieceReport) -> None:
        state.unsettled.finish(whole.start, min(report.finished, whole.end))
        for start, end in zip(report.beyond[::2], report.beyond[1::2], strict=True):
            state.unsettled.finish(start, end)
        state.merge_attempts(report.attempts)
        pause = report.pause
        if report.task_error is not None:
            state.failures += 1
            doublings = min(state.failures - 1, _MOST_DOUBLINGS)
            pause = min(self._first_pause * 2**doublings, self._longest_pause)
        elif not report.is_postponed:
            state.failures = 0
        if pause is not None:
            state.not_before = self._monotonic() + pause
            if report.is_postponed:
                self._lost_until[state.owned] = state.not_before


# What a driver knows of one of its queues, from one batch to the next.


@dataclass(slots=True, eq=False)
class QueueState:
    """An owned queue, as far as batches are concerned."""

    owned: OwnedQueue
    unsettled: UnsettledMessages
    #: The offset that the next message will get, as was last heard.
    end: int
    #: In order: how often messages that are not done with were tried, by their offset, and when
    #: they are tried again.
    attempts: dict[int, int] = field(default_factory=dict)
    not_before: float = float("-inf")
    #: When the broker is next asked where the group stands, what it said the last time if that was
    #: something else, and whether this was told.
    compared_next: float = float("-inf")
    doubted: int | None = None
    is_contested: bool = False
    #: For how many seconds a master has said that it has nothing between two offsets, by these.
    gaps: dict[tuple[int, int], float] = field(default_factory=dict)
    #: In order: how many tasks in a row have failed with it.
    failures: int = 0

    def attempts_in(self, start: int, end: int) -> dict[int, int]:
        return {offset: tried for offset, tried in self.attempts.items() if start <= offset < end}

    def merge_attempts(self, attempts: Mapping[int, int]) -> None:
        """Take what a task says; of messages that it did not come to, what was known stays."""
        known = {**self.attempts, **attempts}
        first = self.unsettled.committed
        self.attempts = {offset: tried for offset, tried in known.items() if offset >= first}

    def move(self, offset: int) -> None:
        """Go on from another offset; those beyond it will be other messages."""
        self.unsettled.move(offset)
        self.attempts.clear()
        self.gaps.clear()
        self.not_before = float("-inf")

    def gaps_in(self, start: int, end: int) -> tuple[Gap, ...]:
        return tuple(
            Gap(*bounds, seconds)
            for bounds, seconds in self.gaps.items()
            if bounds[0] < end and start < bounds[1]
        )

    def update_gaps(self, told: Sequence[tuple[QueueRange, Iterable[Gap]]]) -> None:
        """Take what the tasks of a batch say about gaps in their ranges.

        What a task was given of, and says no more, is none. A gap may be in several ranges, and go
        beyond the last: each task is heard from the start of its range to that of the next.
        """
        told = sorted(told, key=lambda each: each[0].start)
        self.gaps = {
            (start, end): seconds
            for (start, end), seconds in self.gaps.items()
            if all(end <= whole.start or whole.end <= start for whole, _ in told)
        }
        for number, (whole, gaps) in enumerate(told):
            following = told[number + 1 :]
            for start, end, seconds in gaps:
                first = max(start, whole.start)
                upto = min(end, following[0][0].start) if following else end
                if first < upto:
                    self.gaps[first, upto] = max(seconds, self.gaps.get((first, upto), 0.0))

    def drop_passed_gaps(self) -> None:
        """Those that are passed are of no interest any more."""
        done = self.unsettled.committed
        self.gaps = {bounds: seconds for bounds, seconds in self.gaps.items() if bounds[1] > done}


# Which messages of a queue are done with, when several tasks work on pieces of it at once.
#
# The invariant: everything below `committed` is done with, and the message at `committed` is not,
# or not known to be. A piece may be finished before one in front of it: it is remembered, and
# planned no more, until the gap is closed. Only `committed` is ever told to a broker.


class UnsettledMessages:
    """The offsets of one queue that are done with."""

    __slots__ = ("_islands", "committed")

    def __init__(self, committed: int) -> None:
        self.committed = committed
        #: Stretches beyond that are done with; sorted, none touching another.
        self._islands: list[tuple[int, int]] = []

    def finish(self, start: int, end: int) -> None:
        """Messages from `start` up to, and without, `end` are done with."""
        start = max(start, self.committed)
        if end <= start:
            return
        before = [each for each in self._islands if each[1] < start]
        after = [each for each in self._islands if each[0] > end]
        touched = self._islands[len(before) : len(self._islands) - len(after)]
        if touched:
            start, end = min(start, touched[0][0]), max(end, touched[-1][1])
        self._islands = [*before, (start, end), *after]
        if self._islands[0][0] <= self.committed:
            self.committed = self._islands.pop(0)[1]

    def move(self, offset: int) -> None:
        """Go on from another offset: the queue does not have what lies at the old one."""
        self.committed = offset
        self._islands.clear()

    def open(self, end: int, most: int) -> list[tuple[int, int]]:
        """The first `most` messages below `end` that are not done with, as stretches."""
        found: list[tuple[int, int]] = []
        at = self.committed
        for start, stop in [*self._islands, (end, end)]:
            if most <= 0 or at >= end:
                break
            upto = min(start, end, at + most)
            if upto > at:
                found.append((at, upto))
                most -= upto - at
            at = max(at, stop)
        return found

    def backlog(self, end: int) -> int:
        """How many messages below `end` are not done with."""
        place = bisect.bisect_left(self._islands, (end, end))
        done = sum(min(stop, end) - start for start, stop in self._islands[:place])
        return max(0, end - self.committed - done)


# Where a group stands in its queues: what brokers have for it, and where they want it to be.
#
# An administrator may reset the progress of the group. Pulls are told so, those of tasks first, and
# a task may be lost with what it was told. So nothing that a task hears is forgotten by the broker:
# it says the same to every pull of a task, and takes no report of the group, until the driver has
# pulled (`orbitmq.broker.progress`). The driver does that when it knows where to go. It alone
# reports, so what comes after is of the new place; and as long as it has not pulled, what it
# reports undoes nothing.
#
# Of a queue that nobody pulls, the broker is asked where the group stands. Another answer than what
# it was told is no more than a suspicion: it may have lost reports, and anybody may have reported
# something. A pull then brings the truth, and without a reset the broker is told once more.
#
# Apache's brokers tell of a reset once, whoever pulls.


#: Seconds between two questions where the group stands in a queue.
_COMPARED: Final = 3.0


class GroupOffsets:
    """Keeps a group and its brokers of one mind. Belongs to the event loop."""

    def __init__(self, engine: Engine, group: str) -> None:
        self._engine = engine
        self._group = group
        self._monotonic = engine.clock.monotonic
        self.progress: ProgressStore | None = None

    async def is_moved(self, state: QueueState) -> bool:
        """Whether an administrator has moved the group in a queue; it goes on there."""
        queue, progress, now = state.owned.queue, self.progress, self._monotonic()
        if now < state.compared_next or not isinstance(progress, TrackedProgress):
            return False
        # A queue that was just gained begins where a reset wants it. Its tasks need not be told.
        is_new = state.compared_next == float("-inf")
        state.compared_next = now + _COMPARED
        at = state.unsettled.committed
        try:
            held = await progress.stored(queue)
            is_agreed = held is None or held == at
            if is_agreed:
                state.doubted = None
            if held is None or (is_agreed and not is_new):
                return False
            offset = await reset_told(self._engine, self._group, queue, at, keep=True)
        except OrbitError as error:
            # No reason to leave its messages: what is done with them is reported later, too.
            log.debug("it is not known where the group stands in %s: %s", queue, error)
            return False
        if state.owned.is_draining or state.owned.is_dropped:
            # It is for whoever has the queue next.
            return False
        if offset is not None:
            return await self.follow(state, offset)
        if not is_agreed:
            await self._contest(state, progress, held)
        return False

    async def follow(self, state: QueueState, told: int) -> bool:
        """Go on where a reset wants the group, of which we were told; whether that is elsewhere.

        Then the broker may forget it. In this order: its answer to that may be lost.
        """
        owned = state.owned
        is_moved = self._move(state, told)
        if owned.is_dropped:
            # It is for whoever has the queue next.
            return is_moved
        try:
            newest = await reset_told(
                self._engine, self._group, owned.queue, state.unsettled.committed
            )
        except OrbitError as error:
            # If it was not forgotten, we are told again.
            log.debug("a reset of %s may still be told: %s", owned.queue, error)
            return is_moved
        return (newest is not None and self._move(state, newest)) or is_moved

    async def report(self, queues: Sequence[Queue]) -> None:
        """Tell brokers where the group stands, as far as they can be reached."""
        if self.progress is None or not queues:
            return
        try:
            await self.progress.persist(queues)
        except OrbitError as error:
            # It is in memory, and tried again: after the next batch, and every few seconds.
            log.warning("progress could not be reported: %s", error)

    def _move(self, state: QueueState, offset: int) -> bool:
        """Go on at another offset; False when the group is there.

        Then what it has done beyond is to be done once more.
        """
        queue = state.owned.queue
        if offset == state.unsettled.committed:
            state.move(offset)
            return False
        log.info(
            "the progress of the group was reset: %s goes on at %d",
            queue,
            offset,
            extra={"queue": str(queue), "offset": offset},
        )
        state.move(offset)
        if self.progress is not None and not state.owned.is_dropped:
            self.progress.update(queue, offset, increase_only=False)
            if isinstance(self.progress, TrackedProgress):
                # What was last reported is not there any more, and may soon be reported again.
                self.progress.insist([queue])
        return True

    async def _contest(self, state: QueueState, progress: TrackedProgress, held: int) -> None:
        """Tell a broker again where the group stands, which has something else for it."""
        queue, at = state.owned.queue, state.unsettled.committed
        if held != state.doubted:
            # Perhaps it goes on: the queue is somebody else's by now, and we have yet to hear it.
            state.doubted = held
            return
        if not state.is_contested:
            state.is_contested = True
            log.warning(
                "the broker has %d as the progress of the group in %s, which is at %d: it has lost "
                "a report, or somebody else reports for the group",
                held,
                queue,
                at,
                extra={"queue": str(queue), "offset": at},
            )
        progress.update(queue, at, increase_only=False)
        progress.insist([queue])
        await self.report([queue])


# How a batch is cut into pieces, and how pieces are dealt out to tasks.
#
# In order a queue is one piece, whole, in one task. Otherwise pieces are cut until every task has
# its share: handlers may be slow, and then an even load is what counts. Few messages make few
# tasks, because a task has its price too.


#: Messages that are worth a task of their own: it takes some 40 ms to start one.
WORTH_A_TASK: Final = 16
#: Messages of the first batch: how fast its handlers are, nobody knows.
FIRST_BATCH: Final = 5000


@dataclass(frozen=True, slots=True)
class Piece:
    """Messages of one queue that one task handles."""

    range: QueueRange
    #: In order: how often messages of it were tried before, by their offset.
    attempts: Mapping[int, int] = field(default_factory=dict, hash=False)
    #: Where the group stands in the queue, which may be before the piece.
    committed: int | None = None
    #: Whether its broker did not answer the driver: then a replica may have it.
    is_doubtful: bool = False
    #: What a master was heard to lack in the queue, and for how long.
    gaps: tuple[Gap, ...] = ()

    @property
    def first_gap(self) -> int | None:
        """Where the first of these gaps begins in it."""
        start, end = self.range.start, self.range.end
        inside = [gap.start for gap in self.gaps if gap.start < end and start < gap.end]
        return max(start, min(inside)) if inside else None


def assign_to_tasks(
    pieces: Sequence[Piece], tasks: int, *, may_cut: bool, worth: int = WORTH_A_TASK
) -> list[tuple[Piece, ...]]:
    """Pieces for at most `tasks` tasks, each with about the same number of messages."""
    total = sum(len(piece.range) for piece in pieces)
    tasks = max(1, min(tasks, -(-total // worth)))
    if may_cut:
        share = max(worth, -(-total // tasks))
        pieces = [small for piece in pieces for small in _cut(piece, share)]
    loads = [(0, number) for number in range(tasks)]
    dealt: list[list[Piece]] = [[] for _ in loads]
    for piece in sorted(pieces, key=lambda each: (-len(each.range), each.range)):
        load, number = loads[0]
        dealt[number].append(piece)
        heapq.heapreplace(loads, (load + len(piece.range), number))
    return [tuple(some) for some in dealt if some]


def fair_shares(backlog: Mapping[Queue, int], limit: int) -> dict[Queue, int]:
    """`limit` messages dealt out to queues, the shortest first: no queue waits for a long one."""
    shares: dict[Queue, int] = {}
    left = limit
    for place, queue in enumerate(sorted(backlog, key=lambda each: (backlog[each], each))):
        share = max(1, left // (len(backlog) - place))
        shares[queue] = min(backlog[queue], share)
        left -= shares[queue]
    return shares


class AdaptiveBatchSize:
    """How many messages the next batch takes: as many as were handled in the time for one.

    Messages that a task did not come to are read again; so what slow handlers do not manage is not
    given to them in the first place. The first batch is a careful one.
    """

    def __init__(self, most: int, *, least: int = WORTH_A_TASK) -> None:
        self._most = most
        self._least = min(least, most)
        self.size = min(most, FIRST_BATCH)

    def learn(self, planned: int, handled: int) -> None:
        """Of `planned` messages so many were handled."""
        if handled < planned:
            self.size = max(self._least, handled + handled // 2)
        elif planned >= self.size:
            self.size *= 2
        self.size = min(self.size, self._most)


def _cut(piece: Piece, most: int) -> list[Piece]:
    whole = piece.range
    count = -(-len(whole) // most)
    bounds = [whole.start + len(whole) * number // count for number in range(count + 1)]
    return [
        replace(piece, range=QueueRange(whole.queue, start, end), attempts={})
        for start, end in pairwise(bounds)
    ]
