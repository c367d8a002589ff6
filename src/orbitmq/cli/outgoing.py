"""Messages out of words, lines and files."""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from orbitmq.cli.errors import Misused
from orbitmq.client.errors import MessageRefused
from orbitmq.client.message import Message
from orbitmq.message.wellknown import RESERVED


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What every message has that does not say otherwise."""

    topic: str
    tags: str | None = None
    keys: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    delay: float | None = None
    deliver_at: float | None = None
    sharding_key: str | None = None

    def message(self, body: bytes) -> Message:
        return Message(
            self.topic,
            body,
            tags=self.tags,
            keys=self.keys,
            properties=self.properties,
            delay=self.delay,
            deliver_at=self.deliver_at,
            sharding_key=self.sharding_key,
        )


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A message as a line of JSON.

    The fields of what `consume --json` and `message browse --json` print are allowed, so that their
    output is an input; what a message gets when it is stored is passed over.
    """

    body: Any = None
    body_base64: str | None = None
    tags: str | None = None
    keys: tuple[str, ...] | str = ()
    properties: dict[str, str] = {}
    delay: float | None = None
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
    """Each line is a body; empty lines are passed over."""
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
    """Each word is a body."""
    for word in words:
        yield defaults.message(word.encode("utf-8", "surrogateescape"))


def _message(line: Line, defaults: Defaults) -> Message:
    own = {name: value for name, value in line.properties.items() if name not in RESERVED}
    return Message(
        defaults.topic,
        _body(line),
        tags=line.tags or defaults.tags,
        keys=line.keys or defaults.keys,
        properties={**defaults.properties, **own},
        delay=defaults.delay if line.delay is None else line.delay,
        deliver_at=defaults.deliver_at if line.delay is None else None,
        sharding_key=line.sharding_key or defaults.sharding_key,
    )


def _body(line: Line) -> bytes:
    if line.body_base64 is not None:
        return base64.b64decode(line.body_base64, validate=True)
    if line.body is None:
        raise MessageRefused("body", "is missing: give body or body_base64")
    return line.body.encode() if isinstance(line.body, str) else msgspec.json.encode(line.body)
