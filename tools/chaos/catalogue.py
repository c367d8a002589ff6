"""Every scenario, and how long its nemesis is at work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.chaos.effort import Effort
from tools.chaos.figures import Figure
from tools.chaos.programs import Stage
from tools.chaos.scenarios import (
    backlog,
    consumers,
    crowd,
    disks,
    killing,
    later,
    network,
    ordering,
    rebalancing,
    soak,
    transactions,
)

#: Minutes that a run takes when nothing else is asked for; amounts are meant for it, about.
USUAL_MINUTES = 60.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario and how much of it there is."""

    name: str
    rows: str  #: of the list of reliability tests
    about: str
    run: Callable[[Stage, Effort], list[Figure]]
    usual: float  #: seconds of faults at scale 1
    least: float = 5.0  #: with which it still says something
    beside: float = 10.0  #: seconds to set up, to drain and to judge, about
    calm: Callable[[float], float] = lambda _: 0.0  #: seconds between so many seconds of faults

    def seconds(self, scale: float) -> float:
        """How long its faults go on."""
        return max(self.least, self.usual * scale)

    def takes(self, faults: float) -> float:
        """Seconds that all of it takes with so many seconds of faults, about."""
        return faults + self.calm(faults) + self.beside


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "kill-sync",
        "R1 R5",
        "kill -9 of the broker, sync flush",
        killing.kill_sync,
        180,
        20,
        calm=killing.calm_beside,
    ),
    Scenario(
        "kill-async",
        "R2 R5",
        "kill -9 of the broker, async flush",
        killing.kill_async,
        100,
        20,
        calm=killing.calm_beside,
    ),
    Scenario(
        "consumers",
        "R5 R6",
        "consumers start, stop, die, pause",
        consumers.consumer_chaos,
        110,
        25,
        calm=lambda _: consumers.CALM,
    ),
    Scenario("orderly", "R5 R7", "order locks, pauses, wrong dates", ordering.orderly, 70, 20),
    Scenario(
        "orderly-real",
        "R5 R7",
        "the same with locks of 30 and 60 s",
        ordering.orderly_in_real_time,
        160,
        100,
        45,
    ),
    Scenario("network", "R5 R8", "delay, loss, partition, half-open", network.network, 100, 35, 10),
    Scenario("rebalance", "R9", "members and queues come and go", rebalancing.rebalance, 40, 5, 8),
    Scenario("rebalance-unnoticed", "R9", "without notices", rebalancing.without_notice, 5, 5, 40),
    Scenario("delayed", "R5 R13", "delayed messages across kill -9", later.delayed, 100, 60, 20),
    Scenario("transactions", "R5 R14", "crashes at every step", transactions.transactions, 60, 10),
    Scenario("disk-full", "R5 R19", "writes fail with ENOSPC", disks.disk_full, 10, 5, 3),
    Scenario("disk-tiny", "R5 R19", "a really full file system", disks.tiny_disk, 10, 5, 3),
    Scenario("disk-read-only", "R5 R19", "writes fail with EROFS", disks.disk_read_only, 10, 5, 3),
    Scenario("fsync", "R5 R19", "fdatasync fails", disks.failing_sync, 10, 5, 3),
    Scenario("handles", "R5 R19", "too few file handles", disks.few_handles, 10, 5, 3),
    Scenario("soak", "R5 R20", "load with rolling restarts", soak.soak, 120, 60),
    Scenario("backlog", "R21", "a large backlog, cold start", backlog.backlog, 220, 30, 5),
    Scenario("crowd", "R23", "topics, groups, connections", crowd.crowd, 10, 10, 0),
)
