"""`orbitmq produce`: sends messages from arguments, standard input or a file."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import enum
import os
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from orbitmq.cli.application import section
from orbitmq.cli.command import (
    Session,
    TopicName,
    check_positive,
    closest,
    command,
    is_age,
    queue_of,
    seconds,
    time_of,
)
from orbitmq.cli.main import FAILED, INTERRUPTED, CommandError, Misused
from orbitmq.cli.output import rate as per_second
from orbitmq.client.errors import TopicNotFound
from orbitmq.client.message import Message
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.producer.send import SendResult
from orbitmq.client.routes import Queue
from orbitmq.client.signals import unless
from orbitmq.console.words import duration, several
from orbitmq.errors import MessageRefused, OrbitError
from orbitmq.message.properties import RESERVED

app = section()


class Input(enum.StrEnum):
    """The format of the input."""

    LINES = "lines"
    JSON = "json"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRecord:
    """A message that was sent; one line for each."""

    id: str | None = None  #: null with --dry-run
    offset_id: str | None = None
    topic: str
    broker: str | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    status: str  #: ok, flush-disk-timeout, flush-slave-timeout, slave-not-available, or `not sent`


@command(
    app,
    "produce",
    examples=(
        "orbitmq produce orders 'hello' 'world' --keys order-1 --tag paid",
        "cat events.txt | orbitmq produce events --rate 100",
        "orbitmq produce events --file events.jsonl --input json",
        "orbitmq produce load 'x' --limit 10000",
        "orbitmq message browse orders --limit 0 --json | orbitmq produce copy --input json",
    ),
    prints=SentRecord,
    changes=True,
    former={
        "--count": "--limit",
        "-c": "--limit",
        "--key": "--keys",
        "--order-key": "--ordering-key",
    },
)
async def produce(
    session: Session,
    topic: TopicName,
    bodies: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BODY]...",
            help="The bodies, one message each; by default standard input is read.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="Read this file instead of standard input."
        ),
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
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--keys", "-k", help="A key by which the message can be found; may be repeated."
        ),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option("--tag", "--tags", "-t", help="The tag, by which consumers filter."),
    ] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option(
            "--property",
            "-p",
            metavar="NAME=VALUE",
            help="A property of the message; may be repeated.",
        ),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option("--delay", metavar="DURATION", help="Deliver the message after this time."),
    ] = None,
    deliver_at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="Deliver the message at this time.")
    ] = None,
    ordering_key: Annotated[
        str | None,
        typer.Option(
            "--ordering-key",
            help="Messages with the same key go to the same queue and stay in order.",
        ),
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option("--queue", "-q", metavar="BROKER:ID", help="Send to this queue only."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", "-r", help="The maximum number of messages per second."),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-l",
            min=1,
            help="The number of messages; bodies from arguments are repeated.",
        ),
    ] = None,
) -> None:
    """Send messages and wait for the acknowledgements; ends at the first failure."""
    if bodies and file is not None:
        raise Misused("give bodies or --file, not both")
    check_positive(rate, "--rate")
    defaults = Defaults(
        topic=topic,
        tags=tag,
        keys=tuple(keys or ()),
        properties=_properties(properties or []),
        delay=None if delay is None else seconds(delay, "--delay"),
        deliver_at=_delivery(deliver_at, session.out.clock.now()),
        ordering_key=ordering_key,
    )
    target = None if queue is None else queue_of(topic, queue)
    await _note_new_topic(session, topic)
    with session.stop_requested() as stopping:
        messages = _Messages(bodies or [], file, form, defaults, stopping).all(number)
        async with contextlib.aclosing(messages):
            if session.is_dry_run:
                await _count_only(session, messages)
                return
            async with AsyncProducer.on(session.engine) as producer:
                lists = bool(bodies) and number is None
                await _Sending(session, producer, target, rate, lists=lists).run(messages, stopping)


async def _note_new_topic(session: Session, topic: str) -> None:
    """Say that sending creates a topic, since its name may be mistyped."""
    try:
        await session.admin.topics.route(topic)
    except TopicNotFound:
        known = [each.name for each in await session.admin.topics.list()]
        what = "would be created" if session.is_dry_run else "is new: sending creates it"
        session.out.note(f"orbitmq: topic {topic} {what}{closest(topic, known)}")


def _delivery(text: str | None, now: float) -> float | None:
    """The time of delivery; an age such as 15m is refused here."""
    if text is None:
        return None
    if is_age(text):
        raise Misused(f"--at takes a date; for a delay use --delay {text}")
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
    """The messages to send."""

    bodies: list[str]
    file: Path | None
    form: Input
    defaults: Defaults
    stopping: asyncio.Event

    async def all(self, number: int | None) -> AsyncGenerator[Message, None]:
        """Up to --count messages: arguments are repeated, input is cut off."""
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
            body = await read_all(self.file, self.stopping)
            if not self.stopping.is_set():
                yield self.defaults.message(body)
            return
        source: AsyncIterator[Message]
        if self.bodies:
            source = of_words(self.bodies, self.defaults)
        elif self.form is Input.JSON:
            source = as_json(read_lines(self.file, self.stopping), self.defaults)
        else:
            source = as_text(read_lines(self.file, self.stopping), self.defaults)
        async for message in source:
            yield message


async def _count_only(session: Session, messages: AsyncIterator[Message]) -> None:
    number = 0
    async for message in messages:
        number += 1
        if session.out.is_json:
            session.out.record(SentRecord(topic=message.topic, status="not sent"))
    session.out.note(f"dry run: {several(number, 'message')} would be sent")


def _record(topic: str, result: SendResult) -> SentRecord:
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
    """Sends messages concurrently and reports the results in order."""

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
        self._session = session
        self._producer = producer
        self._queue = queue
        self._pause = 0.0 if rate is None else 1 / rate
        self._lists = lists
        self._waiting: deque[tuple[Message, asyncio.Future[SendResult]]] = deque()
        self._sent = 0
        self._problem: OrbitError | None = None
        #: The failure of the reporting task, such as a closed pipe.
        self._untold: OSError | None = None

    async def run(self, messages: AsyncIterator[Message], stopping: asyncio.Event) -> None:
        clock = self._out.clock
        began = next_at = clock.monotonic()
        async for message in messages:
            if self._pause:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, next_at - clock.monotonic())):
                        await stopping.wait()
                next_at = max(next_at, clock.monotonic()) + self._pause
            if stopping.is_set():
                break
            await self._submit(message, stopping)
        await self._producer.flush()
        self._finished(stopping)
        if self._untold is not None:
            raise self._untold
        took = clock.monotonic() - began
        if not self._sent and self._problem is None and not stopping.is_set():
            self._out.note("orbitmq: the input is empty: nothing was sent")
            return
        speed = f", {per_second(self._sent / took)}/s" if took > 0 and self._sent > 1 else ""
        self._out.note(f"{several(self._sent, 'message')} sent in {duration(took)}{speed}")
        if self._problem is not None:
            self._out.note(f"orbitmq: {self._problem}")
            raise typer.Exit(FAILED)
        if self._session.is_late:
            self._out.note("orbitmq: ended by --timeout")
            raise typer.Exit(FAILED)
        if stopping.is_set():
            raise typer.Exit(INTERRUPTED)

    async def _submit(self, message: Message, stopping: asyncio.Event) -> None:
        try:
            sent = await self._producer.submit(message, queue=self._queue)
        except OrbitError as error:
            self._problem = error
            stopping.set()
            return
        self._waiting.append((message, sent))
        # Report results also while the input pauses.
        sent.add_done_callback(lambda _: self._finished(stopping))

    def _finished(self, stopping: asyncio.Event) -> None:
        try:
            self._tell_finished()
        except OSError as error:
            self._untold = error
        if self._problem is not None or self._untold is not None:
            stopping.set()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Defaults for all messages."""

    topic: str
    tags: str | None = None
    keys: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    delay: float | None = None
    deliver_at: float | None = None
    ordering_key: str | None = None

    def message(self, body: bytes) -> Message:
        return Message(
            self.topic,
            body,
            tags=self.tags,
            keys=self.keys,
            properties=self.properties,
            delay=self.delay,
            deliver_at=self.deliver_at,
            ordering_key=self.ordering_key,
        )


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A message as a line of JSON.

    All fields that `consume --json` and `message browse --json` print are allowed, so that their
    output is valid input. Fields that are set when a message is stored are ignored.
    """

    body: Any = None
    body_base64: str | None = None
    tags: str | None = None
    tag: str | None = None
    keys: tuple[str, ...] | str = ()
    properties: dict[str, str] = {}
    delay: float | None = None
    ordering_key: str | None = None
    sharding_key: str | None = None
    id: Any = None
    unique_id: Any = None
    offset_id: Any = None
    topic: Any = None
    broker: Any = None
    queue_id: Any = None
    queue_offset: Any = None
    born_at: Any = None
    stored_at: Any = None
    size: Any = None
    failures: Any = None
    problem: Any = None


_decode = msgspec.json.Decoder(Line).decode


async def as_text(lines: AsyncIterator[bytes], defaults: Defaults) -> AsyncGenerator[Message, None]:
    """Each line is a body; empty lines are ignored."""
    async for line in lines:
        if line:
            yield defaults.message(line)


async def as_json(lines: AsyncIterator[bytes], defaults: Defaults) -> AsyncGenerator[Message, None]:
    """Each line is an object that describes a message. Raises `Misused`, naming the line."""
    number = 0
    async for text in lines:
        number += 1
        if not text.strip():
            continue
        try:
            yield _message(_decode(text), defaults)
        except (msgspec.MsgspecError, UnicodeDecodeError, binascii.Error, MessageRefused) as error:
            raise Misused(f"line {number} of the input is not a message: {error}") from error


async def of_words(words: Sequence[str], defaults: Defaults) -> AsyncGenerator[Message, None]:
    """Each argument is a body."""
    for word in words:
        yield defaults.message(word.encode("utf-8", "surrogateescape"))


def _message(line: Line, defaults: Defaults) -> Message:
    own = {name: value for name, value in line.properties.items() if name not in RESERVED}
    return Message(
        defaults.topic,
        _body(line),
        tags=line.tags or line.tag or defaults.tags,
        keys=line.keys or defaults.keys,
        properties={**defaults.properties, **own},
        delay=defaults.delay if line.delay is None else line.delay,
        deliver_at=defaults.deliver_at if line.delay is None else None,
        ordering_key=line.ordering_key or line.sharding_key or defaults.ordering_key,
    )


def _body(line: Line) -> bytes:
    if line.body_base64 is not None:
        return base64.b64decode(line.body_base64, validate=True)
    if line.body is None:
        raise MessageRefused("body", "is missing: give body or body_base64")
    return line.body.encode() if isinstance(line.body, str) else msgspec.json.encode(line.body)


# Input is read by a daemon thread: the event loop does not block, a line that is typed slowly is
# sent immediately, and a terminal without input does not keep the process alive.


_CHUNK = 256 * 1024
#: The longest line; no message may be longer.
LONGEST_LINE = 64 * 1024 * 1024
#: The most chunks that wait in memory.
_AHEAD = 4


async def read_all(path: Path | None, stopping: asyncio.Event) -> bytes:
    """The whole file; None: standard input."""
    return b"".join([chunk async for chunk in _chunks(path, stopping)])


async def read_lines(path: Path | None, stopping: asyncio.Event) -> AsyncGenerator[bytes, None]:
    """Every line without its end; None: of standard input. Ends also when stopped."""
    rest = b""
    async for chunk in _chunks(path, stopping):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
        if len(rest) > LONGEST_LINE:
            raise CommandError(f"a line of the input is longer than {LONGEST_LINE} bytes")
    if rest and not stopping.is_set():
        yield rest


async def _chunks(path: Path | None, stopping: asyncio.Event) -> AsyncGenerator[bytes, None]:
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue(_AHEAD)
    reader = _Reader(path, loop, chunks)
    threading.Thread(target=reader.run, name="orbitmq-input", daemon=True).start()
    try:
        while chunk := await unless(stopping, chunks.get()):
            if isinstance(chunk, OSError):
                raise chunk
            yield chunk
    finally:
        reader.is_wanted = False


class _Reader:
    """Reads the input on a thread."""

    def __init__(
        self,
        path: Path | None,
        loop: asyncio.AbstractEventLoop,
        chunks: asyncio.Queue[bytes | OSError],
    ) -> None:
        self._path = path
        self._loop = loop
        self._chunks = chunks
        self.is_wanted = True

    def run(self) -> None:
        try:
            source = sys.stdin.fileno() if self._path is None else os.open(self._path, os.O_RDONLY)
            try:
                while chunk := os.read(source, _CHUNK):
                    if not self._give(chunk):
                        return
            finally:
                if self._path is not None:
                    os.close(source)
            self._give(b"")
        except OSError as error:
            self._give(error)

    def _give(self, chunk: bytes | OSError) -> bool:
        """Wait for room; False when reading was stopped."""
        if not self.is_wanted:
            return False
        putting = self._chunks.put(chunk)
        try:
            asyncio.run_coroutine_threadsafe(putting, self._loop).result()
        except (RuntimeError, asyncio.CancelledError):
            # The loop is closed: the command has ended.
            putting.close()
            return False
        return self.is_wanted
