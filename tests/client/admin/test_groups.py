"""Groups: listed, configured, described."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.admin.groups import GroupState, decode_lags, lags_of
from orbitmq.client.admin.members import FindingKind
from orbitmq.client.errors import BadRequest, GroupNotFound
from orbitmq.client.routes import Queue
from orbitmq.wire.bodies import (
    ConsumeStats,
    ConsumeStatsList,
    MessageModel,
    MessageQueue,
    ProcessQueueInfo,
    QueueProgress,
)
from orbitmq.wire.codes import BodyError, RequestCode
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.broker import until
from tests.support.client_admin import GROUP, World, forget_code

A0 = Queue("orders", "broker-a", 0)
A1 = Queue("orders", "broker-a", 1)
B0 = Queue("orders", "broker-b", 0)
B1 = Queue("orders", "broker-b", 1)
QUEUES = (A0, A1, B0, B1)


async def test_a_list_tells_who_is_online_and_how_old_the_backlog_is_when_asked(world):
    await world.consumer("c1")
    await world.admin.groups.create("idle")
    records = await world.fill(A0, 5)
    await world.report(A0, 2)
    world.cluster.advance(100.0)

    unasked = {each.group: each for each in await world.admin.groups.list()}
    listing = await world.admin.groups.list(members=True, times=True)

    groups = {each.group: each for each in listing}
    assert groups[GROUP].state is GroupState.ONLINE
    assert groups["idle"].state is GroupState.OFFLINE
    members = groups[GROUP].members
    assert members is not None
    assert members.client_ids == ("c1",)
    assert (members.model, members.consume_type) == ("clustering", "push")
    waited = world.cluster.clock.now() - records[2].stored_at
    assert groups[GROUP].lag_seconds == pytest.approx(waited, abs=5.0)
    assert groups["idle"].lag_seconds == 0.0
    assert list(groups) == [GROUP, "idle"]
    assert groups[GROUP].brokers == ("broker-a", "broker-b")
    assert (groups[GROUP].lag, groups["idle"].lag) == (3, 0)
    (topic,) = [each for each in groups[GROUP].topics if each.topic == "orders"]
    assert (topic.lag, topic.queues) == (3, 2)
    assert (unasked[GROUP].state, unasked[GROUP].lag) == (GroupState.UNKNOWN, 3)
    assert unasked[GROUP].lag_seconds is None


async def test_a_broker_that_cannot_tell_of_all_groups_is_asked_for_each(world, monkeypatch):
    for broker in world.cluster.brokers:
        forget_code(monkeypatch, broker, RequestCode.GET_BROKER_CONSUME_STATS)
    await world.admin.groups.create(GROUP)
    await world.fill(A0, 5)
    await world.report(A0, 2)

    (group,) = await world.admin.groups.list()

    assert (group.group, group.lag) == (GROUP, 3)


async def test_progress_shows_lag_in_messages_and_seconds_per_queue(world):
    await world.admin.groups.create(GROUP)
    records = await world.fill(A0, 5)
    await world.fill(B1, 2)
    await world.report(A0, 2)
    await world.report(B1, 2)
    world.cluster.advance(60.0)

    progress = await world.admin.groups.progress(GROUP)

    by_queue = {each.queue: each for each in progress.queues}
    behind = by_queue[A0]
    assert (behind.broker_offset, behind.consumer_offset, behind.lag) == (5, 2, 3)
    # The age of the first message that waits, not of the last one consumed.
    waited = world.cluster.clock.now() - records[2].stored_at
    assert behind.lag_seconds == pytest.approx(waited, abs=5.0)
    assert behind.last_consumed_at == pytest.approx(records[1].stored_at)
    assert behind.owner is None
    done = by_queue[B1]
    assert (done.lag, done.lag_seconds) == (0, 0.0)
    assert progress.lag == 3
    assert progress.lag_seconds == behind.lag_seconds
    assert progress.of_topic("orders") == progress.queues


async def test_retries_of_a_group_without_progress_in_them_count_from_the_first(world, monkeypatch):
    await world.admin.groups.create(GROUP)
    retry = Queue(f"%RETRY%{GROUP}", "broker-a", 0)
    await world.admin.topics.create(retry.topic, queues=1)
    await world.fill(retry, 2)
    await world.report(A0, 0)

    (listed,) = await world.admin.groups.list()
    told = await world.admin.groups.progress(GROUP)
    # An Apache broker tells only of topics with progress.
    for module in ("progress", "handlers.admin"):
        monkeypatch.setattr(
            f"orbitmq.broker.{module}.topics_behind",
            lambda parts, group: sorted(parts.progress.topics_of(group)),
        )
    asked = await world.admin.groups.progress(GROUP)

    assert listed.retry_lag == 2
    assert (told.retry_lag, asked.retry_lag) == (2, 2)
    (waiting,) = asked.of_topic(retry.topic)
    assert (waiting.queue, waiting.consumer_offset) == (retry, 0)
    assert waiting.lag_seconds is not None


async def test_progress_names_the_owner_of_each_queue(world):
    await world.fill(A0, 1)
    held = ProcessQueueInfo(cached_msg_count=1)
    await world.consumer("c1", owns={A0: held, A1: held})
    await world.consumer("c2", owns={B0: held, B1: ProcessQueueInfo(is_dropped=True)})
    for queue in QUEUES:
        await world.report(queue, 0)

    progress = await world.admin.groups.progress(GROUP)

    owners = {each.queue: each.owner for each in progress.of_topic("orders")}
    assert owners == {A0: "c1", A1: "c1", B0: "c2", B1: None}
    without = await world.admin.groups.progress(GROUP, owners=False)
    assert {each.owner for each in without.queues} == {None}


async def test_what_waits_in_queues_that_nobody_has_reported_from_is_counted(world):
    await world.fill(A0, 2)
    await world.fill(B0, 3)
    await world.consumer("c1")
    await world.report(B0, 1)

    progress = await world.admin.groups.progress(GROUP)

    assert {each.queue: each.lag for each in progress.of_topic("orders")} == {
        A0: 2,
        A1: 0,
        B0: 2,
        B1: 0,
    }
    only = await world.admin.groups.progress(GROUP, topic="orders")
    assert [(each.queue, each.lag) for each in only.queues] == [
        (each.queue, each.lag) for each in progress.of_topic("orders")
    ]


async def test_settings_of_a_group_are_changed_on_every_broker_and_read_back(world):
    groups = world.admin.groups
    await groups.create("new", max_retries=3, consume_timeout=timedelta(minutes=5))

    changed = await groups.update("new", retry_queues=2, orderly=True)

    shown = {
        (e.max_retries, e.retry_queues, e.is_orderly, e.consume_timeout) for e in changed.values()
    }
    assert set(changed) == {"broker-a", "broker-b"}
    assert shown == {(3, 2, True, 300.0)}
    assert await groups.settings("new") == changed


async def test_a_paused_group_gets_nothing_until_it_is_resumed(world):
    await world.consumer("c1")
    await world.fill(A0, 2)
    client = await world.client("broker-a")

    await world.admin.groups.pause(GROUP)

    refused = await client.pull("orders", consumer_group=GROUP)
    assert refused.code == 16
    assert (await world.admin.groups.describe(GROUP)).state is GroupState.PAUSED
    await world.admin.groups.resume(GROUP)
    answer = await client.pull("orders", consumer_group=GROUP)
    assert answer.code == 0
    assert (await world.admin.groups.describe(GROUP)).state is GroupState.ONLINE


async def test_a_group_is_deleted_with_its_progress_unless_it_is_online(world):
    consumer = await world.consumer("c1")
    await world.fill(A0, 1)
    await world.report(A0, 1)
    await world.die(A0, b"dead")

    for refused in (world.admin.groups.delete, world.admin.groups.check_offline):
        with pytest.raises(BadRequest, match="c1"):
            await refused(GROUP)
    assert world.progress(A0) == 1
    await consumer.stop()
    await _until_offline(world)
    await world.admin.groups.check_offline(GROUP)
    await world.admin.groups.delete(GROUP)

    assert world.progress(A0) is None
    with pytest.raises(GroupNotFound):
        await world.admin.groups.settings(GROUP)
    # Dead letters stay unless one says otherwise.
    assert f"%DLQ%{GROUP}" in world.cluster.brokers[0].parts.topics
    await world.admin.groups.create(GROUP)
    await world.admin.groups.delete(GROUP, delete_topics=True)
    assert f"%DLQ%{GROUP}" not in world.cluster.brokers[0].parts.topics
    assert f"%RETRY%{GROUP}" not in world.cluster.brokers[0].parts.topics


async def _until_offline(world: World) -> None:
    def is_offline() -> bool:
        return not any(b.parts.consumers.is_online(GROUP) for b in world.cluster.brokers)

    await until(is_offline, 10.0)


async def test_a_group_is_described_with_everything(world):
    held = ProcessQueueInfo(cached_msg_count=1)
    await world.consumer("c1", owns=dict.fromkeys(QUEUES, held))
    await world.fill(A0, 4)
    await world.report(A0, 1)
    await world.die(A0, b"dead")

    details = await world.admin.groups.describe(GROUP)

    assert details.state is GroupState.ONLINE
    assert set(details.settings) == {"broker-a", "broker-b"}
    assert details.members is not None
    assert [each.client_id for each in details.members.clients] == ["c1"]
    assert [each.topic for each in details.members.subscriptions] == ["orders"]
    assert details.dead_letters == 1
    # Four and the one that died.
    assert details.progress.lag == 4
    assert details.findings == ()


# What is wrong inside groups.


@pytest.mark.feature("L6")
async def test_differing_subscriptions_are_found_with_both_members(world):
    await world.consumer("c1", subscriptions={"orders": "paid"})
    await world.consumer("c2", subscriptions={"orders": "paid || refunded"})

    (finding,) = await world.admin.groups.findings(GROUP)

    assert finding.kind is FindingKind.DIFFERENT_SUBSCRIPTIONS
    assert finding.topic == "orders"
    told = {each.expression: each.clients for each in finding.variants}
    assert told == {"paid": ("c1",), "paid || refunded": ("c2",)}
    assert "c1" in finding.text
    assert "c2" in finding.text


async def test_differing_subscriptions_are_found_without_the_brokers_help(world, monkeypatch):
    # Apache's broker does not compare heartbeats.
    monkeypatch.setattr("orbitmq.broker.handlers.membership.findings", lambda *_: [])
    await world.consumer("c1", subscriptions={"orders": "paid"})
    await world.consumer("c2", subscriptions={"orders": "paid", "returns": "*"})
    await world.consumer("c3", subscriptions={"orders": " paid ", "returns": "*"})

    (finding,) = await world.admin.groups.findings(GROUP)

    assert finding.kind is FindingKind.DIFFERENT_SUBSCRIPTIONS
    assert finding.topic == "returns"
    assert {each.clients: each.expression for each in finding.variants} == {
        ("c1",): None,
        ("c2", "c3"): "*",
    }


async def test_two_consumers_with_one_id_are_found(world):
    first = await world.consumer("same")
    second = await world.consumer("same")
    await first.beat()
    await second.beat()

    found = await world.admin.groups.findings(GROUP)

    (finding,) = [each for each in found if each.kind is FindingKind.DUPLICATE_CLIENT]
    assert finding.client_id == "same"
    assert len(finding.addresses) == 2


async def test_queues_that_nobody_has_or_nobody_pulls_are_found(world):
    now = world.cluster.clock.now()
    stale = ProcessQueueInfo(last_pull_timestamp=round((now - 600) * 1000))
    fresh = ProcessQueueInfo(last_pull_timestamp=round(now * 1000))
    await world.consumer("c1", owns={A0: stale, B0: fresh, B1: fresh})
    for queue in (A0, A1, B0):
        await world.fill(queue, 1)
        await world.report(queue, 0)

    found = await world.admin.groups.findings(GROUP)

    assert {(each.kind, each.queue) for each in found} == {
        (FindingKind.STALLED_QUEUE, A0),
        (FindingKind.UNOWNED_QUEUE, A1),
    }
    (stalled,) = [each for each in found if each.kind is FindingKind.STALLED_QUEUE]
    assert stalled.client_id == "c1"


async def test_a_broadcasting_group_has_no_owners_to_miss(world):
    await world.consumer("c1", model=MessageModel.BROADCASTING)
    await world.fill(A0, 1)
    await world.report(A0, 0)

    assert await world.admin.groups.findings(GROUP) == ()


# The lag of all groups out of one answer: the fast way reads what the general one does.


#: Names with quotes, blanks and backslashes cannot be, and must not be misread.
names = st.text(st.sampled_from('abc%_-" \\{}:1'), min_size=1, max_size=6)
offsets = st.integers(0, 2**62)
queues = st.builds(MessageQueue, broker_name=names, queue_id=st.integers(0, 9), topic=names)
places = st.builds(QueueProgress, broker_offset=offsets, consumer_offset=offsets)
stats = st.builds(
    ConsumeStats,
    consume_tps=st.floats(0, 1e6),
    offset_table=st.dictionaries(queues, places, max_size=4),
)
tables = st.builds(
    ConsumeStatsList,
    broker_addr=st.just("127.0.0.1:1"),
    consume_stats_list=st.lists(
        st.dictionaries(names, st.lists(stats, max_size=3).map(tuple), max_size=2), max_size=4
    ).map(tuple),
)


@given(tables)
def test_both_ways_read_the_same(table):
    body = encode_body(table)

    general = decode_body(ConsumeStatsList, body)

    assert decode_lags(body) == {
        group: lags_of(parts)
        for entry in general.consume_stats_list
        for group, parts in entry.items()
    }


def test_other_dialects_are_read_as_well():
    quoted = (
        b'{"consumeStatsList":[{"g":[{"offsetTable":{"{\\"brokerName\\":\\"b\\",\\"queueId\\":0,'
        b'\\"topic\\":\\"T\\"}":{"brokerOffset":5,"consumerOffset":2}}}]}]}'
    )
    spaced = (
        b'{"consumeStatsList":[{"g":[{"offsetTable":{{"topic":"T","brokerName":"b","queueId":0}:'
        b'{"brokerOffset":"5","consumerOffset":2}}}]}]}'
    )

    for body in (quoted, spaced):
        assert decode_lags(body)["g"]["T"].lag == 3
    assert decode_lags(b"") == {}
    with pytest.raises(BodyError):
        decode_lags(b"[nonsense")
