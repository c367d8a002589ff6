"""Progress of streaming queries for the console.

    report_queries(spark, "http://localhost:8090")

Spark tells the process that started a query how it goes; from there it goes to the console: batch,
rows per second, the lag of every queue, and why a query failed. It works for every query of the
session that has started since, in classic and Connect sessions.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql.streaming.listener import StreamingQueryListener

from orbitmq.spark.consolelink import ConsoleLink, QueryReport
from orbitmq.spark.errors import SourceError
from orbitmq.spark.offsets import from_json, is_starting

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

log = logging.getLogger(__name__)

CONSOLE_VARIABLE: Final = "ORBITMQ_CONSOLE"
TOKEN_VARIABLE: Final = "ORBITMQ_CONSOLE_TOKEN"  # noqa: S105  # its name
#: Of what Spark says about a failed query: the rest is stacks of the JVM.
_SHOWN: Final = 1000


def report_queries(
    spark: SparkSession,
    console: str | None = None,
    *,
    token: str | None = None,
    groups: Mapping[str, str] | None = None,
) -> QueryReports:
    """Report every streaming query that starts from now on, until `stop` of what is returned.

    Without `console` and `token` they are taken from ORBITMQ_CONSOLE and ORBITMQ_CONSOLE_TOKEN.
    Queries are named by their `queryName`; `groups` says which group each of them reports to, so
    that the console can show them together.
    """
    reports = QueryReports(spark, console_link(console, token), groups or {})
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

    def __init__(self, spark: SparkSession, link: ConsoleLink, groups: Mapping[str, str]) -> None:
        self._spark = spark
        self._link = link
        self._groups = groups
        self._url = _page_of(spark)
        # Guards what follows: Spark's events come on one thread, the link looks on another.
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._reports: dict[str, QueryReport] = {}
        self.listener = _Listener(self)

    def stop(self) -> None:
        """Report no more. May be repeated."""
        self._spark.streams.removeListener(self.listener)
        self._link.stop()

    # ---- what Spark tells

    def started(self, event: QueryStartedEvent) -> None:
        name = event.name or f"query {event.id}"
        with self._lock:
            self._names[str(event.id)] = name
        self._say(name, self._begun(name))
        self._link.watch(name, lambda: self._look(name))

    def progressed(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        name = self._name_of(progress.id)
        if name is None:
            return
        topics, lag = _lag_of(progress.sources)
        with self._lock:
            before = self._reports[name]
        seconds = progress.durationMs.get("triggerExecution")
        self._say(
            name,
            msgspec.structs.replace(
                before,
                state="running" if any(lag.values()) else "waiting",
                batch=progress.batchId,
                rows=progress.numInputRows,
                rows_per_second=_finite(progress.processedRowsPerSecond),
                input_rows_per_second=_finite(progress.inputRowsPerSecond),
                batch_seconds=None if seconds is None else seconds / 1000,
                topics=topics or before.topics,
                lag=lag,
            ),
        )

    def idle(self, event: QueryIdleEvent) -> None:
        name = self._name_of(event.id)
        if name is not None:
            with self._lock:
                before = self._reports[name]
            self._say(name, msgspec.structs.replace(before, state="waiting"))

    def terminated(self, event: QueryTerminatedEvent) -> None:
        name = self._name_of(event.id)
        if name is None:
            return
        with self._lock:
            before = self._reports[name]
        error = None if event.exception is None else event.exception[:_SHOWN]
        state = "stopped" if error is None else "failed"
        self._say(name, msgspec.structs.replace(before, state=state, error=error))

    # ---- what is told

    def _begun(self, name: str) -> QueryReport:
        return QueryReport(state="running", group=self._groups.get(name), url=self._url)

    def _say(self, name: str, report: QueryReport) -> None:
        with self._lock:
            self._reports[name] = report
        self._link.news()

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


def _lag_of(sources: list[Any]) -> tuple[tuple[str, ...], dict[str, int]]:
    """The topics of our sources, and how many messages wait in each of their queues."""
    topics: set[str] = set()
    lag: dict[str, int] = {}
    for source in sources:
        reached, latest = _positions(source.endOffset), _positions(source.latestOffset)
        topics.update(queue.topic for queue in reached)
        for queue, at in reached.items():
            lag[str(queue)] = max(0, latest.get(queue, at) - at)
    return tuple(sorted(topics)), lag


def _positions(text: str | None) -> Mapping[Any, int]:
    """The positions in an offset of ours; empty for one of another source."""
    try:
        offset = json.loads(text or "null")
        if not isinstance(offset, dict) or is_starting(offset):
            return {}
        return from_json(offset)
    except (ValueError, SourceError):
        return {}


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
