"""Names of topics and groups, with and without a namespace."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.names import (
    check_group,
    check_topic,
    dead_letter_topic,
    is_retry_topic,
    is_system_topic,
    retry_topic,
)
from orbitmq.client.namespaces import unwrap, wrap_group, wrap_topic
from orbitmq.errors import SettingError

names = st.text("abcdefgh%|_-0123456789XYZ", min_size=1, max_size=20)
namespaces = st.text("abcXYZ_-019", min_size=1, max_size=10)


@pytest.mark.parametrize(
    ("topic", "wrapped"),
    [
        ("orders", "shop%orders"),
        ("shop%orders", "shop%orders"),
        ("%RETRY%billing", "%RETRY%shop%billing"),
        ("%DLQ%billing", "%DLQ%shop%billing"),
        ("%RETRY%shop%billing", "%RETRY%shop%billing"),
        ("TBW102", "TBW102"),
        ("rmq_sys_wheel_timer", "rmq_sys_wheel_timer"),
        ("RMQ_SYS_TRACE_TOPIC", "RMQ_SYS_TRACE_TOPIC"),
    ],
)
def test_topics_get_the_namespace_behind_their_prefix(topic: str, wrapped: str) -> None:
    assert wrap_topic("shop", topic) == wrapped


def test_groups_get_the_namespace_unless_they_are_the_systems() -> None:
    assert wrap_group("shop", "billing") == "shop%billing"
    assert wrap_group("shop", "CID_RMQ_SYS_TRACE") == "CID_RMQ_SYS_TRACE"


@given(names)
def test_without_a_namespace_names_are_left_alone(name: str) -> None:
    assert wrap_topic(None, name) == wrap_group(None, name) == unwrap(None, name) == name


@given(namespaces, names)
def test_wrapping_twice_is_wrapping_once_and_unwrapping_takes_it_back(
    namespace: str, name: str
) -> None:
    for wrap in (wrap_topic, wrap_group):
        wrapped = wrap(namespace, name)

        assert wrap(namespace, wrapped) == wrapped
        assert unwrap(namespace, wrapped) == unwrap(namespace, name)


@given(namespaces, names)
def test_the_retry_topic_of_a_wrapped_group_is_the_wrapped_retry_topic(
    namespace: str, group: str
) -> None:
    wrapped = wrap_group(namespace, group)
    if not group.startswith(("CID_RMQ_SYS_", "%")):
        assert wrap_topic(namespace, retry_topic(group)) == retry_topic(wrapped)
        assert wrap_topic(namespace, dead_letter_topic(group)) == dead_letter_topic(wrapped)


def test_names_tell_what_they_are() -> None:
    assert is_retry_topic("%RETRY%billing")
    assert not is_retry_topic("billing")
    assert is_system_topic("SCHEDULE_TOPIC_XXXX")
    assert is_system_topic("rmq_sys_any")
    assert not is_system_topic("orders")


@pytest.mark.parametrize("name", ["", "with space", "ümlaut", "a.b", "x" * 128, None, 7])
def test_names_that_brokers_refuse_are_refused_before(name: Any) -> None:
    with pytest.raises(SettingError, match="a topic"):
        check_topic(name)
    with pytest.raises(SettingError, match="a group"):
        check_group(name)


def test_good_names_are_given_back() -> None:
    assert check_topic("%RETRY%" + "g" * 120) == "%RETRY%" + "g" * 120
    assert check_group("g" * 120) == "g" * 120
    with pytest.raises(SettingError, match="can have 120 characters"):
        check_group("g" * 121)
