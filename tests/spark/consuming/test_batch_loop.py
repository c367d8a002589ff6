"""The loop of batches: when a group is failing, when it ends, what a stop does; without Spark."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext

from orbitmq.client.ranges.connections import QueueRange
from orbitmq.client.routes import Queue
from orbitmq.spark.consuming import batches, worker
from orbitmq.spark.consuming.batches import READY, BatchLoop, SparkJobs, run_in_spark
from orbitmq.spark.consuming.pipeline import BatchSettings
from orbitmq.spark.consuming.progress import (
    PieceReport,
    PipelineFailed,
    PipelineProgress,
    PipelineState,
)
from orbitmq.spark.consuming.queues import BatchPlan, Piece
from tests.support.store import HandClock

DEADLINE = 60.0

LOST = RuntimeError("executor lost")
DONE = PieceReport(place=0, finished=10, done=10)
BLOCKED = PieceReport(place=0, finished=0, attempts={0: 1}, pause=1.0, failed=1)
BROKEN = PieceReport(place=0, finished=0, task_error="ModuleNotFoundError: billing\nTraceback ...")
UNREAD = PieceReport(place=0, finished=0, error="BrokerUnavailable: broker-b")
POSTPONED = PieceReport(place=0, finished=0, pause=5.0, error="lost", is_postponed=True)

Outcome = PieceReport | Exception | Sequence[PieceReport]


def pieces(count: int, messages: int = 10) -> tuple[Piece, ...]:
    queues = (Queue("orders", "broker-a", number) for number in range(count))
    return tuple(Piece(QueueRange(queue, 0, messages)) for queue in queues)


def stub(**facts: Any) -> Any:
    return SimpleNamespace(**facts)


class Group:
    """A loop whose plans and jobs have the results that a test sets."""

    def __init__(self, jobs: Any = None, **settings: float) -> None:
        self.settled: list[list[PieceReport]] = []
        self.limits: list[int] = []
        self.spark = stub()
        self.clock = HandClock()
        self.outcome: list[PieceReport] | Exception = []
        times: Any = {"first_pause": 0.001, "longest_pause": 0.001, "idle": 0.001, **settings}
        self.stops: list[int] = []
        self.driver = stub(
            batch=BatchSettings(**times),
            group="billing",
            client_id="1",
            options=stub(ordered=False),
            packed=object(),
            lag=dict,
            denial=lambda: None,
            has_link=False,
            is_settled=lambda: True,
            failed_in_a_row=lambda: 0,
            settle=self._settle,
            stop=lambda: self.stops.append(1),
        )
        jobs = jobs or stub(begin=lambda: None, end=lambda: None)
        self.loop = BatchLoop(
            self.spark, self.driver, clock=self.clock, jobs=jobs, run_batch=self.job
        )

    def batch(self, outcome: Outcome, *, messages: int = 10) -> None:
        """Run a batch with one queue for each report; an exception fails its job."""
        if isinstance(outcome, Exception):
            self.outcome, count = outcome, 1
        else:
            reports = [outcome] if isinstance(outcome, PieceReport) else outcome
            self.outcome = [replace(each, place=n) for n, each in enumerate(reports)]
            count = len(self.outcome)
        self.plan_by(lambda: pieces(count, messages))
        self.loop.run_once()
        self.clock.advance(1)

    def plan_by(self, plan: Callable[[], tuple[Piece, ...]]) -> None:
        def planned(limit: int, *, follow: bool) -> BatchPlan:
            self.limits.append(limit)
            return BatchPlan(pieces=plan())

        self.driver.plan = planned

    def progress(self) -> PipelineProgress:
        return self.loop.progress(PipelineState.RUNNING)

    def _settle(self, planned: BatchPlan, reports: list[PieceReport]) -> int:
        self.settled.append(reports)
        return sum(report.missing for report in reports)

    def job(self, *_: Any, is_ordered: bool, offer: None) -> list[PieceReport]:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def group():
    return Group()


@pytest.mark.parametrize(
    ("batches", "share", "is_failing"),
    [
        # Attempts of messages.
        ([PieceReport(place=0, finished=10, done=8, retried=12, failed=12)], 0.6, True),
        ([BLOCKED] * 10, 1.0, True),  # in order, one message blocks its queue
        ([BLOCKED] * 10 + [DONE] * 2, 1 / 3, False),
        ([PieceReport(place=0, finished=0, pause=1.0, held=1)] * 6, None, False),
        # Jobs.
        ([LOST, LOST], None, False),
        ([LOST, DONE, LOST, LOST], 0.0, False),
        ([LOST] * 3, None, True),
        ([LOST, LOST, LOST, DONE], 0.0, False),
        ([(BROKEN, POSTPONED)] * 3, None, True),
        ([POSTPONED, POSTPONED, (POSTPONED, DONE), POSTPONED], 0.0, False),
        ([UNREAD] * 50, None, False),  # the brokers are the problem
        # A job has not failed if handlers were called.
        ([(BROKEN, replace(UNREAD, finished=1, done=1))] * 5, 0.0, False),
        ([(BROKEN, replace(UNREAD, beyond=(3, 4)))] * 5, None, False),
        ([(BROKEN, replace(BLOCKED, error="ValueError: order 7"))] * 5, 1.0, False),
        ([(BROKEN, PieceReport(place=1, finished=0, pause=1.0, held=1))] * 5, None, False),
    ],
)
def test_a_group_is_failing_when_most_attempts_or_jobs_fail(group, batches, share, is_failing):
    for outcome in batches:
        group.batch(outcome)

    assert (group.progress().failed_share, group.progress().is_failing) == (share, is_failing)


def test_a_queue_whose_tasks_fail_three_times_in_a_row_makes_a_group_failing(group):
    seen = []
    for failures in range(4):
        group.driver.failed_in_a_row = lambda failures=failures: failures
        seen.append(group.progress().is_failing)

    assert seen == [False, False, False, True]


def test_a_task_that_fails_beside_others_is_reported_and_ends_no_pipeline(group):
    for _ in range(3 * group.driver.batch.failures):
        group.batch([BROKEN, PieceReport(place=1, finished=5000, done=5000)], messages=5000)

    last = group.progress().last_batch
    assert last is not None
    assert (last.error or "").startswith("ModuleNotFoundError: billing")
    assert group.loop.failure is None
    assert not group.progress().is_failing
    # The others' work counts, and batches do not shrink.
    assert [report.finished for report in group.settled[-1]] == [0, 5000]
    assert group.limits[-1] >= 5000


@pytest.mark.parametrize(
    ("every", "outcome", "between"),
    [(3, [BROKEN, UNREAD], [UNREAD]), (3, [POSTPONED], [])],
    ids=["a task fails and a broker is away", "queues are postponed"],
)
def test_a_pipeline_in_which_nothing_gets_done_ends(group, every, outcome, between):
    """A queue whose task failed waits, with other batches or none in between."""
    looks = 0

    def plan():
        nonlocal looks
        looks += 1
        if looks > 200:
            group.loop.stop()
        reports = between if looks % every else outcome
        group.outcome = [replace(each, place=place) for place, each in enumerate(reports)]
        return pieces(len(reports))

    group.plan_by(plan)
    group.loop.run()

    assert isinstance(group.loop.failure, PipelineFailed)
    assert (group.loop.failure.failures, looks) == (10, 10 * every)
    assert group.stops == [1]


def test_an_error_that_ends_the_batches_is_reported_and_ends_the_pipeline(group):
    """As the death of Java: `run` must return."""
    ended = threading.Event()

    def plan():
        raise ConnectionRefusedError("Java is gone")

    group.plan_by(plan)
    group.loop.start(ended)

    assert ended.wait(DEADLINE)
    assert isinstance(group.loop.failure, PipelineFailed)
    assert group.loop.failure.last == "ConnectionRefusedError: Java is gone"
    assert group.stops == [1]


@pytest.mark.parametrize("is_connect", [False, True])
def test_a_session_that_has_ended_does_not_prevent_a_stop(is_connect):
    def gone(tag):
        raise ConnectionRefusedError("Java is gone")

    context = SimpleNamespace(addJobTag=str, removeJobTag=gone, cancelJobsWithTag=gone)
    spark: Any = SimpleNamespace(sparkContext=context)
    if is_connect:
        spark = SimpleNamespace(addTag=str, removeTag=gone, interruptTag=gone)
    jobs = SparkJobs(spark)

    jobs.begin()
    jobs.cancel()
    jobs.end()

    assert not jobs.is_running


def test_an_unfinished_message_at_the_head_makes_no_batch_smaller(group):
    for _ in range(2):
        group.batch(PieceReport(place=0, finished=0, beyond=(1, 5000)), messages=5000)

    assert group.limits[-1] >= 5000


# ---- a batch as a Spark job


PIECE = Piece(QueueRange(Queue("orders", "broker-a", 0), 10, 30))


class Session:
    """A session that runs the tasks of a job here."""

    def range(self, start: int, end: int, *_: int) -> Session:
        self._numbers = pa.RecordBatch.from_pydict({"id": pa.array(range(start, end))})
        return self

    def mapInArrow(self, handle: Any, _schema: str) -> Session:  # noqa: N802  # Spark's name
        self._handle = handle
        return self

    def collect(self) -> list[Any]:
        batches = self._handle(iter([self._numbers]))
        return [SimpleNamespace(**row) for batch in batches for row in batch.to_pylist()]


class Idle:
    """A worker that finishes every piece."""

    def __init__(self) -> None:
        self.given: list[float] = []

    def handle(self, pieces: Any, seconds: float, *_: Any) -> list[PieceReport]:
        self.given.append(seconds)
        return [PieceReport(place=place, finished=piece.range.end) for place, piece in pieces]


@pytest.fixture
def run(monkeypatch):
    """Runs a job with one piece; returns its report."""

    def run(*, attempt=0, is_ordered=True, worker_for=lambda _: Idle()):
        context = SimpleNamespace(attemptNumber=lambda: attempt)
        monkeypatch.setattr(TaskContext, "get", lambda: context)
        monkeypatch.setattr(worker, "worker_for", worker_for)
        packed: Any = object()
        spark: Any = Session()
        (report,) = run_in_spark(spark, packed, [[(0, PIECE)]], 5.0, is_ordered=is_ordered)
        return report

    return run


def lacks_a_module(packed: Any) -> Any:
    raise ModuleNotFoundError("No module named 'billing'")


def test_in_order_a_second_attempt_handles_nothing_and_postpones_its_queues(run):
    report = run(attempt=1)

    assert (report.place, report.finished, report.is_postponed) == (0, 10, True)
    # As long as the first attempt may take to get ready and to begin calls.
    assert report.pause == 5.0 + READY
    assert "attempt" in report.error


def test_in_order_an_error_of_a_task_is_reported_and_not_left_to_spark(run):
    """Spark would try the task again, and accept an attempt that does nothing."""
    report = run(worker_for=lacks_a_module)

    assert (report.place, report.finished) == (0, 10)
    assert report.task_error.startswith("ModuleNotFoundError: No module named 'billing'")
    assert "Traceback" in report.task_error


@pytest.mark.parametrize(
    ("getting_ready", "given"), [(1.0, [5.0]), (READY + 2, [3.0]), (READY + 5, [])]
)
def test_in_order_a_task_that_is_ready_late_begins_no_call_too_late(
    run, monkeypatch, getting_ready, given
):
    now, idle = 100.0, Idle()

    def slowly(packed):
        nonlocal now
        now += getting_ready
        return idle

    monkeypatch.setattr(batches, "time", SimpleNamespace(monotonic=lambda: now))
    report = run(worker_for=slowly)

    assert idle.given == given
    assert (report.task_error is None) == bool(given)
