"""What SQL92 filters refuse at compile time, and how they say where the fault is."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orbitmq.errors import InvalidFilter, OrbitError
from orbitmq.filter.sql import MAX_DEPTH, MAX_LENGTH, MAX_TOKENS, compile_sql

ten = {"a": "10", "b": "true"}


def refusal(text: str, *, lenient: bool = False) -> InvalidFilter:
    with pytest.raises(InvalidFilter) as refused:
        compile_sql(text, lenient=lenient)
    return refused.value


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("", 0, "the expression is empty"),
        (" \n\t ", 4, "the expression is empty"),
        ("a >", 3, "ends too early; expected a property"),
        ("a BETWEEN 1", 11, "ends too early; expected AND"),
        ("(a > 5", 6, "ends too early; expected )"),
        ("a > '5'", 4, "> compares numbers, and a string is none"),
        ("'5' < a", 0, "< compares numbers, and a string is none"),
        ("a >= TRUE", 5, ">= compares numbers, and TRUE or FALSE is none"),
        ("a <= NULL", 5, "<= compares numbers, and NULL is none"),
        ("a > (b = 1)", 5, "> compares numbers, and a condition is none"),
        ("a > 1 > 2", 0, "> compares numbers, and a condition is none"),
        ("a BETWEEN 'x' AND 5", 10, "BETWEEN compares numbers, and a string is none"),
        ("a BETWEEN 1 AND NULL", 16, "BETWEEN compares numbers, and NULL is none"),
        ("a NOT BETWEEN 1 AND TRUE", 20, "BETWEEN compares numbers, and TRUE or FALSE is none"),
        ("a BETWEEN 5 AND 1", 10, "lower bound first"),
        ("a BETWEEN 1.5 AND 1", 10, "lower bound first"),
        ("a = NULL", 4, "write IS NULL"),
        ("NULL <> a", 0, "write IS NULL"),
        ("TRUE = 1", 7, "TRUE or FALSE cannot be compared with a 32-bit integer"),
        ("5 IN ('5')", 0, "IN needs a property on its left"),
        ("NOT a IN ('5')", 0, "IN needs a property on its left"),
        ("a IN (5)", 6, "unexpected '5'; expected a 'string'"),
        ("a IN ()", 6, "unexpected ')'; expected a 'string'"),
        ("a CONTAINS 5", 11, "unexpected '5'; expected a 'string'"),
        ("a = 0.0", 4, "for zero write 0"),
        ("a = 1E-400", 4, "for zero write 0"),
        ("a = 1E400", 4, "below 1.8E308"),
        ("a = 9223372036854775808", 4, "integers go up to 9223372036854775807"),
        ("a = -9223372036854775808", 5, "integers go up to 9223372036854775807"),
        ("a = " + "9" * 5000, 4, "integers go up to 9223372036854775807"),
        ("a != 1", 2, "unexpected '!'; there is no '!'; write <>"),
        ('a = "x"', 4, "single quotes"),
        ("a.b = 1", 1, "a property's name holds letters, digits, _ and $ only"),
        ("a = 'x", 4, "no closing quote"),
        ("a = 1 /* x", 6, "no end"),
        ("a = é", 4, "unexpected 'é'"),
        ("a\xa0= 1", 1, "unexpected '\\xa0'"),
        ("5", 0, "a condition is needed here, and a 32-bit integer is none"),
        ("a = 1 AND 'x'", 10, "a condition is needed here, and a string is none"),
        ("a = 1 OR 5.5", 9, "a condition is needed here, and a floating-point number is none"),
        ("-a", 0, "a condition is needed here, and a signed value is none"),
        ("NOT 5", 4, "a condition is needed here"),
        ("a IS 5", 5, "unexpected '5'; expected NULL or NOT"),
        ("= 5", 0, "unexpected '='; expected a property"),
        ("a NOT 5", 6, "unexpected '5'; expected BETWEEN or IN or CONTAINS"),
    ],
)
def test_a_faulty_expression_is_refused_at_the_fault_in_both_modes(text, position, reason):
    for lenient in (False, True):
        refused = refusal(text, lenient=lenient)

        assert reason in refused.reason
        assert refused.position == position
        assert refused.expression == text


@pytest.mark.parametrize(
    ("text", "ignored", "meaning"),
    [
        ("a > 5 garbage", "garbage", "a > 5"),
        ("a > 5 garbage ! '", "garbage ! '", "a > 5"),
        ("a LIKE '1%'", "LIKE '1%'", "a"),
        ("a = 010", "10", "a = 0"),
        ("a = 0L", "L", "a = 0"),
        ("a > 5)", ")", "a > 5"),
        ("a > 5 + 1", "+ 1", "a > 5"),
        ("a = 10 -- note\n AND_b", "AND_b", "a = 10"),
        ("b = TRUE 'x'", "'x'", "b = TRUE"),
    ],
)
def test_text_after_the_expression_is_refused_unless_apache_is_to_be_followed(
    text, ignored, meaning
):
    refused = refusal(text)
    followed = compile_sql(text, lenient=True)

    assert "Apache RocketMQ would silently ignore the rest" in refused.reason
    assert text[refused.position :] == ignored
    assert followed.ignored_from == refused.position
    assert followed.evaluate(ten) == compile_sql(meaning).evaluate(ten)


@pytest.mark.parametrize("text", ["a > 5 -- note", "a > 5 --", "a > 5 -- 'x", "a > 5 -- x\n--y"])
def test_a_comment_at_the_end_needs_no_newline(text):
    assert compile_sql(text).matches(ten)
    assert compile_sql(text, lenient=True).matches(ten)


def test_two_minus_signs_before_a_number_are_signs_when_no_line_ends_there():
    assert compile_sql("a > --5").matches(ten)
    assert refusal("a > --5\n").position == 8


def test_the_place_is_shown_by_line_column_and_a_caret():
    refused = refusal("a > 5\n  AND b ! 3\nOR a = 1")

    assert (refused.line, refused.column) == (2, 9)
    assert str(refused) == (
        "unexpected '!'; there is no '!'; write <> or NOT (...), at line 2, column 9:\n"
        "    AND b ! 3\n"
        "          ^"
    )
    assert isinstance(refused, OrbitError)


def test_the_excerpt_of_a_long_line_is_cut_around_the_fault_and_fit_for_a_log():
    refused = refusal("a = 'x\x1b[31m' AND " + "b = 'y' AND " * 50 + "! " + "z" * 500)

    _, shown, caret = str(refused).split("\n")

    assert shown.startswith("  ...")
    assert shown.endswith("...")
    assert shown[caret.index("^")] == "!"
    assert len(shown) < 100
    assert "?[31m" in str(refusal("'\x1b[31m' = !"))


@pytest.mark.parametrize("lenient", [False, True])
def test_an_expression_has_a_greatest_length(lenient):
    longest = "a = 10" + " " * (MAX_LENGTH - 6)

    assert compile_sql(longest, lenient=lenient).matches(ten)
    refused = refusal(longest + " ", lenient=lenient)
    assert f"{MAX_LENGTH} are allowed" in refused.reason


@pytest.mark.parametrize("lenient", [False, True])
def test_an_expression_has_a_greatest_number_of_words(lenient):
    # Far from the greatest length: what costs is the number of things to look at.
    values = ",".join(["'x'"] * (MAX_TOKENS // 2 - 3) + ["'10'"])
    most = f"a IN ({values}) "

    assert compile_sql(most, lenient=lenient).matches(ten)
    assert not compile_sql(most.replace("IN", "NOT IN"), lenient=lenient).matches(ten)
    refused = refusal(f"{most} OR a", lenient=lenient)
    assert f"more than {MAX_TOKENS} words and signs" in refused.reason
    assert refused.position == len(f"{most} OR ")


NESTINGS = [
    ("(", "a = 10", ")"),
    ("NOT (", "a = 10", ")"),
    ("NOT ", "b", ""),
    ("- ", "5 = 5", ""),
    ("-", "5 = 5", ""),
    ("+ ", "a = 10", ""),
    ("", "a = 10", " = TRUE"),
    ("", "a", " IS NULL"),
    ("(a = 1 OR ", "a = 10", ")"),
    ("-(", "a = 10", ") between 1 and 2"),
]


def test_signs_that_might_begin_a_comment_are_counted():
    """The end of the line is looked for at each: a long one after many took half a second."""
    row = "a > " + "-" * 90 + "1 OR "
    tail = f"b = '{'x' * 20_000}'"

    assert compile_sql(row * 5 + tail).matches({"a": "2"})
    refused = refusal(row * 40 + tail)

    assert "more than 512 times --" in refused.reason
    assert compile_sql("a > 1 -- " + "-" * 2_000).matches({"a": "2"})


@pytest.mark.parametrize(("opening", "middle", "closing"), NESTINGS)
@pytest.mark.parametrize("levels", [600, 1500])
def test_deep_nesting_is_refused_before_it_exhausts_the_stack(opening, middle, closing, levels):
    with pytest.raises(InvalidFilter, match=r"levels deep|still open here"):
        compile_sql(opening * levels + middle + closing * levels)


@pytest.mark.parametrize(("opening", "middle", "closing"), NESTINGS)
def test_moderate_nesting_is_evaluated(opening, middle, closing):
    compiled = compile_sql(opening * 60 + middle + closing * 60)

    assert compiled.evaluate(ten) in (True, False, None)


def test_nesting_up_to_the_limit_is_evaluated():
    text = "b = TRUE"
    for _ in range(MAX_DEPTH - 2):
        text = f"NOT ({text})"

    assert compile_sql(text).evaluate(ten) is True
    assert f"nested more than {MAX_DEPTH} levels" in refusal(f"NOT ({text})").reason


def test_a_long_chain_is_not_deep():
    chain = " OR ".join(f"a = {number}" for number in range(MAX_TOKENS // 4, 0, -1))
    assert len(chain) < MAX_LENGTH

    assert compile_sql(chain).matches(ten)
    assert not compile_sql(chain).matches({"a": str(MAX_TOKENS)})
    assert not compile_sql(chain.replace("OR", "AND")).matches(ten)


WORDS = """
    a b NOT AND OR IN IS NULL TRUE BETWEEN CONTAINS = <> > <= ( ) , - + 5 0 1.5 1e400 '' 'x' 'y
    -- /* */ ! . " é
"""
words = st.sampled_from([*WORDS.split(), "\n", "\t"])
soups = st.lists(words, max_size=25).map(" ".join) | st.lists(words, max_size=25).map("".join)


@settings(max_examples=300, deadline=None)  # the first example makes the parser
@given(text=st.text() | soups, lenient=st.booleans())
@example(text="\ud800", lenient=False)
@example(text="a = '\ud800'", lenient=False)
def test_any_text_compiles_or_is_refused_and_nothing_else_happens(text, lenient):
    try:
        compiled = compile_sql(text, lenient=lenient)
    except InvalidFilter as refused:
        place = refused.position
    else:
        place = len(text) if compiled.ignored_from is None else compiled.ignored_from
        compiled.matches(ten)
        compiled.matches(b"a\x0110\x02")

    assert 0 <= place <= len(text)
