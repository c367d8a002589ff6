"""When a group on Spark is ill, by the batches it has had; no Spark is needed."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from orbitmq.client.ranges.connections import QueueRange
from orbitmq.client.routes import Queue
from orbitmq.spark.consuming.batches import READY, BatchLoop, SparkJobs
from orbitmq.spark.consuming.pipeline import BatchSettings
from orbitmq.spark.consuming.progress import (
    PieceReport,
    PipelineFailed,
    PipelineProgress,
    PipelineState,
)
from orbitmq.spark.consuming.queues import BatchPlan, Piece
from tests.support.sparking import until
from tests.support.store import HandClock

QUEUE = Queue("orders", "broker-a", 0)
DEADLINE = 60.0


class Group:
    """A loop whose plans and jobs have the results that a test sets."""

    def __init__(self, jobs: Any = None, **settings: float) -> None:
        self.failed_in_a_row = 0
        self.settled: list[list[PieceReport]] = []
        self.limits: list[int] = []
        spark: Any = SimpleNamespace()
        self.spark = spark
        self.clock = HandClock()
        self.outcome: list[PieceReport] | Exception = []
        times: Any = {"first_pause": 0.001, "longest_pause": 0.001, "idle": 0.001, **settings}
        driver: Any = SimpleNamespace(
            batch=BatchSettings(**times),
            group="billing",
            client_id="1",
            options=SimpleNamespace(ordered=False),
            packed=object(),
            lag=dict,
            denial=lambda: None,
            is_settled=lambda: True,
            failed_in_a_row=lambda: self.failed_in_a_row,
            settle=self._settle,
        )
        calm: Any = SimpleNamespace(begin=lambda: None, end=lambda: None)
        self.driver = driver
        self.loop = BatchLoop(
            spark, driver, clock=self.clock, jobs=jobs or calm, run_batch=self.job
        )

    def batch(self, *outcome: PieceReport | Exception, messages: int = 10) -> None:
        """Run a batch with one queue for each outcome; an exception fails its job."""
        errors = [each for each in outcome if isinstance(each, Exception)]
        self.outcome = errors[0] if errors else [*outcome]  # type: ignore[list-item]
        pieces = tuple(
            Piece(QueueRange(Queue("orders", "broker-a", number), 0, messages))
            for number in range(len(outcome))
        )

        def plan(limit: int) -> BatchPlan:
            self.limits.append(limit)
            return BatchPlan(pieces=pieces)

        self.driver.plan = plan
        self.loop.run_once()
        self.clock.advance(1)

    def progress(self) -> PipelineProgress:
        return self.loop.progress(PipelineState.RUNNING)

    def _settle(self, planned: BatchPlan, reports: list[PieceReport]) -> int:
        self.settled.append(reports)
        return sum(report.missing for report in reports)

    def job(self, *_: Any, is_ordered: bool) -> list[PieceReport]:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def group():
    return Group()


def test_a_group_whose_messages_fail_is_ill(group):
    group.batch(PieceReport(place=0, finished=10, done=8, retried=12, failed=12))

    assert (group.progress().is_failing, group.progress().failed_share) == (True, 0.6)


def test_in_order_a_message_that_blocks_its_queue_counts_at_every_attempt(group):
    for attempts in range(1, 11):
        group.batch(PieceReport(place=0, finished=0, attempts={0: attempts}, pause=1.0, failed=1))

    assert (group.progress().is_failing, group.progress().failed_share) == (True, 1.0)
    for _ in range(2):
        group.batch(PieceReport(place=0, finished=10, done=10))
    assert (group.progress().is_failing, group.progress().failed_share) == (False, 1 / 3)


def test_messages_that_middleware_holds_make_no_group_ill(group):
    for _ in range(6):
        group.batch(PieceReport(place=0, finished=0, pause=1.0, held=1))

    last = group.progress().last_batch
    assert last is not None
    assert (last.held, last.failed) == (1, 0)
    assert (group.progress().is_failing, group.progress().failed_share) == (False, None)


def test_a_job_that_fails_once_makes_no_group_ill_and_several_in_a_row_do(group):
    lost = RuntimeError("executor lost")
    seen = []
    for outcome in (lost, PieceReport(place=0, finished=10, done=10), lost, lost, lost):
        group.batch(outcome)
        seen.append(group.progress().is_failing)
    group.batch(PieceReport(place=0, finished=10, done=10))

    assert seen == [False, False, False, False, True]
    assert not group.progress().is_failing


def test_jobs_of_which_every_task_failed_are_failed_jobs(group):
    failed = PieceReport(
        place=0, finished=0, task_error="ModuleNotFoundError: billing\nTraceback ..."
    )
    seen = []
    for _ in range(3):
        group.batch(failed, PieceReport(place=1, finished=0, is_postponed=True))
        seen.append(group.progress().is_failing)

    last = group.progress().last_batch
    assert last is not None
    assert (last.error or "").startswith("ModuleNotFoundError: billing")
    assert seen == [False, False, True]


def test_a_task_that_fails_beside_others_is_told_and_ends_no_pipeline(group):
    loop, driver = group.loop, group.driver
    batches = 0

    def plan(limit):
        nonlocal batches
        batches += 1
        group.limits.append(limit)
        if batches == 3 * driver.batch.failures:
            loop.stop()
            return BatchPlan()
        queues = (Queue("orders", "broker-a", number) for number in range(2))
        return BatchPlan(pieces=tuple(Piece(QueueRange(queue, 0, 5000)) for queue in queues))

    stub = group.driver
    stub.plan = plan
    group.outcome = [
        PieceReport(place=0, finished=0, task_error="ModuleNotFoundError: billing\nTraceback ..."),
        PieceReport(place=1, finished=5000, done=5000),
    ]
    loop.run()

    last = group.progress().last_batch
    assert last is not None
    assert (last.error or "").startswith("ModuleNotFoundError: billing")
    assert loop.failure is None
    assert not group.progress().is_failing
    assert group.progress().done == 5000 * (batches - 1)
    # What the others did in the same job counts, and the batches do not shrink.
    assert [report.finished for report in group.settled[-1]] == [0, 5000]
    assert group.limits[-1] >= 5000


def test_a_pipeline_in_which_nothing_gets_done_ends_though_not_every_task_fails(group):
    """A queue whose task fails waits between, with batches of one whose broker gives nothing."""
    loop = group.loop
    failed = PieceReport(place=0, finished=0, task_error="ModuleNotFoundError: billing")
    unread = PieceReport(place=1, finished=0, error="BrokerUnavailable: broker-b")
    batches = 0

    def plan(limit):
        nonlocal batches
        batches += 1
        if batches > 200:
            loop.stop()
        queues = [Queue("orders", f"broker-{name}", 0) for name in "ab"]
        pieces = [Piece(QueueRange(queue, 0, 10)) for queue in queues]
        if batches % 3:
            group.outcome = [replace(unread, place=0)]
            return BatchPlan(pieces=tuple(pieces[1:]))
        group.outcome = [failed, unread]
        return BatchPlan(pieces=tuple(pieces))

    stub = group.driver
    stub.plan, stub.stop = plan, lambda: None
    loop.run()

    assert isinstance(loop.failure, PipelineFailed)
    assert (loop.failure.failures, batches) == (10, 30)


def test_brokers_that_give_nothing_end_no_pipeline(group):
    for _ in range(50):
        group.batch(PieceReport(place=0, finished=0, error="BrokerUnavailable: broker-b"))

    assert not group.progress().is_failing


@pytest.mark.parametrize(
    "work",
    [
        PieceReport(place=1, finished=1, done=1, error="BrokerUnavailable: broker-b"),
        PieceReport(place=1, finished=0, beyond=(3, 4), error="BrokerUnavailable: broker-b"),
        PieceReport(place=1, finished=0, pause=1.0, failed=1, error="ValueError: order 7"),
        PieceReport(place=1, finished=0, pause=1.0, held=1),
    ],
)
def test_a_job_in_which_handlers_were_called_has_not_failed(group, work):
    failed = PieceReport(place=0, finished=0, task_error="ModuleNotFoundError: billing")
    for _ in range(5):
        group.batch(failed, work)

    assert not group.progress().is_failing


def test_a_queue_with_which_tasks_fail_again_and_again_makes_a_group_ill(group):
    seen = []
    for failures in range(4):
        group.failed_in_a_row = failures
        seen.append(group.progress().is_failing)

    assert seen == [False, False, False, True]


def test_what_was_passed_over_is_counted(group):
    group.batch(PieceReport(place=0, finished=10, missing=7))
    group.batch(PieceReport(place=0, finished=10, missing=3))

    last = group.progress().last_batch
    assert last is not None
    assert (last.missing, group.progress().missing) == (3, 10)


def test_batches_in_which_everything_was_put_off_are_failed_jobs(group):
    postponed = PieceReport(place=0, finished=0, pause=5.0, error="lost", is_postponed=True)
    seen = []
    for beside in ((), (), (PieceReport(place=1, finished=10, done=10),), (), (), ()):
        group.batch(postponed, *beside)
        seen.append(group.progress().is_failing)

    assert seen == [False, False, False, False, False, True]


def test_looks_that_find_nothing_between_failed_jobs_keep_no_pipeline_alive(group):
    """Queues of which an attempt was lost are not planned for a while."""
    loop, driver = group.loop, group.driver
    looks = 0
    stops: list[int] = []

    def plan(limit):
        nonlocal looks
        looks += 1
        if looks > 200:
            loop.stop()
        piece = Piece(QueueRange(QUEUE, 0, 10))
        return BatchPlan() if looks % 3 else BatchPlan(pieces=(piece,))

    stub = group.driver
    stub.plan, stub.stop = plan, lambda: stops.append(looks)
    group.outcome = [PieceReport(place=0, finished=0, error="lost", is_postponed=True)]
    loop.run()

    failures = driver.batch.failures
    assert stops == [3 * failures]
    assert isinstance(loop.failure, PipelineFailed)
    assert (loop.failure.failures, loop.failure.last) == (failures, "lost")


def test_whatever_ends_batches_is_told_and_ends_the_pipeline(group):
    """As the death of Java did, in order: whoever waited for the pipeline waited for ever."""
    loop, ended = group.loop, threading.Event()
    stub = group.driver
    stops: list[int] = []

    def plan(limit):
        raise ConnectionRefusedError("Java is gone")

    stub.plan, stub.stop = plan, lambda: stops.append(1)
    loop.start(ended)

    assert ended.wait(DEADLINE)
    assert isinstance(loop.failure, PipelineFailed)
    assert loop.failure.last == "ConnectionRefusedError: Java is gone"
    assert stops == [1]


def test_a_stop_that_comes_while_brokers_are_asked_begins_no_batch(group):
    loop = group.loop
    stub = group.driver

    def plan(limit):
        loop.stop()
        return BatchPlan(pieces=(Piece(QueueRange(QUEUE, 0, 10)),))

    stub.plan = plan
    group.outcome = AssertionError("a job is run")
    loop.run()

    # Whoever takes the queues waits for the batch to be settled.
    assert group.settled == [[]]
    assert loop.progress(PipelineState.STOPPED).batches == 0


def test_a_stop_cancels_a_job_that_begins_only_then():
    """A cancellation finds the jobs that Spark has, and this one is yet to be given to it."""
    cancelled = [threading.Event() for _ in range(3)]
    names: set[str] = set()

    class Jobs(SimpleNamespace):
        is_running = True

        def begin(self) -> None:
            names.add(threading.current_thread().name)
            assert cancelled[-1].wait(DEADLINE)
            raise RuntimeError("cancelled")

        def cancel(self) -> None:
            next(each for each in cancelled if not each.is_set()).set()

    group = Group(Jobs(), stop=0.01)
    group.driver.plan = lambda limit: BatchPlan(pieces=(Piece(QueueRange(QUEUE, 0, 10)),))
    group.loop.start(threading.Event())
    until(lambda: bool(names), "the job begins")
    group.loop.stop()

    assert names.isdisjoint(each.name for each in threading.enumerate())
    assert group.settled == [[]]


def test_in_order_queues_wait_for_the_tasks_of_a_job_that_has_failed(group):
    group.driver.options.ordered = True

    group.batch(RuntimeError("executor lost"), PieceReport(place=1, finished=10))

    found = [(each.place, each.finished, each.is_postponed) for each in group.settled[-1]]
    assert found == [(0, 0, True), (1, 0, True)]
    assert {each.pause for each in group.settled[-1]} == {group.driver.batch.seconds + READY}


@pytest.mark.parametrize("is_connect", [False, True])
def test_a_session_that_has_ended_prevents_no_stop(is_connect):
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


@pytest.mark.parametrize("outcome", [[PieceReport(place=0, finished=10)], RuntimeError("lost")])
def test_what_a_listener_of_batches_runs_is_not_cancelled_with_them(group, caplog, outcome):
    """It is on the same thread, and so were its jobs on that of the last batch."""
    tags: set[str] = set()
    in_batch, in_listener, cancelled = [], [], threading.Event()

    def job(*_, **more):
        in_batch.append(len(tags))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def listener(_):
        in_listener.append(len(tags))
        assert cancelled.wait(DEADLINE)

    group.spark.sparkContext = SimpleNamespace(
        defaultParallelism=1,
        addJobTag=tags.add,
        removeJobTag=tags.remove,
        cancelJobsWithTag=lambda _: cancelled.set(),
    )
    group.spark.conf = SimpleNamespace(get=lambda _, default: default)
    stub = group.driver
    stub.batch, stub.packed = replace(stub.batch, stop=0.2), object()
    stub.plan = lambda limit: BatchPlan(pieces=(Piece(QueueRange(QUEUE, 0, 10)),))
    loop = BatchLoop(group.spark, stub, listener, run_batch=job)
    loop.start(threading.Event())
    until(lambda: bool(in_listener), "the listener is called")
    loop.stop()

    assert (in_batch, in_listener) == ([1], [0])
    assert "its messages come again" not in caplog.text


def test_a_message_at_the_head_that_is_not_done_makes_no_batch_smaller(group):
    for _ in range(2):
        group.batch(PieceReport(place=0, finished=0, beyond=(1, 5000)), messages=5000)

    assert group.limits[-1] >= 5000


def test_a_batch_has_as_many_tasks_as_the_session_runs_by_then(group):
    group.spark.sparkContext = SimpleNamespace(defaultParallelism=2)
    group.batch(PieceReport(place=0, finished=50), messages=1000)
    early = group.progress().last_batch
    group.spark.sparkContext.defaultParallelism = 8
    group.batch(PieceReport(place=0, finished=50), messages=1000)
    late = group.progress().last_batch

    assert early is not None
    assert late is not None
    assert (early.tasks, late.tasks) == (2, 8)
