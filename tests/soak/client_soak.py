"""Twelve hours of leaks in ten minutes: a thousand lost connections, a hundred consumers.

Run with `make soak`. What is leaked in a night of reconnects and deployments is leaked here as
often; memory counts as well, because it has had time to settle.

Memory by itself says little: allocators keep what was freed. Objects that the collector knows are
counted by their type instead; what is leaked once for every connection or consumer shows as one
type, or several, that have grown by about as many. The broker is a process of its own, so that what
is counted is the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType
from typing import TypeAlias

import pytest

from orbitmq.client.consumer.consumer import AsyncConsumer, Consumer
from orbitmq.client.consumer.settings import PullSettings
from orbitmq.client.message import ReceivedMessage
from orbitmq.client.producer.producer import AsyncProducer, Producer
from orbitmq.client.pullconsumer.consumer import AsyncPullConsumer, PollSettings, PullConsumer
from orbitmq.parsing import Position
from orbitmq.remoting.connection import Connection, call_on_loop
from tests.support import command
from tests.support.client import quick_settings
from tests.support.consuming import until

TOPIC = "leaks"
#: Of a step that has to wait for reconnects, on a busy machine.
DEADLINE = 60.0

#: What every timer has, also one that was cancelled.
_OF_TIMERS = frozenset({"_contextvars.Context"})
#: Made for classes and tasks by whoever has a cache of them, and gone with those.
_OF_CACHES = frozenset({"weakref.ReferenceType"})

#: Objects of one kind that belong to what is on its way out, and soon are gone.
_JUST_GOING = 16

Step: TypeAlias = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Census:
    """What this process holds."""

    threads: int
    descriptors: int
    tasks: int
    memory: int
    objects: Counter[str] = field(repr=False)

    @classmethod
    def taken(cls) -> Census:
        for _ in range(3):
            gc.collect()
        kinds = (type(each) for each in gc.get_objects() if not _is_kept_by_python(each))
        return cls(
            threads=threading.active_count(),
            descriptors=sum(1 for _ in Path("/proc/self/fd").iterdir()),
            tasks=len(asyncio.all_tasks()),
            memory=_own_memory(),
            objects=Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds),
        )

    def grown(self, before: Census, *, by: int) -> dict[str, int]:
        """The kinds of objects of which there are at least so many more."""
        more = {
            name: count - before.objects[name]
            for name, count in self.objects.items()
            if name not in _OF_TIMERS | _OF_CACHES
        }
        return {name: count for name, count in more.items() if count >= by}


async def settled_census(before: Census | None = None) -> Census:
    """A census when what was begun has ended: no more of anything than before, if that comes."""
    with contextlib.suppress(TimeoutError):
        if before is not None:
            await until(lambda: _has_settled(Census.taken(), before), deadline=10.0)
    return Census.taken()


def _has_settled(now: Census, before: Census) -> bool:
    return (
        now.threads <= before.threads
        and now.descriptors <= before.descriptors
        and now.tasks <= before.tasks
        and not now.grown(before, by=_JUST_GOING)
    )


def check_flat(before: Census, after: Census, *, times: int) -> None:
    """Nothing is left of what was done so many times since the first census."""
    few = max(8, times // 2)  # connections that are just coming or going; a leak counts `times`
    assert after.threads < before.threads + few, [each.name for each in threading.enumerate()]
    assert after.descriptors < before.descriptors + few
    assert after.tasks < before.tasks + few, [task.get_name() for task in asyncio.all_tasks()]
    grown = after.grown(before, by=times)
    assert not grown, grown


def _is_kept_by_python(found: object) -> bool:
    """A timer that was cancelled, or what an abstract class notes of a class it was asked about.

    asyncio keeps up to a hundred such timers until they are due. An abstract class keeps a weak
    reference for each class that `isinstance` has seen, and with it a function that ends it.
    """
    if isinstance(found, asyncio.TimerHandle):
        return found.cancelled()
    return type(found) is BuiltinFunctionType and found.__name__ == "_destroy"


def _own_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("the kernel does not tell how much memory is anonymous")


@contextlib.contextmanager
def cluster_process(folder: Path) -> Iterator[str]:
    """A name server and a broker in another process; gives the address of the name server."""
    with command.Started(
        *("up", "--json", "--namesrv-port", "0", "--broker-port", "0"),
        *("--log-level", "error", "--data", str(folder)),
    ) as started:
        told = [json.loads(line) for line in started.lines]
        yield next(each["address"] for each in told if each.get("role") == "name server")


# ---- reconnecting


class Reconnecting:
    """Clients of every kind whose connections are cut, over and over, while they work."""

    def __init__(self, name_server: str) -> None:
        self._name_server = name_server
        #: Connections that were cut.
        self.cut = 0
        self._consumed: set[bytes] = set()
        self._polled: set[bytes] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Reconnecting]:
        client = quick_settings(self._name_server)
        pull = PullSettings(error_delay=0.02)
        consumer = AsyncConsumer("pushed", client=client, consume_from=Position.FIRST, pull=pull)
        consumer.on(TOPIC)(self._consume)
        threads = Producer("threads", client=client)
        async with (
            AsyncProducer("loop", client=client) as self._producer,
            consumer,
            AsyncPullConsumer(
                "polled", client=client, consume_from="first", polling=PollSettings(pull=pull)
            ) as self._puller,
        ):
            await self._producer.send(TOPIC, b"makes the topic")
            self._puller.subscribe(TOPIC)
            await asyncio.to_thread(threads.start)
            self._threads = threads
            try:
                yield self
            finally:
                await asyncio.to_thread(threads.stop)

    def _consume(self, message: ReceivedMessage) -> None:
        self._consumed.add(message.body)

    async def step(self, number: int) -> None:
        """Cut everything; then send with every producer, and receive with every consumer."""
        for each in gc.get_objects():
            if isinstance(each, Connection) and each.is_open:
                call_on_loop(each._loop, each.abort, "cut by the test")
                self.cut += 1
        bodies = {f"loop {number}".encode(), f"thread {number}".encode()}
        first, second = sorted(bodies)
        await self._producer.send(TOPIC, first, timeout=DEADLINE)
        await asyncio.to_thread(self._threads.send, TOPIC, second, timeout=DEADLINE)
        async with asyncio.timeout(DEADLINE):
            while not bodies <= self._polled:
                self._polled |= {each.body for each in await self._puller.poll(timeout=1.0)}
            await until(lambda: bodies <= self._consumed, deadline=DEADLINE)
        self._consumed.clear()
        self._polled.clear()


# ---- restarting


class Restarting:
    """Consumers of every kind that are started, consume a message, and are stopped."""

    def __init__(self, name_server: str) -> None:
        self._client = quick_settings(name_server)

    async def step(self, number: int) -> None:
        """One consumer, the kinds in turn."""
        async with AsyncProducer("restarts", client=self._client) as producer:
            await producer.send(TOPIC, b"%d" % number)
        kinds: tuple[Step, ...] = (self._push, self._push_in_order, self._push_sync, self._poll)
        await kinds[number % len(kinds)]()

    async def _push_in_order(self) -> None:
        await self._push("ordered", ordered=True)

    async def _push(self, group: str = "async", *, ordered: bool = False) -> None:
        seen: list[ReceivedMessage] = []
        consumer = AsyncConsumer(
            group, client=self._client, consume_from=Position.FIRST, ordered=ordered
        )

        @consumer.on(TOPIC)
        async def take(message: ReceivedMessage) -> None:
            seen.append(message)

        async with consumer:
            await until(lambda: seen, deadline=DEADLINE)

    async def _push_sync(self) -> None:
        seen = threading.Event()
        consumer = Consumer("sync", client=self._client, consume_from=Position.FIRST)

        @consumer.on(TOPIC)
        def take(_: ReceivedMessage) -> None:
            seen.set()

        def consume() -> None:
            with consumer:
                assert seen.wait(DEADLINE)

        await asyncio.to_thread(consume)

    async def _poll(self) -> None:

        def poll() -> None:
            with PullConsumer("polled-once", client=self._client, consume_from="first") as consumer:
                consumer.subscribe(TOPIC)
                assert consumer.poll(timeout=DEADLINE)

        await asyncio.to_thread(poll)


_MIB = 1024 * 1024
#: What allocators keep beside, whatever happens.
_MEMORY = 16 * _MIB


def _report(what: str, before: Census, after: Census, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(
            f"\n{what}: threads {before.threads} -> {after.threads}, "
            f"descriptors {before.descriptors} -> {after.descriptors}, "
            f"tasks {before.tasks} -> {after.tasks}, "
            f"objects {before.objects.total():,} -> {after.objects.total():,}, "
            f"memory {before.memory / _MIB:.1f} -> {after.memory / _MIB:.1f} MiB"
        )


@pytest.fixture
def name_server(tmp_path, caplog):
    # Records are kept for reports of failures, with all that they mention.
    caplog.set_level(logging.CRITICAL, "orbitmq")
    with cluster_process(tmp_path) as address:
        yield address


@pytest.mark.timeout(1200)
async def test_a_thousand_lost_connections_leave_nothing(name_server, capsys):
    async with Reconnecting(name_server).running() as clients:
        number = 0
        while clients.cut < 200:
            await clients.step(number)
            number += 1
        before, warm = await settled_census(), number

        while clients.cut < 1200:
            await clients.step(number)
            number += 1

        after = await settled_census(before)
    _report("1,000 reconnects", before, after, capsys)
    check_flat(before, after, times=number - warm)
    assert after.memory - before.memory < _MEMORY


@pytest.mark.timeout(1200)
async def test_a_hundred_stopped_consumers_leave_nothing(name_server, capsys):
    restarting = Restarting(name_server)
    for number in range(20):
        await restarting.step(number)
    before = await settled_census()

    for number in range(20, 120):
        await restarting.step(number)

    after = await settled_census(before)
    _report("100 restarts of consumers", before, after, capsys)
    check_flat(before, after, times=100)
    assert after.memory - before.memory < _MEMORY
