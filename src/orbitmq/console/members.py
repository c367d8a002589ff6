"""What the members of groups report: how long handlers take, and what is wrong among them.

A broker passes the question on to each consumer, which may answer slowly or not at all. So members
are polled beside the looks at the cluster, a few groups at a time.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.groups import different_subscriptions, queue_findings, retries_for_ever
from orbitmq.client.admin.members import Finding, RunningInfo
from orbitmq.client.consumer.statistics import CallTimes
from orbitmq.clock import Clock
from orbitmq.console.collect import Poller
from orbitmq.errors import OrbitError
from orbitmq.names import is_retry_topic

log = logging.getLogger(__name__)

#: Consumers of one group that are polled; all of a group do the same work.
MOST_MEMBERS = 8
#: Seconds for the answer of a consumer, and for those of brokers about its group.
TIMEOUT = 3.0
#: Groups that are polled at the same time, and consumers.
_CONCURRENT_GROUPS = 4
_CONCURRENT_CONSUMERS = 32
#: Seconds that queues must be shared unevenly. Members that come and go are noticed in 20 s, but
#: the queues of an orderly consumer that died are taken over only when its locks are 60 s old.
UNEVEN_AFTER = 90.0
#: Looks in which all members must have had the same numbers of queues, the first and the last
#: included: a group that rebalances meanwhile is not stuck.
UNEVEN_LOOKS = 3
#: The property that names the allocation strategy; Java's clients put a class name there.
_STRATEGY = "allocateMessageQueueStrategy"
_EVEN = ("avg", "averagely")
_BY_ROOM = ("machine_room", "machineroom")

#: The client ids of the consumers of each group.
Clients = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerTimes:
    """The handlers of a group; rates are those of all polled members together."""

    #: Mean seconds of a call: of the median member, and of the slowest one.
    median: float
    slowest: float
    #: Messages per second that went well, that failed, and that were pulled.
    ok_rate: float
    failed_rate: float
    pull_rate: float
    #: Mean seconds from asking a broker for messages to having some, of the slowest member.
    pull_time: float
    #: Percentiles of the last minute, of all members that report them; None: none does. Consumers
    #: with other clients report means only.
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    longest: float | None = None


@dataclass(frozen=True, slots=True)
class _Lasting:
    """Since when something was the same in every look, and in how many looks."""

    since: float
    looks: int = 0

    def seen_again(self) -> _Lasting:
        return _Lasting(self.since, self.looks + 1)


class MemberPoller:
    """Polls the consumers of groups in turn."""

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
        """`behind` names the groups with lag: only their queues can be stuck.

        `members` consumers of a group are polled in its turn. Queues that are shared unevenly are
        reported after `uneven_after` seconds.
        """
        self._admin = admin
        self._clients = clients
        self._behind = behind
        self._clock = clock
        self._members = members
        self._every = every
        self._uneven_after = uneven_after
        self._free = asyncio.Semaphore(_CONCURRENT_CONSUMERS)
        self._turns: Poller[str, None] = Poller(budget)
        self.times: dict[str, HandlerTimes] = {}
        #: What is wrong among the members of a group.
        self.findings: dict[str, MemberFindings] = {}
        #: Topics of groups that are shared unevenly, and since when in the same way.
        self.uneven: dict[str, dict[Uneven, _Lasting]] = {}

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._every)

    async def poll(self, only: Collection[str] | None = None) -> None:
        """Poll the consumers of the groups whose turn it is, or of `only`."""
        clients = dict(self._clients())
        behind = frozenset(self._behind())
        free = asyncio.Semaphore(_CONCURRENT_GROUPS)

        async def one(group: str) -> None:
            async with free:
                await self._poll(group, clients[group], is_behind=group in behind)

        turn = self._turns.choose(clients) if only is None else [*clients.keys() & set(only)]
        await asyncio.gather(*map(one, turn))
        for known in (self.times, self.findings, self.uneven):
            for gone in known.keys() - clients.keys():
                known.pop(gone)

    async def _poll(self, group: str, clients: Sequence[str], *, is_behind: bool) -> None:
        asked = (self._info(group, each) for each in clients[: self._members])
        infos = [info for info in await asyncio.gather(*asked) if info is not None]
        running = {info.client_id: info for info in infos}
        # What brokers report about a group, and its connections, is part of a look.
        findings = different_subscriptions(group, running)
        if is_behind:
            findings += await self._stuck(group, running)
        endless = next(filter(retries_for_ever, infos), None)
        self.findings[group] = MemberFindings(
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
            log.debug("a consumer does not answer: %s", error)
            return None

    async def _uneven(self, group: str, running: Mapping[str, RunningInfo]) -> tuple[Uneven, ...]:
        """Topics that have been shared unevenly for long enough."""
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
        """Whether these are all members, and of a group that shares queues."""
        try:
            async with asyncio.timeout(TIMEOUT):
                members, _ = await self._admin.consumers.look(group)
        except (OrbitError, TimeoutError) as error:
            log.debug("a group cannot be looked into: %s", error)
            return False
        # Asked afterwards: a member that joined meanwhile may own what seems to have no owner.
        return (
            members is not None
            and running.keys() >= set(members.client_ids)
            and (members.model, members.consume_type) == ("clustering", "push")
        )

    async def _stuck(self, group: str, running: Mapping[str, RunningInfo]) -> tuple[Finding, ...]:
        """Queues without an owner, or whose owner does not pull.

        Known only when all members have reported what they own, which push consumers do.
        """
        if not await self._are_all(group, running):
            return ()
        try:
            async with asyncio.timeout(TIMEOUT):
                progress = await self._admin.groups.progress(group, owners=False)
        except (OrbitError, TimeoutError) as error:
            # Deleted meanwhile, or its brokers do not answer, which is a fault of its own.
            log.debug("a group cannot be looked into: %s", error)
            return ()
        return queue_findings(progress, running, self._clock.now())


def times_of(infos: Iterable[RunningInfo]) -> HandlerTimes | None:
    """The handlers of a group by the reports of its consumers; None: none has worked."""
    topics = [each for info in infos for each in info.topics.items()]
    working = [each for each in topics if each[1].ok_rate + each[1].failed_rate > 0]
    if not working:
        return None
    # Retried messages are rare and say little about the usual time of a handler.
    usual = [each for name, each in working if not is_retry_topic(name)]
    chosen = usual or [each for _, each in working]
    times = [each.consume_time for each in chosen]
    reported = [each.consume_times for each in chosen if each.consume_times is not None]
    calls = CallTimes.together(reported)
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


@dataclass(frozen=True, slots=True)
class MemberFindings:
    """What is wrong with a group by the reports of its members."""

    findings: tuple[Finding, ...] = ()
    #: An orderly member that retries without a limit.
    endless: str | None = None
    #: Topics whose queues have not been shared evenly for some time.
    uneven: tuple[Uneven, ...] = ()


@dataclass(frozen=True, slots=True)
class Uneven:
    """A topic whose queues are not shared evenly."""

    topic: str
    #: How many queues each member has, those with the most first.
    counts: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """`client-1 has 4 of its queues and client-2 has none`"""
        (most, many), (least, few) = self.counts[0], self.counts[-1]
        return f"{most} has {many} of its queues and {least} has {few or 'none'}"


def uneven_topics(running: Mapping[str, RunningInfo]) -> Iterator[Uneven]:
    """The topics of a group that are shared unevenly, by the reports of all its members.

    The usual strategies give every member as many queues as any other, or one less. A difference of
    two shows that members see different groups, use different strategies, or keep queues too long.
    Strategies that are uneven on purpose (hash, machine room, by hand) are not judged.
    """
    if any(_is_uneven_on_purpose(info) for info in running.values()):
        return
    topics = {each.topic for info in running.values() for each in info.subscriptions}
    for topic in sorted(topics):
        if is_retry_topic(topic):
            continue
        counts = {
            client_id: sum(each.queue.topic == topic for each in info.queues if not each.is_dropped)
            for client_id, info in running.items()
            if any(each.topic == topic for each in info.subscriptions)
        }
        if max(counts.values()) - min(counts.values()) > 1:
            ranked = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
            yield Uneven(topic, tuple(ranked))


def _is_uneven_on_purpose(info: RunningInfo) -> bool:
    # Java's default prints an object: `org.apache…AllocateMessageQueueAveragely@1b2c`.
    said = info.properties.get(_STRATEGY, "").partition("@")[0].lower()
    is_even = any(word in said for word in _EVEN) and not any(word in said for word in _BY_ROOM)
    return bool(said) and not is_even
