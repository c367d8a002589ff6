"""Pulls that are answered at once: what they get, why they are refused, what they commit."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.broker.broker import Broker, Parts
from orbitmq.broker.handlers.pull import CODES, PullAnswers
from orbitmq.broker.settings import PullSettings, Transfer
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.settings import ConnectionSettings, ServerSettings
from orbitmq.store import read as reading
from orbitmq.store.read import ReadResult, ReadStatus
from orbitmq.store.settings import ReadSettings
from orbitmq.wire.bodies import (
    ConsumeType,
    MessageModel,
    SubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
)
from orbitmq.wire.codes import (
    EncodeError,
    ForbiddenType,
    Language,
    RequestCode,
    ResponseCode,
    Serialization,
)
from orbitmq.wire.command import Command, command_pieces, decode_command
from orbitmq.wire.frame import Bytes, FrameReader
from orbitmq.wire.headers import PullFlag, PullMessageResponse
from tests.support.broker import (
    GROUP,
    SMALL_STORE,
    RawClient,
    bodies_in,
    messages_in,
    pull_header,
    until,
)
from tests.support.replication import SERVING, slave_of

#: Neither holds nor brings a subscription: what a Java push consumer sends, but for holding.
BY_HEARTBEAT = 0
COMMITTING = int(PullFlag.SUBSCRIPTION | PullFlag.COMMIT_OFFSET)


def make_topic(broker: Broker) -> None:
    config = TopicConfig(topic_name="orders", read_queue_nums=4, write_queue_nums=4)
    broker.parts.topics.ensure(config, now=0.0)


async def fill(client: RawClient, count: int, topic: str = "orders", **fields: Any) -> None:
    await asyncio.gather(
        *(client.stored(topic, b"%d" % number, **fields) for number in range(count))
    )


# What a pull gets.


@pytest.mark.parametrize("code", [RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE])
@pytest.mark.parametrize("serialization", list(Serialization))
async def test_a_pull_brings_messages_and_says_where_to_go_on(client, code, serialization):
    await fill(client, 5)

    answer = await client.connection.request(
        code, pull_header("orders", 0, 2, max_msg_nums=2), serialization=serialization
    )

    place = answer.header(PullMessageResponse)
    assert (answer.code, answer.remark) == (ResponseCode.SUCCESS, "FOUND")
    assert bodies_in(answer) == [b"2", b"3"]
    assert (place.next_begin_offset, place.min_offset, place.max_offset) == (4, 0, 5)
    assert place.suggest_which_broker_id == 0
    assert (place.topic_sys_flag, place.group_sys_flag) == (0, 0)


#: Read status, code and next offset for a queue with messages 0 to 4, by the offset asked for.
OUTCOMES = [
    (0, ResponseCode.SUCCESS, "FOUND", 5),
    (4, ResponseCode.SUCCESS, "FOUND", 5),
    (5, ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", 5),
    (6, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY", 5),
    (-1, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL", 0),
]


@pytest.mark.parametrize(("offset", "code", "remark", "following"), OUTCOMES)
async def test_the_outcome_of_a_read_has_its_code_and_its_next_offset(
    client, offset, code, remark, following
):
    await fill(client, 5)

    answer = await client.pull("orders", 0, offset)

    assert (answer.code, answer.remark) == (code, remark)
    assert answer.ext_fields["nextBeginOffset"] == str(following)
    # C++ clients take a number for 0.
    assert all(isinstance(value, str) for value in answer.ext_fields.values())


@pytest.mark.parametrize(
    ("offset", "code"), [(0, ResponseCode.PULL_NOT_FOUND), (7, ResponseCode.PULL_OFFSET_MOVED)]
)
async def test_a_pull_of_an_empty_queue_is_sent_to_its_beginning(broker, client, offset, code):
    """A topic that was deleted and made again must not be waited for at the old offset."""
    broker.parts.topics.ensure(TopicConfig(topic_name="orders"), now=0.0)

    answer = await client.pull("orders", 0, offset)

    assert (answer.code, answer.remark) == (code, "NO_MESSAGE_IN_QUEUE")
    assert answer.ext_fields["nextBeginOffset"] == "0"


@pytest.mark.feature("I3")
async def test_a_pull_is_limited_by_number_and_bytes_and_more_so_from_the_disk(
    start_broker, open_client
):
    read = ReadSettings(memory_distance=1 << 40)
    near = await open_client(await start_broker(root="near", store=replace(SMALL_STORE, read=read)))
    read = ReadSettings(memory_distance=0)
    far = await open_client(await start_broker(root="far", store=replace(SMALL_STORE, read=read)))
    for client in (near, far):
        await fill(client, 100, "small")
        for _ in range(40):
            await client.stored("large", b"x" * 20_000)

    counts = [
        len(messages_in(await client.pull(topic, 0, 0, max_msg_nums=asked)))
        for client in (near, far)
        for topic, asked in (("small", 1000), ("small", 5), ("large", 1000))
    ]

    # 32 messages or 256 KiB from memory, 8 messages or 64 KiB from the disk.
    assert counts == [32, 5, 12, 8, 5, 3]


@pytest.mark.parametrize(
    ("distance", "usual", "in_bulk"), [(1 << 40, 32, 300), (0, 8, 100)], ids=["memory", "disk"]
)
async def test_a_pull_for_more_bytes_than_usual_gets_more_messages(
    start_broker, open_client, distance, usual, in_bulk
):
    """Consumers ask for 256 KiB at most, and get what they always got."""
    read = ReadSettings(memory_distance=distance, bulk_count=400, bulk_bytes=1 << 20)
    client = await open_client(await start_broker(store=replace(SMALL_STORE, read=read)))
    for number in range(300):
        await client.stored("orders", b"%d" % number)

    async def found(max_bytes, count=1000):
        answer = await client.pull("orders", 0, 0, max_msg_nums=count, max_msg_bytes=max_bytes)
        return bodies_in(answer)

    assert await found(256 * 1024) == [b"%d" % number for number in range(usual)]
    assert await found(1 << 20) == [b"%d" % number for number in range(in_bulk)]
    assert len(await found(1 << 20, count=7)) == 7


async def test_an_answer_always_fits_into_a_frame(start_broker, open_client):
    read = ReadSettings(memory_count=10_000, memory_bytes=1 << 30, memory_distance=1 << 40)
    store = replace(SMALL_STORE, file_size=64 * 1024 * 1024, read=read)
    client = await open_client(await start_broker(store=store))
    for _ in range(10):
        await client.stored("orders", b"x" * 2_000_000)

    answer = await client.pull("orders", 0, 0, max_msg_bytes=-1)

    assert answer.code == ResponseCode.SUCCESS
    assert len(messages_in(answer)) == 8


async def test_a_one_way_pull_is_neither_answered_nor_held(broker, client):
    await fill(client, 1)
    for offset in (0, 1):
        header = pull_header("orders", 0, offset, hold=5)
        client.connection.notify(RequestCode.PULL_MESSAGE, header)

    assert await client.max_offset("orders") == 1
    assert len(broker.parts.held) == 0


# Filters.


@pytest.mark.parametrize(
    ("subscription", "bodies"),
    [
        ({"sub_string": "a || c"}, [b"1", b"3"]),
        ({"sub_string": "a", "expression_type": ""}, [b"1"]),
        ({"sub_string": "price BETWEEN 2 AND 3", "expression_type": "SQL92"}, [b"2", b"3"]),
        # C++ clients fill the hashes with zeros.
        ({"sub_string": "b", "code_set": (0,), "tags_set": ("b",)}, [b"2"]),
    ],
    ids=["tags", "no kind", "sql", "wrong hashes"],
)
async def test_a_pull_is_filtered_by_its_own_subscription_or_by_that_of_its_group(
    client, subscription, bodies
):
    for tag, price in (("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")):
        properties = {"TAGS": tag, "price": price}
        await client.stored("orders", price.encode(), properties=properties)
    wanted = SubscriptionData(topic="orders", **subscription)
    await client.heartbeat("c1", wanted)

    by_group = await client.pull("orders", sys_flag=BY_HEARTBEAT)
    by_itself = await client.pull(
        "orders",
        subscription=wanted.sub_string,
        expression_type=wanted.expression_type,
        consumer_group="never_heard_of",
    )

    assert bodies_in(by_group) == bodies_in(by_itself) == bodies
    assert by_itself.ext_fields["nextBeginOffset"] == "4"


@pytest.mark.feature("I4")
async def test_tags_are_judged_by_the_queue_and_sql_by_the_message(client, monkeypatch):
    for number in range(20):
        properties = {"TAGS": "ab"[number % 2], "price": str(number)}
        await client.stored("orders", b"%d" % number, properties=properties)
    read: list[int] = []
    properties_of = vars(reading)["properties_of"]

    def watched(record):
        read.append(1)
        return properties_of(record)

    monkeypatch.setattr(reading, "properties_of", watched)
    by_tag = await client.pull("orders", subscription="nowhere")
    read_by_tag = len(read)
    by_sql = await client.pull("orders", subscription="price > 17", expression_type="SQL92")

    assert by_tag.code == ResponseCode.PULL_RETRY_IMMEDIATELY
    assert read_by_tag == 0
    assert bodies_in(by_sql) == [b"18", b"19"]
    assert len(read) == 20


async def test_a_pull_steps_over_many_messages_that_its_filter_rejects(client):
    await fill(client, 1000, properties={"TAGS": "other"})
    await client.stored("orders", b"wanted", properties={"TAGS": "mine"})

    first = await client.pull("orders", subscription="mine")
    following = int(first.ext_fields["nextBeginOffset"])
    second = await client.pull("orders", 0, following, subscription="mine")

    assert (first.code, first.remark) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE")
    assert following == 800
    assert bodies_in(second) == [b"wanted"]


# What is refused.


@dataclass(frozen=True)
class Case:
    """A pull that is refused."""

    name: str
    code: ResponseCode
    remark: str
    pull: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Parts], None] = lambda _: None
    #: What the group said before, by which it is then judged; without it the group is not online.
    heartbeat: SubscriptionData | None = None
    model: MessageModel = MessageModel.CLUSTERING
    forbidden: ForbiddenType | None = None


def _group(**fields: Any) -> Callable[[Parts], None]:
    def prepare(parts: Parts) -> None:
        parts.groups.update(SubscriptionGroupConfig(group_name=GROUP, **fields), now=0.0)

    return prepare


def _topic(topic: str, **fields: Any) -> Callable[[Parts], None]:
    def prepare(parts: Parts) -> None:
        parts.topics.update(TopicConfig(topic_name=topic, **fields), now=0.0)

    return prepare


def _forbid(parts: Parts) -> None:
    parts.groups.forbid(GROUP, "orders", is_forbidden=True, now=0.0)


ORDERS = SubscriptionData(topic="orders", sub_string="*", sub_version=5)
SQL = SubscriptionData(
    topic="orders", sub_string="price > 1", expression_type="SQL92", sub_version=5
)
BAD_SQL = SubscriptionData(
    topic="orders", sub_string="price >", expression_type="SQL92", sub_version=5
)

#: By the number of the check in Apache's broker, in the order in which they are made.
CASES = (
    Case("0 slave", ResponseCode.SYSTEM_BUSY, "[REJECTREQUEST]", settings={"broker_id": 1}),
    Case(
        "1 broker not readable",
        ResponseCode.NO_PERMISSION,
        "pulling message is forbidden",
        settings={"permission": 2},
        forbidden=ForbiddenType.BROKER,
    ),
    Case(
        "2 lite pull disabled",
        ResponseCode.NO_PERMISSION,
        "lite pull consumer is forbidden",
        {"code": RequestCode.LITE_PULL_MESSAGE},
        {"pull": PullSettings(lite_pull=False)},
        forbidden=ForbiddenType.BROKER,
    ),
    Case(
        "3 no group",
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        "subscription group [nobody] does not exist",
        {"consumer_group": "nobody"},
        {"auto_create_group": False},
    ),
    Case(
        "4 group disabled",
        ResponseCode.NO_PERMISSION,
        "switched off",
        prepare=_group(consume_enable=False),
        forbidden=ForbiddenType.GROUP,
    ),
    Case(
        "5 no topic", ResponseCode.TOPIC_NOT_EXIST, "topic[nothing] not exist", {"topic": "nothing"}
    ),
    Case(
        "6 topic not readable",
        ResponseCode.NO_PERMISSION,
        "the topic[closed] pulling message is forbidden",
        {"topic": "closed"},
        prepare=_topic("closed", perm=2),
        forbidden=ForbiddenType.TOPIC,
    ),
    Case("7 queue too high", ResponseCode.INVALID_PARAMETER, "queueId[4]", {"queue_id": 4}),
    Case("7 queue negative", ResponseCode.INVALID_PARAMETER, "queueId[-1]", {"queue_id": -1}),
    *(
        Case(
            f"8a bad {kind}",
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            "parse the consumer's subscription failed",
            {"subscription": text, "expression_type": kind},
        )
        for text, kind in (("||", "TAG"), ("price >", "SQL92"), ("x", "XPATH"))
    ),
    Case(
        "8b not online",
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        "the consumer's group info not exist",
        {"sys_flag": BY_HEARTBEAT},
    ),
    Case(
        "8c broadcasting disabled",
        ResponseCode.NO_PERMISSION,
        "can not consume by broadcast way",
        prepare=_group(consume_broadcast_enable=False),
        heartbeat=ORDERS,
        model=MessageModel.BROADCASTING,
        forbidden=ForbiddenType.BROADCASTING,
    ),
    Case(
        "8d forbidden",
        ResponseCode.NO_PERMISSION,
        "is forbidden for topic[orders]",
        prepare=_forbid,
        heartbeat=ORDERS,
        forbidden=ForbiddenType.SUBSCRIPTION,
    ),
    Case(
        "8e topic not subscribed",
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        "the consumer's subscription not exist",
        heartbeat=SubscriptionData(topic="others", sub_string="*"),
    ),
    Case(
        "8f newer version",
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        "the consumer's subscription not latest",
        {"sub_version": 6},
        heartbeat=ORDERS,
    ),
    Case(
        "8g filter did not compile",
        ResponseCode.FILTER_DATA_NOT_EXIST,
        "filter data is not exist",
        heartbeat=BAD_SQL,
    ),
    Case(
        "9 no property filters",
        ResponseCode.SYSTEM_ERROR,
        "does not support consumers to filter messages by SQL92",
        {"subscription": "price > 1", "expression_type": "SQL92"},
        {"pull": PullSettings(enable_property_filter=False)},
    ),
    Case(
        "9 no property filters for heartbeats",
        ResponseCode.SYSTEM_ERROR,
        "does not support consumers to filter messages by SQL92",
        settings={"pull": PullSettings(enable_property_filter=False)},
        heartbeat=SQL,
    ),
    Case(
        "10 pull consumers rejected",
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        "rejected by server",
        settings={"pull": PullSettings(reject_pull_consumer=True)},
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_pull_is_refused_with_the_code_of_its_check(start_broker, open_client, case):
    broker = await start_broker(**case.settings)
    client = await open_client(broker)
    make_topic(broker)
    case.prepare(broker.parts)
    flag = {}
    if case.heartbeat is not None:
        await client.heartbeat("c1", case.heartbeat, message_model=case.model)
        flag = {"sys_flag": BY_HEARTBEAT}

    answer = await client.pull(**({"topic": "orders"} | flag | case.pull))

    assert answer.code == case.code
    assert case.remark in (answer.remark or "")
    forbidden = answer.ext_fields.get("forbiddenType")
    assert forbidden == (None if case.forbidden is None else str(int(case.forbidden)))


async def test_a_group_that_pulls_actively_may_be_required_to_send_heartbeats(
    start_broker, open_client
):
    broker = await start_broker(pull=PullSettings(reject_pull_consumer=True))
    member, stranger = await open_client(broker), await open_client(broker)
    await member.stored("orders")
    await member.heartbeat("c1", ORDERS, consume_type=ConsumeType.CONSUME_ACTIVELY)

    assert (await member.pull("orders")).code == ResponseCode.SUCCESS
    assert (await stranger.pull("orders")).code == ResponseCode.SUBSCRIPTION_NOT_EXIST


async def test_tools_see_the_subscription_of_a_pull(broker, client):
    await client.stored("orders")
    await client.pull("orders", subscription="a || b")

    subscription = broker.parts.consumers.subscription(GROUP, "orders")
    assert subscription is not None
    assert subscription.sub_string == "a || b"
    assert not broker.parts.consumers.is_online(GROUP)


# The result of the checks is remembered until something changes.


PAID = SubscriptionData(topic="orders", sub_string="paid", sub_version=6)


async def pull(client: RawClient, **fields: Any) -> Command:
    return await client.pull("orders", **({"sys_flag": BY_HEARTBEAT, "sub_version": 5} | fields))


@pytest.fixture
async def member(broker, open_client):
    """A member of the group, by whose heartbeats the pulls of another connection are judged."""
    make_topic(broker)
    member = await open_client(broker)
    await member.heartbeat("c1", ORDERS)
    await member.stored("orders", b"one")
    return member


Switch = Callable[[Parts, bool], None]
#: Permissions of a pull, each with what switches it on and off.
SWITCHES: dict[str, Switch] = {
    "broker": lambda parts, on: parts.change_settings(
        replace(parts.settings, permission=6 if on else 2)
    ),
    "topic": lambda parts, on: _topic("orders", perm=6 if on else 2)(parts),
    "group": lambda parts, on: _group(consume_enable=on)(parts),
    "topic of the group": lambda parts, on: parts.groups.forbid(
        GROUP, "orders", is_forbidden=not on, now=0.0
    ),
}


@pytest.mark.feature("I1")
@pytest.mark.feature("I2")
@pytest.mark.parametrize("name", SWITCHES)
async def test_a_permission_counts_for_every_pull(broker, client, member, name):
    codes = []

    for is_allowed in (True, False, True):
        SWITCHES[name](broker.parts, is_allowed)
        codes.append((await pull(client)).code)

    assert codes == [ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION, ResponseCode.SUCCESS]


async def _delete_topic(parts: Parts, _: RawClient) -> None:
    parts.topics.delete("orders", now=0.0)


async def _leave(parts: Parts, member: RawClient) -> None:
    await member.close()
    await until(lambda: not parts.consumers.is_online(GROUP))


async def _subscribe_to_others(_: Parts, member: RawClient) -> None:
    await member.heartbeat("c1", SubscriptionData(topic="others", sub_string="*", sub_version=6))


async def _broadcast(parts: Parts, member: RawClient) -> None:
    await member.heartbeat("c1", ORDERS, message_model=MessageModel.BROADCASTING)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_delete_topic, ResponseCode.TOPIC_NOT_EXIST),
        (_leave, ResponseCode.SUBSCRIPTION_NOT_EXIST),
        (_subscribe_to_others, ResponseCode.SUBSCRIPTION_NOT_EXIST),
        (_broadcast, ResponseCode.NO_PERMISSION),
    ],
)
async def test_a_pull_that_passed_is_refused_after_a_change(broker, client, member, change, code):
    _group(consume_broadcast_enable=False)(broker.parts)
    before = await pull(client)

    await change(broker.parts, member)
    after = await pull(client)

    assert (before.code, after.code) == (ResponseCode.SUCCESS, code)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"queue_id": 4}, ResponseCode.INVALID_PARAMETER),
        ({"queue_id": -1}, ResponseCode.INVALID_PARAMETER),
        ({"sub_version": 6}, ResponseCode.SUBSCRIPTION_NOT_LATEST),
        ({"sub_version": 4}, ResponseCode.SUCCESS),
        ({"code": RequestCode.LITE_PULL_MESSAGE}, ResponseCode.NO_PERMISSION),
    ],
)
async def test_another_queue_version_or_kind_of_pull_has_its_own_result(
    broker, client, member, fields, code
):
    pulls = PullSettings(lite_pull=False)
    broker.parts.change_settings(replace(broker.parts.settings, pull=pulls))
    passed = await pull(client)

    answer = await pull(client, **fields)

    assert (passed.code, answer.code) == (ResponseCode.SUCCESS, code)


def of_java(request: Command) -> Command:
    return msgspec.structs.replace(request, language=Language.JAVA)


@pytest.mark.parametrize("subscription", [ORDERS, SQL], ids=["tags", "sql"])
async def test_a_java_member_that_dropped_the_heartbeat_of_its_rebalance_is_served(
    broker, member, open_client, subscription
):
    """It drops the heartbeat when another one is under way, and sends the next after 30 s."""
    await member.stored("orders", b"dear", properties={"price": "2"})
    java = await open_client(broker, of_java)
    await java.heartbeat("c2", subscription, group="readers")
    await java.query("orders", consumer_group="readers")
    # The one that was under way, from before the rebalance.
    await java.heartbeat("c2", subscription, group="readers")

    answers = [
        await pull(java, consumer_group="readers", sub_version=version) for version in (9, 9, 5)
    ]
    stranger = await pull(member, consumer_group="readers", sub_version=9)

    assert all(b"dear" in bodies_in(each) for each in answers)
    assert stranger.code == ResponseCode.SUBSCRIPTION_NOT_LATEST


async def test_a_newer_version_without_a_rebalance_may_be_another_subscription(
    broker, member, open_client
):
    java = await open_client(broker, of_java)
    await java.heartbeat("c2", ORDERS)
    before_any = (await pull(java, sub_version=6)).code

    await java.query("orders")
    await java.heartbeat("c2", PAID)
    after_it_was_told = (await pull(java, sub_version=7)).code

    # Another member of the group wants something else.
    await java.query("orders")
    await member.heartbeat("c1", SubscriptionData(topic="orders", sub_string="*", sub_version=8))
    beside_others = (await pull(java, sub_version=9)).code

    # Only Java's take a new version for a rebalance.
    await member.query("orders")
    of_python = (await pull(member, sub_version=9)).code

    assert [before_any, after_it_was_told, beside_others, of_python] == (
        [ResponseCode.SUBSCRIPTION_NOT_LATEST] * 4
    )


# Progress.


@pytest.mark.feature("B12")
@pytest.mark.feature("H5")
@pytest.mark.parametrize(
    ("fields", "committed"),
    [
        ({}, "4"),
        ({"offset": 99}, "4"),
        ({"sys_flag": int(PullFlag.SUBSCRIPTION)}, "0"),
        ({"queue_id": 99}, "0"),
    ],
    ids=["usual", "offset moved", "without the flag", "refused"],
)
async def test_a_pull_commits_the_offset_that_it_carries(client, fields, committed):
    await fill(client, 10)
    carried = {"offset": 5, "sys_flag": COMMITTING, "commit_offset": 4}

    await client.pull("orders", **(carried | fields))

    assert (await client.query("orders")).ext_fields["offset"] == committed


async def test_a_pending_reset_sends_the_next_pull_to_its_offset_once(broker, client):
    await fill(client, 10)
    broker.parts.progress.reset("orders", GROUP, 0, 3)

    moved = await client.pull("orders", 0, 8, sys_flag=COMMITTING, commit_offset=8)
    then = await client.pull("orders", 0, 3)

    assert (moved.code, moved.remark) == (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET")
    assert moved.ext_fields["nextBeginOffset"] == "3"
    assert (moved.ext_fields["minOffset"], moved.ext_fields["maxOffset"]) == ("0", "10")
    assert broker.parts.progress.stored("orders", GROUP, 0) == 3
    assert then.code == ResponseCode.SUCCESS


@pytest.mark.parametrize(("reset", "offset"), [(3, 8), (3, 3), (0, 0)])
async def test_a_reset_that_a_pull_keeps_is_reported_until_another_pull_takes_it(
    broker, client, reset, offset
):
    """Tasks of a group on Spark pull so: what they hear may be lost with them."""
    await fill(client, 10)
    progress = broker.parts.progress
    progress.reset("orders", GROUP, 0, reset)

    for _ in range(2):
        told = await client.pull("orders", 0, offset, keep_reset=True)
        await client.report("orders", 8)
        assert (told.code, told.remark) == (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET")
        assert told.ext_fields["nextBeginOffset"] == str(reset)
        assert progress.stored("orders", GROUP, 0) == reset
    await client.pull("orders", 0, 9)
    then = await client.pull("orders", 0, offset, keep_reset=True)
    await client.report("orders", 8)

    assert then.code == ResponseCode.SUCCESS
    assert progress.stored("orders", GROUP, 0) == 8


@pytest.mark.parametrize(
    ("reset", "offset", "reported", "is_moved"),
    [
        (3, 3, 3, False),
        (0, 0, None, False),
        # It still has messages below, and would consume them.
        (3, 3, 1, True),
        (3, 3, None, True),
        (3, 8, 3, True),
        (3, 0, None, True),
    ],
)
async def test_a_consumer_that_is_where_a_reset_wants_it_is_not_stopped(
    broker, client, reset, offset, reported, is_moved
):
    await fill(client, 10)
    broker.parts.progress.reset("orders", GROUP, 0, reset)
    commit = 0 if reported is None else PullFlag.COMMIT_OFFSET
    flag = int(PullFlag.SUBSCRIPTION | commit)

    first = await client.pull("orders", 0, offset, sys_flag=flag, commit_offset=reported or 0)

    wanted = ResponseCode.PULL_OFFSET_MOVED if is_moved else ResponseCode.SUCCESS
    assert first.code == wanted
    assert broker.parts.progress.pending_reset("orders", GROUP, 0) is None
    assert broker.parts.progress.stored("orders", GROUP, 0) == reset


# The way of the messages.


# The file is mapped and written from there, as by Apache's broker; `sendfile` of a stretch was
# measured to be as fast as that, and not faster.
@pytest.mark.feature("I6")
@pytest.mark.parametrize(("transfer", "is_copied"), [(Transfer.HEAP, True), (Transfer.FILE, False)])
async def test_messages_go_through_the_heap_or_straight_from_the_file(
    start_broker, open_client, monkeypatch, transfer, is_copied
):
    broker = await start_broker(pull=PullSettings(transfer=transfer))
    client = await open_client(broker)
    bodies = [b"%d " % number + b"x" * 60_000 for number in range(3)]
    for body in bodies:
        await client.stored("orders", body)
    sent: list[Bytes] = []
    send = Connection.send

    def watched(connection, answer):
        sent.extend(answer if isinstance(answer, list) else ())
        send(connection, answer)

    monkeypatch.setattr(Connection, "send", watched)

    answer = await client.pull("orders")

    assert bodies_in(answer) == bodies
    messages = [piece for piece in sent if len(piece) > 60_000]
    assert messages
    assert all(isinstance(piece, bytes) is is_copied for piece in messages)
    # A view of what is mapped has the map itself behind it, and nothing else.
    views = [piece for piece in messages if isinstance(piece, memoryview)]
    assert all(isinstance(view.obj, mmap.mmap) for view in views)


async def test_a_consumer_that_reads_slowly_gets_everything_and_does_not_hold_up_others(
    start_broker, open_client
):
    limits = ConnectionSettings(
        slow_bytes=64 * 1024, resume_bytes=16 * 1024, unwritten_bytes=1024 * 1024
    )
    broker = await start_broker(
        server=ServerSettings(port=0, connection=limits), pull=PullSettings(step_bytes=50_000)
    )
    client = await open_client(broker)
    await client.stored("orders", b"x" * 200_000)
    reader, writer = await asyncio.open_connection(*broker.address, limit=16 * 1024)

    # More than the buffers of both sockets hold.
    for number in range(100):
        request = Command.request(RequestCode.PULL_MESSAGE, pull_header("orders"), opaque=number)
        writer.writelines(command_pieces(request))
    await until(lambda: any(each.is_slow for each in broker.parts.listeners.connections))
    waiting = len(broker.parts.pacing)
    live = await client.pull("orders")
    frames, answers = FrameReader(), 0
    while answers < 100:
        for frame in frames.feed(await asyncio.wait_for(reader.read(1 << 20), 30)):
            answers += len(decode_command(frame).body) > 200_000
    writer.close()
    await writer.wait_closed()

    assert waiting
    assert live.code == ResponseCode.SUCCESS
    assert len(broker.parts.pacing) == 0


# Replicas.


@pytest.mark.feature("I5")
def test_far_behind_is_more_than_two_fifths_of_the_memory():
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    assert ReadSettings().memory_distance == memory * 40 // 100


@pytest.mark.feature("I5")
@pytest.mark.parametrize(
    ("is_allowed", "has_slave", "suggested"),
    [(False, False, "0"), (False, True, "0"), (True, False, "0"), (True, True, "1")],
)
async def test_a_reader_far_behind_is_sent_to_a_replica_if_there_is_one_and_it_may_be_read(
    start_broker, open_client, is_allowed, has_slave, suggested
):
    store = replace(SMALL_STORE, read=ReadSettings(memory_distance=1000))
    broker = await start_broker(
        store=store, pull=PullSettings(slave_read_enable=is_allowed), replication=SERVING
    )
    serving = broker.parts.replication.serving
    assert serving is not None
    if has_slave:
        await start_broker(root="slave", **slave_of(broker))
        await until(lambda: serving.replicas)
    client = await open_client(broker)
    await fill(client, 100)

    far = await client.pull("orders", 0, 0)
    near = await client.pull("orders", 0, 99)

    assert far.ext_fields["suggestWhichBrokerId"] == suggested
    assert near.ext_fields["suggestWhichBrokerId"] == "0"


async def test_a_slave_corrects_nobodys_offset(start_broker, open_client):
    """Perhaps it has not got the messages yet."""
    broker = await start_broker(broker_id=1, pull=PullSettings(slave_read_enable=True))
    broker.parts.topics.ensure(TopicConfig(topic_name="orders"), now=0.0)
    client = await open_client(broker)

    answer = await client.pull("orders", 0, 77)

    assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
    assert answer.ext_fields["nextBeginOffset"] == "77"


# Answers in pieces.


KIB = 1024
LOG = memoryview(bytes(range(256)) * 4096)

int31 = st.integers(0, 2**31 - 1)
int63 = st.integers(0, 2**63 - 1)
sizes = st.lists(st.sampled_from([100, 1 * KIB, 20 * KIB, 90 * KIB]), max_size=12)


def found(sizes: list[int]) -> ReadResult:
    """A read that found messages of these sizes, each apart from the others."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(LOG[at : at + size])
        at = (at + size + 7) % (len(LOG) - 100 * KIB)
    return ReadResult(ReadStatus.FOUND, 9, 0, 9, len(sizes), sum(sizes), pieces)


def request(opaque: int = 1, serialization: Serialization = Serialization.JSON) -> Command:
    return Command.request(RequestCode.PULL_MESSAGE, opaque=opaque, serialization=serialization)


@given(
    status=st.sampled_from(ReadStatus),
    sizes=sizes,
    opaque=int31,
    place=st.tuples(int63, int63, int63, int63, int31, int31),
    serialization=st.sampled_from(Serialization),
    by_heap=st.booleans(),
)
def test_an_answer_says_the_same_in_any_number_of_pieces(
    status, sizes, opaque, place, serialization, by_heap
):
    answers, result = PullAnswers(), found(sizes)
    answers.by_heap = by_heap

    pieces = answers.make(
        request(opaque, serialization), CODES[status], status.value, place, result
    )

    (frame,) = FrameReader().feed(b"".join(pieces))
    answer = decode_command(frame)
    assert (answer.code, answer.opaque, answer.remark) == (CODES[status], opaque, status.value)
    assert answer.is_response
    assert bytes(answer.body) == b"".join(result.pieces)
    suggested, following, lowest, end, topic_flag, group_flag = place
    assert answer.header(PullMessageResponse) == PullMessageResponse(
        suggest_which_broker_id=suggested,
        next_begin_offset=following,
        min_offset=lowest,
        max_offset=end,
        topic_sys_flag=topic_flag,
        group_sys_flag=group_flag,
    )


def test_an_answer_that_no_frame_can_take_is_refused():
    result = msgspec.structs.replace(found([KIB]), size=1 << 30)

    with pytest.raises(EncodeError, match="a frame may have"):
        PullAnswers().make(request(), 0, "FOUND", (0, 9, 0, 9, 0, 0), result)
