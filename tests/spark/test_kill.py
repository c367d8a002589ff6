"""A streaming job whose driver, worker and broker are killed: every message once."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.filling import fill, numbered
from tests.support.sparking import in_files, until
from tests.support.sparkkilling import BrokerProcess, Job, lag

TOPIC = "orders"
GROUP = "archive"
QUEUES = 4


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    found = BrokerProcess(tmp_path / "data")
    yield found
    found.bury()


@pytest.mark.feature("M2")
@pytest.mark.timeout(420)
def test_nothing_is_lost_or_doubled_when_driver_worker_and_broker_are_killed(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    fill(broker.broker, TOPIC, numbered(1000, queues=QUEUES))

    first = Job("sparkpipeline", broker.name_server, TOPIC, GROUP, str(tmp_path))
    try:
        first.until_batches(2)
    finally:
        first.kill()
    fill(broker.broker, TOPIC, numbered(600, queues=QUEUES, first=1000))

    second = Job("sparkpipeline", broker.name_server, TOPIC, GROUP, str(tmp_path))
    try:
        second.until_batches(1)
        for worker in second.workers():
            os.kill(worker, signal.SIGKILL)
        second.until_batches(3)
        broker.kill()
        broker.start()
        fill(broker.broker, TOPIC, numbered(400, queues=QUEUES, first=1600))
        until(lambda: len(in_files(tmp_path)) >= 2000, "everything is in the files")
        until(lambda: lag(broker.name_server, GROUP, TOPIC) == 0, "the broker knows of it")
    finally:
        code = second.stop()

    assert code == 0
    counts = Counter(in_files(tmp_path))
    assert sorted(counts) == list(range(2000))
    assert set(counts.values()) == {1}
