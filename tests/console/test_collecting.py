"""Looks at the cluster: few requests, honest when something is missing."""

from __future__ import annotations

import asyncio
import socket

import pytest

from orbitmq.client.admin.admin import AsyncAdmin
from orbitmq.client.engine import Engine
from orbitmq.client.routes import Queue
from orbitmq.client.settings import ClientSettings
from orbitmq.console.app import Console
from orbitmq.console.checks import Observation, find_faults
from orbitmq.console.collect import BrokerTables, Collector
from orbitmq.console.errors import ConsoleError
from orbitmq.console.settings import Budget, ConsoleSettings
from orbitmq.testing import AsyncEmbeddedCluster
from orbitmq.wire.codes import RequestCode
from tests.support.client_admin import World, forget_code
from tests.support.consoles import console_of, settings_for


async def test_a_broker_that_cannot_be_reached_is_shown_with_what_to_do(desk):
    await desk.world.register_ghost("broker-z")

    content = await desk.browser.until(
        "/now", lambda found: len(found["brokers"]) == 3 and found["fault_count"]
    )

    ghost = next(each for each in content["brokers"] if each["name"] == "broker-z")
    assert not ghost["is_up"]
    texts = [
        fault["text"]
        for kind in content["faults"]
        for fault in kind["faults"]
        if fault["subject"] == "broker-z"
    ]
    assert any("cannot be reached" in text for text in texts)
    # The others go on.
    assert (await desk.browser.get("/topics?search=orders"))["total"] == 1


async def test_an_older_broker_that_knows_no_table_of_groups_still_lists_them(desk, monkeypatch):
    for broker in desk.cluster.brokers:
        forget_code(monkeypatch, broker, RequestCode.GET_BROKER_CONSUME_STATS)
    await desk.world.admin.groups.create("billing")
    queue = Queue("orders", "broker-a", 0)
    await desk.world.fill(queue, 3)
    await desk.world.report(queue, 1)

    found = await desk.browser.until("/groups", lambda found: found["rows"][0]["lag"] == 2)

    assert found["rows"][0]["name"] == "billing"


async def test_a_cluster_that_went_away_is_shown_as_it_was_and_said_so():
    cluster = AsyncEmbeddedCluster()
    await cluster.start()
    try:
        async with console_of(cluster) as browser:
            await cluster.stop()
            content = await browser.until("/now", lambda found: found["problem"])

            assert "no name server answers" in content["problem"]
            assert content["brokers"]
            assert (await browser.get("/topics"))["total"] > 0
    finally:
        await cluster.stop()


async def test_without_a_cluster_the_page_comes_and_says_why(unused_tcp_port):
    settings = ConsoleSettings(
        client=ClientSettings(name_servers=(f"127.0.0.1:{unused_tcp_port}",)), port=0, every=0.1
    )
    from tests.support.consoles import Browser

    async with Console(settings) as console:
        browser = Browser(console)
        content = await browser.until("/now", lambda found: found["problem"])
        page = await browser.ask("GET", "/")
        topics = await browser.get("/topics", 503)

    assert content["at"] is None
    assert page.status == 200
    assert "no name server answers" in topics["error"]


async def test_a_look_takes_a_bounded_number_of_requests(monkeypatch):
    usual = Engine.ask
    asked: dict[Engine, int] = {}

    async def counted(self, *words, **options):
        asked[self] = asked.get(self, 0) + 1
        return await usual(self, *words, **options)

    monkeypatch.setattr(Engine, "ask", counted)
    budget = Budget(ages=5, topics=5, members=5, dead_letters=5, resent=2, letters=10, handlers=1)
    async with (
        AsyncEmbeddedCluster(brokers=2) as cluster,
        AsyncAdmin(name_server=cluster.name_server, clock=cluster.clock) as other,
        Engine(settings_for(cluster).client, clock=cluster.clock) as engine,
    ):
        world = World(cluster, other)
        for number in range(60):
            group, queue = f"group-{number}", Queue(f"topic-{number}", "broker-a", 0)
            await cluster.create_topic(queue.topic, queues=1)
            await other.groups.create(group)
            await world.fill(queue, 1)
            await world.report(queue, 0, group)
        await world.consumer("dying", group="group-0", subscriptions={"topic-0": "*"})
        for number in range(40):
            unique_id = f"7F0000010000000000000000{number:08X}"
            await world.die(
                Queue("topic-0", "broker-a", 0), b"x", group="group-0", UNIQ_KEY=unique_id
            )
        collector = Collector(AsyncAdmin.on(engine), BrokerTables(engine), budget, cluster.clock)

        looks, requests = [], []
        for _ in range(7):
            before = asked.get(engine, 0)
            looks.append(await collector.look())
            requests.append(asked[engine] - before)
        await world.close()

    assert looks[-1].lag == 60 + 40
    assert (looks[-1].open_letters, looks[-1].unknown_letters) == (40, 0)
    assert looks[0].open_letters + looks[0].unknown_letters == 40
    # The admin's own, of members and servers; asking each group would be 120 and more.
    assert max(look.requests for look in looks) < 40 + 10 * 2 * 2
    assert max(requests) < 120
    # When all letters are known and no topic has grown, none is asked about.
    assert looks[-1].requests < 40


async def test_letters_that_were_all_sent_again_are_never_called_open_and_soon_no_fault():
    async with (
        AsyncEmbeddedCluster() as cluster,
        Engine(settings_for(cluster).client, clock=cluster.clock) as engine,
    ):
        admin = AsyncAdmin.on(engine)
        world = World(cluster, admin)
        await cluster.create_topic("orders", queues=1)
        await world.consumer("dying")
        for number in range(24):
            unique_id = f"7F0000010000000000000000{number:08X}"
            await world.die(Queue("orders", "broker-a", 0), b"x", UNIQ_KEY=unique_id)
        await admin.dead_letters.resend("billing")
        collector = Collector(admin, BrokerTables(engine), Budget(letters=9), cluster.clock)

        looks, faults = [], []
        for _ in range(5):
            looks.append(await collector.look())
            found = find_faults(Observation(snapshot=looks[-1], now=cluster.clock.now()))
            faults.append([each.text for each in found if each.kind == "dead letters"])
        await world.close()

    assert [(look.open_letters, look.open_last_hour) for look in looks] == [(0, 0)] * 5
    assert [look.unknown_letters for look in looks] == [17, 10, 3, 0, 0]
    assert (looks[-1].dead_letters, looks[-1].resent_letters) == (24, 24)
    unknown = "died in the last hour, and it is not known whether they were resent"
    assert faults == [*([f"{number} messages {unknown}"] for number in (17, 10, 3)), [], []]


async def test_history_and_audit_outlive_the_console(tmp_path):
    file = tmp_path / "history.sqlite"
    async with AsyncEmbeddedCluster() as cluster:
        async with console_of(cluster, history=file) as browser:
            await browser.post("/topics", {"name": "orders", "queues": 1})
        command = f"orbitmq topic create orders --queues 1 --name-server {cluster.name_server}"
        cluster.advance(3 * 3600.0)
        async with console_of(cluster, history=file) as browser:
            lines = (await browser.get("/audit"))["lines"]
            day = await browser.get("/charts?minutes=1440&series=cluster/lag")
            hour = await browser.get("/charts?minutes=60&series=cluster/lag")

    assert [line["command"] for line in lines] == [command]
    first, last = day["series"]["cluster/lag"][0][0], day["series"]["cluster/lag"][-1][0]
    assert last - first > 2.5 * 3600
    assert len(hour["series"]["cluster/lag"]) >= 1


async def test_a_port_in_use_is_said_with_its_number():
    async with AsyncEmbeddedCluster() as cluster:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ConsoleError, match=str(port)):
                await Console(settings_for(cluster, port=port)).start()


async def test_stopping_ends_streams_and_leaves_no_task():
    before = asyncio.all_tasks()
    async with AsyncEmbeddedCluster() as cluster:
        running = asyncio.all_tasks()
        async with console_of(cluster) as browser:
            reader, writer = await asyncio.open_connection("127.0.0.1", browser.console.port)
            writer.write(b"GET /api/v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b"retry")
        async with asyncio.timeout(30):
            await reader.read()
        writer.close()
        await writer.wait_closed()
        left = {task for task in asyncio.all_tasks() - running if not task.done()}
        assert {task.get_name() for task in left if "console" in task.get_name()} == set()
    assert {task for task in asyncio.all_tasks() - before if not task.done()} == set()
