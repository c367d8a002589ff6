"""Our client at Apache's servers where not everybody may connect: over TLS, with accounts.

The broker takes nobody without TLS and a certificate, and knows three accounts. Those of the old
line are read from ``plain_acl.yml`` (ACL 1.0); the new line has users and policies (ACL 2.0) and
takes them over from the same file when it starts. Both sign alike.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.message import Message
from orbitmq.client.producer.core import SendSettings
from orbitmq.client.producer.producer import AsyncProducer
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer
from orbitmq.client.routes import Queue
from orbitmq.errors import BrokerRefused, OrbitError
from orbitmq.remoting.tls import ClientTls
from orbitmq.wire.command import Credentials
from tests.interop.apache import Broker, NameServer
from tests.interop.beside import SHORT_HOLDS, Taken, java_count, until
from tests.interop.session import Session, body
from tests.support.client import quick_settings

if TYPE_CHECKING:
    import ssl

    from orbitmq.client.settings import ClientSettings
    from tests.interop.apache import Release

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

TLS = Path(__file__).parents[1] / "data" / "tls"
CERTIFICATE, KEY = TLS / "certificate.pem", TLS / "key.pem"


def _account(name: str, secret: str) -> Credentials:
    return Credentials(access_key=name, secret_key=secret)


MAKER = _account("maker-key", "maker-s3cr3t")
TAKER = _account("taker-key", "taker-s3cr3t")
ADMIN = _account("admin-key", "admin-s3cr3t")
NOBODY = _account("nobody-key", "nobody-s3cr3t")
IMPOSTOR = _account("maker-key", "a-gu3ss-of-it")

#: Java's client needs the group too, which is why it is in the same file for both.
ACCOUNTS = f"""\
globalWhiteRemoteAddresses:
accounts:
  - accessKey: {MAKER.access_key}
    secretKey: {MAKER.secret_key}
    admin: false
    defaultTopicPerm: DENY
    defaultGroupPerm: DENY
    topicPerms:
      - Orders=PUB
  - accessKey: {TAKER.access_key}
    secretKey: {TAKER.secret_key}
    admin: false
    defaultTopicPerm: DENY
    defaultGroupPerm: DENY
    topicPerms:
      - Orders=SUB
    groupPerms:
      - takers=SUB
      - pollers=SUB
      - java-takers=SUB
  - accessKey: {ADMIN.access_key}
    secretKey: {ADMIN.secret_key}
    admin: true
"""

_AUTH = "org.apache.rocketmq.auth"


@dataclass(frozen=True, slots=True)
class Secured:
    """A cluster that is guarded, and how to get in."""

    release: Release
    name_server: str
    broker: str
    java: Session

    @property
    def refusal(self) -> str:
        """What is in the text of an error for who may not; the old line has no code for it."""
        is_old = self.release.is_old_line
        return r"AclException: .*\(SYSTEM_ERROR, code 1\)" if is_old else "NO_PERMISSION"

    def client(self, who: Credentials | None, tls: ssl.SSLContext | None = None) -> ClientSettings:
        return quick_settings(
            self.name_server, credentials=who, tls=known() if tls is None else tls
        )

    def producer(self, who: Credentials | None, **settings: Any) -> AsyncProducer:
        return AsyncProducer("makers", client=self.client(who), **settings)

    def consumer(self, who: Credentials | None, group: str, handler: Any) -> AsyncConsumer:
        consumer = AsyncConsumer(
            group, client=self.client(who), consume_from="first", pull=SHORT_HOLDS
        )
        consumer.on("Orders")(handler)
        return consumer


def known() -> ssl.SSLContext:
    """The TLS of somebody whom the servers trust, and who trusts them."""
    return ClientTls(authority=CERTIFICATE, certificate=CERTIFICATE, key=KEY).context()


@pytest.fixture(scope="module")
def secured(release, tmp_path_factory):
    home = tmp_path_factory.mktemp("secured")
    accounts = home / "broker" / "conf" / "plain_acl.yml"
    accounts.parent.mkdir(parents=True)
    accounts.write_text(ACCOUNTS)
    properties = home / "tls.properties"
    properties.write_text(
        "tls.test.mode.enable=false\n"
        "tls.server.need.client.auth=require\ntls.server.authClient=true\n"
        f"tls.server.keyPath={KEY}\ntls.server.certPath={CERTIFICATE}\n"
        f"tls.server.trustCertPath={CERTIFICATE}\n"
        f"tls.client.authServer=true\ntls.client.trustCertPath={CERTIFICATE}\n"
        f"tls.client.certPath={CERTIFICATE}\ntls.client.keyPath={KEY}\n"
    )
    tls = ("-Dtls.enable=true", f"-Dtls.config.file={properties}")
    enforcing = (*tls, "-Dtls.server.mode=enforcing")
    with (
        # It takes both: whoever waits for the broker's registration asks without TLS.
        NameServer.running(release, home / "names", options=tls) as names,
        Broker.running(
            release,
            home / "broker",
            names.address,
            settings=_access(release, home),
            options=enforcing,
        ) as broker,
        Session.running(release, home / "java", names.address, *tls) as java,
    ):
        place = Secured(release, names.address, broker.address, java)
        asyncio.run(_create_topic(place))
        yield place


def _access(release: Release, home: Path) -> dict[str, object]:
    """The settings that make a broker ask who somebody is."""
    common = {"waitTimeMillsInSendQueue": 10_000}
    if release.is_old_line:
        return {**common, "aclEnable": "true"}
    inner = f'{{"accessKey":"{ADMIN.access_key}","secretKey":"{ADMIN.secret_key}"}}'
    return {
        **common,
        "authConfigPath": home / "broker" / "auth",
        "authenticationEnabled": "true",
        "authenticationMetadataProvider": (
            f"{_AUTH}.authentication.provider.LocalAuthenticationMetadataProvider"
        ),
        "authorizationEnabled": "true",
        "authorizationMetadataProvider": (
            f"{_AUTH}.authorization.provider.LocalAuthorizationMetadataProvider"
        ),
        "innerClientAuthenticationCredentials": inner,
        "migrateAuthFromV1Enabled": "true",
    }


async def _create_topic(place: Secured) -> None:
    async with AsyncAdmin(client=place.client(ADMIN)) as admin:
        await admin.topics.create("Orders", queues=4)


async def test_what_one_account_may_send_another_may_consume(secured):
    taken = Taken()
    java_settings = {
        "topic": "Orders",
        "group": "java-takers",
        "hold": "",
        "deadline": 120,
        "access-key": TAKER.access_key,
        "secret-key": TAKER.secret_key,
    }
    running = secured.java.start("consume", java_settings)
    try:
        async with secured.producer(MAKER) as producer, secured.consumer(TAKER, "takers", taken):
            sent = [await producer.send("Orders", f"body-{number}") for number in range(10)]
            sent.append(await producer.send("Orders", "é" * 5000, keys="large", tags="ä"))
            batch = await producer.send_batch([Message("Orders", f"in-{n}") for n in range(10)])
            await taken.until_count(21)
            lines = await java_count(running, 21)
    finally:
        await asyncio.to_thread(running.release)

    ids = Counter(result.msg_id for result in (*sent, *batch))
    assert Counter(message.msg_id for message in taken.messages) == ids
    assert Counter(line["msgId"] for line in lines) == ids
    assert Counter(body(line) for line in lines) == Counter(taken.texts)


async def test_what_java_sends_is_polled_and_progress_is_kept(secured):
    made = await asyncio.to_thread(
        secured.java.run,
        "send",
        {
            "topic": "Orders",
            "count": 5,
            "prefix": "java-",
            "access-key": MAKER.access_key,
            "secret-key": MAKER.secret_key,
        },
    )
    wanted = {line["msgId"] for line in made}
    found: set[str] = set()
    async with AsyncPullConsumer(
        "pollers", client=secured.client(TAKER), consume_from="first"
    ) as consumer:
        consumer.subscribe("Orders")
        async with asyncio.timeout(60):
            while not wanted <= found:
                found |= {message.msg_id for message in await consumer.poll(timeout=5)}
        await consumer.commit()

    async with AsyncAdmin(client=secured.client(ADMIN)) as admin:
        progress = await admin.groups.progress("pollers", topic="Orders")
    assert progress.lag == 0


async def test_a_failed_message_comes_again_from_a_guarded_broker(secured):
    attempts: list[int] = []

    def fail_once(message):
        if message.text() == "again":
            attempts.append(message.attempt)
            if message.attempt == 1:
                raise ValueError("not yet")

    taken = Taken(work=fail_once)
    async with secured.consumer(TAKER, "takers", taken), secured.producer(MAKER) as producer:
        await producer.send("Orders", "again")
        await until(lambda: len(attempts) >= 2)

    assert attempts == [1, 2]


async def test_two_members_of_a_guarded_group_share_its_queues(secured):
    async with secured.consumer(TAKER, "takers", Taken()) as first:
        await until(lambda: len(_orders(first)) == 4)
        before = asyncio.get_running_loop().time()
        async with secured.consumer(TAKER, "takers", Taken()) as second:
            await until(lambda: len(_orders(first)) == len(_orders(second)) == 2)
            print(f"shared after {asyncio.get_running_loop().time() - before:.2f} s")
            assert not _orders(first) & _orders(second)
        await until(lambda: len(_orders(first)) == 4)


def _orders(consumer: AsyncConsumer) -> set[Queue]:
    return {queue for queue in consumer.assignment() if queue.topic == "Orders"}


@pytest.mark.parametrize(
    "who",
    [TAKER, IMPOSTOR, NOBODY, None],
    ids=["only-reads", "wrong-secret", "unknown", "unsigned"],
)
async def test_who_may_not_send_is_told_so(secured, who):
    async with secured.producer(who, sending=SendSettings(timeout=20.0)) as producer:
        with pytest.raises(OrbitError, match=secured.refusal):
            await producer.send("Orders", "no")


async def test_who_is_no_administrator_makes_no_topic(secured):
    async with AsyncAdmin(client=secured.client(MAKER)) as admin:
        with pytest.raises(OrbitError, match=secured.refusal):
            await admin.topics.create("Payroll", queues=1)


@pytest.mark.parametrize("how", ["no-certificate", "plain", "stranger"])
async def test_who_has_no_certificate_or_does_not_know_theirs_gets_nowhere(secured, how):
    if how == "plain":
        client = quick_settings(secured.name_server, credentials=MAKER)
    else:
        # Without a certificate of its own; or trusting only those that the machine trusts.
        authority = CERTIFICATE if how == "no-certificate" else None
        client = secured.client(MAKER, ClientTls(authority=authority).context())
    sending = SendSettings(timeout=5.0)
    async with AsyncProducer("makers", client=client, sending=sending) as producer:
        with pytest.raises(OrbitError) as refused:
            await producer.send("Orders", "no")

    assert not isinstance(refused.value, BrokerRefused)
