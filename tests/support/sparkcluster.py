"""A standalone Spark cluster on this machine: a master and workers, each a process."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Self

from orbitmq.spark.session import prepare
from tests.support.command import Piped, importing
from tests.support.sparkkilling import kill_session

#: A JVM on a busy machine takes its time.
DEADLINE = 90.0

_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
_JOINED = re.compile(r"Successfully registered with master")


class Daemon(Piped):
    """A process of Spark that serves until it is killed."""

    deadline = DEADLINE

    def __init__(self, kind: str, *words: str, folder: Path) -> None:
        environment = importing()
        prepare(environment)
        folder.mkdir(parents=True)
        environment |= {
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(folder / "local"),
            "SPARK_WORKER_DIR": str(folder / "work"),
        }
        name = f"org.apache.spark.deploy.{kind.lower()}.{kind}"
        spark_class = Path(environment["SPARK_HOME"]) / "bin" / "spark-class"
        super().__init__(
            [str(spark_class), name, "--host", "127.0.0.1", "--webui-port", "0", *words],
            environment,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            errors="replace",
            start_new_session=True,
        )

    def until_said(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """What it said that matches."""

        self.until_true(lambda: pattern.search(self.errors), pattern.pattern)
        found = pattern.search(self.errors)
        assert found is not None
        return found

    def kill(self) -> None:
        """Kill it with everything that it has started: the machine is gone. May be repeated."""
        kill_session(self.process.pid)
        self.wait()


class SparkCluster:
    """A master and its workers, one core each."""

    def __init__(self, folder: Path, *, workers: int = 2) -> None:
        self._folder = folder
        self._count = workers
        self._daemons: list[Daemon] = []
        self.workers: list[Daemon] = []
        self.master = ""

    def __enter__(self) -> Self:
        try:
            master = self._started("Master", "--port", "0", folder=self._folder / "master")
            self.master = master.until_said(_MASTER)[1]
            self.workers = [self.add_worker() for _ in range(self._count)]
            for worker in self.workers:
                worker.until_said(_JOINED)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()

    def add_worker(self) -> Daemon:
        words = ("--cores", "1", "--memory", "768m", self.master)
        return self._started("Worker", *words, folder=self._folder / f"w{len(self._daemons)}")

    def _started(self, kind: str, *words: str, folder: Path) -> Daemon:
        daemon = Daemon(kind, *words, folder=folder)
        self._daemons.append(daemon)
        return daemon
