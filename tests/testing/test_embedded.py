"""The embedded cluster that users' tests run against."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace

import pytest

from orbitmq.errors import OrbitError
from orbitmq.remoting.channels import connect
from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.settings import parse_address
from orbitmq.store.settings import StoreLocked
from orbitmq.testing import AsyncEmbeddedCluster, EmbeddedCluster, MovableClock
from orbitmq.wire.bodies import TopicRouteData
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers import GetRouteInfoRequest
from orbitmq.wire.javajson import decode_body
from tests.support.broker import RawClient, until
from tests.support.tries import shortest_of

#: What the embedded cluster promises, in seconds.
PROMISED = 0.3


async def client_of(address: str) -> RawClient:
    return RawClient(await connect(parse_address(address), owner=Dispatcher({})), [])


async def ask_route(name_server: str, topic: str) -> Command:
    connection = await connect(parse_address(name_server), owner=Dispatcher({}))
    answer = await connection.request(
        RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequest(topic=topic)
    )
    connection.close()
    await connection.wait_closed()
    return answer


def send(address: str, topic: str, *bodies: bytes) -> None:
    """Send from a loop of its own, as a program under test would."""

    async def go() -> None:
        client = await client_of(address)
        for body in bodies:
            await client.stored(topic, body)
        await client.close()

    asyncio.run(go())


# Without a loop.


@pytest.mark.feature("P5")
def test_it_starts_far_sooner_than_a_test_would_notice():
    with EmbeddedCluster():
        pass  # whatever is imported late is imported now

    def start():
        began = time.perf_counter()
        with EmbeddedCluster():
            return time.perf_counter() - began

    took = shortest_of(start, PROMISED)

    print(f"\nstarted in {took * 1000:.0f} ms")
    assert took < PROMISED


def test_what_a_program_sends_can_be_looked_at():
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=2)

        send(cluster.broker_addresses[0], "orders", b"one", b"two")

        assert [message.body for message in cluster.messages("orders")] == [b"one", b"two"]
        assert cluster.messages("%DLQ%nobody") == []


def test_a_created_topic_is_found_by_clients_at_once():
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("orders", queues=3)

        answer = asyncio.run(ask_route(cluster.name_server, "orders"))

    route = decode_body(TopicRouteData, answer.body)
    queues = {each.broker_name: each.write_queue_nums for each in route.queue_datas}
    assert queues == {"broker-a": 3, "broker-b": 3}


def test_time_that_is_moved_on_makes_delayed_messages_due():
    clock = MovableClock()

    async def send_delayed(address):
        client = await client_of(address)
        # The last level: two hours.
        await client.stored("orders", b"late", properties={"DELAY": "18"})
        await client.close()

    with EmbeddedCluster(clock=clock) as cluster:
        asyncio.run(send_delayed(cluster.broker_addresses[0]))
        cluster.advance(7100)
        assert cluster.messages("orders") == []

        cluster.advance(200)
        asyncio.run(until(lambda: cluster.messages("orders")))

        assert [message.body for message in cluster.messages("orders")] == [b"late"]


def test_a_restarted_broker_has_its_address_and_its_messages():
    with EmbeddedCluster() as cluster:
        (address,) = cluster.broker_addresses
        send(address, "orders", b"kept")

        cluster.restart_broker()

        assert cluster.broker_addresses == (address,)
        assert [message.body for message in cluster.messages("orders")] == [b"kept"]
        send(address, "orders", b"more")
        assert len(cluster.messages("orders")) == 2


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads = set(threading.enumerate())

    with EmbeddedCluster() as cluster:
        send(cluster.broker_addresses[0], "orders", b"x")
        assert len(list(tmp_path.iterdir())) == 1

    assert list(tmp_path.iterdir()) == []
    assert set(threading.enumerate()) <= threads


_A_CHILD_EXITS = """
import os, sys, tempfile
from pathlib import Path
from orbitmq.testing import EmbeddedCluster

cluster = EmbeddedCluster()
cluster.start()
before = set(Path(tempfile.gettempdir()).rglob("*"))
child = os.fork()
if child == 0:
    sys.exit(0)  # with everything that is done at the end of a process
os.waitpid(child, 0)
assert before, "the data is there"
gone = [path for path in before if not path.exists()]
assert not gone, gone
cluster.send("orders", b"after")
cluster.stop()
assert not list(Path(tempfile.gettempdir()).iterdir())
"""


def test_a_forked_child_that_exits_leaves_the_data_of_its_parent_alone(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _A_CHILD_EXITS],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_data_in_a_folder_of_its_own_is_kept(tmp_path):
    with EmbeddedCluster(folder=tmp_path) as cluster:
        send(cluster.broker_addresses[0], "orders", b"kept")

    with EmbeddedCluster(folder=tmp_path) as cluster:
        assert [message.body for message in cluster.messages("orders")] == [b"kept"]


def test_settings_can_be_changed():
    def strict(settings):
        return replace(settings, auto_create_topic=False)

    async def send_to_nowhere(address):
        client = await client_of(address)
        answer = await client.send("unknown")
        await client.close()
        return answer.code

    with EmbeddedCluster(adjust=strict) as cluster:
        assert asyncio.run(send_to_nowhere(cluster.broker_addresses[0])) == 17


def test_a_start_that_fails_is_told_where_it_was_asked_for(tmp_path):
    with (
        EmbeddedCluster(folder=tmp_path),
        pytest.raises(StoreLocked),
        EmbeddedCluster(folder=tmp_path),
    ):
        pytest.fail("two clusters cannot share a folder")


def test_a_cluster_that_is_not_started_says_so():
    cluster = EmbeddedCluster()

    for use in (lambda: cluster.name_server, lambda: cluster.create_topic("orders")):
        with pytest.raises(OrbitError, match="not started"):
            use()


# On the caller's loop.


async def test_it_lives_on_the_callers_loop():
    before = set(threading.enumerate())
    async with AsyncEmbeddedCluster() as cluster:
        # Those that wait for the disk; none has a loop of its own.
        assert len(set(threading.enumerate()) - before) < 10
        await cluster.create_topic("orders")
        client = await client_of(str(cluster.brokers[0].address))
        await client.stored("orders", b"here")
        await client.close()

        assert [message.body for message in cluster.messages("orders")] == [b"here"]
        assert cluster.brokers[0].parts.loop is asyncio.get_running_loop()


async def test_progress_of_a_group_can_be_looked_at():
    async with AsyncEmbeddedCluster() as cluster:
        client = await client_of(str(cluster.brokers[0].address))
        await client.stored("orders", b"x")
        await client.pull("orders")
        await client.report("orders", 1)
        await client.close()

        assert cluster.progress("billing", "orders") == {("broker-a", 0): 1}


def test_a_cluster_where_only_the_client_is_installed_says_what_is_missing():
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "import orbitmq.testing\n"
        "try: orbitmq.testing.EmbeddedCluster\n"
        "except orbitmq.testing.BrokerMissing as error: print(error)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert re.search(
        r"needs numpy, which is not installed; .*pip install '.*\[broker\]'", done.stdout
    )


def test_a_moved_clock_goes_on_and_leaves_intervals_alone():
    clock = MovableClock()
    before, monotonic = clock.now(), clock.monotonic()

    clock.advance(3600)

    assert 3600 <= clock.now() - before < 3660
    assert clock.monotonic() - monotonic < 60


async def test_what_cannot_be_is_refused_with_what_can():
    async with AsyncEmbeddedCluster(brokers=2) as cluster:
        await cluster.create_topic("orders")

        with pytest.raises(OrbitError, match=r"queues must be 1 to 1024, got 0"):
            await cluster.create_topic("fresh", queues=0)
        with pytest.raises(OrbitError, match=r"create_topic: .*illegal"):
            await cluster.create_topic("no spaces")
        with pytest.raises(OrbitError, match=r"has a topic 'nope'; there are .*orders"):
            cluster.messages("nope")
        for place in (-1, 2, 5):
            with pytest.raises(OrbitError, match=rf"the brokers are 0 to 1, got {place}"):
                await cluster.restart_broker(place)

        assert cluster.messages("orders") == []


def test_waiting_for_a_group_that_does_not_consume_says_what_is_behind():
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=1)
        cluster.send("orders", b"one", b"two")

        with pytest.raises(OrbitError, match=r"'billing'.*'orders'.*broker-a:0: 2"):
            cluster.until_consumed("billing", "orders", timeout=0.1)
