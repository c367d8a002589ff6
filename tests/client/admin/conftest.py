"""Fixtures of the tests of administration."""

from __future__ import annotations

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client_admin import World


@pytest.fixture
async def world():
    """Two brokers, an admin, and the topic `orders` with two queues on each broker."""
    async with (
        AsyncEmbeddedCluster(brokers=2) as cluster,
        AsyncAdmin(name_server=cluster.name_server, clock=cluster.clock) as admin,
    ):
        await cluster.create_topic("orders", queues=2)
        world = World(cluster, admin)
        try:
            yield world
        finally:
            await world.close()
