"""Request and reply: the reply is pushed to who asked, and stored."""

from __future__ import annotations

from typing import Any

import pytest

from orbitmq.broker.settings import ReplySettings
from orbitmq.clock import milliseconds
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import PushReplyRequest, SendMessageResponse
from tests.support.delivery import AskedProducer, hand_broker

REPLIES = "DefaultCluster_REPLY_TOPIC"
PROPERTIES = {"CORRELATION_ID": "c1", "REPLY_TO_CLIENT": "asker@1", "MSG_TYPE": "reply"}


@pytest.fixture
async def served(tmp_path):
    async with hand_broker(tmp_path) as served:
        yield served


@pytest.fixture
async def asker(served):
    asker = await AskedProducer.join(served[0].broker, "asker@1")
    yield asker
    await asker.close()


@pytest.mark.parametrize(
    "code", [RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2]
)
async def test_a_reply_is_pushed_to_the_client_that_asked_and_stored(served, asker, code):
    broker, client = served

    answer = await client.send(REPLIES, b"42", properties=PROPERTIES, code=code, flag=5)
    pushed = asker.replies[0]
    header = pushed.header(PushReplyRequest)
    stored = broker.messages(REPLIES)[0]

    assert answer.code == ResponseCode.SUCCESS
    assert bytes(pushed.body) == stored.body == b"42"
    assert header.topic == REPLIES
    assert header.flag == 5
    assert "CORRELATION_ID\x01c1" in (header.properties or "")
    assert "PUSH_REPLY_TIME\x01" in (header.properties or "")
    assert header.born_host == str(client.connection.local)
    assert header.store_host == str(broker.broker.address)
    assert header.store_timestamp == milliseconds(broker.clock.now())
    assert answer.header(SendMessageResponse).msg_id == stored.offset_id
    assert answer.ext_fields["MSG_REGION"] == "DefaultRegion"
    assert stored.properties == PROPERTIES


async def test_a_reply_need_not_be_stored(tmp_path):
    settings = ReplySettings(store=False)
    async with hand_broker(tmp_path, replies=settings) as (broker, client):
        asker = await AskedProducer.join(broker.broker, "asker@1")

        answer = await client.send(
            REPLIES, b"42", properties=PROPERTIES, code=RequestCode.SEND_REPLY_MESSAGE_V2
        )
        await asker.close()

        header = answer.header(SendMessageResponse)
        assert answer.code == ResponseCode.SUCCESS
        assert (header.msg_id, header.queue_offset) == ("0", 0)
        assert broker.messages(REPLIES) == []


@pytest.mark.parametrize(
    ("properties", "text"), [({"CORRELATION_ID": "c1"}, "REPLY_TO_CLIENT"), (PROPERTIES, "asker@1")]
)
async def test_a_reply_that_reaches_nobody_is_stored_and_says_so(served, properties, text):
    broker, client = served

    answer = await client.send(
        REPLIES, b"42", properties=properties, code=RequestCode.SEND_REPLY_MESSAGE_V2
    )

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert text in (answer.remark or "")
    assert broker.bodies(REPLIES) == [b"42"]


async def test_a_client_that_refuses_the_reply_is_a_failure(served, asker):
    _, client = served
    asker.reply_code = 1

    answer = await client.send(
        REPLIES, b"42", properties=PROPERTIES, code=RequestCode.SEND_REPLY_MESSAGE_V2
    )

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "as the test says" in (answer.remark or "")


async def test_a_client_that_does_not_answer_is_waited_for_only_so_long(tmp_path):
    settings = ReplySettings(push_timeout=0.05)
    async with hand_broker(tmp_path, replies=settings) as (broker, client):
        asker = await AskedProducer.join(broker.broker, "asker@1")
        asker.reply_code = None

        answer = await client.send(
            REPLIES, b"42", properties=PROPERTIES, code=RequestCode.SEND_REPLY_MESSAGE_V2
        )
        await asker.close()

        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert len(asker.replies) == 1
        assert broker.bodies(REPLIES) == [b"42"]


@pytest.mark.parametrize(
    ("fields", "changes", "code"),
    [
        ({"topic": "bad topic"}, {}, ResponseCode.INVALID_PARAMETER),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, {}, ResponseCode.NO_PERMISSION),
        ({"queue_id": 9}, {}, ResponseCode.INVALID_PARAMETER),
        ({"topic": "unknown"}, {"auto_create_topic": False}, ResponseCode.TOPIC_NOT_EXIST),
        ({}, {"broker_id": 1}, ResponseCode.NO_PERMISSION),
    ],
)
async def test_the_checks_of_a_send_come_first(tmp_path, fields, changes, code):
    async with hand_broker(tmp_path, **changes) as (broker, client):
        asker = await AskedProducer.join(broker.broker, "asker@1")
        arguments: dict[str, Any] = {"topic": REPLIES} | fields

        answer = await client.send(
            body=b"42", properties=PROPERTIES, code=RequestCode.SEND_REPLY_MESSAGE_V2, **arguments
        )
        await asker.close()

        assert answer.code == code
        assert asker.replies == []
