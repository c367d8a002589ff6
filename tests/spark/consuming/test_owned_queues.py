"""The driver's queues between rebalancing and batches: plans, results, commits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from orbitmq.client.admin.admin import Admin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.consumer.progress import MemoryProgress
from orbitmq.client.consumer.resets import pending_reset
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.engine import Engine
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.clock import Clock
from orbitmq.remoting.settings import Address
from orbitmq.spark.consuming.progress import PieceReport
from orbitmq.spark.consuming.queues import BatchPlan, OwnedQueues
from orbitmq.testing.cluster import AsyncEmbeddedCluster
from tests.support.consuming import LockStub
from tests.support.filling import fill, numbered
from tests.support.store import HandClock

QUEUE = Queue("orders", "broker-a", 0)
OTHER = Queue("orders", "broker-a", 1)
AWAY, AWAY_TOO = Queue("orders", "broker-x", 0), Queue("orders", "broker-x", 1)


@dataclass
class Bench:
    """A topic with a hundred messages in each of two queues, and a group's progress."""

    engine: Engine
    progress: MemoryProgress
    address: str
    name_server: str

    def queues(self, *, ordered: bool = False, clock: Clock | None = None) -> OwnedQueues:
        found = OwnedQueues(self.engine, "billing", ordered=ordered, clock=clock)
        found.offsets.progress = self.progress
        return found

    def own(
        self, queues: OwnedQueues, queue: Queue = QUEUE, at: int = 0, lock: LockStub | None = None
    ) -> OwnedQueue:
        owned = OwnedQueue(queue, at, now=self.engine.clock.monotonic(), lock=lock)
        queues.begin(owned)
        return owned

    async def send(self, count: int) -> None:
        await asyncio.to_thread(fill, self.address, "orders", numbered(count))

    async def reset(self, offset: int) -> None:
        """Reset the group's offset, as an administrator does."""

        def change() -> None:
            with Admin(name_server=self.name_server) as admin:
                admin.groups.create("billing")
                admin.progress.reset("billing", "orders", ResetTo.by_queue({QUEUE: offset}))

        await asyncio.to_thread(change)
        self.progress.kept[QUEUE] = offset


@pytest.fixture
async def bench():
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic("orders", queues=2)
        address = str(cluster.brokers[0].address)
        await asyncio.to_thread(fill, address, "orders", numbered(200, queues=2))
        engine = Engine(ClientSettings(name_servers=(cluster.name_server,)))
        await engine.start()
        await engine.routes.get("orders")
        yield Bench(engine, MemoryProgress(), address, cluster.name_server)
        await engine.stop()


def finished(upto: int, **more: object) -> list[PieceReport]:
    """A report of the only piece."""
    return [PieceReport(place=0, finished=upto, **more)]  # type: ignore[arg-type]


def ranges(planned: BatchPlan) -> list[tuple[int, int]]:
    return [(each.range.start, each.range.end) for each in planned.pieces]


def planned_queues(planned: BatchPlan) -> list[Queue]:
    return [each.range.queue for each in planned.pieces]


@pytest.mark.parametrize(
    ("report", "following", "committed", "lag"),
    [
        ({"upto": 25}, [(25, 100)], 25, 75),
        ({"upto": 17, "beyond": (18, 30, 35, 40)}, [(17, 18), (30, 35), (40, 100)], 17, 66),
    ],
)
async def test_a_batch_continues_after_what_is_finished(bench, report, following, committed, lag):
    queues = bench.queues()
    bench.own(queues, at=10)

    first = await queues.plan(30)
    await queues.settle(first, finished(**report))
    second = await queues.plan(1000)

    assert (ranges(first), ranges(second)) == ([(10, 40)], following)
    assert bench.progress.kept == {QUEUE: committed}
    assert queues.lag == {QUEUE: lag}


async def test_a_hand_over_waits_for_the_batch_and_its_commit(bench):
    queues = bench.queues()
    owned = bench.own(queues)
    planned = await queues.plan(100)

    assert not await queues.drain(owned, 0.05)
    waiting = asyncio.create_task(queues.drain(owned, 10))
    await queues.settle(planned, finished(60))

    assert await waiting
    assert bench.progress.kept == {QUEUE: 60}
    assert (await queues.plan(100)).pieces == ()


async def test_results_for_a_lost_queue_are_dropped(bench):
    queues = bench.queues()
    owned = bench.own(queues)
    planned = await queues.plan(100)
    queues.end(owned)
    owned.drop()
    bench.own(queues, at=3)

    await queues.settle(planned, finished(60))

    assert bench.progress.kept == {}
    assert ranges(await queues.plan(100)) == [(3, 100)]


# ---- in order


@pytest.mark.parametrize("is_in_batch", [False, True])
async def test_in_order_a_hand_over_waits_for_a_lost_task(bench, is_in_batch):
    """It may only be out of reach, and works under the same order lock."""
    queues = bench.queues(ordered=True)
    owned = bench.own(queues, lock=LockStub())
    planned = await queues.plan(50)
    waiting = [asyncio.create_task(queues.drain(owned, 0.05))] if is_in_batch else []
    await queues.settle(planned, finished(0, pause=0.3, is_postponed=True))
    ends = queues.state(QUEUE).not_before

    if not is_in_batch:
        waiting.append(asyncio.create_task(queues.drain(owned, 0.05)))
    assert [await each for each in waiting] == [False]
    assert await queues.drain(owned, 60.0)

    assert bench.engine.clock.monotonic() >= ends


async def test_in_order_a_hand_over_does_not_wait_for_a_delayed_message(bench):
    queues = bench.queues(ordered=True)
    owned = bench.own(queues, lock=LockStub())
    planned = await queues.plan(50)

    await queues.settle(planned, finished(0, pause=3600.0))

    assert await queues.drain(owned, 0.0)


async def test_in_order_attempts_of_messages_that_a_task_did_not_reach_are_kept(bench):
    queues = bench.queues(ordered=True)
    bench.own(queues, lock=LockStub())
    await queues.settle(await queues.plan(20), finished(4, attempts={4: 2, 5: 2, 6: 2}))

    small = await queues.plan(2)
    await queues.settle(small, finished(5, attempts={5: 3}))
    following = await queues.plan(20)

    assert [piece.attempts for piece in small.pieces] == [{4: 2, 5: 2}]
    assert [piece.attempts for piece in following.pieces] == [{5: 3, 6: 2}]


async def test_an_offset_beyond_the_end_is_set_back_without_its_attempts(bench):
    """The broker lost the end of its log, and uses the offsets for other messages."""
    queues = bench.queues(ordered=True)
    bench.own(queues, at=500, lock=LockStub())
    queues.state(QUEUE).merge_attempts({500: 2, 501: 2})

    planned = await queues.plan(20)
    committed = bench.progress.read(QUEUE)
    await bench.send(500)
    following = await queues.plan(1000)

    assert (planned.pieces, committed) == ((), 100)
    assert ranges(following) == [(100, 600)]
    assert [piece.attempts for piece in following.pieces] == [{}]


# ---- resets


async def test_a_reset_of_a_lost_queue_is_left_to_its_next_owner(bench):
    queues = bench.queues()
    owned = bench.own(queues, at=10)
    planned = await queues.plan(50)

    await bench.reset(30)
    owned.drop()
    missing = await queues.settle(planned, finished(60, missing=7, reset_to=30))

    assert await pending_reset(bench.engine, "billing", QUEUE, 60, keep=True) == 30
    assert missing == 0  # they are skipped again there


# ---- brokers and tasks that fail


async def test_known_messages_of_a_broker_that_is_away_are_planned_if_it_has_a_replica(
    bench, monkeypatch
):
    queues = bench.queues()
    bench.own(queues, AWAY, at=10)
    queues.state(AWAY).end = 30
    routes = bench.engine.routes
    brokers = {**routes.brokers, "broker-x": {1: Address("127.0.0.1", 1)}}  # without a master
    monkeypatch.setattr(type(routes), "brokers", property(lambda _: brokers))

    planned = await queues.plan(100)

    assert ranges(planned) == [(10, 30)]
    assert list(planned.errors) == [AWAY]


async def test_a_queue_whose_task_fails_waits_longer_each_time_and_the_others_do_not(bench):
    clock = HandClock()
    queues = bench.queues(ordered=True, clock=clock)
    for queue in (QUEUE, OTHER):
        bench.own(queues, queue, lock=LockStub())

    async def batch(failure: str | None = None) -> None:
        planned = await queues.plan(10)
        reports = []
        for place, piece in enumerate(planned.pieces):
            if failure and piece.range.queue == QUEUE:
                start = piece.range.start
                reports.append(PieceReport(place=place, finished=start, task_error=failure))
            else:
                reports.append(PieceReport(place=place, finished=piece.range.end))
        await queues.settle(planned, reports)

    waited = []
    for _ in range(3):
        await batch("no such module")
        began = clock.monotonic()
        while QUEUE not in planned_queues(await queues.plan(10)):
            clock.advance(0.25)
        waited.append(clock.monotonic() - began)
    failed = queues.failed_in_a_row
    await batch()

    assert waited == [0.5, 1.0, 2.0]
    assert (failed, queues.failed_in_a_row) == (3, 0)
    assert bench.progress.kept[OTHER] > 15
