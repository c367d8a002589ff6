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
#: And how many it tries until that many could be read.
_TRIED = 20


@dataclass(frozen=True, slots=True)
class Skews:
    """What messages tell about clocks."""

    #: What is wrong, by broker.
    found: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: Queues whose latest message was looked at.
    looked: int = 0
    #: Topics that could not be read, and why.
    left_out: Mapping[str, str] = field(default_factory=dict, hash=False)


async def compare_clocks(
    admin: AsyncAdmin, topics: Iterable[str], clock: Clock, *, enough: int | None = None
) -> Skews:
    """Compare brokers' clocks with this machine's and with producers', by these topics.

    `enough` is how many of them need to be read, all by default. One that cannot be (it may not be
    read, or was deleted meanwhile) is left out.
    """
    found: dict[str, str] = {}
    left_out: dict[str, str] = {}
    looked = read = 0
    for topic in topics:
        if read == enough:
            break
        try:
            for broker, queue in (await _latest(admin, topic)).items():
                problem = await _skew(admin, queue.queue, queue.max_offset - 1, clock)
                looked += 1
                if problem is not None:
                    found.setdefault(broker, problem)
        except OrbitError as error:
            left_out[topic] = str(error)
        else:
            read += 1
    return Skews(found, looked, left_out)


async def _latest(admin: AsyncAdmin, topic: str) -> dict[str, QueueStatus]:
    """The queue of each broker that was written to last: all of a broker have one clock."""
    status = await admin.topics.status(topic)
    written = sorted(status.queues, key=lambda each: each.last_stored_at or 0.0)
    return {queue.queue.broker: queue for queue in written if queue.messages}


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
            topics = self._topics()[:_TRIED]
            if topics:
                await self.look(topics)
            await asyncio.sleep(EVERY if topics else 1.0)

    async def look(self, topics: Iterable[str]) -> None:
        """One look; topics that cannot be read are left out, and named when they change."""
        before = self.skews.left_out.keys()
        self.skews = await compare_clocks(self._admin, topics, self._clock, enough=_SAMPLED)
        for topic in self.skews.left_out.keys() - before:
            reason = self.skews.left_out[topic]
            log.warning("clocks are compared without topic %s: %s", topic, reason)
