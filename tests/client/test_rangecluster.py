"""What a planner is told of brokers that do not answer: each has its own time."""

from __future__ import annotations

import asyncio
import time

import pytest

from orbitmq.client.ranges import cluster as rangecluster
from orbitmq.client.ranges.cluster import RangeCluster
from orbitmq.client.ranges.connections import RangeAccess
from orbitmq.client.routes import Queue
from orbitmq.errors import OrbitError

REFUSES, HANGS = Queue("orders", "broker-a", 0), Queue("orders", "broker-b", 0)
HANGING = 0.1
#: Timers may come early by as much as a clock is inexact.
AT_LEAST = 0.9 * HANGING


@pytest.fixture
def cluster(orbit_shared_cluster):
    access = RangeAccess(name_servers=(orbit_shared_cluster.name_server,))
    with RangeCluster(access, "readers") as found:
        yield found


async def no_answer(queue: Queue) -> OrbitError:
    """What a broker has for an answer; one takes its time, the other does not even begin to."""
    if queue == HANGS:
        await asyncio.sleep(HANGING)
    return OrbitError("no")


def test_a_broker_that_refuses_has_not_waited_for_one_that_hangs(cluster, monkeypatch):
    async def ask(_, queue):
        raise await no_answer(queue)

    monkeypatch.setattr(rangecluster, "end_offset", ask)
    began = time.monotonic()

    found = cluster.ends([REFUSES, HANGS], patient=False)

    assert found.failures.keys() == found.waited.keys() == {REFUSES, HANGS}
    assert found.waited[HANGS] >= AT_LEAST
    # The first was through before the second began.
    assert sum(found.waited.values()) <= time.monotonic() - began


def test_nor_has_one_that_refuses_a_report(cluster, monkeypatch):
    async def store(positions):
        return {queue: await no_answer(queue) for queue in positions}

    monkeypatch.setattr(cluster._offsets, "store", store)
    began = time.monotonic()

    reported = cluster.report({REFUSES: 1, HANGS: 1})

    assert reported.failures.keys() == reported.waited.keys() == {REFUSES, HANGS}
    assert reported.waited[HANGS] >= AT_LEAST
    assert sum(reported.waited.values()) <= time.monotonic() - began


def test_what_nobody_can_say_is_not_repeated(cluster, monkeypatch):
    told: dict[Queue, int] = {}

    async def stored(queue):
        if queue == HANGS:
            raise await no_answer(queue)
        return 3

    async def store(positions):
        told.update(positions)
        return {}

    monkeypatch.setattr(cluster._offsets, "stored", stored)
    monkeypatch.setattr(cluster._offsets, "store", store)

    reported = cluster.repeat({REFUSES: 7, HANGS: 7})

    assert told == {REFUSES: 7}
    assert reported.failures.keys() == {HANGS}
    assert reported.waited[HANGS] >= AT_LEAST
