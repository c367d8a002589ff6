"""Spark queries and their progress, as their drivers report it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from orbitmq.clock import Clock
from orbitmq.console.settings import BadInput, NotThere
from orbitmq.spark.consolelink import QueryReport

#: Seconds without a report after which a running pipeline counts as lost.
LOST_AFTER = 60.0
MOST_PIPELINES = 500
_LONGEST_NAME = 120
_LONGEST_ERROR = 2000


class PipelineState(enum.StrEnum):
    """The state of a query."""

    RUNNING = "running"
    WAITING = "waiting"
    #: It runs, and its messages fail and come again.
    FAILING = "failing"
    FAILED = "failed"
    STOPPED = "stopped"
    #: Not reported: it stopped reporting.
    LOST = "lost"


#: The states of a query whose driver runs.
UP = frozenset({PipelineState.RUNNING, PipelineState.WAITING, PipelineState.FAILING})


class PipelineReport(QueryReport, frozen=True, kw_only=True):
    """A driver's report on a query; only the state is required."""

    state: PipelineState
    #: How long a batch may take before the next one is late.
    trigger_seconds: float | None = None
    #: Topics that it writes.
    output: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A query, and its last report."""

    name: str
    report: PipelineReport
    reported_at: float

    def state_at(self, now: float) -> PipelineState:
        is_up = self.report.state in UP
        is_lost = is_up and now - self.reported_at > LOST_AFTER
        return PipelineState.LOST if is_lost else self.report.state

    def is_up_at(self, now: float) -> bool:
        """Whether its driver runs, so that its rates are those of now."""
        return self.state_at(now) in UP

    @property
    def total_lag(self) -> int:
        return sum(self.report.lag.values())


class Pipelines:
    """All queries that have reported."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all: dict[str, Pipeline] = {}
        #: Counts the changes.
        self.turn = 0

    def report(self, name: str, body: bytes) -> Pipeline:
        """Take a report. Raises `BadInput`."""
        if not name or len(name) > _LONGEST_NAME or not name.isprintable():
            raise BadInput(f"a pipeline's name has 1 to {_LONGEST_NAME} printable characters")
        try:
            report = msgspec.json.decode(body, type=PipelineReport)
        except msgspec.MsgspecError as error:
            raise BadInput(f"not the report of a pipeline: {error}") from error
        if report.state is PipelineState.LOST:
            raise BadInput("a pipeline cannot report that it is lost")
        if report.url is not None and not report.url.startswith(("http://", "https://")):
            raise BadInput("the url of a pipeline must begin with http:// or https://")
        if report.error is not None:
            report = msgspec.structs.replace(report, error=report.error[:_LONGEST_ERROR])
        if name in self._all and report.state not in UP:
            report = _with_places(report, self._all[name].report)
        if name not in self._all and len(self._all) >= MOST_PIPELINES:
            self._forget_one()
        self.turn += 1
        pipeline = self._all[name] = Pipeline(name, report, self._clock.now())
        return pipeline

    def get(self, name: str) -> Pipeline:
        """Raises `NotThere`."""
        if name not in self._all:
            raise NotThere(f"no pipeline {name!r} has reported")
        return self._all[name]

    def forget(self, name: str) -> None:
        """Raises `NotThere`."""
        self.get(name)
        self.turn += 1
        del self._all[name]

    @property
    def all(self) -> list[Pipeline]:
        return sorted(self._all.values(), key=lambda each: each.name)

    def by_group(self) -> dict[str, list[str]]:
        """The names of the queries that consume as a group."""
        found: dict[str, list[str]] = {}
        for each in self.all:
            if each.report.group:
                found.setdefault(each.report.group, []).append(each.name)
        return found

    def _forget_one(self) -> None:
        oldest = min(self._all.values(), key=lambda each: each.reported_at)
        del self._all[oldest.name]


def _with_places(report: PipelineReport, before: PipelineReport) -> PipelineReport:
    """The last report of a query that ended, with what it read and wrote until then."""
    return msgspec.structs.replace(
        report,
        group=report.group or before.group,
        topics=report.topics or before.topics,
        output=report.output or before.output,
        lag=report.lag or before.lag,
    )
