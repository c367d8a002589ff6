"""Processes of tests, above all of the `orbitmq` command as users run it."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

#: Far above what it should take, so that a busy machine fails nothing.
DEADLINE = 60.0
COMMAND = (sys.executable, "-W", "error", "-m", "orbitmq.cli")
ROOT = Path(__file__).parents[2]


#: Instead of the configuration folder of the person who runs the tests.
_CONFIG = tempfile.TemporaryDirectory(prefix="orbitmq-config-")


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without settings of the person who runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ORBITMQ_")}
    own = {"NO_COLOR": "1", "COLUMNS": "100", "XDG_CONFIG_HOME": _CONFIG.name}
    return {**kept, **own, **(more or {})}


def importing() -> dict[str, str]:
    """The environment in which a process can import OrbitMQ and these tests."""
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


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


class Piped:
    """A process whose output is read line by line as it comes; it ends with the block."""

    #: For whatever is waited for.
    deadline = DEADLINE

    def __init__(self, words: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        """`options` are those of `Popen`; without them the process reads nothing."""
        self.lines: list[str] = []
        self.errors = ""
        self._grew = threading.Condition()
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(words, env=env, text=True, **(pipes | options))
        outputs = ((self.process.stdout, self.take), (self.process.stderr, self._take_error))
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, take), daemon=True)
            for pipe, take in outputs
            if pipe is not None
        ]
        self._left = len(self._readers)
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def until_true(
        self, condition: Callable[[], object], what: str, deadline: float | None = None
    ) -> None:
        """Return when the condition holds; fail when it does not in time or the process ends."""
        end = time.monotonic() + (deadline or self.deadline)
        with self._grew:
            while not condition():
                said = f"{what}: {self.lines[-20:]} {self.errors[-3000:]}"
                assert self._left, f"the process ended before {said}"
                assert time.monotonic() < end, f"too late for {said}"
                # Conditions may speak of other processes, which wake nobody here.
                self._grew.wait(0.05)

    def write(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait until it ends by itself; the exit code."""
        code = self.process.wait(self.deadline)
        for reader in self._readers:
            reader.join(self.deadline)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        return code

    def take(self, line: str) -> None:
        """A line has come; called while others wait."""
        self.lines.append(line.rstrip("\n"))

    def _take_error(self, line: str) -> None:
        self.errors += line

    def _read(self, pipe: IO[str], take: Callable[[str], None]) -> None:
        for line in pipe:
            with self._grew:
                take(line)
                self._grew.notify_all()
        with self._grew:
            self._left -= 1
            self._grew.notify_all()


class Started(Piped):
    """A command that serves until it is told to stop; `lines` are those up to its readiness."""

    def __init__(
        self, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        began = time.perf_counter()
        self._is_ready = False
        super().__init__([*COMMAND, *words], environment(env), cwd=cwd)
        try:
            self.until_true(lambda: self._is_ready, "it was ready")
        except BaseException:
            self.__exit__()
            raise
        #: Seconds from starting the process to its word that it is ready.
        self.took = time.perf_counter() - began

    def address(self, name: str) -> str:
        """Where something of this name said that it listens."""
        (found,) = [line for line in self.lines if line.startswith(name + "  ")]
        return found[len(name) :].split()[0]

    def take(self, line: str) -> None:
        if not self._is_ready:
            super().take(line)
            self._is_ready = "ready" in line


#: Makes the terminal on the standard input that of the session, whose keys send signals.
_AT_TERMINAL = (
    "import fcntl, os, sys, termios;"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A process on a pseudo terminal, whose keys are pressed and whose screen is read."""

    #: For whatever is waited for.
    deadline = DEADLINE

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        lines: int,
        columns: int,
        *,
        is_piped: bool = False,
        cwd: Path | None = None,
    ) -> None:
        """With `is_piped` the output goes into a pipe, not to the terminal."""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen = ""
        # The size of a terminal is its own, that of a pipe the environment's.
        sizes = () if is_piped else ("COLUMNS", "LINES")
        self.process = subprocess.Popen(
            [sys.executable, "-c", _AT_TERMINAL, *words],
            stdin=theirs,
            stdout=subprocess.PIPE if is_piped else theirs,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in env.items() if name not in sizes},
            cwd=cwd,
            start_new_session=True,
        )
        os.close(theirs)
        output = self.process.stdout.fileno() if self.process.stdout else self._ours
        self._reader = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        os.close(self._ours)

    def until(self, wanted: str | Callable[[str], object]) -> str:
        """Wait for these words, or until the screen is as wanted; all that has been written."""
        is_there = (lambda said: wanted in said) if isinstance(wanted, str) else wanted
        end, pause = time.monotonic() + self.deadline, threading.Event()
        while True:
            has_ended = not self._reader.is_alive()
            if is_there(said := self.said):
                return said
            assert not has_ended, f"it ended without {wanted}: {said}"
            assert time.monotonic() < end, said
            pause.wait(0.02)

    @property
    def said(self) -> str:
        """What `until` looks at."""
        return self.screen

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait(self) -> int:
        """Read to the end; the exit code."""
        code = self.process.wait(self.deadline)
        self._reader.join(self.deadline)
        return code

    def _read(self, output: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        with contextlib.suppress(OSError):  # how Linux says that the other side is closed
            while data := os.read(output, 65536):
                self.screen += decoder.decode(data)
