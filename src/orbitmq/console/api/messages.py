"""Messages: found by place, time, key or id; what became of them; and as they arrive."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orbitmq.client.admin import BodyForm, shown_body
from orbitmq.client.admin.errors import BadRequest
from orbitmq.client.received import ReceivedMessage
from orbitmq.console import commandlines
from orbitmq.console.answers import answer, needed, number, text
from orbitmq.console.api.shownmessages import (
    message_details,
    message_row,
    readable_body,
    shown_track,
)
from orbitmq.console.api.topics import queue_named
from orbitmq.console.errors import BadInput
from orbitmq.console.events import encoded, stream
from orbitmq.console.offsetwalks import cursor_at
from orbitmq.console.parts import Parts, is_let_in, parts_of
from orbitmq.console.paths import TRACE_CONTEXT, known_steps, traced_steps

MOST = 200
#: Messages that a page which follows a topic is shown in one second; the rest are counted.
TAIL_RATE = 50
#: Pages that may follow topics at the same time: each of them keeps brokers busy.
MOST_TAILS = 30


async def messages(request: Request) -> Response:
    """A page of a topic: `cursor`, or where to begin.

    By time (`since`, `until`, ISO or epoch seconds), by place (`queue` and `offset`), or by `key`.
    `expression` and `type` (TAG, SQL92) filter at the broker; `newest=1` goes backwards. `listed`
    is how many the pages before had: the command is for all of them together.
    """
    parts = parts_of(request)
    topic = needed(request, "topic")
    if key := text(request, "key"):
        return await _by_key(parts, request, topic, key)
    cursor = text(request, "cursor")
    queue = text(request, "queue")
    queues = None if queue is None else [queue_named(topic, queue)]
    size = number(request, "count", 50, 1, MOST)
    since, until = _moment(text(request, "since")), _moment(text(request, "until"))
    newest = text(request, "newest") == "1"
    expression, kind = text(request, "expression"), text(request, "type") or "TAG"
    offset = number(request, "offset", -1, 0, 2**63 - 1)
    if cursor is None and offset >= 0:
        cursor = await cursor_at(
            parts.admin,
            queue_named(topic, needed(request, "queue")),
            offset,
            newest_first=newest,
            expression=expression or "*",
            expression_type=kind,
        )
    page = await parts.admin.messages.page(
        topic,
        cursor=cursor,
        size=size,
        since=since,
        until=until,
        queues=queues,
        newest_first=newest,
        expression=expression or "*",
        expression_type=kind,
    )
    command = commandlines.browse_messages(
        topic,
        since=since,
        until=until,
        queues=queues or (),
        offset=offset if offset >= 0 else None,
        expression=expression,
        is_sql=kind != "TAG",
        newest=newest,
        limit=_listed(request) + size,
    )
    rows = [message_row(each) for each in page.messages]
    return answer({"rows": rows, "cursor": page.cursor, "command": parts.aimed(command)})


def _listed(request: Request) -> int:
    """How many messages the pages before had."""
    return number(request, "listed", 0, 0, 2**31)


def _moment(given: str | None) -> float | str | None:
    """Epoch seconds as a number, anything else as it is."""
    if given is None:
        return None
    try:
        return float(given)
    except ValueError:
        return given


async def _by_key(parts: Parts, request: Request, topic: str, key: str) -> Response:
    """The newest first. A cursor is the millisecond of the last one, and how many of it are done.

    Messages with one millisecond come in a fixed order, so that counting them is enough.
    """
    size = number(request, "count", 50, 1, MOST)
    millis, skip = _key_cursor(text(request, "cursor"))
    until = None if millis is None else (millis + 1) / 1000
    rows: list[ReceivedMessage] = []
    cursor: str | None = None
    found = parts.admin.messages.by_key(topic, key, until=until)
    async with aclosing(found):
        async for message in found:
            if message.stored.store_ms == millis and skip:
                skip -= 1
                continue
            if len(rows) == size:
                last = rows[-1].stored.store_ms
                done = sum(each.stored.store_ms == last for each in rows)
                before = _key_cursor(text(request, "cursor"))
                cursor = f"{last}.{done + (before[1] if before[0] == last else 0)}"
                break
            rows.append(message)
    command = parts.aimed(commandlines.find_messages(topic, key, limit=_listed(request) + size))
    shown = [message_row(each) for each in rows]
    return answer({"rows": shown, "cursor": cursor, "command": command})


def _key_cursor(given: str | None) -> tuple[int | None, int]:
    if given is None:
        return None, 0
    millis, _, done = given.partition(".")
    if not (millis.isdecimal() and done.isdecimal()):
        raise BadInput("not a cursor; use the one of the page before, unchanged")
    return int(millis), int(done)


async def _found(request: Request) -> ReceivedMessage:
    """The message that a query names by its id."""
    messages = parts_of(request).admin.messages
    return await messages.get(needed(request, "id"), topic=text(request, "topic"))


async def message(request: Request) -> Response:
    """One message, by its unique id and topic or by its offset id, with all its properties."""
    found = await _found(request)
    command = commandlines.show_message(found.msg_id, found.queue.topic)
    return answer(message_details(found) | {"command": parts_of(request).aimed(command)})


async def body(request: Request) -> Response:
    """A body as it is, to be saved; or with `form` as text for people."""
    found = await _found(request)
    raw, problem = readable_body(found)
    if raw is None:
        raise BadInput(problem or "the body cannot be read")
    if form := text(request, "form"):
        try:
            return answer({"form": form, "text": shown_body(raw, BodyForm(form))})
        except ValueError as error:
            raise BadRequest(f"a body is shown as one of {', '.join(BodyForm)}") from error
    headers = {
        "content-disposition": f'attachment; filename="{found.offset_id}.bin"',
        # It is somebody else's: never anything that runs.
        "content-security-policy": "sandbox; default-src 'none'",
    }
    return Response(raw, media_type="application/octet-stream", headers=headers)


async def track(request: Request) -> Response:
    """What became of a message in every group that consumes its topic, and its path with times."""
    found = await _found(request)
    parts = parts_of(request)
    messages = parts.admin.messages
    tracks = await messages.track(found)
    steps = [*known_steps(found, tracks), *await traced_steps(messages, found)]
    return answer(
        {
            "message": message_row(found),
            "tracks": [shown_track(each) for each in tracks],
            "path": sorted(steps, key=lambda step: step.at),
            "trace": found.get(TRACE_CONTEXT),
            "command": parts.aimed(commandlines.track_message(found.offset_id, None)),
        }
    )


async def tail(request: Request) -> Response:
    """Messages as they arrive, as events; the first one has the command that does the same."""
    parts = parts_of(request)
    topic = needed(request, "topic")
    # So that a wrong name is an answer and not a stream that ends.
    await parts.admin.topics.get(topic)
    expression, kind = text(request, "expression"), text(request, "type") or "TAG"
    arriving = parts.admin.messages.tail(topic, expression=expression or "*", expression_type=kind)
    command = commandlines.follow_topic(topic, expression=expression, is_sql=kind != "TAG")
    return stream(_tail(parts, arriving, parts.aimed(command)), is_let_in(request))


async def _tail(
    parts: Parts, arriving: AsyncGenerator[ReceivedMessage, None], command: str
) -> AsyncGenerator[bytes, None]:
    if parts.tails >= MOST_TAILS:
        yield encoded("refused", {"text": f"{MOST_TAILS} pages follow topics already; close one"})
        return
    parts.tails += 1
    try:
        yield encoded("command", {"command": command})
        async with aclosing(_arriving(parts, arriving)) as events:
            async for event in events:
                yield event
    finally:
        parts.tails -= 1


async def _arriving(
    parts: Parts, arriving: AsyncGenerator[ReceivedMessage, None]
) -> AsyncGenerator[bytes, None]:
    second, shown, passed = 0, 0, 0
    async with aclosing(arriving):
        async for each in arriving:
            now = int(parts.clock.monotonic())
            if now != second:
                if passed:
                    yield encoded("passed", {"count": passed})
                second, shown, passed = now, 0, 0
            if shown < TAIL_RATE:
                shown += 1
                yield encoded("message", message_row(each))
            else:
                passed += 1


routes = [
    Route("/messages", messages),
    Route("/messages/one", message),
    Route("/messages/body", body),
    Route("/messages/track", track),
    Route("/messages/tail", tail),
]
