"""Names of topics and groups, with and without a namespace."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.errors import SettingError
from orbitmq.names import (
    check_group,
    check_topic,
    dead_letter_topic,
    group_of_retry_topic,
    group_problem,
    is_retry_topic,
    is_system_topic,
    most_similar,
    retry_topic,
    topic_problem,
    unwrap,
    wrap_group,
    wrap_topic,
)

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
def test_topics_get_the_namespace_behind_their_prefix(topic, wrapped):
    assert wrap_topic("shop", topic) == wrapped


def test_groups_get_the_namespace_unless_they_are_the_systems():
    assert wrap_group("shop", "billing") == "shop%billing"
    assert wrap_group("shop", "CID_RMQ_SYS_TRACE") == "CID_RMQ_SYS_TRACE"


@given(names)
def test_without_a_namespace_names_are_left_alone(name):
    assert wrap_topic(None, name) == wrap_group(None, name) == unwrap(None, name) == name


@given(namespaces, names)
def test_wrapping_twice_is_wrapping_once_and_unwrapping_takes_it_back(namespace, name):
    for wrap in (wrap_topic, wrap_group):
        wrapped = wrap(namespace, name)

        assert wrap(namespace, wrapped) == wrapped
        assert unwrap(namespace, wrapped) == unwrap(namespace, name)


@given(namespaces, names)
def test_the_retry_topic_of_a_wrapped_group_is_the_wrapped_retry_topic(namespace, group):
    wrapped = wrap_group(namespace, group)
    if not group.startswith(("CID_RMQ_SYS_", "%")):
        assert wrap_topic(namespace, retry_topic(group)) == retry_topic(wrapped)
        assert wrap_topic(namespace, dead_letter_topic(group)) == dead_letter_topic(wrapped)


def test_names_tell_what_they_are():
    assert is_retry_topic("%RETRY%billing")
    assert not is_retry_topic("billing")
    assert is_system_topic("SCHEDULE_TOPIC_XXXX")
    assert is_system_topic("rmq_sys_any")
    assert not is_system_topic("orders")


@pytest.mark.parametrize("name", ["", "with space", "ümlaut", "a.b", "x" * 128, None, 7])
def test_names_that_brokers_refuse_are_refused_before(name):
    with pytest.raises(SettingError, match="a topic"):
        check_topic(name)
    with pytest.raises(SettingError, match="a group"):
        check_group(name)


def test_good_names_are_given_back():
    assert check_topic("%RETRY%" + "g" * 120) == "%RETRY%" + "g" * 120
    assert check_group("g" * 120) == "g" * 120
    with pytest.raises(SettingError, match="can have 120 characters"):
        check_group("g" * 121)


# What is allowed.

allowed_names = st.text("%|abzABZ019_-", min_size=1, max_size=127).filter(
    lambda name: not name.startswith(("%RETRY%", "%DLQ%"))
)


@given(allowed_names)
def test_letters_digits_and_four_signs_make_a_name(name):
    assert check_topic(name) == name
    assert group_problem(name[:120]) is None


@pytest.mark.parametrize(
    ("name", "is_fine"),
    [
        ("a" * 127, True),
        ("a" * 128, False),
        ("%RETRY%" + "a" * 248, True),
        ("%RETRY%" + "a" * 249, False),
        ("%DLQ%" + "a" * 250, True),
        ("%DLQ%" + "a" * 251, False),
        ("", False),
        ("   ", False),
        ("a/b", False),
        ("a\n", False),
    ],
)
def test_topic_names_have_a_length_and_a_character_set(name, is_fine):
    assert (topic_problem(name) is None) == is_fine


@pytest.mark.parametrize(("length", "is_fine"), [(120, True), (121, False), (0, False)])
def test_group_names_have_a_length(length, is_fine):
    assert (group_problem("g" * length) is None) == is_fine


def test_a_retry_topic_names_its_group():
    assert retry_topic("g") == "%RETRY%g"
    assert dead_letter_topic("g") == "%DLQ%g"
    assert group_of_retry_topic("%RETRY%g") == "g"
    assert group_of_retry_topic("T") is None


# Similar names.


@pytest.mark.parametrize("slip", ["ordesr", "order", "orderss", "0rders", "Orders", "xorders"])
def test_a_slip_of_a_name_is_seen_through(slip):
    assert most_similar(slip, ["invoices", "orders", "payments"]) == "orders"


def test_a_name_of_its_own_is_no_slip_of_another():
    assert most_similar("refunds", ["invoices", "orders", "payments", "refunds"]) is None


@pytest.mark.parametrize(
    "other", ["%RETRY%orders", "%DLQ%orders", "shop%orders", "rmq_sys_orders", "SELF_TEST_TOPIC"]
)
def test_nobody_means_what_belongs_to_a_group_the_system_or_another_namespace(other):
    slip = other.rpartition("%")[2].replace("rmq_", "rm_")[:-1]

    assert most_similar(slip, [other]) is None
    assert most_similar(slip, [other, slip + "x"]) == slip + "x"


def test_in_a_namespace_its_own_topics_are_meant():
    known = ["ordesrs", "orders", "shop%orders", "shops%ordesrs", "%RETRY%shop%ordesrs"]

    assert most_similar("shop%ordesr", known) == "shop%orders"


@given(
    meant=st.text("abcdefgh-", min_size=6, max_size=20),
    place=st.integers(0, 18),
    others=st.lists(st.text("mnopqrstuvw", min_size=1, max_size=20), max_size=300),
)
def test_a_swap_of_two_letters_is_found_among_any_number_of_other_names(meant, place, others):
    place %= len(meant) - 1
    swapped = meant[:place] + meant[place + 1] + meant[place] + meant[place + 2 :]

    assert most_similar(swapped, [*others, meant]) == (meant if swapped != meant else None)


def test_of_many_names_few_are_compared(monkeypatch):
    compared: list[int] = []
    usual = difflib.get_close_matches

    def counted(word, names, most, least):
        names = list(names)
        compared.append(len(names))
        return usual(word, names, most, least)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    known = [f"service-{number % 97}-events-{number:05}" for number in range(10_000)]

    assert most_similar("service-4-evnets-00101", known) == "service-4-events-00101"
    assert compared == [100]
