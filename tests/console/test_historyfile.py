"""Seven days in a small file."""

from __future__ import annotations

import sqlite3

import pytest

from orbitmq.console import history as historyfile
from orbitmq.console.errors import ConsoleError
from orbitmq.console.history import KEEP, STEP, HistoryFile


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


async def test_a_level_line_is_closed_where_it_ends():
    history = HistoryFile(None)
    await history.open()
    for stretch, value in enumerate((3.0, 3.0, 3.0, 9.0, 9.0)):
        await history.add(float(stretch * STEP), {"x": value})
    points = await history.since("x", 0.0)
    await history.close()

    assert points == [(0.0, 3.0), (2.0 * STEP, 3.0), (3.0 * STEP, 9.0)]


async def test_what_is_older_than_a_week_goes():
    history = HistoryFile(None)
    await history.open()
    await history.add(0.0, {"x": 1.0})
    await history.add(KEEP / 2, {"x": 2.0})
    await history.add(KEEP + 2.0 * STEP, {"x": 3.0})
    await history.add(KEEP + 4.0 * STEP, {"x": 4.0})
    points = await history.since("x", 0.0)
    await history.close()

    assert min(at for at, _ in points) > 0
    assert [value for _, value in points][-1] == 3.0


async def test_what_never_changes_is_still_known_after_more_than_a_week():
    history = HistoryFile(None)
    await history.open()
    for stretch in range(0, 2 * KEEP, 3600):
        await history.add(float(stretch), {"x": 7.0})
    points = await history.since("x", 2.0 * KEEP - 3 * 3600)
    everything = await history.since("x", 0.0)
    await history.close()

    assert {value for _, value in points} == {7.0}
    # A point a day, of the last week only.
    assert len(everything) <= 9


async def test_there_is_a_bound_whatever_is_kept_and_the_oldest_goes_first():
    history = HistoryFile(None, most=1000)
    await history.open()
    for stretch in range(200):
        values = {f"group/{number}/lag": float(stretch) for number in range(20)}
        await history.add(float(stretch * STEP), values)
    points = [await history.since(f"group/{number}/lag", 0.0) for number in range(20)]
    await history.close()

    assert sum(map(len, points)) <= 1000
    for each in points:
        assert each[-1] == (198.0 * STEP, 198.0)
        assert each[0][0] > 0


async def test_what_stays_the_same_is_written_again_when_its_point_had_to_go_early():
    history = HistoryFile(None, most=1000)
    await history.open()
    for stretch in range(200):
        values = {f"group/{number}/lag": float(stretch) for number in range(20)}
        await history.add(float(stretch * STEP), values | {"level": 7.0})
    level = await history.since("level", 0.0)
    lag = await history.since("group/0/lag", 0.0)
    await history.close()

    assert {value for _, value in level} == {7.0}
    # In the stretch after the cut, and so on.
    assert level[0][0] <= lag[0][0] + 7 * 3600


async def test_series_that_have_no_points_any_more_are_forgotten(tmp_path):
    path = tmp_path / "history.sqlite"
    history = HistoryFile(path)
    await history.open()
    for at in (0.0, STEP, KEEP + 2.0 * STEP, KEEP + 3.0 * STEP):
        await history.add(at, {"gone": 1.0} if at == 0.0 else {"stays": at})
    await history.close()
    with sqlite3.connect(path) as reader:
        names = [name for (name,) in reader.execute("SELECT name FROM series")]
    reader.close()

    assert names == ["stays"]


async def test_two_consoles_may_have_one_file(tmp_path):
    path = tmp_path / "history.sqlite"
    one, other = HistoryFile(path), HistoryFile(path)
    await one.open()
    await other.open()
    for stretch in range(3):
        await one.add(float(stretch * STEP), {"x": float(stretch), "one": 1.0})
        await other.add(float(stretch * STEP), {"x": float(stretch), "other": 2.0})
    points = [await each.since(name, 0.0) for each in (one, other) for name in ("x", "one")]
    await one.close()
    await other.close()

    assert points == [[(0.0, 0.0), (float(STEP), 1.0)], [(0.0, 1.0)]] * 2


async def test_a_stretch_that_could_not_be_written_leaves_nothing_half_done(tmp_path):
    path = tmp_path / "history.sqlite"
    history = HistoryFile(path)
    await history.open()
    with sqlite3.connect(path) as other:
        other.execute(
            "CREATE TRIGGER full BEFORE INSERT ON points BEGIN SELECT RAISE(FAIL, 'full'); END"
        )
        other.commit()
        await history.add(0.0, {"x": 1.0})
        await history.add(float(STEP), {"x": 1.0})
        left = list(other.execute("SELECT name FROM series"))
        other.execute("DROP TRIGGER full")
        other.commit()
    other.close()
    await history.add(2.0 * STEP, {"x": 1.0})
    points = await history.since("x", 0.0)
    await history.close()

    assert left == []
    # It has not changed since; but that was not written.
    assert points == [(float(STEP), 1.0)]


async def test_the_audit_has_a_bound_as_well(monkeypatch):
    monkeypatch.setattr(historyfile, "MOST_LINES", 5)
    history = HistoryFile(None)
    await history.open()
    for number in range(9):
        await history.note(float(number), f"line {number}")
    for stretch in range(2):
        await history.add(float(stretch * STEP), {"x": 1.0})
    lines = await history.notes(100)
    await history.close()

    assert lines == [f"line {number}" for number in range(4, 9)]


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

    await history.add(0.0, {"x": 1.0})
    await history.add(float(STEP), {"x": 2.0})

    assert await history.since("x", 0.0) == []
    await history.close()
