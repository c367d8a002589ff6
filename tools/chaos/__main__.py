"""`python -m tools.chaos`: every scenario, one table, and an exit code."""

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

from tools.chaos.catalogue import SCENARIOS, Scenario
from tools.chaos.effort import Effort
from tools.chaos.programs import ROOT, Stage
from tools.chaos.report import (
    Outcome,
    Run,
    commit_of,
    condensed,
    machine_of,
    put_into_docs,
    read,
    write,
)
from tools.chaos.suites import SUITES, run_suite

_FOLDER = ROOT / "build" / "chaos"
_PAGE = ROOT / "docs" / "guarantees.md"
#: Minutes for which the rounds of the suites are meant.
_USUAL = 40.0


def main(words: Sequence[str] | None = None) -> int:
    """Run what is asked for; 0 when every rule was kept."""
    wanted = _arguments().parse_args(words)
    console = Console()
    if wanted.list:
        known = [(each.name, each.rows, each.about) for each in SCENARIOS]
        known += [(each.name, each.rows, each.about) for each in SUITES]
        for name, rows, about in known:
            if not _is_wanted(name, wanted.only):
                continue
            console.print(f"{name:20} {rows:8} {about}")
        return 0
    if wanted.docs_only:
        put_into_docs(read(_FOLDER), _PAGE)
        return 0
    chosen = [each for each in SCENARIOS if _is_wanted(each.name, wanted.only)]
    suites = [each for each in SUITES if _is_wanted(each.name, wanted.only)]
    if wanted.only and not chosen and not suites:
        console.print(f"no scenario is called {' or '.join(wanted.only)}; see --list")
        return 2
    began = time.monotonic()
    outcomes = []
    for scenario in chosen:
        seconds = wanted.seconds or scenario.seconds(wanted.minutes * 60 * 0.5)
        outcome = _run_scenario(scenario, Effort(seconds, wanted.seed), console)
        outcomes.append(outcome)
    for suite in suites:
        console.print(f"[bold]{suite.name}[/]: {suite.about}")
        outcome = Outcome(suite.name, suite.about)
        _FOLDER.mkdir(parents=True, exist_ok=True)
        at = time.monotonic()
        scale = wanted.minutes / _USUAL
        outcome.figures = run_suite(suite, scale, wanted.seed, _FOLDER / f"{suite.name}.log")
        outcome.seconds = time.monotonic() - at
        outcomes.append(outcome)
        _show(outcome, console)
    minutes = (time.monotonic() - began) / 60
    run = Run(commit_of(), machine_of(), wanted.seed, minutes, outcomes)
    write(run, _FOLDER)
    if wanted.docs:
        put_into_docs(run, _PAGE)
    console.print(_table(run))
    console.print(f"written to {(_FOLDER / 'report.md').relative_to(ROOT)}")
    return 0 if run.is_kept else 1


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=_USUAL, help="how long it may take in all, about"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="for each scenario, instead of its share"
    )
    parser.add_argument("--only", nargs="+", default=[], help="these, by names or their beginnings")
    parser.add_argument("--seed", type=int, default=1, help="repeats what the nemesis does")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/guarantees.md")
    parser.add_argument("--docs-only", action="store_true", help="the same, of the last run")
    parser.add_argument("--list", action="store_true", help="say what there is")
    return parser


def _is_wanted(name: str, only: Sequence[str]) -> bool:
    """Whether a name is among those that were given, which may be only beginnings of names."""
    names = {each.name for each in SCENARIOS} | {each.name for each in SUITES}
    return not only or any(
        name == each or (each not in names and name.startswith(each)) for each in only
    )


def _run_scenario(scenario: Scenario, effort: Effort, console: Console) -> Outcome:
    console.print(f"[bold]{scenario.name}[/]: {scenario.about} ({effort.seconds:.0f} s)")
    outcome = Outcome(scenario.name, scenario.about)
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"orbitmq-{scenario.name}-"))
    try:
        with Stage(folder / "stage") as stage:
            outcome.figures = scenario.run(stage, effort)
    except Exception as error:  # noqa: BLE001  # the other scenarios are run all the same
        outcome.failure = f"{type(error).__name__}: {error}"
        console.print(traceback.format_exc(), markup=False)
    outcome.seconds = time.monotonic() - began
    if outcome.is_kept:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        console.print(f"what happened is in {folder}", markup=False)
    _show(outcome, console)
    return outcome


def _show(outcome: Outcome, console: Console) -> None:
    for figure in condensed(outcome.figures):
        mark = "[green]ok[/]" if figure.is_kept else "[red]NO[/]"
        console.print(f"  {mark} ", end="")
        console.print(f"{figure.what}: {figure.value} {figure.rule}", markup=False)
    console.print(f"  {outcome.seconds:.0f} s")


def _table(run: Run) -> Table:
    table = Table(title=f"commit {run.commit}, seed {run.seed}, {run.minutes:.0f} min")
    for name in ("scenario", "row", "figure", "value", "rule", "kept"):
        table.add_column(name, overflow="fold")
    for outcome in run.outcomes:
        if outcome.failure is not None:
            table.add_row(outcome.name, "", outcome.failure, "", "", "NO")
        for figure in condensed(outcome.figures):
            kept = "" if not figure.rule else "yes" if figure.is_kept else "NO"
            table.add_row(outcome.name, figure.row, figure.what, figure.value, figure.rule, kept)
    return table


if __name__ == "__main__":
    sys.exit(main())
