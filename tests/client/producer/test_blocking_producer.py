"""The blocking producer: threads that send, submit, stop and fork."""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from orbitmq.client.message import Message
from orbitmq.client.producer.core import SendSettings
from orbitmq.client.producer.producer import Producer
from orbitmq.client.producer.send import SendStatus
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.errors import (
    BrokerRefused,
    ClientError,
    MessageRefused,
    NotRunning,
    SendFailed,
    TooManyInFlight,
    WrongUse,
)
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.client import QUICK_CHANNELS
from tests.support.producing import SILENCE, scripted_cluster

DEADLINE = 30.0


@pytest.fixture(scope="module")
def cluster():
    with EmbeddedCluster(brokers=2) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster, request):
    topic = str(request.node.name)[:100].translate({ord("["): "-", ord("]"): None})
    cluster.create_topic(topic)
    return topic


@pytest.fixture
def producer(cluster):
    with Producer("orders-svc", name_server=cluster.name_server) as producer:
        yield producer


def _in_threads(count: int, work: Callable[[int], object]) -> list[object]:
    """What the work did on each of so many threads; its result or its error."""
    outcomes: list[object] = [None] * count

    def run(number: int) -> None:
        try:
            outcomes[number] = work(number)
        except Exception as error:  # noqa: BLE001  # looked at by the test
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
        assert not thread.is_alive(), "a thread hangs"
    return outcomes


@pytest.mark.feature("K1")
def test_a_message_is_sent_with_one_line(cluster, producer, topic):
    result = producer.send(topic, b"...", tags="paid", keys="o-1", timeout=10)
    again = producer.send(Message(topic, "text", properties={"region": "eu"}))
    later = producer.submit(topic, b"later").result(DEADLINE)
    producer.send_one_way(topic, b"one way")
    producer.send(topic, b"after it", queue=Queue(topic, "broker-a", 0))

    stored = {message.unique_id: message for message in cluster.messages(topic)}
    assert result.status is SendStatus.OK
    assert (stored[result.msg_id].tags, stored[result.msg_id].keys) == ("paid", "o-1")
    assert stored[result.msg_id].offset_id == result.offset_id
    assert stored[again.msg_id].body == b"text"
    assert stored[later.msg_id].body == b"later"


def test_many_threads_send_at_the_same_time(cluster, producer, topic):
    def work(number):
        bodies = [b"%d-%d" % (number, step) + bytes(step * 97) for step in range(60)]
        return [producer.send(topic, body, keys=f"{number}-{len(body)}").msg_id for body in bodies]

    outcomes = _in_threads(12, work)

    stored = {message.unique_id: message for message in cluster.messages(topic)}
    assert len(stored) == 12 * 60
    for number, ids in enumerate(outcomes):
        assert isinstance(ids, list), ids
        for step, msg_id in enumerate(ids):
            assert stored[msg_id].body == b"%d-%d" % (number, step) + bytes(step * 97)


async def test_threads_that_send_use_connections_of_their_own_up_to_a_bound():
    client = ClientSettings(channel=replace(QUICK_CHANNELS, blocking_connections=3))
    async with scripted_cluster("a") as cluster:

        def work():
            with Producer(name_server=cluster.name_server.address, client=client) as producer:
                producer.send("orders", b"x")
                outcomes = _in_threads(
                    8, lambda _: sum(producer.send("orders", b"x").is_ok for _ in range(50))
                )
                # One is the event loop's.
                connected.append(len(cluster.brokers["a"].connections))
            return outcomes

        connected: list[int] = []
        outcomes = await asyncio.to_thread(work)

    assert outcomes == [50] * 8
    assert 2 <= connected[0] <= 4


def test_errors_are_those_of_the_async_face(cluster, producer, topic):
    with pytest.raises(MessageRefused, match="body"):
        producer.send(topic, b"")
    with pytest.raises(MessageRefused, match="4194304"):
        producer.send(topic, bytes(5_000_000))
    for _ in range(2):
        with pytest.raises(BrokerRefused) as caught:
            producer.send(topic, b"x", queue=Queue(topic, "broker-a", 77))
        assert caught.value.name == "INVALID_PARAMETER"
    assert producer.send(topic, b"x").is_ok


def test_a_full_flight_is_an_error_after_the_timeout():
    settings = SendSettings(max_in_flight=1)
    client = ClientSettings(channel=QUICK_CHANNELS, request_timeout=1.0)
    # Nobody answers there: the first message is in flight until its own time is up.
    listening = socket.create_server(("127.0.0.1", 0))
    silent = f"127.0.0.1:{listening.getsockname()[1]}"
    with listening, Producer(name_server=silent, client=client, sending=settings) as producer:
        first = producer.submit("orders", b"x", timeout=3.0)
        with pytest.raises(TooManyInFlight):
            producer.submit("orders", b"x", timeout=0.1)
        with pytest.raises(TimeoutError, match="1 messages"):
            producer.flush(0.01)
        with pytest.raises(ClientError):
            first.result(DEADLINE)


def in_a_callback(producer: Producer, topic: str, work: Callable[[], object]) -> object:
    """What becomes of a call on the producer's own thread."""
    outcome: concurrent.futures.Future[object] = concurrent.futures.Future()

    def called(_: object) -> None:
        try:
            outcome.set_result(work())
        except Exception as error:  # noqa: BLE001  # looked at by the test
            outcome.set_result(error)

    # The answer must not be there before the callback is: that would be called here.
    is_noted = threading.Event()

    def select(queues, _):
        is_noted.wait(DEADLINE)
        return queues[0]

    producer.submit(topic, b"first", selector=select).add_done_callback(called)
    is_noted.set()
    return outcome.result(DEADLINE)


def test_a_one_way_send_does_not_wait_for_the_event_loop(cluster, producer, topic):
    blocked, opened, ends = threading.Event(), threading.Event(), []

    def block(queues, _):
        blocked.set()
        ends.append(opened.wait(5.0))
        return queues[0]

    connected = producer.send(topic, b"first").queue
    held = producer.submit(topic, b"held", selector=block)
    assert blocked.wait(DEADLINE)

    producer.send_one_way(topic, b"one way", queue=connected)
    opened.set()
    producer.send(topic, b"after it", queue=connected)
    held.result(DEADLINE)

    assert ends == [True]
    assert b"one way" in [message.body for message in cluster.messages(topic)]


@pytest.mark.parametrize(
    "call",
    [
        lambda producer, topic: producer.send(topic, b"x"),
        lambda producer, topic: producer.send_one_way(topic, b"x"),
        lambda producer, topic: producer.send_batch([Message(topic, b"x")]),
        lambda producer, topic: producer.request(topic, b"x"),
        lambda producer, topic: producer.send_half(Message(topic, b"x")),
        lambda producer, topic: producer.queues(topic),
        lambda producer, _: producer.flush(),
        lambda producer, _: producer.stop(),
    ],
)
def test_a_blocking_call_in_a_callback_is_refused_before_anything_is_written(
    cluster, producer, call
):
    topic = f"callbacks-{id(call)}"
    cluster.create_topic(topic)
    producer.send(topic, b"warm")

    error = in_a_callback(producer, topic, lambda: call(producer, topic))

    assert isinstance(error, WrongUse)
    producer.send(topic, b"last")
    bodies = [message.body for message in cluster.messages(topic)]
    assert sorted(bodies) == [b"first", b"last", b"warm"]


def test_a_callback_may_submit_and_does_not_wait_for_room(cluster, topic):
    sending = SendSettings(max_in_flight=1, timeout=DEADLINE)
    with Producer(name_server=cluster.name_server, sending=sending) as producer:

        def submit_twice():
            producer.submit(topic, b"second")
            return producer.submit(topic, b"too many")

        began = time.monotonic()
        error = in_a_callback(producer, topic, submit_twice)
        assert time.monotonic() - began < DEADLINE / 2
        producer.flush(DEADLINE)

    assert isinstance(error, TooManyInFlight)
    assert {message.body for message in cluster.messages(topic)} == {b"first", b"second"}


def test_a_batch_is_sent_from_any_iterable(cluster, producer, topic):
    results = producer.send_batch(
        (Message(topic, b"%d" % number) for number in range(100)), ordering_key=1
    )

    assert [result.queue_offset for result in results] == list(range(100))
    assert [message.body for message in cluster.messages(topic)] == [b"%d" % n for n in range(100)]
    assert producer.queues(topic)[1] == results[0].queue


async def test_stopping_waits_for_what_was_submitted_as_long_as_it_has_time():
    # The second attempt is made, and answered, after the time that other calls would have had.
    settings = SendSettings(timeout=0.02, attempt_timeout=0.2, retries=50)
    async with scripted_cluster("a") as scripted:
        scripted.script = {"a": [SILENCE]}
        producer = Producer(name_server=str(scripted.name_server.address), sending=settings)
        await asyncio.to_thread(producer.start)
        submitted = producer.submit("orders", b"x", timeout=DEADLINE)

        await asyncio.to_thread(producer.stop)

        assert submitted.result(0).is_ok


async def test_a_signal_handler_may_stop_it_while_its_thread_sends():
    """The handler is called on the thread that it interrupts, here as Python calls it: between."""
    client = ClientSettings(channel=QUICK_CHANNELS, stop_timeout=0.1)
    async with scripted_cluster("a") as cluster:
        producer = Producer("handled", name_server=cluster.name_server.address, client=client)
        ended: list[object] = []

        def select(queues, _):
            producer.stop()
            return queues[0]

        def work(_):
            producer.start()
            assert producer.send("orders", b"x").is_ok
            producer.send("orders", b"y", selector=select)

        ended += await asyncio.to_thread(_in_threads, 1, work)

    assert [type(each) for each in ended] == [NotRunning], ended
    assert not [each for each in threading.enumerate() if each.name.endswith("handled")]


@pytest.mark.parametrize("round_", range(3))
def test_a_stop_among_sends_leaves_nobody_waiting(cluster, topic, round_):
    producer = Producer(name_server=cluster.name_server)
    producer.start()
    sent = threading.Semaphore(0)
    acknowledged: list[str] = []

    def work(_):
        while True:
            acknowledged.append(producer.send(topic, bytes(20_000)).msg_id)
            sent.release()

    def stop(_):
        for _ in range(50):
            assert sent.acquire(timeout=DEADLINE)
        producer.stop()

    outcomes = _in_threads(9, lambda number: work(number) if number else stop(number))

    assert outcomes[0] is None
    assert all(isinstance(each, NotRunning | SendFailed) for each in outcomes[1:]), outcomes
    stored = {message.unique_id for message in cluster.messages(topic)}
    assert stored >= set(acknowledged)


def test_a_forgotten_stop_does_not_keep_the_program_from_ending(cluster, topic):
    program = (
        "from orbitmq.client.producer.producer import Producer\n"
        f"producer = Producer(name_server={cluster.name_server!r})\n"
        "producer.start()\n"
        f"producer.send({topic!r}, b'x')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )

    # Development mode also tells of steps that take 0.1 s, which on a busy machine any may.
    complaints = [each for each in ended.stderr.splitlines() if not each.startswith("Executing <")]
    assert (ended.returncode, complaints) == (0, [])
    assert len(cluster.messages(topic)) == 1
