"""The life of a broker: starting, registering, keeping its state, stopping."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path

import pytest

from orbitmq.broker.broker import Broker, advertised_host
from orbitmq.broker.errors import ConfigNotSaved
from orbitmq.broker.settings import (
    BrokerSettings,
    HttpSettings,
    OutwardSettings,
    ProgressSettings,
    PullSettings,
    RegistrationSettings,
    SendSettings,
)
from orbitmq.errors import OrbitError, SettingError
from orbitmq.message.record import pack_host
from orbitmq.namesrv.server import NameServer
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.settings import ListenFailed, ServerSettings
from orbitmq.store.files import DiskFiles
from orbitmq.store.settings import StoreLocked
from orbitmq.wire.bodies import SubscriptionData, TopicConfig, TopicRouteData
from orbitmq.wire.command import Command
from tests.support.broker import GROUP, bodies_in, small_settings, until

#: Far longer than any of these tests takes.
LONG = 300.0


async def until_routed(name_server: NameServer, topic: str) -> TopicRouteData:
    """The route of a topic, as soon as there is one."""
    routes = name_server.service.routes
    await until(lambda: routes.route(topic) is not None)
    found = routes.route(topic)
    assert found is not None
    return found


# Starting.


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


# The address in messages.


@pytest.mark.parametrize(
    ("advertised", "why"),
    [("224.0.0.1", "many machines"), ("nobody.invalid", "cannot be resolved")],
)
async def test_an_address_that_no_client_can_reach_is_refused(tmp_path, advertised, why):
    settings = small_settings(tmp_path / "broker", advertised=advertised)

    with pytest.raises(SettingError, match=why):
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
        *(
            (
                lambda root, host=host: BrokerSettings(root=root, advertised=host),
                "broker.advertised",
            )
            for host in ("a b", "0.0.0.0", "0.0.0.0:10911", "[::]:1")  # noqa: S104
        ),
        (lambda root: BrokerSettings(root=root, tick=0), "broker.tick"),
        (lambda root: BrokerSettings(root=root, stop_grace=-1), "broker.stop_grace"),
        (lambda root: BrokerSettings(root=root, lock_pause=-1), "broker.lock_pause"),
        (lambda _: SendSettings(max_message_size=0), "send.max_message_size"),
        (lambda _: SendSettings(region='"'), "send.region"),
        (lambda _: HttpSettings(port=65_536), "http.port"),
        (lambda _: OutwardSettings(access_key="a"), "outward.access_key"),
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
    after = [server.service.routes.route("TBW102") for server in (name_server, second)]
    await second.stop()

    for each in found:
        [data] = each.broker_datas
        assert (data.cluster, data.broker_name) == ("DefaultCluster", "broker-a")
        assert data.broker_addrs == {0: address}
        assert each.queue_datas[0].write_queue_nums == 8
    assert after == [None, None]


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
    assert retry.broker_datas[0].broker_addrs[0] == str(broker.address)
    # Telling about one topic took nothing away from the others.
    assert name_server.service.routes.route("TBW102") is not None


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


async def test_a_stop_before_a_start_and_a_second_stop_do_nothing(tmp_path):
    broker = Broker(small_settings(tmp_path / "broker"))

    await broker.stop()
    await broker.start()
    await broker.stop()
    await broker.stop()

    assert not (tmp_path / "broker" / "abort").exists()


async def test_a_table_that_cannot_be_saved_at_the_stop_does_not_prevent_the_others(
    start_broker, open_client, tmp_path
):
    class FullDisk(DiskFiles):
        def rename(self, source: Path, target: Path) -> None:
            if target.name.startswith("consumerOffset"):
                raise OSError(errno.ENOSPC, "no space left")
            super().rename(source, target)

    broker = await start_broker(parts={"disk": FullDisk()})
    client = await open_client(broker)
    await client.stored("orders")
    await client.heartbeat("c", SubscriptionData(topic="orders", sub_string="*"))
    await client.report("orders", 1)
    broker.parts.topics.ensure(TopicConfig(topic_name="last"), now=0.0)

    with pytest.raises(ConfigNotSaved, match="consumerOffset"):
        await broker.stop()

    assert "last" in (tmp_path / "broker" / "config" / "topics.json").read_text()


# Odd requests.
