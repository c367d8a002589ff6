"""Moving the progress of groups."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.broker.progress import CommitSource
from orbitmq.wire.bodies import CorrectionOffsets, ResetOffsets
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import (
    CloneGroupOffsetRequest,
    QueryCorrectionOffsetRequest,
    ResetOffsetRequest,
)
from tests.support.admin import OLD_VERSION, ask, of_version, subscription, told
from tests.support.broker import GROUP, RawClient, until
from tests.support.remoting import ManualClock

RESET = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET


async def reset(client: RawClient, *, dry_run: bool = False, **fields: Any) -> Command:
    header = ResetOffsetRequest(**({"group": GROUP, "topic": "orders"} | fields))
    return await ask(client, RESET, header, extra={"dryRun": "true"} if dry_run else None)


async def plan(client: RawClient, *, dry_run: bool = False, **fields: Any) -> dict[int, int]:
    """A reset that must succeed: queue and offset, from its answer."""
    header = ResetOffsetRequest(**({"group": GROUP, "topic": "orders"} | fields))
    extra = {"dryRun": "true"} if dry_run else None
    body = await told(client, ResetOffsets, RESET, header, extra=extra)
    return {each.queue_id: offset for each, offset in body.offset_table.items()}


@pytest.fixture
def clock():
    return ManualClock(time=1_700_000_000.0)


@pytest.fixture
async def broker(start_broker, clock):
    """One with ten messages in queue 0 of `orders`, a second apart, and three in queue 1."""
    return await start_broker(parts={"clock": clock})


@pytest.fixture
async def client(broker, open_client, clock):
    client = await open_client(broker)
    for _ in range(10):
        await client.stored("orders", queue_id=0)
        clock.time += 1
    for _ in range(3):
        await client.stored("orders", queue_id=1)
    broker.parts.groups.find(GROUP, now=0)
    return client


def stored(broker: Broker, group: str = GROUP, topic: str = "orders") -> dict[int, int]:
    return broker.parts.progress.offsets(topic, group)


async def read_back(client: RawClient, queue_id: int = 0) -> int:
    answer = await client.query("orders", queue_id)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return int(answer.ext_fields["offset"])


@pytest.mark.feature("L3")
class TestReset:
    """To a time, an offset, the end; per queue; tried first; read back."""

    async def test_a_group_that_is_not_there_goes_on_at_a_time(self, broker, client):
        answer = await plan(client, timestamp=1_700_000_004_000)

        assert answer == {0: 4, 1: 0, 2: 0, 3: 0}
        assert [await read_back(client, each) for each in range(4)] == [4, 0, 0, 0]
        assert stored(broker) == answer

    async def test_a_negative_time_is_the_end(self, client):
        answer = await plan(client, timestamp=-1)

        assert answer == {0: 10, 1: 3, 2: 0, 3: 0}
        assert await read_back(client) == 10

    async def test_one_queue_goes_to_an_offset_and_the_others_stay(self, broker, client):
        await plan(client, timestamp=-1)

        answer = await plan(client, queue_id=0, offset=7)

        assert answer == {0: 7}
        assert stored(broker) == {0: 7, 1: 3, 2: 0, 3: 0}

    async def test_one_queue_goes_to_a_time(self, client):
        assert await plan(client, queue_id=0, timestamp=1_700_000_002_500) == {0: 3}
        assert await plan(client, queue_id=0, offset=-1, timestamp=-1) == {0: 10}

    async def test_a_dry_run_shows_the_plan_and_changes_nothing(self, broker, client):
        tried = await plan(client, dry_run=True, timestamp=1_700_000_004_000)
        untouched = stored(broker)
        done = await plan(client, timestamp=1_700_000_004_000)

        assert untouched == {}
        assert tried == done == stored(broker)

    async def test_a_member_is_sent_to_the_new_offset_and_its_old_reports_are_dropped(
        self, broker, client
    ):
        await client.heartbeat("me", subscription("orders"))
        await client.pull("orders")
        await client.report("orders", 10)
        waiting = asyncio.create_task(client.pull("orders", offset=10, hold=60))
        await until(lambda: len(broker.parts.held) == 1)

        answer = await plan(client, timestamp=1_700_000_004_000)

        async with asyncio.timeout(30):
            moved = await waiting
        assert answer[0] == 4
        assert moved.code == ResponseCode.PULL_OFFSET_MOVED
        assert moved.ext_fields["nextBeginOffset"] == "4"
        assert await read_back(client) == 4

    async def test_a_report_of_the_time_before_does_not_undo_it(self, client):
        await plan(client, timestamp=0)

        late = await client.report("orders", 9)

        assert late.code == ResponseCode.SUCCESS
        assert await read_back(client) == 0


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
async def test_a_reset_that_would_have_no_effect_is_refused(broker, client, fields, code, words):
    answer = await reset(client, **fields)

    assert answer.code == code
    assert words in (answer.remark or "")
    assert stored(broker) == {}


async def test_a_slave_refuses_to_reset(start_broker, open_client):
    client = await open_client(await start_broker(root="slave", broker_id=1))

    answer = await reset(client)

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark == "Can not reset offset in slave broker"


def commit(broker: Broker, group: str, *offsets: int, topic: str = "orders") -> None:
    for queue_id, offset in enumerate(offsets):
        broker.parts.progress.commit(
            topic, group, queue_id, offset, by=group, way=CommitSource.REQUEST, now=0
        )


async def correction(client: RawClient, compare: str, without: str | None = None) -> dict[int, int]:
    header = QueryCorrectionOffsetRequest(
        topic="orders", compare_group=compare, filter_groups=without
    )
    body = await told(client, CorrectionOffsets, RequestCode.QUERY_CORRECTION_OFFSET, header)
    return body.correction_offsets


async def test_the_correction_is_the_lowest_progress_unless_the_group_is_behind(broker, client):
    commit(broker, "slow", 2, 3)
    commit(broker, "fast", 9, 1)

    assert await correction(client, "fast") == {0: 2, 1: 1}
    assert await correction(client, "nobody") == {0: 2, 1: 1}
    assert await correction(client, "slow", without="slow") == {0: 2**63 - 1, 1: 1}


async def test_groups_that_are_left_out_keep_their_progress(broker, client):
    commit(broker, "slow", 2)
    commit(broker, "fast", 9)

    await correction(client, "fast", without="slow,fast")

    assert stored(broker, "slow") == {0: 2}
    assert stored(broker, "fast") == {0: 9}


@pytest.mark.parametrize(("version", "key"), [(OLD_VERSION, b"{0:2}"), (479, b'{"0":2}')])
async def test_integer_keys_are_bare_for_old_peers_only(broker, open_client, client, version, key):
    commit(broker, "slow", 2)
    peer = await open_client(broker, of_version(version))
    header = QueryCorrectionOffsetRequest(topic="orders", compare_group="nobody")

    answer = await ask(peer, RequestCode.QUERY_CORRECTION_OFFSET, header)

    assert bytes(answer.body) == b'{"correctionOffsets":%b}' % key


async def clone(client: RawClient, source: str, target: str, **fields: Any) -> Command:
    header = CloneGroupOffsetRequest(src_group=source, dest_group=target, **fields)
    return await ask(client, RequestCode.CLONE_GROUP_OFFSET, header)


async def test_progress_is_cloned_in_one_topic_or_in_all(broker, client):
    await client.stored("payments")
    commit(broker, "old", 5, 2)
    commit(broker, "old", 1, topic="payments")

    one = await clone(client, "old", "one", topic="orders")
    everything = await clone(client, "old", "all")

    assert one.code == everything.code == ResponseCode.SUCCESS
    assert stored(broker, "one") == stored(broker, "all") == {0: 5, 1: 2}
    assert stored(broker, "one", "payments") == {}
    assert stored(broker, "all", "payments") == {0: 1}


async def test_a_clone_that_copied_nothing_says_so(client):
    answer = await clone(client, "nobody", "one")

    assert answer.code == ResponseCode.SUCCESS
    assert "nothing was cloned" in (answer.remark or "")


async def test_a_topic_that_the_source_has_given_up_is_cloned_only_if_that_is_wanted(
    broker, client
):
    await client.stored("payments")
    commit(broker, GROUP, 5)
    await client.heartbeat("me", subscription("payments"))

    await clone(client, GROUP, "without")
    await clone(client, GROUP, "with", offline=True)

    assert stored(broker, "without") == {}
    assert stored(broker, "with") == {0: 5}


async def test_members_of_a_group_that_is_online_do_not_undo_a_clone(broker, client):
    commit(broker, "old", 5)
    await client.heartbeat("me", subscription("orders"))
    await client.report("orders", 9)

    await clone(client, "old", GROUP, topic="orders")
    await client.report("orders", 9)

    assert await read_back(client) == 5
