"""The bench runner on tiny workloads."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import main
from benchmarks.catalogue import BENCHES
from benchmarks.docspage import write_page
from benchmarks.machine import this_machine
from benchmarks.report import Report, published, ratio_text, read_json, write_data
from benchmarks.runner import (
    LEAST_ROUNDS,
    Absent,
    Bench,
    Clock,
    NoMoreRounds,
    NotAtHand,
    Result,
    Sample,
    Scale,
    measure,
)
from tests.support.tries import TRIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.runner import Prepare, Work

SMALL = Scale(rounds=5, round_seconds=0.002, megabytes=1)


def counting_to(candidate: int, floor: int, cleaned: list[str] | None = None) -> Prepare:
    """A candidate and a floor that count one unit for a loop of so many steps."""

    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        def loop(steps: int) -> Work:
            def work() -> int:
                for _ in range(steps):
                    pass
                return 1

            return work

        yield loop(candidate), loop(floor)
        if cleaned is not None:
            cleaned.append("cleaned")

    return prepare


def bench(prepare: Prepare, *, target: float | None = None, name: str = "counting") -> Bench:
    return Bench(
        name=name,
        room="arithmetic",
        unit="loops/s",
        compared_with="a shorter loop",
        prepare=prepare,
        target=target,
    )


def test_the_ratio_is_the_speed_of_the_candidate_relative_to_the_floor():
    for _ in range(TRIES):
        result = measure(bench(counting_to(8000, 1000)), SMALL)
        if result.ratio == pytest.approx(1 / 8, rel=0.6):
            break  # else something disturbed it

    assert result.ratio is not None
    assert result.spread is not None
    assert result.ratio == pytest.approx(1 / 8, rel=0.6)
    low, high = result.spread
    assert low <= result.ratio <= high
    assert result.figure is not None
    assert result.figure > 0
    assert result.rounds == 5


@pytest.mark.parametrize(("target", "ok"), [(0.0001, True), (1000.0, False), (None, None)])
def test_a_target_is_met_missed_or_not_set(target, ok):
    result = measure(bench(counting_to(100, 100), target=target), SMALL)

    assert result.ok is ok
    assert result.target == target


def test_a_figure_can_be_the_time_for_a_unit():
    times = Bench(
        name="counting",
        room="arithmetic",
        unit="µs each",
        compared_with="itself",
        prepare=counting_to(1000, 1000),
        time_for=1,
        unit_factor=1e6,
        clock=Clock.WALL,
    )

    result = measure(times, SMALL)

    assert result.figure is not None
    assert 1 < result.figure < 10_000
    assert result.clock == "wall time"


def test_a_busy_machine_gets_fewer_rounds_but_never_too_few():
    impatient = Scale(rounds=50, round_seconds=0.002, patience=0.0)

    result = measure(bench(counting_to(100, 100)), impatient)

    assert result.rounds == LEAST_ROUNDS


def test_what_lets_the_machine_settle_comes_before_each_timed_part_and_is_not_counted():
    settled: list[float] = []

    def settle():
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass
        settled.append(until)

    settling = replace(bench(counting_to(10, 10)), between=settle, once_per_round=True)
    result = measure(settling, SMALL)

    assert len(settled) == 2 * SMALL.rounds
    assert result.figure is not None
    assert result.figure > 1 / 0.02


def test_what_a_bench_set_up_is_cleaned_up():
    cleaned: list[str] = []

    measure(bench(counting_to(10, 10, cleaned)), SMALL)

    assert cleaned == ["cleaned"]


def test_a_run_prints_a_table_and_writes_the_declared_fields(tmp_path, capsys):
    out = tmp_path / "build" / "bench.json"
    absent = Absent(name="racing", room="peers", compared_with="a horse", reason="no horse")

    status = main(
        ["--quick", "--json", str(out)],
        benches=[bench(counting_to(100, 100), target=0.1)],
        curves=[],
        absent=[absent],
        scale=SMALL,
    )

    assert status == 0
    printed = capsys.readouterr().out
    assert "counting" in printed
    assert "a horse (not at hand: no horse)" in printed
    written = json.loads(out.read_text())
    measured, missing = written["results"]
    assert {"name", "figure", "unit", "compared_with", "ratio", "spread", "target", "ok"} <= set(
        measured
    )
    assert measured["ok"] is True
    assert missing["figure"] is None
    assert missing["note"] == "not at hand: no horse"
    assert {"python", "cores", "cpu", "commit", "packages"} <= set(written["machine"])


def test_one_failing_bench_does_not_hide_the_others(tmp_path, capsys):
    @contextmanager
    def broken(_: Scale) -> Iterator[tuple[Work, Work]]:
        if SMALL.rounds:
            raise ValueError("out of luck")
        yield int, int

    out = tmp_path / "bench.json"

    status = main(
        ["--quick", "--json", str(out)],
        benches=[bench(broken, name="broken"), bench(counting_to(10, 10))],
        curves=[],
        absent=[],
        scale=SMALL,
    )

    assert status == 1
    assert "arithmetic: broken: ValueError: out of luck" in capsys.readouterr().err
    report = read_json(out)
    assert [result.name for result in report.results] == ["counting"]
    assert report.failures == ["arithmetic: broken: ValueError: out of luck"]
    write_page(report, tmp_path / "docs")
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert "- arithmetic: broken: ValueError: out of luck" in page


def test_what_missed_its_target_is_counted(tmp_path, capsys):
    out = tmp_path / "bench.json"
    benches = [
        bench(counting_to(10, 10), target=1e9, name="slow"),
        bench(counting_to(10, 10), target=1e-9, name="fast"),
    ]

    status = main(["--json", str(out)], benches=benches, curves=[], scale=SMALL)

    assert status == 1
    told = capsys.readouterr().err
    assert "1 met, 1 missed, 0 not measured" in told
    assert "missed: arithmetic: slow" in told
    write_page(read_json(out), tmp_path / "docs")
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert "Targets and curves: 1 met, 1 missed, 0 not measured." in page
    assert "Missed what is wanted:\n\n- arithmetic: slow\n" in page


def test_a_quick_run_that_misses_a_target_says_so_and_is_no_failure(tmp_path, capsys):
    slow = bench(counting_to(10, 10), target=1e9, name="slow")

    status = main(
        ["--quick", "--json", str(tmp_path / "bench.json")], benches=[slow], curves=[], scale=SMALL
    )

    assert status == 0
    assert "0 met, 1 missed, 0 not measured" in capsys.readouterr().err


def test_targets_of_lines_that_could_not_be_measured_stay_counted(tmp_path, capsys):
    def failing(error):
        @contextmanager
        def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
            if SMALL.rounds:
                raise error
            yield int, int

        return prepare

    out = tmp_path / "bench.json"
    benches = [
        bench(failing(ValueError("out of luck")), target=1, name="failed"),
        bench(failing(NotAtHand("no horse")), target=1, name="absent"),
        bench(failing(NotAtHand("no horse")), name="without a target"),
    ]

    status = main(["--json", str(out)], benches=benches, curves=[], scale=SMALL)

    assert status == 1
    assert "0 met, 0 missed, 2 not measured" in capsys.readouterr().err
    report = read_json(out)
    assert report.not_measured == ["arithmetic: failed", "arithmetic: absent"]
    write_page(report, tmp_path / "docs")
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert "were not measured:\n\n- arithmetic: failed\n- arithmetic: absent\n" in page
    assert "at least 1: not measured" in page


@pytest.mark.parametrize(
    ("least", "target", "ok"), [(1e-9, None, True), (1e12, None, False), (1e-9, 1e9, False)]
)
def test_a_figure_can_have_a_floor_of_its_own(least, target, ok):
    wanted = replace(bench(counting_to(10, 10), target=target), least_figure=least)

    assert measure(wanted, SMALL).ok is ok


def test_both_sides_are_kept_round_by_round():
    paces = iter((1.0, 2.0, 3.0))

    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        def floor():
            seconds = next(paces)
            return Sample(6, seconds, seconds)

        yield lambda: Sample(6, 1.0, 1.0), floor

    result = measure(replace(bench(prepare), rounds=3, once_per_round=True), SMALL)

    assert result.figures == (6.0, 6.0, 6.0)
    assert result.floor_figures == (6.0, 3.0, 2.0)
    assert result.ratios == (1.0, 2.0, 3.0)


def test_a_line_has_no_more_rounds_than_were_made():
    made = iter((1.0, 2.0))

    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        def look():
            for seconds in made:
                return Sample(1, seconds, seconds)
            raise NoMoreRounds

        yield look, lambda: Sample(1, 1.0, 1.0)

    result = measure(replace(bench(prepare), once_per_round=True), SMALL)

    assert result.ratios == (1.0, 0.5)
    assert result.rounds == 2


def test_one_round_has_no_spread():
    once = measure(replace(bench(counting_to(10, 10)), rounds=1), SMALL)
    often = measure(bench(counting_to(10, 10)), SMALL)

    assert "to" not in ratio_text(once)
    assert " to " in ratio_text(often)


def test_a_quick_run_does_not_become_the_page(tmp_path, capsys):
    out = tmp_path / "bench.json"
    main(
        ["--quick", "--json", str(out)],
        benches=[bench(counting_to(10, 10))],
        curves=[],
        scale=SMALL,
    )

    assert main(["--docs", "--json", str(out)]) == 2
    assert "of a quick run, which is too short to publish; run: make bench" in (
        capsys.readouterr().err
    )


def test_the_data_of_the_page_is_short_and_holds_no_path(tmp_path):
    ratios = tuple(1 / 3 + number for number in range(15))
    result = Result(
        name="counting",
        room="arithmetic",
        figure=1234567.891,
        unit="messages/s",
        compared_with="json.loads of 1/2 of it",
        ratio=ratios[0],
        spread=(0.1, 0.2),
        ratios=ratios,
    )
    report = Report(
        machine=this_machine(),
        quick=False,
        results=[result] * 100,
        failures=[f"arithmetic: broken: OSError: no such file: '{tmp_path}/store'"],
    )

    text = write_data(published(report), tmp_path / "data" / "bench.json").read_text()

    assert str(tmp_path) not in text
    assert "no such file: '(a path)'" in text
    assert "json.loads of 1/2 of it" in text
    assert len(text) < 350 * len(report.results)
    again = read_json(tmp_path / "data" / "bench.json").results[0]
    assert again.unit == "messages/s"
    assert again.figure == 1234600
    assert again.ratios == pytest.approx(ratios, rel=1e-3)


def test_what_there_is_no_time_for_is_named(tmp_path, capsys):
    out = tmp_path / "bench.json"
    hurried = replace(SMALL, longest=0.0)

    status = main(
        ["--json", str(out)], benches=[bench(counting_to(10, 10))], curves=[], scale=hurried
    )

    assert status == 0
    assert "the time was up: arithmetic: counting" in capsys.readouterr().err
    report = read_json(out)
    assert (report.results, report.left_out) == ([], ["arithmetic: counting"])
    write_page(report, tmp_path / "docs")
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert "because the time was up:\n\n- arithmetic: counting" in page


def test_a_name_that_no_bench_has_is_an_error(capsys):
    assert main(["--only", "no such bench"]) == 2
    assert "no such bench" in capsys.readouterr().err


def test_the_page_holds_every_line_and_a_plot_of_each_room(tmp_path):
    out = tmp_path / "bench.json"
    absent = Absent(name="racing", room="peers", compared_with="a horse", reason="no horse")
    main(
        ["--quick", "--json", str(out)],
        benches=[bench(counting_to(10, 10), target=1e9)],
        curves=[],
        absent=[absent],
        scale=SMALL,
    )

    written = write_page(read_json(out), tmp_path / "docs")

    page = (tmp_path / "docs" / "performance.md").read_text()
    assert "| counting |" in page
    assert "at least 1e+09: not ok" in page
    assert "not at hand: no horse" in page
    assert [path.name for path in written] == [
        "performance.md",
        "bench.json",
        "performance-arithmetic.svg",
    ]
    assert "[bench.json](data/bench.json)" in page
    assert (tmp_path / "docs" / "data" / "bench.json").exists()
    assert all(path.stat().st_size > 0 for path in written)


def test_the_catalogue_names_every_bench_once_and_says_what_it_is_compared_with():
    titles = [(line.room, line.name) for line in BENCHES]

    assert len(set(titles)) == len(titles)
    assert all(line.compared_with for line in BENCHES)


def test_a_log_shows_which_line_is_being_measured(tmp_path, capsys):
    told: list[str] = []

    @contextmanager
    def listening(_: Scale) -> Iterator[tuple[Work, Work]]:
        told.append(capsys.readouterr().err)
        yield lambda: Sample(1, 1.0, 1.0), lambda: Sample(1, 1.0, 1.0)

    lines = [bench(listening, name="first"), bench(listening, name="second")]
    once = [replace(line, rounds=1, once_per_round=True) for line in lines]

    main(["--json", str(tmp_path / "bench.json")], benches=once, curves=[], scale=SMALL)

    assert re.fullmatch(r"1/2 arithmetic: first, \d+:\d\d:\d\d\n", told[0])
    assert re.fullmatch(r"2/2 arithmetic: second, \d+:\d\d:\d\d\n", told[1])


def test_a_line_for_which_there_is_no_time_is_not_said_to_begin(tmp_path, capsys):
    out = tmp_path / "bench.json"
    no_time = replace(SMALL, longest=0.0)

    main(["--json", str(out)], benches=[bench(counting_to(10, 10))], curves=[], scale=no_time)

    assert capsys.readouterr().err.startswith("left out, the time was up: arithmetic: counting\n")


def test_a_terminal_has_a_bar_instead(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    out = tmp_path / "bench.json"

    main(["--json", str(out)], benches=[bench(counting_to(10, 10))], curves=[], scale=SMALL)

    told = capsys.readouterr().err
    assert "arithmetic: counting" in told
    assert "1/1 arithmetic" not in told
