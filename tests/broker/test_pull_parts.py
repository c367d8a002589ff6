"""Pulls whose filter looks into messages: processed in parts, with others in between."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from orbitmq.broker.broker import Broker
from orbitmq.broker.scheduler import JUDGEMENTS
from orbitmq.wire.bodies import SubscriptionData, TopicConfig
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import PullFlag, PullMessageResponse
from tests.support.broker import GROUP, RawClient, bodies_in, until
from tests.support.store import put

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
