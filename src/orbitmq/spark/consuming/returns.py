"""Failed messages on Spark: sending them back, and reading them as DataFrames.

Brokers do not report whether a message that they take back becomes a dead letter. Without a limit
of the pipeline the group's own limit decides, so a task asks each broker for it once.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.sendback import LazyProducer, SendBack, retries_allowed
from orbitmq.client.consumer.verdict import DEAD, Failure
from orbitmq.client.engine import Engine
from orbitmq.client.loopthread import LoopThread
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.ranges.cluster import RangeCluster
from orbitmq.client.ranges.connections import QueueRange, RangeAccess, RangeFilter
from orbitmq.client.ranges.read import Missing, RangeSettings, read_ranges
from orbitmq.errors import NoRoute, NotRunning, OrbitError
from orbitmq.message.properties import (
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
)
from orbitmq.message.stored import decode_messages, without_inner_batches
from orbitmq.names import check_group, dead_letter_topic, retry_topic
from orbitmq.spark.consuming.pipeline import resolve_access, source_options
from orbitmq.spark.consuming.progress import ReturnFailed, Settled
from orbitmq.spark.consuming.verdicts import (
    ADDED,
    DEAD_LETTER,
    OK,
    REQUIRED,
    RETRY,
    check_columns,
    check_kept,
    messages_of,
)
from orbitmq.spark.internals import cause_first, connections_to

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from orbitmq.client.ranges.connections import ClientTls, Credentials
    from orbitmq.client.routes import Queue


log = logging.getLogger(__name__)


class SendBackResult(enum.Enum):
    """The result of sending a message back."""

    RETRIED = "retried"  #: it is delivered again
    DEAD = "dead"  #: it became a dead letter
    HELD = "held"  #: it is delivered again and did not fail: middleware kept it from the handler
    KEPT = "kept"  #: no broker took it


@dataclass(slots=True)
class SendBackCounts:
    """The results for the messages of a piece."""

    results: Counter[SendBackResult] = field(default_factory=Counter)
    failed: int = 0  #: all but those that middleware held
    reason: str | None = None

    def add(self, more: SendBackCounts) -> None:
        self.results.update(more.results)
        self.failed += more.failed
        self.reason = more.reason or self.reason


class CountingSendBack(SendBack):
    """Sends failed messages back and counts the results."""

    def __init__(
        self, engine: Engine, group: str, *, max_retries: int | None, timeout: float
    ) -> None:
        super().__init__(
            engine, group, LazyProducer(engine), max_retries=max_retries, timeout=timeout
        )
        self._sent: list[tuple[ReceivedMessage, Failure, bool]] = []
        #: The group's limit at each broker; None: the broker did not say.
        self._limits: dict[str, int | None] = {}
        self._asking_limit = asyncio.Lock()

    async def send_back(self, message: ReceivedMessage, failure: Failure) -> bool:
        if self._max_retries is None and failure.level != DEAD and not failure.is_held:
            await self._learn_limit(message.queue.broker)
        is_taken = await super().send_back(message, failure)
        self._sent.append((message, failure, is_taken))
        return is_taken

    async def give_up(self, message: ReceivedMessage, failure: Failure) -> bool:
        is_taken = await super().give_up(message, failure)
        self._sent.append((message, failure, is_taken))
        return is_taken

    def tally(self, piece: QueueRange, unfinished: Container[object] = ()) -> SendBackCounts:
        """The results for a piece since the last call, without messages that are still open."""
        found = SendBackCounts()
        others = []
        for sent in self._sent:
            message, failure, is_taken = sent
            is_of_piece = piece.start <= message.queue_offset < piece.end
            is_open = is_taken and message.queue_offset in unfinished
            if message.queue != piece.queue or not is_of_piece or is_open:
                others.append(sent)
                continue
            found.reason = failure.reason or found.reason
            found.failed += not failure.is_held
            found.results[self.fate(message, failure, is_taken=is_taken)] += 1
        self._sent = others
        return found

    def forget(self) -> None:
        """Forget counts and limits."""
        self._sent.clear()
        self._limits.clear()

    def fate(self, message: ReceivedMessage, failure: Failure, *, is_taken: bool) -> SendBackResult:
        """The result for a message that was sent back since `forget`."""
        if not is_taken:
            return SendBackResult.KEPT
        if failure.is_held:
            return SendBackResult.HELD
        is_used_up = message.reconsume_times >= self._allowed(message.queue.broker)
        return (
            SendBackResult.DEAD if failure.level == DEAD or is_used_up else SendBackResult.RETRIED
        )

    def _allowed(self, broker: str) -> int:
        limit = self._limits.get(broker)
        return super()._allowed(broker) if limit is None else limit

    async def _learn_limit(self, broker: str) -> None:
        async with self._asking_limit:
            if broker not in self._limits:
                self._limits[broker] = await self._limit_at(broker)

    async def _limit_at(self, broker: str) -> int | None:
        try:
            return await retries_allowed(self._engine, self._group, broker, timeout=self._timeout)
        except OrbitError as error:
            # Usual for a group that the broker does not know yet, and without the permission.
            log.debug("the limit of group %s at %s is not known: %s", self._group, broker, error)
            return None


#: Failed messages that are sent back in parallel.
_AT_ONCE: Final = 64
#: Seconds before those that no broker took are sent again.
_PAUSES: Final = (0.1, 0.5)


class SendBackClient:
    """Sends failed messages of a group back. Blocking; for one thread at a time."""

    def __init__(self, access: RangeAccess, group: str, max_retries: int | None) -> None:
        """`group` with its namespace."""
        self._access = access
        self._group = group
        self._max_retries = max_retries
        self._thread = LoopThread("orbitmq-returning")
        self._engine: Engine | None = None
        self._returns: CountingSendBack | None = None

    def start(self) -> None:
        self._thread.start()
        self._thread.run(self._start())

    def stop(self) -> None:
        """Close everything. May be called again."""
        if self._engine is not None:
            self._thread.run(self._engine.stop())
            self._engine = self._returns = None
        self._thread.stop()

    def send_back(self, failed: Sequence[tuple[ReceivedMessage, Failure]]) -> list[SendBackResult]:
        """Send messages back; returns the result of each."""
        return self._thread.run(self._send_back(failed))

    async def _start(self) -> None:
        self._engine = Engine(self._access.settings())
        await self._engine.start()
        self._returns = CountingSendBack(
            self._engine, self._group, max_retries=self._max_retries, timeout=5.0
        )

    async def _send_back(
        self, failed: Sequence[tuple[ReceivedMessage, Failure]]
    ) -> list[SendBackResult]:
        engine, returns = self._engine, self._returns
        if engine is None or returns is None:
            raise NotRunning("this client")
        await _know_brokers(engine, {message.queue.topic for message, _ in failed})
        turns = asyncio.Semaphore(_AT_ONCE)
        taken = [False] * len(failed)

        async def send(place: int) -> None:
            async with turns:
                taken[place] = await returns.send_back(*failed[place])

        for pause in (*_PAUSES, None):
            await asyncio.gather(*(send(place) for place, done in enumerate(taken) if not done))
            if all(taken) or pause is None:
                break
            await asyncio.sleep(pause)
            # The broker has just created the retry topic, with the group.
            await _know_brokers(engine, {retry_topic(self._group)}, refresh=True)
        fates = [
            returns.fate(*each, is_taken=is_taken)
            for each, is_taken in zip(failed, taken, strict=True)
        ]
        returns.forget()
        return fates


async def _know_brokers(engine: Engine, topics: Iterable[str], *, refresh: bool = False) -> None:
    """Look up the routes by which brokers are found; a missing one fails its messages later."""
    await asyncio.gather(
        *(engine.routes.get(topic, refresh=refresh) for topic in topics), return_exceptions=True
    )


# Rows with a verdict. Sending back is an action of its own: as a step of a DataFrame it would run
# again for every action. A retried task sends its rows again, which at-least-once allows.
#
# Brokers take a message back by its physical offset, which is in no column, so it is pulled by its
# queue offset. Of an expired message, the row itself is sent to the retry or dead-letter topic.

_SCHEMA: Final = "retried BIGINT, dead BIGINT, held BIGINT, kept BIGINT, error STRING"
_OPTIONAL: Final = ("flag", "reconsumeTimes", "properties")
_USED: Final = (*REQUIRED, *_OPTIONAL, *ADDED)
#: Pulling a few messages between two costs less than another pull.
_NEIGHBOURS: Final = 8


def settle(
    frame: DataFrame,
    group: str,
    *,
    name_server: str | Iterable[str] | None = None,
    credentials: Credentials | None = None,
    tls: ClientTls | None = None,
    max_retries: int | None = None,
) -> Settled:
    """Send the failed rows of `judged` back, to be delivered to the group again or to become dead.

    Returns when brokers have taken all of them; raises `ReturnFailed` when one was not taken, so
    that the batch fails and is repeated. Rows whose handler would be called again are refused. A
    row whose outcome is null is delivered again. Without `max_retries` the group's own limit
    applies; an account that may not ask for it counts with the brokers' default of 16.
    """
    check_group(group)
    check_columns(frame, (*REQUIRED, "outcome"), optional=_OPTIONAL)
    check_kept(frame)
    used = [name for name in _USED if name in frame.columns]
    # A row without a verdict has not succeeded.
    failed = frame.where(~frame["outcome"].eqNullSafe(OK)).select(*used)
    send = _sending(resolve_access(name_server, credentials, tls), group, max_retries)
    rows = failed.mapInArrow(send, _SCHEMA).collect()
    kept = sum(row.kept for row in rows)
    if kept:
        raise ReturnFailed(kept, next(row.error for row in rows if row.kept) or "")
    return Settled(
        retried=sum(row.retried for row in rows),
        dead=sum(row.dead for row in rows),
        held=sum(row.held for row in rows),
    )


def with_retries(
    *topics: str,
    group: str,
    name_server: str | Iterable[str] | None = None,
    credentials: Credentials | None = None,
    tls: ClientTls | None = None,
) -> str:
    """These topics and the group's retry topic, for the option `subscribe` of a stream.

    Brokers create the retry topic with the group, which is done here.
    """
    access = resolve_access(name_server, credentials, tls)
    with RangeCluster(access, check_group(group), retries=8, pause=0.05) as cluster:
        cluster.queues(topics)  # finds the brokers
        cluster.join(topics, RangeFilter())
        cluster.queues([retry_topic(group)], refresh=True)
    return ",".join((*topics, retry_topic(group)))


def _sending(
    access: RangeAccess, group: str, max_retries: int | None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def send(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with cause_first():
            yield from counted(batches)

    def counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from orbitmq.spark.consuming.worker import send_back_client  # noqa: PLC0415  # tasks only

        for batch in batches:
            if not batch.num_rows:
                continue
            failed = list(zip(_stored(access, group, batch), _failures(batch), strict=True))
            try:
                fates = send_back_client(access, group, max_retries).send_back(failed)
                yield _counted(fates)
            except OrbitError as error:
                yield _counted([SendBackResult.KEPT] * len(failed), str(error))

    return send


def _failures(batch: pa.RecordBatch) -> list[Failure]:
    def column(name: str) -> Sequence[object]:
        if name in batch.schema.names:
            values: list[object] = batch.column(name).to_pylist()
            return values
        return [None] * batch.num_rows

    return [
        Failure(
            DEAD if outcome == DEAD_LETTER else 0,
            # The outcome decides: it may have been changed after the other columns.
            delay if isinstance(delay, float) and outcome != DEAD_LETTER else None,
            reason if isinstance(reason, str) else None,
            is_held=is_held is True and outcome == RETRY,
        )
        for outcome, reason, delay, is_held in zip(*map(column, ADDED), strict=True)
    ]


def _stored(access: RangeAccess, group: str, batch: pa.RecordBatch) -> list[ReceivedMessage]:
    """The messages of rows as brokers have them, or as the rows have them."""
    rows = messages_of(batch, group)
    found: dict[tuple[Queue, int], ReceivedMessage] = {}
    try:
        for chunk in read_ranges(
            connections_to(access),
            neighbours((row.queue, row.queue_offset) for row in rows),
            group=group,
            settings=RangeSettings(missing=Missing.SKIP, patience=5.0, lag_patience=0.1),
        ):
            for piece in chunk.pieces:
                for stored in without_inner_batches(decode_messages(piece), chunk.start):
                    message = ReceivedMessage(stored, chunk.queue, group)
                    found[chunk.queue, stored.queue_offset] = message
    except OrbitError as error:
        log.warning("failed messages cannot be pulled and are sent as they are: %s", error)
    return [found.get((row.queue, row.queue_offset), row) for row in rows]


def neighbours(places: Iterable[tuple[Queue, int]]) -> list[QueueRange]:
    """A few ranges that contain all places and little else."""
    ranges: list[QueueRange] = []
    for queue, offset in sorted(set(places)):
        last = ranges[-1] if ranges else None
        if last is not None and last.queue == queue and offset - last.end < _NEIGHBOURS:
            ranges[-1] = QueueRange(queue, last.start, offset + 1)
        else:
            ranges.append(QueueRange(queue, offset, offset + 1))
    return ranges


def _counted(fates: Sequence[SendBackResult], error: str | None = None) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    counts = Counter(fates)
    if error is None and counts[SendBackResult.KEPT]:
        error = "no broker took it"
    columns = {each.value: pa.array([counts[each]], pa.int64()) for each in SendBackResult}
    return pa.RecordBatch.from_pydict({**columns, "error": pa.array([error], pa.string())})


#: The property with the reason of a failure.
_REASON: Final = "DLQ_REASON"


def dead_letters(
    spark: SparkSession,
    group: str,
    *,
    name_server: str | Iterable[str] | None = None,
    credentials: Credentials | None = None,
    tls: ClientTls | None = None,
) -> DataFrame:
    """The dead letters of a group.

    Columns: `topic` and `msgId` of the message that was sent, `originMsgId` (where it was stored),
    `attempts`, `reason`, `sentAt`, `storedAt` (when it was given up), `body`, `tags`, `keys`,
    `properties`, and where the copy is: `brokerName`, `queueId`, `queueOffset`.
    """
    topic = dead_letter_topic(check_group(group))
    return _failed(spark, topic, resolve_access(name_server, credentials, tls), group)


def retries(
    spark: SparkSession,
    group: str,
    *,
    name_server: str | Iterable[str] | None = None,
    credentials: Credentials | None = None,
    tls: ClientTls | None = None,
) -> DataFrame:
    """The copies of failed messages that became due for another attempt, as `dead_letters`.

    `attempts` are those made before. Copies that still wait for their time are not in it.
    """
    topic = retry_topic(check_group(group))
    return _failed(spark, topic, resolve_access(name_server, credentials, tls), group)


def _failed(spark: SparkSession, topic: str, access: RangeAccess, group: str) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # the usual name

    frame = _read(spark, topic, access, group)
    properties = F.col("properties")

    def first_of(*names: str) -> list[Column]:
        return [properties.getItem(name) for name in names]

    return frame.select(
        F.coalesce(*first_of(DLQ_ORIGIN_TOPIC, RETRY_TOPIC), F.col("topic")).alias("topic"),
        F.col("msgId"),
        F.coalesce(*first_of(DLQ_ORIGIN_MESSAGE_ID, ORIGIN_MESSAGE_ID)).alias("originMsgId"),
        F.col("reconsumeTimes").alias("attempts"),
        properties.getItem(_REASON).alias("reason"),
        F.col("bornTimestamp").alias("sentAt"),
        F.col("storeTimestamp").alias("storedAt"),
        *map(F.col, ("body", "tags", "keys", "properties")),
        *map(F.col, ("brokerName", "queueId", "queueOffset")),
    )


def _read(spark: SparkSession, topic: str, access: RangeAccess, group: str) -> DataFrame:
    """The topic; no rows while it does not exist because nothing has failed."""
    from orbitmq.spark.source import full_schema  # noqa: PLC0415  # only where Spark is

    with RangeCluster(access, group) as cluster:
        try:
            cluster.queues([topic])
        except NoRoute:
            return spark.createDataFrame([], full_schema())
    # As the group itself: with accounts, others may not read its failures.
    options = {**source_options(access), "subscribe": topic, "group": group}
    return spark.read.format("rocketmq").options(**options).load()
