"""Jobs on Spark, and brokers, as processes that can be killed at any time."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from orbitmq.client.ranges.cluster import RangeCluster
from orbitmq.client.ranges.connections import QueueRange, RangeAccess, RangeConnections
from orbitmq.client.ranges.read import read_ranges
from orbitmq.client.routes import Queue
from orbitmq.message.stored import decode_messages
from orbitmq.spark.internals import PYSPARK_DAEMON, QUIET_DAEMON
from orbitmq.spark.session import prepare
from tests.support.brokerlives import BrokerProcess
from tests.support.command import ROOT, Piped, importing
from tests.support.filling import fill, numbered
from tests.support.sparking import until

#: A session, its JVM and the first batch, on a machine that may have much else to do.
STARTING = 150.0


class Job(Piped):
    """The job, as a process group that can be killed as a whole."""

    def __init__(self, module: str, *words: str) -> None:
        """Runs a module of `tests.support` that prints a line for every batch."""
        self.batches: list[int] = []
        command = [sys.executable, "-m", f"tests.support.{module}", *words]
        super().__init__(command, importing(), cwd=ROOT, start_new_session=True)

    def until_batches(self, count: int, deadline: float = STARTING) -> None:
        """Return when it has made so many batches."""
        self.until_true(lambda: len(self.batches) >= count, f"{count} batches", deadline)

    def kill(self) -> None:
        """Driver, JVM and workers, at one instant."""
        kill_session(self.process.pid)
        self.wait()

    def workers(self) -> list[int]:
        """The Python processes in which tasks run."""
        return python_workers(self.process.pid)

    def take(self, line: str) -> None:
        if line.startswith("batch "):
            self.batches.append(int(line.split()[1]))


def lag(name_server: str, group: str, topic: str, queues: int = 4) -> int:
    """Messages that the broker takes for unread by the group."""
    with RangeCluster(RangeAccess(name_servers=(name_server,)), group) as cluster:
        names = [Queue(topic, "broker-a", number) for number in range(queues)]
        ends, progress = cluster.ends(names).or_raise(), cluster.progress(names).or_raise()
    return sum(end - (progress[queue] or 0) for queue, end in ends.items())


def bodies_in(name_server: str, topic: str) -> list[bytes]:
    """The bodies of all messages of a topic."""
    access = RangeAccess(name_servers=(name_server,))
    with RangeCluster(access, "reader") as cluster:
        ends = cluster.ends(cluster.queues([topic])).or_raise()
    connections = RangeConnections(access)
    ranges = [QueueRange(queue, 0, end) for queue, end in ends.items() if end]
    chunks = read_ranges(connections, ranges, group="reader")
    found = [
        bytes(each.body) for chunk in chunks for each in decode_messages(b"".join(chunk.pieces))
    ]
    connections.close()
    return found


TOPIC = "orders"
QUEUES = 4
#: Messages of each round.
COUNT = 300
DEADLINE = 180.0
#: A batch takes some tenths of a second.
LONGEST_PAUSE = 0.4


class Rounds:
    """A job that is hurt in every round, while its topic is filled."""

    def __init__(
        self, broker: BrokerProcess, start: Callable[[], Job], plan: Sequence[str], seed: int
    ) -> None:
        """`plan` names what is killed: the driver, a worker or the broker."""
        self._broker = broker
        self._start = start
        self._plan = plan
        self._random = random.Random(seed)
        self._pause = threading.Event()
        self.kills: list[str] = []
        self.sent = 0
        self.job = start()

    def run(self) -> None:
        """All rounds."""
        self._send()
        self.job.until_batches(1, DEADLINE)
        for kind in self._plan:
            self._send()
            batches = len(self.job.batches)
            self.job.until_batches(batches + 1, DEADLINE)
            # The next batch runs; somewhere in it, and never at the same place.
            self._pause.wait(self._random.uniform(0, LONGEST_PAUSE))
            self.kills.append(kind)
            print(f"round {len(self.kills)}: {kind}", flush=True)  # shown when it fails
            getattr(self, f"_kill_{kind}")()

    def _send(self) -> None:
        fill(self._broker.address, TOPIC, numbered(COUNT, queues=QUEUES, first=self.sent))
        self.sent += COUNT

    def _kill_driver(self) -> None:
        self.job.kill()
        self.job = self._start()
        self._send()
        self.job.until_batches(1, DEADLINE)

    def _kill_worker(self) -> None:
        workers = self.job.workers()
        assert workers, "there is no Python worker to kill"
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.kill(worker, signal.SIGKILL)

    def _kill_broker(self) -> None:
        self._broker.stop()
        self._broker.start()


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


# ---- a standalone cluster of Spark on this machine

#: A JVM on a busy machine takes its time.
JVM_DEADLINE = 90.0

_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
_JOINED = re.compile(r"Successfully registered with master")


class Daemon(Piped):
    """A process of Spark that serves until it is killed."""

    deadline = JVM_DEADLINE

    def __init__(self, kind: str, *words: str, folder: Path) -> None:
        environment = importing()
        prepare(environment)
        folder.mkdir(parents=True)
        environment |= {
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1",
            # Without our own settings of its log, which leave out what is waited for.
            "SPARK_CONF_DIR": str(folder),
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
