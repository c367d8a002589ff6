"""Finding messages by key: making the index from the log, and looking into it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.runner import Bench, Prepare, Scale, Work
from benchmarks.workload import records
from orbitmq.message.stored import decode_message
from orbitmq.store.index import KeyIndex


def _build(body_size: int) -> Prepare:
    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        rows = records(4096, body_size, topics=4)
        chunk = memoryview(b"".join(rows))
        sizes = np.array([len(row) for row in rows])
        starts = np.cumsum(sizes) - sizes
        base = 0
        by_hand: dict[str, list[int]] = {}
        with tempfile.TemporaryDirectory() as folder:
            index = KeyIndex.open(Path(folder))

            def candidate() -> int:
                nonlocal base
                index.append_log(chunk, starts, base)
                base += len(chunk)
                return len(rows)

            def floor() -> int:
                by_hand.clear()
                for row, start in zip(rows, starts, strict=True):
                    message = decode_message(row)
                    keys = [message.unique_id, *(message.keys or "").split(" ")]
                    for key in keys:
                        by_hand.setdefault(f"{message.topic}#{key}", []).append(int(start))
                return len(rows)

            yield candidate, floor
            index.abandon()

    return prepare


@contextmanager
def _look_up(_: Scale) -> Iterator[tuple[Work, Work]]:
    rows = records(50_000, 10)
    chunk = memoryview(b"".join(rows))
    sizes = np.array([len(row) for row in rows])
    starts = np.cumsum(sizes) - sizes
    wanted = [decode_message(row).unique_id or "" for row in rows[::500]]
    with tempfile.TemporaryDirectory() as folder:
        index = KeyIndex.open(Path(folder))
        index.append_log(chunk, starts, 0)
        (path,) = Path(folder).iterdir()

        def candidate() -> int:
            for key in wanted:
                found = index.candidates("orders", key, 0, 1 << 62)
                list(islice((each for each in found if each is not None), 32))
            return len(wanted)

        with path.open("rb", buffering=0) as file:

            def floor() -> int:
                for number in range(len(wanted)):
                    file.seek(20_000_040 + number * 10_000)
                    file.read(20)
                return len(wanted)

            yield candidate, floor
        index.abandon()


BENCHES = (
    Bench(
        name="indexing two keys of a message, 100 B bodies",
        room="key index",
        unit="µs each",
        time_for=1,
        unit_factor=1e6,
        compared_with="a dict in memory filled from decoded messages",
        prepare=_build(100),
    ),
    Bench(
        name="indexing two keys of a message, 1 KiB bodies",
        room="key index",
        unit="µs each",
        time_for=1,
        unit_factor=1e6,
        compared_with="a dict in memory filled from decoded messages",
        prepare=_build(1024),
    ),
    Bench(
        name="looking a unique key up",
        room="key index",
        unit="µs each",
        time_for=1,
        unit_factor=1e6,
        compared_with="one seek and read of 20 bytes",
        prepare=_look_up,
    ),
)
