"""What the lines about clients share: started when one of them asks, ended together."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Self, TypeVar, cast

from benchmarks.load.asking import Target
from benchmarks.load.clientprocesses import (
    ClientProcess,
    CppClient,
    JavaClient,
    KafkaClient,
    OurClient,
    OurCluster,
)
from benchmarks.load.clientwork import Send
from benchmarks.load.kafka import KafkaBroker, KafkaJars
from benchmarks.load.processes import Floor, Generator
from benchmarks.runner import NotAtHand

T = TypeVar("T")


class ClientStage:
    """The processes by name, and the topics that were filled."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._made: dict[str, object] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._made.clear()
        self._stack.close()

    @property
    def cluster(self) -> OurCluster:
        return self._once("cluster", lambda: OurCluster(self._folder()))

    @property
    def ours(self) -> OurClient:
        return self._once("ours", OurClient)

    @property
    def second(self) -> OurClient:
        """Another process with our client, for lines with two."""
        return self._once("second", OurClient)

    @property
    def generator(self) -> Generator:
        return self._once("generator", Generator)

    @property
    def relay(self) -> Target:
        return self._once("relay", lambda: Floor("relay")).target

    def cpp(self) -> ClientProcess:
        """The C++ client. Raises `NotAtHand`."""
        return self._peer("cpp", CppClient)

    def java(self) -> ClientProcess:
        """Apache's client. Raises `NotAtHand`."""
        return self._peer("java", JavaClient)

    def confluent(self) -> ClientProcess:
        """confluent-kafka. Raises `NotAtHand`."""
        return self._of_kafka("confluent_kafka", "confluent-kafka")

    def aiokafka(self) -> ClientProcess:
        """aiokafka. Raises `NotAtHand`."""
        return self._of_kafka("aiokafka", "aiokafka")

    @property
    def kafka(self) -> KafkaBroker:
        """Raises `NotAtHand`."""
        return self._kafka_broker()

    def filled(self, count: int) -> str:
        """A topic of four queues with so many messages of 1 KiB."""
        return self.filled_by(
            self.ours,
            Send(
                name_server=self.cluster.name_server,
                broker_port=self.cluster.broker_port,
                topic=f"bench-filled-{count}",
                way="pipelined",
                count=count,
            ),
        )

    def filled_by(self, client: ClientProcess, wish: Send) -> str:
        """The topic of a wish that was fulfilled once."""
        name = f"topic {wish.topic} at {wish.name_server}"
        if name not in self._made:
            self._made[name] = client.ask(wish)
        return wish.topic

    def _peer(self, name: str, make: Callable[[Path], ClientProcess]) -> ClientProcess:
        if name not in self._made:
            try:
                self._once(name, lambda: make(self._folder()))
            except NotAtHand as reason:
                self._made[name] = reason
        made = self._made[name]
        if isinstance(made, NotAtHand):
            raise made
        return cast("ClientProcess", made)

    def _kafka_broker(self) -> KafkaBroker:
        return self._once("kafka", lambda: KafkaBroker(KafkaJars.obtain()))

    def _of_kafka(self, library: str, package: str) -> ClientProcess:
        def make(_: Path) -> ClientProcess:
            self._kafka_broker()  # first: it is to end after its clients
            return KafkaClient(library, package)

        return self._peer(library, make)

    def _folder(self) -> Path:
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="orbitmq-bench-")))

    def _once(self, name: str, make: Callable[[], AbstractContextManager[T]]) -> T:
        if name not in self._made:
            self._made[name] = self._stack.enter_context(make())
        return cast("T", self._made[name])
