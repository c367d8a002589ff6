"""Builds nodes as the parser recognises them, and refuses what can never be evaluated.

The checks are those that Apache's parser makes while it reads, so that an expression is refused
here exactly when it is refused there: by what a part *is*, not by what it might evaluate to. A
signed number, for one, is no literal any more and escapes the checks on literals.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lark import Token, Transformer, v_args

from orbitmq.filter.javanumbers import INT32_MAX, INT64_MAX
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

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Levels of an expression. Evaluating takes a Python call per level.
MAX_DEPTH = 128


class Refused(Exception):  # not an error of its own: `parse` makes one of it
    """A reason to refuse the expression, and the place of it."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.at = at


@v_args(inline=True)
class NodeBuilder(Transformer[Token, Node]):
    """One method per alternative of the grammar, called when it has been read completely."""

    def selector(self, condition: Node) -> Node:
        return _as_condition(condition)

    def any_of(self, *operands: Node) -> Node:
        return Logic("OR", tuple(map(_as_condition, operands)), operands[0].at, _above(*operands))

    def all_of(self, *operands: Node) -> Node:
        return Logic("AND", tuple(map(_as_condition, operands)), operands[0].at, _above(*operands))

    def equal(self, left: Node, right: Node) -> Equal:
        for operand in (left, right):
            if isinstance(operand, Literal) and operand.value is None:
                raise Refused("NULL equals nothing; write IS NULL or IS NOT NULL", operand.at)
        if (
            isinstance(left, Literal)
            and isinstance(right, Literal)
            and left.kind is Kind.BOOLEAN
            and right.kind is not Kind.BOOLEAN
        ):
            raise Refused(f"TRUE or FALSE cannot be compared with {right.kind.value}", right.at)
        return Equal(left, right, left.at, _above(left, right))

    def unequal(self, left: Node, right: Node) -> Node:
        return self._not(self.equal(left, right))

    def is_null(self, operand: Node, _null: Token) -> IsNull:
        return IsNull(operand, operand.at, _above(operand))

    def is_not_null(self, operand: Node, _not: Token, null: Token) -> Node:
        return self._not(self.is_null(operand, null))

    def order(self, left: Node, symbol: Token, right: Node) -> Node:
        for operand in (left, right):
            _check_ordered(operand, symbol.value)
        return Order(symbol.value, left, right, left.at, _above(left, right))

    def between(self, operand: Node, low: Node, high: Node) -> Node:
        built = self._between(operand, low, high, is_negated=False)
        if isinstance(low, Literal) and isinstance(high, Literal):
            # Both are numbers by now. As Java: converted to double when one of them is.
            lower, upper = low.value, high.value
            assert isinstance(lower, int | float)  # noqa: S101
            assert isinstance(upper, int | float)  # noqa: S101
            if Kind.DOUBLE in (low.kind, high.kind):
                lower, upper = float(lower), float(upper)
            if lower > upper:
                raise Refused("BETWEEN needs the lower bound first", low.at)
        return built

    def not_between(self, operand: Node, _not: Token, low: Node, high: Node) -> Node:
        return self._between(operand, low, high, is_negated=True)

    def _between(self, operand: Node, low: Node, high: Node, *, is_negated: bool) -> Node:
        for part in (operand, low, high):
            _check_ordered(part, "BETWEEN")
        return Between(operand, low, high, is_negated, operand.at, _above(operand, low, high))

    def among(self, operand: Node, *members: Token) -> Among:
        return self._among(operand, members, is_negated=False)

    def not_among(self, operand: Node, _not: Token, *members: Token) -> Among:
        return self._among(operand, members, is_negated=True)

    def _among(self, operand: Node, members: Sequence[Token], *, is_negated: bool) -> Among:
        if not isinstance(operand, Property):
            raise Refused("IN needs a property on its left", operand.at)
        texts = frozenset(map(_unquoted, members))
        return Among(operand, texts, is_negated, operand.at, _above(operand))

    def text_test(self, operand: Node, word: Token, search: Token) -> TextTest:
        return TextTest(
            word.upper(), operand, _unquoted(search), False, operand.at, _above(operand)
        )

    def not_text_test(self, operand: Node, _not: Token, word: Token, search: Token) -> TextTest:
        return TextTest(word.upper(), operand, _unquoted(search), True, operand.at, _above(operand))

    def negative(self, minus: Token, operand: Node) -> Negative:
        return Negative(operand, place_of(minus), _above(operand))

    def negation(self, word: Token, operand: Node) -> Node:
        return Not(_as_condition(operand), place_of(word), _above(operand))

    def _not(self, operand: Node) -> Not:
        return Not(operand, operand.at, _above(operand))

    def named_property(self, name: Token) -> Property:
        return Property(name.value, place_of(name))

    def string_literal(self, text: Token) -> Literal:
        return Literal(_unquoted(text), Kind.TEXT, place_of(text))

    def integer_literal(self, digits: Token) -> Literal:
        plain = digits.rstrip("lL")
        if len(plain) > 19 or (number := int(plain)) > INT64_MAX:
            raise Refused(f"integers go up to {INT64_MAX}", place_of(digits))
        return Literal(number, Kind.INT if number <= INT32_MAX else Kind.LONG, place_of(digits))

    def float_literal(self, digits: Token) -> Literal:
        number = float(digits)
        if number == 0 or math.isinf(number):
            raise Refused(
                "floating-point numbers are above 0 and below 1.8E308; for zero write 0",
                place_of(digits),
            )
        return Literal(number, Kind.DOUBLE, place_of(digits))

    def true_literal(self, word: Token) -> Literal:
        return Literal(True, Kind.BOOLEAN, place_of(word))

    def false_literal(self, word: Token) -> Literal:
        return Literal(False, Kind.BOOLEAN, place_of(word))

    def null_literal(self, word: Token) -> Literal:
        return Literal(None, Kind.NOTHING, place_of(word))


def _as_condition(node: Node) -> Node:
    """The node as an operand of AND, OR and NOT, and as a whole expression."""
    if isinstance(node, Property):
        return Flag(node, node.at, _above(node))
    if isinstance(node, Negative):
        raise Refused("a condition is needed here, and a signed value is none", node.at)
    if isinstance(node, Literal) and node.kind not in (Kind.BOOLEAN, Kind.NOTHING):
        raise Refused(f"a condition is needed here, and {node.kind.value} is none", node.at)
    return node


def _check_ordered(node: Node, symbol: str) -> None:
    if isinstance(node, Literal) and node.kind in NUMBERS:
        return
    if isinstance(node, Literal) or kind_of(node) is Kind.BOOLEAN:
        raise Refused(f"{symbol} compares numbers, and {_spoken(node)} is none", node.at)


def _spoken(node: Node) -> str:
    if isinstance(node, Literal) and node.kind is Kind.BOOLEAN:
        return "TRUE or FALSE"
    return kind_of(node).value


def _above(*operands: Node) -> int:
    """The depth of a node with these operands."""
    deepest = max(operands, key=lambda operand: operand.depth)
    if deepest.depth >= MAX_DEPTH:
        raise Refused(f"the expression is nested more than {MAX_DEPTH} levels deep", deepest.at)
    return deepest.depth + 1


def _unquoted(text: Token) -> str:
    return text[1:-1].replace("''", "'")


def place_of(token: Token) -> int:
    """Where the token begins."""
    assert token.start_pos is not None  # noqa: S101  # every token of a text has a place in it
    return token.start_pos
