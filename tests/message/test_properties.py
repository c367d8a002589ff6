"""Property strings: read as every peer reads them, and changed without being taken apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.message.properties import (
    append_property,
    decode_properties,
    encode_properties,
    property_value,
    remove_properties,
    replace_property,
)
from orbitmq.message.record import PropertiesRefused
from tests.support.message import any_properties, names, values

maps = st.dictionaries(names, values, max_size=6)


def java_reading(text: str) -> dict[str, str]:
    """Apache's way of reading, by positions, as an independent model."""
    found = {}
    at = 0
    while at < len(text):
        end = text.find("\x02", at)
        end = len(text) if end < 0 else end
        if end - at >= 3:
            separator = text.find("\x01", at)
            if at < separator < end - 1:
                found[text[at:separator]] = text[separator + 1 : end]
        at = end + 1
    return found


def test_the_documented_string_gives_the_documented_properties():
    raw = b"a\x01b\x02c\x01\x02\x01d\x02e\x01f"

    assert decode_properties(raw) == {"a": "b", "e": "f"}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("", {}),
        ("a\x01b", {"a": "b"}),
        ("a\x01b\x01c\x02", {"a": "b\x01c"}),
        ("a\x01b\x02a\x01c\x02", {"a": "c"}),
        ("a\x01b\x02a\x01\x02", {"a": "b"}),
        ("ab\x02\x02\x02", {}),
        ("\x01\x01a\x02", {}),
        ("a\x01\x01\x02", {"a": "\x01"}),
    ],
)
def test_the_rules_of_reading(raw, expected):
    assert decode_properties(raw) == decode_properties(raw.encode()) == expected
    assert property_value(raw, "a") == property_value(raw.encode(), "a") == expected.get("a")


@given(raw=any_properties)
def test_reading_agrees_with_apaches(raw):
    assert decode_properties(raw) == java_reading(raw.decode("utf-8", "replace"))


@given(properties=maps)
def test_what_was_written_is_read_back(properties):
    assert decode_properties(encode_properties(properties)) == properties


def test_entries_without_a_value_are_not_written():
    assert encode_properties({"a": None, "b": "", "c": "d"}) == b"c\x01d\x02"


@pytest.mark.parametrize("bad", [{"": "v"}, {"a\x01": "v"}, {"a\x02": "v"}, {"a": "v\x02"}])
def test_separators_in_the_wrong_place_are_refused(bad):
    with pytest.raises(PropertiesRefused, match="empty or contain"):
        encode_properties(bad)


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(PropertiesRefused, match="UTF-8"):
        encode_properties({"a": "\ud800"})


def test_32767_bytes_are_the_most():
    assert len(encode_properties({"a": "x" * 32764})) == 32767
    with pytest.raises(PropertiesRefused, match="32768 bytes; a message can hold 32767"):
        encode_properties({"a": "x" * 32765})


@given(raw=any_properties, name=names)
def test_one_property_is_found_as_if_all_were_read(raw, name):
    text = raw.decode("utf-8", "replace")

    assert property_value(raw, name) == decode_properties(raw).get(name)
    assert property_value(text, name) == decode_properties(text).get(name)


def test_a_name_that_is_not_utf8_is_found_under_the_name_it_is_read_as():
    raw = b"\xff\x01one\x02a\x01b\x02\xef\xbf\xbd\x01two\x02\xfe\x01three\x02"

    assert decode_properties(raw) == {"\ufffd": "three", "a": "b"}
    assert property_value(raw, "\ufffd") == "three"
    assert decode_properties(remove_properties(raw, ["\ufffd"])) == {"a": "b"}


@pytest.mark.parametrize("name", ["", "a\x01b", "a\x02b"])
def test_names_that_no_property_can_have_are_refused(name):
    with pytest.raises(PropertiesRefused, match="name"):
        property_value(b"a\x01b\x01c\x02", name)


@given(raw=any_properties, name=names, value=values)
def test_an_appended_property_wins_and_the_others_stay(raw, name, value):
    before = decode_properties(raw)

    after = append_property(raw, name, value)

    assert decode_properties(after) == before | {name: value}
    assert after.startswith(raw)
    assert after.endswith(b"\x02")


@given(raw=any_properties, gone=st.lists(names, max_size=3))
def test_removed_properties_are_gone_and_the_others_stay(raw, gone):
    text = raw.decode("utf-8", "replace")
    expected = {n: v for n, v in decode_properties(raw).items() if n not in gone}

    assert decode_properties(remove_properties(raw, gone)) == expected
    assert decode_properties(remove_properties(text, gone)) == expected


@given(raw=any_properties)
def test_removing_what_is_not_there_changes_nothing(raw):
    assert remove_properties(raw, ("no such name",)) == raw


@given(raw=any_properties, name=names, value=values)
def test_a_replaced_property_is_there_once(raw, name, value):
    after = replace_property(raw.decode("utf-8", "replace"), name, value)

    assert decode_properties(after) == decode_properties(raw) | {name: value}
    assert [item for item in after.split("\x02") if item.startswith(f"{name}\x01")] == [
        f"{name}\x01{value}"
    ]


@pytest.mark.parametrize("value", ["", "a\x02b"])
def test_a_value_that_cannot_be_read_back_is_not_appended(value):
    with pytest.raises(PropertiesRefused, match="value"):
        append_property("", "a", value)
