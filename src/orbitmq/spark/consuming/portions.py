"""The owned queues of a driver, and which of their messages are in the running batch.

For rebalancing this is both where messages come from and who handles them. Queues come and go at
any time; a batch takes what is owned when it is planned. A queue that is being given up is planned
no more, and whoever takes it waits until the batch has ended that it is in. What a batch says about
a queue that was lost all the same does not count: the next owner has those messages.

One batch runs at a time. Results are taken, and progress is reported, before the next is planned.

An administrator may reset the progress of the group: what the batch did in that queue counts no
more (`orbitmq.spark.consuming.standing`).

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
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.starting import end_offset, first_offset
from orbitmq.client.errors import BrokerRefused
from orbitmq.client.ranges import QueueRange
from orbitmq.client.topicroute import MASTER
from orbitmq.errors import OrbitError
from orbitmq.spark.consuming.ledger import Ledger
from orbitmq.spark.consuming.planning import Piece, fair_shares
from orbitmq.spark.consuming.portion import Portion
from orbitmq.spark.consuming.standing import Standing
from orbitmq.spark.heads import BrokerPauses

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue
    from orbitmq.spark.consuming.reports import PieceReport

log = logging.getLogger(__name__)

#: Seconds for which a broker that does not answer is left alone at least.
_SILENCE: Final = 1.0
#: Pauses have long reached their limit by then.
_MOST_DOUBLINGS: Final = 16


@dataclass(slots=True)
class Planned:
    """A batch, as planned and until it is settled."""

    pieces: tuple[Piece, ...] = ()
    portions: tuple[Portion, ...] = ()
    #: Why queues could not be looked at.
    errors: dict[Queue, OrbitError] = field(default_factory=dict)

    @property
    def messages(self) -> int:
        return sum(len(piece.range) for piece in self.pieces)


class Portions:
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
        self._portions: dict[Queue, Portion] = {}
        self._in_batch: dict[OwnedQueue, asyncio.Future[None]] = {}
        #: In order: until when a task that Spark has lost may begin calls.
        self._lost_until: dict[OwnedQueue, float] = {}
        self._pauses = BrokerPauses(_SILENCE)
        #: Why queues could not be looked at the last time, and what brokers were left alone for.
        self._errors: dict[Queue, OrbitError] = {}
        self._silent: dict[str, OrbitError] = {}
        #: The connections on which masters were last looked at.
        self._looked_on: dict[str, object | None] = {}
        self._standing = Standing(engine, group)

    @property
    def progress(self) -> ProgressStore | None:
        """Where the group's progress is kept; there before any queue is."""
        return self._standing.progress

    @progress.setter
    def progress(self, progress: ProgressStore) -> None:
        self._standing.progress = progress

    # ---- what rebalancing does

    def begin(self, owned: OwnedQueue) -> None:
        """A queue is ours now."""
        at = owned.next_offset
        self._portions[owned.queue] = Portion(owned, Ledger(at), at)

    def end(self, owned: OwnedQueue) -> None:
        """A queue is not ours any more, or soon will not be."""
        portion = self._portions.get(owned.queue)
        if portion is not None and portion.owned is owned:
            del self._portions[owned.queue]
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
        return {
            queue: portion.ledger.backlog(portion.end) for queue, portion in self._portions.items()
        }

    @property
    def failed_in_a_row(self) -> int:
        """How many tasks in a row have failed with the same queue; of all queues, the most."""
        return max((each.failures for each in self._portions.values()), default=0)

    async def plan(self, limit: int) -> Planned:
        """Look for messages, and take at most `limit` of them into a batch."""
        planned = Planned()
        portions = [each for each in self._portions.values() if self._may_plan(each)]
        await self._look_at(portions)
        planned.errors = {
            each.owned.queue: self._errors[each.owned.queue]
            for each in portions
            if each.owned.queue in self._errors
        }
        # Queues may have gone while brokers were asked.
        portions = [
            each
            for each in portions
            if self._may_plan(each)
            and self._portions.get(each.owned.queue) is each
            # Its broker is away, perhaps for long: a task would wait for it in vain.
            and (each.owned.queue not in planned.errors or self._has_replica(each.owned.queue))
        ]
        backlog = {each.owned.queue: each.ledger.backlog(each.end) for each in portions}
        shares = fair_shares({queue: size for queue, size in backlog.items() if size}, limit)
        taken = [each for each in portions if each.owned.queue in shares]
        planned.pieces = tuple(
            piece for each in taken for piece in self._pieces(each, shares[each.owned.queue])
        )
        planned.portions = tuple(taken)
        loop = asyncio.get_running_loop()
        for each in taken:
            self._in_batch[each.owned] = loop.create_future()
            self._lost_until.pop(each.owned, None)
            each.owned.running = shares[each.owned.queue]
        return planned

    async def settle(self, planned: Planned, reports: Iterable[PieceReport]) -> int:
        """Take what came of a batch, and report progress; returns when brokers know it.

        How many offsets were passed over for good, at which brokers have no messages.
        """
        by_queue: dict[Queue, list[tuple[QueueRange, PieceReport]]] = {}
        for report in await self._believed(planned, list(reports)):
            whole = planned.pieces[report.place].range
            by_queue.setdefault(whole.queue, []).append((whole, report))
        moved = await self._follow_resets(planned.portions, by_queue)
        queues, missing = [], 0
        for portion in planned.portions:
            owned = portion.owned
            if portion not in moved:
                told = by_queue.get(owned.queue, ())
                self._take_all(portion, told)
                # Else they are passed over again, here or by the next owner.
                missing += 0 if owned.is_dropped else sum(each.missing for _, each in told)
            owned.running = 0
            owned.last_consumed = self._monotonic()
            is_news = owned.queue in by_queue and not owned.is_dropped
            if is_news and self.progress is not None:
                self.progress.update(
                    owned.queue, portion.ledger.committed, increase_only=not self._ordered
                )
                queues.append(owned.queue)
        await self._standing.report(queues)
        for portion in planned.portions:
            ended = self._in_batch.pop(portion.owned, None)
            if ended is not None and not ended.done():
                ended.set_result(None)
        return missing

    # ---- planning

    def _may_plan(self, portion: Portion) -> bool:
        owned, now = portion.owned, self._monotonic()
        if owned.is_draining or now < portion.not_before:
            return False
        return owned.lock is None or owned.lock.is_held(now)

    def _has_replica(self, queue: Queue) -> bool:
        return any(number != MASTER for number in self._engine.routes.brokers.get(queue.broker, ()))

    async def _look_at(self, portions: Sequence[Portion]) -> None:
        """Hear of the ends of queues, but for those of brokers that are left alone."""
        by_broker: dict[str, list[Portion]] = {}
        now = self._monotonic()
        for each in portions:
            queue = each.owned.queue
            if self._pauses.is_over(queue.broker, now):
                by_broker.setdefault(queue.broker, []).append(each)
            else:
                # A queue may have come since.
                self._errors.setdefault(queue, self._silent[queue.broker])
        await asyncio.gather(*(self._look_at_broker(*some) for some in by_broker.items()))

    async def _look_at_broker(self, broker: str, portions: Sequence[Portion]) -> None:
        began = self._monotonic()
        errors = await asyncio.gather(*(self._look(each) for each in portions))
        now = self._monotonic()
        # One that refuses something of one queue is there for the others.
        silence = [each for each in errors if each and not isinstance(each, BrokerRefused)]
        if silence:
            self._silent[broker] = silence[0]
        before, connection = self._looked_on.get(broker), self._connection_to(broker)
        self._looked_on[broker] = connection
        if silence or connection is None or connection is not before:
            for each in self._portions.values():
                if each.owned.queue.broker == broker:
                    # It may have restarted, or have when it is next heard of, and be catching up.
                    each.gaps.clear()
        self._pauses.note([broker], {broker: now - began} if silence else {}, now)

    def _connection_to(self, broker: str) -> object | None:
        """The open connection to a master; only whether it is the same one matters here."""
        master = self._engine.routes.brokers.get(broker, {}).get(MASTER)
        return None if master is None else self._engine.open_connection(master)

    async def _look(self, portion: Portion) -> OrbitError | None:
        """Hear of the end of a queue; why that was not possible, if it was not."""
        queue, ledger = portion.owned.queue, portion.ledger
        portion.owned.last_pull = self._monotonic()
        try:
            end = await end_offset(self._engine, queue)
            if await self._standing.is_moved(portion):
                # It may be further than that end.
                end = await end_offset(self._engine, queue)
            if end < ledger.committed:
                await self._correct(portion, end)
            portion.end = portion.owned.max_offset = end
        except OrbitError as error:
            self._errors[queue] = error
            return error
        self._errors.pop(queue, None)
        return None

    async def _correct(self, portion: Portion, end: int) -> None:
        """The broker has lost the end of the queue: go on from where it ends now."""
        queue = portion.owned.queue
        offset = max(end, await first_offset(self._engine, queue))
        log.warning(
            "the queue ends before the progress of the group, which is set back",
            extra={"queue": str(queue), "offset": portion.ledger.committed, "end": end},
        )
        portion.move(offset)
        if self.progress is not None:
            self.progress.update(queue, offset, increase_only=False)

    def _pieces(self, portion: Portion, share: int) -> Iterable[Piece]:
        queue = portion.owned.queue
        stretches = portion.ledger.open(portion.end, share)
        for start, end in stretches[:1] if self._ordered else stretches:
            yield Piece(
                QueueRange(queue, start, end),
                portion.attempts_in(start, end),
                portion.ledger.committed,
                is_doubtful=queue in self._errors,
                gaps=portion.gaps_in(start, end),
            )

    # ---- settling

    async def _believed(
        self, planned: Planned, reports: Sequence[PieceReport]
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
        portions: Iterable[Portion],
        by_queue: Mapping[Queue, Sequence[tuple[QueueRange, PieceReport]]],
    ) -> set[Portion]:
        """Follow the resets that tasks were told of; the queues that they were of.

        What the batch did in them counts no more, also where it had begun at that very place.
        """
        told = {
            portion: report.reset_to
            for portion in portions
            for _, report in by_queue.get(portion.owned.queue, ())
            if report.reset_to is not None
        }
        await asyncio.gather(*(self._standing.follow(*each) for each in told.items()))
        return set(told)

    def _take_all(
        self, portion: Portion, reports: Sequence[tuple[QueueRange, PieceReport]]
    ) -> None:
        for whole, report in reports:
            self._take(portion, whole, report)
        portion.hear_of(
            [
                (whole, report.known_gaps)
                for whole, report in reports
                if report.failed is None and not report.is_put_off
            ]
        )
        portion.forget_gaps()

    def _take(self, portion: Portion, whole: QueueRange, report: PieceReport) -> None:
        portion.ledger.finish(whole.start, min(report.finished, whole.end))
        for start, end in zip(report.beyond[::2], report.beyond[1::2], strict=True):
            portion.ledger.finish(start, end)
        portion.remember(report.attempts)
        pause = report.pause
        if report.failed is not None:
            portion.failures += 1
            doublings = min(portion.failures - 1, _MOST_DOUBLINGS)
            pause = min(self._first_pause * 2**doublings, self._longest_pause)
        elif not report.is_put_off:
            portion.failures = 0
        if pause is not None:
            portion.not_before = self._monotonic() + pause
            if report.is_put_off:
                self._lost_until[portion.owned] = portion.not_before
