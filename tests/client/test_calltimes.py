"""Percentiles out of buckets: never below the truth, and hardly above it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.consumer.statistics import CallTimes

#: From a nanosecond to a day.
times = st.floats(1e-9, 86_400) | st.just(0.0)
shares = st.floats(0.01, 1.0)


@given(st.lists(times, min_size=1, max_size=200), shares)
def test_a_percentile_is_at_most_a_sixteenth_above_the_truth(found, share):
    truth = sorted(found)[math.ceil(len(found) * share) - 1]

    percentile = CallTimes.of(found).percentile(share)

    assert percentile is not None
    # The time 0 is in a bucket with what is as good as nothing.
    assert truth <= percentile <= max(truth * 17 / 16, 1e-300)


@given(st.lists(st.lists(times, max_size=50), max_size=6))
def test_many_together_are_as_one(parts):
    everything = [each for part in parts for each in part]

    together = CallTimes.together(map(CallTimes.of, parts))

    assert together == CallTimes.of(everything)
    assert together.calls == len(everything)
    assert together.longest == max(everything, default=None)


@given(st.lists(times, min_size=1, max_size=50))
def test_what_is_told_is_understood(found):
    told = CallTimes.of(found).to_text()

    assert CallTimes.from_text(told) == CallTimes.of(found)


def test_what_is_told_can_be_read_by_people():
    told = CallTimes.of([0.001] * 98 + [0.25, 2.0]).to_text()

    assert told.startswith("calls=100 p50=0.001")
    assert " longest=2.0 s buckets=" in told


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "calls=1 p50=1 longest=1.0 s buckets=",
        "calls=1 p50=1 longest=1.0 s buckets=3ff0",
        "calls=1 p50=1 longest=1.0 s buckets=3ff0:1,",
        "calls=1 p50=1 longest=soon s buckets=3ff0:1",
        "calls=1 p50=1 longest=nan s buckets=3ff0:1",
        "calls=1 p50=1 longest=-1 s buckets=3ff0:1",
        "calls=1 p50=1 longest=1.0 s buckets=3ff0:0",
        "calls=1 p50=1 longest=1.0 s buckets=fffff:1",
        "calls=1 p50=1 longest=1.0 s buckets=8000:1",
    ],
)
def test_what_others_tell_under_the_same_name_is_not_known(text):
    assert CallTimes.from_text(text) is None


def test_of_no_calls_nothing_is_known():
    nothing = CallTimes({})

    assert (nothing.calls, nothing.p50, nothing.p95, nothing.p99) == (0, None, None, None)
    assert nothing.longest is None
