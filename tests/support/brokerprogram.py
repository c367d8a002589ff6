"""The program of a process that is nothing but clusters: what `orbitmq up` runs, several times.

Each is asked for with a line of JSON on its standard input, and answered with one. Brokers are as
in `orbitmq.testing`: small files and a clock that can be moved on are all that differs from those
of a user. The process ends with the input, and so with whoever started it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from orbitmq.broker.settings import BrokerSettings
from orbitmq.testing import AsyncEmbeddedCluster, MovableClock

#: Longer than any request.
_LONGEST_LINE = 1 << 20


class Clusters:
    """The clusters of this process, by number."""

    def __init__(self) -> None:
        self._clusters: dict[int, AsyncEmbeddedCluster] = {}
        self._next = 0
        self._actions: Mapping[str, Callable[..., Awaitable[Any]]] = {
            "start": self._start,
            "stop": self._stop,
            "restart_broker": self._restart_broker,
            "create_topic": self._create_topic,
            "messages": self._messages,
            "progress": self._progress,
            "behind": self._behind,
            "advance": self._advance,
            "pass_time": self._pass_time,
        }

    async def do(self, action: str, **arguments: Any) -> Any:
        return await self._actions[action](**arguments)

    async def stop_all(self) -> None:
        for cluster in self._clusters.values():
            await cluster.stop()

    async def _start(self, brokers: int, changes: Mapping[str, Any]) -> dict[str, Any]:
        cluster = AsyncEmbeddedCluster(
            brokers=brokers, clock=PassingClock(), adjust=partial(adjusted, changes=changes)
        )
        await cluster.start()
        self._next += 1
        self._clusters[self._next] = cluster
        return {
            "cluster": self._next,
            "name_server": cluster.name_server,
            "brokers": [str(broker.address) for broker in cluster.brokers],
        }

    async def _stop(self, cluster: int) -> None:
        await self._clusters.pop(cluster).stop()

    async def _restart_broker(self, cluster: int, place: int) -> None:
        await self._clusters[cluster].restart_broker(place)

    async def _create_topic(self, cluster: int, topic: str, queues: int) -> None:
        await self._clusters[cluster].create_topic(topic, queues=queues)

    async def _messages(self, cluster: int, topic: str) -> list[str]:
        found = self._clusters[cluster].messages(topic)
        return [base64.b64encode(message.encode()).decode() for message in found]

    async def _progress(self, cluster: int, group: str, topic: str) -> list[tuple[str, int, int]]:
        found = self._clusters[cluster].progress(group, topic)
        return [(broker, queue, offset) for (broker, queue), offset in found.items()]

    async def _behind(self, cluster: int, group: str, topic: str) -> list[tuple[str, int]]:
        return self._clusters[cluster]._behind(group, topic)

    async def _advance(self, cluster: int, seconds: float) -> None:
        self._clusters[cluster].advance(seconds)

    async def _pass_time(self, cluster: int, seconds: float) -> None:
        clock = self._clusters[cluster].clock
        assert isinstance(clock, PassingClock)
        clock.pass_time(seconds)


class PassingClock(MovableClock):
    """A clock of which the time that passed can be moved as well: locks and members grow old."""

    def __init__(self) -> None:
        super().__init__()
        self._passed = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self._passed

    def pass_time(self, seconds: float) -> None:
        self._passed += seconds


def adjusted(settings: BrokerSettings, changes: Mapping[str, Any]) -> BrokerSettings:
    """Settings of a broker with some of them changed; those of a part by a mapping of their own."""
    return replace(
        settings,
        **{
            name: replace(getattr(settings, name), **value) if isinstance(value, dict) else value
            for name, value in changes.items()
        },
    )


async def serve() -> None:
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    clusters = Clusters()
    try:
        while line := await reader.readline():
            try:
                answer = {"is": await clusters.do(**json.loads(line))}
            except Exception as error:  # noqa: BLE001  # raised again by whoever asked
                answer = {"error": f"{error}\n{traceback.format_exc()}"}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        await clusters.stop_all()
        transport.close()


if __name__ == "__main__":
    asyncio.run(serve())
