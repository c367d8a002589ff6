"""A consumer group on Spark, as a console is told of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from orbitmq.client.names import is_retry_topic
from orbitmq.spark.consolelink import CONSOLE_VARIABLE
from orbitmq.spark.consuming.reports import PipelineProgress, PipelineState

if TYPE_CHECKING:
    from orbitmq.spark.consolelink import ConsoleLink, QueryReport

_STATES: Final = {
    PipelineState.NEW: "running",
    PipelineState.STOPPING: "running",
    PipelineState.STOPPED: "stopped",
    PipelineState.FAILED: "failed",
}


def link_to(console: str | None) -> ConsoleLink | None:
    """A link to the console that is given or that the environment names; None without any."""
    if not console and not os.environ.get(CONSOLE_VARIABLE):
        return None
    from orbitmq.spark.reporting import console_link  # noqa: PLC0415  # who has a console

    return console_link(console)


def reported(progress: PipelineProgress) -> QueryReport:
    """The progress of a pipeline as a console shows it."""
    from orbitmq.spark.consolelink import QueryReport  # noqa: PLC0415  # who has a console

    last = progress.last_batch
    lag = {str(queue): waiting for queue, waiting in progress.lag.items()}
    busy = "running" if any(lag.values()) else "waiting"
    topics = {queue.topic for queue in progress.lag if not is_retry_topic(queue.topic)}
    return QueryReport(
        state=_STATES.get(progress.state, "failing" if progress.is_failing else busy),
        batch=None if last is None else last.number,
        rows=None if last is None else last.handled,
        rows_per_second=None if last is None else last.rows_per_second,
        batch_seconds=None if last is None else last.seconds,
        group=progress.group,
        topics=tuple(sorted(topics)),
        lag=lag,
        done=progress.done,
        retried=progress.retried,
        dead=progress.dead,
        failed_share=progress.failed_share,
        error=progress.last_error,
    )
