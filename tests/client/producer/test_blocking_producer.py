"""The blocking producer: threads that send, submit, stop and fork."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orbitmq.broker.settings import BrokerSettings
from orbitmq.client.errors import UsedAfterFork
from orbitmq.client.message import Message
from orbitmq.client.producer.core import ProducerCore, SendSettings
from orbitmq.client.producer.producer import Producer
from orbitmq.client.producer.send import SendStatus
from orbitmq.client.producer.submit import InFlight
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.cluster import Cluster
from orbitmq.errors import (
    BrokerRefused,
    ClientError,
    MessageRefused,
    NotRunning,
    SendFailed,
    TooManyInFlight,
    WrongUse,
)
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.settings import RequestTimedOut, ServerSettings
from orbitmq.remoting.tls import ClientTls, ServerTls, TlsMode
from orbitmq.store.settings import StoreSettings
from orbitmq.testing.cluster import EmbeddedCluster
from orbitmq.wire.codes import TransactionState
from orbitmq.wire.command import Credentials
from tests.support.askingthreads import background_loop
from tests.support.client import QUICK_CHANNELS
from tests.support.forking import in_a_fork
from tests.support.producing import SILENCE, scripted_cluster
from tests.support.remoting import until

DEADLINE = 30.0
TLS = Path(__file__).resolve().parents[2] / "data" / "tls"
STORE = StoreSettings(file_size=16 * 1024 * 1024, preallocate_step=0)


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
    results = producer.send_batch((Message(topic, b"%d" % number) for number in range(100)), key=1)

    assert [result.queue_offset for result in results] == list(range(100))
    assert [message.body for message in cluster.messages(topic)] == [b"%d" % n for n in range(100)]
    assert producer.queues(topic)[1] == results[0].queue


def test_it_says_when_it_is_not_running(cluster, topic):
    producer = Producer("once", name_server=cluster.name_server)
    with pytest.raises(NotRunning, match="start it"):
        producer.send(topic, b"x")
    producer.start()
    with pytest.raises(WrongUse):
        producer.start()
    producer.stop()
    producer.stop()
    with pytest.raises(NotRunning, match="was stopped"):
        producer.start()

    assert not [each for each in threading.enumerate() if each.name.endswith("once")]
    for call in (producer.send, producer.submit, producer.send_one_way, producer.request):
        with pytest.raises(NotRunning, match="was stopped"):
            call(topic, b"x")


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


class Interrupt(BaseException):
    """What strikes a thread, as Ctrl-C does."""


async def test_what_was_sent_and_not_answered_fails_when_a_stop_is_interrupted(monkeypatch):
    async def interrupted(*_):
        raise Interrupt

    async with scripted_cluster("a") as scripted:
        producer = Producer("hasty", name_server=str(scripted.name_server.address))
        await asyncio.to_thread(producer.start)
        await asyncio.to_thread(producer.send, "orders", b"x")
        scripted.script = {"a": [SILENCE] * 3}
        submitted = [producer.submit("orders", b"x", timeout=3600) for _ in range(3)]
        await until(lambda: not scripted.script["a"])
        monkeypatch.setattr(InFlight, "until_empty", interrupted)
        with pytest.raises(Interrupt):
            await asyncio.to_thread(producer.stop)

        assert [type(each.exception(0)) for each in submitted] == 3 * [NotRunning]
        assert producer.statistics().in_flight == 0


def test_stops_that_overlap_all_wait_for_the_same_end(cluster, topic, monkeypatch):
    """And the transaction that they wait for is committed."""
    producer = Producer("several-stops", name_server=cluster.name_server)
    producer.start()
    is_at_work, go_on, stopping = threading.Event(), threading.Event(), threading.Semaphore(0)
    stop = ProducerCore.stop

    async def noted(core):
        stopping.release()
        await stop(core)

    monkeypatch.setattr(ProducerCore, "stop", noted)

    def local(_, __):
        is_at_work.set()
        return go_on.wait(DEADLINE)

    def work(number):
        if number == 0:
            return producer.send_in_transaction(Message(topic, b"x"), local).state
        assert is_at_work.wait(DEADLINE)
        if number == 3:
            assert stopping.acquire(timeout=DEADLINE)
            assert stopping.acquire(timeout=DEADLINE)
            go_on.set()
            return None
        producer.stop()
        return [each.name for each in threading.enumerate() if each.name.endswith("several-stops")]

    outcomes = _in_threads(4, work)

    assert outcomes == [TransactionState.COMMIT, [], [], None]
    assert [message.body for message in cluster.messages(topic)] == [b"x"]


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


def test_a_handler_that_raises_ends_a_send_and_the_next_one_works():
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with background_loop() as run:
            context = scripted_cluster("a")
            cluster = run(context.__aenter__())
            client = ClientSettings(channel=QUICK_CHANNELS)
            with Producer(name_server=cluster.name_server.address, client=client) as producer:
                producer.send("orders", b"first")
                cluster.script = {"a": [SILENCE]}

                def strike():
                    asyncio.run(until(lambda: not cluster.script["a"]))
                    os.kill(os.getpid(), signal.SIGINT)

                striking = threading.Thread(target=strike)
                striking.start()
                with pytest.raises(KeyboardInterrupt):
                    producer.send("orders", b"interrupted", timeout=DEADLINE)
                striking.join()

                assert producer.send("orders", b"next").is_ok
            run(context.__aexit__(None, None, None))
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_that_come_all_the_time_keep_no_send_beyond_its_deadline():
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        with background_loop() as run:
            context = scripted_cluster("a")
            cluster = run(context.__aenter__())
            with Producer(name_server=cluster.name_server.address) as producer:
                producer.send("orders", b"first")
                cluster.script = {"a": [SILENCE]}
                signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
                began = time.monotonic()
                with pytest.raises(SendFailed) as caught:
                    producer.send("orders", b"x", timeout=1.0)
                assert time.monotonic() - began < 2.5
                assert isinstance(caught.value.cause, RequestTimedOut)
                signal.setitimer(signal.ITIMER_REAL, 0)
            run(context.__aexit__(None, None, None))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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


async def test_signed_and_encrypted_sends_work_from_threads(tmp_path):
    tls = ServerTls(
        certificate=TLS / "certificate.pem", key=TLS / "key.pem", mode=TlsMode.ENFORCING
    )
    # Brokers register at the name server in the clear.
    permissive = replace(tls, mode=TlsMode.PERMISSIVE)
    own = Cluster(
        NameServerSettings(server=ServerSettings(tls=permissive)),
        [BrokerSettings(root=tmp_path, server=ServerSettings(tls=tls), store=STORE)],
    )
    client = ClientSettings(
        credentials=Credentials(access_key="AK", secret_key="SK123456"),  # noqa: S106
        tls=ClientTls(authority=TLS / "certificate.pem").context(),
    )
    await own.start()

    def send():
        with Producer(name_server=str(own.name_server_address), client=client) as producer:
            return _in_threads(4, lambda _: [producer.send("orders", b"x") for _ in range(20)])

    try:
        outcomes = await asyncio.to_thread(send)
    finally:
        await own.stop()

    assert all(isinstance(each, list) for each in outcomes), outcomes


@pytest.mark.feature("P6")
def test_after_a_fork_it_says_that_it_belongs_to_another_process(cluster, producer, topic):
    producer.send(topic, b"before")

    def use_and_stop():
        text = "nothing was raised"
        try:
            producer.send(topic, b"in the child")
        except UsedAfterFork as error:
            text = str(error)
        producer.stop()  # as a `with` block that the fork was in would
        return text

    forked = in_a_fork(use_and_stop)

    assert f"belongs to process {os.getpid()} and cannot be used in process {forked.pid}" in (
        forked.said
    )
    assert producer.send(topic, b"after").is_ok
    assert {message.body for message in cluster.messages(topic)} == {b"before", b"after"}


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
