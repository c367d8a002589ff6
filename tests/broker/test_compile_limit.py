"""How much one connection, and one host, may have compiled, and what becomes of the rest."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from orbitmq.broker import filters as compiledfilters
from orbitmq.broker.errors import Refused, SystemBusy
from orbitmq.broker.filters import BURST, RATE, CompileLater, CompileLimit, FilterTable
from orbitmq.filter.tags import compile_filter
from orbitmq.remoting.settings import Address
from orbitmq.wire.bodies import CheckClientRequest, SubscriptionData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.javajson import encode_body
from tests.support.broker import GROUP, RawClient, bodies_in, until
from tests.support.store import HandClock

NOW = 1_700_000_000.0
ONE, ANOTHER = Address("1.1.1.1", 1), Address("2.2.2.2", 1)


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


def exhaust(filters: FilterTable) -> None:
    """Use up what a connection may have compiled."""
    filters.limit.charge(ONE, BURST)


# What is allowed.


@pytest.mark.parametrize(
    ("shares", "who"), [(1, [ONE]), (3, [Address("1.1.1.1", n) for n in range(9)])]
)
def test_a_bucket_is_used_up_and_fills_again(clock, shares, who):
    limit = CompileLimit(clock.monotonic)
    for number in range(shares):
        assert limit.allows(who[number], BURST)
        limit.charge(who[number], BURST)

    assert not limit.allows(who[-1], RATE)
    assert limit.allows(ANOTHER, BURST)
    clock.advance(1.0)
    assert limit.allows(who[-1], RATE)


def test_more_than_a_bucket_holds_is_taken_from_a_full_one_and_leaves_a_debt(clock):
    limit = CompileLimit(clock.monotonic)

    assert limit.allows(ONE, 2 * BURST)
    limit.charge(ONE, 2 * BURST)
    clock.advance(BURST / RATE)
    assert not limit.allows(ONE, 1)
    clock.advance(1.0)
    assert limit.allows(ONE, RATE)


def test_full_buckets_take_no_memory(clock):
    limit = CompileLimit(clock.monotonic)

    for number in range(5_000):
        limit.charge(Address(f"1.1.{number}", number), 10)
        clock.advance(1.0)

    assert len(limit) < 2_000


# Groups.


def test_what_was_compiled_before_costs_nothing(filters, compilations):
    said = wants("size = 1")
    filters.of_group("g", "orders", said, 1, ANOTHER)
    exhaust(filters)

    for _queue in range(16):
        filters.of_group("h", "orders", said, 1, ONE)

    assert compilations == ["size = 1"]


def test_an_expression_that_turns_out_wrong_at_the_pull_is_refused_with_the_reason(
    filters, compilations
):
    wrong = wants("size >", "wrong")

    for _ in range(3):
        with pytest.raises(Refused, match=r"did not compile.*ends too early") as refusal:
            filters.of_group("g", "wrong", wrong, 1, ONE)
        assert refusal.value.code == ResponseCode.FILTER_DATA_NOT_EXIST

    assert len(compilations) == 1  # not again with every pull


# Pulls.


def test_pulls_with_ever_new_expressions_are_answered_that_the_broker_is_busy(
    filters, clock, compilations
):
    filters.of_pull(long(0), "SQL92", ONE)
    exhaust(filters)
    compilations.clear()

    with pytest.raises(SystemBusy):
        filters.of_pull("size = 1", "SQL92", ONE)
    filters.of_pull(long(0), "SQL92", ONE)  # compiled before
    filters.of_pull("size = 1000", "SQL92", ANOTHER)
    clock.advance(3.0)
    filters.of_pull("size = 2", "SQL92", ONE)

    assert compilations == ["size = 1000", "size = 2"]


def test_a_pull_waits_for_a_later_step_when_another_expression_was_compiled_in_this_one(
    filters, compilations
):
    filters.must_wait = lambda: True

    with pytest.raises(CompileLater):
        filters.of_pull("size = 1", "SQL92", ONE)
    filters.of_pull("A || B", "TAG", ONE)

    assert compilations == []
    filters.of_pull("size = 1", "SQL92")
    filters.of_pull("size = 1", "SQL92", ONE)
    assert compilations == ["size = 1"]


def test_an_expression_that_is_too_long_costs_no_more_than_the_longest(filters, clock):
    with pytest.raises(Refused, match="32768 are allowed"):
        filters.of_pull("x" * 10_000_000, "SQL92", ONE)

    clock.advance(32_768 / RATE)
    filters.of_pull(long(1), "SQL92", ONE)


# Checks before a consumer begins.


def test_a_check_beyond_the_limit_passes_unread(filters, compilations):
    with pytest.raises(Refused, match="ends too early") as refusal:
        filters.check("size >", "SQL92", ONE)
    assert refusal.value.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    exhaust(filters)
    compilations.clear()

    filters.check("size > >", "SQL92", ONE)
    with pytest.raises(Refused, match="32768 are allowed"):
        filters.check("x" * 40_000, "SQL92", ONE)
    filters.is_enabled = False
    with pytest.raises(Refused, match="enablePropertyFilter"):
        filters.check(long(11), "SQL92", ONE)

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

    pulls = [client.pull("orders", sys_flag=0) for _ in range(40)]
    answers = await asyncio.wait_for(asyncio.gather(*pulls), 30)

    assert [bodies_in(answer) for answer in answers] == [[b"seven"]] * 40
    assert len(compilations) == 1


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
