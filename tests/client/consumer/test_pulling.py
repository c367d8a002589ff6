"""Pulling from real brokers."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from orbitmq.client.consumer.pull import PullDelay
from orbitmq.client.consumer.rebalance import Rebalancer
from orbitmq.client.consumer.settings import PullSettings
from orbitmq.client.consumer.subscriptions import Subscription
from orbitmq.client.routes import Queue
from tests.support.broker import RawClient, until
from tests.support.pulling import GROUP, TOPIC, pulling

DEADLINE = 20.0


def queue(number: int = 0, topic: str = TOPIC) -> Queue:
    return Queue(topic, "broker-a", number)


@pytest.mark.feature("B1")
async def test_pulls_follow_each_other_at_once_and_messages_come_in_order(cluster, sender):
    bodies = [b"%d" % number for number in range(100)]
    for body in bodies:
        await sender.stored(TOPIC, body)

    async with pulling(cluster.name_server) as member:
        member.own(queue())
        await until(lambda: len(member.taker.messages) == 100, DEADLINE)

        assert member.taker.bodies == bodies
        assert member.progress.read(queue()) == 100


@pytest.mark.feature("B1")
async def test_an_interval_spaces_pulls(cluster, sender):
    for _ in range(3):
        await sender.stored(TOPIC)
    settings = PullSettings(batch_size=1, interval=0.2, hold=1.0, timeout=5.0)

    async with pulling(cluster.name_server, settings=settings) as member:
        began = member.engine.clock.monotonic()
        member.own(queue())
        await until(lambda: len(member.taker.messages) == 3, DEADLINE)

        assert member.engine.clock.monotonic() - began >= 0.4


@pytest.mark.feature("B6")
async def test_a_message_that_arrives_during_a_held_pull_is_delivered_by_it(
    cluster, sender, caplog
):
    caplog.set_level(logging.DEBUG, "orbitmq.client.consumer")
    hold = PullSettings(hold=0.2, timeout=5.0)
    async with pulling(cluster.name_server, settings=hold) as member:
        owned = member.own(queue())
        began = owned.last_pull
        await until(lambda: owned.last_pull > began, DEADLINE)  # the first one came back empty

        await sender.stored(TOPIC, b"now")
        await until(lambda: member.taker.messages, DEADLINE)

        assert member.taker.bodies == [b"now"]
        assert member.puller.counts() == {}
        assert [r for r in caplog.records if r.levelno > logging.DEBUG] == []


@pytest.mark.feature("B3")
async def test_a_thousand_queues_need_no_thread_and_no_task_each(new_cluster):
    async with new_cluster() as cluster:
        await cluster.create_topic(TOPIC, queues=1000)
        sender = await RawClient.open(cluster.brokers[0])
        async with pulling(cluster.name_server) as member:
            await member.engine.heartbeat()
            threads, tasks = threading.active_count(), len(asyncio.all_tasks())

            for number in range(1000):
                member.own(queue(number))
            for number in range(1000):
                await sender.stored(TOPIC, queue_id=number)
            await until(lambda: len(member.taker.messages) == 1000, DEADLINE)

            assert len(member.puller.queues) == 1000
            # The broker, which is here as well, has some for the files that it saves.
            assert threading.active_count() - threads < 50
            assert len(asyncio.all_tasks()) - tasks < 50
        await sender.close()


@pytest.mark.feature("B9")
async def test_tags_with_the_same_hash_are_told_apart_by_their_text(cluster, sender):
    # "Aa" and "BB" have the same Java hash.
    for tag in ("BB", "Aa", "BB", "Aa", "BB"):
        await sender.stored(TOPIC, tag.encode(), properties={"TAGS": tag})

    async with pulling(cluster.name_server, Subscription.by_tags(TOPIC, "Aa || Cc")) as member:
        member.own(queue())
        await until(lambda: member.progress.read(queue()) == 5, DEADLINE)

        assert member.taker.bodies == [b"Aa", b"Aa"]


@pytest.mark.feature("B12")
async def test_in_broadcasting_pulls_carry_no_progress(cluster, sender):
    for _ in range(40):
        await sender.stored(TOPIC)

    async with pulling(cluster.name_server, is_broadcasting=True) as member:
        member.own(queue())
        await until(lambda: len(member.taker.messages) == 40, DEADLINE)
        await sender.stored(TOPIC)
        await until(lambda: len(member.taker.messages) == 41, DEADLINE)

        assert cluster.progress(GROUP, TOPIC) == {}


@pytest.mark.feature("B4")
@pytest.mark.feature("B14")
async def test_a_broker_that_restarts_is_pulled_again_without_loss_or_repetition(cluster, sender):
    async with pulling(cluster.name_server) as member:
        for number in range(4):
            member.own(queue(number))
        for number in range(4):
            await sender.stored(TOPIC, b"before", queue_id=number)
        await until(lambda: len(member.taker.messages) == 4, DEADLINE)

        await cluster.restart_broker()
        again = await RawClient.open(cluster.brokers[0])
        for number in range(4):
            await again.stored(TOPIC, b"after", queue_id=number)

        await until(lambda: len(member.taker.messages) == 8, DEADLINE)
        await again.close()
        assert sorted(member.taker.bodies) == [b"after"] * 4 + [b"before"] * 4


@pytest.mark.feature("B8")
async def test_an_illegal_offset_is_corrected_at_the_broker_and_the_queue_begun_anew(
    cluster, sender
):
    for _ in range(10):
        await sender.stored(TOPIC)

    async with pulling(cluster.name_server, reports_to_broker=True) as member:
        beyond_the_end = await sender.report(TOPIC, 5000)
        assert beyond_the_end.code == 0
        rebalancer = Rebalancer(
            member.engine,
            GROUP,
            lambda: [TOPIC],
            progress=member.progress,
            puller=member.puller,
            consumption=member.taker,
        )
        member.puller.rebuild = rebalancer.rebuild
        await rebalancer.start()
        await until(lambda: cluster.progress(GROUP, TOPIC).get(("broker-a", 0)) == 10, DEADLINE)
        await sender.stored(TOPIC, b"new")

        await until(lambda: member.taker.bodies == [b"new"], DEADLINE)
        await rebalancer.stop()

    assert cluster.progress(GROUP, TOPIC)["broker-a", 0] == 11
    assert member.puller.counts()[queue(), PullDelay.ILLEGAL_OFFSET] == 1
