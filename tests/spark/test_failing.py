"""When a pipeline that runs is ill all the same."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.spark.health import FEWEST, SHARE, WINDOW, FailureWatch


def watch(*points: tuple[float, int, dict[int, int]]) -> FailureWatch:
    made = FailureWatch()
    for point in points:
        made.add(*point)
    return made


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
def test_half_of_what_was_handled_lately_makes_it_ill_if_there_are_several(
    done: int, failed: int, is_failing: bool
) -> None:
    assert watch((1.0, done, {0: failed})).is_failing(1.0) == is_failing


@pytest.mark.parametrize("done", [0, 100_000])
def test_one_message_that_fails_again_and_again_does_not(done: int) -> None:
    """With the usual delays of a broker; in order it would be once a second."""
    idle = watch((0.0, done, {}))
    for attempt, seconds in enumerate((0, 10, 40, 100, 220)):
        idle.add(WINDOW + seconds, 0, {attempt: 1})

    now = WINDOW + 220
    assert idle.share(now) == 1.0
    assert not idle.is_failing(now)


def test_several_that_fail_again_and_again_do_though_their_first_attempts_are_long_ago() -> None:
    restarted = watch((0.0, 0, {4: FEWEST, 5: 1}), (60.0, 0, {5: FEWEST - 1, 6: 1}))

    assert restarted.is_failing(60.0)
    assert restarted.share(60.0) == 1.0


def test_a_message_counts_once_in_the_share_however_often_it_failed() -> None:
    assert watch((0.0, 30, {0: 10, 1: 10, 2: 10})).share(1.0) == 0.25


def test_it_is_well_again_when_the_failures_are_old() -> None:
    mended = watch((0.0, 0, {0: 50}), (10.0, 400, {}))

    assert not mended.is_failing(WINDOW)
    assert mended.share(WINDOW) == 0.0
    assert mended.share(10.0 + WINDOW) is None


STEPS = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.integers(0, 20),
        st.dictionaries(st.integers(0, 3), st.integers(0, 20), max_size=3),
    ),
    max_size=30,
)


@given(STEPS)
def test_only_what_came_within_the_window_counts(
    steps: list[tuple[int, int, dict[int, int]]],
) -> None:
    made = FailureWatch()
    now = 0
    kept: list[tuple[int, int, dict[int, int]]] = []
    for passed, well, badly in steps:
        now += passed
        kept.append((now, well, badly))
        made.add(float(now), well, badly)

    recent = [each for each in kept if each[0] > now - WINDOW]
    done = sum(each[1] for each in recent)
    by_try = sum((Counter(each[2]) for each in recent), Counter[int]())
    failed = max(by_try.values(), default=0)
    assert made.share(float(now)) == (failed / (done + failed) if done + failed else None)
    ill = failed >= FEWEST and failed >= SHARE * (done + failed)
    assert made.is_failing(float(now)) == ill


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), unique=True, max_size=12),
        max_size=6,
    )
)
def test_never_more_messages_are_counted_than_there_are(
    rounds: list[list[tuple[int, int]]],
) -> None:
    """Each pair is a message and a try of it, which may fail once."""
    failures = {each for some in rounds for each in some}
    made = FailureWatch()
    for _, attempt in failures:
        made.add(0.0, 0, {attempt: 1})
    made.add(0.0, 100, {})

    messages = len({message for message, _ in failures})
    share = made.share(0.0)
    assert share is not None
    assert share <= messages / (100 + messages)
