"""An embedded cluster for tests without an event loop of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from orbitmq.broker.settings import BrokerSettings
from orbitmq.client.producer.producer import Producer
from orbitmq.client.producer.results import SendResult
from orbitmq.errors import OrbitError
from orbitmq.message.stored import StoredMessage
from orbitmq.testing.clock import MovableClock
from orbitmq.testing.embedded import AsyncEmbeddedCluster

R = TypeVar("R")

#: How long any single step may take, so that a test that went wrong ends.
_DEADLINE = 60.0
_NOT_STARTED = "the cluster is not started; use it as a context manager"


class EmbeddedCluster:
    """A name server and brokers on an event loop of their own, in a background thread.

    with EmbeddedCluster() as cluster:
        run_my_pipeline(name_server=cluster.name_server)

    Every method may be called from any thread but that one.
    """

    def __init__(
        self,
        *,
        brokers: int = 1,
        folder: Path | str | None = None,
        clock: MovableClock | None = None,
        adjust: Callable[[BrokerSettings], BrokerSettings] | None = None,
    ) -> None:
        """`folder` keeps the data afterwards; `adjust` changes the settings of every broker."""
        self._cluster = AsyncEmbeddedCluster(
            brokers=brokers, folder=folder, clock=clock, adjust=adjust
        )
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Done when the cluster is to end, and when it has.
        self._wanted: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._producer: Producer | None = None
        self.clock = self._cluster.clock

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when clients find every broker."""
        if self._thread is not None:
            raise OrbitError("the cluster is started already")
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._wanted, self._ended = concurrent.futures.Future(), concurrent.futures.Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(started)), name="orbitmq-cluster", daemon=True
        )
        self._thread.start()
        try:
            started.result(_DEADLINE)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop everything and remove the data, unless it has a folder of its own."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.stop()
        self._wanted.set_result(None)
        try:
            self._ended.result(_DEADLINE)
        finally:
            thread.join(_DEADLINE)

    async def _live(self, started: concurrent.futures.Future[None]) -> None:
        """The whole life of the cluster; what goes wrong is raised where its owner waits."""
        ended = self._ended
        try:
            await self._cluster.start()
        except BaseException as error:  # noqa: BLE001  # raised again by start()
            started.set_exception(error)
            ended.set_result(None)
            return
        self._loop = asyncio.get_running_loop()
        started.set_result(None)
        await asyncio.wrap_future(self._wanted)
        self._loop = None
        try:
            await self._cluster.stop()
        except BaseException as error:  # noqa: BLE001  # raised again by stop()
            ended.set_exception(error)
        else:
            ended.set_result(None)

    @property
    def name_server(self) -> str:
        """The address to give to clients."""
        return self._cluster.name_server

    @property
    def broker_addresses(self) -> tuple[str, ...]:
        return tuple(str(broker.address) for broker in self._cluster.brokers)

    def create_topic(self, topic: str, *, queues: int = 4) -> None:
        """Create a topic on every broker; returns when clients find it."""
        self._run(self._cluster.create_topic(topic, queues=queues))

    def send(self, topic: str, *bodies: bytes | str, **fields: Any) -> list[SendResult]:
        """Send a message for each body; `fields` are those of `Producer.send`: tags, keys, ..."""
        if self._loop is None:
            raise OrbitError(_NOT_STARTED)
        if self._producer is None:
            self._producer = Producer("orbitmq-testing", name_server=self.name_server)
            self._producer.start()
        return [self._producer.send(topic, body, **fields) for body in bodies]

    def until_consumed(self, group: str, topic: str, *, timeout: float = 10.0) -> None:
        """Wait until the group's progress at the brokers has reached the end of the topic.

        Progress gets there when consumers report it: those that are pushed to soon after they have
        nothing left to do, pull consumers every five seconds, and all of them when they stop.
        """
        self._run(self._cluster.until_consumed(group, topic, timeout=timeout))

    def messages(self, topic: str) -> list[StoredMessage]:
        """What is in a topic and can be read, in the order in which it was stored."""
        return self._call(lambda: self._cluster.messages(topic))

    def progress(self, group: str, topic: str) -> dict[tuple[str, int], int]:
        """The committed offsets of a group, by broker and queue."""
        return self._call(lambda: self._cluster.progress(group, topic))

    def advance(self, seconds: float) -> None:
        """Move the clock on; what has become due is delivered at once."""
        self._call(lambda: self._cluster.advance(seconds))

    def restart_broker(self, place: int = 0) -> None:
        """Stop a broker and start it again, with the same address and data."""
        self._run(self._cluster.restart_broker(place))

    def _call(self, function: Callable[[], R]) -> R:
        async def call() -> R:
            return function()

        return self._run(call())

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        """Have the work done where the cluster lives."""
        if self._loop is None:
            work.close()
            raise OrbitError(_NOT_STARTED)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_DEADLINE)
