"""Where the brokers of tests of clients live.

Tests that prove a row of features run against brokers in another process; those that have to look
into a broker, or change how it behaves, say so with `usefixtures("inside")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import pytest

from orbitmq.testing import AsyncEmbeddedCluster, EmbeddedCluster
from tests.support.brokerprocess import BlockingProcessCluster, BrokerProcess, ProcessCluster
from tests.support.brokerprogram import adjusted


class NewCluster(Protocol):
    """Makes a cluster, which is to be started."""

    def __call__(
        self, *, brokers: int = 1, changes: Mapping[str, Any] | None = None
    ) -> AsyncEmbeddedCluster:
        """`changes` are settings of its brokers; those of a part are a mapping of their own."""


class NewBlockingCluster(Protocol):
    """The same for tests without an event loop."""

    def __call__(self, *, brokers: int = 1) -> EmbeddedCluster: ...


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


def _inside(*, brokers: int = 1, changes: Mapping[str, Any] | None = None) -> AsyncEmbeddedCluster:
    return AsyncEmbeddedCluster(brokers=brokers, adjust=partial(adjusted, changes=changes or {}))


def _is_apart(request: pytest.FixtureRequest) -> bool:
    proves_a_row = request.node.get_closest_marker("feature") is not None
    return proves_a_row and "inside" not in request.fixturenames
