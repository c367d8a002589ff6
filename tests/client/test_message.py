"""Messages as applications make them, and as consumers get them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.pretty import pretty_repr

from orbitmq.client.message import Message, ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.errors import BodyUnreadable, MessageRefused
from orbitmq.message.properties import RESERVED, decode_properties, encode_properties
from orbitmq.message.stored import StoredMessage

texts = st.text(
    st.characters(blacklist_characters="\x01\x02", blacklist_categories=["Cs"]), min_size=1
).filter(str.strip)
names = texts.filter(lambda name: name not in RESERVED)
words = texts.map(lambda text: "".join(text.split())).filter(bool)


def test_what_the_message_says_about_itself_travels_as_properties():
    message = Message(
        "orders",
        b"x",
        tags="paid",
        keys=" o-1  o-2 ",
        ordering_key="customer-7",
        properties={"country": "SE"},
        wait_stored=False,
    )

    assert message.all_properties() == {
        "country": "SE",
        "TAGS": "paid",
        "KEYS": "o-1 o-2",
        "__SHARDINGKEY": "customer-7",
        "WAIT": "false",
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"delay_level": 20}, {"DELAY": "20"}),  # for brokers that have more levels than usual
        ({"delay": 1.5}, {"TIMER_DELAY_MS": "1500"}),
        ({"delay": timedelta(minutes=2)}, {"TIMER_DELAY_MS": "120000"}),
        ({"deliver_at": 1_700_000_000.25}, {"TIMER_DELIVER_MS": "1700000000250"}),
        ({"deliver_at": datetime(2030, 1, 1, tzinfo=UTC)}, {"TIMER_DELIVER_MS": "1893456000000"}),
    ],
)
def test_each_kind_of_delay_has_its_property(fields, expected):
    assert Message("orders", b"x", **fields).all_properties() == expected


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"topic": ""}, "message.topic"),
        ({"topic": "with space"}, "message.topic"),
        ({"topic": "t" * 128}, "message.topic"),
        ({"topic": None}, "message.topic"),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, "SCHEDULE_TOPIC_XXXX"),
        ({"topic": "rmq_sys_wheel_timer"}, "belongs to the brokers"),
        ({"keys": "o-1 o\x01-2"}, "message.keys"),
        ({"keys": ["o-1", "o\x02-2"]}, "message.keys"),
        ({"body": b""}, "message.body"),
        ({"body": ""}, "message.body"),
        ({"body": None}, "message.body"),
        ({"body": 7}, "message.body"),
        ({"body": "\ud800"}, "message.body"),
        ({"tags": " "}, "message.tags"),
        ({"tags": "a\x01b"}, "message.tags"),
        ({"tags": 5}, "message.tags"),
        ({"tags": "paid || sent"}, "a message has one tag"),
        ({"tags": "\ud800"}, "message.tags"),
        ({"keys": ["a b"]}, "message.keys"),
        ({"keys": [""]}, "message.keys"),
        ({"keys": 5}, "message.keys"),
        ({"keys": [5]}, "message.keys"),
        ({"properties": {"TAGS": "a"}}, "message.properties['TAGS']"),
        ({"properties": {"a": ""}}, "message.properties['a']"),
        ({"properties": {"": "a"}}, "message.properties['']"),
        ({"properties": {"a\x02": "a"}}, "message.properties"),
        ({"properties": {"a": 1}}, "message.properties['a']"),
        ({"properties": 5}, "message.properties"),
        ({"flag": 2**31}, "message.flag"),
        ({"flag": True}, "message.flag"),
        ({"delay_level": -1}, "message.delay_level"),
        ({"delay": 0}, "message.delay"),
        ({"delay": float("nan")}, "message.delay"),
        ({"delay": "soon"}, "message.delay"),
        ({"deliver_at": -1}, "message.deliver_at"),
        ({"deliver_at": float("inf")}, "message.deliver_at"),
        ({"ordering_key": ""}, "message.ordering_key"),
        ({"delay": 1, "delay_level": 1}, "message.delay"),
        ({"delay": 1, "deliver_at": 1_700_000_000}, "message.deliver_at"),
    ],
)
def test_a_message_that_cannot_be_sent_is_refused_by_the_name_of_its_field(fields, named):
    values: dict[str, Any] = {"topic": "orders", "body": b"x"} | fields
    topic, body = values.pop("topic"), values.pop("body")

    with pytest.raises(MessageRefused) as refused:
        Message(topic, body, **values)

    assert named in str(refused.value)
    assert f"message.{refused.value.field}" in str(refused.value)


@pytest.mark.parametrize("topic", ["BenchmarkTest", "RMQ_SYS_TRACE_TOPIC", "%RETRY%billing"])
def test_topics_that_clients_send_to_for_the_system_are_open(topic):
    assert Message(topic, b"x").topic == topic


def test_nothing_about_a_message_changes_after_it_was_made():
    properties = {"country": "SE"}
    body = bytearray(b"paid")
    message = Message("orders", body, properties=properties)

    properties["country"] = "NO"
    body[:] = b"lost"

    assert (message.body, message.properties["country"]) == (b"paid", "SE")
    with pytest.raises(dataclasses.FrozenInstanceError):
        message.topic = "other"  # type: ignore[misc]  # that is the point
    with pytest.raises(TypeError):
        message.properties["country"] = "NO"  # type: ignore[index]


def test_a_changed_copy_is_checked_like_a_new_message():
    message = Message("orders", b"x", tags="paid", delay=2)

    assert dataclasses.replace(message, body=b"y") == Message("orders", b"y", tags="paid", delay=2)
    with pytest.raises(MessageRefused, match=r"message\.tags"):
        dataclasses.replace(message, tags="")


@given(
    body=st.binary(min_size=1),
    tags=st.none() | texts,
    keys=st.lists(words, max_size=3),
    properties=st.dictionaries(names, texts, max_size=3),
    flag=st.integers(-(2**31), 2**31 - 1),
)
def test_whatever_was_accepted_is_read_the_same_from_the_wire(body, tags, keys, properties, flag):
    message = Message("orders", body, tags=tags, keys=keys, properties=properties, flag=flag)

    read = decode_properties(encode_properties(message.all_properties()))

    assert read.pop("TAGS", None) == tags
    assert read.pop("KEYS", "").split() == keys
    assert read == properties


@given(properties=st.dictionaries(names, texts, max_size=3), delay=st.none() | st.floats(1, 100))
def test_a_message_travels_between_processes(properties, delay):
    message = Message("orders", b"x", properties=properties, delay=delay, keys="a b")

    again = pickle.loads(pickle.dumps(message))  # noqa: S301  # our own bytes

    assert again == message == copy.deepcopy(message)
    assert hash(again) == hash(message)


# ---- received messages


QUEUE = Queue("orders", "broker-a", 1)


def _stored(
    properties: Mapping[str, str] | None = None, *, topic: str = "orders", **fields: Any
) -> StoredMessage:
    values: dict[str, Any] = {"stored_body": b"paid", "queue_id": 1, "queue_offset": 42}
    return StoredMessage.build(topic=topic, properties=properties or {}, **(values | fields))


def test_a_message_tells_what_its_producer_said():
    stored = _stored(
        {"TAGS": "paid", "KEYS": "o-1 o-2", "UNIQ_KEY": "A1", "country": "SE"},
        flag=7,
        born_ms=1_700_000_000_123,
        store_ms=1_700_000_001_000,
    )

    message = ReceivedMessage(stored, QUEUE, "billing")

    assert (message.topic, message.body, message.text()) == ("orders", b"paid", "paid")
    assert (message.tags, message.keys, message.flag) == ("paid", ("o-1", "o-2"), 7)
    assert (message.msg_id, message.unique_id) == ("A1", "A1")
    assert (message.get("country"), message.get("size"), message.get("size", 3)) == ("SE", None, 3)
    assert (message.born_at, message.stored_at) == (1_700_000_000.123, 1_700_000_001.0)
    assert (message.queue, message.queue_offset, message.group) == (QUEUE, 42, "billing")
    assert (message.size, message.stored) == (stored.size, stored)


@pytest.mark.parametrize(
    ("topic", "properties", "namespace", "shown"),
    [
        ("%RETRY%billing", {"RETRY_TOPIC": "orders"}, None, "orders"),
        # A dead letter keeps the property of its retries.
        ("%DLQ%billing", {"RETRY_TOPIC": "orders"}, None, "%DLQ%billing"),
        ("shop%orders", {}, "shop", "orders"),
        ("%RETRY%shop%billing", {"RETRY_TOPIC": "shop%orders"}, "shop", "orders"),
    ],
)
def test_a_message_shows_the_topic_that_it_was_sent_to(topic, properties, namespace, shown):
    stored = _stored(properties | {"ORIGIN_MESSAGE_ID": "FF"}, topic=topic, reconsume_times=2)

    message = ReceivedMessage(stored, Queue(topic, "broker-a", 0), "billing", namespace=namespace)

    assert (message.topic, message.queue.topic) == (shown, topic)
    assert (message.reconsume_times, message.attempt, message.origin_id) == (2, 3, "FF")


def test_a_message_of_a_transaction_has_its_id():
    with_property = _stored({"__transactionId__": "T1", "UNIQ_KEY": "A1"})
    committed = _stored({"UNIQ_KEY": "A1"}, prepared_offset=512)

    assert ReceivedMessage(with_property, QUEUE).transaction_id == "T1"
    assert ReceivedMessage(committed, QUEUE).transaction_id == "A1"


def test_orderly_retries_are_counted_without_touching_the_record():
    first = ReceivedMessage(_stored(), QUEUE, "billing", namespace="shop")

    again = first.with_reconsume_times(3)

    assert (again.reconsume_times, again.attempt, first.reconsume_times) == (3, 4, 0)
    assert (again.stored, again.queue, again.group) == (first.stored, QUEUE, "billing")
    assert again != first


class Order(msgspec.Struct):
    number: int


def test_a_json_body_is_read_and_checked():
    message = ReceivedMessage(_stored(stored_body=b'{"number": 7}'), QUEUE)

    assert message.json() == {"number": 7}
    assert message.json(Order).number == 7


@pytest.mark.parametrize("kind", [Any, Order])
def test_a_body_that_is_not_what_it_is_read_as_names_the_message(kind):
    message = ReceivedMessage(_stored({"UNIQ_KEY": "A1"}, stored_body=b'\xff{"number"'), QUEUE)

    with pytest.raises(BodyUnreadable, match="message A1") as json_error:
        message.json(kind)
    with pytest.raises(BodyUnreadable, match="utf-8"):
        message.text()

    again = pickle.loads(pickle.dumps(json_error.value))  # noqa: S301  # our own bytes
    assert (again.queue, again.queue_offset, str(again)) == (QUEUE, 42, str(json_error.value))


def test_nothing_of_a_received_message_can_be_changed():
    message = ReceivedMessage(_stored({"country": "SE"}), QUEUE)

    for name in ("queue", "stored", "group", "body", "other"):
        with pytest.raises(AttributeError):
            setattr(message, name, None)
    with pytest.raises(TypeError):
        message.properties["country"] = "NO"  # type: ignore[index]  # that is the point


def test_messages_are_equal_when_they_are_the_same_delivery_of_the_same_record():
    message = ReceivedMessage(_stored(), QUEUE, "billing")

    assert message == ReceivedMessage(_stored(), QUEUE, "billing")
    assert hash(message) == hash(ReceivedMessage(_stored(), QUEUE, "billing"))
    assert message != ReceivedMessage(_stored(), Queue("orders", "broker-b", 1))
    assert message != ReceivedMessage(_stored(queue_offset=43), QUEUE)
    assert message != "paid"


def test_a_received_message_travels_between_processes():
    message = ReceivedMessage(
        _stored({"RETRY_TOPIC": "shop%orders"}, topic="%RETRY%shop%g"), QUEUE, "g", 5, "shop"
    )

    again = pickle.loads(pickle.dumps(message))  # noqa: S301  # our own bytes

    assert again == message
    assert (again.topic, again.reconsume_times, again.group) == ("orders", 5, "g")


def test_the_body_is_not_shown():
    message = ReceivedMessage(_stored(stored_body=b"secret"), QUEUE)

    for shown in (repr(message), pretty_repr(message), str(message.__rich_repr__())):
        assert "secret" not in shown
        assert "orders@broker-a:1" in shown
    assert "secret" not in repr(Message("orders", b"secret"))


def test_the_body_is_not_encoded_with_the_message():
    message = ReceivedMessage(_stored({"TAGS": "paid"}, stored_body=b"secret"), QUEUE)
    assert message.properties

    with pytest.raises(TypeError, match="WholeMessage"):
        msgspec.json.encode(message)
    with pytest.raises(TypeError, match="not encoded as a whole"):
        msgspec.json.encode({"message": message}, enc_hook=repr)
