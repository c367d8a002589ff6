"""A Python worker of Spark that consumes: reads pieces of queues, and has them handled.

Brokers are read one after the other, those last that did not answer the driver, and each is waited
for no longer than its share of the time: one that is silent keeps the messages of the others
waiting, but not for the whole batch. What is wrong with one queue of a
broker (a damaged record, a refusal) stops that queue alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from orbitmq.client.consumer.innerbatches import without_inner_batches
from orbitmq.client.consumer.subscription import Subscription
from orbitmq.client.errors import BrokerUnavailable, NotRunning
from orbitmq.client.loopthread import LoopThread
from orbitmq.client.queue import Queue
from orbitmq.client.rangenotes import RangeNotes
from orbitmq.client.rangereading import Missing, ProgressReset, RangeSettings, read_ranges
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

#: A broker is waited for so long in any case: the time to find that a master is away, and to ask a
#: replica. In order, where a master has to be there for the locks, it is less.
_LEAST_PATIENCE: Final = 4.0
_LEAST_IN_ORDER: Final = 0.1
#: In order, the part of its share that a silent broker gets; the rest is for what was read.
_PART_IN_ORDER: Final = 0.5


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
        places = _by_topic_and_broker(task.works)
        try:
            for number, works in enumerate(places):
                topic = works[0].piece.range.queue.topic
                patience = self._patience(task, len(places) - number)
                self._read(task, self._parts.subscriptions[topic], works, patience)
        except Exception:
            # A mistake of ours. The process may live on: no handler is to be at work by then.
            for work in task.works:
                work.owned.is_draining = True
            self._thread.run(self._parts.finish(task))
            raise
        return self._thread.run(self._parts.finish(task))

    # ---- reading, in the thread of the task

    def _patience(self, task: Task, places: int) -> float:
        """How long a broker may be silent, when so many places are still to be read."""
        most = self._definition.patience
        share = task.handling.time_left / places
        if self._definition.ordered:
            return min(most, max(_LEAST_IN_ORDER, share * _PART_IN_ORDER))
        return min(most, max(_LEAST_PATIENCE, share)) if places > 1 else most

    def _read(
        self, task: Task, subscription: Subscription, works: list[Work], patience: float
    ) -> None:
        """Read pieces of one broker and have them handled; what stops it is noted in them."""
        together = deque([works])
        heard: set[Queue] = set()
        while together and not task.handling.is_over:
            some = together.popleft()
            try:
                self._feed(task, subscription, some, patience)
            except ProgressReset as reset:
                _note_reset(some, reset, is_repeated=reset.queue in heard)
                heard.add(reset.queue)
                together.appendleft(some)
            except OrbitError as error:
                for work in some:
                    if work.unread is not None:
                        work.error = f"{type(error).__name__}: {error}"
                apart = _by_queue(some)
                if len(apart) > 1 and not isinstance(error, BrokerUnavailable):
                    # It is of one of these queues, and is not said to be of which.
                    together.extend(apart)
        for work in works:
            self._thread.run(task.handling.flush(work))

    def _feed(
        self, task: Task, subscription: Subscription, works: list[Work], patience: float
    ) -> None:
        for chunk in self._chunks(subscription, works, patience, task.notes):
            work = next(each for each in works if chunk_is_of(chunk, each))
            messages = self._messages(chunk, subscription)
            work.error = None
            self._thread.run(task.handling.feed(work, messages, chunk.end))
            if task.handling.is_over or not any(each.is_open for each in works):
                break

    def _chunks(
        self, subscription: Subscription, works: list[Work], patience: float, notes: RangeNotes
    ) -> Iterator[Chunk]:
        return read_ranges(
            links_to(self._definition.access),
            [work.unread for work in works if work.unread is not None],
            group=self._definition.wire_group,
            wanted=RangeFilter(subscription.expression, subscription.type),
            # What has expired is passed over, as every consumer does.
            settings=RangeSettings(missing=Missing.SKIP, patience=patience, tells_resets=True),
            notes=notes,
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


def _by_topic_and_broker(works: Sequence[Work]) -> list[list[Work]]:
    """Works that can be read together, in order, and those of doubtful brokers last."""

    def place(work: Work) -> tuple[str, str]:
        queue = work.piece.range.queue
        return queue.topic, queue.broker

    places = [list(some) for _, some in groupby(works, key=place)]
    return sorted(places, key=lambda some: any(work.piece.is_doubtful for work in some))


def _by_queue(works: Sequence[Work]) -> list[list[Work]]:
    return [list(some) for _, some in groupby(works, key=lambda work: work.piece.range.queue)]


def _note_reset(works: Sequence[Work], reset: ProgressReset, *, is_repeated: bool) -> None:
    """End the work on a queue whose group is to go on elsewhere.

    Unless it is there already: the driver may have seen the reset before a pull was told of it.
    """
    told = [work for work in works if work.piece.range.queue == reset.queue]
    if not is_repeated and any(work.piece.committed == reset.offset for work in told):
        return
    for work in told:
        work.owned.is_draining = True
        work.reset_to = reset.offset
        work.error = str(reset)
