"""Tests that belong to a chaos run and live elsewhere, with more rounds than in `make test`.

They read `ORBITMQ_ROUNDS` and `ORBITMQ_SEEDS`, how much of each, and `ORBITMQ_FIRST_SEED`; what
they print is kept in a file. A suite passes or it does not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tools.chaos.figures import Figure
from tools.chaos.programs import ROOT


@dataclass(frozen=True, slots=True)
class Suite:
    """A set of test files."""

    name: str
    rows: str
    about: str
    paths: tuple[str, ...]  #: patterns; what there is of them is run
    rounds: int
    seeds: int
    seconds: float = 900.0  #: after which it has failed


SUITES: tuple[Suite, ...] = (
    Suite(
        "simulation", "R18", "deterministic simulation", ("tests/simulation",), 2_000, 2_000, 1200
    ),
    Suite(
        "power-loss",
        "R2 R3",
        "power-loss model of the store",
        ("tests/store/test_powerloss.py",),
        500,
        500,
    ),
    Suite("damage", "R4", "torn and flipped bytes", ("tests/store/test_damage.py",), 2_000, 2_000),
    Suite("fuzz", "R17", "fuzzing of every byte interface", ("tests/fuzz",), 2_000, 2_000),
    Suite("security", "R17", "what strangers can do", ("tests/security",), 1, 1),
    Suite("spark", "R15 R16", "Spark under faults", ("tests/chaos/test_spark_*.py",), 10, 10, 1800),
)


def run_suite(suite: Suite, scale: float, seed: int, log: Path) -> list[Figure]:
    """Run it with `scale` of its rounds; one figure, or a note that there is no such suite."""
    files = sorted({str(path) for pattern in suite.paths for path in ROOT.glob(pattern)})
    if not files:
        return [Figure(suite.rows, suite.about, "left out: not in this checkout", "")]
    rounds, seeds = max(1, int(suite.rounds * scale)), max(1, int(suite.seeds * scale))
    environment = {
        **os.environ,
        "ORBITMQ_ROUNDS": str(rounds),
        "ORBITMQ_SEEDS": str(seeds),
        "ORBITMQ_FIRST_SEED": str(seed),
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    }
    words = [sys.executable, "-m", "pytest", "-q", "-o", f"timeout={suite.seconds:g}", *files]
    began = time.monotonic()
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                words,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=suite.seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    took = time.monotonic() - began
    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
    found = re.search(r"(\d+ (?:passed|failed|error).*?)(?: in |$)", last)
    told = found.group(1).strip("= ") if found else (last[-120:] or "nothing was run")
    ending = " (not within its time)" if code == -1 else ""
    value = f"{told}, {rounds:,} rounds, {took:.0f} s{ending}"
    return [Figure(suite.rows, suite.about, value, "all pass", code == 0)]
