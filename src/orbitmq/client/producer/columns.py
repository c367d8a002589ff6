"""Many messages from Arrow columns or lists of bodies, without an object for each.

Everything is checked before anything is sent. Messages without a queue go to the queues in turn, a
frame to each, several at a time; those with a queue or a key stay in their order. A message that is
longer than a frame goes alone, compressed if single sends are. When a broker refuses a message of a
frame, the frame is halved until that message is alone, as with `submit`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from orbitmq.client.message import Message
from orbitmq.client.producer.send import (
    BatchResult,
    Sending,
    SendResult,
    broker_of_id,
    by_key,
    results_in,
)
from orbitmq.client.routes import Queue, queues_by_broker
from orbitmq.errors import (
    BrokerRefused,
    MessageRefused,
    OrbitError,
    SendFailed,
    SettingError,
)
from orbitmq.message.arrow import MESSAGE_SCHEMA, repeated
from orbitmq.message.columns import (
    EncodedMessages,
    encode_messages,
    have_any,
    id_items,
    is_plain,
    item,
    joined_items,
    lengths,
    text_of,
    unique_ids,
    with_entries,
)
from orbitmq.message.properties import DEDUP_ID, INSTANCE_ID, KEYS, RESERVED, SHARDING_KEY, TAGS
from orbitmq.names import is_retry_topic
from orbitmq.wire.codes import ResponseCode

if TYPE_CHECKING:
    from orbitmq.client.producer.core import ProducerCore

#: Rows and bytes that are encoded together, while others are on their way.
_CHUNK: Final = 8192
_CHUNK_BYTES: Final = 4 * 1024 * 1024
_MESSAGE_ILLEGAL: Final = int(ResponseCode.MESSAGE_ILLEGAL)
#: Messages of a frame, and frames in flight.
_FRAME: Final = 4096
_WINDOW: Final = 4
#: Bytes of a `dedup_id` that needs no closer look.
_SHORT: Final = 255
#: The columns of messages, with other names that they may have.
_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "body": (),
    "tag": ("tags",),
    "keys": (),
    "properties": (),
    "ordering_key": ("shardingKey",),
    "flag": (),
    "dedup_id": (),
}
#: Columns of received messages that brokers set: such rows can be sent as they are.
_IGNORED: Final = frozenset(MESSAGE_SCHEMA.names) - {"body", "tags", "keys", "properties", "flag"}


@dataclass(frozen=True)
class _Sent:
    """A frame that was stored: which rows it had, and where they are."""

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.uint8]
    result: SendResult

    @cached_property
    def results(self) -> list[SendResult]:
        """Of each row."""
        ids = [each.tobytes().decode() for each in self.ids]
        return results_in(ids, self.result) if len(ids) > 1 else [self.result]

    @property
    def has_copies(self) -> bool:
        """Whether some of the rows were stored before."""
        return isinstance(self.result, BatchResult) or self.result.is_duplicate

    def msg_ids(self) -> pa.StringArray:
        if not self.has_copies:
            return text_of(self.ids)
        return pa.array([each.msg_id for each in self.results])

    def queue_ids(self) -> npt.NDArray[np.int32]:
        if not self.has_copies:
            return np.full(len(self.rows), self.result.queue.id, np.int32)
        return np.array([each.queue.id for each in self.results], np.int32)

    def queue_offsets(self) -> npt.NDArray[np.int64]:
        if not self.has_copies:
            return self.result.queue_offset + np.arange(len(self.rows))
        return np.array([each.queue_offset for each in self.results], np.int64)


class SendResults(Sequence[SendResult]):
    """Where many messages were stored, one entry for each in their order.

    Entries are made when one of their frame is looked at: `to_arrow` has all of them as columns.
    """

    def __init__(self, count: int, frames: Sequence[_Sent]) -> None:
        self._count = count
        self._frames = tuple(frames)
        self._places: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def is_ok(self) -> bool:
        """Whether all messages are as safe as brokers promise."""
        return all(frame.result.is_ok for frame in self._frames)

    @overload
    def __getitem__(self, place: int) -> SendResult: ...

    @overload
    def __getitem__(self, place: slice) -> list[SendResult]: ...

    def __getitem__(self, place: int | slice) -> SendResult | list[SendResult]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(self._count))]
        result = self._stored(range(self._count)[place])
        assert result is not None  # noqa: S101  # a caller only gets complete results
        return result

    def entries(self) -> list[SendResult | None]:
        """All of them, None for messages that were not acknowledged."""
        return [self._stored(row) for row in range(self._count)]

    def _stored(self, row: int) -> SendResult | None:
        if self._places is None:
            # For each row its frame, and its number there.
            self._places = places = np.full((self._count, 2), -1, np.int64)
            for number, frame in enumerate(self._frames):
                places[frame.rows, 0] = number
                places[frame.rows, 1] = np.arange(len(frame.rows))
        number, inside = self._places[row].tolist()
        return None if number < 0 else self._frames[number].results[inside]

    def to_arrow(self) -> pa.Table:
        """`msgId`, `brokerName`, `queueId` and `queueOffset` of the stored messages, row by row."""
        frames = self._frames
        if not frames:
            return pa.table({name: pa.nulls(0, MESSAGE_SCHEMA.field(name).type) for name in _WHERE})
        rows = np.concatenate([frame.rows for frame in frames])
        table = pa.table(
            {
                "msgId": pa.chunked_array([each.msg_ids() for each in frames]),
                "brokerName": pa.chunked_array(
                    [repeated(each.result.queue.broker, len(each.rows)) for each in frames]
                ),
                "queueId": np.concatenate([each.queue_ids() for each in frames]),
                "queueOffset": np.concatenate([each.queue_offsets() for each in frames]),
            }
        )
        return table if (np.diff(rows) == 1).all() else table.take(np.argsort(rows))

    def __repr__(self) -> str:
        stored = sum(len(frame.rows) for frame in self._frames)
        return f"<SendResults: {stored} of {self._count} messages stored>"


_WHERE: Final = ("msgId", "brokerName", "queueId", "queueOffset")


@dataclass(frozen=True, slots=True)
class _Checked:
    """Rows that may be sent: what is stored of them but their ids."""

    first: int
    bodies: pa.BinaryArray
    #: Without the unique id.
    properties: pa.StringArray
    flags: npt.NDArray[np.int32] | None
    ordering_keys: pa.StringArray | None
    dedup_ids: pa.StringArray | None = None

    def __len__(self) -> int:
        return len(self.bodies)


def many(
    bodies: Sequence[Any] | pa.Array,
    *,
    keys: Sequence[Any] | pa.Array | None,
    tag: str | Sequence[str | None] | pa.Array | None,
    properties: Sequence[Mapping[str, str] | None] | pa.Array | None,
    dedup_ids: Sequence[str | None] | pa.Array | None = None,
) -> pa.RecordBatch:
    """Lists as the columns that `send_arrow` takes."""
    for name, value in (("body", bodies), ("keys", keys)):
        if isinstance(value, str | bytes):
            # Its letters would be messages.
            raise MessageRefused(name, f"must be a list, one for each message, got {value[:40]!r}")
    if not hasattr(bodies, "__len__"):
        bodies = list(bodies)
    text = pa.string()
    kinds = {"body": pa.binary(), "keys": text, "tag": text, "properties": _MAP, "dedup_id": text}
    if isinstance(tag, str):
        tag = repeated(tag, len(bodies))
    given = {"body": bodies, "keys": keys, "tag": tag, "properties": properties}
    given["dedup_id"] = dedup_ids
    columns = {}
    for name, values in given.items():
        if values is None:
            continue
        if len(values) != len(bodies):
            raise MessageRefused(
                name, f"has {len(values)} entries for {len(bodies)} bodies; give one for each"
            )
        columns[name] = _column(name, values, kinds[name])
    return pa.RecordBatch.from_pydict(columns)


_MAP: Final = pa.map_(pa.string(), pa.string())


def _column(name: str, values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if name == "keys":
        values = [
            each if each is None or isinstance(each, str) else " ".join(each) for each in values
        ]
    if name == "properties":
        values = [each if each is None else list(each.items()) for each in values]
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
        raise MessageRefused(name, f"must be a list of {kind} or None: {error}") from error


def with_properties(
    table: pa.Table | pa.RecordBatch, added: Mapping[str, str], names: Iterable[str]
) -> tuple[pa.Table | pa.RecordBatch, list[dict[str, str]]]:
    """The rows with further properties, but for those that have any of these names.

    Also the properties of the latter. What cannot be sent stays as it is: sending says why.
    """
    if not isinstance(table, pa.Table | pa.RecordBatch):
        return table, []
    place = table.schema.get_field_index("properties")
    if place < 0:
        given = [pa.nulls(table.num_rows, _MAP)]
    elif pa.types.is_map(table.schema.field(place).type):
        column = table.column(place).cast(_MAP)
        given = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    else:
        return table, []
    chunks, left_out = [], []
    for chunk in given:
        maps = pc.coalesce(chunk, pa.scalar([], _MAP)) if chunk.null_count else chunk
        have_them = have_any(maps, names)
        left_out += [dict(pairs) for pairs in maps.filter(have_them).to_pylist()]
        chunks.append(with_entries(maps, added, have_them))
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    properties = pa.chunked_array(chunks, _MAP)
    if place < 0:
        return table.append_column("properties", properties), left_out
    return table.set_column(place, "properties", properties), left_out


def checked(table: pa.Table | pa.RecordBatch, topic: str, limit: int) -> list[_Checked]:
    """The rows of a table in chunks. Raises `MessageRefused`, which names the row and the column.

    `limit` is that of a body.
    """
    Message(topic, b".")  # checks the topic
    if is_retry_topic(topic):
        raise MessageRefused("topic", "is a retry topic, which takes no batches")
    if not isinstance(table, pa.Table | pa.RecordBatch):
        raise MessageRefused("table", f"must be a pyarrow Table or RecordBatch, got {table!r}")
    names = _names(table.schema)
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    most = max(1, min(_CHUNK, _CHUNK_BYTES * max(1, table.num_rows) // max(1, table.nbytes)))
    found, first = [], 0
    for batch in table.to_batches(max_chunksize=most):
        found.append(_check(batch, names, first, limit))
        first += batch.num_rows
    return found


def _names(schema: pa.Schema) -> dict[str, str]:
    """The names that the columns of messages have in a schema."""
    other = {also: name for name, alsos in _COLUMNS.items() for also in alsos}
    found: dict[str, str] = {}
    for given in schema.names:
        name = other.get(given, given)
        if given in _IGNORED:
            continue
        if name not in _COLUMNS:
            allowed = ", ".join(_COLUMNS)
            raise MessageRefused(given, f"is no column of messages; there are: {allowed}")
        if name in found:
            raise MessageRefused(given, f"is another name of {found[name]}; give one of them")
        found[name] = given
    if "body" not in found:
        raise MessageRefused("body", "is missing: a column of bytes or texts")
    return found


def _check(batch: pa.RecordBatch, names: Mapping[str, str], first: int, limit: int) -> _Checked:
    def column(name: str) -> pa.Array | None:
        return batch.column(names[name]) if name in names else None

    bodies = _cast(batch.column(names["body"]), pa.binary(), "body", "bytes or texts")
    sizes = lengths(bodies)
    if bodies.null_count or (len(sizes) and not sizes.min()):
        row = int(np.argmin(np.where(bodies.is_null().to_numpy(zero_copy_only=False), 0, sizes)))
        raise MessageRefused(f"[{first + row}].body", "must not be empty")
    if len(sizes) and sizes.max() > limit:
        row = int(sizes.argmax())
        raise MessageRefused(
            f"[{first + row}].body", f"has {sizes[row]} bytes and may have {limit}"
        )
    parts: list[pa.StringArray] = []
    given = column("properties")
    if given is not None:
        parts.append(_properties(given, first))
    names_of = ("tag", TAGS), ("keys", KEYS), ("ordering_key", SHARDING_KEY), ("dedup_id", DEDUP_ID)
    for name, key in names_of:
        values = column(name)
        if values is not None:
            values = _texts(name, values, first)
            parts.append(item(key, values))
    joined = repeated("", len(bodies))
    if parts:
        joined = parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, "")
    flag = column("flag")
    flags = None
    if flag is not None:
        flags = pc.fill_null(_cast(flag, pa.int32(), "flag", "32-bit numbers"), 0).to_numpy()
    ordering = column("ordering_key")
    if ordering is not None:
        ordering = _texts("ordering_key", ordering, first)
    dedup_ids = column("dedup_id")
    if dedup_ids is not None:
        dedup_ids = _texts("dedup_id", dedup_ids, first)
    return _Checked(first, bodies, joined, flags, ordering, dedup_ids)


def _cast(column: pa.Array, kind: pa.DataType, name: str, what: str) -> pa.Array:
    try:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return column if column.type == kind else column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise MessageRefused(name, f"must be {what}, its type is {column.type}: {error}") from error


def _texts(name: str, column: pa.Array, first: int) -> pa.StringArray:
    """A column of tags or keys as it is stored, checked as a message's own."""
    if name == "keys" and (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        column = _each(name, column, first)
    texts = _cast(column, pa.string(), name, "texts")
    if name in ("tag", "tags") and pc.any(pc.match_substring(texts, "||")).as_py():
        return _each(name, texts, first)  # refuses it
    is_short = name != "dedup_id" or (pc.max(pc.binary_length(texts)).as_py() or 0) <= _SHORT
    return texts if is_short and is_plain(texts) else _each(name, texts, first)


def _each(name: str, column: pa.Array, first: int) -> pa.StringArray:
    """The same, value by value, where something may have to be refused or changed."""
    values: list[str | None] = []
    for row, value in enumerate(column.to_pylist()):
        if value is None:
            values.append(None)
            continue
        try:
            message = Message("topic", b".", **{name: value})
        except MessageRefused as refused:
            raise MessageRefused(f"[{first + row}].{name}", refused.problem) from None
        values.append(" ".join(message.keys) or None if name == "keys" else value)
    return pa.array(values, pa.string())


def _properties(column: pa.Array, first: int) -> pa.StringArray:
    maps = _cast(column, _MAP, "properties", "maps of texts to texts")
    names = pc.unique(maps.keys).to_pylist()
    plain = is_plain(maps.items) and all(
        name and name.isascii() and name.isidentifier() and name not in RESERVED for name in names
    )
    if not plain:
        for row, pairs in enumerate(maps.to_pylist()):
            given = {name: value for name, value in pairs or () if value is not None}
            try:
                Message("topic", b".", properties=given)
            except MessageRefused as refused:
                raise MessageRefused(f"[{first + row}].{refused.field}", refused.problem) from None
    return joined_items(maps)


# ---- sending


async def send_columns(
    core: ProducerCore,
    topic: str,
    table: pa.Table | pa.RecordBatch,
    timeout: float,  # noqa: ASYNC109  # for all of it
    *,
    queue: Queue | None,
    ordering_key: str | int | None,
) -> SendResults:
    """Send the rows of a table. Raises `SendFailed`, which says what is stored.

    Before anything is sent `MessageRefused`, and `SettingError` for a queue and a key.
    """
    if queue is not None and ordering_key is not None:
        raise SettingError("queue and ordering_key exclude each other: give one of them")
    core.running()
    chunks = checked(table, topic, core.settings.max_message_size)
    for chunk in chunks:
        core.drafting.check_properties(lengths(chunk.properties), chunk.first)
    return await _Columns(core, topic, timeout, queue, ordering_key).send(chunks)


class _Columns:
    """One call."""

    def __init__(
        self,
        core: ProducerCore,
        topic: str,
        timeout: float,
        queue: Queue | None,
        ordering_key: str | int | None,
    ) -> None:
        self._core = core
        self._publisher = core.running()
        self._topic = topic
        self._wire_topic = core.drafting.wire_topic(topic)
        if queue is not None and core.drafting.wire_topic(queue.topic) != self._wire_topic:
            raise MessageRefused("topic", f"is {topic!r}, the queue is {queue}")
        self._queue = None if queue is None else Queue(self._wire_topic, queue.broker, queue.id)
        self._ordering_key = ordering_key
        self._deadline = core.monotonic() + timeout
        self._queues: tuple[Queue, ...] = ()
        self._turns: dict[Queue, asyncio.Lock] = {}
        self._sent: list[_Sent] = []
        #: What ends the call, and with how many attempts; of refused messages the first one.
        self._failure: tuple[OrbitError, int] | None = None
        self._refusal: tuple[OrbitError, int] | None = None

    async def send(self, chunks: Sequence[_Checked]) -> SendResults:
        try:
            is_old = await self._publisher.is_before_5(self._wire_topic, self._left())
            if self._queue is None:
                self._queues = await self._publisher.queues(self._wire_topic, self._left())
        except OrbitError as error:
            self._failure = error, 0
        else:
            await self._send_frames(chunks, is_old=is_old)
        self._sent.sort(key=lambda sent: int(sent.rows[0]))
        results = SendResults(sum(map(len, chunks)), self._sent)
        if (failed := self._failure or self._refusal) is not None:
            failure, attempts = failed
            cause: BaseException | None = failure
            if isinstance(failure, SendFailed):
                attempts, cause = failure.attempts, failure.cause
            raise SendFailed(self._topic, attempts, cause, results.entries()) from failure
        return results

    async def _send_frames(self, chunks: Sequence[_Checked], *, is_old: bool) -> None:
        window = asyncio.Semaphore(_WINDOW)
        async with asyncio.TaskGroup() as tasks:
            for chunk in chunks:
                for queue, rows in self._by_queue(chunk):
                    part = _Part(self._core, chunk, rows)
                    for begin, end in part.frames():
                        await window.acquire()
                        if self._failure is not None:
                            return
                        carrying = self._carry(part, begin, end, queue, is_old=is_old)
                        task = tasks.create_task(carrying)
                        task.add_done_callback(lambda _: window.release())

    def _left(self) -> float:
        return max(0.0, self._deadline - self._core.monotonic())

    def _by_queue(self, chunk: _Checked) -> list[tuple[Queue | None, npt.NDArray[np.int64] | None]]:
        """The rows of each queue, in their order; None: all rows, or any queue."""
        queues = self._queues
        if self._queue is None and self._ordering_key is not None:
            self._queue = by_key(self._ordering_key)(queues, Message(self._topic, b"."))
        if self._queue is not None:
            return [(self._queue, None)]
        if chunk.ordering_keys is None:
            return [(None, None)] if chunk.dedup_ids is None else self._by_broker(chunk)
        any_message = Message(self._topic, b".")
        encoded = chunk.ordering_keys.dictionary_encode()
        places = {queue: place for place, queue in enumerate(queues)}
        chosen = [
            places[by_key(key)(queues, any_message)] for key in encoded.dictionary.to_pylist()
        ]
        codes = pc.fill_null(encoded.indices, len(chosen)).to_numpy()
        of_rows = np.array([*chosen, -1], np.int64)[codes]
        return [
            (None if place < 0 else queues[place], np.flatnonzero(of_rows == place))
            for place in np.unique(of_rows).tolist()
        ]

    def _by_broker(
        self, chunk: _Checked
    ) -> list[tuple[Queue | None, npt.NDArray[np.int64] | None]]:
        """The rows that each broker de-duplicates, for one of its queues in turn."""
        own = queues_by_broker(self._queues)
        if len(own) == 1 or chunk.dedup_ids is None:
            return [(None, None)]
        brokers = list(own)
        chosen = np.array(
            [
                -1 if each is None else brokers.index(broker_of_id(each.encode(), brokers))
                for each in chunk.dedup_ids.to_pylist()
            ]
        )
        parts: list[tuple[Queue | None, npt.NDArray[np.int64] | None]] = []
        for place in np.unique(chosen).tolist():
            queues = own[brokers[place]]
            queue = None if place < 0 else queues[chunk.first // _CHUNK % len(queues)]
            parts.append((queue, np.flatnonzero(chosen == place)))
        return parts

    def _sending(
        self, part: _Part, begin: int, end: int, queue: Queue | None, *, is_old: bool
    ) -> Sending:
        core = self._core
        if end - begin == 1:
            draft = core.drafting.single(
                self._wire_topic,
                part.body(begin),
                part.text(begin),
                part.msg_id(begin),
                part.flag(begin),
                may_repeat=part.may_repeat,
            )
        else:
            draft = core.drafting.batch(
                self._wire_topic,
                part.encoded.rows(begin, end),
                end - begin,
                is_before_5=is_old,
                may_repeat=part.may_repeat,
            )
        return Sending(draft, core.monotonic(), self._left(), queue)

    async def _carry(
        self, part: _Part, begin: int, end: int, queue: Queue | None, *, is_old: bool
    ) -> None:
        if queue is None:
            await self._store(part, begin, end, None, is_old=is_old)
        else:
            # The lock is fair, so frames of a queue keep their order.
            async with self._turns.setdefault(queue, asyncio.Lock()):
                await self._store(part, begin, end, queue, is_old=is_old)

    async def _store(
        self, part: _Part, begin: int, end: int, queue: Queue | None, *, is_old: bool
    ) -> None:
        """Send a frame; one that is refused in halves, until the refused message is alone."""
        if self._failure is not None:
            return  # nothing is sent behind a gap
        sending = self._sending(part, begin, end, queue, is_old=is_old)
        try:
            result = await self._publisher.send(sending)
        except OrbitError as error:
            is_refused = isinstance(error, BrokerRefused) and error.code == _MESSAGE_ILLEGAL
            if not is_refused:
                self._failure = error, sending.attempts
            elif end - begin == 1:
                self._refusal = self._refusal or (error, sending.attempts)
            else:
                self._publisher.counts.failed -= end - begin  # the halves count
                middle = (begin + end) // 2
                await self._store(part, begin, middle, queue, is_old=is_old)
                await self._store(part, middle, end, queue, is_old=is_old)
        else:
            self._sent.append(_Sent(part.rows[begin:end], part.ids[begin:end], result))


class _Part:
    """Rows that are encoded together, with their ids."""

    def __init__(
        self, core: ProducerCore, chunk: _Checked, rows: npt.NDArray[np.int64] | None
    ) -> None:
        settings = core.settings
        bodies, properties, self._flags = chunk.bodies, chunk.properties, chunk.flags
        if rows is None:
            self.rows = np.arange(chunk.first, chunk.first + len(chunk), dtype=np.int64)
        else:
            bodies, properties = bodies.take(pa.array(rows)), properties.take(pa.array(rows))
            self._flags = None if self._flags is None else self._flags[rows]
            self.rows = rows + chunk.first
        #: Whether every row has a `dedup_id`.
        self.may_repeat = chunk.dedup_ids is not None and not chunk.dedup_ids.null_count
        self._most = settings.largest_batch
        self._bodies = bodies
        self.ids = unique_ids(core.drafting.ids, len(bodies))
        parts = [properties, id_items(self.ids)]
        if core.drafting.namespace is not None:
            parts.append(item(INSTANCE_ID, repeated(core.drafting.namespace, len(bodies))))
        self._properties = pc.binary_join_element_wise(*parts, "").cast(pa.binary())
        self.encoded: EncodedMessages = encode_messages(bodies, self._properties, self._flags)

    def frames(self) -> list[tuple[int, int]]:
        return self.encoded.frames(self._most, _FRAME)

    def body(self, row: int) -> bytes:
        body: bytes = self._bodies[row].as_py()
        return body

    def text(self, row: int) -> str:
        text: bytes = self._properties[row].as_py()
        return text.decode()

    def msg_id(self, row: int) -> str:
        return str(self.ids[row].tobytes(), "ascii")

    def flag(self, row: int) -> int:
        return 0 if self._flags is None else int(self._flags[row])
