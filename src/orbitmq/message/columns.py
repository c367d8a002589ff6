"""Messages encoded from Arrow columns, without a Python object per message.

The opposite of `message.arrow`: bodies and properties become the elements of batch sends (see
`stored.encode_batch`, which gives the same bytes). Elements lie one behind the other, so that any
run of rows is the body of a batch, cut out without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from orbitmq.message.properties import UNIQ_KEY
from orbitmq.message.record import MAX_PROPERTIES, PropertiesRefused
from orbitmq.message.stored import MIN_ELEMENT_SIZE

if TYPE_CHECKING:
    from orbitmq.message.ids import UniqueIds
    from orbitmq.message.scan import Int64s

_HEAD: Final = np.dtype(
    [("size", ">i4"), ("magic", ">i4"), ("crc", ">i4"), ("flag", ">i4"), ("body_size", ">i4")]
)
#: The two digits of each octet, as one number: half the time of taking pairs.
_HEX_DIGITS: Final = np.frombuffer(bytes(range(256)).hex().upper().encode(), np.uint16)
#: Bytes that separate properties, and so cannot be in their names and values.
_SEPARATORS: Final = 2


@dataclass(frozen=True, slots=True)
class EncodedMessages:
    """The elements of messages, in the order of their rows."""

    data: memoryview
    #: Where each begins, and where the last one ends.
    bounds: Int64s

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def rows(self, begin: int, end: int) -> memoryview:
        """The body of a batch of these rows."""
        return self.data[self.bounds[begin] : self.bounds[end]]

    def take(self, rows: npt.NDArray[np.int64]) -> EncodedMessages:
        """Some of the messages."""
        buffers = [None, pa.py_buffer(self.bounds), pa.py_buffer(self.data)]
        elements = pa.Array.from_buffers(pa.large_binary(), len(self), buffers)
        return _encoded(elements.take(pa.array(rows)))

    def frames(self, most_bytes: int, most: int) -> list[tuple[int, int]]:
        """The rows as batches of at most this size and number; a longer message is alone."""
        runs = []
        begin, bounds = 0, self.bounds
        while begin < len(self):
            end = int(np.searchsorted(bounds, bounds[begin] + most_bytes, "right")) - 1
            end = max(begin + 1, min(end, begin + most))
            runs.append((begin, end))
            begin = end
        return runs


def encode_messages(
    bodies: pa.BinaryArray, properties: pa.BinaryArray, flags: npt.NDArray[Any] | None = None
) -> EncodedMessages:
    """Messages of these columns, which have no nulls. Raises `PropertiesRefused`."""
    count = len(bodies)
    body_sizes, sizes = lengths(bodies), lengths(properties)
    if count and int(sizes.max()) > MAX_PROPERTIES:
        row = int(sizes.argmax())
        raise PropertiesRefused(
            f"the properties of message {row} take {sizes[row]} bytes; a message can hold "
            f"{MAX_PROPERTIES}"
        )
    heads = np.zeros(count, _HEAD)
    heads["size"] = MIN_ELEMENT_SIZE + body_sizes + sizes
    heads["body_size"] = body_sizes
    if flags is not None:
        heads["flag"] = flags
    joined = pc.binary_join_element_wise(
        _of_one_size(heads, _HEAD.itemsize),
        bodies.cast(pa.large_binary()),
        _of_one_size(sizes.astype(">u2"), 2),
        properties.cast(pa.large_binary()),
        pa.scalar(b"", pa.large_binary()),
    )
    return _encoded(joined)


def _encoded(elements: pa.LargeBinaryArray) -> EncodedMessages:
    _, offsets, data = elements.buffers()
    bounds = np.frombuffer(offsets, np.int64, len(elements) + 1, elements.offset * 8)
    return EncodedMessages(memoryview(b"" if data is None else data)[: bounds[-1]], bounds)


def lengths(column: pa.BinaryArray) -> Int64s:
    """Bytes of each row of a binary column."""
    offsets = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, column.offset * 4)
    found: Int64s = np.diff(offsets).astype(np.int64)
    return found


def octets(column: pa.BinaryArray) -> npt.NDArray[np.uint8]:
    """The bytes of all rows of a binary or text column, side by side."""
    _, offsets, data = column.buffers()
    if data is None or not len(column):
        return np.empty(0, np.uint8)
    bounds = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4)
    return np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]


def item(name: str, values: pa.StringArray) -> pa.StringArray:
    """A property of every row that has a value, else nothing."""
    ended = pc.binary_join_element_wise(f"{name}\x01", values, "\x02", "")
    return pc.fill_null(ended, "")


def joined_items(maps: pa.MapArray) -> pa.StringArray:
    """The entries of each map as properties; entries without a value do not count."""
    bounds, names, values = _entries(maps)
    entries = pc.fill_null(pc.binary_join_element_wise(names, "\x01", values, "\x02", ""), "")
    entries = pc.if_else(pc.equal(pc.fill_null(values, ""), ""), "", entries)
    starts = np.frombuffer(entries.buffers()[1], np.int32, len(entries) + 1, entries.offset * 4)
    rows = starts[bounds].astype(np.int32)
    buffers = [None, pa.py_buffer(rows), entries.buffers()[2]]
    joined = pa.Array.from_buffers(pa.string(), len(maps), buffers)
    return pc.if_else(maps.is_null(), "", joined) if maps.null_count else joined


def with_entries(
    maps: pa.MapArray, entries: Mapping[str, str], are_whole: npt.NDArray[np.bool_]
) -> pa.MapArray:
    """Add entries to the maps, except to those that `are_whole`. There are no nulls."""
    bounds, names, values = _entries(maps)
    added = np.where(are_whole, 0, len(entries))
    # Added entries follow a map's own; in the joined columns they are behind all others.
    further = np.tile(np.arange(len(entries)) + len(names), np.count_nonzero(~are_whole))
    places = np.insert(np.arange(len(names)), np.repeat(bounds[1:], added), further)
    return pa.MapArray.from_arrays(
        np.concatenate([[0], np.cumsum(np.diff(bounds) + added)]).astype(np.int32),
        pa.concat_arrays([names, pa.array(list(entries), names.type)]).take(places),
        pa.concat_arrays([values, pa.array(list(entries.values()), values.type)]).take(places),
    )


def have_any(maps: pa.MapArray, names: Iterable[str]) -> npt.NDArray[np.bool_]:
    """Which maps have an entry with one of the names."""
    bounds, keys, _ = _entries(maps)
    wanted = pc.is_in(keys, pa.array(list(names), keys.type)).to_numpy(zero_copy_only=False)
    found: npt.NDArray[np.bool_] = np.diff(np.concatenate([[0], np.cumsum(wanted)])[bounds]) > 0
    return found


def _entries(maps: pa.MapArray) -> tuple[npt.NDArray[np.int32], pa.StringArray, pa.Array]:
    """The entries of all maps side by side, and where those of each map begin among them."""
    bounds = np.frombuffer(maps.buffers()[1], np.int32, len(maps) + 1, maps.offset * 4)
    begin, count = int(bounds[0]), int(bounds[-1] - bounds[0])
    return bounds - bounds[0], maps.keys.slice(begin, count), maps.items.slice(begin, count)


def unique_ids(ids: UniqueIds, count: int) -> npt.NDArray[np.uint8]:
    """New unique ids, as digits: one row of characters for each."""
    begin, process, milliseconds, counter = ids.many(count)
    counters = np.fromiter(counter, np.int64, count)
    processes = (process + (counters >> 16)) & 0xFFFFFFFF
    raw = np.empty((count, len(begin) + 10), np.uint8)
    raw[:, : len(begin)] = np.frombuffer(begin, np.uint8)
    raw[:, -10:-6] = processes.astype(">u4").view(np.uint8).reshape(count, 4)
    raw[:, -6:-2] = np.frombuffer((milliseconds & 0xFFFFFFFF).to_bytes(4, "big"), np.uint8)
    raw[:, -2:] = (counters & 0xFFFF).astype(">u2").view(np.uint8).reshape(count, 2)
    return hexadecimal(raw)


def hexadecimal(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Rows of bytes as rows of upper-case digits."""
    return _HEX_DIGITS.take(raw).view(np.uint8)


def id_items(digits: npt.NDArray[np.uint8], names: Sequence[str] = (UNIQ_KEY,)) -> pa.StringArray:
    """Ids as properties of these names."""
    count, columns = len(digits), []
    for name in names:
        start = np.frombuffer(f"{name}\x01".encode(), np.uint8)
        columns += [np.broadcast_to(start, (count, len(start))), digits]
        columns.append(np.full((count, 1), _SEPARATORS, np.uint8))
    return text_of(np.concatenate(columns, axis=1))


def numbered(values: npt.NDArray[np.int64]) -> pa.LargeBinaryArray:
    """Numbers as their decimal digits."""
    return pa.array(values).cast(pa.large_string()).cast(pa.large_binary())


def text_of(characters: npt.NDArray[np.uint8]) -> pa.StringArray:
    """Rows of ASCII characters as a column."""
    count, width = characters.shape
    bounds = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(np.ascontiguousarray(characters))]
    return pa.Array.from_buffers(pa.string(), count, buffers)


def _of_one_size(values: npt.NDArray[Any], size: int) -> pa.LargeBinaryArray:
    bounds = np.arange(len(values) + 1, dtype=np.int64) * size
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def is_plain(column: pa.StringArray) -> bool:
    """Whether every value is a word of printable ASCII, or null."""
    found = octets(column)
    if not len(found):
        return bool(len(column) == column.null_count)
    least, most = int(found.min()), int(found.max())
    if least <= ord(" ") or most > ord("~"):
        return False
    shortest: int = pc.min(pc.binary_length(column)).as_py()
    return shortest > 0
