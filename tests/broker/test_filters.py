"""Filters of pulls: where they come from, what is kept, and how much is compiled and judged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from orbitmq.broker import filters as filter_table
from orbitmq.broker.broker import Broker
from orbitmq.broker.errors import Refused, SystemBusy
from orbitmq.broker.filters import BURST, RATE, CompileLimit, FilterTable
from orbitmq.broker.scheduler import JUDGEMENTS
from orbitmq.filter.tags import compile_filter
from orbitmq.remoting.settings import Address
from orbitmq.wire.bodies import SubscriptionData, TopicConfig
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import PullMessageResponse
from tests.support.broker import GROUP, RawClient, bodies_in, until
from tests.support.store import HandClock, put

ONE, ANOTHER = Address("1.1.1.1", 1), Address("2.2.2.2", 1)
CODE = ResponseCode


def wants(text: str, version: int) -> SubscriptionData:
    return SubscriptionData(
        topic="orders", sub_string=text, sub_version=version, expression_type="SQL92"
    )


@pytest.fixture
def clock():
    return HandClock(1_700_000_000.0)


@pytest.fixture
def filters(clock):
    return FilterTable(is_enabled=True, monotonic=clock.monotonic)


@pytest.fixture
def compilations(monkeypatch):
    """The SQL expressions that were compiled."""
    done: list[str] = []

    def counted(text, kind, *, lenient):
        if kind == "SQL92":
            done.append(text)
        return compile_filter(text, kind, lenient=lenient)

    monkeypatch.setattr(filter_table, "compile_filter", counted)
    return done


def long(number: int) -> str:
    """An expression of about 20,000 characters that accepts one size."""
    return f"size = {number} OR name = '{'x' * 20_000}'"


def tag_list(number: int, tags: int = 4_000) -> str:
    return "||".join(f"{number + tag:05}" for tag in range(0, tags * 100, 100))


def exhaust(filters: FilterTable) -> None:
    """Use up what a connection may have compiled."""
    filters.limit.charge(ONE, BURST)


def refusal(call: Callable[..., object], *args: object) -> int | None:
    try:
        call(*args)
    except Refused as refused:
        return refused.code
    return None


# What is served and refused.


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize(
    ("text", "kind", "code", "code_if_disabled"),
    [
        ("A", "TAG", None, None),
        ("||", "TAG", CODE.SUBSCRIPTION_PARSE_FAILED, CODE.SUBSCRIPTION_PARSE_FAILED),
        ("x" * 32_769, None, CODE.SUBSCRIPTION_PARSE_FAILED, CODE.SUBSCRIPTION_PARSE_FAILED),
        ("price > 5", "SQL92", None, CODE.SYSTEM_ERROR),
        ("price >", "SQL92", CODE.SUBSCRIPTION_PARSE_FAILED, CODE.SYSTEM_ERROR),
        ("x" * 40_000, "SQL92", CODE.SUBSCRIPTION_PARSE_FAILED, CODE.SYSTEM_ERROR),
        ("x", "XPATH", CODE.SUBSCRIPTION_PARSE_FAILED, CODE.SYSTEM_ERROR),
        # No expression at all.
        ("", "SQL92", CODE.SUBSCRIPTION_PARSE_FAILED, CODE.SUBSCRIPTION_PARSE_FAILED),
    ],
)
def test_an_expression_is_refused_by_its_kind_its_length_and_its_text(
    filters, text, kind, code, code_if_disabled, is_enabled
):
    filters.is_enabled = is_enabled
    expected = code if is_enabled else code_if_disabled
    assert refusal(filters.of_pull, text, kind) == expected
    # A consumer asks before it begins; tags and an empty text are not parsed for that.
    if text not in ("||", ""):
        assert refusal(filters.check, text, kind) == expected


def test_the_end_of_an_expression_of_a_group_is_ignored_and_logged_once(filters, caplog):
    for version in (1, 2):
        said = wants("price > 5 LIKE 'x'", version)
        found = filters.of_group("g", "orders", said, version)
        assert found.accepts_properties({"price": "6"})

    assert caplog.text.count("the end of a subscription is ignored") == 1


# What is kept.


def test_filters_are_limited_by_the_memory_that_they_take():
    filters = FilterTable(tag_cache_bytes=300_000)
    short = filters.of_pull("A", "TAG")

    for number in range(12):
        filters.of_pull(tag_list(number, 2_000), "TAG")
        assert filters.of_pull("A", "TAG") is short  # what is used stays

    assert 200_000 < filters.bytes <= 300_000


# What a connection, and a host, may have compiled.


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


def test_full_buckets_take_no_memory(clock):
    limit = CompileLimit(clock.monotonic)

    for number in range(5_000):
        limit.charge(Address(f"1.1.{number}", number), 10)
        clock.advance(1.0)

    assert len(limit) < 2_000


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


@pytest.fixture
async def still(broker):
    """A broker whose buckets do not fill again."""
    broker.parts.filters.limit = CompileLimit(lambda: 0.0)
    return broker


async def test_pulls_that_come_together_are_compiled_once_and_all_answered(
    still, open_client, compilations
):
    clients = [await open_client(still) for _ in range(3)]
    await clients[0].stored("orders", b"seen", properties={"size": "7"})
    pulls = [
        client.pull("orders", subscription=text, expression_type="SQL92")
        for client in clients
        for text in (f"size <> {id(client)}", long(7)) * 5
    ]

    answers = await asyncio.wait_for(asyncio.gather(*pulls), 30)

    assert [bodies_in(answer) for answer in answers] == [[b"seen"]] * 30
    assert len(compilations) == 4


# Pulls in parts: a step of the loop judges few messages by their properties.


COUNT = 1000


async def fill(broker: Broker, client: RawClient) -> None:
    """Messages with a price from 0 on."""
    await client.stored("orders", b"0", queue_id=0, properties={"price": "0"})
    for number in range(1, COUNT):
        put(broker.parts.store, "orders", 0, b"%d" % number, {"price": str(number)})
    broker.parts.store.write()


async def by_sql(client: RawClient, text: str, **fields: Any) -> Command:
    return await client.pull("orders", subscription=text, expression_type="SQL92", **fields)


async def until_in_parts(broker: Broker) -> None:
    """Return when a pull waits for its next part."""
    async with asyncio.timeout(30):
        while not len(broker.parts.pacing):  # noqa: ASYNC110  # a step of the loop at a time
            await asyncio.sleep(0)


def spied(broker: Broker) -> list[int]:
    """How many messages filters look into from now on, part by part."""
    judged: list[int] = []
    pacing = broker.parts.pacing
    note = pacing.judged

    def noting(messages: int, most: int = JUDGEMENTS) -> None:
        judged.append(messages)
        note(messages, most)

    pacing.judged = noting  # type: ignore[method-assign]  # as a spy
    return judged


async def most_in_a_step(judged: list[int], *pulls: asyncio.Future[Command]) -> int:
    """The most messages that one step of the loop looks into, until the pulls are answered."""
    most = 0
    async with asyncio.timeout(30):
        while not all(pull.done() for pull in pulls):
            before = len(judged)
            await asyncio.sleep(0)
            most = max(most, sum(judged[before:]))
    return most


async def test_a_filter_judges_800_messages_in_parts(broker, client):
    await fill(broker, client)

    answer = await by_sql(client, "price IN ('10', '300', '799', '800')", max_msg_nums=1_000_000)
    header = answer.header(PullMessageResponse)

    assert bodies_in(answer) == [b"10", b"300", b"799"]
    assert (header.next_begin_offset, header.max_offset) == (800, COUNT)


@pytest.mark.parametrize(
    ("readers", "terms", "most"),
    [(8, 1, 2 * JUDGEMENTS), (1, 199, JUDGEMENTS // 2)],
    ids=["many readers", "a long expression"],
)
async def test_a_step_of_the_loop_judges_few_messages_while_others_are_served(
    broker, client, open_client, readers, terms, most
):
    await fill(broker, client)
    judged = spied(broker)
    text = " OR ".join(f"price = {-number - 1}" for number in range(terms))
    pulls = [asyncio.ensure_future(by_sql(await open_client(broker), text)) for _ in range(readers)]
    await until_in_parts(broker)
    in_a_step = asyncio.ensure_future(most_in_a_step(judged, *pulls))
    await client.stored("payments")
    were_done = all(pull.done() for pull in pulls)

    assert await in_a_step <= most
    assert sum(judged) == readers * 800
    assert not were_done
    assert {pull.result().code for pull in pulls} == {ResponseCode.PULL_RETRY_IMMEDIATELY}


async def test_a_pull_that_was_held_is_processed_in_parts_as_well(broker, client):
    await fill(broker, client)
    pull = asyncio.ensure_future(by_sql(client, "price IN ('1', '699')", offset=COUNT, hold=20.0))
    await until(lambda: len(broker.parts.held) == 1)
    judged = spied(broker)
    for number in range(COUNT):
        put(broker.parts.store, "orders", 0, b"%d" % number, {"price": str(number)})
    broker.parts.store.write()

    most = await most_in_a_step(judged, pull)

    assert bodies_in(pull.result()) == [b"1", b"699"]
    assert most <= 2 * JUDGEMENTS
    assert sum(judged) == 800


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda parts: parts.topics.delete("orders", now=0.0), ResponseCode.TOPIC_NOT_EXIST),
        (
            lambda parts: parts.groups.forbid(GROUP, "orders", is_forbidden=True, now=0.0),
            ResponseCode.NO_PERMISSION,
        ),
        (
            lambda parts: parts.topics.ensure(TopicConfig(topic_name="t1"), now=0.0),
            ResponseCode.SUCCESS,
        ),
    ],
    ids=["topic deleted", "group forbidden", "another topic"],
)
async def test_a_pull_in_parts_is_checked_again_with_every_part(broker, client, change, code):
    await fill(broker, client)
    await client.heartbeat("c1", wants("price IN ('10', '700')", 5))
    judged = spied(broker)
    pull = asyncio.ensure_future(client.pull("orders", sys_flag=0, sub_version=5))
    await until_in_parts(broker)

    change(broker.parts)
    async with asyncio.timeout(30):
        answer = await pull

    assert answer.code == code
    assert (sum(judged) == 800) is (code == ResponseCode.SUCCESS)


@pytest.mark.parametrize("change", ["subscription", "topic"])
async def test_a_pull_in_parts_is_answered_empty_after_a_change(
    broker, client, open_client, change
):
    await fill(broker, client)
    await client.heartbeat("c1", wants("price IN ('10', '700')", 5))
    member = await open_client(broker)
    await client.pull("orders", sys_flag=0, sub_version=5)  # has the expression compiled
    pulls = [
        asyncio.ensure_future(client.pull("orders", sys_flag=0, sub_version=5)) for _ in range(8)
    ]
    await until_in_parts(broker)

    if change == "subscription":
        await member.heartbeat("c1", wants("price IN ('20', '600')", 6))
    else:
        config = broker.parts.topics.get("orders")
        broker.parts.topics.delete("orders", now=0.0)
        broker.parts.topics.ensure(msgspec.structs.replace(config), now=0.0)
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*pulls)
        again = await client.pull("orders", sys_flag=0, sub_version=5)

    assert ResponseCode.PULL_RETRY_IMMEDIATELY in {answer.code for answer in answers}
    assert bodies_in(again) == ([b"20", b"600"] if change == "subscription" else [b"10", b"700"])
