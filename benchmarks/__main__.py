"""Measure everything: `python -m benchmarks [--quick] [--only TEXT] [--docs]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.catalogue import ABSENT, BENCHES
from benchmarks.machine import this_machine
from benchmarks.report import Report, print_table, read_json, write_json
from benchmarks.runner import Absent, Bench, NotAtHand, Result, Scale, absence, measure

ROOT = Path(__file__).parent.parent


def main(
    arguments: Sequence[str] | None = None,
    *,
    benches: Sequence[Bench] = BENCHES,
    absent: Sequence[Absent] = ABSENT,
    scale: Scale | None = None,
) -> int:
    options = _parser().parse_args(arguments)
    if options.docs:
        return _write_docs(options.json)
    scale = scale or (Scale.quick() if options.quick else Scale())
    chosen = [bench for bench in benches if options.only.lower() in _title(bench).lower()]
    if not chosen:
        print(f"no bench has {options.only!r} in its name", file=sys.stderr)
        return 2
    results, failures = _measure_all(chosen, scale)
    if not options.only:
        results += [comparison.result() for comparison in absent]
    report = Report(machine=this_machine(), quick=options.quick, results=results)
    print_table(report, Console(width=None if sys.stdout.isatty() else 180))
    write_json(report, options.json)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under three minutes")
    parser.add_argument("--only", default="", metavar="TEXT", help="benches with TEXT in the name")
    parser.add_argument(
        "--docs", action="store_true", help="write docs/performance.md from the last results"
    )
    parser.add_argument(
        "--json", type=Path, default=ROOT / "build" / "bench.json", help="the file of results"
    )
    return parser


def _title(bench: Bench) -> str:
    return f"{bench.room}: {bench.name}"


def _measure_all(benches: Sequence[Bench], scale: Scale) -> tuple[list[Result], list[str]]:
    results: list[Result] = []
    failures: list[str] = []
    columns = (
        TextColumn("{task.description:<60}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(benches))
        for stage, sharing in groupby(benches, key=lambda bench: bench.stage):
            with stage or nullcontext():
                for bench in sharing:
                    progress.update(task, description=_title(bench)[:60])
                    try:
                        results.append(measure(bench, scale))
                    except NotAtHand as reason:
                        results.append(absence(bench, str(reason)))
                    except Exception as error:  # noqa: BLE001  one must not hide the others
                        failures.append(f"{_title(bench)}: {type(error).__name__}: {error}")
                    progress.advance(task)
    return results, failures


def _write_docs(results: Path) -> int:
    from benchmarks.docspage import write_page  # noqa: PLC0415  matplotlib is slow to import

    if not results.exists():
        print(f"{results.name} is missing; run: make bench", file=sys.stderr)
        return 2
    for written in write_page(read_json(results), ROOT / "docs"):
        print(written.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
