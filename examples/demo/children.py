"""The processes that the demo starts, each told apart by the lines that it prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

#: How long a process may take to end when it is asked to.
_PATIENCE = 30.0
#: Shippers that are started in the place of the last one that ended by itself.
MOST_REPLACED = 5


def kill_descendants() -> None:
    """End all processes that this one has started, and theirs, without a word."""
    try:
        words = ["ps", "-A", "-o", "pid=,ppid="]
        listed = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:  # a system without it; they end when they notice that we are gone
        return
    pairs = [line.split() for line in listed.stdout.splitlines()]
    parents = {int(pid): int(parent) for pid, parent in pairs}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    for pid in found - {os.getpid()}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Child:
    """A process of ours whose lines are listened to as they come."""

    def __init__(self, words: list[str], heard: Callable[[str], None], log: Path) -> None:
        self._errors: IO[bytes] = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, *words],
            # Never written to: it ends with this process, however that ends, and the child with it.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C is for the demo alone
        )
        self.log = log
        self._heard = heard
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def ending(self) -> str:
        """How it came to its end, for a sentence about it."""
        code = self.process.poll()
        if code is None:
            return "still runs"
        if code < 0:
            return f"was killed ({signal.Signals(-code).name})"
        return f"ended with exit code {code}, see {self.log}"

    def kill(self) -> None:
        """End it and what it has started, without a word."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ask it to end, and hear what it had still to say."""
        if self.is_running:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_PATIENCE)
        self._listener.join()
        self._errors.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            if line.endswith("\n"):  # a line that was cut off was never printed whole
                self._heard(line[:-1])


class Cluster(Child):
    """A name server and a broker, as `orbitmq up` starts them, with short delays."""

    def __init__(self, folder: Path) -> None:
        self.name_server = ""
        self.console = ""
        self.is_ready = threading.Event()
        # Level 3 is the first retry, level 4 the second.
        levels = [1.0, 1.0, 1.0, 2.0, *range(3, 17)]
        super().__init__(
            [
                *("-m", "orbitmq.cli", "up", "--data", str(folder / "broker"), "--json"),
                "--stop-with-input",
                *("--namesrv-port", "0", "--broker-port", "0"),
                *("--console", "--console-port", "0"),
                *("--set", f"broker.store.delay_levels={','.join(map(str, levels))}"),
            ],
            self._hear,
            folder / "broker.log",
        )

    def _hear(self, line: str) -> None:
        event = json.loads(line)
        if event.get("role") == "name server":
            self.name_server = event["address"]
        if event.get("role") == "console":
            self.console = event["address"]
        if event.get("event") == "ready":
            self.is_ready.set()


class Shops(Child):
    """The producers."""

    def __init__(self, name_server: str, folder: Path, *, rate: float, seed: int) -> None:
        self.sent = 0
        words = ["-m", "examples.demo.producing", name_server]
        super().__init__(
            [*words, "--rate", str(rate), "--seed", str(seed)], self._hear, folder / "shops.log"
        )

    def _hear(self, line: str) -> None:
        self.sent = int(line)


class Shippers:
    """The members of the shipping group: some come late, one leaves, and any may be killed.

    A member that ends by itself ends nothing else. The broker gives its queues to those that are
    left, from where its progress was last reported: what it had in hand, and what it has done since
    that report, comes again. Only when nobody is left is a new one started.
    """

    def __init__(self, name_server: str, folder: Path) -> None:
        self._name_server = name_server
        self._folder = folder
        self.children: list[Child] = []
        self._replaced = 0
        #: How often each order was shipped, by its key.
        self.shipped: dict[str, int] = {}
        #: Members that have ended by themselves.
        self.fallen = 0
        self._lock = threading.Lock()

    def join(self) -> None:
        words = ["-m", "examples.demo.shipping", self._name_server]
        self.children.append(Child(words, self._hear, self._folder / "shippers.log"))

    def leave(self) -> None:
        """One of them goes, gracefully."""
        if len(self.children) > 1:
            self.children.pop(0).end()

    def look_after(self) -> list[str]:
        """What there is to say about members that have ended by themselves since the last look."""
        said = []
        for member in [each for each in self.children if not each.is_running]:
            self.children.remove(member)
            member.end()  # to hear what it had shipped
            self.fallen += 1
            said.append(f"A shipper {member.ending}. {self._successors()}")
        return said

    def _successors(self) -> str:
        """Who takes over what a member had; a new one if there is nobody, and not for ever."""
        again = "what it had in hand comes again."
        if left := len(self.children):
            others = "The other one takes" if left == 1 else f"The other {left} take"
            return f"{others} over its queues, and {again}"
        if self._replaced == MOST_REPLACED:
            return "No other one is left."
        self._replaced += 1
        self.join()
        return f"It was the only one, so a new one takes its place, and {again}"

    def end(self) -> None:
        for member in self.children:
            if member.is_running:
                member.process.send_signal(signal.SIGTERM)  # all at once
        for member in self.children:
            member.end()

    def kill(self) -> None:
        for member in self.children:
            member.kill()

    @property
    def members(self) -> int:
        return len(self.children)

    @property
    def count(self) -> int:
        """Orders that were shipped, however often."""
        return len(self.shipped)

    @property
    def problem(self) -> str | None:
        if self.children:
            return None
        return f"no shipper stays, see {self._folder / 'shippers.log'}"

    def _hear(self, line: str) -> None:
        with self._lock:
            self.shipped[line] = self.shipped.get(line, 0) + 1
