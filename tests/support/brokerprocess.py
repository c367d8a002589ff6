"""Clusters in a process of their own, for tests that need nothing of the inside of a broker.

One process is started for all tests of a run (of each worker that runs tests); in it every test
gets a new cluster, which costs no more than one inside of the test. What such a test proves, it
proves across processes: nothing can reach the broker but what comes over its sockets.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.managers import BaseManager
from typing import Any, cast

from orbitmq.broker.broker import Broker
from orbitmq.message.stored import StoredMessage, decode_message
from orbitmq.remoting.settings import Address, parse_address
from orbitmq.testing import AsyncEmbeddedCluster, EmbeddedCluster
from tests.support.brokerprogram import HostedCluster


class BrokerProcess(BaseManager):
    """A process with clusters."""

    cluster: Callable[[int, Mapping[str, Any]], HostedCluster]

    def __init__(self) -> None:
        super().__init__(ctx=multiprocessing.get_context("spawn"))


BrokerProcess.register(
    "cluster",
    HostedCluster,
    exposed=(
        *("begin", "stop", "restart_broker", "create_topic", "records", "progress", "behind"),
        "advance",
    ),
)


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
        self._there = process.cluster(brokers, dict(changes or {}))
        self._name_server = ""
        self._addresses: tuple[Address, ...] = ()

    # What may take a while is not waited for on the loop.

    async def start(self) -> None:
        self._name_server, addresses = await asyncio.to_thread(self._there.begin)
        self._addresses = tuple(map(parse_address, addresses))

    async def stop(self) -> None:
        await asyncio.to_thread(self._there.stop)

    async def restart_broker(self, place: int = 0) -> None:
        await asyncio.to_thread(self._there.restart_broker, place)

    async def create_topic(self, topic: str, *, queues: int = 4) -> None:
        await asyncio.to_thread(self._there.create_topic, topic, queues=queues)

    @property
    def name_server(self) -> str:
        return self._name_server

    @property
    def brokers(self) -> tuple[Broker, ...]:
        return tuple(cast("Broker", _Elsewhere(address)) for address in self._addresses)

    def messages(self, topic: str) -> list[StoredMessage]:
        return [decode_message(record) for record in self._there.records(topic)]

    def progress(self, group: str, topic: str) -> dict[tuple[str, int], int]:
        return self._there.progress(group, topic)

    def behind(self, group: str, topic: str) -> list[tuple[str, int]]:
        return self._there.behind(group, topic)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self._there.advance(seconds)


class BlockingProcessCluster(EmbeddedCluster):
    """The same for tests without an event loop of their own."""

    def __init__(self, process: BrokerProcess, *, brokers: int = 1) -> None:
        super().__init__(brokers=brokers)
        self._cluster = ProcessCluster(process, brokers=brokers)
        self.clock = self._cluster.clock
