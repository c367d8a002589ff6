"""Clocks of brokers, judged by their latest messages.

A message cannot have been stored in the future, nor before it was sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.topicvalues import QueueStatus
from orbitmq.client.queue import Queue
from orbitmq.clock import Clock
from orbitmq.console.words import duration
from orbitmq.errors import OrbitError

log = logging.getLogger(__name__)

#: Clocks that differ by less are as good as equal for messages.
TOLERANCE = 2.0
#: Seconds between two looks of a console: clocks drift slowly.
EVERY = 60.0
#: Topics that a console looks at each time; more would not tell more about clocks.
_SAMPLED = 3


@dataclass(frozen=True, slots=True)
class Skews:
    """What messages tell about clocks."""

    #: What is wrong, by broker.
    found: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: Queues whose latest message was looked at.
    looked: int = 0


async def compare_clocks(admin: AsyncAdmin, topics: Iterable[str], clock: Clock) -> Skews:
    """Compare brokers' clocks with this machine's and with producers', by these topics."""
    found: dict[str, str] = {}
    looked = 0
    for topic in topics:
        status = await admin.topics.status(topic)
        # All queues of a broker have its clock: the one that was written to last tells.
        latest: dict[str, QueueStatus] = {}
        for queue in sorted(status.queues, key=lambda each: each.last_stored_at or 0.0):
            if queue.messages:
                latest[queue.queue.broker] = queue
        for broker, queue in latest.items():
            looked += 1
            problem = await _skew(admin, queue.queue, queue.max_offset - 1, clock)
            if problem is not None:
                found.setdefault(broker, problem)
    return Skews(found, looked)


async def _skew(admin: AsyncAdmin, queue: Queue, offset: int, clock: Clock) -> str | None:
    page = await admin.messages.page(queue.topic, queues=(queue,), size=1, newest_first=True)
    for message in page.messages:
        # Asked for afterwards: what was stored meanwhile is not from the future.
        ahead = message.stored_at - clock.now()
        if ahead > TOLERANCE:
            return (
                f"the clock of broker {queue.broker} is {duration(ahead)} ahead of this machine's"
            )
        behind = message.born_at - message.stored_at
        if behind > TOLERANCE:
            return (
                f"the clock of broker {queue.broker} is {duration(behind)} behind that of a "
                f"producer of {queue.topic} (offset {offset})"
            )
    return None


class ClockWatch:
    """Looks at clocks from time to time."""

    def __init__(
        self, admin: AsyncAdmin, topics: Callable[[], Sequence[str]], clock: Clock
    ) -> None:
        """`topics` are those that were written to, the latest first."""
        self._admin = admin
        self._topics = topics
        self._clock = clock
        self.skews = Skews()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            topics = self._topics()[:_SAMPLED]
            if topics:
                await self.look(topics)
            await asyncio.sleep(EVERY if topics else 1.0)

    async def look(self, topics: Iterable[str]) -> None:
        """One look; what cannot be asked is left for the next one."""
        try:
            self.skews = await compare_clocks(self._admin, topics, self._clock)
        except OrbitError as error:
            log.debug("clocks cannot be compared: %s", error)
