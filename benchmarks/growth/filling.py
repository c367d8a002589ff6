"""Stores with many messages, filled without a broker.

The messages go through the store's own interface, in batches, because ten million sends would take
minutes; a broker is started on the files afterwards. What lies there is what sends would have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from benchmarks.workload import BORN_HOST, START_MS, messages
from orbitmq.store.store import Store

#: Messages between two looks of the store after its files.
_BETWEEN_TICKS = 100_000
_DIFFERENT = 4096
_MOST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Messages of one topic."""

    topic: str
    queues: int
    per_queue: int
    body_size: int
    #: So many of a queue lie side by side before the next queue has its turn.
    side_by_side: int = 1
    is_bare: bool = False  #: without keys, tags and properties

    @property
    def count(self) -> int:
        return self.queues * self.per_queue


def fill(root: Path, fillings: Sequence[Filling]) -> None:
    store = Store(root)
    try:
        for filling in fillings:
            _fill(store, filling)
    finally:
        store.close()


def _fill(store: Store, filling: Filling) -> None:
    if not filling.count:
        return
    run = min(filling.side_by_side, filling.per_queue)
    different = max(run, min(_DIFFERENT, _MOST_BYTES // filling.body_size))
    made = [
        (message.body, 0, b"" if filling.is_bare else message.properties)
        for message in messages(different, filling.body_size)
    ]
    runs = cycle([made[at : at + run] for at in range(0, different - run + 1, run)])
    unseen = 0
    for first in range(0, filling.per_queue, run):
        wanted = min(run, filling.per_queue - first)
        for queue_id in range(filling.queues):
            elements = next(runs)[:wanted]
            store.append_batch(filling.topic, queue_id, elements, START_MS, BORN_HOST)
            store.write()
            unseen += wanted
        if unseen >= _BETWEEN_TICKS:
            store.tick()
            unseen = 0
