"""Filters of pulls: where they come from, which versions count, what is kept."""

from __future__ import annotations

import gc
import json
import logging
import tracemalloc

import msgspec
import pytest

from orbitmq.broker.configfile import ConfigFile
from orbitmq.broker.errors import Refused
from orbitmq.broker.filters import KEPT_AFTER_LEAVING, CompiledFilters, FilterFile, FilterTable
from orbitmq.filter.tags import TagFilter
from orbitmq.javahash import java_hash
from orbitmq.wire.bodies import SubscriptionData
from orbitmq.wire.codes import ResponseCode

NOW = 1_700_000_000.0


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
    compiled = CompiledFilters(lenient=True)
    compiled.get("a > 0", "SQL92")  # has the grammar made
    gc.collect()
    before = compiled.bytes
    tracemalloc.start()
    try:
        for text in texts:
            compiled.get(text, kind)
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


def test_a_registered_expression_that_takes_much_memory_filters_all_the_same():
    filters = table(cache_size=1)
    long = "price > 5 AND " * 100 + "price > 7"
    filters.register("g", [wants(long)], NOW)
    filters.of_pull("A", "TAG")

    assert price_over(filters, wants(long)) == 7
    filters.is_enabled = False
    assert refusal_of(filters, wants(long)) == ResponseCode.SYSTEM_ERROR


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


def test_sql_is_read_as_apache_does_and_what_is_ignored_is_logged(caplog):
    said = wants("price > 5 LIKE 'x'")
    with caplog.at_level(logging.WARNING, logger="orbitmq.broker"):
        filters = table()
        filters.register("g", [said], NOW)

    assert price_over(filters, said) == 5
    assert "ignored" in caplog.text
    with pytest.raises(Refused):
        table(lenient=False).of_pull("price > 5 LIKE 'x'", "SQL92")


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


def test_a_registered_expression_filters():
    filters = table()
    filters.register("g", [wants("price > 5")], NOW)

    assert price_over(filters, wants("price > 5")) == 5


def test_an_expression_that_does_not_compile_leaves_no_filter():
    filters = table()
    filters.register("g", [wants("price >")], NOW)
    assert refusal_of(filters, wants("price >")) == ResponseCode.FILTER_DATA_NOT_EXIST

    filters.register("g", [wants("price > 5", 2)], NOW)
    assert price_over(filters, wants("price > 5", 2)) == 5
    filters.register("g", [wants("price >", 3)], NOW)
    assert refusal_of(filters, wants("price >", 3)) == ResponseCode.FILTER_DATA_NOT_EXIST


def test_a_filter_older_than_the_pull_is_told_so():
    filters = table()
    filters.register("g", [wants("price > 5", 1)], NOW)

    newer = wants("price > 5", 2)
    assert refusal_of(filters, newer, version=2) == ResponseCode.FILTER_DATA_NOT_LATEST
    filters.register("g", [newer], NOW)
    assert price_over(filters, newer, version=2) == 5


def test_what_the_group_says_now_counts_also_when_it_is_older():
    filters = table()
    filters.register("g", [wants("price > 5", 2)], NOW)

    filters.register("g", [wants("price > 9", 1)], NOW)

    assert price_over(filters, wants("price > 9", 1)) == 9


def test_groups_and_topics_have_their_own_filters():
    filters = table()
    filters.register("g", [wants("price > 5"), wants("price > 6", topic="U")], NOW)
    filters.register("h", [wants("price > 7")], NOW)

    assert price_over(filters, wants("price > 5")) == 5
    assert filters.of_group("g", "U", wants("price > 6", topic="U"), 1).accepts_properties(
        {"price": "7"}
    )
    assert not filters.of_group("h", "T", wants("price > 7"), 1).accepts_properties({"price": "7"})


# Leaving.


def test_a_filter_is_kept_for_a_day_after_its_group_left():
    filters = table()
    filters.register("g", [wants("price > 5")], NOW)
    filters.leave("g", NOW)

    assert filters.clean(NOW + KEPT_AFTER_LEAVING - 1) == 0
    assert price_over(filters, wants("price > 5")) == 5
    assert filters.clean(NOW + KEPT_AFTER_LEAVING) == 1
    assert refusal_of(filters, wants("price > 5")) == ResponseCode.FILTER_DATA_NOT_EXIST


def kept(filters: FilterTable) -> list[tuple[str, str]]:
    by_topic = filters.file().filter_data_by_topic
    return [(group, topic) for topic in by_topic for group in by_topic[topic].group_filter_data]


def test_what_was_left_does_not_grow_without_end():
    """Whoever wants another topic with every heartbeat leaves the one before."""
    filters = table(left_room=10_000)
    filters.register("stays", [wants("price > 5", topic="0")], NOW)
    for number in range(100):
        filters.register("g", [wants("price > 5", topic=f"{number:03}")], NOW + number)
    after_changes = kept(filters)
    filters.leave("g", NOW + 100)
    again = table(left_room=3_000)
    again.load(filters.file(), NOW + 100)
    # Somebody comes back to the last one, which is no longer among those that were left.
    filters.register("g", [wants("price > 5", topic="099")], NOW + 101)
    for number in range(100):
        filters.register(f"h{number}", [wants("price > 5")], NOW + 102)
        filters.leave(f"h{number}", NOW + 102)

    assert 3 < len(after_changes) < 15
    assert {("stays", "0"), ("g", "099"), ("g", "098")} <= set(after_changes)
    assert 0 < len(kept(again)) < 5
    assert {("stays", "0"), ("g", "099"), ("h99", "T")} <= set(kept(filters))
    assert len(kept(filters)) < 15
    filters.clean(NOW + 200 + KEPT_AFTER_LEAVING)
    assert set(kept(filters)) == {("stays", "0"), ("g", "099")}


def test_a_group_that_comes_back_keeps_its_filter():
    filters = table()
    filters.register("g", [wants("price > 5")], NOW)
    filters.leave("g", NOW)
    filters.register("g", [wants("price > 5")], NOW + 10)

    assert filters.clean(NOW + 2 * KEPT_AFTER_LEAVING) == 0


def test_a_topic_that_is_no_longer_named_counts_as_left():
    filters = table()
    filters.register("g", [wants("price > 5"), wants("price > 5", topic="U")], NOW)
    filters.register("g", [wants("price > 5"), wants("A", kind="TAG", topic="U")], NOW)

    assert filters.clean(NOW + KEPT_AFTER_LEAVING) == 1
    assert set(filters.file().filter_data_by_topic) == {"T"}


def test_a_repeated_heartbeat_is_no_reason_to_save():
    filters = table()
    filters.register("g", [wants("price > 5"), wants("A", kind="TAG", topic="U")], NOW)
    revision = filters.revision

    filters.register("g", [wants("price > 5"), wants("A", kind="TAG", topic="U")], NOW + 30)
    filters.leave("unknown", NOW)

    assert filters.revision == revision
    filters.leave("g", NOW)
    assert filters.revision > revision


# The file.

#: As Apache writes it, with the bloom filter that we have no use for.
APACHE_FILE = (
    '{"filterDataByTopic":{"T":{"groupFilterData":{"g":{"bloomFilterData":{"bitNum":960,'
    '"bitPos":[1,2,3]},"bornTime":1699999000000,"clientVersion":7,"consumerGroup":"g","dead":false,'
    '"deadTime":0,"expression":"price > 5","expressionType":"SQL92","topic":"T"}},"topic":"T"}}}'
)


def test_the_file_of_an_apache_broker_is_read(tmp_path):
    path = tmp_path / "consumerFilter.json"
    path.write_text(APACHE_FILE)
    loaded = ConfigFile(path, FilterFile).load().value
    assert loaded is not None

    filters = table()
    filters.load(loaded, NOW)

    assert price_over(filters, wants("price > 5", 7), version=7) == 5
    assert filters.clean(NOW - 30 + KEPT_AFTER_LEAVING - 1) == 0
    assert filters.clean(NOW - 30 + KEPT_AFTER_LEAVING) == 1


def test_the_file_brings_filters_back(tmp_path):
    filters = table()
    filters.register("g", [wants("price > 5", 3)], NOW)
    filters.register("h", [wants("price > 6", 4)], NOW)
    filters.leave("h", NOW + 5)
    file = ConfigFile(tmp_path / "consumerFilter.json", FilterFile)

    file.save(filters.file())
    loaded = file.load().value
    assert loaded is not None
    again = table()
    again.load(loaded, NOW + 100)

    entries = json.loads((tmp_path / "consumerFilter.json").read_text())
    assert entries["filterDataByTopic"]["T"]["groupFilterData"]["h"] == {
        "bornTime": 1_700_000_000_000,
        "clientVersion": 4,
        "consumerGroup": "h",
        "deadTime": 1_700_000_005_000,
        "expression": "price > 6",
        "expressionType": "SQL92",
        "topic": "T",
    }
    assert price_over(again, wants("price > 5", 3), version=3) == 5
    assert again.clean(NOW + 5 + KEPT_AFTER_LEAVING) == 1


def test_after_a_restart_those_go_first_that_left_first():
    filters = table()
    filters.register("here", [wants("price > 5", topic="c")], NOW)
    for number, name in enumerate("zmakb"):
        filters.register(name, [wants("price > 5", topic=name)], NOW)
        filters.leave(name, NOW + number)
    saved = filters.file()
    in_order = [*zip("zmakb", "zmakb", strict=True), ("here", "c")]

    counts = set()
    for room in range(1_000, 12_000, 500):
        again = table(left_room=room)
        again.load(saved, NOW + 100)
        count = len(kept(again))
        assert set(kept(again)) == set(in_order[len(in_order) - count :])
        counts.add(count)

    assert counts == set(range(len(in_order) + 1))


def test_what_no_longer_compiles_is_left_out_of_the_table(caplog):
    document = json.loads(APACHE_FILE)
    document["filterDataByTopic"]["T"]["groupFilterData"]["g"]["expression"] = "price >"
    filters = table()

    with caplog.at_level(logging.WARNING, logger="orbitmq.broker"):
        filters.load(msgspec.json.decode(json.dumps(document), type=FilterFile), NOW)

    assert refusal_of(filters, wants("price >")) == ResponseCode.FILTER_DATA_NOT_EXIST
    assert "does not compile" in caplog.text
