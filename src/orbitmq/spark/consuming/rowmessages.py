"""Rows of the `rocketmq` source as the messages that they were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from orbitmq.client.queue import Queue
from orbitmq.client.received import ReceivedMessage
from orbitmq.message.stored import StoredMessage
from orbitmq.message.wellknown import KEYS, TAGS, UNIQ_KEY
from orbitmq.spark.consuming.errors import RowsRefused

if TYPE_CHECKING:
    import pyarrow as pa

#: Which message it is.
PLACE: Final = ("topic", "brokerName", "queueId", "queueOffset")
#: What a message cannot be made without.
REQUIRED: Final = (*PLACE, "body")
#: What is taken where it is there.
OPTIONAL: Final = (
    "msgId",
    "tags",
    "keys",
    "flag",
    "reconsumeTimes",
    "bornTimestamp",
    "storeTimestamp",
    "properties",
)
_TIMES: Final = ("bornTimestamp", "storeTimestamp")
#: No place in a log: what a message is asked for by must never be another one's.
NO_PLACE: Final = -1


def messages_of(batch: pa.RecordBatch, group: str | None = None) -> list[ReceivedMessage]:
    """A message for every row, in their order. Raises `RowsRefused` for one without a place."""
    for name in PLACE:
        if batch.column(name).null_count:
            row = batch.column(name).is_null().index(True).as_py()
            raise RowsRefused(
                f"column {name} is null in row {row} of a batch of {batch.num_rows}: that row is "
                "no message; leave such rows out, as an outer join makes them"
            )
    names = [name for name in (*REQUIRED, *OPTIONAL) if name in batch.schema.names]
    columns = [
        _millis(batch.column(name)) if name in _TIMES else batch.column(name).to_pylist()
        for name in names
    ]
    return [
        _message(dict(zip(names, values, strict=True)), group)
        for values in zip(*columns, strict=True)
    ]


def _message(row: Mapping[str, Any], group: str | None) -> ReceivedMessage:
    queue = Queue(row["topic"], row["brokerName"], row["queueId"])
    stored = StoredMessage.build(
        topic=queue.topic,
        stored_body=row["body"] or b"",
        properties=_properties(row),
        queue_id=queue.id,
        queue_offset=row["queueOffset"],
        physical_offset=NO_PLACE,
        flag=row.get("flag") or 0,
        born_ms=row.get("bornTimestamp") or 0,
        store_ms=row.get("storeTimestamp") or 0,
        reconsume_times=row.get("reconsumeTimes") or 0,
    )
    return ReceivedMessage(stored, queue, group)


def _properties(row: Mapping[str, Any]) -> dict[str, str | None]:
    """Those of the row; where it has none, what other columns say about them."""
    if (given := row.get("properties")) is not None:
        return dict(given)
    named = {TAGS: row.get("tags"), KEYS: row.get("keys"), UNIQ_KEY: row.get("msgId")}
    return {name: value for name, value in named.items() if value}


def _millis(column: pa.Array) -> list[int | None]:
    """Times as milliseconds, without dates between: in some zones the first and last have none."""
    import pyarrow as pa  # noqa: PLC0415  # tasks only

    if not pa.types.is_timestamp(column.type):
        return [None] * len(column)
    exact = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64())
    return [None if micros is None else micros // 1000 for micros in exact.to_pylist()]
