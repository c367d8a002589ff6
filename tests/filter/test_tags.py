"""Tag expressions: how they are read, and both of their checks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.errors import InvalidFilter
from orbitmq.filter.tags import TagFilter, parse_tags
from orbitmq.javahash import java_hash

tag_texts = st.text(st.characters(exclude_characters="|"), min_size=1).filter(
    lambda tag: tag.strip("".join(map(chr, range(0x21)))) == tag and tag != "*"
)
codes_64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize("expression", [None, "", "*"])
def test_no_text_an_empty_one_and_a_star_match_everything(expression):
    everything = parse_tags(expression)

    assert everything.matches_all
    assert everything.accepts_code(0)
    assert everything.accepts_code(java_hash("TagA"))
    assert everything.accepts_tag("TagA")
    assert everything.accepts_tag(None)


@pytest.mark.parametrize(
    ("expression", "tags"),
    [
        ("TagA", {"TagA"}),
        ("TagA||TagB", {"TagA", "TagB"}),
        ("  TagA\t||\nTagB  ", {"TagA", "TagB"}),
        ("||TagA||||TagB||", {"TagA", "TagB"}),
        ("TagA || TagA", {"TagA"}),
        ("Tag A", {"Tag A"}),
        ("TagA|TagB", {"TagA|TagB"}),
        ("|||", {"|"}),
        (" * ", {"*"}),
        ("* || TagA", {"*", "TagA"}),
        ("\u3000TagA\xa0", {"\u3000TagA\xa0"}),
    ],
)
def test_tags_stand_between_separators_without_their_blanks(expression, tags):
    parsed = parse_tags(expression)

    assert parsed.tags == tags
    assert parsed.codes == tuple(sorted({java_hash(tag) for tag in tags}))
    assert not parsed.matches_all


@pytest.mark.parametrize("expression", ["||", "||||", "||||||"])
def test_separators_alone_are_refused_with_the_place_of_the_fault(expression):
    with pytest.raises(InvalidFilter, match="needs a tag between its separators") as refused:
        parse_tags(expression)

    assert refused.value.position == 0
    assert (refused.value.line, refused.value.column) == (1, 1)
    assert str(refused.value).endswith(f"  {expression}\n  ^")


@pytest.mark.parametrize("expression", [" ", "\t\n", "|| ||", " || || "])
def test_blank_tags_alone_match_nothing(expression):
    nothing = parse_tags(expression)

    assert nothing == TagFilter()
    assert not nothing.accepts_code(0)
    assert not nothing.accepts_tag("")
    assert not nothing.mask(np.array([0, 1])).any()


@given(tags=st.sets(tag_texts, min_size=1, max_size=8), other=st.text())
def test_a_tag_passes_both_checks_when_it_is_named(tags, other):
    parsed = parse_tags(" || ".join(sorted(tags)))

    assert all(parsed.accepts_code(java_hash(tag)) and parsed.accepts_tag(tag) for tag in tags)
    assert parsed.accepts_tag(other) == (other in tags)


def test_a_tag_with_the_same_hash_passes_the_first_check_and_fails_the_second():
    assert java_hash("AaAa") == java_hash("BBBB")
    parsed = parse_tags("AaAa")

    assert parsed.accepts_code(java_hash("BBBB"))
    assert not parsed.accepts_tag("BBBB")


def test_a_message_without_a_tag_matches_no_list():
    parsed = parse_tags("TagA || TagB")

    assert not parsed.accepts_code(0)
    assert not parsed.accepts_tag(None)


@given(code=codes_64)
def test_only_the_low_32_bits_of_a_code_count(code):
    low = code & 0xFFFFFFFF
    signed = low - (1 << 32) if low >> 31 else low
    wanted = TagFilter(codes=(signed,))

    assert wanted.accepts_code(code)
    assert not wanted.accepts_code(code ^ 1)
    assert wanted.accepts_code(code ^ 1 << 40)


@given(
    codes=st.sets(st.integers(-(2**31), 2**31 - 1), max_size=40),
    others=st.lists(codes_64, max_size=60),
    order=st.sampled_from(["<i8", ">i8"]),
)
def test_a_mask_says_of_each_entry_what_the_single_check_says(codes, others, order):
    wanted = TagFilter(codes=tuple(sorted(codes)))
    entries = [*others, *codes, *(code - (7 << 32) for code in codes)]

    mask = wanted.mask(np.array(entries, dtype=order))

    assert mask.tolist() == [wanted.accepts_code(code) for code in entries]


def test_a_mask_reads_a_column_of_packed_entries_in_place():
    entry = np.dtype([("position", ">i8"), ("size", ">i4"), ("tag_code", ">i8")])
    entries = np.zeros(3, dtype=entry)
    entries["tag_code"] = [java_hash("TagA"), java_hash("TagB"), 0]

    assert parse_tags("TagB").mask(entries["tag_code"]).tolist() == [False, True, False]
    assert parse_tags("*").mask(entries["tag_code"]).tolist() == [True, True, True]
