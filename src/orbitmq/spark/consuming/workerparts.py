"""What a worker has on its event loop: handlers, connections, and in order, the locks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Self

from orbitmq.client.consumer.consuming import Bindings, Parts
from orbitmq.client.consumer.locks import QueueLock, QueueLocks
from orbitmq.client.consumer.progress import MemoryProgress
from orbitmq.client.consumer.statistics import Statistics
from orbitmq.client.consumer.subscription import Subscription
from orbitmq.client.engine import Engine
from orbitmq.client.names import retry_topic
from orbitmq.client.queue import Queue
from orbitmq.client.rangenotes import RangeNotes
from orbitmq.client.ranges import QueueRange
from orbitmq.errors import OrbitError
from orbitmq.spark.consuming.handling import ConcurrentInTask, Handling, OrderlyInTask, Work
from orbitmq.spark.consuming.returning import Returns

if TYPE_CHECKING:
    from orbitmq.spark.consuming.definition import Definition
    from orbitmq.spark.consuming.planning import Piece
    from orbitmq.spark.consuming.reports import PieceReport

log = logging.getLogger(__name__)

#: What is waited for beyond the longest that a handler may take.
_GRACE: Final = 30.0


@dataclass(slots=True)
class Task:
    """What runs for one task."""

    handling: Handling
    works: list[Work]
    locks: QueueLocks | None
    notes: RangeNotes = field(default_factory=RangeNotes)


class WorkerParts:
    """The parts of a worker. Belongs to its event loop."""

    def __init__(self, definition: Definition, engine: Engine, lock_engine: Engine | None) -> None:
        self._definition = definition
        self._engine = engine
        self._lock_engine = lock_engine
        group, registrations = definition.wire_group, definition.registrations()
        self.subscriptions = {each.topic: each.subscription for each in registrations}
        self.subscriptions[retry_topic(group)] = Subscription(retry_topic(group))
        self._returns = Returns(
            engine,
            group,
            max_retries=definition.consume.max_retries,
            timeout=definition.consume.send_back_timeout,
        )
        parts = Parts(
            engine,
            group,
            Bindings({each.topic: each.binding for each in registrations}, group),
            # Where a piece stands is seen in its window; the driver keeps what comes of it.
            MemoryProgress(),
            self._returns,
            definition.consume,
            Statistics(engine.clock.monotonic),
        )
        kind = OrderlyInTask if definition.ordered else ConcurrentInTask
        self._consumption: OrderlyInTask | ConcurrentInTask = kind(parts)

    @classmethod
    async def started(cls, definition: Definition) -> Self:
        """Everything ready for the first task."""
        engine = Engine(definition.access.settings())
        await engine.start()
        lock_engine = None
        if definition.ordered:
            # In the name of the driver, which is who the broker gave the locks to.
            address, _, instance = definition.client_id.partition("@")
            settings = definition.access.settings(instance=instance)
            lock_engine = Engine(replace(settings, client_ip=address))
            await lock_engine.start()
        parts = cls(definition, engine, lock_engine)
        await parts._consumption.start()
        return parts

    async def stop(self) -> None:
        await self._consumption.stop()
        await self._engine.stop()
        if self._lock_engine is not None:
            await self._lock_engine.stop()

    async def begin(self, pieces: Sequence[tuple[int, Piece]], seconds: float) -> Task:
        """Get ready for the pieces of a task, of which nothing is begun after `seconds`."""
        deadline = asyncio.get_running_loop().time() + seconds
        await self._know_brokers({piece.range.queue.topic for _, piece in pieces})
        locks, held = await self._locked([piece.range.queue for _, piece in pieces])
        now = self._engine.clock.monotonic()
        works = [
            Work(place, piece, now=now, lock=held.get(piece.range.queue))
            for place, piece in sorted(pieces, key=lambda each: each[1].range)
        ]
        for work in works:
            if locks is not None and work.piece.range.queue not in held:
                work.owned.is_draining = True
                work.error = "the order lock of the queue is not the driver's any more"
        self._returns.forget()
        handling = Handling(
            self._consumption,
            self._returns,
            deadline=deadline,
            most_bytes=self._definition.bytes_in_task,
            drain=self._definition.consume.timeout + _GRACE,
        )
        task = Task(handling, works, locks)
        for _, piece in pieces:
            for gap in piece.gaps:
                task.notes.know(piece.range.queue, gap)
        return task

    async def finish(self, task: Task) -> list[PieceReport]:
        """Wait for the handlers, and say what came of it."""
        try:
            reports = await task.handling.finish(task.works)
            works = {work.place: work for work in task.works}
            return [_with_notes(report, works[report.place], task.notes) for report in reports]
        finally:
            if task.locks is not None:
                # Not given back: they are the driver's, which goes on with the queues.
                task.locks.stop()

    async def _know_brokers(self, topics: set[str]) -> None:
        """Brokers that take failed messages back are found by the routes of topics."""
        routes = [self._engine.routes.get(topic) for topic in sorted(topics)]
        if self._lock_engine is not None:
            routes += [self._lock_engine.routes.get(topic) for topic in sorted(topics)]
        for found in await asyncio.gather(*routes, return_exceptions=True):
            if isinstance(found, OrbitError):
                log.warning("a route cannot be had: %s", found)
            elif isinstance(found, BaseException):
                raise found

    async def _locked(
        self, queues: list[Queue]
    ) -> tuple[QueueLocks | None, dict[Queue, QueueLock]]:
        """The order locks of queues, renewed for as long as the task runs.

        So nobody else has a queue while its handler is called, whatever has become of the driver;
        and a task that begins after the driver lost a queue is refused the lock, and does nothing.
        """
        if self._lock_engine is None:
            return None, {}
        locks = QueueLocks(self._lock_engine, self._definition.wire_group)
        held = await locks.acquire(queues)
        locks.start()
        return locks, held


def _with_notes(report: PieceReport, work: Work, notes: RangeNotes) -> PieceReport:
    """A report with what was found out beside the messages of its piece."""
    whole = work.piece.range
    gaps = notes.gaps(whole)
    return replace(
        report,
        # What was not given to the handlers is read again, and counted then.
        missing=notes.left_out(QueueRange(whole.queue, whole.start, work.given)),
        gaps=tuple(bound for gap in gaps for bound in (gap.start, gap.end)),
        gap_seconds=tuple(gap.seconds for gap in gaps),
    )
