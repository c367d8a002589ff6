"""Counts over time: exact in all, and right for the last minute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.consumer.statistics import CallMeter, CallTimes, Meter, Statistics


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    st.lists(st.tuples(st.floats(0, 40), st.integers(1, 50), st.floats(0, 10)), max_size=60),
    st.floats(0, 130),
)
def test_a_meter_counts_what_lies_within_its_stretch(events, later):
    now, width, slots = 1000.0, 5.0, 12
    meter = Meter(now, slots, width)
    kept: list[tuple[float, int, float]] = []
    for pause, count, value in events:
        now += pause
        meter.add(now, count, value)
        kept.append((now, count, value))
    now += later

    surely = sum(count for at, count, _ in kept if now - at < (slots - 1) * width)
    maybe = sum(count for at, count, _ in kept if now - at <= slots * width)
    assert surely <= meter.recent(now) <= maybe
    assert meter.count == sum(count for _, count, _ in kept)
    assert abs(meter.total - sum(value for _, _, value in kept)) < 1e-6


def test_a_rate_is_that_of_the_time_that_has_passed_and_a_mean_the_last_known_one():
    meter = Meter(0.0, 12, 5.0)
    for second in range(10):
        meter.add(second, 7, 10.5)

    assert meter.rate(10.0) == 7.0
    assert meter.mean(10.0) == 1.5
    assert meter.mean(1000.0) == 1.5
    assert Meter(0.0, 12, 5.0).mean(5.0) == 0.0


@given(
    st.lists(
        st.tuples(
            st.floats(0, 40), st.lists(st.floats(0, 100), min_size=1, max_size=8),
            st.integers(1, 200), st.booleans(),
        ),
        max_size=40,
    ),
    st.floats(0, 130),
)  # fmt: skip
def test_percentiles_are_those_of_the_calls_within_the_stretch(events, later):
    now, width, slots = 1000.0, 5.0, 12
    meter = CallMeter(now, slots, width)
    kept: list[tuple[int, list[float]]] = []
    for pause, times, repeated, is_looked_at in events:
        now += pause
        meter.add_calls(now, times * repeated)
        kept.append((int(now // width), times * repeated))
        if is_looked_at:
            meter.times(now)
    now += later

    found = meter.times(now)

    within = [each for slot, times in kept if int(now // width) - slot < slots for each in times]
    assert found == CallTimes.of(within)
    assert found.calls == meter.recent(now)


def test_failures_are_remembered_for_an_hour():
    time = Time()
    statistics = Statistics(time)
    statistics.consumed("orders", done=3, failed=2, times=[0.1] * 5)

    time.now += 3000
    assert statistics.topic("orders").failed_last_hour == 2
    assert statistics.topic("orders").failed_per_second == 0.0

    time.now += 1000
    assert statistics.topic("orders").failed_last_hour == 0
    assert statistics.topic("orders").failed == 2


def test_running_info_has_milliseconds():
    time = Time()
    statistics = Statistics(time)
    statistics.consumed("orders", done=1, failed=0, times=[0.25])
    statistics.pulled("orders", 32, 0.125)
    time.now += 10

    status = statistics.status("orders")

    assert (status.consume_rt, status.pull_rt) == (250.0, 125.0)
    assert (status.consume_ok_tps, status.pull_tps) == (0.1, 3.2)
