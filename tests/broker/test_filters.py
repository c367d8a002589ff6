"""Filters of pulls: where they come from, which versions count, what is kept."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from orbitmq.broker.errors import Refused
from orbitmq.broker.filters import FilterTable
from orbitmq.filter.tags import TagFilter
from orbitmq.javahash import java_hash
from orbitmq.wire.bodies import SubscriptionData
from orbitmq.wire.codes import ResponseCode


def wants(
    text: str | None, version: int = 1, kind: str = "SQL92", topic: str = "T"
) -> SubscriptionData:
    return SubscriptionData(topic=topic, sub_string=text, sub_version=version, expression_type=kind)


def table(**settings: object) -> FilterTable:
    return FilterTable(**({"is_enabled": True} | settings))  # type: ignore[arg-type]  # by name


def refusal_of(
    filters: FilterTable, subscription: SubscriptionData | None, version: int = 1
) -> int:
    with pytest.raises(Refused) as refusal:
        filters.of_group("g", "T", subscription, version)
    return refusal.value.code


def price_over(filters: FilterTable, subscription: SubscriptionData, version: int = 1) -> int:
    """The limit of a filter `price > limit`, found by asking."""
    found = filters.of_group("g", "T", subscription, version)
    return next(n for n in range(100) if found.accepts_properties({"price": str(n + 1)}))


# Pulls that bring their subscription.


@pytest.mark.parametrize("kind", [None, "", "TAG"])
def test_a_pull_with_tags_is_filtered_by_their_hashes(kind):
    found = table().of_pull("A || B", kind)

    assert isinstance(found, TagFilter)
    assert found.accepts_code(java_hash("A"))
    assert not found.accepts_code(java_hash("C"))


def test_a_pull_with_sql_is_filtered_by_properties():
    found = table().of_pull("price > 5", "SQL92")

    assert found.accepts_properties({"price": "6"})
    assert not found.accepts_properties({"price": "5"})


@pytest.mark.parametrize(
    ("text", "kind"), [("||", "TAG"), ("price >", "SQL92"), ("", "SQL92"), ("x", "XPATH")]
)
def test_what_cannot_be_parsed_is_refused(text, kind):
    with pytest.raises(Refused) as refusal:
        table().of_pull(text, kind)

    assert refusal.value.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


def test_expressions_are_compiled_once():
    filters = table()

    assert filters.of_pull("price > 5", "SQL92") is filters.of_pull("price > 5", "SQL92")


def test_the_cache_does_not_grow_without_end():
    filters = table(cache_size=2)
    first = filters.of_pull("a > 1", "SQL92")

    for number in range(10):
        filters.of_pull(f"a > {number + 5}", "SQL92")

    assert filters.of_pull("a > 1", "SQL92") is not first


def tag_list(number: int, tags: int = 4_000) -> str:
    return "||".join(f"{number + tag:05}" for tag in range(0, tags * 100, 100))


def test_the_cache_is_bounded_by_the_memory_that_filters_take():
    filters = table(tag_cache_bytes=300_000)
    short = filters.of_pull("A", "TAG")
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(12):
            filters.of_pull(tag_list(number, 2_000), "TAG")
            assert filters.of_pull("A", "TAG") is short  # what is used stays
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept < 600_000  # each list takes 90 KB, and took 600 KB with its tags


def test_tag_lists_and_sql_do_not_push_each_other_out():
    filters = table(cache_size=5, cache_bytes=10_000, tag_cache_bytes=10_000)
    sql = filters.of_pull("a > 1", "SQL92")
    tags = filters.of_pull("A", "TAG")

    for number in range(20):
        filters.of_pull(tag_list(number, 50), "TAG")
    sql_after_tags = filters.of_pull("a > 1", "SQL92")
    tags_after_tags = filters.of_pull("A", None)
    for number in range(20):
        filters.of_pull(f"a > 1 AND b > {number}", "SQL92")

    assert sql_after_tags is sql
    assert tags_after_tags is not tags
    assert filters.of_pull("A", "TAG") is tags_after_tags
    assert filters.of_pull("a > 1", "SQL92") is not sql


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        ([tag_list(number, 2_000) for number in range(2)], "TAG"),
        (["||".join(chr(0x4E00 + n + k) for n in range(3_000)) for k in range(2)], "TAG"),
        (["a > 1 AND " * 300 + "a > 2"], "SQL92"),
        (["a = 1 OR " * 300 + "a > 2"], "SQL92"),
        ([f"price > {number} AND region = 'eu'" for number in range(50)], "SQL92"),
    ],
    ids=["tags", "short tags", "and", "or", "short"],
)
def test_the_memory_of_a_filter_is_known(texts, kind):
    compiled = table()
    compiled.of_pull("a > 0", "SQL92")  # has the grammar made
    gc.collect()
    before = compiled.bytes
    tracemalloc.start()
    try:
        for text in texts:
            compiled.of_pull(text, kind)
        gc.collect()
        measured, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    counted = compiled.bytes - before
    assert measured / 2 < counted < measured * 5


def test_a_tag_list_has_a_longest_length():
    longest = tag_list(0, 5_000)[:32_768]
    filters = table()

    found = filters.of_pull(longest, "TAG")
    with pytest.raises(Refused, match="32769 characters, 32768 are allowed") as refusal:
        filters.of_pull(longest + "x", None)

    assert found.accepts_code(java_hash("00100"))
    assert refusal.value.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    filters.check(longest, "TAG")
    with pytest.raises(Refused, match="32768 are allowed"):
        filters.check(longest + "x", "TAG")


def test_sql_has_to_be_turned_on():
    filters = table(is_enabled=False)

    with pytest.raises(Refused, match="enablePropertyFilter") as refusal:
        filters.of_pull("price > 5", "SQL92")

    assert refusal.value.code == ResponseCode.SYSTEM_ERROR
    filters.of_pull("A", "TAG")
    filters.check("A", None)
    with pytest.raises(Refused, match="enablePropertyFilter"):
        filters.check("price > 5", "SQL92")


@pytest.mark.parametrize(
    ("text", "kind"), [("price >", "SQL92"), ("x" * 40_000, "SQL92"), ("x", "XPATH")]
)
def test_what_is_not_turned_on_is_refused_as_that_also_when_it_is_wrong(text, kind):
    filters = table(is_enabled=False)

    with pytest.raises(Refused, match="enablePropertyFilter") as pulled:
        filters.of_pull(text, kind)
    with pytest.raises(Refused, match="enablePropertyFilter") as checked:
        filters.check(text, kind)

    assert pulled.value.code == checked.value.code == ResponseCode.SYSTEM_ERROR


def test_a_pull_by_no_expression_at_all_is_refused_as_that_also_when_sql_is_not_turned_on():
    with pytest.raises(Refused) as refusal:
        table(is_enabled=False).of_pull("", "SQL92")

    assert refusal.value.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


def test_a_client_can_ask_beforehand():
    filters = table()

    filters.check("price > 5", "SQL92")
    with pytest.raises(Refused) as refusal:
        filters.check("price >", "SQL92")
    assert refusal.value.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


# Pulls that rely on heartbeats.


def test_a_group_that_said_nothing_has_no_subscription():
    assert refusal_of(table(), None) == ResponseCode.SUBSCRIPTION_NOT_EXIST


def test_tags_come_from_the_text_whatever_the_hashes_say():
    said = SubscriptionData(topic="T", sub_string="A", sub_version=1, code_set=(0, 0))

    found = table().of_group("g", "T", said, 1)

    assert found.accepts_code(java_hash("A"))
    assert not found.accepts_code(0)


def test_a_pull_newer_than_the_last_heartbeat_is_told_so():
    said = wants("A", version=4, kind="TAG")

    assert refusal_of(table(), said, version=5) == ResponseCode.SUBSCRIPTION_NOT_LATEST
    table().of_group("g", "T", said, 4)
    table().of_group("g", "T", said, 3)


def test_an_expression_of_a_group_filters_and_what_is_ignored_is_logged_once(caplog):
    filters = table()

    assert price_over(filters, wants("price > 5 LIKE 'x'")) == 5
    assert price_over(filters, wants("price > 5 LIKE 'x'", 2), version=2) == 5
    assert price_over(filters, wants("price > 9", 1)) == 9
    assert caplog.text.count("the end of a subscription is ignored") == 1
    filters.is_enabled = False
    assert refusal_of(filters, wants("price > 9")) == ResponseCode.SYSTEM_ERROR


def test_an_expression_of_a_group_that_does_not_compile_is_logged_once(caplog):
    filters = table()

    for _ in range(3):
        assert refusal_of(filters, wants("price >")) == ResponseCode.FILTER_DATA_NOT_EXIST

    assert caplog.text.count("subscription does not compile") == 1
    assert price_over(filters, wants("price > 5", 2)) == 5
