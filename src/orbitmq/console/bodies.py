"""Bodies of messages as the page shows them: decoded by topic, with some fields masked.

Which decoder a topic has is kept with the history. A masked field is shown as `***`, wherever it is
in a body. A body that cannot be decoded into fields is hidden as a whole when it may have one.
"""

from __future__ import annotations

import base64
import binascii
import enum
import gzip
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import msgspec

from orbitmq.client.message import ReceivedMessage
from orbitmq.console.settings import BadInput
from orbitmq.message.formats import (
    FormatRefused,
    Read,
    avro_reader,
    avro_schema,
    missing,
    protobuf_class,
)
from orbitmq.message.properties import DLQ_ORIGIN_TOPIC, REAL_TOPIC, RETRY_TOPIC
from orbitmq.message.record import MessageError

if TYPE_CHECKING:
    from orbitmq.console.history import HistoryFile

#: What stands in the place of a masked value.
MASK: Final = "***"
#: Bytes that a compressed body may grow to.
LARGEST_INFLATED: Final = 16 * 1024 * 1024
_LARGEST_SCHEMA: Final = 1024 * 1024
_MOST_TOPICS: Final = 10_000
_GZIP = b"\x1f\x8b"
#: The name under which the decoder of a topic is kept.
_KEPT = "decoder/"


class Format(enum.StrEnum):
    """What a body is, inside of its compression."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"
    AVRO = "avro"
    PROTOBUF = "protobuf"
    MSGPACK = "msgpack"


class Decoder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the bodies of a topic are read."""

    format: Format = Format.AUTO
    #: Bytes before the content that are skipped, 5 for those of a schema registry.
    skip: int = 0
    #: Of Avro: the schema, as JSON.
    schema: str | None = None
    #: Of Protobuf: a FileDescriptorSet (`protoc --include_imports -o FILE`) in base64.
    descriptor: str | None = None
    #: Of Protobuf: the full name of the message type, `shop.Order`.
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Decoded:
    """A body that was read."""

    #: The content without compression.
    raw: bytes
    #: What it was read as; `text` and `bytes` have no fields.
    form: str
    #: The fields; None without any.
    value: Any = None
    #: Why it could not be read as its topic's decoder says.
    problem: str | None = None

    @property
    def has_fields(self) -> bool:
        return isinstance(self.value, dict | list)


def reader(decoder: Decoder) -> Read:
    """The function that reads contents. Raises `BadInput` for what cannot be one."""
    if not 0 <= decoder.skip <= 1024:
        raise BadInput(f"skip must be from 0 to 1024 bytes, got {decoder.skip}")
    if remedy := missing(decoder.format):
        raise BadInput(f"{decoder.format} needs a package that is not there; {remedy}")
    match decoder.format:
        case Format.AVRO:
            return _avro(decoder.schema)
        case Format.PROTOBUF:
            return _protobuf(decoder.descriptor, decoder.message)
        case Format.MSGPACK:
            return msgspec.msgpack.decode
        case _:
            return msgspec.json.decode


def _avro(schema: str | None) -> Read:
    if not schema:
        raise BadInput("avro needs the schema of the topic's messages, as JSON")
    if len(schema) > _LARGEST_SCHEMA:
        raise BadInput(f"a schema has {_LARGEST_SCHEMA} characters at most")
    try:
        return avro_reader(avro_schema(schema))
    except FormatRefused as refused:
        raise BadInput(str(refused)) from refused


def _protobuf(descriptor: str | None, message: str | None) -> Read:
    if not descriptor or not message:
        raise BadInput(
            "protobuf needs a descriptor (protoc --include_imports -o FILE) and the full name of "
            "the message type, like shop.Order"
        )
    try:
        kind = protobuf_class(base64.b64decode(descriptor, validate=True), message)
    except (FormatRefused, binascii.Error) as refused:
        raise BadInput(str(refused)) from refused
    as_dict = import_module("google.protobuf.json_format").MessageToDict
    pool = kind.DESCRIPTOR.file.pool

    def read(raw: bytes) -> Any:
        found = kind.FromString(raw)
        return as_dict(found, preserving_proto_field_name=True, descriptor_pool=pool)

    return read


class Bodies:
    """The decoders of topics, and the fields that are masked."""

    def __init__(self, file: HistoryFile, masked: Collection[str]) -> None:
        self._file = file
        self.masked = tuple(tuple(each.lower().split(".")) for each in masked)
        self._decoders: dict[str, tuple[Decoder, Read]] = {}

    async def load(self) -> None:
        """Load the decoders of earlier runs."""
        for name, text in (await self._file.kept(_KEPT)).items():
            try:
                decoder = msgspec.json.decode(text, type=Decoder)
                self._decoders[name.removeprefix(_KEPT)] = (decoder, reader(decoder))
            except (msgspec.MsgspecError, BadInput):
                # A package that was there is missing now: the bodies are shown undecoded.
                continue

    def decoder(self, topic: str) -> Decoder:
        """The decoder of a topic."""
        found = self._decoders.get(topic)
        return Decoder() if found is None else found[0]

    async def choose(self, topic: str, decoder: Decoder) -> None:
        """Read the bodies of a topic so from now on. Raises `BadInput`."""
        read = reader(decoder)
        if topic not in self._decoders and len(self._decoders) >= _MOST_TOPICS:
            raise BadInput(f"{_MOST_TOPICS} topics have a decoder already")
        if decoder == Decoder():
            self._decoders.pop(topic, None)
            await self._file.keep(_KEPT + topic, None)
            return
        self._decoders[topic] = (decoder, read)
        await self._file.keep(_KEPT + topic, msgspec.json.encode(decoder).decode())

    def decoded(self, topic: str, body: bytes) -> Decoded:
        """A body, read as its topic's decoder says."""
        decoder, read = self._decoders.get(topic, (None, msgspec.json.decode))
        form = Format.AUTO if decoder is None else decoder.format
        try:
            raw = _inflated(body)
        except ValueError as error:
            return Decoded(body, "bytes", problem=str(error))
        content = raw if decoder is None else raw[decoder.skip :]
        if form is Format.TEXT:
            return Decoded(raw, "text")
        if form is Format.AUTO and content[:1].strip() not in (b"", b"{", b"["):
            return Decoded(raw, _plain_form(raw))
        try:
            value = read(content)
        except Exception as error:  # noqa: BLE001  # foreign bytes: packages raise what they like
            problem = (
                None if form is Format.AUTO else f"not {form}: {str(error) or type(error).__name__}"
            )
            return Decoded(raw, _plain_form(raw), problem=problem)
        return Decoded(content, "json" if form is Format.AUTO else form.value, value)

    def is_masked(self, path: Collection[str]) -> bool:
        """Whether a field is masked: its path ends with that of a masked one."""
        names = tuple(each.lower() for each in path)
        return any(names[-len(each) :] == each for each in self.masked)

    def without_masked(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """A copy in which masked fields are `***`."""
        if isinstance(value, Mapping):
            return {
                name: MASK
                if self.is_masked((*path, str(name)))
                else self.without_masked(each, (*path, str(name)))
                for name, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.without_masked(each, path) for each in value]
        return value

    def may_have_masked(self, raw: bytes) -> bool:
        """Whether bytes without fields may hold a masked value: named ones, or binary ones."""
        if not self.masked:
            return False
        try:
            text = raw.decode().lower()
        except UnicodeDecodeError:
            return True
        return "\x00" in text or any(each[-1] in text for each in self.masked)


@dataclass(frozen=True, slots=True)
class ShownBody:
    """The part of a body that a user may see."""

    #: The bytes to be shown and saved, without compression; None: they cannot be read.
    raw: bytes | None
    form: str
    #: The fields that are shown; None: it has none.
    value: Any
    #: All of them, for conditions.
    fields: Any
    is_masked: bool
    problem: str | None


@dataclass(frozen=True, slots=True)
class BodyView:
    """Bodies as one user sees them, with or without masked fields."""

    bodies: Bodies
    sees_masked: bool = False

    def shown(self, message: ReceivedMessage) -> ShownBody:
        """The body of a message."""
        try:
            body = message.body
        except MessageError as error:
            return ShownBody(None, "bytes", None, None, is_masked=False, problem=str(error))
        found = self.bodies.decoded(topic_of(message), body)
        if self.sees_masked or not self.bodies.masked:
            return _shown(found, found.value, is_masked=False)
        if not found.has_fields:
            if self.bodies.may_have_masked(found.raw):
                problem = found.problem or "hidden: it may have masked fields"
                return ShownBody(MASK.encode(), "text", None, None, is_masked=True, problem=problem)
            return _shown(found, found.value, is_masked=False)
        value = self.bodies.without_masked(found.value)
        return _shown(found, value, is_masked=value != found.value)

    def body(self, message: ReceivedMessage) -> bytes:
        """The bytes that may be saved."""
        shown = self.shown(message)
        return message.body if shown.raw is None or not shown.is_masked else shown.raw

    def check_visible(self, path: Collection[str]) -> None:
        """Raise `BadInput` for a condition that would tell a masked value."""
        if not self.sees_masked and self.bodies.is_masked(path):
            raise BadInput(f"the field {'.'.join(path)} is masked, and cannot be filtered by")


def _shown(found: Decoded, value: Any, *, is_masked: bool) -> ShownBody:
    raw = found.raw
    if found.has_fields and (is_masked or found.form != "json"):
        raw = msgspec.json.encode(plain(value))
    return ShownBody(raw, found.form, value, found.value, is_masked, found.problem)


def topic_of(message: ReceivedMessage) -> str:
    """The topic that a message was sent to: copies are read as the original."""
    for name in (DLQ_ORIGIN_TOPIC, RETRY_TOPIC, REAL_TOPIC):
        if topic := message.get(name):
            return topic
    return message.queue.topic


def plain(value: Any) -> Any:
    """A decoded value as JSON has it: texts for dates and bytes, and as keys."""
    if isinstance(value, Mapping):
        return {
            each if isinstance(each, str) else str(each): plain(it) for each, it in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def _plain_form(raw: bytes) -> str:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bytes"
    return "text"


def _inflated(body: bytes) -> bytes:
    """A body without gzip. Raises `ValueError`."""
    if not body.startswith(_GZIP):
        return body
    try:
        with gzip.GzipFile(fileobj=BytesIO(body)) as file:
            raw = file.read(LARGEST_INFLATED + 1)
    except (OSError, EOFError, zlib.error, binascii.Error) as error:
        raise ValueError(f"not gzip: {error}") from error
    if len(raw) > LARGEST_INFLATED:
        raise ValueError(f"gzip with more than {LARGEST_INFLATED} bytes")
    return raw
