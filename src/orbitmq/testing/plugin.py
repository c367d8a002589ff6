"""pytest fixtures for users' tests, found by pytest when OrbitMQ is installed.

    def test_an_order_is_announced(orbit_cluster, orbit_topic):
        announce(order, name_server=orbit_cluster.name_server, topic=orbit_topic)

        assert [message.body for message in orbit_cluster.messages(orbit_topic)] == [b"paid"]

Nothing of a broker is imported before a test requests a fixture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from orbitmq.client.producer.producer import Producer
    from orbitmq.client.settings import ClientSettings
    from orbitmq.testing.cluster import EmbeddedCluster, MovableClock


#: Names of topics may have no more; a part is left for the number.
_LONGEST = 100


@pytest.fixture
def orbit_cluster() -> Iterator[EmbeddedCluster]:
    """A cluster of one broker for this test alone."""
    from orbitmq.testing import EmbeddedCluster  # noqa: PLC0415  # see above

    with EmbeddedCluster() as cluster:
        yield cluster


@pytest.fixture
def orbit_broker(orbit_cluster: EmbeddedCluster) -> str:
    """The address of the broker of `orbit_cluster`."""
    return orbit_cluster.broker_addresses[0]


@pytest.fixture
def orbit_client(orbit_cluster: EmbeddedCluster) -> ClientSettings:
    """What to give to a producer, a consumer or an admin of `orbit_cluster` as `client`."""
    from orbitmq.client.settings import ClientSettings  # noqa: PLC0415  # see above

    return ClientSettings(name_servers=(orbit_cluster.name_server,))


@pytest.fixture
def orbit_producer(orbit_client: ClientSettings) -> Iterator[Producer]:
    """A started producer of `orbit_cluster`."""
    from orbitmq.client.producer.producer import Producer  # noqa: PLC0415  # see above

    with Producer("orbitmq-testing", client=orbit_client) as producer:
        yield producer


@pytest.fixture
def orbit_clock(orbit_cluster: EmbeddedCluster) -> MovableClock:
    """The clock of `orbit_cluster`: moved on, delayed messages arrive within a second."""
    return orbit_cluster.clock


@pytest.fixture
def orbit_topic(orbit_cluster: EmbeddedCluster, request: pytest.FixtureRequest) -> str:
    """A new topic in `orbit_cluster`, called like the test."""
    return _new_topic(orbit_cluster, request)


@pytest.fixture(scope="session")
def orbit_shared_cluster() -> Iterator[EmbeddedCluster]:
    """One cluster for all tests that ask for it; give each its own topics and groups."""
    from orbitmq.testing import EmbeddedCluster  # noqa: PLC0415  # see above

    with EmbeddedCluster() as cluster:
        yield cluster


@pytest.fixture
def orbit_shared_topic(
    orbit_shared_cluster: EmbeddedCluster, request: pytest.FixtureRequest
) -> str:
    """A new topic in `orbit_shared_cluster`, called like the test."""
    return _new_topic(orbit_shared_cluster, request)


def _new_topic(cluster: EmbeddedCluster, request: pytest.FixtureRequest) -> str:
    # The same test may run twice in a session, with other parameters or in another file.
    number = request.config.stash.get(_NUMBER, 0) + 1
    request.config.stash[_NUMBER] = number
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", request.node.name)[:_LONGEST].strip("-")
    topic = f"{name}-{number}"
    cluster.create_topic(topic)
    return topic


_NUMBER = pytest.StashKey[int]()
