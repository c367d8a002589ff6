"""When progress is put by: regularly, and soon after a queue has nothing left to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import pytest

from orbitmq.client.consumer.owned import OwnedQueue
from orbitmq.client.consumer.progress import MemoryProgress
from orbitmq.client.consumer.rebalancesettings import RebalanceSettings
from orbitmq.client.consumer.reporting import Reporting
from orbitmq.client.engine import Engine
from orbitmq.client.errors import BrokerUnavailable
from orbitmq.client.queue import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client import running_engine
from tests.support.consumers import consumer_of, fill
from tests.support.consuming import received, until

QUEUES = [Queue("orders", "broker-a", number) for number in range(2)]
NEVER = 3600.0


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
async def engine() -> AsyncIterator[Engine]:
    async with running_engine("127.0.0.1:1") as running:
        yield running


def owned_by(engine: Engine) -> dict[Queue, OwnedQueue]:
    now = engine.clock.monotonic()
    return {queue: OwnedQueue(queue, 0, now=now) for queue in QUEUES}


def reporting(engine: Engine, progress: NotedProgress, owned: Any, **times: float) -> Reporting:
    given = {"interval": NEVER, "when_idle": 0.02} | times
    return Reporting(engine, "billing", progress, owned, **given)


async def test_a_queue_without_work_is_reported_soon(engine: Engine) -> None:
    progress, owned = NotedProgress(), owned_by(engine)
    reports = reporting(engine, progress, owned)
    progress.update(QUEUES[0], 7)

    reports.became_empty()

    await until(lambda: progress.kept == {QUEUES[0]: 7})
    reports.stop()


async def test_a_queue_with_cached_messages_is_left_to_the_regular_report(engine: Engine) -> None:
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


async def test_a_queue_that_empties_again_and_again_is_not_reported_each_time(
    engine: Engine,
) -> None:
    progress, owned = NotedProgress(), owned_by(engine)
    reports = reporting(engine, progress, owned, when_idle=0.05)
    # A handler finishes every millisecond, and every time nothing is left.
    for offset in range(1, 201):
        progress.update(QUEUES[0], offset)
        owned[QUEUES[0]].last_consumed = engine.clock.monotonic()
        reports.became_empty()
        if progress.kept:
            # A busy machine may have paused this loop for long enough; then it was idle indeed.
            break
        await asyncio.sleep(0.001)
    during = progress.stores

    await until(lambda: progress.kept == {QUEUES[0]: progress.read(QUEUES[0])})
    assert during <= 1
    assert progress.stores <= 2
    reports.stop()


@pytest.mark.parametrize("stops", [False, True], ids=["not wanted", "stopped"])
async def test_nothing_is_reported_early_when_it_is_not_wanted(engine: Engine, stops: bool) -> None:
    progress, owned = NotedProgress(), owned_by(engine)
    reports = reporting(engine, progress, owned, when_idle=0.01 if stops else 0.0)
    other = reporting(engine, NotedProgress(), owned_by(engine), when_idle=0.05)
    progress.update(QUEUES[0], 7)
    if stops:
        reports.stop()

    reports.became_empty()
    other.became_empty()

    # The other one, which takes longer, has looked.
    await until(lambda: other._progress.asked)  # type: ignore[attr-defined]
    assert progress.asked == []
    other.stop()


async def test_a_position_that_was_reset_can_be_read_back_before_the_next_one(
    engine: Engine,
) -> None:
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


async def test_trouble_is_told_once_with_the_group_and_its_end_too(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="orbitmq.client.consumer.reporting")
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
    assert "group billing cannot be put by" in told[0]


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "in order"])
async def test_brokers_know_that_all_is_consumed_without_the_regular_report(ordered: bool) -> None:
    seldom = RebalanceSettings(persist=NEVER)
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic("orders", queues=4)
        consumer = consumer_of(cluster, "billing", rebalance=seldom, ordered=ordered)
        consumer.on("orders")(lambda message: None)
        async with consumer:
            await fill(cluster, "orders", 50)
            await cluster.until_consumed("billing", "orders", timeout=30)
            await fill(cluster, "orders", 50)
            await cluster.until_consumed("billing", "orders", timeout=30)
