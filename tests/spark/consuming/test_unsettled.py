"""What is done with in a queue, against the plainest model there is: a set of offsets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.spark.consuming.queues import UnsettledMessages

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
