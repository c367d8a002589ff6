"""Rows with a verdict: those that failed go back to the broker that stored them.

It is done in one action of its own and not in a step of somebody's DataFrame, which Spark would run
again for every action. A task that is tried again sends its rows back once more: a group then gets
those messages twice, which at least once allows.

Brokers take a message back by its place in their log, which no column has. So it is looked up by
its offset, which costs a pull for neighbouring rows; of a message that is gone meanwhile, the row
itself is sent to the retry topic, or given up.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.innerbatches import without_inner_batches
from orbitmq.client.consumer.verdict import DEAD, Failure
from orbitmq.client.names import check_group, retry_topic
from orbitmq.client.rangecluster import RangeCluster
from orbitmq.client.rangereading import Missing, RangeSettings, read_ranges
from orbitmq.client.ranges import QueueRange, RangeFilter
from orbitmq.client.received import ReceivedMessage
from orbitmq.errors import OrbitError
from orbitmq.message.stored import decode_messages
from orbitmq.spark.connections import links_to
from orbitmq.spark.consuming.errors import ReturnFailed
from orbitmq.spark.consuming.keeping import check_kept
from orbitmq.spark.consuming.reaching import reach
from orbitmq.spark.consuming.returning import Fate
from orbitmq.spark.consuming.rowcolumns import check_columns
from orbitmq.spark.consuming.rowmessages import REQUIRED, messages_of
from orbitmq.spark.consuming.verdicts import ADDED, DEAD_LETTER, OK, RETRY
from orbitmq.spark.workerends import cause_first

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from orbitmq.client.queue import Queue
    from orbitmq.client.rangeaccess import ClientTls, Credentials, RangeAccess

log = logging.getLogger(__name__)

_SCHEMA: Final = (
    "retried BIGINT, dead BIGINT, held BIGINT, kept BIGINT, failures MAP<INT, BIGINT>, error STRING"
)
_OPTIONAL: Final = ("flag", "reconsumeTimes", "properties")
_USED: Final = (*REQUIRED, *_OPTIONAL, *ADDED)
#: A pull for one message more costs less than another pull.
_NEIGHBOURS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """How many rows went back."""

    retried: int
    dead: int
    #: Rows that middleware kept from the handler: they come again, and did not fail.
    held: int = 0
    #: Those that failed, by the attempts that were before.
    failures: Mapping[int, int] = field(default_factory=dict)


def settle(
    frame: DataFrame,
    group: str,
    *,
    name_server: str | Iterable[str] | None = None,
    credentials: Credentials | None = None,
    tls: ClientTls | None = None,
    max_retries: int | None = None,
) -> Settled:
    """Send the failed rows of `judged` back, to be delivered to the group again or given up.

    Returns when brokers have taken all of them; raises `ReturnFailed` when one was not taken, so
    that the batch fails and is repeated. Rows that would be judged again are refused. A row whose
    outcome is null has no verdict, and is delivered again as well. Without `max_retries` the limit
    is the group's own; where the account may not ask brokers for it, the numbers assume their 16.
    """
    check_group(group)
    check_columns(frame, (*REQUIRED, "outcome"), optional=_OPTIONAL)
    check_kept(frame)
    used = [name for name in _USED if name in frame.columns]
    # Without a verdict a row has not succeeded: it comes again.
    failed = frame.where(~frame["outcome"].eqNullSafe(OK)).select(*used)
    send = _sending(reach(name_server, credentials, tls), group, max_retries)
    rows = failed.mapInArrow(send, _SCHEMA).collect()
    kept = sum(row.kept for row in rows)
    if kept:
        raise ReturnFailed(kept, next(row.error for row in rows if row.kept) or "")
    failures: Counter[int] = Counter()
    for row in rows:
        failures.update(row.failures)
    return Settled(
        retried=sum(row.retried for row in rows),
        dead=sum(row.dead for row in rows),
        held=sum(row.held for row in rows),
        failures=dict(failures),
    )


def with_retries(
    *topics: str,
    group: str,
    name_server: str | Iterable[str] | None = None,
    credentials: Credentials | None = None,
    tls: ClientTls | None = None,
) -> str:
    """These topics and the group's retry topic, as the option `subscribe` of a stream takes them.

    Brokers make a retry topic when they first hear of its group: they do so here.
    """
    access = reach(name_server, credentials, tls)
    with RangeCluster(access, check_group(group), retries=8, pause=0.05) as cluster:
        cluster.queues(topics)  # by which its brokers are known
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
        from orbitmq.spark.consuming.kept import returner_for  # noqa: PLC0415  # tasks only

        for batch in batches:
            if not batch.num_rows:
                continue
            failed = list(zip(_stored(access, group, batch), _failures(batch), strict=True))
            try:
                fates = returner_for(access, group, max_retries).send_back(failed)
                yield _counted(failed, fates)
            except OrbitError as error:
                yield _counted(failed, [Fate.KEPT] * len(failed), str(error))

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
            # The outcome is what counts: it may have been changed since the others were made.
            delay if isinstance(delay, float) and outcome != DEAD_LETTER else None,
            reason if isinstance(reason, str) else None,
            is_held=is_held is True and outcome == RETRY,
        )
        for outcome, reason, delay, is_held in zip(*map(column, ADDED), strict=True)
    ]


def _stored(access: RangeAccess, group: str, batch: pa.RecordBatch) -> list[ReceivedMessage]:
    """The messages of rows as brokers have them; as the rows have them where brokers do not."""
    rows = messages_of(batch, group)
    found: dict[tuple[Queue, int], ReceivedMessage] = {}
    try:
        for chunk in read_ranges(
            links_to(access),
            neighbours((row.queue, row.queue_offset) for row in rows),
            group=group,
            settings=RangeSettings(missing=Missing.SKIP, patience=5.0, lag_patience=0.1),
        ):
            for piece in chunk.pieces:
                for stored in without_inner_batches(decode_messages(piece), chunk.start):
                    message = ReceivedMessage(stored, chunk.queue, group)
                    found[chunk.queue, stored.queue_offset] = message
    except OrbitError as error:
        log.warning("failed messages cannot be looked up, and are sent as they are: %s", error)
    return [found.get((row.queue, row.queue_offset), row) for row in rows]


def neighbours(places: Iterable[tuple[Queue, int]]) -> list[QueueRange]:
    """Few ranges that have all places in them, and little else."""
    ranges: list[QueueRange] = []
    for queue, offset in sorted(set(places)):
        last = ranges[-1] if ranges else None
        if last is not None and last.queue == queue and offset - last.end < _NEIGHBOURS:
            ranges[-1] = QueueRange(queue, last.start, offset + 1)
        else:
            ranges.append(QueueRange(queue, offset, offset + 1))
    return ranges


def _counted(
    failed: Sequence[tuple[ReceivedMessage, Failure]],
    fates: Sequence[Fate],
    error: str | None = None,
) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    counts = Counter(fates)
    failures = Counter(
        message.reconsume_times
        for (message, _), fate in zip(failed, fates, strict=True)
        if fate in (Fate.RETRIED, Fate.DEAD)
    )
    if error is None and counts[Fate.KEPT]:
        error = "no broker took it"
    return pa.RecordBatch.from_arrays(
        [
            *(
                pa.array([counts[fate]], pa.int64())
                for fate in (Fate.RETRIED, Fate.DEAD, Fate.HELD, Fate.KEPT)
            ),
            pa.array([sorted(failures.items())], pa.map_(pa.int32(), pa.int64())),
            pa.array([error], pa.string()),
        ],
        names=["retried", "dead", "held", "kept", "failures", "error"],
    )
