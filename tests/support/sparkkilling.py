"""Jobs on Spark, and brokers, as processes that can be killed at any time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from orbitmq.client.ranges.cluster import RangeCluster
from orbitmq.client.ranges.connections import RangeAccess
from orbitmq.client.routes import Queue
from orbitmq.spark.worker import PYSPARK_DAEMON, QUIET_DAEMON
from tests.support.command import Started
from tests.support.sparking import until

ROOT = Path(__file__).parents[2]
#: A session, its JVM and the first batch, on a machine that may have much else to do.
STARTING = 150.0


class Job:
    """The job, as a process group that can be killed as a whole."""

    def __init__(self, module: str, *words: str) -> None:
        """Runs a module of `tests.support` that prints a line for every batch."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.support.{module}", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.batches: list[int] = []
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._listen, daemon=True),
            threading.Thread(target=self._collect, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def until_batches(self, count: int, deadline: float = STARTING) -> None:
        """Return when it has made so many batches."""

        def enough() -> bool:
            assert self.process.poll() is None, "".join(self._errors)[-3000:]
            return len(self.batches) >= count

        until(enough, f"{count} batches", deadline)

    def kill(self) -> None:
        """Driver, JVM and workers, at one instant."""
        kill_session(self.process.pid)
        self._end()

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(60)
        self._end()
        return code

    def workers(self) -> list[int]:
        """The Python processes in which tasks run."""
        return python_workers(self.process.pid)

    def _end(self) -> None:
        self.process.wait(60)
        for thread in self._threads:
            thread.join(60)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("batch "):
                self.batches.append(int(line.split()[1]))

    def _collect(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)


class BrokerProcess:
    """A name server and a broker in one process, on ports that stay."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = ("0", "0")
        self._started: Started | None = None
        self.start()

    def start(self) -> None:
        name_port, broker_port = self._ports
        self._started = Started(
            *("up", "--data", str(self._folder)),
            *("--namesrv-port", name_port, "--broker-port", broker_port),
        )
        self.name_server = self._started.address("name server")
        self.broker = self._started.address("broker-a")
        self._ports = (self.name_server.rpartition(":")[2], self.broker.rpartition(":")[2])

    def kill(self) -> None:
        assert self._started is not None
        self._started.process.kill()
        self._started.__exit__()
        self._started = None

    def bury(self) -> None:
        if self._started is not None:
            self._started.stop()
            self._started.__exit__()


def lag(name_server: str, group: str, topic: str, queues: int = 4) -> int:
    """Messages that the broker takes for unread by the group."""
    with RangeCluster(RangeAccess(name_servers=(name_server,)), group) as cluster:
        names = [Queue(topic, "broker-a", number) for number in range(queues)]
        ends, progress = cluster.ends(names).or_raise(), cluster.progress(names).or_raise()
    return sum(end - (progress[queue] or 0) for queue, end in ends.items())


#: PySpark's, and that of our own sessions.
_DAEMONS = (PYSPARK_DAEMON, QUIET_DAEMON)


class _Process(NamedTuple):
    pid: int
    parent: int
    session: int
    words: str


def processes_of(leader: int, sessions: Iterable[int] = ()) -> Iterator[_Process]:
    """A process, what it and its children have started, and everything in these sessions.

    Java is in a session of its own, in which Python's workers stay when they leave its group.
    """
    running = list(_running())
    theirs = {leader, *sessions}
    while True:
        family = {each.pid for each in running if each.session in theirs} | {leader}
        found = {each.session for each in running if each.parent in family} | theirs
        if found == theirs:
            return iter([each for each in running if each.session in theirs])
        theirs = found


def python_workers(leader: int) -> list[int]:
    """The processes of a job in which tasks run: they are forked from a daemon."""
    found = [each for each in processes_of(leader) if any(name in each.words for name in _DAEMONS)]
    daemons = {each.pid for each in found}
    return [each.pid for each in found if each.parent in daemons]


def kill_session(leader: int) -> None:
    """Kill a process that leads a session, and everything that it has started."""
    sessions = {leader}

    def are_dead() -> bool:
        # Again and again: some may be born while others are killed. What is orphaned is known by
        # its session.
        found = list(processes_of(leader, sessions))
        sessions.update(each.session for each in found)
        for each in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        return not found

    until(are_dead, f"job {leader} is killed")


def _running() -> Iterator[_Process]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            words = (entry / "cmdline").read_text()
        except OSError:
            continue  # it has ended meanwhile
        if fields[0] != "Z":
            yield _Process(int(entry.name), int(fields[1]), int(fields[3]), words)
