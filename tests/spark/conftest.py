"""One Spark session and one cluster for all tests of the source."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.support.filling import make_topic
from tests.support.sparking import run_module
from tests.support.sparksession import running_session

#: Its session has to outlast workers that have nothing to do for a minute.
LONGEST = "test_a_local_session_says_nothing_unless_something_is_wrong"


@pytest.fixture(scope="session")
def spark():
    with running_session("orbitmq tests") as session:
        yield session


@pytest.fixture(scope="session", autouse=True)
def quiet_session(request, tmp_path_factory):
    """The longest test's process, which begins with the first test and runs beside the others."""
    if not any(item.name == LONGEST for item in request.session.items):
        yield None
        return
    cluster, folder = request.getfixturevalue("orbit_shared_cluster"), tmp_path_factory.mktemp("q")
    make_topic(cluster, "quiet", 10)
    cluster.create_topic("quiet-copies", queues=1)
    # By these Spark would find settings of its own, and workers other ones.
    settings = ("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_IP")
    words = (cluster.name_server, "quiet", "quiet-copies", str(folder))
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run_module, "sparkquiet", *words, cwd=folder, without=settings)


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
