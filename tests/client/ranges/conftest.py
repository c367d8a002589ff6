"""Connections to the shared cluster, for tests that read and write ranges of its queues."""

from __future__ import annotations

import pytest

from orbitmq.client.ranges.connections import RangeAccess, RangeConnections


@pytest.fixture
def access(orbit_shared_cluster):
    return RangeAccess(name_servers=(orbit_shared_cluster.name_server,))


@pytest.fixture
def links(access):
    found = RangeConnections(access)
    yield found
    found.close()
