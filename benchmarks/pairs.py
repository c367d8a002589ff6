"""Pairs of lines that look at the same rounds, by wall time and by CPU time: a row for each."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.kafka_bench import CPU_AGAIN
from benchmarks.report import ratio_text
from benchmarks.runner import Result, verdict

_COLOURS = {"wall": "#5b7f9e", "cpu": "#c9a24b"}


@dataclass(frozen=True, slots=True)
class Pair:
    """What two lines say; the second is missing where it was not measured."""

    by_wall: Result
    by_cpu: Result | None

    @property
    def is_measured(self) -> bool:
        return self.by_wall.ratio is not None


def pairs_of(results: Iterable[Result]) -> list[Pair]:
    """The lines in their order, two by two."""
    by_title = {(each.name, each.compared_with): each for each in results}
    return [
        Pair(each, by_title.get((each.name + CPU_AGAIN, each.compared_with)))
        for each in by_title.values()
        if not each.name.endswith(CPU_AGAIN)
    ]


def pairs_table(pairs: Iterable[Pair]) -> str:
    lines = [
        "| OrbitMQ | messages/s | beside | messages/s | ratio by wall time | ratio by CPU time |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for pair in pairs:
        wall, cpu = pair.by_wall, pair.by_cpu
        cells = (
            wall.name,
            f"{wall.figure:,.0f}" if wall.figure is not None else "",
            f"{wall.compared_with} ({wall.note})" if wall.note else wall.compared_with,
            f"{statistics.median(wall.floor_figures):,.0f}" if wall.floor_figures else "",
            _judged(wall),
            _judged(cpu) if cpu is not None else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _judged(result: Result) -> str:
    wanted = ""
    if result.target is not None:
        wanted = f"; at least {result.target:g}: {verdict(result) or 'not measured'}"
    return ratio_text(result) + wanted


def plot_pairs(pairs: Iterable[Pair], title: str, path: Path) -> None:
    """Two bars for each pair, and a tick where a target is."""
    shown = [pair for pair in pairs if pair.is_measured]
    figure = Figure(figsize=(9, 1.2 + 0.55 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for row, pair in enumerate(shown):
        for kind, shift, result in (("wall", -0.2, pair.by_wall), ("cpu", 0.2, pair.by_cpu)):
            if result is None or result.ratio is None or result.spread is None:
                continue
            at, (low, high) = row + shift, result.spread
            label = {"wall": "by wall time", "cpu": "by CPU time of the client"}[kind]
            bar = axes.barh(at, result.ratio, color=_COLOURS[kind], height=0.36)
            bar.set_label("" if row else label)
            errors = [[max(0.0, result.ratio - low)], [max(0.0, high - result.ratio)]]
            axes.errorbar(result.ratio, at, xerr=errors, color="#222222", capsize=2, linewidth=1)
            if result.target is not None:
                axes.plot([result.target] * 2, [at - 0.2, at + 0.2], color="#222222", linewidth=2)
    names = [f"{pair.by_wall.name}\nbeside {pair.by_wall.compared_with}" for pair in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.axvline(1, color="#888888", linewidth=1, linestyle="--")
    axes.set_xlabel("speed relative to Kafka's client (1: equal; thick tick: target)")
    axes.set_title(title)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    # Without a date and with fixed ids the file changes only when the figures do.
    with mpl.rc_context({"svg.hashsalt": "orbitmq"}):
        figure.savefig(path, metadata={"Date": None})
