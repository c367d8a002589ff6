"""Turns nodes into functions of a message's properties, once per subscription.

Logic has three values: true, false and null, where null means "cannot be said", mostly because a
property is missing. A message matches when the whole expression is true.

How two values meet depends on what each of them is, and that is known beforehand, so the table
below is asked when the expression is compiled and not when a message is judged. The text of a
property is read as whatever stands on the other side: `a = 10` reads a 32-bit integer, `a = 10.0` a
double, `a = TRUE` a truth value, `a = '10'` nothing at all. Text that cannot be read so ends the
evaluation of the whole expression (`IncomparableValues`), even where another branch would be true.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from orbitmq.filter.errors import IncomparableValues
from orbitmq.filter.javanumbers import (
    order_doubles,
    read_boolean,
    read_double,
    read_int32,
    read_int64,
)
from orbitmq.filter.nodes import (
    NUMBERS,
    Among,
    Between,
    Equal,
    Flag,
    IsNull,
    Kind,
    Literal,
    Logic,
    Negative,
    Node,
    Not,
    Order,
    Property,
    TextTest,
    kind_of,
)
from orbitmq.filter.properties import Lookup

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
