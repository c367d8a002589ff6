"""One thorough look at a cluster: for those who ask once, and want to know about everything.

It looks as the console does, only without a budget, and twice if somebody seems to stand still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, replace

from orbitmq.client.admin import TopicKind
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.engine import Engine
from orbitmq.clock import Clock
from orbitmq.console.checks.clocks import compare_clocks
from orbitmq.console.checks.seen import Seen
from orbitmq.console.collecting import Collector
from orbitmq.console.handlers import Handlers
from orbitmq.console.pipelines import Pipeline
from orbitmq.console.samples import STALLED_AFTER, GroupSample, Snapshot
from orbitmq.console.settings import Budget
from orbitmq.console.tables import BrokerTables

#: Within less time a group that works may finish nothing.
SHORTEST_WATCH = 1.0
#: Topics whose latest messages are looked at for clocks.
_SAMPLED = 20
_EVERYTHING = 1_000_000


@dataclass(frozen=True, slots=True)
class Examination:
    """What was seen, and how thoroughly."""

    seen: Seen
    #: Queues whose latest message was looked at.
    queues: int


async def examine(
    engine: Engine,
    admin: AsyncAdmin,
    clock: Clock,
    *,
    watch: float,
    only: Collection[str] = (),
    pipelines: tuple[Pipeline, ...] = (),
) -> Examination:
    """Look at everything; `watch` is how long groups that seem to stand still are looked at.

    `only` names the groups to look at, all by default. Raises `OrbitError` when no name server
    answers.
    """
    budget = Budget(
        ages=_EVERYTHING, topics=_EVERYTHING, members=_EVERYTHING, dead_letters=_EVERYTHING
    )
    collector = Collector(admin, BrokerTables(engine), budget, clock, patience=SHORTEST_WATCH)
    snapshot = _chosen(await collector.look(), only)
    clients = {
        group: found for group, found in collector.clients.items() if group in snapshot.groups
    }
    handlers = Handlers(admin, lambda: clients, budget=_EVERYTHING)
    began = clock.monotonic()
    await handlers.ask()
    skews = await compare_clocks(admin, _sampled(snapshot), clock)
    if any(map(_seems_still, snapshot.groups.values())):
        await asyncio.sleep(max(0.0, watch - (clock.monotonic() - began)))
        snapshot = _chosen(await collector.look(), only)
    seen = Seen(
        snapshot=snapshot,
        now=clock.now(),
        inside=handlers.inside,
        skews=skews.found,
        pipelines=pipelines,
    )
    return Examination(seen, skews.looked)


def _seems_still(group: GroupSample) -> bool:
    return bool(group.members) and group.lag > 0 and (group.lag_seconds or 0.0) >= STALLED_AFTER


def _chosen(snapshot: Snapshot, only: Collection[str]) -> Snapshot:
    if not only:
        return snapshot
    groups = {name: group for name, group in snapshot.groups.items() if name in only}
    return replace(snapshot, groups=groups)


def _sampled(snapshot: Snapshot) -> list[str]:
    topics = (each.topic for each in snapshot.topics.values())
    return [each.name for each in topics if each.kind is not TopicKind.SYSTEM][:_SAMPLED]
