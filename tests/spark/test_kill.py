"""A streaming job whose driver, worker and broker are killed: every message once."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

from tests.support.brokerlives import BrokerProcess
from tests.support.filling import fill, numbered
from tests.support.sparkheld import Hold
from tests.support.sparking import in_files, until
from tests.support.sparkkilling import STARTING, Job, Rounds, bodies_in, lag

TOPIC = "orders"
GROUP = "archive"
QUEUES = 4


@pytest.fixture
def broker(tmp_path):
    with BrokerProcess(tmp_path / "data") as broker:
        yield broker


@pytest.mark.feature("T4")
@pytest.mark.timeout(420)
def test_a_topic_gets_every_row_once_when_driver_worker_and_broker_are_killed(broker, tmp_path):
    """A few rounds of tests/chaos/test_spark_kills.py."""
    words = (broker.name_server, TOPIC, GROUP, str(tmp_path), "copies", "true")
    plan = ("driver", "worker", "broker")
    rounds = Rounds(broker, lambda: Job("sparkcopy", *words), plan, seed=7)
    try:
        rounds.run()
        until(lambda: lag(broker.name_server, GROUP, TOPIC) == 0, "all is copied")
        code = rounds.job.stop()
    finally:
        rounds.job.kill()

    assert code == 0
    copies = sorted(map(int, bodies_in(broker.name_server, "copies")))
    assert copies == list(range(rounds.sent))


@pytest.mark.feature("M2")
@pytest.mark.timeout(420)
def test_nothing_is_lost_or_doubled_when_driver_worker_and_broker_are_killed(broker, tmp_path):
    """Each of them in the middle of a batch, which is held for that."""
    hold = Hold(tmp_path)
    words = (broker.name_server, TOPIC, GROUP, str(tmp_path))
    send(broker, 0, 1000)

    first = Job("sparkheld", *words)
    try:
        first.until_batches(2)
        in_the_middle(hold, broker, 1000, 600)
    finally:
        first.kill()
    assert hold.is_batch_open(), "the driver was killed between two batches"
    hold.end()

    second = Job("sparkheld", *words)
    try:
        second.until_batches(1)
        in_the_middle(hold, broker, 1600, 200)
        workers = second.workers()
        assert hold.holders() <= set(workers), "those that are killed do the work"
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        assert hold.is_batch_open(), "the workers were killed between two batches"
        hold.end()
        second.until_batches(len(second.batches) + 1)

        in_the_middle(hold, broker, 1800, 100)
        broker.stop()
        assert hold.is_batch_open(), "the broker was killed between two batches"
        broker.start()
        hold.end()
        send(broker, 1900, 100)
        until(lambda: len(in_files(tmp_path)) >= 2000, "everything is in the files")
        until(lambda: lag(broker.name_server, GROUP, TOPIC) == 0, "the broker knows of it")
    finally:
        code = second.stop()

    assert code == 0
    counts = Counter(in_files(tmp_path))
    assert sorted(counts) == list(range(2000))
    assert set(counts.values()) == {1}


def in_the_middle(hold: Hold, broker: BrokerProcess, first: int, count: int) -> None:
    """Return when a batch runs and does not go on; there is something to make one of."""
    hold.begin()
    send(broker, first, count)
    until(hold.holders, "a task is held", STARTING)


def send(broker: BrokerProcess, first: int, count: int) -> None:
    fill(broker.address, TOPIC, numbered(count, queues=QUEUES, first=first))
