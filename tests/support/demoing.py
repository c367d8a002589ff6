"""The demo as somebody meets it: at a terminal of its own, where Ctrl-C can be pressed."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tests.support.command import environment

ROOT = Path(__file__).parents[2]
#: Far above what anything of it takes, so that a busy machine fails nothing.
DEADLINE = 120.0

#: Makes the terminal on the standard input that of the session, whose keys send signals.
_AT_TERMINAL = (
    "import fcntl, os, sys, termios;"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class RunningDemo:
    """The demo in the foreground of a terminal; its output goes there, or into a pipe."""

    def __init__(self, folder: Path, *options: str, piped: bool = False) -> None:
        self.folder = folder
        self._said = ""
        self._grew = threading.Condition()
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 130, 0, 0))
        # A terminal has a size of its own; a pipe has none.
        env = environment({"TERM": "xterm", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"})
        if not piped:
            del env["COLUMNS"]
        words = ["-m", "examples.demo", "--folder", str(folder), *options]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _AT_TERMINAL, *words],
            cwd=ROOT,
            stdin=theirs,
            stdout=subprocess.PIPE if piped else theirs,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        os.close(theirs)
        output = self.process.stdout.fileno() if self.process.stdout else self._terminal
        self._listener = threading.Thread(target=self._listen, args=(output,), daemon=True)
        self._listener.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE)
        self._listener.join(DEADLINE)
        if self.process.stdout is not None:
            self.process.stdout.close()
        os.close(self._terminal)

    @property
    def said(self) -> str:
        """Everything so far, without colours; of a screen that was drawn anew, every frame."""
        with self._grew:
            return _ESCAPE.sub("", self._said)

    def until(self, wanted: str | Callable[[str], object]) -> str:
        """Wait for these words, or until what was said is as wanted; everything so far."""
        is_there = (lambda said: wanted in said) if isinstance(wanted, str) else wanted
        end = time.monotonic() + DEADLINE
        while True:
            has_ended = not self._listener.is_alive()
            if is_there(said := self.said):
                return said
            assert not has_ended, f"it ended before: {said}"
            assert time.monotonic() < end, said
            with self._grew:
                self._grew.wait(0.05)

    def until_there(self, file: str) -> None:
        """Wait until something in the folder matches."""
        self.until(lambda _: any(self.folder.glob(file)))

    def until_signals_are_taken(self) -> None:
        """Wait until the process handles SIGTERM, which no interpreter does by itself."""
        bit = 1 << (signal.SIGTERM - 1)
        status = Path(f"/proc/{self.process.pid}/status")

        def are_taken(_: str) -> bool:
            found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
            return found is not None and bool(int(found[1], 16) & bit)

        self.until(are_taken)

    def press_ctrl_c(self) -> None:
        """As a person does: the terminal sends SIGINT to all in the foreground."""
        os.write(self._terminal, b"\x03")

    def send_to_all(self, number: signal.Signals) -> None:
        """As `timeout` and service managers do."""
        os.killpg(self.process.pid, number)

    def wait(self) -> int:
        """Hear it to its end; the exit code."""
        code = self.process.wait(DEADLINE)
        self._listener.join(DEADLINE)
        return code

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]

    def _listen(self, output: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while data := _read(output):
            with self._grew:
                self._said += decoder.decode(data)
                self._grew.notify_all()


def _read(output: int) -> bytes:
    try:
        return os.read(output, 65536)
    except OSError:
        return b""  # how Linux says that the other side of a terminal is closed
