"""From the messages of a pull to the end of the last listener, without any socket.

* `CrewHandover` is the hand-over alone: calls are made, workers call the handler, and the loop
  hears what is done.
* `WindowHandover` is the whole way inside a consumer: messages are kept in the window of their
  queue before, leave it afterwards, and progress moves.
* `ExecutorHandover` is what people write: `executor.submit` for each message, with as many threads,
  and without any progress.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from benchmarks.workload import records
from orbitmq.client.consumer.dispatch import Bindings, ConcurrentConsumption, Parts
from orbitmq.client.consumer.handlers import bind_handler
from orbitmq.client.consumer.progress import MemoryProgress
from orbitmq.client.consumer.settings import ConsumeSettings
from orbitmq.client.consumer.statistics import Statistics
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.consumer.workers import Calls, WorkerPool
from orbitmq.client.engine import Engine
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.message.stored import decode_messages

_THREADS = 20
_QUEUES = 4
_PER_PULL = 32
_PULLS = 128
#: Pulls that come before what they brought is waited for: no more than flow control lets in.
_AT_ONCE = 32
#: For what takes milliseconds.
_DEADLINE = 60.0
_TOPIC = "orders"
_GROUP = "bench"


def _listen(_: ReceivedMessage) -> None:
    """The listener."""


class PulledBatches:
    """Messages of four queues, as pulls brought them in turn."""

    def __init__(self) -> None:
        self.queues = tuple(Queue(_TOPIC, "broker-a", number) for number in range(_QUEUES))
        made = decode_messages(b"".join(records(_PER_PULL * _PULLS, 1024)))
        #: The place of a queue, and what was pulled from it.
        self.pulls: list[tuple[int, list[ReceivedMessage]]] = []
        for number, first in enumerate(range(0, len(made), _PER_PULL)):
            place = number % _QUEUES
            queue = self.queues[place]
            some = made[first : first + _PER_PULL]
            self.pulls.append((place, [ReceivedMessage(each, queue, _GROUP) for each in some]))
        self.count = len(made)


class CrewHandover:
    """Ours, without window and progress."""

    def __init__(self, batches: PulledBatches) -> None:
        self._batches = batches
        self._runner = asyncio.Runner()
        self._left = 0

    def __enter__(self) -> Self:
        self._runner.run(self._begin())
        return self

    async def _begin(self) -> None:
        self._worker_pool = WorkerPool(_THREADS, self._finished, group=_GROUP)
        self._bindings = Bindings({_TOPIC: bind_handler(_listen, group=_GROUP)}, _GROUP)
        self._owned = [OwnedQueue(queue, 0, now=0.0) for queue in self._batches.queues]
        self._is_empty = asyncio.Event()

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._worker_pool.stop(1.0))
        self._runner.close()

    def work(self) -> int:
        self._runner.run(self._consume())
        return self._batches.count

    async def _consume(self) -> None:
        for first in range(0, _PULLS, _AT_ONCE):
            self._is_empty.clear()
            for place, messages in self._batches.pulls[first : first + _AT_ONCE]:
                owned = self._owned[place]
                self._left += len(messages)
                for binding, some in self._bindings.by_handler(owned.queue, messages):
                    self._worker_pool.submit(Calls(binding, owned, some, time.monotonic))
                if place == _QUEUES - 1:
                    await asyncio.sleep(0)
            async with asyncio.timeout(_DEADLINE):
                await self._is_empty.wait()

    def _finished(self, jobs: list[Calls]) -> None:
        self._left -= sum(len(calls.take_results()[0]) for calls in jobs)
        if not self._left:
            self._is_empty.set()


class WindowHandover:
    """Ours."""

    def __init__(self, batches: PulledBatches) -> None:
        self._batches = batches
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self._runner.run(self._begin())
        return self

    async def _begin(self) -> None:
        engine = Engine(ClientSettings(name_servers=("127.0.0.1:9876",)))
        progress = MemoryProgress()
        now = engine.clock.monotonic
        parts = Parts(
            engine,
            _GROUP,
            Bindings({_TOPIC: bind_handler(_listen, group=_GROUP)}, _GROUP),
            progress,
            None,
            ConsumeSettings(workers=_THREADS),
            Statistics(now),
        )
        self._consumption = ConcurrentConsumption(parts)
        self._consumption.has_room = self._has_room
        self._owned = [OwnedQueue(queue, 0, now=now()) for queue in self._batches.queues]
        self._is_empty = asyncio.Event()

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._consumption.stop())
        self._runner.close()

    def work(self) -> int:
        self._runner.run(self._consume())
        return self._batches.count

    async def _consume(self) -> None:
        for first in range(0, _PULLS, _AT_ONCE):
            self._is_empty.clear()
            for place, messages in self._batches.pulls[first : first + _AT_ONCE]:
                owned = self._owned[place]
                self._consumption.accept(owned, owned.window.add(messages))
                if place == _QUEUES - 1:
                    # One answer for each queue in a read, then the next read.
                    await asyncio.sleep(0)
            async with asyncio.timeout(_DEADLINE):
                await self._is_empty.wait()

    def _has_room(self, _: OwnedQueue) -> None:
        if not any(len(owned.window) for owned in self._owned):
            self._is_empty.set()


class ExecutorHandover:
    """What people write."""

    def __init__(self, batches: PulledBatches) -> None:
        self._batches = batches
        self._executor = ThreadPoolExecutor(_THREADS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()

    def work(self) -> int:
        submit = self._executor.submit
        for first in range(0, _PULLS, _AT_ONCE):
            futures = []
            for _, messages in self._batches.pulls[first : first + _AT_ONCE]:
                futures += [submit(_listen, message) for message in messages]
            for future in futures:
                future.result()
        return self._batches.count
