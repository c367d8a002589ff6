"""How a declared body is read from what peers write, and written so that all of them can read it.

Reading tries msgspec with the declared types first. Only what it refuses is scanned as fastjson's
dialect and converted forgivingly (`fastjson`, `coerce`).

Writing is compact standard JSON, keys in alphabetical order, nulls left out. Two kinds of map have
no standard form and follow the peers instead: maps keyed by message queues have the queue's object
as key, which is what Java, Go and the admin tools parse; maps keyed by integers have quoted keys,
or bare ones for a reader older than 4.9.4.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import inspect

from orbitmq.wire.coerce import Mismatch, coerce
from orbitmq.wire.errors import BodyError, EncodeError
from orbitmq.wire.fastjson import JsonError, Value, parse
from orbitmq.wire.jsontext import quoted, scalar
from orbitmq.wire.limits import DEFAULT_LIMITS, WireLimits

#: Java's `int` and `long`.
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Body(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An object in a JSON body. Fields are declared in the order in which they are written."""


B = TypeVar("B", bound=Body)


def decode_body(kind: type[B], data: bytes | memoryview, limits: WireLimits = DEFAULT_LIMITS) -> B:
    """A body as a `kind`. Raises `BodyError` when it is not one, in whatever dialect."""
    # A reference would pass for an object without any of its fields.
    if b'"$ref"' not in bytes(data):
        try:
            decoder: msgspec.json.Decoder[B] = _decoder(kind)
            return decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass
    try:
        return coerce(kind, _values(data, limits), limits)
    except JsonError as error:
        raise BodyError(kind.__name__, f"not JSON: {error}") from error
    except Mismatch as mismatch:
        raise BodyError(kind.__name__, str(mismatch)) from mismatch


def _values(data: bytes | memoryview, limits: WireLimits) -> Value:
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError as error:
        raise JsonError("not UTF-8", error.start) from error
    return parse(text, limits)


@functools.cache
def _decoder(kind: type[B]) -> msgspec.json.Decoder[B]:
    return msgspec.json.Decoder(kind, strict=False)


def encode_body(body: Body, *, bare_integer_keys: bool = False) -> bytes:
    """A body as JSON; with bare integer keys for Java readers older than 4.9.4."""
    pieces: list[bytes] = []
    _write(body, pieces, bare_integer_keys)
    return b"".join(pieces)


def _write(value: Any, pieces: list[bytes], bare: bool) -> None:
    if isinstance(value, msgspec.Struct):
        _write_struct(value, pieces, bare)
    elif isinstance(value, dict):
        _write_mapping(value, pieces, bare)
    elif isinstance(value, tuple):
        pieces.append(b"[")
        for place, entry in enumerate(value):
            if place:
                pieces.append(b",")
            _write(entry, pieces, bare)
        pieces.append(b"]")
    else:
        pieces.append(scalar(value))


def _write_struct(body: msgspec.Struct, pieces: list[bytes], bare: bool) -> None:
    kind = type(body)
    if _is_plain(kind):
        pieces.append(scalar(body))
        return
    separator = b"{"
    for attribute, name in _names(kind):
        value = getattr(body, attribute)
        if value is None:
            continue
        pieces.append(separator + name)
        separator = b","
        _write(value, pieces, bare)
    pieces.append(b"{}" if separator == b"{" else b"}")


def _write_mapping(mapping: dict[Any, Any], pieces: list[bytes], bare: bool) -> None:
    separator = b"{"
    for key, value in mapping.items():
        pieces.append(separator)
        separator = b","
        if isinstance(key, str):
            pieces.append(quoted(key))
        elif isinstance(key, int):
            pieces.append(b"%d" % key if bare else b'"%d"' % key)
        elif isinstance(key, msgspec.Struct):
            _write_struct(key, pieces, bare)
        else:
            raise EncodeError(f"{key!r} cannot be the key of a map")
        pieces.append(b":")
        _write(value, pieces, bare)
    pieces.append(b"{}" if separator == b"{" else b"}")


@functools.cache
def _names(kind: type[msgspec.Struct]) -> tuple[tuple[str, bytes], ...]:
    pairs = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    return tuple((attribute, b'"%b":' % name.encode()) for attribute, name in pairs)


@functools.cache
def _is_plain(kind: type[msgspec.Struct]) -> bool:
    """Whether msgspec writes this struct as we would: nothing optional, no map with odd keys."""
    return _plain(inspect.type_info(kind))


def _plain(declared: inspect.Type) -> bool:
    match declared:
        case inspect.StructType():
            return all(_plain(field.type) for field in declared.fields)
        case inspect.DictType():
            return isinstance(declared.key_type, inspect.StrType) and _plain(declared.value_type)
        case inspect.VarTupleType():
            return _plain(declared.item_type)
        case _:
            return not isinstance(declared, inspect.UnionType | inspect.AnyType)
