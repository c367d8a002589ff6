"""`orbitmq produce`: messages sent from words, standard input or a file."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from orbitmq.cli.choosing import TopicName, check_positive, is_age, queue_of, seconds, time_of
from orbitmq.cli.declaring import command, section
from orbitmq.cli.errors import FAILED, INTERRUPTED, Misused
from orbitmq.cli.input import read_all, read_lines
from orbitmq.cli.outgoing import Defaults, as_json, as_text, of_words
from orbitmq.cli.session import Session
from orbitmq.cli.stopping import wish_to_stop
from orbitmq.cli.wording import duration, several
from orbitmq.cli.wording import rate as per_second
from orbitmq.client.message import Message
from orbitmq.client.producer.asyncproducer import AsyncProducer
from orbitmq.client.producer.results import SendResult
from orbitmq.client.queue import Queue
from orbitmq.errors import OrbitError

app = section("Send messages.")


class Input(enum.StrEnum):
    """What the input is made of."""

    LINES = "lines"
    JSON = "json"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRecord:
    """A message that was sent; one line for each."""

    id: str | None  #: null with --dry-run
    offset_id: str | None
    topic: str
    broker: str | None
    queue_id: int | None
    queue_offset: int | None
    status: str  #: ok, flush-disk-timeout, flush-slave-timeout, slave-not-available, or `not sent`


@command(
    app,
    "produce",
    examples=(
        "orbitmq produce orders 'hello' 'world' --key order-1 --tag paid",
        "cat events.txt | orbitmq produce events --rate 100",
        "orbitmq produce events --file events.jsonl --input json",
        "orbitmq produce load 'x' --count 10000",
        "orbitmq message browse orders --limit 0 --json | orbitmq produce copy --input json",
    ),
    prints=SentRecord,
    changes=True,
)
async def produce(
    session: Session,
    topic: TopicName,
    bodies: Annotated[
        list[str] | None,
        typer.Argument(metavar="[BODY]...", help="Each is a message; else standard input is read."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Read this instead of standard input."),
    ] = None,
    form: Annotated[
        Input,
        typer.Option(
            "--input",
            "-i",
            help="lines: each a body; json: each an object with body, keys, tags, properties, "
            "delay; whole: all of it one body.",
        ),
    ] = Input.LINES,
    key: Annotated[
        list[str] | None, typer.Option("--key", "-k", help="A business key; may be repeated.")
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", "-t", help="The tag.")] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", "-p", metavar="NAME=VALUE", help="May be repeated."),
    ] = None,
    delay: Annotated[
        str | None, typer.Option("--delay", metavar="DURATION", help="Delivered so much later.")
    ] = None,
    deliver_at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="Delivered at this time.")
    ] = None,
    sharding_key: Annotated[
        str | None, typer.Option("--order-key", help="Messages with the same stay in order.")
    ] = None,
    queue: Annotated[
        str | None, typer.Option("--queue", "-q", metavar="BROKER:ID", help="To this queue only.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", "-r", help="At most so many per second.")
    ] = None,
    number: Annotated[
        int | None,
        typer.Option("--count", "-c", min=1, help="So many in all: words again, input at most."),
    ] = None,
) -> None:
    """Send messages, each acknowledged by its broker; ends at the first that cannot be sent."""
    if bodies and file is not None:
        raise Misused("give bodies or --file, not both")
    check_positive(rate, "--rate")
    defaults = Defaults(
        topic=topic,
        tags=tag,
        keys=tuple(key or ()),
        properties=_properties(properties or []),
        delay=None if delay is None else seconds(delay, "--delay"),
        deliver_at=_delivery(deliver_at, session.out.clock.now()),
        sharding_key=sharding_key,
    )
    target = None if queue is None else queue_of(topic, queue)
    # Sending alone would make a topic of any name, mistyped ones too.
    await session.admin.topics.route(topic)
    with wish_to_stop() as wish:
        messages = _Messages(bodies or [], file, form, defaults, wish).all(number)
        async with contextlib.aclosing(messages):
            if session.is_dry_run:
                await _count_only(session, messages)
                return
            async with AsyncProducer.on(session.engine) as producer:
                lists = bool(bodies) and number is None
                await _Sending(session, producer, target, rate, lists=lists).run(messages, wish)


def _delivery(text: str | None, now: float) -> float | None:
    """When messages are delivered; an age, which every other time may be, is not meant here."""
    if text is None:
        return None
    if is_age(text):
        raise Misused(f"--at takes a date; say --delay {text} for so much later")
    return time_of(text, now, "--at")


def _properties(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise Misused(f"--property takes a name and a value, as in region=eu; got {word!r}")
        found[name] = value
    return found


@dataclass(frozen=True, slots=True)
class _Messages:
    """What is to be sent."""

    bodies: list[str]
    file: Path | None
    form: Input
    defaults: Defaults
    wish: asyncio.Event

    async def all(self, number: int | None) -> AsyncGenerator[Message, None]:
        """Words are repeated up to the number wanted, input is cut off there."""
        left = number
        while True:
            async with contextlib.aclosing(self._once()) as messages:
                async for message in messages:
                    yield message
                    if left is not None:
                        left -= 1
                        if left == 0:
                            return
            if not self.bodies or left is None:
                return

    async def _once(self) -> AsyncGenerator[Message, None]:
        if self.form is Input.WHOLE and not self.bodies:
            body = await read_all(self.file, self.wish)
            if not self.wish.is_set():
                yield self.defaults.message(body)
            return
        source: AsyncIterator[Message]
        if self.bodies:
            source = of_words(self.bodies, self.defaults)
        elif self.form is Input.JSON:
            source = as_json(read_lines(self.file, self.wish), self.defaults)
        else:
            source = as_text(read_lines(self.file, self.wish), self.defaults)
        async for message in source:
            yield message


async def _count_only(session: Session, messages: AsyncIterator[Message]) -> None:
    number = 0
    async for message in messages:
        number += 1
        if session.out.is_json:
            session.out.record(_record(message.topic, None))
    session.out.note(f"dry run: {several(number, 'message')} would be sent")


def _record(topic: str, result: SendResult | None) -> SentRecord:
    if result is None:
        return SentRecord(
            id=None,
            offset_id=None,
            topic=topic,
            broker=None,
            queue_id=None,
            queue_offset=None,
            status="not sent",
        )
    return SentRecord(
        id=result.msg_id,
        offset_id=result.offset_id,
        topic=topic,
        broker=result.queue.broker,
        queue_id=result.queue.id,
        queue_offset=result.queue_offset,
        status=result.status.value,
    )


class _Sending:
    """Sends messages, many at a time, and tells of them in their order."""

    def __init__(
        self,
        session: Session,
        producer: AsyncProducer,
        queue: Queue | None,
        rate: float | None,
        *,
        lists: bool,
    ) -> None:
        self._out = session.out
        self._producer = producer
        self._queue = queue
        self._pause = 0.0 if rate is None else 1 / rate
        self._lists = lists
        self._waiting: deque[tuple[Message, asyncio.Future[SendResult]]] = deque()
        self._sent = 0
        self._problem: OrbitError | None = None
        #: Nobody reads what is told any more, for example.
        self._untold: OSError | None = None

    async def run(self, messages: AsyncIterator[Message], wish: asyncio.Event) -> None:
        clock = self._out.clock
        began = next_at = clock.monotonic()
        async for message in messages:
            if self._pause:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, next_at - clock.monotonic())):
                        await wish.wait()
                next_at = max(next_at, clock.monotonic()) + self._pause
            if wish.is_set():
                break
            await self._submit(message, wish)
        await self._producer.flush()
        self._finished(wish)
        if self._untold is not None:
            raise self._untold
        took = clock.monotonic() - began
        speed = f", {per_second(self._sent / took)}/s" if took > 0 and self._sent > 1 else ""
        self._out.note(f"{several(self._sent, 'message')} sent in {duration(took)}{speed}")
        if self._problem is not None:
            self._out.note(f"orbitmq: {self._problem}")
            raise typer.Exit(FAILED)
        if wish.is_set():
            raise typer.Exit(INTERRUPTED)

    async def _submit(self, message: Message, wish: asyncio.Event) -> None:
        try:
            sent = await self._producer.submit(message, queue=self._queue)
        except OrbitError as error:
            self._problem = error
            wish.set()
            return
        self._waiting.append((message, sent))
        # Told when it is known, also while the input has nothing more for a while.
        sent.add_done_callback(lambda _: self._finished(wish))

    def _finished(self, wish: asyncio.Event) -> None:
        try:
            self._tell_finished()
        except OSError as error:
            self._untold = error
        if self._problem is not None or self._untold is not None:
            wish.set()

    def _tell_finished(self) -> None:
        while self._waiting and self._waiting[0][1].done():
            message, sent = self._waiting.popleft()
            error = sent.exception()
            if error is None:
                self._sent += 1
                self._tell(message, sent.result())
            elif isinstance(error, OrbitError):
                self._problem = self._problem or error
            else:
                raise error

    def _tell(self, message: Message, result: SendResult) -> None:
        if self._out.is_json:
            self._out.record(_record(message.topic, result))
        elif self._lists:
            place = f"{result.queue.broker}:{result.queue.id} offset {result.queue_offset}"
            unsafe = "" if result.is_ok else f", {result.status.value}"
            self._out.line(f"{result.msg_id}  {place}{unsafe}")
