"""A network between clients and a broker that can be bad: slow, cut, silent, half open.

The broker advertises the proxy's address, so that every client comes this way. Who is at the other
end of a connection is found in the tables of the kernel, so that a fault can be for one process: a
partition of one consumer blocks its connections and those that it makes anew.

What is held back by a partition is delivered when it is over, as TCP does it. Half open means that
the broker's side is gone, and nobody told the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

T = TypeVar("T")

_DEADLINE = 30.0
_CHUNK = 65536
#: Chunks that may be on their way in one direction; a full network holds the sender back.
_ON_THE_WAY = 64
_A_MOMENT = 0.01


@dataclass(frozen=True, slots=True)
class Weather:
    """What the network does to a connection."""

    delay: float = 0.0  #: seconds, at most; each chunk has its own, and none overtakes another
    is_blocked: bool = False  #: nothing passes, in either direction
    bytes_per_second: float = 0.0  #: to the client; 0: as fast as it goes


FINE = Weather()


@dataclass(eq=False, slots=True)
class _Link:
    """One connection through the proxy."""

    pid: int | None
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    is_half_open: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class FaultyProxy:
    """Listens for clients in a thread of its own. Its methods may be called from any other."""

    def __init__(self, server_port: int, *, seed: int = 0) -> None:
        self._server_port = server_port
        self._chance = random.Random(seed)  # noqa: S311  # repeats a run
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._listener: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._weather: dict[int | None, Weather] = {}
        self.port = 0

    def start(self, port: int = 0) -> Self:
        self._thread.start()
        self._call(self._listen(port))
        return self

    def close(self) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_DEADLINE)
        self._loop.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    # ---- faults

    def set_weather(self, weather: Weather, pid: int | None = None) -> None:
        """For one process, or for all that have no weather of their own."""
        self._run(lambda: self._weather.__setitem__(pid, weather))

    def clear(self) -> None:
        """The network is fine again; what was half open stays so."""
        self._run(self._weather.clear)

    def cut(self, pid: int | None = None, share: float = 1.0) -> int:
        """Break connections; how many."""
        return self._run(lambda: self._cut(pid, share))

    def half_open(self, pid: int | None = None) -> int:
        """Let the broker's side of connections vanish without a word to the clients; how many."""
        return self._run(lambda: self._half_open(pid))

    def connections(self, pid: int | None = None) -> int:
        return self._run(lambda: len(self._of(pid)))

    # ---- on the loop

    def _of(self, pid: int | None) -> list[_Link]:
        return [link for link in self._links if pid is None or link.pid == pid]

    def _cut(self, pid: int | None, share: float) -> int:
        cut = [link for link in self._of(pid) if self._chance.random() < share]
        for link in cut:
            link.client.transport.abort()
            link.server.transport.abort()
        return len(cut)

    def _half_open(self, pid: int | None) -> int:
        links = [link for link in self._of(pid) if not link.is_half_open]
        for link in links:
            link.is_half_open = True
            link.server.transport.abort()
        return len(links)

    async def _listen(self, port: int) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.port = int(self._listener.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        tasks = [task for link in self._links for task in link.tasks]
        for link in tuple(self._links):
            link.client.transport.abort()
            link.server.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0)  # what was aborted is closed in the next turn

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid = owner_of(int(writer.get_extra_info("peername")[1]))
        try:
            # To the client it looks connected, as behind a firewall that went silent.
            await self._until_unblocked(pid)
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.transport.abort()
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        link = _Link(pid, writer, far_writer)
        self._links.add(link)
        link.tasks = [
            asyncio.create_task(self._carry(link, reader, far_writer, to_client=False)),
            asyncio.create_task(self._carry(link, far_reader, writer, to_client=True)),
        ]
        try:
            await asyncio.wait(link.tasks)
        finally:
            self._links.discard(link)
            writer.transport.abort()
            far_writer.transport.abort()

    async def _carry(
        self,
        link: _Link,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        to_client: bool,
    ) -> None:
        """One direction: what was read is written when its time has come."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_ON_THE_WAY)
        filling = asyncio.create_task(self._fill(link, reader, queue))
        try:
            while True:
                due, data = await queue.get()
                await self._until_passable(link, due)
                if not data:
                    break
                if link.is_half_open:
                    continue
                with contextlib.suppress(ConnectionError):
                    writer.write(data)
                    await writer.drain()
                speed = self._weather_of(link.pid).bytes_per_second
                if to_client and speed:
                    await asyncio.sleep(len(data) / speed)
        finally:
            filling.cancel()
            if not (link.is_half_open and to_client):
                writer.transport.abort() if to_client else writer.close()
        if link.is_half_open and to_client:
            # The client is told nothing: the connection ends when the client ends it.
            await asyncio.wait(link.tasks[:1])

    async def _fill(
        self, link: _Link, reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        latest = 0.0
        while True:
            try:
                data = await reader.read(_CHUNK)
            except ConnectionError:
                data = b""
            delay = self._chance.uniform(0, self._weather_of(link.pid).delay)
            latest = max(latest, self._loop.time() + delay)
            await queue.put((latest, data))
            if not data:
                return

    async def _until_passable(self, link: _Link, due: float) -> None:
        wait = due - self._loop.time()
        if wait > 0:
            await asyncio.sleep(wait)
        await self._until_unblocked(link.pid)

    async def _until_unblocked(self, pid: int | None) -> None:
        while self._weather_of(pid).is_blocked:  # noqa: ASYNC110  # told from other threads
            await asyncio.sleep(_A_MOMENT)

    def _weather_of(self, pid: int | None) -> Weather:
        return self._weather.get(pid) or self._weather.get(None, FINE)

    # ---- from other threads

    def _run(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return self._call(call())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_DEADLINE)


def owner_of(port: int) -> int | None:
    """The process whose connection has this local port; None when the kernel does not tell."""
    inode = _inode_of(port)
    if inode is None:
        return None
    wanted = f"socket:[{inode}]"
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):  # noqa: PTH208  # many, and quickly
                with contextlib.suppress(OSError):
                    if os.readlink(f"{folder}/{name}") == wanted:  # noqa: PTH115
                        return int(folder.parent.name)
    return None


def _inode_of(port: int) -> str | None:
    suffix = f":{port:04X}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            # One that waits for its end has no owner, and another may have its port by now.
            if fields[1].endswith(suffix) and fields[9] != "0":
                return fields[9]
    return None
