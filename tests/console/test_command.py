"""`orbitmq console` as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from orbitmq.cli.servers import Listening, Service, WithConsole
from orbitmq.testing import AsyncEmbeddedCluster

DEADLINE = 40.0


@contextlib.asynccontextmanager
async def command(*words: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "orbitmq.cli", "console", "--port", "0", "--json", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | environment,
    )
    try:
        async with asyncio.timeout(DEADLINE):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def listening(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        assert process.stderr is not None
        raise AssertionError((await process.stderr.read()).decode())
    found: dict[str, Any] = json.loads(line)
    return found


async def test_it_starts_shows_the_cluster_and_stops_in_order(tmp_path):
    async with (
        AsyncEmbeddedCluster() as cluster,
        command("-n", cluster.name_server, "--history", str(tmp_path / "h.sqlite")) as process,
    ):
        told = await listening(process)

        def get(path):
            with urllib.request.urlopen(told["address"] + path, timeout=10) as answer:  # noqa: S310
                return json.loads(answer.read())

        me = await asyncio.to_thread(get, "api/v1/me")
        content = await asyncio.to_thread(get, "api/v1/now")
        while content["at"] is None:
            await asyncio.sleep(0.05)
            content = await asyncio.to_thread(get, "api/v1/now")
        process.send_signal(signal.SIGTERM)
        code = await process.wait()

    assert told["role"] == "console"
    assert me["write"] is False
    assert content["brokers"][0]["is_up"]
    assert code == 0
    assert (tmp_path / "h.sqlite").exists()


def contexts(folder: Path, **servers: str) -> dict[str, str]:
    """The environment of a user with these contexts."""
    file = folder / "orbitmq" / "contexts.json"
    file.parent.mkdir()
    made = {name: {"name_servers": [server]} for name, server in servers.items()}
    file.write_text(json.dumps({"contexts": made}))
    return {"XDG_CONFIG_HOME": str(folder), "ORBITMQ_ACCESS_KEY": "of-another"}


@pytest.mark.feature("W7")
@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--all-contexts",), ["lab", "shop"]),
        (("--context", "shop", "--context", "lab", "--context", "shop"), ["shop", "lab"]),
        (("--context", "shop"), [""]),
    ],
)
async def test_it_serves_the_contexts_that_are_named(tmp_path, words, names):
    async with AsyncEmbeddedCluster() as cluster:
        server = cluster.name_server
        home = contexts(tmp_path, shop=server, lab="127.0.0.1:1")
        if names == [""]:
            home["ORBITMQ_ACCESS_KEY"] = ""
        async with command(*words, ORBITMQ_NAME_SERVER="127.0.0.1:2", **home) as process:
            told = await listening(process)

            def get():
                with urllib.request.urlopen(told["address"] + "api/v1/clusters", timeout=10) as one:  # noqa: S310
                    return json.loads(one.read())["clusters"]

            found = await asyncio.to_thread(get)
    assert [each["name"] for each in found] == names
    (shop,) = [each for each in found if each["name"] != "lab"]
    assert shop["name_servers"] == [server]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--context", "shop", "--context", "lap"), "there is no context 'lap'; there are: lab"),
        (("--all-contexts", "--context", "shop"), "--all-contexts goes without --context"),
        (("--all-contexts", "-n", "x"), "--all-contexts goes without --context and --name-server"),
        (("--all-contexts", "--tls"), "--tls is of one cluster"),
    ],
)
async def test_contexts_that_cannot_be_served_are_refused(tmp_path, words, said):
    home = contexts(tmp_path, shop="127.0.0.1:1", lab="127.0.0.1:1")
    async with command(*words, **home) as process:
        _, error = await process.communicate()

    assert process.returncode == 2
    assert said in " ".join(error.decode().split())


async def test_it_does_not_listen_openly_without_a_password():
    async with command("--host", "0.0.0.0") as process:  # noqa: S104
        _, error = await process.communicate()

    assert process.returncode == 2
    assert b"ORBITMQ_CONSOLE_PASSWORD" in error


@pytest.mark.parametrize("content", ["", "short"])
async def test_a_password_file_that_cannot_work_is_refused(tmp_path, content):
    file = tmp_path / "password"
    file.write_text(content)
    async with command("--password-file", str(file)) as process:
        _, error = await process.communicate()

    assert process.returncode == 2
    assert b"password" in error


async def test_the_password_comes_from_the_environment_and_is_never_printed():
    secret = "correct horse battery"  # noqa: S105
    async with (
        AsyncEmbeddedCluster() as cluster,
        command(
            "-n", cluster.name_server, "--log-level", "debug", ORBITMQ_CONSOLE_PASSWORD=secret
        ) as process,
    ):
        told = await listening(process)

        def get():
            with urllib.request.urlopen(told["address"] + "api/v1/me", timeout=10) as answer:  # noqa: S310
                return json.loads(answer.read())

        me = await asyncio.to_thread(get)
        process.send_signal(signal.SIGINT)
        output, error = await process.communicate()

    assert me == {"login": True, "version": None}
    assert secret.encode() not in output + error


class Serving(Service):
    """A cluster that runs already, as what a console is started beside."""

    def __init__(self, name_server: str) -> None:
        self._name_server = name_server
        self.is_up = False

    async def start(self) -> None:
        self.is_up = True

    async def stop(self) -> None:
        self.is_up = False

    def listening(self) -> Sequence[Listening]:
        return (Listening("name server", "name server", self._name_server),)


@pytest.mark.parametrize("is_folder", [True, False])
async def test_a_broken_history_does_not_stop_the_cluster_that_a_console_is_started_with(
    tmp_path, caplog, is_folder
):
    file = tmp_path / "console.sqlite"
    if is_folder:
        file.mkdir()
    else:
        file.write_text("this is no database, and too long for an empty one" * 20)
    async with AsyncEmbeddedCluster() as cluster, asyncio.timeout(DEADLINE):
        serving = Serving(cluster.name_server)
        both = WithConsole(serving, 0, history=file)
        await both.start()
        was_up, places = serving.is_up, [each.role for each in both.listening()]
        await both.stop()

    assert was_up
    assert places == ["name server", "console"]
    (warning,) = [each for each in caplog.messages if "in memory only" in each]
    assert str(file) in warning


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--users", "nowhere.json"), "orbitmq user add NAME --users nowhere.json"),
        (("--users", "u.json", "--password-file", "PASSWORD"), "cannot go together"),
        (("--oidc-client", "x"), "--oidc-issuer"),
        (("--oidc-issuer", "http://idp.example.org", "--oidc-role", "*=reader"), "https://"),
        (("--oidc-issuer", "https://idp.example.org", "--oidc-role", "*=king"), "VALUE=ROLE"),
        (("--oidc-issuer", "https://idp.example.org", "--oidc-client", "x"), "--oidc-role"),
        (("--oidc-issuer", "https://idp.example.org", "--oidc-role", "a=admin"), "--oidc-client"),
    ],
)
async def test_logins_that_cannot_work_are_refused_at_the_start(tmp_path, words, said):
    file = tmp_path / "password"
    file.write_text("correct horse battery")
    given = [str(file) if each == "PASSWORD" else each for each in words]
    async with command(*given) as process:
        output, error = await process.communicate()

    assert process.returncode in (1, 2)
    assert said in " ".join(error.decode().split())
    assert not output
