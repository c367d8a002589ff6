"""How long handlers take and how often they fail, by the account of the consumers themselves.

A broker does not know: it is asked to pass the question on to each consumer, which may be slow to
answer or say nothing. So this happens beside the looks at the cluster, a few consumers at a time.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from orbitmq.client.admin import AsyncAdmin, RunningInfo
from orbitmq.client.admin.findings import retries_for_ever
from orbitmq.client.names import is_retry_topic
from orbitmq.console.rotation import Rotation
from orbitmq.errors import OrbitError

log = logging.getLogger(__name__)

#: Consumers of one group that are asked; all of a group do the same work.
MOST_MEMBERS = 8
#: Seconds that a consumer may take for its answer.
TIMEOUT = 3.0

#: The client ids of the consumers of each group.
Clients = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class HandlerTimes:
    """The handlers of a group now."""

    #: Seconds for a message: of the consumer in the middle, and of the slowest one.
    median: float
    slowest: float
    #: Messages per second that fail, of all that were asked.
    failed_rate: float


class Handlers:
    """Asks consumers in turn."""

    def __init__(
        self, admin: AsyncAdmin, clients: Callable[[], Clients], *, budget: int, every: float
    ) -> None:
        self._admin = admin
        self._clients = clients
        self._every = every
        self._turn = Rotation(budget)
        self.times: dict[str, HandlerTimes] = {}
        #: What is wrong with how consumers are set up, in words, by group.
        self.findings: dict[str, str] = {}

    async def run(self) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(self._every)

    async def ask(self) -> None:
        """Ask the consumers of some groups."""
        clients = dict(self._clients())
        for group in self._turn.next(clients):
            asked = (self._info(group, each) for each in clients[group][:MOST_MEMBERS])
            infos = [info for info in await asyncio.gather(*asked) if info is not None]
            self.times.pop(group, None)
            self.findings.pop(group, None)
            if found := times_of(infos):
                self.times[group] = found
            if forever := next(filter(retries_for_ever, infos), None):
                self.findings[group] = (
                    f"{forever.client_id} of group {group!r} consumes in order and retries for "
                    "ever: one message that cannot be processed stops its queue"
                )
        for known in (self.times, self.findings):
            for gone in known.keys() - clients.keys():
                del known[gone]

    async def _info(self, group: str, client_id: str) -> RunningInfo | None:
        try:
            async with asyncio.timeout(TIMEOUT):
                return await self._admin.consumers.running_info(group, client_id)
        except (OrbitError, TimeoutError) as error:
            log.debug("a consumer does not tell: %s", error)
            return None


def times_of(infos: Iterable[RunningInfo]) -> HandlerTimes | None:
    """The handlers of a group out of what its consumers say; None when none has worked."""
    working = [
        topic
        for info in infos
        for name, topic in info.topics.items()
        if not is_retry_topic(name) and topic.ok_rate + topic.failed_rate > 0
    ]
    if not working:
        return None
    times = [each.consume_time for each in working]
    failed = sum(each.failed_rate for each in working)
    return HandlerTimes(statistics.median(times), max(times), failed)
