"""Rows of features whose rules have tests of their own, shown once from end to end.

The brokers live in another process; what members of a group do is seen as their users see it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.settings import PullSettings
from orbitmq.client.consumer.strategies import share, strategy_named
from orbitmq.client.consumer.verdict import Verdict
from orbitmq.client.idempotence import Idempotence
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.consumers import (
    consumer_of,
    fill,
    own_queues,
    producer_of,
    send,
    until_retry_is_owned,
)
from tests.support.consuming import DEADLINE, until

QUEUE_COUNT = 8
ONE = Queue("orders", "broker-a", 0)


# ---- shares


@pytest.mark.feature("A3")
@pytest.mark.feature("A5")
@pytest.mark.feature("A17")
async def test_members_share_the_queues_in_contiguous_pages_without_anybody_who_tells_them(cluster):
    members = await _group(cluster, "AVG")
    try:
        await until(lambda: sorted(map(len, _shares(members))) == [2, 3, 3])
        shares = _shares(members)
    finally:
        await asyncio.gather(*(member.stop() for member in members))

    # By client id, as everybody sorts them: Java's averaging gives the first ones more.
    assert [[queue.id for queue in queues] for queues in shares] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert len({member.client_id for member in members}) == 3


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("CONSISTENT_HASH", marks=pytest.mark.feature("A6")),
        pytest.param("AVG_BY_CIRCLE", marks=pytest.mark.feature("A7")),
    ],
)
async def test_members_share_the_queues_by_the_strategy_that_all_of_them_have(cluster, strategy):
    members = await _group(cluster, strategy)
    ids = sorted(member.client_id for member in members)
    everything = [Queue("orders", "broker-a", number) for number in range(QUEUE_COUNT)]
    # Equal with Java's by recorded answers of its classes: see test_allocation.
    wanted = [
        sorted(share(strategy_named(strategy, "strategy"), everything, ids, member.client_id))
        for member in members
    ]
    try:
        await until(lambda: _shares(members) == wanted)
    finally:
        await asyncio.gather(*(member.stop() for member in members))

    assert sorted(queue for queues in wanted for queue in queues) == everything


async def _group(cluster: AsyncEmbeddedCluster, strategy: str) -> list[AsyncConsumer]:
    """Three members at work, in the order of their client ids."""
    members = [consumer_of(cluster, "sharing", strategy=strategy) for _ in range(3)]
    for member in members:
        member.on("orders")(lambda message: None)
        await member.start()
    return sorted(members, key=lambda member: member.client_id)


def _shares(members: list[AsyncConsumer]) -> list[list[Queue]]:
    return [own_queues(member) for member in members]


# ---- fetching


@pytest.mark.feature("B5")
async def test_a_pull_without_messages_waits_at_the_broker_and_is_answered_by_their_arrival(
    cluster,
):
    came_at: list[float] = []
    consumer = consumer_of(cluster)
    consumer.on("orders")(lambda message: came_at.append(time.monotonic()))
    async with consumer, producer_of(cluster) as producer:
        await until_retry_is_owned(consumer)
        # One for each queue, and one for the retry topic.
        await _until_held(cluster, QUEUE_COUNT + 1)
        # Far longer than a pull that is not held.
        watched = 10 * PullSettings().flow_delay
        held_since = cluster.clock.now()
        await until(lambda: cluster.clock.now() - held_since > watched)
        sent_at = time.monotonic()
        await producer.send("orders", "x", queue=ONE)
        await until(lambda: came_at)
        fetched = consumer.statistics().topics["orders"]
        await _until_held(cluster, QUEUE_COUNT + 1)

    assert PullSettings().hold == 15.0
    assert came_at[0] - sent_at < PullSettings().hold - 5, "it came with the end of the hold"
    assert fetched.pulled == 1
    assert fetched.pull_time > 10 * PullSettings().flow_delay, (
        "the pull that was held is the one that was answered"
    )


async def _until_held(cluster: AsyncEmbeddedCluster, count: int) -> None:
    """Wait until so many pulls wait at the broker, by its own account."""
    async with AsyncAdmin(name_server=cluster.name_server) as admin, asyncio.timeout(DEADLINE):
        while (await admin.runtime("broker-a")).raw["heldPulls"] != str(count):  # noqa: ASYNC110  # is asked for
            await asyncio.sleep(0.01)


# ---- handling


@pytest.mark.feature("D3")
@pytest.mark.feature("D4")
async def test_a_listener_says_what_becomes_of_messages_and_silence_or_an_error_is_a_failure(
    cluster,
):
    seen: list[tuple[str, int]] = []
    consumer = consumer_of(cluster)

    def listen(messages, context):
        (message,) = messages
        seen.append((message.text(), message.attempt))
        if message.attempt > 1 or message.text() == "done":
            return Verdict.SUCCESS
        if message.text() == "raises":
            raise ValueError("no")
        return Verdict.RETRY if message.text() == "later" else None

    consumer.listen("orders", listen)
    async with consumer:
        await send(cluster, "orders", ["done", "later", "raises", "silent"])
        await until(lambda: consumer.statistics().sent_back == 3)
        await until_retry_is_owned(consumer)
        cluster.advance(10)
        await until(lambda: len(seen) == 7)

    assert Counter(seen) == Counter(
        [("done", 1)]
        + [(text, number) for text in ("later", "raises", "silent") for number in (1, 2)]
    )


@pytest.mark.feature("D5")
async def test_of_a_batch_those_after_the_acknowledged_ones_come_again(cluster):
    seen: list[list[tuple[str, int]]] = []
    consumer = consumer_of(cluster, batch_size=4)

    @consumer.on("orders")
    def bill(messages: list[ReceivedMessage]) -> int | None:
        seen.append([(message.text(), message.attempt) for message in messages])
        return 1 if len(seen) == 1 else None  # the first two are done

    await fill(cluster, "orders", 4, queue=ONE)
    async with consumer:
        await until(lambda: consumer.statistics().sent_back == 2)
        await until_retry_is_owned(consumer)
        cluster.advance(10)
        await until(lambda: sum(map(len, seen)) == 6)

    assert seen[0] == [("0", 1), ("1", 1), ("2", 1), ("3", 1)]
    assert sorted(each for batch in seen[1:] for each in batch) == [("2", 2), ("3", 2)]


@pytest.mark.feature("D14")
async def test_a_message_that_was_sent_twice_is_handled_once_with_the_helper(cluster):
    seen: list[str] = []
    consumer = consumer_of(
        cluster, middleware=[Idempotence(key=lambda message: message.keys[0], retry=0.05)]
    )
    consumer.on("orders")(lambda message: seen.append(message.text()))

    async with consumer, producer_of(cluster) as producer:
        for _ in range(3):
            await producer.send("orders", "paid", keys="order-1", queue=ONE)
        await producer.send("orders", "last", keys="order-2", queue=ONE)
        await until(lambda: consumer.positions().get(ONE) == 4)

    assert Counter(seen) == {"paid": 1, "last": 1}


@pytest.mark.feature("E3")
async def test_in_order_each_queue_is_handled_by_one_worker_at_a_time_of_one_member(cluster):
    busy: Counter[int] = Counter()
    seen: dict[int, list[int]] = {}
    most = 0
    members = [consumer_of(cluster, "ordered", ordered=True, workers=8) for _ in range(2)]

    async def bill(message):
        nonlocal most
        queue = message.queue.id
        busy[queue] += 1
        most = max(most, busy[queue])
        await asyncio.sleep(0)
        seen.setdefault(queue, []).append(message.queue_offset)
        busy[queue] -= 1

    for member in members:
        member.on("orders")(bill)
    async with members[0]:
        for number in range(QUEUE_COUNT):
            await fill(cluster, "orders", 20, queue=Queue("orders", "broker-a", number))
        async with members[1]:
            await until(lambda: sum(map(len, seen.values())) == 20 * QUEUE_COUNT)

    assert most == 1
    assert seen == {number: list(range(20)) for number in range(QUEUE_COUNT)}
