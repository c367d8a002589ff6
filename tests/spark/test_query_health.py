"""Whether a stream or a group is failing, by counts of attempts; and whose rows are counted."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from orbitmq.spark.consuming.progress import Settled
from orbitmq.spark.health import FEWEST, SHARE, WINDOW, FailureRate, SentBackCounts, StreamHealth
from orbitmq.spark.pipelines.run import Run
from orbitmq.spark.worker import query_of

# ---- attempts


@pytest.mark.parametrize(
    ("done", "failed", "is_failing"),
    [
        (100, 99, False),
        (100, 100, True),
        (3, FEWEST - 1, False),
        (3, FEWEST, True),
        (0, FEWEST - 1, False),
        (0, FEWEST, True),
    ],
)
def test_half_of_the_attempts_must_have_failed_and_several(done, failed, is_failing):
    rate = FailureRate()

    rate.add(1.0, done, failed)

    assert rate.is_failing(1.0) == is_failing


STEPS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 20), st.integers(0, 20)), max_size=30
)


@given(STEPS)
def test_only_attempts_within_the_window_count(steps):
    rate, now = FailureRate(), 0
    points: list[tuple[int, int, int]] = []
    for passed, done, failed in steps:
        now += passed
        points.append((now, done, failed))
        rate.add(now, done, failed)

    recent = [each for each in points if each[0] > now - WINDOW]
    done, failed = sum(each[1] for each in recent), sum(each[2] for each in recent)
    assert rate.share(now) == (failed / (done + failed) if done + failed else None)
    assert rate.is_failing(now) == (failed >= FEWEST and failed >= SHARE * (done + failed))


# ---- streams that send rows back


def settled(retried: int = 0, dead: int = 0, held: int = 0) -> Settled:
    return Settled(retried=retried, dead=dead, held=held)


#: Steps of a stream: rows that it sends back, or the number of rows of a batch that ends; then the
#: share of failed attempts, whether it is failing, and what was retried.
STREAMS: dict[str, tuple[list[Settled | int], float | None, bool, int]] = {
    "most rows come back": ([settled(9, dead=3), 15], 0.8, True, 9),
    "no batch has ended": ([settled(10)], None, False, 10),
    "few rows come back": ([settled(10), 5000], 10 / 5000, False, 10),
    "the next batch began to send back": (
        [settled(1), settled(100), 10, 390],
        101 / 400,
        False,
        101,
    ),
    "middleware held all rows": ([settled(held=6), 6], None, False, 0),
    "middleware held some rows": ([settled(held=6), 6, settled(held=6), 8], 0.0, False, 0),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_failing_when_most_of_its_rows_come_back(name):
    steps, share, is_failing, retried = STREAMS[name]
    counts = SentBackCounts()
    health = StreamHealth(counts, "a")

    for step in steps:
        if isinstance(step, Settled):
            counts.add("a", step)
        else:
            health.batch_ended(1.0, step)

    assert (health.share(1.0), health.is_failing(1.0)) == (share, is_failing)
    assert health.sent_back.retried == retried


def test_a_stream_is_not_judged_by_another_or_by_its_former_run():
    counts = SentBackCounts()
    counts.add("a", settled(500))
    counts.add("b", settled(1000))
    health = StreamHealth(counts, "a")

    counts.add("a", settled(3))
    counts.add(None, settled(2, dead=1))  # outside of any batch
    health.batch_ended(1.0, 400)

    assert (health.share(1.0), health.sent_back, health.done) == (3 / 400, Settled(retried=3), 397)
    assert counts.total() == Settled(retried=1505, dead=1)


@pytest.mark.parametrize(
    ("session", "stream"),
    [
        (
            {"sparkContext": SimpleNamespace(getLocalProperty={"sql.streaming.queryId": "q"}.get)},
            "q",
        ),
        ({"sparkContext": SimpleNamespace(getLocalProperty={}.get)}, None),
        ({}, None),  # of Connect
    ],
)
def test_rows_are_counted_for_the_stream_of_the_calling_thread(session, stream):
    frame: Any = SimpleNamespace(sparkSession=SimpleNamespace(**session))

    assert query_of(frame) == stream


def test_a_run_can_be_pickled_without_what_belongs_to_its_process(monkeypatch):
    """As a Connect session does with a function for batches."""

    class Unmovable(SimpleNamespace):
        def __reduce__(self) -> str:
            raise TypeError("it cannot be sent")

    here: Any = Run(
        Unmovable(),  # type: ignore[arg-type]
        name="billing",
        name_server=["one:9876", "two:9876"],
        checkpoint="folder",
        console=Unmovable(),  # type: ignore[arg-type]
    )
    here.returned.add(None, settled(3, dead=1))

    there = cloudpickle.loads(cloudpickle.dumps(lambda: here))()
    there.returned.add(None, settled(1))

    assert there.options == here.options == {"nameServer": "one:9876;two:9876"}
    assert (there.name, there.checkpoint("a"), there.console) == ("billing", "folder/a", None)
    assert here.returned.total() == Settled(retried=3, dead=1)
    assert there.returned.total() == Settled(retried=1)


def test_a_copy_of_a_run_has_the_session_of_the_present_batch(monkeypatch):
    """Connect makes the function while the session is the query's, and calls it in another."""
    own, of_the_query, of_the_batch = (SimpleNamespace() for _ in range(3))
    here: Any = Run(own, name_server="one:9876")  # type: ignore[arg-type]

    monkeypatch.setattr(SparkSession, "active", lambda: of_the_query)
    there: Any = copy.copy(here)
    monkeypatch.setattr(SparkSession, "active", lambda: of_the_batch)

    assert there.spark is of_the_batch
    assert here.spark is own
