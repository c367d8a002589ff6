"""Rows with values and errors that few expect: what fails a task, and what it says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types

from orbitmq.client.consumer.handlers import bind_handler
from orbitmq.client.consumer.verdict import Retry
from orbitmq.spark.consuming.progress import RowsRefused
from orbitmq.spark.consuming.verdicts import (
    OPTIONAL,
    PLACE,
    REQUIRED,
    _judging,
    check_columns,
    messages_of,
)

FIRST, LAST = -62_135_596_800_000, 253_402_300_799_999


def places(count: int, **changed: pa.Array) -> pa.RecordBatch:
    columns = {
        "topic": pa.array(["orders"] * count),
        "brokerName": pa.array(["broker-a"] * count),
        "queueId": pa.array([0] * count, pa.int32()),
        "queueOffset": pa.array(range(count), pa.int64()),
        "body": pa.array([b"x"] * count),
    } | changed
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def rows(born: Any, kind: pa.DataType) -> pa.RecordBatch:
    return places(1, bornTimestamp=pa.array([born], kind))


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York", None])
@pytest.mark.parametrize("born", [FIRST, LAST, 0, 1_700_000_000_123, None])
def test_a_time_is_the_same_in_every_zone(born, zone):
    """Spark gives times in the zone of its session, where the first and the last have no date."""
    micros = None if born is None else born * 1000

    (message,) = messages_of(rows(micros, pa.timestamp("us", zone)))

    assert message.stored.born_ms == (born or 0)


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
def test_an_error_whose_text_is_none_is_a_verdict_like_others(error, said):
    def fail(message):
        raise error

    def bind():
        return bind_handler(fail, group="billing", batch=None, batch_size=None, middleware=())

    (judged,) = _judging(bind, 1)(iter([rows(0, pa.timestamp("us", "UTC"))]))

    assert judged.column("outcome").to_pylist() == ["retry"]
    assert judged.column("error").to_pylist() == [said]


@pytest.mark.parametrize("name", PLACE)
def test_a_row_without_a_place_is_refused_by_its_column(name):
    whole = places(3)
    holes = pa.array([*whole.column(name).to_pylist()[:2], None], whole.column(name).type)

    with pytest.raises(RowsRefused, match=f"column {name} is null in row 2 of a batch of 3"):
        messages_of(places(3, **{name: holes}))


def test_a_coroutine_has_one_event_loop_in_a_task():
    """What it keeps, a client of a database say, belongs to the loop that it was made on."""
    loops: list[asyncio.AbstractEventLoop] = []
    made: list[asyncio.Queue[int]] = []

    async def handle(message):
        loops.append(asyncio.get_running_loop())
        if not made:
            made.append(asyncio.Queue())
        waiting = asyncio.create_task(made[0].get())  # the first who waits binds it to a loop
        await asyncio.sleep(0)
        made[0].put_nowait(message.queue_offset)
        assert await waiting == message.queue_offset

    def bind():
        return bind_handler(handle, group="billing", batch=None, batch_size=None, middleware=())

    judged = list(_judging(bind, 1)(iter([places(3), places(2), places(0), places(4)])))

    outcomes = [each.column("outcome").to_pylist() for each in judged]
    assert outcomes == [["ok"] * 3, ["ok"] * 2, [], ["ok"] * 4]
    assert len(set(loops)) == 1
    assert loops[0].is_closed()


def frame(**changed: types.DataType) -> Any:
    """What a DataFrame says about itself."""
    columns: dict[str, types.DataType] = {
        "topic": types.StringType(),
        "brokerName": types.StringType(),
        "queueId": types.IntegerType(),
        "queueOffset": types.LongType(),
        "body": types.BinaryType(),
        "properties": types.MapType(types.StringType(), types.StringType()),
    } | changed
    schema = types.StructType([types.StructField(*each) for each in columns.items()])
    return SimpleNamespace(columns=schema.names, schema=schema)


@pytest.mark.parametrize(
    ("column", "kind", "said"),
    [
        ("body", types.StringType(), "column body must be binary, it is string"),
        ("queueId", types.StringType(), "column queueId must be int, it is string"),
        ("queueOffset", types.DoubleType(), "column queueOffset must be bigint, it is double"),
        ("tags", types.ArrayType(types.StringType()), "tags must be string, it is array<string>"),
        ("reconsumeTimes", types.StringType(), "reconsumeTimes must be int, it is string"),
        (
            "properties",
            types.MapType(types.StringType(), types.IntegerType()),
            "properties must be map<string,string>, it is map<string,int>",
        ),
    ],
)
def test_a_column_of_another_type_is_refused_before_any_task(column, kind, said):
    with pytest.raises(RowsRefused) as raised:
        check_columns(frame(**{column: kind}), REQUIRED, optional=OPTIONAL)

    assert said in str(raised.value)


def test_columns_that_are_not_used_may_be_anything():
    odd = frame(
        tags=types.IntegerType(), queueId=types.LongType(), bornTimestamp=types.StringType()
    )

    check_columns(odd, REQUIRED)
    check_columns(frame(bornTimestamp=types.StringType()), REQUIRED, optional=OPTIONAL)
