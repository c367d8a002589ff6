"""The first message at or after a time, wherever a broker says that it is."""

from __future__ import annotations

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.admin.admin import Admin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.ranges.cluster import RangeCluster, search
from orbitmq.client.ranges.connections import RangeAccess
from orbitmq.client.routes import Queue
from orbitmq.testing.cluster import EmbeddedCluster, MovableClock
from tests.support.filling import fill, numbered


@given(
    times=st.lists(st.integers(0, 20), max_size=60).map(sorted),
    low=st.integers(0, 5),
    guess=st.integers(-3, 80),
    wanted=st.integers(-1, 22),
)
async def test_the_place_is_the_same_whatever_the_broker_says(times, low, guess, wanted):
    async def is_young(offset):
        assert low <= offset < low + len(times)
        return times[offset - low] >= wanted

    found = await search(low, low + len(times), guess, is_young)

    assert found == low + bisect.bisect_left(times, wanted)


@pytest.mark.parametrize("by", [-1, 0, 1])
async def test_a_guess_that_is_nearly_right_costs_few_looks(by):
    looks = []

    async def is_young(offset):
        looks.append(offset)
        return offset >= 5000

    assert await search(0, 10_000, 5000 + by, is_young) == 5000
    assert len(looks) <= 4


class StandingClock(MovableClock):
    """A clock whose time of day moves only when it is moved; it stands within a millisecond."""

    def now(self) -> float:
        return 1_700_000_000.0007 + self._ahead


@pytest.fixture
def cluster():
    with EmbeddedCluster(clock=StandingClock()) as cluster:
        yield cluster


def test_messages_are_found_by_the_time_at_which_they_were_stored(cluster):
    cluster.create_topic("orders", queues=2)
    times = []
    for first in (0, 10, 20):
        times.append(cluster.clock.now())
        fill(cluster.broker_addresses[0], "orders", numbered(10, first=first))
        cluster.clock.advance(100)
    filled, empty = Queue("orders", "broker-a", 0), Queue("orders", "broker-a", 1)
    access = RangeAccess(name_servers=(cluster.name_server,))

    def found(time):
        with RangeCluster(access, "readers") as asked:
            return asked.at_times({filled: time, empty: time}).or_raise()

    assert [found(time)[filled] for time in times] == [0, 10, 20]
    assert found(times[1] + 50)[filled] == 20
    assert found(times[0] - 50)[filled] == 0
    assert found(times[2] + 50) == {filled: None, empty: None}


def test_an_administrator_finds_what_was_stored_from_a_time_on(cluster):
    cluster.create_topic("orders", queues=1)
    fill(cluster.broker_addresses[0], "orders", numbered(1))
    cluster.clock.advance(0.001)
    fill(cluster.broker_addresses[0], "orders", numbered(2, first=1))
    since = cluster.clock.now()

    with Admin(name_server=cluster.name_server) as admin:
        admin.groups.create("readers")
        browsed = [bytes(each.body) for each in admin.messages.browse("orders", since=since)]
        moved = admin.progress.plan_reset("readers", "orders", ResetTo.time(since))

    assert browsed == [b"1", b"2"]
    assert [move.to_offset for move in moved.moves] == [1]
