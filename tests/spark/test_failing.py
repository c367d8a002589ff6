"""When a pipeline that runs is failing all the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.spark.health import FEWEST, SHARE, WINDOW, FailureRate


@pytest.mark.parametrize(
    ("done", "failed", "is_failing"),
    [
        (100, 99, False),
        (100, 100, True),
        (3, FEWEST - 1, False),
        (3, FEWEST, True),
        (9, 0, False),
        (0, 1, False),
        (0, FEWEST - 1, False),
        (0, FEWEST, True),
    ],
)
def test_half_of_the_attempts_must_have_failed_and_several(done, failed, is_failing):
    rate = FailureRate()

    rate.add(1.0, done, failed)

    assert rate.is_failing(1.0) == is_failing


def test_one_message_with_the_usual_delays_of_a_broker_is_not_enough():
    rate = FailureRate()
    for seconds in (0, 10, 40, 100, 220):
        rate.add(seconds, 0, 1)

    assert rate.share(220) == 1.0
    assert not rate.is_failing(220)


STEPS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 20), st.integers(0, 20)), max_size=30
)


@given(STEPS)
def test_only_attempts_within_the_window_count(steps):
    rate = FailureRate()
    now = 0
    points: list[tuple[int, int, int]] = []
    for passed, done, failed in steps:
        now += passed
        points.append((now, done, failed))
        rate.add(now, done, failed)

    recent = [each for each in points if each[0] > now - WINDOW]
    done, failed = sum(each[1] for each in recent), sum(each[2] for each in recent)
    assert rate.share(now) == (failed / (done + failed) if done + failed else None)
    assert rate.is_failing(now) == (failed >= FEWEST and failed >= SHARE * (done + failed))
