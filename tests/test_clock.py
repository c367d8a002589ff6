"""Times in whole milliseconds, which stores and the protocol have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.clock import milliseconds, milliseconds_up

#: Up to the year 2100, as a float of seconds says it.
TIMES = st.floats(0, 4_102_444_800)


@given(earlier=TIMES, later=TIMES)
def test_a_later_time_is_never_a_smaller_number(earlier, later):
    earlier, later = sorted((earlier, later))

    assert milliseconds(earlier) <= milliseconds(later)
    assert milliseconds_up(earlier) <= milliseconds_up(later)


@given(st.integers(0, 4_102_444_800_000))
def test_a_time_made_of_milliseconds_is_those(number):
    assert milliseconds(number / 1000) == milliseconds_up(number / 1000) == number


@pytest.mark.parametrize(
    ("time", "down", "up"),
    [
        (1_700_000_000.0004, 1_700_000_000_000, 1_700_000_000_001),
        (1_700_000_000.0006, 1_700_000_000_000, 1_700_000_000_001),
        (1_700_000_000.0016, 1_700_000_000_001, 1_700_000_000_002),
        (0.0005, 0, 1),
        (-0.0005, -1, 0),
    ],
)
def test_a_part_of_a_millisecond_is_left_out_or_counts_as_a_whole_one(time, down, up):
    assert (milliseconds(time), milliseconds_up(time)) == (down, up)
