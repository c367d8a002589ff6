"""A broker that can move to another address, beside a name server that stays where it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.command import Started

NAME = "broker-a"


class MovingBroker:
    """A broker as a process of its own, with one name and one folder wherever it listens."""

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
