"""A group on Spark whose progress is reset while it runs; its driver and a worker are enough."""

from __future__ import annotations

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
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import fill, numbered

DEADLINE = 60.0


class Group:
    """A group on Spark, of which every batch is run by the test."""

    def __init__(self, cluster: EmbeddedCluster, *, ordered: bool = False) -> None:
        self._cluster = cluster
        self.seen: list[int] = []
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

    def until(self, condition: Callable[[], bool], *, most: int = 1000) -> None:
        """Run batches until a condition holds."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, self.seen
            planned = self.driver.plan(most)
            if planned.pieces:
                reports = self.worker.handle(list(enumerate(planned.pieces)), 20)
                self.driver.settle(planned, reports)
            threading.Event().wait(0.02)

    def lose_a_reset(self, *, is_tried_again: bool) -> list[PieceReport]:
        """Run a batch whose tasks are told of a reset, and lost with that; they said what is given.

        Spark may try them again: in order, they then handle nothing.
        """
        planned = self.driver.plan(10)
        self.reset()
        pieces = list(enumerate(planned.pieces))
        lost, reports = self.worker.handle(pieces, 20), []
        if is_tried_again and self.driver.options.ordered:
            reports = postponed(pieces, 0.01)
        elif is_tried_again:
            reports = self.worker.handle(pieces, 20)
        self.driver.settle(planned, reports)
        return lost

    def stands_at(self, offset: int) -> bool:
        return self._cluster.progress("billing", "orders") == {("broker-a", 0): offset}

    def reset(self) -> None:
        with Admin(name_server=self._cluster.name_server) as admin:
            admin.progress.reset("billing", "orders", "first")

    def report(self, offset: int) -> None:
        """As anybody may do it."""
        access = RangeAccess(name_servers=(self._cluster.name_server,))
        with RangeCluster(access, "billing") as cluster:
            cluster.queues(["orders"])
            assert not cluster.report({Queue("orders", "broker-a", 0): offset}).failures


def _unused(message: ReceivedMessage) -> None:
    """Travels in the place of the one that is called."""


@pytest.fixture
def filled(orbit_cluster, monkeypatch):
    monkeypatch.setattr("orbitmq.spark.consuming.queues._COMPARED", 0.1)
    orbit_cluster.create_topic("orders", queues=1)
    fill(orbit_cluster.broker_addresses[0], "orders", numbered(20))
    return orbit_cluster


@pytest.fixture
def group(filled):
    found = Group(filled)
    yield found
    found.stop()


@pytest.fixture(params=[False, True], ids=["concurrent", "ordered"])
def either_group(filled, request):
    found = Group(filled, ordered=request.param)
    yield found
    found.stop()


def test_an_idle_group_goes_back(group):
    group.until(lambda: group.stands_at(20))

    group.reset()
    group.until(lambda: len(group.seen) >= 40 and group.stands_at(20))

    assert sorted(group.seen) == sorted([*range(20), *range(20)])


@pytest.mark.parametrize("offset", [5, 15])
def test_a_group_is_not_moved_by_what_somebody_reports(group, offset):
    group.until(lambda: group.stands_at(10), most=10)

    group.report(offset)
    assert group.stands_at(offset)
    group.until(lambda: len(group.seen) >= 20 and group.stands_at(20), most=10)

    assert sorted(group.seen) == list(range(20))


def test_a_group_goes_back_when_a_broker_pushes_a_reset_to_it(group):
    """As Apache's brokers do before version 5."""
    group.until(lambda: group.stands_at(20))
    member = group.driver._member
    assert member is not None

    group.driver._thread.run(member.reset({Queue("orders", "broker-a", 0): 0}))
    group.until(lambda: len(group.seen) >= 40 and group.stands_at(20))

    assert sorted(group.seen) == sorted([*range(20), *range(20)])


def test_a_group_at_work_goes_back(group, monkeypatch):
    # The task alone is told.
    monkeypatch.setattr("orbitmq.spark.consuming.queues._COMPARED", 3600.0)
    group.until(lambda: len(group.seen) >= 10, most=10)

    group.reset()
    group.until(lambda: len(group.seen) >= 30 and group.stands_at(20), most=10)

    assert sorted(group.seen) == sorted([*range(10), *range(20)])


@pytest.mark.parametrize("is_tried_again", [False, True])
@pytest.mark.parametrize("compared", [0.0, 3600.0], ids=["asked", "told"])
def test_a_reset_outlives_the_task_that_was_told_of_it(
    either_group, monkeypatch, compared, is_tried_again
):
    """The driver asks for it, or the next task is told as well."""
    group = either_group
    monkeypatch.setattr("orbitmq.spark.consuming.queues._COMPARED", compared)
    group.until(lambda: group.stands_at(10), most=10)

    lost = group.lose_a_reset(is_tried_again=is_tried_again)
    group.until(lambda: len(group.seen) >= 30 and group.stands_at(20), most=10)

    assert [report.reset_to for report in lost] == [0]
    before, after = group.seen[:10], group.seen[10:]
    if not group.driver.options.ordered:
        before, after = sorted(before), sorted(after)
    assert (before, after) == ([*range(10)], [*range(20)])
