"""The engine: asking and telling, its life, and what it leaves behind."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orbitmq.client.engine import NOT_MINE, Engine
from orbitmq.client.settings import ClientSettings
from orbitmq.errors import BrokerRefused, NotRunning, SettingError, WrongUse
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.settings import (
    Address,
    ChannelSettings,
    ConnectFailed,
    ConnectionLost,
    RequestTimedOut,
    ServerSettings,
)
from orbitmq.remoting.tls import ClientTls, ServerTls, TlsMode
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
TLS_FOLDER = Path(__file__).resolve().parents[1] / "data" / "tls"


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


async def test_telling_needs_no_answer():
    heard: list[bytes] = []

    def hear(_, request):
        assert request.is_one_way
        heard.append(bytes(request.body))

    async with serving({ECHO: hear}) as server, running_engine(NOBODY) as engine:
        await engine.tell(server.address, ECHO, body=b"news")

        await until(lambda: heard == [b"news"])


async def test_requests_go_on_after_a_broker_was_restarted_under_them():
    async with AsyncEmbeddedCluster() as cluster:
        await cluster.create_topic("orders")
        async with running_engine(cluster.name_server) as engine:
            where = await engine.routes.broker_of("orders")
            header = GetMaxOffsetRequest(topic="orders", queue_id=0)
            answered, failed = 0, 0
            is_over = False

            async def ask_on():
                nonlocal answered, failed
                while not is_over:
                    try:
                        await engine.ask(where, RequestCode.GET_MAX_OFFSET, header)
                        answered += 1
                    except (ConnectFailed, ConnectionLost, BrokerRefused, RequestTimedOut):
                        failed += 1
                        await asyncio.sleep(0.005)

            asking = [asyncio.create_task(ask_on()) for _ in range(4)]
            await until(lambda: answered > 20)
            await cluster.restart_broker()
            before = answered

            await until(lambda: answered > before + 20)

            is_over = True
            await asyncio.gather(*asking)


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


async def test_a_server_that_sends_us_away_twice_has_refused():
    asked: list[Connection] = []

    def away(connection, request):
        asked.append(connection)
        return request.answer(ResponseCode.GO_AWAY, remark="please go away")

    async with serving({ECHO: away}) as server, running_engine(NOBODY) as engine:
        with pytest.raises(BrokerRefused, match="GO_AWAY"):
            await engine.ask(server.address, ECHO)

        assert len(asked) == len(set(asked)) == 2


async def test_members_keep_being_known_to_a_broker_that_sends_them_away():
    broker = ScriptedBroker(handlers={ECHO: _echo})
    async with (
        broker.serving(),
        ScriptedNameServer().serving() as names,
        running_engine(names.address) as engine,
    ):
        names.routes["orders"] = topic_route({"broker-a": {0: broker.address}})
        await engine.routes.get("orders")
        engine.join(MemberStub(producer_group="shop"))
        await engine.heartbeat()
        (first,) = broker.connections
        first.leave_open(Command.request(ECHO, opaque=1))
        first.finish("stopping")
        await engine.heartbeat()

        await until(lambda: len(broker.heartbeats) == 2)
        assert len(broker.arrivals) == 2
        first.abort()


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


async def test_connections_are_encrypted_when_wanted():
    tls = ServerTls(certificate=TLS_FOLDER / "certificate.pem", key=TLS_FOLDER / "key.pem")
    context = ClientTls(authority=TLS_FOLDER / "certificate.pem").context()
    enforced = ServerSettings(tls=replace(tls, mode=TlsMode.ENFORCING))
    async with (
        serving({ECHO: _echo}, enforced) as server,
        running_engine(NOBODY, tls=context) as engine,
        running_engine(NOBODY) as plain,
    ):
        answer = await engine.ask(server.address, ECHO, body=b"private")

        assert bytes(answer.body) == b"private"
        with pytest.raises(ConnectionLost):
            await plain.ask(server.address, ECHO)


# ---- life


async def test_nothing_is_left_after_the_stop(caplog):
    async with AsyncEmbeddedCluster(brokers=2) as cluster:
        await cluster.create_topic("orders")
        threads = set(threading.enumerate())
        before = asyncio.all_tasks()
        async with running_engine(
            cluster.name_server, route_refresh=0.01, heartbeat=0.01
        ) as engine:
            engine.routes.track("orders")
            await engine.routes.get("orders")
            engine.join(MemberStub(producer_group="shop"))
            await engine.heartbeat()
            engine.spawn(asyncio.Event().wait(), "waits for ever")
            connections = [engine.open_connection(broker.address) for broker in cluster.brokers]

        # The brokers save their tables meanwhile, which ends.
        await until(lambda: asyncio.all_tasks() <= before)
        assert all(each is not None and not each.is_open for each in connections)
        assert engine.open_connection(cluster.brokers[0].address) is None
        fresh = set(threading.enumerate()) - threads
        assert all(each.name.startswith("asyncio_") for each in fresh), fresh
    assert "ERROR" not in caplog.text


async def test_a_stop_may_be_called_by_many_and_again():
    engine = Engine(quick_settings(NOBODY))
    await engine.start()

    await asyncio.gather(*(engine.stop() for _ in range(3)))
    await engine.stop()

    assert not engine.is_running


async def test_a_cancelled_stop_still_closes_everything():
    def ignore(_, __):
        return None

    broker = ScriptedBroker(handlers={int(RequestCode.UNREGISTER_CLIENT): ignore})
    async with broker.serving(), ScriptedNameServer().serving() as names:
        names.routes["orders"] = topic_route({"broker-a": {0: broker.address}})
        engine = Engine(quick_settings(names.address, stop_timeout=20))
        await engine.start()
        await engine.routes.get("orders")
        engine.join(MemberStub(producer_group="shop"))
        await engine.heartbeat()
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0.01)
        stopping.cancel()

        with pytest.raises(asyncio.CancelledError):
            await stopping

        await until(lambda: not broker.connections)
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


async def test_an_engine_that_was_never_started_stops_without_ado():
    engine = Engine(quick_settings(NOBODY))

    await engine.stop()

    with pytest.raises(NotRunning):
        await engine.start()


async def test_use_from_another_loop_is_refused_with_a_reason():
    async def use(engine):
        await engine.ask(Address("127.0.0.1", 1), ECHO)

    async with running_engine(NOBODY) as engine:
        with pytest.raises(WrongUse, match="another event loop"):
            await asyncio.to_thread(asyncio.run, use(engine))
        with pytest.raises(WrongUse, match="another event loop"):
            await asyncio.to_thread(engine.join, MemberStub())


async def test_a_task_that_fails_is_logged_with_its_traceback(caplog):
    async def fail():
        raise KeyError("missing")

    async with running_engine(NOBODY) as engine:
        task = engine.spawn(fail(), "counting")
        await until(task.done)

    assert "task 'counting' failed" in caplog.text
    assert "KeyError: 'missing'" in caplog.text


async def test_a_task_may_stop_the_engine_that_it_belongs_to():
    async with running_engine(NOBODY) as engine:
        task = engine.spawn(engine.stop(), "stops")
        await task

    assert not engine.is_running


def test_a_forked_child_is_told_to_make_its_own_engine():
    program = """
        import asyncio, os, sys
        from orbitmq.client.engine import Engine
        from orbitmq.client.errors import UsedAfterFork
        from orbitmq.client.settings import resolve
        from orbitmq.remoting.settings import Address

        async def main():
            engine = Engine(resolve("127.0.0.1:1"))
            await engine.start()
            child = os.fork()
            if child == 0:
                os._exit(in_child(engine))
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 42, status
            await engine.stop()

        def in_child(engine):
            async def use():
                try:
                    await engine.ask(Address("127.0.0.1", 1), 10)
                except UsedAfterFork as error:
                    assert str(os.getpid()) in str(error)
                    async with Engine(engine.settings) as own:
                        return 42 if own.client_id != engine.client_id else 2
                return 1
            loop = asyncio.new_event_loop()
            return loop.run_until_complete(use())

        asyncio.run(main())
    """

    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=dict(os.environ),
    )

    assert (ended.returncode, ended.stderr) == (0, "")


async def test_a_server_that_ends_every_connection_is_not_called_in_a_loop():
    opened = 0

    def close(connection):
        nonlocal opened
        opened += 1
        connection.abort("full")

    pauses = ChannelSettings(first_pause=0.05, longest_pause=0.05, jitter=0.0)
    async with (
        serving(Dispatcher({}, opened=close)) as server,
        ScriptedNameServer().serving() as names,
        running_engine(names.address, channel=pauses) as engine,
    ):
        names.routes["orders"] = topic_route({"broker-a": {0: server.address}})
        await engine.routes.get("orders")
        engine.join(MemberStub(producer_group="shop"))
        began = time.monotonic()
        await engine.heartbeat()

        await until(lambda: opened > 5)

        # The first attempt, then one after each pause.
        assert opened <= 1 + (time.monotonic() - began) / 0.05


async def test_a_pause_longer_than_any_request_is_waited_for_without_work():
    pauses = ChannelSettings(first_pause=600.0, longest_pause=600.0)
    async with (
        ScriptedNameServer().serving() as names,
        running_engine(names.address, channel=pauses, request_timeout=0.5) as engine,
    ):
        names.routes["orders"] = topic_route({"broker-a": {0: Address("127.0.0.1", 1)}})
        await engine.routes.get("orders")
        engine.join(MemberStub(producer_group="shop"))
        await engine.heartbeat()

        # Were it asked for again and again, nothing else would get a turn.
        for _ in range(10):
            await asyncio.sleep(0)


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
