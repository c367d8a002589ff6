"""Rows with times and errors that few expect: none of them fails a task."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from orbitmq.client.consumer.handlers import Binding, bind_handler
from orbitmq.client.consumer.verdict import Retry
from orbitmq.client.received import ReceivedMessage
from orbitmq.spark.consuming.rowmessages import messages_of
from orbitmq.spark.consuming.verdicts import _judging

FIRST, LAST = -62_135_596_800_000, 253_402_300_799_999


def rows(born: Any, kind: pa.DataType) -> pa.RecordBatch:
    columns = {
        "topic": pa.array(["orders"]),
        "brokerName": pa.array(["broker-a"]),
        "queueId": pa.array([0], pa.int32()),
        "queueOffset": pa.array([0], pa.int64()),
        "body": pa.array([b"x"]),
        "bornTimestamp": pa.array([born], kind),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York", None])
@pytest.mark.parametrize("born", [FIRST, LAST, 0, 1_700_000_000_123, None])
def test_a_time_is_the_same_in_every_zone(born: int | None, zone: str | None) -> None:
    """Spark gives times in the zone of its session, where the first and the last have no date."""
    micros = None if born is None else born * 1000

    (message,) = messages_of(rows(micros, pa.timestamp("us", zone)))

    assert message.stored.born_ms == (born or 0)


def test_a_time_of_another_kind_is_no_time() -> None:
    (message,) = messages_of(rows("yesterday", pa.string()))
    (exact,) = messages_of(rows(datetime(2026, 1, 1, tzinfo=UTC), pa.timestamp("ns", "UTC")))

    assert message.stored.born_ms == 0
    assert exact.stored.born_ms == 1_767_225_600_000


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Speechless(), "Speechless: (no text: ValueError)"),
        (ValueError("\udcff broken"), "ValueError: ? broken"),
        (Retry("\udcff broken"), "? broken"),
        (Retry(Speechless()), "Speechless: (no text: ValueError)"),
        (Retry(404), "404"),
    ],
)
def test_an_error_whose_text_is_none_is_a_verdict_like_others(error: Exception, said: str) -> None:
    def fail(message: ReceivedMessage) -> None:
        raise error

    def bind() -> Binding:
        return bind_handler(fail, group="billing", batch=None, batch_size=None, middleware=())

    (judged,) = _judging(bind, 1)(iter([rows(0, pa.timestamp("us", "UTC"))]))

    assert judged.column("outcome").to_pylist() == ["retry"]
    assert judged.column("error").to_pylist() == [said]
