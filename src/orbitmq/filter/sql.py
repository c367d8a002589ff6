"""SQL92 filters on message properties: compiled once, then asked for every message."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedToken

from orbitmq.errors import InvalidFilter
from orbitmq.filter.evaluate import (
    INT32_MAX,
    INT64_MAX,
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
    compile_condition,
    kind_of,
)
from orbitmq.filter.tags import IncomparableValues, lookup_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orbitmq.filter.evaluate import Condition
    from orbitmq.filter.tags import Properties


def compile_sql(text: str, *, lenient: bool = False) -> SqlFilter:
    """The filter that `text` describes; `InvalidFilter` names the place of a fault.

    Text after a complete expression is refused, unless `lenient` asks for what Apache does: ignore
    it. Expressions that are accepted either way mean the same either way.
    """
    parsed = parse(text, lenient=lenient)
    return SqlFilter(text, parsed.ignored_from, compile_condition(parsed.condition))


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """A compiled expression."""

    text: str
    #: Where the text begins that does not belong to the expression; None when all of it does.
    ignored_from: int | None
    _condition: Condition = field(repr=False, compare=False)

    @property
    def needs_properties(self) -> bool:
        """Always: a queue entry tells nothing about them."""
        return True

    def accepts_code(self, tag_code: int) -> bool:
        """Always: whether the message matches is seen in its properties."""
        return True

    def accepts_properties(self, properties: Properties) -> bool:
        """Whether a message with these properties matches."""
        return self.matches(properties)

    def matches(self, properties: Properties) -> bool:
        """Whether the expression is true, and neither false, null nor impossible to evaluate."""
        try:
            return self._condition(lookup_in(properties)) is True
        except IncomparableValues:
            return False

    def evaluate(self, properties: Properties) -> bool | None:
        """True, false or null; `IncomparableValues` when a value cannot be read as needed."""
        return self._condition(lookup_in(properties))


# Building nodes. The checks are those of Apache's parser, so an expression is refused here exactly
# when it is refused there: by what a part *is*, not by its value. A signed number, for example, is
# not a literal.

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


# The grammar of RocketMQ's SQL92 selectors. NOT binds tighter than a comparison: `NOT a = 1` is
# `(NOT a) = 1`. Apache's parser stops at the first token that cannot continue and ignores the rest,
# so `a LIKE '1%'` is the bare property `a`: the subscription is accepted and matches nothing. By
# default the rest is refused here; `lenient` follows Apache. Blanks and comments may follow in both
# cases.

#: Longer expressions are refused, so that none has to be stored.
MAX_LENGTH = 32_768
#: Names, literals, words and signs of an expression. Compiling takes up to ten microseconds for
#: each, and a broker has one loop: this is a thousand comparisons, or two thousand values of IN.
MAX_TOKENS = 4_096
#: Open parentheses and signs that the parser remembers. They cost no depth once closed.
_MAX_PENDING = 4 * MAX_DEPTH
#: Signs that another follows. Each might begin a comment, whose end is looked for each time.
_MAX_DOUBLE_SIGNS = 4 * MAX_DEPTH

# Terminals follow "the longest match wins", which a regular expression's alternatives do not do by
# themselves: hence the priorities and the look-aheads. Case is ignored among ASCII letters only.
GRAMMAR = r"""
    selector: any_of
    ?any_of: all_of (_OR all_of)*
    ?all_of: equality (_AND equality)*
    ?equality: comparison
        | equality _EQUAL comparison                         -> equal
        | equality _UNEQUAL comparison                       -> unequal
        | equality _IS NULL                                  -> is_null
        | equality _IS NOT NULL                              -> is_not_null
    ?comparison: unary
        | comparison ORDER unary                             -> order
        | comparison TEXT_TEST STRING                        -> text_test
        | comparison NOT TEXT_TEST STRING                    -> not_text_test
        | comparison _BETWEEN unary _AND unary               -> between
        | comparison NOT _BETWEEN unary _AND unary           -> not_between
        | comparison _IN "(" STRING ("," STRING)* ")"        -> among
        | comparison NOT _IN "(" STRING ("," STRING)* ")"    -> not_among
    ?unary: "+" unary
        | MINUS unary                                        -> negative
        | NOT unary                                          -> negation
        | primary
    ?primary: NAME                                           -> named_property
        | STRING                                             -> string_literal
        | INTEGER                                            -> integer_literal
        | FLOAT                                              -> float_literal
        | TRUE                                               -> true_literal
        | FALSE                                              -> false_literal
        | NULL                                               -> null_literal
        | "(" any_of ")"

    NOT.3: /NOT(?![A-Z0-9_$])/i
    _AND.3: /AND(?![A-Z0-9_$])/i
    _OR.3: /OR(?![A-Z0-9_$])/i
    _BETWEEN.3: /BETWEEN(?![A-Z0-9_$])/i
    _IN.3: /IN(?![A-Z0-9_$])/i
    _IS.3: /IS(?![A-Z0-9_$])/i
    TRUE.3: /TRUE(?![A-Z0-9_$])/i
    FALSE.3: /FALSE(?![A-Z0-9_$])/i
    NULL.3: /NULL(?![A-Z0-9_$])/i
    TEXT_TEST.3: /(CONTAINS|STARTSWITH|ENDSWITH)(?![A-Z0-9_$])/i
    NAME.2: /[A-Za-z_$][A-Za-z0-9_$]*/
    FLOAT.2: /([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+/
    INTEGER.1: /0|[1-9][0-9]*[lL]?/
    STRING: /'[^']*(''[^']*)*'/
    ORDER: />=|>|<=|<(?!>)/
    _EQUAL: "="
    _UNEQUAL: "<>"
    MINUS: "-"

    LINE_COMMENT.3: /--[^\r\n]*+(\r\n|\r|\n)/
    BLOCK_COMMENT.3: /\/\*(.|\n)*?\*\//
    BLANKS: /[ \t\n\r\f]+/
    %ignore LINE_COMMENT
    %ignore BLOCK_COMMENT
    %ignore BLANKS
"""


class Parsed(NamedTuple):
    """A condition, and where the part of the text begins that was ignored, if any was."""

    condition: Node
    ignored_from: int | None


def parse(text: str, *, lenient: bool = False) -> Parsed:
    """The condition that `text` states."""
    if len(text) > MAX_LENGTH:
        raise InvalidFilter(
            f"the expression has {len(text)} characters, {MAX_LENGTH} are allowed", text, MAX_LENGTH
        )
    parser: Any = _parser().parse_interactive(text)  # which lark leaves without annotations
    try:
        ignored_from = _feed(parser, text)
        condition: Node = parser.feed_eof()
    except UnexpectedToken:  # at the end: every other place is handled where the text is fed
        what = "the expression ends too early" if text.strip() else "the expression is empty"
        raise InvalidFilter(f"{what}; expected {_expected(parser)}", text, len(text)) from None
    except Refused as refusal:
        raise InvalidFilter(refusal.reason, text, refusal.at) from None
    if ignored_from is not None and not lenient and not text.startswith("--", ignored_from):
        raise InvalidFilter(
            "the expression is complete before this, and Apache RocketMQ would silently ignore the "
            "rest; correct it or remove it",
            text,
            ignored_from,
        )
    return Parsed(condition, ignored_from)


def _feed(parser: Any, text: str) -> int | None:
    """Feed the tokens, and return the place of the first one that a whole expression precedes."""
    try:
        double_signs = 0
        tokens = parser.lexer_thread.lex(parser.parser_state)
        for number, token in enumerate(tokens, start=1):
            if number > MAX_TOKENS:
                raise Refused(
                    f"the expression has more than {MAX_TOKENS} words and signs", place_of(token)
                )
            if len(parser.parser_state.state_stack) > _MAX_PENDING:
                raise Refused(
                    f"more than {_MAX_PENDING} parts are still open here", place_of(token)
                )
            if token.type == "MINUS" and text.startswith("--", place_of(token)):
                double_signs += 1
                if double_signs > _MAX_DOUBLE_SIGNS:
                    raise Refused(f"more than {_MAX_DOUBLE_SIGNS} times --", place_of(token))
            try:
                parser.feed_token(token)
            except UnexpectedToken:
                if "$END" in parser.accepts():
                    return place_of(token)
                raise Refused(
                    f"unexpected {token.value[:40]!r}; expected {_expected(parser)}",
                    place_of(token),
                ) from None
    except UnexpectedCharacters as fault:
        at = fault.pos_in_stream
        assert at is not None  # noqa: S101  # lark's lexer always says where
        raise Refused(_lexical_reason(text[at]), at) from None
    return None


def _lexical_reason(char: str) -> str:
    hint = {
        "'": "this string has no closing quote",
        '"': "strings are written in single quotes",
        "!": "there is no '!'; write <> or NOT (...)",
        ".": "a property's name holds letters, digits, _ and $ only",
        "/": "this comment has no end",
    }.get(char, "a name holds letters, digits, _ and $ only, and there is no arithmetic")
    return f"unexpected {char!r}; {hint}"


#: How terminals are called in an error. Several may share a name.
_SPOKEN = {
    "NAME": "a property",
    "STRING": "a 'string'",
    "INTEGER": "a number",
    "FLOAT": "a number",
    "TRUE": "TRUE",
    "FALSE": "FALSE",
    "NULL": "NULL",
    "NOT": "NOT",
    "MINUS": "-",
    "PLUS": "+",
    "LPAR": "(",
    "RPAR": ")",
    "COMMA": ",",
    "_AND": "AND",
    "_OR": "OR",
    "_BETWEEN": "BETWEEN",
    "_IN": "IN",
    "_IS": "IS",
    "TEXT_TEST": "CONTAINS, STARTSWITH, ENDSWITH",
    "_EQUAL": "=",
    "ORDER": ">, >=, <, <=",
    "_UNEQUAL": "<>",
}


def _expected(parser: Any) -> str:
    accepted = parser.accepts()
    return " or ".join(dict.fromkeys(said for name, said in _SPOKEN.items() if name in accepted))


@cache
def _parser() -> Lark:
    """The tables, made at the first use: some ten milliseconds that a tag filter never pays."""
    return Lark(
        GRAMMAR,
        parser="lalr",
        lexer="basic",
        start="selector",
        transformer=NodeBuilder(),
        maybe_placeholders=False,
        g_regex_flags=re.ASCII,
    )
