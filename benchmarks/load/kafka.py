"""Kafka, and Spark's own source for it, from Maven Central: what topics are read with elsewhere.

The jars are fetched once into ``build/kafka/``, where nothing is committed. The broker is one
process, controller and broker in one, on loopback.
"""

from __future__ import annotations

import base64
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from benchmarks.peers import ROOT, Peer, Tell, fetching

if TYPE_CHECKING:
    from collections.abc import Mapping

_CACHE = ROOT / "build" / "kafka"
#: The newest of Spark's source that Maven Central was seen to have, and what it is made for; of its
#: small part for secured brokers only an older one was there. Spark has the rest of what it needs.
_KAFKA = "3.9.2"
_SOURCE = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    f"org.apache.kafka:kafka-clients:{_KAFKA}",
    "org.apache.commons:commons-pool2:2.13.1",
)
_BROKER = (f"org.apache.kafka:kafka_2.13:{_KAFKA}",)
_START_DEADLINE = 90.0
_STOP_DEADLINE = 30.0
_JAVA = ("-Xms512m", "-Xmx512m", "-XX:+UseG1GC", "-Djava.net.preferIPv4Stack=true")


@dataclass(frozen=True, slots=True)
class KafkaJars:
    """Spark's source, and a broker for it."""

    source: Path
    broker: Path

    @classmethod
    def obtain(cls) -> Self:
        """Raises `NotAtHand`, with the reason."""
        KAFKA.check()
        return cls(*KAFKA.places)


def _fetch(tell: Tell) -> None:
    # It lives with the tests against Apache.
    from tests.support import maven  # noqa: PLC0415

    def told(files: int) -> None:
        tell(f"{files} files")

    source, broker = KAFKA.places
    with fetching():
        maven.tool("java")
        if not source.exists():
            maven.make_whole(
                source, lambda at: maven.fetch_jars(at, _SOURCE, alone=True, tell=told)
            )
        if not broker.exists():
            maven.make_whole(broker, lambda at: maven.fetch_jars(at, _BROKER, tell=told))


KAFKA = Peer(f"Kafka {_KAFKA}", "Maven Central", [_CACHE / "source", _CACHE / _KAFKA], _fetch)


class KafkaBroker:
    """One broker with its controller, as its own defaults have it, as far as one broker can."""

    def __init__(self, jars: KafkaJars) -> None:
        self._jars = jars
        self._stack = ExitStack()
        self._port, self._controller_port = _free_ports()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings = home / "server.properties"
            settings.write_text(
                "".join(f"{name}={value}\n" for name, value in self._settings(home).items())
            )
            log = stack.enter_context((home / "broker.log").open("w+b"))
            # With a letter in front: one that begins with a dash would be taken for an option.
            cluster = "O" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
            subprocess.run(
                self._command("kafka.tools.StorageTool", "format", "-t", cluster, "-c", settings),
                stdout=log,
                stderr=log,
                timeout=_START_DEADLINE,
                check=True,
            )
            self._process = subprocess.Popen(
                self._command("kafka.Kafka", settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=home,
            )
            stack.callback(self._stop)
            self._await_start(Path(log.name))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _command(self, main: str, *arguments: object) -> list[str]:
        path = str(self._jars.broker / "*")
        return ["java", *_JAVA, "-cp", path, main, *map(str, arguments)]

    def _settings(self, home: Path) -> Mapping[str, object]:
        controller = f"127.0.0.1:{self._controller_port}"
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": f"1@{controller}",
            "log.dirs": home / "log",
            # As many as the topics of ours have queues.
            "num.partitions": 4,
            "offsets.topic.replication.factor": 1,
            # Groups of one wait for nobody.
            "group.initial.rebalance.delay.ms": 0,
        }

    def _await_start(self, log: Path) -> None:
        assert self._process is not None
        pause = threading.Event()
        deadline = time.monotonic() + _START_DEADLINE
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
            except OSError:
                pause.wait(0.1)
            else:
                return
        raise ChildProcessError(f"Kafka did not start: {log.read_text(errors='replace')[-2000:]}")

    def _stop(self) -> None:
        assert self._process is not None
        # Nobody needs what it stored.
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(_STOP_DEADLINE)


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])
