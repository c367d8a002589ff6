"""A consumer group whose driver is killed in the middle of a batch: nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orbitmq.spark import consume
from orbitmq.testing.background import EmbeddedCluster
from tests.support.filling import fill, numbered
from tests.support.sparkconsuming import QUICK, SOON, Journal, idle, progress_of
from tests.support.sparking import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[3]
TOPIC = "orders"
GROUP = "billing"
QUEUES = 4
COUNT = 2000
#: What may be under way when everything is killed: a batch.
IN_A_BATCH = 100


class Job:
    """The job, as a process group that can be killed as a whole."""

    def __init__(self, name_server: str, journal: Path) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.sparkconsumer"),
                *(name_server, GROUP, TOPIC, str(journal)),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.batches = 0
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def kill(self) -> None:
        """Driver, JVM and workers, at one instant."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self._end()

    def _end(self) -> None:
        self.process.wait(60)
        self._listener.join(60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.batches += line.startswith("batch ")


@pytest.mark.timeout(240)
def test_nothing_is_lost_when_the_driver_is_killed_in_a_batch(
    spark: SparkSession, orbit_cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    """And little comes twice: what was in the batch that nobody could report."""
    orbit_cluster.create_topic(TOPIC, queues=QUEUES)
    fill(orbit_cluster.broker_addresses[0], TOPIC, numbered(COUNT, queues=QUEUES))
    journal = Journal(tmp_path / "journal")

    first = Job(orbit_cluster.name_server, journal.path)
    try:
        until(lambda: first.batches >= 2, "two batches")
        handled = len(journal.entries())
        until(lambda: len(journal.entries()) > handled, "it is in the middle of the next")
    finally:
        first.kill()
    before = len(journal.entries())
    reported = sum(progress_of(orbit_cluster, GROUP, TOPIC).values())

    second = consume(
        spark, GROUP, name_server=orbit_cluster.name_server, batch=QUICK, rebalance=SOON
    )
    second.on(TOPIC)(journal.writing())
    with second:
        idle(second)

    assert 200 <= reported < COUNT
    assert reported <= before
    counts = Counter(journal.bodies())
    assert set(counts) == {str(n) for n in range(COUNT)}
    assert sum(progress_of(orbit_cluster, GROUP, TOPIC).values()) == COUNT
    assert sum(counts.values()) - COUNT == before - reported <= IN_A_BATCH
