"""A run of the benches in a test: its exit code, its report, its page and what it printed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.docspage import write_page
from benchmarks.report import Report, read_json
from benchmarks.runner import Scale

SMALL = Scale(rounds=5, round_seconds=0.002, megabytes=1)


@dataclass(frozen=True)
class Ran:
    status: int
    report: Report
    page: str
    #: The files of the page.
    files: list[Path]
    out: str
    err: str


@pytest.fixture
def run(tmp_path, capsys):
    """Runs some benches and curves, and nothing else."""

    def run(*arguments, benches=(), curves=(), absent=(), scale=SMALL):
        place = tmp_path / "build" / "bench.json"
        status = main(
            [*arguments, "--json", str(place)],
            benches=list(benches),
            curves=list(curves),
            absent=list(absent),
            scale=scale,
        )
        said = capsys.readouterr()
        report = read_json(place)
        files = write_page(report, tmp_path / "docs")
        page = (tmp_path / "docs" / "performance.md").read_text()
        return Ran(status, report, page, files, said.out, said.err)

    return run
