"""When a group on Spark is ill, by the batches it has had; no Spark is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orbitmq.client.queue import Queue
from orbitmq.client.ranges import QueueRange
from orbitmq.spark.consuming.batching import Batching
from orbitmq.spark.consuming.planning import Piece
from orbitmq.spark.consuming.portions import Planned
from orbitmq.spark.consuming.reports import PieceReport, PipelineProgress, PipelineState
from orbitmq.spark.consuming.settings import BatchSettings
from tests.support.store import HandClock

QUEUE = Queue("orders", "broker-a", 0)


class Group:
    """Batches whose jobs end as they are told to."""

    def __init__(self) -> None:
        driver: Any = SimpleNamespace(
            batch=BatchSettings(first_pause=0.001),
            group="billing",
            client_id="1",
            options=SimpleNamespace(ordered=False),
            lag=dict,
            settle=lambda planned, reports: None,
        )
        spark: Any = SimpleNamespace()
        self.spark = spark
        self.clock = HandClock()
        self._outcome: list[PieceReport] | Exception = []
        self._batching = Batching(spark, driver, clock=self.clock)
        self._batching._run_job = self._job  # type: ignore[method-assign]

    def batch(self, outcome: PieceReport | Exception, *, messages: int = 10) -> None:
        self._outcome = outcome if isinstance(outcome, Exception) else [outcome]
        self._batching._batch(Planned(pieces=(Piece(QueueRange(QUEUE, 0, messages)),)))
        self.clock.advance(1)

    def progress(self) -> PipelineProgress:
        return self._batching.progress(PipelineState.RUNNING)

    def _job(self, planned: Planned, sizes: list[int]) -> list[PieceReport]:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


@pytest.fixture
def group() -> Group:
    return Group()


def test_a_group_whose_messages_fail_is_ill(group: Group) -> None:
    group.batch(PieceReport(place=0, finished=10, done=4, retried=6, failures={0: 6}))

    assert (group.progress().is_failing, group.progress().failed_share) == (True, 0.6)


def test_one_message_in_order_that_is_tried_every_second_makes_no_group_ill(group: Group) -> None:
    group.batch(PieceReport(place=0, finished=10, done=10))
    group.clock.advance(3600)
    for attempts in range(1, 60):
        group.batch(
            PieceReport(
                place=0, finished=0, attempts={0: attempts}, pause=1.0, failures={attempts - 1: 1}
            )
        )

    assert (group.progress().is_failing, group.progress().failed_share) == (False, 1.0)


def test_messages_that_middleware_holds_make_no_group_ill(group: Group) -> None:
    for _ in range(6):
        group.batch(PieceReport(place=0, finished=0, pause=1.0, held=1))

    last = group.progress().last_batch
    assert last is not None
    assert (last.held, last.failures) == (1, {})
    assert (group.progress().is_failing, group.progress().failed_share) == (False, None)


def test_a_job_that_fails_once_makes_no_group_ill_and_several_in_a_row_do(group: Group) -> None:
    lost = RuntimeError("executor lost")
    seen = []
    for outcome in (lost, PieceReport(place=0, finished=10, done=10), lost, lost, lost):
        group.batch(outcome)
        seen.append(group.progress().is_failing)
    group.batch(PieceReport(place=0, finished=10, done=10))

    assert seen == [False, False, False, False, True]
    assert not group.progress().is_failing


def test_a_message_at_the_head_that_is_not_done_makes_no_batch_smaller(group: Group) -> None:
    group.batch(PieceReport(place=0, finished=0, beyond=(1, 5000)), messages=5000)

    assert group._batching._pace.size >= 5000


def test_a_batch_has_as_many_tasks_as_the_session_runs_by_then(group: Group) -> None:
    group.spark.sparkContext = SimpleNamespace(defaultParallelism=2)
    group.batch(PieceReport(place=0, finished=50), messages=1000)
    early = group.progress().last_batch
    group.spark.sparkContext.defaultParallelism = 8
    group.batch(PieceReport(place=0, finished=50), messages=1000)
    late = group.progress().last_batch

    assert early is not None
    assert late is not None
    assert (early.tasks, late.tasks) == (2, 8)
