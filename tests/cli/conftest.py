"""A cluster of two brokers for all tests of a file, and the command that asks it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from orbitmq.client.consumer.consumer import Consumer
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.testing import EmbeddedCluster
from tests.support.nursery import Nursery
from tests.support.orbitmqcli import Cli


@pytest.fixture(scope="module")
def cluster():
    with EmbeddedCluster(brokers=2) as cluster:
        yield cluster


def consumer_of(
    cluster: EmbeddedCluster, group: str, topic: str, handler: Any = lambda _: None, **options: Any
) -> Consumer:
    """A consumer from the first message on, which reports progress often; not started."""
    given: dict[str, Any] = {
        "consume_from": "first",
        "rebalance": RebalanceSettings(persist=0.1),
    } | options
    consumer = Consumer(group, name_server=cluster.name_server, **given)
    consumer.on(topic)(handler)
    return consumer


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
