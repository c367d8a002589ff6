"""Heartbeats, goodbyes and order locks over a socket."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import msgspec
import pytest

from orbitmq.broker.broker import Broker
from orbitmq.broker.groups import MADE_PER_SECOND
from orbitmq.broker.settings import PullSettings
from orbitmq.client.consumer.strategies import share, strategy_named
from orbitmq.client.routes import Queue
from orbitmq.namesrv.server import NameServer
from orbitmq.remoting.channels import connect
from orbitmq.wire.bodies import (
    CheckClientRequest,
    ConsumerData,
    ConsumerList,
    HeartbeatData,
    LockBatch,
    LockedQueues,
    MessageModel,
    MessageQueue,
    QueryAssignment,
    SubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import (
    GetConsumerListRequest,
    GetRouteInfoRequest,
    UnregisterClientRequest,
)
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.broker import GROUP, RawClient, bodies_in, until
from tests.support.remoting import serving
from tests.support.store import HandClock

ORDERS = SubscriptionData(topic="orders", sub_string="*", sub_version=1)


async def members(client: RawClient, group: str = GROUP) -> list[str]:
    answer = await client.connection.request(
        RequestCode.GET_CONSUMER_LIST_BY_GROUP, GetConsumerListRequest(consumer_group=group)
    )
    if answer.code != ResponseCode.SUCCESS:
        return []
    return sorted(decode_body(ConsumerList, answer.body).consumer_id_list)


def groups_told(client: RawClient) -> list[str]:
    return [notice.ext_fields["consumerGroup"] for notice in client.notices]


async def raw_heartbeat(client: RawClient, body: Any) -> Command:
    return await client.connection.request(
        RequestCode.HEART_BEAT, body=json.dumps(body).encode() + b"\n"
    )


# Coming.


async def test_a_heartbeat_makes_members_and_says_what_is_understood(broker, client):
    answer = await client.heartbeat("c1", ORDERS, producers=("makers",))

    assert answer.code == ResponseCode.SUCCESS
    assert answer.ext_fields == {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"}
    assert await members(client) == ["c1"]
    assert broker.parts.producers.is_online("makers")
    assert broker.parts.producers.channels_of("c1") != ()
    [member] = broker.parts.consumers.members(GROUP)
    assert member.client.address == str(client.connection.local)
    assert member.client.version == 479


async def test_a_heartbeat_makes_the_group_and_its_retry_topic(broker, client):
    await client.heartbeat("c1", ORDERS)

    retry = broker.parts.topics.get("%RETRY%" + GROUP)
    assert GROUP in broker.parts.groups
    assert retry is not None
    assert (retry.read_queue_nums, retry.write_queue_nums, retry.perm) == (1, 1, 6)


async def test_a_group_that_may_not_be_made_is_passed_over(start_broker, open_client):
    broker = await start_broker(auto_create_group=False)
    client = await open_client(broker)

    answer = await client.heartbeat("c1", ORDERS, producers=("makers",))

    assert answer.code == ResponseCode.SUCCESS
    assert await members(client) == []
    assert broker.parts.topics.get("%RETRY%" + GROUP) is None
    assert broker.parts.producers.is_online("makers")


async def test_a_group_that_is_refused_is_told_of_once_a_minute_and_when_it_is_refused_anew(
    start_broker, open_client, caplog
):
    clock = HandClock()
    broker = await start_broker(auto_create_group=False, parts={"clock": clock})
    client, other = await open_client(broker), await open_client(broker)

    def told():
        return [each.getMessage() for each in caplog.records if "may not be made" in each.msg]

    for seconds in (0.0, 30.0, 29.9):
        clock.advance(seconds)
        await client.heartbeat("c1", ORDERS)
        await other.heartbeat("c2", ORDERS)
    once = len(told())
    clock.advance(0.2)
    await client.heartbeat("c1", ORDERS)
    twice = told()
    broker.parts.groups.update(SubscriptionGroupConfig(group_name=GROUP), now=0.0)
    await client.heartbeat("c1", ORDERS)
    broker.parts.groups.delete(GROUP, now=0.0)
    await client.heartbeat("c1", ORDERS)

    assert once == 1
    assert len(twice) == 2
    assert twice[-1].endswith("(time 7)")
    assert len(told()) == 3
    assert told()[-1].endswith("(time 1)")


async def test_a_heartbeat_of_very_many_groups_makes_no_more_than_are_allowed(
    start_broker, open_client
):
    broker = await start_broker(max_auto_groups=20, max_auto_topics=10_000)
    client = await open_client(broker)
    before = len(broker.parts.topics)
    made = 20 - len(broker.parts.groups)

    answer = await raw_heartbeat(
        client,
        {
            "clientID": "greedy",
            "consumerDataSet": [
                {"groupName": f"g{number}", "subscriptionDataSet": []} for number in range(200)
            ],
        },
    )

    assert answer.code == ResponseCode.SUCCESS
    assert len(broker.parts.groups) == 20
    assert len(broker.parts.topics) == before + made


async def test_members_of_a_group_that_may_not_be_made_are_told_when_they_ask_who_is_in_it(
    start_broker, open_client
):
    broker = await start_broker(max_auto_groups=1)
    client = await open_client(broker)
    await client.heartbeat("c1", ORDERS)

    answer = await client.connection.request(
        RequestCode.GET_CONSUMER_LIST_BY_GROUP, GetConsumerListRequest(consumer_group=GROUP)
    )

    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert f"orbitmq group create {GROUP}" in (answer.remark or "")
    assert "max_auto_groups" in (answer.remark or "")


async def test_a_heartbeat_of_a_cpp_client_is_understood(broker, client):
    """Numbers for names, texts for versions, sets that are missing, a newline at the end."""
    answer = await raw_heartbeat(
        client,
        {
            "clientID": "cpp",
            "consumerDataSet": [
                {
                    "groupName": GROUP,
                    "consumeType": 1,
                    "messageModel": 1,
                    "consumeFromWhere": 0,
                    "subscriptionDataSet": [
                        {
                            "topic": "orders",
                            "subString": "a||b",
                            "subVersion": "1700000000000",
                            "codeSet": [0, 0],
                            "tagsSet": ["a", "b"],
                        }
                    ],
                }
            ],
        },
    )

    assert answer.code == ResponseCode.SUCCESS
    assert broker.parts.consumers.model(GROUP) is MessageModel.CLUSTERING
    subscription = broker.parts.consumers.subscription(GROUP, "orders")
    assert subscription is not None
    assert subscription.sub_version == 1_700_000_000_000


async def test_a_heartbeat_that_cannot_be_read_is_refused(client):
    answer = await raw_heartbeat(client, ["not", "an", "object"])

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "HeartbeatData" in (answer.remark or "")


async def test_short_heartbeats_are_asked_for_the_subscription_when_it_is_not_known(client):
    def data(*, is_short):
        return encode_body(
            HeartbeatData(
                client_id="c1",
                heartbeat_fingerprint=77,
                without_sub=is_short,
                consumer_data_set=(
                    ConsumerData(
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


async def test_all_members_are_told_at_once_when_one_joins(broker, open_client):
    first, second = await open_client(broker), await open_client(broker)

    await first.heartbeat("c1", ORDERS)
    await until(lambda: len(first.notices) == 1)
    await second.heartbeat("c2", ORDERS)

    await until(lambda: len(first.notices) == 2 and len(second.notices) == 1)
    assert groups_told(first) == [GROUP, GROUP]
    assert all(notice.is_one_way for notice in first.notices)
    assert await members(first) == ["c1", "c2"]


async def test_a_heartbeat_without_news_tells_nobody(client):
    await client.heartbeat("c1", ORDERS)
    await until(lambda: client.notices)

    for _ in range(3):
        await client.heartbeat("c1", ORDERS)

    # Whatever was sent would have come before the last answer.
    assert len(client.notices) == 1


@pytest.mark.parametrize("how", ["goodbye", "close", "abort"])
async def test_all_members_are_told_at_once_when_one_leaves(broker, open_client, how):
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


async def test_a_broadcasting_group_is_not_told(broker, open_client):
    clients = [await open_client(broker) for _ in range(2)]

    for number, client in enumerate(clients):
        await client.heartbeat(f"c{number}", ORDERS, message_model=MessageModel.BROADCASTING)

    assert await members(clients[0]) == ["c0", "c1"]
    assert [client.notices for client in clients] == [[], []]


@pytest.mark.parametrize("by", ["broker", "group"])
async def test_notices_can_be_switched_off(start_broker, open_client, by):
    broker = await start_broker(notify_consumers=by != "broker")
    if by == "group":
        broker.parts.groups.update(
            SubscriptionGroupConfig(group_name=GROUP, notify_consumer_ids_changed_enable=False),
            now=0.0,
        )
    client = await open_client(broker)

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


async def test_who_is_silent_for_too_long_is_let_go_and_the_others_are_told(
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


async def test_a_group_that_disagrees_is_reported_once(start_broker, open_client, caplog):
    caplog.set_level(logging.INFO)
    broker = await start_broker(scan_interval=0.02)
    clients = [await open_client(broker) for _ in range(2)]
    for number, client in enumerate(clients):
        tags = SubscriptionData(topic="orders", sub_string=f"tag{number}")
        await client.heartbeat(f"c{number}", tags)

    await until(lambda: "subscribe differently" in caplog.text)
    await clients[1].heartbeat("c1", SubscriptionData(topic="orders", sub_string="tag0"))
    await until(lambda: "resolved" in caplog.text)

    assert caplog.text.count("subscribe differently") == 2  # when it began, and when it ended


# Asking.


async def test_a_group_that_is_not_made_in_this_second_may_be_asked_for_again(
    start_broker, open_client
):
    """Told that nobody is in it, a consumer would believe that it is refused for good."""
    clock = HandClock()
    broker = await start_broker(parts={"clock": clock})
    client = await open_client(broker)
    for number in range(MADE_PER_SECOND):
        broker.parts.groups.find(f"g{number}", now=clock.now())

    await client.heartbeat("c1", ORDERS)
    answer = await client.connection.request(
        RequestCode.GET_CONSUMER_LIST_BY_GROUP, GetConsumerListRequest(consumer_group=GROUP)
    )
    clock.advance(1.0)
    await client.heartbeat("c1", ORDERS)

    assert answer.code == ResponseCode.SYSTEM_BUSY
    assert "come again" in (answer.remark or "")
    assert await members(client) == ["c1"]


async def test_a_refused_group_cannot_forge_a_line_of_the_log(client, caplog):
    for name in ("x\nERROR all is lost\x1b[2J", "y" * 100_000):
        consumer = {"groupName": name, "subscriptionDataSet": []}
        await raw_heartbeat(client, {"clientID": "c1", "consumerDataSet": [consumer]})

    told = [each.getMessage() for each in caplog.records if "may not be made" in each.msg]
    assert len(told) == 2
    assert all(text.isprintable() and len(text) < 2000 for text in told)


async def test_a_group_without_members_is_answered_with_an_error(client):
    answer = await client.connection.request(
        RequestCode.GET_CONSUMER_LIST_BY_GROUP, GetConsumerListRequest(consumer_group="nobody")
    )

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark == "no consumer for this group, nobody"


@pytest.mark.parametrize(
    ("text", "kind", "is_enabled", "code"),
    [
        ("a || b", "TAG", True, ResponseCode.SUCCESS),
        ("price > 1", "SQL92", True, ResponseCode.SUCCESS),
        ("price >", "SQL92", True, ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ("price > 1", "SQL92", False, ResponseCode.SYSTEM_ERROR),
        ("price >", "SQL92", False, ResponseCode.SYSTEM_ERROR),
        ("a || b", "TAG", False, ResponseCode.SUCCESS),
    ],
)
async def test_a_consumer_can_ask_whether_its_subscription_can_be_served(
    start_broker, open_client, text, kind, is_enabled, code
):
    broker = await start_broker(pull=PullSettings(enable_property_filter=is_enabled))
    client = await open_client(broker)
    asked = CheckClientRequest(
        client_id="c1",
        group=GROUP,
        subscription_data=SubscriptionData(topic="orders", sub_string=text, expression_type=kind),
    )

    answer = await client.connection.request(
        RequestCode.CHECK_CLIENT_CONFIG, body=encode_body(asked)
    )

    assert answer.code == code


async def test_the_retry_topic_of_a_group_that_consumes_in_order_is_ordered(broker, client):
    broker.parts.topics.ensure(TopicConfig(topic_name="orders", order=True), now=0.0)

    await client.heartbeat("c1", ORDERS)

    retry = broker.parts.topics.get("%RETRY%" + GROUP)
    assert retry is not None
    assert retry.order


async def test_a_client_with_too_many_producer_groups_is_told_and_the_rest_is_noted(
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


async def test_a_client_with_too_much_about_consumer_groups_is_told_and_the_rest_is_noted(
    start_broker, open_client, caplog
):
    broker = await start_broker(max_consumer_bytes=5_000)
    client = await open_client(broker)
    other = await open_client(broker)

    answers = [await client.heartbeat("c1", ORDERS, group=f"g{number}") for number in range(10)]
    again = await client.heartbeat("c1", ORDERS, group="g0")
    elsewhere = await other.heartbeat("c2", ORDERS, group="g9", producers=("makers",))
    nameless = await other.heartbeat("c" * 5_000, ORDERS)

    codes = [answer.code for answer in answers]
    assert codes == [ResponseCode.SUCCESS] * 3 + [ResponseCode.INVALID_PARAMETER] * 7
    assert "1 of 1 subscriptions of group 'g3' are left out" in (answers[3].remark or "")
    assert "5000 bytes (max_consumer_bytes)" in (answers[3].remark or "")
    assert again.code == elsewhere.code == ResponseCode.SUCCESS
    assert broker.parts.consumers.groups() == ("g0", "g1", "g2", "g9")
    assert "g5" not in broker.parts.groups
    lines = [text for text in caplog.messages if "too much about consumer groups" in text]
    assert len(lines) == 1
    assert "max_consumer_bytes" in lines[0]
    assert nameless.code == ResponseCode.INVALID_PARAMETER
    assert "4096 are allowed" in (nameless.remark or "")


async def test_pulls_for_what_a_heartbeat_had_no_room_for_are_told_which_setting_it_is(
    start_broker, open_client
):
    broker = await start_broker(max_consumer_bytes=5_000)
    client, other = await open_client(broker), await open_client(broker)
    for topic in ("orders", "large"):
        await client.stored(topic, b"seen")
    large = SubscriptionData(topic="large", sub_string="x" * 5_000, sub_version=1)

    refused = await client.heartbeat("c1", ORDERS, large)
    served = await client.pull("orders", sys_flag=0)
    missed = await client.pull("large", sys_flag=0)
    all_missed = await client.pull("large", sys_flag=0, consumer_group="nobody")
    elsewhere = await other.pull("large", sys_flag=0)
    mended = await client.heartbeat("c1", ORDERS)
    not_asked_for = await client.pull("large", sys_flag=0)

    assert refused.code == ResponseCode.INVALID_PARAMETER
    assert "1 of 2 subscriptions" in (refused.remark or "")
    assert mended.code == ResponseCode.SUCCESS
    assert bodies_in(served) == [b"seen"]
    for pulled in (missed, all_missed, elsewhere, not_asked_for):
        assert pulled.code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    assert "5000 bytes (max_consumer_bytes)" in (missed.remark or "")
    assert "5000 bytes (max_consumer_bytes)" in (all_missed.remark or "")
    assert "max_consumer_bytes" not in (elsewhere.remark or "")
    assert "max_consumer_bytes" not in (not_asked_for.remark or "")


LONG = "||".join(f"tag-{number}" for number in range(4_000))


@pytest.mark.parametrize(
    "long",
    [
        SubscriptionData(topic="long", sub_string=LONG),
        SubscriptionData(topic="long", sub_string="*", tags_set=tuple(LONG.split("||")) * 2),
        SubscriptionData(topic="long", sub_string="*", code_set=tuple(range(40_000))),
        SubscriptionData(topic="long", sub_string=LONG, expression_type="SQL92"),
    ],
    ids=["text", "tags", "hashes", "sql"],
)
async def test_a_subscription_that_is_too_long_is_left_out_and_told(broker, client, long):
    await client.stored("long", b"seen")

    refused = await client.heartbeat("c1", long, ORDERS, producers=("makers",))
    pulled = await client.pull("long", sys_flag=0)
    subscribed = broker.parts.consumers.subscriptions(GROUP)
    short = SubscriptionData(topic="long", sub_string="*", sub_version=2)
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


async def test_a_pull_with_a_tag_list_that_is_too_long_is_refused(broker, client):
    await client.stored("orders", b"red", properties={"TAGS": "tag-7"})
    fitting = LONG[: LONG.rindex("||", 0, 32_768)]
    check = CheckClientRequest(
        client_id="c1",
        group=GROUP,
        subscription_data=SubscriptionData(topic="orders", sub_string=LONG),
    )

    refused = await client.pull("orders", subscription=LONG)
    noted = broker.parts.consumers.subscription(GROUP, "orders")
    checked = await client.connection.request(
        RequestCode.CHECK_CLIENT_CONFIG, body=encode_body(check)
    )
    found = [bodies_in(await client.pull("orders", subscription=fitting)) for _ in range(2)]

    assert refused.code == checked.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    assert f"{len(LONG)} characters, 32768 are allowed" in (refused.remark or "")
    assert f"{len(LONG)} characters, 32768 are allowed" in (checked.remark or "")
    assert noted is None
    assert found == [[b"red"], [b"red"]]


# Order locks.


def queues(*numbers: int) -> tuple[MessageQueue, ...]:
    return tuple(
        MessageQueue(broker_name="broker-a", queue_id=number, topic="orders") for number in numbers
    )


async def lock(client: RawClient, who: str, *numbers: int) -> list[int]:
    body = LockBatch(client_id=who, consumer_group=GROUP, mq_set=queues(*numbers))
    answer = await client.connection.request(RequestCode.LOCK_BATCH_MQ, body=encode_body(body))
    assert answer.code == ResponseCode.SUCCESS
    held = decode_body(LockedQueues, answer.body).lock_ok_mq_set
    return sorted(queue.queue_id for queue in held)


async def unlock(client: RawClient, who: str, *numbers: int) -> None:
    body = LockBatch(client_id=who, consumer_group=GROUP, mq_set=queues(*numbers))
    answer = await client.connection.request(RequestCode.UNLOCK_BATCH_MQ, body=encode_body(body))
    assert (answer.code, bytes(answer.body)) == (ResponseCode.SUCCESS, b"")


def make_orders(broker: Broker) -> None:
    config = TopicConfig(topic_name="orders", read_queue_nums=4, write_queue_nums=4)
    broker.parts.topics.update(config, now=broker.parts.clock.now())


async def test_a_queue_is_locked_by_one_client_of_a_group_at_a_time(broker, client):
    make_orders(broker)
    assert await lock(client, "me", 0, 1, 2) == [0, 1, 2]
    assert await lock(client, "you", 2, 3) == [3]

    await unlock(client, "you", 0, 1, 2)
    assert await lock(client, "you", 0, 1, 2) == []
    await unlock(client, "me", 1, 2)

    assert await lock(client, "you", 0, 1, 2) == [1, 2]


async def test_a_lock_that_is_not_renewed_is_free_after_a_minute(start_broker, open_client):
    clock = HandClock()
    broker = await start_broker(parts={"clock": clock})
    make_orders(broker)
    client = await open_client(broker)
    await lock(client, "me", 0, 1)

    clock.advance(59)
    renewed = await lock(client, "me", 0)
    too_early = await lock(client, "you", 0, 1)
    clock.advance(2)
    late_enough = await lock(client, "you", 0, 1)

    assert (renewed, too_early, late_enough) == ([0], [], [1])


async def test_a_broker_may_wait_after_a_start_until_old_locks_are_over(start_broker, open_client):
    clock = HandClock()
    broker = await start_broker(parts={"clock": clock}, lock_pause=30)
    make_orders(broker)
    client = await open_client(broker)

    too_early = await lock(client, "me", 0)
    clock.advance(30)

    assert (too_early, await lock(client, "me", 0)) == ([], [0])


async def test_many_clients_join_and_leave_at_the_same_time(broker, open_client):
    clients = [await open_client(broker) for _ in range(20)]
    await asyncio.gather(
        *(client.heartbeat(f"c{number:02}", ORDERS) for number, client in enumerate(clients))
    )
    assert len(await members(clients[0])) == 20

    for client in clients[1:]:
        client.connection.abort()

    await until(lambda: len(broker.parts.consumers.members(GROUP)) == 1)
    assert await members(clients[0]) == ["c00"]


async def test_members_that_disagree_are_told_so_with_the_list_of_members(
    start_broker, open_client
):
    broker = await start_broker(scan_interval=0.02)
    one, two = await open_client(broker), await open_client(broker)
    blue = SubscriptionData(topic="orders", sub_string="blue", sub_version=1)

    async def told():
        answer = await one.connection.request(
            RequestCode.GET_CONSUMER_LIST_BY_GROUP, GetConsumerListRequest(consumer_group=GROUP)
        )
        assert answer.code == ResponseCode.SUCCESS
        return answer.ext_fields.get("findings")

    await one.heartbeat("one", ORDERS)
    await two.heartbeat("two", ORDERS)
    assert await told() is None

    await two.heartbeat("two", msgspec.structs.replace(blue, sub_version=2))
    await until(lambda: broker.parts.disagreements.open_findings(GROUP) != ())
    (finding,) = json.loads(await told() or "[]")
    assert set(finding) == {"kind", "group", "text", "topic"}
    assert "one with TAG '*', two with TAG 'blue'; messages will be missed" in finding["text"]

    await two.heartbeat("two", msgspec.structs.replace(ORDERS, sub_version=3))
    await until(lambda: broker.parts.disagreements.open_findings(GROUP) == ())
    assert await told() is None


WANTED = SubscriptionData(topic="orders", sub_string="*")


async def ask(client: RawClient, client_id: str, **changes: Any) -> Command:
    asked = QueryAssignment(
        **{
            "client_id": client_id,
            "consumer_group": GROUP,
            "message_model": MessageModel.CLUSTERING,
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
        TopicConfig(
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


async def until_known(name_server: NameServer, brokers: int) -> None:
    """Return when the name server has a route of the topic to so many brokers."""
    connection = await connect(name_server.address)
    header = GetRouteInfoRequest(topic="orders")
    async with asyncio.timeout(30):
        while True:
            answer = await connection.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header, timeout=9)
            if answer.code == 0 and bytes(answer.body).count(b'"readQueueNums"') == brokers:
                break
            await asyncio.sleep(0.01)
    connection.close()
    await connection.wait_closed()


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
    await until_known(name_server, brokers=2)

    told = queues_in(await ask(client, "c"))

    assert told == [("first", 0), ("first", 1), ("second", 0), ("second", 1)]


async def test_a_share_is_worked_out_anew_when_somebody_comes(broker, client, open_client):
    make_topic(broker, 4)
    await client.heartbeat("a", WANTED)
    alone = queues_in(await ask(client, "a"))

    await (await open_client(broker)).heartbeat("b", WANTED)
    shared = queues_in(await ask(client, "a"))

    assert [number for _, number in alone] == [0, 1, 2, 3]
    assert [number for _, number in shared] == [0, 1]


async def test_a_broadcast_member_has_all_queues_that_may_be_read(broker, client):
    make_topic(broker, 3)

    answer = await ask(
        client, "anybody", message_model=MessageModel.BROADCASTING, strategy_name=None
    )

    assert [number for _, number in queues_in(answer)] == [0, 1, 2]


async def test_queues_that_may_not_be_read_are_nobodys(broker, client):
    make_topic(broker, 3, perm=2)
    await client.heartbeat("c", WANTED)

    assert queues_in(await ask(client, "c")) == []


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
async def test_a_share_that_cannot_be_told_is_refused_and_the_client_keeps_what_it_has(
    broker, client, changes, code, words
):
    make_topic(broker, 3)
    await client.heartbeat("c", WANTED)

    answer = await ask(client, **({"client_id": "c"} | changes))

    assert answer.code == code
    assert words in (answer.remark or "")


async def test_a_group_whose_strategy_is_not_known_is_in_the_log_once(broker, client, caplog):
    make_topic(broker, 3)
    await client.heartbeat("c", WANTED)

    for _ in range(3):
        await ask(client, "c", strategy_name="MACHINE_ROOM")

    (line,) = [each for each in caplog.records if "assigned no queues" in each.getMessage()]
    assert "'MACHINE_ROOM'" in line.getMessage()
    assert getattr(line, "group", "") == GROUP


async def test_without_its_name_server_a_broker_does_not_take_its_own_queues_for_all(
    start_broker, open_client, name_server
):
    broker = await start_broker(name_servers=(str(name_server.address),))
    make_topic(broker, 2)
    client = await open_client(broker)
    await client.heartbeat("c", WANTED)
    await name_server.stop()

    answer = await ask(client, "c")

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "no name server says where topic orders is" in (answer.remark or "")


@pytest.mark.parametrize("code", [ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SYSTEM_BUSY])
async def test_a_refusal_of_the_name_server_keeps_its_code(start_broker, open_client, code):
    def refuse(_, request):
        return request.answer(code, remark="not now")

    async with serving({RequestCode.GET_ROUTEINFO_BY_TOPIC: refuse}) as refusing:
        broker = await start_broker(name_servers=(str(refusing.address),))
        client = await open_client(broker)
        await client.heartbeat("c", WANTED)

        answer = await ask(client, "c")

    assert answer.code == code
    assert "gives no route of topic orders: not now" in (answer.remark or "")
