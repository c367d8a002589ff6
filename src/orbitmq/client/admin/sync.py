"""The sync face of administration: the same names, each call waits for its result.

The methods are made of the async ones, so that there is one signature and one docstring for both.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from orbitmq.client.admin.admin import AdminSettings, AsyncAdmin, AsyncDeadLetters
from orbitmq.client.admin.cluster import ClusterStatus
from orbitmq.client.admin.configuration import AsyncConfig
from orbitmq.client.admin.groups import AsyncGroups
from orbitmq.client.admin.members import AsyncConsumers
from orbitmq.client.admin.messages import AsyncMessages
from orbitmq.client.admin.resetting import AsyncProgress
from orbitmq.client.admin.runtime import RuntimeInfo
from orbitmq.client.admin.topics import AsyncTopics
from orbitmq.client.errors import NotRunning
from orbitmq.client.loopthread import LoopThread
from orbitmq.client.settings import ClientSettings
from orbitmq.clock import Clock

P = ParamSpec("P")
R = TypeVar("R")


class _Part:
    """A part of an admin, and the thread that it lives on."""

    def __init__(self, part: object, thread: LoopThread) -> None:
        self._part = part
        self._thread = thread


def _waiting(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[_Part, P], R]:
    """The same method, which returns when it is done."""

    @functools.wraps(method)
    def wait(self: _Part, /, *args: P.args, **kwargs: P.kwargs) -> R:
        bound: Callable[..., Coroutine[Any, Any, R]] = getattr(self._part, method.__name__)
        return self._thread.run(bound(*args, **kwargs))

    return wait


def _iterating(
    method: Callable[Concatenate[Any, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[_Part, P], Generator[R, None, None]]:
    """The same method, whose results come one after the other."""

    @functools.wraps(method)
    def iterate(self: _Part, /, *args: P.args, **kwargs: P.kwargs) -> Generator[R, None, None]:
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
        # Left half-way it is closed, unless the admin was stopped before it.
        if thread.is_running:
            thread.run(close())


class Topics(_Part):
    """Administration of topics."""

    list = _waiting(AsyncTopics.list)
    get = _waiting(AsyncTopics.get)
    route = _waiting(AsyncTopics.route)
    groups = _waiting(AsyncTopics.groups)
    status = _waiting(AsyncTopics.status)
    rates = _waiting(AsyncTopics.rates)
    create = _waiting(AsyncTopics.create)
    update = _waiting(AsyncTopics.update)
    delete = _waiting(AsyncTopics.delete)


class Groups(_Part):
    """Administration of groups."""

    list = _waiting(AsyncGroups.list)
    settings = _waiting(AsyncGroups.settings)
    progress = _waiting(AsyncGroups.progress)
    describe = _waiting(AsyncGroups.describe)
    findings = _waiting(AsyncGroups.findings)
    create = _waiting(AsyncGroups.create)
    update = _waiting(AsyncGroups.update)
    pause = _waiting(AsyncGroups.pause)
    resume = _waiting(AsyncGroups.resume)
    check_offline = _waiting(AsyncGroups.check_offline)
    delete = _waiting(AsyncGroups.delete)


class Progress(_Part):
    """Moves progress."""

    plan_reset = _waiting(AsyncProgress.plan_reset)
    plan_skip = _waiting(AsyncProgress.plan_skip)
    plan_clone = _waiting(AsyncProgress.plan_clone)
    reset = _waiting(AsyncProgress.reset)
    apply = _waiting(AsyncProgress.apply)


class Messages(_Part):
    """Looks messages up."""

    get = _waiting(AsyncMessages.get)
    by_offset_id = _waiting(AsyncMessages.by_offset_id)
    copies = _waiting(AsyncMessages.copies)
    readable_copies = _waiting(AsyncMessages.readable_copies)
    by_key = _iterating(AsyncMessages.by_key)
    at = _waiting(AsyncMessages.at)
    browse = _iterating(AsyncMessages.browse)
    tail = _iterating(AsyncMessages.tail)
    page = _waiting(AsyncMessages.page)
    track = _waiting(AsyncMessages.track)


class DeadLetters(_Part):
    """Dead letters: found, looked at, sent again, exported."""

    list = _iterating(AsyncDeadLetters.list)
    sample = _waiting(AsyncDeadLetters.sample)
    summary = _waiting(AsyncDeadLetters.summary)
    resend = _waiting(AsyncDeadLetters.resend)
    resending = _iterating(AsyncDeadLetters.resending)
    export = _waiting(AsyncDeadLetters.export)


class Consumers(_Part):
    """Looks at clients."""

    members = _waiting(AsyncConsumers.members)
    producers = _waiting(AsyncConsumers.producers)
    running_info = _waiting(AsyncConsumers.running_info)
    consume_directly = _waiting(AsyncConsumers.consume_directly)


class Config(_Part):
    """Looks after running servers."""

    broker = _waiting(AsyncConfig.broker)
    update_broker = _waiting(AsyncConfig.update_broker)
    set_writable = _waiting(AsyncConfig.set_writable)
    clean_expired_queues = _waiting(AsyncConfig.clean_expired_queues)
    clean_unused_topics = _waiting(AsyncConfig.clean_unused_topics)
    delete_expired_log = _waiting(AsyncConfig.delete_expired_log)
    name_server = _waiting(AsyncConfig.name_server)
    update_name_servers = _waiting(AsyncConfig.update_name_servers)
    values = _waiting(AsyncConfig.values)
    value = _waiting(AsyncConfig.value)
    put_value = _waiting(AsyncConfig.put_value)
    delete_value = _waiting(AsyncConfig.delete_value)
    ordered_topics = _waiting(AsyncConfig.ordered_topics)


class Admin:
    """Administration of a cluster, without an event loop of one's own.

    with Admin(name_server="localhost:9876") as admin:
        print(admin.groups.progress("billing").lag)
    """

    def __init__(
        self,
        *,
        name_server: str | None = None,
        client: ClientSettings | None = None,
        settings: AdminSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._admin = AsyncAdmin(
            name_server=name_server, client=client, settings=settings, clock=clock
        )
        self._thread = LoopThread("orbitmq-admin")

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
        """Asks nobody anything yet."""
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
                with suppress(NotRunning):  # somebody else has stopped it meanwhile
                    self._thread.run(self._admin.stop())
            finally:
                self._thread.stop()

    @property
    def topics(self) -> Topics:
        return Topics(self._admin.topics, self._thread)

    @property
    def groups(self) -> Groups:
        return Groups(self._admin.groups, self._thread)

    @property
    def progress(self) -> Progress:
        return Progress(self._admin.progress, self._thread)

    @property
    def messages(self) -> Messages:
        return Messages(self._admin.messages, self._thread)

    @property
    def dead_letters(self) -> DeadLetters:
        return DeadLetters(self._admin.dead_letters, self._thread)

    @property
    def consumers(self) -> Consumers:
        return Consumers(self._admin.consumers, self._thread)

    @property
    def config(self) -> Config:
        return Config(self._admin.config, self._thread)

    def cluster(self) -> ClusterStatus:
        """All brokers and name servers, and whether they are well."""
        return self._thread.run(self._admin.cluster())

    def runtime(self, broker: str) -> RuntimeInfo:
        """What one broker says about itself; it is named as `name`, `name/id` or by its address."""
        return self._thread.run(self._admin.runtime(broker))

    @property
    def requests(self) -> int:
        """How many requests were made so far."""
        return self._admin.requests
