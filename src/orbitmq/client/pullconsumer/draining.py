"""What of the returned messages counts as done, and when a queue can be given up.

A queue that another member waits for is held until the application has dealt with what it was
given: until its next poll, or, when it commits by itself, until it has committed. That takes as
long as it takes to work a batch off, and is bounded; what is not done by then comes a second time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.pullconsumer.cache import Cache, CachedQueue


class Settling:
    """Turns what polls returned into progress."""

    def __init__(self, cache: Cache, progress: ProgressStore, *, is_automatic: bool) -> None:
        self._cache = cache
        self._progress = progress
        self._is_automatic = is_automatic
        self._is_ending = False

    def note(self) -> None:
        """Take what is settled as progress, if commits are automatic."""
        if self._is_automatic:
            for queue in self._cache.queues:
                self._note(queue)

    def end(self) -> None:
        """No poll and no commit will follow: nothing is worth waiting for any more."""
        self._is_ending = True
        self._cache.settled.set()

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        """Give out no more of a queue and wait until what was returned is done with."""
        self._cache.clear(owned)
        queue = self._cache.of(owned)
        try:
            async with asyncio.timeout(timeout):
                while not self._is_done(queue):
                    self._cache.settled.clear()
                    await self._cache.settled.wait()
        except TimeoutError:
            return False
        else:
            return True
        finally:
            if self._is_automatic:
                self._note(queue)
            self._cache.forget(owned)

    def _is_done(self, queue: CachedQueue) -> bool:
        if self._is_ending:
            return True
        if self._is_automatic:
            return queue.settled == queue.returned
        position = self._progress.read(queue.owned.queue)
        return queue.given is None or (position is not None and position >= queue.given)

    def _note(self, queue: CachedQueue) -> None:
        self._progress.update(queue.owned.queue, queue.settled, increase_only=False)
