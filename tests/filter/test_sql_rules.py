"""The rules of SQL92 filters, one by one, in words."""

from __future__ import annotations

import pytest

from orbitmq.filter.sql import compile_sql
from orbitmq.filter.tags import IncomparableValues

PROPERTIES = {"a": "10", "b": "true", "s": "abc", "f": "3.5"}


def evaluate(text: str) -> bool | None:
    return compile_sql(text).evaluate(PROPERTIES)


@pytest.mark.parametrize(
    "text",
    [
        "a > 5",
        "a = 10.0",
        "a BETWEEN -1 AND 20",
        "a not between 1 and 5",
        "f BETWEEN 3.0 AND 4.0",
        "a > f",
        "missing = 1 OR a = 10",
        "(a>5) = TRUE",
        "a > +5",
        "a = '10'",
        "s IN ('abc', 'x')",
        "s contains 'b' AND s startswith 'a' AND s endswith 'c'",
        "missing IS NULL AND a IS NOT NULL",
        "b = TRUE",
        "a > /* any */ 5 -- number",
    ],
)
def test_these_match(text):
    assert evaluate(text) is True
    assert compile_sql(text).matches(PROPERTIES)


@pytest.mark.parametrize(
    "text",
    [
        "a BETWEEN 20 AND -1",
        "1 = missing",
        "missing contains 'x'",
        "missing not contains 'x'",
        "s contains ''",
        "s not endswith ''",
        "a",
        "s NOT IN ('abc')",
        "a = missing",
    ],
)
def test_these_are_false(text):
    assert evaluate(text) is False
    assert not compile_sql(text).matches(PROPERTIES)


@pytest.mark.parametrize(
    "text",
    [
        "missing <> 1",
        "NOT (missing = 1)",
        "missing",
        "missing IN ('x')",
        "missing NOT IN ('x')",
        "missing BETWEEN 1 AND 2",
        "a = 10 AND missing = 1",
        "a = 11 OR missing = 1",
        "NULL",
        "a > -s",
    ],
)
def test_these_are_null_and_do_not_match(text):
    assert evaluate(text) is None
    assert not compile_sql(text).matches(PROPERTIES)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("s > 5", "'abc' is not a 32-bit integer"),
        ("s = 5", "'abc' is not a 32-bit integer"),
        ("s = 2147483648", "'abc' is not a 64-bit integer"),
        ("f > 3", "'3.5' is not a 32-bit integer"),
        ("f BETWEEN 3 AND 4", "'3.5' is not a 32-bit integer"),
        ("a > b", "'true' is not a number"),
        ("s > f", "'abc' is not a number"),
        ("TRUE = b", "'true' is not readable as a truth value"),
        ("s > 5 OR a = 10", "'abc' is not a 32-bit integer"),
    ],
)
def test_these_cannot_be_evaluated_and_do_not_match(text, fault):
    with pytest.raises(IncomparableValues, match=fault):
        evaluate(text)
    assert not compile_sql(text).matches(PROPERTIES)


def test_a_missing_property_is_null_on_the_left_of_equality_and_false_on_its_right():
    assert evaluate("missing = 1") is None
    assert evaluate("1 = missing") is False
    assert evaluate("missing <> 1") is None
    assert evaluate("1 <> missing") is True
    assert evaluate("missing = absent") is True


def test_not_binds_tighter_than_a_comparison():
    assert evaluate("NOT a = 10") is False  # a condition never equals a number
    assert evaluate("NOT b = TRUE") is True  # and a bare property is never true
    assert evaluate("NOT a = FALSE") is False
    assert evaluate("NOT (a = 11)") is True


def test_and_binds_tighter_than_or():
    assert evaluate("a = 10 OR a = 11 AND a = 12") is True
    assert evaluate("(a = 10 OR a = 11) AND a = 12") is False


def test_keywords_have_no_case_and_names_have():
    assert evaluate("a BeTwEeN 1 aNd 10") is True
    assert evaluate("A IS NULL") is True
    assert compile_sql("NOTE = 'x'").matches({"NOTE": "x"})


def test_the_literal_decides_how_many_bits_a_property_may_have():
    large = {"a": "2147483648"}

    assert compile_sql("a > 2147483647").matches(large) is False
    assert compile_sql("a >= 2147483648").matches(large) is True
    assert compile_sql("a > 2147483647.0").matches(large) is True


def test_system_properties_are_properties():
    assert compile_sql("TAGS = 'TagA' AND KEYS IS NULL").matches({"TAGS": "TagA"})


def test_a_filter_reads_stored_properties_as_well_as_a_map():
    wanted = compile_sql("price > 100 AND region IN ('eu', 'us')")
    stored = b"TAGS\x01TagA\x02price\x01250\x02region\x01eu\x02"

    assert wanted.matches(stored)
    assert wanted.matches(memoryview(stored))
    assert wanted.matches({"price": "250", "region": "eu"})
    assert not wanted.matches(b"price\x01250\x02")


def test_nested_betweens_cost_no_more_than_their_length():
    # Read as two comparisons each, sixty levels would be 2 ** 60 evaluations.
    text = "a between 1 and 20"
    for _ in range(60):
        text = f"-({text}) between 1 and 20"

    assert evaluate(text) is None
