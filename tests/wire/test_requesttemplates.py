"""A request from a template is the request that the ordinary encoder writes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.wire.codes import EncodeError, RequestCode, WireLimits
from orbitmq.wire.command import Command, encode_command
from orbitmq.wire.headers import SendMessageRequest
from orbitmq.wire.templates import RequestTemplate

VARYING = ("queue_id", "sys_flag", "born_timestamp", "flag", "properties")
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
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
    values=st.tuples(INT32, INT32, INT64, INT32, st.text()),
    opaque=st.integers(0, 2**31 - 1),
    body=st.binary(max_size=100),
)
def test_it_writes_the_same_bytes(code, group, topic, values, opaque, body):
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


def test_fields_in_another_order_are_refused():
    with pytest.raises(EncodeError, match="order"):
        RequestTemplate(310, SendMessageRequest, VARYING[::-1], constant=_constant())


def test_a_constant_that_looks_like_a_mark_is_refused():
    with pytest.raises(EncodeError, match="mark"):
        RequestTemplate(310, SendMessageRequest, VARYING, constant=_constant(topic="1970352100"))


def test_a_frame_above_the_limit_is_refused():
    template = RequestTemplate(
        310, SendMessageRequest, VARYING, constant=_constant(), limits=WireLimits(frame=1000)
    )

    with pytest.raises(EncodeError, match="1000"):
        template.pieces(1, 0, 0, 0, 0, "", body=bytes(1000))
