"""The fixtures, in a pytest run of their own as users have it."""

from __future__ import annotations

import importlib.metadata

import pytest

pytest_plugins = ["pytester"]

PLUGIN = "orbitmq.testing.plugin"

USERS_TESTS = """
import asyncio
import threading

from orbitmq import Consumer
from orbitmq.remoting.settings import parse_address
from orbitmq.remoting.channels import connect
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers import GetMaxOffsetRequest

seen = []


def count(address, topic):
    async def go():
        connection = await connect(parse_address(address), owner=Dispatcher({}))
        header = GetMaxOffsetRequest(topic=topic, queue_id=0)
        answer = await connection.request(RequestCode.GET_MAX_OFFSET, header)
        connection.close()
        await connection.wait_closed()
        return answer.ext_fields["offset"]

    return asyncio.run(go())


def test_a_broker_is_there(orbit_broker, orbit_topic):
    assert count(orbit_broker, orbit_topic) == "0"


def test_topics_are_called_like_tests(orbit_cluster, orbit_topic):
    assert orbit_topic.startswith("test_topics_are_called_like_tests-")
    assert orbit_cluster.messages(orbit_topic) == []


def test_the_clock_is_the_clusters(orbit_cluster, orbit_clock):
    assert orbit_cluster.clock is orbit_clock


def test_a_program_that_consumes(orbit_cluster, orbit_topic, orbit_client):
    orbit_cluster.send(orbit_topic, b"paid", "shipped", tags="order")
    bodies = []
    consumer = Consumer("billing", client=orbit_client, consume_from="first")
    both = threading.Event()

    @consumer.on(orbit_topic, tags="order")
    def bill(message):
        bodies.append(message.body)
        if len(bodies) == 2:
            both.set()

    with consumer:
        assert both.wait(30)

    orbit_cluster.until_consumed("billing", orbit_topic)
    assert sorted(bodies) == [b"paid", b"shipped"]


def test_a_program_that_produces(orbit_cluster, orbit_topic, orbit_producer):
    orbit_producer.send(orbit_topic, b"paid")

    assert [message.body for message in orbit_cluster.messages(orbit_topic)] == [b"paid"]


def test_one(orbit_cluster, orbit_shared_cluster, orbit_shared_topic):
    seen.append((orbit_cluster.name_server, orbit_shared_cluster.name_server, orbit_shared_topic))


def test_two(orbit_cluster, orbit_shared_cluster, orbit_shared_topic):
    seen.append((orbit_cluster.name_server, orbit_shared_cluster.name_server, orbit_shared_topic))
    own, shared, topics = zip(*seen)
    assert len(set(own)) == 2
    assert len(set(shared)) == 1
    assert len(set(topics)) == 2
"""


@pytest.fixture
def words():
    """What makes pytest load the plugin, where the installed metadata does not say it yet."""
    declared = importlib.metadata.entry_points(group="pytest11")
    is_known = any(point.value == PLUGIN for point in declared)
    return [
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        *([] if is_known else ["-p", PLUGIN]),
    ]


@pytest.mark.feature("P5")
def test_the_fixtures_work_in_a_users_project(pytester, words):
    pytester.makepyfile(USERS_TESTS)

    ran = pytester.runpytest_subprocess(*words)

    ran.assert_outcomes(passed=7)


def test_a_run_that_uses_no_fixture_imports_no_broker(pytester, words):
    pytester.makepyfile(
        """
        import sys

        def test_nothing():
            loaded = [name for name in sys.modules if name.startswith("orbitmq.broker")]
            assert not loaded
            assert "numpy" not in sys.modules
        """
    )

    ran = pytester.runpytest_subprocess(*words)

    ran.assert_outcomes(passed=1)
