"""Messages one by one at a steady pace, and how long each takes to `foreachBatch` or a handler.

    python -m benchmarks.load.sparkpaced rocketmq|kafka ADDRESS TOPIC RATE

The process sends, each message with the time at which it was due as its body, until its input
ends. Says "ready" when the first is stored. The clock is one that all processes of a machine share.
"""

from __future__ import annotations

import inspect
import math
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from benchmarks.load.processes import Child
from benchmarks.runner import NotAtHand

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from benchmarks.load.sparkstage import SparkStage

#: Who calls handlers on executors: a group of ours, or Kafka's source in one of Spark's modes. What
#: real-time mode is made for is rows that stay in Java: to Kafka's sink, from which we read them.
Handling: TypeAlias = Literal["consume", "micro-batch", "real-time", "real-time to a topic"]

#: For the first rows of a stream, and for the last of a window.
_DEADLINE = 60.0
#: Seconds at the beginning that are not counted: classes are loaded, plans are compiled.
_COLD = 5.0


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


@contextmanager
def paced(
    stage: SparkStage, rate: float, seconds: float, *, with_kafka: bool
) -> Iterator[list[float]]:
    """Seconds from send to `foreachBatch`, of the messages of a window. Ends stream and sender."""
    topic = stage.new_topic()
    if with_kafka:
        kind, address, source = "kafka", stage.kafka.address, stage.kafka_source(topic)
    else:
        kind, address, source = "rocketmq", stage.cluster.name_server, stage.source(topic)
    arrivals = _Window()
    with ExitStack() as stack:
        sender = Child(*("-m", "benchmarks.load.sparkpaced", kind, address, topic, str(rate)))
        stack.enter_context(sender)
        sender.line()
        rows = (
            stage.spark.readStream.format(kind)
            .options(**source, startingOffsets="earliest")
            .load()
            .select("value" if with_kafka else "body")
        )
        query = (
            rows.writeStream.foreachBatch(arrivals.take)
            .option("checkpointLocation", stage.checkpoint())
            .start()
        )
        stack.callback(query.stop)
        arrivals.wait_for_first()
        time.sleep(_COLD)
        began = time.monotonic()
        time.sleep(seconds)
        times = arrivals.between(began, began + seconds)
    yield times


#: Seconds of a real-time batch, at whose end Spark writes its log; five at least.
_REAL_TIME = "30 seconds"
_TIMES = struct.Struct("dd")


@contextmanager
def handled(
    stage: SparkStage, rate: float, seconds: float, handling: Handling
) -> Iterator[list[float]]:
    """Seconds from send to a handler in Spark's workers, of the messages of a window."""
    is_ours = handling == "consume"
    topic = stage.new_topic() if is_ours else stage.new_kafka_topic()
    kind = "rocketmq" if is_ours else "kafka"
    address = stage.cluster.name_server if is_ours else stage.kafka.address
    journal = Path(stage.checkpoint()) / "times"
    with ExitStack() as stack:
        sender = Child(*("-m", "benchmarks.load.sparkpaced", kind, address, topic, str(rate)))
        stack.enter_context(sender)
        sender.line()
        start = _consume if is_ours else _query(handling)
        stack.callback(start(stage, topic, _handler(journal)))
        _wait_for(lambda: bool(_seen(journal)), "the first message")
        # Until what arrived meanwhile is handled.
        _wait_for(lambda: _lag(journal) < _COLD, "a handler that keeps up")
        time.sleep(_COLD)
        began = time.monotonic()
        time.sleep(seconds)
        ended = time.monotonic()
        _wait_for(lambda: time.monotonic() - _lag(journal) >= ended, "the last message")
    yield [arrived - due for due, arrived in _seen(journal) if began <= due < ended]


def _handler(journal: Path) -> Callable[[bytes], None]:
    """Notes when a message was due, and when it arrived. Travels by value."""
    path, pack = str(journal), _TIMES.format

    def handle(body: bytes) -> None:
        now = time.monotonic()
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, struct.pack(pack, float(body), now))
        os.close(file)

    return handle


def _seen(journal: Path) -> list[tuple[float, float]]:
    data = journal.read_bytes() if journal.exists() else b""
    return list(_TIMES.iter_unpack(data[: len(data) // _TIMES.size * _TIMES.size]))


def _lag(journal: Path) -> float:
    """The age of the newest message that was handled."""
    return time.monotonic() - max(due for due, _ in _seen(journal))


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 2 * _DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {2 * _DEADLINE:g} s")
        time.sleep(0.2)


def _consume(stage: SparkStage, topic: str, handle: Callable[[bytes], None]) -> Callable[[], None]:
    from orbitmq.spark import consume  # noqa: PLC0415  # an extra

    group = f"handlers-{topic}"
    server = stage.cluster.name_server
    run = consume(stage.spark, group, name_server=server, consume_from="first")
    run.on(topic)(lambda message: handle(message.body))
    run.start()
    return run.stop


def _query(handling: Handling) -> Callable[..., Callable[[], None]]:
    def start(stage: SparkStage, topic: str, handle: Callable[[bytes], None]) -> Callable[[], None]:
        source = stage.spark.readStream.format("kafka").options(
            **stage.kafka_source(topic), startingOffsets="earliest"
        )
        writer = source.load().select("value").writeStream.outputMode("update")
        if handling != "micro-batch":
            if "realTime" not in inspect.signature(writer.trigger).parameters:
                raise NotAtHand("Spark has a real-time mode from 4.1 on")
            mode: Any = {"realTime": _REAL_TIME}
            writer = writer.trigger(**mode)
        writer = writer.option("checkpointLocation", stage.checkpoint())
        stack = ExitStack()
        if handling == "real-time to a topic":
            address, sink = stage.kafka.address, stage.new_kafka_topic()
            options = {"kafka.bootstrap.servers": address, "topic": sink}
            writer = writer.format("kafka").options(**options)
            stack.enter_context(_polled(address, sink, handle))
        else:
            writer = writer.foreach(lambda row: handle(bytes(row[0])))
        stack.callback(writer.start().stop)
        return stack.close

    return start


@contextmanager
def _polled(address: str, topic: str, handle: Callable[[bytes], None]) -> Iterator[None]:
    """Hands over every message of a topic of Kafka's, in a thread."""
    import confluent_kafka  # noqa: PLC0415  # of few lines

    is_over = threading.Event()
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": address, "group.id": topic, "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])

    def poll() -> None:
        while not is_over.is_set():
            message = consumer.poll(0.2)
            if message is not None and not message.error():
                handle(message.value() or b"")
        consumer.close()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class _Window:
    """What `foreachBatch` has collected."""

    def __init__(self) -> None:
        #: When a message was due, and when it arrived.
        self._seen: list[tuple[float, float]] = []
        self._news = threading.Condition()

    def take(self, frame: DataFrame, _: int) -> None:
        rows = frame.collect()
        now = time.monotonic()
        with self._news:
            self._seen += [(float(row[0]), now) for row in rows]
            self._news.notify_all()

    def wait_for_first(self) -> None:
        with self._news:
            if not self._news.wait_for(lambda: self._seen, _DEADLINE):
                raise TimeoutError(f"no message arrived within {_DEADLINE:g} s")

    def between(self, began: float, ended: float) -> list[float]:
        """Of the messages that were due then; waits for the last of them."""
        with self._news:
            is_complete = self._news.wait_for(lambda: self._seen[-1][0] >= ended, _DEADLINE)
            if not is_complete:
                raise TimeoutError(f"the last message did not arrive within {_DEADLINE:g} s")
            return [arrived - due for due, arrived in self._seen if began <= due < ended]


def main(kind: str, address: str, topic: str, rate: float) -> None:
    sending = _to_kafka if kind == "kafka" else _to_rocketmq
    with sending(address, topic) as send:
        print("ready", flush=True)
        began, number = time.monotonic(), 0
        while True:
            due = began + number / rate
            if select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
                return
            send(repr(due).encode())
            number += 1


@contextmanager
def _to_rocketmq(address: str, topic: str) -> Iterator[Callable[[bytes], object]]:
    from orbitmq import Producer  # noqa: PLC0415  # of one of two processes

    with Producer("bench-paced", name_server=address) as producer:
        producer.send(topic, _now())
        yield lambda body: producer.submit(topic, body)


@contextmanager
def _to_kafka(address: str, topic: str) -> Iterator[Callable[[bytes], object]]:
    import confluent_kafka  # noqa: PLC0415  # of one of two processes

    # Our client sends at once by default.
    settings = {"bootstrap.servers": address, "acks": "1", "linger.ms": 0}
    producer = confluent_kafka.Producer(settings)
    producer.produce(topic, _now())
    producer.flush(_DEADLINE)

    def send(body: bytes) -> None:
        producer.produce(topic, body)
        producer.poll(0)

    yield send
    producer.flush(_DEADLINE)


def _now() -> bytes:
    return repr(time.monotonic()).encode()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
