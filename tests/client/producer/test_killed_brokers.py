"""Broker processes that are killed, frozen and started again under load."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.producer.core import SendSettings
from orbitmq.client.producer.producer import AsyncProducer, Producer
from orbitmq.client.producer.send import SendResult
from orbitmq.client.settings import ClientSettings
from orbitmq.cluster import Cluster
from orbitmq.errors import ClientError
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.settings import ServerSettings
from tests.support.command import Started
from tests.support.remoting import DEADLINE, until

#: How soon producers go on after a broker is back. Their longest pause is two seconds; the rest is
#: for the machine.
RECOVERY = 15.0


@dataclass
class Processes:
    """Brokers as processes, and a name server that they register with."""

    folder: Path
    name_server: str
    started: dict[str, Started] = field(default_factory=dict)
    ports: dict[str, str] = field(default_factory=dict)

    async def start(self, name: str) -> None:
        """Start a broker, or start it again where it was."""
        words = ("broker", "--data", str(self.folder / name), "--name", name)
        where = ("--port", self.ports.get(name, "0"), "--name-server", self.name_server)
        self.started[name] = started = await asyncio.to_thread(Started, *words, *where)
        self.ports[name] = started.address(name).rpartition(":")[2]

    def tell(self, name: str, number: signal.Signals) -> None:
        self.started[name].process.send_signal(number)

    async def kill(self, name: str) -> None:
        """End it at this instant."""
        await self.end(name, signal.SIGKILL)

    async def end(self, name: str, number: signal.Signals) -> None:
        """Send it a signal and wait for its end."""
        await asyncio.to_thread(self.started.pop(name).stop, number)

    async def bury(self) -> None:
        for name in tuple(self.started):
            await self.kill(name)


@contextlib.asynccontextmanager
async def _processes(folder: Path, *names: str) -> AsyncIterator[Processes]:
    cluster = Cluster(NameServerSettings(server=ServerSettings()))
    await cluster.start()
    processes = Processes(folder, str(cluster.name_server_address))
    try:
        await asyncio.gather(*map(processes.start, names))
        await cluster.until_registered(names)
        async with AsyncAdmin(name_server=processes.name_server) as admin:
            await admin.topics.create("orders", queues=4)
        await cluster.until_routed("orders", names)
        yield processes
    finally:
        await processes.bury()
        await cluster.stop()


@dataclass
class Load:
    """Sends without a pause, from tasks and from threads, and what came of it."""

    #: When each send began, when it was acknowledged, and by which broker.
    acknowledged: list[tuple[float, float, str]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    async def by_tasks(self, producer: AsyncProducer) -> None:
        while not self.is_over.is_set():
            began = time.monotonic()
            try:
                self._note(began, await producer.send("orders", b"from a task"))
            except ClientError as error:
                self.errors.append(error)

    def by_thread(self, producer: Producer) -> None:
        while not self.is_over.is_set():
            began = time.monotonic()
            try:
                self._note(began, producer.send("orders", b"from a thread"))
            except ClientError as error:
                self.errors.append(error)

    def _note(self, began: float, result: SendResult) -> None:
        self.acknowledged.append((began, time.monotonic(), result.queue.broker))

    def brokers(self, since: float = 0.0) -> set[str]:
        """Who took what was sent since then; an answer from before may be noted after it."""
        return {broker for began, _, broker in self.acknowledged if began > since}

    async def goes_on(self) -> None:
        """Returns when a good number more was sent."""
        wanted = len(self.acknowledged) + 200
        await until(lambda: len(self.acknowledged) >= wanted, "200 more sends")


@contextlib.asynccontextmanager
async def _load(name_server: str, settings: SendSettings | None = None) -> AsyncIterator[Load]:
    load = Load()
    client = ClientSettings(route_refresh=0.5)
    blocking = Producer("blocking", name_server=name_server, client=client, sending=settings)
    await asyncio.to_thread(blocking.start)
    async with (
        AsyncProducer(
            "async", name_server=name_server, client=client, sending=settings
        ) as producer,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(4):
            tasks.create_task(load.by_tasks(producer))
            tasks.create_task(asyncio.to_thread(load.by_thread, blocking))
        try:
            yield load
        finally:
            load.is_over.set()
    await asyncio.to_thread(blocking.stop)


@pytest.mark.feature("K3")
async def test_no_caller_sees_that_a_broker_is_killed_while_another_is_up(tmp_path):
    async with (
        _processes(tmp_path, "broker-a", "broker-b") as processes,
        _load(processes.name_server, SendSettings(timeout=DEADLINE)) as load,
    ):
        await load.goes_on()
        assert load.brokers() == {"broker-a", "broker-b"}

        await processes.kill("broker-b")
        killed = time.monotonic()
        await load.goes_on()

        assert load.brokers(killed) == {"broker-a"}
        await processes.start("broker-b")
        await until(lambda: "broker-b" in load.brokers(killed), "the return of broker-b")

    assert load.errors == []


@pytest.mark.feature("J7")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_producers_go_on_soon_after_the_only_broker_is_back(tmp_path, number):
    """Callers with more patience than the broker needs do not even notice."""
    patient = SendSettings(timeout=2 * DEADLINE)
    async with (
        _processes(tmp_path, "broker-a") as processes,
        _load(processes.name_server, patient) as load,
    ):
        await load.goes_on()
        await processes.end("broker-a", number)
        ended = time.monotonic()
        await until(lambda: time.monotonic() - ended > 0.5, "half a second of silence")

        await processes.start("broker-a")
        back = time.monotonic()
        await load.goes_on()

        first = min(at for began, at, _ in load.acknowledged if began > ended)
    assert first - back < RECOVERY
    assert load.errors == []
