"""What a planner asks a cluster: times, bounds, the group's offsets, and who else is there."""

from __future__ import annotations

import bisect
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.admin.admin import Admin
from orbitmq.client.admin.resets import ResetTo
from orbitmq.client.ranges.cluster import Bounds, RangeCluster, search
from orbitmq.client.ranges.connections import RangeAccess, RangeFilter
from orbitmq.client.routes import Queue
from orbitmq.errors import NoRoute
from orbitmq.testing.cluster import EmbeddedCluster, MovableClock
from tests.support.filling import fill, numbered

REFUSES, HANGS = Queue("orders", "broker-a", 0), Queue("orders", "broker-b", 0)


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
def still_cluster():
    with EmbeddedCluster(clock=StandingClock()) as cluster:
        yield cluster


def test_messages_are_found_by_the_time_at_which_they_were_stored(still_cluster):
    still_cluster.create_topic("orders", queues=2)
    times = []
    for first in (0, 10, 20):
        times.append(still_cluster.clock.now())
        fill(still_cluster.broker_addresses[0], "orders", numbered(10, first=first))
        still_cluster.clock.advance(100)
    filled, empty = Queue("orders", "broker-a", 0), Queue("orders", "broker-a", 1)
    access = RangeAccess(name_servers=(still_cluster.name_server,))

    def found(time):
        with RangeCluster(access, "readers") as asked:
            return asked.at_times({filled: time, empty: time}).or_raise()

    assert [found(time)[filled] for time in times] == [0, 10, 20]
    assert found(times[1] + 50)[filled] == 20
    assert found(times[0] - 50)[filled] == 0
    assert found(times[2] + 50) == {filled: None, empty: None}


def test_an_administrator_finds_what_was_stored_from_a_time_on(still_cluster):
    still_cluster.create_topic("orders", queues=1)
    fill(still_cluster.broker_addresses[0], "orders", numbered(1))
    still_cluster.clock.advance(0.001)
    fill(still_cluster.broker_addresses[0], "orders", numbered(2, first=1))
    since = still_cluster.clock.now()

    with Admin(name_server=still_cluster.name_server) as admin:
        admin.groups.create("readers")
        browsed = [bytes(each.body) for each in admin.messages.browse("orders", since=since)]
        moved = admin.progress.plan_reset("readers", "orders", ResetTo.time(since))

    assert browsed == [b"1", b"2"]
    assert [move.to_offset for move in moved.moves] == [1]


# ---- topics, queues and offsets


@pytest.fixture
def cluster(access):
    with RangeCluster(access, "readers") as found:
        yield found


def test_a_planner_sees_topics_bounds_and_the_offsets_of_its_group(
    cluster, orbit_shared_cluster, orbit_shared_topic
):
    fill(orbit_shared_cluster.broker_addresses[0], orbit_shared_topic, numbered(10, queues=2))

    queues = cluster.queues([orbit_shared_topic])
    bounds = cluster.bounds(queues).or_raise()
    stored = cluster.stored_at({queues[0]: 4, queues[2]: 0}).or_raise()

    assert cluster.topics(re.escape(orbit_shared_topic)) == (orbit_shared_topic,)
    assert [bounds[queue] for queue in queues] == [Bounds(0, 5)] * 2 + [Bounds(0, 0)] * 2
    assert cluster.ends(queues).or_raise() == {queue: bounds[queue].high for queue in queues}
    assert stored[queues[0]] is not None
    assert stored[queues[2]] is None
    assert set(cluster.progress(queues).or_raise().values()) == {None}
    assert cluster.report({queues[0]: 3}).failures == {}
    assert cluster.progress(queues).or_raise()[queues[0]] == 3


def test_a_topic_that_is_not_there_is_named_beside_those_that_are(cluster, orbit_shared_topic):
    routed = cluster.routed([orbit_shared_topic, "no-such-topic"])

    assert len(routed.queues) == 4
    assert set(routed.failures) == {"no-such-topic"}
    with pytest.raises(NoRoute, match="no-such-topic"):
        cluster.queues(["no-such-topic"])


def test_readers_that_join_a_group_see_each_other(cluster, access, orbit_shared_topic):
    with RangeCluster(access, "readers") as other:
        for each in (cluster, other):
            each.join([orbit_shared_topic], RangeFilter())

        assert len(cluster.others(orbit_shared_topic)) == 1
        assert cluster.others(orbit_shared_topic) != other.others(orbit_shared_topic)


# ---- brokers that do not answer: each has its own time
