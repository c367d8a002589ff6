"""`orbitmq message`: finds messages by id, key, offset and time, and tracks them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from orbitmq.cli.application import section
from orbitmq.cli.command import (
    Queues,
    Session,
    Since,
    Sql,
    Tags,
    TopicName,
    Until,
    command,
    filter_of,
    queue_of,
    queues_of,
    time_of,
)
from orbitmq.cli.main import CommandError, Misused
from orbitmq.cli.output import Columns, Printer, body_fields, count, size
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.messages import BodyForm, Track, cursor_at, shown_body
from orbitmq.client.admin.topics import TopicKind
from orbitmq.client.errors import BadRequest, MessageNotFound
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.console.words import NOTHING
from orbitmq.message.record import MessageError
from orbitmq.parsing import fill

_PREVIEW = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRecord:
    """A stored message."""

    id: str  #: the unique id, or the offset id of a message without one
    unique_id: str | None  #: given by the producer; the same through all retries
    offset_id: str  #: where this copy is stored
    topic: str  #: that it was sent to
    broker: str
    queue_id: int
    queue_offset: int
    tags: str | None
    keys: tuple[str, ...]
    born_at: float  #: when it was sent, by the producer's clock
    stored_at: float  #: when it was stored, by the broker's clock
    size: int  #: bytes of the stored record
    failures: int  #: failed attempts before
    properties: Mapping[str, str]  #: all, those of the system as well
    body: str | None  #: when it is UTF-8
    body_base64: str | None  #: when it is not
    problem: str | None = None  #: why the body cannot be read

    @classmethod
    def of(cls, message: ReceivedMessage) -> MessageRecord:
        body, encoded, problem = None, None, None
        try:
            body, encoded = body_fields(message.body)
        except MessageError as error:
            problem = str(error)
        return fill(
            cls,
            message,
            id=message.msg_id,
            broker=message.queue.broker,
            queue_id=message.queue.id,
            failures=message.reconsume_times,
            body=body,
            body_base64=encoded,
            problem=problem,
        )


def message_columns(out: Printer) -> Columns[ReceivedMessage]:
    """The columns of a list of messages."""
    return (
        Columns[ReceivedMessage]()
        .text("stored", lambda each: out.moment(each.stored_at))
        .text("queue", lambda each: f"{each.queue.broker}:{each.queue.id}")
        .number("offset", lambda each: count(each.queue_offset))
        .id("id", lambda each: each.msg_id)
        .text("tags", lambda each: each.tags or NOTHING)
        .text("keys", lambda each: " ".join(each.keys) or NOTHING)
        .number("size", lambda each: size(each.size))
        .text("body", preview)
    )


def preview(message: ReceivedMessage) -> str:
    """The beginning of the body, on one line."""
    try:
        body = message.body
    except MessageError as error:
        return f"({error})"
    try:
        text = " ".join(body[: 4 * _PREVIEW].decode().split())
    except UnicodeDecodeError:
        text = body[:_PREVIEW].hex(" ")
    return text if len(text) <= _PREVIEW else text[: _PREVIEW - 1] + "…"


def print_message(out: Printer, message: ReceivedMessage, form: BodyForm) -> None:
    """Print one message in full."""
    properties = " ".join(f"{name}={value}" for name, value in sorted(message.properties.items()))
    out.facts(
        ("id", message.msg_id),
        ("offset id", message.offset_id),
        ("topic", message.topic),
        ("queue", f"{message.queue}, offset {message.queue_offset}"),
        ("tags", message.tags or NOTHING),
        ("keys", " ".join(message.keys) or NOTHING),
        ("sent", out.moment(message.born_at)),
        ("stored", out.moment(message.stored_at)),
        ("size", size(message.size)),
        ("failures", str(message.reconsume_times)),
        ("properties", properties or NOTHING),
    )
    out.raw("")
    out.text(shown_body(message.body, form))


app = section()

Form = Annotated[BodyForm, typer.Option("--format", "-f", help="The format of the body.")]
OfTopic = Annotated[
    str | None,
    typer.Option("--topic", "-t", help="The topic, if it is not given before the id."),
]
Named = Annotated[
    list[str],
    typer.Argument(metavar="[TOPIC] ID", help="The message's id or offset id, after its topic."),
]
Limit = Annotated[
    int, typer.Option("--limit", "-l", min=0, help="The maximum number of messages; 0: all.")
]


@command(
    app,
    "get",  # its first name
    examples=("orbitmq message get AC110001000078BF0000000000000000 --topic orders",),
    prints=MessageRecord,
    is_hidden=True,
)
@command(
    app,
    "show",
    examples=(
        "orbitmq message show AC110001000078BF0000000000000000 --topic orders",
        "orbitmq message show --topic orders 7F00000100002A9F0000000000001234 --format hex",
    ),
    prints=MessageRecord,
)
async def show(
    session: Session, named: Named, topic: OfTopic = None, form: Form = BodyForm.AUTO
) -> None:
    """Show one message by its id."""
    message = await message_of(session.admin, named, topic)
    _print_one(session, message, form)


@command(
    app,
    "at",
    examples=("orbitmq message at orders broker-a:3 1500",),
    prints=MessageRecord,
)
async def at(
    session: Session,
    topic: TopicName,
    queue: Annotated[str, typer.Argument(metavar="BROKER:ID", help="The queue.")],
    offset: Annotated[int, typer.Argument(metavar="OFFSET", help="The offset in the queue.")],
    form: Form = BodyForm.AUTO,
) -> None:
    """Show the message at an offset of a queue."""
    _print_one(session, await session.admin.messages.at(queue_of(topic, queue), offset), form)


@command(
    app,
    "find",
    examples=(
        "orbitmq message find orders order-4711",
        "orbitmq message find orders order-4711 --since 2h --json | jq -r .body",
    ),
    prints=MessageRecord,
)
async def find(
    session: Session,
    topic: TopicName,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key of the messages.")],
    since: Since = None,
    until: Until = None,
    limit: Limit = 50,
) -> None:
    """Find messages by a business key, the newest first."""
    now = session.out.clock.now()
    found = session.admin.messages.by_key(
        topic,
        key,
        since=time_of(since, now, "--since"),
        until=time_of(until, now, "--until"),
    )
    if not await _list(session, found, limit):
        raise CommandError(f"no message of topic {topic!r} has the key {key!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Chooses messages of a topic."""

    since: Since = None
    until: Until = None
    queue: Queues = None
    offset: Annotated[
        int | None,
        typer.Option(
            "--offset", metavar="OFFSET", min=0, help="Start at this offset; needs one --queue."
        ),
    ] = None
    tags: Tags = None
    sql: Sql = None


@command(
    app,
    "browse",
    examples=(
        "orbitmq message browse orders --newest --limit 20",
        "orbitmq message browse orders --since 2026-01-31T12:00 --until 2026-01-31T13:00 --limit 0",
        "orbitmq message browse orders --queue broker-a:3 --offset 1500",
        'orbitmq message browse orders --sql "amount > 100" --json',
    ),
    prints=MessageRecord,
)
async def browse(
    session: Session,
    topic: TopicName,
    choice: Choice,
    newest: Annotated[bool, typer.Option("--newest", "-r", help="Newest first.")] = False,
    limit: Limit = 50,
    cursor: Annotated[
        str | None,
        typer.Option(
            "--cursor",
            help="Continue at the cursor that an earlier call printed.",
        ),
    ] = None,
) -> None:
    """Walk through a topic in the order of storing.

    When there are more messages than --limit, the --cursor for the next call is printed on standard
    error.
    """
    now = session.out.clock.now()
    expression, kind = filter_of(choice.tags, choice.sql)
    since = time_of(choice.since, now, "--since")
    until = time_of(choice.until, now, "--until")
    queues = queues_of(topic, choice.queue)
    if limit == 0 and cursor is not None:
        raise Misused("--cursor goes on page by page; give a --limit with it")
    if choice.offset is not None:
        cursor = await _cursor_at(session, choice, queues, cursor, newest=newest)
    if limit == 0 and cursor is None:
        # A page is printed when it is full, which takes long when few messages match, and each one
        # pulls again what the previous page did not show.
        found = session.admin.messages.browse(
            topic,
            since=since,
            until=until,
            queues=queues,
            newest_first=newest,
            expression=expression,
            expression_type=kind,
        )
        if not await _list(session, found, 0):
            _print(session, ())
        return
    page = await session.admin.messages.page(
        topic,
        cursor=cursor,
        size=limit or _TABLE,
        since=since,
        until=until,
        queues=queues,
        newest_first=newest,
        expression=expression,
        expression_type=kind,
    )
    _print(session, page.messages)
    while limit == 0 and page.cursor is not None:
        page = await session.admin.messages.page(topic, cursor=page.cursor, size=_TABLE)
        if page.messages:
            _print(session, page.messages)
    if page.cursor is not None:
        session.out.note(f"there are more messages; continue with --cursor {page.cursor}")


async def _cursor_at(
    session: Session,
    choice: Choice,
    queues: Sequence[Queue] | None,
    cursor: str | None,
    *,
    newest: bool,
) -> str:
    """The cursor for --offset. Raises `Misused` and `BadRequest`."""
    if queues is None or len(queues) != 1:
        raise Misused("--offset needs one queue; add for example --queue broker-a:3")
    if cursor is not None or choice.since is not None or choice.until is not None:
        raise Misused("--offset cannot be given together with --cursor, --since or --until")
    expression, kind = filter_of(choice.tags, choice.sql)
    return await cursor_at(
        session.admin,
        queues[0],
        choice.offset or 0,
        newest_first=newest,
        expression=expression,
        expression_type=kind,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackRecord:
    """What became of a message in a group; one line for each group."""

    group: str
    #: waiting, consumed, filtered, parked, retrying, dead, broadcast or no_progress
    fate: str
    is_online: bool  #: whether the group has members now
    failures: int  #: failed attempts, as its copies show; including those before it was resent
    resent: int  #: how often it died and was sent again
    copy_id: str | None  #: offset id of the copy that `fate` describes
    copy_queue: str | None  #: where that copy is


@command(
    app,
    "track",
    examples=(
        "orbitmq message track orders AC110001000078BF0000000000000000",
        "orbitmq message track AC110001000078BF0000000000000000 --topic orders",
    ),
    prints=TrackRecord,
)
async def track(session: Session, named: Named, topic: OfTopic = None) -> None:
    """Show what became of a message in every group that consumes its topic."""
    message = await message_of(session.admin, named, topic)
    tracks = await session.admin.messages.track(message)
    out = session.out
    if out.is_json:
        out.records(_track_record(each) for each in tracks)
        return
    out.line(f"message {message.msg_id}, stored {out.moment(message.stored_at)} in {message.queue}")
    out.table(
        Columns[Track]()
        .text("group", lambda each: each.group)
        .text("online", lambda each: "yes" if each.is_online else "no")
        .text("what became of it", lambda each: each.text)
        .number("failures", lambda each: count(each.failures))
        .text("copy", lambda each: NOTHING if each.copy is None else str(each.copy.queue)),
        tracks,
        empty="no group consumes its topic",
    )


def _track_record(track: Track) -> TrackRecord:
    copy = track.copy
    return fill(
        TrackRecord,
        track,
        fate=track.fate.name.lower(),
        copy_id=None if copy is None else copy.offset_id,
        copy_queue=None if copy is None else str(copy.queue),
    )


def _print_one(session: Session, message: ReceivedMessage, form: BodyForm) -> None:
    if session.out.is_json:
        session.out.record(MessageRecord.of(message))
    else:
        print_message(session.out, message, form)


async def _list(session: Session, found: AsyncIterator[ReceivedMessage], limit: int) -> int:
    """Print messages: JSON immediately, tables in blocks of rows."""
    shown = 0
    waiting: list[ReceivedMessage] = []
    async for message in found:
        shown += 1
        if session.out.is_json:
            session.out.record(MessageRecord.of(message))
        else:
            waiting.append(message)
            if len(waiting) == _TABLE:
                _print(session, waiting)
                waiting = []
        if shown == limit:
            break
    if waiting:
        _print(session, waiting)
    return shown


#: Rows of one table block; a walk through a big topic prints before it ends.
_TABLE = 500


def _print(session: Session, messages: Sequence[ReceivedMessage]) -> None:
    out = session.out
    if out.is_json:
        out.records(map(MessageRecord.of, messages))
    else:
        out.table(message_columns(out), messages)
        if not messages:
            out.note("no messages")


# Two kinds of id look the same. An offset id is an address in a broker's log. A unique id is found
# only by the index of its topic: without the topic all topics are searched, if they are few. Retry
# and dead-letter topics, which hold copies, are searched last, and not at all if they are many.


#: The most topics that are searched for a unique id.
FEW_TOPICS = 200
_COPIES = {TopicKind.RETRY, TopicKind.DEAD_LETTER}
#: Both kinds of id, for IPv4 and for IPv6.
_is_id = re.compile(r"[0-9A-Fa-f]{32}|[0-9A-Fa-f]{56}").fullmatch


async def message_of(admin: AsyncAdmin, named: Sequence[str], topic: str | None) -> ReceivedMessage:
    """The message named by `ID` or by `TOPIC ID`. Raises `Misused`, and what `get` raises."""
    *before, message_id = named
    if len(before) > 1 or (before and topic is not None):
        raise Misused("name one message: orders ID, or: ID --topic orders")
    topic = before[0] if before else topic
    try:
        return await admin.messages.get(message_id, topic=topic)
    except (BadRequest, MessageNotFound):
        if topic is not None or not _is_id(message_id):
            raise
    return await _in_any_topic(admin, message_id)


async def _in_any_topic(admin: AsyncAdmin, unique_id: str) -> ReceivedMessage:
    topics = [each for each in await admin.topics.list() if each.kind is not TopicKind.SYSTEM]
    own = [each.name for each in topics if each.kind not in _COPIES]
    copies = [each.name for each in topics if each.kind in _COPIES]
    if len(own) > FEW_TOPICS:
        raise Misused(
            f"no message is stored where {unique_id} points; if it is a unique id, name its "
            "topic, as in --topic orders"
        )
    # The message as sent is preferred to a copy.
    for names in (own, copies) if len(copies) <= FEW_TOPICS else (own,):
        # The admin bounds the number of concurrent requests.
        asked = (admin.messages.copies(each, unique_id) for each in names)
        for found in await asyncio.gather(*asked):
            if found:
                return found[0]
    problem = (
        f"no message is stored where {unique_id} points, and no topic has a message with this "
        "unique id"
    )
    if len(copies) > FEW_TOPICS:
        problem += (
            f"; the {len(copies):,} topics for retries and dead letters are too many to search: "
            "name one, as in --topic %DLQ%billing"
        )
    raise CommandError(problem)
