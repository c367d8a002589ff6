"""A batch as a Spark job: one row of a number for each task, which becomes rows of reports.

`spark.range` with as many partitions as numbers is the one way to say what runs in which task that
works in classic and in Connect sessions alike.

Spark tries a task again whose executor it has lost. Such an executor may only be out of reach, and
its handlers at work: in order, a second attempt therefore handles nothing. It says that its queues
are to wait until the first one begins no calls any more. What goes wrong in a task is therefore not
left to Spark, which would try it again as well, and have the second attempt succeed: the first one
tells it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Final

from orbitmq.spark.consuming.reports import PieceReport
from orbitmq.spark.workerends import cause_first

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from orbitmq.spark.consuming.definition import PackedDefinition
    from orbitmq.spark.consuming.planning import Piece

_SCHEMA: Final = (
    "place INT, finished BIGINT, beyond ARRAY<BIGINT>, done BIGINT, retried BIGINT, dead BIGINT, "
    "kept BIGINT, held BIGINT, failures MAP<INT, BIGINT>, attempts MAP<BIGINT, INT>, "
    "pause DOUBLE, error STRING, reset_to BIGINT, failed STRING, is_put_off BOOLEAN, "
    "missing BIGINT, gaps ARRAY<BIGINT>, gap_seconds ARRAY<DOUBLE>"
)
_COLUMNS: Final = tuple(field.name for field in fields(PieceReport))
#: In order: how long the first task of a process may take to get handlers and connections ready. A
#: lost attempt may begin calls for that much longer.
READY: Final = 10.0


def run_batch(
    spark: SparkSession,
    packed: PackedDefinition,
    tasks: Sequence[Sequence[tuple[int, Piece]]],
    seconds: float,
    *,
    is_ordered: bool = False,
) -> list[PieceReport]:
    """Have the pieces of each task handled. Raises what Spark raises when the job fails.

    In order, what went wrong in a task is in the reports of its pieces instead.
    """
    numbers = spark.range(0, len(tasks), 1, len(tasks))
    rows = numbers.mapInArrow(
        _handling(packed, tasks, seconds, is_ordered=is_ordered), _SCHEMA
    ).collect()
    return [PieceReport(**row.asDict()) for row in rows]


def parallelism(spark: SparkSession) -> int:
    """How many tasks a session runs at once."""
    # A Connect session has no context. There, it is the partitions of a range of its own making.
    context = getattr(spark, "sparkContext", None)
    if context is not None:
        return max(1, int(context.defaultParallelism))
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # as everybody calls them

    return max(1, spark.range(1000).select(F.spark_partition_id()).distinct().count())


def _handling(
    packed: PackedDefinition,
    tasks: Sequence[Sequence[tuple[int, Piece]]],
    seconds: float,
    *,
    is_ordered: bool,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    tasks = tuple(tuple(each) for each in tasks)

    def handle(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with cause_first():
            yield from reports(batches)

    def reports(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from orbitmq.spark.consuming.kept import worker_for  # noqa: PLC0415  # tasks only

        for batch in batches:
            for number in batch.column(0).to_pylist():
                if not is_ordered:
                    yield _rows(worker_for(packed).handle(tasks[number], seconds))
                elif _attempt() > 0:
                    yield _rows(put_off(tasks[number], seconds + READY))
                else:
                    yield _rows(_in_order(packed, tasks[number], seconds))

    return handle


def _in_order(
    packed: PackedDefinition, pieces: Sequence[tuple[int, Piece]], seconds: float
) -> list[PieceReport]:
    """Handle pieces, or say why not; what ends this process is all that Spark hears of."""
    from orbitmq.spark.consuming.kept import worker_for  # noqa: PLC0415  # tasks only

    latest = time.monotonic() + seconds + READY
    try:
        worker = worker_for(packed)
        left = latest - time.monotonic()
        if left > 0:
            return worker.handle(pieces, min(seconds, left))
    except Exception as error:  # noqa: BLE001
        # Whatever handlers raise when they are unpacked, and mistakes of ours.
        return _failed(pieces, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    took = f"more than {seconds + READY:g} s"
    return _failed(pieces, f"it took {took} to get the handlers ready, and no call was begun")


def _failed(pieces: Sequence[tuple[int, Piece]], why: str) -> list[PieceReport]:
    return [
        PieceReport(place=place, finished=piece.range.start, failed=why) for place, piece in pieces
    ]


def _attempt() -> int:
    """How often the task that runs was begun before."""
    from pyspark import TaskContext  # noqa: PLC0415  # tasks only

    context = TaskContext.get()
    return 0 if context is None else int(context.attemptNumber())


def put_off(pieces: Iterable[tuple[int, Piece]], seconds: float) -> list[PieceReport]:
    """Say that pieces are to wait until an attempt that may be lost begins no calls any more."""
    # It began earlier than now, so its time is up earlier as well.
    return [
        PieceReport(
            place=place,
            finished=piece.range.start,
            pause=seconds,
            error="an attempt to handle it was lost, and may still be at work",
            is_put_off=True,
        )
        for place, piece in pieces
    ]


def _rows(reports: Sequence[PieceReport]) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    types = {
        "beyond": pa.list_(pa.int64()),
        "place": pa.int32(),
        "failures": pa.map_(pa.int32(), pa.int64()),
        "attempts": pa.map_(pa.int64(), pa.int32()),
        "pause": pa.float64(),
        "error": pa.string(),
        "failed": pa.string(),
        "is_put_off": pa.bool_(),
        "gaps": pa.list_(pa.int64()),
        "gap_seconds": pa.list_(pa.float64()),
    }
    schema = pa.schema([(name, types.get(name, pa.int64())) for name in _COLUMNS])
    rows = [
        {name: getattr(report, name) for name in _COLUMNS}
        | {
            "failures": sorted(report.failures.items()),
            "attempts": sorted(report.attempts.items()),
        }
        for report in reports
    ]
    return pa.RecordBatch.from_pylist(rows, schema=schema)
