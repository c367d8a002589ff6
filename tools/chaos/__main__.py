"""`python -m tools.chaos`: every scenario, two tables, and an exit code."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.chaos.catalogue import SCENARIOS, USUAL_MINUTES, Scenario
from tools.chaos.effort import Effort
from tools.chaos.figures import Figure
from tools.chaos.plan import Part, scale_for, taken
from tools.chaos.programs import ROOT, Stage
from tools.chaos.report import (
    Outcome,
    Run,
    by_rows,
    by_scenarios,
    commit_of,
    condensed,
    last,
    machine_of,
    put_into_docs,
    why_not_resumed,
    write,
)
from tools.chaos.suites import SUITES, Suite, run_suite

_FOLDER = ROOT / "build" / "chaos"
_PAGE = ROOT / "docs" / "guarantees.md"


def main(words: Sequence[str] | None = None) -> int:
    """Run what is asked for; 0 when every rule was kept."""
    wanted = _arguments().parse_args(words)
    # A file has no width; what is narrower breaks the tables.
    console = Console(width=None if sys.stdout.isatty() else 160)
    parts = [each for each in _parts(wanted) if _is_wanted(each, wanted.only)]
    if wanted.list:
        for part in parts:
            console.print(f"{part.name:20} {part.rows:8} {part.about}", highlight=False)
        return 0
    if wanted.docs:
        return _put_into_docs(console)
    if not parts:
        console.print(f"no scenario is called {' or '.join(wanted.only)}; see --list")
        return 2
    run = _begin(wanted)
    if isinstance(run, str):
        console.print(f"cannot go on with the last run: {run}", markup=False)
        return 2
    _go_through(parts, run, console)
    kept = write(run, _FOLDER)
    for table in _tables(run):
        console.print(table)
    console.print(f"kept as {kept.relative_to(ROOT)} and .md", highlight=False)
    if run.is_whole:
        console.print("make chaos ARGS=--docs puts it into docs/guarantees.md", highlight=False)
    return 0 if run.is_kept else 1


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=USUAL_MINUTES, help="how long it may take in all, about"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="for each scenario, instead of its own"
    )
    parser.add_argument("--only", nargs="+", default=[], help="these, by names or their beginnings")
    parser.add_argument("--seed", type=int, default=1, help="repeats what the nemesis does")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the last run, which was cut short: the same commit, seed and lengths",
    )
    parser.add_argument(
        "--docs",
        action="store_true",
        help="run nothing; put the last whole run into docs/guarantees.md",
    )
    parser.add_argument("--list", action="store_true", help="say what there is")
    return parser


def _parts(wanted: argparse.Namespace) -> list[Part]:
    scenarios = [_of_scenario(each, wanted) for each in SCENARIOS]
    return scenarios + [_of_suite(each, wanted) for each in SUITES]


def _of_scenario(scenario: Scenario, wanted: argparse.Namespace) -> Part:
    def faults(scale: float) -> float:
        return wanted.seconds or scenario.seconds(scale)

    def run(folder: Path, scale: float) -> list[Figure]:
        with Stage(folder / "stage") as stage:
            return scenario.run(stage, Effort(faults(scale), wanted.seed))

    def seconds(scale: float) -> float:
        return scenario.takes(faults(scale))

    return Part(scenario.name, scenario.rows, scenario.about, False, seconds, run)


def _of_suite(suite: Suite, wanted: argparse.Namespace) -> Part:
    def run(folder: Path, scale: float) -> list[Figure]:
        return run_suite(suite, scale, wanted.seed, folder / "output.log")

    return Part(suite.name, suite.rows, suite.about, suite.is_extra, suite.seconds, run)


def _is_wanted(part: Part, only: Sequence[str]) -> bool:
    """Whether it is among those that were named, by their names or only by their beginnings."""
    if not only:
        return not part.is_extra
    names = {each.name for each in SCENARIOS} | {each.name for each in SUITES}
    return any(
        part.name == each or (each not in names and part.name.startswith(each)) for each in only
    )


def _put_into_docs(console: Console) -> int:
    run = last(_FOLDER, is_whole=True)
    if run is None:
        minutes = f"{USUAL_MINUTES:.0f} minutes"
        console.print(f"no whole run is kept here; make chaos makes one in about {minutes}")
        return 2
    put_into_docs(run, _PAGE)
    console.print(f"the run of commit {run.commit} is in {_PAGE.relative_to(ROOT)}")
    return 0


def _begin(wanted: argparse.Namespace) -> Run | str:
    """A new run, or the last one when it is to be gone on with; or why that is not possible."""
    began = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    fresh = Run(began, commit_of(), machine_of(), wanted.seed, wanted.minutes, each=wanted.seconds)
    if not wanted.resume:
        return fresh
    before = last(_FOLDER, is_whole=False)
    if before is None:
        return "there is none"
    return why_not_resumed(before, fresh) or before


def _go_through(parts: Sequence[Part], run: Run, console: Console) -> None:
    """Run what the run does not have yet, and keep it after every part."""
    done = {outcome.name for outcome in run.outcomes}
    left = [part for part in parts if part.name not in done]
    whole = {each.name for each in SCENARIOS}
    whole |= {each.name for each in SUITES if not each.is_extra}
    before = run.minutes
    began = time.monotonic()
    while left:
        scale = scale_for(left, (run.asked - run.minutes) * 60, run.asked / USUAL_MINUTES)
        minutes = taken(left, scale) / 60
        part = left.pop(0)
        at = f"{len(parts) - len(left)}/{len(parts)}, about {minutes:.0f} min left"
        console.print(f"[bold]{part.name}[/] ({at}): {part.about}", highlight=False)
        outcome = _run_part(part, scale, run, console)
        run.outcomes.append(outcome)
        run.minutes = before + (time.monotonic() - began) / 60
        run.is_whole = whole <= {each.name for each in run.outcomes}
        write(run, _FOLDER)


def _run_part(part: Part, scale: float, run: Run, console: Console) -> Outcome:
    outcome = Outcome(part.name, part.about, part.rows)
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"orbitmq-{part.name}-"))
    try:
        with console.status(f"{part.name}, about {part.seconds(scale):.0f} s"):
            outcome.figures = part.run(folder, scale)
    except Exception as error:  # noqa: BLE001  # the other scenarios are run all the same
        outcome.failure = f"{type(error).__name__}: {error}"
        console.print(traceback.format_exc(), markup=False)
    outcome.seconds = time.monotonic() - began
    if outcome.is_kept:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        console.print(f"what happened is in {folder}", markup=False)
        console.print(f"again: {again(part, scale, run)}", markup=False)
    for figure in condensed(outcome.figures):
        mark = "[green]ok[/]" if figure.is_kept else "[red]NO[/]"
        console.print(f"  {mark} ", end="")
        console.print(f"{figure.what}: {figure.value} {figure.rule}", markup=False)
    console.print(f"  {outcome.seconds:.0f} s")
    return outcome


def again(part: Part, scale: float, run: Run) -> str:
    """The command that does the same once more, as far as it follows from the seed."""
    length = f"--seconds {run.each:g}" if run.each else f"--minutes {scale * USUAL_MINUTES:.2f}"
    return f'make chaos ARGS="--only {part.name} --seed {run.seed} {length}"'


def _tables(run: Run) -> list[Table]:
    title = f"commit {run.commit}, seed {run.seed}, {run.minutes:.0f} min"
    rows = Table(title=title)
    for name in ("row", "test", "a night asks for", "this run did", "passes when", "kept"):
        rows.add_column(name, overflow="fold")
    for each in by_rows(run):
        rows.add_row(*each)
    figures = Table(title="every figure")
    for name in ("scenario", "row", "figure", "value", "rule", "kept"):
        figures.add_column(name, overflow="fold")
    for each in by_scenarios(run):
        figures.add_row(*each)
    return [figures, rows]


if __name__ == "__main__":
    sys.exit(main())
