"""Brokers as processes with several lives, on one folder and the same ports."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence
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


class MovingBroker:
    """A broker beside a name server, with one name and one folder wherever it listens."""

    def __init__(self, name_server: str, data: Path, settings: Sequence[str] = ()) -> None:
        self.name_server = name_server
        self._words = [
            *("broker", "--name", NAME, "--data", str(data), "--port", "0"),
            *("--name-server", name_server),
            *(word for each in settings for word in ("--set", each)),
        ]
        self._started = Started(*self._words)

    @property
    def address(self) -> str:
        """Where it listens now."""
        return self._started.address(NAME)

    def move(self) -> None:
        """Stop it in order, and start it on another port with all that it has."""
        before = self.address
        while self.address == before:  # by chance it may get the same port again
            code = self._started.stop()
            assert code == 0, self._started.errors
            self._started = Started(*self._words)

    def end(self) -> None:
        self._started.__exit__()


@contextlib.contextmanager
def moving_broker(data: Path, *settings: str) -> Iterator[MovingBroker]:
    """A name server and a broker, each a process; neither outlives the test."""
    with Started("namesrv", "--port", "0") as server:
        broker = MovingBroker(server.address("name server"), data, settings)
        try:
            yield broker
        finally:
            broker.end()
