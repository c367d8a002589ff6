"""Rows of a DataFrame as messages, with ids that are the same when the rows are written again.

An id looks like those of other clients, 32 hexadecimal digits, and is made of who writes (query,
batch and partition, or the job of a batch write) and of the number of the row. A task that is tried
again, or a batch that is repeated after a crash, gives its messages the ids that they had, so that
consumers which look for duplicates by message id find them. The digits in which other clients put
the time are zero, because time is not the same the second time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from orbitmq.client.errors import MessageRefused
from orbitmq.client.message import Message
from orbitmq.message.batch import BatchElement
from orbitmq.message.errors import MessageError
from orbitmq.message.properties import encode_properties
from orbitmq.message.wellknown import KEYS, RESERVED, SHARDING_KEY, TAGS, UNIQ_KEY
from orbitmq.spark.errors import SourceError

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows of one partition that can be numbered.
_MOST_ROWS: Final = 1 << 32


class RowRefused(SourceError):
    """A row that is no message."""

    def __init__(self, row: int, problem: str) -> None:
        self.row = row
        self.problem = problem
        super().__init__(
            f"row {row} of the partition cannot be written: {problem}; set the option badRows to "
            "skip to leave such rows out"
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """Who writes: the same when it writes the same rows again."""

    #: The id of the query and its batch, or of the job.
    writer: str
    partition: int

    @property
    def ids(self) -> RowIds:
        return RowIds(f"{self.writer}/{self.partition}")


class RowIds:
    """The message ids of a partition."""

    def __init__(self, origin: str) -> None:
        digest = hashlib.sha256(origin.encode()).digest()
        self._front = digest[:6].hex().upper()
        self._back = "00000000" + digest[6:8].hex().upper()

    def of(self, row: int) -> str:
        if row >= _MOST_ROWS:
            raise SourceError(f"a partition can write {_MOST_ROWS} rows; repartition the DataFrame")
        return f"{self._front}{row:08X}{self._back}"


class Written(NamedTuple):
    """A message out of a row."""

    topic: str
    element: BatchElement
    unique_id: str
    #: The number of the queue among those of the topic, if the row says so.
    queue: int | None
    key: str | None
    is_delayed: bool


class RowReader:
    """Reads messages out of record batches.

    `_written` is the rule: it makes a `Message`, which is checked, of one row. Most rows have
    nothing but a body, tags and keys, and nothing wrong with them; for these `plain_properties`
    gives what the rule would give, for all rows at once.
    """

    def __init__(self, topic: str | None, origin: Origin) -> None:
        self._topic = topic
        self._ids = origin.ids
        self._row = 0

    def messages(self, batch: pa.RecordBatch) -> Iterator[Written | RowRefused]:
        """A message, or why there is none, for every row."""
        names = [name for name in _FIELDS if name in batch.schema.names]
        columns = {name: batch.column(name).to_pylist() for name in names}
        plain: Sequence[bytes | None] = [None] * batch.num_rows
        if self._topic is not None:
            plain = plain_properties(batch)
        first, self._row = self._row, self._row + batch.num_rows
        nothing = [None] * batch.num_rows
        bodies = columns["body"]
        queues, keys = columns.get("queueId", nothing), columns.get("shardingKey", nothing)
        for place, properties in enumerate(plain):
            unique_id = self._ids.of(first + place)
            if properties is None or self._topic is None:
                row = {name: columns[name][place] for name in names}
                yield self._judged(first + place, unique_id, row)
                continue
            body = bodies[place]
            element = BatchElement(
                body if isinstance(body, bytes) else body.encode(),
                0,
                b"%bUNIQ_KEY\x01%b\x02" % (properties, unique_id.encode()),
            )
            yield Written(self._topic, element, unique_id, queues[place], keys[place], False)

    def _judged(self, row: int, unique_id: str, values: Mapping[str, Any]) -> Written | RowRefused:
        try:
            return self._written(unique_id, values)
        except (MessageRefused, MessageError) as refused:
            return RowRefused(row, str(refused))

    def _written(self, unique_id: str, row: Mapping[str, Any]) -> Written:
        topic = self._topic or row.get("topic")
        if topic is None:
            raise MessageRefused("topic", "is null; give the option 'topic', or one in every row")
        deliver_at: datetime | None = row.get("deliverAt")
        queue = row.get("queueId")
        if queue is not None and queue < 0:
            raise MessageRefused("queueId", f"must be 0 or more, got {queue}")
        body = row["body"]
        message = Message(
            topic,
            b"" if body is None else body,
            tags=row.get("tags") or None,
            keys=row.get("keys") or (),
            properties=_own(row.get("properties")),
            flag=row.get("flag") or 0,
            delay_level=row.get("delayLevel") or 0,
            deliver_at=deliver_at,
            sharding_key=row.get("shardingKey") or None,
        )
        properties = message.all_properties()
        properties[UNIQ_KEY] = unique_id
        return Written(
            topic,
            BatchElement(message.body, message.flag, encode_properties(properties)),
            unique_id,
            queue,
            message.sharding_key,
            bool(message.delay_level) or deliver_at is not None,
        )


def plain_properties(batch: pa.RecordBatch) -> list[bytes | None]:
    """The stored properties of rows that need no judging, without their ids; None for the others.

    A row needs judging if it has a column beyond body, tags, keys and queue, if a text of it might
    be refused or changed, or if it is long enough to reach a limit.
    """
    import pyarrow as pa  # noqa: PLC0415  # as the caller has it
    import pyarrow.compute as pc  # noqa: PLC0415

    body = batch.column("body")
    is_plain = pc.greater(pc.fill_null(pc.binary_length(body), 0), 0)
    parts = []
    for column, name in (("tags", TAGS), ("keys", KEYS), ("shardingKey", SHARDING_KEY)):
        if column not in batch.schema.names:
            continue
        texts = batch.column(column)
        if not pa.types.is_string(texts.type):
            return [None] * batch.num_rows
        texts = pc.fill_null(texts, "")
        is_plain = pc.and_(is_plain, pc.less(pc.binary_length(texts), _SHORT))
        is_plain = pc.and_(is_plain, pc.match_substring_regex(texts, _PLAIN_TEXT))
        item = pc.binary_join_element_wise(f"{name}\x01", texts, "\x02", "")
        parts.append(pc.if_else(pc.equal(texts, ""), "", item))
    if "queueId" in batch.schema.names:
        is_plain = pc.and_(
            is_plain, pc.fill_null(pc.greater_equal(batch.column("queueId"), 0), True)
        )
    for column in _NEVER_PLAIN:
        if column in batch.schema.names:
            is_plain = pc.and_(is_plain, pc.is_null(batch.column(column)))
    joined = pa.array([""] * batch.num_rows)
    if parts:
        joined = pc.binary_join_element_wise(*parts, "")
    found = pc.if_else(is_plain, joined, None).cast(pa.binary())
    properties: list[bytes | None] = found.to_pylist()
    return properties


#: Words of printable ASCII with single spaces between them, or nothing.
_PLAIN_TEXT: Final = r"^([!-~]+( [!-~]+)*)?$"
#: Far below what the properties of a message may take.
_SHORT: Final = 1000
_NEVER_PLAIN: Final = ("properties", "delayLevel", "deliverAt", "flag")

_FIELDS: Final = (
    "body",
    "topic",
    "tags",
    "keys",
    "properties",
    "queueId",
    "shardingKey",
    "delayLevel",
    "deliverAt",
    "flag",
)


def _own(properties: Any) -> dict[str, str]:
    """The application's properties: those of the system are set anew by whoever sends."""
    if not properties:
        return {}
    pairs = properties.items() if isinstance(properties, dict) else properties
    return {name: value for name, value in pairs if name not in RESERVED and value}
