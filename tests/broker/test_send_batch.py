"""Batch sends over a socket."""

from __future__ import annotations

from typing import Any

import pytest

from orbitmq.broker.settings import SendSettings
from orbitmq.message.properties import encode_properties
from orbitmq.message.stored import encode_batch
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import SendMessageResponse
from tests.support.broker import RawClient, messages_in

THREE = [(b"one", 1, b""), (b"two", 2, encode_properties({"TAGS": "b"})), (b"three", 3, b"")]


@pytest.mark.parametrize(
    "code", [RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE]
)
async def test_a_batch_is_stored_as_single_messages_side_by_side(client, code):
    await client.stored("orders", b"before", queue_id=1)

    answer = await client.send(
        "orders",
        encode_batch(THREE),
        queue_id=1,
        code=code,
        batch=True,
        properties={"UNIQ_KEY": "BATCH1"},
        reconsume_times=2,
    )

    place = answer.header(SendMessageResponse)
    messages = messages_in(await client.pull("orders", 1, 1))
    assert answer.code == ResponseCode.SUCCESS
    assert (place.queue_id, place.queue_offset, place.transaction_id) == (1, 1, "BATCH1")
    assert [bytes(message.body) for message in messages] == [b"one", b"two", b"three"]
    assert [message.queue_offset for message in messages] == [1, 2, 3]
    assert [message.flag for message in messages] == [1, 2, 3]
    assert [message.tags for message in messages] == [None, "b", None]
    assert {message.reconsume_times for message in messages} == {2}
    assert place.msg_id.split(",") == [message.offset_id for message in messages]


async def test_the_elements_of_a_batch_keep_their_own_properties_and_get_no_others(client):
    await client.send("orders", encode_batch(THREE), batch=True, properties={"UNIQ_KEY": "B"})

    messages = messages_in(await client.pull("orders"))

    assert [dict(message.properties) for message in messages] == [{}, {"TAGS": "b"}, {}]


@pytest.mark.parametrize("text", ["true", "1", "TRUE"])
async def test_a_batch_is_told_by_its_field_whatever_its_client_writes_there(client, text):
    """C++ clients send `1`, which Apache's broker does not understand."""
    answer = await _lettered(client, encode_batch(THREE), m=text)

    assert answer.code == ResponseCode.SUCCESS
    assert await client.max_offset("orders") == 3


@pytest.mark.parametrize("text", ["false", "0", None])
async def test_code_320_alone_makes_no_batch(client, text):
    fields = {} if text is None else {"m": text}

    answer = await _lettered(client, encode_batch(THREE), **fields)

    assert answer.code == ResponseCode.SUCCESS
    assert await client.max_offset("orders") == 1


async def _lettered(client: RawClient, body: bytes, **fields: str) -> Any:
    letters = {"a": "makers", "b": "orders", "c": "TBW102", "d": "4", "e": "0"}
    letters |= {"f": "0", "g": "1700000000000", "h": "0"}
    return await client.connection.request(
        RequestCode.SEND_BATCH_MESSAGE, body=body, extra=letters | fields
    )


async def test_a_batch_without_an_id_is_answered_without_one(client):
    place = await client.stored("orders", encode_batch(THREE), batch=True)

    assert place.transaction_id is None


@pytest.mark.parametrize(
    ("topic", "body", "code", "remark"),
    [
        (
            "%RETRY%billing",
            encode_batch(THREE),
            ResponseCode.MESSAGE_ILLEGAL,
            "retry group billing",
        ),
        ("%DLQ%" + "g" * 123, encode_batch(THREE), ResponseCode.MESSAGE_ILLEGAL, "too long 128"),
        ("orders", b"no batch", ResponseCode.MESSAGE_ILLEGAL, "no batch element at byte 0"),
        ("orders", encode_batch(THREE)[:-1], ResponseCode.MESSAGE_ILLEGAL, "no batch element"),
        ("orders", b"", ResponseCode.SYSTEM_ERROR, "without a body"),
        ("no topic", encode_batch(THREE), ResponseCode.INVALID_PARAMETER, "illegal characters"),
    ],
)
async def test_a_batch_that_cannot_be_stored_is_refused_as_a_whole(
    broker, client, topic, body, code, remark
):
    answer = await client.send(topic, body, batch=True)

    assert answer.code == code
    assert remark in (answer.remark or "")
    assert broker.parts.store.statistics().log_end == 0


async def test_a_batch_may_be_as_large_as_a_message(start_broker, open_client):
    body = encode_batch([(b"x" * 1000, 0, b"")] * 10)
    client = await open_client(await start_broker(send=SendSettings(max_message_size=len(body))))

    taken = await client.send("orders", body, batch=True)
    refused = await client.send("orders", body + encode_batch([(b"", 0, b"")]), batch=True)

    assert taken.code == ResponseCode.SUCCESS
    assert refused.code == ResponseCode.MESSAGE_ILLEGAL
