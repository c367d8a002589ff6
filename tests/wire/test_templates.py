"""Requests and answers filled in from templates, compared with those that are encoded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.wire.codes import EncodeError, Language, RequestCode, ResponseCode, WireLimits
from orbitmq.wire.command import (
    AnswerTemplate,
    Command,
    RequestTemplate,
    decode_command,
    encode_command,
)
from orbitmq.wire.frame import FrameReader, frame_head
from orbitmq.wire.headers import PullMessageResponse, SendMessageRequest, SendMessageResponse

SENT = AnswerTemplate(
    SendMessageResponse,
    ("msg_id", "queue_id", "queue_offset", "transaction_id"),
    constant={"region": "100% Default", "trace_on": True},
)
NUMBERED = AnswerTemplate(
    SendMessageResponse,
    ("msg_id", "queue_id", "queue_offset", "transaction_id"),
    forms={"msg_id": "7F000001%016X"},
)
FOUND = AnswerTemplate(
    PullMessageResponse,
    ("suggest_which_broker_id", "next_begin_offset", "min_offset", "max_offset"),
    constant={"topic_sys_flag": 0, "group_sys_flag": 0},
    remark="FOUND",
)
EMPTY = AnswerTemplate(
    PullMessageResponse,
    ("next_begin_offset", "max_offset"),
    constant={"suggest_which_broker_id": 0, "min_offset": 0},
    code=ResponseCode.PULL_NOT_FOUND,
    language=Language.JAVA,
    version=0,
)

int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
ids = st.text("0123456789ABCDEF", min_size=1) | st.text() | st.sampled_from(['"', "\\", "%s", ""])


@given(int32, ids, int32, int64, ids)
def test_a_send_answer_filled_in_is_the_one_encoded(
    opaque, msg_id, queue_id, queue_offset, transaction_id
):
    values = (msg_id, queue_id, queue_offset, transaction_id)

    assert SENT.head(opaque, *values) == encode_command(SENT.command(opaque, *values))


@given(int32, st.integers(0, 2**63 - 1), int32, int64, ids)
def test_a_text_that_is_made_of_a_number_is_given_as_the_number(
    opaque, at, queue_id, queue_offset, transaction_id
):
    values = (at, queue_id, queue_offset, transaction_id)

    command = NUMBERED.command(opaque, *values)

    assert command.header(SendMessageResponse).msg_id == f"7F000001{at:016X}"
    assert NUMBERED.head(opaque, *values) == encode_command(command)


@given(int32, int64, int64, int64, int64, st.binary(max_size=40))
def test_a_pull_answer_filled_in_is_the_one_encoded(opaque, broker, next_offset, low, high, body):
    head = FOUND.head(opaque, broker, next_offset, low, high, body_size=len(body))

    (frame,) = FrameReader().feed(head + body)
    command = decode_command(frame)

    assert (command.opaque, command.remark, command.body) == (opaque, "FOUND", body)
    assert command.header(PullMessageResponse) == PullMessageResponse(
        suggest_which_broker_id=broker,
        next_begin_offset=next_offset,
        min_offset=low,
        max_offset=high,
        topic_sys_flag=0,
        group_sys_flag=0,
    )
    assert head[8:] == encode_command(FOUND.command(opaque, broker, next_offset, low, high))[8:]


def test_an_answer_can_take_the_voice_of_another_peer():
    assert EMPTY.head(7, 5, 9)[8:] == (
        b'{"code":19,"extFields":{"suggestWhichBrokerId":"0","nextBeginOffset":"5","minOffset":"0",'
        b'"maxOffset":"9"},"flag":1,"language":"JAVA","opaque":7,'
        b'"serializeTypeCurrentRPC":"JSON","version":0}'
    )


def test_every_value_of_the_fields_is_a_string_as_cpp_needs_it():
    assert b'"queueId":"3","queueOffset":"4"' in SENT.head(1, "A", 3, 4, "B")


def test_an_answer_beyond_the_largest_frame_is_not_begun():
    with pytest.raises(EncodeError, match="a frame may have 16777216 bytes") as filled_in:
        FOUND.head(1, 0, 0, 0, 0, body_size=16 * 1024 * 1024)
    header = len(FOUND.head(1, 0, 0, 0, 0)) - 8
    with pytest.raises(EncodeError) as encoded:
        frame_head(0, bytes(header), 16 * 1024 * 1024)

    assert str(filled_in.value) == str(encoded.value)


@pytest.mark.parametrize("varying", [("queue_id", "msg_id"), ("nothing",)])
def test_fields_are_named_in_the_order_of_their_declaration(varying):
    with pytest.raises(EncodeError, match="SendMessageResponse"):
        AnswerTemplate(SendMessageResponse, varying)


def test_a_constant_that_looks_like_a_mark_is_refused():
    with pytest.raises(EncodeError, match="looks like a mark"):
        AnswerTemplate(
            SendMessageResponse, ("queue_id", "queue_offset"), constant={"msg_id": "1970352100"}
        )


VARYING = ("queue_id", "sys_flag", "born_timestamp", "flag", "properties")
CODES = st.sampled_from(
    [RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE]
)


def _constant(group: str = "g", topic: str = "orders") -> dict[str, Any]:
    return {
        "producer_group": group,
        "topic": topic,
        "default_topic": "TBW102",
        "default_topic_queue_nums": 4,
        "batch": False,
        "broker_name": "broker-a",
    }


@given(
    code=CODES,
    group=st.text(),
    topic=st.text(),
    values=st.tuples(int32, int32, int64, int32, st.text()),
    opaque=st.integers(0, 2**31 - 1),
    body=st.binary(max_size=100),
)
def test_a_request_filled_in_is_the_one_encoded(code, group, topic, values, opaque, body):
    constant = _constant(group, topic)
    template = RequestTemplate(code, SendMessageRequest, VARYING, constant=constant)

    filled = template.pieces(opaque, *values, body=body)

    header = SendMessageRequest(**constant, **dict(zip(VARYING, values, strict=True)))
    request = Command.request(code, header, opaque=opaque, body=body)
    assert b"".join(filled) == encode_command(request)


@pytest.mark.parametrize(("size", "pieces"), [(0, 1), (1024, 1), (64 * 1024, 2)])
def test_a_small_body_is_one_piece_with_its_head_and_a_large_one_is_not_copied(size, pieces):
    template = RequestTemplate(310, SendMessageRequest, VARYING, constant=_constant())
    body = bytes(size)

    filled = template.pieces(1, 0, 0, 0, 0, "", body=body)

    assert len(filled) == pieces
    assert b"".join(filled).endswith(body)
    assert pieces == 1 or filled[-1] is body


def test_varying_fields_in_another_order_are_refused():
    with pytest.raises(EncodeError, match="order"):
        RequestTemplate(310, SendMessageRequest, VARYING[::-1], constant=_constant())


def test_a_constant_of_a_request_that_looks_like_a_mark_is_refused():
    with pytest.raises(EncodeError, match="mark"):
        RequestTemplate(310, SendMessageRequest, VARYING, constant=_constant(topic="1970352100"))


def test_a_request_above_the_limit_is_refused():
    template = RequestTemplate(
        310, SendMessageRequest, VARYING, constant=_constant(), limits=WireLimits(frame=1000)
    )

    with pytest.raises(EncodeError, match="1000"):
        template.pieces(1, 0, 0, 0, 0, "", body=bytes(1000))
