"""What is submitted in the background by threads: who waits for whom, and who is told what."""

from __future__ import annotations

import asyncio
import contextlib
import sys
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
from tests.support.producing import SILENCE, ScriptedCluster, scripted_cluster
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
    """Keeps messages from being made ready until it is opened."""

    def __init__(
        self, step: str, is_held: Callable[[Sending], bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`step` is the method of a publisher that they have to pass."""
        self._is_open = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        go_on = getattr(Publisher, step)

        async def gated(
            publisher: Publisher, sending: Sending, *more: object, **options: object
        ) -> object:
            if is_held(sending):
                self._loop = asyncio.get_running_loop()
                await self._is_open.wait()
            return await go_on(publisher, sending, *more, **options)

        monkeypatch.setattr(Publisher, step, gated)

    @property
    def is_reached(self) -> bool:
        return self._loop is not None

    def open(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._is_open.set)


def _is_of_held(sending: Sending) -> bool:
    return sending.topic == "held"


def _is_for_b(sending: Sending) -> bool:
    return sending.queue is not None and sending.queue.broker == "b"


async def test_a_topic_that_is_not_ready_holds_up_no_other_and_keeps_its_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = _Gate("find", _is_of_held, monkeypatch)
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
        await until(lambda: producer._lines.is_empty)
    assert [each.body for each in cluster.sent if each.header.topic == "held"] == bodies


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_broker_that_is_not_reached_holds_up_no_other_of_the_topic(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = _Gate("connect", _is_for_b, monkeypatch)
    a, b = Queue("orders", "a", 0), Queue("orders", "b", 0)
    async with scripted_cluster("a", "b") as cluster, _producing(cluster) as producer:
        if is_known:
            await asyncio.to_thread(producer.queues, "orders")
        held = [producer.submit("orders", b"b1", queue=b)]
        others = [producer.submit("orders", b"a1", queue=a)]
        held.append(producer.submit("orders", b"b2", queue=b))
        await until(lambda: gate.is_reached)
        others.append(producer.submit("orders", b"a2", queue=a))
        held.append(producer.submit("orders", b"b3", queue=b))

        await until(lambda: all(each.done() for each in others))

        assert not any(each.done() for each in held)
        gate.open()
        assert all([(await asyncio.wrap_future(each)).is_ok for each in others + held])
        await until(lambda: producer._lines.is_empty)
    assert [each.body for each in cluster.sent] == [b"a1", b"a2", b"b1", b"b2", b"b3"]


async def test_those_that_wait_for_a_broker_in_vain_go_to_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = _Gate("connect", _is_for_b, monkeypatch)
    async with scripted_cluster("a", "b") as cluster, _producing(cluster) as producer:
        await asyncio.to_thread(producer.send, "orders", b"x", queue=Queue("orders", "a", 0))
        server = cluster.brokers["b"].server
        assert server is not None
        await server.stop(grace=0)
        bound = producer.submit("orders", b"b", queue=Queue("orders", "b", 0), timeout=1)
        await until(lambda: gate.is_reached)
        free = [producer.submit("orders", b"free") for _ in range(8)]  # half of them for either

        gate.open()

        assert {(await asyncio.wrap_future(each)).queue.broker for each in free} == {"a"}
        with pytest.raises(SendFailed):
            await asyncio.wrap_future(bound)


async def test_who_waits_with_others_behind_it_leaves_them_half_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []

    async def connected(_publisher: Publisher, _queue: Queue, limit: float) -> None:
        limits.append(limit)

    monkeypatch.setattr(Publisher, "_connected", connected)
    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        queue = Queue("orders", "a", 0)
        sending = producer._core.sending("orders", b"x", {"queue": queue})
        publisher = producer._core.publisher

        assert await publisher.connect(sending, queue, True, leaves_half=True)
        sending.made -= 2 * sending.timeout
        assert await publisher.connect(sending, queue, True, leaves_half=True)

        (limit,) = limits
        assert 0 < limit <= sending.timeout / 2


def _refuse(_queues: object, _message: object) -> Queue:
    raise ValueError("none of them")


def _exit(_: object) -> None:
    sys.exit(1)


async def test_a_callback_that_exits_loses_nothing_that_was_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = _Gate("find", _is_of_held, monkeypatch)
    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        cluster.publish("held")
        queue = Queue("held", "a", 0)
        submitted = [producer.submit("held", b"1", queue=queue)]
        await until(lambda: gate.is_reached)
        wrong = producer.submit("held", b"wrong", selector=_refuse)
        wrong.add_done_callback(_exit)
        submitted += [producer.submit("held", body, queue=queue) for body in (b"2", b"3")]

        gate.open()

        await until(lambda: all(each.done() for each in submitted))
        assert all(each.result().is_ok for each in submitted)
        assert isinstance(wrong.exception(0), ValueError)
    assert [each.body for each in cluster.sent] == [b"1", b"2", b"3"]


async def test_a_callback_that_exits_loses_nothing_that_waits_for_a_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = _Gate("connect", _is_for_b, monkeypatch)
    client = ClientSettings(channel=SHORT_FRAMES, client_ip="127.0.0.1")
    async with scripted_cluster("b") as cluster, _producing(cluster, client) as producer:
        queue = Queue("orders", "b", 0)
        submitted = [producer.submit("orders", b"1", queue=queue)]
        await until(lambda: gate.is_reached)
        long = producer.submit("orders", bytes(2 * SHORT), queue=queue)
        long.add_done_callback(_exit)
        submitted += [producer.submit("orders", body, queue=queue) for body in (b"2", b"3")]

        gate.open()

        await until(lambda: all(each.done() for each in submitted))
        assert all(each.result().is_ok for each in submitted)
        assert isinstance(long.exception(0), EncodeError)
    assert [each.body for each in cluster.sent] == [b"1", b"2", b"3"]


async def test_a_selector_that_exits_is_told_and_stops_no_other() -> None:
    def leave(_queues: object, _message: object) -> Queue:
        sys.exit(1)

    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        await asyncio.to_thread(producer.send, "orders", b"x")
        wrong = producer.submit("orders", b"wrong", selector=leave)
        right = producer.submit("orders", b"right")

        await until(lambda: wrong.done() and right.done())

        assert isinstance(wrong.exception(0), SystemExit)
        assert right.result().is_ok


async def test_what_expires_while_it_waits_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = _Gate("find", _is_of_held, monkeypatch)
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


async def test_what_is_stored_is_told_so_when_the_loop_is_gone() -> None:
    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        stored = await asyncio.to_thread(producer.send, "orders", b"x")
        cluster.script = {"a": [SILENCE]}
        again = producer.submit("orders", b"y")
        await until(lambda: not cluster.script["a"])
        producer._untold[again].result = stored

        producer._give_up_all()

        assert again.result(0) is stored


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
