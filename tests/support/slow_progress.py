"""A store of progress that takes and tells positions when a test lets it, and a group with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from orbitmq.client.consumer.progress import MemoryProgress
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.consumers import send
from tests.support.consuming import DEADLINE, until
from tests.support.rebalancing import QUICK, TOPIC, Consumer, Group

#: Handlers are waited for longer than a test lasts; nothing is reported but what is told to be.
PATIENT = replace(QUICK, handover=4 * DEADLINE, persist=3600.0, persist_idle=0.0)

FIRST, SECOND = (Queue(TOPIC, "broker-a", number) for number in range(2))


class Slow(MemoryProgress):
    """Puts by, and says, where the first queue is when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept.update({FIRST: 0, SECOND: 0})
        #: One for each time that the first queue is to be put by, as long as there are any.
        self.turns: list[asyncio.Event] = []
        self.waiting = 0
        #: Holds answers back that were found already.
        self.answers: asyncio.Event | None = None
        self.has_read = False
        self.refuses: set[Queue] = set()

    async def persist(self, queues: Iterable[Queue]) -> None:
        queues = list(queues)
        if FIRST in queues and self.turns:
            turn = self.turns.pop(0)
            self.waiting += 1
            await turn.wait()
        await super().persist(queues)

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        taken = {queue: at for queue, at in changed.items() if queue not in self.refuses}
        await super().store(taken)
        return {queue: BrokerUnavailable(queue.broker, "no") for queue in changed.keys() - taken}

    async def stored(self, queue: Queue) -> int | None:
        found = await super().stored(queue)
        if queue == FIRST and self.answers is not None:
            self.has_read = True
            await self.answers.wait()
        return found


async def consumed_five(
    cluster: AsyncEmbeddedCluster, group: Group, progress: Slow, **options: Any
) -> Consumer:
    """A member that has both queues, and five messages of the first one behind it."""
    await send(cluster, TOPIC, range(5), queue=FIRST)
    member = await group.join(**options)
    await until(lambda: progress.read(FIRST) == 5)
    await until(lambda: member.owned == {FIRST, SECOND})
    await progress.persist([FIRST])
    return member


class Busy:
    """A handler that keeps the sixth message of the first queue until it may end."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self, _: Consumer, message: ReceivedMessage) -> None:
        if (message.queue, message.queue_offset) == (FIRST, 5):
            self.has_begun.set()
            await self.may_end.wait()


async def busy_with_the_sixth(
    cluster: AsyncEmbeddedCluster, group: Group, progress: Slow, handler: Busy
) -> Consumer:
    member = await consumed_five(cluster, group, progress, handler=handler)
    await send(cluster, TOPIC, ["sixth"], queue=FIRST)
    async with asyncio.timeout(DEADLINE):
        await handler.has_begun.wait()
    return member


def repeated(group: Group) -> list[int]:
    """The messages of the first queue that were consumed more than once."""
    return sorted(offset for queue, offset in group.ledger.duplicates if queue == FIRST)
