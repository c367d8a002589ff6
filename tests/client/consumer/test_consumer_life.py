"""The life of a consumer: start, stop, both faces, what it leaves behind."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from typing import Any

import pytest
import uvloop

from orbitmq.client.consumer.consumer import AsyncConsumer, Consumer
from orbitmq.client.consumer.settings import ConsumeSettings, FlowSettings, RebalanceSettings
from orbitmq.client.consumer.subscriptions import SubscriptionRefused
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.producer.producer import AsyncProducer, Producer
from orbitmq.client.routes import Queue
from orbitmq.errors import NotRunning, SettingError, WrongUse
from orbitmq.remoting.settings import ServerSettings
from orbitmq.testing import EmbeddedCluster
from orbitmq.wire.codes import RequestCode
from tests.support.client import ScriptedNameServer, quick_settings, topic_route
from tests.support.consumers import committed, consumer_of, send
from tests.support.consuming import DEADLINE, until
from tests.support.remoting import serving

QUEUES = tuple(Queue("orders", "broker-a", number) for number in range(4))


class TestLife:
    async def test_it_cannot_be_started_twice_or_after_its_stop(self, cluster):
        consumer = consumer_of(cluster)
        consumer.on("orders")(lambda message: None)
        await consumer.start()
        with pytest.raises(WrongUse, match="running already"):
            await consumer.start()
        await consumer.stop()
        await consumer.stop()

        with pytest.raises(NotRunning, match="was stopped"):
            await consumer.start()
        with pytest.raises(NotRunning):
            consumer.resize(3)

    async def test_handlers_are_registered_before_the_start(self, cluster):
        consumer = consumer_of(cluster)
        with pytest.raises(SettingError, match="has no handler"):
            await consumer.start()
        consumer.on("orders")(lambda message: None)
        with pytest.raises(SettingError, match="has a handler already"):
            consumer.on("orders")(lambda message: None)
        async with consumer:
            with pytest.raises(WrongUse, match="use `subscribe`"):
                consumer.on("refunds")(lambda message: None)

    async def test_a_condition_that_the_broker_refuses_fails_the_start(self, cluster, monkeypatch):
        def unchecked(*_):
            """The parser is not installed here."""

        monkeypatch.setattr("orbitmq.client.consumer.subscriptions.compile_filter", unchecked)
        consumer = consumer_of(cluster)
        consumer.on("orders", sql="amount >")(lambda message: None)

        with pytest.raises(SubscriptionRefused, match="amount >"):
            await consumer.start()

    @pytest.mark.parametrize(
        ("wrong", "text"),
        [
            ({"workers": 0}, "consume.workers must be 1 to 1000"),
            ({"batch_size": 2000}, "consume.batch_size"),
            ({"max_retries": -1}, "consume.max_retries"),
            ({"model": "sharing"}, "model must be one of broadcasting, clustering"),
            ({"consume_from": "yesterday"}, "consume_from"),
            ({"group": "DEFAULT_CONSUMER"}, "reserved"),
            ({"group": "no spaces"}, "letters"),
            ({"name_server": "host:port"}, "name_server"),
            ({"workers": 2.5}, "consume.workers must be a whole number"),
            ({"workers": "5"}, "consume.workers must be a whole number"),
            ({"batch_size": "3"}, "consume.batch_size must be a whole number"),
            ({"max_retries": 1.5}, "consume.max_retries must be a whole number"),
            ({"ordered": "no"}, "ordered must be True or False, got 'no'"),
            ({"strict_last": 1}, "strict_last must be True or False"),
            ({"flow": 5}, "flow must be an object of FlowSettings, got int"),
            ({"pull": FlowSettings()}, "pull must be an object of PullSettings, got FlowSettings"),
            ({"consume": 0}, "consume must be an object of ConsumeSettings"),
            ({"rebalance": {}}, "rebalance must be an object of RebalanceSettings"),
            ({"locks": False}, "locks must be an object of LockSettings"),
            ({"client": "host"}, "client must be an object of ClientSettings"),
            ({"strategy": "nope"}, "strategy must be one of AVG"),
            ({"strategy": 3}, "strategy must be a callable or one of AVG"),
        ],
    )
    def test_a_wrong_setting_is_named(self, wrong, text):
        given: dict[str, Any] = {"group": "g", "name_server": "127.0.0.1:9876"} | wrong
        with pytest.raises(SettingError, match=text):
            AsyncConsumer(given.pop("group"), **given)

    @pytest.mark.parametrize(
        "name", ["suspend", "timeout", "time_slice", "local_retry", "send_back_timeout"]
    )
    def test_a_wrong_consume_setting_is_named(self, name):
        with pytest.raises(SettingError, match=f"consume.{name}"):
            ConsumeSettings(**{name: -1})

    async def test_without_a_name_server_it_starts_and_says_once_what_it_waits_for(
        self, cluster, caplog
    ):
        name_server = ScriptedNameServer()
        addresses = {0: cluster.brokers[0].address}
        for topic in ("orders", "refunds"):
            name_server.routes[topic] = topic_route({"broker-a": addresses})
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = int(server.getsockname()[1])
        await send(cluster, "orders", ["a"])
        seen: list[str] = []
        rebalance = RebalanceSettings(retry=0.05)
        client = quick_settings(f"127.0.0.1:{port}")
        consumer = consumer_of(cluster, client=client, rebalance=rebalance)
        for topic in ("orders", "refunds"):
            consumer.on(topic)(lambda message: seen.append(message.text()))

        async with consumer:
            await until(lambda: consumer.statistics().troubles)
            at = ServerSettings(port=port)
            async with serving({RequestCode.GET_ROUTEINFO_BY_TOPIC: name_server.answer_route}, at):
                await until(lambda: seen == ["a"])

        waits = [r for r in caplog.records if "until a name server answers" in r.getMessage()]
        assert [record.levelname for record in waits] == ["WARNING"]

    @pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
    async def test_a_handler_ends_run_but_cannot_wait_for_it(self, cluster, is_async):
        refused: list[str] = []
        consumer = consumer_of(cluster)

        async def handle_async(message):
            try:
                await consumer.stop()
            except WrongUse as error:
                refused.append(str(error))
            consumer.stop_soon()

        def handle(message):
            try:
                asyncio.run(consumer.stop())
            except WrongUse as error:
                refused.append(str(error))
            consumer.stop_soon()

        consumer.on("orders")(handle_async if is_async else handle)
        await send(cluster, "orders", ["x"])
        async with asyncio.timeout(DEADLINE):
            await consumer.run()

        assert len(refused) == 1
        assert "use stop_soon()" in refused[0]
        assert committed(cluster, consumer.group, "orders") == 1

    async def test_a_namespace_is_seen_by_brokers_only(self, cluster):
        await cluster.create_topic("shop%orders")
        client = quick_settings(cluster.name_server, namespace="shop")
        seen: list[tuple[str, int]] = []
        consumer = consumer_of(cluster, "billing", client=client)

        @consumer.on("orders")
        def handle(message: ReceivedMessage) -> None:
            seen.append((message.topic, message.attempt))
            if message.attempt == 1:
                raise ValueError("once")

        async with consumer, AsyncProducer(client=client) as producer:
            assert {queue.topic for queue in await consumer.queues("orders")} == {"shop%orders"}
            await producer.send("orders", "x")
            await until(lambda: consumer.statistics().sent_back == 1)
            await until(
                lambda: any(q.topic == "%RETRY%shop%billing" for q in consumer.assignment())
            )
            cluster.advance(10)
            await until(lambda: len(seen) == 2)

        assert seen == [("orders", 1), ("orders", 2)]
        assert committed(cluster, "shop%billing", "shop%orders") == 1

    async def test_a_stop_that_is_cancelled_goes_on_and_gives_everything_back(self, cluster):
        before = asyncio.all_tasks()
        queue = Queue("orders", "broker-a", 0)
        consumer = consumer_of(cluster, "billing")
        begun, may_end = asyncio.Event(), asyncio.Event()

        @consumer.on("orders")
        async def bill(message: ReceivedMessage) -> None:
            begun.set()
            await may_end.wait()

        await consumer.start()
        await send(cluster, "orders", ["a"], queue=queue)
        await begun.wait()
        stopping = asyncio.create_task(consumer.stop())
        await until(lambda: is_stopping(consumer))
        stopping.cancel()
        await asyncio.wait([stopping])
        assert stopping.cancelled()
        with pytest.raises(NotRunning, match="was stopped"):
            consumer.positions()
        may_end.set()
        await consumer.stop()

        assert committed(cluster, "billing", "orders") == 1
        await until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})

    async def test_a_stop_waits_for_the_start_that_is_under_way(self, cluster):
        before = asyncio.all_tasks()
        consumer = consumer_of(cluster)
        consumer.on("orders")(lambda message: None)
        starting = asyncio.create_task(consumer.start())
        await asyncio.sleep(0)

        await consumer.stop()

        assert starting.done()
        await until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})


def is_stopping(consumer: AsyncConsumer | Consumer) -> bool:
    try:
        consumer.positions()
    except NotRunning:
        return True
    return False


class TestSyncFace:
    def test_it_consumes_in_the_background(self, orbit_cluster):
        orbit_cluster.create_topic("orders", queues=4)
        seen: list[str] = []
        done, refunded = threading.Event(), threading.Event()
        consumer = Consumer("billing", name_server=orbit_cluster.name_server, consume_from="first")

        @consumer.on("orders")
        def bill(message: ReceivedMessage) -> None:
            seen.append(message.text())
            if len(seen) == 10:
                done.set()

        with Producer(name_server=orbit_cluster.name_server) as producer, consumer:
            for number in range(10):
                producer.send("orders", str(number))
            assert done.wait(DEADLINE)
            assert consumer.queues("orders") == QUEUES
            assert consumer.assignment() >= {*QUEUES}
            assert consumer.statistics().topics["orders"].pulled == 10
            assert consumer.running_info().properties["consumerGroup"] == "billing"
            consumer.resize(3)
            assert consumer.workers == 3
            consumer.pause()
            consumer.resume()
            assert "@" in consumer.client_id
            orbit_cluster.create_topic("refunds", queues=1)
            consumer.subscribe("refunds", lambda message: refunded.set())
            producer.send("refunds", "x")
            assert refunded.wait(DEADLINE)
            consumer.unsubscribe("refunds")
            with pytest.raises(WrongUse, match="running already"):
                consumer.start()

        assert sorted(seen, key=int) == [str(number) for number in range(10)]
        assert sum(orbit_cluster.progress("billing", "orders").values()) == 10
        assert consumer.statistics().topics["orders"].consumed == 10, "as it was at the end"
        for call in (consumer.start, consumer.positions, lambda: consumer.queues("orders")):
            with pytest.raises(NotRunning):
                call()


async def test_a_topic_is_left_without_a_warning(cluster, caplog):
    await cluster.create_topic("refunds", queues=1)
    seen: list[str] = []
    consumer = consumer_of(cluster)
    for topic in ("orders", "refunds"):
        consumer.on(topic)(lambda message: seen.append(message.text()))

    async with consumer:
        await send(cluster, "orders", list("abcd"))
        await until(
            lambda: len(seen) == 4
        )  # and the next pulls wait at the broker, which refuses them
        await consumer.unsubscribe("orders")
        await until(lambda: "orders" not in {each.topic for each in consumer.assignment()})

    assert not [each.message for each in caplog.records if "put off" in each.message]


@pytest.mark.feature("P3")
def test_it_lives_on_the_callers_loop_whichever_that_is(new_blocking_cluster):
    with new_blocking_cluster() as cluster:
        cluster.create_topic("orders")
        _live_on_the_callers_loop(cluster.name_server)


def _live_on_the_callers_loop(name_server: str) -> None:
    async def application() -> list[str]:
        seen: list[str] = []
        sync_seen: list[str] = []
        consumer = AsyncConsumer("asynchronous", name_server=name_server, consume_from="first")
        sync_consumer = Consumer("synchronous", name_server=name_server, consume_from="first")

        @consumer.on("orders")
        async def note(message: ReceivedMessage) -> None:
            assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
            seen.append(message.text())

        sync_consumer.on("orders")(lambda message: sync_seen.append(message.text()))
        async with consumer:
            await asyncio.to_thread(sync_consumer.start)
            with Producer(name_server=name_server) as producer:
                await asyncio.to_thread(producer.send, "orders", "x")
            await until(lambda: seen == ["x"] and sync_seen == ["x"])
            await asyncio.to_thread(sync_consumer.stop)
        return seen

    assert uvloop.run(application()) == ["x"]


# ---- stops in the middle of a backlog


COUNT = 600


def test_what_begins_stays_a_prefix_of_its_queue_so_a_stop_repeats_nothing():
    handled: Counter[bytes] = Counter()
    lock = threading.Lock()

    def consume_until(cluster, wanted):
        reached = threading.Event()
        consumer = Consumer("g", name_server=cluster.name_server, consume_from="first", workers=4)

        @consumer.on("orders")
        def handle(message: ReceivedMessage) -> None:
            # Calls of different lengths, so that they end in another order than they began.
            threading.Event().wait(0.001 + message.queue_offset % 7 * 0.002)
            with lock:
                handled[message.body] += 1
                if len(handled) >= wanted:
                    reached.set()

        with consumer:
            assert reached.wait(DEADLINE)

    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=2)
        cluster.send("orders", *(f"{number}" for number in range(COUNT)))

        for wanted in (COUNT // 4, COUNT // 2, COUNT):
            consume_until(cluster, wanted)

        assert len(handled) == COUNT
        assert sum(handled.values()) == COUNT
