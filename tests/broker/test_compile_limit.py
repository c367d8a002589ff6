"""How much one connection, and one host, may have compiled, and what becomes of the rest."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from orbitmq.broker import filters as compiledfilters
from orbitmq.broker.errors import Refused, SystemBusy
from orbitmq.broker.filters import (
    BURST,
    HOST_SHARES,
    RATE,
    CompileLater,
    CompileLimit,
    FilterTable,
    TokenBuckets,
)
from orbitmq.filter.tags import compile_filter
from orbitmq.wire.bodies import CheckClientRequest, SubscriptionData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import encode_body
from tests.support.broker import GROUP, RawClient, bodies_in, until
from tests.support.store import HandClock

NOW = 1_700_000_000.0


@pytest.fixture
def compilations(monkeypatch):
    """The SQL expressions that were compiled."""
    done: list[str] = []

    def counted(text, kind, *, lenient):
        if kind == "SQL92":
            done.append(text)
        return compile_filter(text, kind, lenient=lenient)

    monkeypatch.setattr(compiledfilters, "compile_filter", counted)
    return done


def long(number: int, size: int = 20_000) -> str:
    """An expression of about `size` characters that accepts one size."""
    return f"size = {number} OR name = '{'x' * size}'"


def wants(text: str, topic: str = "orders", version: int = 1) -> SubscriptionData:
    return SubscriptionData(
        topic=topic, sub_string=text, sub_version=version, expression_type="SQL92"
    )


@pytest.fixture
def clock():
    return HandClock(NOW)


@pytest.fixture
def filters(clock):
    return FilterTable(is_enabled=True, monotonic=clock.monotonic)


def exhaust(filters: FilterTable, who: str = "one") -> None:
    """Use up what a connection may have compiled."""
    filters.limit.charge(who, BURST)


# What is allowed.


def test_a_bucket_is_used_up_and_fills_again():
    buckets = TokenBuckets(rate=10, burst=100)

    assert buckets.has("one", 100, 0.0)
    buckets.take("one", 100, 0.0)

    assert not buckets.has("one", 1, 0.0)
    assert not buckets.has("one", 51, 5.0)
    assert buckets.has("one", 50, 5.0)
    assert buckets.has("another", 100, 0.0)


def test_more_than_a_bucket_holds_is_taken_from_a_full_one_and_leaves_a_debt():
    buckets = TokenBuckets(rate=10, burst=100)
    assert buckets.has("one", 500, 0.0)
    buckets.take("one", 500, 0.0)

    assert not buckets.has("one", 1, 40.0)
    assert buckets.has("one", 1, 40.1)


def test_full_buckets_take_no_memory():
    buckets = TokenBuckets(rate=10, burst=100)
    for number in range(10_000):
        buckets.take(number, 10, float(number))

    assert len(buckets) < 2_000


# Heartbeats.


def test_a_heartbeat_has_little_compiled_and_each_pull_one_more(filters, clock, compilations):
    said = {f"t{number}": wants(long(number), f"t{number}") for number in range(30)}

    filters.register("g", said.values(), NOW, "one")
    at_once = len(compilations)
    for number, (topic, subscription) in enumerate(said.items()):
        clock.advance(10.0)
        found = filters.of_group("g", topic, subscription, 1, "one")
        again = filters.of_group("g", topic, subscription, 1, "one")

        assert len(compilations) == max(at_once, number + 1)
        assert found is again
        assert found.accepts_properties({"size": str(number)})
    assert at_once == BURST // 20_000


def test_what_was_compiled_before_costs_nothing(filters, compilations):
    said = [wants(f"size = {number}", f"t{number}") for number in range(300)]
    filters.register("g", said, NOW)

    filters.register("h", said, NOW, "one")
    filters.register("h", [wants(long(1))], NOW, "one")

    assert len(compilations) == 301


def test_short_expressions_are_all_compiled_at_once(filters, compilations):
    filters.register("g", [wants(f"size = {n}", f"t{n}") for n in range(100)], NOW, "one")

    assert len(compilations) == 100


def test_an_expression_that_turns_out_wrong_at_the_pull_is_refused_with_the_reason(
    filters, compilations, caplog
):
    exhaust(filters)
    wrong = wants("size >", "wrong")
    filters.register("g", [wrong], NOW, "one")
    compilations.clear()

    refusals = []
    for _ in range(3):
        with pytest.raises(Refused) as refusal:
            filters.of_group("g", "wrong", wrong, 1)
        refusals.append(refusal.value)

    assert {each.code for each in refusals} == {ResponseCode.FILTER_DATA_NOT_EXIST}
    assert "ends too early" in str(refusals[0])
    assert all("did not compile" in str(each) for each in refusals)
    assert len(compilations) == 1  # not again with every pull
    assert "subscription does not compile" in caplog.text


def test_of_a_long_file_only_those_that_left_last_are_compiled_at_the_start(filters, compilations):
    said = {f"t{number:02}": wants(long(number, 30_000), f"t{number:02}") for number in range(20)}
    for number in range(20):
        filters.register("g", list(said.values())[number:], NOW + number, "one")
    compilations.clear()
    loaded = FilterTable(is_enabled=True)

    loaded.load(filters.file(), NOW + 100)
    at_start = len(compilations)

    assert 0 < at_start < 10
    assert compilations == [long(number, 30_000) for number in range(19, 19 - at_start, -1)]
    for number, (topic, subscription) in enumerate(said.items()):
        found = loaded.of_group("g", topic, subscription, 1)
        assert found.accepts_properties({"size": str(number)})


# Pulls.


def test_pulls_with_ever_new_expressions_are_answered_that_the_broker_is_busy(
    filters, clock, compilations
):
    filters.of_pull(long(0), "SQL92", "one")
    exhaust(filters)
    compilations.clear()

    with pytest.raises(SystemBusy):
        filters.of_pull("size = 1", "SQL92", "one")
    filters.of_pull(long(0), "SQL92", "one")  # compiled before
    filters.of_pull("size = 1000", "SQL92", "another")
    clock.advance(3.0)
    filters.of_pull("size = 2", "SQL92", "one")

    assert compilations == ["size = 1000", "size = 2"]


def test_the_queues_of_a_topic_share_one_compilation(filters, clock, compilations):
    exhaust(filters)
    compilations.clear()
    said = wants("size = 1")
    filters.register("g", [said], NOW, "one")
    clock.advance(3.0)

    for _queue in range(16):
        filters.of_group("g", "orders", said, 1, "one")

    assert compilations == ["size = 1"]


def test_the_end_of_an_expression_that_is_ignored_is_logged_once_and_not_with_every_pull(
    filters, caplog
):
    said = wants(f"{long(1, 700)} trailing words")
    filters.register("g", [said], NOW, "one")

    for _ in range(100):
        filters.of_group("g", "orders", said, 1, "one")

    assert caplog.text.count("the end of a subscription is ignored") == 1


def test_the_end_that_is_ignored_is_logged_by_the_first_pull_if_nobody_compiled_it_before(
    filters, clock, caplog
):
    said = wants(f"{long(1, 700)} trailing words")
    exhaust(filters)
    filters.register("g", [said], NOW, "one")
    before = caplog.text.count("the end of a subscription is ignored")
    clock.advance(10.0)

    for _ in range(100):
        filters.of_group("g", "orders", said, 1, "one")

    assert before == 0
    assert caplog.text.count("the end of a subscription is ignored") == 1


def test_a_pull_waits_for_a_later_step_when_another_expression_was_compiled_in_this_one(
    filters, compilations
):
    filters.must_wait = lambda: True

    with pytest.raises(CompileLater):
        filters.of_pull("size = 1", "SQL92", "one")
    filters.of_pull("A || B", "TAG", "one")

    assert compilations == []
    filters.of_pull("size = 1", "SQL92")
    filters.of_pull("size = 1", "SQL92", "one")
    assert compilations == ["size = 1"]


def test_an_expression_that_is_too_long_costs_no_more_than_the_longest(filters, clock):
    with pytest.raises(Refused, match="32768 are allowed"):
        filters.of_pull("x" * 10_000_000, "SQL92", "one")

    clock.advance(32_768 / RATE)
    filters.of_pull(long(1), "SQL92", "one")


# Checks before a consumer begins.


def test_a_check_beyond_the_limit_passes_unread(filters, compilations):
    with pytest.raises(Refused, match="ends too early") as refusal:
        filters.check("size >", "SQL92", "one")
    assert refusal.value.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    exhaust(filters)
    compilations.clear()

    filters.check("size > >", "SQL92", "one")
    with pytest.raises(Refused, match="32768 are allowed"):
        filters.check("x" * 40_000, "SQL92", "one")
    filters.is_enabled = False
    with pytest.raises(Refused, match="enablePropertyFilter"):
        filters.check(long(11), "SQL92", "one")

    assert compilations == []


# Over the wire.


@pytest.fixture
async def still(broker):
    """A broker whose buckets do not fill again."""
    broker.parts.filters.limit = CompileLimit(lambda: 0.0)
    return broker


async def checked(client: RawClient, subscription: SubscriptionData) -> Command:
    asked = CheckClientRequest(
        client_id="c1", group=GROUP, subscription_data=subscription, namespace=""
    )
    body = encode_body(asked)
    return await asyncio.wait_for(
        client.connection.request(RequestCode.CHECK_CLIENT_CONFIG, body=body), 30
    )


async def test_a_heartbeat_with_many_long_expressions_leaves_them_to_pulls(
    still, client, compilations
):
    for number in range(3):
        await client.stored(f"t{number}", b"seen", properties={"size": str(number)})
    said = [wants(long(number), f"t{number}") for number in range(60)]

    beaten = await client.heartbeat("c1", *said)
    at_once = len(compilations)
    pulled = [await client.pull(f"t{number}", sys_flag=0) for number in range(3)]

    assert beaten.code == ResponseCode.SUCCESS
    assert at_once == 1
    assert [bodies_in(answer) for answer in pulled] == [[b"seen"]] * 3
    assert len(compilations) in {3, 4}


async def test_pulls_that_come_together_are_compiled_in_turns_and_all_answered(
    still, open_client, compilations, monkeypatch
):
    clients = [await open_client(still) for _ in range(3)]
    await clients[0].stored("orders", b"seen", properties={"size": "7"})
    writes: list[int] = []
    pacing = still.parts.pacing
    end_judging = pacing._end_judging

    def ended():
        writes.append(len(compilations))
        end_judging()

    monkeypatch.setattr(pacing, "_end_judging", ended)
    pulls = [
        client.pull("orders", subscription=text, expression_type="SQL92")
        for client in clients
        for text in (f"size = 7 AND size <> {id(client)}", f"size <> {id(client)}", long(7))
    ]

    answers = await asyncio.wait_for(asyncio.gather(*pulls), 30)

    assert [bodies_in(answer) for answer in answers] == [[b"seen"]] * 9
    assert len(compilations) == 7
    before = [0, *writes]
    assert all(then - now <= 1 for now, then in zip(before, writes, strict=False))


async def test_many_pulls_that_wait_for_the_same_expression_are_all_answered(
    still, client, compilations
):
    await client.stored("orders", b"seven", properties={"size": "7"})
    await client.heartbeat("c1", wants(long(1), "other"), wants(long(7)))
    at_once = len(compilations)

    pulls = [client.pull("orders", sys_flag=0) for _ in range(40)]
    answers = await asyncio.wait_for(asyncio.gather(*pulls), 30)

    assert at_once == 1
    assert [bodies_in(answer) for answer in answers] == [[b"seven"]] * 40
    assert len(compilations) == 2


async def test_a_held_pull_is_answered_by_the_expression_that_a_heartbeat_left_to_it(
    still, client, compilations
):
    await client.stored("orders", b"seven", properties={"size": "7"})
    await client.heartbeat("c1", wants("size = 8"))
    held = asyncio.ensure_future(client.pull("orders", hold=20.0, sys_flag=2, offset=1))
    try:
        await until(lambda: len(still.parts.held) == 1)
        await client.heartbeat("c1", wants(long(7), version=2), wants(long(1), "other"))
        answer = await asyncio.wait_for(held, 30)
    finally:
        held.cancel()

    assert answer.code == ResponseCode.PULL_NOT_FOUND
    assert bodies_in(await client.pull("orders", sys_flag=0)) == [b"seven"]


async def test_a_held_pull_beyond_the_limit_is_answered_that_the_broker_is_busy(still, client):
    topics = [f"t{number}" for number in range(12)]
    for topic in topics:
        await client.stored(topic)
    await client.heartbeat("c1", *(wants("size = 1", topic) for topic in topics))
    pulls = [
        asyncio.ensure_future(client.pull(topic, hold=2.0, sys_flag=2, offset=1))
        for topic in topics
    ]
    await until(lambda: len(still.parts.held) == len(topics))

    said = [wants(long(at, 25_000), topic, version=2) for at, topic in enumerate(topics)]
    await client.heartbeat("c1", *said)
    answers = await asyncio.wait_for(asyncio.gather(*pulls), 30)

    codes = Counter(answer.code for answer in answers)
    assert codes[ResponseCode.SYSTEM_BUSY] == len(topics) - BURST // 25_000
    assert codes[ResponseCode.PULL_NOT_FOUND] == BURST // 25_000


async def test_a_consumer_with_much_sql_is_told_that_it_can_begin(broker, client, compilations):
    said = [wants(long(number, 650), f"t{number}") for number in range(30)]

    answers = [await checked(client, each) for each in said]

    assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
    assert len(compilations) == 30


async def test_many_connections_of_a_host_have_little_compiled(still, open_client, compilations):
    for number in range(10):
        each = await open_client(still)
        for part in range(4):
            said = wants(long(10 * number + part, BURST // 4 - 100), f"t{number}", part)
            beaten = await each.heartbeat("c1", said, group=f"g{number}")
            assert beaten.code == ResponseCode.SUCCESS

    assert len(compilations) == pytest.approx(4 * HOST_SHARES, abs=1)


async def test_a_connection_that_ends_leaves_no_allowance(broker, open_client):
    passing = await open_client(broker)
    await passing.heartbeat("c1", wants("size = 7"))
    assert len(broker.parts.filters.limit) == 1

    await passing.close()

    await until(lambda: len(broker.parts.filters.limit) == 0)
