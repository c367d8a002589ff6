"""What is deleted on a master is deleted on its slaves, and does not come back with one of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import DeleteGroupRequest, TopicRequest
from tests.support.broker import GROUP, RawClient, bodies_in, until
from tests.support.replication import SERVING, following, slave_of, until_copied, until_rounds

StartBroker = Callable[..., Awaitable[Broker]]
OpenClient = Callable[..., Awaitable[RawClient]]

#: Slaves that come back after their log was copied in part get all of it.
WHOLE = replace(SERVING, whole_log=True, heartbeat=0.1)


@pytest.fixture
async def master(start_broker):
    return await start_broker(root="master", replication=WHOLE)


async def start_slave(start_broker: StartBroker, master: Broker) -> Broker:
    return await start_broker(root="slave", **slave_of(master, state_interval=0.1))


async def start_promoted(start_broker: StartBroker, master: Broker, slave: Broker) -> Broker:
    """The slave, started as a master when the master is gone."""
    await master.stop()
    await slave.stop()
    return await start_broker(root="slave")


async def delete_topic(client: RawClient, topic: str) -> None:
    answer = await client.connection.request(
        RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest(topic=topic)
    )
    assert answer.code == ResponseCode.SUCCESS


def queues(broker: Broker, topic: str) -> list[int]:
    return sorted(each.queue_id for each in broker.parts.store.queues() if each.topic == topic)


async def test_a_deleted_topic_does_not_come_back_when_a_slave_becomes_master(
    start_broker, open_client, master
):
    slave = await start_slave(start_broker, master)
    client = await open_client(master)
    for _ in range(3):
        await client.stored("secret", b"personal data")
    await client.stored("secret", b"delayed", properties={"DELAY": "1"})
    await client.stored("kept", b"mine")
    await until_copied(master, slave)
    await until(lambda: "secret" in slave.parts.topics and queues(slave, "secret"))

    await delete_topic(client, "secret")
    await until(lambda: not queues(slave, "secret"), 20)
    promoted = await start_promoted(start_broker, master, slave)
    client = await open_client(promoted)

    assert "secret" not in promoted.parts.topics
    assert (await client.pull("secret")).code == ResponseCode.TOPIC_NOT_EXIST
    assert bodies_in(await client.pull("kept")) == [b"mine"]
    # The delayed message of the deleted topic is dropped when its time has come.
    await until(lambda: promoted.parts.destinations.dropped == 1, 20)
    assert "secret" not in promoted.parts.topics


async def test_a_slave_that_is_behind_gets_no_queues_of_a_topic_that_is_deleted_meanwhile(
    start_broker, open_client, master
):
    client = await open_client(master)
    for number in range(5):
        await client.stored("gone", b"%d" % number)
    await delete_topic(client, "gone")
    await client.stored("kept", b"mine")

    slave = await start_slave(start_broker, master)
    await until_copied(master, slave)
    await until(lambda: following(slave).is_in_step, 20)
    await until(lambda: not queues(slave, "gone"), 20)
    promoted = await start_promoted(start_broker, master, slave)

    assert "gone" not in promoted.parts.topics
    assert queues(promoted, "kept") == [0]


async def test_a_topic_that_was_made_again_is_consumed_from_its_beginning_on_a_promoted_slave(
    start_broker, open_client, master
):
    slave = await start_slave(start_broker, master)
    client = await open_client(master)
    for number in range(5):
        await client.stored("orders", b"old %d" % number)
    await client.pull("orders")
    await client.report("orders", 5)
    await until(lambda: slave.parts.progress.stored("orders", GROUP, 0) == 5, 20)

    await delete_topic(client, "orders")
    new = [b"new %d" % number for number in range(8)]
    for body in new:
        await client.stored("orders", body)
    await until_copied(master, slave)
    await until_rounds(slave, 2)
    promoted = await start_promoted(start_broker, master, slave)
    client = await open_client(promoted)
    first = int((await client.query("orders")).ext_fields["offset"])

    assert bodies_in(await client.pull("orders", 0, first)) == new


async def test_a_topic_that_was_made_again_stays_on_the_slave(start_broker, open_client, master):
    slave = await start_slave(start_broker, master)
    client = await open_client(master)
    for number in range(10):
        await client.stored("orders", b"%d" % number)
        await until_copied(master, slave)
        await until(lambda: bool(queues(slave, "orders")), 20)
        await delete_topic(client, "orders")
        await until(lambda: not queues(slave, "orders"), 20)
    await client.stored("orders", b"last")
    await until_copied(master, slave)
    await until_rounds(slave, 3)

    promoted = await start_promoted(start_broker, master, slave)
    client = await open_client(promoted)

    assert bodies_in(await client.pull("orders")) == [b"last"]


async def test_a_topic_that_was_made_again_while_the_slave_was_away_has_no_former_life_there(
    start_broker, open_client, master
):
    slave = await start_slave(start_broker, master)
    client = await open_client(master)
    for queue_id in range(4):
        await client.stored("orders", b"old", queue_id=queue_id)
    await client.stored("orders", b"delayed", properties={"DELAY": "1"})
    await until_copied(master, slave)
    await slave.stop()

    await delete_topic(client, "orders")
    await client.stored("orders", b"new", queue_id=2)
    slave = await start_slave(start_broker, master)
    await until_copied(master, slave)
    await until(lambda: queues(slave, "orders") == [2], 20)
    promoted = await start_promoted(start_broker, master, slave)
    client = await open_client(promoted)

    assert bodies_in(await client.pull("orders", 2)) == [b"new"]
    assert await client.max_offset("orders", 0) == 0
    await until(lambda: promoted.parts.destinations.dropped == 1, 20)


async def test_a_master_whose_queues_look_shorter_than_its_log_deletes_nothing_on_its_slave(
    start_broker, open_client, master, monkeypatch
):
    # As Apache's do while its disk is flushed; and it does not say what it has deleted.
    monkeypatch.setattr(master.parts.store, "deletions", dict)
    slave = await start_slave(start_broker, master)
    client = await open_client(master)
    for number in range(8):
        await client.stored("orders", b"%d" % number, queue_id=number % 4)
    await until_copied(master, slave)
    ends = master.parts.store.max_offset
    monkeypatch.setattr(master.parts.store, "max_offset", lambda *queue: max(0, ends(*queue) - 1))

    await client.stored("another", b"x")  # a change of the table of topics
    await until_rounds(slave, 3)

    assert queues(slave, "orders") == [0, 1, 2, 3]
    assert [slave.parts.store.max_offset("orders", number) for number in range(4)] == [2] * 4
    assert slave.parts.store.deleted_below("orders") == 0


async def test_progress_of_a_group_that_was_deleted_is_deleted_on_the_slave(
    start_broker, open_client, master
):
    slave = await start_slave(start_broker, master)
    client = await open_client(master)
    await client.stored("orders")
    await client.pull("orders")
    await client.report("orders", 1)
    await until(lambda: slave.parts.progress.stored("orders", GROUP, 0) == 1, 20)

    await client.connection.request(
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        DeleteGroupRequest(group_name=GROUP, clean_offset=True),
    )

    await until(lambda: slave.parts.progress.stored("orders", GROUP, 0) is None, 20)


async def test_a_master_that_comes_back_with_an_empty_disk_deletes_nothing_on_its_slave(
    start_broker, open_client, master
):
    slave = await start_slave(start_broker, master)
    client = await open_client(master)
    for number in range(5):
        await client.stored("orders", b"%d" % number)
    await until_copied(master, slave)
    await slave.stop()
    await master.stop()

    empty = await start_broker(root="empty", replication=WHOLE)
    client = await open_client(empty)
    # Its log is longer than that of the slave, and another one.
    for number in range(20):
        await client.stored("other", b"%d" % number * 50)
    slave = await start_slave(start_broker, empty)
    await until_rounds(slave, 4, 20)

    assert queues(slave, "orders") == [0]
    promoted = await start_promoted(start_broker, empty, slave)
    client = await open_client(promoted)
    assert bodies_in(await client.pull("orders")) == [b"%d" % number for number in range(5)]
