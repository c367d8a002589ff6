"""Connected clients, and what single consumers hold and do."""

from __future__ import annotations

import pytest

from orbitmq.client.errors import ConsumerNotOnline, MessageNotFound
from orbitmq.client.routes import Queue
from orbitmq.errors import NotSupported
from orbitmq.message.stored import decode_message
from orbitmq.wire.bodies import ConsumeResult, ProcessQueueInfo
from orbitmq.wire.codes import RequestCode
from tests.support.client_admin import GROUP, forget_code

A0 = Queue("orders", "broker-a", 0)
B1 = Queue("orders", "broker-b", 1)


async def test_members_are_shown_once_however_many_brokers_they_are_connected_to(world):
    await world.consumer("c1", subscriptions={"orders": "paid || refunded"})
    await world.consumer("c2", subscriptions={"orders": "paid || refunded"})

    members = await world.admin.consumers.members(GROUP)

    assert members.client_ids == ("c1", "c2")
    assert [(each.language, each.version) for each in members.clients] == [("python", "5.3.3")] * 2
    assert all(each.address.startswith("127.0.0.1:") for each in members.clients)
    assert members.consume_from == "last_offset"
    (subscription,) = members.subscriptions
    assert (subscription.topic, subscription.expression) == ("orders", "paid || refunded")


@pytest.mark.feature("L5")
async def test_a_consumer_tells_what_it_holds_and_does(world):
    held = ProcessQueueInfo(
        cached_msg_count=7,
        cached_msg_size_in_mib=2,
        cached_msg_min_offset=3,
        cached_msg_max_offset=9,
        commit_offset=3,
        locked=True,
        last_pull_timestamp=1_700_000_000_500,
    )
    await world.consumer("c1", owns={B1: held, A0: ProcessQueueInfo()})

    info = await world.admin.consumers.running_info(GROUP, "c1", stack=True)

    assert [each.queue for each in info.queues] == [A0, B1]
    owned = info.queues[1]
    assert (owned.cached_messages, owned.cached_mib, owned.commit_offset) == (7, 2, 3)
    assert (owned.cached_min_offset, owned.cached_max_offset) == (3, 9)
    assert (owned.is_locked, owned.is_dropped) == (True, False)
    assert (owned.last_pull_at, owned.last_consume_at) == (1_700_000_000.5, None)
    assert info.cached_messages == 7
    assert (info.topics["orders"].ok_rate, info.topics["orders"].pull_time) == (2.5, 0.02)
    # Clients other than ours have means only: what they do not tell is not 0.
    assert info.topics["orders"].consume_times is None
    assert [each.topic for each in info.subscriptions] == ["orders"]
    assert not info.is_orderly
    assert info.stack == "main: waiting"
    connection = await world.admin.consumers.members(GROUP)
    assert connection.client_ids == ("c1",)


async def test_a_broker_that_is_gone_does_not_hide_a_consumer_of_another(world):
    await world.register_ghost("broker-0")
    await world.consumer("c1")

    assert (await world.admin.consumers.running_info(GROUP, "c1")).client_id == "c1"


async def test_a_consumer_consumes_a_message_on_demand(world):
    good = await world.consumer("c1")
    await world.consumer("c2", result=ConsumeResult.CR_THROW_EXCEPTION)
    sent = await world.send(B1, b"this one")
    consumers = world.admin.consumers

    done = await consumers.consume_directly(GROUP, "c1", sent.msg_id)
    failed = await consumers.consume_directly(GROUP, "c2", sent.msg_id)

    assert (done.result, done.is_success, done.seconds) == ("success", True, 1.5)
    assert done.remark == "as told"
    assert (failed.result, failed.is_success) == ("throw_exception", False)
    assert [decode_message(record).body for record in good.consumed] == [b"this one"]
    with pytest.raises(MessageNotFound):
        await consumers.consume_directly(GROUP, "c1", sent.msg_id[:16] + f"{10**9:016X}")
    with pytest.raises(ConsumerNotOnline, match="c9"):
        await consumers.consume_directly(GROUP, "c9", sent.msg_id)


async def test_producers_are_shown_of_all_groups_or_one(world):
    client = await world.client("broker-a")
    await client.heartbeat("p1", producers=("makers", "others"))

    everyone = await world.admin.consumers.producers()
    makers = await world.admin.consumers.producers("makers")

    assert [(group, each.client_id) for group, each in everyone] == [
        ("makers", "p1"),
        ("others", "p1"),
    ]
    assert [(group, each.client_id) for group, each in makers] == [("makers", "p1")]
    assert len(await world.admin.consumers.producers("nobody")) == 0


async def test_a_broker_that_cannot_list_all_producers_says_what_to_do(world, monkeypatch):
    for broker in world.cluster.brokers:
        forget_code(monkeypatch, broker, RequestCode.GET_ALL_PRODUCER_INFO)

    with pytest.raises(NotSupported, match="name a producer group"):
        await world.admin.consumers.producers()
