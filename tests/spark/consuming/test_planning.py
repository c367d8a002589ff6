"""How batches are cut and dealt out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.ranges.connections import QueueRange
from orbitmq.client.routes import Queue
from orbitmq.spark.consuming.queues import (
    AdaptiveBatchSize,
    Piece,
    UnsettledMessages,
    assign_to_tasks,
    fair_shares,
)

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


# ---- finished offsets of a queue, against a set


END = 60
stretches = st.tuples(st.integers(0, END), st.integers(0, END)).map(
    lambda pair: tuple(sorted(pair))
)


@given(begin=st.integers(0, 10), finished=st.lists(stretches, max_size=12), most=st.integers(0, 70))
def test_what_is_open_is_what_nobody_has_finished(begin, finished, most):
    unsettled = UnsettledMessages(begin)
    unfinished = set(range(begin, END))
    for start, end in finished:
        unsettled.finish(start, end)
        unfinished -= set(range(start, end))

        assert unsettled.committed == min(unfinished, default=END)
        assert unsettled.backlog(END) == len(unfinished)
        found = [n for start, end in unsettled.open(END, most) for n in range(start, end)]
        assert found == sorted(unfinished)[:most]


@given(finished=st.lists(stretches, max_size=8), end=st.integers(0, END))
def test_what_lies_beyond_the_end_of_the_queue_is_not_open(finished, end):
    unsettled = UnsettledMessages(0)
    for start, stop in finished:
        unsettled.finish(start, stop)
    done = {n for start, stop in finished for n in range(start, stop)}

    found = [n for start, stop in unsettled.open(end, END) for n in range(start, stop)]

    assert found == [n for n in range(end) if n not in done]
    assert unsettled.backlog(end) == len(found)


def test_a_queue_that_goes_on_elsewhere_forgets_what_was_done():
    unsettled = UnsettledMessages(100)
    unsettled.finish(110, 120)

    unsettled.move(5)

    assert unsettled.committed == 5
    assert unsettled.open(200, 1000) == [(5, 200)]
