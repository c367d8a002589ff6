"""Numbers about queues, groups and the broker."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.broker.progress import CommitSource
from orbitmq.wire import bodies, headers
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from tests.support.admin import ask, queue, subscription, told
from tests.support.broker import GROUP, RawClient, until
from tests.support.remoting import ManualClock

START = 1_700_000_000.0


@pytest.fixture
def clock():
    return ManualClock(time=START)


@pytest.fixture
async def broker(start_broker, clock):
    return await start_broker(parts={"clock": clock})


@pytest.fixture
async def client(broker, open_client, clock):
    """Five messages are in queue 0 of `orders`, a second apart."""
    client = await open_client(broker)
    for _ in range(5):
        await client.stored("orders", b"12345678", properties={"TAGS": "red"})
        clock.time += 1
    return client


def millis(seconds: float) -> int:
    return round((START + seconds) * 1000)


async def consume_stats(client: RawClient, **fields: Any) -> bodies.ConsumeStats:
    header = headers.GetConsumeStatsRequest(consumer_group=GROUP, **fields)
    return await told(client, bodies.ConsumeStats, RequestCode.GET_CONSUME_STATS, header)


async def test_a_group_that_gave_a_topic_up_is_not_measured_in_it(client):
    await client.stored("payments")
    await client.heartbeat("me", subscription("payments"))
    await client.report("orders", 2)
    await client.report("payments", 1)

    assert {each.topic for each in (await consume_stats(client)).offset_table} == {"payments"}
    assert not (await consume_stats(client, topic="orders")).offset_table
    listed = await consume_stats(client, topic_list="orders;never")
    assert {each.topic for each in listed.offset_table} == {"orders"}


async def test_all_groups_are_measured_together(broker, client):
    for group, offset in (("fast", 5), ("slow", 1)):
        broker.parts.groups.find(group, now=0)
        broker.parts.progress.commit(
            "orders", group, 0, offset, by=group, way=CommitSource.REQUEST, now=0
        )

    stats = await told(
        client,
        bodies.ConsumeStatsList,
        RequestCode.GET_BROKER_CONSUME_STATS,
        headers.GetBrokerConsumeStatsRequest(),
    )
    ordered = await told(
        client,
        bodies.ConsumeStatsList,
        RequestCode.GET_BROKER_CONSUME_STATS,
        headers.GetBrokerConsumeStatsRequest(is_order=True),
    )

    by_group = {name: each for entry in stats.consume_stats_list for name, each in entry.items()}
    assert stats.total_diff == 4
    assert stats.broker_addr == str(broker.address)
    assert by_group.keys() == {config.group_name for config in broker.parts.groups}
    assert by_group["slow"][0].offset_table[queue("orders")].consumer_offset == 1
    assert by_group["TOOLS_CONSUMER"] == ()
    assert ordered.total_diff == 0


async def test_retries_wait_for_a_group_that_has_no_progress_in_them(broker, client):
    broker.parts.groups.find(GROUP, now=0)
    broker.parts.groups.find("idle", now=0)
    for _ in range(2):
        await client.stored(f"%RETRY%{GROUP}")
    # There, and with nothing in it.
    broker.parts.topics.ensure_retry("idle", 1, now=0)

    stats = await consume_stats(client)
    every = await told(
        client,
        bodies.ConsumeStatsList,
        RequestCode.GET_BROKER_CONSUME_STATS,
        headers.GetBrokerConsumeStatsRequest(),
    )

    waiting = bodies.QueueProgress(broker_offset=2, consumer_offset=0)
    assert stats.offset_table[queue(f"%RETRY%{GROUP}")] == waiting
    by_group = {name: each for entry in every.consume_stats_list for name, each in entry.items()}
    assert by_group[GROUP][0].offset_table[queue(f"%RETRY%{GROUP}")] == waiting
    assert by_group["idle"] == ()
    assert every.total_diff == 2


async def test_the_time_that_a_group_lags_behind_is_told(client, clock):
    await client.pull("orders")
    await client.report("orders", 2)
    clock.time = START + 60

    header = headers.QueryConsumeTimeSpanRequest(topic="orders", group=GROUP)
    spans = await told(client, bodies.ConsumeTimeSpans, RequestCode.QUERY_CONSUME_TIME_SPAN, header)

    first, second = spans.consume_time_span_set[:2]
    local = datetime.fromtimestamp(START, UTC).astimezone()
    assert (first.min_time_stamp, first.max_time_stamp) == (millis(0), millis(4))
    assert first.consume_time_stamp == millis(1)
    assert first.delay_time == 58_000
    assert first.min_time_stamp_str == f"{local:%Y-%m-%d#%H:%M:%S}:000"
    assert (second.min_time_stamp, second.max_time_stamp, second.delay_time) == (-1, -1, 0)


async def test_the_entries_of_a_queue_are_shown(broker, client):
    header = headers.QueryConsumeQueueRequest(
        topic="orders", queue_id=0, index=1, count=2, consumer_group="nobody"
    )

    shown = await told(client, bodies.ConsumeQueueEntries, RequestCode.QUERY_CONSUME_QUEUE, header)

    sizes = {entry.physic_size for entry in shown.queue_data}
    assert (shown.min_queue_index, shown.max_queue_index) == (0, 5)
    assert len(shown.queue_data) == 2
    assert len(sizes) == 1
    assert shown.queue_data[0].physic_offset == sizes.pop()
    assert shown.queue_data[0].tags_code == 112785
    assert shown.filter_data == "nobody@orders is not online!"
    record = broker.parts.store.message_at(shown.queue_data[1].physic_offset)
    assert len(record) == shown.queue_data[1].physic_size


@pytest.mark.parametrize(
    ("code", "header", "answered", "remark"),
    [
        (
            RequestCode.GET_TOPIC_STATS_INFO,
            headers.TopicRequest(topic="never"),
            ResponseCode.TOPIC_NOT_EXIST,
            "topic[never] not exist",
        ),
        (
            RequestCode.QUERY_CONSUME_TIME_SPAN,
            headers.QueryConsumeTimeSpanRequest(topic="never", group=GROUP),
            ResponseCode.TOPIC_NOT_EXIST,
            "topic[never] not exist",
        ),
        (
            RequestCode.QUERY_CONSUME_QUEUE,
            headers.QueryConsumeQueueRequest(topic="never", queue_id=3, count=1),
            ResponseCode.SYSTEM_ERROR,
            "3@never is not exist!",
        ),
        (
            RequestCode.QUERY_CONSUME_QUEUE,
            headers.QueryConsumeQueueRequest(topic="orders", queue_id=0, index=5, count=1),
            ResponseCode.SUCCESS,
            "Index 5 of 0@orders is not exist!",
        ),
        *(
            (
                RequestCode.VIEW_BROKER_STATS_DATA,
                headers.ViewBrokerStatsRequest(stats_name=name, stats_key=key),
                ResponseCode.SYSTEM_ERROR,
                f"The stats <{name}> <{key}> not exist",
            )
            for name, key in (
                ("TOPIC_PUT_NUMS", "never"),
                ("GROUP_GET_NUMS", "orders@nobody"),
                ("BROKER_PUT_NUMS", "OtherCluster"),
                ("NO_SUCH_NUMS", "orders"),
            )
        ),
    ],
)
async def test_what_is_not_there_is_named_in_the_answer(client, code, header, answered, remark):
    answer = await ask(client, code, header)

    assert (answer.code, answer.remark) == (answered, remark)


async def stats_item(client: RawClient, name: str, key: str) -> bodies.BrokerStatsData:
    header = headers.ViewBrokerStatsRequest(stats_name=name, stats_key=key)
    return await told(client, bodies.BrokerStatsData, RequestCode.VIEW_BROKER_STATS_DATA, header)


async def test_counts_of_topics_groups_and_the_broker_are_told(client):
    await client.pull("orders")

    puts = await stats_item(client, "TOPIC_PUT_NUMS", "orders")
    sizes = await stats_item(client, "TOPIC_PUT_SIZE", "orders")
    gets = await stats_item(client, "GROUP_GET_NUMS", f"orders@{GROUP}")
    all_puts = await stats_item(client, "BROKER_PUT_NUMS", "DefaultCluster")
    plain = await stats_item(client, "BROKER_GET_NUMS_WITHOUT_SYSTEM_TOPIC", "DefaultCluster")

    assert puts.stats_minute.sum == puts.stats_hour.sum == puts.stats_day.sum == 5
    assert (puts.stats_minute.tps, puts.stats_minute.avgpt) == (1.0, 1.0)
    assert (sizes.stats_day.sum, sizes.stats_day.avgpt) == (40, 8.0)
    assert (gets.stats_minute.sum, gets.stats_minute.avgpt) == (5, 5.0)
    assert all_puts.stats_day.sum == 5
    assert plain.stats_day.sum == 5


async def runtime(client: RawClient) -> dict[str, str]:
    return (await told(client, bodies.KVTable, RequestCode.GET_BROKER_RUNTIME_INFO)).table


async def test_the_broker_tells_what_it_did_and_what_it_has(broker, client, clock):
    await client.pull("orders")
    clock.time = START + 90_061

    info = await runtime(client)

    assert info["runtime"] == "[ 1 days, 1 hours, 1 minutes, 1 seconds ]"
    assert info["bootTimestamp"] == str(millis(0))
    assert info["msgPutTotalTodayNow"] == info["putMessageTimesTotal"] == "5"
    assert info["msgGetTotalTodayNow"] == "5"
    assert info["putMessageSizeTotal"] == "40"
    assert info["putMessageAverageSize"] == "8.0"
    assert info["earliestMessageTimeStamp"] == str(millis(0))
    assert info["commitLogMaxOffset"] == str(broker.parts.store.statistics().log_end)
    assert info["brokerVersionDesc"] == "V5_3_3"
    assert 0 < float(info["commitLogDiskRatio"]) <= 1
    assert [float(rate) for rate in info["putTps"].split(" ")] == [pytest.approx(5 / 90_061)] * 3


async def test_delayed_messages_are_shown_by_level(client):
    await client.stored("orders", properties={"DELAY": "3"})

    assert (await runtime(client))["scheduleMessageOffset_3"] == "0,1"


RESET = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET


async def reset(tool: RawClient, *, dry_run: bool = False, **fields: Any) -> Command:
    header = headers.ResetOffsetRequest(**({"group": GROUP, "topic": "orders"} | fields))
    return await ask(tool, RESET, header, extra={"dryRun": "true"} if dry_run else None)


async def plan(tool: RawClient, *, dry_run: bool = False, **fields: Any) -> dict[int, int]:
    """A reset that must succeed: queue and offset, from its answer."""
    header = headers.ResetOffsetRequest(**({"group": GROUP, "topic": "orders"} | fields))
    extra = {"dryRun": "true"} if dry_run else None
    body = await told(tool, bodies.ResetOffsets, RESET, header, extra=extra)
    return {each.queue_id: offset for each, offset in body.offset_table.items()}


@pytest.fixture
async def tool(broker, open_client, clock):
    tool = await open_client(broker)
    for _ in range(10):
        await tool.stored("orders", queue_id=0)
        clock.time += 1
    for _ in range(3):
        await tool.stored("orders", queue_id=1)
    broker.parts.groups.find(GROUP, now=0)
    return tool


def stored(broker: Broker, group: str = GROUP, topic: str = "orders") -> dict[int, int]:
    return broker.parts.progress.offsets(topic, group)


async def read_back(tool: RawClient) -> int:
    answer = await tool.query("orders")
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return int(answer.ext_fields["offset"])


@pytest.mark.feature("L3")
@pytest.mark.parametrize(
    ("fields", "offsets"),
    [
        ({"timestamp": 1_700_000_004_000}, {0: 4, 1: 0, 2: 0, 3: 0}),
        ({"timestamp": -1}, {0: 10, 1: 3, 2: 0, 3: 0}),
        ({"queue_id": 0, "offset": 7}, {0: 7}),
        ({"queue_id": 0, "timestamp": 1_700_000_002_500}, {0: 3}),
        ({"queue_id": 0, "offset": -1, "timestamp": -1}, {0: 10}),
    ],
    ids=["a time", "the end", "an offset", "a time in one queue", "the end of one queue"],
)
async def test_a_group_is_reset_to_what_is_asked_for_after_a_dry_run_that_changes_nothing(
    broker, tool, fields, offsets
):
    tried = await plan(tool, dry_run=True, **fields)
    untouched = stored(broker)
    done = await plan(tool, **fields)
    late = await tool.report("orders", 9)

    assert untouched == {}
    assert tried == done == stored(broker) == offsets
    assert late.code == ResponseCode.SUCCESS
    assert await read_back(tool) == offsets[0]


@pytest.mark.feature("L3")
async def test_a_member_is_sent_to_the_new_offset_by_its_waiting_pull(broker, tool):
    await tool.heartbeat("me", subscription("orders"))
    await tool.pull("orders")
    await tool.report("orders", 10)
    waiting = asyncio.create_task(tool.pull("orders", offset=10, hold=60))
    await until(lambda: len(broker.parts.held) == 1)

    answer = await plan(tool, timestamp=1_700_000_004_000)

    async with asyncio.timeout(30):
        moved = await waiting
    assert answer[0] == 4
    assert moved.code == ResponseCode.PULL_OFFSET_MOVED
    assert moved.ext_fields["nextBeginOffset"] == "4"
    assert await read_back(tool) == 4


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"topic": "never"}, ResponseCode.TOPIC_NOT_EXIST, "Topic never does not exist"),
        (
            {"group": "nobody"},
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            "Group nobody does not exist",
        ),
        ({"queue_id": 0, "offset": 11}, ResponseCode.SYSTEM_ERROR, "range [0-10]"),
        ({"queue_id": 0, "offset": -2}, ResponseCode.SYSTEM_ERROR, "range [0-10]"),
        ({"queue_id": 4, "offset": 0}, ResponseCode.SYSTEM_ERROR, "has no queue 4"),
    ],
)
async def test_a_reset_that_would_have_no_effect_is_refused(broker, tool, fields, code, words):
    answer = await reset(tool, **fields)

    assert answer.code == code
    assert words in (answer.remark or "")
    assert stored(broker) == {}


async def test_a_slave_refuses_to_reset(start_broker, open_client):
    tool = await open_client(await start_broker(root="slave", broker_id=1))

    answer = await reset(tool)

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark == "Can not reset offset in slave broker"


def commit(broker: Broker, group: str, *offsets: int, topic: str = "orders") -> None:
    for queue_id, offset in enumerate(offsets):
        broker.parts.progress.commit(
            topic, group, queue_id, offset, by=group, way=CommitSource.REQUEST, now=0
        )


async def correction(tool: RawClient, compare: str, without: str | None = None) -> dict[int, int]:
    header = headers.QueryCorrectionOffsetRequest(
        topic="orders", compare_group=compare, filter_groups=without
    )
    body = await told(tool, bodies.CorrectionOffsets, RequestCode.QUERY_CORRECTION_OFFSET, header)
    return body.correction_offsets


async def test_the_correction_is_the_lowest_progress_unless_the_group_is_behind(broker, tool):
    commit(broker, "slow", 2, 3)
    commit(broker, "fast", 9, 1)

    assert await correction(tool, "fast") == {0: 2, 1: 1}
    assert await correction(tool, "nobody") == {0: 2, 1: 1}
    assert await correction(tool, "slow", without="slow") == {0: 2**63 - 1, 1: 1}


async def clone(tool: RawClient, source: str, target: str, **fields: Any) -> Command:
    header = headers.CloneGroupOffsetRequest(src_group=source, dest_group=target, **fields)
    return await ask(tool, RequestCode.CLONE_GROUP_OFFSET, header)


async def test_progress_is_cloned_in_one_topic_or_in_all(broker, tool):
    await tool.stored("payments")
    commit(broker, "old", 5, 2)
    commit(broker, "old", 1, topic="payments")

    one = await clone(tool, "old", "one", topic="orders")
    everything = await clone(tool, "old", "all")

    assert one.code == everything.code == ResponseCode.SUCCESS
    assert stored(broker, "one") == stored(broker, "all") == {0: 5, 1: 2}
    assert stored(broker, "one", "payments") == {}
    assert stored(broker, "all", "payments") == {0: 1}


async def test_a_topic_that_the_source_has_given_up_is_cloned_only_if_that_is_wanted(broker, tool):
    await tool.stored("payments")
    commit(broker, GROUP, 5)
    await tool.heartbeat("me", subscription("payments"))

    await clone(tool, GROUP, "without")
    await clone(tool, GROUP, "with", offline=True)

    assert stored(broker, "without") == {}
    assert stored(broker, "with") == {0: 5}


async def test_members_of_a_group_that_is_online_do_not_undo_a_clone(broker, tool):
    commit(broker, "old", 5)
    await tool.heartbeat("me", subscription("orders"))
    await tool.report("orders", 9)

    await clone(tool, "old", GROUP, topic="orders")
    await tool.report("orders", 9)

    assert await read_back(tool) == 5
