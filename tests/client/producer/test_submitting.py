"""What is submitted in the background by threads: who waits for whom, and who is told what."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import orbitmq.client
from orbitmq.client.producer.core import SendSettings
from orbitmq.client.producer.producer import Producer
from orbitmq.client.producer.send import BrokerLinks, Faults, Publisher, Sending, SendResult
from orbitmq.client.routes import Queue, route_of
from orbitmq.client.settings import ClientSettings
from orbitmq.errors import NoRoute, SendFailed
from orbitmq.names import AUTO_CREATE_TOPIC
from orbitmq.remoting.settings import RequestTimedOut
from orbitmq.wire.bodies import TopicRouteData
from orbitmq.wire.codes import EncodeError, WireLimits
from orbitmq.wire.command import Credentials
from tests.support.askingthreads import StrikeAt
from tests.support.client import QUICK_CHANNELS
from tests.support.producing import SILENCE, ScriptedCluster, scripted_cluster
from tests.support.remoting import DEADLINE, until

#: No frame is longer.
SHORT = 16 * 1024
SHORT_FRAMES = replace(
    QUICK_CHANNELS, connection=replace(QUICK_CHANNELS.connection, limits=WireLimits(frame=SHORT))
)
#: Half of it is for waiting, and half for being sent elsewhere.
HASTY = 2.0
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


async def test_a_topic_that_is_not_ready_holds_up_no_other_and_keeps_its_order(monkeypatch):
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
    assert [each.body for each in cluster.sent if each.header.topic == "held"] == bodies


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_broker_that_is_not_reached_holds_up_no_other_of_the_topic(is_known, monkeypatch):
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
    assert [each.body for each in cluster.sent] == [b"a1", b"a2", b"b1", b"b2", b"b3"]


async def test_those_that_wait_for_a_broker_in_vain_go_to_another_one(monkeypatch):
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


async def test_who_waits_with_others_behind_it_leaves_them_half_of_the_time(monkeypatch):
    limits: list[float] = []

    async def connected(_links, _queue, limit):
        limits.append(limit)

    monkeypatch.setattr(BrokerLinks, "connected", connected)
    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        queue = Queue("orders", "a", 0)
        sending = producer._core.sending("orders", b"x", {"queue": queue})
        publisher = producer._core.publisher

        await publisher.connect(sending, queue, True)
        sending.made -= 2 * sending.timeout
        await publisher.connect(sending, queue, True)

        (limit,) = limits
        assert 0 < limit <= sending.timeout / 2


async def test_what_a_connection_took_is_not_spent_again_on_the_version_of_the_broker(monkeypatch):
    now, spent, limits = 1000.0, 3.0, list[float]()

    async def connected(_links, _queue, limit):
        nonlocal now
        limits.append(limit)
        now += spent

    async def check_times(_links, _draft, _queue, limit):
        limits.append(limit)

    monkeypatch.setattr(BrokerLinks, "connected", connected)
    monkeypatch.setattr(BrokerLinks, "check_times", check_times)
    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        queue = Queue("orders", "a", 0)
        sending = producer._core.sending("orders", b"x", {"queue": queue})
        sending.made = now
        publisher = producer._core.publisher
        monkeypatch.setattr(publisher, "_monotonic", lambda: now)

        await publisher.connect(sending, queue, True)

    assert limits == [DEADLINE / 2, DEADLINE / 2 - spent]


def _have_all_go_to_b(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as b is not avoided, too."""
    monkeypatch.setattr(Faults, "forgive", lambda _faults, _broker: None)
    producer._core.publisher._faults.avoided["a"] = math.inf


async def test_who_waits_behind_a_patient_one_goes_to_another_broker_in_time(monkeypatch):
    gate = _Gate("connect", _is_for_b, monkeypatch)
    b = Queue("orders", "b", 0)
    async with scripted_cluster("a", "b") as cluster, _producing(cluster) as producer:
        await asyncio.to_thread(producer.send, "orders", b"x", queue=Queue("orders", "a", 0))
        _have_all_go_to_b(producer, monkeypatch)
        bound = [producer.submit("orders", b"b1", queue=b)]
        await until(lambda: gate.is_reached)
        free = [producer.submit("orders", b"free", timeout=HASTY) for _ in range(8)]
        bound.append(producer.submit("orders", b"b2", queue=b))

        await until(lambda: all(each.done() for each in free))

        assert {each.result(0).queue.broker for each in free} == {"a"}
        assert not any(each.done() for each in bound)
        gate.open()
        assert all([(await asyncio.wrap_future(each)).is_ok for each in bound])
    assert [each.body for each in cluster.sent] == [b"x", *[b"free"] * 8, b"b1", b"b2"]


async def test_so_does_who_waits_while_the_topic_is_made(monkeypatch):
    gate = _Gate("connect", _is_for_b, monkeypatch)
    async with scripted_cluster("a", "b") as cluster, _producing(cluster) as producer:
        cluster.publish(AUTO_CREATE_TOPIC)
        bound = producer.submit("new", b"b", queue=Queue("new", "b", 0))
        await until(lambda: gate.is_reached)
        free = [producer.submit("new", b"free", timeout=HASTY) for _ in range(4)]

        await until(lambda: all(each.done() for each in free))

        assert {each.result(0).queue.broker for each in free} == {"a"}
        assert not bound.done()
        gate.open()
        assert (await asyncio.wrap_future(bound)).is_ok


@pytest.mark.parametrize("others", [False, True])
async def test_who_finds_no_other_broker_either_is_told_when_its_time_is_up(others, monkeypatch):
    gate = _Gate("connect", _is_for_b, monkeypatch)
    names = ("a", "b") if others else ("b",)
    async with scripted_cluster(*names) as cluster, _producing(cluster) as producer:
        await asyncio.to_thread(producer.queues, "orders")
        for broker in cluster.brokers.values():
            assert broker.server is not None
            await broker.server.stop(grace=0)
        bound = producer.submit("orders", b"b", queue=Queue("orders", "b", 0), timeout=1)
        await until(lambda: gate.is_reached)
        free = [producer.submit("orders", b"free", timeout=0.1) for _ in range(8)]

        await until(lambda: all(each.done() for each in free))

        assert all(isinstance(each.exception(0), SendFailed) for each in free)
        gate.open()
        with pytest.raises(SendFailed):
            await asyncio.wrap_future(bound)
        await asyncio.to_thread(producer.flush, DEADLINE)


async def test_a_callback_that_exits_loses_nothing_that_goes_elsewhere(monkeypatch):
    gate = _Gate("connect", _is_for_b, monkeypatch)
    client = ClientSettings(channel=SHORT_FRAMES, client_ip="127.0.0.1")
    async with scripted_cluster("a", "b") as cluster, _producing(cluster, client) as producer:
        await asyncio.to_thread(producer.send, "orders", b"x", queue=Queue("orders", "a", 0))
        _have_all_go_to_b(producer, monkeypatch)
        bound = producer.submit("orders", b"b", queue=Queue("orders", "b", 0))
        await until(lambda: gate.is_reached)
        long = producer.submit("orders", bytes(2 * SHORT), timeout=HASTY)
        long.add_done_callback(_exit)
        free = [producer.submit("orders", b"free", timeout=HASTY) for _ in range(2)]

        await until(lambda: long.done() and all(each.done() for each in free))

        assert isinstance(long.exception(0), EncodeError)
        assert {each.result(0).queue.broker for each in free} == {"a"}
        gate.open()
        assert (await asyncio.wrap_future(bound)).is_ok


def _refuse(_queues: object, _message: object) -> Queue:
    raise ValueError("none of them")


def _exit(_: object) -> None:
    sys.exit(1)


async def test_a_callback_that_exits_loses_nothing_that_was_submitted(monkeypatch):
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


async def test_a_callback_that_exits_loses_nothing_that_waits_for_a_broker(monkeypatch):
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


async def test_a_selector_that_exits_is_told_and_stops_no_other():
    def leave(_queues, _message):
        sys.exit(1)

    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        await asyncio.to_thread(producer.send, "orders", b"x")
        wrong = producer.submit("orders", b"wrong", selector=leave)
        right = producer.submit("orders", b"right")

        await until(lambda: wrong.done() and right.done())

        assert isinstance(wrong.exception(0), SystemExit)
        assert right.result().is_ok


async def test_what_expires_while_it_waits_is_not_sent(monkeypatch):
    gate = _Gate("find", _is_of_held, monkeypatch)
    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        cluster.publish("held")
        first = producer.submit("held", b"in time")
        await until(lambda: gate.is_reached)
        late = producer.submit("held", b"late", timeout=0.01)
        await until(late.done)

        gate.open()

        assert (await asyncio.wrap_future(first)).is_ok
        with pytest.raises(SendFailed) as caught:
            await asyncio.wrap_future(late)
        assert isinstance(caught.value.cause, RequestTimedOut)
    assert [each.body for each in cluster.sent] == [b"in time"]


@pytest.mark.parametrize("step", ["find", "connect"])
async def test_who_waits_behind_a_patient_one_is_told_when_its_own_time_is_up(step, monkeypatch):
    gate = _Gate(step, _is_of_held, monkeypatch)
    queue = Queue("held", "a", 0)
    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        cluster.publish("held")
        patient = [producer.submit("held", b"1", queue=queue)]
        await until(lambda: gate.is_reached)
        patient.append(producer.submit("held", b"2", queue=queue))
        hasty = [producer.submit("held", b"hasty", queue=queue, timeout=0.01) for _ in range(2)]
        free = producer.submit("held", b"hasty", timeout=0.01)
        patient.append(producer.submit("held", b"3", queue=queue))

        await until(lambda: all(each.done() for each in (*hasty, free)))

        assert not any(each.done() for each in patient)
        for each in (*hasty, free):
            error = each.exception(0)
            assert isinstance(error, SendFailed)
            assert isinstance(error.cause, RequestTimedOut)
        gate.open()
        assert all([(await asyncio.wrap_future(each)).is_ok for each in patient])
        await asyncio.to_thread(producer.flush, DEADLINE)
    assert [each.body for each in cluster.sent] == [b"1", b"2", b"3"]


async def test_a_callback_that_exits_when_time_is_up_loses_nothing_that_waits(monkeypatch):
    gate = _Gate("connect", _is_for_b, monkeypatch)
    queue = Queue("orders", "b", 0)
    async with scripted_cluster("b") as cluster, _producing(cluster) as producer:
        patient = [producer.submit("orders", b"1", queue=queue)]
        await until(lambda: gate.is_reached)
        hasty = [producer.submit("orders", b"hasty", queue=queue, timeout=0.01) for _ in range(2)]
        for each in hasty:
            each.add_done_callback(_exit)
        patient.append(producer.submit("orders", b"2", queue=queue))

        await until(lambda: all(each.done() for each in hasty))

        gate.open()
        await until(lambda: all(each.done() for each in patient))
        assert all(each.result().is_ok for each in patient)
    assert [each.body for each in cluster.sent] == [b"1", b"2"]


@pytest.mark.parametrize("has_key", [False, True])
async def test_who_comes_while_queues_are_forgotten_does_not_pass_those_that_wait_for_them(
    has_key, monkeypatch
):
    gate = _Gate("connect", _is_first, monkeypatch)
    where: dict[str, Any] = {"key": 7} if has_key else {"queue": Queue("orders", "b", 0)}
    async with scripted_cluster("b") as cluster, _producing(cluster) as producer:
        core = producer._core
        first = producer.submit("orders", b"first", **where)
        await until(lambda: gate.is_reached)
        cluster.publish("orders", queues=0)
        await asyncio.to_thread(
            producer._thread.run, core.engine.routes.get("orders", refresh=True)
        )
        assert not core.publisher.knows("orders")
        cluster.publish("orders")
        _have_queues_back_after_a_look(cluster, monkeypatch)

        second = producer.submit("orders", b"second", **where)
        await until(second.done)

        assert isinstance(second.exception(0), NoRoute)
        third = producer.submit("orders", b"third", **where)
        gate.open()
        assert (await asyncio.wrap_future(first)).is_ok
        assert (await asyncio.wrap_future(third)).is_ok
    assert [each.body for each in cluster.sent] == [b"first", b"third"]


def _is_first(sending: Sending) -> bool:
    message = sending.draft.message
    return message is not None and message.body == b"first"


def _have_queues_back_after_a_look(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The route of `orders` is told right after the first look that did not find it."""
    data = cluster.name_server.routes["orders"]
    assert isinstance(data, TopicRouteData)
    route = route_of("orders", data)
    find = Publisher.find

    async def find_too_early(publisher: Publisher, sending: Sending) -> object:
        found = await find(publisher, sending)
        asyncio.get_running_loop().call_soon(publisher._engine.routes._apply, route)
        return found

    monkeypatch.setattr(Publisher, "find", find_too_early)


async def test_queues_are_not_forgotten_for_those_of_the_template(monkeypatch):
    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        cluster.publish(AUTO_CREATE_TOPIC)
        routes = producer._core.engine.routes
        look_up = routes._lookup

        async def overtaken(topic):
            """The topic's own route comes while the template's is asked for."""
            if topic == AUTO_CREATE_TOPIC:
                cluster.publish("new", queues=3)
                await routes.get("new", refresh=True)
            return await look_up(topic)

        monkeypatch.setattr(routes, "_lookup", overtaken)

        queues = await asyncio.to_thread(producer.queues, "new")

        assert len(queues) == 3
        assert producer._core.publisher.knows("new")
        route = routes.known("new")
        assert route is not None
        assert not route.is_provisional


async def test_what_is_stored_is_told_so_when_the_loop_is_gone():
    async with scripted_cluster("a") as cluster, _producing(cluster) as producer:
        stored = await asyncio.to_thread(producer.send, "orders", b"x")
        cluster.script = {"a": [SILENCE]}
        again = producer.submit("orders", b"y")
        await until(lambda: not cluster.script["a"])
        producer._submissions.in_flight.messages[again].result = stored

        producer._submissions.give_up()

        assert again.result(0) is stored


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
    assert [each.body for each in cluster.sent] == [b"first", b"short"]


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
        await own.send("orders", b"x", key=7)
        await asyncio.to_thread(threaded.send, "orders", b"x", key=7)
        bodies = [b"%d" % number for number in range(100)]
        sent: list[asyncio.Future[SendResult]] = []
        async with cluster.brokers["a"].refusing():
            for core in (own._core, threaded._core):
                await until(partial(lambda core: not core.publisher._links.is_open("a"), core))
            for body in bodies:
                submitted = producer.submit("orders", body, key=7)
                if isinstance(submitted, concurrent.futures.Future):
                    sent.append(asyncio.wrap_future(submitted))
                else:
                    sent.append(await submitted)
                await asyncio.sleep(0.01)

        assert all([(await each).is_ok for each in sent])
    assert [each.body for each in cluster.sent[2:]] == bodies


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
    assert place > 20, "there are more points than that"
