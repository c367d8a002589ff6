"""A Python worker of Spark that consumes: reads pieces of queues, and has them handled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from orbitmq.client.consumer.innerbatches import without_inner_batches
from orbitmq.client.consumer.subscription import Subscription
from orbitmq.client.errors import NotRunning
from orbitmq.client.loopthread import LoopThread
from orbitmq.client.rangereading import Missing, RangeSettings, read_ranges
from orbitmq.client.ranges import RangeFilter
from orbitmq.client.rangewindow import Chunk
from orbitmq.client.received import ReceivedMessage
from orbitmq.errors import OrbitError
from orbitmq.message.stored import decode_messages
from orbitmq.message.sysflag import BATCH_MASK
from orbitmq.spark.connections import links_to
from orbitmq.spark.consuming.definition import Definition
from orbitmq.spark.consuming.handling import Work
from orbitmq.spark.consuming.planning import Piece
from orbitmq.spark.consuming.reports import PieceReport
from orbitmq.spark.consuming.workerparts import Task, WorkerParts


class Worker:
    """Handles pieces of queues for one pipeline. For one thread at a time."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._thread = LoopThread("orbitmq-consuming")
        self._parts: WorkerParts | None = None

    def start(self) -> None:
        self._thread.start()
        try:
            self._parts = self._thread.run(WorkerParts.started(self._definition))
        except BaseException:
            self._thread.stop()
            raise

    def stop(self) -> None:
        """Close everything; what a handler still does is left to itself."""
        if self._parts is not None:
            self._thread.run(self._parts.stop())
            self._parts = None
        self._thread.stop()

    def handle(self, pieces: Sequence[tuple[int, Piece]], seconds: float) -> list[PieceReport]:
        """Have the handlers called for all messages of these pieces, for so long at most."""
        if self._parts is None:
            raise NotRunning("this worker")
        task = self._thread.run(self._parts.begin(pieces, seconds))
        by_topic = groupby(task.works, key=lambda work: work.piece.range.queue.topic)
        for topic, works in by_topic:
            self._read(task, self._parts.subscriptions[topic], list(works))
        return self._thread.run(self._parts.finish(task))

    # ---- reading, in the thread of the task

    def _read(self, task: Task, subscription: Subscription, works: list[Work]) -> None:
        """Read the pieces of a topic and have them handled; what stops it is noted in them."""
        try:
            for chunk in self._chunks(subscription, works):
                work = next(each for each in works if chunk_is_of(chunk, each))
                messages = self._messages(chunk, subscription)
                self._thread.run(task.handling.feed(work, messages, chunk.end))
                if task.handling.is_over or not any(each.is_open for each in works):
                    break
        except OrbitError as error:
            for work in works:
                if work.fetched < work.piece.range.end:
                    work.error = f"{type(error).__name__}: {error}"
        for work in works:
            self._thread.run(task.handling.flush(work))

    def _chunks(self, subscription: Subscription, works: list[Work]) -> Iterator[Chunk]:
        return read_ranges(
            links_to(self._definition.access),
            [work.piece.range for work in works if work.is_open],
            group=self._definition.wire_group,
            wanted=RangeFilter(subscription.expression, subscription.type),
            # What has expired is passed over, as every consumer does.
            settings=RangeSettings(missing=Missing.SKIP, patience=self._definition.patience),
        )

    def _messages(self, chunk: Chunk, subscription: Subscription) -> Sequence[ReceivedMessage]:
        definition = self._definition
        stored = [each for piece in chunk.pieces for each in decode_messages(piece)]
        if any(each.sys_flag & BATCH_MASK == BATCH_MASK for each in stored):
            stored = without_inner_batches(stored, chunk.start)
        return subscription.accepted(
            [
                ReceivedMessage(
                    each, chunk.queue, definition.wire_group, None, definition.namespace
                )
                for each in stored
                # A record with several messages comes once for every pull that begins inside of it.
                if chunk.start <= each.queue_offset < chunk.end
            ]
        )


def chunk_is_of(chunk: Chunk, work: Work) -> bool:
    """Whether what was read belongs to a piece."""
    whole = work.piece.range
    return chunk.queue == whole.queue and whole.start <= chunk.start < whole.end
