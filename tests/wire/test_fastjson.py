"""The dialect of JSON that Java writes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.wire.codes import WireLimits
from orbitmq.wire.javajson import JsonError, ObjectKey, parse

documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(documents, st.booleans(), st.sampled_from([None, 1]))
def test_standard_json_means_what_it_means_everywhere(document, ascii_only, indent):
    text = json.dumps(document, ensure_ascii=ascii_only, indent=indent)

    assert parse(text + "\n") == document


def test_integer_keys_may_be_bare():
    assert parse('{0:"a",-1:"b","2":"c"}') == {0: "a", -1: "b", "2": "c"}


def test_an_object_may_stand_in_the_place_of_a_key():
    text = '{{"brokerName":"b","queueId":0,"topic":"T"}:5,{"brokerName":"b"}:{1:2}}'

    assert parse(text) == {
        ObjectKey((("brokerName", "b"), ("queueId", 0), ("topic", "T"))): 5,
        ObjectKey((("brokerName", "b"),)): {1: 2},
    }


MQ = {"topic": "T", "queueId": 0}


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ('{"a":{"topic":"T","queueId":0},"b":{"$ref":"$.a"}}', {"a": MQ, "b": MQ}),
        ('{"b":{"$ref":"$.a"},"a":{"topic":"T","queueId":0}}', {"a": MQ, "b": MQ}),
        ('{"l":[[1],{"$ref":"$.l[0]"}]}', {"l": [[1], [1]]}),
        ('{"a":{"x-y":[7]},"b":{"$ref":"$.a.x\\\\-y"}}', {"a": {"x-y": [7]}, "b": [7]}),
        ('{"a":[1],"b":{"$ref":"$.c"},"c":{"$ref":"$.a"}}', {"a": [1], "b": [1], "c": [1]}),
        ('{"a":{"$ref":5}}', {"a": {"$ref": 5}}),
    ],
)
def test_references_lead_to_what_was_written_first(text, meaning):
    assert parse(text) == meaning


def test_two_dots_lead_to_the_object_around():
    parsed: Any = parse('{"name":"root","child":{"parent":{"$ref":".."}}}')

    assert parsed["child"]["parent"] is parsed


@pytest.mark.parametrize(
    "path", ["$.x", "$.a[9]", "$.a.b.c", "@", "a", "$a", "$..a", "$.a[", "$.b", ""]
)
def test_a_reference_that_leads_nowhere_is_refused(path):
    with pytest.raises(JsonError, match="reference"):
        parse(json.dumps({"a": [1], "b": {"$ref": path}}))


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        ("{", 1),
        ("[1,]", 3),
        ("[1 2]", 3),
        ('{"a"}', 4),
        ('{"a":1,}', 7),
        ("{a:1}", 1),
        ("{1.5:1}", 2),
        ('{{"a":[1]}:1}', 1),
        ("{'a':1}", 1),
        ("nul", 0),
        ("01", 1),
        ("-", 0),
        ("1.", 1),
        ('"a', 2),
        ('"a\nb"', 2),
        ('"\\x"', 1),
        ('"\\u12g4"', 1),
        ("1 2", 2),
        ("NaN", 0),
        ("/*c*/1", 0),
        ("9" * 401, 0),
    ],
)
def test_everything_else_is_refused_with_its_position(text, position):
    with pytest.raises(JsonError) as caught:
        parse(text)

    assert caught.value.position == position


def test_depth_and_number_of_values_are_limited():
    limits = WireLimits(body_depth=3, body_values=5)

    assert parse("[[[1]]]", limits) == [[[1]]]
    with pytest.raises(JsonError, match="more than 3 levels"):
        parse("[[[[1]]]]", limits)
    with pytest.raises(JsonError, match="more than 3 levels"):
        parse('{{"a":1}:{{"a":1}:{{"a":1}:1}}}', limits)
    with pytest.raises(JsonError, match="more than 5 values"):
        parse("[1,2,3,4,5]", limits)


@settings(max_examples=400)
@given(st.text(alphabet='{}[]:,"\\$ref.@0123456789-eEtruefalsn \n\x01ü', max_size=40))
def test_any_text_is_a_value_or_a_json_error(text):
    try:
        parse(text)
        position = len(text)
    except JsonError as error:
        position = error.position

    assert 0 <= position <= len(text)
