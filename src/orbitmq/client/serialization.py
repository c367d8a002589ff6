"""Values as bodies: what a producer encodes, and what a consumer decodes by a type.

Bytes and texts are bodies as they are. Every other value goes through a serializer: JSON, unless
the application names another one. Pydantic's own classes are encoded and checked by pydantic, which
is never imported here.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Annotated, Any, Final, Protocol, TypeAlias, get_args, get_origin, get_type_hints

import msgspec
from msgspec.inspect import CustomType, StructType, type_info

from orbitmq.errors import MessageRefused, SettingError


class Serializer(Protocol):
    """What an application may give as `serializer=`; modules such as `pickle` fit as well."""

    def dumps(self, value: Any, /) -> bytes | str:
        """A value as a body. What it raises refuses the message before it is sent."""

    def loads(self, body: bytes, /) -> Any:
        """A body as a value, which is then checked against the handler's annotation.

        An `OSError`, or a `Retry`, has the message delivered again; any other error says that the
        body does not match.
        """


Dumps: TypeAlias = Callable[[Any], bytes | str]
Loads: TypeAlias = Callable[[bytes], Any]
#: "json" (the default), "msgpack", a serializer, or the pair of its functions.
Serializing: TypeAlias = str | Serializer | tuple[Dumps, Loads] | None
#: Makes the value of a body. Raises anything for one that does not match.
Decode: TypeAlias = Callable[[bytes], Any]


class Format(Protocol):
    """A serializer that also decodes by a type."""

    name: str

    def encode(self, value: Any, /) -> bytes:
        """Raises anything for a value that has no such form."""

    def decoder(self, kind: Any, /) -> Decode:
        """Raises `SettingError` for a type that nothing can be decoded to."""


class _BuiltIn:
    """JSON or MessagePack, by msgspec."""

    def __init__(self, name: str, module: Any, *, is_json: bool) -> None:
        self.name = name
        self._is_json = is_json
        self._module = module
        self._encode = module.Encoder(enc_hook=self._plain).encode

    def encode(self, value: Any, /) -> bytes:
        if hasattr(type(value), _PYDANTIC):
            value = self._plain(value)
        encoded: bytes = self._encode(value)
        return encoded

    def _plain(self, value: Any) -> Any:
        return _plain(value, mode="json" if self._is_json else "python")

    def decoder(self, kind: Any, /) -> Decode:
        if _has_pydantic(kind):
            adapter = _adapter(kind)
            if self._is_json:
                return adapter.validate_json  # type: ignore[no-any-return]  # of pydantic
            loads = self._module.decode
            return lambda body: adapter.validate_python(loads(body))
        _check_decodable(kind)
        decode: Decode = self._module.Decoder(kind, dec_hook=from_plain).decode
        return decode


class _OfApplication:
    """A serializer of the application: what it loads is converted to the wanted type."""

    def __init__(self, dumps: Dumps, loads: Loads, name: str) -> None:
        self.name = name
        self._dumps = dumps
        self._loads = loads

    def encode(self, value: Any, /) -> bytes:
        body = self._dumps(value)
        if isinstance(body, str):
            return body.encode()
        if not isinstance(body, bytes):
            raise TypeError(f"dumps returned {type(body).__name__}, and must return bytes")
        return body

    def decoder(self, kind: Any, /) -> Decode:
        loads = self._loads
        # Of a class that only the serializer knows, there is nothing to convert.
        is_own = isinstance(kind, type) and isinstance(_described(kind), CustomType)
        convert = _checked_instance if is_own else partial(msgspec.convert, dec_hook=from_plain)
        if _has_pydantic(kind):
            convert = _validated
        elif not is_own:
            _check_decodable(kind)
        given = kind if isinstance(kind, type) and not hasattr(kind, "__total__") else ()

        def decode(body: bytes) -> Any:
            value = loads(body)
            return value if isinstance(value, given) else convert(value, kind)

        return decode


JSON: Final[Format] = _BuiltIn("JSON", msgspec.json, is_json=True)
MSGPACK: Final[Format] = _BuiltIn("MessagePack", msgspec.msgpack, is_json=False)
_BUILT_IN: Final = {"json": JSON, "msgpack": MSGPACK}


def format_of(serializer: Serializing) -> Format:
    """The format that a `serializer=` stands for. Raises `SettingError`."""
    if serializer is None:
        return JSON
    if isinstance(serializer, str) and serializer in _BUILT_IN:
        return _BUILT_IN[serializer]
    given: Any = serializer
    if isinstance(given, tuple) and len(given) == 2 and all(map(callable, given)):
        return _OfApplication(*given, name=f"{_name(given[0])} and {_name(given[1])}")
    dumps, loads = getattr(given, "dumps", None), getattr(given, "loads", None)
    if callable(dumps) and callable(loads):
        return _OfApplication(dumps, loads, _name(given))
    raise SettingError(
        'serializer must be "json", "msgpack", an object with dumps and loads, or the pair of two '
        f"such functions, got {serializer!r}"
    )


# ---- bodies


def encoded_body(body: object, json: object = None, serializer: Serializing = None) -> bytes:
    """What is sent for a body, or for a value given as `json`. Raises `MessageRefused`."""
    if json is not None:
        if body is not None:
            raise MessageRefused("json", "cannot be given together with body; choose one")
        return _encoded(json, JSON)
    if body is None:
        raise MessageRefused("body", "is missing; give a Message, or a topic and a body")
    if isinstance(body, str):
        try:
            body = body.encode()
        except UnicodeEncodeError as error:
            raise MessageRefused("body", f"is a text that has no bytes: {error}") from error
    elif isinstance(body, bytearray | memoryview):
        body = bytes(body)
    elif not isinstance(body, bytes):
        form = format_of(serializer)
        value, body = body, _encoded(body, form)
        if serializer is None and not body.startswith((b"{", b"[")):
            raise MessageRefused(
                "body",
                "must be bytes, a text, or a value that is an object or an array in JSON, got "
                f"{type(value).__name__}; write json= for a single value",
            )
    if not body:
        # Java consumers get no array at all for an empty body, and fail on it.
        raise MessageRefused("body", "must not be empty")
    return body


def _encoded(value: object, form: Format) -> bytes:
    try:
        return form.encode(value)
    except Exception as error:
        kind = type(value).__name__
        raise MessageRefused(
            "body", f"({kind}) cannot be encoded with {form.name}: {one_line(error)}"
        ) from error


def mismatch(error: BaseException) -> str:
    """Why a body does not match, and where; one line, without the body itself."""
    if not type(error).__module__.startswith("pydantic"):
        if isinstance(error, msgspec.MsgspecError | UnicodeDecodeError | _PlainError):
            return str(error)
        return f"{type(error).__name__}: {one_line(error)}"
    found = error.errors(include_url=False, include_context=False, include_input=False)  # type: ignore[attr-defined]  # of pydantic
    first, others = found[0], len(found) - 1
    place = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
    return f"{first['msg']} - at `${place}`" + (f", and {others} more" if others else "")


def one_line(error: BaseException) -> str:
    """The first line of an error's text; its type where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


# ---- types

#: Where msgspec notes the fields of a dataclass, a TypedDict or a named tuple.
_NOTED: Final = "__msgspec_cache__"


def shown(kind: Any) -> str:
    """A type as people write it."""
    if get_origin(kind) is Annotated:
        return shown(get_args(kind)[0])
    return kind.__qualname__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def structs_in(kind: Any) -> Iterator[type]:
    """The msgspec structs that a type is made of."""
    for part in _parts(_described(kind), set()):
        if isinstance(part, StructType):
            yield part.cls


def before_pickling(kind: Any) -> None:
    """Ready the classes of a type for another process, which gets them by value.

    What msgspec notes in them cannot be pickled, and names in their annotations mean nothing there.
    """
    for cls in tuple(_classes(kind)):
        if is_by_value(cls) and not hasattr(cls, _PYDANTIC):
            own = cls.__annotations__
            found = get_type_hints(cls, include_extras=True)
            own.update({name: found[name] for name in own})
        _forget(cls)


def after_pickling(kind: Any) -> None:
    """Repair dataclasses that were pickled by value: their marks of no default are copies."""
    for cls in tuple(_classes(kind)):
        for each in vars(cls).get("__dataclass_fields__", {}).values():
            for name in ("default", "default_factory", "kw_only"):
                if type(getattr(each, name)).__name__ == type(dataclasses.MISSING).__name__:
                    setattr(each, name, dataclasses.MISSING)
        _forget(cls)


def _forget(cls: type) -> None:
    if _NOTED in vars(cls):
        delattr(cls, _NOTED)


def is_by_value(cls: type) -> bool:
    """Whether no other process can import a class."""
    return cls.__module__ == "__main__" or "<locals>" in cls.__qualname__


def _classes(kind: Any) -> Iterator[type]:
    for part in _parts(_described(kind), set()):
        if isinstance(cls := getattr(part, "cls", None), type):
            yield cls


def _check_decodable(kind: Any) -> None:
    for part in _parts(_described(kind), set()):
        if isinstance(part, CustomType) and not hasattr(part.cls, _PYDANTIC):
            raise SettingError(
                f"no body can be decoded to {shown(part.cls)}; use a dataclass, a TypedDict, a "
                "msgspec or pydantic model, or a type that JSON has"
            )


def _described(kind: Any) -> object:
    try:
        return type_info(kind)
    except Exception as error:  # whatever an odd annotation causes
        raise SettingError(f"no body can be decoded to {shown(kind)}: {one_line(error)}") from error


def _parts(info: object, seen: set[object]) -> Iterator[object]:
    """All that a description of a type consists of."""
    if isinstance(info, tuple):
        for each in info:
            yield from _parts(each, seen)
    elif isinstance(info, msgspec.Struct):
        cls = getattr(info, "cls", None)
        if cls is not None and not isinstance(info, CustomType):
            if cls in seen:  # a type that contains itself
                return
            seen.add(cls)
        yield info
        for name in info.__struct_fields__:
            if name not in ("cls", "default", "default_factory"):
                yield from _parts(getattr(info, name), seen)


def _checked_instance(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise _PlainError(f"Expected `{shown(kind)}`, got `{type(value).__name__}`")
    return value


# ---- pydantic

#: What classes have that pydantic can encode and check by itself.
_PYDANTIC: Final = "__pydantic_validator__"


class _PlainError(ValueError):
    """A mismatch in words."""


@lru_cache(maxsize=1024)
def _adapter(kind: Any) -> Any:
    """Pydantic's adapter for a type that contains its classes."""
    try:
        return sys.modules["pydantic"].TypeAdapter(kind)
    except Exception as error:  # whatever pydantic raises for a type
        raise SettingError(f"no body can be decoded to {shown(kind)}: {one_line(error)}") from error


def _has_pydantic(kind: Any) -> bool:
    """Whether a type is pydantic's, or an alias such as a union or a list of such types."""
    return hasattr(kind, _PYDANTIC) or any(map(_has_pydantic, get_args(kind)))


def _plain(value: Any, *, mode: str) -> Any:
    """A value that msgspec does not know, as one that it does."""
    if not hasattr(type(value), _PYDANTIC):
        raise TypeError(
            f"{shown(type(value))} in it is no dataclass, msgspec struct or pydantic model"
        )
    # By alias, as models are filled by their aliases.
    kind: Any = type(value)
    return _adapter(kind).dump_python(value, mode=mode, by_alias=True)


def from_plain(kind: Any, value: Any) -> Any:
    """For msgspec: a pydantic model, maybe inside of another type."""
    if not _has_pydantic(kind):
        raise TypeError(f"nothing can be decoded to {shown(kind)}")
    try:
        return _validated(value, kind)
    except ValueError as error:
        raise _PlainError(mismatch(error)) from error


def _validated(value: Any, kind: Any) -> Any:
    return _adapter(kind).validate_python(value)


def _name(given: object) -> str:
    return str(getattr(given, "__name__", None) or type(given).__name__)
