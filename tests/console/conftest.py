"""Fixtures of the console's tests: a cluster, what looks at it, and a console with a browser."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.engine import Engine
from orbitmq.client.routes import Queue
from orbitmq.testing import AsyncEmbeddedCluster
from tests.support.client_admin import World
from tests.support.consoles import Browser, console_of, settings_for

QUEUE = Queue("orders", "broker-a", 0)
OTHER = Queue("orders", "broker-b", 1)


@dataclass
class Desk:
    """A cluster, and the console that a test reads."""

    cluster: AsyncEmbeddedCluster
    world: World
    browser: Browser

    @property
    def aim(self) -> str:
        """The end of a command for this cluster."""
        return f" --name-server {self.cluster.name_server}"


@dataclass
class Watch:
    """A cluster, and what the parts of a console look at it with."""

    cluster: AsyncEmbeddedCluster
    engine: Engine
    admin: AsyncAdmin
    world: World


def read_only(browser: Browser, *, write: bool = False) -> None:
    """Take the rights of a console away, or give them back."""
    state = browser.console.state
    state.settings = replace(state.settings, write=write)


async def die(
    world: World, count: int, reason: str = "why", *, start: int = 0, group: str = "billing"
) -> None:
    """Make dead letters of `orders`, with a key and an id each."""
    for number in range(start, start + count):
        await world.die(
            QUEUE,
            f"body {number}".encode(),
            reason,
            group=group,
            KEYS=f"order-{number}",
            UNIQ_KEY=f"7F000001{sum(group.encode()):08X}{number:016X}",
        )


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


@pytest.fixture
async def watch():
    """Two brokers with the topic `orders`, and no console."""
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(AsyncEmbeddedCluster(brokers=2))
        await cluster.create_topic("orders", queues=4)
        settings = settings_for(cluster).client
        engine = await stack.enter_async_context(Engine(settings, clock=cluster.clock))
        admin = AsyncAdmin.on(engine)
        world = World(cluster, admin)
        stack.push_async_callback(world.close)
        yield Watch(cluster, engine, admin, world)
