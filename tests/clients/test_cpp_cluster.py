"""librocketmq against two broker processes that share a topic, as `orbitmq up` starts them."""

from __future__ import annotations

import asyncio

import pytest

from orbitmq import Admin
from orbitmq.wire.bodies import TopicRouteData
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers import GetRouteInfoRequest
from orbitmq.wire.javajson import decode_body
from tests.support.clients import CppClient
from tests.support.command import Started
from tests.support.remoting import asked

FREE = ("--namesrv-port", "0", "--broker-port", "0")


@pytest.fixture
def up(tmp_path):
    with Started("up", *FREE, "--brokers", "2", cwd=tmp_path) as up:
        yield up


def brokers_of(name_server: str, topic: str) -> set[str]:
    wanted = GetRouteInfoRequest(topic=topic)
    answer = asyncio.run(asked(name_server, RequestCode.GET_ROUTEINFO_BY_TOPIC, wanted))
    if answer.code != 0:
        return set()
    return {queues.broker_name for queues in decode_body(TopicRouteData, answer.body).queue_datas}


def test_messages_are_spread_over_all_brokers_and_come_from_all(plain_package, tmp_path, up):
    name_server = up.address("name server")
    bodies = [f"order {number}" for number in range(32)]

    with CppClient(plain_package, tmp_path / "home") as client:
        client.produce("makers", name_server)
        results = client.send("sync", *({"topic": "Orders", "body": body} for body in bodies))
        client.until(lambda: len(brokers_of(name_server, "Orders")) == 2, "the topic on both")
        client.ask("consume", group="billing", name_server=name_server, topic="Orders")
        client.until_bodies(bodies)

        assert [status for status, _, _ in results] == [0] * 32
        with Admin(name_server=name_server) as admin:
            stored = admin.topics.status("Orders")
        # The client sends again what was not answered within its 3 s; all else comes once.
        assert len(client.bodies()) == stored.messages
        assert set(client.bodies()) == set(bodies)
        assert len({queue.queue.broker for queue in stored.queues if queue.messages}) == 2
    assert up.stop() == 0
    assert "Traceback" not in up.errors
