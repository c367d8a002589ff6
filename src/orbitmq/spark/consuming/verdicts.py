"""Verdicts in DataFrames: calls a handler for every row and adds its verdict as columns.

For `foreachBatch` and any other job:

    with judged(batch, bill, group="billing") as rows:
        good = rows.where("outcome = 'ok'")
        good.write.mode("overwrite").parquet(f"billed/batch={number}")
        settle(rows, "billing", name_server="localhost:9876")

Trap: every action computes a DataFrame again, and calls the handler again. A row that failed in
one call and succeeded in the next would be neither written nor sent back. `judged` therefore keeps
the verdicts of one call, and `settle` refuses rows whose handler could be called again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from orbitmq.client.consumer.handlers import Binding, bind_handler
from orbitmq.client.consumer.verdict import DEAD, Failure, Outcome, Verdict, text_of
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.errors import SettingError
from orbitmq.message.properties import KEYS, TAGS, UNIQ_KEY
from orbitmq.message.stored import StoredMessage
from orbitmq.spark.consuming.pipeline import make_portable, portable_parameters
from orbitmq.spark.consuming.progress import RowsRefused
from orbitmq.spark.internals import analyzed_plan, release_checkpoint

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

    from orbitmq.client.consumer.handlers import HandlerFunction
    from orbitmq.client.serialization import Serializing


#: The values of `outcome`: done; to be delivered again; given up.
OK: Final = "ok"
RETRY: Final = "retry"
DEAD_LETTER: Final = "dead"

#: The added columns: outcome, reason, the delay that the handler asked for, and whether middleware
#: kept the message from the handler, so that no attempt was spent.
ADDED: Final = ("outcome", "error", "retryAfter", "isHeld")
#: The function's name in Spark's plans.
HANDLER_IN_PLAN: Final = "orbitmq_process"
_DAMAGED: Final = Failure(reason="the body is damaged, or cannot be expanded")


def process(
    frame: DataFrame,
    handler: HandlerFunction,
    *,
    group: str = "spark",
    batch: bool | None = None,
    batch_size: int | None = None,
    workers: int = 1,
    middleware: Sequence[object] = (),
    serializer: Serializing = None,
) -> DataFrame:
    """The rows of a DataFrame of messages, with a handler's verdict on each.

    The handler is that of a `Consumer`: for one message or a batch, `def` or `async def`, for
    messages or for values of their bodies, with `Retry`, `DeadLetter` and all other results.
    All columns stay; `outcome` is ok, retry or dead, `error` the reason, `retryAfter` the delay
    that the handler asked for. `isHeld` is true of a row to retry that middleware kept from the
    handler, as `Idempotence` does while another process handles it: no attempt is spent. A failing
    row fails no task. `workers` rows are handled in parallel in each task. `group` is passed to
    middleware. A coroutine runs on one event loop for the whole task, so it may keep a client that
    belongs to its loop until the task ends.

    Trap: every action calls the handler again. Use `judged` for rows that are used twice.
    """
    if isinstance(workers, bool) or workers < 1:
        raise SettingError(f"process: workers must be 1 or more, got {workers!r}")
    check_columns(frame, REQUIRED, optional=OPTIONAL)
    if taken := sorted({*ADDED} & {*frame.columns}):
        raise RowsRefused(f"process adds the columns {', '.join(taken)}, which are there already")

    parameters = portable_parameters(handler, batch=batch)

    def bind() -> Binding:
        return bind_handler(
            handler,
            group=group,
            batch_size=batch_size,
            middleware=middleware,
            serializer=serializer,
            parameters=parameters,
        )

    bind()  # raises errors on the driver
    make_portable(parameters)
    return frame.mapInArrow(_judging(bind, workers), _schema(frame))


def _schema(frame: DataFrame) -> Any:
    from pyspark.sql.types import (  # noqa: PLC0415  # only where Spark is
        BooleanType,
        DoubleType,
        StringType,
        StructField,
        StructType,
    )

    return StructType(
        [
            *frame.schema.fields,
            StructField("outcome", StringType(), nullable=False),
            StructField("error", StringType()),
            StructField("retryAfter", DoubleType()),
            StructField("isHeld", BooleanType(), nullable=False),
        ]
    )


def _judging(
    bind: Callable[[], Binding], workers: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def orbitmq_process(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        binding = bind()
        with (
            # One loop for all batches of the task: handlers may keep clients that belong to it.
            contextlib.closing(asyncio.Runner()) as runner,
            ThreadPoolExecutor(workers, thread_name_prefix="orbitmq-process") as pool,
        ):
            for batch in batches:
                messages = messages_of(batch)
                readable, failures = _readable(batch, messages)
                calls = _calls(binding, readable)
                while calls:
                    if binding.is_async:
                        outcomes = runner.run(_all(binding, calls, workers))
                    else:
                        outcomes = list(
                            pool.map(lambda some: binding.call(some[0].queue, some), calls)
                        )
                    failures |= _failures(calls, outcomes)
                    calls = _again(outcomes, failures)
                yield _with_outcomes(batch, messages, failures)

    assert orbitmq_process.__name__ == HANDLER_IN_PLAN  # noqa: S101  # a name in two places
    return orbitmq_process


def _readable(
    batch: pa.RecordBatch, messages: Sequence[ReceivedMessage]
) -> tuple[list[ReceivedMessage], dict[int, Failure]]:
    """The messages with a body, which is null where it is damaged, and failures of the others."""
    is_readable = batch.column("body").is_valid().to_pylist()
    pairs = list(zip(messages, is_readable, strict=True))
    return (
        [message for message, is_good in pairs if is_good],
        {id(message): _DAMAGED for message, is_good in pairs if not is_good},
    )


def _failures(
    calls: Sequence[Sequence[ReceivedMessage]], outcomes: Sequence[Outcome]
) -> dict[int, Failure]:
    """The failures of messages, by identity."""
    failures: dict[int, Failure] = {}
    for some, outcome in zip(calls, outcomes, strict=True):
        outcome = _without_order(outcome, some)
        failure = outcome.failure or Failure()
        failures.update((id(message), failure) for message in outcome.tried)
        for message in outcome.held:
            failures[id(message)] = outcome.held_failure
    return failures


def _again(
    outcomes: Sequence[Outcome], failures: dict[int, Failure]
) -> list[Sequence[ReceivedMessage]]:
    """Calls without the messages that did not match: the others of their batch were not called."""
    calls = [
        each.held
        for each in outcomes
        if each.held and each.failure is not None and each.failure.is_mismatch
    ]
    for some in calls:
        for message in some:
            del failures[id(message)]
    return calls


async def _all(
    binding: Binding, calls: Sequence[Sequence[ReceivedMessage]], workers: int
) -> list[Outcome]:
    turns = asyncio.Semaphore(workers)

    async def call(some: Sequence[ReceivedMessage]) -> Outcome:
        async with turns:
            return await binding.call_async(some[0].queue, some)

    return await asyncio.gather(*map(call, calls))


def _calls(
    binding: Binding, messages: Sequence[ReceivedMessage]
) -> list[Sequence[ReceivedMessage]]:
    """Messages by call of the handler: neighbours of one queue, at most the batch size."""
    size = binding.batch_size
    found: list[Sequence[ReceivedMessage]] = []
    for _, neighbours in groupby(messages, key=lambda message: message.queue):
        some = list(neighbours)
        found += [some[begin : begin + size] for begin in range(0, len(some), size)]
    return found


def _without_order(outcome: Outcome, messages: Sequence[ReceivedMessage]) -> Outcome:
    if outcome.verdict in (Verdict.COMMIT, Verdict.ROLLBACK):
        reason = f"{outcome.verdict.name} is for consumption in order"
        return Outcome(Verdict.RETRY, messages, Failure(reason=reason))
    return outcome


def _with_outcomes(
    batch: pa.RecordBatch, messages: Sequence[ReceivedMessage], failures: dict[int, Failure]
) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    found = [failures.get(id(message)) for message in messages]
    outcomes = [
        OK if failure is None else DEAD_LETTER if failure.level == DEAD else RETRY
        for failure in found
    ]
    reasons = [None if failure is None else _text(failure.reason) for failure in found]
    pauses = [None if failure is None else failure.pause for failure in found]
    are_held = [failure is not None and failure.is_held for failure in found]
    fields = [
        *batch.schema,
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("retryAfter", pa.float64()),
        pa.field("isHeld", pa.bool_(), nullable=False),
    ]
    columns = [
        *batch.columns,
        pa.array(outcomes, pa.string()),
        pa.array(reasons, pa.string()),
        pa.array(pauses, pa.float64()),
        pa.array(are_held, pa.bool_()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _text(reason: object) -> str | None:
    """A handler's reason as text for a column."""
    if reason is None:
        return None
    text = reason if isinstance(reason, str) else text_of(reason)
    return text.encode("utf-8", "replace").decode()


# Invariant: every use of the rows of `judged` sees the same verdicts, or fails. `persist` does not
# guarantee this: blocks that are lost with an executor are silently computed again. A local
# checkpoint has no lineage, so a lost block fails the action and Spark repeats the whole batch.
# Attempts of one task can leave different blocks only with speculation, which is refused.


@contextlib.contextmanager
def judged(
    frame: DataFrame,
    handler: HandlerFunction,
    *,
    group: str = "spark",
    batch: bool | None = None,
    batch_size: int | None = None,
    workers: int = 1,
    middleware: Sequence[object] = (),
    serializer: Serializing = None,
) -> Iterator[DataFrame]:
    """The rows of `process` with the verdicts of one call of the handler, until the `with` ends.

    The handler is called immediately, for all rows. Later uses of the rows fail when Spark has lost
    some of them: let the batch fail, so that it is repeated.
    """
    if frame.isStreaming:
        raise RowsRefused("judged is for the batches of a stream: use it inside of foreachBatch")
    if str(frame.sparkSession.conf.get("spark.speculation", "false")).lower() == "true":
        raise SettingError(
            "spark.speculation must be false for judged: it runs a task twice at the same time, "
            "and the two may judge a row differently"
        )
    fresh = process(
        frame,
        handler,
        group=group,
        batch=batch,
        batch_size=batch_size,
        workers=workers,
        middleware=middleware,
        serializer=serializer,
    )
    rows = fresh.localCheckpoint(eager=True)
    try:
        yield rows
    finally:
        release_checkpoint(rows)


def check_kept(frame: DataFrame) -> None:
    """Refuse rows whose handler would be called again; raises `RowsRefused`."""
    if HANDLER_IN_PLAN in analyzed_plan(frame):
        raise RowsRefused(
            "these rows come directly from `process`, whose handler is called again by every "
            "action, also after persist() when a block is lost; a row that fails in one call and "
            "not in the next would be lost. Take the rows from `with judged(...) as rows:`"
        )


# Rows of the `rocketmq` source as messages.

#: The columns that identify a message.
PLACE: Final = ("topic", "brokerName", "queueId", "queueOffset")
#: The columns that a message needs.
REQUIRED: Final = (*PLACE, "body")
#: The columns that are used if present.
OPTIONAL: Final = (
    "msgId",
    "tags",
    "keys",
    "flag",
    "reconsumeTimes",
    "bornTimestamp",
    "storeTimestamp",
    "properties",
)
_TIMES: Final = ("bornTimestamp", "storeTimestamp")
#: No physical offset: it must never be that of another message.
NO_PLACE: Final = -1


def messages_of(batch: pa.RecordBatch, group: str | None = None) -> list[ReceivedMessage]:
    """A message for every row, in order. Raises `RowsRefused` for a row that names no message."""
    for name in PLACE:
        if batch.column(name).null_count:
            row = batch.column(name).is_null().index(True).as_py()
            raise RowsRefused(
                f"column {name} is null in row {row} of a batch of {batch.num_rows}: that row is "
                "no message; leave such rows out, as an outer join makes them"
            )
    names = [name for name in (*REQUIRED, *OPTIONAL) if name in batch.schema.names]
    columns = [
        _millis(batch.column(name)) if name in _TIMES else batch.column(name).to_pylist()
        for name in names
    ]
    return [
        _message(dict(zip(names, values, strict=True)), group)
        for values in zip(*columns, strict=True)
    ]


def _message(row: Mapping[str, Any], group: str | None) -> ReceivedMessage:
    queue = Queue(row["topic"], row["brokerName"], row["queueId"])
    stored = StoredMessage.build(
        topic=queue.topic,
        stored_body=row["body"] or b"",
        properties=_properties(row),
        queue_id=queue.id,
        queue_offset=row["queueOffset"],
        physical_offset=NO_PLACE,
        flag=row.get("flag") or 0,
        born_ms=row.get("bornTimestamp") or 0,
        store_ms=row.get("storeTimestamp") or 0,
        reconsume_times=row.get("reconsumeTimes") or 0,
    )
    return ReceivedMessage(stored, queue, group)


def _properties(row: Mapping[str, Any]) -> dict[str, str | None]:
    """The properties of a row, or those that other columns imply."""
    if (given := row.get("properties")) is not None:
        return dict(given)
    named = {TAGS: row.get("tags"), KEYS: row.get("keys"), UNIQ_KEY: row.get("msgId")}
    return {name: value for name, value in named.items() if value}


def _millis(column: pa.Array) -> list[int | None]:
    """Times as milliseconds; not through dates, which cannot express the first and last times."""
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    if not pa.types.is_timestamp(column.type):
        return [None] * len(column)
    exact = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64())
    return [None if micros is None else micros // 1000 for micros in exact.to_pylist()]


def check_columns(frame: DataFrame, wanted: Sequence[str], *, optional: Sequence[str] = ()) -> None:
    """Refuse a DataFrame with missing columns or wrong types, before a task fails with them.

    Raises `RowsRefused`. Other columns are not checked.
    """
    if missing := [name for name in wanted if name not in frame.columns]:
        raise RowsRefused(
            f"the DataFrame has no column {', '.join(missing)}; it must have those of the "
            f"rocketmq source: {', '.join(wanted)}"
        )
    from pyspark.sql.types import StringType  # noqa: PLC0415  # only where Spark is

    from orbitmq.spark.source import COLUMNS  # noqa: PLC0415  # only where Spark is

    for column in frame.schema.fields:
        if column.name not in wanted and column.name not in optional:
            continue
        kind = COLUMNS.get(column.name, StringType())  # `outcome` is a text
        if not _fits(column.dataType, kind):
            raise RowsRefused(
                f"column {column.name} must be {kind.simpleString()}, it is "
                f"{column.dataType.simpleString()}; keep what the rocketmq source gave, and put "
                "what is made of it into another column"
            )


def _fits(given: DataType, kind: DataType) -> bool:
    """Whether a column may have a type: any integer or text, and any type for a time.

    Texts may have a collation. A message has no time where the column has another type.
    """
    from pyspark.sql.types import (  # noqa: PLC0415  # only where Spark is
        IntegralType,
        MapType,
        StringType,
        TimestampType,
    )

    if isinstance(kind, MapType):
        return (
            isinstance(given, MapType)
            and _fits(given.keyType, kind.keyType)
            and _fits(given.valueType, kind.valueType)
        )
    for family in (IntegralType, StringType):
        if isinstance(kind, family):
            return isinstance(given, family)
    return isinstance(kind, TimestampType) or given == kind
