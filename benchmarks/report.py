"""The results as a table for people and as a file for programs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.growth.curve import Grown
from benchmarks.growth.wording import by_axis, change_text, point_text, size_text
from benchmarks.machine import Machine
from benchmarks.runner import Result, verdict


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`build/bench.json`: the figures of every round, and what was made of them."""

    machine: Machine
    quick: bool
    results: list[Result]
    curves: list[Grown] = []
    only: str = ""  #: what was asked for, when that was not everything
    failures: list[str] = []  #: lines that raised, and what
    left_out: list[str] = []  #: lines for which there was no time
    dropped: list[str] = []  #: what a quick run does without
    not_measured: list[str] = []  #: lines with a target, and curves, of which nothing is known

    @property
    def met(self) -> int:
        """Targets that were met, and curves that are as they should be."""
        return sum(each.ok is True for each in self.results) + sum(each.ok for each in self.curves)

    @property
    def missed(self) -> list[str]:
        """Targets that were not met, and curves that rise without a reason or gain too little."""
        lines = [f"{each.room}: {each.name}" for each in self.results if each.ok is False]
        return lines + [f"growth: {each.axis}: {each.name}" for each in self.curves if not each.ok]

    @property
    def score(self) -> str:
        return f"{self.met} met, {len(self.missed)} missed, {len(self.not_measured)} not measured"


def write_json(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


#: Digits that are kept of what is published: rounds differ by more.
_DIGITS = 5
#: Of failures: where somebody keeps his files is nobody's business.
_PATH = re.compile(r"(?<![\w/.])(?:/[\w.+@~-]+){2,}/?")


def published(report: Report) -> Report:
    """What a page and its data are made of: rounded, so that both say the same; without paths."""
    return msgspec.convert(_published(msgspec.to_builtins(report)), Report)


def write_data(report: Report, path: Path) -> Path:
    """The figures of every round for readers of the page, as short as they can be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(report) + b"\n")
    return path


def _published(value: object) -> object:
    match value:
        case dict():
            return {name: _published(each) for name, each in value.items()}
        case list() | tuple():
            return [_published(each) for each in value]
        case float():
            return float(f"{value:.{_DIGITS}g}")
        case str():
            return _PATH.sub("(a path)", value)
    return value


def read_json(path: Path) -> Report:
    return msgspec.json.decode(path.read_bytes(), type=Report)


def print_table(report: Report, console: Console) -> None:
    """The lines with their ratios, room by room."""
    if not report.results:
        return
    machine = report.machine
    table = Table(
        title=f"{machine.cores} cores of {machine.cpu}, {machine.python}, {machine.commit}",
        caption="ratio: speed relative to what it is compared with, median of rounds (quartiles)",
    )
    table.add_column("room")
    table.add_column("what", overflow="fold")
    table.add_column("figure", justify="right")
    table.add_column("unit")
    table.add_column("ratio", justify="right")
    table.add_column("compared with", overflow="fold")
    table.add_column("target", justify="right")
    table.add_column("")
    for room, results in by_room(report.results):
        for result in results:
            colour = {"ok": "green", "not ok": "red", "": ""}[verdict(result)]
            table.add_row(
                room,
                result.name,
                figure_text(result),
                result.unit,
                ratio_text(result),
                f"{result.compared_with} ({result.note})" if result.note else result.compared_with,
                target_text(result),
                verdict(result),
                style=colour,
            )
        table.add_section()
    console.print(table)


def print_curves(report: Report, console: Console) -> None:
    """How costs grow, a line for each curve."""
    if not report.curves:
        return
    table = Table(
        title="How the cost of a message grows",
        caption="quartiles in brackets; growth: last relative to first, round by round",
    )
    table.add_column("with")
    table.add_column("what", overflow="fold")
    for name in ("from", "to", "at first", "at last"):
        table.add_column(name, justify="right")
    table.add_column("unit")
    for name in ("growth", "exponent"):
        table.add_column(name, justify="right")
    table.add_column("", overflow="fold")
    for axis, curves in by_axis(report.curves):
        for curve in curves:
            first, last = curve.points[0], curve.points[-1]
            table.add_row(
                axis,
                curve.name,
                size_text(axis, first.size),
                size_text(axis, last.size),
                point_text(first),
                point_text(last),
                curve.unit,
                change_text(curve),
                f"{curve.growth.exponent:.2f}",
                curve.verdict,
                style="green" if curve.ok else "red",
            )
        table.add_section()
    console.print(table)


def by_room(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """The results grouped by room, in the order in which rooms first appear."""
    rooms: dict[str, list[Result]] = {}
    for result in results:
        rooms.setdefault(result.room, []).append(result)
    return list(rooms.items())


def figure_text(result: Result) -> str:
    figure = result.figure
    if figure is None:
        return ""
    if figure >= 1000:
        return f"{figure:,.0f}"
    return f"{figure:.3g}"


def ratio_text(result: Result) -> str:
    if result.ratio is None or result.spread is None:
        return ""
    if result.rounds == 1:
        return f"{result.ratio:.2f}"  # of which nobody knows how much it varies
    low, high = result.spread
    return f"{result.ratio:.2f} ({low:.2f} to {high:.2f})"


def target_text(result: Result) -> str:
    """What must be reached: of the ratio, of the figure, or of both."""
    parts = [] if result.target is None else [f"{result.target:g}"]
    if result.least_figure is not None:
        parts.append(f"{result.least_figure:,.0f} {result.unit}")
    return " and ".join(parts)
