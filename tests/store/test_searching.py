"""Offsets by time, against looking at every message."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitmq.store.read import Boundary
from orbitmq.store.settings import RetentionSettings
from tests.support.store import SMALL, messages_of, put

if TYPE_CHECKING:
    pass


def brute_force(times: list[int], first: int, wanted: int, boundary: Boundary) -> int:
    """`times` are those of the messages `first`, `first + 1`, ..."""
    if boundary is Boundary.LOWER:
        return first + next((n for n, time in enumerate(times) if time >= wanted), len(times))
    return first + max((n for n, time in enumerate(times) if time <= wanted), default=0)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    gaps=st.lists(st.sampled_from([0, 0, 0, 1, 2, 5]), min_size=1, max_size=120),
    other_queue=st.booleans(),
    is_cleaned=st.booleans(),
)
def test_the_offset_is_the_one_that_looking_at_all_messages_gives(
    open_store, clock, tmp_path_factory, gaps, other_queue, is_cleaned
):
    retention = RetentionSettings(max_bytes=9000, full_ratio=1.0)
    store = open_store(replace(SMALL, retention=retention), root=tmp_path_factory.mktemp("times"))
    clock.time = 1_700_000_000.0
    base = 1_700_000_000_000
    for gap in gaps:
        clock.advance(gap / 1000)
        put(store, "T", 0, bytes(150))
        if other_queue:
            put(store, "T", 1, bytes(150))
        store.write()
    if is_cleaned:
        store.wait_flushed(store.statistics().log_end)
        store.clean()
    first = store.min_offset("T", 0)
    times = []
    for number in range(first, store.max_offset("T", 0)):
        times.append(messages_of(store.read("T", 0, number, 1))[0].store_ms)

    for wanted in range(base - 1, max(times, default=base) + 3):
        for boundary in Boundary:
            expected = brute_force(times, first, wanted, boundary)
            assert store.offset_by_time("T", 0, wanted, boundary) == expected
    assert store.earliest_store_time("T", 0) == (times[0] if times else -1)


def test_an_unknown_queue_has_offset_0_at_any_time(open_store):
    store = open_store()

    assert store.offset_by_time("T", 0, 5) == 0
    assert store.offset_by_time("T", 0, 5, Boundary.UPPER) == 0
    assert store.earliest_store_time("T", 0) == -1


def test_a_small_step_back_of_the_clock_does_not_disturb_the_order(open_store, clock):
    store = open_store()
    for step in (0.0, -0.4, 0.1, -0.2, 1.0):
        clock.advance(step)
        put(store, "T", 0, b"x")
        store.write()

    times = [message.store_ms for message in messages_of(store.read("T", 0, 0))]

    assert times == sorted(times)


def test_a_clock_that_was_hours_ahead_is_followed_back(open_store, clock):
    store = open_store()
    clock.advance(7200)
    put(store, "T", 0, b"x")
    store.write()
    clock.advance(-7200)
    put(store, "T", 0, b"y")
    store.write()

    ahead, right = (message.store_ms for message in messages_of(store.read("T", 0, 0)))

    assert ahead - right == 7_200_000
