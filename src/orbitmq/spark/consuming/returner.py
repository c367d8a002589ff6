"""Sends failed messages back from a task that has rows of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from orbitmq.client.consumer.verdict import Failure
from orbitmq.client.engine import Engine
from orbitmq.client.errors import NotRunning
from orbitmq.client.loopthread import LoopThread
from orbitmq.client.names import retry_topic
from orbitmq.client.rangeaccess import RangeAccess
from orbitmq.client.received import ReceivedMessage
from orbitmq.spark.consuming.returning import Fate, Returns

#: Failed messages that are on their way back at once.
_AT_ONCE: Final = 64
#: Before those that were not taken are sent once more.
_PAUSES: Final = (0.1, 0.5)


class Returner:
    """Sends failed messages of a group back. Blocking; for one thread at a time."""

    def __init__(self, access: RangeAccess, group: str, max_retries: int | None) -> None:
        """`group` as brokers know it."""
        self._access = access
        self._group = group
        self._max_retries = max_retries
        self._thread = LoopThread("orbitmq-returning")
        self._engine: Engine | None = None
        self._returns: Returns | None = None

    def start(self) -> None:
        self._thread.start()
        self._thread.run(self._start())

    def stop(self) -> None:
        """Close everything. May be called again."""
        if self._engine is not None:
            self._thread.run(self._engine.stop())
            self._engine = self._returns = None
        self._thread.stop()

    def send_back(self, failed: Sequence[tuple[ReceivedMessage, Failure]]) -> list[Fate]:
        """Send messages back; for each, what became of it."""
        return self._thread.run(self._send_back(failed))

    async def _start(self) -> None:
        self._engine = Engine(self._access.settings())
        await self._engine.start()
        self._returns = Returns(
            self._engine, self._group, max_retries=self._max_retries, timeout=5.0
        )

    async def _send_back(self, failed: Sequence[tuple[ReceivedMessage, Failure]]) -> list[Fate]:
        engine, returns = self._engine, self._returns
        if engine is None or returns is None:
            raise NotRunning("this returner")
        await _know_brokers(engine, {message.queue.topic for message, _ in failed})
        turns = asyncio.Semaphore(_AT_ONCE)
        taken = [False] * len(failed)

        async def send(place: int) -> None:
            async with turns:
                taken[place] = await returns.send_back(*failed[place])

        for pause in (*_PAUSES, None):
            await asyncio.gather(*(send(place) for place, done in enumerate(taken) if not done))
            if all(taken) or pause is None:
                break
            await asyncio.sleep(pause)
            # A broker makes a retry topic when it first hears of the group, which was just now.
            await _know_brokers(engine, {retry_topic(self._group)}, refresh=True)
        fates = [
            returns.fate(*each, is_taken=is_taken)
            for each, is_taken in zip(failed, taken, strict=True)
        ]
        returns.forget()
        return fates


async def _know_brokers(engine: Engine, topics: Iterable[str], *, refresh: bool = False) -> None:
    """Brokers are found by the routes of topics; one that is not found takes nothing back."""
    await asyncio.gather(
        *(engine.routes.get(topic, refresh=refresh) for topic in topics), return_exceptions=True
    )
