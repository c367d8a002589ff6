"""What a task of a batch does, and what it does when Spark tries it again; no Spark is needed."""

from __future__ import annotations

from typing import Any

import pytest

from orbitmq.client.queue import Queue
from orbitmq.client.ranges import QueueRange
from orbitmq.spark.consuming import job, kept
from orbitmq.spark.consuming.planning import Piece
from orbitmq.spark.consuming.reports import PieceReport

pa = pytest.importorskip("pyarrow")

PIECE = Piece(QueueRange(Queue("orders", "broker-a", 0), 10, 30))


class Idle:
    """A worker that says that all is done."""

    def handle(self, pieces: Any, seconds: float) -> list[PieceReport]:
        return [PieceReport(place=place, finished=piece.range.end) for place, piece in pieces]


def told(monkeypatch: pytest.MonkeyPatch, *, attempt: int, is_ordered: bool) -> dict[str, Any]:
    """The row of the only piece."""
    monkeypatch.setattr(job, "_attempt", lambda: attempt)
    monkeypatch.setattr(kept, "worker_for", lambda packed: Idle())
    packed: Any = None
    handle = job._handling(packed, [[(0, PIECE)]], 5.0, is_ordered=is_ordered)
    numbers = pa.RecordBatch.from_pydict({"id": pa.array([0], pa.int64())})
    ((row,),) = (batch.to_pylist() for batch in handle(iter([numbers])))
    return dict(row)


def test_in_order_a_task_that_is_tried_again_handles_nothing_and_has_its_queues_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = told(monkeypatch, attempt=1, is_ordered=True)

    assert (row["place"], row["finished"], row["pause"]) == (0, 10, 5.0)
    assert "attempt" in row["error"]


@pytest.mark.parametrize(("attempt", "is_ordered"), [(0, True), (1, False)])
def test_other_tasks_handle_their_pieces(
    monkeypatch: pytest.MonkeyPatch, attempt: int, is_ordered: bool
) -> None:
    row = told(monkeypatch, attempt=attempt, is_ordered=is_ordered)

    assert (row["finished"], row["pause"], row["error"]) == (30, None, None)
