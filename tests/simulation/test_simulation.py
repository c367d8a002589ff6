"""Many lives of a cluster in virtual time, each of which follows from its seed.

ORBITMQ_SEEDS says how many, ORBITMQ_FIRST_SEED where to begin. Each life is lived in a process of
its own kind, with the hash seed that its repetition has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.simulation import PLANTS

SEEDS = int(os.environ.get("ORBITMQ_SEEDS", "60"))
FIRST = int(os.environ.get("ORBITMQ_FIRST_SEED", "0"))
#: Lives of one process; it takes as long as three of them to start.
AT_ONCE = 30 if SEEDS < 500 else 125
#: A life takes a quarter of a second; whoever shares the machine may need it more.
DEADLINE = 500.0
#: By then a planted mistake has shown itself many times over.
LIVES_OF_A_MISTAKE = 120
#: Where to begin with mistakes that show themselves in few lives.
FIRST_LIVES = {"believes-in-locks-for-ever": 49}

ROOT = Path(__file__).parents[2]


def lives(first: int, count: int, *options: str) -> list[dict[str, Any]]:
    """What became of the lives of some seeds."""
    command = [sys.executable, "-m", "tests.support.simulation", str(first), str(count), *options]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, AT_ONCE))
def test_no_promise_is_broken_whatever_happens(first):
    reports = lives(first, min(AT_ONCE, FIRST + SEEDS - first))

    for report in reports:
        again = (
            f"PYTHONHASHSEED=0 python -m tests.support.simulation {report['seed']} --trace --log"
        )
        assert report["violations"] == [], f"see: {again}"
    # Lives in which nothing was sent or nothing went wrong would prove nothing.
    assert sum(report["acked"] for report in reports) > 10 * len(reports)
    assert sum(report["duplicates"] for report in reports) > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistake", sorted(PLANTS))
def test_a_mistake_in_the_code_is_found_and_found_again(mistake):
    _, kinds = PLANTS[mistake]

    first = FIRST_LIVES.get(mistake, 0)
    *_, found, end = lives(first, LIVES_OF_A_MISTAKE, "--plant", mistake, "--until-found")

    assert {each.partition(":")[0] for each in found["violations"]} & kinds
    assert end == {"is_repeated": True}


def test_the_same_seed_is_the_same_life_and_another_is_another():
    one, other = lives(3, 2)
    repeated = lives(3, 2)

    assert [one, other] == repeated
    assert one["fingerprint"] != other["fingerprint"]
