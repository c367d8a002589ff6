"""What is submitted in the background by threads: who waits for whom, and who is told what."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from orbitmq.client.errors import SendFailed
from orbitmq.client.message import Message
from orbitmq.client.producer.producer import Producer
from orbitmq.client.producer.publishing import Publisher
from orbitmq.client.producer.sending import Sending
from orbitmq.client.producer.settings import SendSettings
from orbitmq.client.queue import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.remoting.errors import RequestTimedOut
from orbitmq.wire.acl import Credentials
from orbitmq.wire.codes import TransactionState
from orbitmq.wire.errors import EncodeError
from orbitmq.wire.limits import WireLimits
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


class _Gate:
    """Keeps the messages of a topic from being made ready until it is opened."""

    def __init__(self, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_open = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        prepare = Publisher.prepare

        async def gated(publisher: Publisher, sending: Sending) -> None:
            if sending.topic == topic:
                self._loop = asyncio.get_running_loop()
                await self._is_open.wait()
            await prepare(publisher, sending)

        monkeypatch.setattr(Publisher, "prepare", gated)

    @property
    def is_reached(self) -> bool:
        return self._loop is not None

    def open(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._is_open.set)


async def test_a_topic_that_is_not_ready_holds_up_no_other_and_keeps_its_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = _Gate("held", monkeypatch)
    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        cluster.publish("held")
        await asyncio.to_thread(producer.send, "orders", b"x")
        queue = Queue("held", "a", 0)
        bodies = [b"%d" % number for number in range(5)]
        held = [producer.submit("held", body, queue=queue) for body in bodies[:3]]
        await until(lambda: gate.is_reached)
        held += [producer.submit("held", body, queue=queue) for body in bodies[3:]]

        other = await asyncio.wrap_future(producer.submit("orders", b"y"))

        assert other.is_ok
        assert not any(each.done() for each in held)
        gate.open()
        assert all([(await asyncio.wrap_future(each)).is_ok for each in held])
        await until(lambda: not producer._waiting)
    assert [each.body for each in cluster.sent if each.header.topic == "held"] == bodies


async def test_what_expires_while_it_waits_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = _Gate("held", monkeypatch)
    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        cluster.publish("held")
        first = producer.submit("held", b"in time")
        await until(lambda: gate.is_reached)
        late = producer.submit("held", b"late", timeout=0.01)
        sending = producer._untold[late]
        monotonic = producer._core.engine.clock.monotonic
        await until(lambda: monotonic() > sending.deadline)

        gate.open()

        assert (await asyncio.wrap_future(first)).is_ok
        with pytest.raises(SendFailed) as caught:
            await asyncio.wrap_future(late)
        assert isinstance(caught.value.cause, RequestTimedOut)
    assert [each.body for each in cluster.sent] == [b"in time"]


async def test_a_send_without_time_is_not_made_by_its_thread() -> None:
    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        await asyncio.to_thread(producer.send, "orders", b"x")
        core = producer._core
        sending = core.sending("orders", b"late", {})
        sending.made -= 2 * sending.timeout

        with pytest.raises(SendFailed) as caught:
            await asyncio.to_thread(core.publisher.from_thread, sending)

        assert isinstance(caught.value.cause, RequestTimedOut)
    assert [each.body for each in cluster.sent] == [b"x"]


@pytest.mark.parametrize("is_signed", [False, True])
async def test_a_message_of_which_no_frame_can_be_made_stops_no_other(is_signed: bool) -> None:
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
    assert [each.body for each in cluster.sent] == [b"first", b"short"]


def _one_way(producer: Producer) -> None:
    producer.send_one_way("orders", b"x")


def _in_transaction(producer: Producer) -> None:
    producer.send_in_transaction(Message("orders", b"x"), lambda _message, _id: True)


def _by_hand(producer: Producer) -> None:
    sent = producer.send_half(Message("orders", b"x"))
    producer.end_transaction(sent, TransactionState.COMMIT)


@pytest.mark.parametrize("tell", [_one_way, _in_transaction, _by_hand])
async def test_what_the_loop_tells_for_a_thread_is_not_overtaken_by_it(
    tell: Callable[[Producer], None],
) -> None:
    def told(producer: Producer) -> bool:
        """Whether the next request of this thread takes the way of what it has told."""
        tell(producer)
        lanes = producer._core.publisher._sides["a"]._lanes
        return lanes is not None and threading.get_ident() in lanes._told

    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        assert await asyncio.to_thread(told, producer)
