"""Runs the `orbitmq` command as users do: as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

#: Far above what it should take, so that a busy machine fails nothing.
DEADLINE = 60.0

COMMAND = (sys.executable, "-W", "error", "-m", "orbitmq.cli")


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without settings of the person who runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ORBITMQ_")}
    return {**kept, "NO_COLOR": "1", "COLUMNS": "100", **(more or {})}


def run(
    *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env=environment(env),
        timeout=DEADLINE,
        check=False,
    )


class Started:
    """A command that serves until it is told to stop."""

    def __init__(
        self, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        began = time.perf_counter()
        self.lines: list[str] = []
        self._errors: list[str] = []
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=environment(env),
        )
        self._collecting = threading.Thread(target=self._collect, daemon=True)
        self._collecting.start()
        # A start that hangs is ended, so that the reading below ends.
        watch = threading.Timer(DEADLINE, self.process.kill)
        watch.start()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if "ready" in line:
                break
        watch.cancel()
        #: Seconds from starting the process to its word that it is ready.
        self.took = time.perf_counter() - began
        self.is_ready = bool(self.lines) and "ready" in self.lines[-1]
        if not self.is_ready:
            self._finish()
        assert self.is_ready, f"it did not start: {self.errors}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self._finish()

    @property
    def errors(self) -> str:
        return "".join(self._errors)

    def address(self, name: str) -> str:
        """Where something of this name said that it listens."""
        (found,) = [line for line in self.lines if line.startswith(name + "  ")]
        return found[len(name) :].split()[0]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait until it ends by itself; the exit code."""
        code = self.process.wait(timeout=DEADLINE)
        self._finish()
        return code

    def _collect(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.append(line)

    def _finish(self) -> None:
        self.process.wait(timeout=DEADLINE)
        self._collecting.join(timeout=DEADLINE)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()
