"""SQL92 expressions: their nodes, and their compilation to functions of a message's properties.

Logic has three values: true, false and null ("unknown", mostly because a property is missing). A
message matches when the expression is true. How two values compare depends on their kinds, which
are known when the expression is compiled. The text of a property is read as the kind of the other
side: `a = 10` reads a 32-bit integer, `a = 10.0` a double, `a = TRUE` a boolean, `a = '10'` text.
Text that cannot be read so ends the whole evaluation (`IncomparableValues`), as in Apache's broker.
"""

from __future__ import annotations

import enum
import math
import operator
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from typing import Literal as OneOf

from orbitmq.filter.tags import IncomparableValues, Lookup

# Numbers and booleans as Java reads and orders them (`Integer.valueOf`, `Double.valueOf`,
# `Double.compareTo`, ...), because these rules decide which messages match. Python's `int` and
# `float` take underscores and blanks, know no `1.5f`, and order NaN and -0.0 differently.

INT32_MAX = 0x7FFFFFFF
INT64_MAX = 0x7FFFFFFFFFFFFFFF

#: `Double.valueOf` trims what `String.trim` trims.
_BLANKS = "".join(map(chr, range(0x21)))
# In both, no text can be divided among the parts in two ways: one that does not fit would be tried
# in all of them, which takes seconds for the longest property.
_DECIMAL = re.compile(
    r"[+-]?(?:NaN|Infinity|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fFdD]?)"
)
_HEXADECIMAL = re.compile(
    r"[+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+[fFdD]?"
)


def read_int32(text: str) -> int:
    """The number that `Integer.valueOf` reads."""
    if len(text) < 10 and text.isdigit() and text.isascii():  # nearly every value there is
        return int(text)
    number = _read_integer(text)
    if number is None or not ~INT32_MAX <= number <= INT32_MAX:
        raise IncomparableValues(text, "a 32-bit integer")
    return number


def read_int64(text: str) -> int:
    """The number that `Long.valueOf` reads."""
    if len(text) < 19 and text.isdigit() and text.isascii():
        return int(text)
    number = _read_integer(text)
    if number is None or not ~INT64_MAX <= number <= INT64_MAX:
        raise IncomparableValues(text, "a 64-bit integer")
    return number


def _read_integer(text: str) -> int | None:
    """The integer with an optional sign; one with more digits than 64 bits need may be cut short.

    Digits of every script count, as in Java, but only those that are one UTF-16 unit.
    """
    digits = text[1:] if text[:1] in ("+", "-") else text
    if digits.isascii():
        if not digits.isdigit():
            return None
    else:
        values = [unicodedata.decimal(char, -1) if char < "\U00010000" else -1 for char in digits]
        if min(values) < 0:
            return None
        digits = "".join(map(str, values))
    if len(digits) > 19:
        digits = digits.lstrip("0")[:20] or "0"  # 20 digits are out of range already
    number = int(digits)
    return -number if text[0] == "-" else number


def read_double(text: str) -> float:
    """The number that `Double.valueOf` reads."""
    trimmed = text.strip(_BLANKS)
    if _DECIMAL.fullmatch(trimmed):
        return float(trimmed.rstrip("fFdD"))  # Python spells NaN and Infinity the same way
    if _HEXADECIMAL.fullmatch(trimmed):
        try:
            return float.fromhex(trimmed.rstrip("fFdD"))
        except OverflowError:
            return -math.inf if trimmed[0] == "-" else math.inf
    raise IncomparableValues(text, "a number")


def read_boolean(text: str) -> bool:
    """The truth value that `Boolean.valueOf` reads: false for everything but `true`."""
    return text.lower() == "true"


def order_doubles(left: float, right: float) -> int:
    """Negative, 0 or positive as `Double.compareTo`: -0.0 below 0.0, NaN above all and itself."""
    if left < right:
        return -1
    if left > right:
        return 1
    if left == right:
        if left:
            return 0
        return int(math.copysign(1, left) - math.copysign(1, right))
    return math.isnan(left) - math.isnan(right)


# Nodes. Property values are text and literals have one type, so the kind of each node is known
# before any message. `at` is the place in the expression, `depth` the number of levels below and
# including it.


class Kind(enum.Enum):
    """What a part evaluates to when it is not null."""

    TEXT = "a string"
    INT = "a 32-bit integer"
    LONG = "a 64-bit integer"
    DOUBLE = "a floating-point number"
    BOOLEAN = "a condition"
    #: Always null: the literal NULL, and the negative of what is no number.
    NOTHING = "NULL"


NUMBERS = frozenset({Kind.INT, Kind.LONG, Kind.DOUBLE})


@dataclass(frozen=True, slots=True)
class Property:
    """A property of the message, by its name."""

    name: str
    at: int
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Literal:
    """A value that stands in the expression itself."""

    value: str | int | float | bool | None
    kind: Kind
    at: int
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Negative:
    """`-x`. No literal any more: `a BETWEEN 1 AND -1` is accepted, and never true."""

    operand: Node
    at: int
    depth: int


@dataclass(frozen=True, slots=True)
class Flag:
    """A property used as a condition. Text is no condition, so it is never true."""

    operand: Property
    at: int
    depth: int


@dataclass(frozen=True, slots=True)
class Not:
    """`NOT x`, of a condition."""

    operand: Node
    at: int
    depth: int


@dataclass(frozen=True, slots=True)
class Logic:
    """Conditions joined by one word; a long chain is one node, not a deep tree."""

    word: OneOf["AND", "OR"]
    operands: tuple[Node, ...]
    at: int
    depth: int


@dataclass(frozen=True, slots=True)
class Equal:
    """`x = y`; `x <> y` is its `Not`."""

    left: Node
    right: Node
    at: int
    depth: int


@dataclass(frozen=True, slots=True)
class IsNull:
    """`x IS NULL`."""

    operand: Node
    at: int
    depth: int


@dataclass(frozen=True, slots=True)
class Order:
    """`x > y` and its three relatives, of numbers."""

    symbol: str
    left: Node
    right: Node
    at: int
    depth: int


@dataclass(frozen=True, slots=True)
class Between:
    """`x BETWEEN low AND high`, both ends included, or its negation.

    A node of its own, though it means two orders joined by AND (or, negated, by OR): written as
    two, nested ones would double the work at every level.
    """

    operand: Node
    low: Node
    high: Node
    is_negated: bool
    at: int
    depth: int


@dataclass(frozen=True, slots=True)
class Among:
    """`x IN ('a', 'b')`, or its negation."""

    operand: Property
    members: frozenset[str]
    is_negated: bool
    at: int
    depth: int


@dataclass(frozen=True, slots=True)
class TextTest:
    """`x CONTAINS 'a'`, `x STARTSWITH 'a'`, `x ENDSWITH 'a'`, or a negation."""

    word: str
    operand: Node
    search: str
    is_negated: bool
    at: int
    depth: int


Node: TypeAlias = (
    Property
    | Literal
    | Negative
    | Flag
    | Not
    | Logic
    | Equal
    | IsNull
    | Order
    | Between
    | Among
    | TextTest
)


def kind_of(node: Node) -> Kind:
    """What `node` evaluates to when it is not null."""
    if isinstance(node, Negative):
        # In a loop: this is asked for each sign of a row of them.
        inner: Node = node.operand
        while isinstance(inner, Negative):
            inner = inner.operand
        kind = kind_of(inner)
        return kind if kind in NUMBERS else Kind.NOTHING
    match node:
        case Property():
            return Kind.TEXT
        case Literal():
            return node.kind
        case _:
            return Kind.BOOLEAN


#: A compiled part: its value for a message, None being null.
Evaluate: TypeAlias = Callable[[Lookup], Any]
Condition: TypeAlias = Callable[[Lookup], bool | None]
#: Whether two values that are not null relate as asked.
Relation: TypeAlias = Callable[[Any, Any], bool]


def compile_condition(node: Node) -> Condition:
    """The function that judges a message."""
    match node:
        case Logic(word="AND"):
            return _all_of([compile_condition(operand) for operand in node.operands])
        case Logic():
            return _any_of([compile_condition(operand) for operand in node.operands])
        case Not():
            return _not(compile_condition(node.operand))
        case Equal():
            return _equal(node)
        case Order():
            return _order(node)
        case Between():
            return _between(node)
        case IsNull():
            return _is_null(_compile_value(node.operand))
        case Among():
            return _among(node)
        case TextTest():
            return _text_test(node)
        case Flag():
            return _flag(node.operand.name)
        case Literal(value=True | False | None as value):
            return lambda _lookup: value
        case _:
            raise AssertionError(f"no condition: {node}")  # the builder lets none through


def _compile_value(node: Node) -> Evaluate:
    match node:
        case Property(name=name):
            return lambda lookup: lookup(name)
        case Literal(value=value):
            return lambda _lookup: value
        case Negative(operand=operand):
            return _negative(operand)
        case _:
            return compile_condition(node)


def _negative(operand: Node) -> Evaluate:
    is_negative = True
    while isinstance(operand, Negative):  # a row of signs is one, or none
        operand = operand.operand
        is_negative = not is_negative
    evaluate = _compile_value(operand)
    if kind_of(operand) in NUMBERS:
        return (lambda lookup: -evaluate(lookup)) if is_negative else evaluate

    def nothing(lookup: Lookup) -> None:
        evaluate(lookup)  # for what it may raise

    return nothing


# Logic. Every operand up to the deciding one is evaluated, in the order of the text.


def _all_of(conditions: list[Condition]) -> Condition:
    def all_of(lookup: Lookup) -> bool | None:
        verdict: bool | None = True
        for condition in conditions:
            value = condition(lookup)
            if value is False:
                return False
            if value is None:
                verdict = None
        return verdict

    return all_of


def _any_of(conditions: list[Condition]) -> Condition:
    def any_of(lookup: Lookup) -> bool | None:
        verdict: bool | None = False
        for condition in conditions:
            value = condition(lookup)
            if value:
                return True
            if value is None:
                verdict = None
        return verdict

    return any_of


def _not(condition: Condition) -> Condition:
    def negated(lookup: Lookup) -> bool | None:
        value = condition(lookup)
        return None if value is None else not value

    return negated


def _flag(name: str) -> Condition:
    def flag(lookup: Lookup) -> bool | None:
        return None if lookup(name) is None else False

    return flag


# Comparisons.


class Meeting(NamedTuple):
    """How a left and a right value are made comparable, and whether as Java's doubles."""

    read_left: Callable[[Any], Any]
    read_right: Callable[[Any], Any]
    as_doubles: bool


def _as_is(value: Any) -> Any:
    return value


def _refuse_text(text: str) -> bool:
    raise IncomparableValues(text, "readable as a truth value on the right of one; write x = TRUE")


#: Pairs that are not listed are never equal; the builder refuses to order them.
MEETINGS: Mapping[tuple[Kind, Kind], Meeting] = {
    (Kind.TEXT, Kind.TEXT): Meeting(_as_is, _as_is, as_doubles=False),
    (Kind.TEXT, Kind.INT): Meeting(read_int32, _as_is, as_doubles=False),
    (Kind.TEXT, Kind.LONG): Meeting(read_int64, _as_is, as_doubles=False),
    (Kind.TEXT, Kind.DOUBLE): Meeting(read_double, _as_is, as_doubles=True),
    (Kind.TEXT, Kind.BOOLEAN): Meeting(read_boolean, _as_is, as_doubles=False),
    (Kind.INT, Kind.TEXT): Meeting(_as_is, read_int32, as_doubles=False),
    (Kind.INT, Kind.INT): Meeting(_as_is, _as_is, as_doubles=False),
    (Kind.INT, Kind.LONG): Meeting(_as_is, _as_is, as_doubles=False),
    (Kind.INT, Kind.DOUBLE): Meeting(float, _as_is, as_doubles=True),
    (Kind.LONG, Kind.TEXT): Meeting(_as_is, read_int64, as_doubles=False),
    (Kind.LONG, Kind.INT): Meeting(_as_is, _as_is, as_doubles=False),
    (Kind.LONG, Kind.LONG): Meeting(_as_is, _as_is, as_doubles=False),
    (Kind.LONG, Kind.DOUBLE): Meeting(float, _as_is, as_doubles=True),
    (Kind.DOUBLE, Kind.TEXT): Meeting(_as_is, read_double, as_doubles=True),
    (Kind.DOUBLE, Kind.INT): Meeting(_as_is, float, as_doubles=True),
    (Kind.DOUBLE, Kind.LONG): Meeting(_as_is, float, as_doubles=True),
    (Kind.DOUBLE, Kind.DOUBLE): Meeting(_as_is, _as_is, as_doubles=True),
    (Kind.BOOLEAN, Kind.TEXT): Meeting(_as_is, _refuse_text, as_doubles=False),
    (Kind.BOOLEAN, Kind.BOOLEAN): Meeting(_as_is, _as_is, as_doubles=False),
}
#: Two properties have no number between them that says how to read them.
ORDERED_TEXTS = Meeting(read_double, read_double, as_doubles=True)

_EXACT: Mapping[str, Relation] = {
    "=": operator.eq,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_OF_DOUBLES: Mapping[str, Relation] = {
    "=": lambda left, right: order_doubles(left, right) == 0,
    ">": lambda left, right: order_doubles(left, right) > 0,
    ">=": lambda left, right: order_doubles(left, right) >= 0,
    "<": lambda left, right: order_doubles(left, right) < 0,
    "<=": lambda left, right: order_doubles(left, right) <= 0,
}


def _equal(node: Equal) -> Condition:
    """Equality asks about null on either side, and not alike: `x = 1` is null, `1 = x` false."""
    if isinstance(node.left, Property) and isinstance(node.right, Literal):
        return _equal_to_literal(node.left.name, node.right)
    left = _compile_value(node.left)
    right = _compile_value(node.right)
    equals = _relation("=", kind_of(node.left), kind_of(node.right))

    def equal(lookup: Lookup) -> bool | None:
        left_value = left(lookup)
        right_value = right(lookup)
        if left_value is None:
            return True if right_value is None else None
        return False if right_value is None else equals(left_value, right_value)

    return equal


def _equal_to_literal(name: str, literal: Literal) -> Condition:
    """The everyday case. A value is not null here, so only the property's absence is."""
    wanted = literal.value
    if literal.kind is Kind.TEXT:

        def equal_text(lookup: Lookup) -> bool | None:
            text = lookup(name)
            return None if text is None else text == wanted

        return equal_text
    return _relation_to_literal("=", name, literal)


def _relation_to_literal(symbol: str, name: str, literal: Literal) -> Condition:
    """A property beside a literal that is no text, with as few calls per message as can be."""
    read, _, as_doubles = MEETINGS[Kind.TEXT, literal.kind]
    relation = (_OF_DOUBLES if as_doubles else _EXACT)[symbol]
    constant = literal.value

    def test(lookup: Lookup) -> bool | None:
        text = lookup(name)
        return None if text is None else relation(read(text), constant)

    return test


def _order(node: Order) -> Condition:
    if isinstance(node.left, Property) and isinstance(node.right, Literal):
        return _relation_to_literal(node.symbol, node.left.name, node.right)
    left = _compile_value(node.left)
    relates_to_right = _bound(node.symbol, kind_of(node.left), node.right)

    def order(lookup: Lookup) -> bool | None:
        value = left(lookup)
        return None if value is None else relates_to_right(value, lookup)

    return order


def _between(node: Between) -> Condition:
    operand = _compile_value(node.operand)
    kind = kind_of(node.operand)
    first_symbol, second_symbol = ("<", ">") if node.is_negated else (">=", "<=")
    first = _bound(first_symbol, kind, node.low)
    second = _bound(second_symbol, kind, node.high)
    deciding = node.is_negated  # of an AND, false decides; of an OR, true does

    def between(lookup: Lookup) -> bool | None:
        value = operand(lookup)
        if value is None:
            return None
        by_first = first(value, lookup)
        if by_first is deciding:
            return deciding
        by_second = second(value, lookup)
        if by_second is deciding:
            return deciding
        return None if by_first is None or by_second is None else not deciding

    return between


def _bound(symbol: str, left: Kind, right: Node) -> Callable[[Any, Lookup], bool | None]:
    """The test of a left value that is not null against a right side still to be evaluated."""
    relates = _relation(symbol, left, kind_of(right))
    evaluate = _compile_value(right)

    def test(value: Any, lookup: Lookup) -> bool | None:
        other = evaluate(lookup)
        return None if other is None else relates(value, other)

    return test


def _relation(symbol: str, left: Kind, right: Kind) -> Relation:
    meeting = MEETINGS.get((left, right))
    if meeting is None:
        return lambda _left, _right: False
    if symbol != "=" and left is right is Kind.TEXT:
        meeting = ORDERED_TEXTS
    relation = (_OF_DOUBLES if meeting.as_doubles else _EXACT)[symbol]
    read_left, read_right, _ = meeting
    if read_left is _as_is and read_right is _as_is:
        return relation
    if read_right is _as_is:
        return lambda left_value, right_value: relation(read_left(left_value), right_value)
    if read_left is _as_is:
        return lambda left_value, right_value: relation(left_value, read_right(right_value))
    return lambda left_value, right_value: relation(read_left(left_value), read_right(right_value))


# Tests of one value.


def _is_null(operand: Evaluate) -> Condition:
    return lambda lookup: operand(lookup) is None


def _among(node: Among) -> Condition:
    name, members, is_negated = node.operand.name, node.members, node.is_negated

    def among(lookup: Lookup) -> bool | None:
        text = lookup(name)
        return None if text is None else (text in members) is not is_negated

    return among


_TEXT_TESTS: Mapping[str, Callable[[str, str], bool]] = {
    "CONTAINS": operator.contains,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


def _text_test(node: TextTest) -> Condition:
    """False, negated or not, for what is no text, and for an empty search."""
    if not node.search:
        return lambda _lookup: False
    operand = _compile_value(node.operand)
    passes = _TEXT_TESTS[node.word]
    search, is_negated = node.search, node.is_negated

    def text_test(lookup: Lookup) -> bool:
        text = operand(lookup)
        return isinstance(text, str) and passes(text, search) is not is_negated

    return text_test
