"""How much one connection, and one host, may have compiled, and what becomes of the rest."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from orbitmq.broker import filters as compiledfilters
from orbitmq.broker.broker import Broker
from orbitmq.broker.errors import Refused, SystemBusy
from orbitmq.broker.filters import BURST, RATE, CompileLater, CompileLimit, FilterTable
from orbitmq.broker.scheduler import JUDGEMENTS
from orbitmq.filter.tags import compile_filter
from orbitmq.remoting.settings import Address
from orbitmq.wire.bodies import CheckClientRequest, SubscriptionData, TopicConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import PullFlag, PullMessageResponse
from orbitmq.wire.javajson import encode_body
from tests.support.broker import GROUP, RawClient, bodies_in, until
from tests.support.store import HandClock, put

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


async def test_a_pull_in_parts_gets_what_its_filter_lets_pass(broker, client):
    await fill(broker, client)

    answer = await by_sql(client, "price IN ('10', '300', '799', '800')")
    header = answer.header(PullMessageResponse)

    assert bodies_in(answer) == [b"10", b"300", b"799"]
    assert (header.next_begin_offset, header.max_offset) == (800, COUNT)


async def test_a_filter_looks_at_800_messages_however_many_are_asked_for(broker, client):
    await fill(broker, client)

    answer = await by_sql(client, "price < 0", max_msg_nums=1_000_000)

    assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
    assert answer.header(PullMessageResponse).next_begin_offset == 800


async def test_who_sends_does_not_wait_for_those_who_filter(broker, client, open_client):
    await fill(broker, client)
    readers = [await open_client(broker) for _ in range(8)]
    parts = len(readers) * 800 // JUDGEMENTS

    pulls = [asyncio.ensure_future(by_sql(reader, "price < 0")) for reader in readers]
    await until_in_parts(broker)
    waiting = len(broker.parts.pacing)
    await client.stored("payments")
    are_unfinished = not any(pull.done() for pull in pulls)
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*pulls)

    assert parts == 100
    assert waiting >= 1
    assert are_unfinished
    assert {answer.code for answer in answers} == {ResponseCode.PULL_RETRY_IMMEDIATELY}


async def test_a_step_of_the_loop_looks_into_few_messages_whoever_asks(broker, client, open_client):
    await fill(broker, client)
    readers = [await open_client(broker) for _ in range(8)]
    judged = spied(broker)
    pulls = [asyncio.ensure_future(by_sql(reader, "price < 0")) for reader in readers]

    most = await most_in_a_step(judged, *pulls)

    assert sum(judged) == 8 * 800
    assert most <= 2 * JUDGEMENTS


async def test_the_longer_an_expression_the_fewer_messages_a_step_looks_into(broker, client):
    await fill(broker, client)
    judged = spied(broker)
    text = " OR ".join(f"price = {-number}" for number in range(1, 200))

    pull = asyncio.ensure_future(by_sql(client, text))
    most = await most_in_a_step(judged, pull)

    assert sum(judged) == 800
    assert most <= 2 * JUDGEMENTS * 256 // len(text) < JUDGEMENTS // 2


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


async def test_a_batch_is_judged_in_slices_for_those_who_wait(broker, client, monkeypatch):
    await fill(broker, client)
    pull = asyncio.ensure_future(by_sql(client, "price < 0", offset=COUNT, hold=20.0))
    await until(lambda: len(broker.parts.held) == 1)
    looks: list[int] = []
    look = broker.parts.held._properties_at

    def noting(at):
        looks.append(1)
        return look(at)

    monkeypatch.setattr(broker.parts.held, "_properties_at", noting)
    for number in range(200):
        put(broker.parts.store, "orders", 0, b"%d" % number, {"price": str(number)})
    broker.parts.store.write()
    at_once = len(looks)
    await until(lambda: len(looks) == 200)
    put(broker.parts.store, "orders", 0, b"cheap", {"price": "-1"})
    broker.parts.store.write()

    async with asyncio.timeout(30):
        assert bodies_in(await pull) == [b"cheap"]
    assert at_once <= 2 * broker.parts.held.slices.at_once


async def test_a_pull_in_parts_is_told_that_its_topic_was_deleted(broker, client):
    await fill(broker, client)
    pull = asyncio.ensure_future(by_sql(client, "price < 0"))
    await until_in_parts(broker)

    broker.parts.topics.delete("orders", now=0.0)

    async with asyncio.timeout(30):
        assert (await pull).code == ResponseCode.TOPIC_NOT_EXIST


async def test_a_pull_in_parts_is_begun_anew_when_its_topic_was_made_anew(broker, client):
    await fill(broker, client)
    pull = asyncio.ensure_future(by_sql(client, "price IN ('10', '700')"))
    await until_in_parts(broker)
    before = broker.parts.topics.get("orders")
    assert before is not None

    broker.parts.topics.delete("orders", now=0.0)
    broker.parts.topics.ensure(msgspec.structs.replace(before), now=0.0)
    judged = spied(broker)

    async with asyncio.timeout(30):
        assert bodies_in(await pull) == [b"10", b"700"]
    assert sum(judged) == 800


async def test_a_pull_in_parts_goes_on_while_other_topics_are_made(broker, client):
    await fill(broker, client)
    judged = spied(broker)
    pull = asyncio.ensure_future(by_sql(client, "price IN ('10', '700')"))

    number = 0
    async with asyncio.timeout(30):
        while not pull.done():
            number += 1
            broker.parts.topics.ensure(TopicConfig(topic_name=f"t{number}"), now=0.0)
            await asyncio.sleep(0)

    assert bodies_in(pull.result()) == [b"10", b"700"]
    assert sum(judged) == 800


async def subscribed(client: RawClient, text: str, version: int) -> None:
    await client.heartbeat(
        "c1",
        SubscriptionData(
            topic="orders", sub_string=text, expression_type="SQL92", sub_version=version
        ),
    )


async def test_a_pull_in_parts_ends_when_its_group_is_forbidden(broker, client):
    await fill(broker, client)
    await subscribed(client, "price IN ('10', '700')", 5)
    pull = asyncio.ensure_future(client.pull("orders", sys_flag=0, sub_version=5))
    await until_in_parts(broker)

    broker.parts.groups.forbid(GROUP, "orders", is_forbidden=True, now=0.0)

    async with asyncio.timeout(30):
        assert (await pull).code == ResponseCode.NO_PERMISSION


async def test_a_pull_in_parts_is_begun_anew_for_another_subscription(broker, client):
    await fill(broker, client)
    await subscribed(client, "price IN ('10', '700')", 5)
    pull = asyncio.ensure_future(client.pull("orders", sys_flag=0, sub_version=5))
    await until_in_parts(broker)

    # As a heartbeat does, within a step.
    wanted = SubscriptionData(
        topic="orders", sub_string="price IN ('20', '600')", expression_type="SQL92", sub_version=6
    )
    broker.parts.consumers._groups[GROUP].subscriptions["orders"] = wanted
    broker.parts.consumers.revision += 1

    async with asyncio.timeout(30):
        assert bodies_in(await pull) == [b"20", b"600"]


async def test_a_pull_that_is_begun_anew_has_committed_and_was_held(broker, client, monkeypatch):
    broker.parts.topics.ensure(TopicConfig(topic_name="orders"), now=0.0)
    commits: list[int] = []
    monkeypatch.setattr(
        broker.parts.progress, "commit", lambda *given, **_: commits.append(given[3])
    )
    flag = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND | PullFlag.COMMIT_OFFSET
    pull = asyncio.ensure_future(
        by_sql(client, "price < 0", hold=20.0, sys_flag=int(flag), commit_offset=7)
    )
    await until(lambda: len(broker.parts.held) == 1)
    for number in range(COUNT):
        put(broker.parts.store, "orders", 0, b"%d" % number, {"price": str(number)})
    broker.parts.store.write()
    await until_in_parts(broker)
    before = broker.parts.topics.get("orders")
    assert before is not None

    broker.parts.topics.delete("orders", now=0.0)
    broker.parts.store.delete_topic("orders")
    broker.parts.topics.ensure(msgspec.structs.replace(before), now=0.0)

    async with asyncio.timeout(30):
        assert (await pull).code in (
            ResponseCode.PULL_NOT_FOUND,
            ResponseCode.PULL_OFFSET_MOVED,
            ResponseCode.PULL_RETRY_IMMEDIATELY,
        )
    assert commits == [7]
    assert len(broker.parts.held) == 0


async def test_who_looks_at_tags_does_not_wait_behind_those_who_do_not(broker, client, open_client):
    queues = 2 * broker.parts.held.slices.at_once
    for name in ("sql", "tags"):
        broker.parts.topics.ensure(
            TopicConfig(topic_name=name, read_queue_nums=queues, write_queue_nums=queues), now=0.0
        )
    others = [
        asyncio.ensure_future(
            client.pull(
                "sql", queue_id, hold=20.0, subscription="price < 0", expression_type="SQL92"
            )
        )
        for queue_id in range(queues)
    ]
    second = await open_client(broker)
    pull = asyncio.ensure_future(second.pull("tags", hold=20.0, subscription="good"))
    await until(lambda: len(broker.parts.held) == queues + 1)
    for queue_id in range(queues):
        put(broker.parts.store, "sql", queue_id, b"dear", {"price": "1"})
    put(broker.parts.store, "tags", 0, b"good", {"TAGS": "good"})

    broker.parts.store.write()
    waits = len(broker.parts.held.table.of_queue("tags", 0))

    assert waits == 0
    assert bodies_in(await pull) == [b"good"]
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
