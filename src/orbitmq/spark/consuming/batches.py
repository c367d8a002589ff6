"""The batches of a driver, one after the other: plan, run as a Spark job, settle.

When few messages wait, the tasks of a job follow their queues and report meanwhile.

Invariant: what a job did not report is planned again after it. In order, after a job that failed,
once its tasks begin no further call and Spark has killed them: tasks hold the order locks in the
driver's name, so the broker could not keep two of them apart.
"""

from __future__ import annotations

import copy
import logging
import pickle
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from orbitmq.clock import Clock, SystemClock
from orbitmq.errors import AccessDenied, OrbitError, SettingError
from orbitmq.spark.consuming.progress import (
    BatchReport,
    PieceReport,
    PipelineFailed,
    PipelineProgress,
    PipelineState,
)
from orbitmq.spark.consuming.queues import (
    AdaptiveBatchSize,
    assign_to_tasks,
    deal_queues,
    growing_pause,
)
from orbitmq.spark.health import FailureRate
from orbitmq.spark.internals import cause_first, task_slots
from orbitmq.spark.options import cause_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from orbitmq.spark.consuming.link import LinkOffer
    from orbitmq.spark.consuming.pipeline import Attended, Driver, PackedDefinition
    from orbitmq.spark.consuming.queues import BatchPlan, Piece


log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that a cancelled batch has to end, and between two cancellations.
_CANCELLED: Final = 10.0
_CANCELLED_AGAIN: Final = 0.5
#: Seconds between two looks at a job that follows queues, at most.
_LOOK_EVERY: Final = 0.5
_LOOK_FOR_IDLE: Final = 0.05
#: Seconds that tasks of any job may wait for slots, and then without following.
_MAY_WAIT: Final = 1.0
_GIVING_WAY: Final = 10.0
#: Seconds that all tasks have to reach the driver, and then without following, longer each time.
_TO_CONNECT: Final = 30.0
_UNREACHED: Final = (10.0, 600.0)
_NOT_REACHED: Final = "tasks have not reached the driver"
#: Jobs that fail in a row, or tasks with the same queue, that make a pipeline failing.
_FAILING: Final = 3
#: Characters of a task's error that are reported.
_SHOWN: Final = 500


#: Handles the pieces of each task, as `run_in_spark`.
RunBatch: TypeAlias = "Callable[..., list[PieceReport]]"


class BatchLoop:
    """Runs the batches of a driver, on a thread of its own."""

    def __init__(
        self,
        spark: SparkSession,
        driver: Driver,
        on_batch: Callable[[BatchReport], object] | None = None,
        *,
        clock: Clock | None = None,
        jobs: SparkJobs | None = None,
        run_batch: RunBatch | None = None,
    ) -> None:
        self._spark = spark
        self._driver = driver
        self._settings = driver.batch
        self._on_batch = on_batch
        self._clock = clock or SystemClock()
        self._pace = AdaptiveBatchSize(driver.batch.messages)
        self._jobs = jobs or SparkJobs(spark)
        self._run_batch = run_batch or run_in_spark
        self._tasks = self._slots = 1
        self._thread: threading.Thread | None = None
        #: Runs jobs that follow queues, beside the thread that looks after them.
        self._runner = JobThread(f"orbitmq job {driver.group}")
        self._batches_until = float("-inf")  #: until then no job follows queues
        self._unreached = 0  #: jobs in a row whose tasks did not reach the driver
        #: The beginning of what the next report is about: date and time.
        self._began = (0.0, 0.0)
        self._stopping = threading.Event()
        #: Set when batches end by themselves.
        self._ended = threading.Event()
        # Guards the following, which the batch thread changes and others read.
        self._news = threading.Condition()
        self._looks = 0
        self._idle_look = 0
        self._awaiting_idle = 0  #: calls of `until_idle`
        self._counts = {"batches": 0, "done": 0, "retried": 0, "dead": 0, "missing": 0}
        self._failures = FailureRate()
        self._lost_jobs = 0  #: jobs that failed since something got done
        self._last: BatchReport | None = None
        self._last_error: str | None = None
        self.failure: PipelineFailed | AccessDenied | None = None

    # ---- life

    def check(self) -> None:
        """Refuse a session that cannot keep the order of messages. Raises `SettingError`."""
        speculates = self._spark.conf.get("spark.speculation", "false")
        if self._driver.options.ordered and str(speculates).lower() == "true":
            raise SettingError(
                "spark.speculation must be false for consumption in order: it runs a task twice "
                "at the same time"
            )
        self._tasks = self._settings.tasks or parallelism(self._spark)

    def start(self, ended: threading.Event) -> None:
        """Start; `ended` is set when the batches end without `stop`."""
        self._ended = ended
        self._thread = threading.Thread(
            target=self.run, name=f"orbitmq batches {self._driver.group}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Start no further batch; wait for the running one, then cancel it."""
        self._stopping.set()
        thread = self._thread
        if thread is None:
            return
        thread.join(self._settings.stop)
        if thread.is_alive():
            self._cancel(thread)
        self._runner.stop()

    def _cancel(self, thread: threading.Thread) -> None:
        """Cancel the running batch, repeatedly: its job may only be about to start."""
        until = self._clock.monotonic() + _CANCELLED
        is_logged = False
        while thread.is_alive() and (left := until - self._clock.monotonic()) > 0:
            if self._jobs.is_running and not is_logged:
                is_logged = True
                log.warning(
                    "the running batch is cancelled, its messages come again",
                    extra={"group": self._driver.group},
                )
            # Also after its end for this thread: in Connect, its tasks may run on.
            self._jobs.cancel()
            thread.join(min(left, _CANCELLED_AGAIN))

    @property
    def is_caller(self) -> bool:
        return threading.current_thread() is self._thread

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise copy.copy(self.failure)  # each call adds its traceback

    # ---- what is asked about it

    def until_idle(self, timeout: float | None) -> bool:
        """Wait for a plan, made from now on, that finds no messages."""
        with self._news:
            after = self._looks
            self._awaiting_idle += 1
            try:
                self._news.wait_for(
                    lambda: self._idle_look > after or self.failure or self._stopping.is_set(),
                    timeout,
                )
            finally:
                self._awaiting_idle -= 1
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
                    max(self._lost_jobs, failed_in_a_row) >= _FAILING
                    or self._failures.is_failing(now)
                ),
                **self._counts,
            )

    # ---- on the thread

    def run(self) -> None:
        """Run batches until `stop`, or until too many jobs have failed in a row."""
        try:
            while not self._stopping.is_set():
                error = self.run_once()
                if error is None:
                    continue
                if isinstance(error, AccessDenied):
                    self._end_with(error)
                    return
                # Not reset by empty plans: queues pause after failures.
                failures = self._lost_jobs
                if failures >= self._settings.failures:
                    self._give_up(failures, error)
                    return
                first, longest = self._settings.first_pause, self._settings.longest_pause
                self._stopping.wait(growing_pause(first, failures, longest))
        except Exception as error:
            # A driver that was stopped meanwhile raises OrbitError. Anything else is a defect of
            # this package; unreported, `run` would wait indefinitely.
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
        self._end_with(failure)

    def _end_with(self, failure: PipelineFailed | AccessDenied) -> None:
        try:
            self._driver.stop()
        finally:
            with self._news:
                self.failure = failure
            self._ended.set()

    def run_once(self) -> str | AccessDenied | None:
        """Plan, and run a batch if there are messages; returns why it failed."""
        look = self._new_look()
        # Before the plan, which does not include queues that come later.
        is_settled = self._driver.is_settled()
        may_follow = self._driver.has_link and self._clock.monotonic() >= self._batches_until
        planned = self._driver.plan(self._pace.size, follow=may_follow)
        for queue, error in planned.errors.items():
            self._note(f"{queue}: {error}")
        if is_settled and not planned.messages and not planned.errors:
            self._note_idle(look)
        if planned.pieces and self._stopping.is_set():
            # Stopped while brokers were asked.
            self._driver.settle(planned, [])
            return None
        if planned.pieces:
            return self._batch(planned)
        if (denial := self._driver.denial()) is not None:
            self._note(str(denial))
            return denial
        self._stopping.wait(self._settings.idle)
        return None

    def _new_look(self) -> int:
        with self._news:
            self._looks += 1
            return self._looks

    def _note_idle(self, look: int) -> None:
        """Tell `until_idle` that no messages were there, unless some wait for later."""
        if any(self._driver.lag().values()):
            return
        with self._news:
            self._idle_look = look
            self._news.notify_all()

    def _batch(self, planned: BatchPlan) -> str | None:
        began = self._clock.monotonic()
        self._began = self._clock.now(), began
        reports: list[PieceReport] = []
        failure: str | None = None
        self._tasks = self._tasks_now()
        tasks = self._dealt(planned)
        planned.pieces = tuple(piece for some in tasks for piece in some)
        sizes = [len(some) for some in tasks]
        try:
            reports = (self._follow if planned.follows else self._run_job)(planned, sizes)
            failure = self._failure(planned, reports)
        except Exception as error:
            # However a job fails, its messages come again.
            failure = cause_of(f"{type(error).__name__}: {error}")
            if not self._stopping.is_set():
                log.warning(
                    "a batch failed: %s",
                    failure,
                    exc_info=error,
                    extra={"group": self._driver.group},
                )
            if self._driver.options.ordered:
                # Its tasks may run on, and some on executors that are lost.
                reports = postponed(enumerate(planned.pieces), self._settings.seconds + READY)
        finally:
            missing = self._driver.settle(planned, reports)
        self._report(planned, reports, missing, len(tasks), failure)
        if failure is None and not planned.follows:
            self._learn(planned, reports)
        elif self._clock.monotonic() - began < self._settings.first_pause:
            # Something is wrong with a queue, or changes.
            self._stopping.wait(self._settings.first_pause)
        return failure

    def _dealt(self, planned: BatchPlan) -> list[tuple[Piece, ...]]:
        """The pieces of each task."""
        if planned.follows:
            # One slot is left to other jobs where there are several, as this job lasts. A task
            # without a slot would leave its queues alone.
            self._slots = self._slots_now()
            tasks = min(self._settings.tasks or max(1, self._slots - 1), self._slots)
            return deal_queues(planned.pieces, tasks)
        return assign_to_tasks(
            planned.pieces, self._tasks, may_cut=not self._driver.options.ordered
        )

    def _report(
        self,
        planned: BatchPlan,
        reports: Sequence[PieceReport],
        missing: int,
        tasks: int,
        failure: str | None = None,
    ) -> None:
        """Publish what was done since the last report."""
        errors = [text for report in reports if (text := report.task_error or report.error)]
        is_empty = all(report.is_empty for report in reports)
        if planned.follows and is_empty and not (failure or errors or missing):
            return
        began_at, began = self._began
        self._began = self._clock.now(), self._clock.monotonic()
        sums = {
            name: sum(getattr(report, name) for report in reports)
            for name in ("done", "retried", "dead", "kept", "held", "failed")
        }
        self._publish(
            is_lost=failure is not None,
            got_on=any(_got_on(planned, report) for report in reports),
            report=BatchReport(
                number=self._counts["batches"] + 1,
                began_at=began_at,
                seconds=self._clock.monotonic() - began,
                planned=planned.messages,
                missing=missing,
                tasks=tasks,
                lag=self._driver.lag(),
                error=failure or (errors[-1][:_SHOWN] if errors else None),
                **sums,
            ),
        )

    # ---- a job that follows queues

    def _follow(self, planned: BatchPlan, sizes: list[int]) -> list[PieceReport]:
        """Run a job whose tasks follow their queues, and end it when something else is due."""
        offer = self._driver.open_link(len(sizes))
        job = self._runner.submit(lambda: self._run_job(planned, sizes, offer))
        began = had_slots = self._clock.monotonic()
        why: str | None = None
        is_complete = False
        try:
            while not self._is_over(job):
                look = self._new_look()
                is_settled = self._driver.is_settled()
                seen = self._driver.attend(planned)
                is_complete = seen.is_complete
                self._report(planned, seen.reports, seen.missing, len(sizes))
                for queue, error in planned.errors.items():
                    self._note(f"{queue}: {error}")
                if is_settled and not planned.errors:
                    self._note_idle(look)
                now = self._clock.monotonic()
                had_slots = had_slots if self._wait_for_slots() else now
                if why is None:
                    why = seen.why or self._why_to_end(seen, now - began, now - had_slots)
                    if why is not None:
                        log.debug("tasks end: %s", why, extra={"group": self._driver.group})
                        self._driver.end_tasks()
        finally:
            with suppress(OrbitError):
                self._driver.end_tasks()
            wait([job])
        seen = self._driver.attend(planned)
        self._report(planned, seen.reports, seen.missing, len(sizes))
        reports = job.result()
        if not is_complete and why in (None, _NOT_REACHED):
            self._give_up_following(offer)
        elif is_complete:
            self._unreached = 0
        return reports

    def _is_over(self, job: Future[list[PieceReport]]) -> bool:
        """Wait until the next look is due; whether the job is over."""
        pause = _LOOK_FOR_IDLE if self._awaiting_idle else _LOOK_EVERY
        return job in wait([job], pause).done

    def _why_to_end(self, seen: Attended, lasted: float, waited: float) -> str | None:
        """Why a job that follows queues should end, for reasons that are not its queues'."""
        if self._stopping.is_set():
            return "the pipeline stops"
        if lasted >= (self._settings.follow or 0.0):
            return "its time is over"
        if sum(self._driver.lag().values()) > self._pace.size:
            return "many messages wait, which all tasks share in a batch"
        if waited > _MAY_WAIT:
            self._batches_until = self._clock.monotonic() + _GIVING_WAY
            return "tasks of the session wait for slots"
        if lasted >= _TO_CONNECT and not seen.is_complete:
            return _NOT_REACHED
        return None

    def _give_up_following(self, offer: LinkOffer) -> None:
        """Handle messages in batches for a while: tasks did not reach this process."""
        self._unreached += 1
        pause = growing_pause(_UNREACHED[0], self._unreached, _UNREACHED[1])
        self._batches_until = self._clock.monotonic() + pause
        log.warning(
            "tasks do not reach the driver at %s:%d, so messages are handled in batches for %g s",
            offer.host,
            offer.port,
            pause,
            extra={"group": self._driver.group},
        )

    def _wait_for_slots(self) -> bool:
        """Whether tasks of any job of the session wait while all slots are in use."""
        tracker = self._spark.sparkContext.statusTracker()
        found = map(tracker.getStageInfo, tracker.getActiveStageIds())
        stages = [each for each in found if each is not None]
        active = sum(each.numActiveTasks for each in stages)
        left = sum(each.numTasks - each.numCompletedTasks for each in stages)
        return self._slots <= active < left

    def _failure(self, planned: BatchPlan, reports: list[PieceReport]) -> str | None:
        """Why a job that Spark finished counts as failed, if it does.

        It counts as failed when some task did not run and nothing was done at all. Otherwise one
        executor or one queue may be the problem, and the other queues go on.
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
        """The number of tasks of a batch now: executors come and go."""
        # In Connect it takes a job to find out, too much for every batch.
        if self._settings.tasks or getattr(self._spark, "sparkContext", None) is None:
            return self._tasks
        try:
            return parallelism(self._spark)
        except Exception as error:  # noqa: BLE001
            # A session that has ended, or another error of Java: the job will fail with it.
            log.debug("the number of parallel tasks is not known: %s", error)
            return self._tasks

    def _slots_now(self) -> int:
        """The number of tasks that all jobs of the session run at the same time now."""
        try:
            return max(1, task_slots(self._spark.sparkContext) or parallelism(self._spark))
        except Exception as error:  # noqa: BLE001
            # As above.
            log.debug("the number of slots is not known: %s", error)
            return self._slots

    def _learn(self, planned: BatchPlan, reports: list[PieceReport]) -> None:
        # A task that failed says nothing about the speed of the handlers.
        reports = [report for report in reports if _has_run(report)]
        given = sum(len(planned.pieces[report.place].range) for report in reports)
        finished = sum(
            report.finished - planned.pieces[report.place].range.start + report.finished_beyond
            for report in reports
        )
        self._pace.learn(given, finished)
        if not finished and not any(report.pause for report in reports):
            # Something is wrong with brokers or locks, and will be for a moment.
            self._stopping.wait(self._settings.first_pause)

    def _run_job(
        self, planned: BatchPlan, sizes: list[int], offer: LinkOffer | None = None
    ) -> list[PieceReport]:
        packed = self._driver.packed
        places = iter(enumerate(planned.pieces))
        tasks = [[next(places) for _ in range(size)] for size in sizes]
        seconds, is_ordered = self._settings.seconds, self._driver.options.ordered
        self._jobs.begin()
        try:
            return self._run_batch(
                self._spark, packed, tasks, seconds, is_ordered=is_ordered, offer=offer
            )
        finally:
            # A listener of batches may run jobs of its own on this thread.
            self._jobs.end()

    def _publish(self, report: BatchReport, *, is_lost: bool, got_on: bool) -> None:
        """Publish the report of a batch."""
        with self._news:
            self._last = report
            self._counts["batches"] += 1
            for name in ("done", "retried", "dead", "missing"):
                self._counts[name] += getattr(report, name)
            if is_lost:
                self._lost_jobs += 1
            elif got_on:
                # Not for an empty batch, in which queues only pause after failed tasks.
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


class JobThread:
    """One thread for all jobs, as Java keeps one for each thread; it keeps no program alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have a call made; calls are made one after the other."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def stop(self) -> None:
        """End the thread after its calls."""
        self._calls.put(None)

    def _run(self) -> None:
        while (found := self._calls.get()) is not None:
            future, call = found
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  # raised where the result is wanted
                future.set_exception(error)


def _has_run(report: PieceReport) -> bool:
    """Whether a task handled the piece, whatever the result."""
    return not report.task_error and not report.is_postponed


def _got_on(planned: BatchPlan, report: PieceReport) -> bool:
    """Whether handlers were called for the piece, or nothing prevented it."""
    start = planned.pieces[report.place].range.start
    is_further = report.finished > start or report.finished_beyond > 0
    return is_further or report.failed > 0 or (_has_run(report) and not report.error)


# A batch as a Spark job. `spark.range` with one partition for each number is the one way to assign
# work to tasks in classic and Connect sessions. The rows that come back are reports.
#
# Spark retries a task whose executor it has lost, although the executor may still be working. In
# order a second attempt therefore handles nothing and postpones its queues until the first begins
# no call. For the same reason an error of a task is reported, not raised: Spark would retry it.

#: In order: seconds that a process may need for handlers and connections before its first call. A
#: lost attempt may begin calls for that much longer.
READY: Final = 10.0


def run_in_spark(
    spark: SparkSession,
    packed: PackedDefinition | None,
    tasks: Sequence[Sequence[tuple[int, Piece]]],
    seconds: float,
    *,
    is_ordered: bool = False,
    offer: LinkOffer | None = None,
) -> list[PieceReport]:
    """Handle the pieces of each task. Raises what Spark raises when the job fails.

    In order, an error of a task is in the reports of its pieces instead. With an offer the tasks
    follow their queues.
    """
    assert packed is not None  # noqa: S101  # made by the start of the driver
    numbers = spark.range(0, len(tasks), 1, len(tasks))
    handle = _handling(packed, tasks, seconds, is_ordered=is_ordered, offer=offer)
    rows = numbers.mapInArrow(handle, "reports BINARY").collect()
    return [report for row in rows for report in pickle.loads(row.reports)]  # noqa: S301  # our own


def link_host(spark: SparkSession) -> tuple[str, str] | None:
    """Where tasks reach this process, and the address to listen on; None when they may not."""
    # In Connect this process is a client, which executors need not reach.
    context = getattr(spark, "sparkContext", None)
    if context is None:
        return None
    if str(context.master).startswith("local"):
        return "127.0.0.1", "127.0.0.1"
    host = str(context.getConf().get("spark.driver.host", "127.0.0.1"))
    return host, str(context.getConf().get("spark.driver.bindAddress", host))


def parallelism(spark: SparkSession) -> int:
    """The number of tasks that a session runs in parallel."""
    # A Connect session has no context; there it is the default number of partitions.
    context = getattr(spark, "sparkContext", None)
    if context is not None:
        return max(1, int(context.defaultParallelism))
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # the usual name

    return max(1, spark.range(1000).select(F.spark_partition_id()).distinct().count())


def _handling(
    packed: PackedDefinition,
    tasks: Sequence[Sequence[tuple[int, Piece]]],
    seconds: float,
    *,
    is_ordered: bool,
    offer: LinkOffer | None,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    tasks = tuple(tuple(each) for each in tasks)

    def handle(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with cause_first():
            yield from reports(batches)

    def reports(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from orbitmq.spark.consuming.worker import worker_for  # noqa: PLC0415  # tasks only

        for batch in batches:
            for number in batch.column(0).to_pylist():
                pieces = tasks[number]
                if _attempt() > 0 and is_ordered:
                    yield _row(postponed(pieces, seconds + READY))
                elif _attempt() > 0 and offer is not None:
                    # It knows where the queues were when the job began, not what was done since.
                    yield _row(_begun(pieces, error="an attempt to handle it was lost"))
                elif is_ordered:
                    yield _row(_in_order(packed, pieces, seconds, offer, number))
                else:
                    yield _row(worker_for(packed).handle(pieces, seconds, offer, number))

    return handle


def _in_order(
    packed: PackedDefinition,
    pieces: Sequence[tuple[int, Piece]],
    seconds: float,
    offer: LinkOffer | None,
    number: int,
) -> list[PieceReport]:
    """Handle pieces, or report why not; nothing is raised."""
    from orbitmq.spark.consuming.worker import worker_for  # noqa: PLC0415  # tasks only

    latest = time.monotonic() + seconds + READY
    try:
        worker = worker_for(packed)
        left = latest - time.monotonic()
        if left > 0:
            return worker.handle(pieces, min(seconds, left), offer, number)
    except Exception as error:  # noqa: BLE001
        # Unpacked handlers may raise anything.
        why = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        return _begun(pieces, task_error=why)
    took = f"more than {seconds + READY:g} s"
    why = f"it took {took} to get the handlers ready, and no call was begun"
    return _begun(pieces, task_error=why)


def _begun(pieces: Iterable[tuple[int, Piece]], **more: Any) -> list[PieceReport]:
    """Reports that nothing was done."""
    return [PieceReport(place=place, finished=piece.range.start, **more) for place, piece in pieces]


def _attempt() -> int:
    """The number of earlier attempts of the running task."""
    from pyspark import TaskContext  # noqa: PLC0415  # tasks only

    context = TaskContext.get()
    return 0 if context is None else int(context.attemptNumber())


def postponed(pieces: Iterable[tuple[int, Piece]], seconds: float) -> list[PieceReport]:
    """Reports that pieces must wait until a lost attempt begins no more calls."""
    # It began earlier than now, so its time limit ends earlier as well.
    error = "an attempt to handle it was lost and may still be running"
    return _begun(pieces, pause=seconds, error=error, is_postponed=True)


def _row(reports: Sequence[PieceReport]) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    packed = pickle.dumps(list(reports))
    return pa.RecordBatch.from_pydict({"reports": pa.array([packed], pa.binary())})


class SparkJobs:
    """Tags the jobs of one thread, so that any thread can cancel them.

    A job that fails or is cancelled is over for its caller immediately, but its tasks run on: Spark
    checks every two seconds for tasks to end, waits `spark.python.task.killTimeout` and kills the
    worker.
    """

    def __init__(self, spark: SparkSession) -> None:
        # In a classic session, a session's tags are visible only to the thread that set them.
        context = getattr(spark, "sparkContext", None)
        owner: Any = spark if context is None else context
        names = ("addTag", "removeTag", "interruptTag")
        if context is not None:
            names = ("addJobTag", "removeJobTag", "cancelJobsWithTag")
        self._add, self._remove, self._interrupt = (getattr(owner, name) for name in names)
        #: Of the last job, kept after its end: tasks may still run.
        self._tag: str | None = None
        self.is_running = False

    def begin(self) -> None:
        """Tag the jobs that this thread runs from now on."""
        self._tag = f"orbitmq-{uuid.uuid4().hex}"
        self.is_running = True
        self._add(self._tag)

    def end(self) -> None:
        """Stop tagging."""
        self.is_running = False
        self._try(self._remove)

    def cancel(self) -> None:
        """Cancel the job, from any thread; its tasks end some time later."""
        self._try(self._interrupt)

    def _try(self, act: Callable[[str], object]) -> None:
        if self._tag is None:
            return
        try:
            act(self._tag)
        except Exception as error:  # noqa: BLE001
            # A session that has ended, or another error of Java: nothing runs then.
            log.warning("a job cannot be cancelled: %s", error)
