"""The figures of a run as a table: on the screen, as files, and in the documentation."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.chaos.figures import Figure, are_kept
from tools.chaos.programs import ROOT

_BEGIN = "<!-- figures: written by `python -m tools.chaos --docs` -->"
_END = "<!-- end of figures -->"


@dataclass(slots=True)
class Outcome:
    """What one scenario or suite came to."""

    name: str
    about: str
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    failure: str | None = None

    @property
    def is_kept(self) -> bool:
        return self.failure is None and are_kept(self.figures)


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run."""

    commit: str
    machine: str
    seed: int
    minutes: float
    outcomes: Sequence[Outcome]

    @property
    def is_kept(self) -> bool:
        return all(outcome.is_kept for outcome in self.outcomes)


def commit_of() -> str:
    """The commit that is checked out, and whether anything was changed since."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("ORBITMQ_COMMIT", "unknown")
    return told.stdout.strip()


def machine_of() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}"
    )


def write(run: Run, folder: Path) -> None:
    """Keep a run as `report.json` and `report.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(asdict(run), indent=2) + "\n")
    (folder / "report.md").write_text(f"# A chaos run\n\n{as_markdown(run)}\n")


def read(folder: Path) -> Run:
    """The run that `write` has kept."""
    told = json.loads((folder / "report.json").read_text())
    outcomes = [
        Outcome(
            **{
                **each,
                "figures": [Figure(**figure) for figure in each["figures"]],
            }
        )
        for each in told.pop("outcomes")
    ]
    return Run(outcomes=outcomes, **told)


def as_markdown(run: Run) -> str:
    """One table of everything, the rows that failed marked."""
    kept = sum(outcome.is_kept for outcome in run.outcomes)
    head = (
        f"Commit `{run.commit}`, seed {run.seed}, {run.minutes:.0f} minutes; {run.machine}. "
        f"{kept} of {len(run.outcomes)} scenarios kept every rule."
    )
    lines = [
        head,
        "",
        "| scenario | row | figure | value | rule | kept |",
        "|---|---|---|---|---|---|",
    ]
    for outcome in run.outcomes:
        if outcome.failure is not None:
            lines.append(f"| {outcome.name} | | {_cell(outcome.failure)} | | | **no** |")
        for figure in condensed(outcome.figures):
            mark = "" if not figure.rule else "yes" if figure.is_kept else "**no**"
            cells = (figure.row, figure.what, figure.value, figure.rule, mark)
            lines.append(f"| {outcome.name} | " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines)


def condensed(figures: Sequence[Figure]) -> list[Figure]:
    """Anomalies that are absent, in one line; what is there keeps its own."""
    absent = [figure for figure in figures if figure.rule == "= 0" and figure.is_kept]
    if not absent:
        return list(figures)
    names = ", ".join(figure.what for figure in absent)
    line = Figure(absent[0].row, names, "0 each", "= 0")
    at = figures.index(absent[0])
    rest = [figure for figure in figures if figure not in absent]
    return [*rest[:at], line, *rest[at:]]


def put_into_docs(run: Run, page: Path) -> None:
    """Replace the table of a page by that of a run."""
    text = page.read_text()
    found = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END), re.DOTALL)
    table = f"{_BEGIN}\n\n{as_markdown(run)}\n\n{_END}"
    page.write_text(found.sub(lambda _: table, text))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:300]
