"""A program that ends its loop: tasks that are cancelled then still stop their clients in order."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable

from orbitmq import AsyncProducer, AsyncPullConsumer, Message
from orbitmq.client.consumer.settings import RebalanceSettings

DEADLINE = 30.0


def run_and_leave(worker: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """What a program does that returns from its main function while a task of it is at work."""

    async def main() -> None:
        at_work = asyncio.Event()
        task = asyncio.ensure_future(worker(at_work))
        await asyncio.wait_for(at_work.wait(), DEADLINE)
        del task

    program = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    program.start()
    program.join(2 * DEADLINE)
    assert not program.is_alive()


def test_a_task_that_consumes_leaves_its_progress(orbit_cluster):
    orbit_cluster.create_topic("orders", queues=1)

    async def consume(at_work):
        server = orbit_cluster.name_server
        async with AsyncProducer("shop", name_server=server) as producer:
            for number in range(10):
                await producer.send(Message("orders", b"%d" % number))
        async with AsyncPullConsumer(
            "billing",
            name_server=server,
            consume_from="first",
            rebalance=RebalanceSettings(persist=3600.0),
        ) as consumer:
            consumer.subscribe("orders")
            got = 0
            while got < 10:
                got += len(await consumer.poll(timeout=DEADLINE))
            await consumer.poll(timeout=0.0)  # what was given before is done
            at_work.set()
            await asyncio.Event().wait()

    run_and_leave(consume)

    assert orbit_cluster.progress("billing", "orders") == {("broker-a", 0): 10}


def test_a_task_that_sends_waits_for_what_is_on_its_way(orbit_cluster):
    orbit_cluster.create_topic("orders", queues=1)

    async def send(at_work):
        async with AsyncProducer("shop", name_server=orbit_cluster.name_server) as producer:
            await producer.send("orders", b"first")
            for number in range(100):
                await producer.submit("orders", b"%d" % number)
            at_work.set()
            await asyncio.Event().wait()

    run_and_leave(send)

    assert len(orbit_cluster.messages("orders")) == 101


def test_a_client_that_nobody_stops_is_closed_with_its_loop(orbit_cluster):
    """Warnings of what was not closed are errors here."""
    orbit_cluster.create_topic("orders", queues=1)
    left: list[AsyncProducer] = []

    async def send(at_work):
        producer = AsyncProducer("shop", name_server=orbit_cluster.name_server)
        await producer.start()
        await producer.send("orders", b"only")
        left.append(producer)
        at_work.set()

    run_and_leave(send)

    left.clear()
    gc.collect()
    assert len(orbit_cluster.messages("orders")) == 1
