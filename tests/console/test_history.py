"""Seven days in a small file, an hour in memory: little is kept, and nothing a line would show."""

from __future__ import annotations

import sqlite3
from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.console import history as module
from orbitmq.console.history import KEEP, STEP, FineHistory, HistoryFile, Series, thinned
from orbitmq.console.settings import ConsoleError


@pytest.fixture
async def history():
    """A history in memory with room for a thousand points."""
    made = HistoryFile(None, most=1000)
    await made.open()
    yield made
    await made.close()


async def fill(history, **values):
    """Add values by series, one for each five minutes."""
    for stretch, sample in enumerate(zip(*values.values(), strict=True)):
        await history.add(float(stretch * STEP), dict(zip(values, sample, strict=True)))


async def test_peaks_outlive_the_process(tmp_path):
    path = tmp_path / "deep" / "history.sqlite"
    first = HistoryFile(path)
    await first.open()
    for time, lag in ((0, 5.0), (100, 70.0), (200, 6.0), (STEP, 1.0), (2 * STEP, 1.0)):
        await first.add(float(time), {"cluster/lag": lag})
    await first.close()

    second = HistoryFile(path)
    await second.open()
    points = await second.since("cluster/lag", 0.0)
    await second.close()

    # The highest of each stretch; the level part is one point.
    assert points == [(0.0, 70.0), (float(STEP), 1.0)]


async def test_points_older_than_a_week_are_deleted(history):
    times = (0.0, KEEP / 2, KEEP + 2.0 * STEP, KEEP + 4.0 * STEP)
    for value, at in enumerate(times, 1):
        await history.add(at, {"x": float(value)})

    points = await history.since("x", 0.0)

    assert min(at for at, _ in points) > 0
    assert points[-1][1] == 3.0


async def test_the_oldest_points_are_deleted_above_the_bound_and_level_lines_written_again(history):
    for stretch in range(200):
        lags = {f"group/{number}/lag": float(stretch) for number in range(20)}
        await history.add(float(stretch * STEP), lags | {"level": 7.0})

    points = [await history.since(f"group/{number}/lag", 0.0) for number in range(20)]
    level = await history.since("level", 0.0)

    assert sum(map(len, points)) <= 1000
    assert all(each[-1] == (198.0 * STEP, 198.0) and each[0][0] > 0 for each in points)
    assert {value for _, value in level} == {7.0}
    assert level[0][0] <= points[0][0][0] + 7 * 3600


async def test_two_consoles_may_have_one_file(tmp_path):
    one, other = (HistoryFile(tmp_path / "history.sqlite") for _ in range(2))
    await one.open()
    await other.open()
    for stretch in range(3):
        await one.add(float(stretch * STEP), {"x": float(stretch), "one": 1.0})
        await other.add(float(stretch * STEP), {"x": float(stretch), "other": 2.0})
    points = [await each.since(name, 0.0) for each in (one, other) for name in ("x", "one")]
    await one.close()
    await other.close()

    assert points == [[(0.0, 0.0), (float(STEP), 1.0)], [(0.0, 1.0)]] * 2


async def test_the_audit_has_a_bound(history, monkeypatch):
    monkeypatch.setattr(module, "MOST_LINES", 5)
    for number in range(9):
        await history.note(float(number), f"line {number}")
    await fill(history, x=(1.0, 1.0))

    assert await history.notes(100) == [f"line {number}" for number in range(4, 9)]


async def test_a_file_of_something_else_is_refused_with_its_name(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("this is no database, and long enough not to be taken for an empty one" * 20)

    with pytest.raises(ConsoleError, match=r"notes\.txt"):
        await HistoryFile(path).open()


async def test_a_broken_file_costs_the_history_and_nothing_else(tmp_path):
    path = tmp_path / "history.sqlite"
    history = HistoryFile(path)
    await history.open()
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE points")
    other.close()

    await fill(history, x=(1.0, 2.0))

    assert await history.since("x", 0.0) == []
    await history.close()


samples = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def series_of(points):
    series = Series()
    for time, value in points:
        series.add(float(time), float(value))
    return series


def value_at(points, time):
    """What a line through the points shows at a sample's time."""
    place = bisect_right([at for at, _ in points], time) - 1
    (left, low), (right, high) = points[place], points[min(place + 1, len(points) - 1)]
    return low if right == left else low + (high - low) * (time - left) / (right - left)


@given(samples, st.integers(0, 60))
def test_a_line_through_the_points_that_are_kept_is_the_line_through_all_samples(values, before):
    series = series_of(enumerate(values))
    points = series.since(0.0)
    series.forget(float(before))
    later = series.since(0.0)

    assert [value_at(points, float(time)) for time in range(len(values))] == values
    for time, value in list(enumerate(values))[before:]:
        assert value_at(later, float(time)) == value


def test_a_clock_that_was_set_back_does_not_put_points_out_of_order():
    series = series_of(((10, 1), (11, 2), (5, 3), (12, 4)))

    assert series.since(0.0) == [(10.0, 1.0), (11.0, 3.0), (12.0, 4.0)]


def test_series_without_new_samples_are_forgotten():
    history = FineHistory(keep=30.0)
    history.add(0.0, {"group/gone/lag": 1.0, "group/here/lag": 1.0})
    for time in range(1, 120):
        history.add(float(time), {"group/here/lag": float(time)})

    assert history.since("group/gone/lag", 0.0) == []
    assert history.since("group/here/lag", 100.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=500), st.integers(4, 60))
def test_thinning_keeps_the_highest_the_lowest_and_the_last(values, most):
    points = [(float(time), value) for time, value in enumerate(values)]

    kept = thinned(points, most)

    assert len(kept) <= max(most + 1, 4)
    assert max(value for _, value in kept) == max(values)
    assert min(value for _, value in kept) == min(values)
    assert kept[-1] == points[-1]
    assert kept == sorted(kept)
