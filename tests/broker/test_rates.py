"""Rates and sums over time."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.broker.counters import Counters, Rates
from tests.support.remoting import ManualClock

MORNING = datetime(2026, 3, 2, 0, 0, 0).astimezone().timestamp()


class Broker:
    """Counters and their rates, with a clock that goes second by second."""

    def __init__(self, time: float = MORNING) -> None:
        self.clock = ManualClock(time=time)
        self.counters = Counters()
        self.rates = Rates(self.counters, self.clock)

    def put(self, topic: str, count: int = 1, size: int = 10) -> None:
        counts = self.counters.topic(topic)
        counts.puts += count
        counts.put_bytes += count * size

    def get(self, topic: str, group: str, count: int = 1) -> None:
        counts = self.counters.group(topic, group)
        counts.pulls += 1
        if count:
            counts.hits += 1
            counts.gets += count

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.time += 1
            self.rates.sample()


def test_rates_are_those_of_the_last_ten_sixty_and_six_hundred_seconds():
    broker = Broker()
    broker.wait(1200)
    for _ in range(10):
        broker.put("orders", 6)
        broker.wait(1)

    short, middle, long = broker.rates.per_second(10, 60, 600)

    assert short["puts"] == pytest.approx(6, rel=0.2)
    assert middle["puts"] == pytest.approx(1, rel=0.05)
    assert long["puts"] == pytest.approx(0.1, rel=0.01)
    assert short["put_bytes"] == pytest.approx(60, rel=0.2)


def test_what_happened_since_the_last_sample_counts():
    broker = Broker()
    broker.wait(30)
    broker.put("orders", 60)

    recent = broker.rates.recent("orders")

    assert recent is not None
    assert [span.amounts[0] for span in recent] == [60, 60, 60]
    assert broker.rates.put_rate("orders") == pytest.approx(2)


def test_a_young_broker_does_not_exaggerate():
    broker = Broker()
    broker.put("orders", 5)

    assert broker.rates.put_rate("orders") == 5
    assert broker.rates.per_second(10)[0]["puts"] == 5


def test_nothing_is_known_of_what_was_never_counted():
    broker = Broker()

    assert broker.rates.recent("orders") is None
    assert broker.rates.recent(("orders", "billing")) is None
    assert broker.rates.put_rate("orders") == broker.rates.get_rate("orders", "billing") == 0


def test_pulls_that_brought_something_are_told_from_those_that_did_not():
    broker = Broker()
    broker.wait(10)
    for count in (3, 0, 0, 5):
        broker.get("orders", "billing", count)

    totals = broker.rates.totals()

    assert (totals.pulls, totals.hits, totals.gets) == (4, 2, 8)
    assert broker.rates.get_rate("orders", "billing") == pytest.approx(0.8)


def test_a_minute_an_hour_and_a_day_go_by():
    broker = Broker()
    broker.put("orders", 7)

    sums = []
    for seconds in (30, 90, 4200, 2 * 86_400):
        broker.wait(seconds)
        recent = broker.rates.recent("orders")
        assert recent is not None
        sums.append(tuple(span.amounts[0] for span in recent))

    assert sums == [(7, 7, 7), (0, 7, 7), (0, 0, 7), (0, 0, 0)]


def test_totals_do_not_fall_when_a_topic_is_deleted():
    broker = Broker()
    broker.put("orders", 5)
    broker.get("orders", "billing", 5)
    broker.wait(15)

    broker.counters.forget_topic("orders")
    broker.put("orders", 2)

    recent = broker.rates.recent("orders")
    assert broker.rates.totals().puts == 7
    assert broker.rates.totals().gets == 5
    assert recent is not None
    assert recent[0].amounts[0] == 7


def test_a_topic_that_is_made_again_adds_to_what_it_had():
    broker = Broker()
    broker.put("orders", 5)
    broker.wait(15)
    broker.counters.forget_topic("orders")
    broker.put("orders", 2)
    broker.wait(15)

    recent = broker.rates.recent("orders")

    assert recent is not None
    assert recent[1].amounts == (7, 70, 7, 0)


def test_the_counts_of_a_group_that_is_deleted_stay_in_the_totals():
    broker = Broker()
    broker.get("orders", "billing", 5)
    broker.get("orders", "audit", 1)

    broker.counters.forget_group("billing")

    assert broker.rates.totals().gets == 6
    assert set(broker.rates.groups()) == {("orders", "audit")}


def test_a_new_day_remembers_where_it_began():
    broker = Broker(MORNING + 86_400 - 30)
    broker.put("orders", 5)
    broker.wait(60)
    broker.put("orders", 2)

    yesterday, today, now = broker.rates.mornings()

    assert (yesterday.puts, today.puts, now.puts) == (0, 5, 7)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 25)), max_size=40)
)
def test_a_minute_holds_all_of_the_last_sixty_seconds_and_little_more(events):
    broker = Broker()
    happened: list[tuple[float, str, int]] = []
    for topic, count, pause in events:
        broker.put(topic, count)
        happened.append((broker.clock.time, topic, count))
        broker.wait(pause)

    now = broker.clock.time
    for topic in {topic for _, topic, _ in happened}:
        recent = broker.rates.recent(topic)
        assert recent is not None
        least = sum(count for at, name, count in happened if name == topic and now - at < 60)
        most = sum(count for at, name, count in happened if name == topic and now - at <= 80)
        assert least <= recent[0].amounts[0] <= most
        total = sum(count for _, name, count in happened if name == topic)
        assert recent[2].amounts[0] == total
