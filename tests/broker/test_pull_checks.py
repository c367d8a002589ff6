"""What lets a pull pass is remembered, and holds for as long as nothing changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from orbitmq.broker.broker import Parts
from orbitmq.broker.handlers.pull import PullChecks
from orbitmq.broker.settings import PullSettings
from orbitmq.wire.bodies import MessageModel, SubscriptionData, SubscriptionGroupConfig, TopicConfig
from orbitmq.wire.codes import Language, RequestCode, ResponseCode
from orbitmq.wire.command import Command
from tests.support.broker import GROUP, RawClient, bodies_in, until

#: Without a subscription of its own: the group's counts.
BY_HEARTBEAT = 0
ORDERS = SubscriptionData(topic="orders", sub_string="*", sub_version=5)
PAID = SubscriptionData(topic="orders", sub_string="paid", sub_version=6)

Change = Callable[[Parts, RawClient], Awaitable[None]]


async def pull(client: RawClient, **fields: Any) -> Command:
    return await client.pull("orders", **({"sys_flag": BY_HEARTBEAT, "sub_version": 5} | fields))


@pytest.fixture
async def member(broker, open_client):
    """A member of the group, by whose heartbeats the pulls of another connection are judged."""
    broker.parts.topics.ensure(
        TopicConfig(topic_name="orders", read_queue_nums=4, write_queue_nums=4), now=0.0
    )
    member = await open_client(broker)
    await member.heartbeat("c1", ORDERS)
    await member.stored("orders", b"one")
    return member


async def test_long_tag_lists_are_not_kept_a_second_time(broker, client, member, monkeypatch):
    remembered: list[PullChecks] = []
    passed = PullChecks.passed

    def watched(self, *given, **named):
        remembered.append(self)
        return passed(self, *given, **named)

    monkeypatch.setattr(PullChecks, "passed", watched)
    broker.parts.topics.ensure(TopicConfig(topic_name="few"), now=0.0)
    many = SubscriptionData(
        topic="orders", sub_string="||".join(f"t{n}" for n in range(65)), sub_version=7
    )
    few = SubscriptionData(topic="few", sub_string="a || b", sub_version=7)
    await member.heartbeat("c1", many, few)

    await pull(client, sub_version=7)
    await client.pull("few", sys_flag=BY_HEARTBEAT, sub_version=7)

    assert list(remembered[-1]._passed) == [(GROUP, "few")]


async def test_a_pull_like_one_before_is_not_checked_again(client, member, monkeypatch):
    checked: list[int] = []
    check = PullChecks.check

    def watched(self, request, header):
        checked.append(request.code)
        return check(self, request, header)

    monkeypatch.setattr(PullChecks, "check", watched)
    answers = [await pull(client) for _ in range(3)]

    assert [bodies_in(answer) for answer in answers] == [[b"one"]] * 3
    assert checked == [RequestCode.PULL_MESSAGE]


# Whatever it follows from may change.


async def _disable_group(parts: Parts, _: RawClient) -> None:
    parts.groups.update(SubscriptionGroupConfig(group_name=GROUP, consume_enable=False), now=0.0)


async def _forbid_topic(parts: Parts, _: RawClient) -> None:
    parts.groups.forbid(GROUP, "orders", is_forbidden=True, now=0.0)


async def _close_topic(parts: Parts, _: RawClient) -> None:
    parts.topics.update(TopicConfig(topic_name="orders", perm=2), now=0.0)


async def _delete_topic(parts: Parts, _: RawClient) -> None:
    parts.topics.delete("orders", now=0.0)


async def _close_broker(parts: Parts, _: RawClient) -> None:
    parts.change_settings(replace(parts.settings, permission=2))


async def _leave(parts: Parts, member: RawClient) -> None:
    await member.close()
    await until(lambda: not parts.consumers.is_online(GROUP))


async def _subscribe_to_others(_: Parts, member: RawClient) -> None:
    await member.heartbeat("c1", SubscriptionData(topic="others", sub_string="*", sub_version=6))


CHANGES: dict[str, tuple[Change, ResponseCode]] = {
    "group disabled": (_disable_group, ResponseCode.NO_PERMISSION),
    "topic forbidden to the group": (_forbid_topic, ResponseCode.NO_PERMISSION),
    "topic not readable": (_close_topic, ResponseCode.NO_PERMISSION),
    "topic deleted": (_delete_topic, ResponseCode.TOPIC_NOT_EXIST),
    "broker not readable": (_close_broker, ResponseCode.NO_PERMISSION),
    "group gone": (_leave, ResponseCode.SUBSCRIPTION_NOT_EXIST),
    "topic no longer subscribed": (_subscribe_to_others, ResponseCode.SUBSCRIPTION_NOT_EXIST),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_what_passed_is_refused_after_a_change(broker, client, member, name):
    change, code = CHANGES[name]
    before = await pull(client)

    await change(broker.parts, member)
    after = await pull(client)

    assert (before.code, after.code) == (ResponseCode.SUCCESS, code)


async def test_who_begins_to_broadcast_is_refused_where_that_is_not_allowed(broker, client, member):
    config = SubscriptionGroupConfig(group_name=GROUP, consume_broadcast_enable=False)
    broker.parts.groups.update(config, now=0.0)
    before = await pull(client)

    # Nothing else differs in this heartbeat.
    await member.heartbeat("c1", ORDERS, message_model=MessageModel.BROADCASTING)
    after = await pull(client)

    assert (before.code, after.code) == (ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION)


async def test_another_subscription_filters_the_next_pull(client, member):
    await member.stored("orders", b"two", properties={"TAGS": "paid"})
    before = await pull(client)

    await member.heartbeat("c1", PAID)
    after = await pull(client)

    assert bodies_in(before) == [b"one", b"two"]
    assert bodies_in(after) == [b"two"]


async def test_a_queue_or_a_version_that_is_not_there_is_refused_beside_what_passes(client, member):
    passed = await pull(client)

    codes = [
        (await pull(client, queue_id=4)).code,
        (await pull(client, queue_id=-1)).code,
        (await pull(client, sub_version=6)).code,
        (await pull(client, sub_version=4)).code,
    ]

    assert passed.code == ResponseCode.SUCCESS
    assert codes == [
        ResponseCode.INVALID_PARAMETER,
        ResponseCode.INVALID_PARAMETER,
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ResponseCode.SUCCESS,
    ]


async def test_a_pull_with_a_subscription_of_its_own_is_filtered_by_that(client, member):
    await member.stored("orders", b"two", properties={"TAGS": "paid"})
    await pull(client)

    own = await client.pull("orders", subscription="paid")

    assert bodies_in(own) == [b"two"]


async def test_a_pull_of_another_kind_has_checks_of_its_own(start_broker, open_client):
    broker = await start_broker(pull=PullSettings(lite_pull=False))
    client = await open_client(broker)
    await client.stored("orders", b"one")
    await client.heartbeat("c1", ORDERS)

    usual = await pull(client)
    lite = await pull(client, code=RequestCode.LITE_PULL_MESSAGE)

    assert (usual.code, lite.code) == (ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION)


SQL = SubscriptionData(
    topic="orders", sub_string="price > 1", expression_type="SQL92", sub_version=5
)


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
