"""Masters and slaves for tests: real brokers that follow each other on free ports."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from orbitmq.broker.broker import Broker
from orbitmq.broker.replication.master import ReplicaServer
from orbitmq.broker.replication.slave import LogFollower
from orbitmq.broker.settings import ReplicationSettings
from orbitmq.remoting.settings import Address
from tests.support.broker import RawClient, bodies_in, until

#: Quick, so that tests need not wait.
QUICK = ReplicationSettings(retry=0.02, heartbeat=0.5, silence=5.0)
SERVING = replace(QUICK, serve=True, port=0)


def serving(broker: Broker) -> ReplicaServer:
    found = broker.parts.replication.serving
    assert found is not None
    return found


def following(broker: Broker) -> LogFollower:
    found = broker.parts.replication.following
    assert found is not None
    return found


def slave_of(master: Broker, **changes: Any) -> dict[str, Any]:
    """Settings that make a slave of this master."""
    told = {"master": str(master.address), "master_ha": str(serving(master).address)}
    return {"broker_id": 1, "replication": replace(QUICK, **(told | changes))}


async def until_copied(master: Broker, slave: Broker) -> None:
    """Return when the slave has what the master has."""
    mine, theirs = master.parts.store.mirroring, slave.parts.store.mirroring
    await until(lambda: theirs.written == mine.end, 20.0)


async def until_rounds(slave: Broker, more: int = 1, deadline: float = 10.0) -> None:
    """Return when the slave has copied the tables once more."""
    copying = slave.parts.replication.copying
    assert copying is not None
    goal = copying.rounds + more
    await until(lambda: copying.rounds >= goal, deadline)


def log_bytes(root: Path) -> dict[str, bytes]:
    """The files of the log, by name."""
    return {each.name: each.read_bytes() for each in sorted((root / "commitlog").iterdir())}


async def consume(client: RawClient, topic: str, queue_id: int = 0, offset: int = 0) -> list[bytes]:
    """All messages of a queue from an offset on, pulled as a consumer does."""
    found: list[bytes] = []
    while (answer := await client.pull(topic, queue_id, offset)).code == 0:
        found += bodies_in(answer)
        offset = int(answer.ext_fields["nextBeginOffset"])
    return found


class RawSlave:
    """A slave made of a socket, to do what real ones do not."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    async def open(cls, address: Address, *, window: int | None = None) -> RawSlave:
        """`window` limits what the system takes for it without being read."""
        connection = socket.socket()
        if window is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, tuple(address))
        return cls(connection)

    async def report(self, offset: int) -> None:
        await self.say(offset.to_bytes(8, "big", signed=True))

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def frame(self) -> tuple[int, bytes]:
        head = await self.read(12)
        size = int.from_bytes(head[8:], "big", signed=True)
        return int.from_bytes(head[:8], "big", signed=True), await self.read(size)

    async def read(self, size: int) -> bytes:
        """So many bytes; what there is when the master closes before."""
        found = b""
        async with asyncio.timeout(30):
            while len(found) < size:
                data = await asyncio.get_running_loop().sock_recv(self._socket, size - len(found))
                if not data:
                    break
                found += data
        return found

    def close(self) -> None:
        self._socket.close()
