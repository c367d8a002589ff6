"""Topics as DataFrames: how much of what Spark can take from any Python source arrives.

A source that yields record batches made beforehand is the ceiling: Spark's own path with no network
and no decoding. On a small machine the broker takes its share of the same cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.load.sparkstage import SparkStage
from benchmarks.runner import Bench, Clock, Prepare, Sample, Scale, Work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_STAGE = SparkStage()
_CEILING = "a source of record batches made beforehand"
_KIB = 1024
#: Other columns of a message, in bytes.
_BESIDES = 110
#: Seconds for a batch of one message.
_WANTED_TRIGGER = 0.1
_TRIGGERS = 40


def _rows(scale: Scale, body_size: int) -> int:
    return scale.megabytes * 1024 * _KIB // (body_size + _BESIDES) // 4 * 4


def _taken(frame: DataFrame, rows: int) -> int:
    """Have every row go all the way, to nowhere."""
    frame.write.format("noop").mode("overwrite").save()
    return rows


def _reading(body_size: int, kind: str = "batches") -> Prepare:
    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        rows = _rows(scale, body_size)
        topic = _STAGE.topic(rows, body_size)

        def candidate() -> int:
            return _taken(_STAGE.read(topic), rows)

        def floor() -> int:
            return _taken(_STAGE.ready(rows, body_size, kind), rows)

        candidate(), floor()
        yield candidate, floor

    return prepare


def _writing(body_size: int) -> Prepare:
    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        rows = _rows(scale, body_size) // 4
        frame = _STAGE.ready(rows, body_size).select("body", "tags", "keys")

        def candidate() -> int:
            _STAGE.write(frame, f"written-{body_size}")
            return rows

        candidate()
        yield candidate, lambda: _taken(frame, rows)

    return prepare


@contextmanager
def _triggers(scale: Scale) -> Iterator[tuple[Work, Work]]:
    topic = _STAGE.topic(_rows(scale, 100), 100)

    def run() -> Sample:
        """Batches of one message each, one after the other."""
        reader = _STAGE.spark.readStream.format("rocketmq").options(
            nameServer=_STAGE.name_server,
            assign=f'{{"{topic}": ["broker-a:0"]}}',
            startingOffsets="earliest",
            maxOffsetsPerTrigger="1",
        )
        with tempfile.TemporaryDirectory() as folder:
            query = (
                reader.load()
                .writeStream.format("noop")
                .option("checkpointLocation", folder)
                .start()
            )
            try:
                times = _batch_times(query)
            finally:
                query.stop()
        return Sample(len(times), sum(times), sum(times))

    run()
    yield run, lambda: Sample(_TRIGGERS, _TRIGGERS * _WANTED_TRIGGER, _TRIGGERS * _WANTED_TRIGGER)


def _batch_times(query: object) -> list[float]:
    """Seconds of the batches of a query, without the first, which starts everything."""
    deadline = time.monotonic() + 120
    pause = 0.05
    while True:
        progress = list(query.recentProgress)  # type: ignore[attr-defined]
        times = [each.durationMs["triggerExecution"] / 1000 for each in progress[5:]]
        if len(times) >= _TRIGGERS:
            return times[:_TRIGGERS]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(times)} of {_TRIGGERS} batches within 120 s")
        query.awaitTermination(pause)  # type: ignore[attr-defined]


def _line(
    name: str,
    prepare: Prepare,
    compared_with: str,
    *,
    target: float | None = None,
    note: str = "",
) -> Bench:
    return Bench(
        name=name,
        room="spark",
        unit="rows/s",
        compared_with=compared_with,
        prepare=prepare,
        clock=Clock.WALL,
        rounds=5,
        once_per_round=True,
        target=target,
        note=note,
        stage=_STAGE,
    )


BENCHES: tuple[Bench, ...] = (
    _line("batch read, 1 KiB, local[2]", _reading(_KIB), _CEILING, target=0.7),
    _line("batch read, 100 B, local[2]", _reading(100), _CEILING, target=0.7),
    _line("batch read beside tuples, 1 KiB", _reading(_KIB, "tuples"), "the same rows as tuples"),
    _line(
        "write, 100 B, local[2]",
        _writing(100),
        "the same rows to nowhere",
        note="stored by the broker when it ends",
    ),
    Bench(
        name="a batch of one message",
        room="spark",
        unit="ms",
        compared_with="the 100 ms that are wanted",
        prepare=_triggers,
        clock=Clock.WALL,
        rounds=3,
        once_per_round=True,
        time_for=1,
        unit_factor=1000.0,
        target=1.0,
        stage=_STAGE,
    ),
)
