"""Transactions whose local work is under way when a producer is stopped.

The work is done or not done whatever becomes of the producer, so a stop waits for its end to be
told. It waits for each no longer than the transaction's own timeout, counted from the stop: local
work has no deadline, may hang, and may be what stops the producer. What ends later is not told, and
the broker asks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class OpenTransactions:
    """Begun by threads or coroutines, waited for on the loop. Nobody takes a lock."""

    __slots__ = ("_ended", "_loop", "_open")

    def __init__(self) -> None:
        #: What a stop waits for each of them at most. Changed by one operation at a time, and read
        #: into a list, which is there before the iterator is. A tuple is made after that, which may
        #: begin a collection of garbage, and let another thread change this meanwhile.
        self._open: dict[object, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None

    @contextlib.contextmanager
    def one(self, patience: float) -> Iterator[None]:
        """Another one, from before it is begun until its end was told. For any thread."""
        transaction = object()
        self._open[transaction] = patience
        try:
            yield
        finally:
            del self._open[transaction]
            if not self._open:
                self._tell()

    @property
    def patience(self) -> float:
        """How long a stop waits for those that are open now. For any thread."""
        return max(list(self._open.values()), default=0.0)

    async def until_ended(self) -> bool:
        """Returns when none is open; False when the time is up. No others may begin meanwhile."""
        if self._ended is None:
            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        # Who ends the last one looks here after that, so that one of the two sees the other.
        patience = max(list(self._open.values()), default=None)
        if patience is None:
            return True
        try:
            async with asyncio.timeout(patience):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _tell(self) -> None:
        if self._ended is not None and self._loop is not None:
            # A loop that is closed has nobody who waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ended.set)
