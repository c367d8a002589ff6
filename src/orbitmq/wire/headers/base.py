"""What a header declaration means, and how it becomes fields on the wire and back.

A header is declared once, as a struct. Everything else follows from the declaration:

* the wire name of a field is its name in camel case, unless the field says otherwise;
* fields with a default of their own are always sent and None is not, as Java does with primitives
  and nulls;
* a field marked with `Letter` has a second, one-letter name, used by the request codes in
  `LETTERED_CODES`;
* the declared type says what is accepted: the fast way is msgspec's, the forgiving way is `coerce`.

Headers are in the wire's own units: times are epoch milliseconds, and names say `millis` for spans.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from orbitmq.wire.codes import RequestCode
from orbitmq.wire.coerce import Mismatch, coerce
from orbitmq.wire.errors import HeaderError

#: Java's `int` and `long`.
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Letter(NamedTuple):
    """The one-letter name of a field, given in its annotation."""

    name: str


class Header(msgspec.Struct, frozen=True, kw_only=True, gc=False, rename="camel"):
    """The fields of one kind of request or answer."""


class RequestHeader(Header, frozen=True, kw_only=True, gc=False):
    """What most requests may carry besides their own fields."""

    broker_name: str | None = msgspec.field(name="bname", default=None)
    namespace: str | None = msgspec.field(name="ns", default=None)
    has_namespace: bool | None = msgspec.field(name="nsd", default=None)
    is_one_way: bool | None = msgspec.field(name="oway", default=None)


class TopicRequestHeader(RequestHeader, frozen=True, kw_only=True, gc=False):
    """A request about a topic, which may be addressed by its static-topic name."""

    is_logical: bool | None = msgspec.field(name="lo", default=None)


class NoFields(Header, frozen=True, kw_only=True, gc=False):
    """A request or answer that says everything by its code and body."""


H = TypeVar("H", bound=Header)

#: The requests whose fields have one-letter names. Whether a send is a batch is told by its field
#: `batch`, not by its code.
LETTERED_CODES: frozenset[int] = frozenset(
    # Plain numbers, because every request is looked up here.
    int(code)
    for code in (
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
    )
)


class JsonDecoders(dict[type[Header], Callable[[bytes | memoryview], Any]]):
    """By kind the fast way from `extFields` as JSON; refuses what only the forgiving way reads.

    Made when it is needed first. Every request is looked up here.
    """

    def __init__(self, *, by_letters: bool) -> None:
        super().__init__()
        self._by_letters = by_letters

    def __missing__(self, kind: type[Header]) -> Callable[[bytes | memoryview], Any]:
        named = lettered(kind) if self._by_letters else kind
        decode = self[kind] = msgspec.json.Decoder(named, strict=False).decode
        return decode


def decode_fields(kind: type[H], fields: Mapping[str, str]) -> H:
    """A map of strings into a header; what does not fit is a `HeaderError` that names the field."""
    try:
        return msgspec.convert(fields, kind, strict=False)
    except (msgspec.MsgspecError, ValueError):
        pass
    try:
        return coerce(kind, fields)
    except Mismatch as mismatch:
        raise HeaderError(
            kind.__name__, mismatch.field, mismatch.allowed, mismatch.got
        ) from mismatch


def encode_fields(header: Header, kind: type[Header] | None = None) -> dict[str, str]:
    """A header as a map of strings, with the names that `kind` (else its own class) declares."""
    fields: dict[str, str] = {}
    for attribute, name in _names(kind or type(header)):
        value = getattr(header, attribute)
        if value is not None:
            fields[name] = _text_of(value)
    return fields


def _text_of(value: object) -> str:
    if isinstance(value, str):
        return value.name if isinstance(value, enum.Enum) else value
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, int) else str(value)


@functools.cache
def lettered(kind: type[H]) -> type[H]:
    """The same header under its one-letter names; `kind` itself when it declares none."""
    hints = get_type_hints(kind, include_extras=True)
    info = {field.name: field for field in msgspec.structs.fields(kind)}
    renamed = [
        (name, info[name].type, _renamed_field(info[name], letter.name))
        for name, hint in hints.items()
        if (letter := _letter(hint)) is not None
    ]
    if not renamed:
        return kind
    return msgspec.defstruct(  # type: ignore[return-value]  # a subclass of its base
        kind.__name__, renamed, bases=(kind,), frozen=True, kw_only=True, gc=False
    )


def _letter(hint: object) -> Letter | None:
    if get_origin(hint) is not Annotated:
        return None
    return next((part for part in get_args(hint) if isinstance(part, Letter)), None)


def _renamed_field(field: msgspec.structs.FieldInfo, name: str) -> Any:
    if field.default is msgspec.NODEFAULT:
        return msgspec.field(name=name)
    return msgspec.field(name=name, default=field.default)


@functools.cache
def _names(kind: type[Header]) -> tuple[tuple[str, str], ...]:
    return tuple(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
