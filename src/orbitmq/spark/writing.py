"""Writes a partition: rows become frames of messages, one per queue at a time.

A row says which queue it goes to by `queueId` or `shardingKey`; other rows are dealt out in turn,
beginning at a queue that depends on the partition. The same rows therefore go to the same queues
when they are written again, as far as brokers are there.

A `queueId` alone counts through the queues of all brokers, as clients see them. With `brokerName`,
as a read brings both, it is the number at that broker. A topic that has no such queue gets what was
in one queue into one queue all the same: a copy keeps the order of every queue.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from orbitmq.client.errors import NoRoute
from orbitmq.client.producer.queuechoice import key_hash
from orbitmq.client.queue import Queue
from orbitmq.client.rangewriting import Frame, RangeWriter, WritingSettings
from orbitmq.message.batch import MIN_ELEMENT_SIZE, BatchElement
from orbitmq.spark.connections import writer_to
from orbitmq.spark.errors import TopicMissing
from orbitmq.spark.rows import Origin, RowReader, RowRefused, Written

if TYPE_CHECKING:
    import pyarrow as pa

    from orbitmq.spark.options import WriteOptions

log = logging.getLogger(__name__)

#: What brokers take in one message, unless they are configured otherwise.
LARGEST_BODY: Final = 4 * 1024 * 1024
#: Rows that were left out and are told of one by one.
_TOLD: Final = 5


@dataclass(frozen=True, slots=True)
class WriteCount:
    """What became of the rows of a partition."""

    sent: int
    skipped: int


def write_partition(
    batches: Iterator[pa.RecordBatch], options: WriteOptions, origin: Origin
) -> WriteCount:
    """Send every row; returns when brokers have stored them all."""
    writer = writer_to(
        options.access, options.producer_group, WritingSettings(timeout=options.timeout)
    )
    writing = _Writing(writer, options, origin)
    reader = RowReader(options.topic, origin)
    try:
        for batch in batches:
            for message in reader.messages(batch):
                writing.add(message)
        return writing.finish()
    except BaseException:
        writer.abandon()
        raise


@dataclass(slots=True)
class _Gathering:
    """A frame that is being filled."""

    first_id: str
    elements: list[BatchElement] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    size: int = 0
    may_go_elsewhere: bool = True


class _Writing:
    def __init__(self, writer: RangeWriter, options: WriteOptions, origin: Origin) -> None:
        self._writer = writer
        self._options = options
        self._queues: dict[str, tuple[Queue, ...]] = {}
        self._known: set[Queue] = set()
        self._gathering: dict[Queue, _Gathering] = {}
        self._turn = origin.partition
        #: Of a batch, which is a message to its broker.
        self._largest_frame = min(options.frame_bytes, LARGEST_BODY)
        self._sent = 0
        self._skipped = 0
        self._row = -1

    def add(self, message: Written | RowRefused) -> None:
        self._row += 1
        if isinstance(message, RowRefused):
            self._refuse(message)
            return
        element = message.element
        if len(element.body) > LARGEST_BODY:
            problem = f"its body has {len(element.body)} bytes, {LARGEST_BODY} are allowed"
            self._refuse(RowRefused(self._row, problem))
            return
        queue, is_free = self._queue_of(message)
        if queue is None:
            count = len(self._queues[message.topic])
            problem = f"queueId is {message.queue}, {message.topic} has {count} queues"
            self._refuse(RowRefused(self._row, problem))
            return
        self._sent += 1
        size = MIN_ELEMENT_SIZE + len(element.body) + len(element.properties)
        if message.is_delayed or size > self._largest_frame:
            # Behind what was gathered for its queue: it is stored in its place all the same.
            self._flush(queue)
            self._send(
                Frame(
                    queue,
                    [element],
                    message.unique_id,
                    is_free,
                    is_alone=True,
                    numbers=(self._row,),
                )
            )
            return
        gathering = self._gathering.get(queue)
        if gathering is not None and gathering.size + size > self._largest_frame:
            self._flush(queue)
            gathering = None
        if gathering is None:
            gathering = self._gathering[queue] = _Gathering(message.unique_id)
        gathering.elements.append(element)
        gathering.rows.append(self._row)
        gathering.size += size
        if not is_free:
            gathering.may_go_elsewhere = False

    def finish(self) -> WriteCount:
        for queue in tuple(self._gathering):
            self._flush(queue)
        self._writer.finish()
        self._hear_refused()
        if self._skipped:
            log.warning("%d rows could not be written and were left out", self._skipped)
        return WriteCount(self._sent, self._skipped)

    def _flush(self, queue: Queue) -> None:
        gathering = self._gathering.pop(queue, None)
        if gathering is None:
            return
        self._send(
            Frame(
                queue,
                gathering.elements,
                gathering.first_id,
                gathering.may_go_elsewhere,
                numbers=gathering.rows,
            )
        )

    def _send(self, frame: Frame) -> None:
        self._hear_refused()
        self._writer.send(frame)

    def _hear_refused(self) -> None:
        """Rows that a broker did not take are rows that cannot be written, as any other."""
        for row, reason in self._writer.take_refused():
            self._sent -= 1
            self._refuse(RowRefused(row, reason.remark or str(reason)))

    def _queue_of(self, message: Written) -> tuple[Queue | None, bool]:
        """The queue of a message, and whether another one would do; None: there is none."""
        queues = self._queues.get(message.topic)
        if queues is None:
            queues = self._queues[message.topic] = self._found(message.topic)
            self._known.update(queues)
        if message.queue is not None and message.broker is not None:
            same = Queue(message.topic, message.broker, message.queue)
            return (same if same in self._known else _standing_for(same, queues)), False
        if message.queue is not None:
            return (queues[message.queue] if message.queue < len(queues) else None), False
        if message.key:
            return queues[abs(key_hash(message.key)) % len(queues)], False
        self._turn += 1
        return queues[self._turn % len(queues)], True

    def _found(self, topic: str) -> tuple[Queue, ...]:
        try:
            return self._writer.queues(topic, may_create=self._options.create_topic)
        except NoRoute as missing:
            raise TopicMissing(missing) from None

    def _refuse(self, refused: RowRefused) -> None:
        if not self._options.skip_bad_rows:
            raise refused
        self._skipped += 1
        if self._skipped <= _TOLD:
            log.warning("row %d left out: %s", refused.row, refused.problem)


def _standing_for(absent: Queue, queues: Sequence[Queue]) -> Queue:
    """The queue for what was in a queue that the topic does not have: always the same one."""
    return queues[abs(key_hash(f"{absent.broker}:{absent.id}")) % len(queues)]
