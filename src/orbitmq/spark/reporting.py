"""Progress of streaming queries for the console.

    report_queries(spark, "http://localhost:8090")

Spark tells the process that started a query how it goes; from there it goes to the console: batch,
rows per second, the lag of every queue, and why a query failed. It works for every query of the
session that has started since, in classic and Connect sessions.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql.streaming.listener import StreamingQueryListener

from orbitmq.clock import Clock, SystemClock
from orbitmq.spark.consolelink import (
    CONSOLE_VARIABLE,
    TOKEN_VARIABLE,
    ConsoleLink,
    QueryReport,
)
from orbitmq.spark.errors import SourceError, cause_of
from orbitmq.spark.lags import lag_of
from orbitmq.spark.streamreturns import ReturnCounts, StreamHealth

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

log = logging.getLogger(__name__)
#: Seconds within which Spark tells that a query has ended.
_LAST_WORDS: Final = 5.0


def report_queries(
    spark: SparkSession,
    console: str | None = None,
    *,
    token: str | None = None,
    groups: Mapping[str, str] | None = None,
    returned: ReturnCounts | None = None,
) -> QueryReports:
    """Report every streaming query that starts from now on, until `stop` of what is returned.

    Without `console` and `token` they are taken from ORBITMQ_CONSOLE and ORBITMQ_CONSOLE_TOKEN.
    Queries are named by their `queryName`; `groups` says which group each of them reports to, so
    that the console can show them together. `returned` counts the rows that went back, for those
    that give rows back: `Run.returned`.
    """
    reports = QueryReports(spark, console_link(console, token), groups or {}, returned)
    spark.streams.addListener(reports.listener)
    return reports


def console_link(console: str | None, token: str | None = None) -> ConsoleLink:
    """A link to the console that is given, or to the one that the environment names."""
    address = console or os.environ.get(CONSOLE_VARIABLE)
    if not address:
        raise SourceError(f"no console is named; give its address, or set {CONSOLE_VARIABLE}")
    return ConsoleLink(address, token=token or os.environ.get(TOKEN_VARIABLE) or None)


class QueryReports:
    """The queries of a session, and what was last heard of them."""

    def __init__(
        self,
        spark: SparkSession,
        link: ConsoleLink,
        groups: Mapping[str, str],
        returned: ReturnCounts | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._spark = spark
        self.link = link
        self._returned = returned
        self._clock = clock or SystemClock()
        self._groups = groups
        self._url = _page_of(spark)
        # Guards what follows: Spark's events come on one thread, the link looks on another.
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        #: The runs of queries of whose end nothing was heard.
        self._runs: set[str] = set()
        self._names: dict[str, str] = {}
        self._reports: dict[str, QueryReport] = {}
        self._health: dict[str, StreamHealth] = {}
        self.listener = _Listener(self)

    def stop(self) -> None:
        """Report no more. May be repeated."""
        self._hear_last_words()
        self._spark.streams.removeListener(self.listener)
        self.link.stop()

    def _hear_last_words(self) -> None:
        """Wait for word of queries that are over: Spark sends it, and does not wait for us."""
        with self._lock:
            heard_of = set(self._runs)
        if not heard_of:
            return
        over = heard_of - {str(each.runId) for each in self._spark.streams.active}
        with self._ended:
            self._ended.wait_for(lambda: not over & self._runs, _LAST_WORDS)

    # ---- what Spark tells

    def started(self, event: QueryStartedEvent) -> None:
        name = event.name or f"query {event.id}"
        with self._lock:
            self._names[str(event.id)] = name
            self._runs.add(str(event.runId))
            if self._returned is not None:
                self._health[name] = StreamHealth(self._returned, str(event.id))
        self._say(name, self._begun(name))
        self.link.watch(name, lambda: self._look(name))

    def progressed(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        name = self._name_of(progress.id)
        if name is None:
            return
        found = lag_of(progress.sources)
        topics = tuple(sorted({queue.topic for queue in found}))
        lag = {str(queue): waiting for queue, waiting in found.items()}
        now, rows = self._clock.monotonic(), max(0, progress.numInputRows or 0)
        with self._lock:
            before = self._reports[name]
            health = self._health.get(name)
            if health is not None and rows:
                health.batch_ended(now, progress.batchId, rows)
        seconds = progress.durationMs.get("triggerExecution")
        self._say(
            name,
            msgspec.structs.replace(
                before,
                batch=progress.batchId,
                rows=progress.numInputRows,
                rows_per_second=_finite(progress.processedRowsPerSecond),
                input_rows_per_second=_finite(progress.inputRowsPerSecond),
                batch_seconds=None if seconds is None else seconds / 1000,
                topics=topics or before.topics,
                lag=lag,
                **{
                    "state": "running" if any(lag.values()) else "waiting",
                    **self._handled(name, now),
                },
            ),
        )

    def idle(self, event: QueryIdleEvent) -> None:
        name = self._name_of(event.id)
        if name is not None:
            with self._lock:
                before = self._reports[name]
            counts = self._handled(name, self._clock.monotonic())
            self._say(name, msgspec.structs.replace(before, **{"state": "waiting", **counts}))

    def terminated(self, event: QueryTerminatedEvent) -> None:
        name = self._name_of(event.id)
        if name is None:
            return
        with self._lock:
            before = self._reports[name]
        error = None if event.exception is None else cause_of(event.exception)
        state = "stopped" if error is None else "failed"
        self._say(name, msgspec.structs.replace(before, state=state, error=error))
        with self._ended:
            self._runs.discard(str(event.runId))
            self._ended.notify_all()

    def _handled(self, name: str, now: float) -> dict[str, Any]:
        """What became of rows, where somebody counts those that went back."""
        with self._lock:
            health = self._health.get(name)
            if health is None:
                return {}
            returned = health.returned
            counts = {
                "done": health.done,
                "retried": returned.retried,
                "dead": returned.dead,
                "failed_share": health.share(now),
            }
            return counts | ({"state": "failing"} if health.is_failing(now) else {})

    # ---- what is told

    def _begun(self, name: str) -> QueryReport:
        return QueryReport(state="running", group=self._groups.get(name), url=self._url)

    def _say(self, name: str, report: QueryReport) -> None:
        with self._lock:
            self._reports[name] = report
        self.link.news()

    def _look(self, name: str) -> QueryReport:
        with self._lock:
            return self._reports[name]

    def _name_of(self, query: object) -> str | None:
        with self._lock:
            return self._names.get(str(query))


class _Listener(StreamingQueryListener):
    """Passes Spark's events on. Whatever goes wrong here must not be seen by a query."""

    def __init__(self, reports: QueryReports) -> None:
        self._reports = reports

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802  # Spark's names
        self._reports.started(event)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        self._reports.progressed(event)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        self._reports.idle(event)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        self._reports.terminated(event)


def _page_of(spark: SparkSession) -> str | None:
    """Where Spark shows the session itself; None where that is not known here, or not shown."""
    context = getattr(spark, "sparkContext", None)
    url: str | None = getattr(context, "uiWebUrl", None)
    return url


def _finite(number: float | None) -> float | None:
    """A rate; Spark's is not a number for a batch that took no time."""
    if number is None or number != number or number in (float("inf"), float("-inf")):
        return None
    return number
