"""Our client, alone in its process: reads wishes from standard input, a line of JSON each."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from benchmarks.load.asking import Drive, Failed, Sends, Target
from benchmarks.load.barepulls import consume_bare
from benchmarks.load.clientwork import ClientOutcome, ClientWish, Consume, Deliver, Send, Spent
from benchmarks.load.driving import drive
from benchmarks.load.paceddelivery import deliver
from benchmarks.workload import messages
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

#: Longer than anything that is measured takes.
_SILENCE = 60.0
_DIFFERENT = 1024
_BODY_SIZE = 1024
_BATCH = 32
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
        self._bodies = [each.body for each in messages(_DIFFERENT, _BODY_SIZE)]

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
        taking = _Taking()
        for thread in threads:
            thread.join()
        if failures:
            raise ValueError(f"a send failed: {failures[0]!r}")
        return taking.spent(each * wish.threads)

    async def _awaited(self, wish: Send, producer: AsyncProducer) -> Spent:
        taking = _Taking()
        for number in range(wish.count):
            await producer.send(self._message(wish.topic, number))
        return taking.spent(wish.count)

    async def _pipelined(self, wish: Send, producer: AsyncProducer) -> Spent:
        await producer.send(self._message(wish.topic, 0))
        taking = _Taking()
        for number in range(wish.count):
            await producer.submit(self._message(wish.topic, number))
        await producer.flush()
        return taking.spent(wish.count)

    async def _batched(self, wish: Send, producer: AsyncProducer) -> Spent:
        queues = itertools.cycle(await producer.queues(wish.topic))
        taking = _Taking()
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
            producer = Producer("bench-blocking", name_server=name_server)
            producer.start()
            self._producers[name_server] = producer
        return self._producers[name_server]

    def _async_producer(self, name_server: str) -> AsyncProducer:
        if name_server not in self._async_producers:
            sending = SendSettings(max_in_flight=_IN_FLIGHT)
            producer = AsyncProducer("bench-async", name_server=name_server, sending=sending)
            self._background.run(producer.start())
            self._async_producers[name_server] = producer
        return self._async_producers[name_server]


def _send_frames(wish: Send) -> Spent:
    taking = _Taking()
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
        taking = _Taking()
        consume_bare(wish.broker_port, wish.topic, wish.count)
        return taking.spent(wish.count)
    if wish.way in ("poll", "arrow"):
        return _poll(wish)
    return _push(wish)


def _push(wish: Consume) -> Spent:
    consumer = Consumer(
        wish.group, name_server=wish.name_server, consume_from=Position.FIRST, workers=20
    )
    arriving = _Arriving(wish.count)
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
        arriving = _Arriving(wish.count)
        while not arriving.is_complete:
            if wish.way == "poll":
                came = len(consumer.poll(timeout=_SILENCE))
            else:
                came = consumer.poll_arrow(timeout=_SILENCE).num_rows
            if not came:
                raise TimeoutError(f"nothing came for {_SILENCE:g} s")
            arriving.note(came)
        return arriving.wait()


# ---- what it takes


class _Taking:
    """The clocks at the beginning."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self._began = time.monotonic()

    def spent(self, count: int) -> Spent:
        ended = time.monotonic()
        cpu = time.process_time() - self._cpu
        return Spent(messages=count, began=self._began, ended=ended, cpu=cpu)


class _Arriving:
    """Counts messages, from the first one on, in any thread.

    Handlers of several threads call it. `next` of a count is one step of the interpreter: none is
    lost, without a lock, which would be dearer than all else here.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sum = 0
        self._taking: _Taking | None = None
        self._first = 0
        self._spent: Spent | None = None
        self._ended = threading.Event()

    @property
    def is_complete(self) -> bool:
        return self._ended.is_set()

    def note_one(self) -> None:
        self._note(next(self._numbers))

    def note(self, count: int) -> None:
        with self._lock:  # once for a batch: cheap enough
            self._sum += count
            had = self._sum
        self._note(had)

    def _note(self, had: int) -> None:
        if self._taking is None:
            self._taking = _Taking()
            self._first = had
        elif had >= self._wanted and self._spent is None:
            self._spent = self._taking.spent(had - self._first)
            self._ended.set()

    def wait(self) -> Spent:
        if not self._ended.wait(_SILENCE) or self._spent is None:
            raise TimeoutError(f"{self._wanted} messages did not come within {_SILENCE:g} s")
        return self._spent


if __name__ == "__main__":
    main()
