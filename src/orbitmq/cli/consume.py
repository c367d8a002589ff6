"""`orbitmq consume`: prints messages as they arrive.

Without --group it reads with the tools' group and commits nothing. With --group it is a member like
any other and commits after printing: at least once.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import typer

from orbitmq.cli.application import section
from orbitmq.cli.command import (
    Queues,
    Session,
    Sql,
    Tags,
    TopicName,
    command,
    position_of,
    queues_of,
)
from orbitmq.cli.main import CommandError, Misused
from orbitmq.cli.messages import MessageRecord
from orbitmq.cli.output import Printer
from orbitmq.client.admin.messages import BodyForm, shown_body
from orbitmq.client.errors import BadRequest, NoNameServer, QueueNotAssigned
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer, PollSettings
from orbitmq.client.routes import Queue
from orbitmq.client.signals import unless
from orbitmq.console.words import several
from orbitmq.errors import NoRoute, OrbitError
from orbitmq.names import TOOLS_GROUP
from orbitmq.parsing import POSITIONS, Place, Position

app = section()

_POLL = 1.0


class Form(enum.StrEnum):
    """The format of a message."""

    TEXT = "text"
    JSON = "json"
    HEX = "hex"


@command(
    app,
    "consume",
    examples=(
        "orbitmq consume orders",
        "orbitmq consume orders --follow --tags 'paid || refunded'",
        "orbitmq consume orders --from 2h --json | jq -r .body",
        "orbitmq consume orders --group billing --limit 10",
    ),
    prints=MessageRecord,
    former={"--count": "--limit", "-c": "--limit"},
)
async def consume(
    session: Session,
    topic: TopicName,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            "-g",
            help="Join this group and commit offsets; by default read without a group.",
        ),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="POSITION",
            help=f"Where to start: {POSITIONS}; earliest by default, with --follow latest. A group "
            "with committed offsets continues from them.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for new messages until Ctrl-C.")
    ] = False,
    number: Annotated[
        int | None, typer.Option("--limit", "-l", min=1, help="The maximum number of messages.")
    ] = None,
    queue: Queues = None,
    tags: Tags = None,
    sql: Sql = None,
    form: Annotated[Form, typer.Option("--format", "-f", help="The format of bodies.")] = Form.TEXT,
    headers: Annotated[
        bool,
        typer.Option("--headers", "-H", help="Print a line about each message before its body."),
    ] = False,
) -> None:
    """Print the messages of a topic up to its current end; with --follow also new ones."""
    if tags is not None and sql is not None:
        raise Misused("--tags and --sql cannot be given together")
    if group is not None and queue:
        raise Misused("--queue and --group cannot be given together: the group assigns the queues")
    start = position_of(
        begin or ("latest" if follow else "earliest"), session.out.clock.now(), "--from"
    )
    await session.admin.topics.route(topic)
    show = Shown(session.out, form, headers)
    consumer = AsyncPullConsumer.on(
        session.engine,
        group or TOOLS_GROUP,
        polling=PollSettings(auto_commit=False),
        consume_from=start,
    )
    with session.stop_requested() as stopping:
        if group is not None:
            consumer.subscribe(topic, tags, sql=sql)
            async with consumer:
                printed = await _in_group(consumer, show, stopping, number, follow=follow)
        else:
            async with consumer:
                known = await consumer.queues(topic)
                chosen = queues_of(topic, queue) or known
                if not chosen:
                    raise CommandError(
                        f"topic {topic!r} has no queue that can be read: its read permission is "
                        f"off (turn it on with: orbitmq topic update {topic} --permission rw), or "
                        "that of its brokers (permission = 6 in their settings)"
                    )
                # First of all: messages stored after this are for --follow.
                ends = await consumer.end_offsets(set(chosen).intersection(known))
                await consumer.assign(chosen, tags, sql=sql)
                await _seek(consumer, start, ends)
                printed = await _looking(consumer, show, stopping, number, None if follow else ends)
    if not printed and not follow and not show.reported and (tags or sql) is not None:
        kind = "condition" if tags is None else "tags"
        session.out.note(
            f"orbitmq: no message that was read matches the {kind} {tags or sql!r}; check how they "
            "are written"
        )
    session.out.note(several(printed, "message"))


async def _seek(consumer: AsyncPullConsumer, start: Position, ends: Mapping[Queue, int]) -> None:
    """A progress store that ignores the progress of the tools' group."""
    if start.place is Place.LATEST:
        await asyncio.gather(*(consumer.seek(queue, end) for queue, end in ends.items()))
    else:
        await asyncio.gather(*(consumer.seek(queue, start) for queue in consumer.assignment()))


async def _looking(
    consumer: AsyncPullConsumer,
    show: Shown,
    stopping: asyncio.Event,
    number: int | None,
    ends: Mapping[Queue, int] | None,
) -> int:
    """Print messages, up to the ends if given."""
    while not stopping.is_set() and show.printed != number:
        if ends is not None and _is_past(consumer, ends):
            break
        left = None if number is None else number - show.printed
        messages = await unless(stopping, _polled(consumer, show, left)) or ()
        for message in messages:
            if ends is None or message.queue_offset < ends[message.queue]:
                show(message)
    return show.printed


async def _polled(
    consumer: AsyncPullConsumer, show: Shown, most: int | None, missing: tuple[str, ...] = ()
) -> list[ReceivedMessage]:
    """The next messages. Waiting, and `missing`, are reported once.

    Raises permanent errors. A name server or a topic that existed a moment ago may come back.
    """
    messages: list[ReceivedMessage] = []
    with contextlib.suppress(NoNameServer, NoRoute):
        messages = await consumer.poll(_POLL, max_messages=most)
    if missing or not messages:
        show.waiting((*consumer.statistics().troubles, *missing))
    return messages


def _is_past(consumer: AsyncPullConsumer, ends: Mapping[Queue, int]) -> bool:
    return all(consumer.position(queue) >= end for queue, end in ends.items())


async def _in_group(
    consumer: AsyncPullConsumer,
    show: Shown,
    stopping: asyncio.Event,
    number: int | None,
    *,
    follow: bool,
) -> int:
    """Print this member's share and commit what was printed."""
    is_stored = True
    missing: tuple[str, ...] = ()
    while not stopping.is_set() and show.printed != number:
        left = None if number is None else number - show.printed
        messages = await unless(stopping, _polled(consumer, show, left, missing))
        for message in messages or ():
            show(message)
        is_stored = is_stored and not messages
        missing = ()
        try:
            if not is_stored:
                await _store(consumer)
                is_stored = True
            elif messages is not None and not follow and await _is_done(consumer):
                break
        except OrbitError as error:
            # The broker is unreachable: retried after the next poll.
            if not error.retriable:
                raise
            what = "the ends of the queues are unknown" if is_stored else "progress is not stored"
            missing = (f"{what} yet: {error}",)
    if not is_stored:
        await consumer.commit()
    return show.printed


async def _store(consumer: AsyncPullConsumer) -> None:
    """Commit what was printed."""
    # The queue was moved to another member, which prints it again.
    with contextlib.suppress(QueueNotAssigned):
        await consumer.commit()


async def _is_done(consumer: AsyncPullConsumer) -> bool:
    """Whether everything in this member's queues was printed."""
    if not consumer.assignment():
        return False
    try:
        return _is_past(consumer, await consumer.end_offsets())
    except QueueNotAssigned:
        return False  # it was moved to another member


@dataclass(slots=True)
class Shown:
    """Prints and counts messages."""

    out: Printer
    form: Form
    with_headers: bool
    printed: int = field(default=0)
    reported: set[str] = field(default_factory=set)

    def waiting(self, troubles: Iterable[str]) -> None:
        """Report the reason of waiting, once per outage."""
        now = {trouble.partition(": ")[0]: trouble for trouble in troubles}
        for what in now.keys() - self.reported:
            self.out.note(f"orbitmq: {now[what]}")
        self.reported = set(now)

    def __call__(self, message: ReceivedMessage) -> None:
        self.printed += 1
        if self.out.is_json:
            self.out.record(MessageRecord.of(message))
            return
        if self.with_headers:
            keys = f" keys={' '.join(message.keys)}" if message.keys else ""
            tags = f" tags={message.tags}" if message.tags else ""
            self.out.line(
                f"# {message.queue} offset {message.queue_offset}, stored "
                f"{self.out.moment(message.stored_at)}, id {message.msg_id}{tags}{keys}"
            )
        if self.form is Form.TEXT and not self.out.is_terminal:
            # In a pipe the bytes are unchanged.
            sys.stdout.flush()
            sys.stdout.buffer.write(message.body + b"\n")
            sys.stdout.buffer.flush()
        elif self.form is Form.TEXT:
            self.out.text(message.body.decode(errors="backslashreplace"))
        else:
            self.out.text(_shown(message.body, BodyForm(self.form.value)))


def _shown(body: bytes, form: BodyForm) -> str:
    try:
        return shown_body(body, form)
    except BadRequest:
        # A message that is not JSON must not end the stream.
        return shown_body(body, BodyForm.AUTO)
