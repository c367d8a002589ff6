"""Requests of brokers to consumers: state, progress, resets, direct calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.statistics import CallTimes
from orbitmq.client.engine import Engine
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.errors import WrongUse
from orbitmq.remoting.connection import Connection
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.bodies import (
    ConsumeDirectlyResult,
    ConsumeResult,
    ConsumerRunningInfo,
    ConsumerStatus,
    MessageQueue,
    QueueOffset,
    ResetOffsetList,
    ResetOffsets,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import (
    ConsumeDirectlyRequest,
    GetConsumerRunningInfoRequest,
    GetConsumerStatusRequest,
    ResetOffsetRequest,
)
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.client import running_engine
from tests.support.consumers import consumer_of, done_here, send, until_owned
from tests.support.consuming import DEADLINE, until
from tests.support.prometheus import parse_metrics

QUEUE_COUNT = 2


@pytest.fixture
async def tool(cluster):
    """An administrator's connection to the broker."""
    async with running_engine(cluster.name_server) as engine:
        yield engine


async def running_info(
    cluster: AsyncEmbeddedCluster, tool: Engine, consumer: AsyncConsumer, *, stack: bool = False
) -> ConsumerRunningInfo:
    answer = await tool.ask(
        cluster.brokers[0].address,
        RequestCode.GET_CONSUMER_RUNNING_INFO,
        GetConsumerRunningInfoRequest(
            consumer_group=consumer.group, client_id=consumer.client_id, jstack_enable=stack
        ),
    )
    return decode_body(ConsumerRunningInfo, answer.body)


class TestRunningInfo:
    @pytest.mark.feature("L5")
    async def test_a_tool_sees_what_a_consumer_is_and_does(self, cluster, tool):
        entered, opened = threading.Event(), threading.Event()

        def a_slow_handler(message):
            entered.set()
            opened.wait(DEADLINE)

        consumer = consumer_of(cluster, ordered=True, workers=5)
        consumer.on("orders", tags="paid")(a_slow_handler)
        async with consumer:
            await until_owned(consumer, 2)
            await send(cluster, "orders", ["x"], queue=Queue("orders", "broker-a", 1), tags="paid")
            await asyncio.to_thread(entered.wait, DEADLINE)

            info = await running_info(cluster, tool, consumer, stack=True)
            plain = await running_info(cluster, tool, consumer)
            opened.set()

        assert info.properties["PROP_CONSUMEORDERLY"] == "true"
        assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
        assert info.properties["PROP_THREADPOOL_CORE_SIZE"] == "5"
        assert int(info.properties["PROP_CONSUMER_START_TIMESTAMP"]) > 0
        assert cluster.name_server in info.properties["PROP_NAMESERVER_ADDR"]
        table = {
            (each.topic, each.queue_id): state
            for each, state in info.mq_table.items()
            if each.topic == "orders"
        }
        assert table["orders", 1].cached_msg_count == 1
        assert table["orders", 0].cached_msg_count == 0
        assert all(state.locked for state in table.values())
        assert all(state.last_pull_timestamp > 0 for state in table.values())
        subscribed = {each.topic: each.sub_string for each in info.subscription_set}
        assert subscribed == {"orders": "paid", f"%RETRY%{consumer.group}": "*"}
        assert "a_slow_handler" in (info.jstack or "")
        assert plain.jstack is None

    @pytest.mark.feature("D11")
    async def test_statistics_are_in_it_and_at_the_consumer(self, cluster, tool):
        consumer = consumer_of(cluster)

        @consumer.on("orders")
        def handle(message: ReceivedMessage) -> None:
            threading.Event().wait(0.002)
            if message.text() == "bad":
                raise ValueError("bad")

        async with consumer:
            await send(cluster, "orders", ["a", "b", "bad"])
            await until(lambda: consumer.statistics().sent_back == 1)
            info = await running_info(cluster, tool, consumer)
            here = consumer.statistics().topics["orders"]
            text = consumer.metrics()
            metrics = parse_metrics(text.encode())
            labels = {"client_id": consumer.client_id, "group": consumer.group, "topic": "orders"}

        assert (here.consumed, here.failed, here.pulled) == (2, 1, 3)
        assert here.consume_time >= 0.002
        assert min(here.consumed_per_second, here.failed_per_second, here.pulled_per_second) > 0
        status = info.status_table["orders"]
        assert min(status.consume_ok_tps, status.consume_failed_tps, status.pull_tps) > 0
        assert status.consume_failed_msgs == 1
        assert status.consume_rt >= 2
        assert status.pull_rt > 0
        assert info.user_consumer_info["sentBack"] == "1"
        for name, value in (("consumed_total", 2), ("failed_total", 1), ("pulled_total", 3)):
            assert metrics[f"orbitmq_consumer_{name}"].value(**labels) == value
        for name in ("consumed_per_second", "failed_per_second", "pulled_per_second"):
            assert metrics[f"orbitmq_consumer_{name}"].value(**labels) > 0
        assert metrics["orbitmq_consumer_pull_seconds"].value(**labels) > 0
        calls = metrics["orbitmq_consumer_handler_call_seconds"]
        assert calls.counts == {frozenset(labels.items()): 3}
        assert calls.sums[frozenset(labels.items())] >= 0.006
        families = {each.name: each for each in text_string_to_metric_families(text)}
        assert families["orbitmq_consumer_handler_call_seconds"].type == "summary"
        times = here.consume_times
        assert times.calls == 3
        assert 0.002 <= (times.p50 or 0) <= (times.p99 or 0) == times.longest
        for quantile, took in (("0.5", times.p50), ("0.95", times.p95), ("0.99", times.p99)):
            assert calls.value(quantile=quantile, **labels) == took
        longest = metrics["orbitmq_consumer_handler_call_longest_seconds"]
        assert longest.value(**labels) == times.longest
        assert CallTimes.from_text(info.user_consumer_info["consumeTimes.orders"]) == times

    async def test_coroutine_handlers_are_in_the_stacks(self, cluster, tool):
        entered, opened = asyncio.Event(), asyncio.Event()

        async def waiting_for_something(message):
            entered.set()
            await opened.wait()

        consumer = consumer_of(cluster)
        consumer.on("orders")(waiting_for_something)
        async with consumer:
            await send(cluster, "orders", ["x"])
            await entered.wait()
            info = await running_info(cluster, tool, consumer, stack=True)
            opened.set()

        assert "waiting_for_something" in (info.jstack or "")
        assert "await opened.wait()" in (info.jstack or "")


async def test_a_tool_sees_progress_that_was_not_reported_yet(cluster, tool):
    consumer = consumer_of(cluster)
    consumer.on("orders")(lambda message: None)
    async with consumer:
        await send(cluster, "orders", range(4))
        await until(lambda: sum(consumer.positions().values()) == 4)
        answer = await tool.ask(
            cluster.brokers[0].address,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
            GetConsumerStatusRequest(topic="orders", group=consumer.group),
        )

        table = decode_body(ConsumerStatus, answer.body).consumer_table or {}
        assert sum(table[consumer.client_id].values()) == 4


def connection_to(cluster: AsyncEmbeddedCluster, consumer: AsyncConsumer) -> Connection:
    """The broker's end of a consumer's connection."""
    (member,) = cluster.brokers[0].parts.consumers.members(consumer.group)
    assert isinstance(member.channel, Connection)
    return member.channel


def for_java(offsets: Mapping[int, int]) -> ResetOffsets:
    table = {
        MessageQueue(topic="orders", broker_name="broker-a", queue_id=at): offset
        for at, offset in offsets.items()
    }
    return ResetOffsets(offset_table=table)


def for_cpp(offsets: Mapping[int, int]) -> ResetOffsetList:
    rows = [
        QueueOffset(topic="orders", broker_name="broker-a", queue_id=at, offset=offset)
        for at, offset in offsets.items()
    ]
    return ResetOffsetList(offset_table=tuple(rows))


@pytest.mark.parametrize("form", [for_java, for_cpp])
@pytest.mark.parametrize(
    "options", [{}, {"ordered": True}, {"model": "broadcasting"}], ids=["", "ordered", "broadcast"]
)
async def test_consumption_goes_on_from_the_offsets_of_a_pushed_reset(
    cluster, form, options, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))  # where broadcasting keeps its progress
    queues = [Queue("orders", "broker-a", number) for number in range(2)]
    for queue in queues:
        await send(cluster, "orders", range(10), queue=queue)
    seen: list[tuple[int, int]] = []
    consumer = consumer_of(cluster, **options)
    consumer.on("orders")(lambda each: seen.append((each.queue.id, each.queue_offset)))
    async with consumer:
        await until(lambda: len(seen) == 20)
        seen.clear()
        answer = await connection_to(cluster, consumer).request(
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
            ResetOffsetRequest(topic="orders", group=consumer.group, timestamp=0),
            body=encode_body(form({0: 7, 1: 4})),
            timeout=DEADLINE,
        )
        await until(lambda: len(seen) == 9)
        await until(lambda: [consumer.positions().get(queue) for queue in queues] == [10, 10])

    assert answer.code == ResponseCode.SUCCESS
    assert sorted(seen) == [(0, n) for n in range(7, 10)] + [(1, n) for n in range(4, 10)]


class TestConsumeDirectly:
    async def ask(
        self, cluster: AsyncEmbeddedCluster, tool: Engine, consumer: AsyncConsumer
    ) -> ConsumeDirectlyResult:
        (message,) = cluster.messages("orders")
        answer = await tool.ask(
            cluster.brokers[0].address,
            RequestCode.CONSUME_MESSAGE_DIRECTLY,
            ConsumeDirectlyRequest(
                consumer_group=consumer.group,
                client_id=consumer.client_id,
                msg_id=message.offset_id,
                topic="orders",
            ),
            timeout=DEADLINE,
        )
        return decode_body(ConsumeDirectlyResult, answer.body)

    @pytest.mark.parametrize(
        ("verdict", "expected"),
        [
            (None, ConsumeResult.CR_SUCCESS),
            (False, ConsumeResult.CR_LATER),
            (ValueError("no"), ConsumeResult.CR_THROW_EXCEPTION),
        ],
    )
    async def test_the_handler_is_called_once_and_nothing_follows(
        self, cluster, tool, verdict, expected
    ):
        calls: list[str] = []

        def handle(message):
            calls.append(message.text())
            if len(calls) == 1:
                return None
            if isinstance(verdict, Exception):
                raise verdict
            return verdict

        consumer = consumer_of(cluster)
        consumer.on("orders")(handle)
        async with consumer:
            await send(cluster, "orders", ["x"])
            await until(lambda: done_here(consumer) == 1)
            result = await self.ask(cluster, tool, consumer)

        assert (result.consume_result, result.order, result.auto_commit) == (expected, False, True)
        assert result.spent_time_mills >= 0
        assert calls == ["x", "x"]
        # Nothing went back to the broker.
        assert not cluster.messages(f"%RETRY%{consumer.group}")
        assert not cluster.messages("SCHEDULE_TOPIC_XXXX")

    @pytest.mark.parametrize("is_async", [False, True], ids=["thread", "task"])
    async def test_it_waits_for_a_free_worker_and_cannot_stop_the_consumer(
        self, cluster, tool, is_async
    ):
        opened, refusals = threading.Event(), []
        consumer = consumer_of(cluster, workers=1)

        def handle(message):
            try:
                consumer.check_may_stop()
            except WrongUse as refusal:
                refusals.append(refusal)
            if not is_async:
                opened.wait(DEADLINE)

        async def handle_async(message):
            handle(message)
            await until(opened.is_set)

        consumer.on("orders")(handle_async if is_async else handle)
        async with consumer:
            await send(cluster, "orders", ["x"])
            await until(lambda: len(refusals) == 1)
            asking = asyncio.create_task(self.ask(cluster, tool, consumer))
            await asyncio.wait([asking], timeout=0.2)
            begun = consumer.running_info(with_stacks=True).jstack or ""
            opened.set()
            result = await asking

        assert begun.count("in handle") == 1
        assert len(refusals) == 2
        assert result.consume_result == ConsumeResult.CR_SUCCESS
