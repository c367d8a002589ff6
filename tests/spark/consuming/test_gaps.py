"""A queue of which its master has lost a stretch; a driver and a worker of it are enough."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from orbitmq.client.consumer.consumer import ConsumerOptions
from orbitmq.client.consumer.progress import consume_from
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.ranges.connections import RangeAccess
from orbitmq.spark.consuming.pipeline import BatchSettings, Driver, Handled
from orbitmq.spark.consuming.progress import PieceReport
from orbitmq.spark.consuming.queues import Piece
from orbitmq.spark.consuming.worker import Worker
from orbitmq.store.queues import ConsumeQueue
from orbitmq.testing.cluster import EmbeddedCluster
from tests.support.filling import fill, numbered

DEADLINE = 60.0
GAP = range(5, 15)
ENTRY = 20
SECONDS = 1.0


class Group:
    """A group on Spark that consumes in order, of which every batch is run by the test."""

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self._cluster = cluster
        self.seen: list[int] = []
        self.reports: list[PieceReport] = []
        self.driver = Driver(
            group="billing",
            namespace=None,
            access=RangeAccess(name_servers=(cluster.name_server,)),
            middleware=(),
            options=ConsumerOptions(consume_from=consume_from("first"), ordered=True),
            batch=BatchSettings(),
        )
        self.driver.start([Handled(topic="orders", function=_unused)])

    def stop(self) -> None:
        self.driver.stop()

    def until(self, condition: Callable[[], bool]) -> None:
        """Run batches until a condition holds, each on an executor that knows of nothing."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, (self.seen, self.reports[-3:])
            planned = self.driver.plan(1000)
            if planned.pieces:
                reports = self._handled(list(enumerate(planned.pieces)))
                self.driver.settle(planned, reports)
                self.reports += reports
            threading.Event().wait(0.02)

    def stands_at(self, offset: int) -> bool:
        return self._cluster.progress("billing", "orders") == {("broker-a", 0): offset}

    def _handled(self, pieces: list[tuple[int, Piece]]) -> list[PieceReport]:
        assert self.driver.packed is not None
        handled = (Handled(topic="orders", function=self._handle),)
        worker = Worker(replace(self.driver.packed.unpack(), handled=handled))
        worker.start()
        try:
            return worker.handle(pieces, SECONDS)
        finally:
            worker.stop()

    def _handle(self, message: ReceivedMessage) -> None:
        self.seen.append(message.queue_offset)


def _unused(message: ReceivedMessage) -> None:
    """Travels in the place of the one that is called."""


@pytest.fixture
def group(orbit_cluster):
    orbit_cluster.create_topic("orders", queues=1)
    fill(orbit_cluster.broker_addresses[0], "orders", numbered(20))
    found = Group(orbit_cluster)
    yield found
    found.stop()


@pytest.fixture
def gap(monkeypatch):
    """The broker has no entries there, as when a file of the queue is missing."""
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
def test_in_order_a_gap_is_skipped_within_one_batch(group, caplog):
    with caplog.at_level(logging.WARNING):
        group.until(lambda: group.stands_at(20))

    assert group.seen == [*range(GAP.start), *range(GAP.stop, 20)]
    # It is said, and counted, once.
    assert sum(report.missing for report in group.reports) == len(GAP)
    assert "messages are missing and left out" in caplog.text
