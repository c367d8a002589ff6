"""Rounds of flushing: when they begin, and how long they hold up the owner."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.store import SMALL, HandClock, QuickFiles, put

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orbitmq.store.store import Store

    OpenStore = Callable[..., Store]

SETTINGS = replace(
    SMALL,
    file_size=1 << 20,
    preallocate_step=0,
    flush=replace(SMALL.flush, durable_bytes=100_000, durable_interval=1e9, queues_per_step=1000),
)


class SlowFiles(QuickFiles):
    """A disk on which opening a file takes a millisecond."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self.opened = 0
        self._clock = clock

    def open(self, path: Path, *, create: bool = False) -> int:
        self.opened += 1
        self._clock.advance(0.001)
        return super().open(path, create=create)


def fill(store: Store, queues: int, size: int) -> None:
    """So many bytes of bodies, in turn to all queues."""
    for place in range(size // 1000):
        put(store, "T", place % queues, bytes(900))
    store.write()


@pytest.mark.parametrize(("queues", "is_due"), [(1, True), (16, True), (512, False)])
def test_many_queues_are_flushed_after_more_of_the_log(
    open_store: OpenStore, queues: int, is_due: bool
) -> None:
    store = open_store(SETTINGS)
    for queue_id in range(queues):
        put(store, "T", queue_id, b"")
    fill(store, queues, 110_000)

    for _ in range(4):
        store.tick()
    assert (store.statistics().durable > 0) is is_due

    fill(store, queues, 110_000)
    for _ in range(4):
        store.tick()
    assert store.statistics().durable > 100_000


def test_a_step_does_not_write_queues_for_long(open_store: OpenStore, clock: HandClock) -> None:
    files = SlowFiles(clock)
    store = open_store(SETTINGS, files=files)
    fill(store, 100, 150_000)
    store.tick()  # a round begins
    files.opened = 0

    store.tick()
    assert 1 <= files.opened <= 16

    steps = 0
    while not store.statistics().durable:
        store.tick()
        steps += 1
        assert steps < 100
    end = store.statistics().log_end
    assert store.statistics().durable == end
