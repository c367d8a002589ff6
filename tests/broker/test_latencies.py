"""How long requests take: buckets, percentiles, and what tools are told of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orbitmq.broker.counters import OWN, PUT_BOUNDS, RPC_BOUNDS, Histogram, Latencies, PutTimes
from orbitmq.wire.bodies import KVTable
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.javajson import decode_body
from tests.support.broker import RawClient

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


@given(values)
def test_fewer_bounds_tell_the_same(seen):
    fine, coarse = Histogram(PUT_BOUNDS), Histogram(RPC_BOUNDS)
    for value in seen:
        fine.note(value)
        coarse.note(value)

    assert fine.coarser(RPC_BOUNDS).counts == coarse.counts
    assert fine.coarser(RPC_BOUNDS).total == fine.total


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


def test_nothing_has_no_percentile():
    assert Histogram(PUT_BOUNDS).percentile(0.99) == 0.0


def test_figures_for_people_are_those_of_the_last_complete_minute():
    times = PutTimes(now=0.0)

    times.note(V2, 0, 4.0, 990)
    times.note(OWN, 0, 700.0, 10)
    times.tick(59.9)
    early = times.percentile(0.5)
    times.tick(60.0)
    first = (times.percentile(0.5), times.percentile(0.995), times.shares())
    times.note(V2, 0, 0.2, 5)
    times.tick(119.9)
    unchanged = times.percentile(0.5)
    times.tick(120.0)
    second = times.percentile(0.5)
    times.tick(180.0)

    assert early == 0.0
    assert 3.0 < first[0] <= 4.0
    assert 600.0 < first[1] <= 700.0
    assert first[2] == (
        "[<=0ms]:0 [0~10ms]:990 [10~50ms]:0 [50~100ms]:0 [100~200ms]:0 [200~500ms]:0 "
        "[500ms~1s]:10 [1~2s]:0 [2~3s]:0 [3~4s]:0 [4~5s]:0 [5~10s]:0 [10s~]:0"
    )
    assert unchanged == first[0]
    assert 0.1 < second <= 0.2
    assert times.percentile(0.5) == 0.0
    assert times.longest == 700.0


def test_a_turn_is_noted_for_every_kind_of_request_in_it():
    latencies = Latencies(lambda: 10.004)

    latencies.stored(10.0, [int(V2)] * 3, 2, 0)
    latencies.stored(10.0, [int(V2), int(RequestCode.SEND_BATCH_MESSAGE)], 0, 0)

    counts = {key[0]: histogram.counts[2] for key, histogram in latencies.calls()}
    assert counts == {V2: 4, RequestCode.SEND_BATCH_MESSAGE: 1}
    assert latencies.puts.longest == pytest.approx(4.0)


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
