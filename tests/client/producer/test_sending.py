"""The rules of one send: attempts, retries, deadlines, errors. Brokers are scripted."""

from __future__ import annotations

import asyncio

import pytest

from orbitmq.client.message import Message
from orbitmq.client.producer.core import SendSettings
from orbitmq.client.producer.send import SendStatus
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused, MessageRefused, NoRoute, SendFailed
from orbitmq.remoting.settings import ConnectFailed, ConnectionLost, RequestTimedOut
from orbitmq.wire.codes import RequestCode, ResponseCode
from tests.support.client import topic_route
from tests.support.producing import HANG_UP, SILENCE, Answering, ScriptedCluster, scripted_cluster
from tests.support.remoting import DEADLINE, until

PATIENT = SendSettings(timeout=DEADLINE)
RETRIED = [
    ResponseCode.SYSTEM_ERROR,
    ResponseCode.SYSTEM_BUSY,
    ResponseCode.SERVICE_NOT_AVAILABLE,
    ResponseCode.NO_PERMISSION,
    ResponseCode.TOPIC_NOT_EXIST,
    ResponseCode.NO_BUYER_ID,
    ResponseCode.NOT_IN_CURRENT_UNIT,
    ResponseCode.GO_AWAY,
]


def _only_the_first_fails(cluster: ScriptedCluster, answering: Answering) -> None:
    """The first send fails wherever it goes."""
    remaining = [answering]
    cluster.script = dict.fromkeys(cluster.names, remaining)


async def _stop(cluster: ScriptedCluster, name: str) -> None:
    server = cluster.brokers[name].server
    assert server is not None
    await server.stop(grace=0)


async def test_a_send_says_what_brokers_want_to_know():
    async with scripted_cluster("a") as cluster, cluster.producer("svc") as producer:
        result = await producer.send("orders", b"body", tags="paid", keys="o-1", flag=5)

    (sent,) = cluster.sent
    assert sent.code == RequestCode.SEND_MESSAGE_V2
    header = sent.header
    assert (header.producer_group, header.topic, header.broker_name) == ("svc", "orders", "a")
    assert (header.default_topic, header.default_topic_queue_nums) == ("TBW102", 8)
    assert (header.flag, header.sys_flag, header.reconsume_times) == (5, 0, 0)
    assert (header.batch, header.unit_mode, sent.body) == (False, False, b"body")
    assert sent.properties["TAGS"] == "paid"
    assert result.msg_id == sent.unique_id
    assert result.offset_id == "7F00000100002A9F0000000100000000"
    assert result.queue == Queue("orders", "a", header.queue_id)
    assert (result.queue_offset, result.status, result.is_ok) == (100, SendStatus.OK, True)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ResponseCode.FLUSH_DISK_TIMEOUT, SendStatus.FLUSH_DISK_TIMEOUT),
        (ResponseCode.FLUSH_SLAVE_TIMEOUT, SendStatus.FLUSH_SLAVE_TIMEOUT),
        (ResponseCode.SLAVE_NOT_AVAILABLE, SendStatus.SLAVE_NOT_AVAILABLE),
    ],
)
async def test_a_message_that_is_less_safe_than_promised_is_reported(code, status):
    async with scripted_cluster("a", "b") as cluster, cluster.producer() as producer:
        _only_the_first_fails(cluster, code)

        result = await producer.send("orders", b"x")

    assert (result.status, result.is_ok) == (status, False)
    assert len(cluster.sent) == 1


@pytest.mark.parametrize(
    "answers",
    [
        [ResponseCode.FLUSH_DISK_TIMEOUT] * 3,
        [ResponseCode.FLUSH_DISK_TIMEOUT, ResponseCode.MESSAGE_ILLEGAL],
        [ResponseCode.FLUSH_DISK_TIMEOUT, HANG_UP, HANG_UP],
    ],
    ids=["unsafe again", "then refused", "then lost"],
)
async def test_what_is_stored_less_safely_is_sent_again_if_so_wanted_and_has_not_failed(answers):
    settings = SendSettings(retry_not_stored_ok=True, timeout=DEADLINE, retry_pause=0)
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        cluster.script = {"a": list(answers)}

        result = await producer.send("orders", b"x")

    assert result.status is SendStatus.FLUSH_DISK_TIMEOUT
    assert len(cluster.sent) == len(answers)


@pytest.mark.parametrize("answering", [*RETRIED, HANG_UP])
async def test_another_broker_is_tried_with_the_same_id(answering):
    async with scripted_cluster("a", "b") as cluster, cluster.producer(sending=PATIENT) as producer:
        _only_the_first_fails(cluster, answering)

        result = await producer.send("orders", b"x")

    first, second = cluster.sent
    assert {first.broker, second.broker} == {"a", "b"}
    assert first.unique_id == second.unique_id == result.msg_id
    assert result.queue.broker == second.broker


async def test_a_broker_that_does_not_answer_leaves_time_for_another():
    settings = SendSettings(timeout=6.0)
    async with (
        scripted_cluster("a", "b") as cluster,
        cluster.producer(sending=settings) as producer,
    ):
        _only_the_first_fails(cluster, SILENCE)

        result = await producer.send("orders", b"x")

    assert result.is_ok
    assert [sent.unique_id for sent in cluster.sent] == [result.msg_id] * 2


@pytest.mark.parametrize(
    "code",
    [
        ResponseCode.MESSAGE_ILLEGAL,
        ResponseCode.INVALID_PARAMETER,
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        ResponseCode.VERSION_NOT_SUPPORTED,
    ],
)
async def test_a_refusal_that_others_would_repeat_is_raised_at_once(code):
    async with scripted_cluster("a", "b") as cluster, cluster.producer() as producer:
        _only_the_first_fails(cluster, code)

        with pytest.raises(BrokerRefused) as caught:
            await producer.send("orders", b"x")

    assert (caught.value.code, caught.value.remark) == (code, "told to")
    assert len(cluster.sent) == 1


async def test_what_may_be_stored_is_not_told_as_refused_when_a_later_attempt_is():
    async with scripted_cluster("a", "b") as cluster, cluster.producer(sending=PATIENT) as producer:
        _only_the_first_fails(cluster, HANG_UP)
        for answers in cluster.script.values():
            answers.append(ResponseCode.MESSAGE_ILLEGAL)

        with pytest.raises(SendFailed) as caught:
            await producer.send("orders", b"x")

    assert caught.value.attempts == 2
    assert isinstance(caught.value.cause, BrokerRefused)


async def test_what_may_be_stored_is_not_told_as_unsent_when_nobody_has_the_topic_after_that():
    settings = SendSettings(timeout=DEADLINE, attempt_timeout=1.0)
    async with scripted_cluster("a") as cluster, cluster.producer(sending=settings) as producer:
        cluster.publish("TBW102")  # the broker makes topics
        cluster.script = {"a": [SILENCE]}
        sending = asyncio.create_task(producer.send("new", b"x"))
        await until(lambda: bool(cluster.sent))
        cluster.name_server.routes.clear()  # it has noticed that the broker is gone

        with pytest.raises(SendFailed) as caught:
            await sending

    assert caught.value.attempts == 1
    assert isinstance(caught.value.cause, NoRoute)


@pytest.mark.parametrize(("retries", "words"), [(2, "3"), (0, "tried once")])
async def test_as_many_attempts_are_made_as_wanted_and_the_last_error_is_told(retries, words):
    settings = SendSettings(timeout=DEADLINE, retries=retries)
    async with (
        scripted_cluster("a", "b") as cluster,
        cluster.producer(sending=settings) as producer,
    ):
        cluster.script = dict.fromkeys("ab", [ResponseCode.SYSTEM_BUSY] * 9)

        with pytest.raises(SendFailed, match=words) as caught:
            await producer.send("orders", b"x")

    error = caught.value
    assert (error.topic, error.attempts, error.retriable) == ("orders", retries + 1, True)
    assert isinstance(error.cause, BrokerRefused)
    assert error.cause.code == ResponseCode.SYSTEM_BUSY
    assert len({sent.unique_id for sent in cluster.sent}) == 1


async def test_the_timeout_is_for_the_whole_call():
    async with scripted_cluster("a", "b") as cluster, cluster.producer() as producer:
        await producer.send("orders", b"warm")
        cluster.script = dict.fromkeys("ab", [SILENCE] * 9)
        loop = asyncio.get_running_loop()
        began = loop.time()

        with pytest.raises(SendFailed) as caught:
            await producer.send("orders", b"x", timeout=0.4)

        took = loop.time() - began
    assert 0.39 <= took < DEADLINE / 2
    assert isinstance(caught.value.cause, RequestTimedOut)


async def test_a_broker_that_failed_is_left_alone_by_later_sends():
    async with scripted_cluster("a", "b") as cluster, cluster.producer(sending=PATIENT) as producer:
        _only_the_first_fails(cluster, ResponseCode.SERVICE_NOT_AVAILABLE)
        first = await producer.send("orders", b"x")

        later = {(await producer.send("orders", b"x")).queue.broker for _ in range(10)}

    assert later == {first.queue.broker}


async def test_a_broker_that_is_reached_again_is_no_longer_avoided():
    async with scripted_cluster("a", "b") as cluster, cluster.producer(sending=PATIENT) as producer:
        _only_the_first_fails(cluster, HANG_UP)
        await producer.send("orders", b"x")

        # The client makes lost connections again by itself.
        brokers: set[str] = set()
        async with asyncio.timeout(8):  # less than the ten seconds of avoidance
            while brokers != {"a", "b"}:
                brokers.add((await producer.send("orders", b"x")).queue.broker)


async def test_a_queue_that_was_asked_for_is_the_only_one():
    queue = Queue("orders", "b", 3)
    async with scripted_cluster("a", "b") as cluster, cluster.producer() as producer:
        results = [await producer.send("orders", b"x", queue=queue) for _ in range(3)]
        cluster.script = {"b": [HANG_UP]}

        with pytest.raises(SendFailed) as caught:
            await producer.send(Message("orders", b"x"), queue=queue)

    assert [result.queue for result in results] == [queue] * 3
    assert isinstance(caught.value.cause, ConnectionLost)
    assert {(sent.broker, sent.header.queue_id) for sent in cluster.sent} == {("b", 3)}
    assert len(cluster.sent) == 4


@pytest.mark.parametrize(
    ("given", "options", "match"),
    [
        (("orders", b"x"), {"queue": Queue("payments", "a", 0)}, "the queue is payments@a:0"),
        ((Message("orders", b"x"),), {"tags": "t"}, "tags"),
        ((Message("orders", b"x"), b"y"), {}, "body"),
        (("orders",), {}, "body"),
    ],
)
async def test_arguments_that_contradict_each_other_are_refused(given, options, match):
    async with scripted_cluster("a") as cluster, cluster.producer() as producer:
        with pytest.raises(MessageRefused, match=match):
            await producer.send(*given, **options)

    assert cluster.sent == []


async def test_a_selector_sees_the_queues_in_order_and_its_choice_is_final():
    seen = []

    def select(queues, message):
        seen.append((queues, message.body))
        return Queue("orders", "b", 1)

    async with scripted_cluster("b", "a") as cluster, cluster.producer() as producer:
        result = await producer.send("orders", b"x", selector=select)

    ordered = tuple(Queue("orders", name, place) for name in "ab" for place in range(4))
    assert seen == [(ordered, b"x")]
    assert result.queue == Queue("orders", "b", 1)


async def test_a_selector_that_chooses_nothing_is_an_error_that_says_so():
    async with scripted_cluster("a") as cluster, cluster.producer() as producer:
        with pytest.raises(MessageRefused, match="selector, got None"):
            await producer.send("orders", b"x", selector=lambda *_: None)  # type: ignore[arg-type]  # wrong by intent
        future = await producer.submit("orders", b"x", selector=lambda *_: None)  # type: ignore[arg-type]  # wrong by intent
        with pytest.raises(MessageRefused, match="selector, got None"):
            await future


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_topic_that_cannot_be_written_has_no_route(is_there):
    async with scripted_cluster("a") as cluster, cluster.producer() as producer:
        if is_there:
            route = topic_route({"a": {0: cluster.brokers["a"].address}}, perm=4)
            cluster.name_server.routes["nowhere"] = route
        with pytest.raises(NoRoute, match=r"topic create nowhere"):
            await producer.send("nowhere", b"x")


async def test_a_broker_that_cannot_be_reached_costs_no_attempt():
    """Nothing was sent, so nothing can be stored twice: it is tried as long as there is time."""
    settings = SendSettings(retries=0, timeout=DEADLINE)
    async with (
        scripted_cluster("a", "b") as cluster,
        cluster.producer(sending=settings) as producer,
    ):
        await _stop(cluster, "b")

        results = [await producer.send("orders", b"x") for _ in range(20)]

    assert {result.queue.broker for result in results} == {"a"}


async def test_a_one_way_send_fails_when_its_broker_cannot_be_reached():
    async with scripted_cluster("a") as cluster, cluster.producer() as producer:
        await _stop(cluster, "a")

        with pytest.raises(SendFailed) as caught:
            await producer.send_one_way("orders", b"x")

    assert isinstance(caught.value.cause, ConnectFailed)


async def test_what_has_no_time_left_is_not_sent_and_no_fault_of_the_broker():
    async with scripted_cluster("a") as cluster, cluster.producer() as producer:
        await producer.send("orders", b"first")

        with pytest.raises(SendFailed) as caught:
            await producer.send("orders", b"late", timeout=1e-9)
        with pytest.raises(SendFailed):
            await (await producer.submit("orders", b"late", timeout=1e-9))
        await producer.send("orders", b"last")

    assert isinstance(caught.value.cause, RequestTimedOut)
    assert [sent.body for sent in cluster.sent] == [b"first", b"last"]
