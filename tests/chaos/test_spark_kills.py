"""Driver, Python worker and broker killed in mid-batch, again and again, while messages come.

`ORBITMQ_ROUNDS` is the number of kills (50 unless given), `ORBITMQ_FIRST_SEED` makes another order
of them. What is killed, and when, comes from the seed, which a failure shows.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from tests.support.brokerlives import BrokerProcess
from tests.support.sparkconsuming import Journal
from tests.support.sparking import in_files, until
from tests.support.sparkkilling import DEADLINE, TOPIC, Job, Rounds, bodies_in, lag

ROUNDS = int(os.environ.get("ORBITMQ_ROUNDS", "50"))
SEED = int(os.environ.get("ORBITMQ_FIRST_SEED", "1"))
GROUP = "chaos"
#: For a whole test on a machine that others use as well; a round takes some seconds on a quiet one.
ENOUGH = 300 + 120 * ROUNDS


def plan() -> list[str]:
    """What is killed in each round."""
    chance = random.Random(SEED)
    return [
        chance.choice(("driver", "worker", "worker", "broker", "broker")) for _ in range(ROUNDS)
    ]


@pytest.fixture
def broker(tmp_path):
    with BrokerProcess(tmp_path / "data") as broker:
        yield broker


@pytest.mark.timeout(ENOUGH)
def test_a_stream_into_files_has_every_message_once(broker, tmp_path):
    words = (broker.name_server, TOPIC, GROUP, str(tmp_path))
    rounds = Rounds(broker, lambda: Job("sparkpipeline", *words), plan(), SEED)
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


@pytest.mark.feature("T4")
@pytest.mark.timeout(ENOUGH)
def test_a_stream_into_a_topic_has_every_message_once(broker, tmp_path):
    target = "copies"
    # `ORBITMQ_EXACTLY_ONCE=false` shows that the kills do hit batches: rows are stored twice then.
    exact = os.environ.get("ORBITMQ_EXACTLY_ONCE", "true")
    words = (broker.name_server, TOPIC, GROUP, str(tmp_path), target, exact)
    rounds = Rounds(broker, lambda: Job("sparkcopy", *words), plan(), SEED)
    try:
        rounds.run()
        until(lambda: lag(broker.name_server, GROUP, TOPIC) == 0, "all is copied", 2 * DEADLINE)
        code = rounds.job.stop()
    finally:
        rounds.job.kill()

    counts = Counter(int(body) for body in bodies_in(broker.name_server, target))
    twice = sum(count - 1 for count in counts.values())
    print(
        f"{len(rounds.kills)} kills {dict(Counter(rounds.kills))}, {rounds.sent} messages, "
        f"{rounds.sent - len(counts)} lost, {twice} stored twice",
        flush=True,
    )
    assert code == 0
    assert sorted(counts) == list(range(rounds.sent)), (SEED, rounds.kills)
    assert twice == 0, (SEED, rounds.kills)


@pytest.mark.timeout(ENOUGH)
def test_a_group_on_spark_handles_every_message(broker, tmp_path):
    """At least once: what was in a batch that nobody could report comes again, and no more."""
    journal = Journal(tmp_path / "journal")
    words = (broker.name_server, GROUP, TOPIC, str(journal.path))
    rounds = Rounds(broker, lambda: Job("sparkconsumer", *words), plan(), SEED)
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
