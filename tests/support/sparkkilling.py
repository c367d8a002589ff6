"""Jobs on Spark, and brokers, as processes that can be killed at any time."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from orbitmq.client.ranges.cluster import RangeCluster
from orbitmq.client.ranges.connections import RangeAccess
from orbitmq.client.routes import Queue
from orbitmq.spark.worker import PYSPARK_DAEMON, QUIET_DAEMON
from tests.support.command import ROOT, Piped, importing
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

    def _take(self, line: str) -> None:
        if line.startswith("batch "):
            self.batches.append(int(line.split()[1]))


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
