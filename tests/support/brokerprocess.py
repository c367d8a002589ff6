"""Clusters in a process of their own, for tests that need nothing of the inside of a broker.

One process is started for all tests of a run (of each worker that runs tests); in it every test
gets a new cluster, which costs no more than one inside of the test. What such a test proves, it
proves across processes: nothing can reach the broker but what comes over its sockets.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from orbitmq.broker.broker import Broker
from orbitmq.message.stored import StoredMessage, decode_message
from orbitmq.remoting.settings import Address, parse_address
from orbitmq.testing import AsyncEmbeddedCluster, EmbeddedCluster
from tests.support.command import DEADLINE, environment

ROOT = Path(__file__).parents[2]


class BrokerProcess:
    """A process with clusters. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.support.brokerprogram"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment(),
        )
        self._unread = b""
        self._line = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE)
        finally:
            self._process.kill()
            self._process.wait(DEADLINE)
            self._process.stdout.close()

    def ask(self, action: str, **arguments: Any) -> Any:
        """Have something done there, and return what it said; raises what it raised."""
        with self._line:
            assert self._process.stdin is not None
            request = json.dumps({"action": action, **arguments})
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._read_line())
        if "error" in answer:
            raise RuntimeError(f"{action} in the broker's process: {answer['error']}")
        return answer["is"]

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        until = time.monotonic() + DEADLINE
        while b"\n" not in self._unread:
            ready, _, _ = select.select([stream], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the broker's process said nothing for {DEADLINE:g} s"
            data = os.read(stream, 1 << 20)
            assert data, "the broker's process has ended"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A broker in another process: all that can be had of it is where it listens."""

    address: Address


class ProcessCluster(AsyncEmbeddedCluster):
    """A cluster in another process, with what tests use of one inside; `brokers` have addresses."""

    def __init__(
        self, process: BrokerProcess, *, brokers: int = 1, changes: Mapping[str, Any] | None = None
    ) -> None:
        """`changes` are settings of the brokers; those of a part are a mapping of their own."""
        super().__init__(brokers=brokers)
        self._process = process
        self._changes = dict(changes or {})
        self._number: int | None = None
        self._name_server = ""
        self._addresses: tuple[Address, ...] = ()

    async def start(self) -> None:
        found = await self._ask("start", brokers=self._count, changes=self._changes)
        self._number = found["cluster"]
        self._name_server = found["name_server"]
        self._addresses = tuple(parse_address(each) for each in found["brokers"])

    async def stop(self) -> None:
        number, self._number = self._number, None
        if number is not None:
            await self._ask("stop", cluster=number)

    async def restart_broker(self, place: int = 0) -> None:
        await self._ask("restart_broker", cluster=self._number, place=place)

    @property
    def name_server(self) -> str:
        return self._name_server

    @property
    def brokers(self) -> tuple[Broker, ...]:
        return tuple(cast("Broker", _Elsewhere(address)) for address in self._addresses)

    async def create_topic(self, topic: str, *, queues: int = 4) -> None:
        await self._ask("create_topic", cluster=self._number, topic=topic, queues=queues)

    def messages(self, topic: str) -> list[StoredMessage]:
        found = self._process.ask("messages", cluster=self._number, topic=topic)
        return [decode_message(base64.b64decode(each)) for each in found]

    def progress(self, group: str, topic: str) -> dict[tuple[str, int], int]:
        found = self._process.ask("progress", cluster=self._number, group=group, topic=topic)
        return {(broker, queue): offset for broker, queue, offset in found}

    def _behind(self, group: str, topic: str) -> list[tuple[str, int]]:
        found = self._process.ask("behind", cluster=self._number, group=group, topic=topic)
        return [(place, lag) for place, lag in found]

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self._process.ask("advance", cluster=self._number, seconds=seconds)

    def pass_time(self, seconds: float) -> None:
        """Let what brokers measure pass, which `advance` does not: locks and members grow old."""
        self._process.ask("pass_time", cluster=self._number, seconds=seconds)

    async def _ask(self, action: str, **arguments: Any) -> Any:
        """What may take a while is not waited for on the loop."""
        return await asyncio.to_thread(self._process.ask, action, **arguments)


class BlockingProcessCluster(EmbeddedCluster):
    """The same for tests without an event loop of their own."""

    def __init__(self, process: BrokerProcess, *, brokers: int = 1) -> None:
        super().__init__(brokers=brokers)
        self._cluster = ProcessCluster(process, brokers=brokers)
        self.clock = self._cluster.clock
