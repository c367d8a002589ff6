"""Filters on properties as they are stored, without decoding all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.filter.tags import lookup_in

entries = st.text(st.sampled_from("ab\x01é"), max_size=4) | st.builds(
    "{}\x01{}".format, st.sampled_from(["a", "b", "ab"]), st.sampled_from(["", "1", "2", "a\x013"])
)
stored = st.lists(entries, max_size=6).map("\x02".join)


def decoded(raw: str) -> dict[str, str]:
    """The decoder's rule, entry by entry: a name, a value, neither of them empty."""
    found: dict[str, str] = {}
    for entry in raw.split("\x02"):
        name, mark, value = entry.partition("\x01")
        if name and mark and value:
            found[name] = value
    return found


@given(raw=stored, name=st.sampled_from(["a", "b", "ab", "ba", "aa"]))
def test_a_name_is_found_in_bytes_when_the_whole_would_decode_to_it(raw, name):
    assert lookup_in(raw.encode())(name) == decoded(raw).get(name)


@pytest.mark.parametrize("container", [bytes, bytearray, memoryview])
def test_any_bytes_like_object_is_searched(container):
    lookup = lookup_in(container(b"TAGS\x01TagA\x02price\x0110\x02"))

    assert lookup("TAGS") == "TagA"
    assert lookup("price") == "10"
    assert lookup("AGS") is None


def test_a_map_is_asked_directly():
    assert lookup_in({"a": "1"})("a") == "1"
    assert lookup_in({"a": "1"})("b") is None


def test_bytes_that_are_no_text_are_replaced_and_not_raised():
    assert lookup_in(b"a\x01\xff\x02")("a") == "\ufffd"


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b"a\x01first\x02a\x01last\x02", "last"),
        (b"a\x01first\x02a\x01\x02", "first"),
        (b"a\x01\x02", None),
        (b"a\x01unfinished", "unfinished"),
        (b"a\x01with\x01mark\x02", "with\x01mark"),
        (b"", None),
    ],
)
def test_the_last_entry_with_a_value_counts(raw, value):
    assert lookup_in(raw)("a") == value
