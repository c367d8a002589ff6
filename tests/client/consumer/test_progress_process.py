"""A group's progress as its members and others see it, at a broker in another process."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.routes import Queue
from orbitmq.remoting.settings import Address
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import decode_command
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.headers import UpdateConsumerOffsetRequest
from tests.support.broker import RawClient
from tests.support.client import ScriptedNameServer, quick_settings, topic_route
from tests.support.consumers import committed, consumer_of, new_group, producer_of, send
from tests.support.consuming import until
from tests.support.recording_proxy import RecordingProxy

TOPIC = "orders"
QUEUE = Queue(TOPIC, "broker-a", 0)
#: Nothing is reported but at the end.
SILENT = RebalanceSettings(persist=3600.0, persist_idle=0.0)


@pytest.fixture
async def cluster(new_cluster):
    async with new_cluster() as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        await send(cluster, TOPIC, range(10))
        yield cluster


@pytest.fixture
async def tool(cluster):
    """Somebody who is no member."""
    client = await RawClient.open(cluster.brokers[0])
    yield client
    await client.close()


@pytest.fixture
def nobody():
    """Where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield Address("127.0.0.1", taken.getsockname()[1])


@pytest.mark.feature("G4")
async def test_progress_only_grows_until_somebody_resets_it(cluster, tool):
    group = new_group()
    gates = [asyncio.Event() for _ in range(10)]
    seen: list[int] = []

    async def handle(message):
        seen.append(message.queue_offset)
        await gates[message.queue_offset].wait()

    consumer = consumer_of(cluster, group, rebalance=RebalanceSettings(persist=0.02))
    consumer.on(TOPIC)(handle)
    async with consumer, AsyncAdmin(name_server=cluster.name_server) as admin:
        await until(lambda: len(seen) == 10)
        known: list[int] = []
        for finished in (9, 4, 0, 2, 1, 3, 8, 7, 5, 6):
            gates[finished].set()
            running = [number for number, gate in enumerate(gates) if not gate.is_set()]
            expected = min(running, default=10)
            await until(lambda: consumer.positions().get(QUEUE, 0) == expected)  # noqa: B023
            known.append(committed(cluster, group, TOPIC))
        await until(lambda: committed(cluster, group, TOPIC) == 10)
        assert all(before <= after for before, after in pairwise([*known, 10])), known
        tool.report_one_way(TOPIC, 3, group=group)
        await tool.query(TOPIC, consumer_group=group)  # answered after it was heard
        assert committed(cluster, group, TOPIC) == 10

        seen.clear()
        report = await admin.progress.reset(group, TOPIC, ResetTo.offset(4))
        assert report.is_effective
        await until(lambda: sorted(seen) == list(range(4, 10)))
        assert [each.move.to_offset for each in report.outcomes] == [4]


@pytest.mark.feature("H5")
async def test_progress_that_a_pull_carries_counts_at_once(cluster):
    group = new_group()
    broker = cluster.brokers[0].address
    with RecordingProxy.running(("127.0.0.1", 0), (broker.host, broker.port)) as proxy:
        way = Address(*proxy.listen)
        async with (
            ScriptedNameServer().serving() as name_server,
            AsyncAdmin(name_server=cluster.name_server) as admin,
            producer_of(cluster) as producer,
        ):
            name_server.routes[TOPIC] = topic_route({"broker-a": {0: way}}, queues=1)
            client = quick_settings(name_server.address)
            consumer = consumer_of(cluster, group, client=client, rebalance=SILENT)
            consumer.on(TOPIC)(lambda _: None)
            async with consumer:
                await until(lambda: consumer.positions().get(QUEUE) == 10)
                for count in (11, 12):
                    # It brings the answer to the pull that waits; the next one carries the rest.
                    await producer.send(TOPIC, str(count))
                    await until(lambda: consumer.positions()[QUEUE] == count)  # noqa: B023
                    await until(lambda: committed(cluster, group, TOPIC) >= count - 1)  # noqa: B023
                (place,) = (await admin.groups.progress(group, topic=TOPIC)).queues
                assert place.consumer_offset >= 11
                sent = FrameReader().feed(b"".join(proxy.recording.to_server))
                requests = [decode_command(each) for each in sent]
    assert RequestCode.PULL_MESSAGE in {each.code for each in requests}
    reports = [each for each in requests if each.code == RequestCode.UPDATE_CONSUMER_OFFSET]
    assert {each.header(UpdateConsumerOffsetRequest).commit_offset for each in reports} == {0}
