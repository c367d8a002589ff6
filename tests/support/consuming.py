"""Queues, messages and consumption for tests, without pulling and without a broker."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orbitmq.client.consumer import dispatch
from orbitmq.client.consumer.handlers import Binding, bind_handler, bind_listener
from orbitmq.client.consumer.progress import MemoryProgress
from orbitmq.client.consumer.settings import ConsumeSettings
from orbitmq.client.consumer.statistics import Statistics
from orbitmq.client.consumer.verdict import DEAD, Failure
from orbitmq.client.consumer.window import OwnedQueue, Ownership
from orbitmq.client.engine import Engine
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.clock import Clock
from orbitmq.message.properties import RETRY_TOPIC, UNIQ_KEY
from orbitmq.message.stored import StoredMessage
from orbitmq.names import retry_topic

GROUP = "billing"
QUEUE = Queue("orders", "broker-a", 0)

#: Nothing in a test takes as long; what does has failed.
DEADLINE = 30.0


async def until(condition: Callable[[], object], *, deadline: float = DEADLINE) -> None:
    """Wait for a condition to become true."""
    async with asyncio.timeout(deadline):
        while not condition():  # noqa: ASYNC110  # conditions of all kinds
            await asyncio.sleep(0.002)


async def until_at_least(read: Callable[[], int], wanted: int) -> None:
    """Wait until a number has grown so large."""
    await until(lambda: read() >= wanted)


def received(
    offset: int = 0,
    *,
    body: bytes | None = None,
    queue: Queue = QUEUE,
    reconsume_times: int = 0,
    properties: Mapping[str, str] | None = None,
) -> ReceivedMessage:
    """A message of a queue."""
    stored = StoredMessage.build(
        topic=queue.topic,
        stored_body=str(offset).encode() if body is None else body,
        properties={UNIQ_KEY: f"ID{offset}"} | dict(properties or {}),
        queue_id=queue.id,
        queue_offset=offset,
        physical_offset=offset * 1000,
        reconsume_times=reconsume_times,
    )
    return ReceivedMessage(stored, queue, GROUP)


def retried(offset: int, topic: str, *, reconsume_times: int = 1) -> ReceivedMessage:
    """A message of the group's retry topic that was sent to `topic`."""
    queue = Queue(retry_topic(GROUP), "broker-a", 0)
    return received(
        offset, queue=queue, reconsume_times=reconsume_times, properties={RETRY_TOPIC: topic}
    )


@dataclass
class SentBack:
    """Stands for the broker that takes failed messages back, as long as `takes` says so."""

    takes: bool = True
    #: Raised instead, as by a mistake of ours.
    raises: Exception | None = None
    #: Set to let those go on that wait for the broker.
    gate: asyncio.Event | None = None
    back: list[tuple[ReceivedMessage, Failure]] = field(default_factory=list)
    given_up: list[tuple[ReceivedMessage, Failure]] = field(default_factory=list)

    async def send_back(self, message: ReceivedMessage, failure: Failure) -> bool:
        self.back.append((message, failure))
        return await self._answer()

    def is_dead(self, message: ReceivedMessage, failure: Failure) -> bool:
        return failure.level == DEAD

    async def give_up(self, message: ReceivedMessage, failure: Failure) -> bool:
        self.given_up.append((message, failure))
        return await self._answer()

    async def _answer(self) -> bool:
        if self.gate is not None:
            await self.gate.wait()
        if self.raises is not None:
            raise self.raises
        return self.takes

    @property
    def offsets(self) -> list[int]:
        return [message.queue_offset for message, _ in self.back]


class Gate:
    """A handler that waits, in its thread, until a test lets it go, and then may raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.entered: list[int] = []
        self._error = error
        self._opened = threading.Event()

    def __call__(self, message: ReceivedMessage) -> None:
        self.entered.append(message.queue_offset)
        self._opened.wait(DEADLINE)
        if self._error is not None:
            raise self._error

    def open(self) -> None:
        self._opened.set()


@dataclass
class LockStub:
    """An order lock that a test takes away."""

    held: bool = True

    def is_held(self, now: float) -> bool:
        return self.held


@dataclass
class Bench:
    """Consumption with everything around it in the hands of a test."""

    engine: Engine
    consumption: Any
    progress: MemoryProgress
    sent_back: SentBack
    statistics: Statistics
    bindings: dispatch.Bindings

    def own(
        self, messages: Sequence[ReceivedMessage] = (), *, lock: LockStub | None = None
    ) -> OwnedQueue:
        """Own the queue of these messages, and have them consumed."""
        queue = messages[0].queue if messages else QUEUE
        begin = messages[0].queue_offset if messages else 0
        owned = OwnedQueue(queue, begin, now=self.engine.clock.monotonic(), lock=lock)
        if messages:
            self.feed(owned, messages)
        return owned

    def feed(self, owned: OwnedQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Have messages arrive, as pulling would."""
        new = owned.window.add(list(messages))
        self.consumption.accept(owned, new)

    def position(self, owned: OwnedQueue) -> int | None:
        return self.progress.read(owned.queue)


@contextlib.asynccontextmanager
async def consuming(
    handler: Callable[..., Any] | Mapping[str, Binding],
    *,
    ordered: bool = False,
    broadcasting: bool = False,
    batch: bool | None = None,
    listener: bool = False,
    lapsed: Callable[[OwnedQueue], None] | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> AsyncIterator[Bench]:
    """Consumption of `orders` by a handler, with `settings` of `ConsumeSettings`."""
    client = ClientSettings(name_servers=("127.0.0.1:9",), client_ip="127.0.0.1")
    engine = Engine(client, clock=clock)
    await engine.start()
    consume = ConsumeSettings(**settings)
    if isinstance(handler, Mapping):
        by_topic = dict(handler)
    elif listener:
        by_topic = {
            "orders": bind_listener(
                handler, group=GROUP, batch_size=consume.batch_size, in_order=ordered
            )
        }
    else:
        bound = bind_handler(handler, group=GROUP, batch=batch, batch_size=consume.batch_size)
        by_topic = {"orders": bound}
    sent_back = SentBack()
    progress = MemoryProgress()
    statistics = Statistics(engine.clock.monotonic)
    bindings = dispatch.Bindings(by_topic, GROUP)
    parts = dispatch.Parts(
        engine,
        GROUP,
        bindings,
        progress,
        None if broadcasting else sent_back,  # type: ignore[arg-type]  # stands for it
        consume,
        statistics,
    )
    consumption = (
        dispatch.OrderlyConsumption(parts, lapsed=lapsed)
        if ordered
        else dispatch.ConcurrentConsumption(parts)
    )
    await consumption.start()
    try:
        yield Bench(engine, consumption, progress, sent_back, statistics, bindings)
    finally:
        await consumption.stop()
        await engine.stop()


def called(
    binding: Binding, messages: Sequence[ReceivedMessage], ownership: Ownership | None = None
) -> Any:
    """The outcome of a handler, called as workers call it."""
    if not binding.is_async:
        return binding.call(QUEUE, messages, ownership)

    async def call() -> Any:
        return await binding.call_async(QUEUE, messages, ownership)

    return asyncio.run(call())
