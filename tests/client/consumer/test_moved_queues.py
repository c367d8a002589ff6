"""A queue goes to another member while its messages wait, or are in the middle of their handler.

There is one queue, and it belongs to the member whose name comes first. What its former owner still
does must not be seen: not by the handler, and not in the progress that the broker has, which lives
in another process.
"""

from __future__ import annotations

import asyncio

import pytest

from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import quick_settings
from tests.support.consumers import committed, consumer_of, fill
from tests.support.consuming import DEADLINE, until

GROUP = "billing"
ONE = Queue("orders", "broker-a", 0)
MESSAGES = 5


@pytest.fixture
async def cluster(new_cluster):
    async with new_cluster() as running:
        await running.create_topic("orders", queues=1)
        await fill(running, "orders", MESSAGES, queue=ONE)
        yield running


class Member:
    """A consumer that takes one message at a time, and stays in its handler until it may go on."""

    def __init__(self, cluster: AsyncEmbeddedCluster, name: str) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.may_go_on = asyncio.Event()
        self.consumer: AsyncConsumer = consumer_of(
            cluster,
            GROUP,
            client=quick_settings(cluster.name_server, instance=name),
            workers=1,
            # A queue that has to go does not wait for the handler for long.
            rebalance=RebalanceSettings(handover=0.1, persist=0.05),
        )
        self.consumer.on("orders")(self._handle)

    async def _handle(self, message: ReceivedMessage) -> None:
        self.begun.append(message.queue_offset)
        async with asyncio.timeout(DEADLINE):
            await self.may_go_on.wait()
        self.ended.append(message.queue_offset)

    async def until_at_the_first(self) -> None:
        """Wait until it is in its handler, and has fetched the other messages as well."""
        await until(lambda: self.begun == [0])
        await until(lambda: self.consumer.statistics().topics["orders"].pulled == MESSAGES)


@pytest.mark.feature("D8")
async def test_messages_that_wait_when_their_queue_goes_are_handled_by_the_new_owner_only(cluster):
    former, owner = Member(cluster, "2"), Member(cluster, "1")
    async with former.consumer:
        await former.until_at_the_first()
        async with owner.consumer:
            owner.may_go_on.set()
            await until(lambda: owner.ended == [0, 1, 2, 3, 4])

            former.may_go_on.set()
            await until(lambda: former.consumer.statistics().passed_over == MESSAGES - 1)

    assert former.begun == [0]
    assert committed(cluster, GROUP, "orders") == MESSAGES


@pytest.mark.feature("D9")
async def test_what_a_handler_ends_after_its_queue_has_gone_is_not_committed_and_is_counted(
    cluster,
):
    former, owner = Member(cluster, "2"), Member(cluster, "1")
    async with former.consumer:
        await former.until_at_the_first()
        async with owner.consumer:
            await owner.until_at_the_first()
            former.may_go_on.set()
            await until(lambda: former.consumer.statistics().duplicates == 1)
            # To stop is to report whatever there is to report.
            await former.consumer.stop()
            assert former.ended == [0]
            assert committed(cluster, GROUP, "orders") == 0

            owner.may_go_on.set()
            await until(lambda: committed(cluster, GROUP, "orders") == MESSAGES)

    assert owner.ended == [0, 1, 2, 3, 4]
