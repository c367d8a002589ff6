"""Nothing is finished, and a broker in another process has more: how far fetching runs ahead."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import time
from collections.abc import AsyncIterator

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.pull import EVERY, PullDelay
from orbitmq.client.consumer.settings import FlowSettings, PullSettings
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer, PollSettings
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import quick_settings
from tests.support.consumers import consumer_of, fill, send
from tests.support.consuming import until

KIB = 1024
#: Bytes of a large message, and how many there are: far more than may be cached.
BODY, COUNT = 64 * KIB, 40
LIMIT = 8 * BODY
#: What one pull brings at most.
PULLED = 2

SMALL = Queue("orders", "broker-a", 0)
LARGE = Queue("orders", "broker-a", 1)


@pytest.fixture
async def cluster(new_cluster):
    """A queue of many small messages, and one of large ones."""
    async with new_cluster() as running:
        await running.create_topic("orders", queues=2)
        await fill(running, "orders", COUNT, queue=SMALL)
        # As many bytes on the way as they are: nothing that could be compressed.
        await send(running, "orders", [random.Random(7).randbytes(BODY)] * COUNT, queue=LARGE)
        yield running


@contextlib.asynccontextmanager
async def stuck(
    cluster: AsyncEmbeddedCluster, seen: list[ReceivedMessage], pull: PullSettings
) -> AsyncIterator[tuple[AsyncConsumer, asyncio.Event]]:
    """A consumer whose handler ends for no large message until the event is set."""
    may_go_on = asyncio.Event()
    consumer = consumer_of(cluster, flow=FlowSettings(max_cached_bytes=LIMIT), pull=pull)

    @consumer.on("orders")
    async def handle(message: ReceivedMessage) -> None:
        if message.queue == LARGE:
            await may_go_on.wait()
        seen.append(message)

    async with consumer:
        try:
            yield consumer, may_go_on
        finally:
            may_go_on.set()


@pytest.mark.feature("C2")
async def test_a_queue_is_fetched_up_to_its_limit_of_bytes_and_one_pull_while_others_go_on(
    cluster, caplog
):
    caplog.set_level(logging.INFO, "orbitmq.client.consumer")
    seen: list[ReceivedMessage] = []
    async with (
        stuck(cluster, seen, PullSettings(batch_size=PULLED)) as (consumer, may_go_on),
        AsyncAdmin(name_server=cluster.name_server) as admin,
    ):
        await until(lambda: _put_off(caplog) and len(seen) == COUNT)
        info = await admin.consumers.running_info(consumer.group, consumer.client_id)
        (cached,) = [each.cached_messages for each in info.queues if each.queue == LARGE]
        assert LIMIT <= cached * BODY <= LIMIT + PULLED * BODY
        assert {message.queue for message in seen} == {SMALL}
        assert consumer.statistics().put_off[LARGE, PullDelay.CACHED_BYTES] >= 1
        place = 'topic="orders",broker="broker-a",queue="1",reason="cached bytes"'
        counted = rf"orbitmq_consumer_pulls_put_off_total{{.*{place}}} \d"
        assert re.search(counted, consumer.metrics())

        may_go_on.set()
        await until(lambda: len(seen) == 2 * COUNT)

    assert FlowSettings().max_cached_bytes == 100 * KIB * KIB


@pytest.mark.feature("C4")
async def test_the_first_and_the_thousandth_time_that_a_pull_is_put_off_are_told(cluster, caplog):
    caplog.set_level(logging.INFO, "orbitmq.client.consumer")
    impatient = PullSettings(batch_size=PULLED, flow_delay=0.001)
    async with stuck(cluster, [], impatient) as (consumer, _):
        await until(lambda: len(_put_off(caplog)) == 2, deadline=60.0)

        beginning = f"pull of {LARGE} for group {consumer.group} put off: cached bytes ("
        lines = _put_off(caplog)
    assert all(line.startswith(beginning) for line in lines)
    assert [line.rpartition(", ")[2] for line in lines] == ["1 so far", f"{EVERY + 1} so far"]


@pytest.mark.feature("C4")
async def test_pulls_that_are_put_off_by_50_ms_are_counted_by_queue_and_reason(cluster):
    bytes_, messages = (LARGE, PullDelay.CACHED_BYTES), (SMALL, PullDelay.CACHED_MESSAGES)
    settings = PollSettings(
        max_cached_messages=COUNT // 2, max_cached_bytes=LIMIT, pull=PullSettings(batch_size=PULLED)
    )
    consumer = AsyncPullConsumer(
        "billing",
        client=quick_settings(cluster.name_server),
        consume_from="first",
        polling=settings,
    )
    async with consumer:
        await consumer.assign([SMALL, LARGE])
        await until(lambda: {bytes_, messages} <= consumer.statistics().delays.keys())
        before, began = consumer.statistics().delays, time.monotonic()
        await until(lambda: consumer.statistics().delays[bytes_] >= before[bytes_] + 4)
        took, after = time.monotonic() - began, consumer.statistics().delays

    assert after.keys() == {bytes_, messages}
    assert after[messages] > before[messages]
    # The first of the four may have been due at once.
    assert took >= 3 * 0.05
    assert PullSettings().flow_delay == 0.05


def _put_off(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was told of pulls that have to wait."""
    return [line for line in caplog.messages if "put off: cached bytes" in line]
