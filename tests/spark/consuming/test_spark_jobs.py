"""Jobs that have failed, also with their session; no Spark is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orbitmq.spark.consuming.batches import SparkJobs


def fine(*_: object) -> None:
    """As long as the session was there."""


def gone(*_: object) -> Any:
    raise ConnectionRefusedError("Java is gone")


def test_a_session_that_has_ended_keeps_nobody_from_stopping():
    """Its errors would be in the way of what else is to be stopped."""
    context = SimpleNamespace(
        addJobTag=fine, removeJobTag=gone, cancelJobsWithTag=gone, statusTracker=gone
    )
    spark: Any = SimpleNamespace(sparkContext=context, conf=SimpleNamespace(get=gone))
    jobs = SparkJobs(spark)
    jobs.begin()

    jobs.cancel()
    jobs.end()

    # The time that Spark takes by default.
    assert 4.0 <= jobs.longest < 10.0


def test_a_connect_session_that_has_ended_does_not_either():
    spark: Any = SimpleNamespace(
        addTag=fine, removeTag=gone, interruptTag=gone, conf=SimpleNamespace(get=gone)
    )
    jobs = SparkJobs(spark)
    jobs.begin()

    jobs.cancel()
    jobs.end()

    assert 4.0 <= jobs.longest < 10.0


@pytest.mark.parametrize("master", ["local-cluster[2,1,1024]", "spark://driver:7077"])
@pytest.mark.parametrize(
    ("failed", "expected"), [([], False), ([0, 0], False), ([0, 1], True), (None, True)]
)
def test_tasks_that_have_failed_may_be_lost_and_at_work(failed, expected, master):
    """Of a job that Spark never had there are none. None: nothing is known of it."""
    stages = {
        number: SimpleNamespace(numFailedTasks=each) for number, each in enumerate(failed or [])
    }
    tracker = SimpleNamespace(
        getJobInfo=lambda number: SimpleNamespace(status="FAILED", stageIds=[number, 99]),
        getStageInfo=stages.get,
        getJobIdsForTag=lambda tag: list(stages),
    )
    java = SimpleNamespace(sc=lambda: SimpleNamespace(statusTracker=lambda: tracker))
    context = SimpleNamespace(
        addJobTag=fine,
        removeJobTag=fine,
        statusTracker=gone if failed is None else lambda: tracker,
        _jsc=java,
    )
    spark: Any = SimpleNamespace(sparkContext=context)
    jobs = SparkJobs(spark)
    jobs.begin()
    jobs.end()

    context.master = master
    assert jobs.may_have_lost_tasks() == expected
    # There are no executors that could be lost.
    for context.master in ("local", "local[2]", "local[*, 4]"):
        assert not jobs.may_have_lost_tasks()


def test_of_a_job_of_which_nothing_is_known_a_cancellation_is_reason_enough():
    """In Connect each stop would keep the queues locked otherwise."""
    spark: Any = SimpleNamespace(addTag=fine, removeTag=fine, interruptTag=fine)
    jobs = SparkJobs(spark)
    may_be = []

    for is_cancelled in (False, True, False):
        jobs.begin()
        if is_cancelled:
            jobs.cancel()
        jobs.end()
        may_be.append(jobs.may_have_lost_tasks())

    assert may_be == [True, False, True]
