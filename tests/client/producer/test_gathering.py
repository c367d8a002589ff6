"""What `submit` and concurrent sends put into batches, and what becomes of each message of one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import zlib
from collections import Counter
from dataclasses import replace

import pytest

from orbitmq.broker.settings import BrokerSettings
from orbitmq.client.message import Message
from orbitmq.client.producer.core import SendSettings
from orbitmq.client.producer.producer import AsyncProducer, Producer
from orbitmq.client.producer.send import SendResult, SendStatus
from orbitmq.client.producer.submit import SendFuture
from orbitmq.errors import BrokerRefused, OrbitError, SendFailed
from orbitmq.message.record import COMPRESSED
from orbitmq.remoting.settings import RequestTimedOut
from orbitmq.testing import EmbeddedCluster
from orbitmq.wire.codes import Release, RequestCode, ResponseCode, ordinal_of
from tests.support.producing import HANG_UP, SILENCE, Answering, ScriptedCluster, scripted_cluster
from tests.support.remoting import DEADLINE, until

PATIENT = SendSettings(timeout=DEADLINE, retry_pause=0)


async def _submitted(
    producer: AsyncProducer, bodies: list[bytes], **options: object
) -> list[asyncio.Future[SendResult]]:
    return [await producer.submit("orders", body, **options) for body in bodies]  # type: ignore[arg-type]


def _numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def test_what_waits_for_an_answer_goes_as_one_batch_and_each_message_has_its_result():
    async with scripted_cluster("a") as cluster, cluster.producer(sending=PATIENT) as producer:
        await producer.send("orders", b"to connect", ordering_key=1)
        futures = await _submitted(producer, _numbered(50), ordering_key=1)

        results = await asyncio.gather(*futures)

    _, alone, batch = cluster.sent
    assert (alone.code, batch.code) == (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
    assert cluster.bodies[1:] == _numbered(50)
    assert [result.msg_id for result in results] == alone.ids + batch.ids
    assert len(set(alone.ids + batch.ids)) == 50
    assert [result.queue_offset for result in results] == [200, *range(300, 349)]
    assert results[2].offset_id == "7F00000100002A9F0000000300000001"
    assert "UNIQ_KEY" in batch.properties  # on some topics a batch is one record


async def test_messages_for_any_queue_go_to_all_of_them_batch_by_batch(cluster):
    async with AsyncProducer("svc", name_server=cluster.name_server) as producer:
        results = []
        for _ in range(20):
            results += await asyncio.gather(*(producer.send("orders", b"x") for _ in range(50)))

    assert len({result.msg_id for result in results}) == 1000
    by_queue = Counter(result.queue for result in results)
    assert len(by_queue) > 1
    assert {(r.queue, r.queue_offset) for r in results} == {
        (queue, offset) for queue, count in by_queue.items() for offset in range(count)
    }


async def test_concurrent_sends_share_frames():
    async with scripted_cluster("a") as cluster, cluster.producer(sending=PATIENT) as producer:
        await producer.send("orders", b"to connect")

        results = await asyncio.gather(*(producer.send("orders", body) for body in _numbered(100)))

    assert sorted(cluster.bodies[1:]) == sorted(_numbered(100))
    assert len(cluster.sent) < 10
    assert {result.msg_id for result in results} == {
        i for sent in cluster.sent[1:] for i in sent.ids
    }


async def test_what_waited_for_the_queues_of_its_topic_goes_in_batches():
    async with scripted_cluster("a") as cluster, cluster.producer(sending=PATIENT) as producer:
        await producer.send("orders", b"to connect")
        await until(lambda: producer.publisher.is_old("a") is not None)
        cluster.publish("others")
        futures = [await producer.submit("others", body) for body in _numbered(100)]

        await asyncio.gather(*futures)

    assert sorted(cluster.bodies[1:]) == sorted(_numbered(100))
    assert len(cluster.sent) < 10


async def test_the_queues_of_a_new_topic_are_known_soon(cluster):
    async with AsyncProducer("svc", name_server=cluster.name_server) as producer:
        await producer.send("made-by-sending", b"x")

        await until(lambda: producer.publisher.known("made-by-sending") is not None)


@pytest.mark.parametrize("place", [0, 1, 500, 999])
async def test_one_bad_message_among_a_thousand_fails_alone(place):
    async with scripted_cluster("a") as cluster, cluster.producer(sending=PATIENT) as producer:
        await producer.send("orders", b"to connect", ordering_key=1)
        bodies = _numbered(1000)
        cluster.refused = {bodies[place]}
        futures = await _submitted(producer, bodies, ordering_key=1)

        outcomes = await asyncio.gather(*futures, return_exceptions=True)

    bad = outcomes.pop(place)
    assert isinstance(bad, BrokerRefused)
    assert bad.code == ResponseCode.MESSAGE_ILLEGAL
    assert all(isinstance(outcome, SendResult) for outcome in outcomes)
    assert cluster.bodies[1:] == bodies[:place] + bodies[place + 1 :]


@pytest.mark.parametrize("answer", ["refused", ResponseCode.GO_AWAY])
@pytest.mark.parametrize("settings", [PATIENT, replace(PATIENT, batch_messages=7)])
async def test_messages_of_a_key_keep_their_order_when_a_broker_refuses_a_batch(settings, answer):
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        await producer.send("orders", b"to connect", ordering_key=1)
        bodies = [b"%04d" % number + bytes(2000) for number in range(700)]
        cluster.script = {"a": [0, 0] if answer == "refused" else [0, 0, answer]}
        cluster.refused = {bodies[20]} if answer == "refused" else set()
        futures = await _submitted(producer, bodies, ordering_key=1)

        outcomes = await asyncio.gather(*futures, return_exceptions=True)

    stored = [result.msg_id for result in outcomes if isinstance(result, SendResult)]
    assert len(stored) == 700 - len(cluster.refused)
    arrived = [unique_id for sent in cluster.sent[1:] for unique_id in sent.ids]
    # What the broker sent away has come twice: the second time counts.
    assert list(dict.fromkeys(reversed(arrived))) == stored[::-1]


def test_messages_of_a_key_keep_their_order_at_a_broker_that_takes_no_batch_so_large():
    def small(settings: BrokerSettings) -> BrokerSettings:
        return replace(settings, send=replace(settings.send, max_message_size=100_000))

    with (
        EmbeddedCluster(adjust=small) as cluster,
        Producer("svc", name_server=cluster.name_server) as producer,
    ):
        cluster.create_topic("orders", queues=4)
        producer.send("orders", b"to connect", ordering_key=1)
        futures = [producer.submit("orders", bytes(2000), ordering_key=1) for _ in range(2000)]

        offsets = [future.result(DEADLINE).queue_offset for future in futures]

    assert offsets == list(range(1, 2001))


LARGE = bytes(5000)


@pytest.mark.parametrize(
    ("options", "is_as_sent"),
    [({"body": LARGE}, False), ({"wait_stored": False}, True), ({"delay_level": 2}, True)],
    ids=["compressed", "not waited for", "delayed"],
)
async def test_what_a_batch_cannot_carry_goes_alone_and_in_its_place(options, is_as_sent):
    async with scripted_cluster("a") as cluster, cluster.producer(sending=PATIENT) as producer:
        await producer.send("orders", b"to connect", ordering_key=1)
        given = [Message("orders", body) for body in _numbered(5)]
        given.insert(3, Message("orders", **{"body": b"odd", **options}))
        futures = [await producer.submit(message, ordering_key=1) for message in given]

        await asyncio.gather(*futures)

    frames = [sent.bodies for sent in cluster.sent[1:]]
    odd = frames[2]
    assert frames == [[b"0"], [b"1", b"2"], odd, [b"3", b"4"]]
    assert (odd == [b"odd"]) is is_as_sent
    assert bool(cluster.sent[3].header.sys_flag & COMPRESSED) is not is_as_sent


@pytest.mark.parametrize("place", [1, 3, 5])
@pytest.mark.parametrize("settings", [PATIENT, SendSettings(batch_messages=3)])
async def test_nothing_overtakes_a_batch_that_was_refused(place, settings):
    bodies = [*_numbered(6), LARGE, b"6", b"7"]
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        await producer.send("orders", b"to connect", ordering_key=1)
        cluster.refused = {bodies[place]}
        futures = await _submitted(producer, bodies, ordering_key=1)

        outcomes = await asyncio.gather(*futures, return_exceptions=True)

    assert [place for place, each in enumerate(outcomes) if isinstance(each, OrbitError)] == [place]
    del bodies[place]
    bodies[bodies.index(LARGE)] = zlib.compress(LARGE, SendSettings().compression_level)
    assert cluster.bodies[1:] == bodies


async def test_nothing_overtakes_a_batch_that_is_sent_again_because_a_broker_leaves():
    settings = SendSettings(timeout=DEADLINE)
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        await producer.send("orders", b"to connect", ordering_key=1)
        cluster.script = {"a": [0, ResponseCode.GO_AWAY, 0, ResponseCode.GO_AWAY]}
        futures = await _submitted(producer, _numbered(20), ordering_key=1)
        await futures[0]
        futures += await _submitted(producer, [b"%d" % n for n in range(20, 40)], ordering_key=1)
        await until(lambda: len(cluster.sent) > 3)
        futures += await _submitted(producer, [b"%d" % n for n in range(40, 60)], ordering_key=1)

        results = await asyncio.gather(*futures)

    assert all(result.is_ok for result in results)
    _, first, sent_away, second, also_sent_away, *following = cluster.sent
    assert sent_away.bodies[0] == second.bodies[0] == b"1"
    assert also_sent_away.bodies[0] == following[0].bodies[0]
    stored = [body for sent in (first, second, *following) for body in sent.bodies]
    assert stored == _numbered(60)


async def test_messages_for_a_time_go_alone():
    async with scripted_cluster("a") as cluster, cluster.producer(sending=PATIENT) as producer:
        await producer.send("orders", b"to connect")
        await until(lambda: bool(producer.publisher.is_old("a") is False))
        futures = await _submitted(producer, _numbered(5), delay=30)

        await asyncio.gather(*futures)

    assert [sent.code for sent in cluster.sent] == [RequestCode.SEND_MESSAGE_V2] * 6


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        (SendSettings(batch_messages=7), 7),
        (SendSettings(batch_bytes=1000), 14),
        (SendSettings(batch_messages=1), 1),
    ],
)
async def test_a_batch_has_limits(settings, most):
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        await producer.send("orders", b"to connect", ordering_key=1)
        futures = await _submitted(producer, _numbered(40), ordering_key=1)

        await asyncio.gather(*futures)

    assert cluster.bodies[1:] == _numbered(40)
    assert max(len(sent.bodies) for sent in cluster.sent) <= most
    assert len(cluster.sent) >= 40 / most


@pytest.mark.parametrize("ordering_key", [None, "o-1"])
async def test_when_the_answer_to_a_batch_is_lost_each_message_has_its_own_outcome(ordering_key):
    async with scripted_cluster("a") as cluster, cluster.producer(sending=PATIENT) as producer:
        await producer.send("orders", b"to connect", ordering_key=ordering_key)
        cluster.script = {"a": [0, HANG_UP]}
        futures = await _submitted(producer, _numbered(30), ordering_key=ordering_key)

        outcomes = await asyncio.gather(*futures, return_exceptions=True)

    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if ordering_key is None:
        # They may go elsewhere, or again: with the same ids.
        results = [outcome for outcome in outcomes if isinstance(outcome, SendResult)]
        assert failed == []
        stored = Counter(unique_id for sent in cluster.sent[1:] for unique_id in sent.ids)
        assert {result.msg_id for result in results} == set(stored)
        assert max(stored.values()) == 2
    else:
        # What is bound to a queue may be stored, and is not sent again.
        assert len(failed) == 29
        assert all(isinstance(error, SendFailed) for error in failed)
        assert producer.statistics().failed == 29


async def test_each_message_of_a_batch_has_its_own_time():
    async with scripted_cluster("a") as cluster, cluster.producer(sending=PATIENT) as producer:
        await producer.send("orders", b"to connect", ordering_key=1)
        cluster.script = {"a": [0, SILENCE]}
        first = await producer.submit("orders", b"first", ordering_key=1)
        short = await producer.submit("orders", b"short", ordering_key=1, timeout=0.2)
        long = await producer.submit("orders", b"long", ordering_key=1)
        await first
        await until(lambda: len(cluster.sent) == 3)
        behind = await producer.submit("orders", b"behind", ordering_key=1, timeout=0.3)

        with pytest.raises(SendFailed) as caught:
            await short
        with pytest.raises(SendFailed):
            await behind

        assert isinstance(caught.value.cause, RequestTimedOut)
        assert not long.done()
        assert cluster.sent[-1].bodies == [b"short", b"long"]
        for connection in cluster.brokers["a"].connections:
            connection.abort()
        with pytest.raises(SendFailed):
            await long


@pytest.mark.parametrize("is_safer_wanted", [False, True])
async def test_a_batch_that_is_less_safe_than_promised_says_so_for_each_message(is_safer_wanted):
    settings = SendSettings(timeout=DEADLINE, retry_pause=0, retry_not_stored_ok=is_safer_wanted)
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        await producer.send("orders", b"to connect")
        cluster.script = {"a": [0, ResponseCode.FLUSH_DISK_TIMEOUT]}
        futures = await _submitted(producer, _numbered(12))

        results = await asyncio.gather(*futures)

    found = Counter(result.status for result in results)
    assert found == (
        {SendStatus.OK: 12}
        if is_safer_wanted
        else {SendStatus.OK: 1, SendStatus.FLUSH_DISK_TIMEOUT: 11}
    )


@pytest.mark.parametrize(
    "answer", [ResponseCode.SYSTEM_BUSY, ResponseCode.NO_PERMISSION, ResponseCode.GO_AWAY]
)
async def test_a_batch_that_one_broker_does_not_want_goes_to_another(answer):
    async with scripted_cluster("a", "b") as cluster, cluster.producer(sending=PATIENT) as producer:
        await asyncio.gather(*(producer.send("orders", b"to connect") for _ in range(20)))
        cluster.sent.clear()
        cluster.script = {"a": [answer] * 3}
        futures = await _submitted(producer, _numbered(100))

        results = await asyncio.gather(*futures)

    assert len({result.msg_id for result in results}) == 100


async def test_a_broker_of_rocketmq_4_gets_batches_without_an_id_of_their_own():
    async with scripted_cluster("a") as cluster, cluster.producer(sending=PATIENT) as producer:
        cluster.brokers["a"].version = ordinal_of(Release(4, 9, 7))
        await producer.send("orders", b"to connect", ordering_key=1)
        await until(lambda: bool(producer.publisher.is_old("a")))
        futures = await _submitted(producer, _numbered(20), ordering_key=1)

        await asyncio.gather(*futures)

    batch = cluster.sent[-1]
    assert batch.header.batch
    assert "UNIQ_KEY" not in batch.properties
    assert len(set(batch.ids)) == len(batch.bodies)


async def test_with_linger_messages_wait_for_others():
    settings = SendSettings(linger=0.3, timeout=DEADLINE)
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        await producer.send("orders", b"to connect", ordering_key=1)
        futures = await _submitted(producer, [b"1"], ordering_key=1)
        await asyncio.sleep(0.05)
        futures += await _submitted(producer, [b"2"], ordering_key=1)

        await asyncio.gather(*futures)

    assert [sent.bodies for sent in cluster.sent[1:]] == [[b"1", b"2"]]


async def test_a_send_that_is_given_up_before_its_turn_does_not_go():
    async with scripted_cluster("a") as cluster, cluster.producer(sending=PATIENT) as producer:
        await producer.send("orders", b"to connect", ordering_key=1)
        cluster.script = {"a": [SILENCE]}
        first = asyncio.create_task(producer.send("orders", b"first", ordering_key=1, timeout=0.5))
        await until(lambda: len(cluster.sent) == 2)
        given_up = asyncio.create_task(producer.send("orders", b"given up", ordering_key=1))
        kept = asyncio.create_task(producer.send("orders", b"kept", ordering_key=1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        given_up.cancel()

        assert (await kept).is_ok

        with pytest.raises(SendFailed):
            await first
    assert cluster.bodies[1:] == [b"first", b"kept"]


async def test_messages_of_many_threads_keep_the_order_of_their_keys(cluster):
    with Producer("svc", name_server=cluster.name_server) as producer:

        def work(key: int) -> list[SendResult]:
            futures = [
                producer.submit("orders", f"{key}:{number}", ordering_key=key)
                for number in range(500)
            ]
            return [future.result(DEADLINE) for future in futures]

        async with asyncio.timeout(DEADLINE * 3):
            results = await asyncio.gather(*(asyncio.to_thread(work, key) for key in range(4)))

    for mine in results:
        assert len({result.queue for result in mine}) == 1
        offsets = [result.queue_offset for result in mine]
        assert offsets == sorted(offsets)
    assert len(cluster.messages("orders")) == 2000


async def test_a_callback_that_ends_its_program_takes_no_outcome_from_the_others_of_a_batch(
    cluster,
):
    def end(_: object) -> None:
        raise SystemExit(3)

    def work() -> list[SendResult]:
        with Producer("svc", name_server=cluster.name_server) as producer:
            producer.send("orders", b"to connect", ordering_key=1)
            futures = [producer.submit("orders", b"x", ordering_key=1) for _ in range(200)]
            futures[20].add_done_callback(end)
            return [future.result(DEADLINE) for future in futures]

    assert len(await asyncio.to_thread(work)) == 200


def _result(number: int) -> SendResult:
    return SendResult(SendStatus.OK, f"{number}", "", None, number)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_asked_first", [False, True])
@pytest.mark.parametrize("outcome", [_result(1), ValueError("bad")], ids=["result", "error"])
def test_the_future_of_a_submitted_message_is_one_like_any_other(is_asked_first, outcome):
    future = SendFuture()
    told: list[concurrent.futures.Future[SendResult]] = []
    if is_asked_first:
        future.add_done_callback(told.append)
        assert (future.done(), future.cancel(), future.running()) == (False, False, True)
        with pytest.raises(TimeoutError):
            future.result(0)

    future.settle(outcome)

    if not is_asked_first:
        future.add_done_callback(told.append)
    assert told == [future]
    assert (future.done(), future.cancelled()) == (True, False)
    assert concurrent.futures.wait([future], 0).done == {future}
    assert list(concurrent.futures.as_completed([future], 0)) == [future]
    if isinstance(outcome, SendResult):
        assert (future.result(0), future.exception(0)) == (outcome, None)
    else:
        assert future.exception(0) is outcome
        with pytest.raises(ValueError, match="bad"):
            future.result(0)


def test_threads_that_wait_for_a_submitted_message_get_its_result():
    futures = [SendFuture() for _ in range(2000)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        one = pool.submit(lambda: [future.result(DEADLINE).queue_offset for future in futures])
        all_ = pool.submit(lambda: len(concurrent.futures.wait(futures, DEADLINE).done))
        for number, future in enumerate(futures):
            future.settle(_result(number))

        assert one.result(DEADLINE) == list(range(2000))
        assert all_.result(DEADLINE) == 2000


async def test_a_cluster_that_comes_and_goes_leaves_no_message_without_an_outcome():
    settings = SendSettings(timeout=1.0, retry_pause=0)
    async with (
        scripted_cluster("a", "b") as cluster,
        cluster.producer(sending=settings) as producer,
    ):
        await _disturbed(cluster, producer)


async def _disturbed(cluster: ScriptedCluster, producer: AsyncProducer) -> None:
    answers: list[Answering] = [
        0,
        HANG_UP,
        0,
        ResponseCode.SYSTEM_BUSY,
        SILENCE,
        0,
        ResponseCode.GO_AWAY,
    ]
    cluster.script = {"a": answers * 5, "b": answers[::-1] * 5}
    futures = []
    for number in range(1000):
        key = number % 3 or None
        futures.append(await producer.submit("orders", b"%d" % number, ordering_key=key))
        if number % 50 == 0:
            await asyncio.sleep(0.01)

    async with asyncio.timeout(DEADLINE):
        outcomes = await asyncio.gather(*futures, return_exceptions=True)

    assert len(outcomes) == 1000
    stored = {unique_id for sent in cluster.sent for unique_id in sent.ids}
    results = [outcome for outcome in outcomes if isinstance(outcome, SendResult)]
    assert {result.msg_id for result in results} <= stored
    assert {type(each) for each in outcomes} <= {SendResult, SendFailed}
    assert producer.statistics().in_flight == 0
