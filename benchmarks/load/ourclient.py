"""Our client, alone in its process: reads wishes from standard input, a line of JSON each."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from benchmarks.load.asking import Drive, Failed, Sends, Target
from benchmarks.load.barepulls import consume_bare
from benchmarks.load.clientwork import ClientOutcome, ClientWish, Consume, Deliver, Send, Spent
from benchmarks.load.driving import drive
from benchmarks.load.paceddelivery import deliver
from benchmarks.load.taking import SILENCE, Arriving, Taking
from benchmarks.workload import bodies
from orbitmq import (
    AsyncProducer,
    Consumer,
    Message,
    Position,
    Producer,
    PullConsumer,
    ReceivedMessage,
    SendSettings,
)
from orbitmq.client.loopthread import LoopThread
from orbitmq.errors import OrbitError

_DIFFERENT = 1024
_BODY_SIZE = 1024
_BATCH = 32
#: Of a topic that is made by sending to it.
_QUEUES = 4
#: Requests on their way when sends are pipelined, by our client and by the bare socket.
_IN_FLIGHT = 256


def main() -> None:
    # That messages are fetched ahead of what is consumed is no news here.
    logging.basicConfig(level=logging.ERROR)
    work = _Work()
    try:
        for line in sys.stdin.buffer:
            outcome = work.fulfil(msgspec.json.decode(line, type=ClientWish))
            sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
            sys.stdout.buffer.flush()
    finally:
        work.close()


class _Work:
    """The clients of this process, made when they are needed first."""

    def __init__(self) -> None:
        self._background = LoopThread("bench")
        self._background.start()
        self._producers: dict[str, Producer] = {}
        self._async_producers: dict[str, AsyncProducer] = {}
        self._bodies = bodies(_DIFFERENT, _BODY_SIZE)

    def close(self) -> None:
        for producer in self._producers.values():
            producer.stop()
        for async_producer in self._async_producers.values():
            self._background.run(async_producer.stop())
        self._background.stop()

    def fulfil(self, wish: ClientWish) -> ClientOutcome:
        try:
            match wish:
                case Send():
                    return self._send(wish)
                case Consume():
                    return _consume(wish)
                case Deliver():
                    return asyncio.run(deliver(wish))
        except (OSError, ValueError, OrbitError, TimeoutError) as error:
            return Failed(reason=f"{type(error).__name__}: {error}")

    # ---- sending

    def _send(self, wish: Send) -> Spent:
        if wish.way == "frames":
            return _send_frames(wish)
        if wish.way == "blocking":
            return self._from_threads(wish, self._producer(wish.name_server).send)
        if wish.way == "submitted":
            return _submitted(wish, self._producer(wish.name_server))
        if wish.way == "many":
            return _many(wish, self._producer(wish.name_server))
        if wish.way == "gathered":
            return asyncio.run(_gathered(wish))
        producer = self._async_producer(wish.name_server)
        if wish.way == "threadsafe":
            loop = self._background.loop

            def send(message: Message) -> object:
                return asyncio.run_coroutine_threadsafe(producer.send(message), loop).result()

            return self._from_threads(wish, send)
        ways: dict[str, Callable[[Send, AsyncProducer], Coroutine[Any, Any, Spent]]] = {
            "awaited": self._awaited,
            "pipelined": self._pipelined,
            "batched": self._batched,
        }
        return self._background.run(ways[wish.way](wish, producer))

    def _from_threads(self, wish: Send, send: Callable[[Message], object]) -> Spent:
        each = wish.count // wish.threads
        ready = threading.Barrier(wish.threads + 1)
        failures: list[BaseException] = []

        def work(first: int) -> None:
            ready.wait()
            try:
                for number in range(first, first + each):
                    send(self._message(wish.topic, number))
            except BaseException as error:  # noqa: BLE001  # told by the thread that waits
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=(place * each,)) for place in range(wish.threads)
        ]
        for thread in threads:
            thread.start()
        send(self._message(wish.topic, 0))  # finds the route
        ready.wait()
        taking = Taking()
        for thread in threads:
            thread.join()
        if failures:
            raise ValueError(f"a send failed: {failures[0]!r}")
        return taking.spent(each * wish.threads)

    async def _awaited(self, wish: Send, producer: AsyncProducer) -> Spent:
        taking = Taking()
        for number in range(wish.count):
            await producer.send(self._message(wish.topic, number))
        return taking.spent(wish.count)

    async def _pipelined(self, wish: Send, producer: AsyncProducer) -> Spent:
        await producer.send(self._message(wish.topic, 0))
        taking = Taking()
        for number in range(wish.count):
            await producer.submit(self._message(wish.topic, number))
        await producer.flush()
        return taking.spent(wish.count)

    async def _batched(self, wish: Send, producer: AsyncProducer) -> Spent:
        queues = itertools.cycle(await producer.queues(wish.topic))
        taking = Taking()
        for first in range(0, wish.count, _BATCH * 2):
            # Two at a time: one is encoded while the other is stored.
            await asyncio.gather(
                *(
                    producer.send_batch(
                        [self._message(wish.topic, start + place) for place in range(_BATCH)],
                        queue=next(queues),
                    )
                    for start in (first, first + _BATCH)
                )
            )
        return taking.spent(wish.count)

    def _message(self, topic: str, number: int) -> Message:
        body = self._bodies[number % _DIFFERENT]
        return Message(topic, body, tags="paid", keys=f"order-{number}")

    def _producer(self, name_server: str) -> Producer:
        if name_server not in self._producers:
            sending = SendSettings(auto_create_queues=_QUEUES)
            producer = Producer("bench-blocking", name_server=name_server, sending=sending)
            producer.start()
            self._producers[name_server] = producer
        return self._producers[name_server]

    def _async_producer(self, name_server: str) -> AsyncProducer:
        if name_server not in self._async_producers:
            sending = SendSettings(max_in_flight=_IN_FLIGHT, auto_create_queues=_QUEUES)
            producer = AsyncProducer("bench-async", name_server=name_server, sending=sending)
            self._background.run(producer.start())
            self._async_producers[name_server] = producer
        return self._async_producers[name_server]


def _submitted(wish: Send, producer: Producer) -> Spent:
    several = bodies(wish.count, wish.body_size)
    producer.send(wish.topic, several[0])  # finds the route
    taking = Taking()
    futures = [producer.submit(wish.topic, body) for body in several]
    for future in futures:
        future.result()
    return taking.spent(wish.count)


def _many(wish: Send, producer: Producer) -> Spent:
    several = bodies(wish.count, wish.body_size)
    producer.send(wish.topic, several[0])
    taking = Taking()
    results = producer.send_many(wish.topic, several)
    spent = taking.spent(wish.count)
    if len(results) != wish.count:
        raise ValueError(f"{len(results)} results for {wish.count} messages")
    return spent


async def _gathered(wish: Send) -> Spent:
    several = bodies(wish.count, wish.body_size)
    sending = SendSettings(auto_create_queues=_QUEUES)
    async with AsyncProducer(
        "bench-gathered", name_server=wish.name_server, sending=sending
    ) as producer:
        await producer.send(wish.topic, several[0])
        taking = Taking()
        futures = [await producer.submit(wish.topic, body) for body in several]
        await producer.flush()
        for future in futures:
            future.result()
        return taking.spent(wish.count)


def _send_frames(wish: Send) -> Spent:
    taking = Taking()
    done = drive(
        Drive(
            target=Target(port=wish.broker_port, pid=os.getpid()),
            requests=Sends(topic=wish.topic, body_size=_BODY_SIZE),
            connections=1,
            in_flight=_IN_FLIGHT,
            count=wish.count,
        )
    )
    if done.refused:
        raise ValueError(f"a frame was refused: {done.refusal}")
    return taking.spent(done.messages)


# ---- consuming


def _consume(wish: Consume) -> Spent:
    if wish.way == "bare":
        taking = Taking()
        consume_bare(wish.broker_port, wish.topic, wish.count)
        return taking.spent(wish.count)
    if wish.way in ("poll", "bodies", "arrow"):
        return _poll(wish)
    return _push(wish)


def _push(wish: Consume) -> Spent:
    consumer = Consumer(
        wish.group, name_server=wish.name_server, consume_from=Position.FIRST, workers=20
    )
    arriving = Arriving(wish.count)
    if wish.way == "sync":

        @consumer.on(wish.topic)
        def take(_: ReceivedMessage) -> None:
            arriving.note_one()

    elif wish.way == "async":

        @consumer.on(wish.topic)
        async def take_async(_: ReceivedMessage) -> None:
            arriving.note_one()

    else:

        @consumer.on(wish.topic, batch=True)
        def take_batch(batch: list[ReceivedMessage]) -> None:
            arriving.note(len(batch))

    with consumer:
        return arriving.wait()


def _poll(wish: Consume) -> Spent:
    with PullConsumer(
        wish.group, name_server=wish.name_server, consume_from=Position.FIRST
    ) as consumer:
        consumer.subscribe(wish.topic)
        arriving = Arriving(wish.count)
        while not arriving.is_complete:
            if wish.way == "poll":
                came = len(consumer.poll(timeout=SILENCE))
            elif wish.way == "bodies":
                came = sum(bool(each.body) for each in consumer.poll(timeout=SILENCE))
            else:
                came = consumer.poll_arrow(timeout=SILENCE).num_rows
            if not came:
                raise TimeoutError(f"nothing came for {SILENCE:g} s")
            arriving.note(came)
        return arriving.wait()


if __name__ == "__main__":
    main()
