"""A group that begins at "last" passes over nothing that comes after its first look at a queue.

The broker behaves as RocketMQ 5 does: of a queue without messages and without progress it says
"not found", and the client has to ask for the end as well. What is stored between the two requests
is stored by the broker itself, in the middle of answering, and not by luck.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from orbitmq.broker.settings import BrokerSettings
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.codes import RequestCode
from tests.support.client import quick_settings
from tests.support.consumers import consumer_of, own_queues, send
from tests.support.consuming import until
from tests.support.polling import BY_HAND, NO_TIMER, poll_until
from tests.support.polling import consumer as pull_consumer
from tests.support.rebalancing import TOPIC, answering, slipping_in

QUEUE = Queue(TOPIC, "broker-a", 0)

#: Says what the first messages are that a new group gets; is given the cluster.
Read = Callable[[AsyncEmbeddedCluster], Awaitable[list[bytes]]]


def as_5(settings: BrokerSettings, *, strict_last: bool = False) -> BrokerSettings:
    progress = replace(settings.progress, zero_for_empty=False, strict_last=strict_last)
    return replace(settings, progress=progress)


@contextlib.asynccontextmanager
async def running(
    *, old: int = 0, strict_last: bool = False
) -> AsyncIterator[AsyncEmbeddedCluster]:
    """A cluster with one queue, which may have messages of before."""
    async with AsyncEmbeddedCluster(adjust=partial(as_5, strict_last=strict_last)) as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        await send(cluster, TOPIC, ["old"] * old)
        yield cluster


async def by_handler(cluster: AsyncEmbeddedCluster, **options: Any) -> list[bytes]:
    consumer, seen = listening(cluster, **options)
    async with consumer:
        await until(lambda: own_queues(consumer) == [QUEUE])
        await send(cluster, TOPIC, ["end"])
        await until(lambda: b"end" in seen)
    return seen


def listening(cluster: AsyncEmbeddedCluster, **options: Any) -> tuple[AsyncConsumer, list[bytes]]:
    seen: list[bytes] = []
    consumer = consumer_of(cluster, consume_from="last", **options)
    consumer.on(TOPIC)(lambda message: seen.append(message.body))
    return consumer, seen


async def by_polls(
    cluster: AsyncEmbeddedCluster, *, is_assigned: bool = False, **options: Any
) -> list[bytes]:
    async with pull_consumer(cluster, consume_from="last", **options) as consumer:
        if is_assigned:
            await consumer.assign([QUEUE])
        else:
            consumer.subscribe(TOPIC)
        await until(lambda: consumer.assignment() == (QUEUE,))
        await send(cluster, TOPIC, ["end"])
        found = await poll_until(consumer, lambda found: any(each.body == b"end" for each in found))
    return [message.body for message in found]


READERS: dict[str, Read] = {
    "handler": by_handler,
    "in-order": partial(by_handler, ordered=True),
    "broadcasting": partial(by_handler, model="broadcasting"),
    "polls": partial(by_polls, polling=NO_TIMER),
    "polls-by-hand": partial(by_polls, polling=BY_HAND),
    "assigned": partial(by_polls, is_assigned=True, polling=NO_TIMER),
}


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # where broadcasting keeps its progress


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
async def test_what_comes_between_the_requests_of_a_start_is_consumed(read):
    async with running() as cluster:
        with slipping_in(cluster.brokers[0], TOPIC):
            seen = await read(cluster)

    assert seen == [b"slipped in", b"end"]


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
async def test_so_is_what_comes_to_a_queue_that_has_had_messages(read):
    async with running(old=3, strict_last=True) as cluster:
        with slipping_in(cluster.brokers[0], TOPIC):
            seen = await read(cluster)

    assert seen == [b"slipped in", b"end"]


@pytest.mark.parametrize(
    "code", [RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSET]
)
async def test_so_is_what_comes_while_the_broker_of_a_start_is_stopped(code):
    reached = asyncio.Event()

    async def silent(_, __):
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with running(old=3, strict_last=True) as cluster:
        consumer, seen = listening(cluster)
        with answering(cluster.brokers[0], code, silent):
            await consumer.start()
            await until(reached.is_set)
            await send(cluster, TOPIC, ["meanwhile"])
            await cluster.restart_broker()
        await until(lambda: seen)
        await consumer.stop()

    assert seen == [b"meanwhile"]


async def test_queues_that_a_topic_gets_later_are_consumed_from_their_beginning():
    async with running() as cluster:
        client = quick_settings(cluster.name_server, route_refresh=0.5)
        consumer, seen = listening(cluster, client=client)
        async with consumer:
            await until(lambda: own_queues(consumer) == [QUEUE])
            await cluster.create_topic(TOPIC, queues=2)
            await send(cluster, TOPIC, ["grown"], queue=Queue(TOPIC, "broker-a", 1))
            await until(lambda: seen)

    assert seen == [b"grown"]
