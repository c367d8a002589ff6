"""Our side of a bench, again and again until the input ends.

    python -m benchmarks.profiling.workload PATH OUTCOME

Says "ready" when everything is set up and warm, and writes to the file OUTCOME what came of it.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TypeAlias

import msgspec

from benchmarks.profiling.launching import READY
from benchmarks.profiling.paths import PATHS, SCALE, HotPath
from benchmarks.runner import NotAtHand, Work

#: Seconds of work between two looks at the input.
_LOOK = 0.05


class Worked(msgspec.Struct, frozen=True, tag=True):
    """It was at work until its input ended."""

    rounds: int


class Missing(msgspec.Struct, frozen=True, tag=True):
    """What it needs is not here."""

    reason: str


class Broken(msgspec.Struct, frozen=True, tag=True):
    """It failed."""

    reason: str


Outcome: TypeAlias = Worked | Missing | Broken


def main(path: HotPath, outcome: Path) -> None:
    outcome.write_bytes(msgspec.json.encode(_run(path, _only_for_us())))


def _only_for_us() -> int:
    """Standard output, of which Java and others get another one: nobody reads what they say."""
    ours = os.dup(1)
    os.dup2(2, 1)
    return ours


def _run(path: HotPath, output: int) -> Outcome:
    try:
        bench = path.bench()
        with bench.stage or nullcontext(), bench.prepare(SCALE) as (candidate, _):
            candidate()  # some lines have not called it yet
            os.write(output, READY)
            rounds = _until_the_input_ends(candidate)
    except NotAtHand as reason:
        return Missing(str(reason))
    except Exception as error:  # noqa: BLE001  told by who started this
        return Broken(f"{type(error).__name__}: {error}")
    return Worked(rounds)


def _until_the_input_ends(work: Work) -> int:
    rounds = 0
    while not select.select([0], [], [], 0)[0]:
        look = time.perf_counter() + _LOOK
        while time.perf_counter() < look:
            work()
            rounds += 1
    return rounds


if __name__ == "__main__":
    main(next(each for each in PATHS if each.name == sys.argv[1]), Path(sys.argv[2]))
