"""`orbitmq bench`: what a cluster does under load, seen by one client process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from orbitmq.cli.benchload import LEAST_STAMPED, Load, Meter, consume, end_to_end, produce
from orbitmq.cli.benchrecords import BenchRecord
from orbitmq.cli.benchstage import embedded_cluster
from orbitmq.cli.choosing import check_positive, seconds
from orbitmq.cli.declaring import command, section
from orbitmq.cli.errors import FAILED, Misused
from orbitmq.cli.session import Session
from orbitmq.cli.stopping import wish_to_stop
from orbitmq.cli.wording import several
from orbitmq.cli.wording import size as size_of
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.errors import TopicNotFound
from orbitmq.client.engine import Engine
from orbitmq.client.settings import ClientSettings

app = section("Measure what a cluster does: sending, consuming, and both.")

Topic: TypeAlias = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The topic to use; made if it is not there.")
]
Size: TypeAlias = Annotated[
    int, typer.Option("--size", "-s", min=1, max=4_000_000, help="Bytes of a body.")
]
Rate: TypeAlias = Annotated[
    float | None, typer.Option("--rate", "-r", help="Messages per second; as many as go else.")
]
InFlight: TypeAlias = Annotated[
    int, typer.Option("--in-flight", min=1, help="Messages that wait for their answer at once.")
]
Batch: TypeAlias = Annotated[
    int, typer.Option("--batch", min=1, max=10_000, help="Messages of one request.")
]
MAX_BATCH_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """The flags of every measurement."""

    length: Annotated[
        str | None,
        typer.Option(
            "--seconds", metavar="DURATION", help="How long; 10s by default without --count."
        ),
    ] = None
    number: Annotated[
        int | None, typer.Option("--count", "-c", min=1, help="End after so many messages.")
    ] = None
    queues: Annotated[
        int, typer.Option("--queues", min=1, help="Of a topic that is made, on each broker.")
    ] = 8
    embedded: Annotated[
        bool,
        typer.Option(
            "--embedded", help="Measure a new broker on this machine, deleted at the end."
        ),
    ] = False
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw rate and times, as .svg, .png or .pdf."),
    ] = None

    def check(self) -> None:
        if self.plot is None:
            return
        if self.plot.suffix not in (".svg", ".png", ".pdf"):
            raise Misused(f"--plot must end in .svg, .png or .pdf, got {str(self.plot)!r}")
        if importlib.util.find_spec("matplotlib") is None:
            raise Misused("--plot needs matplotlib, which is not installed; pip install matplotlib")

    def seconds(self) -> float | None:
        if self.length is None:
            return None if self.number is not None else 10.0
        found = seconds(self.length, "--seconds")
        if not found > 0:
            raise Misused(f"--seconds must be longer than nothing, got {self.length!r}")
        return found


@command(
    app,
    "produce",
    examples=(
        "orbitmq bench produce load --size 1024 --seconds 30",
        "orbitmq bench produce load --batch 100 --in-flight 2000 --plot load.svg",
        "orbitmq bench produce load --embedded --count 100000 --json",
    ),
    prints=BenchRecord,
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
    """Send messages, and measure how many are acknowledged and how soon."""
    if size * batch > MAX_BATCH_BYTES:
        raise Misused(f"--size times --batch must be below {MAX_BATCH_BYTES:,} bytes")
    load = _load(topic, measuring, size, rate, in_flight, batch, compress=compress)
    await _measure(session, "produce", load, measuring, produce)


@command(
    app,
    "consume",
    examples=(
        "orbitmq bench consume load",
        "orbitmq bench consume load --follow --seconds 60",
        "orbitmq bench consume load --count 100000 --json | tail -1",
    ),
    prints=BenchRecord,
)
async def bench_consume(
    session: Session,
    topic: Topic,
    measuring: Measuring,
    follow: Annotated[
        bool, typer.Option("--follow", help="Begin at the end, and go on with what comes.")
    ] = False,
) -> None:
    """Read the messages of a topic from the first on, and measure how many come and how old.

    No group is involved, and nobody's progress is changed.
    """
    if measuring.embedded:
        raise Misused("--embedded has nothing to consume; use: orbitmq bench end-to-end --embedded")
    load = _load(topic, measuring, 1, None, 1, 1)

    async def work(engine: Engine, load: Load, meter: Meter, wish: asyncio.Event) -> None:
        await consume(engine, load, meter, wish, follow=follow)

    await _measure(session, "consume", load, measuring, work)


@command(
    app,
    "end-to-end",
    examples=(
        "orbitmq bench end-to-end load --rate 1000",
        "orbitmq bench end-to-end load --embedded --rate 5000 --seconds 20 --plot times.png",
        "orbitmq bench end-to-end load --count 20000 --json | tail -1",
    ),
    prints=BenchRecord,
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
    """Send and receive at once, and measure how long messages are on their way."""
    if size < LEAST_STAMPED:
        raise Misused(f"--size must be {LEAST_STAMPED} or more here: bodies carry their time")
    if size * batch > MAX_BATCH_BYTES:
        raise Misused(f"--size times --batch must be below {MAX_BATCH_BYTES:,} bytes")
    load = _load(topic, measuring, size, rate, in_flight, batch)
    await _measure(session, "end-to-end", load, measuring, end_to_end)


def _load(
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
        seconds=measuring.seconds(),
        count=measuring.number,
        rate=rate,
        in_flight=max(in_flight, batch),
        batch=batch,
        compress=compress,
    )


Work: TypeAlias = Callable[[Engine, Load, Meter, asyncio.Event], Awaitable[None]]


async def _measure(
    session: Session, kind: str, load: Load, measuring: Measuring, work: Work
) -> None:
    out = session.out

    def tell(record: BenchRecord) -> None:
        if out.is_json:
            out.record(record)
        else:
            out.note(record.line())

    meter = Meter(kind, out.clock, tell)
    with wish_to_stop() as wish:
        async with _engine(session, measuring.embedded) as engine:
            admin = AsyncAdmin.on(engine)
            if session.is_dry_run:
                await _tell_plan(session, admin, load, measuring)
                return
            await _see_to_topic(admin, load.topic, measuring.queues, is_made=kind != "consume")
            await work(engine, load, meter, wish)
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
    """What would be sent where; nothing is."""
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
    """Rate and times over time, as a picture."""
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
