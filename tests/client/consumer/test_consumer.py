"""Whole consumers against a real broker: what they get, alone, in a group, while they change."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orbitmq.client.consumer.progress import LocalFileProgress
from orbitmq.client.consumer.pull import PullDelay
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.middleware import Delivery
from orbitmq.errors import SettingError
from tests.support.client import quick_settings
from tests.support.consumers import (
    committed,
    consumer_of,
    fill,
    new_group,
    own_queues,
    send,
    until_owned,
)
from tests.support.consuming import until


class TestConsuming:
    @pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
    async def test_a_handler_gets_every_message_once(self, cluster, is_async):
        seen: Counter[str] = Counter()
        consumer = consumer_of(cluster)

        if is_async:

            @consumer.on("orders")
            async def bill_async(message: ReceivedMessage) -> None:
                await asyncio.sleep(0)
                seen[message.text()] += 1
        else:

            @consumer.on("orders")
            def bill(message: ReceivedMessage) -> None:
                seen[message.text()] += 1

        async with consumer:
            await fill(cluster, "orders", 500)
            await until(lambda: len(seen) == 500)

        assert set(seen.values()) == {1}
        assert committed(cluster, consumer.group, "orders") == 500

    @pytest.mark.feature("D2")
    async def test_a_batch_handler_gets_batches_that_never_mix_queues(self, cluster):
        batches: list[list[ReceivedMessage]] = []
        single: list[ReceivedMessage] = []
        consumer = consumer_of(cluster, batch_size=10)
        other = consumer_of(cluster)

        @consumer.on("orders")
        def bill(messages: list[ReceivedMessage]) -> None:
            batches.append(messages)

        @other.on("orders")
        def count(message: ReceivedMessage) -> None:
            single.append(message)

        await fill(cluster, "orders", 400)
        async with consumer, other:
            await until(lambda: sum(map(len, batches)) == 400 and len(single) == 400)

        assert all(len({message.queue for message in batch}) == 1 for batch in batches)
        assert max(map(len, batches)) == 10

    @pytest.mark.feature("D10")
    async def test_slow_handlers_of_one_queue_run_side_by_side(self, new_cluster):
        seen: list[int] = []
        # Nobody goes on before all twenty workers have a message of the queue, fifty times over.
        together = threading.Barrier(20)

        async with new_cluster() as cluster:
            await cluster.create_topic("slow", queues=1)
            await fill(cluster, "slow", 1000)
            consumer = consumer_of(cluster, workers=20)

            @consumer.on("slow")
            def work(message: ReceivedMessage) -> None:
                together.wait(60)
                seen.append(message.queue_offset)

            async with consumer:
                await until(lambda: len(seen) == 1000 or together.broken, deadline=60)

        assert not together.broken
        assert sorted(seen) == list(range(1000))


def _progress_files(home: Path) -> list[str]:
    """The client ids under which progress is kept."""
    return sorted(path.parents[1].name for path in home.rglob("offsets.json"))


class TestBroadcasting:
    @pytest.mark.feature("A2")
    async def test_every_member_gets_every_message_and_keeps_its_own_progress(
        self, cluster, tmp_path
    ):
        group = new_group()
        seen: list[list[str]] = [[], [], []]
        consumers = []
        for number in range(3):
            client = quick_settings(cluster.name_server, instance=f"member-{number}")
            consumer = consumer_of(
                cluster,
                group,
                client=client,
                model="broadcasting",
                progress=LocalFileProgress(tmp_path / str(number) / "offsets.json"),
            )
            consumer.on("orders")(lambda message, n=number: seen[n].append(message.text()))
            consumers.append(consumer)

        for consumer in consumers:
            await consumer.start()
        await send(cluster, "orders", range(20))
        await until(lambda: all(len(each) == 20 for each in seen))
        for consumer in consumers:
            await consumer.stop()

        assert all(sorted(each, key=int) == [str(n) for n in range(20)] for each in seen)
        assert cluster.progress(group, "orders") == {}
        for number in range(3):
            kept = LocalFileProgress(tmp_path / str(number) / "offsets.json")
            await kept.load()
            assert sum(kept.positions().values()) == 20

    async def test_two_of_a_group_on_one_machine_need_an_instance_each(
        self, cluster, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("HOME", str(tmp_path))
        group = new_group()
        seen: Counter[str] = Counter()

        def member(**client):
            consumer = consumer_of(
                cluster,
                group,
                client=quick_settings(cluster.name_server, **client),
                model="broadcasting",
            )
            consumer.on("orders")(lambda message: seen.update([message.text()]))
            return consumer

        first = member()
        async with first:
            with pytest.raises(SettingError, match="instance="):
                await member().start()
            async with member(instance="second") as second:
                assert second.client_id != first.client_id
                await send(cluster, "orders", range(10))
                await until(lambda: seen.total() == 20)
        async with member() as again:
            await send(cluster, "orders", ["last"])
            await until(lambda: seen["last"] == 1)
            assert again.client_id.endswith("@DEFAULT")

        assert set(seen.values()) == {1, 2}
        assert _progress_files(tmp_path) == ["127.0.0.1@DEFAULT", "127.0.0.1@second"]

    @pytest.mark.feature("D12")
    @pytest.mark.feature("F10")
    async def test_what_fails_is_dropped_with_a_warning_and_never_sent_back(
        self, cluster, tmp_path, caplog
    ):
        group = new_group()
        calls: list[str] = []

        def fail(message):
            calls.append(message.text())
            raise ValueError("no")

        progress = LocalFileProgress(tmp_path / "offsets.json")
        consumer = consumer_of(cluster, group, model="broadcasting", progress=progress)
        consumer.on("orders")(fail)
        async with consumer:
            await send(cluster, "orders", range(4))
            await until(lambda: sum(consumer.positions().values()) == 4)
            assert not any(queue.topic.startswith("%RETRY%") for queue in consumer.assignment())

        assert sorted(calls) == ["0", "1", "2", "3"]
        assert cluster.messages(f"%RETRY%{group}") == []
        assert cluster.messages("SCHEDULE_TOPIC_XXXX") == []
        assert sum("dropped" in each.getMessage() for each in caplog.records) == 4


class TestGroup:
    @pytest.mark.feature("A8")
    async def test_a_member_without_queues_is_idle_until_it_is_needed(self, cluster):
        group = new_group()
        seen: Counter[str] = Counter()

        def count(message):
            seen[message.text()] += 1

        consumers = [consumer_of(cluster, group) for _ in range(5)]
        for consumer in consumers:
            consumer.on("orders")(count)
            await consumer.start()
        await until(lambda: sorted(len(own_queues(each)) for each in consumers) == [0, 1, 1, 1, 1])
        idle = next(each for each in consumers if not own_queues(each))
        busy = [each for each in consumers if each is not idle]

        await busy[0].stop()
        await until_owned(idle, 1)
        await fill(cluster, "orders", 100)
        await until(lambda: len(seen) == 100)
        for consumer in consumers:
            await consumer.stop()

        assert set(seen.values()) == {1}


class TestWhileRunning:
    @pytest.mark.feature("B15")
    async def test_paused_it_fetches_nothing_and_keeps_its_queues(self, cluster):
        seen: list[str] = []
        consumer = consumer_of(cluster)
        consumer.on("orders")(lambda message: seen.append(message.text()))
        async with consumer:
            await until_owned(consumer, 4)
            consumer.pause()
            # What is held at the broker already may still bring one batch for each queue.
            await fill(cluster, "orders", 2000)
            await until(
                lambda: all(
                    consumer.statistics().put_off.get((queue, PullDelay.PAUSED))
                    for queue in own_queues(consumer)
                )
            )
            assert "orbitmq_consumer_pulls_put_off_total{" in consumer.metrics()
            assert len(own_queues(consumer)) == 4
            assert len(seen) < 2000

            consumer.resume()
            await until(lambda: len(seen) == 2000)

    async def test_a_new_condition_applies_from_then_on(self, cluster):
        seen: list[str | None] = []

        def note(message):
            seen.append(message.tags)

        consumer = consumer_of(cluster)
        consumer.on("orders", tags="a")(note)
        async with consumer:
            await send(cluster, "orders", ["1"], tags="a")
            await until(lambda: seen == ["a"])
            await consumer.subscribe("orders", note, tags="b")
            await send(cluster, "orders", ["2"], tags="a")
            await send(cluster, "orders", ["3"], tags="b")
            await until(lambda: seen[-1] == "b")

        assert seen == ["a", "b"]

    @pytest.mark.feature("A18")
    async def test_the_application_hears_of_its_queues(self, cluster):
        told: list[tuple[str, int, int]] = []

        def assigned(topic, queues, own):
            if topic == "orders":
                told.append((topic, len(queues), len(own)))

        consumer = consumer_of(cluster, on_assignment=assigned)
        consumer.on("orders")(lambda message: None)
        async with consumer:
            await until(lambda: told[-1:] == [("orders", 4, 4)])


class TestMiddleware:
    @pytest.mark.feature("P4")
    async def test_decorated_handlers_with_hooks_around_them(self, cluster):
        told: list[str] = []

        class Hooks:
            def before(self, delivery: Delivery) -> None:
                told.append(f"before {delivery.handler} {delivery.topic}")

            def after(self, delivery: Delivery) -> None:
                told.append("after")

            def on_failure(self, delivery: Delivery, error: BaseException | None) -> None:
                told.append(f"failure {error}")

        @contextmanager
        def inner(delivery: Delivery) -> Any:
            told.append("in")
            yield
            told.append("out")

        consumer = consumer_of(cluster, middleware=[Hooks()])

        @consumer.on("orders", middleware=[inner])
        def bill(message: ReceivedMessage) -> None:
            told.append(message.text())
            if message.text() == "bad":
                raise ValueError("bad order")

        async with consumer:
            await send(cluster, "orders", ["good"])
            await until(lambda: "after" in told)
            await send(cluster, "orders", ["bad"])
            await until(lambda: consumer.statistics().sent_back == 1)

        assert told == [
            *("before bill orders", "in", "good", "out", "after"),
            *("before bill orders", "in", "bad", "failure bad order"),
        ]
