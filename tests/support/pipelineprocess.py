"""`orbitmq pipeline run --json` as a process, whose events are waited for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from tests.support.command import environment

#: Starting Spark takes ten seconds, and much more beside others; what takes this long has failed.
DEADLINE = 150.0
#: What a command of a few batches wants: Spark starts sooner, and its workers are few.
QUICK = (
    *("--master", "local[2]", "--setting", "spark.sql.shuffle.partitions=2"),
    *("--setting", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"),
)


class PipelineProcess:
    """A pipeline that runs."""

    def __init__(
        self, *words: str, cwd: Path, env: Mapping[str, str] | None = None, quick: bool = True
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.errors = ""
        self._grew = threading.Condition()
        self._is_over = False
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-W", "error", "-m", "orbitmq.cli", "pipeline", "run"),
                *words,
                "--json",
                *(QUICK if quick else ()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=environment(env),
            start_new_session=True,  # a group of its own, to which signals can be sent
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

    def until(self, condition: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        """The first event for which it holds, waited for."""
        with self._grew:
            self._grew.wait_for(lambda: self._is_over or any(map(condition, self.events)), DEADLINE)
            found = next(filter(condition, self.events), None)
        assert found is not None, f"{what}: {self.events[-5:]} {self.errors[-3000:]}"
        return found

    def of(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Its exit code, when it has ended by itself."""
        code = self.process.wait(DEADLINE)
        self._finish()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grew:
                self.events.append(json.loads(line))
                self._grew.notify_all()
        with self._grew:
            self._is_over = True
            self._grew.notify_all()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()

    def _finish(self) -> None:
        self.process.wait(DEADLINE)
        for thread in self._threads:
            thread.join(DEADLINE)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()
