"""The JSON that Java's fastjson writes: standard JSON and three habits beside it.

* maps with integer keys have bare ones: `{0:"a"}`;
* maps keyed by objects have the object in place of the key: `{{"brokerName":"b",...}:5}`;
* a Java object met for the second time is written as a path to the first: `{"$ref":"$.a[0]"}`.

The scanner accepts these and nothing else that JSON would refuse. Nesting and the number of values
are limited, so what a body can make us hold stays in proportion to its size. References are
followed without copying and may lead back to what is around them: whoever walks the result does so
along a type and counts the steps (see `coerce`).
"""

from __future__ import annotations

import re
from typing import NoReturn, TypeAlias

from orbitmq.wire.errors import WireError
from orbitmq.wire.limits import DEFAULT_LIMITS, WireLimits

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
