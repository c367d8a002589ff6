"""Order locks as others see them: the broker is one process, and a member may be another.

What the broker says about a lock is found out by asking for it under a name that no member has: it
is refused as long as somebody holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from orbitmq.client.consumer.locks import LockSettings
from orbitmq.client.consumer.settings import RebalanceSettings
from orbitmq.client.routes import Queue
from orbitmq.remoting.settings import parse_address
from orbitmq.wire.bodies import LockBatch, LockedQueues, MessageQueue
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.broker import RawClient
from tests.support.brokerprocess import ProcessCluster
from tests.support.client import ScriptedNameServer, quick_settings, topic_route
from tests.support.command import ROOT, environment
from tests.support.consumers import consumer_of, new_group, own_queues, send
from tests.support.consuming import DEADLINE, until
from tools.chaos.proxy import FaultyProxy, Weather

TOPIC = "orders"
QUEUE = Queue(TOPIC, "broker-a", 0)

#: How long the broker keeps a lock that is not renewed, and a member that says nothing.
BROKER_LOCK_LIFE = 60.0
CLIENT_LIFE = 120.0


@pytest.fixture
async def cluster(broker_process):
    """A broker in another process whose time can be let pass."""
    async with ProcessCluster(broker_process, changes={"scan_interval": 0.05}) as cluster:
        yield cluster


@pytest.fixture
async def stranger(cluster):
    client = await RawClient.open(cluster.brokers[0])
    yield Stranger(client)
    await client.close()


class Stranger:
    """Asks for locks by hand, under any name."""

    NAME = "127.0.0.1@stranger"

    def __init__(self, client: RawClient) -> None:
        self.client = client

    async def takes(self, group: str, queue: Queue = QUEUE) -> bool:
        """Take a lock, if nobody else holds it."""
        answer = await self._ask(RequestCode.LOCK_BATCH_MQ, self.NAME, group, queue)
        return bool(decode_body(LockedQueues, answer).lock_ok_mq_set)

    async def _ask(self, code: RequestCode, name: str, group: str, queue: Queue) -> bytes:
        wanted = MessageQueue(topic=queue.topic, broker_name=queue.broker, queue_id=queue.id)
        body = LockBatch(client_id=name, consumer_group=group, mq_set=(wanted,))
        answer = await self.client.connection.request(
            code, body=encode_body(body), timeout=DEADLINE
        )
        assert answer.code == 0, answer.remark
        return bytes(answer.body)


# ---- a member that is paused, and one that is cut off


class PausedMember:
    """A member as a process; what it did, by its diary."""

    LIFE = 0.4

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self.process = process
        self._path = path

    @classmethod
    @contextlib.contextmanager
    def running(cls, cluster: ProcessCluster, group: str, path: Path) -> Iterator[PausedMember]:
        words = (cluster.name_server, group, TOPIC, str(path), str(cls.LIFE))
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.support.orderly_member", *words],
            cwd=ROOT,
            env=environment(),
        )
        try:
            yield cls(process, path)
        finally:
            process.kill()
            process.wait(DEADLINE)

    @property
    def is_stopped(self) -> bool:
        """Whether the kernel has stopped it."""
        how = os.WSTOPPED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self.process.pid, how) is not None

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    @property
    def losses(self) -> int:
        """How often it has given up a lock."""
        return sum(words[1] == "lost" for words in self._lines())

    def calls(self) -> list[tuple[float, float, int]]:
        """Begin and end of each call, and the offset of its message."""
        steps = [words for words in self._lines() if words[1] != "lost"]
        return [
            (float(begin[0]), float(end[0]), int(begin[2]))
            for begin, end in zip(steps[::2], steps[1::2], strict=False)
        ]

    def _lines(self) -> list[list[str]]:
        text = self._path.read_text() if self._path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        return [line.split() for line in whole.splitlines()]


@pytest.mark.feature("E1")
async def test_a_member_that_was_paused_begins_nothing_while_another_has_its_queue(
    cluster, stranger, tmp_path
):
    group = new_group()
    calls: list[tuple[float, float, int]] = []
    entered, opened = asyncio.Event(), asyncio.Event()

    async def consume(message):
        began = time.monotonic()
        entered.set()
        await opened.wait()
        calls.append((began, time.monotonic(), message.queue_offset))

    await cluster.create_topic(TOPIC, queues=1)
    await send(cluster, TOPIC, ["0", "1", "pause", "3", "4"])
    # By their names, the process has the queue as long as both are there.
    second = consumer_of(
        cluster,
        group,
        ordered=True,
        client=quick_settings(cluster.name_server, instance="b", heartbeat=0.1),
        rebalance=RebalanceSettings(return_grace=0.0),
    )
    second.on(TOPIC)(consume)
    with PausedMember.running(cluster, group, tmp_path / "diary") as first:
        await until(lambda: first.is_stopped)
        stopped_at, losses = time.monotonic(), first.losses
        async with second:
            # It is not there, and the broker keeps the queue for it.
            assert not await stranger.takes(group)
            assert not calls
            cluster.pass_time(CLIENT_LIFE + 1.0)
            await asyncio.wait_for(entered.wait(), DEADLINE)
            assert not await stranger.takes(group)

            # It wakes up with messages in its hands, and with a lock of which only time tells.
            await until(lambda: time.monotonic() > stopped_at + PausedMember.LIFE)
            first.go_on()
            await until(lambda: first.losses > losses)
            assert not calls
            opened.set()

            await send(cluster, TOPIC, ["5"])
            await until(lambda: 5 in {each[2] for each in calls + first.calls()})

        owned = [("first", *each) for each in first.calls()] + [("second", *each) for each in calls]
    assert {each[3] for each in owned} == set(range(6))
    overlaps = [
        (one, two)
        for one in owned
        for two in owned
        if one[0] < two[0] and one[1] < two[2] and two[1] < one[2]
    ]
    assert overlaps == []


@contextlib.asynccontextmanager
async def detour(port: int, queues: int) -> AsyncIterator[str]:
    """A name server by which clients come to the broker on another way."""
    async with ScriptedNameServer().serving() as name_server:
        way = {"broker-a": {0: parse_address(f"127.0.0.1:{port}")}}
        name_server.routes[TOPIC] = topic_route(way, queues=queues)
        yield name_server.address


@pytest.fixture
def faulty(cluster):
    proxy = FaultyProxy(cluster.brokers[0].address.port).start()
    yield proxy
    proxy.close()


@pytest.mark.feature("E2")
async def test_a_member_that_cannot_renew_stops_before_the_broker_gives_its_queue_away(
    cluster, stranger, faulty, caplog
):
    group = new_group()
    seen: list[tuple[str, int]] = []

    async def endless(message):
        seen.append(("first", message.queue_offset))
        await asyncio.sleep(0.01)

    await cluster.create_topic(TOPIC, queues=1)
    await send(cluster, TOPIC, range(600))
    second = consumer_of(cluster, group, ordered=True)
    second.on(TOPIC)(lambda message: seen.append(("second", message.queue_offset)))
    async with detour(faulty.port, queues=1) as name_server:
        first = consumer_of(
            cluster,
            group,
            ordered=True,
            client=quick_settings(name_server),
            locks=LockSettings(life=0.8, renewal=0.1, retry=0.05, timeout=0.3),
        )
        first.on(TOPIC)(endless)
        async with first:
            await until(lambda: len(seen) > 10)
            async with second:
                await until(lambda: own_queues(first) == [QUEUE])
                caplog.clear()
                faulty.set_weather(Weather(is_blocked=True))
                faulty.cut()
                await until(lambda: "order lock of" in caplog.text)
                # It has hundreds more in its hands, and the broker still keeps the queue for it.
                stopped = len(seen)
                assert stopped < 600
                assert not await stranger.takes(group)
                assert not own_queues(second)
                cluster.pass_time(BROKER_LOCK_LIFE + 1.0)

                await until(lambda: ("second", 599) in seen)
            faulty.clear()
    assert {who for who, _ in seen[stopped:]} == {"second"}
    by_second = [offset for who, offset in seen if who == "second"]
    assert by_second == list(range(by_second[0], 600))
    assert by_second[0] <= stopped
