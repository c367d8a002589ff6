"""The engine: asking and telling, its life, and what it leaves behind."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest

from orbitmq.client.engine import NOT_MINE, Engine, ProcessCheck, make_client_id, own_ip
from orbitmq.client.errors import UsedAfterFork
from orbitmq.client.settings import ClientSettings
from orbitmq.errors import BrokerRefused, NotRunning, SettingError, WrongUse
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import Address, ConnectFailed, RequestTimedOut
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command, Credentials, access_key_of, is_signed_by
from tests.support.client import MemberStub, quick_settings, running_engine
from tests.support.remoting import serving, until

NOBODY = "127.0.0.1:1"
ECHO, HOLD, GONE = 10, 11, 12


def _echo(_: Connection, request: Command) -> Command:
    return request.answer(ResponseCode.SUCCESS, body=bytes(request.body))


def _ignore(_: Connection, __: Command) -> None:
    return None


# ---- asking


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
        assert "no member of this client" in (nobody.remark or "")


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


# ---- work that is done again and again


#: Longer than any test: only a wake-up ends it.
FOREVER = 3600.0


async def test_a_wake_up_during_the_work_makes_it_run_once_more_and_never_twice_at_a_time():
    running = 0
    done: list[int] = []
    go_on = asyncio.Event()

    async def work():
        nonlocal running
        running += 1
        done.append(running)
        await go_on.wait()
        running -= 1

    async with running_engine(NOBODY) as engine:
        periodic = engine.every(FOREVER, work, first=0, name="work")
        await until(lambda: len(done) == 1)
        for _ in range(5):
            periodic.wake()
        go_on.set()

        await until(lambda: len(done) == 2 and running == 0)
        assert done == [1, 1]


async def test_an_error_is_logged_and_does_not_end_the_repetition(caplog):
    done: list[int] = []

    async def work():
        done.append(1)
        raise KeyError("missing")

    with caplog.at_level(logging.ERROR):
        async with running_engine(NOBODY) as engine:
            engine.every(0.001, work, name="counting")
            await until(lambda: len(done) > 2)

    assert "counting failed" in caplog.text
    assert "KeyError: 'missing'" in caplog.text


# ---- ids, and the process that a client belongs to


@pytest.mark.feature("A17")
def test_clients_of_one_process_have_distinct_ids_by_default():
    settings = ClientSettings(name_servers=("localhost:9876",))

    ids = {Engine(settings).client_id for _ in range(100)}

    assert len(ids) == 100
    for client_id in ids:
        ip, _, instance = client_id.partition("@")
        assert ip == own_ip()
        assert instance.startswith(f"{os.getpid()}#")


def test_a_stable_id_is_the_same_after_a_restart():
    settings = ClientSettings(client_ip="10.0.0.7")

    assert make_client_id(settings, stable=True) == "10.0.0.7@DEFAULT"


def test_the_parts_of_an_id_can_be_chosen():
    settings = ClientSettings(client_ip="10.0.0.7", instance="worker-3", unit="north")

    assert make_client_id(settings) == "10.0.0.7@worker-3@north"
    assert make_client_id(settings, stable=True) == "10.0.0.7@worker-3@north"


def test_what_is_started_belongs_to_the_process_that_it_is_started_in(monkeypatch):
    check = ProcessCheck("the producer", from_start=True)
    made_in = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: made_in + 1)
    check()

    assert check.begin(), "it was made in another"
    assert check.is_same
    check()

    monkeypatch.setattr(os, "getpid", lambda: made_in)
    for use in (check, check.begin):
        with pytest.raises(UsedAfterFork):
            use()


def test_use_in_another_process_is_refused(monkeypatch):
    check = ProcessCheck("the producer")
    check()
    made_in = os.getpid()

    monkeypatch.setattr(os, "getpid", lambda: made_in + 1)

    assert not check.is_same
    with pytest.raises(UsedAfterFork, match="the producer belongs to process") as refused:
        check()
    assert (refused.value.belongs_to, refused.value.used_in) == (made_in, made_in + 1)
