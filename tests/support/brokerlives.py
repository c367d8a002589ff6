"""Brokers as processes with several lives, on one folder and the same ports."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Self

from tests.support.command import Started

NAME = "broker-a"
#: Small files: a start takes no longer than it must, and a folder can be copied.
SMALL = (
    "broker.store.file_size=1048576",
    "broker.store.preallocate_step=0",
    "broker.store.queue_file_entries=1000",
    "broker.store.index_file.slots=1024",
    "broker.store.index_file.entries=4096",
)


class BrokerProcess:
    """A name server and a broker, `orbitmq up`; leaves nothing running."""

    def __init__(self, data: Path, *settings: str) -> None:
        self.data = data
        #: Where the broker keeps its store.
        self.folder = data / NAME
        #: What it logged in the lives that have ended.
        self.log = ""
        self._settings = [word for each in settings for word in ("--set", each)]
        self._ports = ("0", "0")
        self._started: Started | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._started is not None:
            self.stop()

    @property
    def errors(self) -> str:
        """What it has logged in this life."""
        assert self._started is not None
        return self._started.errors

    def start(self) -> None:
        """Return when it is ready."""
        name_server, broker = self._ports
        ports = ("--namesrv-port", name_server, "--broker-port", broker)
        self._started = Started("up", "--data", str(self.data), *ports, *self._settings)
        self.name_server = self._started.address("name server")
        self.address = self._started.address(NAME)
        self._ports = (self.name_server.rpartition(":")[2], self.address.rpartition(":")[2])

    def stop(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End it by a signal; the exit code."""
        started, self._started = self._started, None
        assert started is not None
        code = started.stop(number)
        self.log += started.errors
        return code


class BrokerLives(BrokerProcess):
    """The same beside the event loop of a test, and with small files."""

    def __init__(self, data: Path, *settings: str) -> None:
        super().__init__(data, *SMALL, *settings)

    async def __aenter__(self) -> Self:
        """Starts nothing: the first life begins as all others do."""
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.__exit__)

    async def begin(self) -> None:
        await asyncio.to_thread(self.start)

    async def end(self, number: signal.Signals) -> int:
        return await asyncio.to_thread(self.stop, number)
