"""The figures of a run as tables: on the screen, as files, and in the documentation."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.chaos.figures import Figure, are_kept, short
from tools.chaos.programs import ROOT
from tools.chaos.promises import PROMISES, Promise

_BEGIN = "<!-- figures: written by `make chaos ARGS=--docs` -->"
_END = "<!-- end of figures -->"
_DIRTY, _UNKNOWN = "-dirty", "unknown"


@dataclass(slots=True)
class Outcome:
    """What one scenario or suite came to."""

    name: str
    about: str
    rows: str = ""  #: of the list of reliability tests
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    failure: str | None = None

    @property
    def is_kept(self) -> bool:
        return self.failure is None and are_kept(self.figures)


@dataclass(slots=True)
class Run:
    """A run, or as much of it as there is so far."""

    began: str  #: the date, which also names its file
    commit: str
    machine: str
    seed: int
    asked: float  #: minutes that it was to take
    minutes: float = 0.0  #: that it took
    is_whole: bool = False  #: whether nothing was left out
    outcomes: list[Outcome] = field(default_factory=list)
    each: float = 0.0  #: seconds that every scenario was given instead of its own; 0: none

    @property
    def is_kept(self) -> bool:
        return all(outcome.is_kept for outcome in self.outcomes)


def why_not_resumed(before: Run, fresh: Run) -> str:
    """Why a run cannot go on where an earlier one ended; empty when it can."""
    if before.is_whole:
        return "nothing was left out"
    if fresh.commit == _UNKNOWN or fresh.commit.endswith(_DIRTY):
        return "there are changes without a commit, and nothing says whether they are the same"
    for what, then, asked in (
        ("commit", before.commit, fresh.commit),
        ("--seed", before.seed, fresh.seed),
        ("--minutes", before.asked, fresh.asked),
        ("--seconds", before.each, fresh.each),
    ):
        if then != asked:
            return f"its {what} was {then}, and not {asked}"
    return ""


def commit_of() -> str:
    """The commit that is checked out, and whether anything was changed since."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", f"--dirty={_DIRTY}", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("ORBITMQ_COMMIT", _UNKNOWN)
    return told.stdout.strip()


def machine_of() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}"
    )


# ---- files


def write(run: Run, folder: Path) -> Path:
    """Keep a run as a file of its own, and as a table beside it; the file."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{run.began}.json"
    fresh = kept.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(run), indent=2) + "\n")
    fresh.replace(kept)
    kept.with_suffix(".md").write_text(f"# A chaos run\n\n{as_markdown(run)}\n")
    return kept


def last(folder: Path, *, is_whole: bool) -> Run | None:
    """The newest run that was kept; with `is_whole` the newest that left nothing out."""
    for path in sorted(folder.glob("[0-9]*.json"), reverse=True):
        run = _read(path)
        if run.is_whole or not is_whole:
            return run
    return None


def _read(path: Path) -> Run:
    told = json.loads(path.read_text())
    outcomes = [
        Outcome(**{**each, "figures": [Figure(**figure) for figure in each["figures"]]})
        for each in told.pop("outcomes")
    ]
    return Run(outcomes=outcomes, **told)


# ---- tables


def as_markdown(run: Run) -> str:
    """What was asked for, row by row, and then every figure; what failed is marked."""
    kept = sum(outcome.is_kept for outcome in run.outcomes)
    head = (
        f"Commit `{run.commit}`, seed {run.seed}, {run.minutes:.0f} minutes; {run.machine}. "
        f"{kept} of {len(run.outcomes)} scenarios kept every rule."
    )
    return "\n".join(
        [
            head,
            "",
            "| row | test | a night asks for | this run did | passes when | kept |",
            "|---|---|---|---|---|---|",
            *(_line(*row) for row in by_rows(run)),
            "",
            "Every figure behind it:",
            "",
            "| scenario | row | figure | value | rule | kept |",
            "|---|---|---|---|---|---|",
            *(_line(*row) for row in by_scenarios(run)),
        ]
    )


def by_rows(run: Run) -> list[tuple[str, ...]]:
    """For every row of the list of reliability tests: what is asked for, and what was done.

    Of a run that left scenarios out, only the rows that it has something to say about.
    """
    rows: list[tuple[str, ...]] = [
        (each.row, each.about, each.asked, _done(each, run), each.rule, _mark_of(each, run))
        for each in PROMISES
    ]
    return rows if run.is_whole else [row for row in rows if row[-1]]


def _done(promise: Promise, run: Run) -> str:
    sums: dict[str, float] = defaultdict(float)
    for outcome in run.outcomes:
        for figure in outcome.figures:
            if figure.of and promise.row in figure.row.split():
                sums[figure.of] += figure.amount
    done = ", ".join(f"{short(round(amount))} {of}" for of, amount in sums.items())
    # What is not counted was done all the same: suites say how they ended.
    suites = "; ".join(each.about for each in run.outcomes if promise.row in each.rows.split())
    return done or promise.elsewhere or suites or "not in this run"


def _mark_of(promise: Promise, run: Run) -> str:
    """Whether a row was kept; nothing where no figure with a rule says so."""
    theirs = [each for each in run.outcomes if promise.row in each.rows.split()]
    if any(each.failure is not None for each in theirs):
        return _mark(False)
    figures = [
        figure
        for each in theirs
        for figure in each.figures
        if figure.rule and promise.row in figure.row.split()
    ]
    return _mark(are_kept(figures)) if figures else ""


def by_scenarios(run: Run) -> list[tuple[str, ...]]:
    """Every figure of every scenario."""
    rows: list[tuple[str, ...]] = []
    for outcome in run.outcomes:
        if outcome.failure is not None:
            rows.append((outcome.name, outcome.rows, outcome.failure, "", "", _mark(False)))
        for figure in condensed(outcome.figures):
            mark = _mark(figure.is_kept) if figure.rule else ""
            rows.append((outcome.name, figure.row, figure.what, figure.value, figure.rule, mark))
    return rows


def condensed(figures: Sequence[Figure]) -> list[Figure]:
    """Anomalies that are absent, in one line; what is there keeps its own."""
    absent = [figure for figure in figures if figure.rule == "= 0" and figure.is_kept]
    if not absent:
        return list(figures)
    names = ", ".join(figure.what for figure in absent)
    line = Figure(absent[0].row, names, "0 each" if len(absent) > 1 else "0", "= 0")
    at = figures.index(absent[0])
    rest = [figure for figure in figures if figure not in absent]
    return [*rest[:at], line, *rest[at:]]


def put_into_docs(run: Run, page: Path) -> None:
    """Replace the tables of a page by those of a run."""
    text = page.read_text()
    found = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END), re.DOTALL)
    tables = f"{_BEGIN}\n\n{as_markdown(run)}\n\n{_END}"
    page.write_text(found.sub(lambda _: tables, text))


def _mark(is_kept: bool) -> str:
    return "yes" if is_kept else "**no**"


def _line(*cells: str) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:300]
