"""Our administration against Apache's brokers and name server, of both lines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.admin.deadletters import DeadLetterFilter, ResendResult
from orbitmq.client.admin.members import FindingKind
from orbitmq.client.admin.messages import Fate
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.admin.topics import TopicKind
from orbitmq.client.errors import GroupNotFound, TopicNotFound
from orbitmq.client.routes import Queue
from orbitmq.errors import NotSupported
from orbitmq.remoting.channels import connect
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.settings import parse_address
from orbitmq.wire.bodies import ProcessQueueInfo
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.headers import ConsumerSendBackRequest, SendMessageResponse
from tests.interop.apache import Broker
from tests.support.broker import RawClient
from tests.support.client_admin import FakeConsumer

if TYPE_CHECKING:
    pass

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

DEADLINE = 30.0


@pytest.fixture(scope="module")
def broker(release, name_server, tmp_path_factory):
    home = tmp_path_factory.mktemp("broker")
    with Broker.running(release, home, name_server.address) as running:
        yield running


@pytest.fixture
async def admin(name_server, broker):
    async with AsyncAdmin(name_server=name_server.address) as running:
        yield running


@pytest.fixture
async def client(broker):
    connection = await connect(parse_address(broker.address), owner=Dispatcher({}))
    raw = RawClient(connection, [])
    yield raw
    await raw.close()


async def _send(client: RawClient, queue: Queue, body: bytes, **properties: str) -> str:
    answer = await client.send(
        queue.topic, body, queue_id=queue.id, properties={"WAIT": "true", **properties}
    )
    assert answer.code == 0, answer.remark
    return answer.header(SendMessageResponse).msg_id


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not await condition():  # noqa: ASYNC110  # another process has no event for us
            await asyncio.sleep(0.05)


async def _until_seen(admin: AsyncAdmin, topic: str, count: int) -> None:
    """Apache's broker answers a send before the message can be read."""

    async def is_seen() -> bool:
        return (await admin.topics.status(topic)).messages >= count

    await _until(is_seen)


async def test_the_cluster_is_shown(admin, broker, release):
    async def tells():
        # It has nothing to tell in its first second.
        (found,) = (await admin.cluster()).brokers
        return found.is_up and found.runtime is not None

    await _until(tells)
    status = await admin.cluster()

    (found,) = status.brokers
    assert str(found.node.address) == broker.address
    assert found.runtime is not None
    assert found.runtime.version == release.version
    assert not found.runtime.is_orbitmq
    assert found.runtime.disk_used is not None
    assert found.runtime.started_at is not None
    (server,) = status.name_servers
    assert server.is_up
    assert server.config
    assert (await admin.config.broker("broker-a"))["brokerName"] == "broker-a"


async def test_a_topic_lives(admin, client):
    made = await admin.topics.create("AdminLives", write_queues=2, read_queues=3)
    assert (made.write_queues, made.read_queues) == (2, 3)
    changed = await admin.topics.update("AdminLives", write_queues=3, permission="r")
    assert (changed.write_queues, changed.read_queues) == (3, 3)
    assert changed.permission.letters == "r"
    listing = await admin.topics.list()
    topics = {topic.name: topic for topic in listing}
    assert topics["AdminLives"].kind is TopicKind.NORMAL
    assert topics["TBW102"].kind is TopicKind.SYSTEM
    assert listing.is_complete
    await _send(client, Queue("AdminLives", "broker-a", 1), b"x")
    await _until_seen(admin, "AdminLives", 1)
    status = await admin.topics.status("AdminLives")
    assert [each.messages for each in status.queues] == [0, 1, 0]
    assert status.first_stored_at is not None
    await admin.topics.rates("AdminLives")

    await admin.topics.delete("AdminLives")

    with pytest.raises(TopicNotFound):
        await admin.topics.get("AdminLives")
    with pytest.raises(TopicNotFound):
        await admin.topics.status("AdminLives")


async def test_a_group_lives(admin, client):
    group = "admin-group-lives"
    with pytest.raises(GroupNotFound):
        await admin.groups.settings(group)
    await admin.groups.create(group, max_retries=3)
    paused = await admin.groups.pause(group)
    assert [each.is_enabled for each in paused.values()] == [False]
    resumed = await admin.groups.resume(group)
    assert [(each.is_enabled, each.max_retries) for each in resumed.values()] == [(True, 3)]
    assert group in [each.group for each in await admin.groups.list()]

    await admin.groups.delete(group)

    with pytest.raises(GroupNotFound):
        await admin.groups.settings(group)


async def test_progress_and_members_are_shown(admin, client, broker):
    topic, group = "AdminProgress", "admin-progress"
    await admin.topics.create(topic, queues=2)
    first, second = (Queue(topic, "broker-a", number) for number in (0, 1))
    consumer = FakeConsumer(
        "c1", group=group, subscriptions={topic: "*"}, owns={first: ProcessQueueInfo()}
    )
    await consumer.start([parse_address(broker.address)])
    try:
        for number in range(4):
            await _send(client, first, b"%d" % number)
        await _until_seen(admin, topic, 4)
        assert (await client.report(topic, 1, 0, consumer_group=group)).code == 0

        progress = await admin.groups.progress(group)
        details = await admin.groups.describe(group)
        summary = next(
            each
            for each in await admin.groups.list(members=True, times=True)
            if each.group == group
        )
    finally:
        await consumer.stop()

    by_queue = {each.queue: each for each in progress.of_topic(topic)}
    behind = by_queue[first]
    assert (behind.broker_offset, behind.consumer_offset, behind.lag) == (4, 1, 3)
    assert behind.lag_seconds is not None
    assert 0 <= behind.lag_seconds < 60
    assert behind.owner == "c1"
    assert by_queue[second].lag_seconds == 0.0
    assert details.members is not None
    assert details.members.client_ids == ("c1",)
    assert details.findings == ()
    assert summary.lag == 3
    assert summary.members is not None
    assert summary.lag_seconds is not None
    assert summary.lag_seconds < 60


async def test_differing_subscriptions_are_found(admin, broker):
    group = "admin-differing"
    consumers = [
        FakeConsumer(name, group=group, subscriptions={"TBW102": tags})
        for name, tags in (("c1", "a"), ("c2", "b"))
    ]
    for consumer in consumers:
        await consumer.start([parse_address(broker.address)])
    try:
        found = await admin.groups.findings(group)
    finally:
        for consumer in consumers:
            await consumer.stop()

    kinds = [each for each in found if each.kind is FindingKind.DIFFERENT_SUBSCRIPTIONS]
    (finding,) = [each for each in kinds if each.topic == "TBW102"]
    assert sorted(each.clients for each in finding.variants) == [("c1",), ("c2",)]


async def test_the_progress_of_an_offline_group_is_moved(admin, client):
    topic, group = "AdminReset", "admin-reset"
    await admin.topics.create(topic, queues=2)
    await admin.groups.create(group)
    first, second = (Queue(topic, "broker-a", number) for number in (0, 1))
    for number in range(6):
        await _send(client, first, b"%d" % number)
    await _until_seen(admin, topic, 6)
    messages = [each async for each in admin.messages.browse(topic)]
    assert (await client.report(topic, 5, 0, consumer_group=group)).code == 0

    plan = await admin.progress.plan_reset(group, topic, ResetTo.by_queue({first: 2}))
    assert (plan.replayed, plan.skipped) == (3, 0)
    await admin.progress.apply(plan)

    async def place():
        progress = await admin.groups.progress(group, topic=topic)
        return {each.queue: each.consumer_offset for each in progress.queues}

    assert await place() == {first: 2, second: 0}
    await admin.progress.reset(group, topic, ResetTo.end())
    assert (await place())[first] == 6
    at = messages[3].stored.store_ms / 1000
    report = await admin.progress.reset(group, topic, ResetTo.time(at))
    first_at = next(i for i, m in enumerate(messages) if m.stored.store_ms / 1000 >= at)
    assert (await place())[first] == first_at
    assert report.is_effective
    (clone,) = await admin.progress.plan_clone(group, "admin-reset-clone", topic)
    assert (await admin.progress.apply(clone)).is_effective


async def test_an_online_group_is_moved_or_refused_with_the_remedy(admin, client, broker, release):
    topic, group = "AdminOnline", "admin-online"
    await admin.topics.create(topic, queues=1)
    queue = Queue(topic, "broker-a", 0)
    consumer = FakeConsumer("c1", group=group, subscriptions={topic: "*"})
    await consumer.start([parse_address(broker.address)])
    try:
        for number in range(3):
            await _send(client, queue, b"%d" % number)
        await _until_seen(admin, topic, 3)
        await client.report(topic, 3, 0, consumer_group=group)
        to = ResetTo.by_queue({queue: 1})
        if release.is_old_line:
            with pytest.raises(NotSupported, match="stop its consumers first"):
                await admin.progress.reset(group, topic, to)
            pushed = await admin.progress.reset(group, topic, ResetTo.begin())
            assert [each.read_back for each in pushed.outcomes] == [0]
        else:
            report = await admin.progress.reset(group, topic, to)
            assert [each.read_back for each in report.outcomes] == [1]
    finally:
        await consumer.stop()


async def test_messages_are_found(admin, client):
    topic = "AdminMessages"
    await admin.topics.create(topic, queues=2)
    unique_id = "7F0000010001000000000000000000CC"
    queue = Queue(topic, "broker-a", 1)
    placed = await _send(client, queue, b"wanted", UNIQ_KEY=unique_id, KEYS="k1 k2", TAGS="A")
    for number in range(100):
        await _send(client, Queue(topic, "broker-a", number % 2), b"%d" % number, KEYS="many")
    await _until_seen(admin, topic, 101)

    assert (await admin.messages.get(placed)).body == b"wanted"

    async def is_indexed():
        return len([m async for m in admin.messages.by_key(topic, "many")]) == 100

    await _until(is_indexed)
    (found,) = await admin.messages.copies(topic, unique_id)
    assert (found.queue, found.queue_offset) == (queue, 0)
    assert [m.body async for m in admin.messages.by_key(topic, "k2")] == [b"wanted"]
    many = [m async for m in admin.messages.by_key(topic, "many")]
    assert len(many) == len({m.offset_id for m in many}) == 100
    everything = [m async for m in admin.messages.browse(topic)]
    assert len(everything) == 101
    backwards = [m async for m in admin.messages.browse(topic, newest_first=True)]
    assert {m.offset_id for m in backwards} == {m.offset_id for m in everything}
    assert [m.body async for m in admin.messages.browse(topic, expression="A")] == [b"wanted"]
    at = everything[50].stored.store_ms / 1000
    since = [m async for m in admin.messages.browse(topic, since=at)]
    assert {m.offset_id for m in since} == {
        m.offset_id for m in everything if m.stored.store_ms / 1000 >= at
    }


async def test_dead_letters_are_found_and_sent_again(admin, client, tmp_path):
    topic, group = "AdminDead", "admin-dead"
    await admin.topics.create(topic, queues=1)
    await admin.groups.create(group)
    queue = Queue(topic, "broker-a", 0)
    for number in range(3):
        placed = await _send(
            client, queue, b"%d" % number, UNIQ_KEY=f"7F00000100010000000000000000DD0{number}"
        )
        await _until_seen(admin, topic, number + 1)
        header = ConsumerSendBackRequest(
            offset=int(placed[-16:], 16), group=group, delay_level=-1, origin_topic=topic
        )
        answer = await client.connection.request(RequestCode.CONSUMER_SEND_MSG_BACK, header)
        assert answer.code == 0, answer.remark
    await _until_seen(admin, f"%DLQ%{group}", 3)

    summary = await admin.dead_letters.summary(group)
    assert (summary.count, summary.by_topic[0].name) == (3, topic)
    (sample,) = await admin.dead_letters.sample(group)
    assert (sample.message.body, sample.reason, sample.topic) == (b"2", "unknown", topic)
    # A group is one of the topic when it has progress there.
    await client.report(topic, 3, 0, consumer_group=group)
    (track,) = await admin.messages.track(sample.message)
    assert (track.group, track.fate) == (group, Fate.DEAD)
    report = await admin.dead_letters.resend(group, DeadLetterFilter(ids=[sample.id]))
    assert report.counts == {ResendResult.SENT: 1}, report.failed

    async def is_known_as_sent():
        # Apache's broker answers a send before the message can be found by its id.
        planned = await admin.dead_letters.resend(group, to="origin", dry_run=True)
        return planned.counts.get(ResendResult.ALREADY_SENT) == 1

    await _until(is_known_as_sent)
    origin = await admin.dead_letters.resend(group, to="origin")
    assert origin.counts == {ResendResult.SENT: 2, ResendResult.ALREADY_SENT: 1}, origin.failed
    assert await admin.dead_letters.export(group, tmp_path / "dead.jsonl") == 3


async def test_clients_are_shown(admin, client, broker, release):
    consumer = FakeConsumer("c1", group="admin-clients", subscriptions={"TBW102": "*"})
    await consumer.start([parse_address(broker.address)])
    await client.heartbeat("p1", producers=("admin-makers",))
    try:
        members = await admin.consumers.members("admin-clients")
        info = await admin.consumers.running_info("admin-clients", "c1", stack=True)
        await admin.topics.create("AdminClients", queues=1)
        placed = await _send(client, Queue("AdminClients", "broker-a", 0), b"this one")
        await _until_seen(admin, "AdminClients", 1)
        direct = await admin.consumers.consume_directly("admin-clients", "c1", placed)
        makers = await admin.consumers.producers("admin-makers")
        everyone = await admin.consumers.producers()
    finally:
        await consumer.stop()

    assert members.client_ids == ("c1",)
    assert (members.model, members.consume_type) == ("clustering", "push")
    assert info.stack == "main: waiting"
    assert (direct.result, direct.remark) == ("success", "as told")
    assert len(consumer.consumed) == 1
    assert [each.client_id for _, each in makers] == ["p1"]
    assert ("admin-makers", "p1") in [(group, each.client_id) for group, each in everyone]


async def test_texts_and_cleaning(admin):
    await admin.config.put_value("admin", "here", "there")
    assert await admin.config.value("admin", "here") == "there"
    await admin.config.delete_value("admin", "here")
    assert await admin.config.value("admin", "here") is None
    assert await admin.config.clean_expired_queues() == ("broker-a",)
    assert await admin.config.clean_unused_topics() == ("broker-a",)
    assert await admin.config.set_writable("broker-a", False) > 0
    assert await admin.config.set_writable("broker-a", True) > 0
    after = await admin.config.update_broker("broker-a", {"maxMessageSize": "4000000"})
    assert after["maxMessageSize"] == "4000000"
