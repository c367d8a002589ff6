"""Messages one by one at a steady pace, and how long each takes to `foreachBatch`.

    python -m benchmarks.load.sparkpaced rocketmq|kafka ADDRESS TOPIC RATE

The process sends, each message with the time at which it was due as its body, until its input
ends. Says "ready" when the first is stored. The clock is one that all processes of a machine share.
"""

from __future__ import annotations

import math
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from benchmarks.load.processes import Child

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from benchmarks.load.sparkstage import SparkStage

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
