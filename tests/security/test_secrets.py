"""Secrets: of accounts, of the broker itself, of the console. They are nowhere to be seen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace

import pytest

from orbitmq.broker.settings import AccessSettings, HttpSettings, OutwardSettings
from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.console import app
from orbitmq.console.app import VIEWS
from orbitmq.console.settings import ConsoleSettings
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.codes import RequestCode as Code
from orbitmq.wire.command import Credentials
from tests.security.test_request_codes import BROKER, Right, all_fields, signed_by
from tests.support.access import account, listed
from tests.support.broker import small_settings
from tests.support.client import quick_settings
from tests.support.client_admin import World
from tests.support.consoles import Browser, console_of

ADMIN = account("admin-key", "s3cr3t-of-the-admin")
OTHER = account("other-key", "s3cr3t-of-another")
OUTWARD = "s3cr3t-for-the-master"
PASSWORD = "s3cr3t-of-the-console"  # noqa: S105  # made up here
TOKEN = "s3cr3t-of-pipelines"  # noqa: S105  # made up here
MARK = "s3cr3t"
QUEUE = Queue("orders", "broker-a", 0)

ACCOUNTS = listed(ADMIN, "admin = true") + listed(OTHER)

#: What an administrator may ask without changing anything that the rest depends on.
HARMLESS = [
    code
    for code, right in BROKER.items()
    if right is Right.ADMIN and code.name.startswith(("GET_", "QUERY_", "VIEW_"))
]


@pytest.fixture
async def broker(start_broker, tmp_path):
    accounts = tmp_path / "accounts.toml"
    accounts.write_text(ACCOUNTS)
    return await start_broker(
        access=AccessSettings(accounts=accounts),
        outward=OutwardSettings(access_key="slave-key", secret_key=OUTWARD),
        http=HttpSettings(port=0),
    )


async def test_a_broker_shows_no_secret_to_anybody_by_any_request(broker, open_client, caplog):
    caplog.set_level(logging.DEBUG)
    said = []

    for credentials in (ADMIN, OTHER, Credentials(access_key="admin-key", secret_key=f"{MARK}?")):
        client = await open_client(broker, signed_by(credentials))
        for code in HARMLESS:
            answer = await client.connection.request(code, None, extra=all_fields(), timeout=30)
            said.append(f"{answer.remark}{dict(answer.ext_fields)}{bytes(answer.body)!r}")

    assert any("brokerName" in each for each in said), "the configuration has to be among them"
    assert [each for each in said if MARK in each] == []
    logged = caplog.text + repr([record.__dict__ for record in caplog.records])
    assert MARK not in logged


async def test_a_changed_setting_with_a_secret_is_neither_shown_nor_logged(
    broker, open_client, caplog
):
    caplog.set_level(logging.DEBUG)
    client = await open_client(broker, signed_by(ADMIN))
    text = f"secretKey={MARK}-new\naclSecretKey={MARK}-new\noutward.secret_key={MARK}-new\n"

    changed = await client.connection.request(
        Code.UPDATE_BROKER_CONFIG, None, body=text.encode(), timeout=30
    )
    shown = await client.connection.request(Code.GET_BROKER_CONFIG, timeout=30)

    assert MARK not in bytes(shown.body).decode()
    assert MARK not in (changed.remark or "")
    assert MARK not in caplog.text + repr([record.__dict__ for record in caplog.records])


@pytest.mark.parametrize("page", ["/metrics", "/healthz", "/readyz", "/nothing"])
async def test_the_pages_of_a_broker_have_no_secret(broker, page):
    assert broker.http_address is not None
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(*broker.http_address)
        writer.write(f"GET {page} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        answered = await reader.read()
        writer.close()
        await writer.wait_closed()

    assert answered.startswith(b"HTTP/1.1 ")
    assert MARK.encode() not in answered
    assert b"key" not in answered.lower() or page == "/metrics"


def test_settings_do_not_show_their_secrets(tmp_path):
    client = ClientSettings(name_servers=("127.0.0.1:1",), credentials=ADMIN)
    console = ConsoleSettings(client=client, password=PASSWORD, token=TOKEN)
    broker = small_settings(
        tmp_path, outward=OutwardSettings(access_key="slave-key", secret_key=OUTWARD)
    )

    for each in (client, console, broker, ADMIN):
        assert MARK not in repr(each)
        assert MARK not in str(each)


#: What those addresses of the console are asked for that want to be told.
QUERIES = {
    "/messages": "topic=orders",
    "/messages/one": "topic=orders&id={id}",
    "/messages/body": "topic=orders&id={id}",
    "/messages/track": "topic=orders&id={id}",
    "/charts": "series=cluster.in",
}
#: They go on for as long as somebody listens.
STREAMS = {"/events", "/messages/tail"}
#: Only admins may ask, who log in with a name.
OF_ADMINS = {"/access"}


async def test_no_page_and_no_address_of_the_console_has_a_secret(caplog):
    caplog.set_level(logging.DEBUG, "orbitmq")
    async with (
        AsyncEmbeddedCluster() as cluster,
        AsyncAdmin(name_server=cluster.name_server, clock=cluster.clock) as admin,
        contextlib.AsyncExitStack() as stack,
    ):
        world = World(cluster, admin)
        stack.push_async_callback(world.close)
        await cluster.create_topic("orders", queues=1)
        await world.consumer("client-1", subscriptions={"orders": "*"})
        await world.die(QUEUE, b"a body", "ValueError: bad amount")
        sent = await world.send(QUEUE, b"a body")
        guarded = replace(quick_settings(cluster.name_server), credentials=ADMIN)
        async with console_of(cluster, client=guarded, password=PASSWORD, token=TOKEN) as browser:
            names = {"/replays/{id}": "/replays/none", "{id}": sent.msg_id}
            before = {path: await browser.ask("GET", path) for path in addresses(names)}
            wrong = await browser.ask("POST", "/api/v1/login", {"password": f"{PASSWORD}?"})
            login = await browser.ask("POST", "/api/v1/login", {"password": PASSWORD})
            await browser.begin()
            heard = await listened(browser, world)
            replay = await browser.post("/dead-letters/billing/replay", {"dry_run": True}, 202)
            names["/replays/{id}"] = f"/replays/{replay['id']}"
            after = [await browser.ask("GET", path) for path in addresses(names)]

    assert login.status == 200, login.body
    assert wrong.status in (401, 403)
    told = [path for path, each in before.items() if each.status != 401]
    # The page itself, which is the same for everybody, and that there is a password.
    assert told == [*addresses(names)[: len(VIEWS)], "/api/v1/me?"]
    # An address that does not answer shows nothing, and would prove nothing.
    assert [each.body for each in after if each.status != 200] == []
    assert len(after) > 40
    for answer in (*before.values(), wrong, login, *after):
        assert MARK.encode() not in answer.body
        assert MARK not in repr(dict(answer.headers))
    assert MARK.encode() not in heard
    assert MARK not in caplog.text + repr([record.__dict__ for record in caplog.records])


def addresses(names: Mapping[str, str]) -> list[str]:
    """Every view, and every address that tells something, with names of what is there."""
    known = {
        **names,
        "{topic}": "orders",
        "{group}": "billing",
        "{client}": "client-1",
        "{name}": "nightly",
        "{name:path}": "nightly",
    }

    def filled(path: str) -> str:
        for name, text in known.items():
            path = path.replace(name, text)
        return path

    asked = [
        f"{app.PREFIX}{route.path}?{QUERIES.get(route.path, '')}"
        for route in app.ROUTES
        if "GET" in (route.methods or ()) and route.path not in {*STREAMS, *OF_ADMINS}
    ]
    return [filled(path) for path in (*VIEWS, *asked)]


async def listened(browser: Browser, world: World) -> bytes:
    """What streams tell: of a look, of a pipeline, of what somebody does, of a message."""
    async with (
        browser.listening("/events") as events,
        browser.listening("/messages/tail?topic=orders") as tail,
    ):
        reported = await browser.ask(
            "POST",
            "/api/v1/pipelines/nightly",
            {"state": "running", "batch": 1},
            headers={"authorization": f"Bearer {TOKEN}"},
        )
        assert reported.status == 204, reported.body
        await browser.post("/topics", {"name": "invoices", "queues": 1})
        await tail(b"event: command")
        await world.send(QUEUE, b"another")
        for kind in (b"event: sample", b"event: pipeline", b"event: audit"):
            heard = await events(kind)
        return heard + await tail(b"event: message")
