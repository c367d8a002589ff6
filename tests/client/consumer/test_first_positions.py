"""Where a queue without progress is begun is its progress: what comes after is never passed over.

Everything begins at the end, strictly, which moves on with every message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from orbitmq.broker.settings import BrokerSettings
from orbitmq.client.consumer.progress import BrokerProgress, ConsumeFrom, MemoryProgress
from orbitmq.client.engine import Engine, _State
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.codes import RequestCode
from tests.support.consumers import consumer_of, own_queues, send
from tests.support.consuming import until
from tests.support.polling import BY_HAND, NO_TIMER
from tests.support.polling import consumer as pull_consumer
from tests.support.rebalancing import GROUP, TOPIC, Consumer, Group, refusing

QUEUE = Queue(TOPIC, "broker-a", 0)


@pytest.fixture
async def cluster():
    """One queue, with three messages of before."""
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        await send(cluster, TOPIC, ["old"] * 3)
        yield cluster


def strictly_last(cluster: AsyncEmbeddedCluster, **changes: Any) -> Group:
    def progress(engine: Engine) -> BrokerProgress:
        return BrokerProgress(engine, GROUP, strict_last=True)

    given: dict[str, Any] = {"consume_from": ConsumeFrom.LAST, "progress_of": progress} | changes
    return Group(cluster.name_server, **given)


def stored(cluster: AsyncEmbeddedCluster) -> dict[tuple[str, int], int]:
    return cluster.progress(GROUP, TOPIC)


@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
async def test_what_is_sent_between_two_lives_of_a_consumer_comes_in_the_second(
    cluster, model, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))  # where broadcasting keeps its progress
    seen: list[bytes] = []

    def consumer():
        strict = {"strict_last": True} if model == "clustering" else {}
        made = consumer_of(cluster, GROUP, consume_from="last", model=model, **strict)
        made.on(TOPIC)(lambda message: seen.append(message.body))
        return made

    async with consumer() as first:
        await until(lambda: own_queues(first) == [QUEUE])
    await send(cluster, TOPIC, ["between"])
    async with consumer():
        await until(lambda: seen)

    assert seen == [b"between"]


async def test_a_message_in_hand_when_its_consumer_is_killed_comes_to_the_next_one(cluster):
    taken: list[bytes] = []

    async def stuck(_, message):
        taken.append(message.body)
        await asyncio.Event().wait()

    async with strictly_last(cluster) as group:
        first = await group.join(handler=stuck)
        await until(lambda: first.owned == {QUEUE})
        await send(cluster, TOPIC, ["in hand"])
        await until(lambda: taken)
        await first.kill()
        await group.join()
        await until(lambda: (QUEUE, 3) in group.ledger.consumed)

    assert group.ledger.consumed == {(QUEUE, 3): 1}


async def test_a_beginning_is_at_the_broker_before_the_queue_is_pulled(cluster):
    async with strictly_last(cluster) as group:
        member = await group.join()
        begin, told = member.puller.begin, []

        def watched(owned):
            told.append(stored(cluster))
            begin(owned)

        member.puller.begin = watched  # type: ignore[method-assign]
        await until(lambda: member.owned == {QUEUE})

    assert told == [{("broker-a", 0): 3}]


async def test_a_beginning_that_the_broker_only_supposes_is_put_by_too(cluster):
    async with Group(cluster.name_server, consume_from=ConsumeFrom.LAST) as group:
        member = await group.join(handler=_stuck)
        await until(lambda: member.owned == {QUEUE})

        assert stored(cluster) == {("broker-a", 0): 0}
        await member.kill()


async def _stuck(_: Consumer, __: ReceivedMessage) -> None:
    await asyncio.Event().wait()


async def test_a_queue_whose_beginning_cannot_be_put_by_is_begun_later(cluster):
    class Reluctant(MemoryProgress):
        is_away = True

        async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
            if self.is_away:
                raise BrokerUnavailable("broker-a", "the test says so")
            return await super().store(changed)

    progress = Reluctant()
    async with strictly_last(cluster, progress_of=lambda _: progress) as group:
        member = await group.join()
        await until(lambda: member.rebalancer.counts.postponed >= 2)
        assert member.owned == set()
        await send(cluster, TOPIC, ["new"])

        progress.is_away = False
        await until(lambda: member.owned == {QUEUE})
        # From 3 on if the broker was asked for the end just before something was sent.
        await until(lambda: progress.read(QUEUE) == 4)

    assert progress.kept == {QUEUE: 4}


async def test_a_broker_that_refuses_progress_is_pulled_from_and_told_when_it_takes_it(cluster):
    async with strictly_last(cluster, pulls_report=False) as group:
        with refusing(cluster.brokers[0], RequestCode.UPDATE_CONSUMER_OFFSET):
            member = await group.join()
            await until(lambda: member.owned == {QUEUE})
            assert stored(cluster) == {}
        await member.stop()

    assert stored(cluster) == {("broker-a", 0): 3}


@pytest.mark.parametrize("is_assigned", [False, True], ids=["subscribed", "assigned"])
@pytest.mark.parametrize(("polling", "expected"), [(NO_TIMER, {("broker-a", 0): 3}), (BY_HAND, {})])
async def test_a_pull_consumer_puts_its_beginning_by_unless_it_commits_by_hand(
    polling, expected, is_assigned
):
    async with AsyncEmbeddedCluster(adjust=_strict) as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        await send(cluster, TOPIC, ["old"] * 3)
        async with pull_consumer(cluster, polling=polling, consume_from="last") as consumer:
            if is_assigned:
                await consumer.assign([QUEUE])
            else:
                consumer.subscribe(TOPIC)
            await until(lambda: consumer.assignment() == (QUEUE,))

            assert stored(cluster) == expected


async def kill(consumer: AsyncPullConsumer) -> None:
    """End as a process that is killed: nothing is said, connections just close."""
    consumer._core.puller.stop()
    engine = consumer._core.engine
    engine._state = _State.STOPPING
    await engine._end()


async def test_who_commits_by_hand_commits_the_beginning_to_lose_nothing_after_it():
    async with AsyncEmbeddedCluster(adjust=_strict) as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        await send(cluster, TOPIC, ["old"] * 3)
        async with pull_consumer(cluster, polling=BY_HAND, consume_from="last") as consumer:
            await consumer.assign([QUEUE])
            at = {queue: consumer.position(queue) for queue in consumer.assignment()}

            assert await consumer.commit(at) == {QUEUE: 3}
            assert stored(cluster) == {("broker-a", 0): 3}


def _strict(settings: BrokerSettings) -> BrokerSettings:
    return replace(settings, progress=replace(settings.progress, strict_last=True))
