"""Consumers while they run: workers, pauses, subscriptions, middleware."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest

from orbitmq.client.consumer.pull import PullDelay
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.middleware import Delivery
from tests.support.consumers import consumer_of, fill, own_queues, send, until_owned
from tests.support.consuming import until


@pytest.fixture
async def cluster(new_cluster):
    async with new_cluster() as running:
        await running.create_topic("orders", queues=4)
        yield running


class TestWhileRunning:
    async def test_paused_it_fetches_nothing_and_keeps_its_queues(self, cluster):
        seen: list[str] = []
        consumer = consumer_of(cluster)
        consumer.on("orders")(lambda message: seen.append(message.text()))
        async with consumer:
            await until_owned(consumer, 4)
            consumer.pause()
            # What is held at the broker already may still bring one batch for each queue.
            await fill(cluster, "orders", 400)
            await until(
                lambda: all(
                    consumer.statistics().put_off.get((queue, PullDelay.PAUSED))
                    for queue in own_queues(consumer)
                )
            )
            assert "orbitmq_consumer_pulls_put_off_total{" in consumer.metrics()
            assert len(own_queues(consumer)) == 4
            assert len(seen) < 400

            consumer.resume()
            await until(lambda: len(seen) == 400)

    async def test_topics_come_and_go(self, cluster):
        await cluster.create_topic("refunds", queues=2)
        seen: list[str] = []

        def note(message):
            seen.append(message.topic)

        consumer = consumer_of(cluster)
        consumer.on("orders")(note)
        async with consumer:
            await until_owned(consumer, 4)
            await consumer.subscribe("refunds", note)
            await send(cluster, "refunds", ["x"])
            await until(lambda: seen == ["refunds"])

            await consumer.unsubscribe("orders")
            await until_owned(consumer, 2)

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
