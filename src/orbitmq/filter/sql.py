"""SQL92 filters on message properties: compiled once, then asked for every message.

The text becomes nodes, and the nodes become a function of a message's properties. Logic has three
values: true, false and null ("unknown", mostly because a property is missing). A message matches
when the expression is true. How two values compare depends on their kinds, which are known when the
expression is compiled. The text of a property is read as the kind of the other side: `a = 10` reads
a 32-bit integer, `a = 10.0` a double, `a = TRUE` a boolean, `a = '10'` text. Text that cannot be
read so ends the whole evaluation (`IncomparableValues`), as in Apache's broker.
"""

from __future__ import annotations

import enum
import math
import operator
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from typing import Literal as OneOf

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedToken

from orbitmq.errors import InvalidFilter
from orbitmq.filter.tags import IncomparableValues, Lookup, lookup_in

if TYPE_CHECKING:
    from collections.abc import Sequence

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


# The grammar of RocketMQ's SQL92 selectors. NOT binds tighter than a comparison: `NOT a = 1` is
# `(NOT a) = 1`. Apache's parser stops at the first token that cannot continue and ignores the rest,
# so `a LIKE '1%'` is the bare property `a`: the subscription is accepted and matches nothing. By
# default the rest is refused here; `lenient` follows Apache. Blanks and comments may follow in both
# cases.

#: Levels of an expression. Evaluating takes a Python call per level.
MAX_DEPTH = 128
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


# Building nodes. The checks are those of Apache's parser, so an expression is refused here exactly
# when it is refused there: by what a part *is*, not by its value. A signed number, for example, is
# not a literal.


class Refused(Exception):  # not an error of its own: `parse` makes one of it
    """A reason to refuse the expression, and the place of it."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.at = at


@v_args(inline=True)
class NodeBuilder(Transformer[Token, "Node"]):
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
