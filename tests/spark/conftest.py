"""One Spark session and one cluster for all tests of the source."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from tests.support.sparksession import running_session


@pytest.fixture(scope="session")
def spark():
    with running_session("orbitmq tests") as session:
        yield session


@pytest.fixture
def cluster(orbit_shared_cluster):
    """A cluster that tests share; each has topics and groups of its own."""
    return orbit_shared_cluster


@pytest.fixture
def topic(orbit_shared_topic):
    """A new topic in `cluster` with four queues, called like the test."""
    return orbit_shared_topic


@pytest.fixture
def runs_as(monkeypatch):
    """Makes this process look like one that was started with a module, as Spark does."""

    def run(module: str, **names: object) -> SimpleNamespace:
        main = SimpleNamespace(__spec__=SimpleNamespace(name=module), **names)
        monkeypatch.setitem(sys.modules, "__main__", main)
        return main

    return run
