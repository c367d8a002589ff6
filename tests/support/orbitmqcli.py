"""The `orbitmq` command as a process that asks a cluster, with its answers taken apart."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import typer

from orbitmq.cli.application import app as root
from tests.support.command import COMMAND, DEADLINE, environment
from tests.support.nursery import Nursery


@dataclass(frozen=True, slots=True)
class Cli:
    """Runs commands against one cluster."""

    name_server: str
    nursery: Nursery

    def run(
        self, *words: str, stdin: bytes | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that ends by itself."""
        return self.nursery.run(words, self.environment(env), stdin)

    def text(self, *words: str, stdin: bytes | None = None) -> str:
        """What a command prints that must succeed."""
        ran = self.run(*words, stdin=stdin)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def records(self, *words: str, stdin: bytes | None = None, code: int = 0) -> list[Any]:
        """The JSON objects that a command prints, one per line."""
        ran = self.run(*words, "--json", stdin=stdin)
        assert ran.returncode == code, ran.stderr
        return [json.loads(line) for line in ran.stdout.splitlines()]

    def record(self, *words: str, stdin: bytes | None = None, code: int = 0) -> Any:
        (found,) = self.records(*words, stdin=stdin, code=code)
        return found

    def refusal(self, *words: str, code: int) -> str:
        """The one sentence of a command that must fail."""
        ran = self.run(*words)
        assert ran.returncode == code, (ran.stdout, ran.stderr)
        assert ran.stdout == ""
        (sentence,) = ran.stderr.splitlines()
        assert sentence.startswith("orbitmq: ")
        return sentence.removeprefix("orbitmq: ")

    def refusal_after(self, *words: str, code: int) -> str:
        """The same for a command that printed something before it failed."""
        ran = self.run(*words)
        assert ran.returncode == code, (ran.stdout, ran.stderr)
        return ran.stderr

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return environment({"ORBITMQ_NAME_SERVER": self.name_server, **(more or {})})

    def start(self, *words: str) -> Running:
        """Start a command that goes on."""
        return Running(words, self.environment())

    def at_terminal(self, *words: str, lines: int = 40, columns: int = 120) -> Terminal:
        """Start a command for somebody who sits at a terminal."""
        return Terminal(words, self.environment({"TERM": "xterm"}), lines, columns)


class Running:
    """A command whose output is read as it comes."""

    def __init__(self, words: tuple[str, ...], env: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self.errors = ""
        self._grew = threading.Condition()
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            text=True,
        )
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._read, self._read_errors)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self._finish()

    def until(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """Wait until the lines so far are as wanted."""
        with self._grew:
            assert self._grew.wait_for(lambda: condition(self.lines), DEADLINE), self.lines
            return list(self.lines)

    def until_told(self, words: str) -> None:
        """Wait until standard error has these words."""
        with self._grew:
            assert self._grew.wait_for(lambda: words in self.errors, DEADLINE), self.errors

    def type(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(DEADLINE)
        self._finish()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grew:
                self.lines.append(line.rstrip("\n"))
                self._grew.notify_all()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._grew:
                self.errors += line
                self._grew.notify_all()

    def _finish(self) -> None:
        self.process.wait(DEADLINE)
        for thread in self._threads:
            thread.join(DEADLINE)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()


class Terminal:
    """A command on a pseudo terminal, whose keys are pressed and whose screen is read."""

    def __init__(
        self, words: tuple[str, ...], env: Mapping[str, str], lines: int, columns: int
    ) -> None:
        import fcntl
        import struct
        import termios

        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen = ""
        # The size is that of the terminal, not of the environment.
        plain = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=plain,
            start_new_session=True,
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE)
        os.close(self._ours)

    def until(self, text: str) -> str:
        """Wait until a text has appeared; all that has been written so far."""
        end = time.monotonic() + DEADLINE
        while text not in self.screen:
            assert time.monotonic() < end, self.screen
            assert self._read(end), f"it ended without {text!r}: {self.screen}"
        return self.screen

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait(self) -> int:
        """Read to the end; the exit code."""
        end = time.monotonic() + DEADLINE
        while self._read(end):
            assert time.monotonic() < end, self.screen
        return self.process.wait(DEADLINE)

    def _read(self, end: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return True
        try:
            data = os.read(self._ours, 65536)
        except OSError:
            # Linux says so when the other side is closed.
            return False
        self.screen += data.decode(errors="replace")
        return bool(data)


def parsed(text: str) -> dict[str, Any]:
    """The parameters that the command line makes of a command, which is not run."""
    command: Any = typer.main.get_command(root)
    words = shlex.split(text)[1:]
    context = command.make_context("orbitmq", list(words), resilient_parsing=False)
    while True:
        name, found, rest = command.resolve_command(context, words)
        context = found.make_context(name, list(rest), parent=context)
        if not hasattr(found, "resolve_command"):
            return dict(context.params)
        command, words = found, rest
