"""The progress of streams by topic: rows, bytes, rates and lag, from Spark's own reports.

    print(progress(query))                                  # as query.lastProgress
    spark.streams.addListener(ProgressListener(print))      # every report of the session

Spark reports a query's sources with the offsets of a batch and the latest ones, also to Connect
clients, so nothing is asked of brokers. What it does not count, `measured` adds to a stream.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from orbitmq.client.routes import Queue
from orbitmq.errors import SettingError
from orbitmq.spark.consolelink import TopicProgress
from orbitmq.spark.options import SourceError, from_json, is_starting

try:
    from pyspark.sql.streaming.listener import StreamingQueryListener
except ModuleNotFoundError:
    # The console and the command read reports where Spark is not installed.
    StreamingQueryListener = object  # type: ignore[assignment, misc]

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        SourceProgress,
        StreamingQueryProgress,
    )
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)


class StreamProgress(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A report of Spark about a stream, with the topics of its `rocketmq` sources."""

    id: str
    run_id: str
    name: str | None
    timestamp: str
    batch_id: int
    batch_duration: int  #: in ms
    num_input_rows: int  #: of all sources
    input_rows_per_second: float | None
    processed_rows_per_second: float | None
    topics: tuple[TopicProgress, ...]
    #: Messages that waited, by `topic@broker:queue`; empty if Spark does not know (4.0 and 4.1).
    queues: Mapping[str, int]

    @property
    def json(self) -> str:
        """As JSON, with names like those of Spark's reports."""
        return msgspec.json.encode(self).decode()


def progress(query: StreamingQuery) -> StreamProgress | None:
    """The last report about a stream, by topic; None before the first one."""
    last = query.lastProgress
    return None if last is None else progress_of(last)


def progress_of(report: StreamingQueryProgress) -> StreamProgress:
    """A report of Spark, by topic."""
    topics: dict[str, TopicProgress] = {}
    queues: dict[Queue, int] = {}
    seconds = (report.batchDuration or 0) / 1000
    for source in report.sources:
        waiting = lag_of([source])
        queues |= waiting
        for topic, counts in _counts(source, report).items():
            lag = [each for queue, each in waiting.items() if queue.topic == topic]
            topics[topic] = _topic(topic, counts, sum(lag) if lag else None, source, seconds)
    return StreamProgress(
        id=str(report.id),
        run_id=str(report.runId),
        name=report.name,
        timestamp=report.timestamp,
        batch_id=report.batchId,
        batch_duration=report.batchDuration or 0,
        num_input_rows=max(0, report.numInputRows or 0),
        input_rows_per_second=finite(report.inputRowsPerSecond),
        processed_rows_per_second=finite(report.processedRowsPerSecond),
        topics=tuple(topics[topic] for topic in sorted(topics)),
        queues={str(queue): waiting for queue, waiting in queues.items()},
    )


class _Counts(msgspec.Struct, frozen=True):
    """What is known about the rows of a topic in a batch."""

    rows: int | None
    bytes: int | None = None
    age: float | None = None  #: of the last message, in seconds


def _counts(source: SourceProgress, report: StreamingQueryProgress) -> dict[str, _Counts]:
    """Counts by topic; empty for a source of another format."""
    starts, ends = _positions(source.startOffset), _positions(source.endOffset)
    passed: dict[str, int] = {}
    for queue, end in ends.items():
        passed[queue.topic] = passed.get(queue.topic, 0) + end - starts.get(queue, end)
    rows = max(0, source.numInputRows or 0)
    if len(passed) == 1:
        found = {topic: _Counts(rows) for topic in passed}
    elif sum(passed.values()) == rows:
        found = {topic: _Counts(number) for topic, number in passed.items()}
    else:
        # Filtered at the broker, or read more than once: only measuring tells the topics apart.
        found = {topic: _Counts(None if rows else 0) for topic in passed}
    return {topic: _measured(topic, counts, report) for topic, counts in found.items()}


def _topic(
    topic: str, counts: _Counts, lag: int | None, source: SourceProgress, seconds: float
) -> TopicProgress:
    rows, of_source = counts.rows, max(0, source.numInputRows or 0)
    share = None if rows is None or not of_source else rows / of_source
    incoming = finite(source.inputRowsPerSecond)
    return TopicProgress(
        topic=topic,
        num_input_rows=rows,
        num_input_bytes=0 if rows == 0 else counts.bytes,
        input_rows_per_second=None if share is None or incoming is None else share * incoming,
        processed_rows_per_second=None if share is None or not seconds else (rows or 0) / seconds,
        lag=lag,
        lag_seconds=0.0 if lag == 0 else counts.age,
    )


def lag_of(sources: Iterable[SourceProgress]) -> dict[Queue, int]:
    """Messages that waited in each queue when a batch was planned, of `rocketmq` sources."""
    lag: dict[Queue, int] = {}
    for source in sources:
        reached, latest = _positions(source.endOffset), _positions(source.latestOffset)
        for queue, at in reached.items():
            if latest:
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


def finite(number: float | None) -> float | None:
    """A rate; Spark's is not a number for a batch that took no time."""
    if number is None or number != number or number in (float("inf"), float("-inf")):
        return None
    return number


# What Spark does not count: bytes and times by topic, as observed metrics.

_OBSERVED: Final = "orbitmq"
_ROWS, _BYTES, _NEWEST = "rows", "bytes", "newest"


def measured(frame: DataFrame, topics: str | Sequence[str]) -> DataFrame:
    """The same stream, whose progress has rows, bytes and age of these topics.

    To be called on the stream as it was loaded, once in a query. Raises `SettingError`.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # the usual name

    names = [topics] if isinstance(topics, str) else list(topics)
    if not names or "topic" not in frame.columns:
        raise SettingError("measured needs the names of topics, and a stream with the column topic")
    is_text = dict(frame.dtypes).get("body") in ("binary", "string")
    metrics = []
    for name in names:
        of_topic = F.col("topic") == F.lit(name)
        metrics.append(F.count_if(of_topic).alias(f"{name} {_ROWS}"))
        if is_text:
            size = F.sum(F.when(of_topic, F.octet_length("body")))
            metrics.append(size.alias(f"{name} {_BYTES}"))
        if "storeTimestamp" in frame.columns:
            newest = F.max(F.when(of_topic, F.unix_millis("storeTimestamp")))
            metrics.append(newest.alias(f"{name} {_NEWEST}"))
    return frame.observe(_OBSERVED, *metrics)


def _measured(topic: str, counts: _Counts, report: StreamingQueryProgress) -> _Counts:
    observed = report.observedMetrics.get(_OBSERVED)
    found: Mapping[str, Any] = {} if observed is None else observed.asDict()
    if (rows := found.get(f"{topic} {_ROWS}")) is None:
        return counts
    newest, age = found.get(f"{topic} {_NEWEST}"), None
    if newest is not None:
        planned = datetime.fromisoformat(report.timestamp)  # with its zone
        age = max(0.0, planned.timestamp() - newest / 1000)
    has_bytes = f"{topic} {_BYTES}" in found
    return _Counts(rows, (found[f"{topic} {_BYTES}"] or 0) if has_bytes else None, age)


class ProgressListener(StreamingQueryListener):
    """Takes every report about the streams of a session, by topic.

    `spark.streams.addListener(ProgressListener(...))` in classic and Connect sessions; it sees
    queries that start afterwards.
    """

    def __init__(self, report: Callable[[StreamProgress], object] | None = None) -> None:
        """`report` is called with each report, in a thread of Spark."""
        self._report = report
        #: The last report of each query, by `queryName` or else by id.
        self.latest: dict[str, StreamProgress] = {}
        #: Rows and bytes since the listener was made, by query and topic.
        self._totals: dict[tuple[str, str], _Total] = {}
        self._ended: set[str] = set()

    def metrics(self) -> str:
        """The figures in the text format of Prometheus, for the program's metrics page."""
        # Copied, because Spark's thread adds queries meanwhile.
        running = [
            ({"query": query}, found)
            for query, found in self.latest.copy().items()
            if found.run_id not in self._ended
        ]
        of_topics = [
            ({**labels, "topic": topic.topic}, topic)
            for labels, found in running
            for topic in found.topics
        ]
        totals = [
            ({"query": query, "topic": topic}, total)
            for (query, topic), total in self._totals.copy().items()
        ]
        samples: Mapping[str, Sequence[tuple[Mapping[str, str], Any]]] = {
            "total": totals, "topic": of_topics, "query": running
        }  # fmt: skip
        return "".join(f"{line}\n" for each in _METRICS for line in each.lines(samples[each.of]))

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802  # Spark's names
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        found = progress_of(event.progress)
        if not found.topics:
            return  # of other sources alone
        query = found.name or found.id
        for each in found.topics:
            key = query, each.topic
            self._totals[key] = self._totals.get(key, _Total()).plus(each)
        self.latest[query] = found
        if self._report is not None:
            try:
                self._report(found)
            except Exception:
                log.exception("the report of a stream was not taken: %s", query)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        self._ended.add(str(event.runId))


# Metrics. Of a query that ended, only the totals are left.


class _Total(NamedTuple):
    """What a topic brought a query since the listener was made."""

    rows: int = 0
    bytes: int = 0

    def plus(self, topic: TopicProgress) -> _Total:
        rows, size = topic.num_input_rows or 0, topic.num_input_bytes or 0
        return _Total(self.rows + rows, self.bytes + size)


class _Metric(NamedTuple):
    name: str
    kind: str
    about: str
    of: str
    read: Callable[[Any], float | None]

    def lines(self, samples: Iterable[tuple[Mapping[str, str], Any]]) -> Iterator[str]:
        """In the text format of Prometheus; none where no value is known."""
        from orbitmq.client.consumer.statistics import (  # noqa: PLC0415  # who asks for metrics
            family_head,
            sample_line,
        )

        name = f"orbitmq_stream_{self.name}"
        known = [(labels, value) for labels, it in samples if (value := self.read(it)) is not None]
        if known:
            yield from family_head(name, self.kind, self.about)
            yield from (sample_line(name, *each) for each in known)


_METRICS: Final = (
    _Metric("rows_total", "counter", "Rows read.", "total", lambda it: it.rows),
    _Metric("bytes_total", "counter", "Bytes of bodies, of a measured stream.", "total",
            lambda it: it.bytes or None),
    _Metric("input_rows_per_second", "gauge", "Rows that arrived.", "topic",
            lambda it: it.input_rows_per_second),
    _Metric("processed_rows_per_second", "gauge", "Rows read, of the last batch.", "topic",
            lambda it: it.processed_rows_per_second),
    _Metric("lag_messages", "gauge", "Messages that waited when the batch was planned.", "topic",
            lambda it: it.lag),
    _Metric("lag_seconds", "gauge", "Age of the batch's last message, of a measured stream.",
            "topic", lambda it: it.lag_seconds),
    _Metric("batch", "gauge", "Number of the last batch.", "query", lambda it: it.batch_id),
    _Metric("batch_seconds", "gauge", "Time that it took.", "query",
            lambda it: it.batch_duration / 1000),
)  # fmt: skip
