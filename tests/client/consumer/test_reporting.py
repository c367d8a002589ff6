"""When progress is put by: regularly, and soon after a queue has nothing left to do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from orbitmq.client.consumer.progress import MemoryProgress, OffsetCommitter
from orbitmq.client.consumer.settings import PullSettings, RebalanceSettings
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.engine import Engine
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import quick_settings, running_engine
from tests.support.consumers import consumer_of, fill
from tests.support.consuming import received, until

QUEUES = [Queue("orders", "broker-a", number) for number in range(2)]
NEVER = 3600.0
DEADLINE = 30.0


class NotedProgress(MemoryProgress):
    """Says what it was asked to put by, and fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[set[Queue]] = []
        self.stores = 0
        self.failure: Exception | None = None

    async def persist(self, queues: Iterable[Queue]) -> None:
        wanted = list(queues)
        self.asked.append(set(wanted))
        await super().persist(wanted)

    async def store(self, changed: Mapping[Queue, int]) -> Mapping[Queue, Exception]:
        self.stores += 1
        if self.failure is not None:
            return dict.fromkeys(changed, self.failure)
        return await super().store(changed)


@pytest.fixture
async def engine():
    async with running_engine("127.0.0.1:1") as running:
        yield running


def owned_by(engine: Engine) -> dict[Queue, OwnedQueue]:
    now = engine.clock.monotonic()
    return {queue: OwnedQueue(queue, 0, now=now) for queue in QUEUES}


def reporting(
    engine: Engine, progress: NotedProgress, owned: Any, **times: float
) -> OffsetCommitter:
    given = {"interval": NEVER, "when_idle": 0.02} | times
    return OffsetCommitter(engine, "billing", progress, owned, **given)


async def test_a_queue_with_cached_messages_is_left_to_the_regular_report(engine):
    progress, owned = NotedProgress(), owned_by(engine)
    reports = reporting(engine, progress, owned, when_idle=0.02)
    for queue in QUEUES:
        progress.update(queue, 7)
    owned[QUEUES[0]].window.add([received(7)])

    reports.became_empty()

    await until(lambda: progress.kept)
    assert progress.asked[0] == {QUEUES[1]}
    assert progress.kept == {QUEUES[1]: 7}
    reports.stop()


class HandClock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


class Watched(dict[Queue, OwnedQueue]):
    """Counts how often somebody looks through the owned queues."""

    looks = 0

    def values(self) -> Any:
        self.looks += 1
        return super().values()


@dataclass
class Bench:
    """A `OffsetCommitter` whose time is in the hands of a test."""

    clock: HandClock
    progress: NotedProgress
    owned: Watched
    reports: OffsetCommitter

    async def consumed(self, offset: int, *, idle_for: float) -> None:
        """A handler finishes the last message of the first queue; then it is looked at."""
        queue, owned = QUEUES[0], self.owned
        self.progress.update(queue, offset)
        owned[queue].last_consumed = self.clock.time
        self.clock.time += idle_for
        before = owned.looks
        self.reports.became_empty()
        await until(lambda: owned.looks > before)
        for _ in range(20):
            # What the look began waits for nothing; it takes some turns of the loop.
            await asyncio.sleep(0)


@pytest.fixture
async def bench():
    clock = HandClock()
    async with Engine(quick_settings("127.0.0.1:1"), clock=clock) as engine:
        progress, owned = NotedProgress(), Watched(owned_by(engine))
        reports = reporting(engine, progress, owned, interval=5.0, when_idle=0.01)
        yield Bench(clock, progress, owned, reports)
        reports.stop()


async def test_a_queue_on_which_handlers_finish_all_the_time_is_not_reported_early(bench):
    del bench.owned[QUEUES[1]]
    for offset in range(1, 11):
        await bench.consumed(offset, idle_for=0.0)

    assert bench.progress.asked == []
    bench.clock.time += 0.02
    await until(lambda: bench.progress.kept == {QUEUES[0]: 10})
    assert bench.progress.stores == 1


async def test_a_queue_that_is_idle_again_and_again_is_reported_early_less_and_less(bench):
    reported_at: list[float] = []
    began = bench.clock.time
    for offset in range(1, 81):
        before = bench.progress.stores
        await bench.consumed(offset, idle_for=0.02)
        if bench.progress.stores > before:
            reported_at.append(bench.clock.time - began)
        bench.clock.time += 0.23  # four messages in a second, for 20 seconds

    pauses = [round(after - before) for before, after in itertools.pairwise(reported_at)]
    assert reported_at[0] < 1.0
    assert pauses[:4] == [1, 2, 4, 5]
    assert set(pauses[4:]) <= {5}


async def test_after_a_quiet_time_a_queue_is_reported_early_again(bench):
    for offset in range(1, 41):
        await bench.consumed(offset, idle_for=0.02)
        bench.clock.time += 0.48
    bench.clock.time += 60.0
    before = bench.progress.stores

    await bench.consumed(100, idle_for=0.02)
    await until(lambda: bench.progress.kept[QUEUES[0]] == 100)
    bench.clock.time += 1.1
    await bench.consumed(101, idle_for=0.02)
    await until(lambda: bench.progress.kept[QUEUES[0]] == 101)

    assert bench.progress.stores == before + 2


async def test_a_position_that_was_reset_can_be_read_back_before_the_next_one(engine):
    progress, owned = NotedProgress(), owned_by(engine)
    reports = reporting(engine, progress, owned)
    for queue in QUEUES:
        progress.update(queue, 7)
    monotonic = engine.clock.monotonic
    began = monotonic()

    reports.let_be_seen([QUEUES[0]])
    reports.became_empty()

    await until(lambda: progress.kept == {QUEUES[1]: 7})
    await until(lambda: len(progress.kept) == 2)
    assert monotonic() - began >= 1.0
    reports.stop()


async def test_trouble_is_told_once_with_the_group_and_its_end_too(engine, caplog):
    caplog.set_level("INFO", logger="orbitmq.client.consumer.progress")
    progress, owned = NotedProgress(), owned_by(engine)
    progress.failure = BrokerUnavailable("broker-a", "gone")
    reports = reporting(engine, progress, owned, interval=0.01)
    progress.update(QUEUES[0], 7)
    reports.start()
    await until(lambda: progress.stores > 3)
    progress.failure = None
    await until(lambda: progress.kept)
    await until(lambda: any("is over" in record.getMessage() for record in caplog.records))
    reports.stop()

    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert "group billing cannot be committed" in told[0]


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "in order"])
async def test_brokers_know_that_all_is_consumed_without_the_regular_report(ordered):
    seldom = RebalanceSettings(persist=NEVER)
    # Pulls carry progress as well, when they begin: none begins for want of messages meanwhile.
    held = PullSettings(hold=2 * DEADLINE, timeout=3 * DEADLINE)
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic("orders", queues=4)
        consumer = consumer_of(cluster, "billing", rebalance=seldom, pull=held, ordered=ordered)
        consumer.on("orders")(lambda message: None)
        async with consumer:
            await fill(cluster, "orders", 50)
            await cluster.until_consumed("billing", "orders", timeout=DEADLINE)
            await fill(cluster, "orders", 50)
            await cluster.until_consumed("billing", "orders", timeout=DEADLINE)
