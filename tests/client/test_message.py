"""Messages as applications make them: checked at once, and the same ever after."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.message import Message
from orbitmq.errors import MessageRefused
from orbitmq.message.properties import RESERVED, decode_properties, encode_properties

texts = st.text(
    st.characters(blacklist_characters="\x01\x02", blacklist_categories=["Cs"]), min_size=1
).filter(str.strip)
names = texts.filter(lambda name: name not in RESERVED)
words = texts.map(lambda text: "".join(text.split())).filter(bool)


def test_a_message_needs_a_topic_and_a_body_only():
    message = Message("orders", "paid")

    assert message.body == b"paid"
    assert message.all_properties() == {}
    assert (message.tags, message.keys, message.flag) == (None, (), 0)


def test_what_the_message_says_about_itself_travels_as_properties():
    message = Message(
        "orders",
        b"x",
        tags="paid",
        keys=["o-1", "o-2"],
        sharding_key="customer-7",
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
        ({"delay_level": 3}, {"DELAY": "3"}),
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
        ({"body": b""}, "message.body"),
        ({"body": ""}, "message.body"),
        ({"body": None}, "message.body"),
        ({"body": 7}, "message.body"),
        ({"body": "\ud800"}, "message.body"),
        ({"tags": " "}, "message.tags"),
        ({"tags": "a\x01b"}, "message.tags"),
        ({"tags": 5}, "message.tags"),
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
        ({"sharding_key": ""}, "message.sharding_key"),
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


@pytest.mark.parametrize("topic", ["TBW102", "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"])
def test_a_topic_of_the_brokers_is_refused_with_its_name_and_the_reason(topic):
    with pytest.raises(MessageRefused, match=f"{topic}.*belongs to the brokers"):
        Message(topic, b"x")


@pytest.mark.parametrize("topic", ["BenchmarkTest", "RMQ_SYS_TRACE_TOPIC", "%RETRY%billing"])
def test_topics_that_clients_send_to_for_the_system_are_open(topic):
    assert Message(topic, b"x").topic == topic


def test_a_level_beyond_the_usual_table_is_for_brokers_that_have_more():
    assert Message("orders", b"x", delay_level=20).all_properties()["DELAY"] == "20"


def test_a_text_of_keys_is_several_keys():
    assert Message("orders", b"x", keys=" o-1  o-2 ").keys == ("o-1", "o-2")


@pytest.mark.parametrize("keys", ["o-1 o\x01-2", ["o-1", "o\x02-2"], ["o-1", "o 2"]])
def test_every_key_is_looked_at(keys):
    with pytest.raises(MessageRefused, match="keys"):
        Message("orders", b"x", keys=keys)


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


def test_the_body_is_not_shown():
    assert "secret" not in repr(Message("orders", b"secret"))


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
