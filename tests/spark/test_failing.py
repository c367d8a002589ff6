"""When a pipeline that runs is ill all the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.spark.failing import FEWEST, SHARE, WINDOW, FailureWatch


def watch(*points: tuple[float, int, int]) -> FailureWatch:
    made = FailureWatch()
    for point in points:
        made.add(*point)
    return made


def test_a_pipeline_whose_messages_all_come_back_is_failing_from_the_first_on() -> None:
    young = watch((1.0, 0, 1))

    assert young.share(2.0) == 1.0
    assert young.is_failing(2.0)


@pytest.mark.parametrize(
    ("done", "failed", "is_failing"),
    [(100, 99, False), (100, 100, True), (3, FEWEST - 1, False), (3, FEWEST, True), (9, 0, False)],
)
def test_half_of_what_was_handled_lately_makes_it_ill_if_there_are_several(
    done: int, failed: int, is_failing: bool
) -> None:
    assert watch((1.0, done, failed)).is_failing(1.0) == is_failing


def test_one_message_that_fails_again_and_again_in_an_idle_pipeline_does_not() -> None:
    idle = watch((0.0, 10_000, 0), (WINDOW + 10.0, 10_000, 1), (WINDOW + 30.0, 10_000, 2))

    assert idle.share(WINDOW + 40.0) == 1.0
    assert not idle.is_failing(WINDOW + 40.0)


def test_it_is_well_again_when_the_failures_are_old() -> None:
    mended = watch((0.0, 0, 50), (10.0, 400, 50))

    assert not mended.is_failing(10.0 + WINDOW)
    assert mended.share(11.0 + WINDOW) is None


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 20), st.integers(0, 20)), max_size=30)
)
def test_the_share_is_that_of_what_came_within_the_window(
    steps: list[tuple[int, int, int]],
) -> None:
    made = FailureWatch()
    now, done, failed = 0, 0, 0
    kept: list[tuple[int, int, int]] = []
    for passed, well, badly in steps:
        now += passed
        done, failed = done + well, failed + badly
        kept.append((now, well, badly))
        made.add(float(now), done, failed)

    recent = [each for each in kept if each[0] > now - WINDOW]
    well, badly = sum(each[1] for each in recent), sum(each[2] for each in recent)
    assert made.share(float(now)) == (badly / (well + badly) if well + badly else None)
    ill = badly > 0 and ((badly >= SHARE * (well + badly) and badly >= FEWEST) or done == 0)
    assert made.is_failing(float(now)) == ill
