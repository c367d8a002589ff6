"""Ranges read in the name of a group whose progress an administrator resets meanwhile."""

from __future__ import annotations

import pytest

from orbitmq.client.admin.admin import Admin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.ranges.connections import QueueRange, RangeAccess, RangeConnections
from orbitmq.client.ranges.read import ProgressReset, RangeSettings, read_ranges
from orbitmq.client.routes import Queue
from tests.support.filling import fill, numbered

QUEUE = Queue("orders", "broker-a", 0)
WHOLE = QueueRange(QUEUE, 10, 20)


@pytest.fixture
def links(orbit_cluster):
    orbit_cluster.create_topic("orders", queues=1)
    fill(orbit_cluster.broker_addresses[0], "orders", numbered(20))
    with Admin(name_server=orbit_cluster.name_server) as admin:
        admin.groups.create("billing")
        admin.progress.reset("billing", "orders", ResetTo.by_queue({QUEUE: 3}))
    found = RangeConnections(RangeAccess(name_servers=(orbit_cluster.name_server,)))
    yield found
    found.close()


def test_who_goes_by_the_progress_of_the_group_is_told_of_the_reset_until_somebody_takes_it(links):
    settings = RangeSettings(tells_resets=True)

    for _ in range(2):
        with pytest.raises(ProgressReset) as told:
            list(read_ranges(links, [WHOLE], group="billing", settings=settings))
        assert (told.value.queue, told.value.offset) == (QUEUE, 3)
    list(read_ranges(links, [WHOLE], group="billing"))
    again = list(read_ranges(links, [WHOLE], group="billing", settings=settings))

    assert [(chunk.start, chunk.end) for chunk in again] == [(10, 20)]


def test_others_read_on(links):
    chunks = list(read_ranges(links, [WHOLE], group="billing"))

    assert [(chunk.start, chunk.end) for chunk in chunks] == [(10, 20)]
