"""Property strings of many messages, taken apart together.

The strings lie one after the other in one array of bytes. All separators are found in one pass;
what `properties.decode_properties` says about each item is then said about all of them at once:

* a string without its last `\\x02` gets one, so that items are simply what lies between them;
* the name of an item ends at its first `\\x01`, and an item without name or value does not count;
* of items with one name in one message the last counts.

Strings as producers write them have exactly one `\\x01` and one `\\x02` per item. That is checked
for the whole chunk first, and then no item needs to be searched for its first `\\x01`. Where all of
them have the same names in the same order, `propertylayout` needs less still.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from orbitmq.message.propertylayout import UniformItems, find_uniform
from orbitmq.message.scan import starts_with
from orbitmq.message.slices import is_utf8, numbers, text

if TYPE_CHECKING:
    from orbitmq.message.scan import Bools, Int64s

_NAME_END: Final = 1
_ITEM_END: Final = 2
#: As many names as can be told apart by the bits of one number, with room for their sums: a
#: message has less than 2**14 items.
_BITS_FOR_NAMES: Final = 48


@dataclass(frozen=True, slots=True)
class PropertyItems:
    """Every property of a chunk of messages, as places in the bytes of their strings."""

    octets: npt.NDArray[np.uint8]
    #: Slots 0, 4, 8 ... are the names, slots 2, 6, 10 ... the values; what separates them is
    #: between. Text if all of it is UTF-8, else bytes.
    pieces: pa.StringArray | pa.BinaryArray
    name_at: Int64s
    name_sizes: Int64s
    #: Items of row `i` are those from `first_items[i]` to `first_items[i + 1]`.
    first_items: Int64s
    #: The row of each item.
    rows: Int64s

    def column(self, name: str) -> pa.StringArray:
        """The value of one property in every row, null where a row has none."""
        found = self._named(name.encode())
        rows = self.rows[found]
        count = len(self.first_items) - 1
        if len(found) == count and (rows[1:] != rows[:-1]).all():
            return text(self.pieces.take(numbers(found * 4 + 2)))
        if len(found):
            is_last = np.append(rows[1:] != rows[:-1], True)
            found, rows = found[is_last], rows[is_last]
        slots = np.zeros(count, np.int64)
        missing = np.ones(count, np.bool_)
        slots[rows] = found * 4 + 2
        missing[rows] = False
        return text(self.pieces.take(numbers(slots, valid=~missing)))

    def map_column(self) -> pa.MapArray:
        """All properties of every row."""
        items = np.arange(len(self.rows))
        names = text(self.pieces.take(numbers(items * 4)))
        first_items = self.first_items
        # Names are compared as text: two that are not UTF-8 may have become one.
        encoded = names.dictionary_encode()
        codes = np.frombuffer(encoded.indices.buffers()[1], np.int32, len(names)).astype(np.int64)
        if self._repeats_a_name(codes, len(encoded.dictionary)):
            items = _last_of_each(self.rows * len(encoded.dictionary) + codes)
            names = names.take(numbers(items))
            first_items = np.searchsorted(items, first_items)
        values = text(self.pieces.take(numbers(items * 4 + 2)))
        return pa.MapArray.from_arrays(numbers(first_items.astype(np.int32)), names, values)

    def _repeats_a_name(self, codes: Int64s, names: int) -> bool:
        """Whether any row has two items of one name; `codes` number the names."""
        if names > _BITS_FOR_NAMES:
            labels = self.rows * names + codes
            return len(np.unique(labels)) != len(labels)
        # One bit per name: the sum of a row's bits equals their union only if none comes twice.
        begins = self.first_items[:-1][np.diff(self.first_items) > 0]
        if not len(begins):
            return False
        bits = np.int64(1) << codes
        union, total = np.bitwise_or.reduceat(bits, begins), np.add.reduceat(bits, begins)
        return bool((union != total).any())

    def _named(self, name: bytes) -> Int64s:
        """The items of this name."""
        found = np.flatnonzero(self.name_sizes == len(name))
        return found[starts_with(self.octets, self.name_at[found], name)]


def find_items(strings: pa.BinaryArray) -> PropertyItems | UniformItems:
    """The items of the property strings of a chunk, one string per row."""
    _, offsets, data = strings.buffers()
    first_octets = np.frombuffer(offsets, np.int32, len(strings) + 1, strings.offset * 4)
    begin, end = int(first_octets[0]), int(first_octets[-1])
    octets = np.frombuffer(data, np.uint8)[begin:end] if end > begin else np.empty(0, np.uint8)
    octets, bounds = _end_all_items(octets, first_octets.astype(np.int64) - begin)
    uniform = find_uniform(octets, bounds)
    if uniform is not None:
        return uniform

    name_ends, item_ends = _separators(octets)
    item_at = np.empty_like(item_ends)
    item_at[:1] = 0
    item_at[1:] = item_ends[:-1] + 1
    if len(name_ends) != len(item_ends) or not _count(item_at, name_ends, item_ends).all():
        item_at, name_ends, item_ends = _search_items(item_at, name_ends, item_ends)
    first_items = np.searchsorted(item_ends, bounds)
    rows = np.repeat(np.arange(len(strings)), np.diff(first_items))
    pieces = _pieces(octets, item_at, name_ends, item_ends)
    return PropertyItems(octets, pieces, item_at, name_ends - item_at, first_items, rows)


def _end_all_items(
    octets: npt.NDArray[np.uint8], bounds: Int64s
) -> tuple[npt.NDArray[np.uint8], Int64s]:
    """The strings with a `\\x02` after the last item of each, and where they begin then."""
    ends = bounds[1:]
    filled = ends > bounds[:-1]
    unended = np.zeros(len(ends), np.bool_)
    unended[filled] = octets[ends[filled] - 1] != _ITEM_END
    if not unended.any():
        return octets, bounds
    moved = bounds.copy()
    moved[1:] += np.cumsum(unended)
    return np.insert(octets, ends[unended], _ITEM_END), moved


def _separators(octets: npt.NDArray[np.uint8]) -> tuple[Int64s, Int64s]:
    """The places of all `\\x01` and of all `\\x02`."""
    places = np.flatnonzero(octets <= _ITEM_END)
    kinds = octets[places]
    if (kinds[::2] == _NAME_END).all() and (kinds[1::2] == _ITEM_END).all():
        return places[::2], places[1::2]
    return places.compress(kinds == _NAME_END), places.compress(kinds == _ITEM_END)


def _count(item_at: Int64s, name_ends: Int64s, item_ends: Int64s) -> Bools:
    """Which items have a name and a value, given where their names end."""
    counting: Bools = (item_at < name_ends) & (name_ends < item_ends - 1)
    return counting


def _search_items(
    item_at: Int64s, name_ends: Int64s, item_ends: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """The items that count, where some hold no `\\x01`, several of them, or nothing beside it."""
    # Beyond every item, for those after which no \x01 follows at all.
    name_ends = np.append(name_ends, np.iinfo(np.int64).max)
    first_ends = name_ends[np.searchsorted(name_ends, item_at)]
    counting = _count(item_at, first_ends, item_ends)
    return item_at[counting], first_ends[counting], item_ends[counting]


def _pieces(
    octets: npt.NDArray[np.uint8], item_at: Int64s, name_ends: Int64s, item_ends: Int64s
) -> pa.StringArray | pa.BinaryArray:
    """Names and values of all items, and the separators, as one array over the bytes."""
    count = len(item_at)
    cuts = np.empty(4 * count + 1, np.int32)
    cuts[:-1:4] = item_at
    cuts[1::4] = name_ends
    cuts[2::4] = name_ends + 1
    cuts[3::4] = item_ends
    cuts[-1] = len(octets)
    # Separators are never part of a longer character: if the whole is UTF-8, so is every piece.
    kind = pa.string() if is_utf8(octets) else pa.binary()
    buffers = [None, pa.py_buffer(cuts), pa.py_buffer(octets)]
    return pa.Array.from_buffers(kind, 4 * count, buffers)


def _last_of_each(labels: Int64s) -> Int64s:
    """The places at which a number occurs for the last time, in order."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    is_last = np.append(ordered[1:] != ordered[:-1], True)
    return np.sort(order[is_last])
