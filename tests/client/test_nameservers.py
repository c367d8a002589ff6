"""Several name servers, of which not all answer."""

from __future__ import annotations

import socket

import pytest

from orbitmq.client.errors import NotANameServer
from orbitmq.errors import BrokerRefused
from orbitmq.remoting.settings import Address
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.codes import RequestCode, ResponseCode
from tests.support.client import ScriptedNameServer, running_engine, topic_route

A = Address("127.0.0.1", 10911)


@pytest.fixture
def dead():
    """An address that nobody listens on, and nobody else will for the time of the test."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


async def test_a_dead_name_server_is_passed_over_whatever_the_order(dead):
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic("orders")
        for _ in range(6):
            async with running_engine([dead, cluster.name_server]) as engine:
                assert (await engine.routes.get("orders")).topic == "orders"
                assert str(engine.name_servers[0]) == cluster.name_server
                # From now on the living one is asked at once.
                assert (await engine.routes.get("orders", refresh=True)).topic == "orders"


async def test_when_the_one_in_use_dies_the_next_is_asked():
    first = ScriptedNameServer(routes={"orders": topic_route({"broker-a": {0: A}})})
    second = ScriptedNameServer(routes={"orders": topic_route({"broker-b": {0: A}})})
    async with (
        first.serving(),
        second.serving(),
        running_engine([first.address, second.address]) as engine,
    ):
        await engine.routes.get("orders")
        used, other = (first, second) if first.requests else (second, first)
        assert used.server is not None
        await used.server.stop(grace=0)

        await engine.routes.get("orders", refresh=True)

        assert (used.asked("orders"), other.asked("orders")) == (1, 1)


async def test_a_broker_given_as_name_server_is_recognised():
    async with AsyncEmbeddedCluster() as cluster:
        broker = str(cluster.brokers[0].address)
        async with running_engine([broker]) as engine:
            with pytest.raises(NotANameServer, match=r"probably a broker.*9876") as wrong:
                await engine.routes.get("orders")
            with pytest.raises(NotANameServer):
                await engine.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)

    assert wrong.value.address == broker
    assert wrong.value.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


async def test_one_that_is_not_ready_is_passed_over_and_its_refusal_is_the_last_word():
    starting = ScriptedNameServer(refusal=ResponseCode.SYSTEM_ERROR)
    ready = ScriptedNameServer(routes={"orders": topic_route({"broker-a": {0: A}})})
    async with starting.serving(), ready.serving():
        for _ in range(6):
            async with running_engine([starting.address, ready.address]) as engine:
                assert (await engine.routes.get("orders")).topic == "orders"
        async with running_engine(starting.address) as engine:
            with pytest.raises(BrokerRefused, match=r"not now \(SYSTEM_ERROR"):
                await engine.routes.get("orders")


async def test_an_answer_about_the_question_is_final():
    first, second = ScriptedNameServer(), ScriptedNameServer()
    async with (
        first.serving(),
        second.serving(),
        running_engine([first.address, second.address]) as engine,
    ):
        with pytest.raises(BrokerRefused, match="REQUEST_CODE_NOT_SUPPORTED"):
            await engine.ask_name_server(RequestCode.GET_NAMESRV_CONFIG)

        assert len(engine.name_servers) == 2
