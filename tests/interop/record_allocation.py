"""Makes ``tests/data/allocation.json.gz`` anew: ``python -m tests.interop.record_allocation``.

Apache's own strategy classes answer the questions of ``tests/support/allocation.py``. What is kept
is the answers: for each question the places of the own queues in the list as it was given, or null
where Java refused. The questions are generated again from their seed when the answers are used.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import tempfile
from pathlib import Path

from tests.interop.apache import DRIVER_DEADLINE, VERSIONS, Release
from tests.support.allocation import RECORDED, SEED, Case, cases, digest


def main() -> None:
    questions = list(cases())
    release = Release.obtain(VERSIONS[-1])
    recorded = {
        "from": f"rocketmq-client {release.version}",
        "seed": SEED,
        "questions": digest(questions),
        "answers": answers(release, questions),
    }
    # No time in the file: the same answers give the same bytes.
    packed = gzip.compress(json.dumps(recorded, separators=(",", ":")).encode(), mtime=0)
    RECORDED.write_bytes(packed)
    print(f"{len(questions)} answers of {recorded['from']} in {len(packed)} bytes")


def answers(release: Release, questions: list[Case]) -> list[list[int] | None]:
    """What Java says to each question."""
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            release.command("Allocation", Path(home), options=("-Dfile.encoding=UTF-8",)),
            input="".join(f"{question.line}\n" for question in questions),
            cwd=home,
            capture_output=True,
            encoding="utf-8",
            timeout=DRIVER_DEADLINE,
            check=True,
        )
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == len(questions), done.stderr[-2000:]
    return [_answer(line) for line in lines]


def _answer(line: str) -> list[int] | None:
    if line == "refused":
        return None
    return [int(place) for place in line.split(",")] if line else []


if __name__ == "__main__":
    main()
