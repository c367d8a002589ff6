"""Messages as JSON. Bodies and properties are other people's: texts for the page, nothing more."""

from __future__ import annotations

from typing import Any

from orbitmq.client.admin import BodyForm, DeadLetter, Track, shown_body
from orbitmq.client.admin.errors import BadRequest
from orbitmq.client.received import ReceivedMessage
from orbitmq.message.errors import MessageError

#: Characters of a body in a list, and bytes of one that is shown whole.
PREVIEW = 160
LARGEST_SHOWN = 256 * 1024


def message_row(message: ReceivedMessage) -> dict[str, Any]:
    """A message in a list."""
    raw, problem = readable_body(message)
    return {
        "id": message.msg_id,
        "offset_id": message.offset_id,
        "topic": message.queue.topic,
        "broker": message.queue.broker,
        "queue": message.queue.id,
        "offset": message.queue_offset,
        "stored_at": message.stored_at,
        "born_at": message.born_at,
        "tags": message.tags,
        "keys": message.keys,
        "size": message.size,
        "attempts": message.reconsume_times,
        "preview": problem if raw is None else preview(raw),
        "is_readable": raw is not None,
    }


def message_details(message: ReceivedMessage) -> dict[str, Any]:
    """Everything about a message, with its body in every form that fits it."""
    raw, problem = readable_body(message)
    forms: dict[str, str] = {}
    if raw is not None:
        cut = raw[:LARGEST_SHOWN]
        for form in (BodyForm.JSON, BodyForm.TEXT, BodyForm.HEX):
            try:
                forms[form] = shown_body(cut, form)
            except BadRequest:
                continue
    return message_row(message) | {
        "properties": dict(message.properties),
        "born_host": ":".join(map(str, message.stored.born_host)),
        "store_host": ":".join(map(str, message.stored.store_host)),
        "transaction_id": message.transaction_id,
        "origin_id": message.origin_id,
        "body_size": None if raw is None else len(raw),
        "is_cut": raw is not None and len(raw) > LARGEST_SHOWN,
        "forms": forms,
        "problem": problem,
    }


def readable_body(message: ReceivedMessage) -> tuple[bytes | None, str | None]:
    """The body, or why there is none."""
    try:
        return message.body, None
    except MessageError as error:
        return None, str(error)


def preview(raw: bytes) -> str:
    """The beginning of a body on one line."""
    head = raw[: PREVIEW * 4]
    text = head.decode("utf-8", "replace")
    if "\ufffd" in text[:-1] or any(ord(each) < 32 and each not in "\t\r\n" for each in text):
        return head[: PREVIEW // 3].hex(" ")
    return " ".join(text.split())[:PREVIEW]


def shown_letter(letter: DeadLetter) -> dict[str, Any]:
    """A dead letter in a list."""
    return message_row(letter.message) | {
        "letter": letter.id,
        "origin_topic": letter.topic,
        "origin_id": letter.origin_id,
        "reason": letter.reason,
        "tried": letter.attempts,
        "died_at": letter.died_at,
        "resent_times": letter.resent_times,
    }


def shown_track(track: Track) -> dict[str, Any]:
    """A message in a group."""
    return {
        "group": track.group,
        "fate": track.fate.name.lower(),
        "text": track.text,
        "is_online": track.is_online,
        "failures": track.failures,
        "copy": None if track.copy is None else message_row(track.copy),
    }
