"""Every scenario, with the share of a run's time that it gets."""

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


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario and how much of it there is."""

    name: str
    rows: str  #: of reliability.md
    about: str
    run: Callable[[Stage, Effort], list[Figure]]
    share: float  #: of the time that all scenarios have
    least: float = 5.0  #: seconds
    most: float = float("inf")

    def seconds(self, in_all: float) -> float:
        whole = sum(each.share for each in SCENARIOS)
        return min(self.most, max(self.least, in_all * self.share / whole))


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("kill-sync", "R1 R5", "kill -9 of the broker, sync flush", killing.kill_sync, 6, 20),
    Scenario(
        "kill-async", "R2 R5", "kill -9 of the broker, async flush", killing.kill_async, 3, 20
    ),
    Scenario(
        "consumers", "R5 R6", "consumers start, stop, die, pause", consumers.consumer_chaos, 5, 20
    ),
    Scenario("orderly", "R7", "order locks, pauses, wrong dates", ordering.orderly, 4, 20),
    Scenario(
        "orderly-real",
        "R7",
        "the same with locks of 30 and 60 s",
        ordering.orderly_in_real_time,
        4,
        200,
    ),
    Scenario("network", "R5 R8", "delay, loss, partition, half-open", network.network, 5, 40),
    Scenario(
        "rebalance", "R9", "members and queues come and go", rebalancing.rebalance, 2, 20, 300
    ),
    Scenario("rebalance-unnoticed", "R9", "without notices", rebalancing.without_notice, 1, 5, 30),
    Scenario("delayed", "R13", "delayed messages across kill -9", later.delayed, 3, 15, 210),
    Scenario("transactions", "R14", "crashes at every step", transactions.transactions, 3, 10),
    Scenario("disk-full", "R19", "writes fail with ENOSPC", disks.disk_full, 0.5, 5, 30),
    Scenario("disk-tiny", "R19", "a really full file system", disks.tiny_disk, 0.5, 5, 30),
    Scenario("disk-read-only", "R19", "writes fail with EROFS", disks.disk_read_only, 0.5, 5, 30),
    Scenario("fsync", "R19", "fdatasync fails", disks.failing_sync, 0.5, 5, 30),
    Scenario("handles", "R19", "too few file handles", disks.few_handles, 0.5, 5, 30),
    Scenario("soak", "R20", "load with rolling restarts", soak.soak, 5, 30),
    Scenario("backlog", "R21", "a large backlog, cold start", backlog.backlog, 3, 15, 240),
    Scenario("crowd", "R23", "topics, groups, connections", crowd.crowd, 1, 60, 90),
)
