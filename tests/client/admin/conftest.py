"""Fixtures of the tests of administration."""

from __future__ import annotations

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.testing import AsyncEmbeddedCluster, EmbeddedCluster
from tests.support.client_admin import GROUP, World


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


@pytest.fixture(scope="module")
def shared_cluster():
    """Two brokers with the topic `orders`, which no test of the module changes."""
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("orders", queues=2)
        yield cluster


@pytest.fixture
async def shared(shared_cluster):
    """An admin of the shared cluster, where the group exists on both brokers."""
    async with AsyncAdmin(name_server=shared_cluster.name_server) as admin:
        await admin.groups.create(GROUP)
        yield admin
