"""Says which rows of docs/features.md a passing test proves: `make features`.

A row is proven when at least one test that names it ran and passed, and none that names it failed.
What container images prove is taken from the last run of `make containers`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tools.feature_plugin import CONTAINER_RESULTS, INTEROP_RESULTS, RESULTS, Notes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HERE = Path(__file__).parent.parent
INTEROP_TESTS = "tests/interop"
CONTAINER_TESTS = "tests/containers"
_SECTION = re.compile(r"^#{2,3} (?P<title>.+)$")
_ROW = re.compile(r"^\| (?P<id>[A-Z][0-9]+) \| .+ \|$")


class State(Enum):
    """What is known about a row."""

    PROVEN = "proven"
    FAILING = "failing"
    NEEDS_INTEROP = "needs make interop"
    UNPROVEN = "not proven"


@dataclass(slots=True)
class Row:
    """A capability, and the tests that name it."""

    id: str
    section: str
    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    passed_in_interop: set[str] = field(default_factory=set)

    @property
    def state(self) -> State:
        if self.failed:
            return State.FAILING
        if self.passed:
            return State.PROVEN
        return State.NEEDS_INTEROP if self.passed_in_interop else State.UNPROVEN


def main(arguments: Sequence[str] | None = None) -> int:
    options, for_pytest = _parser().parse_known_args(arguments)
    root: Path = options.root
    rows = read_rows(root / "docs" / "features.md")
    build = root / "build"
    if not options.last:
        run_marked_tests(root, build, for_pytest, with_interop=options.interop)
    elif not (build / RESULTS).exists():
        print(f"there is no build/{RESULTS} yet: run `make features`", file=sys.stderr)
        return 2

    notes = [read_notes(build / RESULTS), read_notes(build / CONTAINER_RESULTS)]
    if options.interop:
        notes.append(read_notes(build / INTEROP_RESULTS))
    else:
        note_interop(rows, read_notes(build / INTEROP_RESULTS))
    unknown = [fault for each in notes for fault in note_outcomes(rows, each)]
    broken = [place for each in notes for place in each["broken"]]
    if (build / CONTAINER_RESULTS).exists():
        ended = time.localtime((build / CONTAINER_RESULTS).stat().st_mtime)
        print(f"the last make containers ended at {time.strftime('%Y-%m-%d %H:%M', ended)}")
    return report(rows.values(), unknown, broken)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.features",
        description=__doc__,
        epilog="Other options go to pytest, for example -n 2.",
    )
    parser.add_argument("--last", action="store_true", help="run nothing, show the last results")
    parser.add_argument("--interop", action="store_true", help="count the interop tests as well")
    parser.add_argument("--root", type=Path, default=HERE, help="the project, if not this one")
    return parser


def read_rows(page: Path) -> dict[str, Row]:
    """The rows of the page by id, in its order."""
    rows: dict[str, Row] = {}
    section = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if title := _SECTION.match(line):
            section = title["title"]
        elif row := _ROW.match(line):
            if row["id"] in rows:
                sys.exit(f"{page.name} has two rows {row['id']}")
            rows[row["id"]] = Row(row["id"], section)
    return rows


def run_marked_tests(
    root: Path, build: Path, for_pytest: Sequence[str], *, with_interop: bool
) -> None:
    """Run them in a process of their own; what they proved is in `build` afterwards."""
    (build / RESULTS).unlink(missing_ok=True)  # so that a run that breaks off proves nothing
    scope = [f"--ignore={CONTAINER_TESTS}"]
    if with_interop:
        (build / INTEROP_RESULTS).unlink(missing_ok=True)
    else:
        scope += [f"--ignore={INTEROP_TESTS}", "-m", "not interop"]
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "tools.feature_plugin"),
        *("--features-only", f"--features-to={build}", "--continue-on-collection-errors"),
        *(f"--rootdir={root}", *scope, *for_pytest),
    ]
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run(command, cwd=root, env=environment, check=False)
    if not (build / RESULTS).exists():
        sys.exit(f"pytest broke off with {ended.returncode}; its own words are above")


def read_notes(file: Path) -> Notes:
    """What the last run left, or nothing."""
    if not file.exists():
        return {"tests": {}, "broken": []}
    notes: Notes = json.loads(file.read_text(encoding="utf-8"))
    return notes


def note_outcomes(rows: dict[str, Row], notes: Notes) -> list[str]:
    """Enter the outcomes into the rows; returns what is wrong with marks."""
    unknown = []
    for name, test in sorted(notes["tests"].items()):
        for row_id in test["ids"]:
            if row_id not in rows:
                unknown.append(f"{name} names {row_id!r}, which docs/features.md does not have")
            elif test["outcome"] == "failed":
                rows[row_id].failed.add(name)
            elif test["outcome"] == "passed":
                rows[row_id].passed.add(name)
    return unknown


def note_interop(rows: dict[str, Row], notes: Notes) -> None:
    """Remember which rows interop tests proved when they last ran, without counting them."""
    for name, test in notes["tests"].items():
        if test["outcome"] == "passed":
            for row_id in rows.keys() & test["ids"]:
                rows[row_id].passed_in_interop.add(name)


def report(rows: Iterable[Row], unknown: Sequence[str], broken: Sequence[str]) -> int:
    """Print the table, the faults and the count; returns the exit code."""
    rows = list(rows)
    _print_table(rows)
    for row in rows:
        for name in sorted(row.failed):
            print(f"{row.id} fails in {name}")
    for fault in unknown:
        print(fault)
    for place in broken:
        print(f"{place} cannot be imported, so what it proves is unknown")
    proven = sum(row.state is State.PROVEN for row in rows)
    print(f"features: {proven} of {len(rows)} proven")
    return 1 if unknown or broken or any(row.failed for row in rows) else 0


def _print_table(rows: Sequence[Row]) -> None:
    table = Table(
        "section", "proven", *(state.value for state in State if state is not State.PROVEN)
    )
    for section in dict.fromkeys(row.section for row in rows):
        inside = [row for row in rows if row.section == section]
        by_state = {state: [row.id for row in inside if row.state is state] for state in State}
        table.add_row(
            section,
            f"{len(by_state.pop(State.PROVEN))} of {len(inside)}",
            *(" ".join(ids) for ids in by_state.values()),
        )
    Console(highlight=False, width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())
