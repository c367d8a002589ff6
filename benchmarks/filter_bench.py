"""Filter expressions against the same test written by hand in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.runner import Bench, Scale, Work
from benchmarks.workload import TAGS, messages
from orbitmq.filter.sql import compile_sql
from orbitmq.filter.tags import parse_tags
from orbitmq.javahash import java_hash
from orbitmq.message.properties import decode_properties

_EXPRESSION = "amount BETWEEN 10.0 AND 500.0 AND country IN ('de', 'cn') AND TAGS <> 'returned'"
_IN_PYTHON = "10.0 <= amount <= 500.0 and country in ('de', 'cn') and tags != 'returned'"


@contextmanager
def _sql(_: Scale) -> Iterator[tuple[Work, Work]]:
    properties = [decode_properties(message.properties) for message in messages(1000, 0)]
    matches = compile_sql(_EXPRESSION).matches

    def by_hand(found: dict[str, str]) -> bool:
        return (
            10 <= float(found["amount"]) <= 500
            and found["country"] in ("de", "cn")
            and found["TAGS"] != "returned"
        )

    assert [matches(found) for found in properties] == [by_hand(found) for found in properties]

    def candidate() -> int:
        for found in properties:
            matches(found)
        return len(properties)

    def floor() -> int:
        for found in properties:
            by_hand(found)
        return len(properties)

    yield candidate, floor


@contextmanager
def _compile(_: Scale) -> Iterator[tuple[Work, Work]]:
    expressions = [f"amount > {number}.0 AND {_EXPRESSION}" for number in range(1, 21)]
    in_python = [f"amount > {number}.0 and {_IN_PYTHON}" for number in range(1, 21)]

    def candidate() -> int:
        for expression in expressions:
            compile_sql(expression)
        return len(expressions)

    def floor() -> int:
        for expression in in_python:
            compile(expression, "filter", "eval")
        return len(expressions)

    yield candidate, floor


@contextmanager
def _tags(_: Scale) -> Iterator[tuple[Work, Work]]:
    chance = np.random.default_rng(1)
    codes = np.array([java_hash(tag) for tag in TAGS], ">i8")[chance.integers(0, 4, 800)]
    mask = parse_tags("created || paid").mask

    def candidate() -> int:
        mask(codes)
        return len(codes)

    def floor() -> int:
        codes.copy()
        return len(codes)

    yield candidate, floor


BENCHES = (
    Bench(
        name="SQL expression with three conditions",
        room="filter",
        unit="messages/s",
        compared_with="the same test written in Python",
        prepare=_sql,
    ),
    Bench(
        name="compiling a SQL expression",
        room="filter",
        unit="µs each",
        time_for=1,
        unit_factor=1e6,
        compared_with="Python's own compile()",
        prepare=_compile,
    ),
    Bench(
        name="two tags over 800 queue entries",
        room="filter",
        unit="entries/s",
        compared_with="copying the column",
        prepare=_tags,
    ),
)
