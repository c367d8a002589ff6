"""Sends failed messages back from a task that has rows of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from orbitmq.client.consumer.verdict import Failure
from orbitmq.client.engine import Engine
from orbitmq.client.errors import NotRunning
from orbitmq.client.loopthread import LoopThread
from orbitmq.client.rangeaccess import RangeAccess
from orbitmq.client.received import ReceivedMessage
from orbitmq.spark.consuming.returning import Returns

#: Failed messages that are on their way back at once.
_AT_ONCE = 64


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

    def send_back(self, failed: Sequence[tuple[ReceivedMessage, Failure]]) -> list[bool]:
        """Send messages back; for each, whether a broker has taken it."""
        return self._thread.run(self._send_back(failed))

    async def _start(self) -> None:
        self._engine = Engine(self._access.settings())
        await self._engine.start()
        self._returns = Returns(
            self._engine, self._group, max_retries=self._max_retries, timeout=5.0
        )

    async def _send_back(self, failed: Sequence[tuple[ReceivedMessage, Failure]]) -> list[bool]:
        engine, returns = self._engine, self._returns
        if engine is None or returns is None:
            raise NotRunning("this returner")
        await _know_brokers(engine, {message.queue.topic for message, _ in failed})
        turns = asyncio.Semaphore(_AT_ONCE)

        async def send(message: ReceivedMessage, failure: Failure) -> bool:
            async with turns:
                return await returns.send_back(message, failure)

        taken = await asyncio.gather(*(send(message, failure) for message, failure in failed))
        returns.forget()
        return list(taken)


async def _know_brokers(engine: Engine, topics: Iterable[str]) -> None:
    """Brokers are found by the routes of topics; one that is not found takes nothing back."""
    await asyncio.gather(*map(engine.routes.get, topics), return_exceptions=True)
