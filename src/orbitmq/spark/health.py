"""Progress and health of streaming queries and consumer groups, for consoles and for runs.

    report_queries(spark, "http://localhost:8090")

Spark reports the progress of a query to the process that started it; from there it goes to the
console: batch, rows per second, lag, errors. Works in classic and Connect sessions.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from orbitmq.clock import Clock, SystemClock
from orbitmq.names import is_retry_topic
from orbitmq.spark.consolelink import CONSOLE_VARIABLE, TOKEN_VARIABLE, ConsoleLink, QueryReport
from orbitmq.spark.consuming.progress import PipelineProgress, PipelineState, Settled
from orbitmq.spark.options import SourceError, cause_of
from orbitmq.spark.streamprogress import progress_of

try:
    from pyspark.sql.streaming.listener import StreamingQueryListener
except ModuleNotFoundError:
    # The console and the command read reports where Spark is not installed.
    StreamingQueryListener = object  # type: ignore[assignment, misc]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )


log = logging.getLogger(__name__)
#: Seconds within which Spark reports the end of a query.
_END_REPORT: Final = 5.0


def report_queries(
    spark: SparkSession,
    console: str | None = None,
    *,
    token: str | None = None,
    groups: Mapping[str, str] | None = None,
    returned: SentBackCounts | None = None,
) -> QueryReports:
    """Report every streaming query that starts from now on, until `stop` of the result.

    `console` and `token` default to ORBITMQ_CONSOLE and ORBITMQ_CONSOLE_TOKEN. Queries are named by
    their `queryName`; `groups` has the group that each of them commits for. `returned` counts the
    rows that queries send back: `Run.returned`.
    """
    reports = QueryReports(spark, console_link(console, token), groups or {}, returned)
    spark.streams.addListener(reports)
    return reports


def console_link(console: str | None, token: str | None = None) -> ConsoleLink:
    """A link to the given console, or to that of the environment."""
    address = console or os.environ.get(CONSOLE_VARIABLE)
    if not address:
        raise SourceError(f"no console is named; give its address, or set {CONSOLE_VARIABLE}")
    return ConsoleLink(address, token=token or os.environ.get(TOKEN_VARIABLE) or None)


@dataclass(slots=True)
class _Query:
    """A query of a session: its last report, and its counts if rows are sent back."""

    report: QueryReport
    health: StreamHealth | None

    def counts(self, now: float) -> dict[str, Any]:
        """Counts of rows, where those that are sent back are counted."""
        if (health := self.health) is None:
            return {}
        sent_back = health.sent_back
        counts = {
            "done": health.done,
            "retried": sent_back.retried,
            "dead": sent_back.dead,
            "failed_share": health.share(now),
        }
        return counts | ({"state": "failing"} if health.is_failing(now) else {})


class QueryReports(StreamingQueryListener):
    """The last report of each query of a session.

    A query's report is replaced as a whole, and read by the link on a thread of its own.
    """

    def __init__(
        self,
        spark: SparkSession,
        link: ConsoleLink,
        groups: Mapping[str, str],
        returned: SentBackCounts | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._spark = spark
        self.link = link
        self._returned = returned
        self._clock = clock or SystemClock()
        self._groups = groups
        self._url = _page_of(spark)
        self._queries: dict[str, _Query] = {}
        #: The runs whose end was not reported yet.
        self._runs: set[str] = set()
        self._ended = threading.Condition()

    def stop(self) -> None:
        """End the reports. May be repeated."""
        self._await_ends()
        self._spark.streams.removeListener(self)
        self.link.stop()

    def _await_ends(self) -> None:
        """Wait for the reports of ended queries, which Spark sends asynchronously."""
        with self._ended:
            known = set(self._runs)
        if not known:
            return
        over = known - {str(each.runId) for each in self._spark.streams.active}
        with self._ended:
            self._ended.wait_for(lambda: not over & self._runs, _END_REPORT)

    # ---- Spark's events

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802  # Spark's names
        name, stream = event.name or f"query {event.id}", str(event.id)
        query = _Query(
            QueryReport(state="running", group=self._groups.get(name), url=self._url),
            None if self._returned is None else StreamHealth(self._returned, stream),
        )
        self._queries[stream] = query
        with self._ended:
            self._runs.add(str(event.runId))
        self.link.watch(name, lambda: query.report)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        progress = event.progress
        if (query := self._queries.get(str(progress.id))) is None:
            return
        found = progress_of(progress)
        topics = tuple(each.topic for each in found.topics)
        now, rows = self._clock.monotonic(), found.num_input_rows
        is_behind = any(found.queues.values())
        if query.health is not None and rows:
            query.health.batch_ended(now, rows)
        seconds = progress.durationMs.get("triggerExecution")
        self._report(
            query,
            batch=progress.batchId,
            rows=rows,
            rows_per_second=found.processed_rows_per_second,
            input_rows_per_second=found.input_rows_per_second,
            batch_seconds=None if seconds is None else seconds / 1000,
            topics=topics or query.report.topics,
            by_topic=found.topics or query.report.by_topic,
            lag=found.queues,
            **{
                "state": "running" if is_behind else "waiting",
                **query.counts(now),
            },
        )

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        if (query := self._queries.get(str(event.id))) is not None:
            self._report(query, **{"state": "waiting", **query.counts(self._clock.monotonic())})

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        if (query := self._queries.get(str(event.id))) is None:
            return
        error = None if event.exception is None else cause_of(event.exception)
        self._report(query, state="stopped" if error is None else "failed", error=error)
        with self._ended:
            self._runs.discard(str(event.runId))
            self._ended.notify_all()

    def _report(self, query: _Query, **changes: Any) -> None:
        query.report = msgspec.structs.replace(query.report, **changes)
        self.link.news()


def _page_of(spark: SparkSession) -> str | None:
    """The address of Spark's own page of the session, if there is one."""
    context = getattr(spark, "sparkContext", None)
    url: str | None = getattr(context, "uiWebUrl", None)
    return url


# Rows that streams send back. Spark reports how many rows a batch had when it ends, and what is
# sent back is known before that, so a stream's counts are compared when a report comes.


class SentBackCounts:
    """What the streams of a run sent back. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = Settled()
        self._by_stream: dict[str, Settled] = {}

    def add(self, stream: str | None, settled: Settled) -> None:
        """Count rows, of a stream or only in the total."""
        with self._lock:
            self._total = self._total.plus(settled)
            if stream is not None:
                self._by_stream[stream] = self._by_stream.get(stream, Settled()).plus(settled)

    def total(self) -> Settled:
        with self._lock:
            return self._total

    def of(self, stream: str) -> Settled:
        with self._lock:
            return self._by_stream.get(stream, Settled())


class StreamHealth:
    """How many rows of a stream were done, retried and given up since its start."""

    def __init__(self, counts: SentBackCounts, stream: str) -> None:
        """To be made when the stream is started."""
        self._counts = counts
        self._stream = stream
        self._before = self._seen = counts.of(stream)
        self._rate = FailureRate()
        self._rows = 0
        self.done = 0  #: rows of batches that have ended, without those that were sent back

    def batch_ended(self, now: float, rows: int) -> None:
        """Take a report of one or several batches that had rows."""
        seen = self._counts.of(self._stream)
        new, self._seen = seen.since(self._seen), seen
        self._rows += rows
        # The next batch may have sent rows back already: they are taken off when it ends.
        done = max(self.done, self._rows - self.sent_back.rows)
        self._rate.add(now, done - self.done, new.retried + new.dead)
        self.done = done

    @property
    def sent_back(self) -> Settled:
        """Rows sent back, those of the running batch included."""
        return self._counts.of(self._stream).since(self._before)

    def share(self, now: float) -> float | None:
        return self._rate.share(now)

    def is_failing(self, now: float) -> bool:
        return self._rate.is_failing(now)


# Whether a pipeline is failing: it looks busy, and what it handles comes back.

#: Seconds that are looked back.
WINDOW: Final = 300.0
#: A pipeline is failing from this share of failed attempts on, if there are at least `FEWEST`.
#: With the usual delays, a single message fails five times in a window.
SHARE: Final = 0.5
FEWEST: Final = 10


class FailureRate:
    """Attempts that succeeded and failed within the window. For one thread at a time."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int]] = deque()
        self._done = 0
        self._failed = 0

    def add(self, now: float, done: int, failed: int) -> None:
        """Count attempts since the last call."""
        if done or failed:
            self._points.append((now, done, failed))
            self._done += done
            self._failed += failed
        self._forget(now)

    def share(self, now: float) -> float | None:
        """The share of attempts that failed; None without any."""
        self._forget(now)
        attempts = self._done + self._failed
        return self._failed / attempts if attempts else None

    def is_failing(self, now: float) -> bool:
        share = self.share(now)
        return share is not None and share >= SHARE and self._failed >= FEWEST

    def _forget(self, now: float) -> None:
        while self._points and self._points[0][0] <= now - WINDOW:
            _, done, failed = self._points.popleft()
            self._done -= done
            self._failed -= failed


_STATES: Final = {
    PipelineState.NEW: "running",
    PipelineState.STOPPING: "running",
    PipelineState.STOPPED: "stopped",
    PipelineState.FAILED: "failed",
}


def link_to(console: str | None) -> ConsoleLink | None:
    """A link to the given console, or to that of the environment; None without any."""
    if not console and not os.environ.get(CONSOLE_VARIABLE):
        return None

    return console_link(console)


def reported(progress: PipelineProgress) -> QueryReport:
    """The progress of a consumer group as a report for the console."""

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
