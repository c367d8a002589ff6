"""Messages as consumers get them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from rich.pretty import pretty_repr

from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.errors import BodyUnreadable
from orbitmq.message.stored import StoredMessage

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


def test_a_message_without_words_about_it_has_none():
    message = ReceivedMessage(_stored(), QUEUE)

    assert (message.tags, message.keys, message.unique_id, message.group) == (None, (), None, None)
    assert message.msg_id == message.offset_id == message.origin_id
    assert message.transaction_id is None


def test_a_retried_message_shows_the_topic_that_it_was_sent_to():
    stored = _stored(
        {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "FF"},
        topic="%RETRY%billing",
        reconsume_times=2,
    )

    message = ReceivedMessage(stored, Queue("%RETRY%billing", "broker-a", 0), "billing")

    assert message.topic == "orders"
    assert message.queue.topic == "%RETRY%billing"
    assert (message.reconsume_times, message.attempt, message.origin_id) == (2, 3, "FF")


def test_an_ordinary_message_is_not_renamed_by_a_property():
    # A dead letter keeps the property of its retries; it is in the dead-letter topic all the same.
    dead = _stored({"RETRY_TOPIC": "orders"}, topic="%DLQ%billing")

    assert ReceivedMessage(dead, QUEUE).topic == "%DLQ%billing"


@pytest.mark.parametrize(
    ("topic", "properties"),
    [("shop%orders", {}), ("%RETRY%shop%billing", {"RETRY_TOPIC": "shop%orders"})],
)
def test_the_namespace_is_not_shown(topic, properties):
    message = ReceivedMessage(_stored(properties, topic=topic), QUEUE, namespace="shop")

    assert message.topic == "orders"


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


def test_nothing_of_a_message_can_be_changed():
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


def test_a_message_travels_between_processes():
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


def test_the_body_is_not_encoded_with_the_message():
    message = ReceivedMessage(_stored({"TAGS": "paid"}, stored_body=b"secret"), QUEUE)
    assert message.properties

    with pytest.raises(TypeError, match="WholeMessage"):
        msgspec.json.encode(message)
    with pytest.raises(TypeError, match="not encoded as a whole"):
        msgspec.json.encode({"message": message}, enc_hook=repr)


def test_a_message_is_made_and_matched_by_public_names():
    message = ReceivedMessage(
        stored=_stored(reconsume_times=2),
        queue=QUEUE,
        group="billing",
        reconsume_times=5,
        namespace="shop",
    )

    match message:
        case ReceivedMessage(stored, queue, "billing", 5, "shop"):
            assert (stored, queue) == (message.stored, QUEUE)
        case _:
            pytest.fail("it is not matched by position")
    match ReceivedMessage(_stored(reconsume_times=2), QUEUE):
        case ReceivedMessage(reconsume_times=2, group=None, tags=None):
            pass
        case _:
            pytest.fail("it is not matched by name")
    assert not any(name.startswith("_") for name in ReceivedMessage.__match_args__)
    assert msgspec.structs.replace(message, reconsume_times=6).attempt == 7
