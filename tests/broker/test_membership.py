"""Heartbeats, unregistering, members and server-side assignment over a socket."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import pytest

from orbitmq.broker.broker import Broker
from orbitmq.client.consumer.strategies import share, strategy_named
from orbitmq.client.routes import Queue
from orbitmq.wire import bodies
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import GetConsumerListRequest, UnregisterClientRequest
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.broker import GROUP, RawClient, bodies_in, until
from tests.support.remoting import serving
from tests.support.store import HandClock

ORDERS = bodies.SubscriptionData(topic="orders", sub_string="*", sub_version=1)


async def consumer_list(client: RawClient) -> Command:
    return await client.connection.request(
        RequestCode.GET_CONSUMER_LIST_BY_GROUP, GetConsumerListRequest(consumer_group=GROUP)
    )


async def members(client: RawClient) -> list[str]:
    answer = await consumer_list(client)
    if answer.code != ResponseCode.SUCCESS:
        return []
    return sorted(decode_body(bodies.ConsumerList, answer.body).consumer_id_list)


# Coming.


async def test_a_heartbeat_makes_members_and_says_what_is_understood(broker, client):
    answer = await client.heartbeat("c1", ORDERS, producers=("makers",))

    assert answer.code == ResponseCode.SUCCESS
    assert answer.ext_fields == {
        "IS_SUPPORT_HEART_BEAT_V2": "true",
        "IS_SUB_CHANGE": "true",
        "dedupWindow": "86400:1000000",
    }
    assert await members(client) == ["c1"]
    assert broker.parts.producers.is_online("makers")
    assert broker.parts.producers.channels_of("c1") != ()
    [member] = broker.parts.consumers.members(GROUP)
    assert member.client.address == str(client.connection.local)
    assert member.client.version == 479
    retry = broker.parts.topics.get("%RETRY%" + GROUP)
    assert GROUP in broker.parts.groups
    assert retry is not None
    assert (retry.read_queue_nums, retry.write_queue_nums, retry.perm) == (1, 1, 6)


async def test_short_heartbeats_are_asked_for_the_subscription_when_it_is_not_known(client):
    def data(*, is_short):
        return encode_body(
            bodies.HeartbeatData(
                client_id="c1",
                heartbeat_fingerprint=77,
                without_sub=is_short,
                consumer_data_set=(
                    bodies.ConsumerData(
                        group_name=GROUP, subscription_data_set=() if is_short else (ORDERS,)
                    ),
                ),
            )
        )

    async def wants_more(*, is_short):
        answer = await client.connection.request(
            RequestCode.HEART_BEAT, body=data(is_short=is_short)
        )
        return answer.ext_fields["IS_SUB_CHANGE"]

    assert await wants_more(is_short=True) == "true"
    assert await wants_more(is_short=False) == "false"
    assert await wants_more(is_short=True) == "false"


# News.


async def test_all_members_are_notified_immediately_when_one_joins(broker, open_client):
    first, second = await open_client(broker), await open_client(broker)

    await first.heartbeat("c1", ORDERS)
    await until(lambda: len(first.notices) == 1)
    await second.heartbeat("c2", ORDERS)

    await until(lambda: len(first.notices) == 2 and len(second.notices) == 1)
    told = [notice.ext_fields["consumerGroup"] for notice in first.notices]
    assert told == [GROUP, GROUP]
    assert all(notice.is_one_way for notice in first.notices)
    assert await members(first) == ["c1", "c2"]


@pytest.mark.parametrize("how", ["goodbye", "close", "abort"])
async def test_all_members_are_notified_immediately_when_one_leaves(broker, open_client, how):
    staying, leaving = await open_client(broker), await open_client(broker)
    await staying.heartbeat("c1", ORDERS)
    await leaving.heartbeat("c2", ORDERS, producers=("makers",))
    await until(lambda: len(staying.notices) == 2)

    if how == "goodbye":
        header = UnregisterClientRequest(
            client_id="c2", consumer_group=GROUP, producer_group="makers"
        )
        answer = await leaving.connection.request(RequestCode.UNREGISTER_CLIENT, header)
        assert answer.code == ResponseCode.SUCCESS
    elif how == "close":
        leaving.connection.close()
    else:
        leaving.connection.abort()

    await until(lambda: len(staying.notices) == 3)
    assert await members(staying) == ["c1"]
    assert not broker.parts.producers.is_online("makers")


async def test_notices_can_be_switched_off(start_broker, open_client):
    client = await open_client(await start_broker(notify_consumers=False))

    await client.heartbeat("c1", ORDERS)

    assert await members(client) == ["c1"]
    assert client.notices == []


async def test_an_empty_group_in_a_goodbye_is_none(broker, client):
    """C++ clients send both fields, one of them empty."""
    await client.heartbeat("c1", ORDERS)

    answer = await client.connection.request(
        RequestCode.UNREGISTER_CLIENT,
        extra={"clientID": "c1", "producerGroup": "makers", "consumerGroup": ""},
    )

    assert answer.code == ResponseCode.SUCCESS
    assert await members(client) == ["c1"]


async def test_a_member_that_is_silent_for_too_long_is_removed_and_the_others_notified(
    start_broker, open_client
):
    clock = HandClock()
    broker = await start_broker(parts={"clock": clock}, scan_interval=0.02)
    silent, lively = await open_client(broker), await open_client(broker)
    await silent.heartbeat("c1", ORDERS)
    await lively.heartbeat("c2", ORDERS)
    await until(lambda: len(lively.notices) == 1)

    clock.advance(119)
    await lively.heartbeat("c2", ORDERS)
    clock.advance(2)

    await until(lambda: len(lively.notices) == 2)
    await until(lambda: not silent.connection.is_open)
    assert await members(lively) == ["c2"]


# Asking.


async def test_the_retry_topic_of_a_group_that_consumes_in_order_is_ordered(broker, client):
    broker.parts.topics.ensure(bodies.TopicConfig(topic_name="orders", order=True), now=0.0)

    await client.heartbeat("c1", ORDERS)

    retry = broker.parts.topics.get("%RETRY%" + GROUP)
    assert retry is not None
    assert retry.order


async def test_a_heartbeat_with_too_many_producer_groups_is_refused_and_the_rest_noted(
    start_broker, open_client, caplog
):
    broker = await start_broker(max_producer_groups=3)
    client = await open_client(broker)
    other = await open_client(broker)

    fits = await client.heartbeat("c1", producers=("a", "b", "c"))
    refused = await client.heartbeat("c1", ORDERS, producers=("b", "a", "d", "c"))
    again = await client.heartbeat("c1", ORDERS, producers=("b", "a", "d", "c"))
    named_too_long = await other.heartbeat("c2", producers=("x" * 256, "d"))

    assert fits.code == ResponseCode.SUCCESS
    assert refused.code == again.code == named_too_long.code == ResponseCode.INVALID_PARAMETER
    assert "of 4 producer groups are left out" in (refused.remark or "")
    assert "max_producer_groups" in (refused.remark or "")
    assert broker.parts.producers.groups() == ("a", "b", "c", "d")
    assert await members(client) == ["c1"]
    lines = [text for text in caplog.messages if "too many producer groups" in text]
    assert len(lines) == 2  # one for each connection, not for each heartbeat


async def test_a_heartbeat_with_too_much_about_consumer_groups_is_refused_and_the_rest_noted(
    start_broker, open_client, caplog
):
    broker = await start_broker(max_consumer_bytes=5_000)
    client = await open_client(broker)
    other = await open_client(broker)

    answers = [await client.heartbeat("c1", ORDERS, group=f"g{number}") for number in range(10)]
    again = await client.heartbeat("c1", ORDERS, group="g0")
    elsewhere = await other.heartbeat("c2", ORDERS, group="g9", producers=("makers",))
    nameless = await other.heartbeat("c" * 5_000, ORDERS)
    for topic in ("orders", "others"):
        await client.stored(topic)
    missed = [
        await client.pull("orders", sys_flag=0, consumer_group="g3"),
        await client.pull("others", sys_flag=0, consumer_group="g0"),
    ]

    codes = [answer.code for answer in answers]
    assert codes == [ResponseCode.SUCCESS] * 3 + [ResponseCode.INVALID_PARAMETER] * 7
    assert "1 of 1 subscriptions of group 'g3' are left out" in (answers[3].remark or "")
    assert "5000 bytes (max_consumer_bytes)" in (answers[3].remark or "")
    for pulled in missed:
        assert pulled.code == ResponseCode.SUBSCRIPTION_NOT_EXIST
        assert "or it did not fit (`max_consumer_bytes`)" in (pulled.remark or "")
    assert again.code == elsewhere.code == ResponseCode.SUCCESS
    assert broker.parts.consumers.groups() == ("g0", "g1", "g2", "g9")
    assert "g5" not in broker.parts.groups
    lines = [text for text in caplog.messages if "too much about consumer groups" in text]
    assert len(lines) == 1
    assert "max_consumer_bytes" in lines[0]
    assert nameless.code == ResponseCode.INVALID_PARAMETER
    assert "4096 are allowed" in (nameless.remark or "")


LONG = "||".join(f"tag-{number}" for number in range(4_000))


@pytest.mark.parametrize(
    "long",
    [
        bodies.SubscriptionData(topic="long", sub_string=LONG),
        bodies.SubscriptionData(topic="long", sub_string="*", tags_set=tuple(LONG.split("||")) * 2),
        bodies.SubscriptionData(topic="long", sub_string="*", code_set=tuple(range(40_000))),
    ],
    ids=["text", "tags", "hashes"],
)
async def test_a_subscription_that_is_too_long_is_left_out_and_told(broker, client, long):
    await client.stored("long", b"seen")

    refused = await client.heartbeat("c1", long, ORDERS, producers=("makers",))
    pulled = await client.pull("long", sys_flag=0)
    subscribed = broker.parts.consumers.subscriptions(GROUP)
    short = bodies.SubscriptionData(topic="long", sub_string="*", sub_version=2)
    mended = await client.heartbeat("c1", short, ORDERS)
    pulled_then = await client.pull("long", sys_flag=0)

    assert refused.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    assert "'long'" in (refused.remark or "")
    assert "32768" in (refused.remark or "")
    assert len(refused.remark or "") < 1000
    assert pulled.code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    assert "32768" in (pulled.remark or "")
    assert set(subscribed) == {"orders"}
    assert broker.parts.producers.is_online("makers")
    assert mended.code == ResponseCode.SUCCESS
    assert bodies_in(pulled_then) == [b"seen"]


async def test_different_subscriptions_are_logged_and_shown_with_the_list_of_members(
    start_broker, open_client, caplog
):
    caplog.set_level(logging.INFO)
    broker = await start_broker(scan_interval=0.02)
    one, two = await open_client(broker), await open_client(broker)
    blue = bodies.SubscriptionData(topic="orders", sub_string="blue", sub_version=2)

    async def shown():
        answer = await consumer_list(one)
        assert answer.code == ResponseCode.SUCCESS
        return answer.ext_fields.get("findings")

    await one.heartbeat("one", ORDERS)
    await two.heartbeat("two", ORDERS)
    before = await shown()
    await two.heartbeat("two", blue)
    await until(lambda: broker.parts.disagreements.open_findings(GROUP) != ())
    (finding,) = json.loads(await shown() or "[]")
    await two.heartbeat("two", msgspec.structs.replace(ORDERS, sub_version=3))
    await until(lambda: broker.parts.disagreements.open_findings(GROUP) == ())

    assert (before, await shown()) == (None, None)
    assert set(finding) == {"kind", "group", "text", "topic"}
    assert "one with TAG '*', two with TAG 'blue'; messages will be missed" in finding["text"]
    logged = [text for text in caplog.messages if "subscribe differently" in text]
    assert logged == [finding["text"], f"resolved: {finding['text']}"]


WANTED = bodies.SubscriptionData(topic="orders", sub_string="*")


async def ask(client: RawClient, client_id: str, **changes: Any) -> Command:
    asked = bodies.QueryAssignment(
        **{
            "client_id": client_id,
            "consumer_group": GROUP,
            "message_model": bodies.MessageModel.CLUSTERING,
            "strategy_name": "AVG",
            "topic": "orders",
        }
        | changes
    )
    return await client.connection.request(
        RequestCode.QUERY_ASSIGNMENT, body=encode_body(asked), timeout=30
    )


def queues_in(answer: Command) -> list[tuple[str, int]]:
    assert answer.code == 0, answer.remark
    given = json.loads(bytes(answer.body))["messageQueueAssignments"]
    assert {each["mode"] for each in given} <= {"PULL"}
    assert {each["messageQueue"]["topic"] for each in given} <= {"orders"}
    return [(each["messageQueue"]["brokerName"], each["messageQueue"]["queueId"]) for each in given]


def make_topic(broker: Broker, queues: int, perm: int = 6) -> None:
    broker.parts.topics.update(
        bodies.TopicConfig(
            topic_name="orders", perm=perm, read_queue_nums=queues, write_queue_nums=queues
        ),
        now=0.0,
    )


@pytest.mark.parametrize("strategy", ["AVG", "AVG_BY_CIRCLE"])
@pytest.mark.parametrize(("queues", "members"), [(8, 1), (8, 3), (3, 3), (2, 3), (7, 2), (0, 2)])
async def test_the_shares_are_those_that_the_members_would_work_out(
    broker, open_client, strategy, queues, members
):
    make_topic(broker, queues)
    # In Java's order the last of these is before the one before it.
    ids = ["b@1", "a@2", "\U0001f680", "\uffee"][-members:]
    clients = {each: await open_client(broker) for each in ids}
    for client_id, client in clients.items():
        await client.heartbeat(client_id, WANTED)

    told = {
        client_id: queues_in(await ask(client, client_id, strategy_name=strategy))
        for client_id, client in clients.items()
    }

    known = [Queue("orders", "broker-a", number) for number in range(queues)]
    for client_id in ids:
        own = share(strategy_named(strategy), known, ids, client_id)
        assert told[client_id] == [(each.broker, each.id) for each in own]


async def test_the_queues_of_all_brokers_of_the_topic_are_shared(
    start_broker, open_client, name_server
):
    at = {"name_servers": (str(name_server.address),)}
    first = await start_broker(root="first", name="first", **at)
    second = await start_broker(root="second", name="second", **at)
    for broker in (first, second):
        make_topic(broker, 2)
    client = await open_client(second)
    await client.heartbeat("c", WANTED)

    def brokers():
        route = name_server.service.routes.route("orders")
        return 0 if route is None else len(route.queue_datas)

    await until(lambda: brokers() == 2)
    told = queues_in(await ask(client, "c"))

    assert told == [("first", 0), ("first", 1), ("second", 0), ("second", 1)]


@pytest.mark.parametrize(("perm", "queues"), [(6, [0, 1, 2]), (2, [])])
async def test_a_broadcasting_member_has_all_readable_queues(broker, client, perm, queues):
    make_topic(broker, 3, perm)

    answer = await ask(
        client, "any", message_model=bodies.MessageModel.BROADCASTING, strategy_name=None
    )

    assert [number for _, number in queues_in(answer)] == queues


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (
            {"strategy_name": "CONSISTENT_HASH"},
            ResponseCode.INVALID_PARAMETER,
            "allocation strategy 'CONSISTENT_HASH' is not known to the broker, which knows AVG and",
        ),
        ({"strategy_name": None}, ResponseCode.INVALID_PARAMETER, "allocation strategy ''"),
        ({"client_id": "x"}, ResponseCode.CONSUMER_NOT_ONLINE, "x is not a member of group"),
        ({"consumer_group": "h"}, ResponseCode.CONSUMER_NOT_ONLINE, "send a heartbeat first"),
        ({"topic": "none"}, ResponseCode.TOPIC_NOT_EXIST, "topic[none] not exist"),
    ],
)
async def test_a_share_that_is_not_known_is_refused_and_a_wrong_strategy_logged_once(
    broker, client, caplog, changes, code, words
):
    make_topic(broker, 3)
    await client.heartbeat("c", WANTED)

    for _ in range(2):
        answer = await ask(client, **({"client_id": "c"} | changes))

    assert answer.code == code
    assert words in (answer.remark or "")
    logged = [each for each in caplog.records if "assigned no queues" in each.getMessage()]
    assert len(logged) == ("strategy_name" in changes)


async def test_without_a_route_a_share_is_refused(start_broker, open_client):
    """The broker does not take its own queues for all queues of the topic."""

    def refuse(_, request):
        return request.answer(ResponseCode.SYSTEM_BUSY, remark="not now")

    async with serving({RequestCode.GET_ROUTEINFO_BY_TOPIC: refuse}) as refusing:
        broker = await start_broker(name_servers=(str(refusing.address),))
        make_topic(broker, 2)
        client = await open_client(broker)
        await client.heartbeat("c", WANTED)
        refused = await ask(client, "c")

    assert refused.code == ResponseCode.SYSTEM_BUSY
    assert "gives no route of topic orders: not now" in (refused.remark or "")
