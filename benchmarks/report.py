"""The results as a table for people and as a file for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.machine import Machine
from benchmarks.runner import Result, verdict


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`build/bench.json`."""

    machine: Machine
    quick: bool
    results: list[Result]


def write_json(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def read_json(path: Path) -> Report:
    return msgspec.json.decode(path.read_bytes(), type=Report)


def print_table(report: Report, console: Console) -> None:
    machine = report.machine
    table = Table(
        title=f"{machine.cores} cores of {machine.cpu}, {machine.python}",
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
                "" if result.target is None else f"{result.target:g}",
                verdict(result),
                style=colour,
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
    low, high = result.spread
    return f"{result.ratio:.2f} ({low:.2f} to {high:.2f})"
