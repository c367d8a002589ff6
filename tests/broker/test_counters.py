"""Rates and sums over time."""

from __future__ import annotations

import math
from datetime import datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orbitmq.broker.counters import PUT_BOUNDS, RPC_BOUNDS, Counters, Histogram, Rates
from orbitmq.wire.bodies import KVTable
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.javajson import decode_body
from tests.support.broker import RawClient
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


V2 = RequestCode.SEND_MESSAGE_V2

values = st.lists(st.floats(0, 20_000), min_size=1, max_size=200)


@given(values)
def test_a_histogram_counts_every_value_below_all_bounds_that_it_is_not_above(seen):
    histogram = Histogram(RPC_BOUNDS)
    for value in seen:
        histogram.note(value)

    for bound, count in histogram.cumulative():
        assert count == sum(value <= bound for value in seen)
    assert len(histogram) == len(seen)
    assert histogram.total == pytest.approx(sum(seen))


@given(values, st.sampled_from([0.5, 0.9, 0.99, 0.999, 1.0]))
@example([0.0, 0.0, 0.0], 1.0)
def test_a_percentile_lies_in_the_bucket_of_the_value_that_it_stands_for(seen, share):
    histogram = Histogram(PUT_BOUNDS)
    for value in seen:
        histogram.note(value)

    true = sorted(seen)[max(0, math.ceil(share * len(seen)) - 1)]
    found = histogram.percentile(share)

    above = next((bound for bound in PUT_BOUNDS if bound >= true), PUT_BOUNDS[-1])
    below = max((bound for bound in PUT_BOUNDS if bound < above), default=0.0)
    assert below <= found <= above


async def told(client: RawClient) -> dict[str, str]:
    answer = await client.connection.request(RequestCode.GET_BROKER_RUNTIME_INFO)
    return dict(decode_body(KVTable, answer.body).table)


async def test_tools_are_told_how_long_puts_took(broker, client):
    idle = await told(client)
    for _ in range(20):
        await client.stored("orders")
    # A minute is over.
    broker.parts.latencies.puts.tick(broker.parts.clock.monotonic() + 61)

    busy = await told(client)

    assert (idle["putLatency99"], idle["putMessageEntireTimeMax"]) == ("0.00", "0")
    assert 0 < float(busy["putLatency99"]) <= float(busy["putLatency999"]) < 10_000
    shares = [part.rpartition(":")[2] for part in busy["putMessageDistributeTime"].split()]
    assert sum(map(int, shares)) == 20
    assert float(busy["putMessageEntireTimeMax"]) >= 0


async def test_calls_are_counted_by_their_code_and_answer(broker, client):
    await client.stored("orders")
    await client.send("orders", b"")
    await client.pull("orders")
    await client.pull("orders", hold=0.05, offset=1)
    await client.query("orders")
    await client.max_offset("orders")
    await client.max_offset("nowhere", 9)

    found = {key: len(histogram) for key, histogram in broker.parts.latencies.calls()}

    assert found[V2, 0, False] == 1
    assert found[V2, 1, False] == 1
    assert found[RequestCode.PULL_MESSAGE, 0, False] == 1
    assert found[RequestCode.PULL_MESSAGE, 19, True] == 1
    held = dict(broker.parts.latencies.calls())[RequestCode.PULL_MESSAGE, 19, True]
    assert held.total >= 50
    assert sum(count for key, count in found.items() if key[0] == RequestCode.GET_MAX_OFFSET) == 2
