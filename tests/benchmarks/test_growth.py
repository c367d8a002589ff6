"""How curves are measured and judged, and what the page says about them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import main
from benchmarks.docspage import write_page
from benchmarks.growth.curve import Allowance, Curve, Point, Probes, grown, growth_of, measure_curve
from benchmarks.growth.wording import judgement_text
from benchmarks.machine import this_machine
from benchmarks.report import Report
from benchmarks.runner import Scale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SIZES = (1, 4, 16, 64)


def curve(
    cost: Callable[[int], float] = float,
    *,
    sizes: tuple[int, ...] = SIZES,
    allowance: Allowance | None = None,
    is_rate: bool = False,
) -> Curve:
    @contextmanager
    def prepare(_: Scale, __: Sequence[int]) -> Iterator[Probes]:
        yield Probes(cost)

    return Curve(
        name="feeding",
        axis="horses",
        sizes=sizes,
        prepare=prepare,
        allowance=allowance,
        is_rate=is_rate,
    )


def points(*costs: float, sizes: Sequence[int] = SIZES) -> tuple[Point, ...]:
    """Three rounds, of which one is dear because the machine was busy."""
    return tuple(
        Point(size=size, values=(cost, cost * 1.01, cost * 3))
        for size, cost in zip(sizes, costs, strict=True)
    )


@pytest.mark.parametrize(
    ("costs", "allowance", "verdict"),
    [
        ((10, 11, 10, 11), None, "flat"),
        ((10, 9, 8, 7), None, "falls"),
        ((10, 10, 10, 14), None, "rises"),
        ((20, 10, 10, 14), None, "rises"),  # cheaper than at first, and yet it bends upwards
        ((10, 10, 10, 14), Allowance("hay is dear", 1.5), "rises for a reason"),
        ((10, 10, 10, 16), Allowance("hay is dear", 1.5), "rises"),
        ((10, 13, 40, 160), Allowance("each eats"), "rises for a reason"),
        ((10, 13, 40, 300), Allowance("each eats"), "rises"),  # more than in proportion
    ],
)
def test_a_curve_may_rise_by_a_quarter_or_as_far_as_its_reason_reaches(costs, allowance, verdict):
    result = grown(curve(allowance=allowance), points(*costs))

    assert result.verdict == verdict
    assert result.ok is (verdict != "rises")


def test_the_exponent_is_that_of_the_power_law():
    assert growth_of(points(7, 7, 7, 7)).exponent == pytest.approx(0)
    assert growth_of(points(1, 4, 16, 64)).exponent == pytest.approx(1)
    assert growth_of(points(1, 2, 4, 8)).exponent == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("rates", "verdict"), [((100, 171), "falls"), ((100, 149), "gains too little")]
)
def test_a_rate_that_is_to_be_multiplied_has_to_gain(rates, verdict):
    wanted = replace(curve(is_rate=True, sizes=(1, 2)), least_gain=1.5)

    result = grown(wanted, points(*rates, sizes=(1, 2)))

    assert result.verdict == verdict
    assert result.ok is (verdict == "falls")
    assert judgement_text(result).endswith("; wanted: at least 1.5 times")


def test_a_quick_run_names_the_sizes_that_it_drops(run):
    ran = run("--quick", curves=[curve(lambda _: 5.0)], scale=None)

    assert ran.report.dropped == ["growth: horses: feeding: without 4"]
    assert ran.report.score == "1 met, 0 missed, 0 not measured"
    assert "- growth: horses: feeding: without 4\n" in ran.page


def test_a_machine_that_gets_busier_bends_no_curve():
    visits: list[int] = []

    def dearer_every_time(size):
        visits.append(size)
        return 10.0 + len(visits)

    result = measure_curve(curve(dearer_every_time), Scale(rounds=4))

    assert result.verdict == "flat"
    assert visits == [*SIZES, *SIZES, *SIZES[::-1], *SIZES, *SIZES[::-1]]
    assert [len(point.values) for point in result.points] == [4] * len(SIZES)


def test_the_page_shows_each_curve_with_its_plot_its_growth_and_its_reason(tmp_path):
    eaten = grown(
        curve(allowance=Allowance("each eats")), points(10, 13, 40, 160), points(1, 1, 1, 1)
    )
    driven = grown(curve(is_rate=True, sizes=(1, 2)), points(100, 150, sizes=(1, 2)))
    flat = grown(replace(curve(), axis="carts"), points(10, 10, 10, 10))
    bent = grown(replace(curve(), axis="wheels"), points(10, 10, 10, 20))
    beyond = grown(
        replace(curve(allowance=Allowance("hay is dear", 1.5)), axis="wheels"),
        points(10, 10, 10, 16),
    )
    report = Report(
        machine=this_machine(), quick=True, results=[], curves=[eaten, driven, flat, bent, beyond]
    )

    written = write_page(report, tmp_path)

    page = (tmp_path / "performance.md").read_text()
    assert f"commit {report.machine.commit}" in page
    assert "rises 16.00 times between 1 and 64. The reason: each eats" in page
    assert "the rate at the last is 1.50 (1.50 to 1.50) times that at the first" in page
    assert "flat: no point is more than 1.00 times as dear as one before it" in page
    assert "rises 2.00 times between 16 and 64, for which no reason is known" in page
    assert "rises 1.60 times between 16 and 64. That is more than the known reason explains" in page
    assert "| 16 | 40.4 (40.2 to 80.2) |" in page
    assert [path.name for path in written] == [
        "performance.md",
        "bench.json",
        "performance-growth-horses.svg",
        "performance-growth-carts.svg",
        "performance-growth-wheels.svg",
    ]
    assert all(path.stat().st_size > 0 for path in written)


def test_curves_can_be_chosen_and_a_part_of_a_run_does_not_become_the_page(run, tmp_path, capsys):
    chosen = curve(lambda _: 5.0)
    curves = [chosen, replace(chosen, axis="carts")]

    ran = run("--only", "growth: horses", curves=curves, scale=Scale(rounds=3))

    assert ran.status == 0
    assert "feeding" in ran.out
    (result,) = ran.report.curves
    assert result.axis == "horses"
    assert [point.values for point in result.points] == [(5.0, 5.0, 5.0)] * len(SIZES)
    assert main(["--docs", "--json", str(tmp_path / "build" / "bench.json")]) == 2
    assert "holds 'growth: horses' only; run: make bench" in capsys.readouterr().err
