"""`orbitmq up`, `broker` and `namesrv` as processes, from their start to the signal that ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from orbitmq import cluster
from orbitmq.broker.settings import OutwardSettings
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.channels import connect
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.settings import ServerSettings, parse_address
from orbitmq.remoting.tls import ClientTls, ServerTls, TlsMode
from orbitmq.wire.bodies import ClusterInfo
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.javajson import decode_body
from tests.support.broker import RawClient, bodies_in, small_settings
from tests.support.command import Started, run
from tests.support.sparking import until

#: Any free ports, data in the folder that the command is run in.
FREE = ("--namesrv-port", "0", "--broker-port", "0")

#: Finds the port in a line about something that listens.
PORT_IN = re.compile(r".*  \S*127\.0\.0\.1:(\d+)").match


async def client_of(address: str) -> RawClient:
    return RawClient(await connect(parse_address(address), owner=Dispatcher({})), [])


async def cluster_info(name_server: str) -> ClusterInfo:
    connection = await connect(parse_address(name_server), owner=Dispatcher({}))
    answer = await connection.request(RequestCode.GET_BROKER_CLUSTER_INFO)
    connection.close()
    await connection.wait_closed()
    return decode_body(ClusterInfo, answer.body)


async def registered(name_server: str) -> dict[str, str]:
    """The brokers that a name server knows, and their addresses."""
    table = (await cluster_info(name_server)).broker_addr_table
    return {name: data.broker_addrs[0] for name, data in table.items()}


async def until_registered(name_server: str, wanted: dict[str, str]) -> None:
    """Wait until a name server knows these brokers and no others."""
    async with asyncio.timeout(20):
        while await registered(name_server) != wanted:  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A child of nobody here that has ended, and whose parent has not looked yet, is no more alive.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def listening_ports(pid: int) -> list[int]:
    """The ports that a process listens on, as the system knows it."""
    sockets = {
        link.readlink().name.removeprefix("socket:[").removesuffix("]")
        for link in Path(f"/proc/{pid}/fd").iterdir()
    }
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listens = "0A"
    return [
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == listens and row[9] in sockets
    ]


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# From the start to the stop.


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_everything_says_where_it_listens_on_either_loop(tmp_path, loop):
    with Started("up", *FREE, "--loop", loop, cwd=tmp_path) as up:
        assert [line.split()[0] for line in up.lines] == ["name", "broker-a", "ready;"]
        assert up.lines[1].endswith("data in orbitmq-data/broker-a")
        assert await registered(up.address("name server")) == {"broker-a": up.address("broker-a")}

        assert up.stop() == 0
        assert up.errors == ""


def test_the_console_can_come_with_it(tmp_path):
    with Started("up", *FREE, "--console", "--console-port", "0", cwd=tmp_path) as up:
        with urllib.request.urlopen(up.address("console"), timeout=20) as page:  # noqa: S310  # ours
            text = page.read().decode()

        assert [line.split()[0] for line in up.lines] == ["name", "broker-a", "console", "ready;"]
        assert "<title>" in text
        assert up.stop() == 0
        assert up.errors == ""
    # What it saw is there when it is started again.
    assert (tmp_path / "orbitmq-data" / "console.sqlite").stat().st_size > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_what_was_sent_is_there_after_a_stop_and_a_start(tmp_path, number):
    with Started("up", *FREE, "--data", "here", cwd=tmp_path) as up:
        client = await client_of(up.address("broker-a"))
        await client.stored("Orders", b"kept")
        assert bodies_in(await client.pull("Orders")) == [b"kept"]
        assert (await client.report("Orders", 1)).code == 0
        # It is still connected.
        assert up.stop(number) == 0
        assert up.errors == ""
        await client.close()

    # The marker of a crash is gone: nothing has to be repaired.
    assert not (tmp_path / "here" / "broker-a" / "abort").exists()
    with Started("up", *FREE, "--data", "here", cwd=tmp_path) as up:
        client = await client_of(up.address("broker-a"))
        assert bodies_in(await client.pull("Orders")) == [b"kept"]
        assert (await client.query("Orders")).ext_fields["offset"] == "1"
        await client.close()


@pytest.mark.feature("J6")
async def test_a_name_server_and_a_broker_can_run_apart(tmp_path):
    with Started("namesrv", "--port", "0", cwd=tmp_path) as name_server:
        address = name_server.address("name server")
        words = ("--name", "east", "--port", "0", "--name-server", address, "--data", "east")
        with Started("broker", *words, cwd=tmp_path) as broker:
            # At once: it says that it is ready when it can be found.
            assert await registered(address) == {"east": broker.address("east")}
            assert (tmp_path / "east" / "commitlog").is_dir()

            assert broker.stop() == 0
        assert await registered(address) == {}
        assert name_server.stop() == 0
        assert "Traceback" not in broker.errors + name_server.errors


@pytest.mark.parametrize("brokers", [1, 2])
def test_there_is_a_line_for_everything_that_listens(tmp_path, brokers):
    port = two_free_ports()
    words = ("--broker-port", str(port), "--brokers", str(brokers), "--http-port", "0")
    slaves = ("--set", "broker.replication.serve=true")

    with Started("up", "--namesrv-port", "0", *words, *slaves, cwd=tmp_path) as up:
        for place, name in enumerate(("broker-a", "broker-b")[:brokers]):
            own = port + 10 * place
            assert up.address(name) == f"127.0.0.1:{own}"
            assert up.address(f"{name} second port") == f"127.0.0.1:{own - 2}"
            assert up.address(f"{name} replication") == f"127.0.0.1:{own + 1}"
        told = [int(found[1]) for found in map(PORT_IN, up.lines) if found is not None]
        processes = (up.process.pid, *children_of(up.process.pid))
        listening = [port for process in processes for port in listening_ports(process)]
        assert up.stop() == 0

    assert len(told) == 1 + 4 * brokers
    assert sorted(told) == sorted(listening)


@pytest.mark.feature("O3")
def test_json_is_printed_and_logged_when_asked_for(tmp_path):
    words = ("up", *FREE, "--json", "--log-level", "info", "--log-format", "json")
    with Started(*words, cwd=tmp_path) as up:
        name_server, broker, ready = (json.loads(line) for line in up.lines)
        up.stop()

    assert (name_server["event"], name_server["role"]) == ("listening", "name server")
    assert (broker["name"], broker["folder"]) == ("broker-a", "orbitmq-data/broker-a")
    assert ready == {"event": "ready"}
    logged = [json.loads(line) for line in up.errors.splitlines()]
    events = [line["event"] for line in logged]
    assert events.count("broker started") == 1
    assert events.count("broker stopped") == 1
    assert {"time", "level", "logger", "event", "broker"} <= logged[2].keys()


@pytest.mark.feature("O3")
def test_nothing_is_written_outside_of_the_folder(tmp_path):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()

    with Started("up", *FREE, "--data", "data", cwd=work, env={"HOME": str(home)}) as up:
        up.stop()

    assert list(home.iterdir()) == []
    assert [path.name for path in work.iterdir()] == ["data"]
    assert sorted(path.name for path in (work / "data").iterdir()) == ["broker-a"]


SLOW = """
import asyncio
from orbitmq.cli.settings import Loop
from orbitmq.cli.servers import serve

class Slow:
    async def start(self): pass
    def listening(self): return ()
    def kill(self): print("killed", flush=True)
    async def until_failed(self): await asyncio.Event().wait()
    async def stop(self):
        print("stopping", flush=True)
        await asyncio.Event().wait()

serve(Slow(), Loop.ASYNCIO, lambda _: print("ready", flush=True))
"""


def test_a_second_signal_ends_a_stop_that_takes_too_long(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)

        assert process.wait(timeout=20) == 130
        assert process.stdout.readline() == "killed\n"
        assert "the next start repairs" in process.stderr.read()


# TLS.

TLS_FOLDER = Path(__file__).parent.parent / "data" / "tls"
SELF_SIGNED = (TLS_FOLDER / "certificate.pem", TLS_FOLDER / "key.pem")
#: Of a name that is not this machine's, and signed by somebody who is not in the file.
SIGNED = (TLS_FOLDER / "leaf-certificate.pem", TLS_FOLDER / "leaf-key.pem")


def enforcing(certificate: Path, key: Path) -> list[str]:
    values = (f"certificate={certificate}", f"key={key}", "mode=enforcing")
    return [word for value in values for word in ("--set", f"namesrv.tls.{value}")]


@pytest.mark.parametrize(("files", "brokers"), [(SELF_SIGNED, 2), (SIGNED, 1)])
async def test_brokers_speak_tls_to_a_name_server_beside_them_that_takes_nothing_else(
    tmp_path, files, brokers
):
    words = (*FREE, "--brokers", str(brokers), *enforcing(*files))
    tls = ClientTls(authority=files[0], verify_host=False).context()

    with Started("up", *words, cwd=tmp_path) as up:
        address = parse_address(up.address("name server"))
        connection = await connect(address, owner=Dispatcher({}), tls=tls)
        answer = await connection.request(RequestCode.GET_BROKER_CLUSTER_INFO, timeout=20)
        connection.close()
        await connection.wait_closed()
        assert up.stop() == 0
        assert up.errors == ""

    known = decode_body(ClusterInfo, answer.body).broker_addr_table
    assert set(known) == {"broker-a", "broker-b"} if brokers == 2 else {"broker-a"}


def test_a_console_reaches_a_name_server_that_enforces_tls(tmp_path):
    words = (*FREE, "--console", "--console-port", "0", *enforcing(*SELF_SIGNED))
    broker = [
        word
        for name, path in zip(("certificate", "key"), SELF_SIGNED, strict=True)
        for word in ("--set", f"broker.tls.{name}={path}")
    ]

    with Started("up", *words, *broker, cwd=tmp_path) as up:
        page = up.address("console").rstrip("/") + "/api/v1/now"

        def shows_the_broker():
            with urllib.request.urlopen(page, timeout=20) as answer:  # noqa: S310  # ours
                return "broker-a" in answer.read().decode()

        # It looks around every few seconds.
        until(shows_the_broker, "the console shows the broker")
        assert up.stop() == 0


async def test_why_a_broker_cannot_be_found_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "REGISTRATION_DEADLINE", 0.5)
    tls = ServerTls(certificate=SELF_SIGNED[0], key=SELF_SIGNED[1], mode=TlsMode.ENFORCING)
    both = cluster.Cluster(
        NameServerSettings(server=ServerSettings(port=0, tls=tls)),
        (small_settings(tmp_path, outward=OutwardSettings(tls=ClientTls(authority=SIGNED[0]))),),
    )

    with pytest.raises(cluster.NotRegistered, match="certificate verify failed") as refused:
        await both.start()

    assert refused.value.missing == ("broker-a",)


# Several brokers.


@pytest.mark.feature("J6")
async def test_several_brokers_share_a_name_server_and_each_has_its_process(tmp_path):
    with Started("up", *FREE, "--brokers", "2", "--data", "all", cwd=tmp_path) as up:
        print(f"\ntwo brokers ready after {up.took:.2f} s")
        brokers = {name: up.address(name) for name in ("broker-a", "broker-b")}
        assert await registered(up.address("name server")) == brokers
        children = children_of(up.process.pid)
        for name, address in brokers.items():
            client = await client_of(address)
            await client.stored("Orders", name.encode())
            await client.close()

        assert len(children) == 2
        assert up.stop(signal.SIGINT) == 0
        assert up.errors == ""
        assert not [pid for pid in children if is_alive(pid)]
    for name in brokers:
        assert (tmp_path / "all" / name / "commitlog").is_dir()
        assert not (tmp_path / "all" / name / "abort").exists()


@pytest.mark.parametrize("ends_by", ["Ctrl-C", "the last broker"])
async def test_when_one_broker_dies_the_others_go_on(tmp_path, ends_by):
    with Started("up", *FREE, "--brokers", "2", cwd=tmp_path) as up:
        name_server, addresses = (
            up.address("name server"),
            {name: up.address(name) for name in ("broker-b", "broker-a")},
        )
        (first, survivor), children = addresses.popitem(), children_of(up.process.pid)
        doomed = next(
            pid for pid in children if parse_address(survivor).port not in listening_ports(pid)
        )
        left = next(pid for pid in children if pid != doomed)

        os.kill(doomed, signal.SIGKILL)

        await until_registered(name_server, {first: survivor})
        client = await client_of(survivor)
        await client.stored("Orders", b"still")
        await client.close()
        until(lambda: "the other brokers go on" in up.errors, "it says so")
        if ends_by == "Ctrl-C":
            assert up.stop(signal.SIGINT) == 0
        else:
            os.kill(left, signal.SIGKILL)
            assert up.wait() == 1

        assert not is_alive(left)
    (dead,) = addresses
    line, *rest = up.errors.splitlines()
    assert f"{dead} ended unexpectedly (killed by SIGKILL)" in line
    assert "run the same command again" in line
    last = f"orbitmq: {first} ended unexpectedly (killed by SIGKILL); no broker is left"
    assert rest == ([] if ends_by == "Ctrl-C" else [last])


def test_no_broker_outlives_the_command_that_started_it(tmp_path):
    with Started("up", *FREE, "--brokers", "2", cwd=tmp_path) as up:
        children = children_of(up.process.pid)

        up.process.kill()

        until(lambda: not any(is_alive(pid) for pid in children), "all have ended")
    # They stopped in order: nothing has to be repaired.
    for name in ("broker-a", "broker-b"):
        assert not (tmp_path / "orbitmq-data" / name / "abort").exists()


# What is refused: one sentence, an exit code, no traceback.


def refusal(*words: str, cwd: Path, code: int = 1) -> str:
    ran = run(*words, cwd=cwd)
    assert ran.returncode == code, ran.stderr
    assert ran.stdout == ""
    (sentence,) = ran.stderr.splitlines()
    assert sentence.startswith("orbitmq: ")
    return sentence


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (
            "up --namesrv-port 40911 --broker-port 40911",
            2,
            "namesrv.port and broker.port are both 40911",
        ),
        (
            "up --namesrv-port 40921 --broker-port 40911 --brokers 2",
            2,
            "lead to the same port, 40921",
        ),
        ("up --users u.json", 2, "give --console as well"),
        ("up FREE --console --users u.json", 1, "orbitmq user add NAME --users u.json"),
        ("up FREE --console --mask a..b", 2, "console.masked names fields"),
        ("up FREE --console --alerts a.toml", 2, "the file a.toml cannot be read"),
        ("up --host 0.0.0.0", 2, "host is '0.0.0.0', which other machines reach"),
        ("broker --host 0.0.0.0", 2, "use --insecure if the network is trusted"),
        ("namesrv --host 0.0.0.0", 2, "use --insecure if the network is trusted"),
        ("up --advertise 0.0.0.0", 2, "must be an address that clients can reach"),
        ("up FREE --advertise nowhere.invalid", 1, "'nowhere.invalid' cannot be resolved"),
        (
            "up --brokers 2 --set broker.root=here",
            2,
            "broker.root is for one broker, but up.brokers is 2",
        ),
        ("broker --port 0 --log-level warning --data /dev/null/deeper", 1, "/dev/null/deeper"),
        (
            "up TLS --set namesrv.tls.client_authority=CERTIFICATE",
            2,
            "and broker.outward.tls.certificate and broker.outward.tls.key to their own",
        ),
        (
            "up TLS --set broker.name_servers=127.0.0.1:9",
            2,
            "set broker.outward.tls.authority to the certificates",
        ),
    ],
)
def test_what_cannot_be_started_is_refused_in_a_sentence(tmp_path, words, code, expected):
    meant = words.replace("FREE", " ".join(FREE)).replace("TLS", " ".join(enforcing(*SELF_SIGNED)))
    meant = meant.replace("CERTIFICATE", str(SELF_SIGNED[0]))

    said = refusal(*meant.split(), cwd=tmp_path, code=code)

    assert expected in said


def two_free_ports() -> int:
    """A port that is free, as is the one ten above it, with those beside them that brokers use.

    Not among those that are given out.
    """
    for port in range(20_000 + os.getpid() % 5_000, 30_000, 20):
        with contextlib.ExitStack() as taken:
            try:
                for beside in (-2, 0, 1, 8, 10, 11):
                    taken.enter_context(socket.create_server(("127.0.0.1", port + beside)))
            except OSError:
                continue
            return port
    pytest.fail("no two ports are free")


def test_a_port_that_is_taken_is_named_with_the_flag_that_chooses_another(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])

        for words, option in (
            (("--namesrv-port", port, "--broker-port", "0"), "--namesrv-port"),
            (("--namesrv-port", "0", "--broker-port", port), "--broker-port"),
            ((*FREE, "--http-port", port), "--http-port"),
            ((*FREE, "--console", "--console-port", port), "--console-port"),
        ):
            said = refusal("up", *words, cwd=tmp_path)

            assert f"cannot listen on 127.0.0.1:{port}" in said
            assert said.endswith(f"choose another port with {option}, or any free one with 0")


def test_a_folder_that_another_broker_has_is_named_with_that_broker(tmp_path):
    with Started("up", *FREE, cwd=tmp_path) as up:
        said = refusal("up", *FREE, cwd=tmp_path)
        up.stop()

    assert f"orbitmq-data/broker-a is already open in process {up.process.pid}" in said
    assert "stop that one or use another folder" in said


def test_when_one_of_several_cannot_start_none_stays(tmp_path):
    with Started("broker", "--port", "0", "--data", "all/broker-b", cwd=tmp_path) as holder:
        ran = run("up", *FREE, "--brokers", "2", "--data", "all", cwd=tmp_path)
        holder.stop()

    assert ran.returncode == 1
    assert "all/broker-b is already open" in ran.stderr
    assert "broker-b ended unexpectedly" in ran.stderr
    assert "Traceback" not in ran.stderr
    # Broker a was stopped, and in order.
    assert not (tmp_path / "all" / "broker-a" / "abort").exists()
