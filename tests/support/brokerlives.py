"""A cluster of one broker as a process with several lives, on one folder and the same ports."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.command import Started

#: Small files: a start takes no longer than it must, and a folder can be copied.
SMALL = (
    "broker.store.file_size=1048576",
    "broker.store.preallocate_step=0",
    "broker.store.queue_file_entries=1000",
    "broker.store.index_file.slots=1024",
    "broker.store.index_file.entries=4096",
)


class BrokerLives:
    """`orbitmq up`, started and ended as a test likes; leaves nothing running."""

    def __init__(self, data: Path, *settings: str) -> None:
        self.data = data
        self._settings = [word for each in (*SMALL, *settings) for word in ("--set", each)]
        self._ports = ("0", "0")
        self._started: Started | None = None
        #: What it logged in the lives that have ended.
        self.log = ""

    async def __aenter__(self) -> Self:
        """Starts nothing: the first life begins as all others do."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._started is not None:
            await self.end(signal.SIGKILL)

    @property
    def name_server(self) -> str:
        assert self._started is not None
        return self._started.address("name server")

    @property
    def address(self) -> str:
        """Where the broker listens."""
        assert self._started is not None
        return self._started.address("broker-a")

    @property
    def folder(self) -> Path:
        """Where the broker keeps its store."""
        return self.data / "broker-a"

    @property
    def errors(self) -> str:
        """What it has logged in this life."""
        assert self._started is not None
        return self._started.errors

    async def begin(self) -> None:
        """Returns when it has said that it is ready."""
        name_server, broker = self._ports
        ports = ("--namesrv-port", name_server, "--broker-port", broker)
        words = ("up", "--data", str(self.data), *ports, *self._settings)
        self._started = started = await asyncio.to_thread(Started, *words)
        found = (started.address("name server"), started.address("broker-a"))
        self._ports = (found[0].rpartition(":")[2], found[1].rpartition(":")[2])

    async def end(self, number: signal.Signals) -> int:
        """End it by a signal; the exit code."""
        started, self._started = self._started, None
        assert started is not None
        code = await asyncio.to_thread(started.stop, number)
        self.log += started.errors
        return code
