"""The first message at or after a time, wherever a broker says that it is."""

from __future__ import annotations

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.queue import Queue
from orbitmq.client.rangeaccess import RangeAccess
from orbitmq.client.rangecluster import RangeCluster
from orbitmq.client.rangetimes import search
from orbitmq.testing.background import EmbeddedCluster
from tests.support.filling import fill, numbered


@given(
    times=st.lists(st.integers(0, 20), max_size=60).map(sorted),
    low=st.integers(0, 5),
    guess=st.integers(-3, 80),
    wanted=st.integers(-1, 22),
)
async def test_the_place_is_the_same_whatever_the_broker_says(
    times: list[int], low: int, guess: int, wanted: int
) -> None:
    async def is_young(offset: int) -> bool:
        assert low <= offset < low + len(times)
        return times[offset - low] >= wanted

    found = await search(low, low + len(times), guess, is_young)

    assert found == low + bisect.bisect_left(times, wanted)


@pytest.mark.parametrize("by", [-1, 0, 1])
async def test_a_guess_that_is_nearly_right_costs_few_looks(by: int) -> None:
    looks = []

    async def is_young(offset: int) -> bool:
        looks.append(offset)
        return offset >= 5000

    assert await search(0, 10_000, 5000 + by, is_young) == 5000
    assert len(looks) <= 4


def test_messages_are_found_by_the_time_at_which_they_were_stored(
    orbit_cluster: EmbeddedCluster,
) -> None:
    orbit_cluster.create_topic("orders", queues=2)
    times = []
    for first in (0, 10, 20):
        times.append(orbit_cluster.clock.now())
        fill(orbit_cluster.broker_addresses[0], "orders", numbered(10, first=first))
        orbit_cluster.clock.advance(100)
    filled, empty = Queue("orders", "broker-a", 0), Queue("orders", "broker-a", 1)
    access = RangeAccess(name_servers=(orbit_cluster.name_server,))

    def found(time: float) -> dict[Queue, int | None]:
        with RangeCluster(access, "readers") as cluster:
            return cluster.at_times({filled: time, empty: time}).or_raise()

    assert [found(time)[filled] for time in times] == [0, 10, 20]
    assert found(times[1] + 50)[filled] == 20
    assert found(times[0] - 50)[filled] == 0
    assert found(times[2] + 50) == {filled: None, empty: None}
