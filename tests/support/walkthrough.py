"""Runs a page of the documentation as its reader would: block by block, in its order.

    ```sh                           a command, which must succeed
    ```sh title="Terminal 1"        one that keeps running until the page is through
    ```python title="shop.py"       a file, written to the reader's folder
    ```text                         what the command before it prints; `...` stands for anything

The reader's machine has port 9876 to itself; ours may be shared with other clusters, which must
not be touched. So servers get ports from the system, and the page's addresses are replaced by
theirs. Nothing is run unless the server that this very page has started says that it is ready.

The reader installs the project into an environment of its own; here it is installed already. So pip
is given the command of the page with this checkout, builds what it needs to know of it, looks
whether everything that the extras want is there, and stops before it would change something.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]
SHOWN_ADDRESS = "localhost:9876"
SHOWN_CONSOLE = "http://localhost:8090"
SHOWN_CHECKOUT = "/path/to/orbitmq"
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
#: What keeps running is asked for ports of its own, and to say where it is.
_OWN_PORTS = "--namesrv-port 0 --broker-port 0 --json"
#: A program from standard input, so often as the argument says. One process is enough for that, and
#: its imports are made once.
_EACH_TIME = """
import sys
program = compile(sys.stdin.read(), "example", "exec")
for _ in range(int(sys.argv[1])):
    exec(program, {"__name__": "__main__"})
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str | None
    text: str

    @property
    def runs_on(self) -> bool:
        """Whether it is a command that keeps a terminal of its own."""
        return self.language == "sh" and self.title is not None


def blocks(page: Path) -> list[Block]:
    return [
        Block(language, title or None, text)
        for language, title, text in _BLOCK.findall(page.read_text())
    ]


def expected(program: str) -> list[str]:
    """What a program says that it prints: behind a print, or in the comments that follow one."""
    found: list[str] = []
    follows_print = False
    for line in program.splitlines():
        text = line.strip()
        if match := re.match(r"print\(.*\)  # (.+)$", text):
            found.append(match[1])
            follows_print = False
        elif text.startswith("# ") and follows_print:
            found.append(text.removeprefix("# "))
        else:
            follows_print = text.startswith("print(")
    return found


class Reader:
    """Somebody with a folder and as many terminals as a page asks for."""

    def __init__(self, folder: Path, *, patience: float) -> None:
        self.folder = folder
        self._patience = patience
        self._address: str | None = None
        self._console: str | None = None
        self._running: list[subprocess.Popen[str]] = []
        #: A file: nobody reads a pipe while the page goes on, and who logs into a full one stands.
        self._log = folder / "servers.log"
        self._said = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._running:
            process.kill()
            process.communicate(timeout=self._patience)

    def follow(self, block: Block) -> None:
        """Do what a block says. Raises `AssertionError` when it does not go as the page says."""
        if block.language == "python" and block.title is not None:
            (self.folder / block.title).write_text(self._with_address(block.text))
        elif block.runs_on:
            self._start(block.text)
        elif block.language == "sh":
            self._said = self._run_script(block.text)
        elif block.language == "text":
            assert matches(self._said, block.text), (
                f"the page says:\n{block.text}\nit was:\n{self._said}"
            )

    def run_program(self, program: str, *, times: int = 1) -> str:
        """Run a Python program so often, each time anew, in one process; what it printed."""
        assert self._address is not None
        return self._run(
            [sys.executable, "-W", "error", "-c", _EACH_TIME, str(times)],
            told=self._with_address(program),
        )

    def stop(self) -> None:
        """Ctrl-C in every terminal that something runs in; it must end well."""
        while self._running:
            process = self._running[-1]
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=self._patience)
            assert process.returncode in (0, 130), self._log.read_text()
            self._running.pop()

    def _start(self, command: str) -> None:
        words = command.strip()
        if "--console" in words:
            words += " --console-port 0"
        with self._log.open("a") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {words} {_OWN_PORTS}"],
                cwd=self.folder,
                env=self._environment(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._running.append(process)
        for said in self._sayings(process):
            if said["event"] == "ready":
                break
            if said["role"] == "name server":
                self._address = said["address"]
            if said["role"] == "console":
                self._console = said["address"].rstrip("/")
        else:
            raise AssertionError(f"{words}: {self._log.read_text()}")
        assert self._address is not None

    def _sayings(self, process: subprocess.Popen[str]) -> Iterator[dict[str, str]]:
        assert process.stdout is not None
        too_late = threading.Timer(self._patience, process.kill)
        too_late.start()
        try:
            for line in process.stdout:
                yield json.loads(line)
        finally:
            too_late.cancel()

    def _run_script(self, script: str) -> str:
        if script.startswith("pip install "):
            return self._look_at_install(script)
        assert self._address is not None, f"no server was started before: {script}"
        return self._run(["bash", "-e", "-c", self._with_address(script)])

    def _look_at_install(self, script: str) -> str:
        careful = "pip install --dry-run --no-index --no-build-isolation"
        script = script.replace("pip install", careful).replace(SHOWN_CHECKOUT, str(ROOT))
        said = self._run(["bash", "-e", "-c", f"{{ {script.strip()}; }} 2>&1"])
        # It only warns of an extra that there is not.
        assert "WARNING" not in said, said
        assert set(re.findall(r"^Would install (\S+)-\S+$", said, re.MULTILINE)) == {"orbitmq"}, (
            said
        )
        return said

    def _run(self, words: list[str], *, told: str = "") -> str:
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that all of it can be ended: Spark starts processes
        )
        try:
            out, log = process.communicate(told, timeout=self._patience)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{words[-1]}\n{told}\n{out}\n{log}"
        return out

    def _with_address(self, text: str) -> str:
        for shown, found in ((SHOWN_ADDRESS, self._address), (SHOWN_CONSOLE, self._console)):
            text = text.replace(shown, found) if found else text
        return text

    def _environment(self) -> Mapping[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("ORBITMQ_")}
        mine = {
            **kept,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "COLUMNS": "100",
        }
        return mine if self._address is None else {**mine, "ORBITMQ_NAME_SERVER": self._address}


def matches(said: str, expected: str) -> bool:
    """Whether lines are as expected; `...` stands for a rest of a line, alone for any lines."""
    pattern = ""
    for line in expected.strip().splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            text = r"\s+".join(re.escape(word) for word in line.split())
            pattern += rf"\s*{text.replace(re.escape('...'), '.*')}[ ]*\n"
    return re.fullmatch(pattern, said.strip() + "\n") is not None
