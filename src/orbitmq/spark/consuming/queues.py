"""The queues that a driver owns: plans batches of them, takes the results, commits offsets.

Invariants: one batch runs at a time, and its offsets are committed before the next is planned. A
queue changes hands after the batch that it is in. Results for a queue that was lost or moved to
another offset meanwhile are dropped. See docs/internals/spark-groups.md.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.progress import TrackedProgress, end_offset, first_offset
from orbitmq.client.consumer.pull import Refusals
from orbitmq.client.consumer.resets import pending_reset
from orbitmq.client.ranges.connections import QueueRange
from orbitmq.client.routes import MASTER, Queue
from orbitmq.errors import BrokerRefused, OrbitError
from orbitmq.spark.plan import cut
from orbitmq.spark.stream import BrokerBackoff

if TYPE_CHECKING:
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.window import OwnedQueue
    from orbitmq.client.engine import Engine
    from orbitmq.clock import Clock
    from orbitmq.spark.consuming.progress import PieceReport


log = logging.getLogger(__name__)

#: Seconds before a broker that does not answer is asked again, at least.
SILENCE: Final = 1.0


def growing_pause(first: float, failures: int, longest: float) -> float:
    """The pause after a number of failures in a row: it doubles each time."""
    return min(first * 2.0 ** min(failures - 1, 60), longest)


def _nothing() -> None:
    """The default listener."""


@dataclass(slots=True)
class BatchPlan:
    """A planned batch, until it is settled."""

    pieces: tuple[Piece, ...] = ()
    states: tuple[QueueState, ...] = ()
    #: Why the ends of queues are not known.
    errors: dict[Queue, OrbitError] = field(default_factory=dict)
    #: Whether tasks follow the queues beyond their pieces.
    follows: bool = False
    #: How often each queue had been moved.
    moves: dict[QueueState, int] = field(default_factory=dict)

    @property
    def messages(self) -> int:
        return sum(len(piece.range) for piece in self.pieces)

    def counts(self, state: QueueState) -> bool:
        """Whether results for a queue count: it was neither reset nor corrected since."""
        return self.moves.get(state) == state.moves


class OwnedQueues:
    """Plans and settles batches of owned queues. Belongs to the event loop.

    For rebalancing it is the source of messages and their consumption in one.
    """

    is_in_order = False

    def __init__(
        self,
        engine: Engine,
        group: str,
        *,
        ordered: bool,
        first_pause: float = 0.5,
        longest_pause: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        """A queue whose task fails is not planned for `first_pause`, doubling each time."""
        self._engine = engine
        self._ordered = ordered
        self._first_pause, self._longest_pause = first_pause, longest_pause
        self._monotonic = (clock or engine.clock).monotonic
        self._states: dict[Queue, QueueState] = {}
        self._in_batch: dict[OwnedQueue, asyncio.Future[None]] = {}
        #: In order: the time until which a task that Spark has lost may begin calls.
        self._lost_until: dict[OwnedQueue, float] = {}
        self._pauses = BrokerBackoff(SILENCE)
        #: Why the ends of queues are not known, and why brokers are not asked.
        self._errors: dict[Queue, OrbitError] = {}
        self._unanswered: dict[str, OrbitError] = {}
        self.offsets = GroupOffsets(engine, group)
        #: Called when a queue of the running batch shall be given up.
        self.end_tasks: Callable[[], object] = _nothing
        self.refusals = Refusals(group, engine.clock)

    # ---- called by rebalancing

    def begin(self, owned: OwnedQueue) -> None:
        """Own a queue."""
        at = owned.next_offset
        self._states[owned.queue] = QueueState(owned, UnsettledMessages(at), at)

    def end(self, owned: OwnedQueue) -> None:
        """Give a queue up."""
        state = self._states.get(owned.queue)
        if state is not None and state.owned is owned:
            del self._states[owned.queue]
            self._errors.pop(owned.queue, None)

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        """Stop planning a queue, and wait for its batch and, in order, for lost tasks.

        A lost task still works under the order lock: released, another member would begin.
        """
        owned.is_draining = True
        try:
            async with asyncio.timeout(timeout):
                if (ended := self._in_batch.get(owned)) is not None:
                    self.end_tasks()
                    await asyncio.shield(ended)
                if (lost_until := self._lost_until.get(owned)) is not None:
                    await asyncio.sleep(lost_until - self._monotonic())
        except TimeoutError:
            return False
        self._lost_until.pop(owned, None)
        return True

    def in_hand(self, owned: OwnedQueue) -> int:
        """Batches of a queue under way."""
        return owned.running

    # ---- called by the driver

    def state(self, queue: Queue) -> QueueState:
        """What is known of an owned queue."""
        return self._states[queue]

    @property
    def lag(self) -> Mapping[Queue, int]:
        """Messages that wait in each queue, by the last known ends."""
        return {queue: state.unsettled.backlog(state.end) for queue, state in self._states.items()}

    @property
    def failed_in_a_row(self) -> int:
        """The largest number of tasks that failed in a row with one queue."""
        return max((each.failures for each in self._states.values()), default=0)

    async def plan(self, limit: int, *, follow: bool = False) -> BatchPlan:
        """Plan a batch of at most `limit` messages.

        With `follow` it has all queues, to be followed, unless more messages wait than that.
        """
        planned = BatchPlan()
        states = [each for each in self._states.values() if self._may_plan(each)]
        await self._look_at(states)
        planned.errors = {
            each.owned.queue: self._errors[each.owned.queue]
            for each in states
            if each.owned.queue in self._errors
        }
        # Queues may have been given up while brokers were asked.
        states = [
            each
            for each in states
            if self._may_plan(each)
            and self._states.get(each.owned.queue) is each
            # A task would wait for a broker that is away, unless it has a replica.
            and (each.owned.queue not in planned.errors or self._has_replica(each.owned.queue))
        ]
        backlog = {each.owned.queue: each.unsettled.backlog(each.end) for each in states}
        planned.follows = (
            follow
            and sum(backlog.values()) <= limit
            and not any(
                each.unsettled.has_gaps or (each.is_stuck and backlog[each.owned.queue])
                for each in states
            )
        )
        if planned.follows:
            shares = backlog
            planned.pieces = tuple(self._whole(each) for each in states)
        else:
            shares = fair_shares({queue: size for queue, size in backlog.items() if size}, limit)
            states = [each for each in states if each.owned.queue in shares]
            planned.pieces = tuple(
                piece for each in states for piece in self._pieces(each, shares[each.owned.queue])
            )
        planned.states = tuple(states)
        planned.moves = {each: each.moves for each in states}
        loop = asyncio.get_running_loop()
        for each in states:
            self._in_batch[each.owned] = loop.create_future()
            self._lost_until.pop(each.owned, None)
            each.owned.running = shares[each.owned.queue]
        return planned

    async def attend(self, planned: BatchPlan) -> str | None:
        """Look after the queues while a batch follows them; returns why it should end."""
        states = [each for each in self._states.values() if self._may_plan(each)]
        await self._look_at(states)
        planned.errors = {each: self._errors[each] for each in self._states if each in self._errors}
        if not all(map(planned.counts, planned.states)):
            return "the offset of a queue was moved"
        if any(each.owned.is_draining for each in planned.states):
            return "a queue is given up"
        known = set(planned.states)
        if any(
            each not in known and self._may_plan(each) and each.owned.queue not in self._errors
            for each in self._states.values()
        ):
            return "another queue can be consumed"
        return None

    async def settle(self, planned: BatchPlan, reports: Iterable[PieceReport]) -> int:
        """Take the last reports of a batch and commit offsets, which is done on return.

        Returns the number of offsets that were skipped because brokers have no messages there.
        """
        missing = await self.take(planned, reports)
        for state in planned.states:
            state.owned.running = 0
            state.owned.last_consumed = self._monotonic()
            ended = self._in_batch.pop(state.owned, None)
            if ended is not None and not ended.done():
                ended.set_result(None)
        return missing

    async def take(self, planned: BatchPlan, reports: Iterable[PieceReport]) -> int:
        """Take reports of a batch that may go on, as `settle`."""
        by_queue: dict[Queue, list[tuple[QueueRange, PieceReport]]] = {}
        for report in reports:
            whole = planned.pieces[report.place].range
            by_queue.setdefault(whole.queue, []).append((whole, report))
        states = [each for each in planned.states if each.owned.queue in by_queue]
        await self._follow_resets(filter(planned.counts, states), by_queue)
        missing = 0
        for state in states:
            if planned.counts(state):
                found = by_queue[state.owned.queue]
                for whole, report in found:
                    self._take(state, whole, report)
                is_stuck = state.is_stuck or any(report.has_ended for _, report in found)
                state.is_stuck = is_stuck and planned.follows
                # Those of a lost queue are skipped again by the next owner.
                missing += 0 if state.owned.is_dropped else sum(each.missing for _, each in found)
            if not state.owned.is_dropped:
                self.offsets.update(state, increase_only=not self._ordered)
        await self.offsets.report(
            [each.owned.queue for each in states if not each.owned.is_dropped]
        )
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
        """Ask for the ends of queues, without those of brokers that did not answer lately."""
        by_broker: dict[str, list[QueueState]] = {}
        now = self._monotonic()
        for each in states:
            queue = each.owned.queue
            if self._pauses.is_over(queue.broker, now):
                by_broker.setdefault(queue.broker, []).append(each)
            else:
                # The queue may be newer than the last question.
                self._errors.setdefault(queue, self._unanswered[queue.broker])
        await asyncio.gather(*(self._look_at_broker(*some) for some in by_broker.items()))

    async def _look_at_broker(self, broker: str, states: Sequence[QueueState]) -> None:
        began = self._monotonic()
        errors = await asyncio.gather(*(self._look(each) for each in states))
        now = self._monotonic()
        # A broker that refuses something about one queue is available for the others.
        silence = [each for each in errors if each and not isinstance(each, BrokerRefused)]
        if silence:
            self._unanswered[broker] = silence[0]
        self._pauses.note([broker], {broker: now - began} if silence else {}, now)

    async def _look(self, state: QueueState) -> OrbitError | None:
        """Ask for the end of a queue; returns the error if there is one."""
        queue, unsettled = state.owned.queue, state.unsettled
        state.owned.last_pull = self._monotonic()
        try:
            end = await end_offset(self._engine, queue)
            if await self.offsets.is_moved(state):
                # The new offset may lie beyond that end.
                end = await end_offset(self._engine, queue)
            if end < unsettled.committed:
                await self._correct(state, end)
            state.end = state.owned.max_offset = end
        except OrbitError as error:
            self._errors[queue] = error
            if isinstance(error, BrokerRefused):
                self.refusals.refused(queue, error)
            return error
        self._errors.pop(queue, None)
        self.refusals.given_up(queue)
        return None

    async def _correct(self, state: QueueState, end: int) -> None:
        """Set the offset back to the end of a queue that became shorter."""
        queue = state.owned.queue
        offset = max(end, await first_offset(self._engine, queue))
        log.warning(
            "the queue ends before the offset of the group, which is set back",
            extra={"queue": str(queue), "offset": state.unsettled.committed, "end": end},
        )
        state.move(offset)
        self.offsets.update(state)

    def _pieces(self, state: QueueState, share: int) -> Iterable[Piece]:
        queue = state.owned.queue
        stretches = state.unsettled.open(state.end, share)
        for start, end in stretches[:1] if self._ordered else stretches:
            yield Piece(
                QueueRange(queue, start, end),
                state.attempts_in(start, end),
                state.unsettled.committed,
                is_doubtful=queue in self._errors,
            )

    def _whole(self, state: QueueState) -> Piece:
        """All messages of a queue, for a task that follows it."""
        queue, at = state.owned.queue, state.unsettled.committed
        return Piece(
            QueueRange(queue, at, max(at, state.end)),
            dict(state.attempts),
            at,
            is_doubtful=queue in self._errors,
        )

    # ---- settling

    async def _follow_resets(
        self,
        states: Iterable[QueueState],
        by_queue: Mapping[Queue, Sequence[tuple[QueueRange, PieceReport]]],
    ) -> None:
        """Follow the resets that tasks have seen.

        The batch's results for them are dropped, even if it started at the new offset.
        """
        resets = {
            state: report.reset_to
            for state in states
            for _, report in by_queue.get(state.owned.queue, ())
            if report.reset_to is not None
        }
        await asyncio.gather(*(self.offsets.follow(*each) for each in resets.items()))

    def _take(self, state: QueueState, whole: QueueRange, report: PieceReport) -> None:
        state.unsettled.finish(whole.start, report.finished)
        for start, end in zip(report.beyond[::2], report.beyond[1::2], strict=True):
            state.unsettled.finish(start, end)
        state.merge_attempts(report.attempts)
        pause = report.pause
        if report.task_error is not None:
            state.failures += 1
            pause = growing_pause(self._first_pause, state.failures, self._longest_pause)
        elif not report.is_postponed:
            state.failures = 0
        if pause is not None:
            state.not_before = self._monotonic() + pause
            if report.is_postponed:
                self._lost_until[state.owned] = state.not_before


@dataclass(slots=True, eq=False)
class QueueState:
    """What the driver knows of an owned queue between batches."""

    owned: OwnedQueue
    unsettled: UnsettledMessages
    #: The last known end: the offset of the next message.
    end: int
    #: In order: attempts of messages that are not done, by offset, and the time of the next one.
    attempts: dict[int, int] = field(default_factory=dict)
    not_before: float = float("-inf")
    #: The time of the next comparison with the broker's offset, the broker's offset if it differed
    #: the last time, and whether that was logged.
    compared_next: float = float("-inf")
    doubted: int | None = None
    is_contested: bool = False
    #: In order: how many tasks in a row have failed with it.
    failures: int = 0
    #: How often it was moved to another offset.
    moves: int = 0
    #: Whether a task that followed it could not go on, as when messages have expired: the tasks of
    #: a batch can.
    is_stuck: bool = False

    def attempts_in(self, start: int, end: int) -> dict[int, int]:
        return {offset: tried for offset, tried in self.attempts.items() if start <= offset < end}

    def merge_attempts(self, attempts: Mapping[int, int]) -> None:
        """Take the attempts that a task reports; those of messages it did not reach stay."""
        known = {**self.attempts, **attempts}
        first = self.unsettled.committed
        self.attempts = {offset: tried for offset, tried in known.items() if offset >= first}

    def move(self, offset: int) -> None:
        """Continue at another offset and forget what was known of messages."""
        self.moves += 1
        self.unsettled.move(offset)
        self.attempts.clear()
        self.not_before = float("-inf")


class UnsettledMessages:
    """Which messages of a queue are done, while several tasks work on pieces of it.

    Invariant: every message below `committed` is done, the one at `committed` is not known to be.
    Only `committed` is reported to brokers; finished ranges above it are not planned again.
    """

    __slots__ = ("_islands", "committed")

    def __init__(self, committed: int) -> None:
        self.committed = committed
        #: Finished ranges above; sorted, none touching another.
        self._islands: list[tuple[int, int]] = []

    @property
    def has_gaps(self) -> bool:
        """Whether messages above `committed` are done."""
        return bool(self._islands)

    def finish(self, start: int, end: int) -> None:
        """Mark the messages from `start` to `end` (exclusive) as done."""
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
        """Continue at another offset and forget the finished ranges."""
        self.committed = offset
        self._islands.clear()

    def open(self, end: int, most: int) -> list[tuple[int, int]]:
        """The ranges of the first `most` messages below `end` that are not done."""
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
        """The number of messages below `end` that are not done."""
        place = bisect.bisect_left(self._islands, (end, end))
        done = sum(min(stop, end) - start for start, stop in self._islands[:place])
        return max(0, end - self.committed - done)


#: Seconds between two comparisons of a queue's offset with the broker's.
COMPARE_EVERY: Final = 3.0


class GroupOffsets:
    """Commits the group's offsets and follows resets. Belongs to the event loop.

    A broker keeps a reset, and refuses commits, until the driver has pulled; the driver pulls once
    it knows the new offset. So a task that is lost with a reset does no harm, and a commit never
    undoes one. Apache's brokers report a reset to one pull only.
    """

    def __init__(self, engine: Engine, group: str) -> None:
        self._engine = engine
        self._group = group
        self._monotonic = engine.clock.monotonic
        #: Set before the first queue is owned.
        self.progress: ProgressStore | None = None

    async def is_moved(self, state: QueueState) -> bool:
        """Whether the group's offset in a queue was reset; then it is followed."""
        queue, progress, now = state.owned.queue, self.progress, self._monotonic()
        if now < state.compared_next or not isinstance(progress, TrackedProgress):
            return False
        # A queue that was just gained starts at a reset offset by itself.
        is_new = state.compared_next == float("-inf")
        state.compared_next = now + COMPARE_EVERY
        at = state.unsettled.committed
        try:
            held = await progress.stored(queue)
            is_agreed = held is None or held == at
            if is_agreed:
                state.doubted = None
            if held is None or (is_agreed and not is_new):
                return False
            offset = await pending_reset(self._engine, self._group, queue, at, keep=True)
        except OrbitError as error:
            # Its messages can be handled all the same: offsets are committed later.
            log.debug("the broker's offset of %s is not known: %s", queue, error)
            return False
        if state.owned.is_draining or state.owned.is_dropped:
            # The next owner follows it.
            return False
        if offset is not None:
            return await self.follow(state, offset)
        if not is_agreed:
            await self._contest(state, progress, held)
        return False

    async def follow(self, state: QueueState, reset_to: int) -> bool:
        """Continue at a reset offset, then let the broker forget it; whether the offset changed.

        In this order, because the broker's answer may be lost.
        """
        owned = state.owned
        is_moved = self._move(state, reset_to)
        if owned.is_dropped:
            # The next owner follows it.
            return is_moved
        try:
            newest = await pending_reset(
                self._engine, self._group, owned.queue, state.unsettled.committed
            )
        except OrbitError as error:
            # If the broker did not forget it, the next pull reports it again.
            log.debug("a reset of %s may be reported again: %s", owned.queue, error)
            return is_moved
        return (newest is not None and self._move(state, newest)) or is_moved

    def update(self, state: QueueState, *, increase_only: bool = False) -> None:
        """Take the offset of a queue, to commit it later."""
        if self.progress is not None:
            queue, at = state.owned.queue, state.unsettled.committed
            self.progress.update(queue, at, increase_only=increase_only)

    async def report(self, queues: Sequence[Queue]) -> None:
        """Commit the offsets of queues, as far as brokers can be reached."""
        if self.progress is None or not queues:
            return
        try:
            await self.progress.persist(queues)
        except OrbitError as error:
            # Kept in memory and tried again: after the next batch, and every few seconds.
            log.warning("offsets could not be committed: %s", error)

    def _move(self, state: QueueState, offset: int) -> bool:
        """Continue at another offset; False when it is the present one.

        Even then, what was finished above it is handled once more.
        """
        queue = state.owned.queue
        if offset == state.unsettled.committed:
            state.move(offset)
            return False
        log.info(
            "the offset of the group was reset: %s continues at %d",
            queue,
            offset,
            extra={"queue": str(queue), "offset": offset},
        )
        state.move(offset)
        if not state.owned.is_dropped:
            self.update(state)
            if isinstance(self.progress, TrackedProgress):
                # The broker no longer has the last commit, and the same offset may come again.
                self.progress.insist([queue])
        return True

    async def _contest(self, state: QueueState, progress: TrackedProgress, held: int) -> None:
        """Commit again when a broker has a different offset twice in a row."""
        queue, at = state.owned.queue, state.unsettled.committed
        if held != state.doubted:
            # It may still change: another member may own the queue by now.
            state.doubted = held
            return
        if not state.is_contested:
            state.is_contested = True
            log.warning(
                "the broker has offset %d for the group in %s, which is at %d: it has lost a "
                "commit, or another client commits for the group",
                held,
                queue,
                at,
                extra={"queue": str(queue), "offset": at},
            )
        self.update(state)
        progress.insist([queue])
        await self.report([queue])


#: Messages that are worth a task of their own: starting one takes some 40 ms.
WORTH_A_TASK: Final = 16
#: Messages of the first batch, when the speed of the handlers is not known.
FIRST_BATCH: Final = 5000


@dataclass(frozen=True, slots=True)
class Piece:
    """Messages of one queue that one task handles."""

    range: QueueRange
    #: In order: earlier attempts of its messages, by offset.
    attempts: Mapping[int, int] = field(default_factory=dict, hash=False)
    #: The committed offset of the queue, at or before the piece.
    committed: int | None = None
    #: Whether its broker did not answer the driver, so that only a replica may have it.
    is_doubtful: bool = False


def assign_to_tasks(
    pieces: Sequence[Piece], tasks: int, *, may_cut: bool, worth: int = WORTH_A_TASK
) -> list[tuple[Piece, ...]]:
    """Distribute pieces to at most `tasks` tasks with about equal numbers of messages.

    Pieces are cut if `may_cut`; in order a queue must stay whole. Few messages make few tasks.
    """
    total = sum(len(piece.range) for piece in pieces)
    tasks = max(1, min(tasks, -(-total // worth)))
    if may_cut:
        share = max(worth, -(-total // tasks))
        pieces = [
            replace(piece, range=some, attempts={})
            for piece in pieces
            for some in cut(piece.range, -(-len(piece.range) // share))
        ]
    loads = [(0, number) for number in range(tasks)]
    dealt: list[list[Piece]] = [[] for _ in loads]
    for piece in sorted(pieces, key=lambda each: (-len(each.range), each.range)):
        load, number = loads[0]
        dealt[number].append(piece)
        heapq.heapreplace(loads, (load + len(piece.range), number))
    return [tuple(some) for some in dealt if some]


def deal_queues(pieces: Sequence[Piece], tasks: int) -> list[tuple[Piece, ...]]:
    """Distribute queues that are followed to at most `tasks` tasks, about as many to each."""
    ordered = sorted(pieces, key=lambda each: each.range)
    return [tuple(ordered[number::tasks]) for number in range(min(tasks, len(ordered)))]


def fair_shares(backlog: Mapping[Queue, int], limit: int) -> dict[Queue, int]:
    """Share `limit` messages among queues, the shortest backlog first, so that none starves."""
    shares: dict[Queue, int] = {}
    left = limit
    for place, queue in enumerate(sorted(backlog, key=lambda each: (backlog[each], each))):
        share = max(1, left // (len(backlog) - place))
        shares[queue] = min(backlog[queue], share)
        left -= shares[queue]
    return shares


class AdaptiveBatchSize:
    """The size of the next batch: as many messages as were handled in the time for one.

    Messages that a task does not reach are read again, so slow handlers get smaller batches.
    """

    def __init__(self, most: int, *, least: int = WORTH_A_TASK) -> None:
        self._most = most
        self._least = min(least, most)
        self.size = min(most, FIRST_BATCH)

    def learn(self, planned: int, handled: int) -> None:
        """Adjust the size after a batch."""
        if handled < planned:
            self.size = max(self._least, handled + handled // 2)
        elif planned >= self.size:
            self.size *= 2
        self.size = min(self.size, self._most)
