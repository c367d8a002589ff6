"""Owned queues between rebalancing and batches."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from orbitmq.client.admin.admin import Admin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.consumer.progress import MemoryProgress, end_offset
from orbitmq.client.consumer.resets import pending_reset
from orbitmq.client.consumer.window import OwnedQueue
from orbitmq.client.engine import Engine
from orbitmq.client.ranges.connections import QueueRange
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.clock import Clock
from orbitmq.errors import BrokerRefused, OrbitError
from orbitmq.remoting.settings import Address
from orbitmq.spark.consuming.progress import PieceReport
from orbitmq.spark.consuming.queues import BatchPlan, OwnedQueues, Piece
from orbitmq.testing.cluster import AsyncEmbeddedCluster
from tests.support.consuming import LockStub
from tests.support.filling import fill, numbered
from tests.support.store import HandClock

QUEUE = Queue("orders", "broker-a", 0)
OTHER = Queue("orders", "broker-a", 1)


@dataclass
class Bench:
    """OwnedQueues with everything around them in the hands of a test."""

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

    async def reset(self, offset: int) -> None:
        """As an administrator does it."""
        await asyncio.to_thread(self._reset, offset)
        self.progress.kept[QUEUE] = offset

    def _reset(self, offset: int) -> None:
        with Admin(name_server=self.name_server) as admin:
            admin.groups.create("billing")
            admin.progress.reset("billing", "orders", ResetTo.by_queue({QUEUE: offset}))


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


def finished(planned: BatchPlan, upto: int, **more: object) -> list[PieceReport]:
    """A report of the only piece."""
    return [PieceReport(place=0, finished=upto, **more)]  # type: ignore[arg-type]


async def test_a_batch_goes_on_where_the_last_one_ended(bench):
    queues = bench.queues()
    bench.own(queues, at=10)

    first = await queues.plan(30)
    await queues.settle(first, finished(first, 25))
    second = await queues.plan(1000)

    assert [(each.range.start, each.range.end) for each in first.pieces] == [(10, 40)]
    assert [(each.range.start, each.range.end) for each in second.pieces] == [(25, 100)]
    assert bench.progress.kept == {QUEUE: 25}
    assert queues.lag == {QUEUE: 75}


async def test_what_was_done_beyond_a_gap_is_not_planned_again(bench):
    queues = bench.queues()
    bench.own(queues)

    first = await queues.plan(100)
    await queues.settle(first, finished(first, 7, beyond=(8, 50, 60, 100)))
    second = await queues.plan(100)

    assert [(each.range.start, each.range.end) for each in second.pieces] == [(7, 8), (50, 60)]
    assert bench.progress.kept == {QUEUE: 7}
    assert queues.lag == {QUEUE: 11}


async def test_whoever_takes_a_queue_waits_for_its_batch_and_has_its_progress(bench):
    queues = bench.queues()
    owned = bench.own(queues)
    planned = await queues.plan(100)

    assert not await queues.drain(owned, 0.05)
    waiting = asyncio.create_task(queues.drain(owned, 10))
    await queues.settle(planned, finished(planned, 60))

    assert await waiting
    assert bench.progress.kept == {QUEUE: 60}
    assert (await queues.plan(100)).pieces == ()


async def test_a_queue_that_is_in_no_batch_is_given_up_at_once(bench):
    queues = bench.queues()
    owned = bench.own(queues)
    bench.own(queues, OTHER)

    assert await queues.drain(owned, 0.0)
    queues.end(owned)
    planned = await queues.plan(100)

    assert [piece.range.queue for piece in planned.pieces] == [OTHER]


async def test_what_a_batch_says_about_a_lost_queue_does_not_count(bench):
    queues = bench.queues()
    owned = bench.own(queues)
    planned = await queues.plan(100)
    queues.end(owned)
    owned.drop()
    again = bench.own(queues, at=3)

    await queues.settle(planned, finished(planned, 60))

    assert bench.progress.kept == {}
    assert [(piece.range.start) for piece in (await queues.plan(100)).pieces] == [3]
    assert not again.is_dropped


async def test_in_order_a_failing_message_keeps_its_queue_waiting(bench):
    queues = bench.queues(ordered=True)
    bench.own(queues, lock=LockStub())
    bench.own(queues, OTHER, lock=LockStub())
    first = await queues.plan(20)
    places = {piece.range.queue: place for place, piece in enumerate(first.pieces)}

    await queues.settle(
        first,
        [
            PieceReport(place=places[QUEUE], finished=4, attempts={4: 2, 5: 1}, pause=0.2),
            PieceReport(place=places[OTHER], finished=10),
        ],
    )
    second = await queues.plan(20)
    await queues.settle(second, [])
    third = await queues.plan(20)
    async with asyncio.timeout(30):
        while QUEUE not in {piece.range.queue for piece in third.pieces}:
            await queues.settle(third, [])
            await asyncio.sleep(0.02)
            third = await queues.plan(20)

    assert [piece.range.queue for piece in second.pieces] == [OTHER]
    attempts = {piece.range.queue: (piece.range.start, piece.attempts) for piece in third.pieces}
    assert attempts[QUEUE] == (4, {4: 2, 5: 1})


@pytest.mark.parametrize("is_in_batch", [False, True])
async def test_in_order_whoever_takes_a_queue_waits_for_a_task_that_was_lost(bench, is_in_batch):
    """It may only be out of reach, and has the order lock as we have."""
    queues = bench.queues(ordered=True)
    owned = bench.own(queues, lock=LockStub())
    planned = await queues.plan(50)
    waiting = [asyncio.create_task(queues.drain(owned, 0.05))] if is_in_batch else []
    await queues.settle(planned, finished(planned, 0, pause=0.3, is_postponed=True))
    ends = queues.state(QUEUE).not_before

    if not is_in_batch:
        waiting.append(asyncio.create_task(queues.drain(owned, 0.05)))
    assert [await each for each in waiting] == [False]
    assert await queues.drain(owned, 60.0)

    assert bench.engine.clock.monotonic() >= ends


async def test_in_order_nobody_waits_for_a_queue_whose_message_is_to_be_tried_later(bench):
    queues = bench.queues(ordered=True)
    owned = bench.own(queues, lock=LockStub())
    planned = await queues.plan(50)

    await queues.settle(planned, finished(planned, 0, pause=3600.0))

    assert await queues.drain(owned, 0.0)


async def test_in_order_the_attempts_of_messages_that_a_task_did_not_come_to_stay(bench):
    queues = bench.queues(ordered=True)
    bench.own(queues, lock=LockStub())
    first = await queues.plan(20)
    await queues.settle(first, finished(first, 4, attempts={4: 2, 5: 2, 6: 2}))

    small = await queues.plan(2)
    await queues.settle(small, finished(small, 5, attempts={5: 3}))
    following = await queues.plan(20)

    assert [piece.attempts for piece in small.pieces] == [{4: 2, 5: 2}]
    assert [piece.attempts for piece in following.pieces] == [{5: 3, 6: 2}]


async def test_attempts_are_not_those_of_other_messages_at_the_same_offsets(bench):
    """The broker lost the end of its log, and the offsets are used again."""
    queues = bench.queues(ordered=True)
    bench.own(queues, at=500, lock=LockStub())
    queues.state(QUEUE).merge_attempts({500: 2, 501: 2})

    await queues.plan(20)
    await asyncio.to_thread(fill, bench.address, "orders", numbered(500))
    following = await queues.plan(1000)

    assert [(piece.range.start, piece.attempts) for piece in following.pieces] == [(100, {})]


async def test_in_order_a_queue_without_its_lock_is_not_planned(bench):
    queues = bench.queues(ordered=True)
    bench.own(queues, lock=LockStub(held=False))

    assert (await queues.plan(100)).pieces == ()


async def test_progress_beyond_the_end_is_set_back_to_it(bench):
    """The broker lost the end of its log: what comes next has offsets that were used before."""
    queues = bench.queues()
    bench.own(queues, at=500)

    planned = await queues.plan(100)
    await asyncio.to_thread(fill, bench.address, "orders", numbered(5))
    following = await queues.plan(100)

    assert planned.pieces == ()
    assert [(each.range.start, each.range.end) for each in following.pieces] == [(100, 105)]
    assert bench.progress.read(QUEUE) == 100


async def test_a_queue_whose_broker_is_away_is_left_out(bench):
    queues = bench.queues()
    away = Queue("orders", "broker-x", 0)
    bench.own(queues, away)
    bench.own(queues)
    # As was heard before it went away.
    queues.state(away).end = 100

    planned = await queues.plan(100)

    assert [piece.range.queue for piece in planned.pieces] == [QUEUE]
    assert list(planned.errors) == [away]


@pytest.mark.parametrize("offset", [3, 90])
async def test_after_a_reset_that_a_task_was_told_of_its_batch_counts_no_more(bench, offset):
    queues = bench.queues()
    bench.own(queues, at=10)
    planned = await queues.plan(50)

    await queues.settle(planned, finished(planned, 60, reset_to=offset))

    following = await queues.plan(1000)
    assert [(each.range.start, each.range.end) for each in following.pieces] == [(offset, 100)]
    assert bench.progress.kept == {QUEUE: offset}


async def test_a_reset_to_where_the_batch_began_has_all_of_it_come_again(bench):
    """Some of its tasks had done their part before, as had the batch before it."""
    queues = bench.queues()
    bench.own(queues, at=10)
    first = await queues.plan(50)
    await queues.settle(first, finished(first, 10, beyond=(50, 60)))
    planned = await queues.plan(50)
    planned.pieces = tuple(Piece(QueueRange(QUEUE, at, at + 20)) for at in (10, 30))

    await bench.reset(10)
    reports = [PieceReport(place=0, finished=30), PieceReport(place=1, finished=30, reset_to=10)]
    await queues.settle(planned, reports)
    following = await queues.plan(100)

    assert [(each.range.start, each.range.end) for each in following.pieces] == [(10, 100)]
    assert bench.progress.kept == {QUEUE: 10}
    assert await pending_reset(bench.engine, "billing", QUEUE, 10, keep=True) is None


@pytest.mark.parametrize("offset", [0, 40, 90])
async def test_a_queue_that_nobody_pulls_goes_on_where_its_group_was_reset_to(
    bench, monkeypatch, offset
):
    monkeypatch.setattr("orbitmq.spark.consuming.queues._COMPARED", 0.0)
    queues = bench.queues()
    bench.own(queues)
    first = await queues.plan(60)
    await queues.settle(first, finished(first, 60))

    await bench.reset(offset)
    second = await queues.plan(100)
    await queues.settle(second, finished(second, 100))
    following = await queues.plan(100)

    assert [(each.range.start, each.range.end) for each in second.pieces] == [(offset, 100)]
    assert following.pieces == ()
    # What was reported before the reset would count as known.
    assert bench.progress.kept == {QUEUE: 100}


async def test_a_reset_whose_last_answer_is_lost_is_followed(bench, monkeypatch):
    """The broker has forgotten it by then."""
    monkeypatch.setattr("orbitmq.spark.consuming.queues._COMPARED", 0.0)
    queues = bench.queues()
    bench.own(queues)
    first = await queues.plan(60)
    await queues.settle(first, finished(first, 60))

    async def cut_off(*question, keep=False):
        answer = await pending_reset(*question, keep=keep)
        if not keep:
            raise OrbitError("the connection was lost")
        return answer

    monkeypatch.setattr("orbitmq.spark.consuming.queues.pending_reset", cut_off)
    await bench.reset(40)
    second = await queues.plan(10)

    assert [each.range.start for each in second.pieces] == [40]
    assert await pending_reset(bench.engine, "billing", QUEUE, 40, keep=True) is None


async def test_of_two_resets_the_last_is_followed(bench):
    queues = bench.queues()
    bench.own(queues, at=10)
    planned = await queues.plan(50)

    await bench.reset(30)
    await queues.settle(planned, finished(planned, 60, reset_to=90))

    assert [each.range.start for each in (await queues.plan(10)).pieces] == [30]
    assert bench.progress.kept == {QUEUE: 30}


async def test_a_reset_of_a_queue_that_was_lost_is_left_to_its_next_owner(bench):
    queues = bench.queues()
    owned = bench.own(queues, at=10)
    planned = await queues.plan(50)

    await bench.reset(30)
    owned.drop()
    await queues.settle(planned, finished(planned, 60, reset_to=30))

    assert await pending_reset(bench.engine, "billing", QUEUE, 60, keep=True) == 30


async def test_a_reset_of_before_the_start_is_not_left_for_tasks_to_hear(bench):
    queues = bench.queues()
    await bench.reset(30)
    bench.own(queues, at=30)

    planned = await queues.plan(50)

    assert [each.range.start for each in planned.pieces] == [30]
    assert await pending_reset(bench.engine, "billing", QUEUE, 30, keep=True) is None


@pytest.mark.parametrize("reported", [40, 90])
async def test_a_report_of_somebody_moves_nobody_and_is_contested(
    bench, monkeypatch, caplog, reported
):
    """Nor does what is left of progress when a broker has lost the last reports."""
    monkeypatch.setattr("orbitmq.spark.consuming.queues._COMPARED", 0.0)
    queues = bench.queues()
    bench.own(queues)
    first = await queues.plan(60)
    await queues.settle(first, finished(first, 60))
    assert (await queues.plan(100)).pieces[0].range.start == 60

    for _ in range(2):
        bench.progress.kept[QUEUE] = reported
        # It may be of whoever has the queue next, and is left alone at first.
        once = await queues.plan(100)
        was_left = bench.progress.kept[QUEUE]
        twice = await queues.plan(100)
        assert [each.range.start for each in (*once.pieces, *twice.pieces)] == [60, 60]
        assert (was_left, bench.progress.kept[QUEUE]) == (reported, 60)
        await queues.plan(100)

    assert len([each for each in caplog.records if "another client commits" in each.message]) == 1


async def test_a_broker_that_is_away_is_left_alone_for_a_while(bench, monkeypatch):
    """One that hangs would keep the others waiting at every batch."""
    monkeypatch.setattr("orbitmq.spark.consuming.queues._SILENCE", 3600.0, raising=False)
    asked: list[Queue] = []

    async def end(engine, queue):
        asked.append(queue)
        if queue.broker == "broker-x":
            raise OrbitError("it hangs")
        return await end_offset(engine, queue)

    monkeypatch.setattr("orbitmq.spark.consuming.queues.end_offset", end)
    queues = bench.queues()
    away, late = (Queue("orders", "broker-x", number) for number in range(2))
    bench.own(queues, away)
    bench.own(queues)

    for _ in range(3):
        planned = await queues.plan(10)
        assert [piece.range.queue for piece in planned.pieces] == [QUEUE]
        # So nobody takes the group to be idle.
        assert list(planned.errors) == [away]
        await queues.settle(planned, [])
    bench.own(queues, late)
    planned = await queues.plan(10)

    assert sorted(planned.errors) == [away, late]
    assert asked == [away, QUEUE, QUEUE, QUEUE, QUEUE]


async def test_a_broker_that_refuses_something_of_one_queue_is_asked_for_the_others(
    bench, monkeypatch
):
    monkeypatch.setattr("orbitmq.spark.consuming.queues._SILENCE", 3600.0, raising=False)

    async def end(engine, queue):
        if queue == OTHER:
            raise BrokerRefused(1, "no", "127.0.0.1:1", 30)
        return await end_offset(engine, queue)

    monkeypatch.setattr("orbitmq.spark.consuming.queues.end_offset", end)
    queues = bench.queues()
    bench.own(queues)
    bench.own(queues, OTHER)

    for _ in range(2):
        planned = await queues.plan(10)
        await queues.settle(planned, [])

    assert [piece.range.queue for piece in planned.pieces] == [QUEUE]
    assert list(planned.errors) == [OTHER]


async def test_what_is_known_to_be_there_is_planned_while_a_replica_may_have_it(bench):
    queues = bench.queues()
    away = Queue("orders", "broker-x", 0)
    bench.own(queues, away, at=10)
    queues.state(away).end = 30
    routes: Any = bench.engine.routes
    # The master is gone.
    routes._brokers = {**routes._brokers, "broker-x": {1: Address("127.0.0.1", 1)}}

    planned = await queues.plan(100)

    assert [(each.range.start, each.range.end) for each in planned.pieces] == [(10, 30)]
    assert list(planned.errors) == [away]


async def test_a_queue_whose_task_fails_waits_longer_each_time_and_the_others_do_not(bench):
    clock = HandClock()
    queues = bench.queues(ordered=True, clock=clock)
    for queue in (QUEUE, OTHER):
        bench.own(queues, queue, lock=LockStub())
    waited, at = [], 0.0

    for _ in range(3):
        planned = await queues.plan(10)
        await queues.settle(
            planned,
            [
                PieceReport(place=place, finished=piece.range.start, task_error="no such module")
                if piece.range.queue == QUEUE
                else PieceReport(place=place, finished=piece.range.end)
                for place, piece in enumerate(planned.pieces)
            ],
        )
        at = clock.monotonic()
        while QUEUE not in {piece.range.queue for piece in (await queues.plan(10)).pieces}:
            clock.advance(0.25)
        waited.append(clock.monotonic() - at)
    failed = queues.failed_in_a_row
    planned = await queues.plan(10)
    await queues.settle(
        planned,
        [
            PieceReport(place=place, finished=piece.range.end)
            for place, piece in enumerate(planned.pieces)
        ],
    )

    assert waited == [0.5, 1.0, 2.0]
    assert (failed, queues.failed_in_a_row) == (3, 0)
    assert bench.progress.kept[OTHER] > 15


async def test_what_was_passed_over_counts_only_where_the_batch_does(bench):
    """Else it is passed over again, here or by the next owner, and counted then."""
    queues = bench.queues()
    owned = bench.own(queues, at=10)
    counted = []

    for report in ({"reset_to": 30}, {}):
        planned = await queues.plan(20)
        counted.append(await queues.settle(planned, finished(planned, 40, missing=7, **report)))
    planned = await queues.plan(20)
    owned.drop()
    counted.append(await queues.settle(planned, finished(planned, 60, missing=7)))

    assert counted == [0, 7, 0]
