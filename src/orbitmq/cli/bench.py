"""`orbitmq bench`: measures rates and latencies of a cluster from one client process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import math
import os
import struct
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from orbitmq.cli.application import section
from orbitmq.cli.command import Session, check_positive, command
from orbitmq.cli.main import FAILED, Misused
from orbitmq.cli.output import count, rate, size
from orbitmq.cli.output import size as size_of
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.engine import Engine
from orbitmq.client.errors import TopicNotFound
from orbitmq.client.message import Message
from orbitmq.client.producer.core import SendSettings
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.producer.send import SendResult
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer, PollSettings
from orbitmq.client.settings import ClientSettings
from orbitmq.clock import Clock
from orbitmq.console.words import NOTHING, duration, several
from orbitmq.errors import OrbitError
from orbitmq.names import TOOLS_GROUP

_PER_DOUBLING = 64
#: Seconds; shorter times share one bucket.
_LEAST = 1e-6


@dataclass(slots=True)
class Times:
    """A histogram of durations in seconds.

    Each doubling has 64 buckets, so that a percentile is at most 1.6 % too high.
    """

    count: int = 0
    total: float = 0.0
    longest: float = 0.0
    _buckets: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float, number: int = 1) -> None:
        """Count a duration, `number` times."""
        self.count += number
        self.total += seconds * number
        self.longest = max(self.longest, seconds)
        place = math.ceil(math.log2(max(seconds, _LEAST) / _LEAST) * _PER_DOUBLING)
        self._buckets[place] += number

    def merge(self, other: Times) -> None:
        self.count += other.count
        self.total += other.total
        self.longest = max(self.longest, other.longest)
        self._buckets.update(other._buckets)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def percentile(self, share: float) -> float | None:
        """The percentile for a share; None without durations."""
        if not self.count:
            return None
        left = math.ceil(self.count * share)
        for place in sorted(self._buckets):
            left -= self._buckets[place]
            if left <= 0:
                return min(self.longest, _LEAST * 2 ** (place / _PER_DOUBLING))
        return self.longest


@dataclass(slots=True)
class Counts:
    """The counts of a period."""

    messages: int = 0
    bytes: int = 0
    failed: int = 0
    times: Times = field(default_factory=Times)

    def add(self, messages: int, size: int, seconds: float) -> None:
        self.messages += messages
        self.bytes += size
        self.times.add(seconds, messages)

    def merge(self, other: Counts) -> None:
        self.messages += other.messages
        self.bytes += other.bytes
        self.failed += other.failed
        self.times.merge(other.times)


#: The mark of a run and the time of sending, at the beginning of a body.
_STAMP = struct.Struct(">8sd")
LEAST_STAMPED = _STAMP.size
_POLL = 0.5
#: How long an end-to-end run waits for the last messages.
_DRAIN = 10.0
_MANY_FAILURES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a run sends or reads."""

    topic: str
    size: int = 1024
    seconds: float | None = 10.0  #: None: until the count
    count: int | None = None
    rate: float | None = None
    in_flight: int = 256
    batch: int = 1
    compress: bool = False


@dataclass(slots=True)
class RateMeter:
    """Counts by second and in total."""

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
        """End the measured time."""
        if self._ended is None:
            self._ended = self.clock.monotonic()

    def fail(self, number: int, error: BaseException) -> None:
        self.current.failed += number
        self.error = str(error) or type(error).__name__

    async def watch(self, is_over: asyncio.Event) -> None:
        """Report every second until the end."""
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


async def produce(engine: Engine, load: Load, meter: RateMeter, stopping: asyncio.Event) -> None:
    """Send as fast as possible, or at the given rate."""
    async with _producer(engine, load) as producer:
        await _watched(meter, _Sender(producer, load, meter, os.urandom(8)).run(stopping))


async def consume(
    engine: Engine, load: Load, meter: RateMeter, stopping: asyncio.Event, *, follow: bool
) -> None:
    """Read a topic to its end, with `follow` further; changes no progress."""
    consumer = _consumer(engine)
    async with consumer:
        queues = await consumer.queues(load.topic)
        await consumer.assign(queues)
        ends = None if follow else await consumer.end_offsets(queues)
        await (consumer.seek_to_end() if follow else consumer.seek_to_begin())

        async def read() -> None:
            while not _is_over(
                load, meter, stopping, meter.total.messages + meter.current.messages
            ):
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


async def end_to_end(engine: Engine, load: Load, meter: RateMeter, stopping: asyncio.Event) -> None:
    """Send and receive; messages are counted when received."""
    mark = os.urandom(8)
    consumer = _consumer(engine)
    async with consumer, _producer(engine, load) as producer:
        await consumer.assign(await consumer.queues(load.topic))
        await consumer.seek_to_end()
        # Sending has its own meter; the result counts received messages.
        sent = RateMeter("produce", meter.clock, lambda _: None)
        sender = _Sender(producer, load, sent, mark)
        is_sent = asyncio.Event()

        async def send() -> None:
            sent.begin()
            try:
                await sender.run(stopping)
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


async def _watched(meter: RateMeter, work: Awaitable[None]) -> None:
    is_over = asyncio.Event()
    meter.begin()
    watching = asyncio.create_task(meter.watch(is_over))
    try:
        await work
    finally:
        meter.end()
        is_over.set()
        await watching


def _is_over(load: Load, meter: RateMeter, stopping: asyncio.Event, done: int) -> bool:
    if stopping.is_set() or (load.count is not None and done >= load.count):
        return True
    return load.seconds is not None and meter.clock.monotonic() - meter.began >= load.seconds


class _Sender:
    """Sends messages with a bounded number in flight."""

    def __init__(self, producer: AsyncProducer, load: Load, meter: RateMeter, mark: bytes) -> None:
        self._producer = producer
        self._load = load
        self._meter = meter
        self._mark = mark
        # Random bytes, so that compression costs what it costs for real data.
        self._filling = os.urandom(load.size)
        self._begun = 0
        self._room = asyncio.Semaphore(max(1, load.in_flight // max(1, load.batch)))
        self.acknowledged = 0
        self.failed = 0

    async def run(self, stopping: asyncio.Event) -> None:
        """Returns when everything is answered. Raises when nothing succeeds."""
        while not _is_over(self._load, self._meter, stopping, self._begun):
            due = await self._due(stopping)
            if due is None:
                break
            if self.failed >= _MANY_FAILURES and not self.acknowledged:
                break
            await self._room.acquire()
            await self._submit(due)
        await self._producer.flush()
        # Each batch is a task; all slots are free when all have ended.
        for _ in range(max(1, self._load.in_flight // max(1, self._load.batch))):
            await self._room.acquire()
        self._meter.end()

    async def _due(self, stopping: asyncio.Event) -> float | None:
        """Wait until the next message is due and return that time; None: the run ends."""
        now = self._meter.clock.monotonic()
        if self._load.rate is None:
            return now
        due = self._meter.began + self._begun / self._load.rate
        if due > now:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due - now):
                    await stopping.wait()
        return None if stopping.is_set() else due

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
            # Immediate refusals must not starve the event loop.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRecord:
    """A measurement: of a second (event `progress`) or of the run (`result`)."""

    event: str
    kind: str  #: produce, consume or end-to-end
    at_seconds: float  #: since the start of the run
    seconds: float  #: the measured time
    messages: int
    bytes: int
    messages_per_second: float
    bytes_per_second: float
    failed: int
    #: Of a message. Produce: until acknowledged, with --rate since it was due; consume: its age;
    #: end-to-end: from sending to receiving. Null without messages.
    mean_seconds: float | None
    p50_seconds: float | None
    p95_seconds: float | None
    p99_seconds: float | None
    p999_seconds: float | None
    max_seconds: float | None
    error: str | None = None  #: why the last one failed

    @classmethod
    def of(
        cls,
        event: str,
        kind: str,
        counts: Counts,
        *,
        at: float,
        seconds: float,
        error: str | None = None,
    ) -> BenchRecord:
        times = counts.times
        span = max(seconds, 1e-9)
        return cls(
            event=event,
            kind=kind,
            at_seconds=at,
            seconds=seconds,
            messages=counts.messages,
            bytes=counts.bytes,
            messages_per_second=counts.messages / span,
            bytes_per_second=counts.bytes / span,
            failed=counts.failed,
            mean_seconds=times.mean,
            p50_seconds=times.percentile(0.5),
            p95_seconds=times.percentile(0.95),
            p99_seconds=times.percentile(0.99),
            p999_seconds=times.percentile(0.999),
            max_seconds=times.longest if times.count else None,
            error=error,
        )

    def line(self) -> str:
        """The record as a line."""
        failed = f"  {count(self.failed)} failed" if self.failed else ""
        return (
            f"{duration(self.at_seconds):>8}  {rate(self.messages_per_second):>12}/s  "
            f"{size(self.bytes_per_second):>10}/s  p50 {brief(self.p50_seconds)}  "
            f"p99 {brief(self.p99_seconds)}  max {brief(self.max_seconds)}{failed}"
        )

    def facts(self) -> Sequence[tuple[str, str]]:
        """The record as names and values."""
        found = [
            ("messages", count(self.messages)),
            ("time", duration(self.seconds)),
            ("rate", f"{rate(self.messages_per_second)}/s, {size(self.bytes_per_second)}/s"),
            ("mean", brief(self.mean_seconds)),
            ("p50", brief(self.p50_seconds)),
            ("p95", brief(self.p95_seconds)),
            ("p99", brief(self.p99_seconds)),
            ("p99.9", brief(self.p999_seconds)),
            ("max", brief(self.max_seconds)),
        ]
        if self.failed:
            why = f", the last: {self.error}" if self.error else ""
            found.append(("failed", f"{several(self.failed, 'message')}{why}"))
        return found


def brief(seconds: float | None) -> str:
    """A time to three figures: `1.23 ms`, `45.6 ms`, `7.89 s`."""
    if seconds is None:
        return NOTHING
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        value = seconds * factor
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else duration(seconds)


app = section()

Topic: TypeAlias = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The topic; created if it does not exist.")
]
Size: TypeAlias = Annotated[
    int, typer.Option("--size", "-s", min=1, max=4_000_000, help="The size of a body in bytes.")
]
Rate: TypeAlias = Annotated[
    float | None,
    typer.Option("--rate", "-r", help="Messages per second; by default as many as possible."),
]
InFlight: TypeAlias = Annotated[
    int, typer.Option("--in-flight", min=1, help="The maximum number of messages in flight.")
]
Batch: TypeAlias = Annotated[
    int, typer.Option("--batch", min=1, max=10_000, help="Messages per request.")
]
MAX_BATCH_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """The flags of every measurement."""

    number: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-l",
            min=1,
            help="The number of messages; without it and --timeout the run takes 10 s.",
        ),
    ] = None
    queues: Annotated[
        int, typer.Option("--queues", min=1, help="Queues per broker, if the topic is created.")
    ] = 8
    embedded: Annotated[
        bool,
        typer.Option(
            "--embedded", help="Start a broker on this machine, measure it and delete it."
        ),
    ] = False
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Plot rates and latencies to a .svg, .png or .pdf file."
        ),
    ] = None

    def check(self) -> None:
        if self.plot is None:
            return
        if self.plot.suffix not in (".svg", ".png", ".pdf"):
            raise Misused(f"--plot must end in .svg, .png or .pdf, got {str(self.plot)!r}")
        if importlib.util.find_spec("matplotlib") is None:
            raise Misused("--plot needs matplotlib, which is not installed; pip install matplotlib")


@command(
    app,
    "produce",
    examples=(
        "orbitmq bench produce load --size 1024 --timeout 30",
        "orbitmq bench produce load --batch 100 --in-flight 2000 --plot load.svg",
        "orbitmq bench produce load --embedded --limit 100000 --json",
    ),
    prints=BenchRecord,
    former={"--count": "--limit", "-c": "--limit", "--seconds": "--timeout"},
    changes=True,
)
async def bench_produce(
    session: Session,
    topic: Topic,
    measuring: Measuring,
    size: Size = 1024,
    rate: Rate = None,
    in_flight: InFlight = 256,
    batch: Batch = 1,
    compress: Annotated[
        bool, typer.Option("--compress", help="Compress bodies of 4 KiB and more.")
    ] = False,
) -> None:
    """Send messages; measure the rate and the latency of acknowledgements."""
    if size * batch > MAX_BATCH_BYTES:
        raise Misused(f"--size times --batch must be below {MAX_BATCH_BYTES:,} bytes")
    load = _load(session, topic, measuring, size, rate, in_flight, batch, compress=compress)
    await _measure(session, "produce", load, measuring, produce)


@command(
    app,
    "consume",
    examples=(
        "orbitmq bench consume load",
        "orbitmq bench consume load --follow --timeout 60",
        "orbitmq bench consume load --limit 100000 --json | tail -1",
    ),
    prints=BenchRecord,
    former={"--count": "--limit", "-c": "--limit", "--seconds": "--timeout"},
)
async def bench_consume(
    session: Session,
    topic: Topic,
    measuring: Measuring,
    follow: Annotated[
        bool, typer.Option("--follow", help="Start at the end and wait for new messages.")
    ] = False,
) -> None:
    """Read a topic from its first message and measure the rate and the age of messages.

    Uses no group and changes no progress.
    """
    if measuring.embedded:
        raise Misused(
            "a new broker has nothing to consume; use: orbitmq bench end-to-end --embedded"
        )
    load = _load(session, topic, measuring, 1, None, 1, 1)

    async def work(engine: Engine, load: Load, meter: RateMeter, stopping: asyncio.Event) -> None:
        await consume(engine, load, meter, stopping, follow=follow)

    await _measure(session, "consume", load, measuring, work)


@command(
    app,
    "end-to-end",
    examples=(
        "orbitmq bench end-to-end load --rate 1000",
        "orbitmq bench end-to-end load --embedded --rate 5000 --timeout 20 --plot times.png",
        "orbitmq bench end-to-end load --limit 20000 --json | tail -1",
    ),
    prints=BenchRecord,
    former={"--count": "--limit", "-c": "--limit", "--seconds": "--timeout"},
    changes=True,
)
async def bench_end_to_end(
    session: Session,
    topic: Topic,
    measuring: Measuring,
    size: Size = 1024,
    rate: Rate = 1000.0,
    in_flight: InFlight = 256,
    batch: Batch = 1,
) -> None:
    """Send and receive messages; measure the time from sending to receiving."""
    if size < LEAST_STAMPED:
        raise Misused(f"--size must be {LEAST_STAMPED} or more here: bodies carry their time")
    if size * batch > MAX_BATCH_BYTES:
        raise Misused(f"--size times --batch must be below {MAX_BATCH_BYTES:,} bytes")
    load = _load(session, topic, measuring, size, rate, in_flight, batch)
    await _measure(session, "end-to-end", load, measuring, end_to_end)


def _seconds(session: Session, measuring: Measuring) -> float | None:
    """How long to measure: as long as the command may take, or 10 s without any limit."""
    left = session.seconds_left
    return 10.0 if left is None and measuring.number is None else left


def _load(
    session: Session,
    topic: str,
    measuring: Measuring,
    size: int,
    rate: float | None,
    in_flight: int,
    batch: int,
    *,
    compress: bool = False,
) -> Load:
    measuring.check()
    check_positive(rate, "--rate")
    return Load(
        topic=topic,
        size=size,
        seconds=_seconds(session, measuring),
        count=measuring.number,
        rate=rate,
        in_flight=max(in_flight, batch),
        batch=batch,
        compress=compress,
    )


Work: TypeAlias = Callable[[Engine, Load, RateMeter, asyncio.Event], Awaitable[None]]


async def _measure(
    session: Session, kind: str, load: Load, measuring: Measuring, work: Work
) -> None:
    out = session.out

    def tell(record: BenchRecord) -> None:
        if out.is_json:
            out.record(record)
        else:
            out.note(record.line())

    meter = RateMeter(kind, out.clock, tell)
    with session.stop_requested() as stopping:
        async with _engine(session, measuring.embedded) as engine:
            admin = AsyncAdmin.on(engine)
            if session.is_dry_run:
                await _tell_plan(session, admin, load, measuring)
                return
            await _see_to_topic(admin, load.topic, measuring.queues, is_made=kind != "consume")
            await work(engine, load, meter, stopping)
    result = meter.result()
    if out.is_json:
        out.record(result)
    else:
        out.facts(*result.facts())
    if measuring.plot is not None:
        draw(meter.records or [result], measuring.plot, f"{kind} {load.topic}")
        out.note(f"drawn in {measuring.plot}")
    if result.failed:
        raise typer.Exit(FAILED)


@contextlib.asynccontextmanager
async def _engine(session: Session, embedded: bool) -> AsyncIterator[Engine]:
    if not embedded:
        yield session.engine
        return
    async with (
        embedded_cluster() as name_server,
        Engine(ClientSettings(name_servers=(name_server,))) as engine,
    ):
        yield engine


async def _tell_plan(session: Session, admin: AsyncAdmin, load: Load, measuring: Measuring) -> None:
    """Print the plan of a dry run."""
    number = (
        f"messages for {load.seconds:g} s"
        if load.count is None
        else f"{several(load.count, 'message')}"
    )
    try:
        await admin.topics.route(load.topic)
    except TopicNotFound:
        made = f", which would be made with {several(measuring.queues, 'queue')} on each broker"
    else:
        made = ""
    bound = "" if load.rate is None else f", {load.rate:g} a second"
    what = f"{number} of {size_of(load.size)}{bound}"
    session.out.note(f"dry run: {what} would be sent to topic {load.topic}{made}")


async def _see_to_topic(admin: AsyncAdmin, topic: str, queues: int, *, is_made: bool) -> None:
    try:
        await admin.topics.route(topic)
    except TopicNotFound:
        if not is_made:
            raise
        await admin.topics.create(topic, queues=queues, exist_ok=True)


def draw(records: Sequence[BenchRecord], path: Path, title: str) -> None:
    """Draw rate and latency over time."""
    import matplotlib as mpl  # noqa: PLC0415  # slow, and only at the end

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    at = [each.at_seconds for each in records]
    figure, (rates, times) = plt.subplots(2, 1, sharex=True, figsize=(9, 5.2))
    rates.plot(at, [each.messages_per_second for each in records], linewidth=1.4)
    rates.set_ylabel("messages per second")
    rates.set_title(title, fontsize=10)
    for name, label in (("p50_seconds", "p50"), ("p99_seconds", "p99"), ("max_seconds", "max")):
        values = [1000 * (getattr(each, name) or 0.0) for each in records]
        times.plot(at, values, label=label, linewidth=1.2)
    times.set_ylabel("milliseconds")
    times.set_xlabel("seconds")
    times.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


@contextlib.asynccontextmanager
async def embedded_cluster() -> AsyncIterator[str]:
    """The name server's address of a temporary cluster in a child process."""
    from orbitmq.cli.servers import ServerProcess  # noqa: PLC0415  # slow to import

    # Settings in the environment are for other brokers.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ORBITMQ_")}
    process = ServerProcess("the broker to measure", environment)
    with tempfile.TemporaryDirectory(prefix="orbitmq-bench-") as folder:
        try:
            await process.start(
                *("up", "--data", folder, "--namesrv-port", "0", "--broker-port", "0")
            )
            yield next(each.address for each in process.listening if each.role == "name server")
        finally:
            await process.stop()
