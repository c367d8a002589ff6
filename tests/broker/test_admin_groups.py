"""Administration of consumer groups."""

from __future__ import annotations

import asyncio

import pytest

from orbitmq.wire.bodies import (
    CreateGroupList,
    GroupForbidden,
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
)
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import (
    DeleteGroupRequest,
    GetAllGroupConfigRequest,
    GroupRequest,
    UpdateGroupForbiddenRequest,
)
from orbitmq.wire.javajson import encode_body
from tests.support.admin import ask, subscription, told
from tests.support.broker import GROUP, RawClient, until


async def update(client: RawClient, config: SubscriptionGroupConfig) -> Command:
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    return await ask(client, code, body=encode_body(config))


async def test_a_group_is_created_changed_and_shown(client):
    first = SubscriptionGroupConfig(group_name="audit", retry_max_times=3)
    second = SubscriptionGroupConfig(group_name="audit", consume_enable=False)

    answers = [await update(client, first), await update(client, second)]

    config = await told(
        client,
        SubscriptionGroupConfig,
        RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG,
        GroupRequest(group="audit"),
    )
    assert [answer.code for answer in answers] == [ResponseCode.SUCCESS] * 2
    assert config == second


@pytest.mark.parametrize("group", ["", "no spaces", "x" * 121])
async def test_a_name_that_no_group_may_have_is_refused(broker, client, group):
    single = await update(client, SubscriptionGroupConfig(group_name=group))
    configs = tuple(SubscriptionGroupConfig(group_name=name) for name in ("fine", group))
    many = await ask(
        client,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        body=encode_body(CreateGroupList(group_config_list=configs)),
    )

    assert single.code == many.code == ResponseCode.INVALID_PARAMETER
    assert "fine" not in broker.parts.groups


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ({"retry_queue_nums": -1}, "retryQueueNums must be from 0 to 16384, got -1"),
        ({"retry_queue_nums": 16_385}, "retryQueueNums must be from 0 to 16384, got 16385"),
        ({"retry_queue_nums": 2**31 - 1}, "retryQueueNums must be"),
        ({"retry_max_times": -2}, "retryMaxTimes must be from -1 to"),
    ],
)
async def test_numbers_that_no_group_may_have_are_refused(broker, client, numbers, named):
    bad = SubscriptionGroupConfig(group_name="audit", **numbers)  # whole numbers
    fine = SubscriptionGroupConfig(group_name="fine")

    single = await update(client, bad)
    many = await ask(
        client,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        body=encode_body(CreateGroupList(group_config_list=(fine, bad))),
    )

    for answer in (single, many):
        assert answer.code == ResponseCode.INVALID_PARAMETER
        assert named in (answer.remark or "")
    assert "audit" not in broker.parts.groups
    assert "fine" not in broker.parts.groups


@pytest.mark.parametrize(
    "numbers",
    [
        {"retry_queue_nums": 0},
        {"retry_queue_nums": 16_384},
        {"retry_max_times": -1},
        {"retry_max_times": 0},
        {"retry_max_times": 2**31 - 1},
    ],
)
async def test_unusual_numbers_that_mean_something_are_taken(broker, client, numbers):
    config = SubscriptionGroupConfig(group_name="audit", **numbers)  # whole numbers

    answer = await update(client, config)

    assert answer.code == ResponseCode.SUCCESS
    assert broker.parts.groups.get("audit") == config


async def test_a_list_of_groups_is_created(broker, client):
    configs = tuple(SubscriptionGroupConfig(group_name=name) for name in ("one", "two"))

    answer = await ask(
        client,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        body=encode_body(CreateGroupList(group_config_list=configs)),
    )

    assert answer.code == ResponseCode.SUCCESS
    assert "one" in broker.parts.groups
    assert "two" in broker.parts.groups


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


async def test_pages_together_are_all_groups(broker, client):
    for number in range(7):
        broker.parts.groups.find(f"group-{number}", now=0)
    seen: dict[str, SubscriptionGroupConfig] = {}
    version = ""
    while len(seen) < len(broker.parts.groups):
        header = GetAllGroupConfigRequest(
            group_seq=len(seen), data_version=version, max_group_num=4
        )
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        table = await told(client, SubscriptionGroupTable, code, header)
        seen |= table.subscription_group_table
        assert table.data_version is not None
        version = encode_body(table.data_version).decode()

    answer = await ask(client, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    assert answer.ext_fields["totalGroupNum"] == str(len(seen))
    assert seen == {config.group_name: config for config in broker.parts.groups}


async def test_a_group_that_is_forbidden_a_topic_cannot_pull_it_until_it_may(broker, client):
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

    waiting = asyncio.create_task(
        client.pull("orders", offset=1, sys_flag=2, suspend_timeout_millis=60_000, sub_version=1)
    )
    await until(lambda: len(broker.parts.held) == 1)
    await forbid(False)
    async with asyncio.timeout(30):
        woken = await waiting

    assert woken.code == ResponseCode.NO_PERMISSION
    assert forbidden == only_asked == GroupForbidden(group=GROUP, topic="orders", readable=False)
    assert allowed.readable
    assert refused.code == ResponseCode.NO_PERMISSION
    assert served.code == ResponseCode.SUCCESS


async def test_a_long_list_of_groups_is_the_same_as_a_short_one(broker, client):
    for number in range(1000):
        broker.parts.groups.find(f"group-{number}", now=0)

    code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
    table = await told(client, SubscriptionGroupTable, code)

    assert table.subscription_group_table == {
        config.group_name: config for config in broker.parts.groups
    }
