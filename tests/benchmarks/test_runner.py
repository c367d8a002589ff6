"""The bench runner on tiny workloads."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import main
from benchmarks.catalogue import BENCHES
from benchmarks.runner import Absent, Bench, NoMoreRounds, NotAtHand, Sample, measure
from tests.benchmarks.conftest import SMALL
from tests.support.tries import TRIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.runner import Prepare, Scale, Work

ABSENT = Absent(name="racing", room="peers", compared_with="a horse", reason="no horse")


def prepared(make: Callable[[], tuple[Work, Work]]) -> Prepare:
    """A bench's set-up: makes the candidate and the floor."""

    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        yield make()

    return prepare


def counting_to(candidate: int, floor: int) -> Prepare:
    """A candidate and a floor that count one unit for a loop of so many steps."""

    def loop(steps: int) -> Work:
        def work() -> int:
            for _ in range(steps):
                pass
            return 1

        return work

    return prepared(lambda: (loop(candidate), loop(floor)))


def failing(error: Exception) -> Prepare:
    def fail() -> tuple[Work, Work]:
        raise error

    return prepared(fail)


def bench(
    prepare: Prepare | None = None, *, target: float | None = None, name: str = "counting"
) -> Bench:
    return Bench(
        name=name,
        room="arithmetic",
        unit="loops/s",
        compared_with="a shorter loop",
        prepare=prepare or counting_to(10, 10),
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


@pytest.mark.parametrize(
    ("target", "least", "ok"),
    [
        (0.0001, None, True),
        (1000.0, None, False),
        (None, None, None),
        (None, 1e-9, True),
        (None, 1e12, False),
        (1e9, 1e-9, False),
    ],
)
def test_a_target_and_a_least_figure_are_met_missed_or_not_set(target, least, ok):
    wanted = replace(bench(counting_to(100, 100), target=target), least_figure=least)

    assert measure(wanted, SMALL).ok is ok


def test_both_sides_are_kept_round_by_round_as_long_as_there_are_rounds():
    paces = iter((1.0, 2.0, 3.0))

    def floor() -> Sample:
        for seconds in paces:
            return Sample(6, seconds, seconds)
        raise NoMoreRounds

    timed = replace(bench(prepared(lambda: (lambda: Sample(6, 1.0, 1.0), floor))))
    result = measure(replace(timed, once_per_round=True), SMALL)

    assert result.figures == (6.0, 6.0, 6.0)
    assert result.floor_figures == (6.0, 3.0, 2.0)
    assert result.ratios == (1.0, 2.0, 3.0)


def test_a_run_prints_a_table_and_writes_a_page_with_a_plot_of_each_room(run):
    ran = run("--quick", benches=[bench(target=1e9)], absent=[ABSENT])

    assert ran.status == 0
    assert "0 met, 1 missed, 0 not measured" in ran.err
    assert "counting" in ran.out
    assert "a horse (not at hand: no horse)" in ran.out
    measured, missing = ran.report.results
    assert (measured.ok, missing.figure, missing.note) == (False, None, "not at hand: no horse")
    for text in ("| counting |", "at least 1e+09: not ok", "not at hand: no horse"):
        assert text in ran.page
    assert "[bench.json](data/bench.json)" in ran.page
    names = ["performance.md", "bench.json", "performance-arithmetic.svg"]
    assert [path.name for path in ran.files] == names
    assert all(path.stat().st_size > 0 for path in ran.files)


def test_one_failing_bench_does_not_hide_the_others(run):
    ran = run(benches=[bench(failing(ValueError("out of luck")), name="broken"), bench()])

    problem = "arithmetic: broken: ValueError: out of luck"
    assert ran.status == 1
    assert problem in ran.err
    assert [result.name for result in ran.report.results] == ["counting"]
    assert ran.report.failures == [problem]
    assert f"- {problem}" in ran.page


def test_a_missed_target_is_named_and_fails_a_full_run(run):
    ran = run(benches=[bench(target=1e9, name="slow"), bench(target=1e-9, name="fast")])

    assert ran.status == 1
    assert "1 met, 1 missed, 0 not measured" in ran.err
    assert "missed: arithmetic: slow" in ran.err
    assert "Targets and curves: 1 met, 1 missed, 0 not measured." in ran.page
    assert "Missed what is wanted:\n\n- arithmetic: slow\n" in ran.page


def test_targets_of_lines_that_could_not_be_measured_stay_counted(run):
    ran = run(
        benches=[
            bench(failing(ValueError("out of luck")), target=1, name="failed"),
            bench(failing(NotAtHand("no horse")), target=1, name="absent"),
            bench(failing(NotAtHand("no horse")), name="without a target"),
        ]
    )

    assert ran.status == 1
    assert "0 met, 0 missed, 2 not measured" in ran.err
    assert ran.report.not_measured == ["arithmetic: failed", "arithmetic: absent"]
    assert "were not measured:\n\n- arithmetic: failed\n- arithmetic: absent\n" in ran.page


def test_lines_for_which_there_is_no_time_are_named(run):
    ran = run(benches=[bench()], scale=replace(SMALL, longest=0.0))

    assert ran.status == 0
    assert "the time was up: arithmetic: counting" in ran.err
    assert (ran.report.results, ran.report.left_out) == ([], ["arithmetic: counting"])
    assert "because the time was up:\n\n- arithmetic: counting" in ran.page


def test_a_quick_run_does_not_become_the_page(run, tmp_path, capsys):
    run("--quick", benches=[bench()])

    assert main(["--docs", "--json", str(tmp_path / "build" / "bench.json")]) == 2
    assert "of a quick run, which is too short to publish" in capsys.readouterr().err


def test_the_catalogue_names_every_bench_once_and_says_what_it_is_compared_with():
    titles = [(line.room, line.name) for line in BENCHES]

    assert len(set(titles)) == len(titles)
    assert all(line.compared_with for line in BENCHES)
