"""Rows that fail, in a stream whose executors and driver are killed: none is lost.

The kill comes when the good rows of a batch are written and the failed ones not yet given back.
With the executor die the verdicts; a row that failed would be a good one if it were judged again,
and so neither written nor given back.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from pyarrow import dataset

from tests.support.brokerlives import BrokerProcess
from tests.support.filling import fill, numbered
from tests.support.sparking import until
from tests.support.sparkkilling import Job, processes_of
from tests.support.sparksettling import EVERY

TOPIC, GROUP = "orders", "billing"
COUNT = 400
DEADLINE = 240.0
MASTER = "local-cluster[1,2,1024]"


@pytest.fixture
def broker(tmp_path):
    with BrokerProcess(tmp_path / "data") as broker:
        yield broker


def billed(folder: Path) -> Counter[int]:
    """How often each number was written, in batches that are complete."""
    files = [
        str(file)
        for done in (folder / "billed").glob("batch=*/_SUCCESS")
        for file in done.parent.glob("*.parquet")
    ]
    if not files:
        return Counter()
    try:
        table = dataset.dataset(files).to_table(columns=["body"])
    except FileNotFoundError:
        return Counter()  # a batch is being replaced just now
    return Counter(int(body) for body in table.column("body").to_pylist())


def kill_executors(job: Job) -> None:
    """The JVM with all that it keeps; Spark starts another one."""
    found = [
        each.pid
        for each in processes_of(job.process.pid)
        if "CoarseGrainedExecutorBackend" in each.words
    ]
    assert found, "there is an executor"
    for pid in found:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(900)
def test_no_row_that_failed_is_lost_when_executors_and_driver_are_killed(broker, tmp_path):
    fill(broker.address, TOPIC, numbered(COUNT, queues=4))
    words = (broker.name_server, TOPIC, GROUP, str(tmp_path), MASTER)

    first = Job("sparksettling", *words)
    try:
        first.until_batches(2, DEADLINE)
        kill_executors(first)
        first.until_batches(4, DEADLINE)
    finally:
        first.kill()
    second = Job("sparksettling", *words)
    try:
        second.until_batches(2, DEADLINE)
        kill_executors(second)
        until(lambda: set(billed(tmp_path)) == set(range(COUNT)), "all are billed", DEADLINE)
    finally:
        second.kill()

    counts = billed(tmp_path)
    # One that was given back and is judged once more with its batch may be there twice.
    doubled = {number for number, times in counts.items() if times > 1}
    assert all(number % EVERY == 0 for number in doubled), sorted(doubled)
