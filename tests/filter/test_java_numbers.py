"""Reading numbers from text, against a recording of what Java reads."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.filter.sql import order_doubles, read_boolean, read_double, read_int32, read_int64
from orbitmq.filter.tags import IncomparableValues

RECORDED = json.loads((Path(__file__).parent / "data" / "java_numbers.json").read_text())
NAN_BITS = 0x7FF8000000000000

T = TypeVar("T")


def read_or_none(read: Callable[[str], T], text: str) -> T | None:
    try:
        return read(text)
    except IncomparableValues:
        return None


def bits(number: float | None) -> int | None:
    if number is None:
        return None
    if math.isnan(number):
        return NAN_BITS
    packed: int = struct.unpack(">q", struct.pack(">d", number))[0]
    return packed


@pytest.mark.parametrize(
    ("text", "int32", "int64", "double_bits", "truth"),
    RECORDED["readings"],
    ids=[ascii(reading[0])[:30] for reading in RECORDED["readings"]],
)
def test_text_is_read_as_java_reads_it(text, int32, int64, double_bits, truth):
    assert read_or_none(read_int32, text) == int32
    assert read_or_none(read_int64, text) == int64
    assert bits(read_or_none(read_double, text)) == double_bits
    assert read_boolean(text) is truth


@given(st.text())
def test_text_that_is_no_number_is_refused_and_nothing_else_happens(text):
    for read in (read_int32, read_int64, read_double):
        read_or_none(read, text)


@given(st.integers())
def test_an_integer_is_read_when_it_fits(number):
    assert read_or_none(read_int32, str(number)) == (number if -(2**31) <= number < 2**31 else None)
    assert read_or_none(read_int64, str(number)) == (number if -(2**63) <= number < 2**63 else None)


@given(st.floats(allow_nan=False))
def test_a_double_is_read_back_to_the_bit(number):
    text = repr(number).replace("inf", "Infinity")

    assert bits(read_double(text)) == bits(number)
    assert bits(read_double(f" {text}\n")) == bits(number)


def test_the_order_of_doubles_is_total():
    ascending = [-math.inf, -1.0, -5e-324, -0.0, 0.0, 5e-324, 1.0, math.inf, math.nan]

    assert all(order_doubles(low, high) < 0 for low, high in pairwise(ascending))
    assert all(order_doubles(high, low) > 0 for low, high in pairwise(ascending))
    assert all(order_doubles(number, number) == 0 for number in ascending)


@given(st.floats(), st.floats())
def test_the_order_of_doubles_is_that_of_their_bits(left, right):
    # Among doubles of one sign, bits taken as integers are in order; negative ones are mirrored.
    def rank(number):
        pattern = bits(number)
        assert pattern is not None
        return pattern if pattern >= 0 else -(2**63) - pattern - 1

    expected = (rank(left) > rank(right)) - (rank(left) < rank(right))
    actual = order_doubles(left, right)

    assert (actual > 0) - (actual < 0) == expected


def test_a_value_that_cannot_be_read_is_named_in_the_error():
    with pytest.raises(IncomparableValues, match=r"the value '3\.5' is not a 32-bit integer"):
        read_int32("3.5")


@pytest.mark.parametrize(
    "text",
    [
        "9" * 30_000 + "x",
        "9" * 15_000 + "." + "9" * 15_000 + "x",
        "." + "9" * 30_000 + "x",
        "1e" + "9" * 30_000 + "x",
        "0x" + "f" * 30_000 + "x",
        "0x" + "f" * 15_000 + "." + "f" * 15_000 + "x",
        " " * 30_000 + "x",
    ],
    ids=lambda text: f"{text[:4]!r}",
)
def test_a_long_text_that_is_no_number_is_refused_in_one_pass(text):
    """A broker has one loop, and a property may have 32 KiB."""
    began = time.process_time()
    for _ in range(2):
        with pytest.raises(IncomparableValues):
            read_double(text)

    # A pass takes less than a millisecond, a search for every way to divide the text many seconds.
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize("text", ["9" * 30_000, "." + "0" * 30_000 + "1", "0x1p" + "9" * 30_000])
def test_a_long_number_is_read_as_a_double(text):
    assert read_double(text) in (math.inf, 0.0)
