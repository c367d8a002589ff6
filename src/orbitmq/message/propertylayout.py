"""Property strings that all have the same names in the same order, as those of one producer have.

Most chunks of a queue are like that, and then next to nothing has to be searched. The first string
tells the names. That all others have them too is checked, not assumed: every string has as many
`\\x02` as the first and ends with one, so that its items are known; and every item begins with the
bytes of its name and the `\\x01` behind it, which is then the first one of the item, and has at
least one byte after that. What is left of the item is the value. All rules of `propertycolumns` for
single items hold by that, and names are not repeated when those of the first string are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from orbitmq.message.slices import is_utf8, numbers

if TYPE_CHECKING:
    from orbitmq.message.scan import Int64s

_ITEM_END: Final = 2
#: A chunk of fewer messages is not worth the fixed cost of looking at each name by itself.
_LEAST_ROWS: Final = 64
_MOST_NAMES: Final = 64


@dataclass(frozen=True, slots=True)
class UniformItems:
    """Every property of a chunk of messages that all have the same names."""

    names: tuple[bytes, ...]
    rows: int
    #: Those of the first row, in the order of the names, then those of the second, and so on.
    values: pa.StringArray

    def column(self, name: str) -> pa.StringArray:
        """The value of one property in every row, null where a row has none."""
        try:
            place = self.names.index(name.encode())
        except ValueError:
            return pa.nulls(self.rows, pa.string())
        count = len(self.names)
        return self.values.take(numbers(np.arange(place, count * self.rows, count)))

    def map_column(self) -> pa.MapArray:
        """All properties of every row."""
        count = len(self.names)
        first_items = np.arange(0, count * self.rows + 1, count, dtype=np.int32)
        return pa.MapArray.from_arrays(numbers(first_items), self._all_names(), self.values)

    def _all_names(self) -> pa.StringArray:
        text = b"".join(self.names)
        begins = np.cumsum([0, *map(len, self.names[:-1])], dtype=np.int32)
        bounds = np.empty(len(self.names) * self.rows + 1, np.int32)
        in_rows = bounds[:-1].reshape(self.rows, len(self.names))
        np.add.outer(np.arange(self.rows, dtype=np.int32) * len(text), begins, out=in_rows)
        bounds[-1] = len(text) * self.rows
        buffers = [None, pa.py_buffer(bounds), pa.py_buffer(text * self.rows)]
        return pa.Array.from_buffers(pa.string(), len(bounds) - 1, buffers)


def find_uniform(octets: npt.NDArray[np.uint8], bounds: Int64s) -> UniformItems | None:
    """The items of strings that lie side by side; None if their names differ, or are not simple."""
    rows = len(bounds) - 1
    if rows < _LEAST_ROWS:
        return None
    names = _names_of(octets[: bounds[1]].tobytes())
    if names is None:
        return None
    item_ends = np.flatnonzero(octets == _ITEM_END).astype(np.int32)
    if len(item_ends) != rows * len(names):
        return None
    ends = item_ends.reshape(rows, len(names))
    if (ends[:, -1] != bounds[1:] - 1).any():
        return None
    # Of every item the name with its end, the value, and the end of the item, one after the other.
    cuts = np.empty(3 * len(item_ends) + 1, np.int32)
    cuts[0] = 0
    cuts[2::3] = item_ends
    cuts[3::3] = item_ends + 1
    starts = [name + b"\x01" for name in names]
    parts = cuts[:-1].reshape(rows, len(names), 3)
    np.add(parts[:, :, 0], np.array([len(start) for start in starts], np.int32), parts[:, :, 1])
    # Separators are never part of a longer character: if the whole is UTF-8, so is every piece.
    if (parts[:, :, 1] >= ends).any() or not is_utf8(octets):
        return None
    buffers = [None, pa.py_buffer(cuts), pa.py_buffer(octets)]
    pieces = pa.Array.from_buffers(pa.string(), len(cuts) - 1, buffers)
    places = np.arange(0, len(cuts) - 1, 3)
    if not _are_repeated(pieces.take(numbers(places)), b"".join(starts), rows):
        return None
    return UniformItems(names, rows, pieces.take(numbers(places + 1)))


def _are_repeated(pieces: pa.StringArray, text: bytes, times: int) -> bool:
    """Whether texts, one after the other, are one text again and again."""
    octets = pieces.buffers()[2].slice(0, len(text) * times)
    return bool(octets.equals(pa.py_buffer(text * times)))


def _names_of(string: bytes) -> tuple[bytes, ...] | None:
    """The names of a string in which nothing is out of the ordinary."""
    items = string.split(b"\x02")
    if items.pop() or not 0 < len(items) <= _MOST_NAMES:
        return None
    pairs = [item.partition(b"\x01") for item in items]
    names = tuple(name for name, _, _ in pairs)
    is_plain = all(name and value for name, _, value in pairs)
    return names if is_plain and len(set(names)) == len(names) else None
