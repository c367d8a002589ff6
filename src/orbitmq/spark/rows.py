"""Rows of a DataFrame as messages, with ids that are the same when the rows are written again.

An id looks like those of other clients, 32 hexadecimal digits. It is a digest of who writes (query,
batch and partition, or the job of a batch write), of the number of the row, and of the message
itself with its topic. Consumers that look for duplicates drop a message whose id they know, hence
two rules of different weight:

1. Messages that differ never have the same id, whatever a repeated batch does to the order and the
   partitions of its rows, and however many writes a batch makes: nothing is dropped that is new.
   This is what the content is in the digest for.
2. The same row again has the same id when it comes at the same place of the same partition, as it
   does when a task is tried again or a batch is repeated as it was: duplicates are recognised.
   Content alone would not do: two equal rows are two messages.

A row that comes at another place has a new id, because no rule could tell it from a second, equal
one. Whoever knows better says so in the column `identity`, which then takes the place of all of
this. The digits in which other clients put the time are zero: time is not the same the second time.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from orbitmq.client.errors import MessageRefused
from orbitmq.client.message import Message
from orbitmq.message.batch import BatchElement
from orbitmq.message.errors import MessageError
from orbitmq.message.properties import check_properties_size, encode_properties
from orbitmq.message.wellknown import KEYS, RESERVED, SHARDING_KEY, TAGS
from orbitmq.spark.errors import SourceError

if TYPE_CHECKING:
    import pyarrow as pa

#: Bytes of an id that are a digest: all but the time. Among 10**10 messages, the chance that two
#: have the same id is below 10**-9.
_DIGEST: Final = 12


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
        self._origin = hashlib.blake2b(origin.encode(), digest_size=_DIGEST, person=b"row")

    def of(self, row: int, topic: str, content: BatchElement) -> str:
        """The id of a message by its place and its content, which has no id yet."""
        body, flag, properties = content
        digest = self._origin.copy()
        # The length tells where properties end and the body begins.
        digest.update(
            b"\n%d %b %d %d\n%b%b"
            % (row, topic.encode(), flag, len(properties), properties, bytes(body))
        )
        return _as_id(digest.hexdigest())

    @staticmethod
    def named(identity: str, topic: str) -> str:
        """The id of a message by what its row says, whoever writes it."""
        text = f"{topic}\n{identity}".encode()
        return _as_id(hashlib.blake2b(text, digest_size=_DIGEST, person=b"identity").hexdigest())


def _as_id(digest: str) -> str:
    return f"{digest[:20]}00000000{digest[20:]}".upper()


class Written(NamedTuple):
    """A message out of a row."""

    topic: str
    element: BatchElement
    unique_id: str
    #: The number of the queue among those of the topic, if the row says so; with a broker, the
    #: number among those of the broker.
    queue: int | None
    broker: str | None
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
        unreadable: dict[int, str] = {}
        columns = {name: _values(name, batch.column(name), unreadable) for name in names}
        plain: Sequence[bytes | None] = [None] * batch.num_rows
        if self._topic is not None:
            plain = plain_properties(batch)
        first, self._row = self._row, self._row + batch.num_rows
        nothing = [None] * batch.num_rows
        bodies = columns["body"]
        queues, keys = columns.get("queueId", nothing), columns.get("shardingKey", nothing)
        brokers, identities = columns.get("brokerName", nothing), columns.get("identity", nothing)
        for place, properties in enumerate(plain):
            if unreadable and place in unreadable:
                yield RowRefused(first + place, unreadable[place])
                continue
            if properties is None or self._topic is None:
                row = {name: columns[name][place] for name in names}
                yield self._judged(first + place, row)
                continue
            body = bodies[place]
            content = BatchElement(
                body if isinstance(body, bytes) else body.encode(), 0, properties
            )
            unique_id = self._id(first + place, self._topic, content, identities[place])
            yield Written(
                self._topic,
                _with_id(content, unique_id),
                unique_id,
                queues[place],
                brokers[place],
                keys[place],
                False,
            )

    def _id(self, row: int, topic: str, content: BatchElement, identity: str | None) -> str:
        if identity:
            return self._ids.named(identity, topic)
        return self._ids.of(row, topic, content)

    def _judged(self, row: int, values: Mapping[str, Any]) -> Written | RowRefused:
        try:
            return self._written(row, values)
        except (MessageRefused, MessageError) as refused:
            return RowRefused(row, str(refused))

    def _written(self, number: int, row: Mapping[str, Any]) -> Written:
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
        properties = encode_properties(message.all_properties())
        content = BatchElement(message.body, message.flag, properties)
        unique_id = self._id(number, topic, content, row.get("identity"))
        element = _with_id(content, unique_id)
        check_properties_size(element.properties)
        return Written(
            topic,
            element,
            unique_id,
            queue,
            row.get("brokerName"),
            message.sharding_key,
            bool(message.delay_level) or deliver_at is not None,
        )


def _values(name: str, column: pa.Array, unreadable: dict[int, str]) -> Sequence[Any]:
    """The values of a column; rows whose value Python has no word for go into `unreadable`."""
    import pyarrow as pa  # noqa: PLC0415  # as the caller has it

    if name == "body" and pa.types.is_string(column.type):
        # A text is sent as the bytes that it is.
        column = column.cast(pa.binary())
    with contextlib.suppress(*_UNREADABLE):
        found: list[Any] = column.to_pylist()
        return found
    values: list[Any] = []
    for place, value in enumerate(column):
        try:
            values.append(value.as_py())
        except _UNREADABLE as error:
            is_text = isinstance(error, UnicodeDecodeError)
            problem = "is no text in UTF-8" if is_text else "is beyond the years 1 to 9999"
            unreadable.setdefault(place, f"column {name} {problem}")
            values.append(None)
    return values


def _with_id(content: BatchElement, unique_id: str) -> BatchElement:
    properties = b"%bUNIQ_KEY\x01%b\x02" % (content.properties, unique_id.encode())
    return BatchElement(content.body, content.flag, properties)


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


#: Values of Spark that Python has none for: it makes texts of any bytes, and its time goes further.
_UNREADABLE: Final = (UnicodeDecodeError, OverflowError)

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
    "brokerName",
    "shardingKey",
    "delayLevel",
    "deliverAt",
    "flag",
    "identity",
)


def _own(properties: Any) -> dict[str, str]:
    """The application's properties: those of the system are set anew by whoever sends."""
    if not properties:
        return {}
    pairs = properties.items() if isinstance(properties, dict) else properties
    return {name: value for name, value in pairs if name not in RESERVED and value}
