"""A load generator, alone in its process: reads wishes from standard input, a line of JSON each."""

from __future__ import annotations

import sys

import msgspec

from benchmarks.load.asking import Drive, Failed, Outcome, Wish
from benchmarks.load.driving import drive
from benchmarks.load.pacing import pace


def main() -> None:
    for line in sys.stdin.buffer:
        outcome = _fulfil(msgspec.json.decode(line, type=Wish))
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()


def _fulfil(wish: Wish) -> Outcome:
    try:
        return drive(wish) if isinstance(wish, Drive) else pace(wish)
    except (OSError, ValueError) as error:
        return Failed(reason=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
