"""Topics as DataFrames: how much of what Spark can take from any Python source arrives.

A source that yields record batches made beforehand is the ceiling: Spark's own path with no network
and no decoding, for the very rows that the topic has. On a small machine the broker takes its share
of the same cores, ours as well as Kafka's.

The ceiling spares its workers the same as ours does (`orbitmq.spark.internals`). It has no
target: how near a read comes to it says what is left to gain, and depends on how many rows share
the planning of a job, which both need. Targets are a read's speed beside the same rows as tuples,
which is what Spark's Python sources yield unless they know Arrow, and its rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from benchmarks.beside import NO_ROUNDS, again
from benchmarks.load.kafka import KAFKA
from benchmarks.load.sparkpaced import handled, paced, percentile
from benchmarks.load.sparkstage import Filled, SparkStage
from benchmarks.load.sparkstreams import (
    Streaming,
    one_by_one,
    ready_rows,
    tiny_batches,
    until_the_end,
)
from benchmarks.runner import (
    LEAST_ROUNDS,
    Bench,
    Clock,
    NoMoreRounds,
    NotAtHand,
    Prepare,
    Sample,
    Scale,
    Work,
)
from benchmarks.warming import warm_up

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_STAGE = SparkStage()
_CEILING = "a source of record batches made beforehand"
_CEILING_NOTE = (
    "a ceiling without network, broker and decoding: the ratio is the share of what Spark can take "
    "from any Python source, with planning, which both need"
)
_KAFKA = "Spark's own Kafka source (connector 4.2.0, broker 3.9.2), the same messages"
_KAFKA_SINK = "Spark's own Kafka sink (connector 4.2.0, broker 3.9.2), the same rows"
_SINK_NOTE = (
    "bodies alone; both with their defaults: Kafka's producer waits for all replicas, "
    "of which there is one, and is idempotent; neither compresses; ours gives every row an id that "
    "stays the same when its batch is repeated"
)
_DEFAULTS_NOTE = "default columns of both: ours with properties, Kafka's without headers"
_WITH_HEADERS = (
    "all columns; properties are headers there, with includeHeaders, which is off by default"
)
_KIB = 1024
#: Other columns of a message, in bytes.
_BESIDES = 110
#: Rows of 1 KiB in a second, of a batch read on two cores.
_WANTED_ROWS = 150_000.0
#: Planning a read takes some tenths of a second, whatever is read: so much that it hardly counts.
_TIMES = 3
#: Of lines that are medians of many batches by themselves.
_ROUNDS = 3
#: Of reads beside the ceiling. A round takes a second, in which Java collects garbage and compiles
#: when it likes: the ratios of single rounds lie between 0.5 and 1, and a median of three says
#: nothing.
_ROUNDS_OF_READS = 9
#: Seconds for a batch of few messages.
_WANTED_TRIGGER = 0.1
#: Messages of 1 KiB that arrive in a second, at a trigger of a second.
_ARRIVING = 40_000
#: Messages in a second, one by one, and for how many seconds they come.
_PACE, _WINDOW = 200.0, 10.0
_PACE_OF_HANDLERS = 1000.0
#: Seconds from send to a handler that are wanted: the median, and the 99th percentile.
_WANTED_MEDIAN, _WANTED_P99 = 0.02, 0.1
#: What Spark's Kafka source gives unless it is asked for headers, with the names of ours.
_WITHOUT_PROPERTIES = (
    "keys string, body binary, topic string, queueId int, queueOffset bigint, "
    "storeTimestamp timestamp"
)


def _rows(scale: Scale, body_size: int) -> int:
    return _TIMES * scale.megabytes * 1024 * _KIB // (body_size + _BESIDES + _KIB // 2)


def _topic(scale: Scale, body_size: int) -> Filled:
    return _STAGE.at(scale).topic(_rows(scale, body_size), body_size)


def _taken(frame: DataFrame, rows: int) -> int:
    """Have every row go all the way, to nowhere."""
    frame.write.format("noop").mode("overwrite").save()
    return rows


def _warm_up(scale: Scale, *works: Callable[[], int]) -> None:
    """Java gets faster with what it does often, for either side: until neither does any more."""

    def slot() -> float:
        began = time.perf_counter()
        rows = sum(work() for work in works)
        return rows / (time.perf_counter() - began)

    warm_up(slot, scale.warming)


def _reading(body_size: int) -> Prepare:
    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        filled = _topic(scale, body_size)

        def candidate() -> int:
            return _taken(_STAGE.read(filled.topic), filled.rows)

        def floor() -> int:
            return _taken(_STAGE.ready(filled), filled.rows)

        _warm_up(scale, candidate, floor)
        yield candidate, floor

    return prepare


@contextmanager
def _reading_beside_tuples(scale: Scale) -> Iterator[tuple[Work, Work]]:
    filled = _topic(scale, _KIB)
    # Tuples are slow: a few are enough to see it.
    rows = filled.rows // 4

    def candidate() -> int:
        return _taken(_STAGE.read(filled.topic, toOffset=str(filled.rows // 16)), rows)

    def floor() -> int:
        return _taken(_STAGE.ready(filled, rows, "tuples"), rows)

    _warm_up(scale, candidate, floor)
    yield candidate, floor


def _reading_beside_kafka(body_size: int, *, with_properties: bool) -> Prepare:
    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        if scale.is_quick and not (with_properties and body_size == _KIB):
            raise NotAtHand("left to the full run")
        filled = _topic(scale, body_size)
        address, topic = _STAGE.kafka_topic(filled)
        schema = None if with_properties else _WITHOUT_PROPERTIES

        def candidate() -> int:
            return _taken(_STAGE.read(filled.topic, schema), filled.rows)

        def floor() -> int:
            options = {"kafka.bootstrap.servers": address, "subscribe": topic}
            if with_properties:
                options["includeHeaders"] = "true"
            return _taken(_STAGE.spark.read.format("kafka").options(**options).load(), filled.rows)

        _warm_up(scale, candidate, floor)
        yield candidate, floor

    return prepare


def _writing(body_size: int) -> Prepare:
    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        filled = _topic(scale, body_size)
        rows = filled.rows // 8
        frame = _STAGE.ready(filled, rows).select("body", "tags", "keys")
        topic = _STAGE.new_topic()

        def candidate() -> int:
            _STAGE.write(frame, topic)
            return rows

        def floor() -> int:
            return _taken(frame, rows)

        _warm_up(scale, candidate, floor)
        yield candidate, floor

    return prepare


def _writing_beside_kafka(body_size: int) -> Prepare:
    @contextmanager
    def prepare(scale: Scale) -> Iterator[tuple[Work, Work]]:
        filled = _topic(scale, body_size)
        # A line of a quick run may take some seconds, and one write of many is half of that.
        rows = filled.rows // (16 if scale.is_quick else 4)
        ready = _STAGE.ready(filled, rows)
        bodies, values = ready.select("body"), ready.selectExpr("body as value")
        topic = _STAGE.new_topic()

        def candidate() -> int:
            _STAGE.write(bodies, topic)
            return rows

        def floor() -> int:
            _STAGE.write_to_kafka(values, topic)
            return rows

        floor()  # where it cannot be had, nothing else need be done
        _warm_up(scale, candidate, floor)
        yield candidate, floor

    return prepare


@contextmanager
def _available_now(scale: Scale) -> Iterator[tuple[Work, Work]]:
    filled = _topic(scale, _KIB)
    _, topic = _STAGE.kafka_topic(filled)

    def candidate() -> int:
        source = {**_STAGE.source(filled.topic), "startingOffsets": "earliest"}
        return until_the_end(
            _STAGE, _STAGE.spark.readStream.format("rocketmq").options(**source).load()
        )

    def floor() -> int:
        source = {**_STAGE.kafka_source(topic), "startingOffsets": "earliest"}
        return until_the_end(
            _STAGE, _STAGE.spark.readStream.format("kafka").options(**source).load()
        )

    _warm_up(scale, candidate, floor)
    yield candidate, floor


Arriving = Callable[[], AbstractContextManager[list[float]]]


class _Arrivals:
    """Windows of messages at a steady pace, whose percentiles are looked at by two lines."""

    def __init__(self, ours: Arriving, theirs: Arriving) -> None:
        self._ways = ours, theirs
        self.kept: tuple[list[list[float]], list[list[float]]] = ([], [])

    @contextmanager
    def make(self, scale: Scale) -> Iterator[tuple[Work, Work]]:
        if scale.is_quick:
            raise NotAtHand("left to the full run")
        ours, theirs = self.kept
        ours.clear()
        theirs.clear()

        def candidate() -> Sample:
            with self._ways[0]() as times:
                ours.append(times)
            return _each(percentile(times, 50))

        def floor() -> Sample:
            with self._ways[1]() as times:
                theirs.append(times)
            return _each(percentile(times, 50))

        floor()
        candidate()
        ours.clear()
        theirs.clear()
        yield candidate, floor

    @contextmanager
    def look_again(self, _: Scale) -> Iterator[tuple[Work, Work]]:
        ours, theirs = self.kept
        if not ours or not theirs:
            raise NotAtHand(NO_ROUNDS)
        yield again(ours, _p99), again(theirs, _p99)

    def beside(self, percent: float, wanted: float) -> Prepare:
        """Our windows beside the time that is wanted."""

        @contextmanager
        def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
            if not (ours := self.kept[0]):
                raise NotAtHand(NO_ROUNDS)
            yield (
                again(ours, lambda times: _each(percentile(times, percent))),
                lambda: _each(wanted),
            )

        return prepare


def _p99(times: list[float]) -> Sample:
    return _each(percentile(times, 99))


@contextmanager
def _throughput(scale: Scale) -> Iterator[tuple[Work, Work]]:
    with Streaming(_STAGE.at(scale), _KIB, _ARRIVING, trigger=1.0) as streaming:

        def candidate() -> Sample:
            window = streaming.batches(2 if scale.is_quick else 4)
            _STAGE.lags.append(window.lag / _ARRIVING)
            return Sample(window.rows, window.seconds, window.seconds)

        yield candidate, lambda: Sample(_ARRIVING, 1.0, 1.0)


@contextmanager
def _lag(scale: Scale) -> Iterator[tuple[Work, Work]]:
    if not _STAGE.lags:
        # The line before, which has seen them, was not asked for.
        with _throughput(scale) as (stream, _):
            for _ in range(_ROUNDS):
                stream()
    lags = iter(_STAGE.lags)

    def seen() -> Sample:
        try:
            return _each(next(lags))
        except StopIteration:
            raise NoMoreRounds from None

    yield seen, lambda: _each(1.0)


@contextmanager
def _latency(scale: Scale) -> Iterator[tuple[Work, Work]]:
    filled = _topic(scale, 100)
    count = 5 if scale.is_quick else 20
    with one_by_one(_STAGE, count) as messages, ready_rows(_STAGE, filled, count) as rows:
        yield lambda: _each(messages()), lambda: _each(rows())


@contextmanager
def _triggers(scale: Scale) -> Iterator[tuple[Work, Work]]:
    filled = _topic(scale, 100)
    count = 10 if scale.is_quick else 40
    with tiny_batches(_STAGE, filled, count) as batches:
        yield lambda: _each(batches()), lambda: Sample(1, _WANTED_TRIGGER, _WANTED_TRIGGER)


def _each(seconds: float) -> Sample:
    return Sample(1, seconds, seconds)


def _line(
    name: str,
    prepare: Prepare,
    compared_with: str,
    *,
    target: float | None = None,
    least_figure: float | None = None,
    note: str = "",
    rounds: int | None = None,
) -> Bench:
    return Bench(
        name=name,
        room="spark",
        unit="rows/s",
        compared_with=compared_with,
        peer=KAFKA if "Kafka" in compared_with else None,
        prepare=prepare,
        clock=Clock.WALL,
        rounds=rounds or (_ROUNDS if name.startswith("stream") else 5),
        least_rounds=rounds or LEAST_ROUNDS,
        once_per_round=True,
        target=target,
        least_figure=least_figure,
        note=note,
        stage=_STAGE,
    )


def _time(
    name: str,
    unit: str,
    prepare: Prepare,
    compared_with: str,
    *,
    target: float | None = None,
    note: str = "",
) -> Bench:
    return Bench(
        name=name,
        room="spark",
        unit=unit,
        compared_with=compared_with,
        peer=KAFKA if "Kafka" in compared_with else None,
        prepare=prepare,
        clock=Clock.WALL,
        rounds=_ROUNDS,
        least_rounds=_ROUNDS,
        once_per_round=True,
        time_for=1,
        unit_factor=1000.0 if unit == "ms" else 1.0,
        target=target,
        note=note,
        stage=_STAGE,
    )


_ARRIVALS = _Arrivals(
    lambda: paced(_STAGE, _PACE, _WINDOW, with_kafka=False),
    lambda: paced(_STAGE, _PACE, _WINDOW, with_kafka=True),
)
_TO_HANDLERS = {
    mode: _Arrivals(
        lambda: handled(_STAGE, _PACE_OF_HANDLERS, _WINDOW, "consume"),
        lambda mode=mode: handled(_STAGE, _PACE_OF_HANDLERS, _WINDOW, mode),  # type: ignore[misc]
    )
    for mode in ("micro-batch", "real-time", "real-time to a topic")
}


def _to_handlers() -> Iterator[Bench]:
    """From send to a handler in a worker: ours beside Kafka's source, and beside what is wanted."""
    name = "send to handler on executors, 1,000 messages/s"
    for mode, arrivals in _TO_HANDLERS.items():
        peer = f"Spark's own Kafka source, {mode}"
        note = "one by one; consume beside foreach, or beside Kafka's sink and a consumer of it"
        looks = ("median", arrivals.make, None), ("99th percentile", arrivals.look_again, 1.0)
        for look, prepare, target in looks:
            line = f"{name}, beside Kafka's {mode}, {look}"
            yield _time(line, "ms", prepare, peer, target=target, note=note)
    ours = _TO_HANDLERS["micro-batch"]
    for look, percent, wanted in (("median", 50, _WANTED_MEDIAN), ("p99", 99, _WANTED_P99)):
        yield _time(
            f"{name}, {look}",
            "ms",
            ours.beside(percent, wanted),
            f"the {wanted * 1000:g} ms that are wanted",
            target=1.0,
            note="the same rounds as beside micro-batches",
        )


BENCHES: tuple[Bench, ...] = (
    _line(
        "batch read, 1 KiB, local[2]",
        _reading(_KIB),
        _CEILING,
        least_figure=_WANTED_ROWS,
        note=_CEILING_NOTE,
        rounds=_ROUNDS_OF_READS,
    ),
    _line(
        "batch read, 100 B, local[2]",
        _reading(100),
        _CEILING,
        note=_CEILING_NOTE,
        rounds=_ROUNDS_OF_READS,
    ),
    _line(
        "batch read beside tuples, 1 KiB",
        _reading_beside_tuples,
        "the same rows as tuples",
        target=2.5,
    ),
    _line(
        "batch read beside Kafka, 1 KiB",
        _reading_beside_kafka(_KIB, with_properties=True),
        _KAFKA,
        target=1.2,
        note=_WITH_HEADERS,
    ),
    _line(
        "batch read beside Kafka, 100 B",
        _reading_beside_kafka(100, with_properties=True),
        _KAFKA,
        target=1.2,
        note=_WITH_HEADERS,
    ),
    _line(
        "batch read beside Kafka, 1 KiB, no properties",
        _reading_beside_kafka(_KIB, with_properties=False),
        _KAFKA,
        note="the columns that it has without headers",
    ),
    _line(
        "write, 100 B, local[2]",
        _writing(100),
        "the same rows to nowhere",
        note="stored by the broker when it ends",
    ),
    _line(
        "write beside Kafka, 1 KiB",
        _writing_beside_kafka(_KIB),
        _KAFKA_SINK,
        target=1.0,
        note=_SINK_NOTE,
    ),
    _line(
        "write beside Kafka, 100 B",
        _writing_beside_kafka(100),
        _KAFKA_SINK,
        target=0.83,
        note=_SINK_NOTE,
    ),
    _line(
        "availableNow in one batch beside Kafka, 1 KiB",
        _available_now,
        _KAFKA,
        note=f"from the start of the query to its end; {_DEFAULTS_NOTE}",
    ),
    _line(
        "stream that keeps up, 1 KiB, trigger of 1 s",
        _throughput,
        f"{_ARRIVING:,} messages that arrive every second",
        target=0.95,
        note="1 is all of them: it keeps up; how fast it could be is not asked",
    ),
    _time(
        "its lag when a batch ends",
        "s",
        _lag,
        "the trigger of 1 s",
        note="messages that are not in a finished batch, in seconds of arrivals",
    ),
    _time(
        "from send to foreachBatch, median",
        "ms",
        _latency,
        "the same with a source that has its row at once",
        note="until the row is collected; the stream was idle",
    ),
    _time(
        "a batch of one message, median",
        "ms",
        _triggers,
        "the 100 ms that are wanted",
        target=1.0,
    ),
    _time(
        "send to foreachBatch beside Kafka, 200 messages/s, median",
        "ms",
        _ARRIVALS.make,
        _KAFKA,
        note="one by one; until foreachBatch has collected the row; triggers follow each other",
    ),
    _time(
        "send to foreachBatch beside Kafka, 200 messages/s, 99th percentile",
        "ms",
        _ARRIVALS.look_again,
        _KAFKA,
        target=1.0,
        note="the same rounds",
    ),
    *_to_handlers(),
)
