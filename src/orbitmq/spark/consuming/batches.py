"""One batch after the other: plan, run as a Spark job, settle.

A job that fails has moved no progress: everything in it is planned again, after a pause that grows.
What its tasks had handled comes a second time, as it would after a crash. In order, that is not
before the last of its tasks has ended (`orbitmq.spark.consuming.batches`): they hold the order
locks in the name of the driver, so the broker would not keep two of them apart. Those that Spark
may have lost are given the time after which they begin no calls any more.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from orbitmq.clock import Clock, SystemClock
from orbitmq.errors import OrbitError, SettingError
from orbitmq.spark.consuming.progress import (
    BatchReport,
    PieceReport,
    PipelineFailed,
    PipelineProgress,
    PipelineState,
)
from orbitmq.spark.consuming.queues import AdaptiveBatchSize, assign_to_tasks
from orbitmq.spark.health import FailureRate
from orbitmq.spark.options import OptionRefused, OptionTexts, cause_of
from orbitmq.spark.worker import cause_first, jobs_of_tag

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from orbitmq.spark.consuming.pipeline import Driver, PackedDefinition
    from orbitmq.spark.consuming.queues import BatchPlan, Piece


log = logging.getLogger(__name__)

#: How long a cancelled batch has to end, and how often it is cancelled meanwhile.
_CANCELLED: Final = 10.0
_CANCELLED_AGAIN: Final = 0.5
#: So many jobs that fail one after the other make a pipeline ill, whatever becomes of messages, and
#: so do as many tasks with the same queue. One alone does not: its messages come again at once.
_ILL: Final = 3
#: Pauses have long reached their limit by then.
_MOST_DOUBLINGS: Final = 16
#: Characters of what a task says about its failure: the cause, and where it arose.
_SHOWN: Final = 500


class BatchLoop:
    """Runs the batches of a driver, on a thread of its own."""

    def __init__(
        self,
        spark: SparkSession,
        driver: Driver,
        on_batch: Callable[[BatchReport], object] | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._spark = spark
        self._driver = driver
        self._settings = driver.batch
        self._on_batch = on_batch
        self._clock = clock or SystemClock()
        self._pace = AdaptiveBatchSize(driver.batch.messages)
        self._jobs = SparkJobs(spark, clock=self._clock)
        self._tasks = 1
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        #: Set when batches end by themselves.
        self._ended = threading.Event()
        # Guards what follows, which the batches change and others read. Nothing is waited for
        # under it but news about it.
        self._news = threading.Condition()
        self._looks = 0
        self._idle_look = 0
        self._counts = {"batches": 0, "done": 0, "retried": 0, "dead": 0, "missing": 0}
        self._failures = FailureRate()
        self._lost_jobs = 0  #: jobs that failed since something got done
        self._last: BatchReport | None = None
        self._last_error: str | None = None
        self.failure: PipelineFailed | None = None

    # ---- life

    def check(self) -> None:
        """Look at the session; refuse one that cannot keep the promises with `SettingError`."""
        speculates = self._spark.conf.get("spark.speculation", "false")
        if self._driver.options.ordered and str(speculates).lower() == "true":
            raise SettingError(
                "spark.speculation must be false for consumption in order: it runs a task twice "
                "at the same time"
            )
        self._tasks = self._settings.tasks or parallelism(self._spark)

    def start(self, ended: threading.Event) -> None:
        """Begin; `ended` is set when the batches end without having been stopped."""
        self._ended = ended
        self._thread = threading.Thread(
            target=self._run, name=f"orbitmq batches {self._driver.group}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Begin no batch more; the one that runs is waited for, then cancelled."""
        self._stopping.set()
        thread = self._thread
        if thread is None:
            return
        thread.join(self._settings.stop)
        if thread.is_alive():
            self._cancel(thread)

    def _cancel(self, thread: threading.Thread) -> None:
        """End the batch that runs. Its job may not have begun yet, and then begins all the same."""
        until = self._clock.monotonic() + _CANCELLED + self._jobs.longest
        is_told = False
        while thread.is_alive() and (left := until - self._clock.monotonic()) > 0:
            if self._jobs.is_running and not is_told:
                is_told = True
                log.warning(
                    "the running batch is cancelled, its messages come again",
                    extra={"group": self._driver.group},
                )
            # Also when it is over for us: in Connect, its tasks may run on.
            self._jobs.cancel()
            thread.join(min(left, _CANCELLED_AGAIN))

    @property
    def is_caller(self) -> bool:
        return threading.current_thread() is self._thread

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    # ---- what is asked about it

    def until_idle(self, timeout: float | None) -> bool:
        """Wait for a look, begun from now on, that finds nothing to do."""
        with self._news:
            after = self._looks
            self._news.wait_for(
                lambda: self._idle_look > after or self.failure or self._stopping.is_set(), timeout
            )
            self.raise_failure()
            return self._idle_look > after

    def progress(self, state: PipelineState) -> PipelineProgress:
        is_running = state is PipelineState.RUNNING
        lag = self._driver.lag() if is_running else {}
        failed_in_a_row = self._driver.failed_in_a_row() if is_running else 0
        now = self._clock.monotonic()
        with self._news:
            return PipelineProgress(
                group=self._driver.group,
                client_id=self._driver.client_id,
                state=state,
                lag=lag,
                last_batch=self._last,
                last_error=self._last_error,
                failed_share=self._failures.share(now),
                is_failing=is_running
                and (
                    max(self._lost_jobs, failed_in_a_row) >= _ILL or self._failures.is_failing(now)
                ),
                **self._counts,
            )

    # ---- on the thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                error = self._look()
                if error is None:
                    continue
                # Looks that find nothing lie between: queues are kept waiting after some failures.
                failures = self._lost_jobs
                if failures >= self._settings.failures:
                    self._give_up(failures, error)
                    return
                pause = self._settings.first_pause * 2 ** min(failures - 1, _MOST_DOUBLINGS)
                self._stopping.wait(min(pause, self._settings.longest_pause))
        except Exception as error:
            # A driver that was stopped under us says so. All else is a mistake of ours, and nobody
            # would hear of it: whoever waits for the end of the pipeline would wait for ever.
            if not isinstance(error, OrbitError):
                log.exception("batches end", extra={"group": self._driver.group})
            if not self._stopping.is_set():
                self._give_up(self._lost_jobs + 1, f"{type(error).__name__}: {error}"[:_SHOWN])
        finally:
            with self._news:
                self._news.notify_all()

    def _give_up(self, failures: int, last: str) -> None:
        failure = PipelineFailed(self._driver.group, failures, last)
        log.error("%s", failure, extra={"group": self._driver.group})
        try:
            self._driver.stop()
        finally:
            with self._news:
                self.failure = failure
            self._ended.set()

    def _look(self) -> str | None:
        """Look for messages, and run a batch if there are any; why that failed, if it did."""
        with self._news:
            self._looks += 1
            look = self._looks
        # Before the look: a queue that comes after it has not been looked at.
        is_settled = self._driver.is_settled()
        planned = self._driver.plan(self._pace.size)
        for queue, error in planned.errors.items():
            self._note(f"{queue}: {error}")
        if planned.pieces and self._stopping.is_set():
            # It came while brokers were asked.
            self._driver.settle(planned, [])
            return None
        if planned.pieces:
            return self._batch(planned)
        if is_settled and not planned.errors and not any(self._driver.lag().values()):
            with self._news:
                self._idle_look = look
                self._news.notify_all()
        self._stopping.wait(self._settings.idle)
        return None

    def _batch(self, planned: BatchPlan) -> str | None:
        began_at, began = self._clock.now(), self._clock.monotonic()
        reports: list[PieceReport] = []
        failure: str | None = None
        self._tasks = self._tasks_now()
        tasks = assign_to_tasks(
            planned.pieces, self._tasks, may_cut=not self._driver.options.ordered
        )
        planned.pieces = tuple(piece for some in tasks for piece in some)
        try:
            reports = self._run_job(planned, [len(some) for some in tasks])
            failure = self._failure(planned, reports)
        except Exception as error:
            # A job fails in many ways, all of which are the same to us: it comes again.
            failure = cause_of(f"{type(error).__name__}: {error}")
            if not self._stopping.is_set():
                log.warning(
                    "a batch failed: %s",
                    failure,
                    exc_info=error,
                    extra={"group": self._driver.group},
                )
            if self._driver.options.ordered:
                # Before anything is settled: that lets go of the queues.
                self._jobs.until_over()
                if self._jobs.may_have_lost_tasks():
                    # Attempts that would have said so are lost with the job.
                    reports = postponed(enumerate(planned.pieces), self._settings.seconds + READY)
        finally:
            missing = self._driver.settle(planned, reports)
        errors = [text for report in reports if (text := report.task_error or report.error)]
        self._tell(
            is_lost=failure is not None,
            got_on=any(_got_on(planned, report) for report in reports),
            report=BatchReport(
                number=self._counts["batches"] + 1,
                began_at=began_at,
                seconds=self._clock.monotonic() - began,
                planned=planned.messages,
                done=sum(report.done for report in reports),
                retried=sum(report.retried for report in reports),
                dead=sum(report.dead for report in reports),
                kept=sum(report.kept for report in reports),
                held=sum(report.held for report in reports),
                missing=missing,
                failed=sum(report.failed for report in reports),
                tasks=len(tasks),
                lag=self._driver.lag(),
                error=failure or (errors[-1][:_SHOWN] if errors else None),
            ),
        )
        if failure is None:
            self._learn(planned, reports)
        return failure

    def _failure(self, planned: BatchPlan, reports: list[PieceReport]) -> str | None:
        """Why a job is as good as lost that Spark is content with, if it is.

        One in which all tasks ran is not, whatever became of messages and brokers. Nor is one in
        which something got done: what is wrong may be of one executor, or of one queue, and is no
        reason to keep the other queues from being consumed.
        """
        failed = [report.task_error for report in reports if report.task_error]
        if failed:
            log.warning("a task failed: %s", failed[0], extra={"group": self._driver.group})
        if all(map(_has_run, reports)) or any(_got_on(planned, report) for report in reports):
            return None
        if failed:
            return failed[0][:_SHOWN]
        return (
            next((each.error for each in reports if each.is_postponed), None) or "tasks were lost"
        )

    def _tasks_now(self) -> int:
        """How many tasks a batch may have: executors come late, and come and go."""
        # In Connect it takes a job to know that, which is too much for every batch.
        if self._settings.tasks or getattr(self._spark, "sparkContext", None) is None:
            return self._tasks
        try:
            return parallelism(self._spark)
        except Exception as error:  # noqa: BLE001
            # A session that has ended under us, or whatever else Java says: the job will say it.
            log.debug("it is not known how many tasks run at once: %s", error)
            return self._tasks

    def _learn(self, planned: BatchPlan, reports: list[PieceReport]) -> None:
        # What a task that failed did not do says nothing about the handlers.
        reports = [report for report in reports if _has_run(report)]
        given = sum(len(planned.pieces[report.place].range) for report in reports)
        finished = sum(
            report.finished - planned.pieces[report.place].range.start + report.finished_beyond
            for report in reports
        )
        self._pace.learn(given, finished)
        if not finished and not any(report.pause for report in reports):
            # Brokers or locks are not as they should be, and will not be so the next instant.
            self._stopping.wait(self._settings.first_pause)

    def _run_job(self, planned: BatchPlan, sizes: list[int]) -> list[PieceReport]:
        packed = self._driver.packed
        assert packed is not None  # noqa: S101  # made by the start
        places = iter(enumerate(planned.pieces))
        tasks = [[next(places) for _ in range(size)] for size in sizes]
        seconds, is_ordered = self._settings.seconds, self._driver.options.ordered
        self._jobs.begin()
        try:
            return run_batch(self._spark, packed, tasks, seconds, is_ordered=is_ordered)
        finally:
            # The listener of batches may run jobs on this thread.
            self._jobs.end()

    def _tell(self, report: BatchReport, *, is_lost: bool, got_on: bool) -> None:
        """Take in what became of a batch; one whose job failed is lost, and comes again."""
        with self._news:
            self._last = report
            self._counts["batches"] += 1
            for name in ("done", "retried", "dead", "missing"):
                self._counts[name] += getattr(report, name)
            if is_lost:
                self._lost_jobs += 1
            elif got_on:
                # Else queues whose tasks fail are only waiting, and nothing gets done meanwhile.
                self._lost_jobs = 0
            self._failures.add(self._clock.monotonic(), report.done, report.failed)
        if report.error is not None:
            self._note(report.error)
        if self._on_batch is not None:
            try:
                self._on_batch(report)
            except Exception:
                log.exception("a listener of batches failed", extra={"group": self._driver.group})

    def _note(self, error: str) -> None:
        with self._news:
            self._last_error = error


def _has_run(report: PieceReport) -> bool:
    """Whether a task came to the piece, whatever it did with it."""
    return not report.task_error and not report.is_postponed


def _got_on(planned: BatchPlan, report: PieceReport) -> bool:
    """Whether handlers were called for the piece, well or badly, or nothing has prevented it."""
    start = planned.pieces[report.place].range.start
    is_further = report.finished > start or report.finished_beyond > 0
    return is_further or report.failed > 0 or (_has_run(report) and not report.error)


# A batch as a Spark job: one row of a number for each task, which becomes rows of reports.
#
# `spark.range` with as many partitions as numbers is the one way to say what runs in which task
# that works in classic and in Connect sessions alike.
#
# Spark tries a task again whose executor it has lost. Such an executor may only be out of reach,
# and its handlers at work: in order, a second attempt therefore handles nothing. It says that its
# queues are to wait until the first one begins no calls any more. What goes wrong in a task is
# therefore not left to Spark, which would try it again as well, and have the second attempt
# succeed: the first one tells it.


_SCHEMA: Final = (
    "place INT, finished BIGINT, beyond ARRAY<BIGINT>, done BIGINT, retried BIGINT, dead BIGINT, "
    "kept BIGINT, held BIGINT, failed BIGINT, attempts MAP<BIGINT, INT>, "
    "pause DOUBLE, error STRING, reset_to BIGINT, task_error STRING, is_postponed BOOLEAN, "
    "missing BIGINT, gaps ARRAY<BIGINT>, gap_seconds ARRAY<DOUBLE>"
)
_COLUMNS: Final = tuple(field.name for field in fields(PieceReport))
#: In order: how long the first task of a process may take to get handlers and connections ready. A
#: lost attempt may begin calls for that much longer.
READY: Final = 10.0


def run_batch(
    spark: SparkSession,
    packed: PackedDefinition,
    tasks: Sequence[Sequence[tuple[int, Piece]]],
    seconds: float,
    *,
    is_ordered: bool = False,
) -> list[PieceReport]:
    """Have the pieces of each task handled. Raises what Spark raises when the job fails.

    In order, what went wrong in a task is in the reports of its pieces instead.
    """
    numbers = spark.range(0, len(tasks), 1, len(tasks))
    rows = numbers.mapInArrow(
        _handling(packed, tasks, seconds, is_ordered=is_ordered), _SCHEMA
    ).collect()
    return [PieceReport(**row.asDict()) for row in rows]


def parallelism(spark: SparkSession) -> int:
    """How many tasks a session runs at once."""
    # A Connect session has no context. There, it is the partitions of a range of its own making.
    context = getattr(spark, "sparkContext", None)
    if context is not None:
        return max(1, int(context.defaultParallelism))
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # as everybody calls them

    return max(1, spark.range(1000).select(F.spark_partition_id()).distinct().count())


def _handling(
    packed: PackedDefinition,
    tasks: Sequence[Sequence[tuple[int, Piece]]],
    seconds: float,
    *,
    is_ordered: bool,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    tasks = tuple(tuple(each) for each in tasks)

    def handle(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with cause_first():
            yield from reports(batches)

    def reports(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from orbitmq.spark.consuming.worker import worker_for  # noqa: PLC0415  # tasks only

        for batch in batches:
            for number in batch.column(0).to_pylist():
                if not is_ordered:
                    yield _rows(worker_for(packed).handle(tasks[number], seconds))
                elif _attempt() > 0:
                    yield _rows(postponed(tasks[number], seconds + READY))
                else:
                    yield _rows(_in_order(packed, tasks[number], seconds))

    return handle


def _in_order(
    packed: PackedDefinition, pieces: Sequence[tuple[int, Piece]], seconds: float
) -> list[PieceReport]:
    """Handle pieces, or say why not; what ends this process is all that Spark hears of."""
    from orbitmq.spark.consuming.worker import worker_for  # noqa: PLC0415  # tasks only

    latest = time.monotonic() + seconds + READY
    try:
        worker = worker_for(packed)
        left = latest - time.monotonic()
        if left > 0:
            return worker.handle(pieces, min(seconds, left))
    except Exception as error:  # noqa: BLE001
        # Whatever handlers raise when they are unpacked, and mistakes of ours.
        return _failed(pieces, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    took = f"more than {seconds + READY:g} s"
    return _failed(pieces, f"it took {took} to get the handlers ready, and no call was begun")


def _failed(pieces: Sequence[tuple[int, Piece]], why: str) -> list[PieceReport]:
    return [
        PieceReport(place=place, finished=piece.range.start, task_error=why)
        for place, piece in pieces
    ]


def _attempt() -> int:
    """How often the task that runs was begun before."""
    from pyspark import TaskContext  # noqa: PLC0415  # tasks only

    context = TaskContext.get()
    return 0 if context is None else int(context.attemptNumber())


def postponed(pieces: Iterable[tuple[int, Piece]], seconds: float) -> list[PieceReport]:
    """Say that pieces are to wait until an attempt that may be lost begins no calls any more."""
    # It began earlier than now, so its time is up earlier as well.
    return [
        PieceReport(
            place=place,
            finished=piece.range.start,
            pause=seconds,
            error="an attempt to handle it was lost, and may still be at work",
            is_postponed=True,
        )
        for place, piece in pieces
    ]


def _rows(reports: Sequence[PieceReport]) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    types = {
        "beyond": pa.list_(pa.int64()),
        "place": pa.int32(),
        "attempts": pa.map_(pa.int64(), pa.int32()),
        "pause": pa.float64(),
        "error": pa.string(),
        "task_error": pa.string(),
        "is_postponed": pa.bool_(),
        "gaps": pa.list_(pa.int64()),
        "gap_seconds": pa.list_(pa.float64()),
    }
    schema = pa.schema([(name, types.get(name, pa.int64())) for name in _COLUMNS])
    rows = [
        {name: getattr(report, name) for name in _COLUMNS}
        | {
            "attempts": sorted(report.attempts.items()),
        }
        for report in reports
    ]
    return pa.RecordBatch.from_pylist(rows, schema=schema)


# The Spark jobs of a pipeline: cancelled from any thread, and waited for to their last task.
#
# A job that fails or is cancelled is over for its caller at once; its other tasks are not. A Python
# worker is not told: Spark looks every two seconds whether a task is to be ended, gives its worker
# `spark.python.task.killTimeout` more, and kills it. All the while the handler works. In order,
# nobody may get the queues before that: not the next batch, and no other member of the group.
#
# How many tasks of a job still run is known to a classic session: a task counts until its worker is
# gone. In Connect it is not known, and the time is waited out that Spark takes at most.
#
# A task on an executor that Spark has lost counts no more, and may be at work all the same. Whether
# there may be one is all that is known of it.


_KILL_TIMEOUT: Final = "spark.python.task.killTimeout"
#: Spark's default for it, and how often it looks whether a task is to be ended.
_KILL: Final = 2.0
_LOOKS: Final = 2.0
#: For the signal to arrive, on a machine that has much to do.
_MARGIN: Final = 2.0
#: Tasks that count for so long after they should be dead do not run: Spark dropped the news.
_FORGOTTEN: Final = 30.0
#: Between two looks at what runs.
_PAUSE: Final = 0.05
#: What a job's status is while it may still begin tasks.
_RUNNING: Final = "RUNNING"
#: The masters of sessions that have no executors to lose. With them one task that fails, as when
#: its process dies, is enough for the job to fail.
_LOCAL: Final = re.compile(r"local(\[.*)?$")


class SparkJobs:
    """Jobs that run one after the other on one thread."""

    def __init__(self, spark: SparkSession, *, clock: Clock | None = None) -> None:
        self._spark = spark
        #: None in a Connect session.
        self._context: Any = getattr(spark, "sparkContext", None)
        self._clock = clock or SystemClock()
        #: Of the last job, also when it is over: its tasks may not be.
        self._tag: str | None = None
        self.is_running = False
        self._is_cancelled = False

    def begin(self) -> None:
        """What this thread runs from now on is the job that is meant."""
        # Tags of a session are of no use in a classic one: they are found by the thread alone that
        # has set them.
        self._tag = f"orbitmq-{uuid.uuid4().hex}"
        self.is_running, self._is_cancelled = True, False
        add = self._spark.addTag if self._context is None else self._context.addJobTag
        add(self._tag)

    def end(self) -> None:
        """What this thread runs from now on is none of it, and is not cancelled with it."""
        self.is_running = False
        if self._tag is None:
            return
        remove = self._spark.removeTag if self._context is None else self._context.removeJobTag
        try:
            remove(self._tag)
        except Exception as error:  # noqa: BLE001
            # A session that has ended under us, or whatever else Java says: nothing runs then.
            log.debug("the tag of a job stays: %s", error)

    def cancel(self) -> None:
        """End the job, from any thread; its tasks end some time later."""
        if self._tag is None:
            return
        self._is_cancelled = True
        try:
            if self._context is None:
                self._spark.interruptTag(self._tag)
            else:
                self._context.cancelJobsWithTag(self._tag)
        except Exception as error:  # noqa: BLE001
            # A session that has ended under us, or whatever else Java says: nothing runs then.
            log.warning("a job could not be cancelled: %s", error)

    @property
    def longest(self) -> float:
        """How long the tasks of a job that has failed may live on."""
        return self._kill_timeout() + _LOOKS + _MARGIN

    def until_over(self) -> None:
        """Return when no task runs of a job that has failed or was cancelled."""
        began, longest = self._clock.monotonic(), self.longest
        pause = threading.Event()
        while (running := self._running()) != 0:
            waited = self._clock.monotonic() - began
            if running is None and waited >= longest:
                return
            if waited >= longest + _FORGOTTEN:
                log.error("%d task(s) of a job that has failed do not end", running)
                return
            pause.wait(_PAUSE)

    def may_have_lost_tasks(self) -> bool:
        """Whether a task of a job that has failed may be at work where Spark has lost it.

        Tasks that fail without that are not told apart from it; those that were cancelled are. When
        nothing is known, a job that we have cancelled has most likely ended for no other reason.
        """
        if _LOCAL.match(str(getattr(self._context, "master", ""))):
            return False
        jobs = self._jobs()
        if jobs is None:
            return not self._is_cancelled
        return any(stage.numFailedTasks for _, stages in jobs for stage in stages)

    def _running(self) -> int | None:
        """Tasks that run; None when it is not known."""
        jobs = self._jobs()
        # What Spark tells about jobs comes late, but in order: when the end of a job is known, so
        # are its tasks.
        if not jobs or any(status == _RUNNING for status, _ in jobs):
            return None
        return sum(int(stage.numActiveTasks) for _, stages in jobs for stage in stages)

    def _jobs(self) -> list[tuple[str, list[Any]]] | None:
        """The status of jobs, and what is known of their tasks; None when nothing is."""
        if self._context is None or self._tag is None:
            return None
        try:
            tracker = self._context.statusTracker()
            numbers = jobs_of_tag(self._context, self._tag)
            jobs = [job for number in numbers if (job := tracker.getJobInfo(number)) is not None]
            stages = [map(tracker.getStageInfo, job.stageIds) for job in jobs]
            return [
                (job.status, [each for each in some if each is not None])
                for job, some in zip(jobs, stages, strict=True)
            ]
        except Exception as error:  # noqa: BLE001
            # A session that has ended under us, or whatever else Java says.
            log.debug("running tasks are not known: %s", error)
            return None

    def _kill_timeout(self) -> float:
        try:
            text = str(self._spark.conf.get(_KILL_TIMEOUT, "2s"))
        except Exception as error:  # noqa: BLE001
            # As above.
            log.debug("it is not known how long tasks are given to end: %s", error)
            return _KILL
        try:
            return OptionTexts({_KILL_TIMEOUT: text}).duration(_KILL_TIMEOUT, _KILL)
        except OptionRefused:
            # Spark also takes a bare number, of milliseconds, and other spellings of units.
            return float(text) / 1000 if text.isdecimal() else _KILL
