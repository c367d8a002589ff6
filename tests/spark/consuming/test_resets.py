"""A driver and a worker whose batches the test runs: resets, other commits, and gaps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from orbitmq.client.admin.admin import Admin
from orbitmq.client.consumer.consumer import ConsumerOptions
from orbitmq.client.consumer.progress import consume_from
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.ranges.cluster import RangeCluster
from orbitmq.client.ranges.connections import RangeAccess
from orbitmq.client.routes import Queue
from orbitmq.spark.consuming.batches import postponed
from orbitmq.spark.consuming.pipeline import BatchSettings, Driver, Handled
from orbitmq.spark.consuming.progress import PieceReport
from orbitmq.spark.consuming.worker import Worker
from orbitmq.store.queues import ConsumeQueue
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import make_topic

DEADLINE = 60.0
GAP = range(5, 15)
#: Bytes of an entry of a queue.
ENTRY = 20


class Group:
    """A group on Spark whose batches the test runs."""

    def __init__(self, cluster: EmbeddedCluster, *, ordered: bool = False) -> None:
        self._cluster = cluster
        self.seen: list[int] = []
        self.reports: list[PieceReport] = []
        self.driver = Driver(
            group="billing",
            namespace=None,
            access=RangeAccess(name_servers=(cluster.name_server,)),
            middleware=(),
            options=ConsumerOptions(consume_from=consume_from("first"), ordered=ordered),
            batch=BatchSettings(),
        )
        self.driver.start([Handled(topic="orders", function=_unused)])
        assert self.driver.packed is not None
        handled = (Handled(topic="orders", function=self._handle),)
        self.worker = Worker(replace(self.driver.packed.unpack(), handled=handled))
        self.worker.start()

    def _handle(self, message: ReceivedMessage) -> None:
        self.seen.append(message.queue_offset)

    def stop(self) -> None:
        self.worker.stop()
        self.driver.stop()

    def until(
        self, condition: Callable[[], bool], *, most: int = 1000, seconds: float = 20.0
    ) -> None:
        """Run batches until a condition holds."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, (self.seen, self.reports[-3:])
            planned = self.driver.plan(most)
            if planned.pieces:
                reports = self.worker.handle(list(enumerate(planned.pieces)), seconds)
                self.driver.settle(planned, reports)
                self.reports += reports
            threading.Event().wait(0.02)

    def lose_a_reset(self, *, is_tried_again: bool) -> list[PieceReport]:
        """Run a batch whose task sees a reset and is lost; returns its reports.

        Spark may try it again: in order, that attempt handles nothing.
        """
        planned = self.driver.plan(10)
        self.reset()
        pieces = list(enumerate(planned.pieces))
        lost, reports = self.worker.handle(pieces, 20), []
        if is_tried_again:
            is_ordered = self.driver.options.ordered
            reports = postponed(pieces, 0.01) if is_ordered else self.worker.handle(pieces, 20)
        self.driver.settle(planned, reports)
        return lost

    def is_committed(self, offset: int) -> bool:
        return self._cluster.progress("billing", "orders") == {("broker-a", 0): offset}

    def reset(self) -> None:
        with Admin(name_server=self._cluster.name_server) as admin:
            admin.progress.reset("billing", "orders", "first")

    def commit_by_another(self, offset: int) -> None:
        access = RangeAccess(name_servers=(self._cluster.name_server,))
        with RangeCluster(access, "billing") as cluster:
            cluster.queues(["orders"])
            assert not cluster.report({Queue("orders", "broker-a", 0): offset}).failures


def _unused(message: ReceivedMessage) -> None:
    """Is pickled in place of the handler that is called."""


@pytest.fixture(params=[False, True], ids=["concurrent", "ordered"])
def group(orbit_cluster, monkeypatch, request):
    monkeypatch.setattr("orbitmq.spark.consuming.queues.COMPARE_EVERY", 0.1)
    make_topic(orbit_cluster, "orders", 20, queues=1)
    found = Group(orbit_cluster, ordered=request.param)
    yield found
    found.stop()


def test_an_idle_group_follows_a_reset(group):
    group.until(lambda: group.is_committed(20))

    group.reset()
    group.until(lambda: len(group.seen) >= 40 and group.is_committed(20))

    assert sorted(group.seen) == sorted([*range(20), *range(20)])


def test_a_group_at_work_follows_a_reset(group, monkeypatch):
    # Only the task sees it.
    monkeypatch.setattr("orbitmq.spark.consuming.queues.COMPARE_EVERY", 3600.0)
    group.until(lambda: len(group.seen) >= 10, most=10)

    group.reset()
    group.until(lambda: len(group.seen) >= 30 and group.is_committed(20), most=10)

    assert sorted(group.seen) == sorted([*range(10), *range(20)])


@pytest.mark.parametrize("is_tried_again", [False, True])
@pytest.mark.parametrize("compare_every", [0.0, 3600.0], ids=["driver asks", "next task sees it"])
def test_a_reset_is_not_lost_with_the_task_that_saw_it(
    group, monkeypatch, compare_every, is_tried_again
):
    monkeypatch.setattr("orbitmq.spark.consuming.queues.COMPARE_EVERY", compare_every)
    group.until(lambda: group.is_committed(10), most=10)

    lost = group.lose_a_reset(is_tried_again=is_tried_again)
    group.until(lambda: len(group.seen) >= 30 and group.is_committed(20), most=10)

    assert [report.reset_to for report in lost] == [0]
    assert sorted(group.seen[:10]) == [*range(10)]
    assert sorted(group.seen[10:]) == [*range(20)]
    assert not group.driver.options.ordered or group.seen == [*range(10), *range(20)]


@pytest.mark.parametrize("offset", [5, 15])
def test_a_commit_by_another_client_does_not_move_a_group(group, offset):
    group.until(lambda: group.is_committed(10), most=10)

    group.commit_by_another(offset)
    assert group.is_committed(offset)
    group.until(lambda: len(group.seen) >= 20 and group.is_committed(20), most=10)

    assert sorted(group.seen) == list(range(20))


@pytest.fixture
def gap(monkeypatch):
    """The broker lacks entries of a queue, as when a file of it is missing."""
    entries, following = ConsumeQueue.entries, ConsumeQueue.following_file

    def gapped(queue, first, count):
        if queue.topic != "orders":
            return entries(queue, first, count)
        if first in GAP:
            return None
        found = entries(queue, first, count)
        return found[: (GAP.start - first) * ENTRY] if found and first < GAP.start else found

    def next_file(queue, number):
        return GAP.stop if queue.topic == "orders" else following(queue, number)

    monkeypatch.setattr(ConsumeQueue, "entries", gapped)
    monkeypatch.setattr(ConsumeQueue, "following_file", next_file)


@pytest.mark.usefixtures("gap")
def test_a_gap_of_a_queue_is_skipped_and_counted_once(group, caplog):
    with caplog.at_level(logging.WARNING):
        group.until(lambda: group.is_committed(20), seconds=1.0)

    assert sorted(group.seen) == [*range(GAP.start), *range(GAP.stop, 20)]
    assert sum(report.missing for report in group.reports) == len(GAP)
    assert "messages are missing and left out" in caplog.text
