"""Apache's broker, its Java client and ours, side by side, for tests of our client.

Calls of the Java side block; these are coroutines around them, so that our side goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.settings import PullSettings
from orbitmq.client.producer.producer import AsyncProducer
from tests.interop.session import Running, Session, body
from tests.support.client import quick_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from orbitmq.client.admin.groups import GroupProgress
    from orbitmq.client.message import ReceivedMessage
    from orbitmq.client.settings import ClientSettings
    from tests.interop.apache import Release

DEADLINE = 60.0

#: A broker of the new line tells of a reset when it answers the next pull.
SHORT_HOLDS = PullSettings(hold=3.0)

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Beside:
    """A cluster, and clients of both languages for it."""

    release: Release
    name_server: str
    session: Session

    # ---- Java

    async def java(self, command: str, **settings: object) -> list[Line]:
        """Runs a command of ``java/Client.java`` to its end."""
        return await asyncio.to_thread(self.session.run, command, _dashed(settings))

    async def java_send(self, topic: str, count: int, **settings: object) -> list[Line]:
        return await self.java("send", topic=topic, count=count, **settings)

    @contextlib.asynccontextmanager
    async def java_consumer(
        self, topic: str, group: str, **settings: object
    ) -> AsyncIterator[Running]:
        """A consumer that stays for the block."""
        given = {"topic": topic, "group": group, "hold": "", "deadline": 240, **settings}
        running = self.session.start("consume", _dashed(given))
        try:
            yield running
        finally:
            await asyncio.to_thread(running.release)

    # ---- ours

    def settings(self, **changes: Any) -> ClientSettings:
        return quick_settings(self.name_server, **changes)

    def producer(self, group: str = "our-makers", **settings: Any) -> AsyncProducer:
        return AsyncProducer(group, client=self.settings(), **settings)

    def consumer(self, topic: str, group: str, handler: Any, **settings: Any) -> AsyncConsumer:
        """Ours, from the first message on, unless `settings` say otherwise; to be entered.

        It asks anew often, because tests wait for that.
        """
        client = settings.pop("client", None) or self.settings()
        by = {name: settings.pop(name) for name in ("tags", "sql") if name in settings}
        given = {"consume_from": "first", "pull": SHORT_HOLDS, **settings}
        consumer = AsyncConsumer(group, client=client, **given)
        consumer.on(topic, **by)(handler)
        return consumer

    def admin(self) -> AsyncAdmin:
        return AsyncAdmin(client=self.settings())

    async def create_topic(self, topic: str, *, queues: int = 4) -> None:
        async with self.admin() as admin:
            await admin.topics.create(topic, queues=queues)

    async def progress(self, group: str, topic: str) -> GroupProgress:
        async with self.admin() as admin:
            return await admin.groups.progress(group, topic=topic)

    async def until_all_consumed(self, group: str, topic: str) -> None:
        """Its progress in every queue becomes the end of the queue."""

        async def is_done() -> bool:
            progress = await self.progress(group, topic)
            return all(each.consumer_offset == each.broker_offset for each in progress.queues)

        await eventually(is_done)


@dataclass
class Taken:
    """A handler that keeps what it is given, after it has done what the test wants with it."""

    work: Callable[[ReceivedMessage], object] | None = None
    pause: float = 0.0  #: seconds that each message takes
    messages: list[ReceivedMessage] = field(default_factory=list)

    async def __call__(self, message: ReceivedMessage) -> None:
        if self.pause:
            await asyncio.sleep(self.pause)
        self.messages.append(message)
        if self.work is not None:
            self.work(message)

    @property
    def texts(self) -> list[str]:
        return [message.text() for message in self.messages]

    async def until_count(self, count: int) -> None:
        await until(lambda: len(self.messages) >= count)

    async def until_texts(self, wanted: Iterable[str]) -> None:
        expected = set(wanted)
        await until(lambda: expected <= set(self.texts))


async def until(condition: Callable[[], object], deadline: float = DEADLINE) -> None:
    """Returns when a condition holds."""
    async with asyncio.timeout(deadline):
        while not condition():  # noqa: ASYNC110  # conditions of all kinds
            await asyncio.sleep(0.01)


async def eventually(
    condition: Callable[[], Awaitable[bool]], *, pause: float = 0.05, deadline: float = DEADLINE
) -> None:
    """The same, for a condition that somebody has to be asked about."""
    async with asyncio.timeout(deadline):
        while not await condition():  # noqa: ASYNC110  # another process has no event for us
            await asyncio.sleep(pause)


async def java_count(running: Running, count: int) -> list[Line]:
    """Returns when so many messages have come to a Java consumer, with them."""
    await asyncio.to_thread(running.until_count, count)
    return running.messages


def number_of(line: Line) -> int:
    """The number that the Java side made a message with, which is in its body."""
    return number_in(body(line))


def number_in(text: str) -> int:
    return int(text.split(" ", maxsplit=1)[0].rsplit("-", 1)[1])


def _dashed(settings: dict[str, object]) -> dict[str, object]:
    return {name.replace("_", "-"): value for name, value in settings.items()}
