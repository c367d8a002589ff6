"""The short versions of `make chaos`: kills, disks, pauses and partitions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tools.chaos.checker import analyse
from tools.chaos.effort import Effort, audit, create_topic, finish
from tools.chaos.faultybroker import FORGETS
from tools.chaos.figures import Figure
from tools.chaos.history import Acked
from tools.chaos.programs import Stage, wait_until
from tools.chaos.scenarios import disks, killing, later, network, ordering, rebalancing

SEED = 7


@pytest.fixture
def stage(tmp_path):
    with Stage(tmp_path / "stage") as made:
        yield made


def assert_kept(figures: Sequence[Figure]) -> None:
    """Fail with every rule that was broken, and with the figures beside it.

    How fast things were is for `make chaos` on a quiet machine; that they came about at all is not.
    """
    broken = [figure for figure in figures if not figure.is_kept and not figure.is_timing]
    shown = "\n".join(f"{each.what}: {each.value} (rule {each.rule})" for each in broken)
    rest = "; ".join(f"{each.what}: {each.value}" for each in figures if each.is_kept)
    assert not broken, f"{shown}\nthe rest: {rest}"


@pytest.mark.timeout(180)
def test_kill_9_of_a_broker_that_flushes_loses_nothing_and_reorders_nothing(stage):
    assert_kept(killing.kill_sync(stage, Effort(5.0, SEED)))


@pytest.mark.timeout(180)
def test_delayed_messages_come_across_kill_9_and_never_early(stage):
    assert_kept(later.delayed(stage, Effort(14.0, SEED)))


@pytest.mark.timeout(180)
def test_a_full_file_system_refuses_writes_and_serves_reads(stage):
    figures = disks.tiny_disk(stage, Effort(3.0, SEED))

    if figures[0].value.startswith("left out"):
        pytest.skip(figures[0].value)
    assert_kept(figures)


@pytest.mark.timeout(180)
def test_after_a_failed_fdatasync_nothing_is_acknowledged(stage):
    assert_kept(disks.failing_sync(stage, Effort(3.0, SEED)))


@pytest.mark.timeout(180)
def test_a_broker_whose_disk_forgets_is_found_out(stage):
    """Without this, a checker that sees nothing would pass for a broker that loses nothing."""
    broker = stage.broker("broker-a", "broker.store.flush.policy=sync")
    broker.start()
    create_topic(stage, queues=2)
    producer = stage.worker("produce", "p1", rate=200)

    def acked():
        return sum(isinstance(event, Acked) for event in stage.events())

    wait_until(lambda: acked() >= 20, "some are stored")
    broker.switch(FORGETS, on=True)
    before = acked()
    wait_until(lambda: acked() >= before + 20, "some are forgotten")
    broker.kill()
    broker.switch(FORGETS, on=False)
    broker.restart()
    finish([producer])
    audit(stage)

    found = analyse(stage.events(), groups=("audit",))

    assert len(found.lost) + len(found.unseen) >= 10


@pytest.mark.timeout(180)
def test_members_that_consume_in_order_never_overlap(stage):
    assert_kept(ordering.orderly(stage, Effort(6.0, SEED)))


@pytest.mark.timeout(180)
def test_partitions_and_half_open_connections_are_survived(stage):
    assert_kept(network.network(stage, Effort(5.0, SEED)))


@pytest.mark.timeout(180)
def test_queues_are_shared_anew_in_time(stage):
    assert_kept(rebalancing.rebalance(stage, Effort(10.0, SEED)))
