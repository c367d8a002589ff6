"""Streams that run while they are measured."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.load.sparkstage import Filled, SparkStage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

#: For anything that a stream does once it runs.
_DEADLINE = 60.0
_POLL = 0.02
#: Batches that start everything and are not counted.
_COLD = 3


@dataclass(frozen=True, slots=True)
class Window:
    """What a stream did between the ends of two batches."""

    rows: int
    seconds: float
    lag: float  #: messages behind at the end of a batch, median


class Streaming:
    """A stream of a topic into which messages arrive at a steady pace."""

    def __init__(self, stage: SparkStage, body_size: int, rate: float, *, trigger: float) -> None:
        self._stage = stage
        self._body_size = body_size
        self._rate = rate
        self._trigger = trigger
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        stage = self._stage
        with ExitStack() as stack:
            self._topic = stage.new_topic()
            stack.enter_context(stage.fed(self._topic, self._body_size, self._rate))
            stream = stage.spark.readStream.format("rocketmq").options(
                **stage.source(self._topic), startingOffsets="latest"
            )
            writer = stream.load().writeStream.format("noop")
            self._query = stack.enter_context(
                running(stage, writer.trigger(processingTime=f"{self._trigger} seconds"))
            )
            self._seen = -1
            self.batches(_COLD)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def batches(self, count: int) -> Window:
        """The next batches that have something in them, from the end of one before them on."""
        first, began, lag = self._next_batch()
        last, ended = first, began
        lags = [lag]
        for _ in range(count):
            last, ended, lag = self._next_batch()
            lags.append(lag)
        return Window(last - first, ended - began, statistics.median(lags[1:]))

    def _next_batch(self) -> tuple[int, float, int]:
        """Wait for the end of a batch: offsets taken up to there, when, and how many are not."""
        from orbitmq.spark.options import from_json  # noqa: PLC0415  # an extra

        progress = _wait_for(self._query, self._new_progress)
        now = time.perf_counter()
        self._seen = progress.batchId
        taken = from_json(json.loads(progress.sources[0].endOffset))
        ends = self._stage.planner.ends(taken).or_raise()
        return sum(taken.values()), now, sum(ends.values()) - sum(taken.values())

    def _new_progress(self) -> Any:
        progress = self._query.lastProgress
        is_new = progress is not None and progress.batchId > self._seen and progress.numInputRows
        return progress if is_new else None


@contextmanager
def one_by_one(stage: SparkStage, count: int) -> Iterator[Callable[[], float]]:
    """A stream that gets single messages; measures how long they take to arrive, in seconds.

    From the call that sends one to the row that `foreachBatch` has collected, median.
    """
    from orbitmq import Message, Producer  # noqa: PLC0415

    topic = stage.new_topic()
    with Producer("bench-singles", name_server=stage.cluster.name_server) as producer:
        producer.send(Message(topic, b"makes the topic"))
        stream = stage.spark.readStream.format("rocketmq").options(
            **stage.source(topic), startingOffsets="earliest"
        )

        def add() -> None:
            producer.send(Message(topic, b"%032x" % time.perf_counter_ns()))

        with _arrivals(stage, stream.load(), add, already=1) as one:
            yield lambda: statistics.median(one() for _ in range(count))


@contextmanager
def ready_rows(stage: SparkStage, filled: Filled, count: int) -> Iterator[Callable[[], float]]:
    """The same of single rows of a source that has them at once.

    From the call that says that there is one more to the row that `foreachBatch` has collected.
    """
    there = Path(stage.checkpoint()) / "there"
    there.write_text("0")
    numbers = itertools.count(1)

    def add() -> None:
        fresh = there.with_suffix(".new")
        fresh.write_text(str(next(numbers)))
        fresh.replace(there)

    stream = stage.spark.readStream.format("ready").options(
        file=str(filled.sample), there=str(there)
    )
    with _arrivals(stage, stream.load(), add, already=0) as one:
        yield lambda: statistics.median(one() for _ in range(count))


@contextmanager
def _arrivals(
    stage: SparkStage, stream: DataFrame, add: Callable[[], None], *, already: int
) -> Iterator[Callable[[], float]]:
    """A stream that gets single rows; measures how long one takes to be collected, in seconds."""
    arrived: list[float] = []
    news = threading.Condition()
    chance = random.Random(1)

    def handle(frame: DataFrame, _: int) -> None:
        rows = frame.select("body").collect()
        with news:
            arrived.extend([time.perf_counter()] * len(rows))
            news.notify_all()

    def until(count: int) -> None:
        with news:
            if not news.wait_for(lambda: len(arrived) >= count, _DEADLINE):
                raise TimeoutError(f"a row did not arrive within {_DEADLINE:g} s")

    def one() -> float:
        before = len(arrived)
        began = time.perf_counter()
        add()
        until(before + 1)
        with news:
            # The next one comes at any moment of Spark's polling, not right behind.
            news.wait_for(lambda: False, chance.uniform(0.1, 0.2))
        return arrived[before] - began

    with running(stage, stream.writeStream.foreachBatch(handle)):
        until(already)
        for _ in range(_COLD):
            one()
        yield one


@contextmanager
def tiny_batches(stage: SparkStage, filled: Filled, count: int) -> Iterator[Callable[[], float]]:
    """Measures batches of one message, one right after the other, in seconds."""

    def measure() -> float:
        stream = stage.spark.readStream.format("rocketmq").options(
            nameServer=stage.cluster.name_server,
            assign=f'{{"{filled.topic}": ["broker-a:0"]}}',
            startingOffsets="earliest",
            maxOffsetsPerTrigger="1",
        )
        with running(stage, stream.load().writeStream.format("noop")) as query:
            return _median_batch(query, count)

    yield measure


def until_the_end(stage: SparkStage, stream: DataFrame) -> int:
    """Run a query that takes what is there; how many rows it took."""
    writer = stream.writeStream.format("noop").trigger(availableNow=True)
    with running(stage, writer) as query:
        query.awaitTermination()
        return sum(each.numInputRows for each in query.recentProgress)


@contextmanager
def running(stage: SparkStage, writer: DataStreamWriter) -> Iterator[StreamingQuery]:
    query = writer.option("checkpointLocation", stage.checkpoint()).start()
    try:
        yield query
    finally:
        query.stop()


def _median_batch(query: StreamingQuery, count: int) -> float:
    """Seconds that a batch takes, from its planning to its entry in the log."""

    def enough() -> list[float] | None:
        counted = [each for each in query.recentProgress if each.numInputRows][_COLD:]
        times = [each.durationMs["triggerExecution"] / 1000 for each in counted]
        return times[:count] if len(times) >= count else None

    times: list[float] = _wait_for(query, enough)
    return statistics.median(times)


def _wait_for(query: StreamingQuery, look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + _DEADLINE
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the stream was not as far within {_DEADLINE:g} s")
        # Raises what ended the query, if that is what happens.
        if query.awaitTermination(_POLL):  # type: ignore[arg-type]  # parts of seconds will do
            raise RuntimeError("the stream has ended")
    return found
