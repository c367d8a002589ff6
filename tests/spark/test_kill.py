"""A streaming job whose driver, worker and broker are killed: every message once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from orbitmq.client.queue import Queue
from orbitmq.client.rangeaccess import RangeAccess
from orbitmq.client.rangecluster import RangeCluster
from tests.support.command import Started
from tests.support.filling import fill, numbered
from tests.support.sparking import in_files, until

ROOT = Path(__file__).parents[2]
TOPIC = "orders"
GROUP = "archive"
QUEUES = 4


class Job:
    """The job, as a process group that can be killed as a whole."""

    def __init__(self, name_server: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.sparkpipeline"),
                *(name_server, TOPIC, GROUP, str(folder)),
            ],
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

    def until_batches(self, count: int) -> None:
        """Return when it has made so many batches."""

        def enough() -> bool:
            assert self.process.poll() is None, "".join(self._errors)[-3000:]
            return len(self.batches) >= count

        until(enough, f"{count} batches")

    def kill(self) -> None:
        """Driver, JVM and workers, at one instant."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self._end()

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(60)
        self._end()
        return code

    def workers(self) -> list[int]:
        """The Python processes in which tasks run."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                words = (entry / "cmdline").read_text()
            except OSError:
                continue  # it has ended meanwhile
            # Workers are forked from a daemon and lead no group of their own.
            if int(fields[3]) == self.process.pid and "pyspark.daemon" in words:
                found.append((int(entry.name), int(fields[1])))
        daemons = {pid for pid, _ in found}
        return [pid for pid, parent in found if parent in daemons]

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


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    found = BrokerProcess(tmp_path / "data")
    yield found
    found.bury()


def lag(name_server: str) -> int:
    """Messages that the broker takes for unread by the group."""
    with RangeCluster(RangeAccess(name_servers=(name_server,)), GROUP) as cluster:
        queues = [Queue(TOPIC, "broker-a", number) for number in range(QUEUES)]
        ends, progress = cluster.ends(queues).or_raise(), cluster.progress(queues).or_raise()
    return sum(end - (progress[queue] or 0) for queue, end in ends.items())


@pytest.mark.feature("M2")
@pytest.mark.timeout(240)
def test_nothing_is_lost_or_doubled_when_driver_worker_and_broker_are_killed(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    fill(broker.broker, TOPIC, numbered(1000, queues=QUEUES))

    first = Job(broker.name_server, tmp_path)
    try:
        first.until_batches(2)
    finally:
        first.kill()
    fill(broker.broker, TOPIC, numbered(600, queues=QUEUES, first=1000))

    second = Job(broker.name_server, tmp_path)
    try:
        second.until_batches(1)
        for worker in second.workers():
            os.kill(worker, signal.SIGKILL)
        second.until_batches(3)
        broker.kill()
        broker.start()
        fill(broker.broker, TOPIC, numbered(400, queues=QUEUES, first=1600))
        until(lambda: len(in_files(tmp_path)) >= 2000, "everything is in the files")
        until(lambda: lag(broker.name_server) == 0, "the broker knows of it")
    finally:
        code = second.stop()

    assert code == 0
    counts = Counter(in_files(tmp_path))
    assert sorted(counts) == list(range(2000))
    assert set(counts.values()) == {1}
