"""The entry of administration: `AsyncAdmin`, and `Admin` for code without an event loop."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from orbitmq.arguments import explained
from orbitmq.client.admin.cluster import ClusterStatus, ClusterView, RuntimeInfo
from orbitmq.client.admin.config import AsyncConfig
from orbitmq.client.admin.deadletters import AsyncDeadLetters
from orbitmq.client.admin.groups import AsyncGroups, ProgressQueries
from orbitmq.client.admin.members import AsyncConsumers
from orbitmq.client.admin.messages import AsyncMessages
from orbitmq.client.admin.requests import AdminRequests
from orbitmq.client.admin.resets import AsyncProgress
from orbitmq.client.admin.topics import AsyncTopics
from orbitmq.client.engine import AsyncLife, Engine
from orbitmq.client.loopthread import BlockingFace, Life, LoopThread, waiting
from orbitmq.client.settings import ClientSettings, resolve
from orbitmq.clock import Clock
from orbitmq.errors import NotRunning
from orbitmq.parsing import positive, whole


@explained()
@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSettings:
    """Limits of an admin."""

    at_once: int = 32  #: concurrent requests, at most
    timeout: float = 5.0  #: seconds for a request, by default

    def __post_init__(self) -> None:
        whole(self.at_once, "admin.at_once")
        positive(self.timeout, "admin.timeout")


@explained()
class AsyncAdmin(AsyncLife):
    """Administration of a cluster.

    async with AsyncAdmin(name_server="localhost:9876") as admin:
        for topic in await admin.topics.list():
            ...

    Names are as brokers know them, without the namespace of the settings. Works with Apache
    RocketMQ 4.9 and 5.x, too; what a broker cannot do raises `NotSupported`.
    """

    def __init__(
        self,
        *,
        name_server: str | Iterable[str] | None = None,
        client: ClientSettings | None = None,
        settings: AdminSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._set_up(Engine(resolve(name_server, client), clock=clock), settings, owns_engine=True)

    @classmethod
    def on(cls, engine: Engine, settings: AdminSettings | None = None) -> AsyncAdmin:
        """An admin on the connections of an engine, which it does not stop."""
        admin = cls.__new__(cls)
        admin._set_up(engine, settings, owns_engine=False)
        return admin

    def _set_up(self, engine: Engine, settings: AdminSettings | None, *, owns_engine: bool) -> None:
        settings = settings or AdminSettings()
        asking = AdminRequests(engine, at_once=settings.at_once, timeout=settings.timeout)
        progress = ProgressQueries(asking)
        self._engine = engine
        self._owns_engine = owns_engine
        self._asking = asking
        self._cluster = ClusterView(asking)
        self.config = AsyncConfig(asking)
        self.topics = AsyncTopics(asking, self.config)
        self.consumers = AsyncConsumers(asking)
        self.groups = AsyncGroups(asking, self.topics, self.consumers, progress)
        self.progress = AsyncProgress(asking, self.consumers, progress)
        self.messages = AsyncMessages(asking, self.consumers, progress)
        self.dead_letters = AsyncDeadLetters(asking, self.topics, self.messages)

    async def start(self) -> None:
        """Start; sends no request."""
        if self._owns_engine and not self._engine.is_running:
            await self._engine.start()

    async def stop(self) -> None:
        """Close all connections."""
        if self._owns_engine:
            await self._engine.stop()

    async def cluster(self) -> ClusterStatus:
        """All brokers and name servers with their state."""
        return await self._cluster.status()

    async def runtime(self, broker: str) -> RuntimeInfo:
        """The state of one broker, named as `name`, `name/id` or by its address."""
        return await self._cluster.runtime(broker)

    @property
    def requests(self) -> int:
        """The number of requests so far."""
        return self._asking.requests


# The sync classes are made from the async ones: the same signature and docstring, and each call
# waits for its result.


P = ParamSpec("P")
R = TypeVar("R")


def _iterating(
    method: Callable[Concatenate[Any, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[BlockingFace, P], Generator[R, None, None]]:
    """The blocking form of an async generator method."""

    @functools.wraps(method)
    def iterate(
        self: BlockingFace, /, *args: P.args, **kwargs: P.kwargs
    ) -> Generator[R, None, None]:
        bound: Callable[..., AsyncGenerator[R, None]] = getattr(self._part, method.__name__)
        return _each(self._thread, bound(*args, **kwargs))

    return iterate


def _each(thread: LoopThread, results: AsyncGenerator[R, None]) -> Generator[R, None, None]:
    end = object()

    async def following() -> R | object:
        return await anext(results, end)

    async def close() -> None:
        await results.aclose()

    try:
        while (result := thread.run(following())) is not end:
            yield result  # type: ignore[misc]  # anything but `end` is a result
    finally:
        # Close an unfinished generator, unless the admin was stopped before.
        if thread.is_running:
            thread.run(close())


@explained()
class Topics(BlockingFace):
    """Administration of topics."""

    list = waiting(AsyncTopics.list)
    get = waiting(AsyncTopics.get)
    route = waiting(AsyncTopics.route)
    groups = waiting(AsyncTopics.groups)
    status = waiting(AsyncTopics.status)
    rates = waiting(AsyncTopics.rates)
    create = waiting(AsyncTopics.create)
    update = waiting(AsyncTopics.update)
    delete = waiting(AsyncTopics.delete)


@explained()
class Groups(BlockingFace):
    """Administration of groups."""

    list = waiting(AsyncGroups.list)
    settings = waiting(AsyncGroups.settings)
    progress = waiting(AsyncGroups.progress)
    describe = waiting(AsyncGroups.describe)
    findings = waiting(AsyncGroups.findings)
    create = waiting(AsyncGroups.create)
    update = waiting(AsyncGroups.update)
    pause = waiting(AsyncGroups.pause)
    resume = waiting(AsyncGroups.resume)
    check_offline = waiting(AsyncGroups.check_offline)
    delete = waiting(AsyncGroups.delete)


@explained()
class Progress(BlockingFace):
    """Moves progress."""

    plan_reset = waiting(AsyncProgress.plan_reset)
    plan_skip = waiting(AsyncProgress.plan_skip)
    plan_clone = waiting(AsyncProgress.plan_clone)
    reset = waiting(AsyncProgress.reset)
    apply = waiting(AsyncProgress.apply)


@explained()
class Messages(BlockingFace):
    """Finds messages."""

    get = waiting(AsyncMessages.get)
    by_offset_id = waiting(AsyncMessages.by_offset_id)
    copies = waiting(AsyncMessages.copies)
    readable_copies = waiting(AsyncMessages.readable_copies)
    by_key = _iterating(AsyncMessages.by_key)
    at = waiting(AsyncMessages.at)
    browse = _iterating(AsyncMessages.browse)
    tail = _iterating(AsyncMessages.tail)
    page = waiting(AsyncMessages.page)
    track = waiting(AsyncMessages.track)


@explained()
class DeadLetters(BlockingFace):
    """Lists, resends and exports dead letters."""

    list = _iterating(AsyncDeadLetters.list)
    sample = waiting(AsyncDeadLetters.sample)
    summary = waiting(AsyncDeadLetters.summary)
    resend = waiting(AsyncDeadLetters.resend)
    resending = _iterating(AsyncDeadLetters.resending)
    export = waiting(AsyncDeadLetters.export)


@explained()
class Consumers(BlockingFace):
    """Connected clients."""

    members = waiting(AsyncConsumers.members)
    producers = waiting(AsyncConsumers.producers)
    running_info = waiting(AsyncConsumers.running_info)
    consume_directly = waiting(AsyncConsumers.consume_directly)


@explained()
class Config(BlockingFace):
    """Settings of running servers."""

    broker = waiting(AsyncConfig.broker)
    update_broker = waiting(AsyncConfig.update_broker)
    set_writable = waiting(AsyncConfig.set_writable)
    clean_expired_queues = waiting(AsyncConfig.clean_expired_queues)
    clean_unused_topics = waiting(AsyncConfig.clean_unused_topics)
    delete_expired_log = waiting(AsyncConfig.delete_expired_log)
    name_server = waiting(AsyncConfig.name_server)
    update_name_servers = waiting(AsyncConfig.update_name_servers)
    values = waiting(AsyncConfig.values)
    value = waiting(AsyncConfig.value)
    put_value = waiting(AsyncConfig.put_value)
    delete_value = waiting(AsyncConfig.delete_value)
    ordered_topics = waiting(AsyncConfig.ordered_topics)


@explained()
class Admin(BlockingFace, Life):
    """Administration of a cluster, for code without an event loop.

    with Admin(name_server="localhost:9876") as admin:
        print(admin.groups.progress("billing").lag)
    """

    cluster = waiting(AsyncAdmin.cluster)
    runtime = waiting(AsyncAdmin.runtime)

    def __init__(
        self,
        *,
        name_server: str | Iterable[str] | None = None,
        client: ClientSettings | None = None,
        settings: AdminSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        admin = AsyncAdmin(name_server=name_server, client=client, settings=settings, clock=clock)
        thread = LoopThread("orbitmq-admin")
        super().__init__(admin, thread)
        self._admin = admin
        self.topics = Topics(admin.topics, thread)
        self.groups = Groups(admin.groups, thread)
        self.progress = Progress(admin.progress, thread)
        self.messages = Messages(admin.messages, thread)
        self.dead_letters = DeadLetters(admin.dead_letters, thread)
        self.consumers = Consumers(admin.consumers, thread)
        self.config = Config(admin.config, thread)

    def start(self) -> None:
        """Start; sends no request."""
        self._thread.start()
        try:
            self._thread.run(self._admin.start())
        except BaseException:
            self._thread.stop()
            raise

    def stop(self) -> None:
        """Close all connections and end the thread. May be called again."""
        if self._thread.is_running:
            try:
                with suppress(NotRunning):  # stopped already
                    self._thread.run(self._admin.stop())
            finally:
                self._thread.stop()

    @property
    def requests(self) -> int:
        """The number of requests so far."""
        return self._admin.requests
