"""Resets whose report reaches no consumer, or one that is about to release the queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orbitmq.remoting.connection import Connection
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import PullMessageRequest, ResetOffsetRequest
from tests.client.consumer.test_resets_in_motion import Handler, is_leaving, letting_go, member
from tests.support.broker import RawClient
from tests.support.consumers import own_queues, send
from tests.support.consuming import DEADLINE, until
from tests.support.rebalancing import GROUP, TOPIC, answering
from tests.support.slow_progress import FIRST, SECOND


@pytest.fixture
async def cluster():
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        yield cluster


async def reset(cluster: AsyncEmbeddedCluster, offset: int) -> None:
    """Reset the first queue, as an administrator does."""
    client = await RawClient.open(cluster.brokers[0])
    asked = ResetOffsetRequest(
        topic=TOPIC, group=GROUP, timestamp=-1, queue_id=FIRST.id, offset=offset, is_force=True
    )
    code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
    answer = await client.connection.request(code, asked, timeout=DEADLINE)
    assert answer.code == ResponseCode.SUCCESS
    await client.close()


async def test_a_reset_is_followed_although_its_report_is_lost_with_the_connection(cluster):
    broker, handler = cluster.brokers[0], Handler()
    lost: list[PullMessageRequest] = []
    usual: Any = broker._dispatcher._handlers[RequestCode.PULL_MESSAGE]

    def lose(connection: Connection, request: Command) -> Any:
        pull = request.header(PullMessageRequest)
        if (pull.topic, pull.queue_id, lost) == (TOPIC, FIRST.id, []):
            lost.append(pull)
            broker.parts.progress.reset(TOPIC, GROUP, FIRST.id, 2)
            connection.abort()
        return usual(connection, request)

    async with member(cluster, "a", handler, ordered=False) as consumer:
        await until(lambda: own_queues(consumer) == [FIRST, SECOND])
        await send(cluster, TOPIC, range(5), queue=FIRST)
        await until(lambda: consumer.positions().get(FIRST) == 5)
        with answering(broker, RequestCode.PULL_MESSAGE, lose):
            await send(cluster, TOPIC, ["more"], queue=FIRST)
            await until(lambda: lost)
        handler.seen.clear()

        await until(lambda: sorted(handler.seen) == [2, 3, 4, 5])
    assert cluster.progress(GROUP, TOPIC)["broker-a", FIRST.id] == 6


async def test_a_reset_of_a_queue_that_is_being_released_is_not_undone_by_the_last_commit(cluster):
    handler, other = Handler(slow=(FIRST, 5)), Handler()
    with letting_go(handler):
        async with member(cluster, "b", handler, ordered=False) as consumer:
            await until(lambda: own_queues(consumer) == [FIRST, SECOND])
            await send(cluster, TOPIC, range(6), queue=FIRST)
            await asyncio.to_thread(handler.has_begun.wait, DEADLINE)
            async with member(cluster, "a", other, ordered=False):
                await until(lambda: is_leaving(consumer, FIRST))

                await reset(cluster, 2)  # reported to the pull that is held for the former owner
                handler.may_end.set()

                await until(lambda: sorted(other.seen) == [2, 3, 4, 5])
    assert cluster.progress(GROUP, TOPIC)["broker-a", FIRST.id] == 6
