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
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from orbitmq.client.consumer.consumer import AsyncConsumer
from orbitmq.client.consumer.locks import LockSettings
from orbitmq.client.consumer.settings import ConsumeSettings, RebalanceSettings
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.routes import Queue
from orbitmq.remoting.settings import parse_address
from orbitmq.wire.bodies import LockBatch, LockedQueues, MessageQueue
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command, decode_command
from orbitmq.wire.frame import FrameReader
from orbitmq.wire.headers import PullMessageRequest
from orbitmq.wire.javajson import decode_body, encode_body
from tests.support.broker import RawClient
from tests.support.brokerprocess import ROOT, ProcessCluster
from tests.support.client import ScriptedNameServer, quick_settings, topic_route
from tests.support.command import environment
from tests.support.consumers import consumer_of, new_group, own_queues, send, until_owned
from tests.support.consuming import DEADLINE, until
from tests.support.recording_proxy import RecordingProxy
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

    async def gives_back(self, group: str, queue: Queue = QUEUE) -> None:
        await self._ask(RequestCode.UNLOCK_BATCH_MQ, self.NAME, group, queue)

    async def takes_away(self, consumer: AsyncConsumer) -> None:
        """Have the lock of a member that goes on renewing it."""
        async with asyncio.timeout(DEADLINE):
            while not await self.takes(consumer.group):
                # One right after the other: hardly ever is it renewed in between.
                name, group = consumer.client_id, consumer.group
                await self._ask(RequestCode.UNLOCK_BATCH_MQ, name, group, QUEUE)

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


# ---- progress and locks


@pytest.mark.feature("E5")
async def test_what_the_broker_knows_when_the_lock_is_had_is_where_consumption_goes_on(
    cluster, stranger, caplog
):
    caplog.set_level("INFO", "orbitmq")
    seen: list[int] = []
    consumer = consumer_of(cluster, ordered=True, locks=LockSettings(life=20.0, renewal=0.05))
    consumer.on(TOPIC)(lambda message: seen.append(message.queue_offset))
    await cluster.create_topic(TOPIC, queues=1)
    await send(cluster, TOPIC, range(10))

    async def somebody_else_comes_to(offset):
        await stranger.takes_away(consumer)
        await until(lambda: not own_queues(consumer))
        seen.clear()
        await stranger.client.report(TOPIC, offset, consumer_group=consumer.group)
        await stranger.gives_back(consumer.group)

    async with consumer:
        await until(lambda: len(seen) == 10)
        await send(cluster, TOPIC, range(10, 15))
        await until(lambda: len(seen) == 15)
        await somebody_else_comes_to(4)
        await until(lambda: seen == list(range(4, 15)))

        await stranger.takes_away(consumer)
        await until(lambda: not own_queues(consumer))
        await send(cluster, TOPIC, range(15, 20))
        await somebody_else_comes_to(18)
        await until(lambda: seen == [18, 19])
    for offset in (0, 4, 18):
        assert f"queue gained: {QUEUE} by group {consumer.group}, from offset {offset}" in (
            caplog.text
        )


@pytest.mark.feature("E6")
async def test_a_queue_that_somebody_else_has_locked_is_pulled_when_it_is_free(cluster, stranger):
    seen: list[int] = []
    await cluster.create_topic(TOPIC, queues=2)
    for place in range(2):
        await send(cluster, TOPIC, range(3), queue=Queue(TOPIC, "broker-a", place))
    broker = cluster.brokers[0].address
    group = new_group()
    assert await stranger.takes(group)
    with RecordingProxy.running(("127.0.0.1", 0), (broker.host, broker.port)) as proxy:

        def pulled():
            """Pulls of each queue so far."""
            pulls = [
                each.header(PullMessageRequest)
                for each in requests(proxy)
                if each.code == RequestCode.PULL_MESSAGE
            ]
            return Counter(pull.queue_id for pull in pulls if pull.topic == TOPIC)

        async with detour(proxy.listen[1], queues=2) as name_server:
            consumer = consumer_of(cluster, group, ordered=True, client=quick_settings(name_server))
            consumer.on(TOPIC)(lambda message: seen.append(message.queue.id))
            async with consumer:
                await until(lambda: seen == [1, 1, 1])
                # Asked for again, after a delay, and refused again.
                await until(lambda: locks_asked(proxy) > 2)
                assert set(pulled()) == {1}
                assert seen == [1, 1, 1]

                await stranger.gives_back(group)
                await until(lambda: seen == [1, 1, 1, 0, 0, 0])
                assert pulled()[0] > 0


def locks_asked(proxy: RecordingProxy) -> int:
    """How often the locked queue was asked for."""
    asked = [
        decode_body(LockBatch, each.body)
        for each in requests(proxy)
        if each.code == RequestCode.LOCK_BATCH_MQ
    ]
    return sum(
        any((queue.topic, queue.queue_id) == (TOPIC, 0) for queue in each.mq_set) for each in asked
    )


def requests(proxy: RecordingProxy) -> list[Command]:
    """Everything that the broker was asked through the proxy so far."""
    return [
        decode_command(each) for each in FrameReader().feed(b"".join(proxy.recording.to_server))
    ]


# ---- workers


class Turns:
    """A handler that takes a while, and notes whose turn it was."""

    WORK = 0.003

    def __init__(self) -> None:
        self.order: list[int] = []
        self.most = 0
        self.overlaps = 0
        self.may_go_on = threading.Event()
        self._inside: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, message: ReceivedMessage) -> None:
        with self._lock:
            self.overlaps += message.queue.id in self._inside
            self._inside.append(message.queue.id)
            self.order.append(message.queue.id)
            self.most = max(self.most, len(self._inside))
        self.may_go_on.wait(DEADLINE)
        due = time.monotonic() + self.WORK
        while time.monotonic() < due:
            pass
        with self._lock:
            self._inside.remove(message.queue.id)


@pytest.mark.feature("E7")
async def test_a_queue_keeps_a_worker_for_its_time_slice_and_yields_to_the_others_then(cluster):
    await cluster.create_topic(TOPIC, queues=3)
    for place in range(3):
        await send(cluster, TOPIC, range(20), queue=Queue(TOPIC, "broker-a", place))

    async def order(time_slice):
        turns = Turns()
        consume = ConsumeSettings(workers=1, time_slice=time_slice)
        consumer = consumer_of(cluster, ordered=True, consume=consume)
        consumer.on(TOPIC)(turns)
        async with consumer:
            await until_owned(consumer, 3)
            await until(lambda: pulled(consumer) == 60)
            turns.may_go_on.set()
            await until(lambda: sum(consumer.positions().values()) == 60)
        assert (turns.overlaps, turns.most) == (0, 1)
        return turns.order

    whole, short = await order(60.0), await order(0.01)

    # Three queues, one after the other; and then each before any has had all of its messages.
    assert changes(whole) == 2
    assert changes(short) >= 6
    assert min(last(short, place) for place in range(3)) > max(map(short.index, range(3)))


def pulled(consumer: AsyncConsumer) -> int:
    topic = consumer.statistics().topics.get(TOPIC)
    return 0 if topic is None else topic.pulled


def changes(order: list[int]) -> int:
    return sum(before != after for before, after in pairwise(order))


def last(order: list[int], queue_id: int) -> int:
    return len(order) - 1 - order[::-1].index(queue_id)
