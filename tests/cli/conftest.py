"""A cluster of two brokers for all tests of a file, and the command that asks it."""

from __future__ import annotations

import itertools

import pytest

from orbitmq.client.consumer.consumer import Consumer
from orbitmq.testing import EmbeddedCluster
from tests.support.nursery import Nursery
from tests.support.orbitmqcli import Cli


@pytest.fixture(scope="module")
def cluster():
    with EmbeddedCluster(brokers=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def names():
    """Names that nobody has used."""
    return (f"name-{number}" for number in itertools.count())


@pytest.fixture(scope="session")
def nursery():
    with Nursery() as nursery:
        yield nursery


@pytest.fixture(scope="module")
def cli(cluster, nursery):
    return Cli(cluster.name_server, nursery)


@pytest.fixture
def consumers():
    """Those that a test has started."""
    started: list[Consumer] = []
    yield started
    for consumer in started:
        consumer.stop()
