"""Queues that the application assigns itself, without a group that shares them out."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from orbitmq.client.consumer.owned import OwnedQueue
from orbitmq.client.consumer.refusals import is_access_denied
from orbitmq.client.errors import BrokerRefused, SettingError
from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.pulling import Puller
    from orbitmq.client.consumer.starting import Starting
    from orbitmq.client.engine import Engine
    from orbitmq.client.pullconsumer.draining import Settling
    from orbitmq.client.queue import Queue

log = logging.getLogger(__name__)

#: Seconds before a queue is tried again whose start could not be worked out.
_RETRY = 1.0


class Assigning:
    """Begins and ends the pulls of assigned queues. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        puller: Puller,
        progress: ProgressStore,
        starting: Starting,
        settling: Settling,
        *,
        puts_start_by: bool,
    ) -> None:
        """`puts_start_by`: where a queue without progress is begun is its progress from then on."""
        self._engine = engine
        self._puller = puller
        self._progress = progress
        self._settling = settling
        self._start = starting.begin if puts_start_by else starting.offset
        self._owned: dict[Queue, OwnedQueue] = {}
        self._wanted: set[Queue] = set()
        #: Why queues that are wanted could not be begun so far.
        self._problems: dict[Queue, OrbitError] = {}
        self._tracked: set[str] = set()
        #: Held by whoever changes the assignment: what one gives up, the next may want back.
        self._changing = asyncio.Lock()
        #: The queues that are being begun by whoever holds it.
        self._begins: asyncio.Future[list[None]] | None = None
        self._is_stopped = False

    @property
    def owned(self) -> Mapping[Queue, OwnedQueue]:
        return self._owned

    async def check(self, queues: Iterable[Queue]) -> None:
        """Whether they can be assigned. Raises `NoRoute`, or `SettingError` for an unknown one."""
        wanted = set(queues)
        for topic in {queue.topic for queue in wanted}:
            known = await self._engine.routes.subscribe_queues(topic)
            for queue in wanted:
                if queue.topic == topic and queue not in known:
                    named = ", ".join(str(each) for each in known) or "none that can be read"
                    raise SettingError(f"topic {topic!r} has no queue {queue}; it has {named}")

    @property
    def troubles(self) -> tuple[str, ...]:
        """What keeps queues from being begun; one stands for all, as they have it in common."""
        return tuple(
            f"{queue} cannot be begun: {problem}"
            for queue, problem in self._problems.items()
            if not is_access_denied(problem)
        )[:1]

    def check_begun(self, queue: Queue) -> None:
        """Raise why a queue that is wanted could not be begun so far."""
        if queue in self._wanted and (problem := self._problems.get(queue)) is not None:
            raise copy.copy(self._puller.refusals.of_all([queue]) or problem)

    async def assign(self, queues: Iterable[Queue]) -> None:
        """Exactly these from now on, which were checked.

        Where a queue begins may be unknown for a while; then it is begun later.
        """
        wanted = set(queues)
        async with self._changing:
            if self._is_stopped:
                return
            self._track({queue.topic for queue in wanted})
            self._wanted = wanted
            for queue in self._problems.keys() - wanted:
                del self._problems[queue]
                self._puller.refusals.given_up(queue)
            gone = [owned for queue, owned in self._owned.items() if queue not in wanted]
            await self._end(gone)
            new = [queue for queue in wanted if queue not in self._owned]
            if not self._is_stopped:
                await self._begin_all(new)

    async def _begin_all(self, queues: list[Queue]) -> None:
        self._begins = asyncio.gather(*(self._begin(queue) for queue in queues))
        try:
            await self._begins
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_stopped or (task is not None and task.cancelling()):
                raise
            # By the stop, which does not wait for brokers that are slow to say where to begin.
        finally:
            self._begins = None

    def _track(self, topics: set[str]) -> None:
        for topic in topics - self._tracked:
            self._engine.routes.track(topic)
        for topic in self._tracked - topics:
            self._engine.routes.untrack(topic)
        self._tracked = topics

    async def _begin(self, queue: Queue) -> None:
        try:
            offset = await self._start(queue)
        except OrbitError as error:
            refusals = self._puller.refusals
            if not (isinstance(error, BrokerRefused) and refusals.refused(queue, error)):
                log.warning(
                    "where %s begins cannot be said: %s", queue, error, extra={"queue": str(queue)}
                )
            self._problems[queue] = error
            self._engine.spawn(self._begin_later(queue), f"begin {queue}")
            return
        self._problems.pop(queue, None)
        self._puller.refusals.given_up(queue)  # its pulls are the next to ask
        if queue in self._wanted and queue not in self._owned:
            now = self._engine.clock.monotonic()
            owned = self._owned[queue] = OwnedQueue(queue, offset, now=now)
            self._puller.begin(owned)

    async def _begin_later(self, queue: Queue) -> None:
        await asyncio.sleep(_RETRY)
        if queue in self._wanted and queue not in self._owned:
            await self._begin(queue)

    async def _end(self, gone: list[OwnedQueue]) -> None:
        """Give queues up; their progress is reported, as far as that is the consumer's business.

        In one report: a broker that is silent is waited for once, not for each queue.
        """
        for owned in gone:
            owned.is_draining = True
            self._puller.end(owned)
        try:
            # Nobody waits for the queues, and the application knows what it does.
            await asyncio.gather(*(self._settling.drain(owned, 0.0) for owned in gone))
        finally:
            # Also when it is broken off: a queue that nobody pulls must not look assigned.
            for owned in gone:
                owned.drop()
                del self._owned[owned.queue]
        try:
            await self._progress.persist([owned.queue for owned in gone])
        except OrbitError as error:
            log.warning("progress in assigned queues not reported: %s", error)
        finally:
            for owned in gone:
                self._progress.forget(owned.queue)

    async def stop(self) -> None:
        """Give everything up; who waits to change the assignment comes too late."""
        self._is_stopped = True
        self._wanted = set()
        if self._begins is not None:
            self._begins.cancel()
        async with self._changing:
            # Whoever was at it when the stop came may have wanted others since.
            self._wanted = set()
            await self._end(list(self._owned.values()))
            self._track(set())
