"""Messages made ready to be sent."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.message import Message
from orbitmq.client.producer.batch import Element, elements, frames
from orbitmq.client.producer.core import Drafting, SendSettings
from orbitmq.client.routes import Queue
from orbitmq.errors import MessageRefused, SettingError
from orbitmq.message.ids import UniqueIds
from orbitmq.message.properties import decode_properties
from orbitmq.message.record import COMPRESSED
from orbitmq.message.stored import encode_batch, expand_body


def _drafting(settings: SendSettings | None = None, namespace: str | None = None) -> Drafting:
    return Drafting(settings or SendSettings(), UniqueIds("127.0.0.1"), namespace)


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
        ("linger", 3),
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


# ---- batches: few frames of many messages


LIMIT = 1000
MESSAGES = st.builds(
    Message,
    st.sampled_from(["orders", "payments", "refunds"]),
    st.binary(min_size=1, max_size=600),
    tags=st.sampled_from([None, "a", "b"]),
    flag=st.integers(0, 9),
    wait_stored=st.booleans(),
)


def _frames(
    messages: Sequence[Message], bound: Mapping[int, Queue] | None = None
) -> list[tuple[Queue | None, list[Element]]]:
    checked = elements(messages, _drafting(), LIMIT)
    return list(frames(messages, checked, bound or {}, LIMIT))


def _body(part: Sequence[Element]) -> bytes:
    return encode_batch([each.element for each in part])


@given(st.lists(st.tuples(MESSAGES, st.sampled_from([None, 0, 1])), max_size=40))
def test_frames_hold_all_messages_once_in_order_and_within_the_limit(wished):
    messages = [message for message, _ in wished]
    bound = {
        place: Queue(message.topic, "a", queue)
        for place, (message, queue) in enumerate(wished)
        if queue is not None
    }

    seen: dict[object, list[int]] = defaultdict(list)
    for queue, part in _frames(messages, bound):
        assert 0 < len(_body(part)) <= LIMIT
        first = messages[part[0].place]
        for place, unique_id, element in part:
            message = messages[place]
            properties = decode_properties(element.properties)
            assert (bytes(element.body), element.flag) == (message.body, message.flag)
            assert (properties["UNIQ_KEY"], properties.get("TAGS")) == (unique_id, message.tags)
            assert (message.topic, message.wait_stored) == (first.topic, first.wait_stored)
            assert queue == bound.get(place)
            seen[message.topic, queue].append(place)
    assert sorted(place for places in seen.values() for place in places) == list(
        range(len(messages))
    )
    assert all(places == sorted(places) for places in seen.values())


@given(st.lists(st.integers(1, 700), min_size=1, max_size=40))
def test_no_frame_could_take_the_first_message_of_the_next(sizes):
    parts = [part for _, part in _frames([Message("orders", bytes(size)) for size in sizes])]

    for part, following in itertools.pairwise(parts):
        assert len(_body(part)) + len(_body(following[:1])) > LIMIT


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (Message("orders", b"x", delay_level=3), r"\[1\]\.delay"),
        (Message("orders", b"x", delay=3), r"\[1\]\.delay"),
        (Message("orders", b"x", deliver_at=2e9), r"\[1\]\.delay"),
        (Message("%RETRY%billing", b"x"), r"\[1\]\.topic"),
        (Message("orders", bytes(LIMIT)), r"\[1\]\.body"),
        ("orders", r"\[1\] must be a Message, got str"),
    ],
)
def test_what_a_batch_cannot_hold_is_refused_before_anything_is_sent(message, problem):
    with pytest.raises(MessageRefused, match=problem):
        elements([Message("orders", b"x"), message], _drafting(), LIMIT)
