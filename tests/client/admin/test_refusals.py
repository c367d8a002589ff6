"""What an admin refuses, with what is allowed."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from orbitmq.client.admin.admin import AdminSettings, AsyncAdmin
from orbitmq.client.admin.deadletters import DeadLetterFilter
from orbitmq.client.admin.messages import Cursor
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.errors import (
    AdminError,
    BadRequest,
    BrokerNotFound,
    BrokerUnavailable,
    ConsumerNotOnline,
    GroupNotFound,
    MessageNotFound,
    QueueNotFound,
    TopicExists,
    TopicNotFound,
)
from orbitmq.client.routes import Queue
from orbitmq.errors import SettingError
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.settings import ServerSettings
from tests.support.client_admin import GROUP

A0 = Queue("orders", "broker-a", 0)
#: Of no message: a unique id, and offset ids at no broker of the cluster.
UNIQUE = "7F00000100010000000000000000FFFF"
ELSEWHERE = "0102030400002A9F0000000000000000"
FOREIGN = Cursor("returns", False, "*", "TAG", ()).text


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda a: a.topics.create("no spaces"), SettingError, "letters"),
        (lambda a: a.topics.delete("TBW102"), BadRequest, "system"),
        (lambda a: a.topics.create("new", queues=0), SettingError, "write_queues must be 1 to"),
        (lambda a: a.topics.create("new", permission="x"), BadRequest, "permission must be rw"),
        (lambda a: a.topics.create("new", message_type="LOUD"), BadRequest, "one of NORMAL"),
        (lambda a: a.topics.create("new", brokers=["broker-x"]), BrokerNotFound, "broker-x"),
        (lambda a: a.topics.create("new", cluster="nowhere"), BrokerNotFound, "cluster nowhere"),
        (lambda a: a.topics.create("orders", queues=2), TopicExists, "orders"),
        (lambda a: a.topics.create("orders", queues=1, exist_ok=True), TopicExists, "2 queues"),
        (
            lambda a: a.topics.create("orders", queues=2, ordered=True, exist_ok=True),
            TopicExists,
            "topics.update",
        ),
        (lambda a: a.topics.update("new", queues=2), TopicNotFound, "new"),
        (lambda a: a.topics.groups("new"), TopicNotFound, "new"),
        (lambda a: a.groups.progress("no body"), SettingError, "letters"),
        (lambda a: a.groups.progress("nobody"), GroupNotFound, "orbitmq group create nobody"),
        (lambda a: a.groups.describe("nobody"), GroupNotFound, "nobody"),
        (lambda a: a.groups.pause("nobody"), GroupNotFound, "nobody"),
        (lambda a: a.groups.delete("nobody"), GroupNotFound, "nobody"),
        (lambda a: a.groups.create("new", max_retries=-1), SettingError, "max_retries"),
        (lambda a: a.groups.create("new", consume_timeout=1.0), BadRequest, "consume_timeout"),
        (lambda a: a.consumers.running_info(GROUP, "c9"), ConsumerNotOnline, "'c9' of 'billing'"),
        (lambda a: a.consumers.members("nobody"), ConsumerNotOnline, "'nobody' is not online"),
        (lambda a: a.messages.by_offset_id("abc"), BadRequest, "32 or 56"),
        (lambda a: a.messages.by_offset_id(ELSEWHERE), MessageNotFound, "no broker of this clus"),
        (lambda a: a.messages.get(UNIQUE), MessageNotFound, r"get\(id, topic="),
        (lambda a: a.messages.get(UNIQUE, topic="orders"), MessageNotFound, "topic 'orders'"),
        (lambda a: a.messages.get("x", topic="orders"), MessageNotFound, "in topic 'orders'"),
        (lambda a: a.messages.at(A0, 3), MessageNotFound, "offset 3"),
        (lambda a: a.messages.at(A0, -1), SettingError, "offset must be"),
        (lambda a: a.messages.at(Queue("orders", "broker-a", 9), 0), MessageNotFound, "at offset"),
        (lambda a: anext(a.messages.by_key("orders", "")), BadRequest, "key"),
        (lambda a: a.messages.page("nothing"), TopicNotFound, "nothing"),
        (
            lambda a: a.messages.page("orders", queues=[Queue("orders", "broker-a", 7)]),
            QueueNotFound,
            "broker-a:7",
        ),
        (lambda a: a.messages.page("orders", size=0), SettingError, "size"),
        (lambda a: a.messages.page("orders", expression_type="X"), BadRequest, "TAG or SQL92"),
        (lambda a: a.messages.page("orders", expression="||"), BadRequest, "tag"),
        (lambda a: a.messages.page("orders", cursor="nonsense"), BadRequest, "not a cursor"),
        (lambda a: a.messages.page("orders", cursor=FOREIGN), BadRequest, "topic 'returns'"),
        (lambda a: a.messages.page("orders", since="x"), SettingError, "since must be like"),
        (lambda a: anext(a.messages.tail("orders", every=0)), SettingError, "every"),
        (lambda a: anext(a.messages.tail("nothing")), TopicNotFound, "nothing"),
        (lambda a: a.progress.plan_reset("nobody", "orders", "last"), GroupNotFound, "nobody"),
        (lambda a: a.progress.plan_reset(GROUP, "nothing", "last"), TopicNotFound, "nothing"),
        (
            lambda a: a.progress.plan_reset(GROUP, "orders", ResetTo.by_queue({A0: 11})),
            BadRequest,
            r"offset 11 is not in queue broker-a:0.*0 to 0",
        ),
        (
            lambda a: a.progress.plan_reset(
                GROUP, "orders", "last", queues=[Queue("orders", "broker-z", 0)]
            ),
            QueueNotFound,
            "broker-a:0, broker-a:1, broker-b:0",
        ),
        (lambda a: a.progress.plan_clone(GROUP, GROUP), BadRequest, "itself"),
        (lambda a: a.progress.plan_clone("nobody", "audit"), GroupNotFound, "nobody"),
        (lambda a: a.dead_letters.summary("no group"), SettingError, "letters"),
        (lambda a: a.dead_letters.sample(GROUP, 0), SettingError, "count"),
        (lambda a: a.dead_letters.resend(GROUP, rate=0), SettingError, "rate"),
        (lambda a: a.dead_letters.resend(GROUP, limit=0), SettingError, "limit"),
        (lambda a: a.dead_letters.resend(GROUP, to="elsewhere"), BadRequest, "retry, origin"),
        (lambda a: a.dead_letters.resend("nobody"), GroupNotFound, "nobody"),
        (lambda a: a.dead_letters.export(GROUP, "dead.csv"), BadRequest, "jsonl, parquet"),
        (lambda a: a.dead_letters.export(GROUP, "x", format="csv"), BadRequest, "'csv' is none"),
        (
            lambda a: a.dead_letters.export(GROUP, "/nowhere/dead.jsonl"),
            AdminError,
            "cannot be written",
        ),
        (lambda a: a.config.update_broker("broker-a", {}), BadRequest, "no setting"),
        (
            lambda a: a.config.update_broker("broker-a", {"maxMessageSize": 5}),
            BadRequest,
            "a name and a text",
        ),
        (lambda a: a.config.name_server("127.0.0.1:1"), BadRequest, "none of the name servers"),
        (lambda a: a.config.put_value("places", "here", ""), BadRequest, "must not be empty"),
        (lambda a: a.config.clean_expired_queues("broker-x"), BrokerNotFound, "broker-x"),
        (lambda a: a.runtime("broker-x"), BrokerNotFound, "broker-a, broker-b"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_what_is_allowed(shared, call, error, text):
    with pytest.raises(error, match=text):
        await call(shared)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: DeadLetterFilter(keys="order-1"), BadRequest, r"filter\.keys must be several"),
        (lambda: DeadLetterFilter(min_attempts=-1), SettingError, r"filter\.min_attempts"),
        (lambda: DeadLetterFilter(since="yesterday"), SettingError, r"filter\.since"),
        (lambda: ResetTo.offset(-1), SettingError, "offset"),
        (lambda: ResetTo.offset(True), SettingError, "offset"),
        (lambda: ResetTo.by_queue({}), BadRequest, "at least one queue"),
        (lambda: ResetTo.time("yesterday"), SettingError, "the time of a reset"),
        (lambda: AdminSettings(at_once=0), SettingError, r"admin\.at_once"),
        (lambda: AdminSettings(timeout=0), SettingError, r"admin\.timeout"),
        (lambda: ResetTo.of("newest"), SettingError, "must be earliest, latest, a time .*, got"),
    ],
)
def test_wrong_values_are_refused_by_name(make, error, text):
    with pytest.raises(error, match=text):
        make()


NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("earliest", ResetTo.earliest()),
        ("latest", ResetTo.latest()),
        (1500, ResetTo.offset(1500)),
        ("first", ResetTo.begin()),
        ("Last", ResetTo.end()),
        ("begin", ResetTo.first()),
        ("end", ResetTo.last()),
        (NOON, ResetTo.time(NOON)),
        ("2026-01-31T12:00:00Z", ResetTo.time(NOON)),
        (ResetTo.shift(-5), ResetTo.shift(-5)),
    ],
)
def test_the_target_of_a_reset_may_be_a_word_or_a_time(written, meant):
    assert ResetTo.of(written) == meant


async def test_a_change_without_any_registered_broker_is_refused():
    server = NameServer(NameServerSettings(server=ServerSettings(port=0)))
    await server.start()
    try:
        async with AsyncAdmin(name_server=str(server.address)) as admin:
            for change in (admin.topics.create("orders"), admin.groups.create(GROUP)):
                with pytest.raises(BrokerUnavailable, match="none is registered"):
                    await change
            assert list(await admin.topics.list()) == []
    finally:
        await server.stop()
