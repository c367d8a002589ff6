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

from orbitmq.message.scan import starts_with
from orbitmq.message.slices import cut, is_utf8

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
        return self.values.take(pa.array(np.arange(place, count * self.rows, count)))

    def map_column(self) -> pa.MapArray:
        """All properties of every row."""
        count = len(self.names)
        first_items = np.arange(0, count * self.rows + 1, count, dtype=np.int32)
        return pa.MapArray.from_arrays(pa.array(first_items), self._all_names(), self.values)

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
    item_ends = np.flatnonzero(octets == _ITEM_END)
    if len(item_ends) != rows * len(names):
        return None
    ends = item_ends.reshape(rows, len(names))
    if (ends[:, -1] != bounds[1:] - 1).any():
        return None
    value_at = np.empty_like(ends)
    at = bounds[:-1]
    for place, name in enumerate(names):
        start = name + b"\x01"
        begin = at + len(start)
        if (begin >= ends[:, place]).any() or not starts_with(octets, at, start).all():
            return None
        value_at[:, place] = begin
        at = ends[:, place] + 1
    # Separators are never part of a longer character: if the whole is UTF-8, so is every piece.
    if not is_utf8(octets):
        return None
    values = cut(octets, value_at.reshape(-1), item_ends, pa.string())
    return UniformItems(names, rows, values)


def _names_of(string: bytes) -> tuple[bytes, ...] | None:
    """The names of a string in which nothing is out of the ordinary."""
    items = string.split(b"\x02")
    if items.pop() or not 0 < len(items) <= _MOST_NAMES:
        return None
    pairs = [item.partition(b"\x01") for item in items]
    names = tuple(name for name, _, _ in pairs)
    is_plain = all(name and value for name, _, value in pairs)
    return names if is_plain and len(set(names)) == len(names) else None
