"""Fixtures of the console's tests: a cluster, and a console that watches it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client_admin import World
from tests.support.consoles import Browser, console_of


@dataclass
class Desk:
    """Where a test sits: brokers on one side, the page on the other."""

    cluster: AsyncEmbeddedCluster
    world: World
    browser: Browser

    @property
    def aim(self) -> str:
        """How commands end that ask this cluster."""
        return f" --name-server {self.cluster.name_server}"


def read_only(browser: Browser, *, write: bool = False) -> None:
    """Take the rights of a console away, or give them back."""
    parts = browser.console.state
    parts.settings = replace(parts.settings, write=write)


@pytest.fixture
async def desk():
    """Two brokers, the topic `orders` with two queues on each, a console with write rights."""
    async with (
        AsyncEmbeddedCluster(brokers=2) as cluster,
        AsyncAdmin(name_server=cluster.name_server, clock=cluster.clock) as admin,
    ):
        await cluster.create_topic("orders", queues=2)
        world = World(cluster, admin)
        try:
            async with console_of(cluster) as browser:
                yield Desk(cluster, world, browser)
        finally:
            await world.close()
