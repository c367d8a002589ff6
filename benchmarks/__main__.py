"""Measure everything: `python -m benchmarks [--quick] [--only TEXT] [--docs]`.

The results go to `build/bench.json`, and as a page with plots to `build/bench`. Ends with 1 when a
line failed, and in a full run also when a target was missed or a curve rises without a reason.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.catalogue import BENCHES, CURVES
from benchmarks.growth.curve import Curve, Grown, measure_curve
from benchmarks.growth.wording import size_text
from benchmarks.machine import this_machine
from benchmarks.peers import fetch_missing
from benchmarks.report import Report, print_curves, print_table, read_json, write_json
from benchmarks.runner import Absent, Bench, NotAtHand, Result, Scale, absence, measure

ROOT = Path(__file__).parent.parent


def main(
    arguments: Sequence[str] | None = None,
    *,
    benches: Sequence[Bench] = BENCHES,
    curves: Sequence[Curve] = CURVES,
    absent: Sequence[Absent] = (),
    scale: Scale | None = None,
) -> int:
    options = _parser().parse_args(arguments)
    if options.docs:
        return _write_docs(options.json)
    scale = scale or (Scale.quick() if options.quick else Scale())
    lines: list[Bench | Curve] = [*benches, *curves]
    chosen = [line for line in lines if options.only.lower() in _title(line).lower()]
    if not chosen:
        print(f"no bench has {options.only!r} in its name", file=sys.stderr)
        return 2
    fetch_missing(line.peer for line in chosen if isinstance(line, Bench) and line.peer)
    machine = this_machine()
    measured = _measure_all(chosen, scale)
    if not options.only:
        measured.results += [comparison.result() for comparison in absent]
    report = Report(
        machine=machine,
        quick=options.quick,
        results=measured.results,
        curves=measured.curves,
        only=options.only,
        failures=measured.failures,
        left_out=measured.left_out,
        dropped=_dropped(chosen, scale),
        not_measured=_not_measured(chosen, measured),
    )
    console = Console(width=None if sys.stdout.isatty() else 180)
    print_table(report, console)
    print_curves(report, console)
    write_json(report, options.json)
    _write_page(report, options.json.parent / "bench")
    _tell(report)
    # Rounds of a quick run are too short to judge by.
    is_missed = bool(report.missed) and not options.quick
    return 1 if report.failures or is_missed else 0


def _not_measured(chosen: Sequence[Bench | Curve], measured: _Measured) -> list[str]:
    """What has to be reached and was not tried: its peer is absent, it failed, the time was up."""
    known = {f"{each.room}: {each.name}" for each in measured.results if each.ok is not None}
    known |= {f"growth: {each.axis}: {each.name}" for each in measured.curves}
    return [title for title in map(_title, filter(_is_judged, chosen)) if title not in known]


def _is_judged(line: Bench | Curve) -> bool:
    if isinstance(line, Curve):
        return True
    return line.target is not None or line.least_figure is not None


def _dropped(chosen: Sequence[Bench | Curve], scale: Scale) -> list[str]:
    """What a quick run does without, in words."""
    curves = [line for line in chosen if isinstance(line, Curve)]
    return [
        f"{_title(curve)}: without {', '.join(size_text(curve.axis, size) for size in sizes)}"
        for curve in curves
        if (sizes := curve.dropped_for(scale))
    ]


def _tell(report: Report) -> None:
    """What the tables do not say, or not at a glance."""
    for title in report.left_out:
        print(f"left out, the time was up: {title}", file=sys.stderr)
    print(f"targets and curves: {report.score}", file=sys.stderr)
    for title in report.missed:
        print(f"missed: {title}", file=sys.stderr)
    for title in report.not_measured:
        print(f"not measured: {title}", file=sys.stderr)
    for failure in report.failures:
        print(f"failed: {failure}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under 12 minutes")
    parser.add_argument("--only", default="", metavar="TEXT", help="benches with TEXT in the name")
    parser.add_argument(
        "--docs", action="store_true", help="write docs/performance.md from the last full run"
    )
    parser.add_argument(
        "--json", type=Path, default=ROOT / "build" / "bench.json", help="the file of results"
    )
    return parser


def _title(line: Bench | Curve) -> str:
    if isinstance(line, Curve):
        return f"growth: {line.axis}: {line.name}"
    return f"{line.room}: {line.name}"


@dataclass(slots=True)
class _Measured:
    results: list[Result] = field(default_factory=list)
    curves: list[Grown] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, line: Bench | Curve, scale: Scale) -> None:
        try:
            if isinstance(line, Curve):
                self.curves.append(measure_curve(line, scale))
            else:
                self.results.append(_measured_or_absent(line, scale))
        except Exception as error:  # noqa: BLE001  one must not hide the others
            self.failures.append(f"{_title(line)}: {type(error).__name__}: {error}")


def _measured_or_absent(bench: Bench, scale: Scale) -> Result:
    try:
        return measure(bench, scale)
    except NotAtHand as reason:
        return absence(bench, str(reason))


def _measure_all(lines: Sequence[Bench | Curve], scale: Scale) -> _Measured:
    measured = _Measured()
    deadline = time.monotonic() + scale.longest
    with _Advance(len(lines)) as advance:
        for stage, sharing in groupby(lines, key=lambda line: line.stage):
            with stage or nullcontext():
                for line in sharing:
                    if time.monotonic() < deadline:
                        advance.begin(_title(line))
                        measured.add(line, scale)
                    else:
                        measured.left_out.append(_title(line))
                    advance.end()
    return measured


class _Advance:
    """How far it is: a bar in a terminal, and in a log a line for each line that begins."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._began = time.monotonic()
        self._is_log = not sys.stderr.isatty()
        columns = (
            TextColumn("{task.description:<60}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), disable=self._is_log)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_log:  # where it would leave an empty line
            self._bar.stop()

    def begin(self, title: str) -> None:
        self._bar.update(self._task, description=title[:60])
        if self._is_log:
            elapsed = timedelta(seconds=int(time.monotonic() - self._began))
            print(f"{self._done + 1}/{self._total} {title}, {elapsed}", file=sys.stderr, flush=True)

    def end(self) -> None:
        self._done += 1
        self._bar.advance(self._task)


def _write_docs(results: Path) -> int:
    if not results.exists():
        print(f"{results.name} is missing; run: make bench", file=sys.stderr)
        return 2
    report = read_json(results)
    if report.only:
        print(f"{results.name} holds {report.only!r} only; run: make bench", file=sys.stderr)
        return 2
    if report.quick:
        print(
            f"{results.name} is of a quick run, which is too short to publish; run: make bench",
            file=sys.stderr,
        )
        return 2
    for written in _write_page(report, ROOT / "docs"):
        print(written.relative_to(ROOT))
    return 0


def _write_page(report: Report, folder: Path) -> list[Path]:
    from benchmarks.docspage import write_page  # noqa: PLC0415  matplotlib is slow to import

    return write_page(report, folder)


def _end_orderly(*_: object) -> None:
    """Stores of several gigabytes are removed and processes ended on the way out."""
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end_orderly)
    sys.exit(main())
