"""Sends at a steady pace with our producer and receives with our consumer, on one event loop.

A message counts from the instant at which it was due, as in `pacing`, which does the same without a
client. The two are thus one process as well: who sends and who receives share a clock.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid

from benchmarks.load.asking import Paced
from benchmarks.load.clientwork import Deliver
from benchmarks.workload import messages
from orbitmq import AsyncConsumer, AsyncProducer, Message, Position, ReceivedMessage

_SILENCE = 30.0
_DUE = "due"


async def deliver(wish: Deliver) -> Paced:
    late: list[float] = []
    count = int(wish.rate * wish.seconds)
    is_there = asyncio.Event()
    is_complete = asyncio.Event()
    run = uuid.uuid4().hex
    consumer = AsyncConsumer(
        f"bench-{run}", name_server=wish.name_server, consume_from=Position.FIRST
    )

    @consumer.on(wish.topic, tags=run)
    async def take(message: ReceivedMessage) -> None:
        due = message.get(_DUE)
        if due is None:
            is_there.set()
            return
        late.append(time.perf_counter() - float(due))
        if len(late) == count:
            is_complete.set()

    async with AsyncProducer("bench-paced", name_server=wish.name_server) as producer, consumer:
        # One message to every queue: when one has come, pulls of all are about to be held.
        for queue in await producer.queues(wish.topic):
            await producer.send(Message(wish.topic, b"first", tags=run), queue=queue)
        async with asyncio.timeout(_SILENCE):
            await is_there.wait()
            await _send(producer, wish, run, count)
            await is_complete.wait()
    late.sort()
    return Paced(
        messages=len(late),
        median=statistics.median(late),
        p99=late[min(len(late) - 1, len(late) * 99 // 100)],
    )


async def _send(producer: AsyncProducer, wish: Deliver, run: str, count: int) -> None:
    bodies = [each.body for each in messages(64, 1024)]
    began = time.perf_counter() + 0.01
    for number in range(count):
        due = began + number / wish.rate
        # The loop's timers are as fine as the kernel's; what is late counts as late.
        while (left := due - time.perf_counter()) > 0:  # noqa: ASYNC110  # waits for the clock
            await asyncio.sleep(left if left > 0.002 else 0)
        await producer.submit(
            Message(
                wish.topic, bodies[number % len(bodies)], tags=run, properties={_DUE: repr(due)}
            )
        )
