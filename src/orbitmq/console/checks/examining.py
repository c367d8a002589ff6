"""One thorough look at a cluster: for those who ask once, and want to know about everything.

It looks as the console does, only without a budget, and twice if somebody seems to stand still.
Dead letters are an exception: those of the last hour are looked up, which are a fault, and not all
of many.
It has no history: what takes longer to show than its watch is not judged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from orbitmq.client.admin import TopicKind
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.errors import GroupNotFound
from orbitmq.client.engine import Engine
from orbitmq.clock import Clock
from orbitmq.console.checks.balance import UNEVEN_AFTER, UNEVEN_LOOKS
from orbitmq.console.checks.clocks import compare_clocks
from orbitmq.console.checks.seen import Seen
from orbitmq.console.collecting import Collector
from orbitmq.console.handlers import Handlers, HandlerTimes
from orbitmq.console.rates import REPORT_INTERVAL
from orbitmq.console.samples import STALLED_AFTER, GroupSample, Snapshot
from orbitmq.console.settings import Budget
from orbitmq.console.tables import BrokerTables

#: Seconds without progress after which a group is called stalled here: two reports of its members
#: would have told of some.
PATIENCE = 2 * REPORT_INTERVAL
#: Topics whose latest messages are looked at for clocks.
_SAMPLED = 20
_EVERYTHING = 1_000_000
#: Dead letters of all groups together that are looked up, to know whether they were sent again.
#: Each is some questions to every broker: more would take longer than all the rest.
_LETTERS = 300


@dataclass(frozen=True, slots=True)
class Examination:
    """What was seen, and how thoroughly."""

    seen: Seen
    #: Queues whose latest message was looked at.
    queues: int
    #: Topics whose latest message could not be read, and why.
    left_out: Mapping[str, str] = field(hash=False)
    #: Groups that seemed to stand still, and for how many seconds they were looked at.
    watched: frozenset[str]
    seconds: float
    #: Groups whose queues seemed to be shared unevenly.
    uneven: frozenset[str] = frozenset()


async def examine(
    engine: Engine,
    admin: AsyncAdmin,
    clock: Clock,
    *,
    watch: float,
    only: Collection[str] = (),
    patience: float = PATIENCE,
    uneven_after: float = UNEVEN_AFTER,
) -> Examination:
    """Look at everything; `watch` is how long groups that seem to stand still are looked at.

    Who has watched for less than `patience` calls no group stalled, for less than `rates.WINDOW`
    none falling behind, and who does not watch for `uneven_after` none unbalanced. `only` names the
    groups to look at, all by default. Raises `GroupNotFound` for one that no broker knows, and
    `OrbitError` when no name server answers.
    """
    budget = Budget(
        ages=_EVERYTHING,
        topics=_EVERYTHING,
        members=_EVERYTHING,
        dead_letters=_EVERYTHING,
        resent=_EVERYTHING,
        letters=_LETTERS,
        older_letters=False,
    )
    collector = Collector(admin, BrokerTables(engine), budget, clock, patience=patience)
    snapshot = _chosen(await collector.look(), only)
    _check_known(snapshot, only)
    clients = {
        group: found for group, found in collector.clients.items() if group in snapshot.groups
    }
    behind = [name for name, group in snapshot.groups.items() if group.lag]
    handlers = Handlers(
        admin,
        lambda: clients,
        lambda: behind,
        clock,
        budget=_EVERYTHING,
        members=_EVERYTHING,
        uneven_after=uneven_after,
    )
    began = clock.monotonic()
    await handlers.ask()
    skews = await compare_clocks(admin, _sampled(snapshot), clock)
    still = frozenset(name for name, group in snapshot.groups.items() if _seems_still(group))
    uneven = frozenset(handlers.uneven)
    if uneven and watch >= uneven_after:
        # What members said last began when they were asked, and not before.
        for _ in range(UNEVEN_LOOKS):
            await asyncio.sleep(watch / UNEVEN_LOOKS)
            await handlers.ask(uneven)
    elif still:
        await asyncio.sleep(max(0.0, watch - (clock.monotonic() - began)))
    if still:
        snapshot = _chosen(await collector.look(resent=False), only)
    seen = Seen(
        snapshot=_patient(snapshot, handlers.times),
        now=clock.now(),
        inside=handlers.inside,
        skews=skews.found,
        only=frozenset(only),
    )
    seconds = clock.monotonic() - began
    return Examination(seen, skews.looked, skews.left_out, still, seconds, uneven)


def _check_known(snapshot: Snapshot, only: Collection[str]) -> None:
    if snapshot.unreachable:
        # Those who do not answer may know it.
        return
    for name in sorted(set(only) - snapshot.groups.keys()):
        raise GroupNotFound(name)


def _seems_still(group: GroupSample) -> bool:
    return bool(group.members) and group.lag > 0 and (group.lag_seconds or 0.0) >= STALLED_AFTER


def _patient(snapshot: Snapshot, times: Mapping[str, HandlerTimes]) -> Snapshot:
    """Whose members have finished something lately is slow: judged with a console's patience."""
    groups = {
        name: replace(group, patience=STALLED_AFTER)
        if name in times and times[name].ok_rate > 0
        else group
        for name, group in snapshot.groups.items()
    }
    return replace(snapshot, groups=groups)


def _chosen(snapshot: Snapshot, only: Collection[str]) -> Snapshot:
    if not only:
        return snapshot
    groups = {name: group for name, group in snapshot.groups.items() if name in only}
    return replace(snapshot, groups=groups)


def _sampled(snapshot: Snapshot) -> list[str]:
    topics = (each.topic for each in snapshot.topics.values())
    return [each.name for each in topics if each.kind is not TopicKind.SYSTEM][:_SAMPLED]
