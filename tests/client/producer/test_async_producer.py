"""The asyncio producer against real brokers: every way of sending, and its life."""

from __future__ import annotations

import asyncio
import logging
import pickle

import pytest

from orbitmq.client.errors import NoNameServer
from orbitmq.client.message import Message
from orbitmq.client.producer.core import Compression, ProducerStatistics, SendSettings
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.producer.send import SendResult, SendStatus, by_key
from orbitmq.client.routes import Queue
from orbitmq.errors import (
    BrokerRefused,
    MessageRefused,
    NoRoute,
    NotRunning,
    SendFailed,
    SettingError,
    TooManyInFlight,
    WrongUse,
)
from orbitmq.javahash import java_hash
from orbitmq.message.stored import StoredMessage
from orbitmq.wire.codes import Release, ResponseCode, TransactionState, ordinal_of
from tests.support.client import quick_settings
from tests.support.producing import HANG_UP, SILENCE, scripted_cluster
from tests.support.remoting import DEADLINE, until

BROKER_COUNT = 2


def _place(message: StoredMessage) -> tuple[str | None, int, int]:
    return message.unique_id, message.queue_id, message.queue_offset


@pytest.mark.feature("K1")
async def test_sync_async_and_one_way_sends_arrive_as_they_were_given(cluster, producer):
    result = await producer.send("orders", "grün", tags="paid", keys=["o-1", "o-2"], timeout=10)
    later = await (await producer.submit(Message("orders", b"2", properties={"region": "eu"})))
    await producer.send_one_way("orders", b"3", tags="silent")
    await until(lambda: len(cluster.messages("orders")) == 3)

    by_body = {message.body: message for message in cluster.messages("orders")}
    stored = by_body["grün".encode()]
    assert isinstance(result, SendResult)
    assert result.status is SendStatus.OK
    assert _place(stored) == (result.msg_id, result.queue.id, result.queue_offset)
    assert stored.offset_id == result.offset_id
    assert (stored.tags, stored.keys) == ("paid", "o-1 o-2")
    assert by_body[b"2"].unique_id == later.msg_id
    assert by_body[b"2"].get_property("region") == "eu"
    assert by_body[b"3"].tags == "silent"


@pytest.mark.feature("K4")
async def test_the_same_key_goes_to_the_same_queue_as_java_puts_it(cluster, producer):
    queues = await producer.queues("orders")
    assert queues == tuple(
        Queue("orders", broker, place) for broker in ("broker-a", "broker-b") for place in range(4)
    )

    for key in [f"order-{number}" for number in range(20)]:
        results = [
            await producer.send("orders", b"1", ordering_key=key),
            await producer.send("orders", b"2", selector=by_key(key)),
            await producer.send(Message("orders", b"3", ordering_key=key)),
        ]

        expected = queues[abs(java_hash(key)) % 8]
        assert [result.queue for result in results] == [expected] * 3
        offsets = [result.queue_offset for result in results]
        assert offsets == list(range(offsets[0], offsets[0] + 3))


@pytest.mark.feature("K2")
async def test_a_batch_is_split_to_the_limit_and_every_message_has_its_id(cluster):
    await cluster.create_topic("payments")
    messages = [
        Message("orders" if number % 3 else "payments", b"%05d" % number * 4000, keys=f"k-{number}")
        for number in range(600)
    ]  # 12 MB: at least three frames
    async with AsyncProducer("svc", name_server=cluster.name_server) as producer:
        results = await producer.send_batch(messages, timeout=60)

    stored = {
        each.unique_id: each for topic in ("orders", "payments") for each in cluster.messages(topic)
    }
    assert len(stored) == len(results) == 600
    for message, result in zip(messages, results, strict=True):
        found = stored[result.msg_id]
        assert (found.body, found.keys) == (message.body, message.keys[0])
        assert found.offset_id == result.offset_id
        assert (found.topic, found.queue_id, found.queue_offset) == (
            result.queue.topic, result.queue.id, result.queue_offset
        )  # fmt: skip
    for topic in ("orders", "payments"):
        of_topic = [each for each in results if each.queue.topic == topic]
        assert len({each.queue for each in of_topic}) == 1
        assert [each.queue_offset for each in of_topic] == list(range(len(of_topic)))


@pytest.mark.parametrize(
    ("release", "has_id"), [(Release(4, 9, 7), False), (Release(5, 5, 0), True)]
)
async def test_a_batch_has_an_id_of_its_own_only_for_brokers_that_keep_it_apart(release, has_id):
    """Brokers before 5.0 add a batch's properties to each message, after the message's own."""
    async with scripted_cluster("a") as cluster, cluster.producer() as producer:
        cluster.brokers["a"].version = ordinal_of(release)
        await producer.send_batch([Message("orders", b"x"), Message("orders", b"y")])

    (sent,) = cluster.sent
    assert ("UNIQ_KEY" in sent.properties) == has_id
    assert sent.properties["WAIT"] == "true"


async def test_messages_of_a_batch_go_to_the_queues_of_their_ordering_keys(cluster, producer):
    keys = ["order-1", "order-2", None, "order-1", "order-3", None, "order-2", "order-1"] * 3
    messages = [
        Message("orders", b"%d" % number, ordering_key=key) for number, key in enumerate(keys)
    ]

    results = await producer.send_batch(messages)

    single = {
        key: (await producer.send("orders", b"one", ordering_key=key)).queue
        for key in ("order-1", "order-2", "order-3")
    }
    bodies = {each.unique_id: each.body for each in cluster.messages("orders")}
    assert [bodies[result.msg_id] for result in results] == [each.body for each in messages]
    for key, queue in single.items():
        own = [result for result, of in zip(results, keys, strict=True) if of == key]
        assert {result.queue for result in own} == {queue}
        offsets = [result.queue_offset for result in own]
        assert offsets == sorted(offsets)
    free = {result.queue for result, of in zip(results, keys, strict=True) if of is None}
    assert len(free) == 1


ORDERS = Queue("orders", "a", 0)


@pytest.mark.parametrize(
    ("topics", "options", "error", "match"),
    [
        (["orders", "payments"], {"queue": ORDERS}, MessageRefused, r"\[1\]\.topic is 'payments'"),
        (
            ["orders"],
            {"queue": ORDERS, "ordering_key": "k"},
            SettingError,
            "queue and ordering_key exclude",
        ),
        (["nowhere"] * 2, {}, SendFailed, "0 of 2 messages are stored"),
    ],
)
@pytest.mark.parametrize("ordering_key", [None, "order-1"])
async def test_a_batch_that_cannot_be_sent_is_refused_as_a_whole(
    topics, options, error, match, ordering_key
):
    messages = [Message(topic, b"x", ordering_key=ordering_key) for topic in topics]
    async with scripted_cluster("a") as cluster, cluster.producer() as producer:
        with pytest.raises(error, match=match) as caught:
            await producer.send_batch(messages, **options)

    assert cluster.sent == []
    if error is SendFailed:
        assert isinstance(caught.value.cause, NoRoute)
        assert caught.value.results == (None, None)


async def test_a_batch_that_fails_half_way_says_what_is_stored():
    settings = SendSettings(max_message_size=1000, retries=0)
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        cluster.script = {"a": [0, HANG_UP]}

        with pytest.raises(SendFailed) as caught:
            await producer.send_batch([Message("orders", bytes(400)) for _ in range(6)])

    error = caught.value
    stored = [result is not None for result in error.results]
    assert stored == [True, True, False, False, False, False]
    assert isinstance(error, SendFailed)
    assert "2 of 6 messages are stored" in str(error)
    assert pickle.loads(pickle.dumps(error)).results == error.results  # noqa: S301  # ours


async def test_a_large_body_is_compressed_on_the_way(cluster):
    body = b"compressible " * 100_000
    for compression in Compression:
        settings = SendSettings(compression=compression)
        async with AsyncProducer(name_server=cluster.name_server, sending=settings) as producer:
            await producer.send("orders", body)

    stored = cluster.messages("orders")
    assert [message.body == body for message in stored] == [True] * 3
    assert all(len(message.stored_body) < len(body) / 50 for message in stored)


async def test_submit_waits_while_too_much_is_in_flight():
    settings = SendSettings(max_in_flight=2, timeout=DEADLINE, retries=0)
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        await producer.send("orders", b"to connect")
        cluster.script = {"a": [SILENCE, SILENCE]}
        first = await producer.submit("orders", b"1", timeout=DEADLINE)
        await producer.submit("orders", b"2", timeout=DEADLINE)

        with pytest.raises(TooManyInFlight, match="2 submitted messages"):
            await producer.submit("orders", b"3", timeout=0.05)

        assert not first.done()
        for connection in cluster.brokers["a"].connections:
            connection.abort()
        with pytest.raises(SendFailed):
            await first
        await (await producer.submit("orders", b"4"))


async def test_a_submitted_message_that_fails_is_logged_if_nobody_looks(caplog):
    settings = SendSettings(retries=0)
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        cluster.script = {"a": [HANG_UP]}
        with caplog.at_level(logging.WARNING, "orbitmq.client.producer"):
            await producer.submit("orders", b"1")
            await producer.flush()

    assert "a message submitted to orders by group" in caplog.text


async def test_stopping_waits_for_what_was_submitted(cluster):
    producer = AsyncProducer("svc", name_server=cluster.name_server)
    await producer.start()
    futures = [await producer.submit("orders", b"%d" % number) for number in range(200)]

    await producer.stop()

    assert [future.result().is_ok for future in futures] == [True] * 200
    assert len(cluster.messages("orders")) == 200


async def test_a_producer_leaves_although_the_caller_of_stop_gives_up(cluster):
    producer = AsyncProducer("svc", name_server=cluster.name_server)
    await producer.start()
    is_at_work, go_on = asyncio.Event(), asyncio.Event()

    async def local(_, __):
        is_at_work.set()
        await go_on.wait()
        return True

    sending = asyncio.create_task(producer.send_in_transaction(Message("orders", b"x"), local))
    await is_at_work.wait()
    first, second = (asyncio.create_task(producer.stop()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait((first,))
    assert not second.done()
    go_on.set()

    await asyncio.wait_for(second, DEADLINE)
    assert (await sending).state is TransactionState.COMMIT


async def test_what_was_sent_failed_and_retried_is_counted():
    settings = SendSettings(retry_pause=0, timeout=DEADLINE)
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        before = producer.statistics()
        cluster.script = {"a": [ResponseCode.SYSTEM_BUSY, 0, ResponseCode.MESSAGE_ILLEGAL]}
        await producer.send("orders", b"again")
        with pytest.raises(BrokerRefused):
            await producer.send("orders", b"refused")
        await producer.send_batch([Message("orders", b"x")] * 5)
        cluster.script = {"a": [ResponseCode.MESSAGE_ILLEGAL, 0, SILENCE]}
        await asyncio.wait([await producer.submit("orders", b"refused")])
        await asyncio.wait([await producer.submit("orders", b"stored")])
        await producer.submit("orders", b"not answered")

        found = producer.statistics()
        for connection in cluster.brokers["a"].connections:
            connection.abort()

    assert before == ProducerStatistics()
    assert found == ProducerStatistics(sent=7, failed=2, retried=1, in_flight=1)
    assert producer.statistics().in_flight == 0


async def test_submits_that_wait_for_room_keep_their_order():
    settings = SendSettings(max_in_flight=2, timeout=DEADLINE)
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        bodies = [b"%d" % number for number in range(50)]
        submits = [
            asyncio.create_task(producer.submit("orders", body, ordering_key=1)) for body in bodies
        ]
        await asyncio.gather(*submits)
        await producer.flush()

    assert cluster.bodies == bodies


async def test_it_says_when_it_is_not_running(cluster):
    producer = AsyncProducer("svc", name_server=cluster.name_server)
    with pytest.raises(NotRunning, match="start it"):
        await producer.send("orders", b"x")
    await producer.start()
    with pytest.raises(WrongUse, match="running already"):
        await producer.start()
    await producer.stop()
    await producer.stop()

    for call in (producer.send, producer.submit, producer.send_one_way, producer.request):
        with pytest.raises(NotRunning, match="was stopped"):
            await call("orders", b"x")


async def test_a_namespace_goes_around_topic_and_group(cluster):
    await cluster.create_topic("shop%orders")
    client = quick_settings(cluster.name_server, namespace="shop")
    async with AsyncProducer("svc", client=client) as producer:
        result = await producer.send("orders", b"x")
        again = await producer.send("orders", b"y", queue=Queue("orders", result.queue.broker, 1))

    assert result.queue.topic == again.queue.topic == "shop%orders"
    assert len(cluster.messages("shop%orders")) == 2


async def test_a_message_can_be_passed_on_as_it_was_stored(cluster, producer):
    await cluster.create_topic("copies")
    sent = await producer.send("orders", b"compressible " * 1000, tags="paid")
    (original,) = cluster.messages("orders")

    await producer.forward(
        "copies",
        original.stored_body,
        original.properties,
        flag=original.flag,
        sys_flag=original.sys_flag,
    )

    (copy,) = cluster.messages("copies")
    assert copy.unique_id == sent.msg_id
    assert (copy.body, copy.tags, copy.is_compressed) == (original.body, "paid", True)


async def test_a_first_send_without_a_name_server_takes_its_time_and_says_why(dead):
    async with AsyncProducer(client=quick_settings(dead)) as producer:
        began = asyncio.get_running_loop().time()
        with pytest.raises(SendFailed, match="first attempt: no name server") as failed:
            # On a busy machine it takes a while to be refused.
            await producer.send("orders", b"x", timeout=2.0)
        lasted = asyncio.get_running_loop().time() - began

    assert lasted >= 2.0
    assert isinstance(failed.value.cause, NoNameServer)


async def test_a_topic_that_is_made_by_sending_to_it_is_told_of_once(cluster, caplog):
    caplog.set_level(logging.INFO, "orbitmq.client.producer")
    await cluster.create_topic("there")
    async with AsyncProducer(name_server=cluster.name_server) as producer:
        await producer.send("there", b"x")
        for _ in range(3):
            await producer.send("brand-new", b"x")

    told = [line for line in caplog.messages if "does not exist" in line]
    assert told == ["topic brand-new does not exist and is created by sending to it"]
