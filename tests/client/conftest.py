"""Where the brokers of tests of clients live.

Tests that prove a row of features run against brokers in another process; those that have to look
into a broker, or change how it behaves, say so with `usefixtures("inside")`.

`cluster` has the topic `orders`. A module that needs another number of brokers or of queues has a
constant `BROKER_COUNT` or `QUEUE_COUNT`.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from orbitmq.testing import AsyncEmbeddedCluster, EmbeddedCluster
from tests.support.broker import RawClient
from tests.support.brokerprocess import BlockingProcessCluster, BrokerProcess, ProcessCluster
from tests.support.brokerprogram import adjusted


@pytest.fixture(scope="session")
def broker_process():
    """One process for the brokers of all tests that this one runs."""
    with BrokerProcess() as process:
        yield process


@pytest.fixture
def inside():
    """Asked for by tests that look into the broker: it lives in their own process."""


@pytest.fixture
def new_cluster(request):
    """How this test gets its cluster."""
    if not _is_apart(request):
        return _inside
    process: BrokerProcess = request.getfixturevalue("broker_process")
    return partial(ProcessCluster, process)


@pytest.fixture
def new_blocking_cluster(request):
    """The same for a test without an event loop."""
    if not _is_apart(request):
        return EmbeddedCluster
    process: BrokerProcess = request.getfixturevalue("broker_process")
    return partial(BlockingProcessCluster, process)


@pytest.fixture
async def cluster(new_cluster, request):
    brokers = getattr(request.module, "BROKER_COUNT", 1)
    async with new_cluster(brokers=brokers) as running:
        await running.create_topic("orders", queues=getattr(request.module, "QUEUE_COUNT", 4))
        yield running


@pytest.fixture
async def client(cluster):
    """A raw connection to the first broker."""
    client = await RawClient.open(cluster.brokers[0])
    yield client
    await client.close()


@pytest.fixture
def sender(client):
    return client


@pytest.fixture
def dead():
    """An address that nobody listens on, and nobody else will for the time of the test."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def _inside(*, brokers: int = 1, changes: Mapping[str, Any] | None = None) -> AsyncEmbeddedCluster:
    return AsyncEmbeddedCluster(brokers=brokers, adjust=partial(adjusted, changes=changes or {}))


def _is_apart(request: pytest.FixtureRequest) -> bool:
    proves_a_row = request.node.get_closest_marker("feature") is not None
    return proves_a_row and "inside" not in request.fixturenames
