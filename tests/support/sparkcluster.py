"""A standalone Spark cluster on this machine: a master and workers, each a process."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Self

from orbitmq.spark.session import prepare
from tests.support.sparkkilling import kill_session

#: A JVM on a busy machine takes its time.
DEADLINE = 90.0

_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
_JOINED = re.compile(r"Successfully registered with master")


class Daemon:
    """A process of Spark that serves until it is killed."""

    def __init__(self, kind: str, *words: str, folder: Path) -> None:
        environment = dict(os.environ)
        prepare(environment)
        folder.mkdir(parents=True)
        environment |= {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(folder / "local"),
            "SPARK_WORKER_DIR": str(folder / "work"),
        }
        name = f"org.apache.spark.deploy.{kind.lower()}.{kind}"
        spark_class = Path(environment["SPARK_HOME"]) / "bin" / "spark-class"
        self.process = subprocess.Popen(
            [str(spark_class), name, "--host", "127.0.0.1", "--webui-port", "0", *words],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def until_said(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """What it said that matches."""

        def said() -> re.Match[str] | None:
            return next(filter(None, map(pattern.search, self._lines)), None)

        with self._changed:
            self._changed.wait_for(lambda: said() or self.process.poll() is not None, DEADLINE)
            found = said()
        assert found is not None, "".join(self._lines)[-4000:]
        return found

    def kill(self) -> None:
        """Kill it with everything that it has started: the machine is gone. May be repeated."""
        kill_session(self.process.pid)
        self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


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


ROOT = Path(__file__).parents[2]
