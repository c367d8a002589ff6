"""Apache's Java client where not everybody may connect: over TLS, with accounts, on the VIP port.

The cluster is a process of `orbitmq up` whose name server and broker take nobody without TLS and
without a certificate; the broker knows three accounts. The client checks the server as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orbitmq.broker.groups import attach
from orbitmq.remoting.settings import ServerSettings
from orbitmq.testing import AsyncEmbeddedCluster
from tests.interop.apache import DriverFailed, free_port
from tests.interop.session import Session
from tests.support.command import Started

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.interop.apache import Release

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

TLS = Path(__file__).parents[1] / "data" / "tls"
CERTIFICATE, KEY = TLS / "certificate.pem", TLS / "key.pem"

MAKER = {"access-key": "maker-key", "secret-key": "maker-s3cr3t"}
TAKER = {"access-key": "taker-key", "secret-key": "taker-s3cr3t"}
ADMIN = {"access-key": "admin-key", "secret-key": "admin-s3cr3t"}

ACCOUNTS = f"""
[[accounts]]
accessKey = "{MAKER["access-key"]}"
secretKey = "{MAKER["secret-key"]}"
topicPerms = ["Orders=PUB"]

[[accounts]]
accessKey = "{TAKER["access-key"]}"
secretKey = "{TAKER["secret-key"]}"
topicPerms = ["Orders=SUB"]
groupPerms = ["readers=SUB"]

[[accounts]]
accessKey = "{ADMIN["access-key"]}"
secretKey = "{ADMIN["secret-key"]}"
admin = true
"""


@dataclass(frozen=True, slots=True)
class Guarded:
    """A guarded cluster, and how clients are started that know how to get in."""

    name_server: str
    broker: str
    release: Release
    home: Path
    options: tuple[str, ...]

    @contextlib.contextmanager
    def session(self, *options: str) -> Iterator[Session]:
        with Session.running(self.release, self.home, self.name_server, *options) as session:
            yield session


@pytest.fixture(scope="module")
def guarded(release, tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    accounts = folder / "accounts.toml"
    accounts.write_text(ACCOUNTS)
    config = folder / "orbitmq.toml"
    server = "".join(
        f'tls.{name} = "{value}"\n'
        for name, value in {
            "certificate": CERTIFICATE,
            "key": KEY,
            "mode": "enforcing",
            "client_authority": CERTIFICATE,
        }.items()
    )
    outward = f"""
        [broker.outward]
        tls.authority = "{CERTIFICATE}"
        tls.certificate = "{CERTIFICATE}"
        tls.key = "{KEY}"
    """
    config.write_text(
        f"[namesrv]\nport = 0\n{server}\n[broker]\nport = 0\n{server}\n"
        f'[broker.access]\naccounts = "{accounts}"\n{outward}'
    )
    properties = folder / "tls.properties"
    properties.write_text(
        "tls.test.mode.enable=false\n"
        f"tls.client.authServer=true\ntls.client.trustCertPath={CERTIFICATE}\n"
        f"tls.client.certPath={CERTIFICATE}\ntls.client.keyPath={KEY}\n"
    )
    words = ("up", "--data", str(folder / "data"), "--config", str(config), "--json")
    with Started(*words) as cluster:
        found = [json.loads(line) for line in cluster.lines]
        addresses = {each["role"]: each["address"] for each in found if "role" in each}
        yield Guarded(
            addresses["name server"],
            addresses["broker"],
            release,
            folder / "client",
            ("-Dtls.enable=true", f"-Dtls.config.file={properties}"),
        )


@pytest.fixture(scope="module")
def inside(guarded):
    """A client that speaks TLS, after an admin has made the topic."""
    with guarded.session(*guarded.options) as session:
        session.run("topic", {"topics": "Orders", "broker": guarded.broker, **ADMIN})
        yield session


def test_what_an_account_may_send_another_may_consume(inside):
    sent = inside.run("send", {"topic": "Orders", "count": 20, "size": 9000, **MAKER})
    batch = inside.run("send", {"topic": "Orders", "count": 20, "batch": 5, **MAKER})
    received = inside.run(
        "consume", {"topic": "Orders", "group": "readers", "count": 40, "deadline": 60, **TAKER}
    )

    assert [line["status"] for line in (*sent, *batch)] == ["SEND_OK"] * 24
    ids = {line["msgId"] for line in sent} | {
        msg_id for line in batch for msg_id in line["msgId"].split(",")
    }
    assert Counter(line["msgId"] for line in received) == Counter(ids)


def test_transactions_are_ended_and_asked_about_over_tls(inside):
    ended = inside.run("transaction", {"topic": "Orders", "count": 2, "deadline": 60, **MAKER})

    assert len(ended) >= 2


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("send", {"count": 1, **TAKER}),
        ("send", {"count": 1, **MAKER, "secret-key": "a-gu3ss"}),
        ("send", {"count": 1, "access-key": "nobody-key", "secret-key": "nobody-s3cr3t"}),
        ("send", {"count": 1}),
        ("send", {"count": 1, **MAKER, "topic": "Payroll"}),
        ("topic", {"topics": "Orders", **MAKER}),
    ],
    ids=["only-reads", "wrong-secret", "unknown", "unsigned", "another-topic", "not-admin"],
)
def test_who_may_not_is_refused_and_told_so(inside, guarded, command, settings):
    given = {"topic": "Orders", "broker": guarded.broker, "queues": 4, **settings}

    with pytest.raises(DriverFailed) as refused:
        inside.run(command, given)

    assert "CODE: 16" in str(refused.value)


@pytest.mark.parametrize("options", [(), ("-Dtls.enable=true",)], ids=["plain", "no-certificate"])
def test_who_does_not_speak_tls_or_has_no_certificate_finds_nothing(guarded, options):
    outside = replace(guarded, home=guarded.home.with_name("outside"))
    with outside.session(*options) as session, pytest.raises(DriverFailed) as refused:
        session.run("send", {"topic": "Orders", "count": 1, **MAKER})

    assert "failed" in str(refused.value)
    assert "CODE: 16" not in str(refused.value)


async def test_a_client_with_the_vip_channel_sends_and_consumes_through_the_second_port(
    release, tmp_path
):
    port = free_port(neighbours=(-2,))
    seen: Counter[int] = Counter()

    def fixed(settings):
        return replace(settings, server=ServerSettings(port=port), vip=True)

    def opened(connection):
        attach(connection)
        seen[connection.local.port] += 1

    async with AsyncEmbeddedCluster(adjust=fixed) as cluster:
        (broker,) = cluster.brokers
        broker.front.connection_opened = opened  # where all connections begin
        await cluster.create_topic("Orders", queues=4)
        with Session.running(
            release,
            tmp_path / "client",
            cluster.name_server,
            "-Dcom.rocketmq.sendMessageWithVIPChannel=true",
        ) as session:
            orders = {"topic": "Orders", "count": 20}
            sent = await asyncio.to_thread(session.run, "send", orders)
            by_sending = seen.copy()
            received = await asyncio.to_thread(
                session.run, "consume", {**orders, "group": "readers"}
            )

    # Before it sends it says who it is, on the first port.
    assert by_sending[port - 2] == 1
    assert [line["status"] for line in sent] == ["SEND_OK"] * 20
    assert {line["msgId"] for line in received} == {line["msgId"] for line in sent}
