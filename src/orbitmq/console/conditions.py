"""Conditions on fields of bodies: `cents > 1000 and customer.country = "CH"`.

A field is a path of names; a number in it is a place in a list. A comparison with a field that is
not there, or of another type, is false. The brokers' SQL92 filters see properties and no bodies.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from orbitmq.console.settings import BadInput

Test = Callable[[Any], bool]
#: A field: the names on the way to it.
Path = tuple[str, ...]

_LONGEST: Final = 2000
_DEEPEST: Final = 50
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?![\w.])
    |(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<sign><=|>=|<>|!=|==|=|<|>|\(|\)|,)
    |(?P<name>[^\W\d][\w$-]*(?:\.[\w$-]+|\[\d+\])*|\[\d+\](?:\.[\w$-]+)*))""",
    re.VERBOSE,
)
_MISSING: Final = object()
_SIGNS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<>": operator.ne,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_WORDS: Final[Mapping[str, Callable[[str, str], bool]]] = {
    "contains": lambda value, part: part.lower() in value.lower(),
    "startswith": str.startswith,
    "endswith": str.endswith,
}
_CONSTANTS: Final[Mapping[str, object]] = {"true": True, "false": False, "null": None}
_HELP: Final = 'write conditions like: cents > 1000 and customer.country = "CH"'


class Condition(NamedTuple):
    """A condition that was read."""

    text: str
    fields: frozenset[Path]
    test: Test


def condition(text: str) -> Condition:
    """The condition that a text describes. Raises `BadInput`, which names the place."""
    if len(text) > _LONGEST:
        raise BadInput(f"a condition has {_LONGEST} characters at most")
    parser = _Parser(text)
    test = parser.any_of(0)
    parser.end()
    return Condition(text, frozenset(parser.fields), test)


def value_at(value: Any, path: Path) -> Any:
    """The value of a field; `_MISSING` where there is none."""
    for name in path:
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return _MISSING
    return value


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Parser:
    """Reads a condition from the left to the right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split())
        self._place = 0
        self.fields: set[Path] = set()

    def any_of(self, depth: int) -> Test:
        tests = [self.all_of(depth)]
        while self._word("or"):
            tests.append(self.all_of(depth))
        return tests[0] if len(tests) == 1 else lambda value: any(each(value) for each in tests)

    def all_of(self, depth: int) -> Test:
        tests = [self._one(depth)]
        while self._word("and"):
            tests.append(self._one(depth))
        return tests[0] if len(tests) == 1 else lambda value: all(each(value) for each in tests)

    def end(self) -> None:
        if self._next.kind != "end":
            raise self._wrong("expected and, or, or the end")

    def _one(self, depth: int) -> Test:
        if depth > _DEEPEST:
            raise self._wrong("too many parentheses")
        if self._word("not"):
            inner = self._one(depth + 1)
            return lambda value: not inner(value)
        if self._sign("("):
            test = self.any_of(depth + 1)
            if not self._sign(")"):
                raise self._wrong("expected )")
            return test
        return self._comparison(self._field())

    def _field(self) -> Path:
        token = self._next
        if token.kind != "name" or token.text.lower() in ("and", "or", "not", *_CONSTANTS):
            raise self._wrong("expected the name of a field")
        self._place += 1
        path = tuple(re.findall(r"[\w$-]+", token.text))
        self.fields.add(path)
        return path

    def _comparison(self, path: Path) -> Test:
        if self._word("is"):
            is_wanted = not self._word("not")
            if not self._word("null"):
                raise self._wrong("expected null")
            return lambda value: (value_at(value, path) in (_MISSING, None)) is is_wanted
        if self._word("exists"):
            return lambda value: value_at(value, path) is not _MISSING
        if self._word("in"):
            wanted = self._list()
            return lambda value: any(_equal(value_at(value, path), each) for each in wanted)
        for word, test in _WORDS.items():
            if self._word(word):
                return self._text_test(path, test)
        for sign, compare in _SIGNS.items():
            if self._sign(sign):
                return _compared(path, sign, compare, self._literal())
        raise self._wrong("expected = != < <= > >= in, contains, startswith, endswith, exists, is")

    def _text_test(self, path: Path, test: Callable[[str, str], bool]) -> Test:
        part = self._literal()
        if not isinstance(part, str):
            raise self._wrong("expected a text in quotes before this")

        def matches(value: Any) -> bool:
            found = value_at(value, path)
            return isinstance(found, str) and test(found, part)

        return matches

    def _list(self) -> list[object]:
        if not self._sign("("):
            raise self._wrong("expected (")
        found = [self._literal()]
        while self._sign(","):
            found.append(self._literal())
        if not self._sign(")"):
            raise self._wrong("expected )")
        return found

    def _literal(self) -> object:
        token = self._next
        if token.kind == "number":
            self._place += 1
            return float(token.text) if re.search(r"[.eE]", token.text) else int(token.text)
        if token.kind == "text":
            self._place += 1
            return re.sub(r"\\(.)", r"\1", token.text[1:-1], flags=re.DOTALL)
        if token.kind == "name" and token.text.lower() in _CONSTANTS:
            self._place += 1
            return _CONSTANTS[token.text.lower()]
        raise self._wrong('expected a number, true, false, null, or a text in "quotes"')

    @property
    def _next(self) -> _Token:
        if self._place < len(self._tokens):
            return self._tokens[self._place]
        return _Token("end", "", len(self._text))

    def _word(self, word: str) -> bool:
        token = self._next
        is_there = token.kind == "name" and token.text.lower() == word
        self._place += is_there
        return is_there

    def _sign(self, sign: str) -> bool:
        is_there = self._next.kind == "sign" and self._next.text == sign
        self._place += is_there
        return is_there

    def _split(self) -> list[_Token]:
        found, at = [], 0
        end = len(self._text.rstrip())
        while at < end:
            match = _TOKEN.match(self._text, at)
            if match is None:
                rest = self._text[at:].lstrip()
                raise BadInput(f"unexpected {rest[:10]!r} in the condition; {_HELP}")
            kind = match.lastgroup or ""
            found.append(_Token(kind, match[kind], match.start(kind)))
            at = match.end()
        return found

    def _wrong(self, expected: str) -> BadInput:
        token = self._next
        where = "at the end" if token.kind == "end" else f"at {token.text!r}"
        return BadInput(f"{expected} {where} of the condition; {_HELP}")


def _compared(path: Path, sign: str, compare: Callable[[Any, Any], bool], wanted: object) -> Test:
    if sign in ("=", "==", "!=", "<>"):
        is_equal = sign in ("=", "==")

        def same(value: Any) -> bool:
            found = value_at(value, path)
            return found is not _MISSING and _equal(found, wanted) is is_equal

        return same

    def ordered(value: Any) -> bool:
        found = value_at(value, path)
        if _is_number(wanted):
            return _is_number(found) and compare(found, wanted)
        return isinstance(found, str) and isinstance(wanted, str) and compare(found, wanted)

    return ordered


def _equal(found: object, wanted: object) -> bool:
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    return found == wanted


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
