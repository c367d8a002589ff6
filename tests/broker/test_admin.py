"""Settings over the wire, and cleaning on demand."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orbitmq.broker.metrics import Metrics
from orbitmq.broker.settings import SETTINGS
from orbitmq.broker.timers import TimerFile
from orbitmq.clock import milliseconds
from orbitmq.wire.bodies import (
    CreateGroupList,
    CreateTopicList,
    GroupForbidden,
    KVTable,
    ProducerConnection,
    ProducerTable,
    QuerySubscription,
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
    TimerMetrics,
    TopicConfig,
    TopicConfigTable,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.codes import RequestCode as Code
from orbitmq.wire.command import Command, decode_command
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.headers import (
    CreateTopicRequest,
    DeleteGroupRequest,
    GetAllGroupConfigRequest,
    GetAllTopicConfigRequest,
    GetConsumerConnectionRequest,
    GetProducerConnectionRequest,
    GroupRequest,
    QuerySubscriptionRequest,
    TopicRequest,
    UpdateGroupForbiddenRequest,
)
from orbitmq.wire.javajson import Value, decode_body, encode_body, parse, parse_properties
from tests.support.admin import OLD_VERSION, ask, consumer_that, of_version, subscription, told
from tests.support.broker import GROUP, RawClient, bodies_in, until
from tests.support.delivery import hand_broker
from tests.support.prometheus import parse_metrics


async def update(client: RawClient, text: str) -> Command:
    return await ask(
        client, RequestCode.UPDATE_BROKER_CONFIG, body=text.encode("utf-8", "surrogateescape")
    )


async def config(client: RawClient) -> dict[str, str]:
    answer = await ask(client, RequestCode.GET_BROKER_CONFIG)
    assert answer.code == ResponseCode.SUCCESS
    assert '"counter"' in answer.ext_fields["version"]
    return parse_properties(bytes(answer.body).decode())


async def test_all_settings_are_shown_under_rocketmqs_names(broker, client):
    text = await config(client)

    assert text["brokerName"] == "broker-a"
    assert text["listenPort"] == str(broker.address.port)
    assert text["maxMessageSize"] == "4194304"
    assert text["flushDiskType"] == "ASYNC_FLUSH"
    assert text["fileReservedTime"] == "72"
    assert text["deleteWhen"] == "04"
    assert text["messageDelayLevel"] == (
        "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    )
    assert SETTINGS.keys() <= text.keys()


async def test_a_change_takes_effect_at_once(broker, client):
    before = (await ask(client, RequestCode.GET_BROKER_CONFIG)).ext_fields["version"]

    answer = await update(client, "maxMessageSize=1024\nregionId=north\n")

    too_large = await client.send("orders", b"x" * 1025)
    assert answer.code == ResponseCode.SUCCESS
    assert too_large.code == ResponseCode.MESSAGE_ILLEGAL
    assert (await config(client))["regionId"] == "north"
    assert broker.parts.settings.send.region == "north"
    after = (await ask(client, RequestCode.GET_BROKER_CONFIG)).ext_fields["version"]
    assert before != after


async def test_a_broker_that_may_not_be_written_tells_the_name_servers(
    start_broker, open_client, name_server
):
    client = await open_client(await start_broker(name_servers=(str(name_server.address),)))
    routes = name_server.service.routes
    await client.stored("orders")
    await until(lambda: routes.route("orders") is not None)

    await update(client, "brokerPermission=4")

    def permission():
        route = routes.route("orders")
        return route.queue_datas[0].perm if route is not None else -1

    await until(lambda: permission() == 4)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("brokerName=other", ResponseCode.SYSTEM_ERROR, "brokerName cannot be changed"),
        ("flushDiskType=SYNC_FLUSH", ResponseCode.SYSTEM_ERROR, "the store was opened with it"),
        ("listenPort=1", ResponseCode.SYSTEM_ERROR, "listenPort cannot be changed"),
        ("noSuchThing=1", ResponseCode.SYSTEM_ERROR, "no setting 'noSuchThing'"),
        ("longPollingEnable=perhaps", ResponseCode.SYSTEM_ERROR, "must be true or false"),
        ("maxMessageSize=many", ResponseCode.SYSTEM_ERROR, "must be a whole number"),
        ("maxMessageSize=0", ResponseCode.SYSTEM_ERROR, "must be positive"),
        ("maxMessageSize=99999999", ResponseCode.SYSTEM_ERROR, "which is what the store takes"),
        ("brokerPermission=9", ResponseCode.SYSTEM_ERROR, "permission must be from 0 to 7"),
        ("regionId=no spaces", ResponseCode.SYSTEM_ERROR, "region must consist of"),
        ("\udcff=1", ResponseCode.SYSTEM_ERROR, "not UTF-8"),
        ("rocketmqHome=/", ResponseCode.NO_PERMISSION, "black list"),
        ("brokerConfigPath=/", ResponseCode.NO_PERMISSION, "black list"),
    ],
)
async def test_what_cannot_be_changed_is_refused_by_name_and_nothing_else_changes(
    broker, client, text, code, words
):
    before = broker.parts.settings

    answer = await update(client, "traceOn=false\n" + text)

    assert answer.code == code
    assert words in (answer.remark or "")
    assert broker.parts.settings is before


async def test_values_that_are_in_force_already_are_accepted(broker, client):
    before = broker.parts.settings
    everything = await ask(client, RequestCode.GET_BROKER_CONFIG)

    answer = await ask(client, RequestCode.UPDATE_BROKER_CONFIG, body=everything.body)

    assert answer.code == ResponseCode.SUCCESS
    assert broker.parts.settings is before


async def test_queues_without_a_topic_are_cleaned_away(broker, client):
    await client.stored("orders")
    await client.stored("gone")
    broker.parts.topics.delete("gone", now=0)

    await ask(client, RequestCode.CLEAN_UNUSED_TOPIC)

    assert {queue.topic for queue in broker.parts.store.queues()} == {"orders"}


async def create(client: RawClient, topic: str, **fields: Any) -> Command:
    defaults: dict[str, Any] = {
        "default_topic": "TBW102",
        "read_queue_nums": 4,
        "write_queue_nums": 4,
        "perm": 6,
        "topic_filter_type": "SINGLE_TAG",
    }
    header = CreateTopicRequest(topic=topic, **(defaults | fields))
    return await ask(client, RequestCode.UPDATE_AND_CREATE_TOPIC, header)


async def delete(client: RawClient, topic: str) -> Command:
    return await ask(client, RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest(topic=topic))


def version_of(table: TopicConfigTable | SubscriptionGroupTable) -> str:
    """The version of a table as the request for its next page quotes it."""
    assert table.data_version is not None
    return encode_body(table.data_version).decode()


@pytest.mark.parametrize(
    ("topic", "fields", "code"),
    [
        ("", {}, ResponseCode.INVALID_PARAMETER),
        ("no spaces", {}, ResponseCode.INVALID_PARAMETER),
        ("x" * 128, {}, ResponseCode.INVALID_PARAMETER),
        ("TBW102", {}, ResponseCode.INVALID_PARAMETER),
        ("rmq_sys_mine", {}, ResponseCode.INVALID_PARAMETER),
        ("orders", {"perm": 8}, ResponseCode.INVALID_PARAMETER),
        ("orders", {"read_queue_nums": -1}, ResponseCode.INVALID_PARAMETER),
        ("orders", {"write_queue_nums": 16_385}, ResponseCode.INVALID_PARAMETER),
        ("orders", {"attributes": "+message.type=MIXED"}, ResponseCode.INVALID_PARAMETER),
        ("orders", {"attributes": "+nonsense=1"}, ResponseCode.SYSTEM_ERROR),
        ("orders", {"attributes": "nonsense"}, ResponseCode.SYSTEM_ERROR),
        ("orders", {"topic_filter_type": "NO_TAG"}, ResponseCode.SYSTEM_ERROR),
    ],
)
async def test_a_topic_that_cannot_be_is_refused(broker, client, topic, fields, code):
    before = list(broker.parts.topics)

    answer = await create(client, topic, **fields)

    assert answer.code == code
    assert answer.remark
    assert list(broker.parts.topics) == before


@pytest.mark.parametrize(
    ("second", "code", "words", "is_first_made"),
    [
        ({"topic_name": "TBW102"}, ResponseCode.INVALID_PARAMETER, "system topic", False),
        (
            {"topic_name": "two", "attributes": {"+nonsense": "1"}},
            ResponseCode.SYSTEM_ERROR,
            "the 1 topics before it in the list are done",
            True,
        ),
    ],
)
async def test_a_list_with_a_topic_that_cannot_be_is_refused(
    broker, client, second, code, words, is_first_made
):
    configs = (TopicConfig(topic_name="one"), TopicConfig(**second))
    body = encode_body(CreateTopicList(topic_config_list=configs))

    answer = await ask(client, RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body)

    assert answer.code == code
    assert words in (answer.remark or "")
    assert ("one" in broker.parts.topics) is is_first_made


async def test_a_deleted_topic_is_forgotten_with_its_queues_and_its_progress(broker, client):
    await client.stored("orders", b"old")
    await client.pull("orders")
    await client.report("orders", 1)

    answer = await delete(client, "orders")

    parts = broker.parts
    assert answer.code == ResponseCode.SUCCESS
    assert "orders" not in parts.topics
    assert parts.progress.offsets("orders", GROUP) == {}
    assert not [queue for queue in parts.store.queues() if queue.topic == "orders"]
    assert "orders" not in parts.counters.topics


async def test_only_a_retry_topic_of_a_popping_group_goes_with_its_topic(broker, client):
    await client.stored("orders")
    await client.pull("orders")
    await client.report("orders", 1)
    popped, ordinary = f"%RETRY%{GROUP}+orders", f"%RETRY%{GROUP}_orders"
    broker.parts.topics.ensure(TopicConfig(topic_name=popped), now=0)
    await client.stored(ordinary, b"again")

    await delete(client, "orders")

    assert popped not in broker.parts.topics
    answer = await client.pull(ordinary, consumer_group=f"{GROUP}_orders")
    assert bodies_in(answer) == [b"again"]


@pytest.mark.parametrize("topic", ["", " ", "TBW102", "SCHEDULE_TOPIC_XXXX"])
async def test_a_system_topic_cannot_be_deleted(broker, client, topic):
    before = len(broker.parts.topics)

    answer = await delete(client, topic)

    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert len(broker.parts.topics) == before


async def test_pages_together_are_all_topics_and_so_is_an_answer_without_pages(broker, client):
    seen: dict[str, TopicConfig] = {}
    version = ""
    while len(seen) < len(broker.parts.topics):
        header = GetAllTopicConfigRequest(
            topic_seq=len(seen), data_version=version, max_topic_num=5
        )
        table = await told(client, TopicConfigTable, RequestCode.GET_ALL_TOPIC_CONFIG, header)
        assert 0 < len(table.topic_config_table) <= 5
        seen |= table.topic_config_table
        version = version_of(table)

    whole = await told(client, TopicConfigTable, RequestCode.GET_ALL_TOPIC_CONFIG)

    assert seen == {config.topic_name: config for config in broker.parts.topics}
    assert list(whole.topic_config_table) == sorted(seen)


async def update_group(client: RawClient, config: SubscriptionGroupConfig) -> Command:
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    return await ask(client, code, body=encode_body(config))


async def test_a_group_is_created_changed_and_shown(client):
    first = SubscriptionGroupConfig(group_name="audit", retry_max_times=2**31 - 1)
    second = SubscriptionGroupConfig(group_name="audit", consume_enable=False, retry_max_times=-1)
    body = encode_body(CreateGroupList(group_config_list=(first,)))

    made = await ask(client, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body=body)
    changed = await update_group(client, second)

    config = await told(
        client,
        SubscriptionGroupConfig,
        RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG,
        GroupRequest(group="audit"),
    )
    assert made.code == changed.code == ResponseCode.SUCCESS
    assert config == second


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"group_name": ""}, ""),
        ({"group_name": "no spaces"}, ""),
        ({"group_name": "x" * 121}, ""),
        ({"retry_queue_nums": -1}, "retryQueueNums must be from 0 to 16384, got -1"),
        ({"retry_queue_nums": 16_385}, "retryQueueNums must be from 0 to 16384, got 16385"),
        ({"retry_max_times": -2}, "retryMaxTimes must be from -1 to"),
    ],
)
async def test_a_group_that_cannot_be_is_refused_and_with_it_the_whole_list(
    broker, client, fields, named
):
    bad = SubscriptionGroupConfig(**({"group_name": "audit"} | fields))
    fine = SubscriptionGroupConfig(group_name="fine")

    single = await update_group(client, bad)
    many = await ask(
        client,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        body=encode_body(CreateGroupList(group_config_list=(fine, bad))),
    )

    for answer in (single, many):
        assert answer.code == ResponseCode.INVALID_PARAMETER
        assert named in (answer.remark or "")
    assert not {"audit", "fine"} & {config.group_name for config in broker.parts.groups}


async def test_asking_for_a_group_does_not_make_it(broker, client):
    answer = await ask(client, RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, GroupRequest(group="typo"))

    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert "typo" not in broker.parts.groups


@pytest.mark.parametrize("with_progress", [True, False])
async def test_a_group_is_deleted_with_or_without_its_progress(broker, client, with_progress):
    await client.stored("orders")
    await client.pull("orders")
    await client.report("orders", 1)

    answer = await ask(
        client,
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        DeleteGroupRequest(group_name=GROUP, clean_offset=with_progress),
    )

    assert answer.code == ResponseCode.SUCCESS
    assert GROUP not in broker.parts.groups
    assert broker.parts.progress.offsets("orders", GROUP) == ({} if with_progress else {0: 1})
    assert not [key for key in broker.parts.counters.groups if key[1] == GROUP]


async def test_pages_together_are_all_groups_and_so_is_one_long_list(broker, client):
    for number in range(1000):
        broker.parts.groups.find(f"group-{number}", now=0)
    code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
    groups = {config.group_name: config for config in broker.parts.groups}
    seen: dict[str, SubscriptionGroupConfig] = {}
    version = ""
    while len(seen) < len(groups):
        header = GetAllGroupConfigRequest(
            group_seq=len(seen), data_version=version, max_group_num=400
        )
        table = await told(client, SubscriptionGroupTable, code, header)
        seen |= table.subscription_group_table
        version = version_of(table)

    whole = await told(client, SubscriptionGroupTable, code)

    assert (await ask(client, code)).ext_fields["totalGroupNum"] == str(len(seen))
    assert seen == whole.subscription_group_table == groups


async def test_a_group_that_is_forbidden_a_topic_cannot_pull_it_until_it_may(client):
    await client.stored("orders")
    await client.heartbeat("me", subscription("orders"))
    code = RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN

    async def forbid(readable):
        header = UpdateGroupForbiddenRequest(group=GROUP, topic="orders", readable=readable)
        return await told(client, GroupForbidden, code, header)

    forbidden = await forbid(False)
    refused = await client.pull("orders", sys_flag=0, sub_version=1)
    only_asked = await forbid(None)
    allowed = await forbid(True)
    served = await client.pull("orders", sys_flag=0, sub_version=1)

    assert forbidden == only_asked == GroupForbidden(group=GROUP, topic="orders", readable=False)
    assert allowed.readable
    assert refused.code == ResponseCode.NO_PERMISSION
    assert served.code == ResponseCode.SUCCESS


CONSUMERS = RequestCode.GET_CONSUMER_CONNECTION_LIST


async def test_groups_that_are_not_there_are_refused(client):
    consumers = await ask(client, CONSUMERS, GetConsumerConnectionRequest(consumer_group="nobody"))
    producers = await ask(
        client,
        RequestCode.GET_PRODUCER_CONNECTION_LIST,
        GetProducerConnectionRequest(producer_group="nobody"),
    )

    assert consumers.code == ResponseCode.CONSUMER_NOT_ONLINE
    assert consumers.remark == "the consumer group[nobody] not online"
    assert producers.code == ResponseCode.SYSTEM_ERROR
    assert producers.remark == "the producer group[nobody] not exist"


async def test_producers_are_shown_by_group_and_all_together(client):
    await client.heartbeat("me", producers=("makers",))

    one = await told(
        client,
        ProducerConnection,
        RequestCode.GET_PRODUCER_CONNECTION_LIST,
        GetProducerConnectionRequest(producer_group="makers"),
    )
    everybody = await told(client, ProducerTable, RequestCode.GET_ALL_PRODUCER_INFO)

    assert [each.client_id for each in one.connection_set] == ["me"]
    assert everybody.data["makers"][0].client_id == "me"
    assert everybody.data["makers"][0].last_update_timestamp > 1_700_000_000_000


async def test_what_a_group_wants_of_a_topic_is_told_if_it_is_there(client):
    await client.heartbeat("me", subscription("orders", "red"))
    code = RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER

    there = await told(
        client, QuerySubscription, code, QuerySubscriptionRequest(group=GROUP, topic="orders")
    )
    gone = await told(
        client, QuerySubscription, code, QuerySubscriptionRequest(group="nobody", topic="orders")
    )

    assert there.subscription_data is not None
    assert there.subscription_data.sub_string == "red"
    assert gone == QuerySubscription(group="nobody", topic="orders")


async def test_findings_of_all_groups_are_part_of_the_runtime_information_and_of_the_metrics(
    broker, client, open_client
):
    other = await open_client(broker)
    await client.heartbeat("one", subscription("orders", "red"))
    await other.heartbeat("two", subscription("orders", "blue"))
    broker.parts.disagreements.check()

    table = (await told(client, KVTable, RequestCode.GET_BROKER_RUNTIME_INFO)).table
    metrics = parse_metrics(b"".join(await Metrics(broker.parts).text()))

    assert metrics["orbitmq_group_findings"].value(kind="different_subscriptions") == 1
    assert table["groupFindings"] == "1"
    assert "subscribe differently to topic 'orders'" in table["groupFinding_1"]


RECORDINGS = Path(__file__).parents[1] / "data" / "recordings"

ADMINS = "admins"
CLIENT = "127.0.0.1@driver"
_ADMINISTRATION = """
    GET_TOPIC_STATS_INFO GET_TOPIC_CONFIG GET_CONSUME_STATS GET_BROKER_RUNTIME_INFO
    GET_ALL_TOPIC_CONFIG GET_ALL_SUBSCRIPTIONGROUP_CONFIG QUERY_TOPIC_CONSUME_BY_WHO
    GET_CONSUMER_CONNECTION_LIST GET_PRODUCER_CONNECTION_LIST GET_CONSUMER_RUNNING_INFO
    QUERY_CONSUME_TIME_SPAN
"""
ADMINISTRATION = frozenset(Code[word] for word in _ADMINISTRATION.split())
#: Maps whose keys are names or queues: what counts is what their values have.
TABLES = frozenset({"offsetTable", "topicConfigTable", "subscriptionGroupTable", "mqTable"}) | {
    "subscriptionTable",
    "forbiddenTable",
    "statusTable",
    "mqPopTable",
    "properties",
}
#: Keys of runtime information that depend on where the store is and what is in it.
VARYING = ("commitLogDiskRatio_", "scheduleMessageOffset_")


def exchanges(version: str, form: str) -> Iterator[tuple[Command, Command]]:
    """Questions about administration and what Apache's broker answered."""
    stem = f"{version}-admin-{form}"
    answers = {answer.opaque: answer for answer in _commands(f"{stem}-to-client.frames")}
    for request in _commands(f"{stem}-to-server.frames"):
        if not request.is_response and request.code in ADMINISTRATION and request.opaque in answers:
            yield request, answers[request.opaque]


def _commands(name: str) -> list[Command]:
    return list(map(decode_command, FrameReader().feed((RECORDINGS / name).read_bytes())))


def paths(value: Value, at: str = "") -> Iterator[str]:
    """Where an answer has something."""
    yield at
    if isinstance(value, list):
        for entry in value:
            yield from paths(entry, f"{at}[]")
    elif isinstance(value, dict):
        is_table = at.rpartition(".")[2] in TABLES
        for key, entry in value.items():
            name = "*" if is_table else str(key)
            if not name.startswith(VARYING):
                yield from paths(entry, f"{at}.{name}")


def body_of(answer: Command) -> Value:
    return parse(bytes(answer.body).decode()) if answer.body else None


@pytest.mark.parametrize("form", ["json", "binary"])
@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
async def test_answers_have_apaches_codes_and_everything_that_apaches_have(broker, version, form):
    recorded = list(exchanges(version, form))
    running = next(
        bytes(answer.body)
        for request, answer in recorded
        if request.code == Code.GET_CONSUMER_RUNNING_INFO
    )

    def running_info(_, request):
        return request.answer(0, remark="not set any response code", body=running)

    consumer = await consumer_that(broker, {Code.GET_CONSUMER_RUNNING_INFO: running_info})
    await _prepare(consumer)

    different: dict[str, object] = {}
    for request, theirs in recorded:
        tool = await consumer_that(broker, {}, version=request.version)
        ours = await tool.connection.request(
            request.code, extra=dict(request.ext_fields), serialization=request.serialization
        )
        await tool.close()
        missing = set(paths(body_of(theirs))) - set(paths(body_of(ours)))
        lacking = theirs.ext_fields.keys() - ours.ext_fields.keys()
        if (ours.code, ours.remark) != (theirs.code, theirs.remark) or missing or lacking:
            different[f"{request.code} {dict(request.ext_fields)}"] = (ours, missing, lacking)
    await consumer.close()

    assert len({request.code for request, _ in recorded}) >= 9
    assert different == {}


async def _prepare(consumer: RawClient) -> None:
    for number in range(3):
        await consumer.stored("Orders", queue_id=number % 2, default_topic_queue_nums=2)
    await consumer.heartbeat(
        CLIENT, subscription("Orders"), subscription(f"%RETRY%{GROUP}"), group=ADMINS
    )
    for queue_id in range(2):
        await consumer.pull("Orders", queue_id, consumer_group=ADMINS)
        await consumer.report("Orders", 1, queue_id, consumer_group=ADMINS)


@pytest.mark.parametrize(("version", "key"), [(OLD_VERSION, b"{0:1}"), (401, b'{"0":1}')])
async def test_keys_that_are_numbers_are_bare_for_old_slaves_only(
    broker, open_client, client, version, key
):
    await client.stored("orders")
    await client.pull("orders")
    await client.report("orders", 1)
    slave = await open_client(broker, of_version(version))

    answer = await ask(slave, RequestCode.GET_ALL_CONSUMER_OFFSET)

    assert b'"orders@%b":%b' % (GROUP.encode(), key) in bytes(answer.body)


async def test_the_progress_of_timers_is_told_in_apaches_way_and_in_ours(tmp_path):
    async with hand_broker(tmp_path) as (broker, client):
        now_ms = milliseconds(broker.clock.now())
        for after in (1000, 60_000):
            due = {"TIMER_DELIVER_MS": str(now_ms + after)}
            await client.stored("orders", b"later", properties=due)
        broker.advance(5)

        answer = await ask(client, RequestCode.GET_TIMER_CHECK_POINT)
        counts = await told(client, TimerMetrics, RequestCode.GET_TIMER_METRICS)

    read_ms, _, offset, master_offset, *version = struct.unpack(">7q", bytes(answer.body))
    assert (read_ms, offset, master_offset) == (now_ms + 5000, 2, 2)
    assert version == [0, 0, 0]
    ours = decode_body(TimerFile, answer.ext_fields["orbitmqTimerProgress"].encode())
    assert (ours.scanned, ours.delivered_ms, ours.delivered_offset) == (2, now_ms + 1000, 0)
    assert {topic: each.count for topic, each in counts.timing_count.items()} == {"orders": 1}
