"""A batch as a Spark job: what its tasks do, and what a second attempt of a task does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext

from orbitmq.client.ranges.connections import QueueRange
from orbitmq.client.routes import Queue
from orbitmq.spark.consuming import batches, worker
from orbitmq.spark.consuming.batches import READY, run_in_spark
from orbitmq.spark.consuming.progress import PieceReport
from orbitmq.spark.consuming.queues import Piece

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

    def handle(self, pieces: Any, seconds: float) -> list[PieceReport]:
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


@pytest.mark.parametrize(("attempt", "is_ordered"), [(0, True), (1, False)])
def test_other_tasks_handle_their_pieces(run, attempt, is_ordered):
    assert run(attempt=attempt, is_ordered=is_ordered) == PieceReport(place=0, finished=30)


def test_in_order_an_error_of_a_task_is_reported_and_not_left_to_spark(run):
    """Spark would try the task again, and accept an attempt that does nothing."""
    report = run(worker_for=lacks_a_module)

    assert (report.place, report.finished) == (0, 10)
    assert report.task_error.startswith("ModuleNotFoundError: No module named 'billing'")
    assert "Traceback" in report.task_error


def test_an_error_of_other_tasks_is_left_to_spark(run):
    with pytest.raises(ModuleNotFoundError):
        run(is_ordered=False, worker_for=lacks_a_module)


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
