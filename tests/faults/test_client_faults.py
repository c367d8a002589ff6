"""Members that stand still and networks that go silent: the short versions of `make chaos`."""

from __future__ import annotations

import pytest

from tests.support.faults import assert_kept
from tools.chaos.effort import Effort
from tools.chaos.programs import Stage
from tools.chaos.scenarios import network, ordering, rebalancing

SEED = 7


@pytest.fixture
def stage(tmp_path):
    with Stage(tmp_path / "stage") as made:
        yield made


@pytest.mark.timeout(180)
def test_members_that_consume_in_order_never_overlap(stage):
    assert_kept(ordering.orderly(stage, Effort(6.0, SEED)))


@pytest.mark.timeout(180)
def test_partitions_and_half_open_connections_are_survived(stage):
    assert_kept(network.network(stage, Effort(5.0, SEED)))


@pytest.mark.timeout(180)
def test_queues_are_shared_anew_in_time(stage):
    assert_kept(rebalancing.rebalance(stage, Effort(10.0, SEED)))
