"""Writes of DataFrames and streams to topics: exactly once where brokers de-duplicate.

Invariant: a task returns when brokers have stored all its rows. A task that fails may have sent
some of them, and sends them again with the same ids (`RowIds`) when it is retried. A broker that
de-duplicates drops what it has; with others a row is there at least once. Nothing can be undone or
made visible later: commit and abort only log.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from orbitmq.arguments import warn_deprecated
from orbitmq.client.errors import NoNameServer
from orbitmq.client.message import Message
from orbitmq.client.producer.send import broker_of_id
from orbitmq.client.ranges.write import EncodedElements, Frame, RangeWriter, WritingSettings
from orbitmq.client.routes import Queue, queues_by_broker
from orbitmq.errors import BrokerRefused, MessageRefused, NoRoute
from orbitmq.javahash import key_hash
from orbitmq.message.properties import (
    DEDUP_ID,
    KEYS,
    RESERVED,
    SHARDING_KEY,
    TAGS,
    UNIQ_KEY,
    check_properties_size,
    encode_properties,
)
from orbitmq.message.record import MessageError
from orbitmq.message.stored import MIN_ELEMENT_SIZE, BatchElement
from orbitmq.names import AUTO_CREATE_TOPIC
from orbitmq.spark.bodies import BodyEncoder, arrow_type, schema_with_body
from orbitmq.spark.internals import (
    batch_of_task,
    cause_first,
    connections_to,
    exit_quietly,
    pyspark_features,
    range_writer,
)
from orbitmq.spark.options import SchemaRefused, SourceError, TopicMissing, WriteOptions
from orbitmq.spark.source import COLUMNS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql.types import Row

    from orbitmq.client.ranges.connections import DedupWindow
    from orbitmq.message.columns import EncodedMessages


log = logging.getLogger(__name__)

#: Rows in a record batch where Spark passes single rows.
_ROWS_AT_ONCE = 4096


@dataclass
class PartitionWritten(WriterCommitMessage):
    """A task's result."""

    partition: int
    sent: int
    skipped: int


def check_topic(options: WriteOptions) -> None:
    """Check the topic of all rows on the driver. Raises `TopicMissing`.

    Tasks check as well, so an error of the name server is ignored here.
    """
    if options.topic is None or options.create_topic:
        return
    with suppress(NoNameServer, BrokerRefused):
        try:
            connections_to(options.access).check_topic(options.topic)
        except NoRoute as missing:
            raise TopicMissing(missing) from None


class TopicWriter:
    """The base of writers for batches and streams."""

    #: Whether the ids of rows are those of messages that brokers de-duplicate, if they can.
    de_duplicates = False
    #: Whether the options are those of a table.
    is_of_table = False

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise SourceError(
                "messages cannot be overwritten; use mode('append'), and outputMode('append') in "
                "a stream"
            )
        plain = schema
        if options.body is not None:
            plain = schema_with_body(schema, options.body, _OF_MESSAGES)
        check_writable(plain, topic=options.topic)
        self._options = options
        self._schema = schema
        #: Identifies the write where no query does.
        self._job = uuid.uuid4().hex

    def check_target(self) -> None:
        """Check the topic, and what its brokers promise, on the driver.

        Raises `TopicMissing`, and `SourceError` where `exactlyOnce` is asked for in vain.
        """
        options = self._options
        check_topic(options)
        wanted = options.exactly_once
        if wanted is None and not self.de_duplicates:
            wanted = False
        windows: Mapping[str, DedupWindow | None] = {}
        if wanted is not False:
            with suppress(NoRoute, NoNameServer, BrokerRefused):
                windows = connections_to(options.access).dedup_windows(
                    options.topic or AUTO_CREATE_TOPIC
                )
        unable = sorted(broker for broker, window in windows.items() if window is None)
        if wanted and unable:
            raise SourceError(
                f"exactlyOnce is true, and {', '.join(unable)} does not de-duplicate: it is no "
                "OrbitMQ broker, an older one, or one with broker.dedup.enabled = false; leave the "
                "option out for at least once"
            )
        # A broker that does not answer now may have rows of the batch that is repeated.
        is_exact = wanted is not False and not unable
        self._options = replace(options, exactly_once=is_exact)
        log.info(
            "rows are written %s",
            "exactly once" if is_exact else "at least once",
            extra={"topic": options.topic or "by row"}
            | {"window": {name: each for name, each in windows.items() if each is not None}},
        )

    @cause_first()
    def write(self, batches: Iterator[pa.RecordBatch]) -> PartitionWritten:
        exit_quietly()
        if self.is_of_table:
            from orbitmq.spark.tables import rows_for_table  # noqa: PLC0415  # for tables alone

            batches = rows_for_table(batches)
        return write_partition(batches, self._options, self._origin())

    def _origin(self) -> Origin:
        context = TaskContext.get()
        if context is None:
            return Origin(self._job, 0)
        return Origin(batch_of_task(context) or self._job, context.partitionId())

    def _log(self, what: str, messages: Iterable[WriterCommitMessage | None]) -> None:
        exit_quietly()  # Spark may call nothing else in this worker
        done = [each for each in messages if isinstance(each, PartitionWritten)]
        log.info(
            what,
            extra={
                "topic": self._options.topic or "by row",
                "partitions": len(done),
                "sent": sum(each.sent for each in done),
                "skipped": sum(each.skipped for each in done),
            },
        )


class RocketMQWriter(TopicWriter, DataSourceArrowWriter):
    """Writes a DataFrame."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._log("DataFrame written", messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._log("writing failed; what was sent stays, and is sent again when tried", messages)


class TopicStreamWriter(TopicWriter):
    """The base of writers for streams."""

    de_duplicates = True

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._log(f"batch {batchId} written", messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._log(f"batch {batchId} failed; what was sent stays, and is sent again", messages)


class RocketMQRowStreamWriter(TopicStreamWriter, DataSourceStreamWriter):
    """Writes a stream row by row, for PySpark 4.0."""

    def write(self, iterator: Iterator[Row]) -> PartitionWritten:
        return super().write(self._batches(iterator))

    def _batches(self, rows: Iterator[Row]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415  # tasks only

        schema = written_columns(self._schema)
        pending: list[dict[str, Any]] = []
        for row in rows:
            values = row.asDict(recursive=True)
            pending.append({name: _with_zone(values[name]) for name in schema.names})
            if len(pending) >= _ROWS_AT_ONCE:
                yield pa.RecordBatch.from_pylist(pending, schema=schema)
                pending = []
        if pending:
            yield pa.RecordBatch.from_pylist(pending, schema=schema)


def _with_zone(value: Any) -> Any:
    """A time with its zone: times in rows are local without saying so, and Arrow assumes UTC."""
    if isinstance(value, dict):
        return {name: _with_zone(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_zone(each) for each in value]
    return value.astimezone(UTC) if isinstance(value, datetime) else value


if pyspark_features().has_arrow_stream_writer:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter

    class RocketMQStreamWriter(TopicStreamWriter, DataSourceStreamArrowWriter):
        """Writes a stream in record batches."""


def stream_writer(
    options: WriteOptions, schema: StructType, *, overwrite: bool
) -> TopicStreamWriter:
    """The writer of streams for the installed PySpark."""
    if pyspark_features().has_arrow_stream_writer:
        return RocketMQStreamWriter(options, schema, overwrite=overwrite)
    return RocketMQRowStreamWriter(options, schema, overwrite=overwrite)


# Writing a partition. A row chooses its queue by `queueId` or `orderingKey`; other rows go to the
# queues in turn, starting at one that depends on the partition, so that a repeated write uses the
# same queues. Where several brokers de-duplicate, the id of such a row chooses the broker, and no
# other one is tried: a copy has to meet the first one. A `queueId` alone counts through the queues
# of all brokers; with `brokerName` it is the number at that broker. If the topic lacks that queue,
# all its rows go to one other queue, so that a copy keeps the order of each queue.

#: The brokers' default limit of a message.
LARGEST_BODY: Final = 4 * 1024 * 1024
#: Skipped rows that are logged one by one.
_LOGGED: Final = 5


def write_partition(
    batches: Iterator[pa.RecordBatch], options: WriteOptions, origin: Origin
) -> PartitionWritten:
    """Send every row and wait until brokers have stored all."""
    writer = range_writer(
        options.access, options.producer_group, WritingSettings(timeout=options.timeout)
    )
    writing = _PartitionWriter(writer, options, origin)
    reader = RowReader(options.topic, origin, de_duplicates=bool(options.exactly_once))
    encoder: BodyEncoder | None = None
    try:
        for given in batches:
            batch = given
            unreadable: dict[int, str] = {}
            if options.body is not None:
                encoder = encoder or BodyEncoder(options.body, given.schema.names, _OF_MESSAGES)
                batch, unreadable = encoder.encoded(given)
            rows = None if unreadable else reader.plain_rows(batch, writing.largest_frame)
            if rows is not None:
                writing.add_rows(rows)
                continue
            for message in reader.messages(batch, unreadable):
                writing.add(message)
        return writing.finish()
    except BaseException:
        writer.abandon()
        raise


@dataclass(slots=True)
class _OpenFrame:
    """A frame that is being filled."""

    first_id: str
    elements: list[BatchElement] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    size: int = 0
    may_go_elsewhere: bool = True


class _PartitionWriter:
    def __init__(self, writer: RangeWriter, options: WriteOptions, origin: Origin) -> None:
        self._writer = writer
        self._options = options
        self._queues: dict[str, tuple[Queue, ...]] = {}
        self._known: set[Queue] = set()
        self._open: dict[Queue, _OpenFrame] = {}
        self._partition = self._turn = origin.partition
        #: A broker applies the limit of a message to a batch.
        self.largest_frame = min(options.frame_bytes, LARGEST_BODY)
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
        if message.is_delayed or size > self.largest_frame:
            # After the open frame of its queue, to keep the order.
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
        open_frame = self._open.get(queue)
        if open_frame is not None and open_frame.size + size > self.largest_frame:
            self._flush(queue)
            open_frame = None
        if open_frame is None:
            open_frame = self._open[queue] = _OpenFrame(message.unique_id)
        open_frame.elements.append(element)
        open_frame.rows.append(self._row)
        open_frame.size += size
        if not is_free:
            open_frame.may_go_elsewhere = False

    def add_rows(self, rows: PlainRows) -> None:
        """Send rows that are encoded together: those of a key to its queue, runs of the others to
        each queue in turn."""
        queues = self._queues_of(rows.topic)
        if rows.keys is None:
            self._add_free(rows, None)
        else:
            for place, chosen in _by_queue(rows.keys, len(queues)):
                if place is None:
                    self._add_free(rows, chosen)
                else:
                    self._flush(queues[place])  # what is in an open frame comes first
                    self._add_run(rows, chosen, queues[place : place + 1], is_free=False)
        self._row += len(rows.encoded)
        self._sent += len(rows.encoded)

    def _add_free(self, rows: PlainRows, chosen: npt.NDArray[np.int64] | None) -> None:
        """Send rows without a key to any queue, or to any of the broker that knows their ids."""
        by_broker = self._brokers_of(rows.topic)
        if by_broker is None:
            self._add_run(rows, chosen, self._queues_of(rows.topic), is_free=True)
            return
        import numpy as np  # noqa: PLC0415  # tasks only

        places = np.arange(len(rows.encoded)) if chosen is None else chosen
        brokers = list(by_broker)
        ids = [each.tobytes() for each in rows.ids[places]]
        of_rows = np.array([brokers.index(broker_of_id(each, brokers)) for each in ids])
        for number in np.unique(of_rows).tolist():
            queues = by_broker[brokers[number]]
            self._add_run(rows, places[of_rows == number], queues, is_free=False)

    def _add_run(
        self,
        rows: PlainRows,
        chosen: npt.NDArray[np.int64] | None,
        queues: Sequence[Queue],
        *,
        is_free: bool,
    ) -> None:
        """Send some of the rows, or all, in runs to some queues."""
        encoded = rows.encoded if chosen is None else rows.encoded.take(chosen)
        for begin, end in encoded.frames(self.largest_frame, -(-len(encoded) // len(queues))):
            self._turn += 1
            where = queues[self._turn % len(queues)]
            numbers: Sequence[int] = range(self._row + 1 + begin, self._row + 1 + end)
            if chosen is not None:
                numbers = (chosen[begin:end] + (self._row + 1)).tolist()
            self._send(
                Frame(
                    where,
                    EncodedElements(encoded.rows(begin, end), end - begin),
                    rows.ids[begin if chosen is None else chosen[begin]].tobytes().decode(),
                    is_free,
                    numbers=numbers,
                )
            )

    def finish(self) -> PartitionWritten:
        for queue in tuple(self._open):
            self._flush(queue)
        self._writer.finish()
        self._take_refused()
        if self._skipped:
            log.warning("%d rows could not be written and were left out", self._skipped)
        return PartitionWritten(self._partition, self._sent, self._skipped)

    def _flush(self, queue: Queue) -> None:
        open_frame = self._open.pop(queue, None)
        if open_frame is None:
            return
        self._send(
            Frame(
                queue,
                open_frame.elements,
                open_frame.first_id,
                open_frame.may_go_elsewhere,
                numbers=open_frame.rows,
            )
        )

    def _send(self, frame: Frame) -> None:
        self._take_refused()
        self._writer.send(frame)

    def _take_refused(self) -> None:
        """Treat rows that a broker refused as rows that cannot be written."""
        for row, reason in self._writer.take_refused():
            self._sent -= 1
            self._refuse(RowRefused(row, reason.remark or str(reason)))

    def _queue_of(self, message: Written) -> tuple[Queue | None, bool]:
        """The queue of a message, None if it does not exist, and whether another may be used."""
        queues = self._queues_of(message.topic)
        if message.queue is not None and message.broker is not None:
            same = Queue(message.topic, message.broker, message.queue)
            return (same if same in self._known else _substitute_for(same, queues)), False
        if message.queue is not None:
            return (queues[message.queue] if message.queue < len(queues) else None), False
        if message.key:
            return queues[abs(key_hash(message.key)) % len(queues)], False
        self._turn += 1
        by_broker = self._brokers_of(message.topic)
        if by_broker is not None:
            own = by_broker[broker_of_id(message.unique_id.encode(), by_broker)]
            return own[self._turn % len(own)], False
        return queues[self._turn % len(queues)], True

    def _brokers_of(self, topic: str) -> Mapping[str, Sequence[Queue]] | None:
        """The queues of each broker, where the ids of rows choose the broker."""
        if not self._options.exactly_once:
            return None
        by_broker = queues_by_broker(self._queues_of(topic))
        return by_broker if len(by_broker) > 1 else None

    def _queues_of(self, topic: str) -> tuple[Queue, ...]:
        queues = self._queues.get(topic)
        if queues is None:
            queues = self._queues[topic] = self._found(topic)
            self._known.update(queues)
        return queues

    def _found(self, topic: str) -> tuple[Queue, ...]:
        try:
            return self._writer.queues(topic, may_create=self._options.create_topic)
        except NoRoute as missing:
            raise TopicMissing(missing) from None

    def _refuse(self, refused: RowRefused) -> None:
        if not self._options.skip_bad_rows:
            raise refused
        self._skipped += 1
        if self._skipped <= _LOGGED:
            log.warning("row %d left out: %s", refused.row, refused.problem)


def _substitute_for(absent: Queue, queues: Sequence[Queue]) -> Queue:
    """The queue in place of one that the topic does not have: always the same."""
    return queues[abs(key_hash(f"{absent.broker}:{absent.id}")) % len(queues)]


# Message ids: 32 hexadecimal digits, as other clients make them. An id is a digest of the writer
# (query, batch and partition, or job), the number of the row, the topic and the message. Consumers
# may drop messages whose id they know, so:
#
# 1. Different messages never have the same id, however a repeated batch orders and partitions its
#    rows. That is why the content is part of the digest.
# 2. The same row at the same place has the same id, as in a retried task or a repeated batch. The
#    content alone would not do: two equal rows are two messages.
#
# A row at another place gets a new id, because it looks like a second equal row. The
# column `identity` replaces all this. The digits where other clients put the time are zero.

#: Bytes of the digest in an id. Among 10**10 messages, the probability that two have the same id is
#: below 10**-9.
_DIGEST: Final = 12


class RowRefused(SourceError):
    """A row cannot be written as a message."""

    def __init__(self, row: int, problem: str) -> None:
        self.row = row
        self.problem = problem
        super().__init__(
            f"row {row} of the partition cannot be written: {problem}; set the option badRows to "
            "skip to leave such rows out"
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """The writer of a partition: the same for a repeated write."""

    #: The id of the query with its batch, or of the job.
    writer: str
    partition: int

    @property
    def ids(self) -> RowIds:
        return RowIds(f"{self.writer}/{self.partition}")


class RowIds:
    """The message ids of a partition."""

    def __init__(self, origin: str) -> None:
        self._origin = hashlib.blake2b(origin.encode(), digest_size=_DIGEST, person=b"row")

    def of_rows(
        self, first: int, topic: str, bodies: pa.BinaryArray, properties: pa.BinaryArray
    ) -> npt.NDArray[np.uint8]:
        """The ids that `of` gives the messages of these columns, as rows of digits.

        What is digested lies side by side. The digest itself is one call for each row. Two 64-bit
        lanes of multiply and xorshift over columns of words would do for accidents: they take half
        of its time for rows of 140 bytes that are equally long, as much for 1 KiB, and 1.2 to 2.5
        times its time where lengths differ, so that rows are padded.
        """
        import numpy as np  # noqa: PLC0415  # tasks only
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.compute as pc  # noqa: PLC0415

        from orbitmq.message.columns import hexadecimal, lengths, numbered  # noqa: PLC0415

        large = pa.large_binary()
        texts = pc.binary_join_element_wise(
            numbered(np.arange(first, first + len(bodies))),
            pa.scalar(b" %b 0 " % topic.encode(), large),
            numbered(lengths(properties)),
            pa.scalar(b"\n", large),
            properties.cast(large),
            bodies.cast(large),
            pa.scalar(b"", large),
        )
        bounds = np.frombuffer(texts.buffers()[1], np.int64, len(texts) + 1).tolist()
        data = memoryview(texts.buffers()[2])
        origin = self._origin.copy()
        origin.update(b"\n")
        copy, digests = origin.copy, []
        for begin, end in itertools.pairwise(bounds):
            digest = copy()
            digest.update(data[begin:end])
            digests.append(digest.digest())
        return _as_ids(hexadecimal(np.frombuffer(b"".join(digests), np.uint8).reshape(-1, _DIGEST)))

    def of(self, row: int, topic: str, content: BatchElement) -> str:
        """The id of a message by its place and its content."""
        body, flag, properties = content
        digest = self._origin.copy()
        # The length separates properties from body.
        digest.update(
            b"\n%d %b %d %d\n%b%b"
            % (row, topic.encode(), flag, len(properties), properties, bytes(body))
        )
        return _as_id(digest.hexdigest())

    @staticmethod
    def named(identity: str, topic: str) -> str:
        """The id of a message by its row's `identity`."""
        text = f"{topic}\n{identity}".encode()
        return _as_id(hashlib.blake2b(text, digest_size=_DIGEST, person=b"identity").hexdigest())


def _as_id(digest: str) -> str:
    return f"{digest[:20]}00000000{digest[20:]}".upper()


def _as_ids(digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    import numpy as np  # noqa: PLC0415  # as the caller has it

    ids = np.full((len(digests), 32), ord("0"), np.uint8)
    ids[:, :20], ids[:, 28:] = digests[:, :20], digests[:, 20:]
    return ids


class PlainRows(NamedTuple):
    """Rows of a batch that are encoded together."""

    topic: str
    encoded: EncodedMessages
    #: The digits of each row's id.
    ids: npt.NDArray[np.uint8]
    #: The keys that choose a queue; None: there are none.
    keys: pa.StringArray | None = None


class Written(NamedTuple):
    """The message of a row."""

    topic: str
    element: BatchElement
    unique_id: str
    #: The number of the queue among those of the topic, or of the broker if one is given.
    queue: int | None
    broker: str | None
    key: str | None
    is_delayed: bool


class RowReader:
    """Makes messages of record batches.

    `_written` makes and checks one `Message`. Most rows have only a body, tags and keys without
    errors; for these `plain_properties` gives the same result for a whole batch.
    """

    def __init__(self, topic: str | None, origin: Origin, *, de_duplicates: bool = False) -> None:
        self._topic = topic
        #: The properties that have the id of a row.
        self._id_names = (UNIQ_KEY, DEDUP_ID) if de_duplicates else (UNIQ_KEY,)
        self._ids = origin.ids
        self._row = 0

    def plain_rows(self, batch: pa.RecordBatch, largest: int) -> PlainRows | None:
        """All rows of a batch without an object for each, if none needs a check or names a queue.

        None if one does, or makes an element of more than `largest` bytes.
        """
        import pyarrow as pa  # noqa: PLC0415  # tasks only
        import pyarrow.compute as pc  # noqa: PLC0415

        from orbitmq.message.columns import encode_messages, id_items, lengths  # noqa: PLC0415

        batch = _named(batch)
        if self._topic is None or not batch.num_rows or not _is_free(batch):
            return None
        properties = plain_texts(batch)
        if properties is None or properties.null_count:
            return None
        bodies = batch.column("body").cast(pa.binary())
        properties = properties.cast(pa.binary())
        if int((lengths(bodies) + lengths(properties)).max()) + _ID_ITEM > largest:
            return None
        ids = self._ids.of_rows(self._row, self._topic, bodies, properties)
        items = id_items(ids, self._id_names).cast(pa.binary())
        with_ids = pc.binary_join_element_wise(properties, items, b"")
        self._row += batch.num_rows
        keys = None
        if "orderingKey" in batch.schema.names:
            keys = batch.column("orderingKey")
        return PlainRows(self._topic, encode_messages(bodies, with_ids), ids, keys)

    def messages(
        self, batch: pa.RecordBatch, unwritable: Mapping[int, str] | None = None
    ) -> Iterator[Written | RowRefused]:
        """A message or an error for every row; `unwritable` has the errors of some."""
        batch = _named(batch)
        names = [name for name in _FIELDS if name in batch.schema.names]
        unreadable = dict(unwritable or {})
        columns = {name: _values(name, batch.column(name), unreadable) for name in names}
        plain: Sequence[bytes | None] = [None] * batch.num_rows
        if self._topic is not None:
            plain = plain_properties(batch)
        first, self._row = self._row, self._row + batch.num_rows
        nothing = [None] * batch.num_rows
        bodies = columns["body"]
        queues, keys = columns.get("queueId", nothing), columns.get("orderingKey", nothing)
        brokers, identities = columns.get("brokerName", nothing), columns.get("identity", nothing)
        for place, properties in enumerate(plain):
            if unreadable and place in unreadable:
                yield RowRefused(first + place, unreadable[place])
                continue
            if properties is None or self._topic is None:
                row = {name: columns[name][place] for name in names}
                yield self._checked(first + place, row)
                continue
            body = bodies[place]
            content = BatchElement(
                body if isinstance(body, bytes) else body.encode(), 0, properties
            )
            unique_id = self._id(first + place, self._topic, content, identities[place])
            yield Written(
                self._topic,
                self._with_id(content, unique_id),
                unique_id,
                queues[place],
                brokers[place],
                keys[place],
                False,
            )

    def _id(self, row: int, topic: str, content: BatchElement, identity: str | None) -> str:
        if identity:
            return self._ids.named(identity, topic)
        return self._ids.of(row, topic, content)

    def _with_id(self, content: BatchElement, unique_id: str) -> BatchElement:
        items = "".join([f"{name}\x01{unique_id}\x02" for name in self._id_names])
        return content._replace(properties=content.properties + items.encode())

    def _checked(self, row: int, values: Mapping[str, Any]) -> Written | RowRefused:
        try:
            return self._written(row, values)
        except (MessageRefused, MessageError) as refused:
            return RowRefused(row, str(refused))

    def _written(self, number: int, row: Mapping[str, Any]) -> Written:
        topic = self._topic or row.get("topic")
        if topic is None:
            raise MessageRefused("topic", "is null; give the option 'topic', or one in every row")
        deliver_at: datetime | None = row.get("deliverAt")
        queue = row.get("queueId")
        if queue is not None and queue < 0:
            raise MessageRefused("queueId", f"must be 0 or more, got {queue}")
        body = row["body"]
        message = Message(
            topic,
            b"" if body is None else body,
            tags=row.get("tags") or None,
            keys=row.get("keys") or (),
            properties=_own(row.get("properties")),
            flag=row.get("flag") or 0,
            delay_level=row.get("delayLevel") or 0,
            deliver_at=deliver_at,
            ordering_key=row.get("orderingKey") or None,
        )
        properties = encode_properties(message.all_properties())
        content = BatchElement(message.body, message.flag, properties)
        unique_id = self._id(number, topic, content, row.get("identity"))
        element = self._with_id(content, unique_id)
        check_properties_size(element.properties)
        return Written(
            topic,
            element,
            unique_id,
            queue,
            row.get("brokerName"),
            message.ordering_key,
            bool(message.delay_level) or deliver_at is not None,
        )


def _values(name: str, column: pa.Array, unreadable: dict[int, str]) -> Sequence[Any]:
    """The values of a column; rows with values that Python cannot express go into `unreadable`."""
    import pyarrow as pa  # noqa: PLC0415  # as the caller has it

    if name == "body" and pa.types.is_string(column.type):
        # Text is sent as its bytes.
        column = column.cast(pa.binary())
    with contextlib.suppress(*_UNREADABLE):
        found: list[Any] = column.to_pylist()
        return found
    values: list[Any] = []
    for place, value in enumerate(column):
        try:
            values.append(value.as_py())
        except _UNREADABLE as error:
            is_text = isinstance(error, UnicodeDecodeError)
            problem = "is no text in UTF-8" if is_text else "is beyond the years 1 to 9999"
            unreadable.setdefault(place, f"column {name} {problem}")
            values.append(None)
    return values


def plain_properties(batch: pa.RecordBatch) -> list[bytes | None]:
    """The encoded properties of rows that need no check, without ids; None for the others."""
    import pyarrow as pa  # noqa: PLC0415  # as the caller has it

    found = plain_texts(batch)
    if found is None:
        return [None] * batch.num_rows
    properties: list[bytes | None] = found.cast(pa.binary()).to_pylist()
    return properties


def _by_queue(
    keys: pa.StringArray, count: int
) -> Iterator[tuple[int | None, npt.NDArray[np.int64]]]:
    """The rows of each queue by their keys; None: of those without a key."""
    import numpy as np  # noqa: PLC0415  # tasks only
    import pyarrow.compute as pc  # noqa: PLC0415

    encoded = keys.dictionary_encode()
    chosen = [abs(key_hash(key)) % count if key else -1 for key in encoded.dictionary.to_pylist()]
    codes = pc.fill_null(encoded.indices, len(chosen)).to_numpy()
    of_rows = np.array([*chosen, -1], np.int64)[codes]
    for place in np.unique(of_rows).tolist():
        yield None if place < 0 else place, np.flatnonzero(of_rows == place)


def _named(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with the names of columns that are used in here."""
    return batch.rename_columns([_SYNONYMS.get(each, each) for each in batch.schema.names])


def _is_free(batch: pa.RecordBatch) -> bool:
    """Whether no row names its queue or its id."""
    names = ("queueId", "brokerName", "identity")
    given = [batch.column(name) for name in names if name in batch.schema.names]
    return all(column.null_count == len(column) for column in given)


def plain_texts(batch: pa.RecordBatch) -> pa.StringArray | None:
    """The same as a column; None if no row is so.

    A row needs a check if it has another column than body, tags, keys and queue, or a text that
    might be refused, changed or too long.
    """
    import pyarrow as pa  # noqa: PLC0415  # as the caller has it
    import pyarrow.compute as pc  # noqa: PLC0415

    body = batch.column("body")
    is_plain = pc.greater(pc.fill_null(pc.binary_length(body), 0), 0)
    parts = []
    for column, name in (("tags", TAGS), ("keys", KEYS), ("orderingKey", SHARDING_KEY)):
        if column not in batch.schema.names:
            continue
        texts = batch.column(column)
        if not pa.types.is_string(texts.type):
            return None
        texts = pc.fill_null(texts, "")
        is_plain = pc.and_(is_plain, pc.less(pc.binary_length(texts), _SHORT))
        is_plain = pc.and_(is_plain, pc.match_substring_regex(texts, _PLAIN_TEXT))
        if column == "tags":
            is_plain = pc.and_(is_plain, pc.invert(pc.match_substring(texts, "||")))
        item = pc.binary_join_element_wise(f"{name}\x01", texts, "\x02", "")
        parts.append(pc.if_else(pc.equal(texts, ""), "", item))
    if "queueId" in batch.schema.names:
        is_plain = pc.and_(
            is_plain, pc.fill_null(pc.greater_equal(batch.column("queueId"), 0), True)
        )
    for column in _NEVER_PLAIN:
        if column in batch.schema.names:
            is_plain = pc.and_(is_plain, pc.is_null(batch.column(column)))
    joined = pa.array([""] * batch.num_rows)
    if parts:
        joined = pc.binary_join_element_wise(*parts, "")
    return pc.if_else(is_plain, joined, None)


#: Bytes of an element's frame and of its ids.
_ID_ITEM: Final = MIN_ELEMENT_SIZE + 42 + 45

#: Values of Spark that Python cannot express: text of any bytes, and times beyond year 9999.
_UNREADABLE: Final = (UnicodeDecodeError, OverflowError)

#: Words of printable ASCII with single spaces between them, or nothing.
_PLAIN_TEXT: Final = r"^([!-~]+( [!-~]+)*)?$"
#: Far below the limit of a message's properties.
_SHORT: Final = 1000
_NEVER_PLAIN: Final = ("properties", "delayLevel", "deliverAt", "flag")

_FIELDS: Final = (
    "body",
    "topic",
    "tags",
    "keys",
    "properties",
    "queueId",
    "brokerName",
    "orderingKey",
    "delayLevel",
    "deliverAt",
    "flag",
    "identity",
)


def _own(properties: Any) -> dict[str, str]:
    """The application's properties: sending sets those of the system."""
    if not properties:
        return {}
    pairs = properties.items() if isinstance(properties, dict) else properties
    return {name: value for name, value in pairs if name not in RESERVED and value}


_NUMBERS: Final = (IntegerType, LongType, ShortType, ByteType)
#: The allowed types of each column, and their description.
WRITABLE: Final[Mapping[str, tuple[tuple[type[DataType], ...], str]]] = {
    "body": ((BinaryType, StringType), "binary or string"),
    "topic": ((StringType,), "string"),
    "tags": ((StringType,), "string"),
    "keys": ((StringType, ArrayType), "string, with spaces between keys, or array<string>"),
    "properties": ((MapType,), "map<string,string>"),
    "queueId": (_NUMBERS, "int"),
    "brokerName": ((StringType,), "string"),
    "orderingKey": ((StringType,), "string"),
    "delayLevel": (_NUMBERS, "int"),
    "deliverAt": ((TimestampType,), "timestamp"),
    "flag": (_NUMBERS, "int"),
    "identity": ((StringType,), "string"),
}
#: Other names of these columns; `shardingKey` is deprecated.
_SYNONYMS: Final[Mapping[str, str]] = {"shardingKey": "orderingKey", "tag": "tags"}
#: Columns that brokers set: rows that were read can be written as they are.
IGNORED: Final = frozenset(COLUMNS.keys() - WRITABLE.keys())
#: Columns that never become fields of a body.
_OF_MESSAGES: Final = frozenset({*COLUMNS, *WRITABLE, *_SYNONYMS})


def check_writable(schema: StructType, *, topic: str | None) -> None:
    """Refuse a schema without a body, or with unknown columns or types. Raises `SchemaRefused`."""
    names = set(schema.names)
    if "body" not in names:
        of_kafka = (
            "; Kafka's 'value' is 'body' here, its 'key' is 'keys'" if "value" in names else ""
        )
        raise SchemaRefused(
            f"a column 'body' (binary or string) is needed to write messages{of_kafka}"
        )
    if topic is None and "topic" not in names:
        raise SchemaRefused("either the option 'topic' or a column 'topic' is needed")
    for column in schema.fields:
        if column.name in IGNORED:
            continue
        name = _SYNONYMS.get(column.name, column.name)
        if name != column.name and name in names:
            raise SchemaRefused(
                f"column {column.name!r} is another name of {name!r}; write one of them"
            )
        if column.name == "shardingKey":
            warn_deprecated("the column 'shardingKey'", "'orderingKey'")
        if name not in WRITABLE:
            raise SchemaRefused(
                f"column {column.name!r} cannot be written; leave it out, or put it into the map "
                f"'properties'. There are: {', '.join(WRITABLE)}"
            )
        kinds, text = WRITABLE[name]
        if not isinstance(column.dataType, kinds) or not _holds_texts(column.dataType):
            raise SchemaRefused(
                f"column {column.name!r} must be {text}, it is {column.dataType.simpleString()}"
            )


def written_columns(schema: StructType) -> pa.Schema:
    """The written columns of a schema, for Arrow.

    Spark's own conversion has different parameters in each version.
    """
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    kinds: Mapping[type[DataType], pa.DataType] = {
        BinaryType: pa.binary(),
        StringType: pa.string(),
        ByteType: pa.int8(),
        ShortType: pa.int16(),
        IntegerType: pa.int32(),
        LongType: pa.int64(),
        TimestampType: pa.timestamp("us", "UTC"),
        ArrayType: pa.list_(pa.string()),
        MapType: pa.map_(pa.string(), pa.string()),
    }
    return pa.schema(
        [
            (each.name, kinds[type(each.dataType)])
            if each.name in _OF_MESSAGES
            else (each.name, arrow_type(each.dataType))
            for each in schema.fields
            if each.name not in IGNORED
        ]
    )


def _holds_texts(kind: DataType) -> bool:
    match kind:
        case MapType():
            return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
        case ArrayType():
            return isinstance(kind.elementType, StringType)
        case _:
            return True
