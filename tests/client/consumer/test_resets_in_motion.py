"""Resets that meet queues on their way: each queue follows its own, the newest, and for certain."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.remoting.connection import Connection
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import MessageQueue, ResetOffsets
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import ResetOffsetRequest, UpdateConsumerOffsetRequest
from orbitmq.wire.javajson import encode_body
from tests.support.client import quick_settings
from tests.support.consumers import consumer_of, own_queues, send
from tests.support.consuming import DEADLINE, until
from tests.support.rebalancing import GROUP, QUICK, TOPIC, answering
from tests.support.slow_progress import FIRST, SECOND

#: Handlers are waited for longer than a test lasts; nothing is reported but what is told to be.
PATIENT = replace(QUICK, handover=4 * DEADLINE, persist=3600.0, persist_idle=0.0)

in_both_ways = pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "in order"])


@pytest.fixture
async def cluster():
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        yield cluster


class Handler:
    """Notes the messages of the first queue; one message waits until it may end."""

    def __init__(self, *, slow: tuple[Queue, int] | None = None) -> None:
        self._slow = slow
        self.seen: list[int] = []
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, message: ReceivedMessage) -> None:
        if message.queue == FIRST:
            self.seen.append(message.queue_offset)
        if (message.queue, message.queue_offset) == self._slow:
            self.has_begun.set()
            self.may_end.wait(DEADLINE)


@contextmanager
def letting_go(handler: Handler) -> Iterator[None]:
    """Nothing waits for ever, however a test ends."""
    try:
        yield
    finally:
        handler.may_end.set()


def member(
    cluster: AsyncEmbeddedCluster, name: str, handler: Handler, *, ordered: bool
) -> AsyncConsumer:
    """A member of the group; shares go by the names."""
    consumer = consumer_of(
        cluster,
        GROUP,
        ordered=ordered,
        rebalance=PATIENT,
        client=quick_settings(cluster.name_server, instance=name),
    )
    consumer.on(TOPIC)(handler)
    return consumer


async def push(
    cluster: AsyncEmbeddedCluster, consumer: AsyncConsumer, offsets: Mapping[Queue, int]
) -> None:
    """Tell one member, as brokers of Apache do."""
    channel = next(
        each.channel
        for each in cluster.brokers[0].parts.consumers.members(GROUP)
        if each.client.id == consumer.client_id
    )
    assert isinstance(channel, Connection)
    table = {
        MessageQueue(topic=queue.topic, broker_name=queue.broker, queue_id=queue.id): offset
        for queue, offset in offsets.items()
    }
    answer = await channel.request(
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
        ResetOffsetRequest(topic=TOPIC, group=GROUP, timestamp=0),
        body=encode_body(ResetOffsets(offset_table=table)),
        timeout=DEADLINE,
    )
    assert answer.code == ResponseCode.SUCCESS


async def one_idle_one_busy(
    cluster: AsyncEmbeddedCluster, consumer: AsyncConsumer, handler: Handler
) -> None:
    """Wait until five messages of the first queue are done, and one of the second is in hand."""
    await until(lambda: own_queues(consumer) == [FIRST, SECOND])
    await send(cluster, TOPIC, range(5), queue=FIRST)
    await until(lambda: consumer.positions().get(FIRST) == 5)
    await send(cluster, TOPIC, ["slow"], queue=SECOND)
    await asyncio.to_thread(handler.has_begun.wait, DEADLINE)
    handler.seen.clear()


def is_leaving(consumer: AsyncConsumer, queue: Queue) -> bool:
    owned = consumer._running.rebalancer.owned.get(queue)
    return owned is None or owned.is_draining


# ---- one push, several queues


@in_both_ways
async def test_a_reset_of_a_queue_that_goes_away_while_another_is_busy_is_not_lost(
    cluster, ordered
):
    handler, other = Handler(slow=(SECOND, 0)), Handler()
    with letting_go(handler):
        async with member(cluster, "b", handler, ordered=ordered) as consumer:
            await one_idle_one_busy(cluster, consumer, handler)

            pushing = asyncio.create_task(push(cluster, consumer, {FIRST: 2, SECOND: 0}))
            await until(lambda: is_leaving(consumer, SECOND))
            async with member(cluster, "a", other, ordered=ordered) as newcomer:
                await until(lambda: own_queues(newcomer) == [FIRST])
                # Whoever of them got there: the reset is followed, before the slow one has ended.
                await until(lambda: sorted({*handler.seen, *other.seen}) == [2, 3, 4])

                assert not handler.may_end.is_set()
                handler.may_end.set()
                await pushing


@in_both_ways
async def test_a_queue_is_reset_while_a_handler_is_at_work_on_another(cluster, ordered):
    handler = Handler(slow=(SECOND, 0))
    with letting_go(handler):
        async with member(cluster, "b", handler, ordered=ordered) as consumer:
            await one_idle_one_busy(cluster, consumer, handler)

            pushing = asyncio.create_task(push(cluster, consumer, {FIRST: 2, SECOND: 0}))
            await until(lambda: len(handler.seen) == 3)

            assert sorted(handler.seen) == [2, 3, 4]
            assert not handler.may_end.is_set()
            handler.may_end.set()
            await pushing


# ---- from one member to another


@contextmanager
def reports_held_back(broker: Broker, offset: int) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Have reports of one offset in the first queue wait: what says that one does, and lets it."""
    assert broker._dispatcher is not None
    usual = broker._dispatcher._handlers[RequestCode.UPDATE_CONSUMER_OFFSET]
    waits, may_go_on = asyncio.Event(), asyncio.Event()

    async def hold(connection: Connection, request: Command) -> Command:
        report = request.header(UpdateConsumerOffsetRequest)
        if (report.topic, report.queue_id, report.commit_offset) == (TOPIC, FIRST.id, offset):
            waits.set()
            await may_go_on.wait()
        answer = usual(connection, request)
        assert isinstance(answer, Command)
        return answer

    with answering(broker, RequestCode.UPDATE_CONSUMER_OFFSET, hold):
        yield waits, may_go_on


@in_both_ways
async def test_a_queue_that_goes_to_another_member_while_it_is_reset_takes_the_reset_with_it(
    cluster, ordered
):
    handler, other = Handler(), Handler()
    async with member(cluster, "b", handler, ordered=ordered) as consumer:
        await until(lambda: own_queues(consumer) == [FIRST, SECOND])
        await send(cluster, TOPIC, range(5), queue=FIRST)
        await until(lambda: consumer.positions().get(FIRST) == 5)
        handler.seen.clear()
        with reports_held_back(cluster.brokers[0], 2) as (waits, may_go_on):
            pushing = asyncio.create_task(push(cluster, consumer, {FIRST: 2}))
            await waits.wait()
            async with member(cluster, "a", other, ordered=ordered) as newcomer:
                await until(lambda: FIRST in newcomer._running.rebalancer.claimed)
                may_go_on.set()
                await pushing

                await until(lambda: sorted(other.seen) == [2, 3, 4])
    assert not handler.seen


@in_both_ways
async def test_a_reset_of_a_queue_that_is_just_taken_over_is_followed(cluster, ordered):
    handler, other = Handler(slow=(FIRST, 5)), Handler()
    with letting_go(handler):
        async with member(cluster, "b", handler, ordered=ordered) as consumer:
            await until(lambda: own_queues(consumer) == [FIRST, SECOND])
            await send(cluster, TOPIC, range(6), queue=FIRST)
            await asyncio.to_thread(handler.has_begun.wait, DEADLINE)
            async with member(cluster, "a", other, ordered=ordered) as newcomer:
                await until(lambda: FIRST in newcomer._running.rebalancer.claimed)

                await push(cluster, consumer, {FIRST: 2})
                await push(cluster, newcomer, {FIRST: 2})
                assert cluster.progress(GROUP, TOPIC)["broker-a", FIRST.id] == 2
                assert not handler.may_end.is_set()
                handler.may_end.set()

                await until(lambda: sorted(other.seen) == [2, 3, 4, 5])
    assert sorted(handler.seen) == list(range(6))
    assert cluster.progress(GROUP, TOPIC)["broker-a", FIRST.id] == 6
