"""Consumers while they run: workers, pauses, subscriptions, middleware."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from contextlib import contextmanager
from typing import Any

import pytest

from orbitmq.client.idempotence import Idempotence
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.middleware import Delivery, TimeLimit
from tests.support.consumers import (
    consumer_of,
    done_here,
    fill,
    own_queues,
    send,
    until_owned,
    until_retry_is_owned,
)
from tests.support.consuming import DEADLINE, until


@pytest.fixture
async def cluster(new_cluster):
    async with new_cluster() as running:
        await running.create_topic("orders", queues=4)
        yield running


class TestWhileRunning:
    @pytest.mark.feature("D1")
    async def test_workers_are_resized(self, cluster):
        inside = 0
        most = 0
        lock = threading.Lock()
        opened = threading.Event()

        def wait(message):
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
            opened.wait(DEADLINE)
            with lock:
                inside -= 1

        consumer = consumer_of(cluster)
        consumer.on("orders")(wait)
        async with consumer:
            assert consumer.workers == 20
            consumer.resize(2)
            await fill(cluster, "orders", 100)
            await until(lambda: inside == 2)

            consumer.resize(7)
            await until(lambda: inside == 7)
            opened.set()
            await until(lambda: done_here(consumer) == 100)

        assert most == 7

    async def test_paused_it_fetches_nothing_and_keeps_its_queues(self, cluster):
        seen: list[str] = []
        consumer = consumer_of(cluster)
        consumer.on("orders")(lambda message: seen.append(message.text()))
        async with consumer:
            await until_owned(consumer, 4)
            consumer.pause()
            # What is held at the broker already may still bring one batch for each queue.
            await fill(cluster, "orders", 400)
            held = len(seen)
            await asyncio.sleep(0.1)
            assert len(seen) <= held + 4 * 32
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

    @pytest.mark.feature("P4")
    async def test_a_time_limit_ends_a_call_and_middleware_sees_which_attempt_it_is(self, cluster):
        told: list[tuple[str, int, object]] = []
        current: contextvars.ContextVar[str] = contextvars.ContextVar("current")

        @contextmanager
        def numbered(delivery: Delivery) -> Any:
            (message,) = delivery.messages
            token = current.set(f"{delivery.group}/{message.msg_id}")
            try:
                yield
            except TimeoutError as error:
                told.append(("too slow", message.attempt, type(error)))
                raise
            finally:
                current.reset(token)

        consumer = consumer_of(cluster, middleware=[numbered, TimeLimit(0.2)])

        @consumer.on("orders")
        async def bill(message: ReceivedMessage) -> None:
            if message.attempt == 1:
                await asyncio.sleep(DEADLINE)
            told.append(("done", message.attempt, current.get()))

        async with consumer:
            await send(cluster, "orders", ["x"])
            await until(lambda: consumer.statistics().sent_back == 1)
            await until_retry_is_owned(consumer)
            cluster.advance(3600)
            await until(lambda: len(told) == 2)

        (message,) = cluster.messages("orders")
        assert told == [
            ("too slow", 1, TimeoutError),
            ("done", 2, f"{consumer.group}/{message.msg_id}"),
        ]

    async def test_what_a_producer_sends_twice_is_handled_once(self, cluster):
        handled: list[str] = []
        consumer = consumer_of(cluster, middleware=[Idempotence(key=lambda m: m.text())])
        consumer.on("orders")(lambda message: handled.append(message.text()))
        async with consumer:
            await send(cluster, "orders", ["a"])
            await until(lambda: handled == ["a"])
            await send(cluster, "orders", ["a", "b"])
            await until(lambda: done_here(consumer) == 3)

        assert handled == ["a", "b"]
