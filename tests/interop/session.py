"""Apache's client in one process that runs many commands side by side.

What `Driver` starts a process for, a `Session` is told by a line (``java/Session.java``), so that
a consumer can stay online while others send, join and leave.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from tests.interop.apache import IPV4, STOP_DEADLINE, DriverFailed, _write_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.interop.apache import Release

DEADLINE = 60.0

#: Consumers look for changes this often; they are told of most changes, but not of new routes.
OFTEN = ("-Drocketmq.client.rebalance.waitInterval=1000",)


class Running:
    """A command of a session: what it has printed so far, and how it ended."""

    def __init__(self, session: Session, number: int, what: str) -> None:
        self._session = session
        self._number = number
        self._what = what
        self.lines: list[dict[str, Any]] = []
        self.end: dict[str, Any] | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The lines that tell of a message that came; others tell of one that was sent."""
        return [line for line in self.lines if "body" in line]

    @property
    def bodies(self) -> list[str]:
        return [body(line) for line in self.messages]

    def until(self, condition: Callable[[], object], deadline: float = DEADLINE) -> None:
        """Returns when the condition holds; fails when it does not, or the command failed."""
        changed = self._session.changed
        until = time.monotonic() + deadline
        with changed:
            while not condition():
                if self.end is not None and not self.end["done"]:
                    raise DriverFailed(self._story("failed"))
                # What a condition looks at may be elsewhere, in the broker, and not notify.
                if time.monotonic() > until or not self._session.is_alive:
                    raise DriverFailed(self._story(f"did not get there in {deadline} s"))
                changed.wait(0.05)

    def until_count(self, count: int) -> None:
        """Returns when so many messages have come."""
        self.until(lambda: len(self.messages) >= count)

    def until_bodies(self, wanted: set[str], deadline: float = DEADLINE) -> None:
        """Returns when every one of these bodies has come, at least once."""
        self.until(lambda: wanted <= set(self.bodies), deadline)

    def result(self, deadline: float = DEADLINE) -> list[dict[str, Any]]:
        """Waits for the command to end well, and returns what it printed."""
        self.until(lambda: self.end is not None, deadline)
        if self.end is None or not self.end["done"]:
            raise DriverFailed(self._story("failed"))
        return self.lines

    def release(self) -> list[dict[str, Any]]:
        """Ends a command that stays, in the orderly way."""
        self._session.tell(f"{self._number}\trelease")
        return self.result()

    def _story(self, outcome: str) -> str:
        printed = "\n".join(str(line) for line in self.lines[-20:])
        return f"{self._what} {outcome}: {self.end}\n{printed}\n{self._session.output()}"


class Session:
    """A process with Apache's client, of one release and one kind of header."""

    def __init__(self, release: Release, home: Path, name_server: str, *options: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        _write_logging(home)
        self.release = release
        self.changed = threading.Condition()
        self._given = {"namesrv": name_server, "route-interval": 1000, "heartbeat-interval": 1000}
        self._numbers = itertools.count()
        self._commands: dict[int, Running] = {}
        self._log = home / "session.log"
        line = release.command("Session", home, options=(IPV4, "-Xmx256m", *OFTEN, *options))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                line, cwd=home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._reader = threading.Thread(target=self._read, name="session output")
        self._reader.start()

    @classmethod
    @contextlib.contextmanager
    def running(
        cls, release: Release, home: Path, name_server: str, *options: str
    ) -> Iterator[Session]:
        session = cls(release, home, name_server, *options)
        try:
            yield session
        finally:
            session.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, command: str, settings: Mapping[str, object]) -> Running:
        """Starts a command of ``java/Client.java``, as a client instance of its own."""
        number = next(self._numbers)
        given = {**self._given, "instance": f"session-{number}", **settings}
        with self.changed:
            running = Running(self, number, f"{command} {dict(settings)}")
            self._commands[number] = running
        words = [str(number), command, *(f"{name}={value}" for name, value in given.items())]
        self.tell("\t".join(words))
        return running

    def run(self, command: str, settings: Mapping[str, object]) -> list[dict[str, Any]]:
        return self.start(command, settings).result()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def output(self, characters: int = 4000) -> str:
        return self._log.read_text(errors="replace")[-characters:]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_DEADLINE)
        finally:
            self._process.kill()
            self._reader.join(STOP_DEADLINE)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for text in output:
                line = json.loads(text)
                running = self._commands[line.pop("command")]
                with self.changed:
                    if "done" in line:
                        running.end = line
                    else:
                        running.lines.append(line)
                    self.changed.notify_all()


def body(line: Mapping[str, Any]) -> str:
    return base64.b64decode(line["body"]).decode()
