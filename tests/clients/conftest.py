"""The C++ clients, and clusters for them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orbitmq.broker.settings import BrokerSettings
from orbitmq.testing import EmbeddedCluster
from tests.support.clients import CppClient, Unobtainable, obtain

StartClient = Callable[..., CppClient]


def _obtained(package: str) -> Path:
    try:
        return obtain(package)
    except Unobtainable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def plain_package():
    """librocketmq 1.x with every way to send, and a pull consumer."""
    return _obtained("rocketmq")


@pytest.fixture(scope="session")
def transactional_package():
    """librocketmq 1.x with transactions."""
    return _obtained("rocketmq-client-python")


@pytest.fixture
def cluster(plain_package):
    """A cluster whose delays are short."""
    del plain_package  # where it cannot be had, no cluster is needed
    with EmbeddedCluster(adjust=short_delays) as cluster:
        cluster.create_topic("Orders", queues=4)
        yield cluster


@pytest.fixture
def start_client(cluster, plain_package, tmp_path):
    """Starts processes with the client, each with a home of its own; ends them all."""
    del cluster  # which ends after them
    homes = (tmp_path / f"home-{number}" for number in itertools.count())
    with contextlib.ExitStack() as started:

        def start(package=plain_package):
            return started.enter_context(CppClient(package, next(homes)))

        yield start


@pytest.fixture
def client(start_client, cluster):
    """A client that has a producer."""
    client = start_client()
    client.produce("makers", cluster.name_server)
    return client


def short_delays(settings: BrokerSettings) -> BrokerSettings:
    """Level n takes n tenths of a second."""
    levels = tuple(level / 10 for level in range(1, 19))
    return replace(settings, store=replace(settings.store, delay_levels=levels))
