"""The load of `orbitmq bench`: what sends, what consumes, and what is counted meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from orbitmq.cli.benchcounts import Counts
from orbitmq.cli.benchrecords import BenchRecord
from orbitmq.client.engine import Engine
from orbitmq.client.message import Message
from orbitmq.client.names import TOOLS_GROUP
from orbitmq.client.producer.asyncproducer import AsyncProducer
from orbitmq.client.producer.results import SendResult
from orbitmq.client.producer.settings import SendSettings
from orbitmq.client.pullconsumer.asyncpullconsumer import AsyncPullConsumer
from orbitmq.client.pullconsumer.settings import PollSettings
from orbitmq.clock import Clock
from orbitmq.errors import OrbitError

#: What marks a message of one run, and when it was sent; both at the beginning of its body.
_STAMP = struct.Struct(">8sd")
LEAST_STAMPED = _STAMP.size
_POLL = 0.5
#: How long an end-to-end run waits for messages that are still on their way.
_DRAIN = 10.0
_MANY_FAILURES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is to be done."""

    topic: str
    size: int = 1024
    seconds: float | None = 10.0  #: None: until the count
    count: int | None = None
    rate: float | None = None
    in_flight: int = 256
    batch: int = 1
    compress: bool = False


@dataclass(slots=True)
class Meter:
    """Counts, second by second and in all."""

    kind: str
    clock: Clock
    tell: Callable[[BenchRecord], object]
    interval: float = 1.0
    began: float = 0.0
    total: Counts = field(default_factory=Counts)
    current: Counts = field(default_factory=Counts)
    records: list[BenchRecord] = field(default_factory=list)
    error: str | None = None
    _last: float = 0.0
    _ended: float | None = None

    def begin(self) -> None:
        self.began = self._last = self.clock.monotonic()

    def end(self) -> None:
        """The time that counts is over; what comes later is not waited for with it."""
        if self._ended is None:
            self._ended = self.clock.monotonic()

    def fail(self, number: int, error: BaseException) -> None:
        self.current.failed += number
        self.error = str(error) or type(error).__name__

    async def watch(self, is_over: asyncio.Event) -> None:
        """Tell every second until it is over."""
        while not is_over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.interval):
                    await is_over.wait()
            if not is_over.is_set():
                self._turn()

    def _turn(self) -> None:
        now = self.clock.monotonic()
        record = BenchRecord.of(
            "progress",
            self.kind,
            self.current,
            at=now - self.began,
            seconds=now - self._last,
            error=self.error,
        )
        self._last = now
        self.total.merge(self.current)
        self.current = Counts()
        self.records.append(record)
        self.tell(record)

    def result(self) -> BenchRecord:
        self.total.merge(self.current)
        self.current = Counts()
        took = (self._ended or self.clock.monotonic()) - self.began
        return BenchRecord.of(
            "result", self.kind, self.total, at=took, seconds=took, error=self.error
        )


async def produce(engine: Engine, load: Load, meter: Meter, wish: asyncio.Event) -> None:
    """Send as fast as the cluster takes it, or at the given rate."""
    async with _producer(engine, load) as producer:
        await _watched(meter, _Sender(producer, load, meter, os.urandom(8)).run(wish))


async def consume(
    engine: Engine, load: Load, meter: Meter, wish: asyncio.Event, *, follow: bool
) -> None:
    """Read what is there, and with `follow` what comes; nobody's progress is changed."""
    consumer = _consumer(engine)
    async with consumer:
        queues = await consumer.queues(load.topic)
        await consumer.assign(queues)
        ends = None if follow else await consumer.end_offsets(queues)
        await (consumer.seek_to_end() if follow else consumer.seek_to_begin())

        async def read() -> None:
            while not _is_over(load, meter, wish, meter.total.messages + meter.current.messages):
                messages = await consumer.poll(_POLL, max_messages=1000)
                now = meter.clock.now()
                for message in messages:
                    age = max(0.0, now - message.born_at)
                    meter.current.add(1, len(message.body), age)
                if ends is not None and all(
                    consumer.position(queue) >= end for queue, end in ends.items()
                ):
                    break
            meter.end()

        await _watched(meter, read())


async def end_to_end(engine: Engine, load: Load, meter: Meter, wish: asyncio.Event) -> None:
    """Send, and receive what was sent; counted when it is received."""
    mark = os.urandom(8)
    consumer = _consumer(engine)
    async with consumer, _producer(engine, load) as producer:
        await consumer.assign(await consumer.queues(load.topic))
        await consumer.seek_to_end()
        # What is sent is counted apart; only what arrives is the result.
        sent = Meter("produce", meter.clock, lambda _: None)
        sender = _Sender(producer, load, sent, mark)
        is_sent = asyncio.Event()

        async def send() -> None:
            sent.begin()
            try:
                await sender.run(wish)
            finally:
                is_sent.set()
                meter.end()

        async def receive() -> None:
            deadline: float | None = None
            while True:
                for message in await consumer.poll(0.1 if is_sent.is_set() else _POLL):
                    if len(message.body) >= LEAST_STAMPED:
                        found, at = _STAMP.unpack_from(message.body)
                        if found == mark:
                            took = max(0.0, meter.clock.monotonic() - at)
                            meter.current.add(1, len(message.body), took)
                arrived = meter.total.messages + meter.current.messages
                if is_sent.is_set():
                    if arrived >= sender.acknowledged:
                        return
                    deadline = deadline or meter.clock.monotonic() + _DRAIN
                    if meter.clock.monotonic() >= deadline:
                        missing = sender.acknowledged - arrived
                        meter.fail(missing, TimeoutError(f"did not arrive within {_DRAIN:g} s"))
                        return

        async def both() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(send())
                tasks.create_task(receive())

        try:
            await _watched(meter, both())
        except* OrbitError as errors:
            raise errors.exceptions[0] from None
        if sent.current.failed:
            meter.current.failed += sent.current.failed
            meter.error = sent.error


def _producer(engine: Engine, load: Load) -> AsyncProducer:
    return AsyncProducer.on(
        engine,
        sending=SendSettings(
            max_in_flight=load.in_flight,
            compress_from=4096 if load.compress else 0,
        ),
    )


def _consumer(engine: Engine) -> AsyncPullConsumer:
    return AsyncPullConsumer.on(engine, TOOLS_GROUP, polling=PollSettings(auto_commit=False))


async def _watched(meter: Meter, work: Awaitable[None]) -> None:
    is_over = asyncio.Event()
    meter.begin()
    watching = asyncio.create_task(meter.watch(is_over))
    try:
        await work
    finally:
        meter.end()
        is_over.set()
        await watching


def _is_over(load: Load, meter: Meter, wish: asyncio.Event, done: int) -> bool:
    if wish.is_set() or (load.count is not None and done >= load.count):
        return True
    return load.seconds is not None and meter.clock.monotonic() - meter.began >= load.seconds


class _Sender:
    """Keeps messages on their way."""

    def __init__(self, producer: AsyncProducer, load: Load, meter: Meter, mark: bytes) -> None:
        self._producer = producer
        self._load = load
        self._meter = meter
        self._mark = mark
        # Bytes that do not shrink, so that compression is measured as it would be for real data.
        self._filling = os.urandom(load.size)
        self._begun = 0
        self._room = asyncio.Semaphore(max(1, load.in_flight // max(1, load.batch)))
        self.acknowledged = 0
        self.failed = 0

    async def run(self, wish: asyncio.Event) -> None:
        """Returns when all that was sent is answered. Raises when nothing gets through at all."""
        while not _is_over(self._load, self._meter, wish, self._begun):
            due = await self._due(wish)
            if due is None:
                break
            if self.failed >= _MANY_FAILURES and not self.acknowledged:
                break
            await self._room.acquire()
            await self._submit(due)
        await self._producer.flush()
        # Batches are tasks of their own: when all have left, every place is free.
        for _ in range(max(1, self._load.in_flight // max(1, self._load.batch))):
            await self._room.acquire()
        self._meter.end()

    async def _due(self, wish: asyncio.Event) -> float | None:
        """When the next message is to go, waited for; None: it is to end."""
        now = self._meter.clock.monotonic()
        if self._load.rate is None:
            return now
        due = self._meter.began + self._begun / self._load.rate
        if due > now:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due - now):
                    await wish.wait()
        return None if wish.is_set() else due

    async def _submit(self, due: float) -> None:
        number = self._load.batch
        if self._load.count is not None:
            number = min(number, self._load.count - self._begun)
        self._begun += number
        sent: asyncio.Future[SendResult] | asyncio.Future[list[SendResult]]
        try:
            if self._load.batch == 1:
                sent = await self._producer.submit(self._message())
            else:
                messages = [self._message() for _ in range(number)]
                sent = asyncio.ensure_future(self._producer.send_batch(messages))
        except OrbitError as error:
            self._room.release()
            self._fail(number, error)
            # A refusal that comes at once would leave no turn for anybody else.
            await asyncio.sleep(0)
            return
        sent.add_done_callback(functools.partial(self._answered, number, due))

    def _answered(
        self,
        number: int,
        due: float,
        sent: asyncio.Future[SendResult] | asyncio.Future[list[SendResult]],
    ) -> None:
        self._room.release()
        if sent.cancelled():
            return
        if (error := sent.exception()) is not None:
            self._fail(number, error)
            return
        self.acknowledged += number
        took = self._meter.clock.monotonic() - due
        self._meter.current.add(number, number * self._load.size, max(0.0, took))

    def _fail(self, number: int, error: BaseException) -> None:
        self.failed += number
        self._meter.fail(number, error)

    def _message(self) -> Message:
        body = self._filling
        if len(body) >= LEAST_STAMPED:
            stamp = _STAMP.pack(self._mark, self._meter.clock.monotonic())
            body = stamp + body[LEAST_STAMPED:]
        return Message(self._load.topic, body)
