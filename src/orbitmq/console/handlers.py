"""How long handlers take, how often they fail, and what is wrong among members, by their account.

A broker does not know: it is asked to pass the question on to each consumer, which may be slow to
answer or say nothing. So this happens beside the looks at the cluster, a few groups at a time.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from orbitmq.client.admin import AsyncAdmin, Finding, RunningInfo
from orbitmq.client.admin.findings import (
    different_subscriptions,
    queue_findings,
    retries_for_ever,
)
from orbitmq.client.calltimes import CallTimes
from orbitmq.client.names import is_retry_topic
from orbitmq.clock import Clock
from orbitmq.console.checks.balance import UNEVEN_AFTER, UNEVEN_LOOKS, Uneven, uneven_topics
from orbitmq.console.checks.groups import Inside
from orbitmq.console.rotation import Rotation
from orbitmq.errors import OrbitError

log = logging.getLogger(__name__)

#: Consumers of one group that are asked; all of a group do the same work.
MOST_MEMBERS = 8
#: Seconds that a consumer may take for its answer, and brokers for theirs about a group.
TIMEOUT = 3.0
#: Groups that are asked at the same time, and consumers.
_AT_ONCE = 4
_CONSUMERS_AT_ONCE = 32

#: The client ids of the consumers of each group.
Clients = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerTimes:
    """The handlers of a group now; rates are those of all members that were asked, together."""

    #: Mean seconds of a call: of the member in the middle, and of the slowest one.
    median: float
    slowest: float
    #: Messages per second that went well, that failed, and that were pulled.
    ok_rate: float
    failed_rate: float
    pull_rate: float
    #: Mean seconds from asking a broker for messages to having some, of the slowest member.
    pull_time: float
    #: What so many of 100 calls took at most in the last minute, of all members together that tell.
    #: None when none does: consumers with other clients know means only.
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    longest: float | None = None


@dataclass(frozen=True, slots=True)
class _Lasting:
    """Since when something was the same in every look, and in how many."""

    since: float
    looks: int = 0

    def seen_again(self) -> _Lasting:
        return _Lasting(self.since, self.looks + 1)


class Handlers:
    """Asks consumers in turn."""

    def __init__(
        self,
        admin: AsyncAdmin,
        clients: Callable[[], Clients],
        behind: Callable[[], Collection[str]],
        clock: Clock,
        *,
        budget: int,
        members: int = MOST_MEMBERS,
        every: float = 5.0,
        uneven_after: float = UNEVEN_AFTER,
    ) -> None:
        """`behind` names the groups that messages wait for: only their queues can be stuck.

        `members` is how many consumers of a group are asked, each once in its turn. `uneven_after`
        is for how many seconds queues must be shared unevenly before that is worth a word.
        """
        self._admin = admin
        self._clients = clients
        self._behind = behind
        self._clock = clock
        self._members = members
        self._every = every
        self._uneven_after = uneven_after
        self._free = asyncio.Semaphore(_CONSUMERS_AT_ONCE)
        self._turn = Rotation(budget)
        self.times: dict[str, HandlerTimes] = {}
        #: What is wrong inside of groups.
        self.inside: dict[str, Inside] = {}
        #: Topics of groups that are shared unevenly, each in the same way since when.
        self.uneven: dict[str, dict[Uneven, _Lasting]] = {}

    async def run(self) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(self._every)

    async def ask(self, only: Collection[str] | None = None) -> None:
        """Ask the consumers of some groups: of those whose turn it is, or of `only`."""
        clients = dict(self._clients())
        behind = frozenset(self._behind())
        free = asyncio.Semaphore(_AT_ONCE)

        async def ask(group: str) -> None:
            async with free:
                await self._ask(group, clients[group], is_behind=group in behind)

        turn = self._turn.next(clients) if only is None else [*clients.keys() & set(only)]
        await asyncio.gather(*map(ask, turn))
        for known in (self.times, self.inside, self.uneven):
            for gone in known.keys() - clients.keys():
                known.pop(gone)

    async def _ask(self, group: str, clients: Sequence[str], *, is_behind: bool) -> None:
        asked = (self._info(group, each) for each in clients[: self._members])
        infos = [info for info in await asyncio.gather(*asked) if info is not None]
        running = {info.client_id: info for info in infos}
        # What brokers say of a group, and its connections, the looks at the cluster have.
        findings = different_subscriptions(group, running)
        if is_behind:
            findings += await self._stuck(group, running)
        endless = next(filter(retries_for_ever, infos), None)
        self.inside[group] = Inside(
            findings,
            None if endless is None else endless.client_id,
            await self._uneven(group, running),
        )
        self.times.pop(group, None)
        if found := times_of(infos):
            self.times[group] = found

    async def _info(self, group: str, client_id: str) -> RunningInfo | None:
        try:
            async with self._free, asyncio.timeout(TIMEOUT):
                return await self._admin.consumers.running_info(group, client_id)
        except (OrbitError, TimeoutError) as error:
            log.debug("a consumer does not tell: %s", error)
            return None

    async def _uneven(self, group: str, running: Mapping[str, RunningInfo]) -> tuple[Uneven, ...]:
        """Topics that have been shared unevenly for as long as it takes to be sure."""
        found = list(uneven_topics(running))
        if not found or not await self._are_all(group, running):
            self.uneven.pop(group, None)
            return ()
        now, before = self._clock.monotonic(), self.uneven.get(group, {})
        lasting = {each: before.get(each, _Lasting(now)).seen_again() for each in found}
        self.uneven[group] = lasting
        return tuple(
            each
            for each, so_far in lasting.items()
            if so_far.looks >= UNEVEN_LOOKS and now - so_far.since >= self._uneven_after
        )

    async def _are_all(self, group: str, running: Mapping[str, RunningInfo]) -> bool:
        """Whether these are all members, and share queues at all."""
        try:
            async with asyncio.timeout(TIMEOUT):
                members, _ = await self._admin.consumers.look(group)
        except (OrbitError, TimeoutError) as error:
            log.debug("a group cannot be looked into: %s", error)
            return False
        # Asked for afterwards: who has come meanwhile may own what seems to be nobody's.
        return (
            members is not None
            and running.keys() >= set(members.client_ids)
            and (members.model, members.consume_type) == ("clustering", "push")
        )

    async def _stuck(self, group: str, running: Mapping[str, RunningInfo]) -> tuple[Finding, ...]:
        """Queues that nobody has or works on.

        That is known only when every member has said what it owns, which is what members that are
        pushed to do.
        """
        if not await self._are_all(group, running):
            return ()
        try:
            async with asyncio.timeout(TIMEOUT):
                progress = await self._admin.groups.progress(group, owners=False)
        except (OrbitError, TimeoutError) as error:
            # Deleted meanwhile, or its brokers do not answer, which is told elsewhere.
            log.debug("a group cannot be looked into: %s", error)
            return ()
        return queue_findings(progress, running, self._clock.now())


def times_of(infos: Iterable[RunningInfo]) -> HandlerTimes | None:
    """The handlers of a group out of what its consumers say; None when none has worked."""
    topics = [each for info in infos for each in info.topics.items()]
    working = [each for each in topics if each[1].ok_rate + each[1].failed_rate > 0]
    if not working:
        return None
    # Messages that failed before are rare, and tell little about what a handler usually takes.
    usual = [each for name, each in working if not is_retry_topic(name)]
    chosen = usual or [each for _, each in working]
    times = [each.consume_time for each in chosen]
    told = [each.consume_times for each in chosen if each.consume_times is not None]
    calls = CallTimes.together(told)
    return HandlerTimes(
        median=statistics.median(times),
        slowest=max(times),
        ok_rate=sum(each.ok_rate for _, each in working),
        failed_rate=sum(each.failed_rate for _, each in working),
        pull_rate=sum(each.pull_rate for _, each in topics),
        pull_time=max(each.pull_time for _, each in topics),
        p50=calls.p50,
        p95=calls.p95,
        p99=calls.p99,
        longest=calls.longest,
    )
