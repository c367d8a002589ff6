"""Every declared header, on the wire and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitmq.wire import headers
from orbitmq.wire.codes import HeaderError, RequestCode, Serialization
from orbitmq.wire.command import Command, decode_command, encode_command
from orbitmq.wire.frame import Frame, FrameReader
from tests.support.wire import EXCHANGES, HEADERS, instances

#: A request code whose fields have long names, one whose fields have letters.
LONG, LETTERS = RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2

PULL = {
    "consumerGroup": "g",
    "topic": "T",
    "queueId": "1",
    "queueOffset": "2",
    "maxMsgNums": "32",
    "sysFlag": "6",
    "commitOffset": "0",
    "suspendTimeoutMillis": "15000",
    "subVersion": "0",
}


def request_with(fields: object, code: int = RequestCode.PULL_MESSAGE) -> Command:
    text = json.dumps({"code": code, "opaque": 1, "extFields": fields})
    return decode_command(Frame(0, text.encode()))


@pytest.mark.parametrize("code", [LONG, LETTERS])
@pytest.mark.parametrize("kind", HEADERS, ids=lambda kind: str(kind.__name__))
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_header_comes_back_as_it_was_sent(kind, code, data):
    header = data.draw(instances(kind))

    for serialization in Serialization:
        sent = Command.request(code, header, opaque=1, serialization=serialization)
        (frame,) = FrameReader().feed(encode_command(sent))
        again = decode_command(frame).header(kind)

        assert _values(again) == _values(header)


def _values(header: headers.Header) -> dict[str, object]:
    return {name: getattr(header, name) for name in header.__struct_fields__}


@pytest.mark.parametrize("kind", HEADERS, ids=lambda kind: str(kind.__name__))
def test_no_two_fields_of_a_header_share_a_name(kind):
    for names in (kind.__struct_encode_fields__, headers.lettered(kind).__struct_encode_fields__):
        assert len(set(names)) == len(names)


def test_a_send_has_the_letters_of_the_protocol():
    header = headers.SendMessageRequest(
        producer_group="a",
        topic="b",
        default_topic="c",
        default_topic_queue_nums=4,
        queue_id=5,
        sys_flag=6,
        born_timestamp=7,
        flag=8,
        properties="i",
        reconsume_times=10,
        unit_mode=False,
        max_reconsume_times=12,
        batch=True,
        broker_name="n",
    )

    by_letters = Command.request(LETTERS, header, opaque=1).ext_fields
    by_names = Command.request(LONG, header, opaque=1).ext_fields

    assert dict(by_letters) == {
        "a": "a",
        "b": "b",
        "c": "c",
        "d": "4",
        "e": "5",
        "f": "6",
        "g": "7",
        "h": "8",
        "i": "i",
        "j": "10",
        "k": "false",
        "l": "12",
        "m": "true",
        "n": "n",
    }
    assert by_names["producerGroup"] == "a"
    assert by_names["bname"] == "n"
    assert not by_letters.keys() & by_names.keys()


def test_exactly_the_short_sends_use_letters():
    assert set(headers.LETTERED_CODES) == {310, 320, 325}


@pytest.mark.parametrize(
    ("header", "always_sent"),
    [
        (headers.GetMaxOffsetRequest(topic="T", queue_id=1), {"committed": "true"}),
        (
            headers.ConsumerSendBackRequest(offset=1, group="g", delay_level=0),
            {"unitMode": "false"},
        ),
        (
            headers.ResetOffsetRequest(group="g", topic="T", is_force=True),
            {"queueId": "-1", "isForce": "true", "timestamp": "0"},
        ),
    ],
)
def test_primitive_fields_are_sent_with_their_defaults_and_nulls_are_not(header, always_sent):
    required = {"topic", "group", "offset", "delayLevel"}
    if isinstance(header, headers.GetMaxOffsetRequest):
        required.add("queueId")

    fields = headers.encode_fields(header)

    assert {name: text for name, text in fields.items() if name not in required} == always_sent


@pytest.mark.parametrize("truth", ["1", "true", "TRUE", 1, True])
@pytest.mark.parametrize("lie", ["0", "false", "False", 0, False])
def test_booleans_come_as_words_digits_and_json(truth, lie):
    fields = dict.fromkeys("abcdefgh", "1") | {"m": truth, "k": lie}

    header = request_with(fields, LETTERS).header(headers.SendMessageRequest)

    assert header.batch is True
    assert header.unit_mode is False


def test_fields_are_converted_by_declaration_and_not_by_their_json_type():
    as_cpp = PULL | {"queueId": 1, "sysFlag": 6, "maxMsgNums": 32}
    as_node = {name: int(text) if text.isdigit() else text for name, text in PULL.items()}
    numeric_names = PULL | {"topic": 5, "consumerGroup": 12}

    plain = request_with(PULL).header(headers.PullMessageRequest)

    assert request_with(as_cpp).header(headers.PullMessageRequest) == plain
    assert request_with(as_node).header(headers.PullMessageRequest) == plain
    assert request_with(numeric_names).header(headers.PullMessageRequest).topic == "5"
    assert request_with(numeric_names).header(headers.PullMessageRequest).consumer_group == "12"


def test_a_name_may_be_the_word_null_and_a_null_is_absence():
    header = request_with(PULL | {"topic": "null", "subscription": "null", "expressionType": None})

    pull = header.header(headers.PullMessageRequest)

    assert (pull.topic, pull.subscription, pull.expression_type) == ("null", "null", None)


@pytest.mark.parametrize(
    ("change", "field", "allowed"),
    [
        ({"queueId": "x"}, "queueId", "an integer from -2147483648 to 2147483647"),
        ({"queueId": "2147483648"}, "queueId", "an integer from -2147483648 to 2147483647"),
        ({"queueOffset": str(2**63)}, "queueOffset", f"an integer from -{2**63} to {2**63 - 1}"),
        ({"queueId": "1_0"}, "queueId", "an integer"),
        ({"queueId": "٣"}, "queueId", "an integer"),
        ({"queueId": True}, "queueId", "an integer"),
        ({"queueId": None}, "queueId", "present"),
        ({"queueId": ""}, "queueId", "an integer"),
        ({"topic": None}, "topic", "present"),
        ({"nsd": "maybe"}, "nsd", "true or false (or 1 or 0)"),
    ],
)
def test_a_wrong_field_is_named_together_with_what_is_allowed(change, field, allowed):
    with pytest.raises(HeaderError) as caught:
        request_with(PULL | change).header(headers.PullMessageRequest)

    assert caught.value.header == "PullMessageRequest"
    assert caught.value.field == field
    assert caught.value.allowed.startswith(allowed)
    assert field in str(caught.value)


def test_an_empty_number_is_as_good_as_none_where_none_is_allowed():
    pull = request_with(PULL | {"maxMsgBytes": "", "expressionType": ""}).header(
        headers.PullMessageRequest
    )

    assert (pull.max_msg_bytes, pull.expression_type) == (None, "")


@pytest.mark.parametrize(("text", "number"), [("+5", 5), ("007", 7), ("-0", 0)])
def test_numbers_are_read_as_java_reads_them(text, number):
    assert (
        request_with(PULL | {"queueId": text}).header(headers.PullMessageRequest).queue_id == number
    )


@pytest.mark.parametrize("text", ["UPPER", "upper", "1", 1])
def test_a_boundary_is_known_by_name_in_any_case(text):
    fields = {"topic": "T", "queueId": "1", "timestamp": "5", "boundaryType": text}

    header = request_with(fields).header(headers.SearchOffsetRequest)

    assert header.boundary_type is headers.BoundaryType.UPPER
    assert headers.encode_fields(header)["boundaryType"] == "UPPER"


@given(st.dictionaries(st.sampled_from([*PULL, "nsd", "lo", "x"]), st.text(max_size=6)))
def test_any_map_of_strings_is_a_header_or_a_header_error(fields):
    try:
        named = {headers.decode_fields(headers.PullMessageRequest, fields).topic: "topic"}[
            fields["topic"]
        ]
    except HeaderError as error:
        named = error.field

    assert named in {*PULL, "nsd", "lo"}


def test_every_header_is_in_the_table_of_exchanges():
    used = {kind for exchange in EXCHANGES.values() for kind in exchange}
    bases: set[type[headers.Header]] = {headers.RequestHeader, headers.TopicRequestHeader}

    assert used == set(HEADERS) - bases
