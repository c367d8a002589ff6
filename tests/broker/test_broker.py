"""The life of a broker: starting, registering, keeping its state, stopping."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orbitmq.broker.broker import Broker, Parts, advertised_host
from orbitmq.broker.configfile import ConfigFile, SavedTable
from orbitmq.broker.errors import BrokerError, PutResult, PutStatus
from orbitmq.broker.handlers.send import SendHandler
from orbitmq.broker.settings import (
    BrokerSettings,
    ProgressSettings,
    PullSettings,
    RegistrationSettings,
    SendSettings,
)
from orbitmq.broker.topics import TopicSettings, TopicTable
from orbitmq.broker.writes import Draft
from orbitmq.clock import SystemClock
from orbitmq.errors import OrbitError, SettingError
from orbitmq.message.record import pack_host
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.channels import connect
from orbitmq.remoting.settings import ListenFailed, ServerSettings
from orbitmq.store.files import DiskFiles
from orbitmq.store.settings import StoreLocked
from orbitmq.wire.bodies import SubscriptionData, TopicConfig, TopicConfigTable, TopicRouteData
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import GetRouteInfoRequest
from orbitmq.wire.javajson import decode_body
from tests.support.broker import GROUP, bodies_in, pull_header, send_header, small_settings, until
from tests.support.tries import shortest_of

#: Seconds of work for a start.
PROMISED = 0.3
#: Far longer than any of these tests takes.
LONG = 300.0


async def route(name_server: NameServer, topic: str) -> TopicRouteData | None:
    connection = await connect(name_server.address)
    try:
        answer = await connection.request(
            RequestCode.GET_ROUTEINFO_BY_TOPIC,
            GetRouteInfoRequest(topic=topic, accept_standard_json_only=True),
        )
    finally:
        connection.close()
        await connection.wait_closed()
    return decode_body(TopicRouteData, answer.body) if answer.code == 0 else None


async def until_routed(
    name_server: NameServer, topic: str, perm: int | None = None
) -> TopicRouteData:
    """The route of a topic, as soon as there is one (with this permission)."""
    async with asyncio.timeout(30):
        while True:
            found = await route(name_server, topic)
            if found is not None and perm in (None, found.queue_datas[0].perm):
                return found
            await asyncio.sleep(0.01)


# Starting.


async def test_a_broker_that_has_started_answers(broker, client):
    assert broker.address.host == "127.0.0.1"
    assert broker.address.port > 0
    assert (await client.stored("orders")).queue_offset == 0


def test_a_start_takes_less_than_a_third_of_a_second_of_work(tmp_path):
    async def start():
        broker = Broker(small_settings(tmp_path / "broker"))
        began = time.process_time()
        await broker.start()
        took = time.process_time() - began
        await broker.stop()
        return took

    # About a hundredth of a second is needed. The other threads of this process count as well.
    assert shortest_of(lambda: asyncio.run(start()), PROMISED) < PROMISED


async def test_the_data_lies_where_apaches_broker_keeps_it(start_broker, open_client, tmp_path):
    broker = await start_broker()
    client = await open_client(broker)
    await client.stored("orders", queue_id=2, properties={"KEYS": "k"})
    broker.parts.groups.find(GROUP, now=0.0)
    await client.report("orders", 1, queue_id=2)
    await broker.stop()

    root = tmp_path / "broker"
    assert (root / "commitlog" / ("0" * 20)).is_file()
    assert (root / "consumequeue" / "orders" / "2" / ("0" * 20)).is_file()
    assert list((root / "index").iterdir())
    config = {path.name for path in (root / "config").iterdir()}
    assert {"topics.json", "subscriptionGroup.json", "consumerOffset.json"} <= config
    offsets = json.loads((root / "config" / "consumerOffset.json").read_text())
    assert offsets["offsetTable"] == {f"orders@{GROUP}": {"2": 1}}
    assert not (root / "abort").exists()


async def test_a_folder_in_use_is_refused_and_nothing_stays_behind(broker, tmp_path):
    second = Broker(small_settings(tmp_path / "broker"))

    with pytest.raises(StoreLocked, match="already open"):
        await second.start()

    with pytest.raises(OrbitError, match="not started"):
        second.address  # noqa: B018  # asking is the point
    await second.stop()


async def test_a_port_in_use_is_refused_before_the_store_is_touched(broker, tmp_path):
    server = ServerSettings(port=broker.address.port)

    with pytest.raises(ListenFailed):
        await Broker(small_settings(tmp_path / "other", server=server)).start()

    assert not (tmp_path / "other").exists()


async def test_whoever_connects_while_the_store_is_opened_is_served_afterwards(tmp_path):
    first = Broker(small_settings(tmp_path / "broker"))
    await first.start()
    server = ServerSettings(port=first.address.port)
    address = first.address
    await first.stop()
    second = Broker(small_settings(tmp_path / "broker", server=server))

    starting = asyncio.ensure_future(second.start())
    async with asyncio.timeout(30):
        while True:
            try:
                connection = await connect(address)
                break
            except OrbitError:
                await asyncio.sleep(0)
    answer = await connection.request(
        RequestCode.SEND_MESSAGE_V2, send_header("orders"), body=b"early"
    )
    await starting
    connection.close()
    await second.stop()

    assert answer.code == ResponseCode.SUCCESS


async def test_two_families_cannot_answer_the_same_code(tmp_path):
    broker = Broker(small_settings(tmp_path / "broker"), families=(SendHandler, SendHandler))

    with pytest.raises(BrokerError, match="two families answer request code 10"):
        await broker.start()


# The address in messages.


@pytest.mark.parametrize("advertised", ["0.0.0.0", "0.0.0.0:10911", "[::]:1"])  # noqa: S104
def test_an_address_that_nobody_can_reach_is_refused(tmp_path, advertised):
    with pytest.raises(SettingError, match=r"broker\.advertised"):
        small_settings(tmp_path, advertised=advertised)


@pytest.mark.parametrize("advertised", ["224.0.0.1", "255.255.255.255", "[ff02::1]"])
async def test_an_address_that_is_nobodys_own_is_refused(tmp_path, advertised):
    settings = small_settings(tmp_path / "broker", advertised=advertised)

    with pytest.raises(SettingError, match="many machines"):
        await Broker(settings).start()


async def test_a_name_that_cannot_be_resolved_is_refused(tmp_path):
    settings = small_settings(tmp_path / "broker", advertised="nobody.invalid")

    with pytest.raises(SettingError, match="cannot be resolved"):
        await Broker(settings).start()


async def test_the_advertised_address_is_what_clients_and_messages_get(start_broker, tmp_path):
    broker = await start_broker(advertised="localhost:12345")

    assert str(broker.address) == "127.0.0.1:12345"
    assert broker.parts.store_host == pack_host("127.0.0.1", 12345)


async def test_a_broker_on_every_interface_advertises_a_real_address(tmp_path):
    settings = small_settings(tmp_path, server=ServerSettings(host="0.0.0.0", port=0))  # noqa: S104

    host, port = await advertised_host(settings)

    assert host not in ("0.0.0.0", "::")  # noqa: S104
    assert port is None


# Settings.


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda root: BrokerSettings(root=root, permission=8), "broker.permission"),
        (lambda root: BrokerSettings(root=root, broker_id=-1), "broker.broker_id"),
        (lambda root: BrokerSettings(root=root, name="a b"), "broker.name"),
        (lambda root: BrokerSettings(root=root, cluster=""), "broker.cluster"),
        (lambda root: BrokerSettings(root=root, name_servers=("a:b",)), "broker.name_servers"),
        (lambda root: BrokerSettings(root=root, advertised="a b"), "broker.advertised"),
        (lambda root: BrokerSettings(root=root, tick=0), "broker.tick"),
        (lambda root: BrokerSettings(root=root, stop_grace=-1), "broker.stop_grace"),
        (lambda root: BrokerSettings(root=root, lock_pause=-1), "broker.lock_pause"),
        (lambda _: SendSettings(max_message_size=0), "send.max_message_size"),
        (lambda _: SendSettings(region='"'), "send.region"),
        (lambda _: PullSettings(short_hold=0), "pull.short_hold"),
        (lambda _: PullSettings(held_requests=-1), "pull.held_requests"),
        (lambda _: ProgressSettings(save_interval=0), "progress.save_interval"),
        (lambda _: RegistrationSettings(interval=0), "registration.interval"),
        (lambda _: RegistrationSettings(interval=60.5), "registration.interval"),
        (lambda root: BrokerSettings(root=root, max_topic_queues=0), "broker.max_topic_queues"),
        (lambda root: BrokerSettings(root=root, max_auto_topics=0), "broker.max_auto_topics"),
        (lambda root: BrokerSettings(root=root, max_auto_groups=0), "broker.max_auto_groups"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_name(tmp_path, make, named):
    with pytest.raises(SettingError, match=named.replace(".", r"\.")):
        make(tmp_path)


# Registration.


@pytest.mark.feature("J6")
async def test_a_broker_is_known_to_its_name_servers_with_all_its_topics(start_broker, name_server):
    second = NameServer(NameServerSettings(server=ServerSettings(port=0)))
    await second.start()
    servers = (str(name_server.address), str(second.address))

    broker = await start_broker(name_servers=servers)
    address = str(broker.address)
    found = [await until_routed(server, "TBW102") for server in (name_server, second)]
    await broker.stop()
    after = [await route(server, "TBW102") for server in (name_server, second)]
    await second.stop()

    for each in found:
        [data] = each.broker_datas
        assert (data.cluster, data.broker_name) == ("DefaultCluster", "broker-a")
        assert data.broker_addrs == {0: address}
        assert each.queue_datas[0].write_queue_nums == 8
    assert after == [None, None]


def broker_address_of(found: TopicRouteData) -> str:
    return found.broker_datas[0].broker_addrs[0]


async def test_a_new_topic_is_registered_at_once(start_broker, open_client, name_server):
    registration = RegistrationSettings(interval=60)
    broker = await start_broker(name_servers=(str(name_server.address),), registration=registration)
    client = await open_client(broker)
    await until_routed(name_server, "TBW102")

    await client.stored("fresh")
    found = await until_routed(name_server, "fresh")
    await client.heartbeat("c1", SubscriptionData(topic="fresh", sub_string="*"))
    retry = await until_routed(name_server, "%RETRY%" + GROUP)

    assert found.queue_datas[0].read_queue_nums == 4
    assert broker_address_of(retry) == str(broker.address)
    # Telling about one topic took nothing away from the others.
    assert await route(name_server, "TBW102") is not None


async def test_a_broker_works_without_its_name_server_and_registers_when_it_comes(
    start_broker, open_client, name_server, caplog
):
    address = name_server.address
    await name_server.stop()
    broker = await start_broker(
        name_servers=(str(address),), registration=RegistrationSettings(interval=0.05, timeout=0.5)
    )
    client = await open_client(broker)
    await until(lambda: broker.parts.registration.unreachable == (address,))

    assert (await client.stored("orders")).queue_offset == 0
    back = NameServer(
        NameServerSettings(server=ServerSettings(host=address.host, port=address.port))
    )
    await back.start()
    await until_routed(back, "orders")
    await broker.stop()
    await back.stop()

    assert caplog.text.count("not registered with name server") == 1


async def test_a_new_topic_is_routed_at_once_by_a_name_server_that_was_restarted(
    start_broker, open_client, name_server
):
    address = name_server.address
    broker = await start_broker(
        name_servers=(str(address),), registration=RegistrationSettings(interval=60)
    )
    client = await open_client(broker)
    await until_routed(name_server, "TBW102")
    await name_server.stop()
    back = NameServer(
        NameServerSettings(server=ServerSettings(host=address.host, port=address.port))
    )
    await back.start()

    await client.stored("fresh")
    known = str(broker.address)
    found = await until_routed(back, "fresh")
    others = await route(back, "TBW102")
    await broker.stop()
    await back.stop()

    assert broker_address_of(found) == known
    assert others is not None


async def test_a_broker_with_less_permission_registers_its_topics_with_less(
    start_broker, name_server
):
    await start_broker(name_servers=(str(name_server.address),), permission=4)

    found = await until_routed(name_server, "TBW102")

    assert found.queue_datas[0].perm == 4


async def test_a_change_of_permission_reaches_the_name_server_at_once(start_broker, name_server):
    broker = await start_broker(
        name_servers=(str(name_server.address),), registration=RegistrationSettings(interval=60)
    )
    await until_routed(name_server, "TBW102")
    parts = broker.parts

    parts.change_settings(replace(parts.settings, permission=4))
    parts.topics.renew_version(now=parts.clock.now())
    parts.registration.register_all()

    found = await until_routed(name_server, "TBW102", perm=4)
    assert found.queue_datas[0].write_queue_nums == 8


# Keeping state.


@pytest.mark.feature("H3")
async def test_progress_is_saved_by_itself_and_at_a_stop(start_broker, open_client, tmp_path):
    assert ProgressSettings().save_interval == 5.0
    broker = await start_broker(progress=ProgressSettings(save_interval=0.05))
    client = await open_client(broker)
    await client.stored("orders")
    broker.parts.groups.find(GROUP, now=0.0)
    path = tmp_path / "broker" / "config" / "consumerOffset.json"

    def saved():
        if not path.exists():
            return None
        return json.loads(path.read_text())["offsetTable"].get(f"orders@{GROUP}")

    await client.report("orders", 7)
    await until(lambda: saved() == {"0": 7})
    await client.report("orders", 8)
    await broker.stop()

    assert saved() == {"0": 8}


async def test_a_restart_keeps_messages_topics_groups_and_progress(start_broker, open_client):
    broker = await start_broker()
    client = await open_client(broker)
    for number in range(10):
        await client.stored("orders", b"%d" % number, queue_id=1)
    await client.heartbeat("c1", SubscriptionData(topic="orders", sub_string="*"))
    await client.report("orders", 6, queue_id=1)
    await broker.stop()

    again = await start_broker()
    client = await open_client(again)
    answer = await client.query("orders", 1)
    found = await client.pull("orders", 1, int(answer.ext_fields["offset"]))
    place = await client.stored("orders", queue_id=1)

    assert answer.ext_fields["offset"] == "6"
    assert bodies_in(found) == [b"6", b"7", b"8", b"9"]
    assert place.queue_offset == 10
    assert GROUP in again.parts.groups
    assert "%RETRY%" + GROUP in again.parts.topics


async def test_a_topic_whose_messages_outlived_it_is_made_again(
    start_broker, open_client, tmp_path, caplog
):
    """A crash may come between the first message of a topic and the saving of the topic."""
    broker = await start_broker()
    await (await open_client(broker)).stored("orders", b"safe", queue_id=3)
    await broker.stop()
    for path in (tmp_path / "broker" / "config").glob("topics.json*"):
        path.unlink()

    again = await start_broker()
    answer = await (await open_client(again)).pull("orders", 3)

    assert bodies_in(answer) == [b"safe"]
    assert "topic found in the store only" in caplog.text
    config = again.parts.topics.get("orders")
    assert config is not None
    assert config.write_queue_nums == 4


class FailingDisk(DiskFiles):
    """A disk on which configuration cannot be written for a while."""

    is_failing = False

    def rename(self, source: Path, target: Path) -> None:
        if self.is_failing:
            raise OSError(28, "No space left on device")
        super().rename(source, target)


async def test_a_table_that_cannot_be_saved_does_not_stop_the_broker(
    start_broker, open_client, caplog
):
    disk = FailingDisk()
    broker = await start_broker(parts={"disk": disk})
    client = await open_client(broker)
    disk.is_failing = True

    await client.stored("fresh")
    await until(lambda: "configuration was not saved" in caplog.text)
    disk.is_failing = False

    assert (await client.stored("fresh")).queue_offset == 1


# Puts of the broker itself.


def draft(topic: str, **fields: Any) -> Draft:
    return Draft(topic, 0, b"body", b"", 1_700_000_000_000, pack_host("127.0.0.1", 1), **fields)


async def test_a_message_of_the_brokers_own_is_written_at_the_end_of_the_step(broker):
    results: list[PutResult] = []

    for _ in range(3):
        broker.parts.writes.put(draft("own"), results.append)
    assert results == []
    assert broker.parts.store.max_offset("own", 0) == 0
    await until(lambda: len(results) == 3)

    assert [result.queue_offset for result in results] == [0, 1, 2]
    assert {result.status for result in results} == {PutStatus.PUT_OK}
    assert broker.parts.store.max_offset("own", 0) == 3


async def test_a_put_that_cannot_be_stored_says_so_and_spares_the_others(broker):
    results: list[PutResult] = []
    writes = broker.parts.writes

    writes.put(draft("own"), results.append)
    writes.put(draft("a/b"), results.append)
    writes.put(draft("own"), results.append)
    await until(lambda: len(results) == 3)

    by_status = sorted(results, key=lambda result: result.status.name)
    assert [result.status for result in by_status] == [
        PutStatus.MESSAGE_ILLEGAL,
        PutStatus.PUT_OK,
        PutStatus.PUT_OK,
    ]
    assert by_status[0].error is not None
    assert not by_status[0].status.is_stored


async def test_what_follows_a_put_and_fails_does_not_hurt_the_others(broker, caplog):
    results: list[PutResult] = []

    def fail(_):
        raise RuntimeError("a bug")

    broker.parts.writes.put(draft("own"), fail)
    broker.parts.writes.put(draft("own"), results.append)
    await until(lambda: results)

    assert results[0].queue_offset == 1
    assert "a callback after a put failed" in caplog.text


async def test_what_changes_while_a_table_is_saved_is_saved_right_after(tmp_path):
    gate = threading.Event()

    class SlowDisk(DiskFiles):
        def sync(self, fd: int) -> None:
            gate.wait(30)

    topics = TopicTable(TopicSettings(cluster="c", broker_name="b"), now=0.0)
    file = ConfigFile(tmp_path / "topics.json", TopicConfigTable, disk=SlowDisk())
    table = SavedTable(
        file, revision=lambda: topics.revision, document=topics.file, clock=SystemClock()
    )
    topics.ensure(TopicConfig(topic_name="first"), now=0.0)
    table.save_soon()
    await until((tmp_path / "topics.json.tmp").exists)

    topics.ensure(TopicConfig(topic_name="second"), now=0.0)
    table.save_soon()
    gate.set()
    await until(lambda: not table.is_stale)

    loaded = file.load().value
    assert loaded is not None
    assert {"first", "second"} <= set(loaded.topic_config_table)
    await table.close()


# Stopping.


async def test_a_stop_does_not_wait_for_connections_that_do_nothing(start_broker, open_client):
    broker = await start_broker()
    clients = [await open_client(broker) for _ in range(10)]
    for client in clients:
        await client.stored("orders")

    async with asyncio.timeout(LONG / 10):
        await broker.stop(grace=LONG)

    await until(lambda: not any(client.connection.is_open for client in clients))


async def test_a_stop_keeps_everything_that_was_answered(start_broker, open_client):
    broker = await start_broker()
    client = await open_client(broker)
    sending = [asyncio.ensure_future(client.send("orders")) for _ in range(500)]
    await until(lambda: any(task.done() for task in sending))

    await broker.stop()
    outcomes = await asyncio.gather(*sending, return_exceptions=True)
    stored = [outcome for outcome in outcomes if isinstance(outcome, Command) and outcome.code == 0]

    again = await start_broker()
    assert again.parts.store.max_offset("orders", 0) >= len(stored) > 0


async def test_a_stop_in_a_hurry_waits_for_nobody_and_keeps_what_was_answered(
    start_broker, open_client, name_server
):
    broker = await start_broker(name_servers=(str(name_server.address),), stop_grace=600.0)
    await until(lambda: broker.parts.registration.is_registered)
    client, deaf = await open_client(broker), await open_client(broker)
    for _ in range(8):
        await client.stored("orders", b"x" * 512 * 1024)
    # Somebody who does not read: an orderly stop waits for it as long as it may.
    deaf.connection._transport.pause_reading()
    pulling = [asyncio.ensure_future(deaf.pull("orders")) for _ in range(32)]
    listeners = broker.parts.listeners
    await until(lambda: any(each.unwritten for each in listeners.connections))

    async with asyncio.timeout(30):
        await broker.stop(grace=0)
    deaf.connection.abort()
    await asyncio.gather(*pulling, return_exceptions=True)

    again = await start_broker()
    assert again.parts.store.max_offset("orders", 0) == 8


async def test_a_stop_before_a_start_and_a_second_stop_do_nothing(tmp_path):
    broker = Broker(small_settings(tmp_path / "broker"))

    await broker.stop()
    await broker.start()
    await broker.stop()
    await broker.stop()

    assert not (tmp_path / "broker" / "abort").exists()


async def test_parts_of_the_broker_are_told_of_a_stop_while_the_store_is_open(tmp_path):
    told: list[bool] = []

    class Watching:
        def __init__(self, parts: Parts) -> None:
            parts.on_stop(lambda: told.append(parts.store.statistics().log_end == 0))

        def handlers(self) -> dict[int, Any]:
            return {}

    broker = Broker(small_settings(tmp_path / "broker"), families=(Watching,))
    await broker.start()
    await broker.stop()

    assert told == [True]


# Odd requests.


async def test_an_unknown_request_is_answered_as_unsupported(client):
    answer = await client.connection.request(987_654)

    assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert answer.remark == " request type 987654 not supported"


async def test_nonsense_on_one_connection_does_not_disturb_another(broker, client):
    _, writer = await asyncio.open_connection(*broker.address)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await writer.drain()
    waiting = asyncio.ensure_future(
        client.connection.request(
            RequestCode.PULL_MESSAGE, pull_header("orders", 0, 1, hold=30), timeout=30
        )
    )

    assert (await client.stored("orders")).queue_offset == 0
    await client.stored("orders")

    writer.close()
    await waiting


async def test_a_job_that_fails_comes_again(broker, caplog):
    calls: list[int] = []
    caplog.set_level(logging.ERROR)

    def fail():
        calls.append(1)
        raise RuntimeError("a bug")

    broker.parts.scheduler.every(0.01, fail)
    await until(lambda: len(calls) >= 3)

    assert "a job of the broker failed" in caplog.text


async def test_settings_of_a_running_broker_can_be_replaced(broker):
    told: list[int] = []
    parts = broker.parts
    parts.on_settings_changed(lambda: told.append(parts.settings.permission))

    parts.change_settings(replace(parts.settings, permission=4))

    assert told == [4]
