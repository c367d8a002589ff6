"""Secrets: of accounts, of the broker itself, of the console. They are nowhere to be seen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.broker.settings import AccessSettings, HttpSettings, OutwardSettings
from orbitmq.client.settings import ClientSettings
from orbitmq.console.api import routes
from orbitmq.console.settings import ConsoleSettings
from orbitmq.remoting.dialing import connect
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.acl import Credentials, sign
from orbitmq.wire.codes import RequestCode as Code
from tests.security.test_request_codes import BROKER, Right, all_fields, signed_by
from tests.support.access import account
from tests.support.broker import small_settings
from tests.support.client import quick_settings
from tests.support.consoles import console_of

ADMIN = account("admin-key", "s3cr3t-of-the-admin")
OTHER = account("other-key", "s3cr3t-of-another")
OUTWARD = "s3cr3t-for-the-master"
PASSWORD = "s3cr3t-of-the-console"  # noqa: S105  # made up here
TOKEN = "s3cr3t-of-pipelines"  # noqa: S105  # made up here
MARK = "s3cr3t"

ACCOUNTS = f"""
[[accounts]]
accessKey = "{ADMIN.access_key}"
secretKey = "{ADMIN.secret_key}"
admin = true

[[accounts]]
accessKey = "{OTHER.access_key}"
secretKey = "{OTHER.secret_key}"
"""

#: What an administrator may ask without changing anything that the rest depends on.
HARMLESS = [
    code
    for code, right in BROKER.items()
    if right is Right.ADMIN and code.name.startswith(("GET_", "QUERY_", "VIEW_"))
]


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    accounts = tmp_path / "accounts.toml"
    accounts.write_text(ACCOUNTS)
    settings = small_settings(
        tmp_path / "store",
        access=AccessSettings(accounts=accounts),
        outward=OutwardSettings(access_key="slave-key", secret_key=OUTWARD),
        http=HttpSettings(port=0),
    )
    broker = Broker(settings)
    await broker.start()
    yield broker
    await broker.stop(grace=0)


async def test_a_broker_shows_no_secret_to_anybody_by_any_request(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said = []

    for credentials in (ADMIN, OTHER, Credentials(access_key="admin-key", secret_key=f"{MARK}?")):
        connection = await connect(broker.address, prepare=signed_by(credentials))
        for code in HARMLESS:
            answer = await connection.request(code, None, extra=all_fields(), timeout=30)
            said.append(f"{answer.remark}{dict(answer.ext_fields)}{bytes(answer.body)!r}")
        connection.close()
        await connection.wait_closed()

    assert any("brokerName" in each for each in said), "the configuration has to be among them"
    assert [each for each in said if MARK in each] == []
    logged = caplog.text + repr([record.__dict__ for record in caplog.records])
    assert MARK not in logged


async def test_a_changed_setting_with_a_secret_is_neither_shown_nor_logged(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    connection = await connect(broker.address, prepare=lambda each: sign(each, ADMIN))
    text = f"secretKey={MARK}-new\naclSecretKey={MARK}-new\noutward.secret_key={MARK}-new\n"

    changed = await connection.request(
        Code.UPDATE_BROKER_CONFIG, None, body=text.encode(), timeout=30
    )
    shown = await connection.request(Code.GET_BROKER_CONFIG, timeout=30)

    connection.close()
    await connection.wait_closed()
    assert MARK not in bytes(shown.body).decode()
    assert MARK not in (changed.remark or "")
    assert MARK not in caplog.text + repr([record.__dict__ for record in caplog.records])


@pytest.mark.parametrize("page", ["/metrics", "/healthz", "/readyz", "/nothing"])
async def test_the_pages_of_a_broker_have_no_secret(broker: Broker, page: str) -> None:
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


def test_settings_do_not_show_their_secrets(tmp_path: Path) -> None:
    client = ClientSettings(name_servers=("127.0.0.1:1",), credentials=ADMIN)
    console = ConsoleSettings(client=client, password=PASSWORD, token=TOKEN)
    broker = small_settings(
        tmp_path, outward=OutwardSettings(access_key="slave-key", secret_key=OUTWARD)
    )

    for each in (client, console, broker, ADMIN):
        assert MARK not in repr(each)
        assert MARK not in str(each)


async def test_no_page_and_no_address_of_the_console_has_a_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "orbitmq")
    addresses = [
        f"{routes.PREFIX}{route.path}"
        for route in routes._ROUTES
        if "GET" in (route.methods or ()) and "{" not in route.path and route.path != "/events"
    ]
    async with AsyncEmbeddedCluster() as cluster:
        client = quick_settings(cluster.name_server)
        guarded = ClientSettings(name_servers=client.name_servers, credentials=ADMIN)
        async with console_of(cluster, client=guarded, password=PASSWORD, token=TOKEN) as browser:
            before = [await browser.ask("GET", path) for path in ("/", "/topics", *addresses)]
            wrong = await browser.ask("POST", "/api/v1/login", {"password": f"{PASSWORD}?"})
            login = await browser.ask("POST", "/api/v1/login", {"password": PASSWORD})
            after = [await browser.ask("GET", path) for path in ("/", "/topics", *addresses)]

    assert login.status == 200, login.body
    assert wrong.status in (401, 403)
    assert {answer.status for answer in after} & {200}
    for answer in (*before, wrong, login, *after):
        assert MARK.encode() not in answer.body
        assert MARK not in repr(dict(answer.headers))
    assert MARK not in caplog.text + repr([record.__dict__ for record in caplog.records])
