"""How batches are cut and dealt out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.ranges.connections import QueueRange
from orbitmq.client.routes import Queue
from orbitmq.spark.consuming.queues import AdaptiveBatchSize, Piece, assign_to_tasks, fair_shares

backlogs = st.dictionaries(
    st.integers(0, 20).map(lambda number: Queue("orders", "broker-a", number)),
    st.integers(1, 500),
    min_size=1,
    max_size=12,
)


def pieces_of(backlog: dict[Queue, int]) -> list[Piece]:
    return [Piece(QueueRange(queue, 7, 7 + size)) for queue, size in backlog.items()]


@given(backlog=backlogs, tasks=st.integers(1, 8), may_cut=st.booleans())
def test_every_message_is_in_one_task_and_no_task_is_without(backlog, tasks, may_cut):
    dealt = assign_to_tasks(pieces_of(backlog), tasks, may_cut=may_cut)

    messages = [
        (piece.range.queue, offset)
        for some in dealt
        for piece in some
        for offset in range(piece.range.start, piece.range.end)
    ]
    expected = {(queue, 7 + n) for queue, size in backlog.items() for n in range(size)}
    assert len(messages) == len(expected)
    assert set(messages) == expected
    assert 1 <= len(dealt) <= tasks
    assert all(dealt)


@given(backlog=backlogs, tasks=st.integers(1, 8))
def test_in_order_a_queue_is_in_one_piece(backlog, tasks):
    dealt = assign_to_tasks(pieces_of(backlog), tasks, may_cut=False)

    queues = [piece.range.queue for some in dealt for piece in some]
    assert sorted(queues) == sorted(backlog)


def test_a_long_queue_is_shared_by_all_tasks():
    dealt = assign_to_tasks(pieces_of({Queue("orders", "broker-a", 0): 4000}), 4, may_cut=True)

    assert [sum(len(piece.range) for piece in some) for some in dealt] == [1000] * 4


def test_few_messages_are_one_task():
    dealt = assign_to_tasks(
        pieces_of({Queue("orders", "broker-a", n): 2 for n in range(4)}), 8, may_cut=True
    )

    assert len(dealt) == 1


@given(backlog=backlogs, limit=st.integers(1, 2000))
def test_shares_stay_within_the_limit_and_leave_no_queue_out(backlog, limit):
    shares = fair_shares(backlog, limit)

    assert shares.keys() == backlog.keys()
    assert all(1 <= share <= backlog[queue] for queue, share in shares.items())
    assert sum(shares.values()) <= max(limit, len(backlog))
    # Nothing is left lying about that there was room for.
    assert sum(shares.values()) >= min(limit, sum(backlog.values()))


def test_batches_shrink_to_what_slow_handlers_manage_and_grow_again():
    pace = AdaptiveBatchSize(10_000)

    pace.learn(10_000, 200)
    assert pace.size == 300
    pace.learn(300, 0)
    assert 0 < pace.size < 300
    for _ in range(20):
        pace.learn(pace.size, pace.size)
    assert pace.size == 10_000


def test_a_batch_that_was_smaller_than_allowed_says_nothing_about_larger_ones():
    pace = AdaptiveBatchSize(1000)
    pace.learn(1000, 100)

    pace.learn(10, 10)

    assert pace.size == 150
