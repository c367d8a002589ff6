"""Which functions of OrbitMQ are called, in their order: `python -m tests.docs.walks NAME`.

Each walk of docs/architecture.md is a program of its own, because the profiler sees all threads of
a process. It prints a JSON list of [file below src/orbitmq, qualified name], in the order of their
first calls.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Self

from orbitmq import Consumer, Producer, ReceivedMessage, Retry
from orbitmq.spark.source import RocketMQSource, full_schema
from orbitmq.testing import EmbeddedCluster

ROOT = Path(__file__).parents[2]
SOURCE = f"{ROOT / 'src' / 'orbitmq'}/"
TOPIC = "walks"
DEADLINE = 30.0


class Trace:
    """Notes the first call of each function of OrbitMQ while it is on."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], None] = {}
        self._is_on = False
        self._begins_with = ""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @contextmanager
    def on(self, begins_with: str = "") -> Iterator[None]:
        """Note calls from the first one of a function on, by default from now on."""
        self._begins_with = begins_with
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_on and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(SOURCE):
                if self._begins_with and code.co_qualname != self._begins_with:
                    return
                self._begins_with = ""
                self.calls[code.co_filename.removeprefix(SOURCE), code.co_qualname] = None


@contextmanager
def cluster_elsewhere() -> Iterator[str]:
    """The name server of a cluster in another process."""
    program = (
        "import sys\n"
        "from orbitmq.testing import EmbeddedCluster\n"
        "with EmbeddedCluster() as cluster:\n"
        f"    cluster.create_topic({TOPIC!r}, queues=1)\n"
        "    print(cluster.name_server, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        assert process.stdin is not None
        process.stdin.close()


class Sender:
    """A producer in another process that is connected, and sends a line when told to."""

    def __init__(self, name_server: str) -> None:
        program = (
            "import sys\n"
            "from orbitmq import Producer\n"
            f"with Producer('walkers', name_server={name_server!r}) as producer:\n"
            "    for line in sys.stdin:\n"
            f"        producer.send({TOPIC!r}, line.strip())\n"
            "        print('sent', flush=True)\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        self.send("before")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=DEADLINE)

    def send(self, body: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{body}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "sent\n"


def send(trace: Trace) -> None:
    """A warm send, in the process of the producer."""
    with cluster_elsewhere() as name_server, Producer("p", name_server=name_server) as producer:
        for _ in range(50):
            producer.send(TOPIC, b"before")
        with trace.on():
            producer.send(TOPIC, b"one")


def submit(trace: Trace) -> None:
    """Messages that are submitted faster than they are sent, in the process of the producer."""
    with cluster_elsewhere() as name_server, Producer("p", name_server=name_server) as producer:
        producer.submit(TOPIC, b"before").result(DEADLINE)
        with trace.on():
            for future in [producer.submit(TOPIC, b"one") for _ in range(500)]:
                future.result(DEADLINE)


def store(trace: Trace) -> None:
    """A send, in the process of the broker."""
    with EmbeddedCluster() as cluster:
        cluster.create_topic(TOPIC, queues=1)
        with Sender(cluster.name_server) as sender, trace.on("Connection.data_received"):
            sender.send("one")


def pull(trace: Trace) -> None:
    """A message for a consumer whose pull is held by the broker, in the process of the consumer."""
    handled = threading.Event()
    began = threading.Event()
    with cluster_elsewhere() as name_server:
        consumer = Consumer("g", name_server=name_server, consume_from="first")

        @consumer.on(TOPIC)
        def handle(message: ReceivedMessage) -> None:
            (handled if message.body == b"one" else began).set()

        with Sender(name_server) as sender, consumer:
            assert began.wait(DEADLINE)
            with trace.on("Connection.data_received"):
                sender.send("one")
                assert handled.wait(DEADLINE)
                until(lambda: any(name == "TrackedProgress.update" for _, name in [*trace.calls]))


def failure(trace: Trace) -> None:
    """A message that fails twice and becomes a dead letter, all in one process."""
    failed = threading.Semaphore(0)
    with EmbeddedCluster() as cluster:
        cluster.create_topic(TOPIC, queues=1)
        consumer = Consumer(
            "g", name_server=cluster.name_server, consume_from="first", max_retries=1
        )

        @consumer.on(TOPIC)
        def handle(message: ReceivedMessage) -> None:
            if message.body == b"before":
                return
            failed.release()
            raise Retry(delay=0.1)

        with Sender(cluster.name_server) as sender, consumer:
            until(lambda: TOPIC in consumer.statistics().topics)
            with trace.on():
                sender.send("one")
                assert failed.acquire(timeout=DEADLINE)
                assert failed.acquire(timeout=DEADLINE)
                until(lambda: cluster.messages("%DLQ%g") != [])


def batch(trace: Trace) -> None:
    """A micro-batch, with the calls that Spark makes on its source."""
    with EmbeddedCluster() as cluster:
        cluster.create_topic(TOPIC, queues=1)
        cluster.send(TOPIC, "one", "two")
        source = RocketMQSource(
            {
                "nameServer": cluster.name_server,
                "subscribe": TOPIC,
                "startingOffsets": "earliest",
                "group": "walkers",
            }
        )
        with trace.on():
            reader = source.streamReader(full_schema())
            start = reader.initialOffset()
            rows = 0
            while not rows:  # the first batch of a stream is empty
                end = reader.latestOffset(start, reader.getDefaultReadLimit())
                for part in reader.partitions(start, end):
                    rows += sum(len(rows) for rows in reader.read(part))
                reader.commit(end)
                start = end


def until(is_so: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(int(DEADLINE / 0.02)):
        if is_so():
            return
        waiting.wait(0.02)
    raise AssertionError("it did not come to that")


WALKS = {walk.__name__: walk for walk in (send, submit, store, pull, failure, batch)}

if __name__ == "__main__":
    found = Trace()
    WALKS[sys.argv[1]](found)
    print(json.dumps(list(found.calls)))
