"""The `orbitmq` command as a process that asks a cluster, with its answers taken apart."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from orbitmq.cli.application import app as root
from tests.support.command import COMMAND, Piped, Terminal, environment
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
        return Terminal([*COMMAND, *words], self.environment({"TERM": "xterm"}), lines, columns)


class Running(Piped):
    """A command whose output is read as it comes, and to which something can be typed."""

    def __init__(self, words: tuple[str, ...], env: Mapping[str, str]) -> None:
        super().__init__([*COMMAND, *words], env, stdin=subprocess.PIPE)

    def until(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """Wait until the lines so far are as wanted."""
        self.until_true(lambda: condition(self.lines), "the lines")
        return list(self.lines)

    def until_told(self, words: str) -> None:
        """Wait until standard error has these words."""
        self.until_true(lambda: words in self.errors, words)

    def type(self, text: str) -> None:
        self.write(text)

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        return super().stop(number)


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
