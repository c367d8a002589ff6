"""Everything besides a message that ends the waiting of held pulls, as it comes over the wire.

Every event here changes what a pull that waits would be told. It is told so at once, and those whom
it does not concern go on waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.broker.settings import PullSettings
from orbitmq.remoting.settings import ServerSettings
from orbitmq.store.settings import RetentionSettings
from orbitmq.testing.cluster import MovableClock
from orbitmq.wire.bodies import MessageModel, SubscriptionData, SubscriptionGroupConfig, TopicConfig
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import (
    CloneGroupOffsetRequest,
    CreateTopicRequest,
    DeleteGroupRequest,
    PullFlag,
    ResetOffsetRequest,
    TopicRequest,
    UpdateGroupForbiddenRequest,
)
from orbitmq.wire.javajson import encode_body
from tests.support.broker import GROUP, SMALL_STORE, RawClient, bodies_in, until
from tests.support.replication import SERVING, following, slave_of, until_copied, until_rounds

#: Far longer than any of these tests waits for an answer.
HOLD = 100.0
DEADLINE = 30.0
OTHERS = "others"


class Waiting(NamedTuple):
    """A pull that may be told something, and one that is none of its business."""

    mine: asyncio.Task[Command]
    other: asyncio.Task[Command]

    async def answer(self) -> Command:
        found = await asyncio.wait_for(self.mine, DEADLINE)
        assert not self.other.done()
        return found


def topic_of(broker: Broker, name: str) -> None:
    broker.parts.topics.ensure(
        TopicConfig(topic_name=name, read_queue_nums=4, write_queue_nums=4), now=0.0
    )


async def wait_for(
    broker: Broker, client: RawClient, *, queue_id: int = 0, other: str = "payments", **fields: Any
) -> Waiting:
    """Have two pulls held: one of `orders`, and one of another topic and group."""
    for name in {"orders", other}:
        topic_of(broker, name)
    mine = asyncio.ensure_future(client.pull("orders", queue_id, hold=HOLD, **fields))
    beside = asyncio.ensure_future(client.pull(other, hold=HOLD, consumer_group=OTHERS))
    await until(lambda: len(broker.parts.held) == 2, DEADLINE)
    return Waiting(mine, beside)


@pytest.fixture
async def admin(broker, open_client):
    return await open_client(broker)


async def ask(client: RawClient, code: RequestCode, header: Any = None, **fields: Any) -> Command:
    answer = await client.connection.request(code, header, timeout=DEADLINE, **fields)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return answer


def changed_topic(**changes: Any) -> CreateTopicRequest:
    given: dict[str, Any] = {
        "topic": "orders",
        "default_topic": "TBW102",
        "read_queue_nums": 4,
        "write_queue_nums": 4,
        "perm": 6,
        "topic_filter_type": "SINGLE_TAG",
    }
    return CreateTopicRequest(**(given | changes))


# Topics.


async def test_deleting_a_topic(broker, client, admin):
    waiting = await wait_for(broker, client)

    await ask(admin, RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest(topic="orders"))

    assert (await waiting.answer()).code == ResponseCode.TOPIC_NOT_EXIST


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"read_queue_nums": 2}, ResponseCode.INVALID_PARAMETER),
        ({"perm": 2}, ResponseCode.NO_PERMISSION),
    ],
    ids=["queues", "permission"],
)
async def test_changing_a_topic(broker, client, admin, changes, code):
    waiting = await wait_for(broker, client, queue_id=3)

    await ask(admin, RequestCode.UPDATE_AND_CREATE_TOPIC, changed_topic(**changes))

    assert (await waiting.answer()).code == code


async def test_a_change_that_concerns_no_reader_wakes_nobody(broker, client, admin):
    waiting = await wait_for(broker, client)

    await ask(admin, RequestCode.UPDATE_AND_CREATE_TOPIC, changed_topic(write_queue_nums=2))
    await client.max_offset("orders")

    assert not waiting.mine.done()
    assert len(broker.parts.held) == 2


# Groups.


async def test_switching_a_group_off(broker, client, admin):
    waiting = await wait_for(broker, client, other="orders")
    off = SubscriptionGroupConfig(group_name=GROUP, consume_enable=False)

    await ask(admin, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=encode_body(off))

    assert (await waiting.answer()).code == ResponseCode.NO_PERMISSION


async def test_forbidding_a_group_to_broadcast(broker, client, admin):
    subscription = SubscriptionData(topic="orders", sub_string="*")
    await client.heartbeat("c", subscription, message_model=MessageModel.BROADCASTING)
    waiting = await wait_for(broker, client, sys_flag=int(PullFlag.SUSPEND))
    off = SubscriptionGroupConfig(group_name=GROUP, consume_broadcast_enable=False)

    await ask(admin, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=encode_body(off))

    assert (await waiting.answer()).code == ResponseCode.NO_PERMISSION


async def test_forbidding_a_group_a_topic(broker, client, admin):
    await client.heartbeat("c", SubscriptionData(topic="orders", sub_string="*"))
    waiting = await wait_for(broker, client, sys_flag=int(PullFlag.SUSPEND))
    header = UpdateGroupForbiddenRequest(group=GROUP, topic="orders", readable=False)

    await ask(admin, RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, header)

    assert (await waiting.answer()).code == ResponseCode.NO_PERMISSION


async def test_deleting_a_group_that_may_not_be_made_by_consuming(start_broker, open_client):
    broker = await start_broker(auto_create_group=False)
    client, admin = await open_client(broker), await open_client(broker)
    for name in (GROUP, OTHERS):
        broker.parts.groups.update(SubscriptionGroupConfig(group_name=name), now=0.0)
    waiting = await wait_for(broker, client)

    await ask(admin, RequestCode.DELETE_SUBSCRIPTIONGROUP, DeleteGroupRequest(group_name=GROUP))

    assert (await waiting.answer()).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


async def test_a_deleted_group_is_not_made_again_by_waking_who_waits(broker, client, admin):
    waiting = await wait_for(broker, client)

    await ask(admin, RequestCode.DELETE_SUBSCRIPTIONGROUP, DeleteGroupRequest(group_name=GROUP))
    await client.max_offset("orders")

    assert not waiting.mine.done()
    assert GROUP not in broker.parts.groups


async def test_a_group_that_wants_something_else(broker, client):
    await client.heartbeat("c", SubscriptionData(topic="orders", sub_string="old", sub_version=1))
    waiting = await wait_for(broker, client, sys_flag=int(PullFlag.SUSPEND), sub_version=1)
    await client.stored("orders", b"unwanted", properties={"TAGS": "none"})

    # Without being woken the pull would go on by the old filter, and pass the message over.
    await client.heartbeat("c", SubscriptionData(topic="orders", sub_string="new", sub_version=2))
    woken = await waiting.answer()
    await client.stored("orders", b"wanted", properties={"TAGS": "new"})
    following_offset = int(woken.ext_fields["nextBeginOffset"])
    found = await client.pull(
        "orders", offset=following_offset, sys_flag=int(PullFlag.SUSPEND), sub_version=2
    )

    # The new filter has judged the message as well.
    assert (woken.code, following_offset) == (ResponseCode.PULL_RETRY_IMMEDIATELY, 1)
    assert bodies_in(found) == [b"wanted"]


async def test_what_came_while_a_group_wanted_something_else_is_judged_again(broker, client):
    await client.heartbeat("c", SubscriptionData(topic="orders", sub_string="old", sub_version=1))
    waiting = await wait_for(broker, client, sys_flag=int(PullFlag.SUSPEND), sub_version=1)
    await client.stored("orders", b"unwanted then", properties={"TAGS": "new"})

    await client.heartbeat("c", SubscriptionData(topic="orders", sub_string="new", sub_version=2))
    woken = await waiting.answer()

    assert bodies_in(woken) == [b"unwanted then"]


async def test_a_member_that_comes_and_wants_the_same_wakes_nobody(broker, client, admin):
    subscription = SubscriptionData(topic="orders", sub_string="*")
    await client.heartbeat("c", subscription)
    waiting = await wait_for(broker, client, sys_flag=int(PullFlag.SUSPEND))

    await admin.heartbeat("d", subscription)
    await client.max_offset("orders")

    assert not waiting.mine.done()


@pytest.mark.parametrize("kind", ["TAG", "SQL92"])
async def test_a_member_that_starts_later_and_wants_the_same_wakes_nobody(
    broker, client, admin, kind
):
    wish: dict[str, Any] = {"topic": "orders", "expression_type": kind}
    wish["sub_string"] = "paid" if kind == "TAG" else "TAGS = 'paid'"
    await client.heartbeat("c", SubscriptionData(**wish, sub_version=1))
    waiting = await wait_for(broker, client, sys_flag=int(PullFlag.SUSPEND), sub_version=1)

    await admin.heartbeat("d", SubscriptionData(**wish, sub_version=2))
    await client.heartbeat("c", SubscriptionData(**wish, sub_version=3))
    # The later version is known all the same.
    of_later = await client.pull("orders", sys_flag=0, sub_version=3)
    was_woken = waiting.mine.done()
    await admin.stored("orders", b"wanted", properties={"TAGS": "paid"})

    assert of_later.code == ResponseCode.PULL_NOT_FOUND, of_later.remark
    assert not was_woken
    assert bodies_in(await waiting.answer()) == [b"wanted"]


# Progress.


async def test_a_reset(broker, client, admin):
    for _ in range(3):
        await client.stored("orders")
    waiting = await wait_for(broker, client, queue_id=1)
    mine = asyncio.ensure_future(client.pull("orders", offset=3, hold=HOLD))
    await until(lambda: len(broker.parts.held) == 3, DEADLINE)

    header = ResetOffsetRequest(
        topic="orders", group=GROUP, queue_id=0, offset=1, timestamp=-1, is_force=True
    )
    await ask(admin, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
    answer = await asyncio.wait_for(mine, DEADLINE)

    assert (answer.code, answer.remark) == (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET")
    assert answer.ext_fields["nextBeginOffset"] == "1"
    assert not waiting.mine.done()
    assert not waiting.other.done()


async def test_the_progress_of_another_group(broker, client, admin):
    for _ in range(3):
        await client.stored("orders")
    await client.heartbeat("c", SubscriptionData(topic="orders", sub_string="*"))
    broker.parts.groups.find("source", now=0.0)
    assert (await client.report("orders", 2, consumer_group="source")).code == 0
    mine = asyncio.ensure_future(client.pull("orders", offset=3, hold=HOLD))
    await until(lambda: len(broker.parts.held) == 1, DEADLINE)

    header = CloneGroupOffsetRequest(
        src_group="source", dest_group=GROUP, topic="orders", offline=True
    )
    await ask(admin, RequestCode.CLONE_GROUP_OFFSET, header)
    answer = await asyncio.wait_for(mine, DEADLINE)

    assert answer.code == ResponseCode.PULL_OFFSET_MOVED
    assert answer.ext_fields["nextBeginOffset"] == "2"


# The broker.


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"brokerPermission=2", ResponseCode.NO_PERMISSION),
        (b"brokerPermission=4", ResponseCode.PULL_NOT_FOUND),
        (b"litePullMessageEnable=false", ResponseCode.NO_PERMISSION),
        (b"rejectPullConsumerEnable=true", ResponseCode.SUBSCRIPTION_NOT_EXIST),
        (b"longPollingEnable=false", ResponseCode.PULL_NOT_FOUND),
    ],
)
async def test_another_setting_of_the_broker(broker, client, admin, text, code):
    topic_of(broker, "orders")
    waiting = asyncio.ensure_future(
        client.pull("orders", hold=HOLD, code=RequestCode.LITE_PULL_MESSAGE)
    )
    await until(lambda: len(broker.parts.held) == 1, DEADLINE)

    await ask(admin, RequestCode.UPDATE_BROKER_CONFIG, body=text)

    assert (await asyncio.wait_for(waiting, DEADLINE)).code == code


async def test_a_setting_that_concerns_no_reader_wakes_nobody(broker, client, admin):
    waiting = await wait_for(broker, client)

    await ask(admin, RequestCode.UPDATE_BROKER_CONFIG, body=b"maxMessageSize=1000000")
    await client.max_offset("orders")

    assert not waiting.mine.done()


async def test_a_stop(start_broker, open_client):
    broker = await start_broker()
    client = await open_client(broker)
    waiting = await wait_for(broker, client)

    await asyncio.wait_for(broker.stop(), DEADLINE)

    for each in waiting:
        assert (await asyncio.wait_for(each, DEADLINE)).code == ResponseCode.PULL_NOT_FOUND


async def test_cleaning_up_leaves_who_waits_at_the_end_where_he_is(start_broker, open_client):
    clock = MovableClock()
    retention = RetentionSettings(keep=1.0, expired_ratio=0.99, forced_ratio=0.99, full_ratio=0.99)
    store = replace(SMALL_STORE, file_size=64 * 1024, retention=retention)
    broker = await start_broker(store=store, parts={"clock": clock})
    client, admin = await open_client(broker), await open_client(broker)
    for _ in range(8):
        await client.stored("orders", b"x" * 20_000)
    waiting = asyncio.ensure_future(client.pull("orders", offset=8, hold=HOLD))
    await until(lambda: len(broker.parts.held) == 1, DEADLINE)

    clock.advance(100)
    await ask(admin, RequestCode.DELETE_EXPIRED_COMMITLOG)
    await ask(admin, RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE)
    assert broker.parts.store.min_offset("orders", 0) > 0
    assert not waiting.done()
    await admin.stored("orders", b"next")

    answer = await asyncio.wait_for(waiting, DEADLINE)
    assert bodies_in(answer) == [b"next"]
    assert answer.ext_fields["nextBeginOffset"] == "9"


# A slave.


Act = Callable[[Broker], None]


def delete_topic(master: Broker) -> None:
    master.parts.topics.delete("orders", now=1.0)


def switch_group_off(master: Broker) -> None:
    off = SubscriptionGroupConfig(group_name=GROUP, consume_enable=False)
    master.parts.groups.update(off, now=1.0)


@pytest.mark.parametrize(
    ("act", "code"),
    [(delete_topic, ResponseCode.TOPIC_NOT_EXIST), (switch_group_off, ResponseCode.NO_PERMISSION)],
)
async def test_what_a_slave_hears_of_its_master(start_broker, open_client, act, code):
    master = await start_broker(root="master", replication=SERVING)
    for name in ("orders", "payments"):
        topic_of(master, name)
    for group in (GROUP, OTHERS):
        master.parts.groups.find(group, now=0.0)
    slave = await start_broker(
        root="slave",
        pull=PullSettings(slave_read_enable=True),
        **slave_of(master, state_interval=0.05),
    )
    await until_rounds(slave)
    waiting = await wait_for(slave, await open_client(slave))

    act(master)

    assert (await waiting.answer()).code == code


async def test_a_master_that_is_back(start_broker, open_client):
    master = await start_broker(root="master", replication=SERVING)
    await (await open_client(master)).stored("orders")
    slave = await start_broker(root="slave", **slave_of(master, state_interval=0.05))
    await until_copied(master, slave)
    await until_rounds(slave)
    address, ha_address = master.address, master.ha_address
    assert ha_address is not None
    await master.stop()
    await until(lambda: following(slave).is_alone, DEADLINE)
    client = await open_client(slave)
    waiting = asyncio.ensure_future(client.pull("orders", offset=1, hold=HOLD))
    await until(lambda: len(slave.parts.held) == 1, DEADLINE)

    await start_broker(
        root="master",
        server=ServerSettings(port=address.port),
        replication=replace(SERVING, port=ha_address.port),
    )

    # Not served here any more: the master is to be asked.
    assert (await asyncio.wait_for(waiting, 30)).code == ResponseCode.SYSTEM_BUSY
