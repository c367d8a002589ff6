"""The parts of a SQL92 expression, after the checks that need no message.

Property values are always text and literals have one type, so the kind of every part's value is
known before any message is seen. A node's `at` is its place in the expression, `depth` the number
of levels below and including it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal as OneOf
from typing import TypeAlias


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
