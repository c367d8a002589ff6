"""What is submitted in the background by threads: who waits for whom, and who is told what."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import orbitmq.client
from orbitmq.client.producer.core import SendSettings
from orbitmq.client.producer.producer import Producer
from orbitmq.client.producer.send import SendResult
from orbitmq.client.settings import ClientSettings
from orbitmq.errors import SendFailed
from orbitmq.wire.codes import EncodeError, ResponseCode, WireLimits
from orbitmq.wire.command import Credentials
from tests.support.askingthreads import StrikeAt
from tests.support.client import QUICK_CHANNELS
from tests.support.producing import ScriptedCluster, scripted_cluster
from tests.support.remoting import DEADLINE, until

#: No frame is longer.
SHORT = 16 * 1024
SHORT_FRAMES = replace(
    QUICK_CHANNELS, connection=replace(QUICK_CHANNELS.connection, limits=WireLimits(frame=SHORT))
)
UNCOMPRESSED = SendSettings(timeout=DEADLINE, compress_from=0)


@contextlib.asynccontextmanager
async def _producing(
    cluster: ScriptedCluster, client: ClientSettings | None = None
) -> AsyncIterator[Producer]:
    producer = Producer(
        "svc", name_server=str(cluster.name_server.address), client=client, sending=UNCOMPRESSED
    )
    await asyncio.to_thread(producer.start)
    try:
        yield producer
    finally:
        await asyncio.to_thread(producer.stop)


async def _stop(cluster: ScriptedCluster, name: str) -> None:
    server = cluster.brokers[name].server
    assert server is not None
    await server.stop(grace=0)


@pytest.mark.parametrize("is_topic_known", [False, True])
async def test_what_waits_behind_others_fails_when_its_own_time_is_up(is_topic_known):
    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        if is_topic_known:
            await asyncio.to_thread(producer.queues, "orders")
            await _stop(cluster, "a")
        else:
            cluster.name_server.refusal = ResponseCode.SERVICE_NOT_AVAILABLE
        first = producer.submit("orders", b"first", ordering_key=1, timeout=3)
        later = [producer.submit("orders", b"later", ordering_key=1, timeout=0.1) for _ in range(3)]

        await until(lambda: all(each.done() for each in (first, *later)))

        assert all(isinstance(each.exception(0), SendFailed) for each in (first, *later))
        assert producer.statistics().failed == 4


@pytest.mark.parametrize("is_signed", [False, True])
async def test_a_message_of_which_no_frame_can_be_made_stops_no_other(is_signed):
    credentials = Credentials(access_key="AK", secret_key="SK123456")  # noqa: S106
    client = ClientSettings(
        channel=SHORT_FRAMES, client_ip="127.0.0.1", credentials=credentials if is_signed else None
    )
    async with scripted_cluster("a") as cluster, _producing(cluster, client) as producer:
        await asyncio.to_thread(producer.send, "orders", b"first")

        long = producer.submit("orders", bytes(2 * SHORT))
        short = producer.submit("orders", b"short")

        assert (await asyncio.wrap_future(short)).is_ok
        with pytest.raises(EncodeError):
            await asyncio.wrap_future(long)
    assert cluster.bodies == [b"first", b"short"]


@pytest.mark.parametrize("is_threaded", [True, False])
async def test_messages_of_a_key_keep_their_order_while_their_broker_refuses_connections(
    is_threaded,
):
    async with (
        scripted_cluster("a") as cluster,
        _producing(cluster) as threaded,
        cluster.producer(sending=UNCOMPRESSED) as own,
    ):
        producer = threaded if is_threaded else own
        await own.send("orders", b"x", ordering_key=7)
        await asyncio.to_thread(threaded.send, "orders", b"x", ordering_key=7)
        bodies = [b"%d" % number for number in range(100)]
        sent: list[asyncio.Future[SendResult]] = []
        async with cluster.brokers["a"].refusing():
            for core in (own._core, threaded._core):
                await until(partial(lambda core: not core.publisher._links.is_open("a"), core))
            for body in bodies:
                submitted = producer.submit("orders", body, ordering_key=7)
                if isinstance(submitted, concurrent.futures.Future):
                    sent.append(asyncio.wrap_future(submitted))
                else:
                    sent.append(await submitted)
                await asyncio.sleep(0.01)

        assert all([(await each).is_ok for each in sent])
    assert cluster.bodies[2:] == bodies


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("is_full", [False, True])
async def test_wherever_submit_is_interrupted_nothing_stays_in_flight(is_full):
    settings = SendSettings(timeout=DEADLINE, max_in_flight=1 if is_full else 1000)
    client = str(Path(orbitmq.client.__file__).parent)
    place = 0
    async with scripted_cluster("a") as cluster:
        producer = Producer(name_server=cluster.name_server.address, sending=settings)

        def work(strike):
            producer.submit("orders", b"first")
            strike.during(lambda: producer.submit("orders", b"second"))
            producer.flush(DEADLINE)

        await asyncio.to_thread(producer.start)
        while True:
            strike = StrikeAt(place, client)
            await asyncio.to_thread(work, strike)
            if not strike.has_struck:
                break
            place += 1
        await asyncio.to_thread(producer.stop)
    assert place > 10, "there are more points than that"
