"""Driver, Python worker and broker killed in mid-batch, again and again, while messages come.

`ORBITMQ_ROUNDS` is the number of kills (50 unless given), `ORBITMQ_FIRST_SEED` makes another order
of them. What is killed, and when, comes from the seed, which a failure shows.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.brokerlives import BrokerProcess
from tests.support.filling import fill, numbered
from tests.support.sparkconsuming import Journal
from tests.support.sparking import in_files, until
from tests.support.sparkkilling import Job, lag

ROUNDS = int(os.environ.get("ORBITMQ_ROUNDS", "50"))
SEED = int(os.environ.get("ORBITMQ_FIRST_SEED", "1"))
TOPIC, GROUP = "orders", "chaos"
QUEUES = 4
#: Messages of each round.
COUNT = 300
DEADLINE = 180.0
#: For a whole test on a machine that others use as well; a round takes some seconds on a quiet one.
ENOUGH = 300 + 120 * ROUNDS
#: A batch takes some tenths of a second.
LONGEST_PAUSE = 0.4

Start = Callable[[], Job]


@pytest.fixture
def broker(tmp_path):
    with BrokerProcess(tmp_path / "data") as broker:
        yield broker


class Rounds:
    """A job that is hurt in every round, while its topic is filled."""

    def __init__(self, broker: BrokerProcess, start: Start) -> None:
        self._broker = broker
        self._start = start
        self._random = random.Random(SEED)
        self._pause = threading.Event()
        self.kills: list[str] = []
        self.sent = 0
        self.job = start()

    def run(self) -> None:
        """All rounds."""
        self._send()
        self.job.until_batches(1, DEADLINE)
        for _ in range(ROUNDS):
            self._send()
            batches = len(self.job.batches)
            self.job.until_batches(batches + 1, DEADLINE)
            # The next batch runs; somewhere in it, and never at the same place.
            self._pause.wait(self._random.uniform(0, LONGEST_PAUSE))
            kind = self._random.choice(("driver", "worker", "worker", "broker", "broker"))
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


@pytest.mark.timeout(ENOUGH)
def test_a_stream_into_files_has_every_message_once(broker, tmp_path):
    words = (broker.name_server, TOPIC, GROUP, str(tmp_path))
    rounds = Rounds(broker, lambda: Job("sparkpipeline", *words))
    try:
        rounds.run()
        until(lambda: len(in_files(tmp_path)) >= rounds.sent, "all is in the files", DEADLINE)
        until(lambda: lag(broker.name_server, GROUP, TOPIC) == 0, "the broker knows", DEADLINE)
        code = rounds.job.stop()
    finally:
        rounds.job.kill()

    counts = Counter(in_files(tmp_path))
    assert code == 0
    assert sorted(counts) == list(range(rounds.sent)), (SEED, rounds.kills)
    assert set(counts.values()) == {1}, (SEED, rounds.kills)


@pytest.mark.timeout(ENOUGH)
def test_a_group_on_spark_handles_every_message(broker, tmp_path):
    """At least once: what was in a batch that nobody could report comes again, and no more."""
    journal = Journal(tmp_path / "journal")
    words = (broker.name_server, GROUP, TOPIC, str(journal.path))
    rounds = Rounds(broker, lambda: Job("sparkconsumer", *words))
    try:
        rounds.run()
        wanted = {str(number) for number in range(rounds.sent)}
        until(lambda: set(journal.bodies()) >= wanted, "all is handled", DEADLINE)
        until(lambda: lag(broker.name_server, GROUP, TOPIC) == 0, "the broker knows", DEADLINE)
    finally:
        rounds.job.kill()

    counts = Counter(journal.bodies())
    assert set(counts) == wanted, (SEED, rounds.kills)
    # A batch of this job has 100 messages at most.
    assert sum(counts.values()) - rounds.sent <= 100 * ROUNDS, (SEED, rounds.kills)
