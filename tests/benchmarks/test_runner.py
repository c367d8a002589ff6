"""The bench runner on tiny workloads."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import main
from benchmarks.catalogue import BENCHES
from benchmarks.docspage import write_page
from benchmarks.report import read_json
from benchmarks.runner import LEAST_ROUNDS, Absent, Bench, Clock, Scale, measure
from tests.support.tries import TRIES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


def test_the_ratio_is_the_speed_of_the_candidate_relative_to_the_floor() -> None:
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
def test_a_target_is_met_missed_or_not_set(target: float | None, ok: bool | None) -> None:
    result = measure(bench(counting_to(100, 100), target=target), SMALL)

    assert result.ok is ok
    assert result.target == target


def test_a_figure_can_be_the_time_for_a_unit() -> None:
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


def test_a_busy_machine_gets_fewer_rounds_but_never_too_few() -> None:
    impatient = Scale(rounds=50, round_seconds=0.002, patience=0.0)

    result = measure(bench(counting_to(100, 100)), impatient)

    assert result.rounds == LEAST_ROUNDS


def test_what_lets_the_machine_settle_comes_before_each_timed_part_and_is_not_counted() -> None:
    settled: list[float] = []

    def settle() -> None:
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass
        settled.append(until)

    settling = replace(bench(counting_to(10, 10)), between=settle, once_per_round=True)
    result = measure(settling, SMALL)

    assert len(settled) == 2 * SMALL.rounds
    assert result.figure is not None
    assert result.figure > 1 / 0.02


def test_what_a_bench_set_up_is_cleaned_up() -> None:
    cleaned: list[str] = []

    measure(bench(counting_to(10, 10, cleaned)), SMALL)

    assert cleaned == ["cleaned"]


def test_a_run_prints_a_table_and_writes_the_declared_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_one_failing_bench_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_what_missed_its_target_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    benches = [
        bench(counting_to(10, 10), target=1e9, name="slow"),
        bench(counting_to(10, 10), target=1e-9, name="fast"),
    ]

    status = main(["--json", str(out)], benches=benches, curves=[], scale=SMALL)

    assert status == 0
    assert "1 targets missed or curves that rise: arithmetic: slow" in capsys.readouterr().err
    write_page(read_json(out), tmp_path / "docs")
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert "Of 2 targets, 1 missed what is wanted: arithmetic: slow." in page


def test_what_there_is_no_time_for_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_name_that_no_bench_has_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "no such bench"]) == 2
    assert "no such bench" in capsys.readouterr().err


def test_the_page_holds_every_line_and_a_plot_of_each_room(tmp_path: Path) -> None:
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
    assert [path.name for path in written] == ["performance.md", "performance-arithmetic.svg"]
    assert all(path.stat().st_size > 0 for path in written)


def test_the_catalogue_names_every_bench_once_and_says_what_it_is_compared_with() -> None:
    titles = [(line.room, line.name) for line in BENCHES]

    assert len(set(titles)) == len(titles)
    assert all(line.compared_with for line in BENCHES)
