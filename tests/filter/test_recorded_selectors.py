"""SQL92 against a recording of what Apache RocketMQ's own parser and evaluator answered.

Written expressions for every rule of the grammar, generated ones, and token soup; each evaluated
on property sets chosen for the edges of Java's number formats.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orbitmq.errors import InvalidFilter
from orbitmq.filter.sql import SqlFilter, compile_sql
from orbitmq.filter.tags import IncomparableValues

RECORDED = json.loads(
    (Path(__file__).parent / "data" / "apache_sql_results.json").read_text(encoding="utf-8")
)
PROPERTY_SETS: list[dict[str, str]] = RECORDED["properties"]
RESULTS: list[tuple[str, str]] = [(text, answers) for text, answers in RECORDED["results"]]
OPERATORS = "= <> > >= < <= BETWEEN IN IS NULL AND OR NOT CONTAINS STARTSWITH ENDSWITH"
LETTERS = {True: "T", False: "F", None: "N"}


def answers_of(compiled: SqlFilter) -> str:
    letters = ""
    for properties in PROPERTY_SETS:
        try:
            letters += LETTERS[compiled.evaluate(properties)]
        except IncomparableValues:
            letters += "X"
    return letters


def lenient_answers(text: str) -> str:
    try:
        return answers_of(compile_sql(text, lenient=True))
    except InvalidFilter:
        return "refused"


@pytest.mark.feature("B10")
def test_every_recorded_expression_gets_the_answers_that_apache_gave():
    assert len(RESULTS) > 1000

    ours = {text: lenient_answers(text) for text, _ in RESULTS}

    assert ours == dict(RESULTS)


def test_the_recording_holds_every_operator_and_every_outcome():
    accepted = " ".join(text.upper() for text, answers in RESULTS if answers != "refused")

    for word in OPERATORS.split():
        assert f" {word} " in accepted
    assert {letter for _, answers in RESULTS for letter in answers} >= set("TFNX")
    assert sum(answers == "refused" for _, answers in RESULTS) > 100


def test_strict_compiling_differs_only_where_apache_ignores_text():
    for text, answers in RESULTS:
        if answers == "refused":
            with pytest.raises(InvalidFilter):
                compile_sql(text)
            continue
        ignored_from = compile_sql(text, lenient=True).ignored_from
        if ignored_from is None or text.startswith("--", ignored_from):
            assert answers_of(compile_sql(text)) == answers
        else:
            with pytest.raises(InvalidFilter) as refused:
                compile_sql(text)
            assert refused.value.position == ignored_from


def test_only_true_is_a_match():
    for text, answers in RESULTS:
        if answers == "refused":
            continue
        compiled = compile_sql(text, lenient=True)

        matched = [compiled.matches(properties) for properties in PROPERTY_SETS]

        assert matched == [letter == "T" for letter in answers]
