"""Whether a stream or a group is failing, by counts of attempts; and whose rows are counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.spark.consuming.progress import Settled
from orbitmq.spark.health import FEWEST, SHARE, WINDOW, FailureRate, SentBackCounts, StreamHealth

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
