"""The engine: asking and telling, its life, and what it leaves behind."""

from __future__ import annotations

import asyncio
import logging

import pytest

from orbitmq.client.engine import NOT_MINE, Engine
from orbitmq.client.settings import ClientSettings
from orbitmq.errors import BrokerRefused, NotRunning, SettingError, WrongUse
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import Address, ConnectFailed, RequestTimedOut, ServerSettings
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command, Credentials, access_key_of, is_signed_by
from orbitmq.wire.headers import GetMaxOffsetRequest
from tests.support.client import (
    MemberStub,
    ScriptedBroker,
    ScriptedNameServer,
    quick_settings,
    running_engine,
    topic_route,
)
from tests.support.remoting import serving, until

NOBODY = "127.0.0.1:1"
ECHO, HOLD, GONE = 10, 11, 12


def _echo(_: Connection, request: Command) -> Command:
    return request.answer(ResponseCode.SUCCESS, body=bytes(request.body))


def _ignore(_: Connection, __: Command) -> None:
    return None


# ---- asking


async def test_a_broker_is_asked_and_answers():
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic("orders")
        async with running_engine(cluster.name_server) as engine:
            where = await engine.routes.broker_of("orders")

            answer = await engine.ask(
                where, RequestCode.GET_MAX_OFFSET, GetMaxOffsetRequest(topic="orders", queue_id=0)
            )

            assert answer.ext_fields["offset"] == "0"


async def test_a_refusal_is_an_error_unless_it_is_accepted():
    async with AsyncEmbeddedCluster() as cluster, running_engine(cluster.name_server) as engine:
        where = cluster.brokers[0].address

        with pytest.raises(BrokerRefused) as refused:
            await engine.ask(where, 9999)
        accepted = await engine.ask(where, 9999, accept=frozenset({0, 3}))

        assert (refused.value.name, refused.value.request_code) == (
            "REQUEST_CODE_NOT_SUPPORTED",
            9999,
        )
        assert refused.value.address == str(where)
        assert accepted.code == 3


async def test_silence_and_absence_are_told_apart():
    async with serving({HOLD: _ignore}) as server, running_engine(NOBODY) as engine:
        with pytest.raises(RequestTimedOut, match=r"within 0.\d+ s"):
            await engine.ask(server.address, HOLD, timeout=0.05)
        with pytest.raises(ConnectFailed):
            await engine.ask(Address("127.0.0.1", 1), HOLD)


async def test_a_server_that_sends_us_away_is_asked_again_on_a_new_connection():
    release = asyncio.Event()

    async def hold(_, request):
        await release.wait()
        return request.answer(ResponseCode.SUCCESS, body=b"late")

    async with serving({ECHO: _echo, HOLD: hold}) as server, running_engine(NOBODY) as engine:
        held = asyncio.create_task(engine.ask(server.address, HOLD, timeout=20))
        await until(lambda: any(each.open_requests for each in server.connections))
        (first,) = server.connections
        first.finish("stopping")

        answer = await engine.ask(server.address, ECHO, body=b"again")

        # What was open on the old connection is still answered there.
        assert bytes(answer.body) == b"again"
        assert len(server.connections) == 2
        release.set()
        assert bytes((await held).body) == b"late"
        await until(lambda: len(server.connections) == 1)


# ---- requests of brokers


async def test_each_member_answers_what_is_meant_for_it():
    def answering(group):
        def answer(_, request):
            if bytes(request.body) != group:
                return NOT_MINE
            return request.answer(ResponseCode.SUCCESS, body=b"from " + group)

        return answer

    async with serving({ECHO: _echo}) as server, running_engine(NOBODY) as engine:
        ends = [engine.serve(GONE, answering(group)) for group in (b"billing", b"shipping")]
        await engine.ask(server.address, ECHO)
        (connection,) = server.connections

        first = await connection.request(GONE, body=b"billing")
        second = await connection.request(GONE, body=b"shipping")
        nobody = await connection.request(GONE, body=b"other")
        ends[1]()
        ended = await connection.request(GONE, body=b"shipping")

        assert [bytes(each.body) for each in (first, second)] == [b"from billing", b"from shipping"]
        assert (nobody.code, ended.code) == (ResponseCode.SYSTEM_ERROR, ResponseCode.SYSTEM_ERROR)
        assert "nobody" in (nobody.remark or "")


# ---- who it is and how it is protected


async def test_every_request_is_signed_and_no_secret_is_logged(caplog):
    caplog.set_level(logging.DEBUG)
    credentials = Credentials(access_key="who", secret_key="hush-hush")  # noqa: S106
    seen: list[Command] = []

    def note(_, request):
        seen.append(request)
        return request.answer(ResponseCode.SUCCESS)

    async with (
        serving({ECHO: note}) as server,
        running_engine(NOBODY, credentials=credentials) as engine,
    ):
        await engine.ask(server.address, ECHO, body=b"x")
        await engine.tell(server.address, ECHO, body=b"y")
        await until(lambda: len(seen) == 2)

    assert all(is_signed_by(request, "hush-hush") for request in seen)
    assert {access_key_of(request) for request in seen} == {"who"}
    assert "hush-hush" not in caplog.text


# ---- life


async def test_a_stop_may_be_called_by_many_and_again():
    engine = Engine(quick_settings(NOBODY))
    await engine.start()

    await asyncio.gather(*(engine.stop() for _ in range(3)))
    await engine.stop()

    assert not engine.is_running


async def test_before_the_start_and_after_the_stop_the_engine_refuses():
    engine = Engine(quick_settings(NOBODY))
    with pytest.raises(NotRunning, match="start it"):
        await engine.ask(Address("127.0.0.1", 1), ECHO)
    with pytest.raises(NotRunning, match="start it"):
        engine.join(MemberStub())
    await engine.start()
    with pytest.raises(WrongUse, match="running already"):
        await engine.start()
    await engine.stop()

    with pytest.raises(NotRunning, match="it was stopped"):
        await engine.ask(Address("127.0.0.1", 1), ECHO)
    with pytest.raises(NotRunning, match="it was stopped"):
        await engine.start()
    with pytest.raises(NotRunning, match="it was stopped"):
        engine.spawn(asyncio.sleep(0), "too late")


async def test_use_from_another_loop_is_refused_with_a_reason():
    async def use(engine):
        await engine.ask(Address("127.0.0.1", 1), ECHO)

    async with running_engine(NOBODY) as engine:
        with pytest.raises(WrongUse, match="another event loop"):
            await asyncio.to_thread(asyncio.run, use(engine))
        with pytest.raises(WrongUse, match="another event loop"):
            await asyncio.to_thread(engine.join, MemberStub())


async def test_an_engine_needs_a_name_server():
    with pytest.raises(SettingError, match=r"client\.name_servers"):
        Engine(ClientSettings())


async def test_a_broker_that_was_away_at_first_is_greeted_when_it_comes():
    broker = ScriptedBroker()
    async with broker.serving():
        address = broker.address
    again = ScriptedBroker()
    async with ScriptedNameServer().serving() as names, running_engine(names.address) as engine:
        names.routes["orders"] = topic_route({"broker-a": {0: address}})
        await engine.routes.get("orders")
        engine.join(MemberStub(producer_group="shop"))
        assert list(await engine.heartbeat()) == [address]

        async with again.serving(ServerSettings(port=address.port)):
            await until(lambda: len(again.heartbeats) == 1)
            assert await engine.heartbeat() == {}
