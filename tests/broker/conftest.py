"""Fixtures of the broker's tests: real brokers and name servers on free ports of this loop."""

from __future__ import annotations

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.settings import ServerSettings
from tests.support.broker import RawClient, small_settings
from tests.support.delivery import hand_broker, kill


@pytest.fixture
def started():
    """The brokers that are stopped at the end of the test."""
    brokers: list[Broker] = []
    return brokers


@pytest.fixture
def crash(started):
    async def crash_one(broker):
        started.remove(broker)
        await kill(broker)

    return crash_one


@pytest.fixture
async def start_broker(tmp_path, started):
    """Starts brokers with changed settings; stops those that the test has left running."""

    async def start(*, root="broker", parts=None, **changes):
        broker = Broker(small_settings(tmp_path / root, **changes), **(parts or {}))
        await broker.start()
        started.append(broker)
        return broker

    yield start
    for broker in started:
        await broker.stop()


@pytest.fixture
async def broker(start_broker):
    return await start_broker()


@pytest.fixture
async def name_server():
    server = NameServer(NameServerSettings(server=ServerSettings(port=0)))
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def open_client():
    """Opens connections to a broker, and leaves none open."""
    opened: list[RawClient] = []

    async def open_one(broker, prepare=None):
        client = await RawClient.open(broker, prepare)
        opened.append(client)
        return client

    yield open_one
    for client in opened:
        await client.close()


@pytest.fixture
async def client(broker, open_client):
    return await open_client(broker)


@pytest.fixture
async def hand(tmp_path):
    """A broker whose clock is moved by hand."""
    async with hand_broker(tmp_path) as (hand, _):
        yield hand


@pytest.fixture
async def hand_client(hand):
    client = await RawClient.open(hand.broker)
    yield client
    await client.close()
