"""A cluster in the process of a test, on free ports, with its data in a temporary folder.

It differs from a cluster that `orbitmq up` starts in small files and a movable clock only: the
store is on the disk, requests come over sockets, and clients find topics through a name server.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import string
import tempfile
import time
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from orbitmq.arguments import explained
from orbitmq.broker.broker import Broker
from orbitmq.broker.settings import BrokerSettings
from orbitmq.broker.topics import READ_WRITE
from orbitmq.client.engine import AsyncLife
from orbitmq.client.loopthread import Life, LoopThread
from orbitmq.client.producer.producer import Producer
from orbitmq.client.producer.send import SendResult
from orbitmq.cluster import Cluster
from orbitmq.errors import OrbitError, SettingError
from orbitmq.message.stored import StoredMessage, decode_messages
from orbitmq.names import DEAD_LETTER_PREFIX, RETRY_PREFIX, topic_problem
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.settings import ServerSettings
from orbitmq.store.settings import IndexSettings, StoreSettings
from orbitmq.wire.bodies import TopicConfig

MIB = 1024 * 1024

#: Small files without preallocation: tests write little.
_STORE = StoreSettings(
    file_size=64 * MIB,
    preallocate_step=0,
    index_file=IndexSettings(slots=10_000, entries=100_000),
)
#: Queues of a topic on one broker; more is a mistake.
MOST_QUEUES = 1024
#: Seconds between two checks of a condition that is waited for.
_CHECK_INTERVAL = 0.02
#: Messages of a queue in one read.
_READ_SIZE = 1000
_NOT_STARTED = "the cluster is not started; use it as a context manager"


@explained()
class AsyncEmbeddedCluster(AsyncLife):
    """A name server and brokers on the caller's event loop.

    async with AsyncEmbeddedCluster(brokers=2) as cluster:
        await cluster.create_topic("orders", queues=4)
    """

    def __init__(
        self,
        *,
        brokers: int = 1,
        folder: Path | str | None = None,
        clock: MovableClock | None = None,
        adjust: Callable[[BrokerSettings], BrokerSettings] | None = None,
    ) -> None:
        """`folder` keeps the data afterwards; `adjust` changes the settings of every broker."""
        if not 1 <= brokers <= 26:
            raise OrbitError(f"a cluster can have 1 to 26 brokers, got {brokers}")
        self.clock = clock or MovableClock()
        self._count = brokers
        self._folder = None if folder is None else Path(folder)
        self._adjust = adjust
        self._remove_data: Callable[[], object] | None = None
        self._cluster: Cluster | None = None

    async def start(self) -> None:
        """Returns when clients find every broker."""
        folder = self._folder
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="orbitmq-"))
            # Removed at the end of the process if the cluster is not stopped.
            self._remove_data = weakref.finalize(self, _remove, folder, os.getpid())
        name_server = NameServerSettings(server=ServerSettings(port=0))
        brokers = [self._settings(folder, place) for place in range(self._count)]
        cluster = Cluster(name_server, brokers, clock=self.clock)
        try:
            await cluster.start()
        except BaseException:
            self._forget_data()
            raise
        self._cluster = cluster

    async def stop(self) -> None:
        """Stop everything and remove the data, unless it has a folder of its own."""
        cluster, self._cluster = self._cluster, None
        try:
            if cluster is not None:
                await cluster.stop()
        finally:
            self._forget_data()

    @property
    def name_server(self) -> str:
        """The address to give to clients."""
        return str(self.running.name_server_address)

    @property
    def brokers(self) -> tuple[Broker, ...]:
        return tuple(self.running.brokers)

    async def create_topic(self, topic: str, *, queues: int = 4) -> None:
        """Create a topic on every broker; returns when clients find it."""
        problem = topic_problem(topic)
        if problem is not None:
            raise SettingError(f"create_topic: {problem}")
        if not 1 <= queues <= MOST_QUEUES:
            raise SettingError(f"create_topic: queues must be 1 to {MOST_QUEUES}, got {queues}")
        for broker in self.brokers:
            parts = broker.parts
            config = TopicConfig(
                topic_name=topic,
                read_queue_nums=queues,
                write_queue_nums=queues,
                perm=READ_WRITE,
            )
            parts.topics.update(config, now=parts.clock.now())
            parts.registration.notice()
        names = [broker.parts.settings.name for broker in self.brokers]
        await self.running.until_routed(topic, names)

    def messages(self, topic: str) -> list[StoredMessage]:
        """What is in a topic and can be read, in the order in which it was stored.

        Raises `OrbitError` for a topic that no broker has. Topics of retries and dead letters are
        created on demand, and are empty before that.
        """
        is_created_on_demand = topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
        tables = [broker.parts.topics for broker in self.brokers]
        if not is_created_on_demand and not any(
            topic in table or table.is_system(topic) for table in tables
        ):
            raise OrbitError(
                f"no broker of the cluster has a topic {topic!r}; there are "
                f"{', '.join(self._own_topics()) or 'none but those of the system'}"
            )
        found = [message for broker in self.brokers for message in _messages(broker, topic)]
        return sorted(found, key=lambda message: (message.store_ms, message.physical_offset))

    def progress(self, group: str, topic: str) -> dict[tuple[str, int], int]:
        """The committed offsets of a group, by broker and queue."""
        return {
            (broker.parts.settings.name, queue_id): offset
            for broker in self.brokers
            for queue_id, offset in broker.parts.progress.offsets(topic, group).items()
        }

    async def until_consumed(self, group: str, topic: str, *, timeout: float = 10.0) -> None:  # noqa: ASYNC109  # named in the error
        """Wait until the group's progress at the brokers has reached the end of the topic.

        Push consumers commit soon after they are idle, pull consumers every five seconds, and all
        consumers when they stop.
        """
        try:
            async with asyncio.timeout(timeout):
                while self.behind(group, topic):  # noqa: ASYNC110  # of two tables, neither of which tells
                    await asyncio.sleep(_CHECK_INTERVAL)
        except TimeoutError as error:
            behind = ", ".join(f"{place}: {lag}" for place, lag in self.behind(group, topic))
            raise OrbitError(
                f"group {group!r} has not reported all of {topic!r} as consumed within "
                f"{timeout:g} s; messages behind by queue: {behind}"
            ) from error

    def behind(self, group: str, topic: str) -> list[tuple[str, int]]:
        """The queues with lag, and their lags."""
        done = self.progress(group, topic)
        lags = [
            (broker.parts.settings.name, queue.queue_id, queue.max_offset)
            for broker in self.brokers
            for queue in broker.parts.store.queues()
            if queue.topic == topic
        ]
        return [
            (f"{name}:{queue_id}", end - done.get((name, queue_id), 0))
            for name, queue_id, end in lags
            if end > done.get((name, queue_id), 0)
        ]

    def advance(self, seconds: float) -> None:
        """Advance the clock; messages that become due are delivered immediately."""
        self.clock.advance(seconds)
        for broker in self.brokers:
            broker.parts.delays.wake()
            broker.parts.timers.wake()

    async def restart_broker(self, place: int = 0) -> None:
        """Stop a broker and start it again, with the same address and data."""
        cluster = self.running
        if not 0 <= place < len(cluster.brokers):
            last = len(cluster.brokers) - 1
            raise OrbitError(f"restart_broker: the brokers are 0 to {last}, got {place}")
        broker = cluster.brokers[place]
        settings, port = broker.parts.settings, broker.address.port
        await broker.stop()
        again = replace(settings, server=replace(settings.server, port=port))
        cluster.brokers[place] = restarted = Broker(again, clock=self.clock)
        await restarted.start()
        await cluster.until_registered([settings.name])

    def _own_topics(self) -> list[str]:
        """The topics that tests have created."""
        return sorted(
            {
                config.topic_name
                for broker in self.brokers
                for config in broker.parts.topics
                if not broker.parts.topics.is_system(config.topic_name)
            }
        )

    @property
    def running(self) -> Cluster:
        """What has been started. Raises `OrbitError` before that."""
        if self._cluster is None:
            raise OrbitError(_NOT_STARTED)
        return self._cluster

    def _settings(self, folder: Path, place: int) -> BrokerSettings:
        name = f"broker-{string.ascii_lowercase[place]}"
        settings = BrokerSettings(
            root=folder / name,
            name=name,
            server=ServerSettings(port=0),
            store=_STORE,
            stop_grace=1.0,
            vip=False,
        )
        return settings if self._adjust is None else self._adjust(settings)

    def _forget_data(self) -> None:
        if self._remove_data is not None:
            self._remove_data()
            self._remove_data = None


def _remove(folder: Path, process: int) -> None:
    """Remove the folder, unless this is a forked child of the process that owns it."""
    if os.getpid() == process:
        shutil.rmtree(folder)


def _messages(broker: Broker, topic: str) -> list[StoredMessage]:
    store = broker.parts.store
    found: list[StoredMessage] = []
    for queue in store.queues():
        if queue.topic != topic:
            continue
        offset = queue.min_offset
        while offset < queue.max_offset:
            result = store.read(topic, queue.queue_id, offset, _READ_SIZE)
            for piece in result.pieces:
                found += decode_messages(bytes(piece))
            if result.next_offset <= offset:
                break
            offset = result.next_offset
    return found


R = TypeVar("R")

#: Seconds for any single step, so that a failing test ends.
_DEADLINE = 60.0


@explained()
class EmbeddedCluster(Life):
    """A name server and brokers on an event loop of their own, in a background thread.

    with EmbeddedCluster() as cluster:
        run_my_pipeline(name_server=cluster.name_server)

    Every method may be called from any other thread.
    """

    def __init__(
        self,
        *,
        brokers: int = 1,
        folder: Path | str | None = None,
        clock: MovableClock | None = None,
        adjust: Callable[[BrokerSettings], BrokerSettings] | None = None,
    ) -> None:
        """`folder` keeps the data afterwards; `adjust` changes the settings of every broker."""
        self._cluster = AsyncEmbeddedCluster(
            brokers=brokers, folder=folder, clock=clock, adjust=adjust
        )
        self._thread = LoopThread("orbitmq-cluster")
        self._producer: Producer | None = None
        self.clock = self._cluster.clock

    def start(self) -> None:
        """Returns when clients find every broker."""
        if self._thread.is_running:
            raise OrbitError("the cluster is started already")
        self._thread.start()
        try:
            self.run(self._cluster.start())
        except BaseException:
            self._thread.stop(_DEADLINE)
            raise

    def stop(self) -> None:
        """Stop everything and remove the data, unless it has a folder of its own."""
        if not self._thread.is_running:
            return
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.stop()
        try:
            self.run(self._cluster.stop())
        finally:
            self._thread.stop(_DEADLINE)

    @property
    def name_server(self) -> str:
        """The address to give to clients."""
        return self._cluster.name_server

    @property
    def brokers(self) -> tuple[Broker, ...]:
        """They belong to the loop of the cluster: look at them through `call`."""
        return self._cluster.brokers

    @property
    def broker_addresses(self) -> tuple[str, ...]:
        return tuple(str(broker.address) for broker in self.brokers)

    def create_topic(self, topic: str, *, queues: int = 4) -> None:
        """Create a topic on every broker; returns when clients find it."""
        self.run(self._cluster.create_topic(topic, queues=queues))

    def send(self, topic: str, *bodies: bytes | str, **fields: Any) -> list[SendResult]:
        """Send a message for each body; `fields` are those of `Producer.send`: tags, keys, ..."""
        self._check_started()
        if self._producer is None:
            self._producer = Producer("orbitmq-testing", name_server=self.name_server)
            self._producer.start()
        return [self._producer.send(topic, body, **fields) for body in bodies]

    def behind(self, group: str, topic: str) -> list[tuple[str, int]]:
        """The queues with lag, and their lags."""
        return self.call(lambda: self._cluster.behind(group, topic))

    def until_consumed(self, group: str, topic: str, *, timeout: float = 10.0) -> None:
        """Wait until the group's progress at the brokers has reached the end of the topic.

        Push consumers commit soon after they are idle, pull consumers every five seconds, and all
        consumers when they stop.
        """
        self.run(self._cluster.until_consumed(group, topic, timeout=timeout))

    def messages(self, topic: str) -> list[StoredMessage]:
        """What is in a topic and can be read, in the order in which it was stored."""
        return self.call(lambda: self._cluster.messages(topic))

    def progress(self, group: str, topic: str) -> dict[tuple[str, int], int]:
        """The committed offsets of a group, by broker and queue."""
        return self.call(lambda: self._cluster.progress(group, topic))

    def advance(self, seconds: float) -> None:
        """Advance the clock; messages that become due are delivered immediately."""
        self.call(lambda: self._cluster.advance(seconds))

    def restart_broker(self, place: int = 0) -> None:
        """Stop a broker and start it again, with the same address and data."""
        self.run(self._cluster.restart_broker(place))

    def call(self, function: Callable[[], R]) -> R:
        """What a function returns that is called on the loop of the cluster."""

        async def call() -> R:
            return function()

        return self.run(call())

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the loop of the cluster."""
        try:
            self._check_started()
        except OrbitError:
            work.close()
            raise
        return self._thread.run(work, _DEADLINE)

    def _check_started(self) -> None:
        if not self._thread.is_running:
            raise OrbitError(_NOT_STARTED)


class MovableClock:
    """A clock whose time of day can be moved.

    Delays become due and messages old; connections and members of groups stay, because they are
    watched by the monotonic clock.
    """

    def __init__(self) -> None:
        self._ahead = 0.0

    def now(self) -> float:
        return time.time() + self._ahead

    def monotonic(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        """Move the time of day; a negative number moves it back, as NTP can."""
        self._ahead += seconds
