"""A slave follows its master, and serves reads when it is suggested or alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from orbitmq.broker.broker import Broker
from orbitmq.broker.settings import PullSettings, RegistrationSettings, ReplicationSettings
from orbitmq.wire.bodies import HARuntimeInfo
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.headers import EndTransactionRequest, TopicRequest
from orbitmq.wire.javajson import decode_body
from tests.support.broker import GROUP, SMALL_STORE, RawClient, bodies_in, until
from tests.support.replication import (
    QUICK,
    SERVING,
    consume,
    log_bytes,
    serving,
    slave_of,
    until_copied,
    until_rounds,
)

StartBroker = Callable[..., Awaitable[Broker]]
READABLE = PullSettings(slave_read_enable=True)


@pytest.fixture
async def master(start_broker):
    return await start_broker(root="master", replication=SERVING, pull=READABLE)


async def send_many(client: RawClient, count: int, first: int = 0, size: int = 20) -> None:
    """To four queues in turn, many at a time."""
    for number in range(first, first + count, 50):
        await asyncio.gather(
            *(
                client.stored("orders", b"%d " % each + b"x" * size, queue_id=each % 4)
                for each in range(number, min(number + 50, first + count))
            )
        )


async def numbers(client: RawClient, queue_id: int, offset: int = 0) -> list[int]:
    found = await consume(client, "orders", queue_id, offset)
    return [int(body.split()[0]) for body in found]


# ---- the log


@pytest.mark.feature("I7")
async def test_a_slave_has_the_same_log_as_its_master_while_producers_send(
    start_broker, open_client, master, tmp_path
):
    client = await open_client(master)
    await send_many(client, 500)
    slave = await start_broker(root="slave", pull=READABLE, **slave_of(master))
    reader = await open_client(slave)

    await asyncio.gather(send_many(client, 3000, first=500, size=3000), until_copied(master, slave))
    await until_copied(master, slave)
    await until(lambda: "orders" in slave.parts.topics)

    for queue_id in range(4):
        assert await numbers(reader, queue_id) == list(range(queue_id, 3500, 4))
    end = master.parts.store.mirroring.end
    assert end > SMALL_STORE.file_size
    await master.stop()
    await slave.stop()
    mine, theirs = log_bytes(tmp_path / "master"), log_bytes(tmp_path / "slave")
    assert b"".join(mine.values())[:end] == b"".join(theirs.values())[:end]
    assert len(theirs) == 2


async def test_an_empty_slave_gets_the_newest_file_and_everything_if_the_master_says_so(
    start_broker, open_client, master
):
    await send_many(await open_client(master), 60, size=400_000)
    assert master.parts.store.mirroring.last_file > 0
    usual = await start_broker(root="usual", **slave_of(master))
    await until_copied(master, usual)
    generous = replace(SERVING, whole_log=True)
    settings = slave_of(master)
    await master.stop()

    again = await start_broker(root="master", replication=generous)
    settings = slave_of(again)
    whole = await start_broker(root="whole", **settings)
    await until_copied(again, whole)

    assert usual.parts.store.mirroring.start == again.parts.store.mirroring.last_file
    assert whole.parts.store.mirroring.start == 0
    assert whole.parts.store.max_offset("orders", 3) == 15
    assert usual.parts.store.max_offset("orders", 3) == 15
    assert usual.parts.store.min_offset("orders", 3) > 0


# ---- what else is copied


@pytest.mark.feature("I7")
async def test_topics_groups_progress_and_delay_progress_are_copied(
    start_broker, open_client, master, tmp_path
):
    client = await open_client(master)
    await client.stored("orders", b"hello")
    await client.stored("orders", b"later", properties={"DELAY": "1"})
    await client.pull("orders")
    await client.report("orders", 1)
    await until(lambda: master.parts.delays.offsets().offset_table[1] == 1)

    slave = await start_broker(root="slave", **slave_of(master, state_interval=0.05))
    await until_copied(master, slave)
    await until_rounds(slave, 2)
    await client.report("orders", 2)
    await until(lambda: slave.parts.progress.stored("orders", "billing", 0) == 2)

    assert slave.parts.topics.get("orders") == master.parts.topics.get("orders")
    assert slave.parts.topics.data_version == master.parts.topics.data_version
    assert slave.parts.groups.get("billing") == master.parts.groups.get("billing")
    await until(lambda: slave.parts.delays.offsets().offset_table[1] == 1)
    await slave.stop()
    for name in ("topics", "subscriptionGroup", "consumerOffset", "delayOffset"):
        assert (tmp_path / "slave" / "config" / f"{name}.json").exists()


async def test_delay_progress_is_not_ahead_of_the_log(start_broker, open_client, master):
    client = await open_client(master)
    await client.stored("orders", b"later", properties={"DELAY": "1"})
    await until(lambda: master.parts.delays.offsets().offset_table[1] == 1)
    deaf = await start_broker(root="deaf", replication=SERVING)
    settings = slave_of(master, master_ha=str(serving(deaf).address))

    slave = await start_broker(root="slave", **settings)
    await until_rounds(slave)

    assert slave.parts.delays.offsets().offset_table[1] == 0


@pytest.mark.parametrize(
    ("soon", "later", "delivered"),
    [
        ({"DELAY": "1"}, {"DELAY": "2"}, lambda parts: parts.delays.offsets().offset_table[1]),
        (
            {"TIMER_DELAY_MS": "20"},
            {"TIMER_DELAY_MS": "1500"},
            lambda parts: parts.timers.counts.given["orders"],
        ),
    ],
    ids=["levels", "timers"],
)
async def test_a_slave_that_becomes_the_master_goes_on_with_what_was_delayed(
    start_broker, open_client, crash, soon, later, delivered
):
    def progress(broker):
        return broker.parts.delays.offsets().offset_table, broker.parts.timers.progress()[0]

    store = replace(SMALL_STORE, delay_levels=(0.05, 1.5))
    master = await start_broker(root="master", replication=SERVING, store=store)
    client = await open_client(master)
    slave = await start_broker(root="slave", store=store, **slave_of(master, state_interval=0.05))
    await client.stored("orders", b"soon", properties=soon)
    await until(lambda: delivered(master.parts) == 1)
    await client.stored("orders", b"later", properties=later)
    await until_copied(master, slave)
    await until(lambda: progress(slave) == progress(master))
    await crash(master)
    await slave.stop()

    promoted = await start_broker(root="slave", store=store)
    await until(lambda: promoted.parts.store.max_offset("orders", 0) == 2)

    on_promoted = await open_client(promoted)
    assert await consume(on_promoted, "orders") == [b"soon", b"later"]
    assert (await on_promoted.stored("orders", b"new")).queue_offset == 2


async def test_a_topic_is_known_as_soon_as_its_messages_come(start_broker, open_client, master):
    client = await open_client(master)
    slave = await start_broker(root="slave", pull=READABLE, **slave_of(master))
    await until_rounds(slave)

    await client.stored("brand-new", b"hello")
    await until(lambda: "brand-new" in slave.parts.topics)

    assert await consume(await open_client(slave), "brand-new") == [b"hello"]


async def test_a_slave_delivers_nothing_and_refuses_what_only_masters_do(
    start_broker, open_client, master
):
    client = await open_client(master)
    slave = await start_broker(root="slave", pull=READABLE, **slave_of(master))
    await client.stored("orders", b"later", properties={"DELAY": "1"})
    await until_copied(master, slave)
    on_slave = await open_client(slave)

    sent = await on_slave.send("orders", b"no")
    header = EndTransactionRequest(
        producer_group="makers",
        tran_state_table_offset=0,
        commit_log_offset=0,
        commit_or_rollback=8,
        msg_id="none",
    )
    ended = await on_slave.connection.request(RequestCode.END_TRANSACTION, header)
    await until(lambda: master.parts.store.max_offset("orders", 0) == 1, 10)
    await until_copied(master, slave)

    assert sent.code in (ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE)
    assert ended.code == ResponseCode.SLAVE_NOT_AVAILABLE
    assert slave.parts.store.max_offset("orders", 0) == 1
    assert slave.parts.store.mirroring.written == master.parts.store.mirroring.end


# ---- reading


@pytest.mark.feature("I7")
async def test_a_slave_that_is_not_for_reading_serves_pulls_when_its_master_is_gone(
    start_broker, open_client, crash, master
):
    client = await open_client(master)
    await send_many(client, 40)
    await client.pull("orders")
    await client.report("orders", 4)
    slave = await start_broker(root="slave", **slave_of(master))
    await until_copied(master, slave)
    await until(lambda: slave.parts.progress.stored("orders", "billing", 0) == 4)
    reader = await open_client(slave)

    refused = await reader.pull("orders")
    await crash(master)
    await until(lambda: slave.parts.replication.is_master_gone)
    progress = await reader.query("orders")
    found = await numbers(reader, 0, int(progress.ext_fields["offset"]))
    await reader.report("orders", 10)

    assert refused.code == ResponseCode.SYSTEM_BUSY
    assert found == list(range(16, 40, 4))
    assert slave.parts.progress.stored("orders", "billing", 0) == 10


@pytest.mark.feature("I7")
async def test_a_consumer_far_behind_is_sent_to_the_slave_and_stays_there_until_it_is_near(
    start_broker, open_client
):
    near = replace(SMALL_STORE, read=replace(SMALL_STORE.read, memory_distance=30_000))
    master = await start_broker(root="master", replication=SERVING, pull=READABLE, store=near)
    client = await open_client(master)
    await send_many(client, 400, size=500)
    slave = await start_broker(root="slave", pull=READABLE, store=near, **slave_of(master))
    await until_copied(master, slave)
    await until(lambda: "orders" in slave.parts.topics)
    brokers = {0: client, 1: await open_client(slave)}

    offset, at, way, found = 0, 0, [], 0
    while (answer := await brokers[at].pull("orders", 0, offset, max_msg_nums=10)).code == 0:
        way.append(at)
        found += len(bodies_in(answer))
        offset = int(answer.ext_fields["nextBeginOffset"])
        at = int(answer.ext_fields["suggestWhichBrokerId"])

    assert found == 100
    assert way[0] == 0
    assert way[1] == 1
    assert way[-1] == 0
    assert sum(way) > len(way) / 2


# ---- name servers, settings, what is shown


async def test_a_slave_finds_its_master_through_the_name_server(
    start_broker, open_client, name_server
):
    told = {
        "name_servers": (str(name_server.address),),
        "registration": RegistrationSettings(interval=0.1),
    }
    slave = await start_broker(root="slave", broker_id=1, replication=QUICK, **told)
    master = await start_broker(root="master", replication=SERVING, **told)

    await send_many(await open_client(master), 20)
    await until_copied(master, slave)
    await until(lambda: "orders" in slave.parts.topics)
    both = name_server.service.routes.route("orders")

    assert both is not None
    assert dict(both.broker_datas[0].broker_addrs) == {
        0: str(master.address),
        1: str(slave.address),
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"in_sync_replicas": 2},
        {"heartbeat": 20.0},
        {"port": 70000},
        {"retry": 0},
        {"transfer_size": 4 * 1024 * 1024},
        {"master": "nowhere:"},
    ],
)
def test_settings_that_cannot_work_are_named(wrong):
    with pytest.raises(Exception, match=f"replication.{next(iter(wrong))}"):
        ReplicationSettings(**wrong)  # that is the point


async def test_how_replication_stands_can_be_asked(start_broker, open_client, master):
    client = await open_client(master)
    slave = await start_broker(root="slave", **slave_of(master))
    await send_many(client, 20)
    await until_copied(master, slave)
    await until(lambda: {each.behind for each in serving(master).replicas} == {0})

    of_master = await client.connection.request(RequestCode.GET_BROKER_HA_STATUS)
    of_slave = await (await open_client(slave)).connection.request(RequestCode.GET_BROKER_HA_STATUS)

    end = master.parts.store.mirroring.end
    shown = decode_body(HARuntimeInfo, of_master.body)
    assert (shown.master, shown.in_sync_slave_nums) == (True, 1)
    assert shown.master_commit_log_max_offset == end
    (connection,) = shown.ha_connection_info
    assert (connection.slave_ack_offset, connection.diff, connection.in_sync) == (end, 0, True)
    assert connection.transfer_from_where == end
    seen = decode_body(HARuntimeInfo, of_slave.body).ha_client_runtime_info
    assert (seen.activated, seen.max_offset) == (True, end)
    assert seen.master_addr == str(serving(master).address)
    assert abs(seen.last_read_timestamp / 1000 - slave.parts.clock.now()) < 30


#: Slaves that come back after their log was copied in part get all of it.
WHOLE = replace(SERVING, whole_log=True, heartbeat=0.1)


@pytest.fixture
async def whole_master(start_broker):
    return await start_broker(root="master", replication=WHOLE)


async def start_slave(start_broker: StartBroker, whole_master: Broker) -> Broker:
    return await start_broker(root="slave", **slave_of(whole_master, state_interval=0.1))


async def start_promoted(start_broker: StartBroker, whole_master: Broker, slave: Broker) -> Broker:
    """The slave, started as a master when the master is gone."""
    await whole_master.stop()
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
    start_broker, open_client, whole_master
):
    slave = await start_slave(start_broker, whole_master)
    client = await open_client(whole_master)
    for _ in range(3):
        await client.stored("secret", b"personal data")
    await client.stored("secret", b"delayed", properties={"DELAY": "1"})
    await client.stored("kept", b"mine")
    await until_copied(whole_master, slave)
    await until(lambda: "secret" in slave.parts.topics and queues(slave, "secret"))

    await delete_topic(client, "secret")
    await until(lambda: not queues(slave, "secret"), 20)
    promoted = await start_promoted(start_broker, whole_master, slave)
    client = await open_client(promoted)

    assert "secret" not in promoted.parts.topics
    assert (await client.pull("secret")).code == ResponseCode.TOPIC_NOT_EXIST
    assert bodies_in(await client.pull("kept")) == [b"mine"]
    # The delayed message of the deleted topic is dropped when its time has come.
    await until(lambda: promoted.parts.destinations.dropped == 1, 20)
    assert "secret" not in promoted.parts.topics


async def test_a_topic_that_was_made_again_is_consumed_from_its_beginning_on_a_promoted_slave(
    start_broker, open_client, whole_master
):
    slave = await start_slave(start_broker, whole_master)
    client = await open_client(whole_master)
    for number in range(5):
        await client.stored("orders", b"old %d" % number)
    await client.pull("orders")
    await client.report("orders", 5)
    await until(lambda: slave.parts.progress.stored("orders", GROUP, 0) == 5, 20)

    await delete_topic(client, "orders")
    new = [b"new %d" % number for number in range(8)]
    for body in new:
        await client.stored("orders", body)
    await until_copied(whole_master, slave)
    await until_rounds(slave, 2)
    promoted = await start_promoted(start_broker, whole_master, slave)
    client = await open_client(promoted)
    first = int((await client.query("orders")).ext_fields["offset"])

    assert bodies_in(await client.pull("orders", 0, first)) == new


async def test_a_master_that_comes_back_with_an_empty_disk_deletes_nothing_on_its_slave(
    start_broker, open_client, whole_master
):
    slave = await start_slave(start_broker, whole_master)
    client = await open_client(whole_master)
    for number in range(5):
        await client.stored("orders", b"%d" % number)
    await until_copied(whole_master, slave)
    await slave.stop()
    await whole_master.stop()

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
