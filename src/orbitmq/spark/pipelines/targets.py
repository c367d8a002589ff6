"""What a pipeline's function gave back, as things that run, come to rest and may fail."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from orbitmq.clock import Clock, SystemClock
from orbitmq.spark.errors import cause_of
from orbitmq.spark.pipelines.errors import PipelineRefused
from orbitmq.spark.pipelines.progress import Progress, QueryWatch
from orbitmq.spark.streamreturns import StreamHealth

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from orbitmq.spark.consuming.pipeline import ConsumePipeline
    from orbitmq.spark.pipelines.run import Run

log = logging.getLogger(__name__)

#: Characters of an error that are shown.
_LONGEST: Final = 1000


class Target(Protocol):
    """Something that runs."""

    name: str

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or badly."""

    @property
    def failure(self) -> str | None:
        """Why it has failed, if it has."""

    @property
    def is_at_rest(self) -> bool:
        """Whether no batch seems to run; asked after it was told to take no more."""

    def look(self) -> Progress:
        """Where it stands."""

    def stop(self) -> None:
        """End it now. May be called again."""


class StreamTarget:
    """A stream of Spark."""

    def __init__(self, query: StreamingQuery, run: Run, *, clock: Clock | None = None) -> None:
        self.name = query.name or str(query.id)
        self._query = query
        self._clock = clock or SystemClock()
        self._watch = QueryWatch()
        self._health = StreamHealth(run.returned, str(query.id))
        self._was_stopped = False
        self._late_told = 0

    @property
    def is_over(self) -> bool:
        return not self._query.isActive

    @property
    def failure(self) -> str | None:
        if self._query.isActive or self._was_stopped:
            return None
        error = self._query.exception()
        return None if error is None else cause_of(str(error))

    @property
    def is_at_rest(self) -> bool:
        if not self._query.isActive:
            return True
        status = self._query.status
        return not (status["isDataAvailable"] and status["isTriggerActive"])

    def look(self) -> Progress:
        now, before = self._clock.monotonic(), self._watch.rows
        self._watch.look(self._query)
        self._tell_late(self._watch.late)
        rows, batch = self._watch.rows - before, self._watch.full_batch
        if rows and batch is not None:
            self._health.batch_ended(now, batch, rows)
        returned, failure = self._health.returned, self.failure
        return Progress(
            query=self.name,
            state=self._state(failure, is_failing=self._health.is_failing(now)),
            batch=self._watch.batch,
            rows=self._watch.rows,
            rows_per_second=self._watch.rows_per_second,
            batch_seconds=self._watch.batch_seconds,
            lag=dict(self._watch.lag),
            retried=returned.retried,
            dead=returned.dead,
            failed_share=self._health.share(now),
            late=self._watch.late,
            error=failure,
        )

    def _tell_late(self, late: int) -> None:
        """Spark leaves such rows out without a word, and results are wrong."""
        if late > self._late_told:
            log.warning(
                "%s: %d rows came after their window was closed, and are in no result; a queue "
                "lags behind the others, so let windows wait longer",
                self.name,
                late - self._late_told,
            )
            self._late_told = late

    def _state(self, failure: str | None, *, is_failing: bool) -> str:
        if failure is not None:
            return "failed"
        if not self._query.isActive:
            return "stopped" if self._was_stopped else "finished"
        if self._watch.batch is None:
            return "starting"
        if is_failing:
            return "failing"
        return "running" if self._query.status["isDataAvailable"] else "waiting"

    def stop(self) -> None:
        if self._query.isActive:
            self._was_stopped = True
            self._query.stop()


class GroupTarget:
    """A consumer group on Spark. Its own stop lets the batch that runs finish."""

    def __init__(self, group: ConsumePipeline, run: Run) -> None:
        self.name = group.progress().group
        self._group = group
        self._once = run.once
        self._is_done = False
        self._was_stopped = False

    @property
    def is_over(self) -> bool:
        if self._once and not self._is_done and self._state() == "running":
            self._is_done = self._group.until_idle(0.01)
        return self._is_done or self._state() != "running"

    @property
    def failure(self) -> str | None:
        progress = self._group.progress()
        return (progress.last_error or "it failed") if progress.state.value == "failed" else None

    @property
    def is_at_rest(self) -> bool:
        return True

    def look(self) -> Progress:
        progress = self._group.progress()
        last = progress.last_batch
        state = progress.state.value
        if state == "running" and progress.is_failing:
            state = "failing"
        elif state == "running" and progress.total_lag == 0:
            state = "waiting"
        return Progress(
            query=self.name,
            state="finished" if self._is_done and state != "failed" else state,
            batch=None if last is None else last.number,
            rows=progress.done + progress.retried + progress.dead,
            rows_per_second=None if last is None else last.rows_per_second,
            batch_seconds=None if last is None else last.seconds,
            lag={f"{at.topic}@{at.broker}:{at.id}": lag for at, lag in progress.lag.items()},
            retried=progress.retried,
            dead=progress.dead,
            failed_share=progress.failed_share,
            error=progress.last_error,
        )

    def _state(self) -> str:
        return self._group.progress().state.value

    def stop(self) -> None:
        self._group.stop()


def started(outcome: object, run: Run) -> tuple[list[Target], DataFrame | None]:
    """What runs, and what is to be shown; writers of streams are started. Raises
    `PipelineRefused` for what is neither.
    """
    from pyspark.sql import DataFrame as Classic  # noqa: PLC0415  # only where Spark is

    if isinstance(outcome, Classic) or type(outcome).__name__ == "DataFrame":
        frame: DataFrame = outcome  # type: ignore[assignment]  # of a Connect session
        if frame.isStreaming:
            raise PipelineRefused(
                "the pipeline gave back a stream that goes nowhere; give back its writer, as in "
                "`return frame.writeStream.format(...)`"
            )
        return [], frame
    targets: list[Target] = []
    try:
        for name, each in _named(outcome, run.name):
            targets.append(_target(each, name, run))
    except BaseException:
        for target in targets:
            target.stop()
        raise
    return targets, None


def _named(outcome: object, name: str) -> Iterable[tuple[str, object]]:
    if outcome is None:
        return []
    if isinstance(outcome, Mapping):
        return [(str(key), each) for key, each in outcome.items()]
    if isinstance(outcome, list | tuple):
        if len(outcome) == 1:
            return [(name, outcome[0])]
        return [(f"{name}-{number}", each) for number, each in enumerate(outcome, 1)]
    return [(name, outcome)]


def _target(thing: object, name: str, run: Run) -> Target:
    kinds = {each.__name__ for each in type(thing).__mro__}
    if "DataStreamWriter" in kinds:
        return StreamTarget(run.start(thing, name), run)  # type: ignore[arg-type]  # either kind
    if "StreamingQuery" in kinds:
        return StreamTarget(thing, run)  # type: ignore[arg-type]  # of either kind of session
    if "ConsumePipeline" in kinds:
        group: ConsumePipeline = thing  # type: ignore[assignment]  # just looked
        if run.console is not None:
            group.report_to(run.console)
        if group.progress().state.value == "new":
            group.start()
        return GroupTarget(group, run)
    raise PipelineRefused(
        f"a pipeline gives back writers of streams, queries, consumer groups, a list or a dict of "
        f"these, a DataFrame to be shown, or nothing; it gave {thing!r}"
    )
