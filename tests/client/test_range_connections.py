"""The connections of a process to a cluster: whether anybody is there, and who is tried."""

from __future__ import annotations

import pytest

from orbitmq.client.errors import NoNameServer
from orbitmq.client.ranges.connections import RangeAccess, RangeConnections
from orbitmq.client.routes import Queue
from orbitmq.testing import EmbeddedCluster
from tests.support.scriptedbroker import ScriptedBroker


def test_a_name_server_that_has_answered_once_may_go_away():
    with EmbeddedCluster() as cluster:
        address = cluster.name_server
        access = RangeAccess(name_servers=(address,))
        early = RangeConnections(access)
        early.check_reachable("a topic that nobody has")
        early.close()
    late = RangeConnections(access)

    early.check_reachable()
    with pytest.raises(NoNameServer, match=address):
        late.check_reachable()


@pytest.mark.parametrize(
    ("is_registered", "replicas", "expected"),
    [
        (True, 0, ["master"] * 3),
        (True, 1, ["master", "first", "master", "first"]),
        (True, 2, ["master", "first", "master", "second", "master"]),
        (False, 2, ["first", "second", "first"]),
    ],
)
def test_between_two_replicas_the_master_is_tried(is_registered, replicas, expected):
    with (
        ScriptedBroker(lambda _: None) as first,
        ScriptedBroker(lambda _: None) as second,
        ScriptedBroker(
            lambda _: None,
            replicas=(first.address, second.address)[:replicas],
            is_registered=is_registered,
        ) as master,
    ):
        names = {master.address: "master", first.address: "first", second.address: "second"}
        links = RangeConnections(RangeAccess(name_servers=(master.address,), timeout=5.0))
        tried = []
        for attempt in range(len(expected)):
            connection, is_master = links.lease(Queue("orders", "broker-a", 0), attempt=attempt)
            tried.append(names[str(connection.address)])
            assert is_master is (tried[-1] == "master")
            connection.close()
        links.close()

    assert tried == expected
