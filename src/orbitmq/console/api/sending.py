"""A test message: sent, and shown where it landed."""

from __future__ import annotations

import base64
import binascii

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orbitmq.client.message import Message
from orbitmq.client.queue import Queue
from orbitmq.console import commandlines
from orbitmq.console.answers import answer, given
from orbitmq.console.errors import BadInput
from orbitmq.console.parts import parts_of, who


class Draft(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message to be sent."""

    topic: str
    body: str = ""
    #: Instead of `body`, for what is not text.
    body_base64: str | None = None
    tags: str | None = None
    keys: tuple[str, ...] = ()
    properties: dict[str, str] = msgspec.field(default_factory=dict)
    #: Seconds until it is delivered.
    delay: float | None = None
    #: `broker-a:3`; none: any.
    queue: str | None = None
    dry_run: bool = False


async def send(request: Request) -> Response:
    """Send a message, and say where it landed; with `dry_run` only the command is told."""
    parts = parts_of(request)
    draft = await given(request, Draft)
    message = Message(
        draft.topic,
        _body(draft),
        tags=draft.tags or None,
        keys=draft.keys,
        properties=draft.properties,
        delay=draft.delay or None,
    )
    command = parts.aimed(
        commandlines.produce(
            draft.topic,
            draft.body,
            tags=draft.tags or None,
            keys=draft.keys,
            properties=draft.properties,
            delay=draft.delay or None,
        )
    )
    if draft.dry_run:
        return answer({"command": command})
    parts.check_write(command)
    result = await parts.producer.send(message, queue=_queue(draft))
    await parts.audit.note(
        who(request),
        parts.aimed(commandlines.command("produce", draft.topic)),
        f"sent as {result.msg_id} to {result.queue}",
    )
    parts.collector.look_soon(configuration=False)
    return answer(
        {
            "command": command,
            "status": result.status.name.lower(),
            "id": result.msg_id,
            "offset_id": result.offset_id,
            "broker": result.queue.broker,
            "queue": result.queue.id,
            "offset": result.queue_offset,
            "topic": draft.topic,
        }
    )


def _body(draft: Draft) -> bytes:
    if draft.body_base64 is None:
        return draft.body.encode()
    try:
        return base64.b64decode(draft.body_base64, validate=True)
    except binascii.Error as error:
        raise BadInput("body_base64 is not base64") from error


def _queue(draft: Draft) -> Queue | None:
    if not draft.queue:
        return None
    broker, _, number = draft.queue.rpartition(":")
    if not number.isdecimal():
        raise BadInput(f"a queue is named like broker-a:3, got {draft.queue[:80]!r}")
    return Queue(draft.topic, broker, int(number))


routes = [Route("/send", send, methods=["POST"])]
