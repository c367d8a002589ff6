r"""The grammar of RocketMQ's SQL92 selectors, and where an expression ends.

Two things are unlike other SQL dialects, and both are kept because subscriptions in use rely on
them. NOT binds tighter than any comparison: `NOT a = 1` is `(NOT a) = 1`. And Apache's parser has
no check for the end of the input: it stops at the first token that cannot continue, and what
follows is ignored without a word, so that `a LIKE '1%'` is the bare property `a`.

The second is a trap: the subscription looks accepted and matches nothing. By default the rest is
therefore refused; `lenient` follows Apache to the letter. What may follow in either case are blanks
and comments, including a `--` comment without its newline, which to Apache is not a comment but is
ignored just the same.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from lark import Lark
from lark.exceptions import UnexpectedCharacters, UnexpectedToken

from orbitmq.filter.building import MAX_DEPTH, NodeBuilder, Refused, place_of
from orbitmq.filter.errors import InvalidFilter

if TYPE_CHECKING:
    from orbitmq.filter.nodes import Node

#: Longer expressions are refused: nobody has to keep them.
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
