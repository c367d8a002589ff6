"""Progress of groups and bounds of queues over a socket."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from orbitmq.broker.broker import Broker
from orbitmq.broker.settings import ProgressSettings
from orbitmq.wire.bodies import TopicConfig
from orbitmq.wire.codes import Language, RequestCode, ResponseCode
from orbitmq.wire.headers import (
    BoundaryType,
    GetEarliestStoreTimeRequest,
    GetMinOffsetRequest,
    SearchOffsetRequest,
)
from tests.support.broker import GROUP, SMALL_STORE, RawClient
from tests.support.store import HandClock


async def ready(client: RawClient, broker: Broker, messages: int = 0) -> None:
    """A topic with a group, and some messages in its first queue."""
    broker.parts.topics.ensure(TopicConfig(topic_name="orders"), now=0.0)
    broker.parts.groups.find(GROUP, now=0.0)
    await asyncio.gather(*(client.stored("orders") for _ in range(messages)))


def one_way(client: RawClient, offset: int, topic: str = "orders") -> None:
    client.connection.notify(
        RequestCode.UPDATE_CONSUMER_OFFSET,
        extra={"consumerGroup": GROUP, "topic": topic, "queueId": "0", "commitOffset": str(offset)},
    )


# Reports.


async def test_a_report_is_what_the_next_query_answers(broker, client):
    await ready(client, broker)

    answer = await client.report("orders", 17, queue_id=3)

    assert (answer.code, answer.remark) == (ResponseCode.SUCCESS, None)
    assert (await client.query("orders", 3)).ext_fields == {"offset": "17"}


@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        ({"consumer_group": "new"}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "Group new not"),
        ({"topic": "nothing"}, ResponseCode.TOPIC_NOT_EXIST, "Topic nothing not exist"),
        (
            {"queue_id": -1},
            ResponseCode.INVALID_PARAMETER,
            "no queue -1 and never had; it has 0 to 15",
        ),
        ({"queue_id": 16}, ResponseCode.INVALID_PARAMETER, "no queue 16 "),
        ({"offset": -5}, ResponseCode.INVALID_PARAMETER, "commitOffset must be 0 or more, got -5"),
    ],
)
async def test_a_report_that_cannot_be_right_is_refused_and_not_kept(
    broker, client, fields, code, named
):
    await ready(client, broker)

    answer = await client.report(**({"topic": "orders", "offset": 1} | fields))

    assert answer.code == code
    assert named in (answer.remark or "")
    assert "new" not in broker.parts.groups
    assert "nothing" not in broker.parts.topics
    assert broker.parts.progress.offsets("orders", GROUP) == {}


async def test_a_topic_that_got_fewer_queues_still_takes_reports_of_the_others(broker, client):
    await ready(client, broker)
    await client.stored("orders", queue_id=12)
    await client.report("orders", 0, queue_id=13)
    fewer = TopicConfig(topic_name="orders", read_queue_nums=4, write_queue_nums=4)
    broker.parts.topics.update(fewer, now=0.0)

    with_messages = await client.report("orders", 1, queue_id=12)
    with_progress = await client.report("orders", 0, queue_id=13)
    with_nothing = await client.report("orders", 0, queue_id=14)

    codes = [answer.code for answer in (with_messages, with_progress, with_nothing)]
    assert codes == [ResponseCode.SUCCESS, ResponseCode.SUCCESS, ResponseCode.INVALID_PARAMETER]
    assert broker.parts.progress.offsets("orders", GROUP) == {12: 1, 13: 0}


async def test_progress_that_an_earlier_broker_kept_for_queues_that_never_were_is_dropped(
    start_broker, open_client, caplog
):
    first = await start_broker()
    client = await open_client(first)
    await ready(client, first, messages=3)
    await client.report("orders", 2)
    for queue_id in (-1, 77, *range(1000, 3000)):
        first.parts.progress.reset("orders", GROUP, queue_id, 5)
    first.parts.progress.reset("made_later", GROUP, 3, 0)
    await first.stop()

    second = await start_broker()

    assert second.parts.progress.offsets("orders", GROUP) == {0: 2}
    assert second.parts.progress.offsets("made_later", GROUP) == {3: 0}
    told = [each.message for each in caplog.records if "never existed" in each.message]
    assert len(told) == 1
    assert "2002 queues" in told[0]


async def test_a_report_from_before_a_reset_does_not_undo_it_when_a_pull_has_taken_it(
    broker, client
):
    await ready(client, broker, messages=10)
    one_way(client, 8)
    broker.parts.progress.reset("orders", GROUP, 0, 3)
    moved = await client.pull("orders", 0, 8)

    one_way(client, 8)
    stale = await client.query("orders")
    await client.pull("orders", 0, 3, max_msg_nums=2)
    for offset in (8, 5):
        one_way(client, offset)
    replayed = await client.query("orders")
    by_tool = await client.report("orders", 9)

    assert moved.code == ResponseCode.PULL_OFFSET_MOVED
    assert stale.ext_fields["offset"] == "3"
    assert replayed.ext_fields["offset"] == "5"
    assert (by_tool.code, by_tool.remark) == (ResponseCode.SUCCESS, None)
    assert broker.parts.progress.stored("orders", GROUP, 0) == 9


@pytest.mark.feature("H2")
async def test_a_report_counts_at_once_and_a_straggler_cannot_move_it_back(
    broker, open_client, caplog
):
    owner, straggler = await open_client(broker), await open_client(broker)
    await ready(owner, broker)
    one_way(owner, 100)
    assert (await owner.query("orders")).ext_fields["offset"] == "100"

    one_way(straggler, 40)
    after_straggler = await straggler.query("orders")
    one_way(owner, 90)
    after_seek = await owner.query("orders")
    broker.parts.progress.reset("orders", GROUP, 0, 10)
    after_reset = await straggler.query("orders")

    assert after_straggler.ext_fields["offset"] == "100"
    assert after_seek.ext_fields["offset"] == "90"
    assert "lower offset refused" in caplog.text
    assert after_reset.ext_fields["offset"] == "10"


async def test_a_cpp_client_never_says_one_way_and_is_taken_for_a_reporter(broker, open_client):
    def as_cpp(request):
        return msgspec.structs.replace(request, language=Language.CPP, version=63)

    owner, straggler = await open_client(broker), await open_client(broker, as_cpp)
    await ready(owner, broker)
    one_way(owner, 100)
    await owner.query("orders")

    answer = await straggler.report("orders", 40)

    assert answer.code == ResponseCode.SUCCESS
    assert "not stored" in (answer.remark or "")
    assert (await owner.query("orders")).ext_fields["offset"] == "100"


# Groups without progress.


@pytest.mark.parametrize(
    ("messages", "settings", "fields", "expected"),
    [
        (3, {}, {}, "0"),
        (3, {}, {"set_zero_if_not_found": True}, "0"),
        (3, {}, {"set_zero_if_not_found": False}, None),
        (3, {"strict_last": True}, {}, None),
        (0, {}, {}, "0"),
        (0, {}, {"set_zero_if_not_found": True}, "0"),
        (0, {}, {"set_zero_if_not_found": False}, None),
        (0, {"zero_for_empty": False}, {}, None),
        (0, {"strict_last": True}, {}, None),
    ],
)
async def test_a_group_without_progress_begins_at_0_in_a_young_queue(
    start_broker, open_client, messages, settings, fields, expected
):
    broker = await start_broker(progress=ProgressSettings(**settings))
    client = await open_client(broker)
    await ready(client, broker, messages)

    answer = await client.query("orders", **fields)

    assert answer.ext_fields.get("offset") == expected
    code = ResponseCode.QUERY_NOT_FOUND if expected is None else ResponseCode.SUCCESS
    assert answer.code == code


async def test_a_queue_whose_messages_have_expired_is_not_young(start_broker, open_client):
    retention = replace(SMALL_STORE.retention, max_bytes=64 * 1024, files_per_run=100)
    store = replace(SMALL_STORE, file_size=32 * 1024, retention=retention)
    broker = await start_broker(store=store)
    client = await open_client(broker)
    await ready(client, broker, 3)
    for _ in range(40):
        await client.stored("others", b"x" * 4096)
    broker.parts.store.settle()
    broker.parts.store.clean()
    assert broker.parts.store.min_offset("orders", 0) == 3

    assert (await client.query("orders")).code == ResponseCode.QUERY_NOT_FOUND
    assert await client.max_offset("orders") == 3


# Queues.


@pytest.mark.feature("H6")
async def test_progress_and_bounds_of_a_queue_can_be_asked_for(start_broker, open_client):
    clock = HandClock()
    broker = await start_broker(parts={"clock": clock})
    client = await open_client(broker)
    for second in range(5):
        clock.time = 1_700_000_000.0 + 10 * second
        await client.stored("orders")
    broker.parts.groups.find(GROUP, now=0.0)
    await client.report("orders", 2)

    async def searched(second, boundary=None):
        answer = await client.connection.request(
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
            SearchOffsetRequest(
                topic="orders",
                queue_id=0,
                timestamp=round((1_700_000_000 + second) * 1000),
                boundary_type=boundary,
            ),
        )
        return answer.ext_fields["offset"]

    lowest = await client.connection.request(
        RequestCode.GET_MIN_OFFSET, GetMinOffsetRequest(topic="orders", queue_id=0)
    )
    earliest = await client.connection.request(
        RequestCode.GET_EARLIEST_MSG_STORETIME,
        GetEarliestStoreTimeRequest(topic="orders", queue_id=0),
    )

    assert (await client.query("orders")).ext_fields["offset"] == "2"
    assert await client.max_offset("orders") == 5
    assert lowest.ext_fields["offset"] == "0"
    assert earliest.ext_fields["timestamp"] == "1700000000000"
    assert [await searched(second) for second in (-1, 0, 5, 10, 40, 41)] == list("001145")
    upper = BoundaryType.UPPER
    assert [await searched(second, upper) for second in (-1, 0, 5, 10, 41)] == list("00014")


async def test_an_unknown_queue_is_empty(client):
    lowest = await client.connection.request(
        RequestCode.GET_MIN_OFFSET, GetMinOffsetRequest(topic="nothing", queue_id=9)
    )
    found = await client.connection.request(
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        SearchOffsetRequest(topic="nothing", queue_id=9, timestamp=5),
    )
    earliest = await client.connection.request(
        RequestCode.GET_EARLIEST_MSG_STORETIME,
        GetEarliestStoreTimeRequest(topic="nothing", queue_id=9),
    )

    assert await client.max_offset("nothing", 9) == 0
    assert lowest.ext_fields["offset"] == found.ext_fields["offset"] == "0"
    assert earliest.ext_fields["timestamp"] == "-1"
