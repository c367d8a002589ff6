"""When the progress of a consumer is put by.

Every few seconds, for all queues; and soon after a queue has nothing left to do, because somebody
may be waiting to see that all is done: a person, a test, a job that follows. A queue counts as idle
when nothing of it is cached and no handler has finished on it for a moment. A queue under load is
never idle: its progress goes along with every pull, and with the regular report.

A queue that gets a message now and then is idle after each of them, and must not be reported each
time. So a broker is told early once, and then not sooner than a second later; each time that the
next occasion comes before its time, the distance doubles, up to that of the regular report. A
broker without an occasion for twice the distance begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orbitmq.client.consumer.spells import Spells
from orbitmq.errors import OrbitError

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.engine import Engine
    from orbitmq.client.periodic import Periodic
    from orbitmq.client.queue import Queue

log = logging.getLogger(__name__)

#: Seconds for which a position that was reset is not replaced by what was consumed from there.
_SEEN: Final = 1.0
#: Seconds between two early reports to a broker: to begin with, and at most.
_DISTANCE: Final = 1.0
_LONGEST: Final = 8.0


@dataclass(slots=True)
class _Pace:
    """How often a broker is told early."""

    last: float
    distance: float

    def went(self, now: float, *, longest: float) -> None:
        """A report goes out, after an occasion that came too soon or after a quiet time."""
        if now - self.last > 2 * self.distance:
            self.distance = _DISTANCE
        else:
            self.distance = min(2 * self.distance, longest)
        self.last = now


class Reporting:
    """Puts the progress of the owned queues by. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        group: str,
        progress: ProgressStore,
        owned: Mapping[Queue, OwnedQueue],
        *,
        interval: float,
        when_idle: float,
    ) -> None:
        """`when_idle` is how long a queue is idle before it is reported; 0: it is not."""
        self._engine = engine
        self._group = group
        self._progress = progress
        self._owned = owned
        self._interval = interval
        self._longest = max(_DISTANCE, min(interval, _LONGEST))
        self._when_idle = when_idle
        self._spells = Spells(log)
        self._regular: Periodic | None = None
        self._look: asyncio.TimerHandle | None = None
        self._is_stopped = False
        #: Queues that are not reported for being idle before these times.
        self._not_before: dict[Queue, float] = {}
        #: Until when the handler calls of a queue were covered by an early report.
        self._covered: dict[Queue, float] = {}
        self._paces: dict[str, _Pace] = {}

    def start(self) -> None:
        self._regular = self._engine.every(
            self._interval, self._report_all, name=f"progress of {self._group}"
        )

    def stop(self) -> None:
        """Report no more; what is owned is reported when it is released."""
        self._is_stopped = True
        if self._regular is not None:
            self._regular.stop()
        if self._look is not None:
            self._look.cancel()

    def became_empty(self) -> None:
        """Nothing of some queue is cached any more. Called often; costs little."""
        if self._look is None and self._when_idle > 0 and not self._is_stopped:
            loop = asyncio.get_running_loop()
            self._look = loop.call_later(self._when_idle, self._look_for_idle)

    def let_be_seen(self, queues: Iterable[Queue]) -> None:
        """Progress was reset: whoever did that reads it back, so it stays there for a moment."""
        until = self._engine.clock.monotonic() + _SEEN
        self._not_before.update(dict.fromkeys(queues, until))

    def _look_for_idle(self) -> None:
        self._look = None
        now = self._engine.clock.monotonic()
        latest = now - self._when_idle
        self._not_before = {queue: at for queue, at in self._not_before.items() if at > now}
        self._covered = {queue: at for queue, at in self._covered.items() if queue in self._owned}
        waiting = [
            owned
            for owned in self._owned.values()
            if not len(owned.window)
            and not owned.is_reset
            and owned.last_consumed > self._covered_until(owned)
        ]
        idle = [
            owned.queue
            for owned in waiting
            if owned.last_consumed <= latest
            and owned.queue not in self._not_before
            and self._may_tell(owned.queue.broker, now)
        ]
        if len(idle) < len(waiting):
            self.became_empty()
        if idle and self._engine.is_running:
            self._note_early(idle, now, latest)
            self._engine.spawn(self._report(idle), f"progress of idle queues of {self._group}")

    def _covered_until(self, owned: OwnedQueue) -> float:
        return self._covered.get(owned.queue, float("-inf"))

    def _may_tell(self, broker: str, now: float) -> bool:
        pace = self._paces.get(broker)
        return pace is None or now >= pace.last + pace.distance

    def _note_early(self, queues: list[Queue], now: float, covered: float) -> None:
        self._covered.update(dict.fromkeys(queues, covered))
        for broker in {queue.broker for queue in queues}:
            pace = self._paces.get(broker)
            if pace is None:
                self._paces[broker] = _Pace(now, _DISTANCE)
            else:
                pace.went(now, longest=self._longest)

    async def _report_all(self) -> None:
        # What was dropped is settled by whoever gives it up, and a reset by `releasing`, once.
        await self._report(
            queue
            for queue, owned in self._owned.items()
            if not (owned.is_dropped or owned.is_reset)
        )

    async def _report(self, queues: Iterable[Queue]) -> None:
        try:
            await self._progress.persist(list(queues))
        except OrbitError as error:
            self._spells.trouble(
                "progress", "progress of group %s cannot be put by: %s", self._group, error
            )
        else:
            self._spells.over("progress")
