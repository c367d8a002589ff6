"""Generated SQL92 expressions against a second evaluator, written for this test alone.

The second one works on trees of plain tuples, one value at a time and with none of the first one's
preparation: no kinds, no table, no functions made beforehand.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.filter.sql import compile_sql
from orbitmq.filter.tags import IncomparableValues

#: A word for the kind of node, and its parts.
Tree: TypeAlias = tuple[Any, ...]

NAMES = ["a", "b", "c"]
TEXTS = ["1", "2", "10", "-1", "2.5", "true", "FALSE", "x", "it's", "3000000000", ""]


class Impossible(Exception):
    """Where Java would throw."""


# Trees, from the smallest up. Only such as compile: what is refused has its own tests.

properties = st.sampled_from(NAMES).map(lambda name: ("property", name))
numbers = st.sampled_from([0, 1, 2, 10, 3_000_000_000, 2.5, 1.0, 10.0]).map(
    lambda number: ("number", number)
)
signed = numbers.map(lambda number: ("negative", number))
texts = st.sampled_from(TEXTS).map(lambda text: ("text", text))
truths = st.sampled_from([True, False]).map(lambda truth: ("truth", truth))
ordered = properties | numbers | signed


def conditions_over(conditions: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    # NULL is refused beside an equals sign, and a bare name is no condition there.
    comparable = conditions.filter(lambda tree: tree[0] not in ("null", "flag"))
    return (
        st.tuples(st.sampled_from(["and", "or"]), st.lists(conditions, min_size=2, max_size=4))
        | st.tuples(st.just("not"), conditions)
        | st.tuples(st.just("isnull"), conditions, st.booleans())
        | st.tuples(st.sampled_from(["=", "<>"]), properties | comparable, comparable)
    )


simple_conditions: st.SearchStrategy[Tree] = st.one_of(
    st.tuples(st.sampled_from(["=", "<>"]), properties, ordered | texts | truths),
    st.tuples(st.sampled_from(["=", "<>"]), ordered | texts, ordered | texts),
    st.tuples(st.sampled_from([">", ">=", "<", "<="]), ordered, ordered),
    st.tuples(st.just("between"), ordered, ordered, signed, st.booleans()),
    st.tuples(
        st.just("in"), properties, st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6)
    ).flatmap(lambda tree: st.booleans().map(lambda negated: (*tree, negated))),
    st.tuples(
        st.sampled_from(["contains", "startswith", "endswith"]),
        properties | texts | numbers,
        st.sampled_from(["", "1", "x", "t'", "0"]),
        st.booleans(),
    ),
    st.tuples(st.just("isnull"), properties | numbers, st.booleans()),
    st.tuples(st.just("flag"), st.sampled_from(NAMES)),
    truths,
    st.just(("null",)),
)
conditions = st.recursive(simple_conditions, conditions_over, max_leaves=12)
messages = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(TEXTS))


def written(tree: Tree) -> str:
    """The tree as SQL."""
    match tree:
        case ("property" | "flag", name):
            return str(name)
        case ("number", number):
            return str(number)
        case ("negative", inner):
            return f"-{written(inner)}"
        case ("text", text):
            return quoted(text)
        case ("truth", truth):
            return str(truth).upper()
        case ("null",):
            return "NULL"
        case ("and" | "or" as word, parts):
            return f" {word} ".join(f"({written(part)})" for part in parts)
        case ("not", inner):
            return f"NOT ({written(inner)})"
        case ("isnull", inner, negated):
            return f"({written(inner)}) is {'not ' if negated else ''}null"
        case ("between", value, low, high, negated):
            bounds = f"{written(low)} and {written(high)}"
            return f"{written(value)} {'not ' if negated else ''}between {bounds}"
        case ("in", value, members, negated):
            listed = ", ".join(map(quoted, members))
            return f"{written(value)} {'NOT ' if negated else ''}IN ({listed})"
        case ("contains" | "startswith" | "endswith" as word, value, search, negated):
            return f"{written(value)} {'NOT ' if negated else ''}{word.upper()} {quoted(search)}"
        case (symbol, left, right):
            return f"({written(left)}) {symbol} ({written(right)})"
    raise AssertionError(tree)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def judged(tree: Tree, message: dict[str, str]) -> Any:
    """The value of the tree, by the letter of the rules."""
    match tree:
        case ("property", name):
            return message.get(name)
        case ("number" | "text" | "truth", value):
            return value
        case ("negative", inner):
            return -judged(inner, message)
        case ("null",):
            return None
        case ("flag", name):
            return False if name in message else None
        case ("and", parts):
            return conjunction(parts, message)
        case ("or", parts):
            # By De Morgan, which three-valued logic obeys.
            return negation(conjunction([("not", part) for part in parts], message))
        case ("not", inner):
            return negation(judged(inner, message))
        case ("isnull", inner, negated):
            return (judged(inner, message) is None) != negated
        case ("between", value, low, high, False):
            return judged(("and", [(">=", value, low), ("<=", value, high)]), message)
        case ("between", value, low, high, True):
            return judged(("or", [("<", value, low), (">", value, high)]), message)
        case ("in", value, members, negated):
            text = judged(value, message)
            return None if text is None else (text in members) != negated
        case ("contains" | "startswith" | "endswith" as word, value, search, negated):
            text = judged(value, message)
            if not isinstance(text, str) or search == "":
                return False
            found = {
                "contains": search in text,
                "startswith": text[: len(search)] == search,
                "endswith": text[-len(search) :] == search,
            }[word]
            return found != negated
        case ("=", left, right):
            return equality(judged(left, message), judged(right, message))
        case ("<>", left, right):
            return negation(judged(("=", left, right), message))
        case (symbol, left, right):
            return ordering(symbol, judged(left, message), judged(right, message))
    raise AssertionError(tree)


def conjunction(parts: list[Tree], message: dict[str, str]) -> bool | None:
    if not parts:
        return True
    first = judged(parts[0], message)
    if first is False:
        return False
    rest = conjunction(parts[1:], message)
    if rest is False:
        return False
    return None if first is None or rest is None else True


def negation(value: bool | None) -> bool | None:
    return None if value is None else not value


def equality(left: Any, right: Any) -> bool | None:
    if left is None:
        return True if right is None else None
    if right is None:
        return False
    if isinstance(left, str) and isinstance(right, str):
        return left == right
    if isinstance(left, bool) and isinstance(right, str):
        raise Impossible
    if isinstance(left, bool) != isinstance(right, bool) and not isinstance(left, str):
        return False
    left, right = read_like(left, right), read_like(right, left)
    return bool(left == right)


def ordering(symbol: str, left: Any, right: Any) -> bool | None:
    if left is None or right is None:
        return None
    if isinstance(left, str) and isinstance(right, str):
        left, right = read_like(left, 1.5), read_like(right, 1.5)
    left, right = read_like(left, right), read_like(right, left)
    return bool(
        {">": left > right, ">=": left >= right, "<": left < right, "<=": left <= right}[symbol]
    )


def read_like(value: Any, other: Any) -> Any:
    """`value`, read as what `other` is when it is text."""
    if not isinstance(value, str):
        return value
    if isinstance(other, bool):
        return value.upper() == "TRUE"
    if isinstance(other, int):
        if not re.fullmatch("-?[0-9]+", value):
            raise Impossible
        if abs(int(value)) >= 2**31 > abs(other):
            raise Impossible
        return int(value)
    if not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", value):
        raise Impossible
    return float(value)


@settings(max_examples=400, deadline=None)  # the first example makes the parser
@given(tree=conditions, message=messages)
def test_an_expression_evaluates_as_the_rules_say(tree, message):
    try:
        expected: object = judged(tree, message)
    except Impossible:
        expected = Impossible

    try:
        actual: object = compile_sql(written(tree)).evaluate(message)
    except IncomparableValues:
        actual = Impossible

    assert actual is expected, written(tree)


@settings(deadline=None)
@given(tree=conditions, message=messages)
def test_only_truth_is_a_match(tree, message):
    try:
        expected = judged(tree, message) is True
    except Impossible:
        expected = False

    assert compile_sql(written(tree)).matches(message) is expected
