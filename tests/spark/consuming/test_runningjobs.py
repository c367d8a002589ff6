"""Jobs of a session that has ended; no Spark is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from orbitmq.spark.consuming.runningjobs import RunningJobs


def fine(*_: object) -> None:
    """As long as the session was there."""


def gone(*_: object) -> Any:
    raise ConnectionRefusedError("Java is gone")


def test_a_session_that_has_ended_keeps_nobody_from_stopping() -> None:
    """Its errors would be in the way of what else is to be stopped."""
    context = SimpleNamespace(
        addJobTag=fine, removeJobTag=fine, cancelJobsWithTag=gone, statusTracker=gone
    )
    spark: Any = SimpleNamespace(sparkContext=context, conf=SimpleNamespace(get=gone))
    jobs = RunningJobs(spark)
    jobs.begin()

    jobs.cancel()

    # The time that Spark takes by default.
    assert 4.0 <= jobs.longest < 10.0


def test_a_connect_session_that_has_ended_does_not_either() -> None:
    spark: Any = SimpleNamespace(
        addTag=fine, removeTag=fine, interruptTag=gone, conf=SimpleNamespace(get=gone)
    )
    jobs = RunningJobs(spark)
    jobs.begin()

    jobs.cancel()

    assert 4.0 <= jobs.longest < 10.0
