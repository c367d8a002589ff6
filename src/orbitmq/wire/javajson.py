"""JSON as Java's fastjson writes it: standard JSON and three habits.

* maps with integer keys have bare ones: `{0:"a"}`;
* maps keyed by objects have the object in place of the key: `{{"brokerName":"b",...}:5}`;
* an object that appears again is a path to the first: `{"$ref":"$.a[0]"}`.

The scanner accepts these and nothing else that JSON refuses. Nesting and the number of values are
limited. References are followed without copying and may form cycles: code that walks the result
follows declared types and counts its steps.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar

import msgspec
from msgspec import inspect

from orbitmq.wire.codes import DEFAULT_LIMITS, BodyError, EncodeError, WireError, WireLimits

Scalar: TypeAlias = str | int | float | bool | None
Value: TypeAlias = "Scalar | list[Value] | dict[Key, Value]"


class ObjectKey(tuple[tuple[str, Scalar], ...]):
    """An object that stands in the place of a key: its fields, as pairs."""

    __slots__ = ()


Key: TypeAlias = str | int | ObjectKey


class JsonError(WireError):
    """Text that is not in the dialect, or beyond the limits."""

    def __init__(self, problem: str, position: int) -> None:
        self.problem = problem
        self.position = position
        super().__init__(f"{problem} at position {position}")


def parse(text: str, limits: WireLimits = DEFAULT_LIMITS) -> Value:
    """The value that a text stands for, with references followed."""
    value = _Scanner(text, limits).document()
    return _Resolver(value).resolved() if '"$ref"' in text else value


_skip_space = re.compile(r"[ \t\r\n]*").match
_plain_string = re.compile(r'"([^"\\\x00-\x1f]*)"').match
_string_run = re.compile(r'[^"\\\x00-\x1f]*').match
_number = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?").match
_bare_key = re.compile(r"-?[0-9]{1,19}").match
_four_digits = re.compile(r"[0-9a-fA-F]{4}").match
_SHORT = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\", "/": "/"}
_WORDS = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}

#: Python refuses to read longer ones, and no field of the protocol has more than twenty.
_LONGEST_NUMBER = 400


class _Scanner:
    """One pass over a text."""

    __slots__ = ("_at", "_depth", "_limits", "_text", "_values")

    def __init__(self, text: str, limits: WireLimits) -> None:
        self._text = text
        self._limits = limits
        self._at = 0
        self._depth = 0
        self._values = 0

    def document(self) -> Value:
        value = self._value()
        self._space()
        if self._at < len(self._text):
            self._fail("expected the end of the text")
        return value

    def _value(self) -> Value:
        self._values += 1
        if self._values > self._limits.body_values:
            self._fail(f"more than {self._limits.body_values} values")
        self._space()
        first = self._text[self._at : self._at + 1]
        if first == '"':
            return self._string()
        if first == "{":
            return self._object()
        if first == "[":
            return self._array()
        if first in _WORDS:
            return self._word(first)
        return self._number_value()

    def _object(self) -> dict[Key, Value]:
        self._enter()
        found: dict[Key, Value] = {}
        while not self._closes("}", is_first=not found):
            key = self._key()
            self._expect(":")
            found[key] = self._value()
        return found

    def _array(self) -> list[Value]:
        self._enter()
        found: list[Value] = []
        while not self._closes("]", is_first=not found):
            found.append(self._value())
        return found

    def _key(self) -> Key:
        self._space()
        first = self._text[self._at : self._at + 1]
        if first == '"':
            return self._string()
        if first == "{":
            return self._object_key()
        match = _bare_key(self._text, self._at)
        if match is None:
            self._fail("expected a key: a string, an integer or an object")
        self._at = match.end()
        return int(match[0])

    def _object_key(self) -> ObjectKey:
        start = self._at
        pairs: list[tuple[str, Scalar]] = []
        for name, value in self._object().items():
            if not isinstance(name, str) or isinstance(value, list | dict):
                self._at = start
                self._fail("an object in the place of a key may hold plain values only")
            pairs.append((name, value))
        return ObjectKey(pairs)

    def _enter(self) -> None:
        self._at += 1
        self._depth += 1
        if self._depth > self._limits.body_depth:
            self._fail(f"more than {self._limits.body_depth} levels")

    def _closes(self, end: str, *, is_first: bool) -> bool:
        """Step over the end of a container (true), or over the comma before its next entry."""
        self._space()
        found = self._text[self._at : self._at + 1]
        if found == end:
            self._at += 1
            self._depth -= 1
            return True
        if not is_first:
            if found != ",":
                self._fail(f"expected ',' or {end!r}")
            self._at += 1
        return False

    def _string(self) -> str:
        match = _plain_string(self._text, self._at)
        if match is not None:
            self._at = match.end()
            return match[1]
        return self._escaped_string()

    def _escaped_string(self) -> str:
        pieces: list[str] = []
        self._at += 1
        while True:
            run = _string_run(self._text, self._at)
            if run is not None:
                pieces.append(run[0])
                self._at = run.end()
            found = self._text[self._at : self._at + 1]
            if found == '"':
                self._at += 1
                return _without_lone_surrogates("".join(pieces))
            if found != "\\":
                self._fail("a string without end, or with a control character")
            pieces.append(self._escape())

    def _escape(self) -> str:
        letter = self._text[self._at + 1 : self._at + 2]
        if letter == "u":
            digits = _four_digits(self._text, self._at + 2)
            if digits is None:
                self._fail("expected four hexadecimal digits")
            self._at += 6
            return chr(int(digits[0], 16))
        if letter not in _SHORT:
            self._fail("unknown escape")
        self._at += 2
        return _SHORT[letter]

    def _word(self, first: str) -> Scalar:
        word, value = _WORDS[first]
        if not self._text.startswith(word, self._at):
            self._fail("expected a value")
        self._at += len(word)
        return value

    def _number_value(self) -> int | float:
        match = _number(self._text, self._at)
        if match is None:
            self._fail("expected a value")
        if match.end() - match.start() > _LONGEST_NUMBER:
            self._fail(f"a number of more than {_LONGEST_NUMBER} digits")
        self._at = match.end()
        return int(match[0]) if match[1] is None and match[2] is None else float(match[0])

    def _expect(self, wanted: str) -> None:
        self._space()
        if not self._text.startswith(wanted, self._at):
            self._fail(f"expected {wanted!r}")
        self._at += 1

    def _space(self) -> None:
        match = _skip_space(self._text, self._at)
        if match is not None:
            self._at = match.end()

    def _fail(self, problem: str) -> NoReturn:
        raise JsonError(problem, self._at)


def _without_lone_surrogates(text: str) -> str:
    """Pairs joined; what has no partner becomes a question mark, as it does in Java."""
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        return text
    return (
        text.encode("utf-16-be", "surrogatepass")
        .decode("utf-16-be", "replace")
        .replace("\ufffd", "?")
    )


class _Resolver:
    """Puts what a reference points to in the place of the reference."""

    __slots__ = ("_parents", "_root")

    def __init__(self, root: Value) -> None:
        self._root = root
        #: The containers around the one being walked, outermost first.
        self._parents: list[list[Value] | dict[Key, Value]] = []

    def resolved(self) -> Value:
        self._walk(self._root)
        return self._root

    def _walk(self, value: Value) -> None:
        if not isinstance(value, dict | list):
            return
        self._parents.append(value)
        entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        for key, entry in entries:
            path = _reference(entry)
            if path is None:
                self._walk(entry)
            else:
                value[key] = self._target(path)  # type: ignore[index]  # key came from value
        self._parents.pop()

    def _target(self, path: str) -> Value:
        target = self._named(path)
        seen = 0
        # A reference to a reference; more hops than levels of a document can only be a circle.
        while (onward := _reference(target)) is not None:
            seen += 1
            if seen > len(self._parents) + 64:
                raise JsonError(f"references in a circle through {path!r}", 0)
            target = self._named(onward)
        return target

    def _named(self, path: str) -> Value:
        if path == "..":
            # From inside the object that holds the reference, ".." is the one around it.
            if len(self._parents) < 2:
                raise JsonError("reference '..' above the document", 0)
            return self._parents[-2]
        if path[:1] != "$":
            raise JsonError(f"reference {path!r}; only '..' and paths from '$' are known", 0)
        target = self._root
        for step in _steps(path):
            try:
                target = target[step]  # type: ignore[index]  # failure is the test
            except (LookupError, TypeError):
                raise JsonError(f"reference {path!r} leads nowhere", 0) from None
        return target


def _reference(value: Value) -> str | None:
    if isinstance(value, dict) and len(value) == 1:
        path = value.get("$ref")
        return path if isinstance(path, str) else None
    return None


_step = re.compile(r"\.((?:\\.|[^.\[\]\\])+)|\[([0-9]{1,9})\]").match
_unescape = re.compile(r"\\(.)").sub


def _steps(path: str) -> list[str | int]:
    steps: list[str | int] = []
    at = 1
    while at < len(path):
        match = _step(path, at)
        if match is None:
            raise JsonError(f"reference {path!r} cannot be read", 0)
        name, index = match.groups()
        steps.append(_unescape(r"\1", name) if index is None else int(index))
        at = match.end()
    return steps


# Conversion to declared types, as lenient as peers expect: numbers in quotes, `"0"` and `"1"` for
# booleans, enumerations by position, nulls for absent fields, objects as keys. msgspec converts
# what is regular; this code handles what msgspec refuses. An error names the field, what is
# allowed, and what was found.

S = TypeVar("S", bound=msgspec.Struct)


class Mismatch(WireError):
    """A value that does not fit the declared type, with the way to it."""

    def __init__(self, allowed: str, got: str) -> None:
        self.allowed = allowed
        self.got = got
        self.path: list[str] = []
        super().__init__(allowed, got)

    @property
    def field(self) -> str:
        return ".".join(reversed(self.path)) or "(all)"

    def __str__(self) -> str:
        return f"{self.field!r} must be {self.allowed}, got {self.got}"


class Budget:
    """How many values a conversion may still visit: references can make a small body large."""

    __slots__ = ("left", "limits")

    def __init__(self, limits: WireLimits) -> None:
        self.limits = limits
        self.left = limits.body_values

    def spend(self, values: int) -> None:
        self.left -= values
        if self.left < 0:
            raise Mismatch(f"at most {self.limits.body_values} values", "more by references")


Convert = Callable[[Any, Budget], Any]


def coerce(
    kind: type[S], value: Value | Mapping[str, str], limits: WireLimits = DEFAULT_LIMITS
) -> S:
    """`value` as a `kind`; raises `Mismatch`."""
    converted: S = _converter_of(kind)(value, Budget(limits))
    return converted


@functools.cache
def _converter_of(kind: type[msgspec.Struct]) -> Convert:
    return _converter(inspect.type_info(kind))


def _converter(declared: inspect.Type) -> Convert:
    return _BUILDERS[type(declared)](declared)


def _struct(declared: inspect.StructType) -> Convert:
    fields = [(field, _converter(field.type), _is_text(field.type)) for field in declared.fields]
    make = declared.cls

    def convert(value: Any, budget: Budget) -> Any:
        if isinstance(value, ObjectKey):
            value = dict(value)
        if not isinstance(value, Mapping):
            raise Mismatch("an object", _shown(value))
        budget.spend(len(fields))
        found: dict[str, Any] = {}
        for field, converter, is_text in fields:
            entry = value.get(field.encode_name)
            if entry is None or (entry == "" and not is_text and not field.required):
                if field.required:
                    raise _at(Mismatch("present", "nothing"), field.encode_name)
                continue
            try:
                found[field.name] = converter(entry, budget)
            except Mismatch as mismatch:
                raise _at(mismatch, field.encode_name) from None
        return make(**found)

    return convert


def _is_text(declared: inspect.Type) -> bool:
    """Whether an empty string is a value here, and not just the absence of one."""
    if isinstance(declared, inspect.UnionType):
        return any(_is_text(part) for part in declared.types)
    return isinstance(declared, inspect.StrType | inspect.AnyType)


def _union(declared: inspect.UnionType) -> Convert:
    inner = [part for part in declared.types if not isinstance(part, inspect.NoneType)]
    converter = _converter(inner[0])

    def convert(value: Any, budget: Budget) -> Any:
        return None if value is None else converter(value, budget)

    return convert


def _many(declared: inspect.VarTupleType) -> Convert:
    converter = _converter(declared.item_type)

    def convert(value: Any, budget: Budget) -> Any:
        if not isinstance(value, list):
            raise Mismatch("an array", _shown(value))
        budget.spend(len(value))
        found = []
        for place, entry in enumerate(value):
            try:
                found.append(converter(entry, budget))
            except Mismatch as mismatch:
                raise _at(mismatch, f"[{place}]") from None
        return tuple(found)

    return convert


def _mapping(declared: inspect.DictType) -> Convert:
    key_of = _converter(declared.key_type)
    value_of = _converter(declared.value_type)
    by_object = isinstance(declared.key_type, inspect.StructType)

    def convert(value: Any, budget: Budget) -> Any:
        if not isinstance(value, dict):
            raise Mismatch("an object", _shown(value))
        budget.spend(len(value))
        found = {}
        for key, entry in value.items():
            if entry is None:
                continue
            try:
                if by_object and isinstance(key, str):
                    key = _key_in_text(key, budget)
                found[key_of(key, budget)] = value_of(entry, budget)
            except Mismatch as mismatch:
                raise _at(mismatch, str(key)[:40]) from None
        return found

    return convert


def _key_in_text(key: str, budget: Budget) -> Value:
    """An object key that was put into quotes, with its own quotes escaped."""
    try:
        return parse(key, budget.limits)
    except JsonError:
        raise Mismatch("an object", _shown(key)) from None


def _text(_: inspect.StrType) -> Convert:
    def convert(value: Any, _: Budget) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int | float):
            return str(value)
        raise Mismatch("a string", _shown(value))

    return convert


_integer = re.compile(r"[+-]?[0-9]{1,20}").fullmatch


def _whole(declared: inspect.IntType) -> Convert:
    low, high = declared.ge, declared.le
    allowed = "an integer" if low is None or high is None else f"an integer from {low} to {high}"

    def convert(value: Any, _: Budget) -> int:
        if isinstance(value, str):
            is_whole = _integer(value) is not None
        else:
            is_whole = type(value) in (int, float) and value % 1 == 0
        if not is_whole:
            raise Mismatch(allowed, _shown(value))
        number = int(value)
        if (low is not None and number < low) or (high is not None and number > high):
            raise Mismatch(allowed, _shown(value))
        return number

    return convert


def _fraction(_: inspect.FloatType) -> Convert:
    def convert(value: Any, _: Budget) -> float:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            try:
                return float(value)
            except (ValueError, OverflowError):
                pass
        raise Mismatch("a number", _shown(value))

    return convert


_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def _truth(_: inspect.BoolType) -> Convert:
    def convert(value: Any, _: Budget) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str | int) and (found := _TRUTH.get(str(value).lower())) is not None:
            return found
        raise Mismatch("true or false (or 1 or 0)", _shown(value))

    return convert


def _choice(declared: inspect.EnumType) -> Convert:
    members = list(declared.cls)
    names = {member.name.upper(): member for member in members}
    allowed = "one of " + ", ".join(names)

    def convert(value: Any, _: Budget) -> Any:
        if isinstance(value, str) and (found := names.get(value.upper())) is not None:
            return found
        text = str(value)
        # `isdecimal` accepts digits of other scripts, which `int` reads as well.
        if isinstance(value, str | int) and text.isascii() and text.isdigit() and len(text) < 4:
            place = int(text)
            if place < len(members):
                return members[place]
        raise Mismatch(allowed, _shown(value))

    return convert


def _anything(_: inspect.AnyType) -> Convert:
    def convert(value: Any, _: Budget) -> Any:
        return value

    return convert


_BUILDERS: Mapping[type[inspect.Type], Callable[[Any], Convert]] = {
    inspect.StructType: _struct,
    inspect.UnionType: _union,
    inspect.VarTupleType: _many,
    inspect.DictType: _mapping,
    inspect.StrType: _text,
    inspect.IntType: _whole,
    inspect.FloatType: _fraction,
    inspect.BoolType: _truth,
    inspect.EnumType: _choice,
    inspect.AnyType: _anything,
}


def _at(mismatch: Mismatch, place: str) -> Mismatch:
    mismatch.path.append(place)
    return mismatch


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# JSON text, byte for byte as Apache's peers write it. fastjson differs from msgspec in few
# characters: upper case hexadecimal digits, and escapes for U+007F to U+009F, U+2028 and U+2029.
# One search finds a string with those; all others are left to msgspec.

_encode = msgspec.json.Encoder().encode

#: Output of msgspec that fastjson would write differently. May also match an escaped backslash
#: followed by such letters, which then only takes the slower way to the same bytes.
_differs = re.compile(rb"\\u00[01][a-f]|\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xa8\xa9]").search
#: Characters for which it writes something else. Three times as quick as looking at the output.
_is_special = re.compile("[\x0b\x0e\x0f\x1a-\x1f\x7f-\x9f\u2028\u2029]").search

_SHORT_ESCAPES = {
    "\b": "\\b",
    "\t": "\\t",
    "\n": "\\n",
    "\f": "\\f",
    "\r": "\\r",
    '"': '\\"',
    "\\": "\\\\",
}
_ESCAPES = str.maketrans(
    {chr(code): f"\\u{code:04X}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}
    | _SHORT_ESCAPES
)


def quoted(text: str) -> bytes:
    """A string in quotes."""
    if not _is_special(text):
        try:
            return _encode(text)
        except UnicodeEncodeError:
            pass  # a lone surrogate
    return b'"%b"' % _escaped(text)


def object_of_strings(fields: Mapping[str, str]) -> bytes:
    """An object whose values are strings, in the order given."""
    return _written(fields) or b"{%b}" % b",".join(
        b'"%b":"%b"' % (_escaped(key), _escaped(value)) for key, value in fields.items()
    )


def _written(value: object) -> bytes | None:
    """What msgspec writes, or None when fastjson would not write the same."""
    try:
        text = _encode(value)
    except UnicodeEncodeError:
        return None
    return None if _differs(text) else text


def _escaped(text: str) -> bytes:
    # A lone surrogate has no UTF-8 form; Java writes a question mark.
    return text.translate(_ESCAPES).encode("utf-8", "replace")


def scalar(value: object) -> bytes:
    """Any JSON value without special keys, as msgspec writes it."""
    try:
        return _encode(value)
    except (UnicodeEncodeError, TypeError, ValueError) as error:
        raise EncodeError(f"{value!r} has no JSON form: {error}") from error


# Bodies. Reading tries msgspec with the declared types, then fastjson's dialect. Writing is compact
# JSON with sorted keys and without nulls. Maps keyed by message queues have the queue's object as
# key; maps keyed by integers have quoted keys, or bare ones for a reader older than 4.9.4.

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


# Bodies of configuration requests: the text of Java's `Properties`.

_ESCAPED = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_LETTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}

#: A key ends at the first separator that no backslash protects.
_KEY = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*(.*)", re.DOTALL)


def parse_properties(text: str) -> dict[str, str]:
    """`key=value` lines; also with `:` or blanks between them, comments, and continued lines."""
    found: dict[str, str] = {}
    for line in _logical_lines(text):
        match = _KEY.match(line)
        if match is not None:
            found[_unescaped(match[1])] = _unescaped(match[2])
    return found


def format_properties(values: Mapping[str, str]) -> str:
    """One `key=value` line each, sorted. RocketMQ escapes nothing, so neither do we."""
    return "".join(f"{name}={value}\n" for name, value in sorted(values.items()))


def _logical_lines(text: str) -> Iterator[str]:
    pending = ""
    for line in re.split(r"\r\n|\r|\n", text):
        line = line.lstrip(" \t\f")
        if not pending and (not line or line[0] in "#!"):
            continue
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            pending += line[:-1]
            continue
        yield pending + line
        pending = ""
    if pending:
        yield pending


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(_character, text)


def _character(match: re.Match[str]) -> str:
    escaped = match[1]
    if len(escaped) == 5:
        return chr(int(escaped[1:], 16))
    return _LETTERS.get(escaped, escaped)
