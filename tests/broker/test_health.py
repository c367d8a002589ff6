"""The pages for those who watch a broker: alive, ready, and the limits of asking."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import threading
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.broker.health import LARGEST_HEAD, Answer, Endpoint
from orbitmq.broker.settings import (
    HttpSettings,
    ProgressSettings,
    RegistrationSettings,
    SendSettings,
)
from orbitmq.errors import OrbitError
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting import server as server_module
from orbitmq.remoting.settings import Address, ListenFailed, ServerSettings
from orbitmq.store.files import DiskFiles
from orbitmq.testing.cluster import MovableClock
from tests.support.broker import RawClient, small_settings, until
from tests.support.prometheus import parse_metrics

ANY_PORT = HttpSettings(port=0)


class Response(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        content: dict[str, object] = json.loads(self.body)
        return content


async def exchange(address: Address | None, request: bytes) -> bytes:
    """Everything that is answered to these bytes until the connection ends."""
    assert address is not None
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()


async def get(address: Address | None, path: str) -> Response:
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n".encode()
    head, _, body = (await exchange(address, request)).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    return Response(int(first.split()[1]), headers, body)


async def hello() -> Answer:
    return Answer(HTTPStatus.OK, (b"hel", b"lo"), "text/plain")


@pytest.fixture
async def start_endpoint():
    """Starts endpoints with pages of the test's own."""
    started: list[Endpoint] = []

    async def start(pages=None, settings=ANY_PORT):
        endpoint = Endpoint(settings, pages or {"/hello": hello})
        await endpoint.start()
        started.append(endpoint)
        return endpoint

    yield start
    for endpoint in started:
        await endpoint.stop()


# A broker's pages.


@pytest.mark.feature("O4")
async def test_a_broker_that_works_is_alive_and_ready(start_broker):
    broker = await start_broker(http=ANY_PORT)

    alive = await get(broker.http_address, "/healthz")
    ready = await get(broker.http_address, "/readyz")
    metrics = await get(broker.http_address, "/metrics?name[]=x")

    assert (alive.status, alive.json["status"]) == (200, "alive")
    assert (ready.status, ready.json) == (200, {"status": "ready"})
    assert metrics.status == 200
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert int(metrics.headers["content-length"]) == len(metrics.body)
    assert broker.http_address is not None
    assert broker.http_address.host == "127.0.0.1"
    port = broker.http_address.port
    with pytest.raises(ListenFailed, match=str(port)):
        await start_broker(root="other", http=HttpSettings(port=port))


async def test_a_broker_that_cannot_store_is_alive_and_not_ready(start_broker):
    store = small_settings(Path("unused")).store
    every_disk = replace(store.retention, expired_ratio=1e-9, forced_ratio=1e-9, full_ratio=1e-9)
    full = replace(store, retention=every_disk)
    broker = await start_broker(http=ANY_PORT, store=full, send=SendSettings(accept_from=9e9))
    broker.parts.store.clean()

    alive = await get(broker.http_address, "/healthz")
    ready = await get(broker.http_address, "/readyz")

    assert alive.status == 200
    assert ready.status == 503
    assert "cannot be stored" in str(ready.json["reasons"])
    assert "full" in str(ready.json["reasons"])
    assert "accepted from" in str(ready.json["reasons"])


PROGRESS = "consumerOffset.json"


class FillableDisk(DiskFiles):
    """A disk for configuration that is full as long as it is said to be."""

    is_full = False

    def open(self, path: Path, *, create: bool = False) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return super().open(path, create=create)


class HurriedClock(MovableClock):
    """One whose monotonic time is moved as well, so that pauses are over."""

    def monotonic(self) -> float:
        return super().monotonic() + self._ahead


async def test_a_broker_whose_tables_cannot_be_saved_is_not_ready_until_they_are(
    start_broker, open_client, caplog
):
    disk, clock = FillableDisk(), HurriedClock()
    broker = await start_broker(
        http=ANY_PORT,
        progress=ProgressSettings(save_interval=0.02),
        parts={"disk": disk, "clock": clock},
    )
    client = await open_client(broker)
    await client.stored("orders")
    await client.pull("orders")
    disk.is_full = True
    await client.report("orders", 1)
    (file,) = [each for each in broker.parts.config_files if each.path.name == PROGRESS]
    await until(lambda: file.failures)

    pages = {page: await get(broker.http_address, page) for page in ("/readyz", "/healthz")}
    disk.is_full = False
    clock.advance(10)
    await until(lambda: not any(each.problem for each in broker.parts.config_files))
    ready = await get(broker.http_address, "/readyz")
    metrics = parse_metrics((await get(broker.http_address, "/metrics")).body)

    assert (pages["/readyz"].status, pages["/healthz"].status, ready.status) == (503, 200, 200)
    (reason,) = [each for each in reasons_of(pages["/readyz"]) if PROGRESS in each]
    assert "No space left" in reason
    assert metrics["orbitmq_config_unsaved"].value(file=PROGRESS) == 0
    assert metrics["orbitmq_config_save_failures_total"].value(file=PROGRESS) >= 1
    # One line when it begins and one when it ends, however often it was tried.
    failed = sum(each.failures > 0 for each in broker.parts.config_files)
    assert sum("not saved" in text for text in caplog.messages) == failed
    assert sum("saved again" in text for text in caplog.messages) == failed


def reasons_of(response: Response) -> list[str]:
    reasons = response.json["reasons"]
    assert isinstance(reasons, list)
    return reasons


async def test_a_broker_works_without_its_name_server_and_is_ready_when_that_knows_it(
    start_broker, open_client
):
    probe = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = probe.sockets[0].getsockname()[1]
    probe.close()
    await probe.wait_closed()
    broker = await start_broker(
        http=ANY_PORT,
        name_servers=(f"127.0.0.1:{port}",),
        registration=RegistrationSettings(interval=0.05, timeout=1.0),
    )

    await (await open_client(broker)).stored("orders")
    before = await get(broker.http_address, "/readyz")
    server = NameServer(NameServerSettings(server=ServerSettings(port=port)))
    await server.start()
    try:
        await until(lambda: broker.parts.registration.is_registered)
        after = await get(broker.http_address, "/readyz")
    finally:
        await server.stop()

    assert before.status == 503
    assert f"127.0.0.1:{port}" in str(before.json["reasons"])
    assert after.status == 200


class SlowFiles(DiskFiles):
    """A disk on which the opening of a store waits until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waiting = threading.Event()
        self.may_go_on = threading.Event()

    def exists(self, path: Path) -> bool:
        if path.name == "abort" and not self.may_go_on.is_set():
            self.is_waiting.set()
            if not self.may_go_on.wait(30):
                raise OSError(errno.ETIMEDOUT, "nobody let the opening go on")
        return super().exists(path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_broker_whose_store_is_being_repaired_is_alive_and_turns_clients_away(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(server_module, "_PATIENCE", 0.05)
    files, port = SlowFiles(), free_port()
    settings = small_settings(tmp_path, http=ANY_PORT, server=ServerSettings(port=port))
    broker = Broker(settings, files=files)
    starting = asyncio.create_task(broker.start())
    try:
        await until(files.is_waiting.is_set, 10)

        alive = await get(broker.http_address, "/healthz")
        ready = await get(broker.http_address, "/readyz")
        metrics = await get(broker.http_address, "/metrics")
        turned_away = await exchange(Address("127.0.0.1", port), b"")
        with pytest.raises(ListenFailed, match=str(port)):
            # Its port is taken all the same.
            await Broker(small_settings(tmp_path / "other", server=settings.server)).start()
        was_done = starting.done()
        files.may_go_on.set()
        async with asyncio.timeout(30):
            await starting
        afterwards = await get(broker.http_address, "/healthz")
        client = await RawClient.open(broker)
        await client.stored("orders")
        await client.close()
    finally:
        files.may_go_on.set()
        await asyncio.wait((starting,), timeout=10)
        await broker.stop()

    assert (alive.status, alive.json["status"]) == (200, "starting")
    assert ready.status == metrics.status == 503
    assert reasons_of(ready) == ["the broker is starting"]
    assert turned_away == b""
    assert not was_done
    assert (afterwards.status, afterwards.json["status"]) == (200, "alive")


@pytest.mark.parametrize("grace", [None, 0.0])
async def test_a_broker_that_is_stopped_while_its_store_is_opened_does_not_run_afterwards(
    tmp_path, grace
):
    files, port = SlowFiles(), free_port()
    settings = small_settings(tmp_path, http=ANY_PORT, server=ServerSettings(port=port))
    broker = Broker(settings, files=files)
    starting = asyncio.create_task(broker.start())
    stopping: list[asyncio.Task[None]] = []
    try:
        await until(files.is_waiting.is_set, 10)

        # However often it is said.
        stopping += [asyncio.create_task(broker.stop(grace)) for _ in range(2)]
        async with asyncio.timeout(30):
            with pytest.raises(OrbitError, match="stopped while it was starting"):
                await starting
        was_stopped = any(each.done() for each in stopping)
        files.may_go_on.set()
        async with asyncio.timeout(30):
            await asyncio.gather(*stopping)
    finally:
        files.may_go_on.set()
        await asyncio.wait((starting, *stopping), timeout=10)

    assert not was_stopped, "the folder was still held"
    assert broker.http_address is None
    # Folder and port are free, also for the same broker.
    for again in (Broker(settings), broker):
        await again.start()
        was_clean = again.parts.store.recovery.was_clean
        await again.stop()
        assert was_clean


# Asking.


HEAD = b" HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status", "words"),
    [
        (b"HEAD /hello" + HEAD, 200, b"Content-Length: 5\r\n"),
        (b"GET /hello/../etc" + HEAD, 404, b"there are /hello"),
        (b"POST /hello" + HEAD, 405, b"Allow: GET, HEAD\r\n"),
        (b"\r\n\r\n", 400, b""),
        (b"GET /hello\r\n\r\n", 400, b""),
        (b"\xff\x00 a b c\r\n\r\n", 400, b""),
        (b"GET / FTP/1\r\n\r\n", 400, b""),
        (b"GET /hello HTTP/1.1\r\nX: " + b"x" * (LARGEST_HEAD // 2) + b"\r\n\r\n", 200, b"hello"),
        (b"GET /hello HTTP/1.1\r\nX: " + b"x" * LARGEST_HEAD, 431, b"at most"),
    ],
)
async def test_a_request_is_answered_with_its_status(start_endpoint, request_bytes, status, words):
    endpoint = await start_endpoint()

    answer = await exchange(endpoint.address, request_bytes)

    assert int(answer.split(b" ", 2)[1]) == status
    assert words in answer
    assert answer.endswith(b"hello") is (status == 200 and request_bytes.startswith(b"GET"))


async def test_a_client_that_asks_too_slowly_is_let_go(start_endpoint):
    endpoint = await start_endpoint(settings=HttpSettings(port=0, timeout=0.05))

    answer = await exchange(endpoint.address, b"GET /hello HTTP/1.1\r\nX: ")

    assert answer == b""


async def test_too_many_clients_are_turned_away(start_endpoint):
    endpoint = await start_endpoint(settings=HttpSettings(port=0, connections=2))
    assert endpoint.address is not None
    waiting = [await asyncio.open_connection(*endpoint.address) for _ in range(2)]

    turned_away = await get(endpoint.address, "/hello")
    reader, writer = waiting[0]
    writer.write(b"GET /hello HTTP/1.1\r\n\r\n")
    served = await reader.read()

    assert turned_away.status == 503
    assert served.endswith(b"hello")
    for _, each in waiting:
        each.close()


async def test_a_page_that_fails_is_logged_and_answered_with_500(start_endpoint, caplog):
    async def failing():
        raise RuntimeError("inside")

    endpoint = await start_endpoint({"/failing": failing})

    with caplog.at_level(logging.ERROR):
        answer = await get(endpoint.address, "/failing")

    assert answer.status == 500
    assert b"inside" not in answer.body
    assert "inside" in caplog.text
