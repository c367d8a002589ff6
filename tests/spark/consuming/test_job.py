"""What a task of a batch does, and what it does when Spark tries it again; no Spark is needed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from orbitmq.client.ranges.connections import QueueRange
from orbitmq.client.routes import Queue
from orbitmq.spark.consuming import batches, worker
from orbitmq.spark.consuming.progress import PieceReport
from orbitmq.spark.consuming.queues import Piece

pa = pytest.importorskip("pyarrow")

PIECE = Piece(QueueRange(Queue("orders", "broker-a", 0), 10, 30))


class Idle:
    """A worker that says that all is done."""

    def handle(self, pieces: Any, seconds: float) -> list[PieceReport]:
        return [PieceReport(place=place, finished=piece.range.end) for place, piece in pieces]


def told(
    monkeypatch: pytest.MonkeyPatch,
    *,
    attempt: int,
    is_ordered: bool,
    worker_for: Callable[[Any], Any] = lambda packed: Idle(),
) -> dict[str, Any]:
    """The row of the only piece."""
    monkeypatch.setattr(batches, "_attempt", lambda: attempt)
    monkeypatch.setattr(worker, "worker_for", worker_for)
    packed: Any = None
    handle = batches._handling(packed, [[(0, PIECE)]], 5.0, is_ordered=is_ordered)
    numbers = pa.RecordBatch.from_pydict({"id": pa.array([0], pa.int64())})
    ((row,),) = (batch.to_pylist() for batch in handle(iter([numbers])))
    return dict(row)


def test_in_order_a_task_that_is_tried_again_handles_nothing_and_has_its_queues_wait(monkeypatch):
    row = told(monkeypatch, attempt=1, is_ordered=True)

    assert (row["place"], row["finished"], row["is_postponed"]) == (0, 10, True)
    # No less than the first attempt may take to get ready and to begin calls.
    assert row["pause"] == 5.0 + batches.READY
    assert "attempt" in row["error"]


@pytest.mark.parametrize(("attempt", "is_ordered"), [(0, True), (1, False)])
def test_other_tasks_handle_their_pieces(monkeypatch, attempt, is_ordered):
    row = told(monkeypatch, attempt=attempt, is_ordered=is_ordered)

    assert (row["finished"], row["pause"], row["error"]) == (30, None, None)
    assert (row["task_error"], row["is_postponed"]) == (None, False)


def not_there(packed: Any) -> Any:
    raise ModuleNotFoundError("No module named 'billing'")


def test_in_order_what_goes_wrong_in_a_task_is_told_and_not_left_to_spark(monkeypatch):
    """Which would try the task again, and be content with an attempt that does nothing."""
    row = told(monkeypatch, attempt=0, is_ordered=True, worker_for=not_there)

    assert (row["place"], row["finished"]) == (0, 10)
    assert row["task_error"].startswith("ModuleNotFoundError: No module named 'billing'")
    assert "Traceback" in row["task_error"]


def test_what_goes_wrong_in_other_tasks_is_left_to_spark(monkeypatch):
    with pytest.raises(ModuleNotFoundError):
        told(monkeypatch, attempt=0, is_ordered=False, worker_for=not_there)


@pytest.mark.parametrize(
    ("seconds_to_be_ready", "expected"),
    [(1.0, 5.0), (batches.READY + 2, 3.0), (batches.READY + 5, None)],
)
def test_in_order_a_task_that_is_ready_late_begins_calls_no_later_than_is_waited_for(
    monkeypatch, seconds_to_be_ready, expected
):
    now = 100.0
    given: list[float] = []

    class Noting(Idle):
        def handle(self, pieces: Any, seconds: float) -> list[PieceReport]:
            given.append(seconds)
            return super().handle(pieces, seconds)

    def slowly(packed):
        nonlocal now
        now += seconds_to_be_ready
        return Noting()

    monkeypatch.setattr(batches, "time", SimpleNamespace(monotonic=lambda: now))
    row = told(monkeypatch, attempt=0, is_ordered=True, worker_for=slowly)

    assert given == ([] if expected is None else [expected])
    assert (row["task_error"] is None) == (expected is not None)
