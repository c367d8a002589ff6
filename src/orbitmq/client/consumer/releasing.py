"""Giving queues up: let running handlers finish, report progress, and only then let go.

As long as a queue is in the table of owned ones, whoever is to have it next waits. So nothing here
may last for ever, except in orderly consumption: there the lock is what others wait for, and to
give it back while a handler runs would put two handlers on one queue. So would, in broadcasting, to
gain a queue once more. A stop does not wait for ever either; it leaves the lock of such a queue to
itself. Nor does it wait for a broker that is silent, be it for a report that was on its way before:
that is found out once, not once for every queue.

Progress is reported twice: at once, for an owner-to-be that does not wait (Apache's clients do
not), and when the last handler has finished. Before the second report the broker is asked when some
time has passed, or the lock was lost: what another owner has reported meanwhile is not taken back.
At a stop the broker is asked for what it is believed to have, too: nobody would say it later.
Otherwise, what a broker could not be told is kept, and told later if it still counts then
(`unreported`): a broker that was away may be back with other messages under the same numbers.

A queue that is reset (`resetting`) is given up as well, and begun anew. The offset is frozen and
told in the moment in which it comes, once, and the queue is held until that has ended, one way or
the other: whoever has it next finds the offset. It is never told again, here or elsewhere: an owner
that did not wait for us may have gone on from there. So a queue that was reset reports nothing of
its own any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from orbitmq.client.consumer.locks import BROKER_LOCK_LIFE
from orbitmq.client.consumer.progress import Doubting
from orbitmq.client.consumer.reportlimit import ReportLimit
from orbitmq.client.consumer.resetting import ResetUnsettled
from orbitmq.client.errors import BrokerRefused, BrokerUnavailable
from orbitmq.errors import OrbitError
from orbitmq.remoting.errors import RemotingError

if TYPE_CHECKING:
    from orbitmq.client.consumer.gaining import Beginning
    from orbitmq.client.consumer.locks import QueueLocks
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.ownership import Ownership
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.rebalancesettings import RebalanceSettings
    from orbitmq.client.consumer.unreported import Unreported
    from orbitmq.client.engine import Engine
    from orbitmq.client.queue import Queue

log = logging.getLogger(__name__)

#: A loss that took longer may have been noticed by an owner that did not wait for us.
_LONG = 1.0
#: Pause between attempts to report progress.
_AGAIN = 0.1
#: How long one report may take at a stop. A store that takes longer is given up.
_LAST_REPORT = 5.0
#: How long a stop takes at most beside its handlers: two reports, and what comes with them.
_STOP = 2 * _LAST_REPORT + 2.0


class Draining(Protocol):
    """Who calls handlers."""

    async def drain(self, owned: OwnedQueue, timeout: float) -> bool:  # noqa: ASYNC109
        """Begin nothing new for a queue and wait for what runs; true when nothing does."""


@runtime_checkable
class Counting(Protocol):
    """Who knows which messages handlers are at work on; a call may have several."""

    def in_hand(self, owned: OwnedQueue) -> int:
        """Messages of a queue that were begun and are not settled."""


@runtime_checkable
class InOrder(Protocol):
    """Who calls handlers of a queue one after the other: with locks of brokers or, in broadcasting,
    without any."""

    #: Whether a queue must not be begun anew as long as a handler is at work on it.
    is_in_order: bool


class Releasing:
    """Gives queues up, each in a task of its own."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        ownership: Ownership,
        *,
        progress: ProgressStore,
        unreported: Unreported,
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
        self._unreported = unreported
        self._puller = puller
        self._consumption = consumption
        self._locks = locks
        is_in_order = isinstance(consumption, InOrder) and consumption.is_in_order
        self._is_in_order = locks is not None or is_in_order
        self._settings = settings
        self._on_released = on_released
        self._is_stopping = False
        self._patience = settings.handover
        #: For all reports of the consumer that a stop may have to wait for.
        self.limit = ReportLimit()
        self._tasks: dict[OwnedQueue, asyncio.Task[None]] = {}
        #: Queues that were given up by a stop while a handler was at work on them.
        self.left_busy: set[Queue] = set()
        #: Queues whose broker was away when it was to be told, and why.
        self._cut_off: dict[OwnedQueue, OrbitError] = {}
        #: Brokers that did not answer at a stop, and are told nothing more.
        self._given_up: set[str] = set()
        #: Resets on their way to be put by.
        self._resets: dict[OwnedQueue, set[asyncio.Task[OrbitError | None]]] = {}
        #: Queues whose locks are on their way back: somebody else may have them already.
        self._unlocking: set[OwnedQueue] = set()

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

    def is_held(self, owned: OwnedQueue) -> bool:
        """Whether nobody else may begin a queue yet: it can still be reset."""
        return self._ownership.owned.get(owned.queue) is owned and owned not in self._unlocking

    def reset(self, owned: OwnedQueue, offset: int) -> asyncio.Task[OrbitError | None]:
        """Give a queue that is held up, with another offset, whatever else it is given up for.

        Returns what puts the offset by, and says what prevented that, if anything did.
        """
        self._progress.freeze(owned.queue, offset)
        owned.is_reset = True
        resets = self._resets.setdefault(owned, set())
        reset = self._engine.spawn(self._tell(owned), f"reset {owned.queue}")
        resets.add(reset)
        reset.add_done_callback(resets.discard)
        self.release(owned, "its progress was reset", reports=False)
        return reset

    async def _tell(self, owned: OwnedQueue) -> OrbitError | None:
        """Put by where a queue was reset to; what prevented it, if anything did."""
        error = await self._persist(owned)
        if error is None and self._ownership.owned.get(owned.queue) is not owned:
            # A stop that was cut short has let go of it, and of the offset, before it was told.
            return ResetUnsettled(owned.queue)
        return error

    async def release_all(self, why: str, *, within: float | None = None) -> None:
        """Give up everything; handlers that run longer than `within` (`handover`) are left.

        Takes about as long as the handlers; and at most `_STOP` more, whatever brokers do.
        """
        self._is_stopping = True
        self.limit.begin(_LAST_REPORT)
        self._patience = self._settings.handover if within is None else within
        all_owned = list(self._ownership.owned.values())
        tasks = [self.release(owned, why) for owned in all_owned]
        try:
            async with asyncio.timeout(self._patience + _STOP):
                await asyncio.gather(*tasks, return_exceptions=True)
        except TimeoutError:
            log.warning(
                "not all queues of group %s could be given up in order; messages may come again",
                self._group,
                extra={"group": self._group},
            )
        self.left_busy.update(owned.queue for owned in all_owned if owned.running)

    async def _release(self, owned: OwnedQueue, why: str, *, reports: bool) -> None:
        queue = owned.queue
        began = self._engine.clock.monotonic()
        is_idle: bool | None = None
        try:
            is_idle = await self._drain(owned, reports=reports)
            owned.drop()
            if not is_idle:
                self._ownership.counts.abandoned += self._in_hand(owned)
            if reports and not owned.is_reset:
                lasted = self._engine.clock.monotonic() - began
                is_careful = lasted > _LONG or not self._is_locked(owned)
                await self._report(owned, is_careful=is_careful)
        finally:
            # Whatever went wrong: a queue that nobody pulls must not look owned, or stay locked.
            owned.drop()
            try:
                await self._resets_are_put_by(owned)
                # Nothing is waited for between this and letting go, but the way of a lock.
                if self._locks is not None:
                    was_idle = not owned.running if is_idle is None else is_idle
                    await self._unlock(self._locks, owned, is_idle=was_idle)
            finally:
                self._let_go(owned)
        log.info(
            "queue released: %s by group %s, %s",
            queue,
            self._group,
            why,
            extra={"group": self._group, "queue": str(queue)},
        )

    def _in_hand(self, owned: OwnedQueue) -> int:
        consumption = self._consumption
        return consumption.in_hand(owned) if isinstance(consumption, Counting) else owned.running

    def _let_go(self, owned: OwnedQueue) -> None:
        queue = owned.queue
        self._cut_off.pop(owned, None)
        self._resets.pop(owned, None)
        self._unlocking.discard(owned)
        try:
            if self._ownership.owned.get(queue) is owned:
                del self._ownership.owned[queue]
                self._ownership.counts.released += 1
                self._progress.forget(queue)
        finally:
            self._on_released(queue.topic)

    def _is_locked(self, owned: OwnedQueue) -> bool:
        """Whether nobody else has begun the queue, as far as locks can tell."""
        return owned.lock is None or owned.lock.is_held(self._engine.clock.monotonic())

    async def _drain(self, owned: OwnedQueue, *, reports: bool) -> bool:
        """Wait for running handlers; whether none runs any more."""
        if owned.is_dropped and not self._is_in_order:
            # Dropped for a wrong offset: what runs does not count, and nobody waits for it.
            return True
        early = None
        if reports:
            if self._is_stopping:
                self._doubt(owned.queue)
            early = asyncio.create_task(self._persist(owned), name=f"report {owned.queue}")
        try:
            while not await self._consumption.drain(owned, self._patience):
                if not self._is_in_order or self._is_stopping:
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
            # The lock of this ownership only: the queue may be ours again under another one.
            if locks.get(owned.queue) is owned.lock:
                self._unlocking.add(owned)
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
        while owned not in self._cut_off and not owned.is_reset:
            error = await self._persist(owned, is_careful=is_careful)
            if error is None:
                return
            if self._is_stopping or self._engine.clock.monotonic() >= until:
                self._keep(owned)
                self._not_reported(owned, error)
                return
            if isinstance(error, BrokerRefused):
                await asyncio.sleep(_AGAIN)
        if not owned.is_reset:
            await self._report_again(owned, self._cut_off[owned], until)

    async def _report_again(self, owned: OwnedQueue, error: OrbitError, until: float) -> None:
        """The same after a broker was away: it may have lost messages, so that proof is needed."""
        self._keep(owned)
        while not self._is_stopping and self._engine.clock.monotonic() < until:
            await asyncio.sleep(_AGAIN)
            try:
                await self._unreported.settle(owned.queue)
            except OrbitError as failed:
                error = failed
            else:
                return
        self._not_reported(owned, error)

    def _keep(self, owned: OwnedQueue) -> None:
        position = self._progress.read(owned.queue)
        if position is not None and not (self._is_stopping or owned.is_reset):
            self._unreported.keep(owned.queue, position, owned.landmark)

    def _not_reported(self, owned: OwnedQueue, error: OrbitError) -> None:
        log.warning(
            "progress of group %s in %s could not be reported, %s: %s",
            self._group,
            owned.queue,
            "its messages come again" if self._is_stopping else "and is when its broker is back",
            error,
            extra={"group": self._group, "queue": str(owned.queue)},
        )

    async def _persist(self, owned: OwnedQueue, *, is_careful: bool = False) -> OrbitError | None:
        """Put the progress by; what prevented it, if anything did."""
        broker = owned.queue.broker
        if broker in self._given_up:
            return BrokerUnavailable(broker, "it did not answer before, and is not asked again")
        try:
            async with self.limit.kept(broker):
                await self._put_by(owned, is_careful=is_careful)
        except OrbitError as error:
            if self._is_stopping and isinstance(error, RemotingError | BrokerUnavailable):
                self._given_up.add(broker)
            if not (self._is_stopping or isinstance(error, BrokerRefused)):
                self._cut_off[owned] = error
            return error
        return None

    async def _put_by(self, owned: OwnedQueue, *, is_careful: bool) -> None:
        queue = owned.queue
        position = self._progress.read(queue)
        if position is None:
            return
        if is_careful:
            await self._progress.fetch(queue)
            if owned.is_reset:
                return
            self._progress.update(queue, position)
        await self._progress.persist([queue])

    async def _resets_are_put_by(self, owned: OwnedQueue) -> None:
        """Wait for all resets of a queue, also those that come meanwhile."""
        while resets := self._resets.get(owned):
            await asyncio.wait(resets)

    def _doubt(self, queue: Queue) -> None:
        if isinstance(self._progress, Doubting):
            self._progress.doubt([queue])
