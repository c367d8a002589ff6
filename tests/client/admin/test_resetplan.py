"""Plans: where progress goes, and what that skips and repeats."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from orbitmq.client.admin.resets import QueueMove, ResetTo, target
from orbitmq.client.routes import Queue

QUEUE = Queue("orders", "broker-a", 0)

bounds = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted)
progress = st.none() | st.integers(0, 60)


@given(bounds, progress, st.integers(-100, 100))
def test_a_shift_stays_inside_the_queue(limits, before, shift):
    low, high = limits

    to = target(ResetTo.shift(shift), QUEUE, progress=before, low=low, high=high, timed=None)

    assert to is not None
    assert low <= to <= high
    if before is not None and low <= before + shift <= high:
        assert to == before + shift


@given(bounds, st.integers(0, 60), st.data())
def test_messages_are_skipped_or_repeated_and_the_count_is_right(limits, before, data):
    low, high = limits
    assume(before <= high)
    to = data.draw(st.integers(low, high))

    move = QueueMove(QUEUE, before, to, low, high)

    there = set(range(low, high))
    next_before = {offset for offset in there if offset >= before}
    next_after = {offset for offset in there if offset >= to}
    assert move.skipped == len(next_before - next_after)
    assert move.replayed == len(next_after - next_before)
    assert not (move.skipped and move.replayed)
    assert move.is_change == (before != to)


@given(bounds, st.data())
def test_a_group_without_progress_repeats_nothing(limits, data):
    low, high = limits
    to = data.draw(st.integers(low, high))

    move = QueueMove(QUEUE, None, to, low, high)

    assert (move.skipped, move.replayed) == (to - low, 0)
    assert move.is_change
