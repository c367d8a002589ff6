"""What a task does with pieces of queues, without a Spark around it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import pytest

from orbitmq.client.admin.admin import Admin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.consumer.locks import QueueLocks
from orbitmq.client.consumer.settings import ConsumeSettings
from orbitmq.client.consumer.verdict import DeadLetter
from orbitmq.client.engine import Engine
from orbitmq.client.idempotence import Idempotence, SeenInMemory
from orbitmq.client.loopthread import LoopThread
from orbitmq.client.ranges.connections import QueueRange, RangeAccess, RangeConnections
from orbitmq.client.ranges.read import Chunk, Pulls, read_ranges
from orbitmq.client.routes import Queue
from orbitmq.message.record import BATCH_MASK
from orbitmq.message.stored import StoredMessage, encode_batch
from orbitmq.spark.consuming.pipeline import Definition, Handled
from orbitmq.spark.consuming.queues import Piece
from orbitmq.spark.consuming.worker import Worker
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import fill, numbered, stop_broker

QUEUE = Queue("orders", "broker-a", 0)
DRIVER = "127.0.0.1@driver"


@pytest.fixture
def worker(orbit_cluster):
    """Makes workers that are stopped with the test."""
    orbit_cluster.create_topic("orders", queues=2)
    made: list[Worker] = []

    def make(handler, *, ordered=False, batch=None, middleware=(), cluster=None, **consume):
        server = (cluster or orbit_cluster).name_server
        definition = Definition(
            group="billing",
            wire_group="billing",
            namespace=None,
            access=RangeAccess(name_servers=(server,), timeout=20.0),
            handled=(Handled("orders", handler, {"batch": batch}),),
            middleware=middleware,
            consume=ConsumeSettings(send_back_timeout=1.0, **consume),
            ordered=ordered,
            client_id=DRIVER,
            bytes_in_task=1 << 20,
            patience=2.0,
        )
        made.append(Worker(definition))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.stop()


def piece(
    start: int,
    end: int,
    *,
    attempts: Mapping[int, int] | None = None,
    queue: Queue = QUEUE,
    committed: int | None = None,
) -> Piece:
    return Piece(QueueRange(queue, start, end), attempts or {}, committed)


def sent(cluster: EmbeddedCluster, count: int) -> None:
    fill(cluster.broker_addresses[0], "orders", numbered(count))


@pytest.mark.parametrize("ordered", [True, False])
def test_after_the_time_limit_no_call_begins_and_running_ones_are_waited_for(
    worker, orbit_cluster, ordered
):
    sent(orbit_cluster, 500)
    seen: list[int] = []

    def slow(message):
        threading.Event().wait(0.02)
        seen.append(message.queue_offset)

    # All of them would take more than two seconds.
    (report,) = worker(slow, workers=4, ordered=ordered).handle([(0, piece(0, 500))], 1.5)

    assert 0 < report.finished < 500
    # Without a gap: only messages that no handler has seen come again.
    assert sorted(seen) == list(range(report.finished))
    assert (report.done, report.beyond, report.error) == (report.finished, (), None)


def test_handlers_have_ended_when_a_task_fails(worker, orbit_cluster, monkeypatch):
    """Its process may live on, and the messages are given to another one."""
    sent(orbit_cluster, 10)
    began, ended = threading.Event(), threading.Event()

    def slow(message):
        began.set()
        threading.Event().wait(0.5)
        ended.set()

    def failing_later(links, ranges, **more):
        if ranges[0].queue.topic == "orders":
            return read_ranges(links, ranges, **more)
        assert began.wait(30)
        raise ZeroDivisionError

    monkeypatch.setattr("orbitmq.spark.consuming.worker.read_ranges", failing_later)
    last = Piece(QueueRange(Queue("%RETRY%billing", "broker-a", 0), 0, 1), is_doubtful=True)
    busy = worker(slow, ordered=True)
    with pytest.raises(ZeroDivisionError):
        busy.handle([(0, piece(0, 10)), (1, last)], 20)
    was_ended = ended.is_set()
    ended.clear()

    assert was_ended
    assert not ended.wait(1.0), "no other call was begun"


def test_a_failed_message_that_nobody_takes_back_is_not_finished(worker, orbit_cluster):
    """Those around it are, and are not repeated with it."""
    sent(orbit_cluster, 20)

    def fail_alone(message):
        if message.queue_offset == 7:
            orbit_cluster.stop()
            raise DeadLetter("no such customer")

    (report,) = worker(fail_alone, workers=2).handle([(0, piece(0, 20))], 4)

    assert (report.finished, report.beyond) == (7, (8, 20))
    assert report.kept >= 1
    assert (report.retried, report.dead) == (0, 0)
    assert report.error == "no such customer"


def test_in_order_every_message_of_a_failing_batch_keeps_its_attempts(worker, orbit_cluster):
    sent(orbit_cluster, 5)
    calls: list[list[tuple[int, int]]] = []

    def fail(messages):
        calls.append([(each.queue_offset, each.attempt) for each in messages])
        if messages[0].queue_offset < 3:
            raise ValueError("not yet")

    busy = worker(fail, ordered=True, batch=True, batch_size=3, max_retries=2, suspend=0.2)
    (first,) = busy.handle([(0, piece(0, 5))], 10)
    (second,) = busy.handle([(0, piece(0, 5, attempts=first.attempts))], 10)
    (third,) = busy.handle([(0, piece(0, 5, attempts=second.attempts))], 10)

    assert (first.attempts, second.attempts) == ({0: 1, 1: 1, 2: 1}, {0: 2, 1: 2, 2: 2})
    assert calls == [
        *([(offset, attempt) for offset in range(3)] for attempt in (1, 2, 3)),
        [(3, 1), (4, 1)],
    ]
    assert (third.finished, third.dead, third.done, third.attempts) == (5, 3, 2, {})
    assert len(orbit_cluster.messages("%DLQ%billing")) == 3


def test_a_record_with_several_messages_is_handled_once_though_two_pulls_bring_it(
    worker, monkeypatch
):
    batch = encode_batch([(str(place).encode(), 0, b"") for place in range(4)])
    record = StoredMessage.build(
        topic="orders", stored_body=batch, queue_offset=10, sys_flag=BATCH_MASK
    ).encode()
    chunks = [Chunk(QUEUE, start, end, [record]) for start, end in ((11, 12), (12, 14))]
    monkeypatch.setattr("orbitmq.spark.consuming.worker.read_ranges", lambda *_, **__: chunks)
    seen: list[tuple[int, bytes]] = []

    busy = worker(lambda message: seen.append((message.queue_offset, message.body)))
    busy.handle([(0, piece(11, 14))], 10)

    assert sorted(seen) == [(11, b"1"), (12, b"2"), (13, b"3")]


@pytest.mark.parametrize(("ordered", "expected"), [(False, (16, 3, 1, 4)), (True, (19, 0, 1, 1))])
def test_outcomes_are_counted_as_done_retried_dead_and_failed(
    worker, orbit_cluster, ordered, expected
):
    sent(orbit_cluster, 20)

    def fail(message):
        if message.queue_offset < 3 and not ordered:
            raise ValueError("not yet")
        if message.queue_offset == 3:
            raise DeadLetter("never")

    (report,) = worker(fail, workers=2, ordered=ordered).handle([(0, piece(0, 20))], 10)

    assert (report.done, report.retried, report.dead, report.failed) == expected


@pytest.mark.parametrize("ordered", [True, False])
def test_a_message_that_middleware_holds_has_not_failed(worker, orbit_cluster, ordered):
    sent(orbit_cluster, 3)
    store = SeenInMemory()
    store.claim("billing\x00orders\x00id-1", time.time(), lease=3600)
    once = Idempotence(store, retry=30)

    (report,) = worker(lambda message: None, ordered=ordered, middleware=(once,)).handle(
        [(0, piece(0, 3))], 1.0
    )

    assert (report.finished, report.held) == (1, 1)
    assert (report.failed, report.retried, report.dead, report.kept) == (0, 0, 0, 0)
    assert (report.attempts, report.pause) == ({}, 30.0 if ordered else None)


def test_in_order_nothing_is_done_without_the_lock(worker, orbit_cluster):
    """A task that begins late, when its driver is gone and somebody else has the queue."""
    sent(orbit_cluster, 10)
    seen: list[int] = []
    thread = LoopThread()
    thread.start()

    async def lock():
        access = RangeAccess(name_servers=(orbit_cluster.name_server,))
        engine = Engine(access.settings(instance="somebody-else"))
        await engine.start()
        await engine.routes.get("orders")
        assert await QueueLocks(engine, "billing").acquire([QUEUE])
        return engine

    engine = thread.run(lock())
    try:
        busy = worker(lambda message: seen.append(message.queue_offset), ordered=True)
        (report,) = busy.handle([(0, piece(0, 10))], 10)
    finally:
        thread.run(engine.stop())
        thread.stop()

    assert seen == []
    assert report.finished == 0
    assert report.error is not None
    assert "lock" in report.error


def test_a_broker_that_is_away_is_an_error_of_its_pieces_alone(worker):
    away, present = (Queue("orders", broker, 0) for broker in ("broker-a", "broker-b"))
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("orders", queues=1)
        fill(cluster.broker_addresses[1], "orders", numbered(10))
        busy = worker(lambda message: None, cluster=cluster)
        stop_broker(cluster, 0)

        reports = busy.handle([(0, piece(0, 10, queue=away)), (1, piece(0, 10, queue=present))], 20)
        busy.stop()

    failed, fine = sorted(reports, key=lambda report: report.place)
    assert (failed.finished, fine.finished, fine.error) == (0, 10, None)
    assert "Unavailable" in (failed.error or "")


def test_a_reset_to_where_the_group_is_waits_for_the_driver_to_hear_of_it(worker, orbit_cluster):
    """Until then its reports do not count."""
    sent(orbit_cluster, 20)
    busy = worker(lambda message: None)
    reset(orbit_cluster, QUEUE, 5)

    (told,) = busy.handle([(0, piece(5, 20, committed=5))], 20)
    hear(orbit_cluster, QUEUE)
    (report,) = busy.handle([(0, piece(5, 20, committed=5))], 20)

    assert (told.finished, told.done, told.reset_to) == (5, 0, 5)
    assert (report.finished, report.done, report.reset_to, report.error) == (20, 15, None, None)


def test_a_reset_to_where_the_group_is_changes_nothing_if_it_is_told_once(
    worker, orbit_cluster, monkeypatch
):
    """As Apache's brokers do."""

    def asking_for_nothing_else(*group, keeps_resets):
        return Pulls(*group)

    monkeypatch.setattr("orbitmq.client.ranges.read.Pulls", asking_for_nothing_else)
    sent(orbit_cluster, 20)
    busy = worker(lambda message: None)
    reset(orbit_cluster, QUEUE, 5)

    (report,) = busy.handle([(0, piece(5, 20, committed=5))], 20)

    assert (report.finished, report.done, report.reset_to, report.error) == (20, 15, None, None)


def reset(cluster: EmbeddedCluster, queue: Queue, offset: int) -> None:
    with Admin(name_server=cluster.name_server) as admin:
        admin.groups.create("billing")
        admin.progress.reset("billing", "orders", ResetTo.by_queue({queue: offset}))


def hear(cluster: EmbeddedCluster, queue: Queue) -> None:
    """As the driver does, after which nobody is told of a reset any more."""
    links = RangeConnections(RangeAccess(name_servers=(cluster.name_server,)))
    try:
        list(read_ranges(links, [QueueRange(queue, 0, 1)], group="billing"))
    finally:
        links.close()
