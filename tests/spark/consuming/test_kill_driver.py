"""A consumer group whose driver is killed in the middle of a batch: nothing is lost."""

from __future__ import annotations

from collections import Counter

import pytest

from orbitmq.spark import consume
from tests.support.filling import make_topic
from tests.support.sparkconsuming import QUICK, SOON, Journal, idle, progress_of
from tests.support.sparking import until
from tests.support.sparkkilling import Job

TOPIC = "orders"
GROUP = "billing"
QUEUES = 4
COUNT = 2000
#: What may be under way when everything is killed: a batch.
IN_A_BATCH = 100


@pytest.mark.timeout(420)
def test_nothing_is_lost_when_the_driver_is_killed_in_a_batch(spark, orbit_cluster, tmp_path):
    """And little comes twice: what was in the batch that nobody could report."""
    make_topic(orbit_cluster, TOPIC, COUNT, queues=QUEUES)
    journal = Journal(tmp_path / "journal")

    first = Job("sparkconsumer", orbit_cluster.name_server, GROUP, TOPIC, str(journal.path))
    try:
        first.until_batches(2)
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
