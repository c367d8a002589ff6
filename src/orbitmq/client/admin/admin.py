"""The async face of administration."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from orbitmq.client.admin.arguments import positive, whole_number
from orbitmq.client.admin.asking import Asking
from orbitmq.client.admin.cluster import ClusterStatus, ClusterView
from orbitmq.client.admin.configuration import AsyncConfig
from orbitmq.client.admin.deadletters import AsyncDeadLetterReading
from orbitmq.client.admin.exporting import AsyncDeadLetterExporting
from orbitmq.client.admin.groups import AsyncGroups
from orbitmq.client.admin.members import AsyncConsumers
from orbitmq.client.admin.messages import AsyncMessages
from orbitmq.client.admin.progress import Progress
from orbitmq.client.admin.resending import AsyncDeadLetterResending
from orbitmq.client.admin.resetting import AsyncProgress
from orbitmq.client.admin.runtime import RuntimeInfo
from orbitmq.client.admin.topics import AsyncTopics
from orbitmq.client.admin.topology import Directory
from orbitmq.client.engine import Engine
from orbitmq.client.errors import NotRunning
from orbitmq.client.settings import ClientSettings, resolve
from orbitmq.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSettings:
    """How hard an admin may ask."""

    at_once: int = 32  #: requests that wait for an answer at the same time
    timeout: float = 5.0  #: seconds for a request that says nothing else

    def __post_init__(self) -> None:
        whole_number("admin.at_once", self.at_once, 1)
        positive("admin.timeout", self.timeout)


class AsyncDeadLetters(AsyncDeadLetterReading, AsyncDeadLetterResending, AsyncDeadLetterExporting):
    """Dead letters: found, looked at, sent again, exported."""

    def __init__(
        self,
        asking: Asking,
        directory: Directory,
        topics: AsyncTopics,
        messages: AsyncMessages,
    ) -> None:
        AsyncDeadLetterReading.__init__(self, messages, asking.clock.now)
        AsyncDeadLetterResending.__init__(self, asking, directory, topics, messages, self)
        AsyncDeadLetterExporting.__init__(self, self)


class _Parts:
    """What an admin consists of while it runs."""

    def __init__(self, engine: Engine, settings: AdminSettings) -> None:
        asking = Asking(engine, at_once=settings.at_once, timeout=settings.timeout)
        directory = Directory(asking)
        progress = Progress(asking, directory)
        self.asking = asking
        self.cluster = ClusterView(asking, directory)
        self.config = AsyncConfig(asking, directory)
        self.topics = AsyncTopics(asking, directory, self.config)
        self.consumers = AsyncConsumers(asking, directory)
        self.groups = AsyncGroups(asking, directory, self.topics, self.consumers, progress)
        self.progress = AsyncProgress(asking, directory, self.consumers, progress)
        self.messages = AsyncMessages(asking, directory, self.consumers, progress)
        self.dead_letters = AsyncDeadLetters(asking, directory, self.topics, self.messages)


class AsyncAdmin:
    """Administration of a cluster.

    async with AsyncAdmin(name_server="localhost:9876") as admin:
        for topic in await admin.topics.list():
            ...

    Names are those that brokers know: a namespace of the settings is not added to them. Works
    with Apache RocketMQ 4.9 and 5.x as well; what a broker cannot do raises `NotSupported`.
    """

    def __init__(
        self,
        *,
        name_server: str | None = None,
        client: ClientSettings | None = None,
        settings: AdminSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._engine = Engine(resolve(name_server, client), clock=clock)
        self._settings = settings or AdminSettings()
        self._owns_engine = True
        self._parts: _Parts | None = None
        self._was_stopped = False

    @classmethod
    def on(cls, engine: Engine, settings: AdminSettings | None = None) -> AsyncAdmin:
        """An admin that shares the connections of an engine, which somebody else stops."""
        admin = cls.__new__(cls)
        admin._engine = engine
        admin._settings = settings or AdminSettings()
        admin._owns_engine = False
        admin._parts = _Parts(engine, admin._settings)
        admin._was_stopped = False
        return admin

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Asks nobody anything yet."""
        if self._owns_engine and self._parts is None:
            await self._engine.start()
            self._parts = _Parts(self._engine, self._settings)

    async def stop(self) -> None:
        """Close all connections."""
        self._parts = None
        self._was_stopped = True
        if self._owns_engine:
            await self._engine.stop()

    # What it looks after.

    @property
    def topics(self) -> AsyncTopics:
        return self._running.topics

    @property
    def groups(self) -> AsyncGroups:
        return self._running.groups

    @property
    def progress(self) -> AsyncProgress:
        return self._running.progress

    @property
    def messages(self) -> AsyncMessages:
        return self._running.messages

    @property
    def dead_letters(self) -> AsyncDeadLetters:
        return self._running.dead_letters

    @property
    def consumers(self) -> AsyncConsumers:
        return self._running.consumers

    @property
    def config(self) -> AsyncConfig:
        return self._running.config

    async def cluster(self) -> ClusterStatus:
        """All brokers and name servers, and whether they are well."""
        return await self._running.cluster.status()

    async def runtime(self, broker: str) -> RuntimeInfo:
        """What one broker says about itself; it is named as `name`, `name/id` or by its address."""
        return await self._running.cluster.runtime(broker)

    @property
    def requests(self) -> int:
        """How many requests were made so far."""
        return self._running.asking.requests

    @property
    def _running(self) -> _Parts:
        if self._parts is None:
            raise NotRunning("this admin", was_stopped=self._was_stopped)
        return self._parts
