"""Bodies that are values: what arrives, and what is refused before anything is sent."""

from __future__ import annotations

import enum
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
import pytest

from orbitmq.client.message import Message
from orbitmq.client.producer.core import Compression, SendSettings
from orbitmq.client.producer.producer import AsyncProducer, Producer
from orbitmq.errors import MessageRefused, SettingError
from orbitmq.wire.codes import TransactionState
from tests.support.consumers import consumer_of
from tests.support.consuming import until
from tests.support.remoting import DEADLINE


class Item(pydantic.BaseModel):
    article: str = pydantic.Field(alias="sku")


@dataclass
class Order:
    number: int
    items: list[Item]


class Payment(msgspec.Struct):
    cents: int
    note: str | None = None


class Color(enum.StrEnum):
    RED = "red"


class Strange:
    """Of no known form."""


ORDER = Order(7, [Item(sku="chair")])
ORDER_JSON = b'{"number":7,"items":[{"sku":"chair"}]}'


@pytest.mark.parametrize(
    ("given", "body"),
    [
        (({"cents": 100},), b'{"cents":100}'),
        (([1, "two"],), b'[1,"two"]'),
        ((ORDER,), ORDER_JSON),
        ((Payment(5),), b'{"cents":5,"note":null}'),
        ((Item(sku="chair"),), b'{"sku":"chair"}'),
        (([Item(sku="chair")],), b'[{"sku":"chair"}]'),
        (("text",), b"text"),
        ((Color.RED,), b"red"),
        ((bytearray(b"bytes"),), b"bytes"),
        ((), b'"text"'),
    ],
    ids=repr,
)
async def test_a_value_arrives_as_json_and_bytes_and_texts_as_they_are(
    cluster, producer, given, body
):
    options: dict[str, Any] = {} if given else {"json": "text"}

    await producer.send("orders", *given, **options)
    await (await producer.submit("orders", *given, **options))
    await producer.send_batch([Message("orders", *given, **options)])
    await producer.send_in_transaction(Message("orders", *given, **options), _commit)
    await producer.send_one_way("orders", *given, **options)

    # The end of a transaction and a one-way send are not answered.
    await until(lambda: len(cluster.messages("orders")) == 5)
    assert {each.body for each in cluster.messages("orders")} == {body}


def _commit(message: Message, transaction: str) -> TransactionState:
    return TransactionState.COMMIT


def test_the_blocking_producer_takes_the_same_values(new_blocking_cluster):
    with new_blocking_cluster() as cluster:
        cluster.create_topic("orders", queues=1)
        with Producer("svc", name_server=cluster.name_server) as producer:
            producer.send("orders", {"cents": 1})
            producer.submit("orders", ORDER).result(DEADLINE)
            producer.send_batch([Message("orders", Payment(5))])
            producer.send("orders", json=3)

        bodies = [each.body for each in cluster.messages("orders")]
    assert bodies == [b'{"cents":1}', ORDER_JSON, b'{"cents":5,"note":null}', b"3"]


@pytest.mark.parametrize(
    ("serializer", "load"),
    [
        ("msgpack", msgspec.msgpack.decode),
        ("json", msgspec.json.decode),
        (json, json.loads),
        (pickle, pickle.loads),
        ((repr, eval), eval),
    ],
    ids=["msgpack", "json", "module json", "module pickle", "pair"],
)
async def test_the_serializer_of_a_producer_encodes_what_is_given_to_it(cluster, serializer, load):
    async with AsyncProducer(
        "svc", name_server=cluster.name_server, serializer=serializer
    ) as producer:
        await producer.send("orders", {"cents": 100}, tags="value")
        await producer.send("orders", b"as it is", tags="bytes")
        await producer.send("orders", json={"cents": 100}, tags="json")
        await producer.send("orders", {"cents": 100}, tags="own", serializer="msgpack")

    bodies = {each.tags: each.body for each in cluster.messages("orders")}
    assert load(bodies["value"]) == {"cents": 100}
    assert bodies["bytes"] == b"as it is"
    assert bodies["json"] == b'{"cents":100}'
    assert bodies["own"] == msgspec.msgpack.encode({"cents": 100})


async def test_a_large_value_is_encoded_once_and_compressed(cluster):
    value = {"text": "x" * 300_000}
    settings = SendSettings(compression=Compression.ZLIB)
    async with AsyncProducer("svc", name_server=cluster.name_server, sending=settings) as producer:
        await producer.send("orders", value)

    (message,) = cluster.messages("orders")
    assert msgspec.json.decode(message.body) == value
    assert message.size < 10_000


async def test_a_request_and_its_reply_may_be_values(cluster):
    consumer = consumer_of(cluster, "service")
    async with AsyncProducer("svc", name_server=cluster.name_server) as producer:

        @consumer.on("orders")
        async def answer(request):
            await producer.reply(request, {"doubled": 2 * request.json()["cents"]})

        async with consumer:
            reply = await producer.request("orders", {"cents": 21}, timeout=DEADLINE)

    assert reply.json() == {"doubled": 42}


class Unserializable:
    def dumps(self, value: object) -> Any:
        return 5

    def loads(self, body: bytes) -> object:
        return body


LOOP: list[object] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (5, {}, r"message\.body must be bytes, a text, or .* got int; write json= for a single"),
        (None, {}, r"message\.body is missing"),
        (Strange(), {}, r"body \(Strange\) cannot be encoded with JSON: Strange in it"),
        ({"a": [Strange()]}, {}, r"body \(dict\) cannot be encoded with JSON: Strange in it"),
        (LOOP, {}, "maximum recursion depth"),
        ({"a": "\ud800"}, {}, "surrogates not allowed"),
        ("x", {"json": 5}, "json cannot be given together with body; choose one"),
        ({}, {"serializer": Unserializable()}, "Unserializable: dumps returned int"),
        (Message("orders", b"x"), {}, "is a whole message"),
        (Strange(), {"serializer": json}, "json: Object of type Strange is not JSON serializable"),
    ],
)
async def test_what_cannot_be_encoded_is_refused_in_a_sentence_and_nothing_is_sent(
    cluster, producer, given, options, words
):
    with pytest.raises(MessageRefused, match=words) as refused:
        await producer.send("orders", given, **options)
    with pytest.raises(MessageRefused, match=words):
        await producer.submit("orders", given, **options)
    with pytest.raises(MessageRefused, match=words):
        Message("orders", given, **options)

    assert len(str(refused.value).splitlines()) == 1
    assert cluster.messages("orders") == []


@pytest.mark.parametrize("serializer", ["yaml", object(), (json.dumps,), (json.dumps, 3)])
def test_what_is_no_serializer_is_refused(serializer):
    with pytest.raises(SettingError, match='must be "json", "msgpack", an object with dumps and'):
        Producer(name_server="127.0.0.1:9", serializer=serializer)


def test_pydantic_is_not_imported_by_a_program_that_does_not_use_it():
    program = (
        "import sys; from orbitmq import Message, Producer, Consumer; "
        "Message('orders', {'a': 1}); print('pydantic' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["False"]
