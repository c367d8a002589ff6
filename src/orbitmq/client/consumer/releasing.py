"""Giving queues up: let running handlers finish, report progress, and only then let go.

As long as a queue is in the table of owned ones, whoever is to have it next waits. So nothing here
may last for ever, except in orderly consumption: there the lock is what others wait for, and to
give it back while a handler runs would put two handlers on one queue. A stop does not wait for ever
either; it leaves the lock of such a queue to itself.

Progress is reported twice: at once, for an owner-to-be that does not wait (Apache's clients do
not), and when the last handler has finished. Before the second report the broker is asked when some
time has passed, or the lock was lost: what another owner has reported meanwhile is not taken back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from orbitmq.client.consumer.locks import BROKER_LOCK_LIFE
from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from orbitmq.client.consumer.gaining import Beginning
    from orbitmq.client.consumer.locks import QueueLocks
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.ownership import Ownership
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.rebalancesettings import RebalanceSettings
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue

log = logging.getLogger(__name__)

#: A loss that took longer may have been noticed by an owner that did not wait for us.
_LONG = 1.0
#: Pause between attempts to report progress.
_AGAIN = 0.1


class Draining(Protocol):
    """Who calls handlers."""

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        """Begin nothing new for a queue and wait for what runs; true when nothing does."""


class Releasing:
    """Gives queues up, each in a task of its own."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        ownership: Ownership,
        *,
        progress: ProgressStore,
        puller: Beginning,
        consumption: Draining,
        locks: QueueLocks | None,
        settings: RebalanceSettings,
        on_released: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._group = group
        self._ownership = ownership
        self._progress = progress
        self._puller = puller
        self._consumption = consumption
        self._locks = locks
        self._settings = settings
        self._on_released = on_released
        self._is_stopping = False
        self._patience = settings.handover
        self._tasks: dict[OwnedQueue, asyncio.Task[None]] = {}
        #: Queues that were given up by a stop while a handler was at work on them.
        self.left_busy: set[Queue] = set()

    def is_going(self, owned: OwnedQueue) -> bool:
        """Whether a queue is being given up."""
        return owned in self._tasks

    def release(self, owned: OwnedQueue, why: str, *, reports: bool = True) -> asyncio.Task[None]:
        """Give a queue up; `reports` unless its progress has been settled already."""
        task = self._tasks.get(owned)
        if task is None:
            owned.is_draining = True
            self._puller.end(owned)
            task = self._engine.spawn(
                self._release(owned, why, reports=reports), f"release {owned.queue}"
            )
            self._tasks[owned] = task
            task.add_done_callback(lambda _: self._tasks.pop(owned, None))
        return task

    async def release_all(self, why: str, *, within: float | None = None) -> None:
        """Give up everything; handlers that run longer than `within` (`handover`) are left."""
        self._is_stopping = True
        self._patience = self._settings.handover if within is None else within
        tasks = [self.release(owned, why) for owned in list(self._ownership.owned.values())]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _release(self, owned: OwnedQueue, why: str, *, reports: bool) -> None:
        queue = owned.queue
        began = self._engine.clock.monotonic()
        try:
            is_idle = await self._drain(owned, reports=reports)
            owned.drop()
            if not is_idle:
                self._ownership.counts.abandoned += owned.running
            if reports:
                lasted = self._engine.clock.monotonic() - began
                is_locked = owned.lock is None or owned.lock.is_held(self._engine.clock.monotonic())
                await self._report(owned, is_careful=lasted > _LONG or not is_locked)
            if self._locks is not None:
                await self._unlock(self._locks, owned, is_idle=is_idle)
        finally:
            # Whatever went wrong: a queue that nobody pulls must not look owned.
            owned.drop()
            if self._ownership.owned.get(queue) is owned:
                del self._ownership.owned[queue]
                self._progress.forget(queue)
                self._ownership.counts.released += 1
            self._on_released(queue.topic)
        log.info(
            "queue released: %s by group %s, %s",
            queue,
            self._group,
            why,
            extra={"group": self._group, "queue": str(queue)},
        )

    async def _drain(self, owned: OwnedQueue, *, reports: bool) -> bool:
        """Wait for running handlers; whether none runs any more."""
        if owned.is_dropped and self._locks is None:
            # Dropped for a wrong offset: what runs does not count, and nobody waits for it.
            return True
        early = None
        if reports:
            early = asyncio.create_task(self._persist(owned), name=f"report {owned.queue}")
        try:
            while not await self._consumption.drain(owned, self._patience):
                if self._locks is None or self._is_stopping:
                    return False
                log.info(
                    "a handler of group %s still runs on %s, which is to be given up",
                    self._group,
                    owned.queue,
                    extra={"group": self._group, "queue": str(owned.queue)},
                )
            return True
        finally:
            if early is not None:
                await asyncio.gather(early, return_exceptions=True)

    async def _unlock(self, locks: QueueLocks, owned: OwnedQueue, *, is_idle: bool) -> None:
        """Give the lock of a queue back, unless a handler still runs under it."""
        if is_idle:
            await locks.release([owned.queue])
            return
        self.left_busy.add(owned.queue)
        log.warning(
            "a handler of group %s still runs at the stop; its queue %s stays locked until the "
            "lock lapses, %g s after its last renewal",
            self._group,
            owned.queue,
            BROKER_LOCK_LIFE,
            extra={"group": self._group, "queue": str(owned.queue)},
        )

    async def _report(self, owned: OwnedQueue, *, is_careful: bool) -> None:
        """Put the progress by, trying for as long as the next owner waits."""
        until = self._engine.clock.monotonic() + self._settings.handover
        while True:
            error = await self._persist(owned, is_careful=is_careful)
            if error is None:
                return
            if self._is_stopping or self._engine.clock.monotonic() >= until:
                log.warning(
                    "progress of group %s in %s could not be reported, its messages come again: %s",
                    self._group,
                    owned.queue,
                    error,
                    extra={"group": self._group, "queue": str(owned.queue)},
                )
                return
            await asyncio.sleep(_AGAIN)

    async def _persist(self, owned: OwnedQueue, *, is_careful: bool = False) -> OrbitError | None:
        queue = owned.queue
        position = self._progress.read(queue)
        if position is None:
            return None
        try:
            if is_careful:
                await self._progress.fetch(queue)
                self._progress.update(queue, position)
            await self._progress.persist([queue])
        except OrbitError as error:
            return error
        return None
