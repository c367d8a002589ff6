"""Consumers in order against a real broker: order, locks, pauses, dead letters."""

from __future__ import annotations

import asyncio
import threading

import pytest

from orbitmq.client.consumer.locks import BROKER_LOCK_LIFE, QueueLocks
from orbitmq.client.consumer.settings import ConsumeSettings, RebalanceSettings
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.message.properties import DLQ_ORIGIN_TOPIC
from tests.support.client import quick_settings, running_engine
from tests.support.consumers import committed, consumer_of, new_group, own_queues, send, until_owned
from tests.support.consuming import DEADLINE, until


@pytest.mark.feature("E9")
async def test_after_the_allowed_attempts_it_becomes_a_dead_letter_and_the_queue_goes_on(cluster):
    calls: list[tuple[str, int]] = []
    consumer = consumer_of(
        cluster, ordered=True, consume=ConsumeSettings(suspend=0.01, max_retries=2)
    )

    @consumer.on("orders")
    def handle(message: ReceivedMessage) -> None:
        calls.append((message.text(), message.attempt))
        if message.text() == "bad":
            raise ValueError("never works")

    async with consumer:
        await send(cluster, "orders", ["good", "bad", "next"], queue=Queue("orders", "broker-a", 1))
        await until(lambda: ("next", 1) in calls)
        dead_letters = f"%DLQ%{consumer.group}"
        await until(lambda: len(cluster.messages(dead_letters)) == 1)

    assert calls == [("good", 1), ("bad", 1), ("bad", 2), ("bad", 3), ("next", 1)]
    (dead,) = cluster.messages(dead_letters)
    assert dead.body == b"bad"
    assert dead.reconsume_times == 3
    assert dead.get_property(DLQ_ORIGIN_TOPIC) == "orders"
    assert dead.get_property("DLQ_REASON") == "ValueError: never works"
    assert committed(cluster, consumer.group, "orders") == 3
    assert ConsumeSettings().max_retries is None, "without a setting attempts go on for ever"


@pytest.mark.feature("E8")
async def test_a_failing_message_holds_its_own_queue_only(cluster):
    calls: list[tuple[int, str, int]] = []
    consumer = consumer_of(cluster, ordered=True, consume=ConsumeSettings(suspend=0.02))

    @consumer.on("orders")
    def handle(message: ReceivedMessage) -> None:
        calls.append((message.queue.id, message.text(), message.attempt))
        if message.text() == "bad" and message.attempt < 4:
            raise ValueError("not yet")

    async with consumer:
        await send(cluster, "orders", ["bad", "after"], queue=Queue("orders", "broker-a", 0))
        await send(cluster, "orders", ["x", "y"], queue=Queue("orders", "broker-a", 1))
        await until(lambda: sum(consumer.positions().values()) == 4)

    held = [(text, attempt) for queue, text, attempt in calls if queue == 0]
    assert held == [("bad", 1), ("bad", 2), ("bad", 3), ("bad", 4), ("after", 1)]
    assert [text for queue, text, _ in calls if queue == 1] == ["x", "y"]
    assert cluster.messages(f"%RETRY%{consumer.group}") == []
    assert ConsumeSettings().suspend == 1.0


@pytest.mark.feature("E4")
async def test_a_queue_is_not_given_up_while_its_handler_runs(cluster):
    group = new_group()
    entered, opened = threading.Event(), threading.Event()
    seen: list[tuple[str, str]] = []

    def slow(message):
        entered.set()
        opened.wait(DEADLINE)
        seen.append(("first", message.text()))

    # By their names, the first one keeps queues 0 and 1, and the second one gets 2 and 3.
    first, second = (
        consumer_of(
            cluster,
            group,
            ordered=True,
            client=quick_settings(cluster.name_server, instance=name),
            rebalance=RebalanceSettings(handover=0.1),
        )
        for name in ("a", "b")
    )
    first.on("orders")(slow)
    second.on("orders")(lambda message: seen.append(("second", message.text())))
    await send(cluster, "orders", ["a", "b"], queue=Queue("orders", "broker-a", 3))
    async with first:
        assert await asyncio.to_thread(entered.wait, DEADLINE)
        async with second:
            await until_owned(first, 3)  # the last one is to be given up, and is not yet
            assert Queue("orders", "broker-a", 3) in first.assignment()
            assert not seen

            opened.set()
            await until(lambda: len(seen) == 2)
            await until_owned(second, 2)

    assert seen == [("first", "a"), ("second", "b")]


@pytest.mark.feature("E11")
async def test_a_new_owner_goes_on_at_once_after_a_graceful_stop(cluster):
    group = new_group()
    first, second = (consumer_of(cluster, group, ordered=True) for _ in range(2))
    for member in (first, second):
        member.on("orders")(lambda message: None)

    async with second:
        async with first:
            await until(lambda: (len(own_queues(first)), len(own_queues(second))) == (2, 2))
        # Far below the 60 s after which a broker lets go of a lock by itself.
        async with asyncio.timeout(BROKER_LOCK_LIFE / 2):
            await until_owned(second, 4)
    async with running_engine(cluster.name_server) as stranger:
        queues = await stranger.routes.subscribe_queues("orders")
        free = await QueueLocks(stranger, group).acquire(queues)

    assert set(free) == set(queues)
