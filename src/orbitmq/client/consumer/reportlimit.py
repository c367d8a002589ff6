"""How long reports may take: as long as they do, and once the consumer stops, a little."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from orbitmq.client.errors import BrokerUnavailable


class ReportLimit:
    """Bounds reports once the consumer stops, also those that are on their way by then."""

    def __init__(self) -> None:
        self._within: float | None = None
        self._under_way: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def kept(self, broker: str) -> AsyncIterator[None]:
        """Raises `BrokerUnavailable` when a report to a broker takes too long."""
        try:
            async with asyncio.timeout(self._within) as timeout:
                self._under_way.add(timeout)
                try:
                    yield
                finally:
                    self._under_way.discard(timeout)
        except TimeoutError as error:
            reason = f"progress was not taken within {self._within:g} s"
            raise BrokerUnavailable(broker, reason) from error

    def begin(self, within: float) -> None:
        """Give every report so many seconds from now on."""
        self._within = within
        until = asyncio.get_running_loop().time() + within
        for timeout in self._under_way:
            if timeout.when() is None:
                timeout.reschedule(until)
