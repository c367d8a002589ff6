"""Processes that the nemesis can kill, stop and start again, and the stage that they are on.

Whatever happens, nothing outlives the stage: it ends every process that it has started, by its id.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tools.chaos.fates import TELL_WHERE
from tools.chaos.faultybroker import CLOCK, OPENED
from tools.chaos.history import Event, Fault, Histories, Recorder, now

ROOT = Path(__file__).resolve().parents[2]
#: What is run is what lies beside this file, whatever is installed.
_PATH = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
#: For a process to come up or to end in order, on a machine that others use as well.
DEADLINE = 60.0


class ScenarioFailed(Exception):
    """A scenario could not do what it meant to; its figures do not exist."""


def wait_until(
    condition: Callable[[], bool], what: str, deadline: float = DEADLINE, every: float = 0.02
) -> float:
    """Seconds until the condition held. Raises `ScenarioFailed` when it does not in time."""
    began = time.monotonic()
    idle = threading.Event()
    while not condition():
        if time.monotonic() - began > deadline:
            raise ScenarioFailed(f"not within {deadline:g} s: {what}")
        idle.wait(every)
    return time.monotonic() - began


def pass_time(seconds: float) -> None:
    """Let the others work."""
    threading.Event().wait(max(0.0, seconds))


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Program:
    """One process, of which the output is kept in a file."""

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.log = log
        self._seen = log.stat().st_size if log.exists() else 0
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ORBITMQ_")}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**kept, "PYTHONPATH": _PATH, "PYTHONUNBUFFERED": "1", **(env or {})},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def output(self) -> str:
        """What this life of it has written."""
        with self.log.open("rb") as file:
            file.seek(self._seen)
            return file.read().decode(errors="replace")

    def until_written(self, text: str) -> float:
        """Seconds until a text is in its output. Raises `ScenarioFailed` when it ends before."""

        def is_written() -> bool:
            ended = not self.is_alive
            if text in self.output():
                return True
            if ended:
                raise ScenarioFailed(f"{self.name} ended: {self.output()[-2000:]}")
            return False

        return wait_until(is_written, f"{self.name} writes {text!r}")

    def signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it at this instant."""
        self.signal(signal.SIGKILL)
        self.process.wait(DEADLINE)

    def stop(self) -> int:
        """End it in order; the exit code. Raises `ScenarioFailed` when it does not end."""
        self.signal(signal.SIGTERM)
        try:
            return self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self._tell_where()
            self.kill()
            raise ScenarioFailed(f"{self.name} did not stop: {self.output()[-4000:]}") from None

    def _tell_where(self) -> None:
        """Have it write what its threads are doing: for whoever wants to know why it hangs."""
        written = len(self.output())
        self.signal(TELL_WHERE)
        with contextlib.suppress(ScenarioFailed):
            wait_until(lambda: len(self.output()) > written, "its stacks are told", 5.0)


class Broker:
    """A broker that can be killed and started again on its folder and its port."""

    def __init__(
        self,
        stage: Stage,
        name: str,
        settings: Sequence[str] = (),
        *,
        advertised: str | None = None,
        rate: float = 1.0,
        prefix: Sequence[str] = (),
        folder: Path | None = None,
    ) -> None:
        self._stage = stage
        self.name = name
        self.port = free_port()
        self.folder = folder or stage.folder / name
        self.faults = stage.folder / f"{name}-faults"
        self.faults.mkdir()
        # What is counted by timers keeps up with what is counted by the clock.
        keeping_up = (f"broker.registration.interval={30.0 / rate}",)
        self._settings = (*(keeping_up if rate != 1.0 else ()), *settings)
        self._advertised = advertised
        self._rate = rate
        self._prefix = tuple(prefix)
        self.program: Program | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> Program:
        if self.program is None:
            raise ScenarioFailed(f"{self.name} was never started")
        return self.program

    def start(self) -> float:
        """Start it; seconds from the start of the process to its word that it is ready."""
        began = time.monotonic()
        self.launch()
        self.running.until_written('"ready"')
        return time.monotonic() - began

    def launch(self) -> None:
        """Start it, and wait for nothing."""
        words = ["-m", "tools.chaos.faultybroker", str(self.faults), "broker", "--json"]
        words += ["--name", self.name, "--port", str(self.port), "--data", str(self.folder)]
        words += ["--name-server", self._stage.name_server, "--log-level", "warning"]
        words += ["--set", "broker.vip=false"]
        if self._advertised is not None:
            words += ["--advertise", self._advertised]
        for setting in self._settings:
            words += ["--set", setting]
        self.program = self._stage.add(
            Program(
                self.name,
                words,
                self._stage.folder / f"{self.name}.log",
                {"ORBITMQ_CHAOS_RATE": str(self._rate)},
                self._prefix,
            )
        )

    def switch(self, fault: str, *, on: bool) -> None:
        """Have its disk fail in one way, or mend it."""
        path = self.faults / fault
        if on:
            path.touch()
        else:
            path.unlink(missing_ok=True)
        self._stage.tell(fault, self.name, is_over=not on)

    def set_clock(self, wrong_by: float) -> None:
        """Set its date; it sees either the old or the new one, which is as long."""
        with (self.faults / CLOCK).open("r+b", buffering=0) as file:
            file.write(f"{wrong_by:<32}".encode())
        self._stage.tell("clock jump", self.name, is_over=False)

    def kill(self) -> None:
        self._stage.tell("kill broker", self.name, is_over=False)
        self.running.kill()

    def restart(self) -> float:
        """Start it again; seconds until it was ready."""
        took = self.start()
        self._stage.tell("kill broker", self.name, is_over=True)
        return took

    @property
    def opened_in(self) -> float:
        """Seconds that it took at its last start from having its settings to listening.

        What comes before, the interpreter and its imports, is the same after every end.
        """
        return float((self.faults / OPENED).read_text())

    def log_bytes(self) -> int:
        """What is written in its commit log, without what was only reserved."""
        return sum(file.stat().st_blocks * 512 for file in self._log_files())

    def log_files(self) -> int:
        """Files that its commit log has begun."""
        return sum(file.stat().st_blocks > 0 for file in self._log_files())

    def _log_files(self) -> Iterator[Path]:
        return (self.folder / "commitlog").glob("[0-9]*")


class Stage:
    """A folder, a name server, and everything that was started; ends it all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.histories = folder / "history"
        self.histories.mkdir(parents=True)
        self._programs: list[Program] = []
        self._closing: list[Callable[[], None]] = []
        self._recorder = Recorder(self.histories / "nemesis.jsonl")
        self._told = Histories(self.histories)
        self._count = 0
        self.name_server = ""

    def __enter__(self) -> Self:
        try:
            self._start_name_server()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start_name_server(self) -> None:
        words = ["-m", "tools.chaos.faultybroker", str(self.folder), "namesrv", "--json"]
        words += ["--port", "0", "--log-level", "warning"]
        program = self.add(Program("namesrv", words, self.folder / "namesrv.log"))
        program.until_written('"ready"')
        told = json.loads(program.output().splitlines()[0])
        self.name_server = told["address"]

    def close(self) -> None:
        """End everything that is left."""
        for program in self._programs:
            program.signal(signal.SIGCONT)
            program.signal(signal.SIGKILL)
        for program in self._programs:
            program.process.wait(DEADLINE)
        for close in reversed(self._closing):
            close()
        self._closing.clear()
        self._recorder.close()

    def add(self, program: Program) -> Program:
        self._programs.append(program)
        return program

    def on_close(self, close: Callable[[], None]) -> None:
        self._closing.append(close)

    def broker(
        self,
        name: str = "broker-a",
        *settings: str,
        advertised: str | None = None,
        rate: float = 1.0,
        prefix: Sequence[str] = (),
        folder: Path | None = None,
    ) -> Broker:
        """A broker that is not started yet.

        `advertised` is where clients are sent, `rate` how much faster its steady clock runs,
        `prefix` the words before the program's own, `folder` where it keeps its data.
        """
        return Broker(
            self,
            name,
            settings,
            advertised=advertised,
            rate=rate,
            prefix=prefix,
            folder=folder,
        )

    def worker(self, role: str, name: str, **options: object) -> Program:
        """Start a worker (see `worker`) with a history of its own."""
        told = {
            "name": name,
            "name_server": self.name_server,
            "history": str(self.histories / f"{name}.jsonl"),
            **options,
        }
        words = ["-m", "tools.chaos.worker", role, json.dumps(told)]
        return self.add(Program(name, words, self.folder / f"{name}.log"))

    def fresh_name(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    # ---- what the nemesis does to workers

    def kill(self, program: Program) -> None:
        program.kill()
        # The death counts from when nothing runs any more.
        self.tell("kill", program.name, is_over=False)

    def pause(self, program: Program) -> None:
        self.tell("pause", program.name, is_over=False)
        program.signal(signal.SIGSTOP)

    def resume(self, program: Program) -> None:
        program.signal(signal.SIGCONT)
        self.tell("pause", program.name, is_over=True)

    def tell(self, what: str, target: str, *, is_over: bool) -> None:
        """Put a fault, or its end, into the history."""
        self._recorder.write(Fault(now(), what, target, is_over))

    def events(self) -> list[Event]:
        """The history so far."""
        return self._told.events()

    def complaints(self, but: str = "\0") -> list[str]:
        """What processes wrote that shows a mistake of ours; not errors whose line has `but` in it.

        Of a traceback its last line is told: the error itself.
        """
        found = []
        for log in sorted(self.folder.glob("*.log")):
            is_in_traceback = False
            for line in log.read_text(errors="replace").splitlines():
                is_end = is_in_traceback and not line.startswith(" ")
                is_one = is_end or "never retrieved" in line or "bug in OrbitMQ" in line
                if is_one and but not in line:
                    found.append(f"{log.name}: {line.strip()}")
                is_in_traceback = line.startswith("Traceback") or (is_in_traceback and not is_end)
        return found
