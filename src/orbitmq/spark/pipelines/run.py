"""A run of a pipeline: `Run` for its function, `Supervisor`, and its Spark session.

To stop gracefully, streams start no further batch (`drainFile`) and are stopped when none runs:
Spark's own stop interrupts the running batch, and the next start repeats it.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from orbitmq.client.signals import Latch
from orbitmq.clock import Clock, SystemClock
from orbitmq.errors import SettingError
from orbitmq.parsing import Duration, duration
from orbitmq.spark.consuming.pipeline import resolve_access, source_options
from orbitmq.spark.health import SentBackCounts, StreamHealth
from orbitmq.spark.internals import is_slow_start, query_of
from orbitmq.spark.options import cause_of
from orbitmq.spark.pipelines.definition import Definition, PipelineBroken, PipelineRefused
from orbitmq.spark.session import LOCAL_ONLY, prepare, settings_for, start_java
from orbitmq.spark.streamprogress import progress_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from orbitmq.client.ranges.connections import ClientTls, Credentials, RangeAccess
    from orbitmq.spark.consolelink import ConsoleLink
    from orbitmq.spark.consuming.pipeline import ConsumePipeline
    from orbitmq.spark.consuming.progress import Settled


class Run:
    """One run of a pipeline.

    run = Run(spark, name_server="localhost:9876", checkpoint="checkpoints")
    query = archive(run, topic="orders", path=Path("lake"))

    With `once`, streams take what is there and end. `trigger` is the time between the starts of two
    batches, by default as short as possible. While `drain_file` exists, streams made by `stream`
    start no batch. `console` receives the progress of consumer groups that the run starts.

    A function for `foreachBatch` may use the run. In a Connect session it gets a copy in a process
    of the server, whose counts of sent-back rows do not reach this one.
    """

    def __init__(
        self,
        spark: SparkSession,
        *,
        name: str = "pipeline",
        name_server: str | Iterable[str] | None = None,
        credentials: Credentials | None = None,
        tls: ClientTls | None = None,
        checkpoint: Path | str | None = None,
        once: bool = False,
        trigger: Duration | None = None,
        drain_file: Path | None = None,
        console: ConsoleLink | None = None,
    ) -> None:
        if once and trigger is not None:
            raise SettingError("once and trigger cannot be given together")
        self._spark: SparkSession | None = spark
        self.name = name
        self.once = once
        self.trigger = None if trigger is None else duration(trigger, "trigger")
        self.access: RangeAccess = resolve_access(name_server, credentials, tls)
        self._checkpoint = None if checkpoint is None else str(checkpoint).rstrip("/")
        self._drain_file = drain_file
        self.console = console
        #: How many rows went back so far, by stream.
        self.returned = SentBackCounts()

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: session, console and counts."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_spark", "console", "returned")
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._spark = None
        self.console = None
        self.returned = SentBackCounts()

    @property
    def spark(self) -> SparkSession:
        """The session of the run; in a copy, the session of the batch.

        A copy asks each time, because batches have a session of their own, whose frames cannot be
        joined with those of the query's session. Tasks have none.
        """
        if self._spark is not None:
            return self._spark
        from pyspark.sql import SparkSession  # noqa: PLC0415  # where Spark is

        return SparkSession.active()

    @property
    def options(self) -> dict[str, str]:
        """The access options of the `rocketmq` source, for any reader or writer."""
        return source_options(self.access)

    @property
    def name_server(self) -> str:
        return ";".join(self.access.name_servers)

    # ---- reading

    def read(self, topic: str, *, schema: str | None = None, **options: str) -> DataFrame:
        """The present messages of a topic."""
        reader = self.spark.read.format("rocketmq").options(**self.options)
        if schema is not None:
            reader = reader.schema(schema)
        return reader.options(**{"subscribe": topic, **options}).load()

    def stream(
        self, topic: str, *, group: str | None = None, schema: str | None = None, **options: str
    ) -> DataFrame:
        """A topic as a stream; with a group, its offsets are committed."""
        reader = self.spark.readStream.format("rocketmq").options(**self.options)
        if schema is not None:
            reader = reader.schema(schema)
        if group is not None:
            reader = reader.option("group", group)
        if self._drain_file is not None:
            reader = reader.option("drainFile", str(self._drain_file))
        return reader.options(**{"subscribe": topic, **options}).load()

    # ---- running

    def checkpoint(self, name: str | None = None) -> str:
        """The checkpoint of the stream of this name. Raises `SettingError`."""
        if self._checkpoint is None:
            raise SettingError(
                "this run has no checkpoint; make it with Run(spark, checkpoint='folder', ...)"
            )
        return self._checkpoint if name is None else f"{self._checkpoint}/{name}"

    def start(
        self, writer: DataStreamWriter, name: str | None = None, *, once: bool | None = None
    ) -> StreamingQuery:
        """Start a stream with its name, its checkpoint and the trigger of the run.

        Streams of one run need different names; the default is the name of the run. `once` is for
        streams that always end.
        """
        writer = writer.queryName(name or self.name)
        writer = writer.option("checkpointLocation", self.checkpoint(name or self.name))
        if self.once if once is None else once:
            writer = writer.trigger(availableNow=True)
        elif self.trigger is not None:
            writer = writer.trigger(processingTime=f"{round(self.trigger * 1000)} milliseconds")
        return writer.start()

    # ---- rows that fail

    def settle(self, frame: DataFrame, group: str, *, max_retries: int | None = None) -> Settled:
        """As `orbitmq.spark.settle`; the rows are counted and shown with the progress.

        They count for the stream whose batch the calling thread handles. A thread of your own needs
        its function wrapped in `pyspark.inheritable_thread_target` for that.
        """
        from orbitmq.spark.consuming.returns import settle  # noqa: PLC0415  # needs Spark

        access = self.access
        settled = settle(
            frame,
            group,
            name_server=access.name_servers,
            credentials=access.credentials,
            tls=access.tls,
            max_retries=max_retries,
        )
        self.returned.add(query_of(frame), settled)
        return settled


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often and how soon a failed pipeline is started again."""

    restarts: int = 5  #: in a row; 0: never
    first_pause: float = 1.0  #: doubles each time
    longest_pause: float = 60.0
    #: Seconds of running after which earlier failures no longer count.
    healthy_after: float = 300.0

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise SettingError(f"restarts must be 0 or more, got {self.restarts!r}")
        for name in ("first_pause", "longest_pause", "healthy_after"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name} must be positive, got {getattr(self, name)!r}")

    def pause(self, failures: int) -> float:
        """Seconds before the next start, after a number of failures in a row."""
        return float(min(self.longest_pause, self.first_pause * 2 ** min(failures - 1, 60)))


#: The least number of restarts where a Python process of Spark started too slowly.
_STARTS: Final = 3


class End(enum.Enum):
    """How a run ended."""

    FINISHED = "finished"  #: by itself: all present messages are done
    STOPPED = "stopped"  #: on request


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run."""

    end: End
    progress: tuple[Progress, ...]
    restarts: int
    #: Whether every batch that had begun was finished.
    is_clean: bool
    shown: DataFrame | None = None


@dataclass(frozen=True, slots=True)
class Restarting:
    """A failed pipeline will be started again."""

    problem: str
    number: int
    pause: float


class Supervisor:
    """Runs one pipeline in the thread that calls `run`."""

    def __init__(
        self,
        definition: Definition,
        values: Mapping[str, Any],
        run: Run,
        *,
        drain_file: Path,
        policy: RestartPolicy | None = None,
        stop_timeout: float = 60.0,
        look_every: float = 0.2,
        on_progress: Callable[[Sequence[Progress]], object] | None = None,
        on_restart: Callable[[Restarting], object] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`drain_file` is that of the run; it must not exist."""
        self._definition = definition
        self._values = dict(values)
        self._run = run
        self._drain_file = drain_file
        self._policy = policy or RestartPolicy()
        self._stop_timeout = stop_timeout
        self._look_every = look_every
        self._on_progress = on_progress or (lambda _: None)
        self._on_restart = on_restart or (lambda _: None)
        self._clock = clock or SystemClock()

    def run(self, ended: threading.Event | Latch) -> Report:
        """Run until the pipeline has finished or `ended` is set.

        Raises `PipelineBroken` when it fails too often, and what its function raises at the first
        start, unless Spark's Python process only started too slowly.
        """
        failures = restarts = 0
        while True:
            began = self._clock.monotonic()
            targets: list[Target] = []
            try:
                outcome = self._definition.function(self._run, **self._values)
                targets, shown = started(outcome, self._run)
            except Exception as error:
                # The user's function may raise anything. At the first start it is a mistake.
                if not restarts and not is_slow_start(str(error)):
                    raise
                problem: str | None = cause_of(str(error) or type(error).__name__)
            else:
                problem = self._watch(targets, ended)
                is_clean = self._bring_to_rest(targets)
                if problem is None:
                    progress = tuple(target.look() for target in targets)
                    self._on_progress(progress)
                    is_finished = not ended.is_set() or not targets
                    end = End.FINISHED if is_finished else End.STOPPED
                    return Report(end, progress, restarts, is_clean, shown)
            if self._clock.monotonic() - began >= self._policy.healthy_after:
                failures = 0
            failures += 1
            if failures > self._allowed(problem or ""):
                raise PipelineBroken(self._run.name, problem or "", restarts=restarts)
            pause = self._policy.pause(failures)
            restarts += 1
            self._on_restart(Restarting(problem or "", restarts, pause))
            if ended.wait(pause):
                return Report(End.STOPPED, (), restarts, is_clean=True)

    def _allowed(self, problem: str) -> int:
        """The failures in a row after which the pipeline is started again."""
        restarts = self._policy.restarts
        return max(restarts, _STARTS) if is_slow_start(problem) else restarts

    def _watch(self, targets: Sequence[Target], ended: threading.Event | Latch) -> str | None:
        """Wait until all targets end, `ended` is set, or one fails; returns the failure."""
        last: tuple[Progress, ...] = ()
        while targets:
            progress = tuple(target.look() for target in targets)
            if progress != last:
                self._on_progress(progress)
                last = progress
            # Before the failures: one that comes in between would look like a normal end.
            is_over = all(target.is_over for target in targets)
            for target in targets:
                if (failure := target.failure) is not None:
                    return failure
            if is_over:
                return None
            if ended.wait(self._look_every):
                return None
        return None

    def _bring_to_rest(self, targets: Sequence[Target]) -> bool:
        """Stop all targets between two batches; False when one took too long or failed."""
        running = [target for target in targets if not target.is_over]
        if not running:
            has_failed = _has_failed(targets)
            for target in targets:
                target.stop()
            return not has_failed
        self._drain_file.parent.mkdir(parents=True, exist_ok=True)
        self._drain_file.touch()
        try:
            is_clean = self._until_at_rest(running) and not _has_failed(targets)
        finally:
            for target in targets:
                target.stop()
            self._drain_file.unlink(missing_ok=True)
        return is_clean

    def _until_at_rest(self, targets: Sequence[Target]) -> bool:
        """Wait until no target runs a batch, twice in a row: there are gaps between batches."""
        deadline = self._clock.monotonic() + self._stop_timeout
        pause = threading.Event()
        times = dict.fromkeys(range(len(targets)), 0)
        while any(number < 2 for number in times.values()):
            if self._clock.monotonic() >= deadline:
                return False
            for place, target in enumerate(targets):
                if times[place] < 2:
                    times[place] = times[place] + 1 if target.is_at_rest else 0
            pause.wait(self._look_every)
        return True


def _has_failed(targets: Sequence[Target]) -> bool:
    return any(target.failure is not None for target in targets)


log = logging.getLogger(__name__)


class StreamTarget:
    """A stream of Spark, as the supervisor looks at it."""

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
        """Whether it has ended, normally or not."""
        return not self._query.isActive

    @property
    def failure(self) -> str | None:
        if self._query.isActive or self._was_stopped:
            return None
        error = self._query.exception()
        return None if error is None else cause_of(str(error))

    @property
    def is_at_rest(self) -> bool:
        """Whether no batch seems to run, after draining has begun."""
        if not self._query.isActive:
            return True
        status = self._query.status
        return not (status["isDataAvailable"] and status["isTriggerActive"])

    def look(self) -> Progress:
        now, before = self._clock.monotonic(), self._watch.rows
        self._watch.look(self._query)
        self._tell_late(self._watch.late)
        if rows := self._watch.rows - before:
            self._health.batch_ended(now, rows)
        sent_back, failure = self._health.sent_back, self.failure
        return Progress(
            query=self.name,
            state=self._state(failure, is_failing=self._health.is_failing(now)),
            batch=self._watch.batch,
            rows=self._watch.rows,
            rows_per_second=self._watch.rows_per_second,
            batch_seconds=self._watch.batch_seconds,
            lag=dict(self._watch.lag),
            retried=sent_back.retried,
            dead=sent_back.dead,
            failed_share=self._health.share(now),
            late=self._watch.late,
            error=failure,
        )

    def _tell_late(self, late: int) -> None:
        """Warn of rows that Spark silently leaves out of the results."""
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
    """A consumer group on Spark. Its own stop finishes the running batch."""

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


#: A stream or a consumer group that a pipeline runs.
Target: TypeAlias = StreamTarget | GroupTarget


def started(outcome: object, run: Run) -> tuple[list[Target], DataFrame | None]:
    """The targets of a function's result, which are started, and the DataFrame to show.

    Raises `PipelineRefused` for any other result.
    """
    from pyspark.sql import DataFrame as Classic  # noqa: PLC0415  # only where Spark is

    if isinstance(outcome, Classic) or type(outcome).__name__ == "DataFrame":
        frame: DataFrame = outcome  # type: ignore[assignment]  # of a Connect session
        if frame.isStreaming:
            raise PipelineRefused(
                "the pipeline returned a stream without a sink; return its writer, as in "
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
        f"a pipeline returns writers of streams, queries, consumer groups, a list or a dict of "
        f"these, a DataFrame to show, or nothing; it returned {thing!r}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of one stream or consumer group of a pipeline."""

    query: str  #: its name
    #: starting, running, waiting (for messages), failing (it runs, but most attempts fail),
    #: stopped, finished or failed
    state: str
    batch: int | None = None  #: the last finished batch
    rows: int = 0  #: read since the start
    rows_per_second: float | None = None  #: of the last batch
    batch_seconds: float | None = None
    #: Messages that wait, by `topic@broker:queue`; empty when not known.
    lag: Mapping[str, int] = field(default_factory=dict)
    retried: int = 0  #: sent back, to be delivered again
    dead: int = 0  #: given up
    #: The share of attempts in the last five minutes that failed; None without any.
    failed_share: float | None = None
    late: int = 0  #: rows, or aggregated rows, that came after their window and are in no result
    error: str | None = None

    @property
    def total_lag(self) -> int | None:
        return sum(self.lag.values()) if self.lag else None


class QueryWatch:
    """Sums up a stream's reports of its batches."""

    def __init__(self) -> None:
        self.batch: int | None = None
        self.rows = 0
        self.rows_per_second: float | None = None
        self.batch_seconds: float | None = None
        self.lag: dict[str, int] = {}
        self.late = 0
        self._seen = ""

    def look(self, query: StreamingQuery) -> bool:
        """Take new reports; returns whether there were any."""
        last = query.lastProgress
        if last is None or last.timestamp == self._seen:
            return False
        # Several batches may have ended; Spark keeps the last hundred reports.
        for each in query.recentProgress:
            if each.timestamp > self._seen:
                self.take(each)
        return True

    def take(self, progress: StreamingQueryProgress) -> None:
        """Take one report; those of an idle stream have no rows."""
        self._seen = progress.timestamp
        found = progress_of(progress)
        rows = found.num_input_rows
        if rows or self.batch is None:
            self.batch = found.batch_id
            self.batch_seconds = found.batch_duration / 1000
            self.rows_per_second = found.processed_rows_per_second if rows else None
        self.rows += rows
        self.late += sum(each.numRowsDroppedByWatermark for each in progress.stateOperators)
        if found.queues:
            self.lag = dict(found.queues)


# The session: on this machine, on a cluster, or through Connect.

#: Attempts of a task in a local session, unless the master says otherwise.
_ATTEMPTS: Final = 4
_local = re.compile(r"local(?:\[(\d+|\*)(?:,(\d+))?\])?").fullmatch
_MASTERS: Final = (
    "local, local[2], spark://host:7077, yarn, k8s://https://host:6443 or sc://host:15002"
)
_FILE_MANAGER: Final = "spark.sql.streaming.checkpointFileManagerClass"


def pipeline_session(
    name: str,
    *,
    master: str | None = None,
    checkpoint: str | None = None,
    settings: Mapping[str, object] | None = None,
    python_path: Iterable[Path] = (),
) -> SparkSession:
    """A session with measured settings for its master. Raises `PipelineRefused`.

    `python_path` are folders from which Spark's workers import as well.
    """
    chosen = session_settings(master, checkpoint, settings)
    _extend_path(python_path)
    prepare(os.environ)
    from pyspark.sql import SparkSession  # noqa: PLC0415  # reads the environment

    builder = SparkSession.builder.appName(name)
    url = chosen.pop("spark.master")
    builder = builder.remote(url) if url.startswith("sc://") else builder.master(url)
    for key, value in chosen.items():
        builder = builder.config(key, value)
    if not url.startswith("sc://"):
        start_java({**chosen, "spark.master": url, "spark.app.name": name})
    return builder.getOrCreate()


def session_settings(
    master: str | None, checkpoint: str | None, settings: Mapping[str, object] | None
) -> dict[str, str]:
    """All settings of the session, the master included."""
    url = _master(master)
    chosen: dict[str, str] = {}
    if not url.startswith("sc://"):
        chosen = dict(settings_for())
        if not url.startswith("local"):
            for setting in LOCAL_ONLY:
                chosen.pop(setting, None)
        if checkpoint is not None and "://" in checkpoint and not checkpoint.startswith("file:"):
            # The fast checkpoint manager is for local file systems.
            chosen.pop(_FILE_MANAGER, None)
        chosen["spark.log.level"] = "ERROR"
        # Without it, a stopped stream may end with an error later.
        chosen["spark.sql.streaming.stopTimeout"] = "30s"
    given = {key: _text(value) for key, value in (settings or {}).items()}
    return {**chosen, **given, "spark.master": url}


def _master(master: str | None) -> str:
    text = master or "local[*]"
    if found := _local(text):
        return f"local[{found[1] or 1},{found[2] or _ATTEMPTS}]"
    if text == "yarn" or text.startswith(("spark://", "k8s://", "sc://")):
        return text
    raise PipelineRefused(f"master must be {_MASTERS}; got {text!r}")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _extend_path(folders: Iterable[Path]) -> None:
    """Let workers, which this process starts, import from the folders of a pipeline."""
    given = [str(folder.resolve()) for folder in folders]
    before = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*given, *before]))
    if not os.environ["PYTHONPATH"]:
        del os.environ["PYTHONPATH"]
    for folder in given:
        if folder not in sys.path:
            sys.path.append(folder)


# A checkpoint belongs to a source and a sink: with others, a run would find nothing to do. So they
# are stored beside the checkpoint, unlike options that may change (a rate, a query).

#: The options that name source and sink.
PLACES: Final = ("topic", "path", "into")
_FILE: Final = "orbitmq-places.json"


def check_checkpoint(checkpoint: str, values: Mapping[str, object]) -> None:
    """Refuse a checkpoint of another source or sink; a remote checkpoint is not checked."""
    file = _file(checkpoint)
    if file is None or not file.exists():
        return
    kept = json.loads(file.read_text(encoding="utf-8"))
    wanted = _places(values)
    for name in PLACES:
        if kept.get(name) != wanted.get(name):
            raise PipelineRefused(
                f"the checkpoint {checkpoint} belongs to a run with {_shown(name, kept)}, and this "
                f"one has {_shown(name, wanted)}; give this one its own with --name or --checkpoint"
            )


def save_places(checkpoint: str, values: Mapping[str, object]) -> None:
    """Store source and sink beside a new checkpoint."""
    file = _file(checkpoint)
    if file is not None and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(_places(values)) + "\n", encoding="utf-8")


def _file(checkpoint: str) -> Path | None:
    local = checkpoint.removeprefix("file://")
    return None if "://" in local else Path(local) / _FILE


def _places(values: Mapping[str, object]) -> dict[str, str]:
    return {name: str(values[name]) for name in PLACES if values.get(name) is not None}


def _shown(name: str, places: Mapping[str, str]) -> str:
    return f"{name}={places[name]}" if name in places else f"no {name}"
