"""Java's string hash, on which tags, index keys and allocation agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.javahash import java_hash


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("A", 65),
        ("TagA", 2598919),
        ("hello world", 1794106052),
        ("订单", 1129459),
        ("polygenelubricants", -(2**31)),
        ("Aa", 2112),
        ("BB", 2112),
        ("😀", 1772899),
    ],
)
def test_known_hashes(text, expected):
    assert java_hash(text) == expected


@given(st.text(st.characters(exclude_categories=()), max_size=64))
def test_it_is_the_polynomial_over_utf_16_units_in_32_bits(text):
    units = memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")

    polynomial = sum(unit * 31 ** (len(units) - 1 - at) for at, unit in enumerate(units))

    assert (java_hash(text) - polynomial) % 2**32 == 0
    assert -(2**31) <= java_hash(text) < 2**31
