"""Messages as `--json` prints them, and as people see them in a list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orbitmq.cli.jsonoutput import body_fields
from orbitmq.cli.printing import Printer
from orbitmq.cli.tables import Columns
from orbitmq.cli.wording import NOTHING, count, size
from orbitmq.client.admin.bodies import BodyForm, shown_body
from orbitmq.client.received import ReceivedMessage
from orbitmq.message.errors import MessageError

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
    failures: int  #: how often it was tried before
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
        return cls(
            id=message.msg_id,
            unique_id=message.unique_id,
            offset_id=message.offset_id,
            topic=message.topic,
            broker=message.queue.broker,
            queue_id=message.queue.id,
            queue_offset=message.queue_offset,
            tags=message.tags,
            keys=message.keys,
            born_at=message.born_at,
            stored_at=message.stored_at,
            size=message.size,
            failures=message.reconsume_times,
            properties=dict(message.properties),
            body=body,
            body_base64=encoded,
            problem=problem,
        )


def message_columns(out: Printer) -> Columns[ReceivedMessage]:
    """Messages in a list."""
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
    """The beginning of a body, on one line."""
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
    """All about one message."""
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
