"""Messages: by offset, time, key or id, with their path through groups, and as they arrive."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orbitmq.client.admin.deadletters import DLQ_REASON, DeadLetter
from orbitmq.client.admin.messages import AsyncMessages, BodyForm, Track, cursor_at, shown_body
from orbitmq.client.errors import BadRequest
from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.console import words
from orbitmq.console.api.topics import queue_named
from orbitmq.console.bodies import (
    BodyView,
    Decoder,
    Format,
    ShownBody,
    topic_of,
)
from orbitmq.console.conditions import Condition, condition
from orbitmq.console.http import (
    answer,
    encoded,
    int_param,
    pick,
    read_body,
    required_param,
    stream,
    text_param,
)
from orbitmq.console.roles import Right
from orbitmq.console.settings import BadInput
from orbitmq.console.state import (
    ConsoleState,
    actor_of,
    check_right,
    session_check,
    state_of,
    view_of,
)
from orbitmq.console.words import Action, several
from orbitmq.errors import ClientError
from orbitmq.message.formats import missing
from orbitmq.message.properties import RESERVED

MOST = 200
#: Messages that are read at a time, and seconds of a request, while a condition is looked for.
SCANNED = 200
LONGEST_SCAN = 3.0
#: Messages that a page which follows a topic is shown in one second; the rest are counted.
TAIL_RATE = 50
#: Pages that may follow topics at the same time: each of them keeps brokers busy.
MOST_TAILS = 30


async def messages(request: Request) -> Response:
    """A page of a topic: `cursor`, or where to begin.

    By time (`since`, `until`, ISO or epoch seconds), by `queue` and `offset`, or by `key`.
    `expression` and `type` (TAG, SQL92) filter at the broker, `where` by fields of bodies here;
    `newest=1` goes backwards. `listed` is the number of rows on the pages before: the command lists
    all pages.
    """
    state = state_of(request)
    topic = required_param(request, "topic")
    if key := text_param(request, "key"):
        return await _by_key(state, request, topic, key)
    cursor = text_param(request, "cursor")
    queue = text_param(request, "queue")
    queues = None if queue is None else [queue_named(topic, queue)]
    size = int_param(request, "count", 50, 1, MOST)
    since, until = _moment(text_param(request, "since")), _moment(text_param(request, "until"))
    newest = text_param(request, "newest") == "1"
    expression, kind = text_param(request, "expression"), text_param(request, "type") or "TAG"
    offset = int_param(request, "offset", -1, 0, 2**63 - 1)
    if cursor is None and offset >= 0:
        cursor = await cursor_at(
            state.admin,
            queue_named(topic, required_param(request, "queue")),
            offset,
            newest_first=newest,
            expression=expression or "*",
            expression_type=kind,
        )
    view, where = view_of(request), _where(request)
    found: list[ReceivedMessage] = []
    looked, began = 0, state.clock.monotonic()
    while True:
        page = await state.admin.messages.page(
            topic,
            cursor=cursor,
            size=size if where is None else SCANNED,
            since=since,
            until=until,
            queues=queues,
            newest_first=newest,
            expression=expression or "*",
            expression_type=kind,
        )
        cursor, looked = page.cursor, looked + len(page.messages)
        found += [each for each in page.messages if _holds(where, view, each)]
        is_late = state.clock.monotonic() - began >= LONGEST_SCAN
        if where is None or len(found) >= size or cursor is None or is_late:
            break
    command = state.command(
        Action.BROWSE_MESSAGES,
        topic,
        since=words.instant(since),
        until=words.instant(until),
        queue=queues,
        offset=offset if offset >= 0 else None,
        **_filter_option(expression, kind),
        newest=newest,
        limit=_listed(request) + size,
    )
    rows = [message_row(each, view) for each in found]
    content = {"rows": rows, "cursor": cursor, "command": command, "looked": looked}
    return answer(content)


def _where(request: Request) -> Condition | None:
    """The condition on fields of bodies in a query. Raises `BadInput`."""
    text = text_param(request, "where")
    if text is None:
        return None
    found = condition(text)
    for path in sorted(found.fields):
        view_of(request).check_visible(path)
    return found


def _holds(where: Condition | None, view: BodyView, message: ReceivedMessage) -> bool:
    return where is None or where.test(view.shown(message).fields)


def _filter_option(expression: str | None, kind: str) -> dict[str, object]:
    return {"tags" if kind == "TAG" else "sql": expression}


def _listed(request: Request) -> int:
    """The number of messages on the pages before."""
    return int_param(request, "listed", 0, 0, 2**31)


def _moment(given: str | None) -> float | str | None:
    """Epoch seconds as a number, other text unchanged."""
    if given is None:
        return None
    try:
        return float(given)
    except ValueError:
        return given


async def _by_key(state: ConsoleState, request: Request, topic: str, key: str) -> Response:
    """The newest first. A cursor is the millisecond of the last row, and the number of its rows.

    Messages of one millisecond come in a fixed order, so that their number is enough.
    """
    size = int_param(request, "count", 50, 1, MOST)
    millis, skip = _key_cursor(text_param(request, "cursor"))
    until = None if millis is None else (millis + 1) / 1000
    rows: list[ReceivedMessage] = []
    cursor: str | None = None
    found = state.admin.messages.by_key(topic, key, until=until)
    async with aclosing(found):
        async for message in found:
            if message.stored.store_ms == millis and skip:
                skip -= 1
                continue
            if len(rows) == size:
                last = rows[-1].stored.store_ms
                done = sum(each.stored.store_ms == last for each in rows)
                before = _key_cursor(text_param(request, "cursor"))
                cursor = f"{last}.{done + (before[1] if before[0] == last else 0)}"
                break
            rows.append(message)
    command = state.command(Action.FIND_MESSAGES, topic, key, limit=_listed(request) + size)
    view = view_of(request)
    shown = [message_row(each, view) for each in rows]
    content = {"rows": shown, "cursor": cursor, "command": command, "looked": len(rows)}
    return answer(content)


def _key_cursor(given: str | None) -> tuple[int | None, int]:
    if given is None:
        return None, 0
    millis, _, done = given.partition(".")
    if not (millis.isdecimal() and done.isdecimal()):
        raise BadInput("not a cursor; use the one of the page before, unchanged")
    return int(millis), int(done)


async def _found(request: Request) -> ReceivedMessage:
    """The message that a query names by its id."""
    messages = state_of(request).admin.messages
    return await messages.get(required_param(request, "id"), topic=text_param(request, "topic"))


async def message(request: Request) -> Response:
    """One message, by its unique id and topic or by its offset id, with all its properties."""
    found = await _found(request)
    command = state_of(request).command(Action.SHOW_MESSAGE, found.msg_id, topic=found.queue.topic)
    return answer(message_details(found, view_of(request)) | {"command": command})


async def body(request: Request) -> Response:
    """A body as a file; with `form` as text."""
    found = await _found(request)
    shown = view_of(request).shown(found)
    raw = shown.raw
    if raw is None:
        raise BadInput(shown.problem or "the body cannot be read")
    if not shown.is_masked and not text_param(request, "form"):
        # A file has the bytes that were sent.
        raw = found.body
    if form := text_param(request, "form"):
        try:
            return answer({"form": form, "text": shown_body(raw, BodyForm(form))})
        except ValueError as error:
            raise BadRequest(f"a body is shown as one of {', '.join(BodyForm)}") from error
    headers = {
        "content-disposition": f'attachment; filename="{found.offset_id}.bin"',
        # Foreign content: never run it.
        "content-security-policy": "sandbox; default-src 'none'",
    }
    return Response(raw, media_type="application/octet-stream", headers=headers)


async def track(request: Request) -> Response:
    """The fate of a message in every group of its topic, and its path with times."""
    found = await _found(request)
    state, view = state_of(request), view_of(request)
    messages = state.admin.messages
    tracks = await messages.track(found)
    steps = [*known_steps(found, tracks), *await traced_steps(messages, found)]
    return answer(
        {
            "message": message_row(found, view),
            "tracks": [shown_track(each, view) for each in tracks],
            "path": sorted(steps, key=lambda step: step.at),
            "trace": found.get(TRACE_CONTEXT),
            "command": state.command(Action.TRACK_MESSAGE, found.offset_id),
        }
    )


async def tail(request: Request) -> Response:
    """Messages as they arrive, as events; the first event has the command."""
    state = state_of(request)
    topic = required_param(request, "topic")
    # A wrong name is answered before the stream begins.
    await state.admin.topics.get(topic)
    expression, kind = text_param(request, "expression"), text_param(request, "type") or "TAG"
    arriving = state.admin.messages.tail(topic, expression=expression or "*", expression_type=kind)
    command = state.command(Action.CONSUME, topic, follow=True, **_filter_option(expression, kind))
    view, where = view_of(request), _where(request)
    events = _tail(state, arriving, command, lambda each: _row_where(each, view, where))
    return stream(events, session_check(request))


def _row_where(
    message: ReceivedMessage, view: BodyView, where: Condition | None
) -> dict[str, Any] | None:
    return message_row(message, view) if _holds(where, view, message) else None


async def _tail(
    state: ConsoleState,
    arriving: AsyncGenerator[ReceivedMessage, None],
    command: str,
    row_of: Callable[[ReceivedMessage], dict[str, Any] | None],
) -> AsyncGenerator[bytes, None]:
    if state.tails >= MOST_TAILS:
        yield encoded("refused", {"text": f"{MOST_TAILS} pages follow topics already; close one"})
        return
    state.tails += 1
    try:
        yield encoded("command", {"command": command})
        async with aclosing(_arriving(state, arriving, row_of)) as events:
            async for event in events:
                yield event
    finally:
        state.tails -= 1


async def _arriving(
    state: ConsoleState,
    arriving: AsyncGenerator[ReceivedMessage, None],
    row_of: Callable[[ReceivedMessage], dict[str, Any] | None],
) -> AsyncGenerator[bytes, None]:
    second, shown, passed = 0, 0, 0
    async with aclosing(arriving):
        async for each in arriving:
            now = int(state.clock.monotonic())
            if now != second:
                if passed:
                    yield encoded("passed", {"count": passed})
                second, shown, passed = now, 0, 0
            if shown < TAIL_RATE:
                row = row_of(each)
                if row is not None:
                    shown += 1
                    yield encoded("message", row)
            else:
                passed += 1


#: Bytes of a body in the command that sends it again.
LONGEST_COMMAND = 2000
#: Characters of a body in a list, and bytes of one that is shown whole.
PREVIEW = 160
LARGEST_SHOWN = 256 * 1024


def message_row(message: ReceivedMessage, view: BodyView) -> dict[str, Any]:
    """A message in a list."""
    shown = view.shown(message)
    raw = shown.raw
    return pick(
        message,
        "offset_id stored_at born_at tags keys size",
        id=message.msg_id,
        topic=message.queue.topic,
        broker=message.queue.broker,
        queue=message.queue.id,
        offset=message.queue_offset,
        attempts=message.reconsume_times,
        preview=shown.problem if raw is None else preview(raw),
        is_readable=raw is not None,
        form=shown.form,
        is_masked=shown.is_masked,
    )


def message_details(message: ReceivedMessage, view: BodyView) -> dict[str, Any]:
    """Everything about a message, with its body in every form that fits it."""
    shown = view.shown(message)
    raw, forms = shown.raw, _forms(shown, message)
    return message_row(message, view) | {
        "properties": dict(message.properties),
        "born_host": ":".join(map(str, message.stored.born_host)),
        "store_host": ":".join(map(str, message.stored.store_host)),
        "transaction_id": message.transaction_id,
        "origin_id": message.origin_id,
        "body_size": None if raw is None else len(raw),
        "is_cut": raw is not None and len(raw) > LARGEST_SHOWN,
        "forms": forms,
        "problem": shown.problem,
        "decoded_for": topic_of(message),
    }


def _forms(shown: ShownBody, message: ReceivedMessage) -> dict[str, str]:
    if shown.raw is None:
        return {}
    forms: dict[str, str] = {}
    # The bytes of a body would tell what is masked in it.
    for form in _FORMS[:2] if shown.is_masked else _FORMS:
        raw = message.body if form is BodyForm.HEX else shown.raw
        try:
            forms[form] = shown_body(raw[:LARGEST_SHOWN], form)
        except BadRequest:
            continue
    return forms


_FORMS = (BodyForm.JSON, BodyForm.TEXT, BodyForm.HEX)


def preview(raw: bytes) -> str:
    """The beginning of a body on one line."""
    head = raw[: PREVIEW * 4]
    text = head.decode("utf-8", "replace")
    if "\ufffd" in text[:-1] or any(ord(each) < 32 and each not in "\t\r\n" for each in text):
        return head[: PREVIEW // 3].hex(" ")
    return " ".join(text.split())[:PREVIEW]


def letter_row(letter: DeadLetter, view: BodyView) -> dict[str, Any]:
    """A dead letter in a list."""
    return message_row(letter.message, view) | pick(
        letter,
        "origin_id reason died_at resent_times",
        letter=letter.id,
        origin_topic=letter.topic,
        tried=letter.attempts,
    )


def shown_track(track: Track, view: BodyView) -> dict[str, Any]:
    """The fate of a message in a group."""
    return pick(
        track,
        "group text is_online failures",
        fate=track.fate.name.lower(),
        copy=None if track.copy is None else message_row(track.copy, view),
    )


TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
#: The header in which W3C's trace context travels.
TRACE_CONTEXT = "traceparent"
#: Records that are read of one message; each attempt of each group makes two.
_MOST_RECORDS = 200
_RECORD, _FIELD = "\x02", "\x01"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step on the path of a message: sent, stored, given to a handler, finished."""

    at: float
    what: str
    #: A host, a queue or a client's group.
    where: str = ""
    group: str | None = None
    #: Seconds that it took; None: not known.
    took: float | None = None
    is_bad: bool = False


def known_steps(message: ReceivedMessage, tracks: Iterable[Track]) -> Iterator[Step]:
    """The steps that the message and its copies show."""
    yield Step(at=message.born_at, what="sent", where=_host(message.stored.born_host))
    is_copy = message.reconsume_times > 0
    yield Step(
        at=message.stored_at,
        what="this copy stored" if is_copy else "stored",
        where=str(message.queue),
        took=None if is_copy else max(0.0, message.stored_at - message.born_at),
    )
    for track in tracks:
        copy = track.copy
        if copy is not None and copy.offset_id != message.offset_id:
            yield Step(
                at=copy.stored_at,
                what=f"{track.fate.value}, after {several(track.failures, 'attempt')}",
                where=str(copy.queue),
                group=track.group,
                is_bad=track.fate.name == "DEAD",
            )


async def traced_steps(messages: AsyncMessages, message: ReceivedMessage) -> list[Step]:
    """The steps in the trace topic, where Java's clients write with `enableMsgTrace`."""
    steps: list[Step] = []
    seen = 0
    try:
        async with aclosing(messages.by_key(TRACE_TOPIC, message.msg_id)) as found:
            async for each in found:
                seen += 1
                steps += parsed(each.text(), message.msg_id)
                if seen == _MOST_RECORDS:
                    break
    except ClientError:
        # There is no such topic, or its messages are no trace.
        return steps
    return steps


def parsed(text: str, message_id: str) -> Iterator[Step]:
    """The records about one message: they end with U+0002, and their fields with U+0001.

    The end of a handler (SubAfter) has neither time nor group in older clients.
    """
    begun: dict[str, tuple[float, str]] = {}
    for record in text.split(_RECORD):
        kind, *fields = record.split(_FIELD)
        try:
            match kind:
                case "Pub" if fields[4] == message_id:
                    took, is_ok = int(fields[9]) / 1000, fields[-1] != "false"
                    yield Step(
                        at=int(fields[0]) / 1000,
                        what="send began" if is_ok else "send failed",
                        where=f"by {fields[2]}",
                        took=took,
                        is_bad=not is_ok,
                    )
                case "SubBefore" if fields[4] == message_id:
                    at, group, again = int(fields[0]) / 1000, fields[2], int(fields[5])
                    begun[fields[3]] = (at, group)
                    what = f"given to a handler, attempt {again + 1}"
                    yield Step(at=at, what=what, group=group)
                case "SubAfter" if fields[1] == message_id:
                    took, is_ok = int(fields[2]) / 1000, fields[3] == "true"
                    known = begun.get(fields[0])
                    if len(fields) >= 8 and fields[6].isdecimal():
                        at, group = int(fields[6]) / 1000, fields[7]
                    elif known is not None:
                        at, group = known[0] + took, known[1]
                    else:
                        continue
                    yield Step(
                        at=at,
                        what="finished" if is_ok else "handler failed",
                        group=group,
                        took=took,
                        is_bad=not is_ok,
                    )
        except (ValueError, IndexError):
            # Written by another client.
            continue


def _host(host: tuple[object, ...]) -> str:
    return ":".join(map(str, host))


async def decoder(request: Request) -> Response:
    """How the bodies of a topic are read, and what each format needs."""
    bodies = state_of(request).bodies
    return answer(
        {
            "decoder": bodies.decoder(request.path_params["topic"]),
            "formats": [{"name": each, "missing": missing(each)} for each in Format],
            "masked": state_of(request).settings.masked,
        }
    )


async def choose_decoder(request: Request) -> Response:
    """Decode the bodies of a topic this way from now on, for all users of this console."""
    state, topic = state_of(request), request.path_params["topic"]
    chosen = await read_body(request, Decoder)
    check_right(request, Right.DECODERS)
    await state.bodies.choose(topic, chosen)
    what = f"bodies of {topic} are read as {chosen.format}"
    await state.audit.note(actor_of(request), f"decoder of {topic}", what)
    return answer({"decoder": chosen, "outcome": what})


class ResendMessageRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message to send again."""

    id: str
    topic: str | None = None
    #: The topic that the copy goes to; none: that of the message.
    to: str | None = None
    dry_run: bool = False


#: Properties of a message that belong to this copy of it alone.
_OWN_PROPERTIES = RESERVED | {DLQ_REASON}


async def resend(request: Request) -> Response:
    """Send a copy of a message, with its body, tag, keys and properties.

    With `dry_run` the answer has only the command that sends such a message.
    """
    state = state_of(request)
    wanted = await read_body(request, ResendMessageRequest)
    found = await state.admin.messages.get(wanted.id, topic=wanted.topic)
    to = wanted.to or topic_of(found)
    properties = {
        name: value for name, value in found.properties.items() if name not in _OWN_PROPERTIES
    }
    text = view_of(request).body(found)
    command = state.command(
        Action.PRODUCE,
        to,
        text[:LONGEST_COMMAND].decode("utf-8", "replace"),
        tag=found.tags,
        keys=found.keys,
        property=properties,
    )
    if wanted.dry_run:
        return answer({"command": command, "to": to})
    check_right(request, Right.SEND, command)
    message = Message(to, found.body, tags=found.tags, keys=found.keys, properties=properties)
    result = await state.producer.send(message)
    outcome = f"a copy of {found.offset_id} sent as {result.msg_id} to {result.queue}"
    await state.audit.note(actor_of(request), state.command(Action.PRODUCE, to), outcome)
    state.collector.look_soon(configuration=False)
    return answer(
        {"command": command, "to": to, "id": result.msg_id, "offset_id": result.offset_id}
    )


routes = [
    Route("/topics/{topic}/decoder", decoder, methods=["GET"]),
    Route("/topics/{topic}/decoder", choose_decoder, methods=["PUT"]),
    Route("/messages/resend", resend, methods=["POST"]),
    Route("/messages", messages),
    Route("/messages/one", message),
    Route("/messages/body", body),
    Route("/messages/track", track),
    Route("/messages/tail", tail),
]
