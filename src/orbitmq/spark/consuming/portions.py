"""The owned queues of a driver, and which of their messages are in the running batch.

For rebalancing this is both where messages come from and who handles them. Queues come and go at
any time; a batch takes what is owned when it is planned. A queue that is being given up is planned
no more, and whoever takes it waits until the batch has ended that it is in. What a batch says about
a queue that was lost all the same does not count: the next owner has those messages.

One batch runs at a time. Results are taken, and progress is reported, before the next is planned.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orbitmq.client.consumer.starting import end_offset, first_offset
from orbitmq.client.ranges import QueueRange
from orbitmq.errors import OrbitError
from orbitmq.spark.consuming.ledger import Ledger
from orbitmq.spark.consuming.planning import Piece, fair_shares

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue
    from orbitmq.spark.consuming.reports import PieceReport

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Portion:
    """An owned queue, as far as batches are concerned."""

    owned: OwnedQueue
    ledger: Ledger
    #: The offset that the next message will get, as was last heard.
    end: int
    #: In order: how often messages that are not done with were tried, by their offset, and when
    #: they are tried again.
    attempts: dict[int, int] = field(default_factory=dict)
    not_before: float = float("-inf")

    def attempts_in(self, start: int, end: int) -> dict[int, int]:
        return {offset: tried for offset, tried in self.attempts.items() if start <= offset < end}

    def remember(self, attempts: Mapping[int, int]) -> None:
        """Take what a task says; of messages that it did not come to, what was known stays."""
        known = {**self.attempts, **attempts}
        first = self.ledger.committed
        self.attempts = {offset: tried for offset, tried in known.items() if offset >= first}

    def move(self, offset: int) -> None:
        """Go on from another offset; those beyond it will be other messages."""
        self.ledger.move(offset)
        self.attempts.clear()


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

    def __init__(self, engine: Engine, *, ordered: bool) -> None:
        self._engine = engine
        self._ordered = ordered
        self._monotonic = engine.clock.monotonic
        self._portions: dict[Queue, Portion] = {}
        self._in_batch: dict[OwnedQueue, asyncio.Future[None]] = {}
        #: Where the group's progress is kept; there before any queue is.
        self.progress: ProgressStore | None = None

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

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        """Plan nothing more of a queue, and wait for the batch that it is in."""
        owned.is_draining = True
        ended = self._in_batch.get(owned)
        if ended is None:
            return True
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(ended)
        except TimeoutError:
            return False
        return True

    # ---- what the driver does

    @property
    def lag(self) -> Mapping[Queue, int]:
        """Messages that wait in each queue, as was last heard."""
        return {
            queue: portion.ledger.backlog(portion.end) for queue, portion in self._portions.items()
        }

    async def plan(self, limit: int) -> Planned:
        """Look for messages, and take at most `limit` of them into a batch."""
        planned = Planned()
        portions = [each for each in self._portions.values() if self._may_plan(each)]
        await asyncio.gather(*(self._look(each, planned) for each in portions))
        # Queues may have gone while brokers were asked.
        portions = [
            each
            for each in portions
            if self._may_plan(each) and self._portions.get(each.owned.queue) is each
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
            each.owned.running = shares[each.owned.queue]
        return planned

    async def settle(self, planned: Planned, reports: Iterable[PieceReport]) -> None:
        """Take what came of a batch, and report progress; returns when brokers know it."""
        by_queue = {each.owned.queue: each for each in planned.portions}
        for report in reports:
            whole = planned.pieces[report.place].range
            self._take(by_queue[whole.queue], whole, report)
        queues = []
        for portion in planned.portions:
            owned = portion.owned
            owned.running = 0
            owned.last_consumed = self._monotonic()
            if not owned.is_dropped and self.progress is not None:
                self.progress.update(
                    owned.queue, portion.ledger.committed, increase_only=not self._ordered
                )
                queues.append(owned.queue)
        await self._persist(queues)
        for portion in planned.portions:
            ended = self._in_batch.pop(portion.owned, None)
            if ended is not None and not ended.done():
                ended.set_result(None)

    # ---- planning

    def _may_plan(self, portion: Portion) -> bool:
        owned, now = portion.owned, self._monotonic()
        if owned.is_draining or now < portion.not_before:
            return False
        return owned.lock is None or owned.lock.is_held(now)

    async def _look(self, portion: Portion, planned: Planned) -> None:
        queue, ledger = portion.owned.queue, portion.ledger
        portion.owned.last_pull = self._monotonic()
        try:
            end = await end_offset(self._engine, queue)
            if end < ledger.committed:
                await self._correct(portion, end)
            portion.end = portion.owned.max_offset = end
        except OrbitError as error:
            planned.errors[queue] = error

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
            yield Piece(QueueRange(queue, start, end), portion.attempts_in(start, end))

    # ---- settling

    def _take(self, portion: Portion, whole: QueueRange, report: PieceReport) -> None:
        portion.ledger.finish(whole.start, min(report.finished, whole.end))
        for start, end in zip(report.beyond[::2], report.beyond[1::2], strict=True):
            portion.ledger.finish(start, end)
        portion.remember(report.attempts)
        if report.pause is not None:
            portion.not_before = self._monotonic() + report.pause

    async def _persist(self, queues: list[Queue]) -> None:
        if self.progress is None or not queues:
            return
        try:
            await self.progress.persist(queues)
        except OrbitError as error:
            # It is in memory, and tried again: after the next batch, and every few seconds.
            log.warning("progress could not be reported: %s", error)
