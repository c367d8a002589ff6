"""Progress and health of streaming queries and consumer groups, for consoles and for runs.

    report_queries(spark, "http://localhost:8090")

Spark reports the progress of a query to the process that started it; from there it goes to the
console: batch, rows per second, lag, errors. Works in classic and Connect sessions.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from orbitmq.clock import Clock, SystemClock
from orbitmq.names import is_retry_topic
from orbitmq.spark.consolelink import CONSOLE_VARIABLE, TOKEN_VARIABLE, ConsoleLink, QueryReport
from orbitmq.spark.consuming.progress import PipelineProgress, PipelineState
from orbitmq.spark.options import SourceError, cause_of, from_json, is_starting

try:
    from pyspark.sql.streaming.listener import StreamingQueryListener
except ModuleNotFoundError:
    # The console and the command read reports where Spark is not installed.
    StreamingQueryListener = object  # type: ignore[assignment, misc]

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        SourceProgress,
    )

    from orbitmq.client.routes import Queue
    from orbitmq.spark.consuming.returns import Settled


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
    spark.streams.addListener(reports.listener)
    return reports


def console_link(console: str | None, token: str | None = None) -> ConsoleLink:
    """A link to the given console, or to that of the environment."""
    address = console or os.environ.get(CONSOLE_VARIABLE)
    if not address:
        raise SourceError(f"no console is named; give its address, or set {CONSOLE_VARIABLE}")
    return ConsoleLink(address, token=token or os.environ.get(TOKEN_VARIABLE) or None)


class QueryReports:
    """The last report of each query of a session."""

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
        # Guards the following: Spark's events come on one thread, the link reads on another.
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        #: The runs whose end was not reported yet.
        self._runs: set[str] = set()
        self._names: dict[str, str] = {}
        self._reports: dict[str, QueryReport] = {}
        self._health: dict[str, StreamHealth] = {}
        self.listener = _Listener(self)

    def stop(self) -> None:
        """End the reports. May be repeated."""
        self._await_ends()
        self._spark.streams.removeListener(self.listener)
        self.link.stop()

    def _await_ends(self) -> None:
        """Wait for the reports of ended queries, which Spark sends asynchronously."""
        with self._lock:
            known = set(self._runs)
        if not known:
            return
        over = known - {str(each.runId) for each in self._spark.streams.active}
        with self._ended:
            self._ended.wait_for(lambda: not over & self._runs, _END_REPORT)

    # ---- Spark's events

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
                health.batch_ended(now, rows)
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
        """Counts of rows, where those that are sent back are counted."""
        with self._lock:
            health = self._health.get(name)
            if health is None:
                return {}
            sent_back = health.sent_back
            counts = {
                "done": health.done,
                "retried": sent_back.retried,
                "dead": sent_back.dead,
                "failed_share": health.share(now),
            }
            return counts | ({"state": "failing"} if health.is_failing(now) else {})

    # ---- reports

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
    """Passes Spark's events on."""

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
    """The address of Spark's own page of the session, if there is one."""
    context = getattr(spark, "sparkContext", None)
    url: str | None = getattr(context, "uiWebUrl", None)
    return url


def _finite(number: float | None) -> float | None:
    """A rate; Spark's is not a number for a batch that took no time."""
    if number is None or number != number or number in (float("inf"), float("-inf")):
        return None
    return number


# Rows that streams send back. Spark reports how many rows a batch had when it ends, and what is
# sent back is known before that, so a stream's counts are compared when a report comes.


@dataclass(frozen=True, slots=True)
class SentBack:
    """Rows that a stream sent back."""

    retried: int = 0  #: to be delivered again
    dead: int = 0  #: given up
    held: int = 0  #: not handled: to be delivered again without an attempt being spent

    @property
    def rows(self) -> int:
        return self.retried + self.dead + self.held

    def plus(self, other: SentBack | Settled) -> SentBack:
        return SentBack(
            self.retried + other.retried, self.dead + other.dead, self.held + other.held
        )

    def since(self, earlier: SentBack) -> SentBack:
        return SentBack(
            self.retried - earlier.retried, self.dead - earlier.dead, self.held - earlier.held
        )


def stream_of(frame: DataFrame) -> str | None:
    """The id of the stream whose batch the calling thread handles; None outside of one.

    A stream keeps its id when it is started again.
    """
    # A Connect session has no context; its batches run in another process.
    context = getattr(frame.sparkSession, "sparkContext", None)
    return None if context is None else context.getLocalProperty("sql.streaming.queryId")


class SentBackCounts:
    """What the streams of a run sent back. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = SentBack()
        self._by_stream: dict[str, SentBack] = {}

    def add(self, stream: str | None, settled: Settled) -> None:
        """Count rows, of a stream or only in the total."""
        with self._lock:
            self._total = self._total.plus(settled)
            if stream is not None:
                self._by_stream[stream] = self._by_stream.get(stream, SentBack()).plus(settled)

    def total(self) -> SentBack:
        with self._lock:
            return self._total

    def of(self, stream: str) -> SentBack:
        with self._lock:
            return self._by_stream.get(stream, SentBack())


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
    def sent_back(self) -> SentBack:
        """Rows sent back, those of the running batch included."""
        return self._counts.of(self._stream).since(self._before)

    def share(self, now: float) -> float | None:
        return self._rate.share(now)

    def is_failing(self, now: float) -> bool:
        return self._rate.is_failing(now)


def lag_of(sources: Iterable[SourceProgress]) -> dict[Queue, int]:
    """Messages that waited in each queue when a batch was planned, of `rocketmq` sources."""
    lag: dict[Queue, int] = {}
    for source in sources:
        reached, latest = _positions(source.endOffset), _positions(source.latestOffset)
        for queue, at in reached.items():
            lag[queue] = max(0, latest.get(queue, at) - at)
    return lag


def _positions(text: str | None) -> Mapping[Queue, int]:
    """The positions of an offset; empty for one of another source."""
    try:
        offset = json.loads(text or "null")
        if not isinstance(offset, dict) or is_starting(offset):
            return {}
        return from_json(offset)
    except (ValueError, SourceError):
        return {}


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
