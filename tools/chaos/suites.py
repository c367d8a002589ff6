"""Tests that belong to a chaos run and live elsewhere, with more rounds than in `make test`.

They read `ORBITMQ_ROUNDS` and `ORBITMQ_SEEDS`, how much of each, and `ORBITMQ_FIRST_SEED` (fuzzers
`ORBITMQ_FUZZ_SEED`); what they print is kept in a file. Fuzzers write how many inputs they tried
into the file that `ORBITMQ_COUNTS` names, and that is what is told. A suite passes when all of its
tests did: one that was skipped, or is not there, has shown nothing. How much was tried counts only
then, because only then all of it was.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.chaos.figures import Figure, tried
from tools.chaos.programs import ROOT


@dataclass(frozen=True, slots=True)
class Suite:
    """A set of test files, and how much of it there is at scale 1."""

    name: str
    rows: str
    about: str
    paths: tuple[str, ...]
    amount: int = 1
    of: str = ""  #: what the amount is one of; empty when there is no more of it than usual
    usual: float = 60.0  #: seconds that it takes, about
    least: int = 1  #: of the amount, with which it still says something
    at_once: int = 2  #: processes
    counts: str = ""  #: what the tests count themselves, when the amount says little
    is_extra: bool = False  #: belongs to no row, and is run when it is named

    def amount_in(self, scale: float) -> int:
        return max(1, self.least, int(self.amount * scale)) if self.of else 1

    def seconds(self, scale: float) -> float:
        """That it takes, about."""
        return self.usual * self.amount_in(scale) / self.amount if self.of else self.usual

    def deadline(self, scale: float) -> float:
        """Seconds after which it has failed: far beyond what it takes on a busy machine."""
        return 300 + 6 * self.seconds(scale)


_RULE = "all pass, none skipped"
#: What pytest may count beside tests that passed; `-W error` is for `make test` to say.
_HARMLESS = frozenset({"warning", "warnings"})

SUITES: tuple[Suite, ...] = (
    Suite(
        "simulation",
        "R18",
        "deterministic simulation",
        ("tests/simulation",),
        10_000,
        "seeds",
        1_250,  # a quarter of a second for each, on two cores
        least=2_000,
    ),
    Suite(
        "kill-store",
        "R1 R2",
        "kill -9 of a process that does nothing but store",
        ("tests/store/test_kill.py",),
        150,
        "kills of a store, for each flush policy",
        75,  # half a second for each
        least=40,
    ),
    Suite(
        "power-loss",
        "R2 R3",
        "power-loss model of the store",
        ("tests/store/test_powerloss.py",),
        2_000,
        "seeds",
        150,
        least=500,
    ),
    Suite(
        "damage",
        "R4",
        "torn and flipped bytes",
        ("tests/store/test_damage.py",),
        4_000,
        "mutations",
        80,
        least=400,
    ),
    Suite(
        "fuzz",
        "R17",
        "fuzzing of every byte interface",
        ("tests/fuzz", "tests/broker/test_fuzz.py"),
        3_000,
        "rounds",
        105,
        least=400,
        counts="inputs",
    ),
    Suite("security", "R17", "what strangers can do", ("tests/security",), usual=10),
    Suite(
        "spark-kills",
        "R15",
        "Spark's driver, worker and broker killed in mid-batch",
        ("tests/chaos/test_spark_kills.py",),
        20,
        "kills of a stream, and as many of a group",
        300,  # 15 s for each, on two cores
        least=5,
    ),
    Suite(
        "spark",
        "R15 R16",
        "Spark when queues, brokers and executors come and go",
        (
            "tests/spark/test_stream.py",
            "tests/spark/test_moved_and_expired.py",
            "tests/chaos/test_spark_cluster.py",
            "tests/chaos/test_spark_settling.py",
        ),
        usual=120,
        at_once=1,
    ),
    Suite(
        "spark-pipelines",
        "",
        "every ready pipeline, as processes",
        ("tests/chaos/test_spark_pipelines.py", "tests/chaos/test_spark_declarative.py"),
        usual=300,
        at_once=1,
        is_extra=True,
    ),
    Suite(
        "spark-versions",
        "",
        "every PySpark from 4.0 on; installs 0.9 GB for each",
        ("tests/chaos/test_spark_versions.py",),
        usual=1200,
        at_once=1,
        is_extra=True,
    ),
)


def run_suite(suite: Suite, scale: float, seed: int, log: Path) -> list[Figure]:
    """Run it with `scale` of its rounds; how much, and whether all passed."""
    absent = [path for path in suite.paths if not (ROOT / path).exists()]
    if absent:
        value = f"not in this checkout: {', '.join(absent)}"
        return [Figure(suite.rows, suite.about, value, _RULE, is_kept=False)]
    amount, deadline = suite.amount_in(scale), suite.deadline(scale)
    counts = log.with_name("counts")
    environment = {
        **os.environ,
        "ORBITMQ_FIRST_SEED": str(seed),
        "ORBITMQ_FUZZ_SEED": str(seed),
        "ORBITMQ_COUNTS": str(counts),
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    }
    if suite.of:
        environment |= {"ORBITMQ_ROUNDS": str(amount), "ORBITMQ_SEEDS": str(amount)}
    words = [sys.executable, "-m", "pytest", "-q", "-o", f"timeout={deadline:g}", *suite.paths]
    if suite.at_once > 1:
        words += ["-n", str(suite.at_once), "--dist", "worksteal"]
    began = time.monotonic()
    code = _run(words, environment, deadline, log)
    took = time.monotonic() - began
    ending = " (not within its time)" if code is None else ""
    summary = _summary(log)
    value = f"{summary} in {took:.0f} s{ending}"
    is_kept = code == 0 and have_all_passed(summary)
    figures = [Figure(suite.rows, suite.about, value, _RULE, is_kept)]
    if not suite.of:
        return figures
    done = _sum_of(counts) if suite.counts else amount
    return [tried(suite.rows, suite.counts or suite.of, done if is_kept else 0), *figures]


def _sum_of(counts: Path) -> int:
    return sum(map(int, counts.read_text().split())) if counts.exists() else 0


def have_all_passed(summary: str) -> bool:
    """Whether pytest's last line tells of tests that passed, and of nothing else."""
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) ([a-z]+)", summary)}
    return counts.pop("passed", 0) > 0 and not (counts.keys() - _HARMLESS)


def _run(
    words: Sequence[str], environment: Mapping[str, str], deadline: float, log: Path
) -> int | None:
    """The exit code; None when it did not end in time."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait(deadline)
        except subprocess.TimeoutExpired:
            # Interrupted, it ends what its tests have started.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            return None
        finally:
            process.kill()
            process.wait(60)


def _summary(log: Path) -> str:
    """What pytest said last: how many tests passed."""
    text = log.read_text(errors="replace").strip()
    found = re.search(
        r"(\d+ (?:passed|failed|error|skipped|deselected|xfailed|no tests).*?)(?: in |$)",
        text.rpartition("\n")[2],
    )
    return found.group(1).strip("= ") if found else (text[-120:] or "nothing was run")
