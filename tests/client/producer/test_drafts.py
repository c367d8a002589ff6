"""Messages made ready to be sent."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.message import Message
from orbitmq.client.producer.core import Drafting, SendSettings
from orbitmq.errors import MessageRefused, SettingError
from orbitmq.message.ids import UniqueIds
from orbitmq.message.properties import RESERVED, decode_properties
from orbitmq.message.record import COMPRESSED
from orbitmq.message.stored import expand_body

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1).filter(
    lambda text: bool(text.strip()) and text not in RESERVED
)


def _drafting(settings: SendSettings | None = None, namespace: str | None = None) -> Drafting:
    return Drafting(settings or SendSettings(), UniqueIds("127.0.0.1"), namespace)


def test_a_draft_says_all_that_the_message_says():
    message = Message(
        "orders",
        b"body",
        tags="paid",
        keys=["o-1", "c-7"],
        properties={"region": "eu"},
        flag=3,
        sharding_key="c-7",
        wait_stored=False,
    )

    draft = _drafting().draft(message)

    assert (draft.topic, draft.body, draft.flag, draft.sys_flag) == ("orders", b"body", 3, 0)
    assert draft.message is message
    assert decode_properties(draft.properties) == {
        "region": "eu",
        "TAGS": "paid",
        "KEYS": "o-1 c-7",
        "__SHARDINGKEY": "c-7",
        "WAIT": "false",
        "UNIQ_KEY": draft.unique_id,
    }


@given(st.dictionaries(TEXT, TEXT, max_size=5))
def test_every_property_arrives(properties):
    draft = _drafting().draft(Message("orders", b"x", properties=properties))

    found = decode_properties(draft.properties)

    assert found.pop("UNIQ_KEY") == draft.unique_id
    assert found == properties


@pytest.mark.parametrize(
    ("size", "compress_from", "is_compressed"),
    [(4095, 4096, False), (4096, 4096, True), (100_000, 0, False)],
)
def test_large_bodies_are_compressed(size, compress_from, is_compressed):
    drafting = _drafting(SendSettings(compress_from=compress_from))

    draft = drafting.draft(Message("orders", bytes(size)))

    assert bool(draft.sys_flag & COMPRESSED) is is_compressed
    assert expand_body(draft.body, draft.sys_flag) == bytes(size)


def test_a_body_that_does_not_get_smaller_is_left_as_it_is():
    body = os.urandom(10_000)

    draft = _drafting().draft(Message("orders", body))

    assert (draft.body, draft.sys_flag) == (body, 0)


def test_a_body_above_the_limit_is_refused_with_the_limit():
    drafting = _drafting(SendSettings(max_message_size=100))

    with pytest.raises(MessageRefused, match=r"message\.body has 101 bytes and may have 100"):
        drafting.draft(Message("orders", bytes(101)))
    drafting.draft(Message("orders", bytes(100)))


def test_properties_above_the_limit_of_a_record_are_refused():
    _drafting().draft(Message("orders", b"x", properties={"a": "b" * 32_000}))

    with pytest.raises(MessageRefused, match="32255"):
        _drafting().draft(Message("orders", b"x", properties={"a": "中" * 11_000}))


def test_what_is_passed_on_keeps_its_id_its_body_and_its_properties():
    properties = {"UNIQ_KEY": "A", "TAGS": "t", "RETRY_TOPIC": "orders", "RECONSUME_TIME": "2"}

    draft = _drafting().passed_on("other", b"stored", properties, flag=7, sys_flag=0x301 | 0x8)

    assert (draft.topic, draft.body, draft.flag, draft.sys_flag) == ("other", b"stored", 7, 0x301)
    assert draft.unique_id == "A"
    assert decode_properties(draft.properties) == properties
    assert (draft.reconsume_times, draft.max_reconsume_times) == (0, None)


def test_to_a_retry_topic_the_attempts_go_as_fields():
    properties = {"UNIQ_KEY": "A", "RECONSUME_TIME": "2", "MAX_RECONSUME_TIMES": "16"}

    draft = _drafting().passed_on("%RETRY%billing", b"x", properties)

    assert (draft.reconsume_times, draft.max_reconsume_times) == (2, 16)
    assert decode_properties(draft.properties) == {"UNIQ_KEY": "A"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("timeout", 0),
        ("retries", -1),
        ("attempt_timeout", 0),
        ("retry_pause", -0.1),
        ("max_message_size", 0),
        ("compress_from", -1),
        ("compression", 5),
        ("compression_level", 10),
        ("max_in_flight", 0),
        ("max_in_flight_bytes", 0),
        ("auto_create_queues", 0),
        ("check_workers", 0),
    ],
)
def test_a_wrong_setting_is_named(setting, value):
    with pytest.raises(SettingError, match=rf"sending\.{setting} must be .*{value}"):
        SendSettings(**{setting: value})  # wrong by intent
