"""Numbers over time: little memory, nothing lost that a line would show."""

from __future__ import annotations

from bisect import bisect_right

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.console.history import FineHistory, Series, thinned

samples = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def value_at(points: list[tuple[float, float]], time: float) -> float:
    """What a line through the points shows at a sample's time."""
    place = bisect_right([at for at, _ in points], time) - 1
    (left, low), (right, high) = points[place], points[min(place + 1, len(points) - 1)]
    return low if right == left else low + (high - low) * (time - left) / (right - left)


@given(samples)
def test_a_line_through_what_is_kept_is_the_line_through_all_samples(values):
    series = Series()
    for time, value in enumerate(values):
        series.add(float(time), float(value))

    points = series.since(0.0)

    assert [value_at(points, float(time)) for time in range(len(values))] == values


@given(samples, st.integers(0, 60))
def test_forgetting_keeps_everything_from_a_time_on(values, before):
    series = Series()
    for time, value in enumerate(values):
        series.add(float(time), float(value))
    series.forget(float(before))

    points = series.since(0.0)

    for time, value in list(enumerate(values))[before:]:
        assert value_at(points, float(time)) == value


def test_a_thousand_equal_samples_are_two_points():
    series = Series()
    for time in range(1000):
        series.add(float(time), 7.0)

    assert series.since(0.0) == [(0.0, 7.0), (999.0, 7.0)]


def test_a_clock_that_was_set_back_does_not_put_points_out_of_order():
    series = Series()
    for time, value in ((10.0, 1.0), (11.0, 2.0), (5.0, 3.0), (12.0, 4.0)):
        series.add(time, value)

    assert series.since(0.0) == [(10.0, 1.0), (11.0, 3.0), (12.0, 4.0)]


def test_series_of_what_is_gone_are_forgotten():
    history = FineHistory(keep=30.0)
    history.add(0.0, {"group/gone/lag": 1.0, "group/here/lag": 1.0})
    for time in range(1, 120):
        history.add(float(time), {"group/here/lag": float(time)})

    assert list(history) == ["group/here/lag"]
    assert history.last("group/gone/lag") is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=500), st.integers(4, 60))
def test_thinning_keeps_the_highest_the_lowest_and_the_last(values, most):
    points = [(float(time), value) for time, value in enumerate(values)]

    kept = thinned(points, most)

    assert len(kept) <= max(most + 1, 4)
    assert max(value for _, value in kept) == max(values)
    assert min(value for _, value in kept) == min(values)
    assert kept[-1] == points[-1]
    assert kept == sorted(kept)
