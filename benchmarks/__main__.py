"""Measure everything: `python -m benchmarks [--quick] [--only TEXT] [--docs]`.

The results go to `build/bench.json`, and as a page with plots to `build/bench`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.catalogue import BENCHES, CURVES
from benchmarks.growth.curve import Curve, Grown, measure_curve
from benchmarks.machine import this_machine
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
    )
    console = Console(width=None if sys.stdout.isatty() else 180)
    print_table(report, console)
    print_curves(report, console)
    write_json(report, options.json)
    _write_page(report, options.json.parent / "bench")
    _tell(report)
    return 1 if report.failures else 0


def _tell(report: Report) -> None:
    """What the tables do not say, or not at a glance."""
    for title in report.left_out:
        print(f"left out, the time was up: {title}", file=sys.stderr)
    if report.missed:
        targets = f"{len(report.missed)} targets missed or curves that rise"
        print(f"{targets}: {'; '.join(report.missed)}", file=sys.stderr)
    for failure in report.failures:
        print(f"failed: {failure}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under 12 minutes")
    parser.add_argument("--only", default="", metavar="TEXT", help="benches with TEXT in the name")
    parser.add_argument(
        "--docs", action="store_true", help="write docs/performance.md from the last results"
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
    columns = (
        TextColumn("{task.description:<60}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    deadline = time.monotonic() + scale.longest
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(lines))
        for stage, sharing in groupby(lines, key=lambda line: line.stage):
            with stage or nullcontext():
                for line in sharing:
                    progress.update(task, description=_title(line)[:60])
                    if time.monotonic() < deadline:
                        measured.add(line, scale)
                    else:
                        measured.left_out.append(_title(line))
                    progress.advance(task)
    return measured


def _write_docs(results: Path) -> int:
    if not results.exists():
        print(f"{results.name} is missing; run: make bench", file=sys.stderr)
        return 2
    report = read_json(results)
    if report.only:
        print(f"{results.name} holds {report.only!r} only; run: make bench", file=sys.stderr)
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
